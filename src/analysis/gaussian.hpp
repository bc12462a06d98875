// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

/// \file gaussian.hpp
/// Normal numbers for simulations on the host.

namespace LinAttn::detail {

/// splitmix64 and the Box-Muller transform.
class Gaussian {
 public:
  explicit Gaussian(std::uint64_t seed) : m_state(seed) {}

  /// Numbers of mean 0 and sample deviation 1 (divisor n - 1), exactly but for rounding.
  std::vector<double> standardised(std::size_t count) {
    std::vector<double> x(count);
    double mean = 0, squares = 0;
    for (double& value : x) mean += value = normal();
    mean /= static_cast<double>(count);
    for (double& value : x) {
      value -= mean;
      squares += value * value;
    }
    const double deviation = std::sqrt(squares / static_cast<double>(count - 1));
    for (double& value : x) value /= deviation;
    return x;
  }

 private:
  double uniform() {  // in (0, 1)
    std::uint64_t z = m_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (static_cast<double>((z ^ (z >> 31)) >> 12) + 0.5) * 0x1p-52;
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

  std::uint64_t m_state;
};

}  // namespace LinAttn::detail
