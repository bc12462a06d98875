// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

/// \file random.hpp
/// Seeded random numbers for tests, the same on every platform up to the last bits of log and cos.

namespace LinAttn::test_support {

/// splitmix64 and, for normal numbers, the Box-Muller transform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : m_state(seed) {}

  /// 64 uniform bits.
  std::uint64_t bits() {
    std::uint64_t z = m_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// Uniform in [low, high).
  double uniform(double low = 0, double high = 1) {
    return low + (high - low) * (static_cast<double>(bits() >> 11) * 0x1p-53);
  }

  /// Uniform in low, ..., high.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }

  /// Normal with the given mean and standard deviation.
  double normal(double mean = 0, double deviation = 1) {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return mean + deviation * radius * std::cos(2 * std::numbers::pi * uniform());
  }

  void fill_normal(std::vector<double>& x, double mean = 0, double deviation = 1) {
    for (double& element : x) element = normal(mean, deviation);
  }
  void fill_uniform(std::vector<double>& x, double low = 0, double high = 1) {
    for (double& element : x) element = uniform(low, high);
  }

  std::vector<double> normals(std::int64_t n, double mean = 0, double deviation = 1) {
    std::vector<double> x(static_cast<std::size_t>(n));
    fill_normal(x, mean, deviation);
    return x;
  }
  std::vector<double> uniforms(std::int64_t n, double low = 0, double high = 1) {
    std::vector<double> x(static_cast<std::size_t>(n));
    fill_uniform(x, low, high);
    return x;
  }

  /// A random order of 0, ..., n - 1.
  std::vector<std::size_t> permutation(std::size_t n) {
    std::vector<std::size_t> order(n);
    for (std::size_t i = 0; i < n; ++i) order[i] = i;
    for (std::size_t i = n; i > 1; --i)
      std::swap(order[i - 1],
                order[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(i) - 1))]);
    return order;
  }

 private:
  std::uint64_t m_state;
};

}  // namespace LinAttn::test_support
