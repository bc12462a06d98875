// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/feature_map.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/variant.hpp>
#include <optional>

/// \file affine.hpp
/// Affine linear attention, f(x) = a x + b of the score (Gerami and Duraiswami 2025).
///
///     w_ij = a s qhat_i . khat_j + b        o_i = sum_j w_ij v_j / sum_j w_ij
///
/// With a = b = 1 this is softmax attention to first order. Over the keys that row i sees, with S = sum khat v^T,
/// z = sum khat, t = sum v and their number m:
///
///     o_i = (a s qhat_i^T S + b t) / (a s qhat_i . z + b m)
///
/// so beside S and z the state has t and m, which stay apart from S: no feature is padded.

namespace LinAttn {

/// What qhat and khat are.
enum class QkNorm {
  l2,    ///< x / sqrt(|x|^2 + eps) for each row: scores are cosines, w >= 0 if |a s| <= b
  none,  ///< x
  max    ///< x / (largest |x| of the rows of the sequence and head); the first of the largest carries the gradient
};

/// x -> rate x / rho(x), rho as QkNorm says; a norm of 0 divides by 1.
struct RowNormMap {
  Parameter rate = 1.0;  ///< differentiable, one for each head
  double factor = 1.0;   ///< constant part of the rate
  QkNorm norm = QkNorm::l2;
  double eps = 1e-6;

  /// The map of one head; see RowNormFeatureMap.
  template <class T>
  struct Bound {
    T rate;
    T eps;
    bool per_row;
  };

  template <class T>
  KOKKOS_FUNCTION Bound<T> bind(std::int64_t head) const {
    return {static_cast<T>(rate(head) * factor), static_cast<T>(eps), norm == QkNorm::l2};
  }
  /// Whether rows are divided by the largest norm of their sequence and head.
  KOKKOS_FUNCTION bool of_sequence() const { return norm == QkNorm::max; }
};

struct Affine {
  static constexpr const char* name = "affine";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = "a";
  static constexpr const char* key_parameter = nullptr;
  static constexpr const char* constant_parameter = "b";
  static constexpr const char* scale_parameter = "scale";

  Parameter a = 1.0;
  Parameter b = 1.0;
  std::optional<double> scale{};  ///< s; default 1 for l2 and max, 1/sqrt(D) for none
  QkNorm qk_norm = QkNorm::l2;
  double norm_eps = 1e-6;  ///< of l2
  /// A largest norm is one of the whole sequence, so under a causal mask later tokens change earlier rows: refused
  /// unless asked for here. Refused in any case with an initial state, whose keys were divided by another norm.
  bool max_norm_sees_future = false;

  double score_scale(std::int64_t d) const {
    return scale.value_or(qk_norm == QkNorm::none && d > 0 ? 1.0 / std::sqrt(static_cast<double>(d)) : 1.0);
  }
  /// This variant with the defaults that depend on the problem filled in.
  Affine resolved(const Problem& problem) const {
    Affine result = *this;
    result.scale = score_scale(problem.d);
    return result;
  }
  RowNormMap query_map() const { return {a, scale.value_or(1.0), qk_norm, norm_eps}; }
  RowNormMap key_map() const { return {1.0, 1.0, qk_norm, norm_eps}; }
  Parameter constant() const { return b; }

  /// \throws InvalidArgument for a = b = 0 (unchecked for values per head), a scale or eps that is not finite, and the
  /// largest norm where it would see the future: under a causal mask, and in step()
  void validate(Pass pass, bool causal) const {
    if (!a.per_head() && !b.per_head() && a.value() * scale.value_or(1) == 0 && b.value() == 0)
      throw InvalidArgument(detail::message("LinAttn: affine attention needs a or b other than 0, found ",
                                            a.value() == 0 ? "a = b = 0" : "b = 0 and a score scale of 0",
                                            ": every weight would be 0"));
    if (scale && !(*scale - *scale == 0.0))
      throw InvalidArgument(detail::message("LinAttn: the score scale of affine attention must be finite, found ",
                                            *scale));
    if (!(norm_eps >= 0.0) || !(norm_eps - norm_eps == 0.0))
      throw InvalidArgument(detail::message("LinAttn: norm_eps must be finite and not negative, found ", norm_eps));
    if (qk_norm != QkNorm::max) return;
    if (pass == Pass::step)
      throw InvalidArgument("LinAttn: a step cannot know the largest norm of a sequence; use qk_norm l2 or none");
    if (causal && !max_norm_sees_future)
      throw InvalidArgument("LinAttn: qk_norm max takes the largest norm of the whole sequence, so later tokens would "
                            "change earlier rows under a causal mask; use qk_norm l2, or ask for it with "
                            "max_norm_sees_future");
  }
};

}  // namespace LinAttn
