// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <linattn/feature_map.hpp>
#include <linattn/problem.hpp>
#include <type_traits>

/// \file variant.hpp
/// What makes one linear attention differ from another, for the engine.

namespace LinAttn {

/// A variant of linear attention that the engine can run:
///
///     o_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = phi_q(q_i) . phi_k(k_j),   j over the visible keys
///
/// It names itself, gives the two feature maps, and says whether it divides by the row sum by default.
/// `query_parameter` and `key_parameter` name the scalar of the map for each head, or are nullptr.
template <class V>
concept Variant = requires(const V& variant) {
  { V::name } -> std::convertible_to<const char*>;
  { V::normalise_by_default } -> std::convertible_to<bool>;
  { V::query_parameter } -> std::convertible_to<const char*>;
  { V::key_parameter } -> std::convertible_to<const char*>;
  { variant.query_map() } -> FeatureMap;
  { variant.key_map() } -> FeatureMap;
};

template <Variant V>
using query_map_t = std::remove_cvref_t<decltype(std::declval<const V&>().query_map())>;
template <Variant V>
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

/// R, checked to agree between the two maps; parameters checked against the heads.
template <class ExecSpace, Variant V>
std::int64_t validate_variant(const V& variant, const Problem& problem) {
  static_assert(ScaledFeatureMap<query_map_t<V>> == ScaledFeatureMap<key_map_t<V>>,
                "LinAttn: query and key map must both be scaled maps or both not be");
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
