// SPDX-License-Identifier: BSD-3-Clause
#include "options.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <linattn/error.hpp>

#include "compute.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

/// Whether the whole text is one number of type T.
template <class T>
bool parses(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && rest == end;
}

}  // namespace

CLI::Validator accepted_by(const std::function<void(const std::string&)>& take) {
  return CLI::Validator(
      [take](std::string& text) {
        try {
          take(text);
          return std::string();
        } catch (const InvalidArgument& error) {
          return std::string(error.what());
        }
      },
      "");
}

CLI::Validator integer_between(std::int64_t low, std::int64_t high) {
  return accepted_by([low, high](const std::string& text) {
    std::int64_t value = 0;
    if (!parses(text, value) || value < low || value > high)
      throw InvalidArgument(
          detail::message("expected an integer from ", low, " to ", high, ", found '", text, "'"));
  });
}

CLI::Validator finite_number() {
  return accepted_by([](const std::string& text) {
    double value = 0;
    if (!parses(text, value) || !std::isfinite(value))
      throw InvalidArgument(detail::message("expected a finite number, found '", text, "'"));
  });
}

void ConfigOptions::add_to(CLI::App& command) {
  auto* const causal_flag =
      command.add_flag("--causal", causal, "Query i sees keys j <= i + Nk - Nq");
  auto* const full_flag = command.add_flag("--full", full, "Every query sees every key");
  for (auto* const flag : {causal_flag, full_flag}) flag->disable_flag_override();
  causal_flag->excludes(full_flag);
  auto* const normalise_flag =
      command.add_flag("--normalise", normalise, "Divide each row by the sum of its weights");
  auto* const plain_flag = command.add_flag("--no-normalise", no_normalise,
                                            "Do not divide: o = scale * sum of weighted values");
  for (auto* const flag : {normalise_flag, plain_flag}) flag->disable_flag_override();
  normalise_flag->excludes(plain_flag);
  command.add_option("--scale", scale, "Factor of the output where rows are not normalised")
      ->type_name("NUMBER")
      ->check(finite_number());
  for (const std::string& name : parameter_names()) {
    std::vector<std::string> owners;
    for (const VariantInfo& info : variants())
      if (info.query_parameter == name || info.key_parameter == name) owners.push_back(info.name);
    command
        .add_option("--" + name, parameters[name],
                    "Parameter of " + join(owners) + ", the same for all heads")
        ->type_name("NUMBER")
        ->check(finite_number());
  }
}

std::map<std::string, io::Value> ConfigOptions::values() const {
  std::map<std::string, io::Value> values;
  if (causal || full) values["causal"] = causal;
  if (normalise || no_normalise) values["normalise"] = normalise;
  if (scale) values["scale"] = *scale;
  for (const auto& [name, value] : parameters)
    if (value) values[name] = *value;
  return values;
}

void ExecutionOptions::add_to(CLI::App& command, const std::string& space_default,
                              const std::string& dtype_default) {
  std::vector<std::string> spaces;
  for (const Space enabled : enabled_spaces()) spaces.emplace_back(to_string(enabled));
  command
      .add_option("--space", space,
                  "Execution space: " + join(spaces) + " (default " + space_default + ")")
      ->type_name("NAME")
      ->check(accepted_by([](const std::string& text) { space_from_name(text); }));
  command
      .add_option("--dtype", dtype,
                  "Precision: f64, f32, f16, bf16 (default " + dtype_default + ")")
      ->type_name("TYPE")
      ->check(accepted_by([](const std::string& text) { scalar_from_name(text); }));
  constexpr int largest = std::numeric_limits<int>::max();
  command.add_option("--chunk", chunk, "Tokens of a chunk (default 0: the plan decides)")
      ->type_name("TOKENS")
      ->check(integer_between(0, largest));
  command
      .add_option("--segments", segments,
                  "Pieces of a sequence worked on at once (default 0: the plan decides)")
      ->type_name("COUNT")
      ->check(integer_between(0, largest));
  command
      .add_option("--tiles", tiles,
                  "Windows of a state worked on at once (default 0: the plan decides)")
      ->type_name("COUNT")
      ->check(integer_between(0, largest));
}

void add_json_option(CLI::App& command, std::string& target) {
  command
      .add_option(
          "--json", target,
          "Write the numbers as JSON to this file; '-': to standard output, in place of the "
          "report")
      ->type_name("FILE");
}

}  // namespace LinAttn::app
