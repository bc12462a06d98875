// SPDX-License-Identifier: BSD-3-Clause
#include "options.hpp"

#include <algorithm>
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

/// What the table does not say: what a setting is for, and of a flag what 0 is for.
struct Meaning {
  std::string_view name, text, off{};
};
constexpr Meaning meanings[] = {
    {"causal", "Query i sees keys j <= i + Nk - Nq", "Every query sees every key"},
    {"normalise", "Divide each row by the sum of its weights",
     "Do not divide: o = scale * sum of weighted values"},
    {"scale",
     "Factor of the output where rows are not normalised; of affine, taylor and softmax that of the scores, "
     "by default 1/sqrt(D), but 1 of affine with qk_norm l2 or max"},
    {"alpha", "Rate of the queries, the same for all heads"},
    {"beta", "Rate of the keys, the same for all heads"},
    {"moments", "Match alpha and beta to the deviations of q and k, instead of giving them"},
    {"moments_scope", "Take deviations over all heads or for each key/value head"},
    {"a", "Slope of the weights over the scores"},
    {"b", "Weight at score 0"},
    {"qk_norm", "What divides queries and keys: their own norm, nothing, the largest norm"},
    {"norm_eps", "Added to the square of the norm of l2"},
    {"small_g",
     "Rows whose sum of weights nearly vanishes are refused, clamped or left as they are"},
    {"g_min", "The least sum of weights for each key that is not small"},
    {"center_v", "Take values relative to the first that is visible: other roundings",
     "Take values as they are"},
    {"dropout_p", "Standard deviation of the noise that multiplies the output"},
    {"seed", "Key of the noise; of performer that of the projection, where the file has none"},
    {"features", "Random features, where the file has no projection; by default 2 D"},
    {"offset", "Number of the call among those with the same noise key"},
    {"block", "Keys of a block of exact attention; by default D"},
    {"combine",
     "How exact attention inside blocks is joined: half of each, /inputs/diag_r and diag_p of "
     "each, "
     "or diag_r and 1 - diag_r"},
};

Meaning meaning_of(std::string_view name) {
  for (const Meaning& meaning : meanings)
    if (meaning.name == name) return meaning;
  return {name, "", ""};
}

/// An attribute, and the variants that have it if not all do.
struct Setting {
  io::AttributeSpec spec;
  std::vector<std::string> owners;
};

/// Settings of the variants of this build, each once, those of all variants first.
std::vector<Setting> all_settings() {
  std::vector<Setting> settings;
  for (const VariantInfo& info : variants())
    for (const io::AttributeSpec& spec : settings_of_variant(info.name)) {
      auto known = settings.begin();
      while (known != settings.end() && known->spec.name != spec.name) ++known;
      if (known == settings.end()) known = settings.insert(known, {spec, {}});
      known->owners.push_back(info.name);
    }
  for (Setting& setting : settings)
    if (setting.owners.size() == variants().size()) setting.owners.clear();
  return settings;
}

/// "default 1", as far as it is the same for all files.
std::string default_text(const io::AttributeSpec& spec) {
  const auto value = io::default_of(spec, {}, 1);
  if (!value || value != io::default_of(spec, {}, 2)) return {};
  return "default " + (value->is_string() ? value->as_string() : value->to_string());
}

std::string help_of(const Setting& setting) {
  const io::AttributeSpec& spec = setting.spec;
  std::string text(meaning_of(spec.name).text);
  if (spec.kind == io::AttributeKind::choice) text += "; " + spec.expectation();
  std::vector<std::string> notes;
  if (!setting.owners.empty()) notes.push_back(join(setting.owners));
  if (const std::string standard = default_text(spec); !standard.empty()) notes.push_back(standard);
  return notes.empty() ? text : text + " (" + join(notes) + ")";
}

const char* type_name_of(io::AttributeKind kind) {
  switch (kind) {
    case io::AttributeKind::real:
      return "NUMBER";
    case io::AttributeKind::choice:
      return "NAME";
    default:
      return "COUNT";
  }
}

void add_flag(CLI::App& command, const std::string& name, ConfigOptions::Flag& flag) {
  const Meaning meaning = meaning_of(name);
  const std::string off = name == "causal" ? "--full" : option_name("no_" + name);
  CLI::Option* const on_flag =
      command.add_flag(option_name(name), flag.on, std::string(meaning.text));
  CLI::Option* const off_flag = command.add_flag(off, flag.off, std::string(meaning.off));
  for (CLI::Option* const either : {on_flag, off_flag}) either->disable_flag_override();
  on_flag->excludes(off_flag);
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

CLI::Validator positive_number() {
  return accepted_by([](const std::string& text) {
    double value = 0;
    if (!parses(text, value) || !std::isfinite(value) || !(value > 0))
      throw InvalidArgument(detail::message("expected a positive number, found '", text, "'"));
  });
}

std::string option_name(std::string_view attribute) {
  std::string name = "--" + std::string(attribute);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

std::string ConfigOptions::option_of(const std::string& attribute) const {
  const auto other = renamed.find(attribute);
  return other == renamed.end() ? option_name(attribute) : other->second;
}

void ConfigOptions::add_to(CLI::App& command) {
  for (const Setting& setting : all_settings()) {
    const io::AttributeSpec& spec = setting.spec;
    const std::string name(spec.name);
    if (spec.kind == io::AttributeKind::flag) {
      add_flag(command, name, flags[name]);
      continue;
    }
    command.add_option(option_of(name), texts[name], help_of(setting))
        ->type_name(type_name_of(spec.kind))
        ->check(accepted_by([spec](const std::string& text) { io::parse(spec, text); }));
  }
}

std::map<std::string, io::Value> ConfigOptions::values() const {
  std::map<std::string, io::Value> values;
  for (const Setting& setting : all_settings()) {
    const std::string name(setting.spec.name);
    if (setting.spec.kind == io::AttributeKind::flag) {
      const Flag& flag = flags.at(name);
      if (flag.on || flag.off) values[name] = flag.on;
    } else if (texts.at(name)) {
      values[name] = io::parse(setting.spec, *texts.at(name));
    }
  }
  return values;
}

void add_foresight_options(CLI::App& command, Foresight& target) {
  command
      .add_flag(
          "--max-norm-sees-future", target.max_norm,
          "Allow qk_norm max under a causal mask, where later tokens then change earlier rows")
      ->disable_flag_override();
  command
      .add_flag("--moments-see-future", target.moments,
                "Allow moments under a causal mask, where later tokens then change earlier rows")
      ->disable_flag_override();
}

void require_use_of(const Foresight& foresight, const std::string& variant) {
  const auto require = [&](const char* option, const char* setting) {
    try {
      io::attribute_of(io::variant_spec(variant), setting);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(detail::message(option, ": ", error.what()));
    }
  };
  if (foresight.max_norm) require("--max-norm-sees-future", "qk_norm");
  if (foresight.moments) require("--moments-see-future", "moments");
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
