// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "../support/random.hpp"
#include "../support/seed.hpp"

/// \file cases.hpp
/// Random inputs for the tests of the reference and the comparisons they share.

namespace LinAttn::reference {

inline void PrintTo(Kernel kernel, std::ostream* out) { *out << kernel_name(kernel); }

}  // namespace LinAttn::reference

namespace LinAttn::test_support {

inline constexpr reference::Kernel all_kernels[] = {
    reference::Kernel::identity, reference::Kernel::elu, reference::Kernel::relu,
    reference::Kernel::quadratic, reference::Kernel::lln};

/// Unit roundoff.
template <class Real>
inline constexpr Real roundoff = std::numeric_limits<Real>::epsilon() / 2;

/// One call of the reference.
template <class Real>
struct Case {
  Problem problem;
  reference::Settings settings;
  reference::Tensors<Real> tensors;
  std::vector<Real> d_o;

  std::vector<Real> forward() const { return reference::forward(problem, settings, tensors); }
  reference::GradientSet<Real> backward() const {
    return reference::backward(problem, settings, tensors, d_o);
  }
  reference::Magnitudes<Real> magnitudes() const {
    return reference::magnitudes(problem, settings, tensors, d_o);
  }
};

template <class Real>
std::vector<Real> converted(const std::vector<double>& x) {
  return std::vector<Real>(x.begin(), x.end());
}

/// Normal inputs at a distance of at least 1/4 from 0, where features have a kink or a zero. A
/// normalised identity gets features near 1: with signed weights the denominator could pass through
/// 0.
inline std::vector<double> features(Random& random, const reference::Settings& settings,
                                    std::int64_t n) {
  if (settings.kernel == reference::Kernel::identity && settings.normalise)
    return random.normals(n, 1, 0.3);
  auto x = random.normals(n);
  for (double& element : x) element = std::copysign(std::max(std::abs(element), 0.25), element);
  return x;
}

/// Numbers of a case depend on the seed of the run and on `number`.
template <class Real>
Case<Real> random_case(const Problem& problem, reference::Settings settings, std::uint64_t number) {
  Random random(seed() + number);
  if (settings.kernel == reference::Kernel::lln) {
    // Multiples of 2^-10, so that a step of finite differences is exact in double.
    const auto parameters = [&](std::int64_t n) {
      std::vector<double> x(static_cast<std::size_t>(n));
      for (double& element : x) element = static_cast<double>(random.integer(512, 1228)) * 0x1p-10;
      return x;
    };
    settings.alpha = parameters(problem.heads);
    settings.beta = parameters(problem.kv_heads);
  }
  const auto& p = problem;
  Case<Real> result{problem, settings, {}, {}};
  result.tensors.q = converted<Real>(features(random, settings, p.batch * p.heads * p.nq * p.d));
  result.tensors.k = converted<Real>(features(random, settings, p.batch * p.kv_heads * p.nk * p.d));
  result.tensors.v = converted<Real>(random.normals(p.batch * p.kv_heads * p.nk * p.dv));
  result.d_o = converted<Real>(random.normals(p.batch * p.heads * p.nq * p.dv));
  return result;
}

/// Makes the first feature of every query and key positive, so that no relu row vanishes by chance.
template <class Real>
void keep_alive(Case<Real>& c) {
  for (auto* x : {&c.tensors.q, &c.tensors.k})
    for (std::size_t n = 0; n < x->size(); n += static_cast<std::size_t>(c.problem.d))
      (*x)[n] = std::abs((*x)[n]);
}

/// Elements of rows first, ..., first + count - 1 of a row-major matrix of the given width.
template <class Real>
std::vector<Real> row_range(const std::vector<Real>& x, std::int64_t first, std::int64_t count,
                            std::int64_t width) {
  return std::vector<Real>(x.begin() + first * width, x.begin() + (first + count) * width);
}

template <class Real>
void append(std::vector<Real>& to, const std::vector<Real>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Equality element by element, in which NaN differs from everything.
template <class Real>
::testing::AssertionResult same(const std::vector<Real>& found, const std::vector<Real>& expected) {
  if (found.size() != expected.size())
    return ::testing::AssertionFailure()
           << found.size() << " elements, expected " << expected.size();
  for (std::size_t n = 0; n < found.size(); ++n)
    if (!(found[n] == expected[n]))
      return ::testing::AssertionFailure()
             << "element " << n << ": " << found[n] << ", expected " << expected[n];
  return ::testing::AssertionSuccess();
}

/// Largest |found - expected| / (unit * magnitude); infinite where one of them is not finite or a
/// magnitude of 0 is not met exactly.
template <class Found, class Real>
Real worst_ratio(const std::vector<Found>& found, const std::vector<Real>& expected,
                 const std::vector<Real>& magnitude, Real unit) {
  if (found.size() != expected.size() || magnitude.size() != expected.size())
    return std::numeric_limits<Real>::infinity();
  Real worst = 0;
  for (std::size_t n = 0; n < found.size(); ++n) {
    const Real difference = std::abs(static_cast<Real>(found[n]) - expected[n]);
    if (difference == 0) continue;
    const Real ratio = difference / (unit * magnitude[n]);
    if (!(ratio <= worst))
      worst = std::isfinite(ratio) ? ratio : std::numeric_limits<Real>::infinity();
  }
  return worst;
}

/// |found - expected| <= count * unit * magnitude for every element.
template <class Found, class Real>
::testing::AssertionResult within(const std::vector<Found>& found,
                                  const std::vector<Real>& expected,
                                  const std::vector<Real>& magnitude, Real unit, double count) {
  const Real worst = worst_ratio(found, expected, magnitude, unit);
  if (worst <= static_cast<Real>(count)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "worst element is off by " << worst << " units of its magnitude, " << count
         << " are allowed (" << found.size() << " against " << expected.size() << " elements)";
}

/// EXPECT_NEAR compares in double, which is blind to what long double can hold.
inline ::testing::AssertionResult near(long double found, long double expected,
                                       long double tolerance) {
  if (std::abs(found - expected) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " differs from " << expected << " by "
                                       << found - expected << ", allowed " << tolerance;
}

template <class Real>
bool all_zero(const std::vector<Real>& x) {
  for (const Real element : x)
    if (!(element == 0)) return false;
  return true;
}

inline std::string describe(const Problem& problem, const reference::Settings& settings) {
  return std::string(reference::kernel_name(settings.kernel)) +
         (settings.causal ? " causal" : " full") +
         (settings.normalise ? " normalised " : " plain ") + problem.to_string();
}

}  // namespace LinAttn::test_support
