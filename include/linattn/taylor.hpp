// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/feature_map.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>

/// \file taylor.hpp
/// The kernel of softmax attention to second order in the score.
///
///     w_ij = 1 + x_ij + x_ij^2 / 2        x_ij = s q_i . k_j
///
/// It is at least 1/2, whatever the score, and exp(x) to within |x|^3 / 6 for x <= 0. The price is the number of
/// features, 1 + D + D (D + 1) / 2 for rows of D entries.

namespace LinAttn {

/// phi(x) = (1, sqrt(s) x_i, s x_i^2 / sqrt(2), s x_i x_j), i < j: phi(q) . phi(k) = 1 + s q . k + (s q . k)^2 / 2.
/// Products stand row by row of their upper triangle, x_i x_i, x_i x_(i+1), ...
struct TaylorMap {
  double scale = 1;

  KOKKOS_FUNCTION std::int64_t features(std::int64_t d) const {
    constexpr std::int64_t largest = std::int64_t(1) << 31;  // beyond it the square is not of 64 bits; refused anyway
    return d < largest ? 1 + d + d * (d + 1) / 2 : INT64_MAX;
  }

  template <class T>
  KOKKOS_FUNCTION void row_value(ConstRow<T> x, Row<T> f) const {
    const T s = static_cast<T>(scale), root = root_of(s);
    f[0] = T(1);
    for (std::int64_t i = 0; i < x.size; ++i) f[1 + i] = root * x[i];
    std::int64_t at = 1 + x.size;
    for (std::int64_t i = 0; i < x.size; ++i) {
      const T factor = s * x[i];
      f[at] = factor * x[i] * T(half_root);
      for (std::int64_t j = i + 1; j < x.size; ++j) f[at + j - i] = factor * x[j];
      at += x.size - i;
    }
  }

  /// dx_i = sqrt(s) df_i + s (sqrt(2) x_i df_ii + sum_j x_j df_ij), j != i. Products are fused with their sums as written,
  /// whatever the strides, so that memory layouts change no bit.
  template <class T>
  KOKKOS_FUNCTION void row_pullback(ConstRow<T> x, ConstRow<T>, ConstRow<T> df, Row<T> dx) const {
    using detail::fused_multiply_add;
    constexpr int parts = 8;  // of a sum, so that the loop vectorises
    const T s = static_cast<T>(scale), root = root_of(s);
    for (std::int64_t i = 0; i < x.size; ++i) dx[i] = root * df[1 + i];
    std::int64_t at = 1 + x.size;
    for (std::int64_t i = 0; i < x.size; ++i) {
      const T factor = s * x[i];
      T part[parts] = {T(2 * half_root) * x[i] * df[at]};
      const auto pair = [&](std::int64_t j, T& sum) {
        const T g = df[at + j - i];
        sum = fused_multiply_add(x[j], g, sum);
        dx[j] = fused_multiply_add(factor, g, dx[j]);
      };
      std::int64_t j = i + 1;
      for (; j + parts <= x.size; j += parts)
        for (int p = 0; p < parts; ++p) pair(j + p, part[p]);
      for (; j < x.size; ++j) pair(j, part[0]);
      T along = part[0];
      for (int p = 1; p < parts; ++p) along += part[p];
      dx[i] = fused_multiply_add(s, along, dx[i]);
      at += x.size - i;
    }
  }

 private:
  static constexpr double half_root = 0.70710678118654752;  // sqrt(1/2)
  template <class T>
  KOKKOS_FUNCTION static T root_of(T s) {
    using std::sqrt;
    return sqrt(s);
  }
};

/// Second-order Taylor attention. Rows have 1 + D + D (D + 1) / 2 features, so D <= 360, and a state of D = 64 is as
/// large as 33 of an elementwise map.
struct Taylor {
  static constexpr const char* name = "taylor";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = nullptr;

  double scale = 0;  ///< s, positive and at most 1e30; 0: 1 / sqrt(D)

  double score_scale(std::int64_t d) const {
    return scale != 0 ? scale : d > 0 ? 1 / std::sqrt(static_cast<double>(d)) : 1.0;
  }
  /// This variant with the default that depends on the problem filled in.
  Taylor resolved(const Problem& problem) const { return {score_scale(problem.d)}; }
  TaylorMap query_map() const { return {scale}; }
  TaylorMap key_map() const { return {scale}; }

  /// \throws InvalidArgument for a scale that is negative, not finite, or too large
  void validate(Pass, bool) const {
    constexpr double largest = 1e30;
    if (!(scale >= 0) || !(scale <= largest))
      throw InvalidArgument(detail::message("LinAttn: the scale of the scores of taylor must be positive and at most ",
                                            largest, " (0: 1 / sqrt(D)), found ", scale));
  }
};

}  // namespace LinAttn
