// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <linattn/block_diagonal.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <type_traits>
#include <utility>

/// \file variant.hpp
/// What makes one attention differ from another.

namespace LinAttn {

/// What every variant says of itself: its name, whether it divides by the row sum by default, and the names of the
/// scalars of each head that it can differentiate, or nullptr.
template <class V>
concept NamedVariant = requires {
  { V::name } -> std::convertible_to<const char*>;
  { V::normalise_by_default } -> std::convertible_to<bool>;
  { V::query_parameter } -> std::convertible_to<const char*>;
  { V::key_parameter } -> std::convertible_to<const char*>;
};

/// A variant of linear attention that the engine can run:
///
///     o_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = phi_q(q_i) . phi_k(k_j),   j over the visible keys
///
/// It names itself, gives the two feature maps, and says whether it divides by the row sum by default.
/// `query_parameter` and `key_parameter` name the scalar of the map for each head, or are nullptr.
///
/// It may also offer (see Affine):
///
///     static constexpr const char* constant_parameter;  Parameter constant() const;
///         a constant b, one for each query head: w_ij = phi_q(q_i) . phi_k(k_j) + b. States then have t and m
///     static constexpr const char* scale_parameter;
///         the name of RowNormMap::factor of the query map, differentiable and the same for all heads
///     BlockDiagonal local_term() const;
///         exact attention inside blocks, joined to the linear one (see LlnDiag). Such rows are always normalised, and
///         have no states yet
///     Projection projection;                  member
///         features are of logits of the rows, M for M rows of the projection, not of their D entries (see Performer).
///         Both maps are then elementwise or scaled
///     V resolved(const Problem&) const;       the variant with defaults that depend on the extents filled in
///     void validate(Pass, bool causal) const; throws InvalidArgument for members that do not go together
template <class V>
concept LinearVariant = NamedVariant<V> && requires(const V& variant) {
  { variant.query_map() } -> FeatureMap;
  { variant.key_map() } -> FeatureMap;
};

/// Exact attention: a softmax over the scores score_scale(D) q_i . k_j of the visible keys. It has no feature maps, and
/// so no State; rows are always normalised.
template <class V>
concept ExactVariant = NamedVariant<V> && !LinearVariant<V> && requires(const V& variant) {
  { variant.score_scale(std::int64_t(1)) } -> std::same_as<double>;
};

/// What the calls of attention.hpp take.
template <class V>
concept Variant = LinearVariant<V> || ExactVariant<V>;

/// Whether the features of a variant are relative to shifts, which its states then have.
template <class V>
inline constexpr bool is_scaled_v = false;
template <LinearVariant V>
inline constexpr bool is_scaled_v<V> =
    ScaledFeatureMap<std::remove_cvref_t<decltype(std::declval<const V&>().key_map())>>;

/// Whether exact attention inside blocks is joined to the linear one.
template <class V>
inline constexpr bool has_local_term_v = requires(const V& variant) {
  { variant.local_term() } -> std::same_as<BlockDiagonal>;
};

/// Whether features are of logits, not of entries.
template <class V>
concept ProjectedVariant = LinearVariant<V> && requires(const V& variant) {
  { variant.projection } -> std::convertible_to<const Projection&>;
};

/// Whether weights have a constant, and its name (nullptr where they have none).
template <class V>
inline constexpr bool has_constant_v = requires(const V& variant) {
  { variant.constant() } -> std::convertible_to<Parameter>;
};
template <class V>
constexpr const char* constant_parameter_name() {
  if constexpr (has_constant_v<V>)
    return V::constant_parameter;
  else
    return nullptr;
}
/// Name of the differentiable score scale, or nullptr.
template <class V>
constexpr const char* scale_parameter_name() {
  if constexpr (requires { V::scale_parameter; })
    return V::scale_parameter;
  else
    return nullptr;
}

template <LinearVariant V>
using query_map_t = std::remove_cvref_t<decltype(std::declval<const V&>().query_map())>;
template <LinearVariant V>
using key_map_t = std::remove_cvref_t<decltype(std::declval<const V&>().key_map())>;

/// Base of a variant whose queries and keys pass through the same map without parameters. Deriving from
/// it and declaring `name` is all that such a variant needs.
template <FeatureMap Map>
struct SameMapVariant {
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = nullptr;
  Map map{};
  Map query_map() const { return map; }
  Map key_map() const { return map; }
};

namespace detail {

template <Variant V>
V resolved(const V& variant, const Problem& problem) {
  if constexpr (requires { { variant.resolved(problem) } -> std::same_as<V>; })
    return variant.resolved(problem);
  else
    return variant;
}

/// R of a row of d entries; 0 of exact attention.
template <Variant V>
std::int64_t features_of(const V& variant, std::int64_t d) {
  if constexpr (ProjectedVariant<V>)
    return variant.projection.rows();
  else if constexpr (LinearVariant<V>)
    return feature_count(variant.key_map(), d);
  else
    return 0;
}

template <class ExecSpace, ExactVariant V>
std::int64_t validate_variant(const V& variant, const Problem& problem, Pass, bool) {
  const double scale = variant.score_scale(problem.d);
  if (!(scale > 0) || !(scale - scale == 0))
    throw InvalidArgument(message("LinAttn: the scale of the scores of ", V::name, " must be positive and finite, found ",
                                  scale));
  return 0;
}

/// R, checked to agree between the two maps; parameters checked against the heads.
template <class ExecSpace, LinearVariant V>
std::int64_t validate_variant(const V& variant, const Problem& problem, Pass pass, bool causal) {
  if constexpr (requires { variant.validate(pass, causal); }) variant.validate(pass, causal);
  if constexpr (has_constant_v<V>)
    Parameter(variant.constant()).template validate<ExecSpace>(V::constant_parameter, problem.heads);
  if constexpr (RowNormFeatureMap<query_map_t<V>>)
    variant.query_map().rate.template validate<ExecSpace>(V::query_parameter ? V::query_parameter : "rate", problem.heads);
  static_assert(ScaledFeatureMap<query_map_t<V>> == ScaledFeatureMap<key_map_t<V>>,
                "LinAttn: query and key map must both be scaled maps or both not be");
  static_assert(!ProjectedVariant<V> || !(mixes_entries_v<query_map_t<V>> || mixes_entries_v<key_map_t<V>>),
                "LinAttn: features of logits are elementwise or scaled maps of them");
  static_assert(!has_constant_v<V> || !ScaledFeatureMap<key_map_t<V>>,
                "LinAttn: scaled maps cannot have a constant added to their weights");
  static_assert(!(RowFeatureMap<query_map_t<V>> && ParameterizedFeatureMap<query_map_t<V>>) &&
                    !(RowFeatureMap<key_map_t<V>> && ParameterizedFeatureMap<key_map_t<V>>),
                "LinAttn: a row-wise map cannot have a differentiable parameter");
  if constexpr (ParameterizedFeatureMap<query_map_t<V>>)
    variant.query_map().template validate<ExecSpace>(V::query_parameter, problem.heads);
  if constexpr (ParameterizedFeatureMap<key_map_t<V>>)
    variant.key_map().template validate<ExecSpace>(V::key_parameter, problem.kv_heads);
  const std::int64_t query_features = feature_count(variant.query_map(), problem.d);
  const std::int64_t key_features = feature_count(variant.key_map(), problem.d);
  if (query_features != key_features || query_features < 0)
    throw InvalidArgument(message("LinAttn: variant ", V::name, " maps a query of ", problem.d,
                                  " entries to ", query_features, " features and a key to ",
                                  key_features));
  return query_features;
}

}  // namespace detail
}  // namespace LinAttn
