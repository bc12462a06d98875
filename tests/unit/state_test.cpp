// SPDX-License-Identifier: BSD-3-Clause

// The monoid of states: identity, associativity, and that combining is the union of key sets.

#include <gtest/gtest.h>

#include <linattn/state.hpp>
#include <vector>

#include "random.hpp"
#include "seed.hpp"

namespace {

using namespace LinAttn;
using LinAttn::test_support::Random;

template <class T>
class Monoid : public ::testing::Test {
 public:
  using Sum = ScaledSum<T>;
  /// Integers times powers of two so near to each other that every sum below is exact.
  static Sum random_sum(Random& random) {
    return {static_cast<T>(random.integer(-31, 31)), static_cast<int>(random.integer(-6, 6))};
  }
  /// The number a sum stands for.
  static T number(const Sum& sum) {
    return sum.shift == no_shift ? sum.value : std::ldexp(sum.value, sum.shift);
  }
};
using Scalars = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Monoid, Scalars);

template <class T>
void expect_same(const ScaledSum<T>& a, const ScaledSum<T>& b) {
  EXPECT_EQ(a.value, b.value);
  EXPECT_EQ(a.shift, b.shift);
}

TYPED_TEST(Monoid, IdentityOnBothSides) {
  Random random(test_support::seed());
  const ScaledSum<TypeParam> identity;
  expect_same(identity + identity, identity);
  for (int n = 0; n < 1000; ++n) {
    const auto x = this->random_sum(random);
    expect_same(x + identity, x);
    expect_same(identity + x, x);
  }
}

TYPED_TEST(Monoid, AssociativityIsExact) {
  Random random(test_support::seed() + 1);
  for (int n = 0; n < 10000; ++n) {
    const auto a = this->random_sum(random), b = this->random_sum(random),
               c = this->random_sum(random);
    expect_same((a + b) + c, a + (b + c));
  }
}

TYPED_TEST(Monoid, CombiningIsAddingAtTheLargerShift) {
  Random random(test_support::seed() + 2);
  for (int n = 0; n < 10000; ++n) {
    const auto a = this->random_sum(random), b = this->random_sum(random);
    const auto both = a + b;
    EXPECT_EQ(both.shift, std::max(a.shift, b.shift));
    EXPECT_EQ(this->number(both), this->number(a) + this->number(b));
  }
}

// Any split of a set of keys: states of the parts combine to the state of the whole.
TYPED_TEST(Monoid, CombinedPartsAreTheUnion) {
  Random random(test_support::seed() + 3);
  std::vector<ScaledSum<TypeParam>> keys(24);
  for (auto& key : keys) key = this->random_sum(random);
  ScaledSum<TypeParam> whole;
  for (const auto& key : keys) whole += key;
  for (std::size_t split = 0; split <= keys.size(); ++split) {
    ScaledSum<TypeParam> left, right;
    for (std::size_t n = 0; n < keys.size(); ++n) (n < split ? left : right) += keys[n];
    expect_same(left + right, whole);
  }
}

// Far apart, the smaller part vanishes and does no harm.
TYPED_TEST(Monoid, FarApart) {
  const ScaledSum<TypeParam> low{TypeParam(3), -(1 << 20)}, high{TypeParam(5), 1 << 20};
  expect_same(low + high, high);
  expect_same(high + low, high);
}

TEST(ShiftMonoid, IsTheMaximum) {
  const ShiftMaximum identity;
  EXPECT_EQ(identity.value, no_shift);
  for (const int a : {-(1 << 20), -3, 0, 7, 1 << 20}) {
    EXPECT_EQ((ShiftMaximum{a} + identity).value, a);
    EXPECT_EQ((identity + ShiftMaximum{a}).value, a);
    for (const int b : {-8, 0, 9})
      EXPECT_EQ((ShiftMaximum{a} + ShiftMaximum{b}).value, std::max(a, b));
  }
}

TEST(ShiftMonoid, EveryExponentIsAboveNoShift) {
  for (const double x : {-1e300, 0.0, 1e300}) {
    EXPECT_GT(ExponentialMap{1.0}.bind<double>(0).exponent(x), no_shift);
  }
}

// Kokkos starts its scans from these.
TEST(ScanIdentities, AreTheIdentitiesOfTheMonoids) {
  EXPECT_EQ(Kokkos::reduction_identity<ScaledSum<double>>::sum().value, 0.0);
  EXPECT_EQ(Kokkos::reduction_identity<ScaledSum<double>>::sum().shift, no_shift);
  EXPECT_EQ(Kokkos::reduction_identity<ScaledSum<float>>::sum().shift, no_shift);
  EXPECT_EQ(Kokkos::reduction_identity<ShiftMaximum>::sum().value, no_shift);
}

}  // namespace
