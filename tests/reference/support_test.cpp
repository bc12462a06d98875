// SPDX-License-Identifier: BSD-3-Clause
// The tools of the tests themselves.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "../support/finite_difference.hpp"
#include "../support/random.hpp"
#include "cases.hpp"

namespace {

using namespace LinAttn::test_support;

TEST(SupportRandom, IsSplitmix64) {
  Random random(0);
  EXPECT_EQ(random.bits(), 0xe220a8397b1dcdafu);
  EXPECT_EQ(random.bits(), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(random.bits(), 0x06c45d188009454fu);
}

TEST(SupportRandom, SameSeedSameNumbers) {
  EXPECT_EQ(Random(7).normals(50), Random(7).normals(50));
  EXPECT_NE(Random(7).normals(50), Random(8).normals(50));
}

TEST(SupportRandom, Moments) {
  const int n = 20000;
  const auto x = Random(11).normals(n, 3, 2);
  double mean = 0, variance = 0, inside = 0;
  for (const double element : x) mean += element / n;
  for (const double element : x) variance += (element - mean) * (element - mean) / n;
  for (const double element : x) inside += std::abs(element - 3) < 2 ? 1.0 / n : 0.0;
  // Four standard deviations of each estimate.
  EXPECT_NEAR(mean, 3, 4 * 2 / std::sqrt(n));
  EXPECT_NEAR(variance, 4, 4 * 4 * std::sqrt(2.0 / n));
  EXPECT_NEAR(inside, 0.6827, 4 * std::sqrt(0.6827 * 0.3173 / n));

  const auto u = Random(12).uniforms(n, -1, 3);
  double average = 0;
  for (const double element : u) average += element / n;
  EXPECT_NEAR(average, 1, 4 * 4 / std::sqrt(12.0 * n));
  EXPECT_GE(*std::min_element(u.begin(), u.end()), -1);
  EXPECT_LT(*std::max_element(u.begin(), u.end()), 3);
}

TEST(SupportRandom, IntegersAndPermutationsReachEverything) {
  Random random(13);
  std::vector<int> count(5);
  for (int n = 0; n < 1000; ++n) ++count[static_cast<std::size_t>(random.integer(-2, 2) + 2)];
  for (const int c : count) EXPECT_NEAR(c, 200, 4 * std::sqrt(1000 * 0.2 * 0.8));
  auto order = random.permutation(30);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (std::size_t n = 0; n < 30; ++n) EXPECT_EQ(order[n], n);
}

template <class Real>
class SupportFiniteDifference : public ::testing::Test {};
using Reals = ::testing::Types<double, long double>;
TYPED_TEST_SUITE(SupportFiniteDifference, Reals);

TYPED_TEST(SupportFiniteDifference, KnowsItsOwnError) {
  using Real = TypeParam;
  for (const Real h : {Real(0x1p-2), Real(0x1p-6), Real(0x1p-10)}) {
    const auto exponential = derivative<Real>([](Real t) { return std::exp(t); }, h);
    EXPECT_LE(std::abs(exponential.value - 1), exponential.error);
    const auto wave = derivative<Real>([](Real t) { return std::sin(5 + 3 * t); }, h);
    EXPECT_LE(std::abs(wave.value - 3 * std::cos(Real(5))), wave.error);
  }
  // Small enough to be of use.
  const auto power = derivative<Real>(
      [](Real t) { return 1 + 2 * t + std::pow(t, Real(5)) + std::pow(t, Real(6)); }, Real(0x1p-9));
  EXPECT_LE(std::abs(power.value - 2), power.error);
  EXPECT_LE(power.error, 1e-11);
  const auto given = derivative<Real>([](Real t) { return 2 * t; }, Real(0.5), Real(1e-3));
  EXPECT_LE(std::abs(given.error - Real(14e-3)), Real(1e-9));
}

TYPED_TEST(SupportFiniteDifference, ChecksDirectionsAndCoordinates) {
  using Real = TypeParam;
  const auto f = [](const std::vector<Real>& x) { return x[0] * x[0] * x[1] + std::exp(x[2]); };
  const std::vector<Real> x{2, 3, 1}, direction{1, -2, Real(0.5)};
  std::vector<Real> gradient{12, 4, std::exp(Real(1))};
  const Real h = Real(0x1p-6);
  const auto right = check_direction<Real>(f, gradient, x, direction, h);
  EXPECT_LE(std::abs(right.analytic - right.numeric), right.error);
  EXPECT_LE(right.error, 1e-9);
  for (std::size_t n = 0; n < 3; ++n) {
    const auto one = coordinate_derivative<Real>(f, x, n, h);
    EXPECT_LE(std::abs(one.value - gradient[n]), one.error);
  }
  gradient[1] *= Real(1) + Real(1e-6);
  const auto wrong = check_direction<Real>(f, gradient, x, direction, h);
  EXPECT_GT(std::abs(wrong.analytic - wrong.numeric), 100 * wrong.error);
}

TEST(SupportComparison, SeesEveryKindOfDifference) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  using Doubles = std::vector<double>;
  EXPECT_TRUE(same(Doubles{1, 2}, Doubles{1, 2}));
  EXPECT_FALSE(same(Doubles{1, 2}, Doubles{1, 3}));
  EXPECT_FALSE(same(Doubles{1}, Doubles{1, 2}));
  EXPECT_FALSE(same(Doubles{nan}, Doubles{nan}));
  EXPECT_TRUE(within(Doubles{1, 2.5}, Doubles{1, 2}, Doubles{0, 1}, 0.25, 2));
  EXPECT_FALSE(within(Doubles{1, 2.5}, Doubles{1, 2}, Doubles{0, 1}, 0.25, 1.9));
  EXPECT_FALSE(within(Doubles{1e-300}, Doubles{0}, Doubles{0}, 0.25, 2));
  EXPECT_FALSE(within(Doubles{nan, 1}, Doubles{1, 1}, Doubles{1, 1}, 0.25, 2));
  EXPECT_FALSE(within(Doubles{1, 1}, Doubles{1, nan}, Doubles{1, 1}, 0.25, 2));
  EXPECT_FALSE(within(Doubles{1}, Doubles{1, 1}, Doubles{1, 1}, 0.25, 2));
  EXPECT_TRUE(all_zero(Doubles{0, -0.0}));
  EXPECT_FALSE(all_zero(Doubles{nan}));
  EXPECT_FALSE(near(1, 1 + 0x1p-60L, 0x1p-61L));
  EXPECT_TRUE(near(1, 1 + 0x1p-60L, 0x1p-59L));
}

}  // namespace
