// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

/// \file random.hpp
/// Random numbers that depend on (seed, stream, index) only.

namespace LinAttn::app {

/// Counter-based generator: the output function of splitmix64 at a counter, so that any element of
/// any stream can be had alone and in any order.
class CounterRandom {
 public:
  CounterRandom(std::uint64_t seed, std::uint64_t stream) : m_key(mix(mix(seed) + stream)) {}

  /// Uniform in (0, 1).
  double uniform(std::uint64_t index) const {
    return (static_cast<double>(mix(m_key + (index + 1) * weyl) >> 12) + 0.5) * 0x1p-52;
  }

  /// Standard normal, by Box and Muller from the uniform numbers 2 index and 2 index + 1.
  double normal(std::uint64_t index) const {
    return std::sqrt(-2 * std::log(uniform(2 * index))) *
           std::cos(2 * std::numbers::pi * uniform(2 * index + 1));
  }

 private:
  static constexpr std::uint64_t weyl = 0x9e3779b97f4a7c15u;

  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  std::uint64_t m_key;
};

}  // namespace LinAttn::app
