// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

/// \file noise.hpp
/// The normal numbers of the dropout substitute, from the published definition of the generator
/// (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) and of the
/// transform (Box and Muller 1958). Shares nothing with the engine's.
///
///     words = Philox4x32-10(key = seed, counter = (e >> 2, offset))       low halves first
///     n     = element e & 3 of (r0 cos t0, r0 sin t0, r1 cos t1, r1 sin t1)
///     r0    = sqrt(-2 log u(w0)), t0 = 2 pi u(w1), r1 and t1 likewise from w2 and w3
///     u(w)  = (w + 1/2) 2^-32, never 0

namespace LinAttn::reference {

/// Ten rounds of Philox4x32.
inline std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                               std::array<std::uint32_t, 2> key) {
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t right = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {high(right) ^ counter[1] ^ key[0], low(right), high(left) ^ counter[3] ^ key[1],
               low(left)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

/// One coordinate of a point with normal coordinates.
template <std::floating_point Real>
struct Normal {
  Real value = 0;   ///< n
  Real radius = 0;  ///< r >= |n|, the scale of what the angle's rounding does to n
};

/// Normal number of element e.
template <std::floating_point Real>
Normal<Real> normal_of(std::uint64_t seed, std::uint64_t offset, std::uint64_t e) {
  static_assert(std::numeric_limits<Real>::digits > 33, "u(w) has 33 digits");
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto words = philox4x32({low(e >> 2), low(e >> 34), low(offset), low(offset >> 32)},
                                {low(seed), low(seed >> 32)});
  const auto uniform = [&](std::size_t n) {
    return (static_cast<Real>(words[n]) + Real(0.5)) * Real(0x1p-32);  // exact
  };
  const std::size_t pair = (e & 2) != 0 ? 2 : 0;
  const Real radius = std::sqrt(-2 * std::log(uniform(pair)));
  const Real angle = 2 * std::numbers::pi_v<Real> * uniform(pair + 1);
  return {radius * ((e & 1) != 0 ? std::sin(angle) : std::cos(angle)), radius};
}

/// n of element e.
template <std::floating_point Real>
Real standard_normal(std::uint64_t seed, std::uint64_t offset, std::uint64_t e) {
  return normal_of<Real>(seed, offset, e).value;
}

}  // namespace LinAttn::reference
