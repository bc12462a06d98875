// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <charconv>
#include <cmath>
#include <linattn/io/variant_table.hpp>

namespace LinAttn::io {
namespace {

using Kind = AttributeKind;
using Rule = DefaultRule;
using Type = DatasetType;

constexpr bool d = true;  // differentiable
constexpr bool required = true;
constexpr bool positive = true;

constexpr std::string_view scale = "scale";
constexpr std::string_view normalise = "normalise";

// Attributes of every variant. A variant that lists a name of its own replaces the one here.
constexpr AttributeSpec common_attributes[] = {
    {"causal", Kind::flag, Rule::value, 0},
    {normalise, Kind::flag, Rule::value, 1},
    {scale, Kind::real, Rule::value, 1},
};

constexpr AttributeSpec lln_attributes[] = {
    {"alpha", Kind::real, Rule::none, 0, d},
    {"beta", Kind::real, Rule::none, 0, d},
    {"moments", Kind::choice, Rule::none, 0, !d, 0, {"authors", "table", "fit", "entropy"}},
    {"moments_scope", Kind::choice, Rule::first_choice, 0, !d, 0, {"tensor", "head"}},
};

constexpr AttributeSpec lln_diag_attributes[] = {
    lln_attributes[0],
    lln_attributes[1],
    lln_attributes[2],
    lln_attributes[3],
    {"block", Kind::integer, Rule::feature_extent, 0, !d, 1},
    {"combine", Kind::choice, Rule::first_choice, 0, !d, 0, {"average", "scale", "ratio"}},
};

constexpr AttributeSpec affine_attributes[] = {
    {"a", Kind::real, Rule::value, 1, d},
    {"b", Kind::real, Rule::value, 1, d},
    {scale, Kind::real, Rule::affine_scale, 0, d},
    {"qk_norm", Kind::choice, Rule::first_choice, 0, !d, 0, {"l2", "none", "max"}},
    {"norm_eps", Kind::real, Rule::value, 1e-6, !d, 0},
    {"small_g", Kind::choice, Rule::first_choice, 0, !d, 0, {"check", "clamp", "ignore"}},
    {"g_min", Kind::real, Rule::value, 1e-6, !d, 0},
    {"center_v", Kind::flag, Rule::value, 0},
    {"dropout_p", Kind::real, Rule::value, 0, !d, 0},
    {"seed", Kind::counter, Rule::value, 0},
    {"offset", Kind::counter, Rule::value, 0},
};

constexpr AttributeSpec lavo_attributes[] = {
    {"check_bases", Kind::flag, Rule::value, 1},
    {"window", Kind::integer, Rule::value, 128, !d, 1},
    {"window_kind", Kind::choice, Rule::first_choice, 0, !d, 0, {"slide", "block", "block+1"}},
    {"memory", Kind::choice, Rule::first_choice, 0, !d, 0, {"incl", "excl", "chunk"}},
    {"merge", Kind::choice, Rule::first_choice, 0, !d, 0, {"joint", "separate"}},
    {"memory_kind", Kind::choice, Rule::first_choice, 0, !d, 0, {"projection", "elementwise"}},
    {"tied", Kind::flag, Rule::value, 0},
    {"cross", Kind::flag, Rule::value, 0},
    {"gamma", Kind::real, Rule::value, 1},
    {scale, Kind::real, Rule::inverse_sqrt_d},
    {"beta", Kind::real, Rule::value, 0, d},
    {"gate", Kind::real, Rule::value, 0, d},
    {"bias", Kind::choice, Rule::first_choice, 0, !d, 0, {"none", "table", "alibi"}},
    {"rope", Kind::flag, Rule::value, 0},
    {"rope_base", Kind::real, Rule::value, 10000},
};

constexpr AttributeSpec softmax_attributes[] = {
    {scale, Kind::real, Rule::inverse_sqrt_d, 0, !d, 0, {}, positive},
};

constexpr AttributeSpec performer_attributes[] = {
    {"features", Kind::integer, Rule::twice_feature_extent, 0, !d, 1},
    {"seed", Kind::counter, Rule::value, 0},
};

constexpr DatasetSpec lln_config[] = {
    {"alpha", "H", Type::floating, d},
    {"beta", "Hkv", Type::floating, d},
};

constexpr DatasetSpec lavo_config[] = {
    {"beta", "H", Type::floating, d},
    {"gate", "H", Type::floating, d},
    {"alibi_slopes", "H", Type::floating},
};

constexpr DatasetSpec lln_diag_inputs[] = {
    {"diag_r", "H, Dv", Type::floating, d},
    {"diag_p", "H, Dv", Type::floating, d},
};

constexpr DatasetSpec lavo_inputs[] = {
    {"bases", "Hkv, r, D", Type::floating, d, required},
    {"bias", "H, nb", Type::floating, d},
};

constexpr DatasetSpec performer_inputs[] = {
    {"projection", "features, D", Type::floating},
};

constexpr DatasetSpec engine_state[] = {
    {"S", "M, Hkv, R, Dv", Type::floating, d, required},
    {"z", "M, Hkv, R", Type::floating, d, required},
};

constexpr DatasetSpec lln_state[] = {
    engine_state[0],
    engine_state[1],
    {"shift", "M, Hkv, R", Type::number},
};

constexpr DatasetSpec lln_diag_state[] = {
    engine_state[0],
    engine_state[1],
    lln_state[2],
    {"block_k", "M, Hkv, block, D", Type::floating, d, required},
    {"block_v", "M, Hkv, block, Dv", Type::floating, d, required},
    {"position", "M", Type::int64, !d, required},
};

constexpr DatasetSpec affine_state[] = {
    engine_state[0],
    engine_state[1],
    {"t", "M, Hkv, Dv", Type::floating, d, required},
    {"m", "M", Type::int64, !d, required},
};

constexpr DatasetSpec lavo_state[] = {
    {"ring_k", "M, Hkv, window, D", Type::floating, d, required},
    {"ring_v", "M, Hkv, window, D", Type::floating, d, required},
    {"mK", "M, Hkv, r", Type::float64, d, required},
    {"mV", "M, Hkv, r", Type::float64, d, required},
    {"W", "M", Type::float64, !d, required},
    {"position", "M", Type::int64, !d, required},
};

constexpr bool normalised = true;

constexpr VariantSpec table[] = {
    {"identity", !normalised, {}, {}, {}, engine_state},
    {"elu", normalised, {}, {}, {}, engine_state},
    {"relu", normalised, {}, {}, {}, engine_state},
    {"quadratic", normalised, {}, {}, {}, engine_state},
    {"lln", normalised, lln_attributes, lln_config, {}, lln_state},
    {"lln-diag", normalised, lln_diag_attributes, lln_config, lln_diag_inputs, lln_diag_state},
    {"affine", normalised, affine_attributes, {}, {}, affine_state},
    {"lavo", normalised, lavo_attributes, lavo_config, lavo_inputs, lavo_state},
    {"softmax", normalised, softmax_attributes, {}, {}, {}},
    // The extension.
    {"taylor", normalised, softmax_attributes, {}, {}, engine_state},
    {"cosine", !normalised, {}, {}, {}, engine_state},
    {"performer", normalised, performer_attributes, {}, performer_inputs, lln_state},
};

[[noreturn]] void fail(const AttributeSpec& spec, const std::string& found) {
  throw InvalidArgument(detail::message("expected ", spec.expectation(), ", found ", found));
}

template <class Number>
Number parse_number(const AttributeSpec& spec, std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || !std::isfinite(static_cast<double>(number)))
    fail(spec, detail::message("'", text, "'"));
  return number;
}

bool is_bounded(const AttributeSpec& spec) {
  return spec.minimum != std::numeric_limits<std::int64_t>::min();
}

double inverse_sqrt(std::int64_t n) {
  return n > 0 ? 1.0 / std::sqrt(static_cast<double>(n)) : 1.0;
}

}  // namespace

std::string AttributeSpec::expectation() const {
  const std::string bound = is_bounded(*this) ? " >= " + std::to_string(minimum) : "";
  switch (kind) {
    case Kind::flag:
      return "0 or 1";
    case Kind::integer:
      return "an integer" + bound;
    case Kind::counter:
      return "an integer from 0 to 2^64 - 1";
    case Kind::real:
      return "a finite number" + (positive ? " > 0" : bound);
    case Kind::choice: {
      std::string text = "one of ";
      for (const std::string_view choice : choices) {
        if (choice.empty()) break;
        if (choice != choices[0]) text += ", ";
        text += choice;
      }
      return text;
    }
  }
  return {};
}

std::span<const VariantSpec> variant_table() { return table; }

const VariantSpec* find_variant(std::string_view name) {
  const auto* found = std::find_if(std::begin(table), std::end(table),
                                   [&](const VariantSpec& v) { return v.name == name; });
  return found == std::end(table) ? nullptr : found;
}

const VariantSpec& variant_spec(std::string_view name) {
  if (const VariantSpec* found = find_variant(name)) return *found;
  throw InvalidArgument(
      detail::message("variant: expected one of ", variant_names(), ", found '", name, "'"));
}

std::string variant_names() {
  std::string names;
  for (const VariantSpec& variant : table) {
    if (!names.empty()) names += ", ";
    names += variant.name;
  }
  return names;
}

std::vector<AttributeSpec> attributes_of(const VariantSpec& variant) {
  std::vector<AttributeSpec> result;
  for (AttributeSpec spec : common_attributes) {
    if (spec.name == normalise) spec.default_value = variant.normalise_by_default ? 1 : 0;
    const bool replaced =
        std::any_of(variant.attributes.begin(), variant.attributes.end(),
                    [&](const AttributeSpec& own) { return own.name == spec.name; });
    if (!replaced) result.push_back(spec);
  }
  result.insert(result.end(), variant.attributes.begin(), variant.attributes.end());
  return result;
}

AttributeSpec attribute_of(const VariantSpec& variant, std::string_view name) {
  std::string names;
  for (const AttributeSpec& spec : attributes_of(variant)) {
    if (spec.name == name) return spec;
    if (!names.empty()) names += ", ";
    names += spec.name;
  }
  throw InvalidArgument(
      detail::message("variant ", variant.name, " has no ", name, "; it has ", names));
}

std::optional<Value> default_of(const AttributeSpec& spec,
                                const std::map<std::string, Value>& given, std::int64_t d) {
  switch (spec.default_rule) {
    case Rule::none:
      break;
    case Rule::value:
      return coerce(spec, spec.default_value);
    case Rule::first_choice:
      return spec.choices[0];
    case Rule::feature_extent:
      return d;
    case Rule::twice_feature_extent:
      return std::max<std::int64_t>(2 * d, 1);
    case Rule::inverse_sqrt_d:
      return inverse_sqrt(d);
    case Rule::affine_scale: {
      const auto norm = given.find("qk_norm");
      const bool bare = norm != given.end() && norm->second == Value("none");
      return bare ? inverse_sqrt(d) : 1.0;
    }
  }
  return {};
}

Value coerce(const AttributeSpec& spec, const Value& value) {
  if (value.is_string() != (spec.kind == Kind::choice)) fail(spec, value.to_string());
  switch (spec.kind) {
    case Kind::flag: {
      const double number = value.as_double();
      if (number != 0.0 && number != 1.0) fail(spec, value.to_string());
      return number == 1.0 ? 1 : 0;
    }
    case Kind::integer:
      try {
        const std::int64_t number = value.as_int64();
        if (number >= spec.minimum) return number;
      } catch (const InvalidArgument&) {
      }
      fail(spec, value.to_string());
    case Kind::counter:
      return value.as_uint64();
    case Kind::real:
      if (!std::isfinite(value.as_double()) ||
          (is_bounded(spec) && value.as_double() < static_cast<double>(spec.minimum)) ||
          (spec.positive && value.as_double() <= 0))
        fail(spec, value.to_string());
      return value.as_double();
    case Kind::choice:
      for (const std::string_view choice : spec.choices)
        if (!choice.empty() && choice == value.as_string()) return value;
      fail(spec, value.to_string());
  }
  return value;
}

Value parse(const AttributeSpec& spec, std::string_view text) {
  switch (spec.kind) {
    case Kind::choice:
      return coerce(spec, text);
    case Kind::real:
      return coerce(spec, parse_number<double>(spec, text));
    case Kind::counter:
      return coerce(spec, parse_number<std::uint64_t>(spec, text));
    default:
      return coerce(spec, parse_number<std::int64_t>(spec, text));
  }
}

}  // namespace LinAttn::io
