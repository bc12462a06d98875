// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <linattn/io/array.hpp>
#include <linattn/io/value.hpp>
#include <map>
#include <optional>
#include <string>

#include "execution.hpp"

/// \file options.hpp
/// Options that subcommands share, and checks that name what was expected and found.

namespace LinAttn::app {

/// Accepts what the function takes without throwing InvalidArgument, whose text says what was
/// expected.
CLI::Validator accepted_by(const std::function<void(const std::string&)>& take);
/// Accepts an integer from low to high.
CLI::Validator integer_between(std::int64_t low, std::int64_t high);
/// Accepts a finite number.
CLI::Validator finite_number();

/// --causal, --full, --normalise, --no-normalise, --scale and a value for each parameter of a
/// variant.
struct ConfigOptions {
  bool causal = false;
  bool full = false;
  bool normalise = false;
  bool no_normalise = false;
  std::optional<double> scale;
  std::map<std::string, std::optional<double>> parameters;

  void add_to(CLI::App& command);
  /// Attributes of /config that were given.
  std::map<std::string, io::Value> values() const;
};

/// --space, --dtype, --chunk, --segments, --tiles. Empty texts mean "not given".
struct ExecutionOptions {
  std::string space;
  std::string dtype;
  int chunk = 0;
  int segments = 0;
  int tiles = 0;

  /// `space_default` and `dtype_default` are for the help.
  void add_to(CLI::App& command, const std::string& space_default,
              const std::string& dtype_default);
};

void add_json_option(CLI::App& command, std::string& target);

}  // namespace LinAttn::app
