// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "comparison.hpp"
#include "compute.hpp"

/// \file json_output.hpp
/// What --json writes: the numbers of the report for programs.

namespace LinAttn::app {

using Json = nlohmann::ordered_json;

/// The target of --json: nowhere, standard output ("-"), or a file that appears only when it is
/// complete.
class JsonOutput {
 public:
  /// `others` are the files that the command reads and writes.
  /// \throws EnvironmentFailure if the file could not be written, found out before any work is done
  /// \throws InvalidArgument if it is one of the others
  JsonOutput(const std::string& target, const std::vector<std::string>& others);

  /// Whether standard output is taken, so that it must hold nothing else.
  bool is_stdout() const { return m_target == "-"; }

  /// \throws EnvironmentFailure if the file cannot be written, which then is as it was
  void write(const Json& document) const;

 private:
  std::string m_target;
};

/// The head of every document: the version of LinAttn and the command.
Json json_document(const char* command);
Json to_json(const Problem& problem);
Json to_json(const io::Value& value);
/// Every attribute by name.
/// By name, a list for the heads.
Json to_json(const HostMoments& moments);
Json to_json(const Settings& settings);
Json to_json(const PassReport& report);
/// Infinities and NaNs become null.
Json to_json(const Comparison& comparison);

}  // namespace LinAttn::app
