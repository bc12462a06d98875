// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/kokkos_compat.hpp>

/// \file normaliser.hpp
/// Row sums that nearly vanish, where weights can have both signs (affine, identity).
///
/// Output and gradients grow like 1/s and 1/s^2, so a row whose sum s is small beside m, the number of keys that it
/// sees, carries no information. Three ways to deal with it (the text of Gerami and Duraiswami has none):

namespace LinAttn {

enum class SmallNormaliser {
  /// Rows are what IEEE arithmetic gives. Kernels record the smallest |s|/m of each head in Saved::smallest, where
  /// that is given, and check() refuses what lies below the limit. Nothing waits for the kernels before that.
  check,
  /// s is replaced by sign(s) max(|s|, least m), sign(0) = +1, and no gradient flows through a replaced sum.
  clamp,
  /// As check, with nothing recorded.
  ignore
};

/// Smallest |s| / m among the rows of one head that see a key, and the row (of q) where it stands, the first of
/// equals; a sum that is not a number counts as smallest. Infinite, and row -1, if no row sees a key.
struct NormaliserRecord {
  double ratio;
  std::int64_t row;
};

namespace detail {

/// An overflowed sum must not pass as a row of zeros.
template <class A>
KOKKOS_FORCEINLINE_FUNCTION A divisor(A s) {
  return s - s == A(0) ? s : s - s;
}

/// The sum that a row is divided by, and whether it stands in for its own.
template <class A>
struct RowSum {
  A value;
  bool replaced;
};

/// sign(s) max(|s|, least); a least of 0 replaces nothing.
template <class A>
KOKKOS_FORCEINLINE_FUNCTION RowSum<A> clamped_row_sum(A s, A least) {
  const A size = s < A(0) ? -s : s;
  if (size < least) return {s < A(0) ? -least : least, true};
  return {divisor(s), false};
}

/// Whether `a` takes the place of `b`: the smaller ratio, what is no number first, of equals the earlier one, `b`.
KOKKOS_FORCEINLINE_FUNCTION bool is_smaller(const NormaliserRecord& a, const NormaliserRecord& b) {
  return b.ratio == b.ratio && !(a.ratio >= b.ratio);
}

}  // namespace detail

}  // namespace LinAttn
