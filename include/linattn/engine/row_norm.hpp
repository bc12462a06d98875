// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/feature_map.hpp>
#include <linattn/team.hpp>
#include <type_traits>

/// \file row_norm.hpp
/// Norms of rows, and sums along them, in an order that depends on their length alone: rows that do not lie side by
/// side are copied first, so that one code sums all of them and the layout changes no bit.

namespace LinAttn::detail {

/// Sum of term(i) for 0 <= i < n, by one thread.
template <class Team, class A, class Term>
KOKKOS_FORCEINLINE_FUNCTION A sum_along(int n, const Term& term) {
  if constexpr (Team::on_host) {
    constexpr int block = 16;
    A part[block] = {};
    int i = 0;
    for (; i + block <= n; i += block) {
      LINATTN_INDEPENDENT
      for (int j = 0; j < block; ++j) part[j] += term(i + j);
    }
    for (int j = 0; i + j < n; ++j) part[j] += term(i + j);
    for (int width = block / 2; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) part[j] += part[j + width];
    return part[0];
  } else {
    A total = A(0);
    for (int i = 0; i < n; ++i) total += term(i);
    return total;
  }
}

/// sqrt(sum x^2 + eps), relative to the largest entry: where squares leave the range of A.
template <class A>
LINATTN_OUTLINE KOKKOS_FUNCTION A careful_norm(const A* x, std::int64_t element, int n, A eps) {
  using std::sqrt;
  A largest = A(0);
  for (int i = 0; i < n; ++i) {
    const A size = x[i * element] < A(0) ? -x[i * element] : x[i * element];
    if (!(size <= largest) && largest == largest) largest = size;  // a NaN stays
  }
  if (largest == A(0)) return sqrt(eps);
  if (!(largest - largest == A(0))) return largest;
  const double scale = static_cast<double>(largest);
  double sum = static_cast<double>(eps) / scale / scale;
  for (int i = 0; i < n; ++i) {
    const double entry = static_cast<double>(x[i * element]) / scale;
    sum += entry * entry;
  }
  return static_cast<A>(scale * sqrt(sum));
}

/// sqrt(sum x^2) of a row of any stride and storage S, one code for all strides.
template <class A, class S>
LINATTN_OUTLINE KOKKOS_FUNCTION A strided_norm(const S* x, std::int64_t element, int n) {
  using std::sqrt;
  constexpr int parts = 8;
  double part[parts] = {};
  const auto add = [&](int i, int p) {
    const double entry = static_cast<double>(static_cast<A>(x[i * element]));
    if constexpr (std::is_same_v<S, double>)
      part[p] = fused_multiply_add(entry, entry, part[p]);  // by name: compilers choose for each stride
    else
      part[p] += entry * entry;  // the square is exact
  };
  int i = 0;
  for (; i + parts <= n; i += parts)
    for (int p = 0; p < parts; ++p) add(i + p, p);
  for (; i < n; ++i) add(i, i % parts);
  for (int width = parts / 2; width > 0; width /= 2)
    for (int p = 0; p < width; ++p) part[p] += part[p + width];
  if constexpr (std::is_same_v<S, double>) {
    if (!(part[0] >= 1e-290 && part[0] <= 1e305)) return careful_norm(x, element, n, 0.0);
  }
  return static_cast<A>(sqrt(part[0]));
}

/// sqrt(sum x^2 + eps) of a row side by side.
template <class Team, class A>
LINATTN_OUTLINE KOKKOS_FUNCTION A row_norm(const A* x, int n, A eps) {
  using std::sqrt;
  constexpr A least = A(sizeof(A) == 4 ? 1e-30 : 1e-290), most = A(sizeof(A) == 4 ? 1e37 : 1e305);
  const A squares = sum_along<Team, A>(n, [=](int i) { return x[i] * x[i]; }) + eps;
  if (squares >= least && squares <= most) return sqrt(squares);
  return careful_norm(x, 1, n, eps);
}

/// sum (factor x) y of rows side by side.
template <class Team, class A>
LINATTN_OUTLINE KOKKOS_FUNCTION A scaled_dot(A factor, const A* x, const A* y, int n) {
  return sum_along<Team, A>(n, [=](int i) { return factor * x[i] * y[i]; });
}

/// Whether 1 / norm is a number; smaller norms count as 0.
template <class A>
KOKKOS_FORCEINLINE_FUNCTION bool can_divide(A norm) {
  return !(norm <= A(sizeof(A) == 4 ? 3e-39 : 6e-309));
}
/// 1 / norm, or 1 for a norm too small to divide by.
template <class A>
KOKKOS_FORCEINLINE_FUNCTION A inverse_norm(A norm) {
  return can_divide(norm) ? A(1) / norm : A(1);
}

}  // namespace LinAttn::detail
