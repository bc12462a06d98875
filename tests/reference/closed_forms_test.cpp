// SPDX-License-Identifier: BSD-3-Clause
// The reference against values worked out by hand.

#include <gtest/gtest.h>

#include <cmath>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;

template <class Real>
class ReferenceClosedForms : public ::testing::Test {};
using Reals = ::testing::Types<double, long double>;
TYPED_TEST_SUITE(ReferenceClosedForms, Reals);

/// One query, one head.
template <class Real>
Case<Real> one_query(reference::Settings settings, std::vector<Real> q, std::vector<Real> k,
                     std::vector<Real> v) {
  const auto d = static_cast<std::int64_t>(q.size());
  const auto nk = static_cast<std::int64_t>(k.size()) / d;
  return {{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = nk, .d = d, .dv = 1},
          settings,
          {std::move(q), std::move(k), std::move(v)},
          {1}};
}

TYPED_TEST(ReferenceClosedForms, WeightIsADotProduct) {
  std::vector<TypeParam> x(10);
  for (int n = 0; n < 10; ++n) x[static_cast<std::size_t>(n)] = n;
  auto c = one_query<TypeParam>({.normalise = false}, x, x, {1});
  EXPECT_TRUE(same(c.forward(), {285}));
  c.settings.normalise = true;
  EXPECT_TRUE(same(c.forward(), {1}));
}

TYPED_TEST(ReferenceClosedForms, Identity) {
  // w = (4, 10), scaled by -2.
  const auto c =
      one_query<TypeParam>({.normalise = false, .scale = -2}, {1, 2}, {2, 1, 4, 3}, {3, 5});
  EXPECT_TRUE(same(c.forward(), {-124}));
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, {-52, -36}));
  EXPECT_TRUE(same(gradient.k, {-6, -12, -10, -20}));
  EXPECT_TRUE(same(gradient.v, {-8, -20}));
}

TYPED_TEST(ReferenceClosedForms, Elu) {
  // phi(q) = 2, phi(k) = (1, 3), w = (2, 6), s = 8, o = 4, dw = (-3/8, 1/8).
  const auto c = one_query<TypeParam>({.kernel = Kernel::elu}, {1}, {0, 2}, {1, 5});
  EXPECT_TRUE(same(c.forward(), {4}));
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, {0}));
  EXPECT_TRUE(same(gradient.k, {-0.75L, 0.25L}));
  EXPECT_TRUE(same(gradient.v, {0.25L, 0.75L}));

  // Below 0 the feature is its own slope: phi(-1) = 1/e, w = (2, 2/e) against slopes (2, 2/e).
  const auto negative =
      one_query<TypeParam>({.kernel = Kernel::elu, .normalise = false}, {1}, {0, -1}, {1, 5});
  const TypeParam inverse_e = std::exp(TypeParam(-1));
  const TypeParam unit = roundoff<TypeParam>;
  EXPECT_TRUE(near(negative.forward()[0], 2 + 10 * inverse_e, 16 * unit));
  EXPECT_TRUE(same(row_range(negative.backward().k, 0, 1, 1), {2}));
  EXPECT_TRUE(near(negative.backward().k[1], 10 * inverse_e, 16 * unit));
}

TYPED_TEST(ReferenceClosedForms, Relu) {
  // phi(q) = (2, 0), phi(k) = (1, 3), (3, 0): w = (2, 6), dw as for elu; no slope at or below 0.
  const auto c = one_query<TypeParam>({.kernel = Kernel::relu}, {2, -1}, {1, 3, 3, 0}, {1, 5});
  EXPECT_TRUE(same(c.forward(), {4}));
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, {0, 0}));
  EXPECT_TRUE(same(gradient.k, {-0.75L, 0, 0.25L, 0}));
  EXPECT_TRUE(same(gradient.v, {0.25L, 0.75L}));
  // With phi(q) = (2, 1) both features meet: w = (5, 6), and k_11 = 0 keeps its slope 0.
  const auto open = one_query<TypeParam>({.kernel = Kernel::relu, .normalise = false}, {2, 1},
                                         {1, 3, 3, 0}, {1, 5});
  EXPECT_TRUE(same(open.forward(), {35}));
  EXPECT_TRUE(same(open.backward().q, {16, 3}));
  EXPECT_TRUE(same(open.backward().k, {2, 1, 10, 0}));
}

TYPED_TEST(ReferenceClosedForms, Quadratic) {
  // phi(q) = (4, 1), phi(k) = (1, 4) twice: w = (8, 8), s = 16,
  // o = 3, dw = (-2, 2)/16.
  const auto c =
      one_query<TypeParam>({.kernel = Kernel::quadratic}, {2, -1}, {1, -2, -1, 2}, {1, 5});
  EXPECT_TRUE(same(c.forward(), {3}));
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, {0, 0}));
  EXPECT_TRUE(same(gradient.k, {-1, 0.5L, -1, 0.5L}));
  EXPECT_TRUE(same(gradient.v, {0.5L, 0.5L}));
}

TYPED_TEST(ReferenceClosedForms, Lln) {
  // w = (1, 3) exp(alpha q): o = 4, A (v - o) = (-3/4, 3/4).
  using Real = TypeParam;
  const Real log3 = std::log(Real(3));
  const auto c = one_query<Real>({.kernel = Kernel::lln, .alpha = {2}, .beta = {0.5}}, {7},
                                 {0, 2 * log3}, {1, 5});
  const Real unit = roundoff<Real>;
  EXPECT_TRUE(near(c.forward()[0], 4, 16 * unit));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], 0, 16 * unit));
  EXPECT_TRUE(near(gradient.k[0], -0.375, 16 * unit));
  EXPECT_TRUE(near(gradient.k[1], 0.375, 16 * unit));
  EXPECT_TRUE(near(gradient.v[0], 0.25, 16 * unit));
  EXPECT_TRUE(near(gradient.v[1], 0.75, 16 * unit));
  EXPECT_TRUE(near(gradient.alpha[0], 0, 64 * unit));
  EXPECT_TRUE(near(gradient.beta[0], 1.5 * log3, 32 * unit));
}

TYPED_TEST(ReferenceClosedForms, LlnSumsOverFeatures) {
  // w_j = e^(q_0 + k_j0) + e^(q_1 + k_j1) with q = (0, log 2): w_0 = 1 + 2 * 3, w_1 = 5 + 2 * 1.
  using Real = TypeParam;
  const Real log2 = std::log(Real(2)), log3 = std::log(Real(3)), log5 = std::log(Real(5));
  const auto c = one_query<Real>({.kernel = Kernel::lln, .alpha = {1}, .beta = {1}}, {0, log2},
                                 {0, log3, log5, 0}, {1, 3});
  const Real unit = roundoff<Real>;
  EXPECT_TRUE(near(c.forward()[0], 2, 16 * unit));
  // dw = (-1, 1)/14 in units where s = 14.
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], Real(4) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.q[1], Real(-4) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.k[0], Real(-1) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.k[1], Real(-6) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.k[2], Real(5) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.k[3], Real(2) / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.alpha[0], -log2 * 4 / 14, 16 * unit));
  EXPECT_TRUE(near(gradient.beta[0], (5 * log5 - 6 * log3) / 14, 32 * unit));
}

TYPED_TEST(ReferenceClosedForms, LlnDoesNotOverflow) {
  // Exponents far beyond the range of exp; only their difference 1 counts, the third key is
  // negligible.
  using Real = TypeParam;
  const auto c = one_query<Real>({.kernel = Kernel::lln, .alpha = {1000}, .beta = {1}}, {40},
                                 {30001, 30000, -30000}, {2, 6, 100});
  const Real w = std::exp(Real(-1)), unit = roundoff<Real>;
  const Real o = (2 + 6 * w) / (1 + w);
  EXPECT_TRUE(near(c.forward()[0], o, 16 * unit));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.k[0], (2 - o) / (1 + w), 64 * unit));
  EXPECT_TRUE(near(gradient.k[1], (6 - o) * w / (1 + w), 64 * unit));
  EXPECT_EQ(gradient.k[2], 0);
  EXPECT_EQ(gradient.v[2], 0);
}

TYPED_TEST(ReferenceClosedForms, LlnSurvivesAKeyChannelThatQueriesAvoid) {
  // Channel 0: key 50, query -60. Channel 1 decides: w_0 = e^-10 + e^1, w_1 = e^-10 + e^2.
  using Real = TypeParam;
  const auto c = one_query<Real>({.kernel = Kernel::lln, .alpha = {1}, .beta = {1}}, {-60, 0},
                                 {50, 1, 50, 2}, {1, -1});
  const Real rest = std::exp(Real(-10)), w0 = rest + std::exp(Real(1)),
             w1 = rest + std::exp(Real(2));
  EXPECT_TRUE(near(c.forward()[0], (w0 - w1) / (w0 + w1), 16 * roundoff<Real>));
}

TYPED_TEST(ReferenceClosedForms, LargeFeaturesGiveTheRunningMean) {
  using Real = TypeParam;
  for (const float size : {1e18F, 1e19F}) {
    Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 64, .nk = 64, .d = 4, .dv = 3};
    auto c = random_case<Real>(problem, {.causal = true}, 11);
    for (auto* x : {&c.tensors.q, &c.tensors.k})
      for (auto& element : *x) element = size;
    const auto o = c.forward();
    for (std::size_t column = 0; column < 3; ++column) {
      Real sum = 0, absolute = 0;
      for (std::size_t i = 0; i < 64; ++i) {
        sum += c.tensors.v[i * 3 + column];
        absolute += std::abs(c.tensors.v[i * 3 + column]);
        const Real count = static_cast<Real>(i + 1);
        EXPECT_TRUE(near(o[i * 3 + column], sum / count, 70 * roundoff<Real> * absolute / count));
      }
    }
    for (const Real x : c.backward().k) EXPECT_TRUE(std::isfinite(x));
  }
}

TYPED_TEST(ReferenceClosedForms, ConstantValuesComeBackAndLeaveNoGradientOfWeights) {
  using Real = TypeParam;
  for (const auto kernel : all_kernels)
    for (const bool causal : {false, true}) {
      Problem problem{.batch = 2, .heads = 6, .kv_heads = 3, .nq = 5, .nk = 9, .d = 7, .dv = 4};
      auto c = random_case<Real>(problem, {.kernel = kernel, .causal = causal}, 21);
      SCOPED_TRACE(describe(problem, c.settings));
      keep_alive(c);
      for (std::size_t n = 0; n < c.tensors.v.size(); ++n)
        c.tensors.v[n] = static_cast<Real>(n % 4) - Real(1.3L);
      const auto o = c.forward();
      for (std::size_t n = 0; n < o.size(); ++n)
        EXPECT_TRUE(near(o[n], static_cast<Real>(n % 4) - Real(1.3L), 8 * roundoff<Real>));
      const auto gradient = c.backward();
      const auto magnitude = c.magnitudes();
      const auto zero = [](const auto& x) { return std::vector<Real>(x.size()); };
      EXPECT_TRUE(within(gradient.q, zero(gradient.q), magnitude.q, roundoff<Real>, 8));
      EXPECT_TRUE(within(gradient.k, zero(gradient.k), magnitude.k, roundoff<Real>, 8));
      EXPECT_TRUE(within(gradient.alpha, zero(gradient.alpha), magnitude.alpha, roundoff<Real>, 8));
      EXPECT_TRUE(within(gradient.beta, zero(gradient.beta), magnitude.beta, roundoff<Real>, 8));
      EXPECT_FALSE(all_zero(gradient.v));
    }
}

TYPED_TEST(ReferenceClosedForms, LlnGradientsSumToZero) {
  // Adding a number to a row of q, or to all of k, changes no output.
  using Real = TypeParam;
  Problem problem{.batch = 1, .heads = 2, .kv_heads = 1, .nq = 6, .nk = 9, .d = 5, .dv = 3};
  for (const bool causal : {false, true}) {
    const auto c = random_case<Real>(problem, {.kernel = Kernel::lln, .causal = causal}, 31);
    const auto gradient = c.backward();
    const auto magnitude = c.magnitudes();
    Real whole = 0, whole_size = 0;
    for (std::size_t n = 0; n < gradient.k.size(); ++n)
      whole += gradient.k[n], whole_size += magnitude.k[n];
    EXPECT_LE(std::abs(whole), 16 * roundoff<Real> * whole_size);
    for (std::size_t row = 0; row < 12; ++row) {
      Real sum = 0, size = 0;
      for (std::size_t n = row * 5; n < row * 5 + 5; ++n)
        sum += gradient.q[n], size += magnitude.q[n];
      EXPECT_LE(std::abs(sum), 16 * roundoff<Real> * size);
    }
    EXPECT_FALSE(all_zero(gradient.q));
  }
}

TYPED_TEST(ReferenceClosedForms, ScaleMattersWithoutNormaliserOnly) {
  using Real = TypeParam;
  for (const auto kernel : all_kernels) {
    Problem problem{.batch = 1, .heads = 4, .kv_heads = 2, .nq = 3, .nk = 5, .d = 6, .dv = 7};
    auto c = random_case<Real>(problem, {.kernel = kernel}, 41);
    SCOPED_TRACE(describe(problem, c.settings));
    const auto o = c.forward();
    const auto gradient = c.backward();
    c.settings.scale = -2;
    EXPECT_TRUE(same(c.forward(), o));
    EXPECT_TRUE(same(c.backward().k, gradient.k));
    EXPECT_TRUE(same(c.backward().v, gradient.v));

    c.settings.normalise = false;
    c.settings.scale = 1;
    const auto plain_o = c.forward();
    const auto plain = c.backward();
    EXPECT_FALSE(same(plain_o, o));
    for (const Real scale : {Real(-2), Real(0.125L), Real(0.1)}) {
      c.settings.scale = static_cast<double>(scale);
      const auto times = [&](std::vector<Real> x) {
        for (Real& element : x) element *= scale;
        return x;
      };
      const auto magnitude = c.magnitudes();
      const double count = scale == Real(0.1) ? 8 : 0;  // powers of two scale without rounding
      const auto scaled = c.backward();
      EXPECT_TRUE(within(c.forward(), times(plain_o), magnitude.o, roundoff<Real>, count));
      EXPECT_TRUE(within(scaled.q, times(plain.q), magnitude.q, roundoff<Real>, count));
      EXPECT_TRUE(within(scaled.k, times(plain.k), magnitude.k, roundoff<Real>, count));
      EXPECT_TRUE(within(scaled.v, times(plain.v), magnitude.v, roundoff<Real>, count));
      EXPECT_TRUE(within(scaled.alpha, times(plain.alpha), magnitude.alpha, roundoff<Real>, count));
      EXPECT_TRUE(within(scaled.beta, times(plain.beta), magnitude.beta, roundoff<Real>, count));
    }
  }
}

}  // namespace
