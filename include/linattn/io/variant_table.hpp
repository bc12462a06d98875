// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <linattn/io/value.hpp>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// \file variant_table.hpp
/// What layout version 1, and this project's extension of it, lets each variant put into a file.
/// The whole table is in src/io/variant_table.cpp; readers, writers and the command line take
/// names, kinds and defaults from it, whether or not this build has an engine for the variant.

namespace LinAttn::io {

/// What an attribute of /config holds.
enum class AttributeKind {
  flag,     ///< 0 or 1
  integer,  ///< int64, not below AttributeSpec::minimum
  counter,  ///< 64 unsigned bits
  real,     ///< finite, not below AttributeSpec::minimum, or AttributeSpec::positive
  choice    ///< one of AttributeSpec::choices
};

/// The value an absent attribute takes.
enum class DefaultRule {
  none,                  ///< it stays absent
  value,                 ///< AttributeSpec::default_value
  first_choice,          ///< the first of AttributeSpec::choices
  feature_extent,        ///< D
  twice_feature_extent,  ///< 2 D; 1 if D = 0
  inverse_sqrt_d,        ///< 1 / sqrt(D); 1 if D = 0
  affine_scale           ///< the same if qk_norm is "none", else 1
};

/// One attribute of /config.
struct AttributeSpec {
  std::string_view name;
  AttributeKind kind = AttributeKind::real;
  DefaultRule default_rule = DefaultRule::none;
  double default_value = 0.0;
  bool differentiable = false;  ///< /expected_grad may hold its gradient
  std::int64_t minimum = std::numeric_limits<std::int64_t>::min();
  std::array<std::string_view, 4> choices{};  ///< unused ones are empty
  bool positive = false;                      ///< of a real: above 0

  /// "0 or 1", "an integer >= 1", "a finite number > 0", "one of l2, none, max": what a message
  /// says was expected.
  std::string expectation() const;
};

/// Element types a dataset may have.
enum class DatasetType {
  floating,  ///< float16, float32 or float64
  float64,
  uint8,
  int64,
  number  ///< floating or int64
};

/// One dataset. The shape is a list of symbols: B, H, Hkv, Nq, Nk, D, Dv, R (features of a state),
/// M (members: B, or the number of packed sequences), S+1, and names that the variant defines.
struct DatasetSpec {
  std::string_view name;
  std::string_view shape;
  DatasetType type = DatasetType::floating;
  bool differentiable = false;
  bool required = false;
};

/// One variant of the layout.
struct VariantSpec {
  std::string_view name;
  bool normalise_by_default = true;
  std::span<const AttributeSpec> attributes;  ///< its own; those of every variant come on top
  std::span<const DatasetSpec> config;  ///< datasets that may replace the attribute of that name
  std::span<const DatasetSpec> inputs;  ///< below /inputs, besides q, k, v and masks
  std::span<const DatasetSpec> state;   ///< below every state group
};

/// All variants, in the order of the layout.
std::span<const VariantSpec> variant_table();

/// \returns nullptr for a name that the layout does not know.
const VariantSpec* find_variant(std::string_view name);

/// \throws InvalidArgument for a name that the layout does not know, listing those it knows.
const VariantSpec& variant_spec(std::string_view name);

/// "identity, elu, ...", for messages.
std::string variant_names();

/// Every attribute /config may have for this variant, with its defaults: causal, normalise and
/// scale and then the variant's own.
std::vector<AttributeSpec> attributes_of(const VariantSpec& variant);

/// The attribute of that name.
/// \throws InvalidArgument "variant elu has no qk_norm; it has ..." if the variant has none.
AttributeSpec attribute_of(const VariantSpec& variant, std::string_view name);

/// The value that an absent attribute takes beside those that are given, in its canonical form, for
/// D = `d`. Nothing if it stays absent.
std::optional<Value> default_of(const AttributeSpec& spec,
                                const std::map<std::string, Value>& given, std::int64_t d);

/// Value of an attribute in its canonical form: int64 for flags and integers, a 64-bit count,
/// double or string. \throws InvalidArgument "expected ..., found ..." if the value is not of the
/// attribute's kind.
Value coerce(const AttributeSpec& spec, const Value& value);

/// The same from text, as on a command line.
/// \throws InvalidArgument as above.
Value parse(const AttributeSpec& spec, std::string_view text);

}  // namespace LinAttn::io
