// SPDX-License-Identifier: BSD-3-Clause

// The exponential feature map: error in units in the last place, exact powers of two, saturation.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <linattn/feature_map.hpp>
#include <linattn/state.hpp>

#include "random.hpp"
#include "seed.hpp"

namespace {

using namespace LinAttn;
using LinAttn::detail::power_of_two;
using LinAttn::test_support::Random;

/// exp(rate x) 2^-shift, good to 1e-18 relative.
///
/// y = rate x is the sum of two doubles without error. From it n ln 2 is taken, n the nearest
/// integer to y / ln 2, with ln 2 in three parts: n has 21 bits and the first two parts 32, so that
/// their products are exact in long double, and so are the differences.
long double exact(double rate, double x, int shift) {
  constexpr long double ln2_1 = 0xb17217f7p-32L;
  constexpr long double ln2_2 = 0xd1cf79abp-64L;
  constexpr long double ln2_3 = 0xc9e3b39803f2f6afp-128L;
  const long double high = rate * x;
  const long double low = std::fma(rate, x, -(rate * x));
  const long double n = std::rint(high / (ln2_1 + ln2_2));
  const long double rest = ((high - n * ln2_1) - n * ln2_2) + (low - n * ln2_3);
  return std::ldexp(std::exp(rest), static_cast<int>(n) - shift);
}

/// Distance in units of the last place of the exact value.
template <class T>
long double ulps(T found, long double expected) {
  int exponent = 0;
  std::frexp(expected, &exponent);
  const int last = std::max(exponent - std::numeric_limits<T>::digits,
                            std::numeric_limits<T>::min_exponent - std::numeric_limits<T>::digits);
  return std::abs(static_cast<long double>(found) - expected) / std::ldexp(1.0L, last);
}

TEST(ExponentialOracle, AgreesWithKnownNumbers) {
  const auto near = [](long double found, long double expected) {
    return std::abs(found / expected - 1) < 1e-18L;
  };
  EXPECT_TRUE(near(exact(1, 0, 0), 1));
  EXPECT_TRUE(near(exact(1, 1, 0), 2.71828182845904523536028747135266L));
  EXPECT_TRUE(near(exact(0.5, -2, 3), 0.367879441171442321595523770161461L / 8));
  // x = 2^20 (ln 2 - 2.3190468138462996e-17) as a double
  EXPECT_TRUE(near(exact(1, 0.6931471805599453 * 1048576, 1048576),
                   1 - 2.3190468138462996e-17L * 1048576 + 2.956509e-22L));
}

template <class T>
class Exponential : public ::testing::Test {};
using Scalars = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Exponential, Scalars);

// Every result is within 2 ulp, unscaled and relative to its own exponent, for rates that are no
// numbers of the type and arguments up to where the base-2 logarithm saturates.
TYPED_TEST(Exponential, WithinTwoUlp) {
  using T = TypeParam;
  Random random(test_support::seed());
  long double worst = 0;
  for (const double rate : {1.0, 2.135, -0.7, 1e-3, 300.0, 0.1}) {
    const auto map = ExponentialMap{rate}.template bind<T>(0);
    const double widest = 0.99 * (1 << 20) * 0.6931 / std::abs(rate);
    const double ranges[] = {1 / std::abs(rate), 20 / std::abs(rate), 80 / std::abs(rate),
                             700 / std::abs(rate), widest};
    for (const double range : ranges)
      for (int n = 0; n < 40000; ++n) {
        // evenly spaced, and moved off the grid
        const double at = (2.0 * n / 40000 - 1) * range + random.uniform(-1, 1) * range / 40000;
        const T x = static_cast<T>(at);
        const int shift = map.exponent(x);
        const T scaled = map.value(x, shift);
        const long double error = ulps(scaled, exact(rate, static_cast<double>(x), shift));
        ASSERT_LE(error, 2) << "rate " << rate << " x " << x << " shift " << shift;
        worst = std::max(worst, error);
        if (std::abs(shift) >= std::numeric_limits<T>::max_exponent - 2) continue;
        ASSERT_LE(ulps(map.value(x, 0), exact(rate, static_cast<double>(x), 0)), 2)
            << "rate " << rate << " x " << x;
      }
  }
  std::cout << "[  worst ulp     ]  " << worst << std::endl;
}

// elu + 1 uses the same exponential.
TYPED_TEST(Exponential, EluPlusOne) {
  using T = TypeParam;
  const EluPlusOneMap map;
  for (int n = 0; n <= 40000; ++n) {
    const T x = static_cast<T>(-80.0 * n / 40000);
    ASSERT_LE(ulps(map.value(x), exact(1, static_cast<double>(x), 0)), 2) << x;
    ASSERT_EQ(map.derivative(x, map.value(x)), map.value(x));
  }
  EXPECT_EQ(map.value(T(0)), T(1));
  EXPECT_EQ(map.value(T(2.5)), T(3.5));
  EXPECT_EQ(map.derivative(T(2.5), T(3.5)), T(1));
}

// The value relative to any shift is the value at another one times a power of two, to the last
// bit.
TYPED_TEST(Exponential, ShiftsAreExact) {
  using T = TypeParam;
  Random random(test_support::seed() + 1);
  const auto map = ExponentialMap{1.7}.template bind<T>(0);
  for (int n = 0; n < 10000; ++n) {
    const T x = static_cast<T>(random.uniform(-300, 300));
    const int own = map.exponent(x);
    for (const int away : {-70, -1, 3, 60, 90})
      ASSERT_EQ(map.value(x, own + away), std::ldexp(map.value(x, own), -away)) << x;
  }
}

// exponent() is the base-2 logarithm to the nearest integer, up to the rounding of that logarithm.
TYPED_TEST(Exponential, MantissaIsNearOne) {
  using T = TypeParam;
  Random random(test_support::seed() + 2);
  const auto map = ExponentialMap{0.9}.template bind<T>(0);
  for (int n = 0; n < 100000; ++n) {
    const T x = static_cast<T>(random.uniform(-2000, 2000));
    const int exponent = map.exponent(x);
    const T mantissa = map.value(x, exponent);
    const double most = 0.5 + (1 + std::abs(exponent)) * 2.0 * std::numeric_limits<T>::epsilon();
    ASSERT_LE(std::abs(std::log2(static_cast<double>(mantissa))), most) << x;
  }
}

TYPED_TEST(Exponential, PowersOfTwoAreExact) {
  using T = TypeParam;
  using Limits = std::numeric_limits<T>;
  for (int e = Limits::min_exponent - 1; e < Limits::max_exponent; ++e)
    ASSERT_EQ(power_of_two<T>(e), std::ldexp(T(1), e)) << e;
  for (const int e : {Limits::min_exponent - 2, -5000, no_shift, 2 * no_shift})
    EXPECT_EQ(power_of_two<T>(e), T(0)) << e;
  for (const int e : {Limits::max_exponent, 5000, -no_shift})
    EXPECT_EQ(power_of_two<T>(e), Limits::infinity()) << e;
}

TYPED_TEST(Exponential, Extremes) {
  using T = TypeParam;
  using Limits = std::numeric_limits<T>;
  const T infinity = Limits::infinity();
  // rates whose second part is positive and negative, in both precisions
  for (const double rate : {1.0, 0.5, 0.7, 0.8, 1.2, 3.3, -0.8, -1.0}) {
    const auto map = ExponentialMap{rate}.template bind<T>(0);
    const T up = rate > 0 ? infinity : -infinity;
    EXPECT_EQ(map.exponent(up), 1 << 20) << rate;
    EXPECT_EQ(map.exponent(-up), -(1 << 20)) << rate;
    EXPECT_EQ(map.exponent(std::copysign(T(1e30), up)), 1 << 20) << rate;
    EXPECT_EQ(map.exponent(std::copysign(T(1e30), -up)), -(1 << 20)) << rate;
    EXPECT_EQ(map.value(-up, 0), T(0)) << rate;
    EXPECT_EQ(map.value(up, 0), infinity) << rate;
    EXPECT_TRUE(std::isfinite(map.value(up, 1 << 20))) << rate;
    EXPECT_GT(map.value(up, 1 << 20), T(0)) << rate;
    EXPECT_TRUE(std::isnan(map.value(Limits::quiet_NaN(), 0))) << rate;
    EXPECT_LE(map.exponent(Limits::quiet_NaN()), -(1 << 20)) << "a NaN must not move the shift";
  }
  const auto constant = ExponentialMap{0.0}.template bind<T>(0);
  for (const T x : {T(0), T(-3), T(1e30)}) {
    EXPECT_EQ(constant.exponent(x), 0);
    EXPECT_EQ(constant.value(x, 0), T(1));
  }
  const auto falling = ExponentialMap{-2.0}.template bind<T>(0);
  EXPECT_LE(ulps(falling.value(T(3), 0), exact(-2, 3, 0)), 2);
}

TYPED_TEST(Exponential, Derivatives) {
  using T = TypeParam;
  const auto map = ExponentialMap{1.5}.template bind<T>(0);
  const T f = map.value(T(0.3), 2);
  EXPECT_EQ(map.derivative(T(0.3), f), T(1.5) * f);
  EXPECT_EQ(map.parameter_derivative(T(0.3), f), T(0.3) * f);
}

}  // namespace
