// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <linattn/team.hpp>

/// \file row_norm.hpp
/// Sums along rows of the caller, and their norms.

namespace LinAttn::detail {

/// Sum of term(i) for 0 <= i < n, by one thread, in an order that depends on n alone.
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

/// sqrt(sum x^2 + eps) where squares leave the range of A; the sum of squares is scaled by the largest entry.
template <class A, class Stride>
LINATTN_OUTLINE KOKKOS_FUNCTION A careful_norm(const A* x, Stride element, int n, A eps) {
  using std::sqrt;
  A largest = A(0);
  for (int i = 0; i < n; ++i) {
    const A size = x[i * element] < A(0) ? -x[i * element] : x[i * element];
    if (!(size <= largest)) largest = size;  // a NaN stays
  }
  if (largest == A(0) || !(largest - largest == A(0))) return largest == A(0) ? sqrt(eps) : largest;
  double sum = static_cast<double>(eps) / static_cast<double>(largest) / static_cast<double>(largest);
  for (int i = 0; i < n; ++i) {
    const double part = static_cast<double>(x[i * element]) / static_cast<double>(largest);
    sum += part * part;
  }
  return static_cast<A>(static_cast<double>(largest) * sqrt(sum));
}

/// sqrt(sum x^2 + eps).
template <class Team, class A, class Stride>
KOKKOS_FORCEINLINE_FUNCTION A row_norm(const A* x, Stride element, int n, A eps) {
  using std::sqrt;
  constexpr A least = A(sizeof(A) == 4 ? 1e-30 : 1e-290), most = A(sizeof(A) == 4 ? 1e37 : 1e305);
  const A squares = sum_along<Team, A>(n, [=](int i) { return x[i * element] * x[i * element]; }) + eps;
  if (squares >= least && squares <= most) return sqrt(squares);
  return careful_norm(x, element, n, eps);
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
