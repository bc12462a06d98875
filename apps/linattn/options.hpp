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
#include <string_view>

#include "compute.hpp"
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
CLI::Validator positive_number();

/// "--qk-norm" for the attribute qk_norm.
std::string option_name(std::string_view attribute);

/// An option for each attribute of /config that a variant of this build has, as the layout's table
/// describes it; flags have a second one for 0 (--no-NAME; that of --causal is --full).
struct ConfigOptions {
  struct Flag {
    bool on = false;
    bool off = false;
  };
  std::map<std::string, Flag> flags{};                        ///< by attribute
  std::map<std::string, std::optional<std::string>> texts{};  ///< likewise
  /// Options called otherwise, because the command has one of that name. By attribute.
  std::map<std::string, std::string> renamed{};

  void add_to(CLI::App& command);
  /// Attributes that were given.
  std::map<std::string, io::Value> values() const;
  /// The option of an attribute.
  std::string option_of(const std::string& attribute) const;
};

/// --max-norm-sees-future and --moments-see-future, which no file can ask for.
void add_foresight_options(CLI::App& command, Foresight& target);

/// Refuses one of these for a variant that has no norms, or no moments. \throws InvalidArgument
void require_use_of(const Foresight& foresight, const std::string& variant);

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
