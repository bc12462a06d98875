// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

/// \file finite_difference.hpp
/// Derivatives by central differences, with a bound of their own error, to check gradients against.

namespace LinAttn::test_support {

/// A derivative and what it may be off by.
template <class Real>
struct Derivative {
  Real value = 0;
  Real error = 0;
};

/// Derivative at 0 of a smooth f(t) from central differences at the steps h, h/2, h/4, extrapolated
/// twice (Richardson): the remainder is O(h^6).
///
/// The error is the change made by the second extrapolation, which exceeds the remainder for small
/// h, plus the noise of f magnified by the differences: the weights of the three differences are
/// 1/45, -20/45, 64/45, so that noise/h times (1 + 20 * 2 + 64 * 4)/45 < 7 reaches the result.
/// \param noise absolute error of one value of f; without it, four roundings of the largest value.
template <class Real, class Function>
Derivative<Real> derivative(Function&& f, Real h, Real noise = -1) {
  std::array<Real, 3> difference;
  Real largest = 0;
  for (std::size_t n = 0; n < 3; ++n) {
    const Real step = h / static_cast<Real>(1 << n);
    const Real up = f(step), down = f(-step);
    largest = std::max({largest, std::abs(up), std::abs(down)});
    difference[n] = (up - down) / (2 * step);
  }
  if (noise < 0) noise = 4 * std::numeric_limits<Real>::epsilon() * largest;
  const Real coarse = (4 * difference[1] - difference[0]) / 3;
  const Real fine = (4 * difference[2] - difference[1]) / 3;
  const Real value = (16 * fine - coarse) / 15;
  return {value, std::abs(value - fine) + 7 * noise / h};
}

/// Derivative of f(x) along the n-th coordinate.
template <class Real, class Function>
Derivative<Real> coordinate_derivative(Function&& f, std::vector<Real> x, std::size_t n, Real h,
                                       Real noise = -1) {
  const Real centre = x[n];
  return derivative<Real>(
      [&](Real t) {
        x[n] = centre + t;
        return static_cast<Real>(f(x));
      },
      h, noise);
}

/// Derivative of f(x) along a direction of any length.
template <class Real, class Function>
Derivative<Real> directional_derivative(Function&& f, const std::vector<Real>& x,
                                        const std::vector<Real>& direction, Real h,
                                        Real noise = -1) {
  std::vector<Real> moved(x.size());
  return derivative<Real>(
      [&](Real t) {
        for (std::size_t n = 0; n < x.size(); ++n) moved[n] = x[n] + t * direction[n];
        return static_cast<Real>(f(moved));
      },
      h, noise);
}

/// A gradient against finite differences along one direction.
template <class Real>
struct DirectionalCheck {
  Real analytic = 0;  ///< gradient . direction
  Real numeric = 0;   ///< by directional_derivative()
  Real error = 0;     ///< bound of the error of numeric
};

/// \pre gradient, x and direction have one size.
template <class Real, class Function>
DirectionalCheck<Real> check_direction(Function&& f, const std::vector<Real>& gradient,
                                       const std::vector<Real>& x,
                                       const std::vector<Real>& direction, Real h,
                                       Real noise = -1) {
  const auto numeric = directional_derivative<Real>(f, x, direction, h, noise);
  Real analytic = 0;
  for (std::size_t n = 0; n < x.size(); ++n) analytic += gradient[n] * direction[n];
  return {analytic, numeric.value, numeric.error};
}

}  // namespace LinAttn::test_support
