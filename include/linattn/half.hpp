// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>
#include <cstring>

/// \file half.hpp
/// The 16-bit types in which tensors can be stored: IEEE 754 binary16 and bfloat16.
///
/// They store numbers and do not compute: kernels convert on load and on store and work in float
/// between. So there is no arithmetic and no implicit conversion. They are types of LinAttn's own
/// because neither C++20 nor every supported Kokkos has both (the half_t of Kokkos 3.4 is a float
/// on the host, bhalf_t came later), because the bits of a result must not depend on what a
/// compiler offers, and because conversions made of integer operations and selects are the same on
/// every backend and become vector instructions in a loop over a row.
///
/// Widening is exact. Narrowing rounds once, to nearest with ties to even, also from double. What
/// is below the normal range rounds to a subnormal number or 0 of its sign; what is too large by
/// half a unit in the last place or more becomes infinite. A NaN stays one, with its sign and
/// leading payload, and becomes quiet.

namespace LinAttn {
namespace detail {

/// The same bits as a type of the same size.
template <class To, class From>
KOKKOS_FORCEINLINE_FUNCTION To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// |x| rounded to odd, with the sign of x: to the float itself if there is one, else to that
/// neighbour of two whose last bit is 1. Rounding this to 22 bits or fewer gives what rounding x
/// once does.
KOKKOS_FORCEINLINE_FUNCTION float round_to_odd(double x) {
  const std::uint64_t bits = bits_as<std::uint64_t>(x), sign = bits & 0x8000000000000000u;
  const double size = bits_as<double>(bits ^ sign);
  const float nearest = static_cast<float>(size);
  const double found = static_cast<double>(nearest);
  const std::uint32_t near = bits_as<std::uint32_t>(nearest), is_even = ~near & 1u;
  const std::uint32_t up = found < size ? is_even : 0u, down = found > size ? is_even : 0u;
  return bits_as<float>((near + up - down) | static_cast<std::uint32_t>(sign >> 32));
}

/// All bits 1 where size < limit, else 0; both below 2^31. A comparison would do, but of several in
/// a row compilers make branches, which keep a loop from being vectorised.
KOKKOS_FORCEINLINE_FUNCTION std::uint32_t mask_below(std::uint32_t size, std::uint32_t limit) {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(size - limit) >> 31);
}

KOKKOS_FORCEINLINE_FUNCTION std::uint32_t select_bits(std::uint32_t mask, std::uint32_t yes,
                                                      std::uint32_t no) {
  return (yes & mask) | (no & ~mask);
}

/// Significand of 11 bits, exponents from -14 to 15.
KOKKOS_FORCEINLINE_FUNCTION std::uint16_t to_float16_bits(float x) {
  const std::uint32_t bits = bits_as<std::uint32_t>(x), sign = bits & 0x80000000u;
  const std::uint32_t size = bits ^ sign;
  const std::uint32_t is_small = mask_below(size, 0x38800000u);
  const std::uint32_t is_finite = mask_below(size, 0x47800000u);
  const std::uint32_t is_number = mask_below(size, 0x7f800001u);
  // the last place of numbers from 1/2 to 1 is that of subnormal ones, 2^-24
  const float small = bits_as<float>(size & is_small) + 0.5f;
  // a significand that rounds up to 2 carries into the exponent, as it should
  const std::uint32_t normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const std::uint32_t other = 0x7c00u | (~is_number & (0x200u | ((size >> 13) & 0x3ffu)));
  const std::uint32_t finite =
      select_bits(is_small, bits_as<std::uint32_t>(small) - 0x3f000000u, normal);
  return static_cast<std::uint16_t>(select_bits(is_finite, finite, other) | (sign >> 16));
}

KOKKOS_FORCEINLINE_FUNCTION float from_float16_bits(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
  const std::uint32_t is_small = mask_below(size, 0x0400u);
  const std::uint32_t is_finite = mask_below(size, 0x7c00u);
  // a subnormal number is read as one of exponent -14, which is 2^-14 more than it is
  const std::uint32_t read = (size << 13) + (0x38000000u | (is_small & 0x00800000u));
  const float x =
      bits_as<float>(read | (~is_finite & 0x7f800000u)) - bits_as<float>(is_small & 0x38800000u);
  return bits_as<float>(bits_as<std::uint32_t>(x) | sign);
}

/// The upper half of a float, rounded.
KOKKOS_FORCEINLINE_FUNCTION std::uint16_t to_bfloat16_bits(float x) {
  const std::uint32_t bits = bits_as<std::uint32_t>(x);
  const auto order = static_cast<std::int32_t>(bits & 0x7fffffffu);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>(order > 0x7f800000 ? quiet : rounded);
}

KOKKOS_FORCEINLINE_FUNCTION float from_bfloat16_bits(std::uint16_t bits) {
  return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace detail

/// IEEE 754 binary16: 11 significant bits, finite up to 65504, normal from 2^-14, subnormal from
/// 2^-24.
struct float16 {
  std::uint16_t bits;  ///< sign, 5 bits of exponent, 10 of fraction

  float16() = default;
  KOKKOS_FORCEINLINE_FUNCTION explicit float16(float x) : bits(detail::to_float16_bits(x)) {}
  KOKKOS_FORCEINLINE_FUNCTION explicit float16(double x) : float16(detail::round_to_odd(x)) {}
  KOKKOS_FORCEINLINE_FUNCTION explicit operator float() const {
    return detail::from_float16_bits(bits);
  }

  KOKKOS_FORCEINLINE_FUNCTION static float16 from_bits(std::uint16_t bits) {
    float16 x;
    x.bits = bits;
    return x;
  }
};

/// bfloat16, the upper half of a float: 8 significant bits, finite up to 3.39e38, subnormal from
/// 2^-133.
struct bfloat16 {
  std::uint16_t bits;  ///< sign, 8 bits of exponent, 7 of fraction

  bfloat16() = default;
  KOKKOS_FORCEINLINE_FUNCTION explicit bfloat16(float x) : bits(detail::to_bfloat16_bits(x)) {}
  KOKKOS_FORCEINLINE_FUNCTION explicit bfloat16(double x) : bfloat16(detail::round_to_odd(x)) {}
  KOKKOS_FORCEINLINE_FUNCTION explicit operator float() const {
    return detail::from_bfloat16_bits(bits);
  }

  KOKKOS_FORCEINLINE_FUNCTION static bfloat16 from_bits(std::uint16_t bits) {
    bfloat16 x;
    x.bits = bits;
    return x;
  }
};

}  // namespace LinAttn
