// SPDX-License-Identifier: BSD-3-Clause
// The noise of the dropout substitute.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numbers>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using Words = std::array<std::uint32_t, 4>;

TEST(ReferenceNoise, KnownAnswersOfTheGenerator) {
  // From the Random123 distribution.
  EXPECT_EQ(reference::philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  constexpr std::uint32_t ones = 0xffffffffu;
  EXPECT_EQ(reference::philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(reference::philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
                                  {0xa4093822u, 0x299f31d0u}),
            (Words{0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u}));
}

TEST(ReferenceNoise, PlaceOfSeedOffsetAndElement) {
  // All six words differ from 0 and from each other.
  constexpr std::uint64_t seed = 0x299f31d0a4093822u, offset = 0x0370734413198a2eu,
                          block = 0x05a308d3243f6a88u;
  const auto words = reference::philox4x32({0x243f6a88u, 0x05a308d3u, 0x13198a2eu, 0x03707344u},
                                           {0xa4093822u, 0x299f31d0u});
  const auto u = [&](std::size_t n) {
    return (static_cast<long double>(words[n]) + 0.5L) / 4294967296.0L;
  };
  const auto radius = [&](std::size_t n) { return std::sqrt(-2 * std::log(u(n))); };
  const auto angle = [&](std::size_t n) { return 2 * std::numbers::pi_v<long double> * u(n); };
  const long double expected[] = {radius(0) * std::cos(angle(1)), radius(0) * std::sin(angle(1)),
                                  radius(2) * std::cos(angle(3)), radius(2) * std::sin(angle(3))};
  for (std::uint64_t n = 0; n < 4; ++n) {
    EXPECT_TRUE(near(reference::standard_normal<long double>(seed, offset, 4 * block + n),
                     expected[n], 1e-17L));
    EXPECT_TRUE(
        near(reference::standard_normal<double>(seed, offset, 4 * block + n), expected[n], 4e-15L));
  }
}

TEST(ReferenceNoise, Moments) {
  constexpr std::uint64_t count = 1u << 18;
  const double n = static_cast<double>(count);
  double mean = 0, square = 0, cube = 0, fourth = 0, lag = 0, far = 0, other = 0, largest = 0;
  const auto normal = [](std::uint64_t e, std::uint64_t offset) {
    return reference::standard_normal<double>(2024, offset, e);
  };
  double previous = normal(count, 0), before = previous;
  for (std::uint64_t e = 0; e < count; ++e) {
    const double x = normal(e, 0);
    mean += x / n, square += x * x / n, cube += x * x * x / n, fourth += x * x * x * x / n;
    lag += x * previous / n, far += x * before / n;
    other += x * normal(e, 1) / n;
    largest = std::max(largest, std::abs(x));
    before = previous, previous = x;
  }
  // Four standard deviations of each estimate.
  const double deviation = 4 / std::sqrt(n);
  EXPECT_NEAR(mean, 0, deviation);
  EXPECT_NEAR(square, 1, std::sqrt(2.0) * deviation);
  EXPECT_NEAR(cube, 0, std::sqrt(15.0) * deviation);
  EXPECT_NEAR(fourth, 3, std::sqrt(96.0) * deviation);
  EXPECT_NEAR(lag, 0, deviation);
  EXPECT_NEAR(far, 0, deviation);
  EXPECT_NEAR(other, 0, deviation);
  EXPECT_GT(largest, 4);
  EXPECT_LT(largest, 6.8);
}

TEST(ReferenceNoise, MultipliesTheOutputAndTheCotangent) {
  using Real = double;
  const Problem problem{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 3, .nk = 5, .d = 6, .dv = 7};
  for (const auto kernel : all_kernels)
    for (const bool normalise : {false, true}) {
      const auto c = random_case<Real>(problem, {.kernel = kernel, .normalise = normalise}, 401);
      SCOPED_TRACE(describe(c.problem, c.settings));
      auto noisy = c;
      noisy.settings.seed = 9;
      noisy.settings.offset = 4;
      EXPECT_TRUE(same(noisy.forward(), c.forward()));
      noisy.settings.dropout_p = 0.3;
      auto o = c.forward();
      auto plain = c;
      std::size_t e = 0;
      for (std::uint64_t b = 0; b < 2; ++b)
        for (std::uint64_t h = 0; h < 4; ++h)
          for (std::uint64_t i = 0; i < 3; ++i)
            for (std::uint64_t j = 0; j < 7; ++j, ++e) {
              const Real factor =
                  1 + 0.3 * reference::standard_normal<Real>(9, 4, ((b * 4 + h) * 3 + i) * 7 + j);
              o[e] *= factor;
              plain.d_o[e] *= factor;
            }
      EXPECT_TRUE(same(noisy.forward(), o));
      const auto gradient = noisy.backward(), expected = plain.backward();
      EXPECT_TRUE(same(gradient.q, expected.q));
      EXPECT_TRUE(same(gradient.k, expected.k));
      EXPECT_TRUE(same(gradient.v, expected.v));
      EXPECT_TRUE(same(gradient.alpha, expected.alpha));
      EXPECT_TRUE(same(gradient.beta, expected.beta));
      EXPECT_TRUE(same(gradient.constant, expected.constant));
      noisy.settings.offset = 5;
      EXPECT_FALSE(same(noisy.forward(), o));
    }
}

}  // namespace
