// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/feature_map.hpp>
#include <linattn/kokkos_compat.hpp>

/// \file state.hpp
/// The memory of linear attention and how two memories become one.
///
///     S = sum_j phi(k_j) v_j^T   (R x Dv)        z = sum_j phi(k_j)   (R)        shift (R)
///
/// The true sums of feature r are 2^shift[r] S[r,:] and 2^shift[r] z[r]; maps without exponential growth
/// leave the shift at 0. States form a monoid: the identity is "no key seen", and combining the states
/// of two sets of keys, element by element as ScaledSum does it, gives the state of their union. The
/// backward pass has the mirrored state over queries, with the same algebra.

namespace LinAttn {

/// Shift of a feature that has seen no key: smaller than every exponent a feature map can return.
inline constexpr int no_shift = -(1 << 28);

/// One element of a state: the number value * 2^shift. The default is the identity of the monoid.
///
/// Shifts are integers, so bringing two elements to the larger shift is exact unless a part underflows
/// and the order of the additions is all that rounding depends on.
template <class T>
struct ScaledSum {
  T value = T(0);
  int shift = no_shift;

  KOKKOS_FUNCTION ScaledSum& operator+=(const ScaledSum& other) {
    const int larger = shift > other.shift ? shift : other.shift;
    value = value * detail::power_of_two<T>(shift - larger) +
            other.value * detail::power_of_two<T>(other.shift - larger);
    shift = larger;
    return *this;
  }
  friend KOKKOS_FUNCTION ScaledSum operator+(ScaledSum left, const ScaledSum& right) {
    return left += right;
  }
};

/// The shift of a union of key sets: the larger one.
struct ShiftMaximum {
  int value = no_shift;
  KOKKOS_FUNCTION ShiftMaximum& operator+=(const ShiftMaximum& other) {
    value = value > other.value ? value : other.value;
    return *this;
  }
  friend KOKKOS_FUNCTION ShiftMaximum operator+(ShiftMaximum left, const ShiftMaximum& right) {
    return left += right;
  }
};

}  // namespace LinAttn

/// Kokkos scans start from these identities.
template <class T>
struct Kokkos::reduction_identity<LinAttn::ScaledSum<T>> {
  KOKKOS_FORCEINLINE_FUNCTION static LinAttn::ScaledSum<T> sum() { return {}; }
};
template <>
struct Kokkos::reduction_identity<LinAttn::ShiftMaximum> {
  KOKKOS_FORCEINLINE_FUNCTION static LinAttn::ShiftMaximum sum() { return {}; }
};
