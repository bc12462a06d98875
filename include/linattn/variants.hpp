// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/affine.hpp>
#include <linattn/block_diagonal.hpp>
#include <linattn/performer.hpp>
#include <linattn/taylor.hpp>
#include <linattn/variant.hpp>
#include <string>
#include <string_view>

/// \file variants.hpp
/// The variants that LinAttn ships, and the list that gives them tests, files, benchmarks and the app.

namespace LinAttn {

/// w_ij = q_i . k_j. Not divided by the row sum by default: it can have any sign and vanish.
struct Identity : SameMapVariant<IdentityMap> {
  static constexpr const char* name = "identity";
  static constexpr bool normalise_by_default = false;
};

/// phi(x) = elu(x) + 1 (Katharopoulos et al. 2020).
struct Elu : SameMapVariant<EluPlusOneMap> {
  static constexpr const char* name = "elu";
};

/// phi(x) = max(x, 0). A row whose features all vanish gives o = 0.
struct Relu : SameMapVariant<ReluMap> {
  static constexpr const char* name = "relu";
};

/// phi(x) = x^2.
struct Quadratic : SameMapVariant<QuadraticMap> {
  static constexpr const char* name = "quadratic";
};

/// w_ij = cos(q_i, k_j) = q_i . k_j / (|q_i| |k_j|), |x|^2 = sum_d x_d^2 + 1e-6, by the kernels of Affine. Not divided by
/// the row sum by default: it can have any sign and vanish.
struct Cosine : SameMapVariant<RowNormMap> {
  static constexpr const char* name = "cosine";
  static constexpr bool normalise_by_default = false;
};

/// LLN attention: phi_q(x) = exp(alpha x), phi_k(x) = exp(beta x) (Nahshan, Kampeas, Haleva 2024).
///
/// alpha is one value for each query head, beta one for each key/value head; both may be differentiated.
/// Shifts are per feature, compensated in the query, so nothing overflows and no epsilon is needed.
struct Lln {
  static constexpr const char* name = "lln";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = "alpha";
  static constexpr const char* key_parameter = "beta";

  Parameter alpha = 1.0;
  Parameter beta = 1.0;

  ExponentialMap query_map() const { return {alpha}; }
  ExponentialMap key_map() const { return {beta}; }
};

/// LLN+Diag: LLN attention and exact attention inside blocks of keys side by side (Nahshan, Kampeas, Haleva 2024,
/// section 3). The linear branch spreads its weight over far keys, the block part restores short range.
///
///     o = r o_lln + p o_block,    r = p = 1/2 unless `combine` says otherwise (see BlockDiagonal)
///
/// alpha and beta as in Lln. Gradients reach r and p too (Gradients::diag_r, diag_p).
struct LlnDiag {
  static constexpr const char* name = "lln-diag";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = "alpha";
  static constexpr const char* key_parameter = "beta";

  Parameter alpha = 1.0;
  Parameter beta = 1.0;
  std::int64_t block = 0;  ///< keys of a block; 0: D
  Combine combine = Combine::average;
  ColumnFactors diag_r = 0.5;  ///< (H,Dv)
  ColumnFactors diag_p = 0.5;  ///< (H,Dv)

  ExponentialMap query_map() const { return {alpha}; }
  ExponentialMap key_map() const { return {beta}; }
  BlockDiagonal local_term() const { return {block, combine, diag_r, diag_p}; }
};

/// Exact attention, the baseline of the others: w_ij = exp(scale q_i . k_j), in memory O(N) and time O(N^2).
///
/// Forward and backward see half of the pairs under a causal mask. Decoding keeps all keys and values (KeyValueCache).
struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = nullptr;

  double scale = 0;  ///< positive and finite; 0: 1 / sqrt(D)

  double score_scale(std::int64_t d) const {
    return scale != 0 ? scale : d > 0 ? 1 / std::sqrt(static_cast<double>(d)) : 1.0;
  }
};

template <class... V>
struct VariantList {};

/// Every shipped variant that is nothing but sums over keys, and so has states and step().
using LinearVariants = VariantList<Identity, Elu, Relu, Quadratic, Lln, Affine, Taylor, Cosine, Performer>;
/// Every shipped variant: one line here gives a variant its tests, command line, fixtures and benchmarks.
using Variants =
    VariantList<Identity, Elu, Relu, Quadratic, Lln, Affine, Taylor, Cosine, Performer, LlnDiag, Softmax>;

namespace detail {
template <class... V, class Body>
void for_each_variant(VariantList<V...>, const Body& body) {
  (body(std::type_identity<V>{}), ...);
}
}  // namespace detail

/// body(std::type_identity<V>{}) for every shipped variant V, in the order of the list.
template <class Body>
void for_each_variant(const Body& body) {
  detail::for_each_variant(Variants{}, body);
}

/// The same for those that have states and step().
template <class Body>
void for_each_linear_variant(const Body& body) {
  detail::for_each_variant(LinearVariants{}, body);
}

/// "identity, elu, ..." for messages.
inline std::string variant_names() {
  std::string names;
  for_each_variant([&]<class V>(std::type_identity<V>) {
    names += (names.empty() ? "" : ", ") + std::string(V::name);
  });
  return names;
}

/// body(std::type_identity<V>{}) for the shipped variant of that name. \throws InvalidArgument if none has it.
template <class Body>
void with_variant(std::string_view name, const Body& body) {
  bool found = false;
  for_each_variant([&]<class V>(std::type_identity<V> type) {
    if (name == V::name) {
      found = true;
      body(type);
    }
  });
  if (!found)
    throw InvalidArgument(
        detail::message("unknown variant '", name, "'; this build has ", variant_names()));
}

}  // namespace LinAttn
