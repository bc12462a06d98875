// SPDX-License-Identifier: BSD-3-Clause
// The kernels that linear attention is compared with: values worked out by hand, what must not
// change, what they approximate, and refusals.

#include <gtest/gtest.h>

#include <limits>
#include <linattn/reference/analysis.hpp>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using Real = double;

constexpr Real unit = roundoff<Real>;
constexpr Real infinity = std::numeric_limits<Real>::infinity();

/// One query of one head, Dv = 1.
Case<Real> one_query(const reference::Settings& settings, std::vector<Real> q, std::vector<Real> k,
                     std::vector<Real> v) {
  const auto d = static_cast<std::int64_t>(q.size()), nk = static_cast<std::int64_t>(v.size());
  return {{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = nk, .d = d, .dv = 1},
          settings,
          {std::move(q), std::move(k), std::move(v)},
          {1}};
}

std::vector<Real> log_sums(const Case<Real>& c) {
  return reference::log_sums(c.problem, c.settings, c.tensors);
}

constexpr Problem grouped{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 7, .nk = 9, .d = 4, .dv = 3};

TEST(ReferenceSoftmax, ByHand) {
  // Scores ln 1, ln 3: A = (1/4, 3/4), o = 25; dx = A (v - 25) = (-15/4, 15/4).
  const Real log3 = std::log(Real(3));
  auto c = one_query({.kernel = Kernel::softmax, .score_scale = 0.5}, {2}, {0, log3}, {10, 30});
  EXPECT_TRUE(near(c.forward()[0], 25, 64 * unit));
  EXPECT_TRUE(near(log_sums(c)[0], std::log(Real(4)), 4 * unit));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], 3.75 * log3 / 2, 32 * unit));
  EXPECT_TRUE(near(gradient.k[0], -3.75, 32 * unit));
  EXPECT_TRUE(near(gradient.k[1], 3.75, 32 * unit));
  EXPECT_TRUE(near(gradient.v[0], 0.25, 4 * unit));
  EXPECT_TRUE(near(gradient.v[1], 0.75, 4 * unit));
  EXPECT_TRUE(gradient.alpha.empty());
  EXPECT_TRUE(gradient.score_scale.empty());
  // Without normaliser the weights are 1 and 3.
  c.settings.normalise = false;
  EXPECT_TRUE(near(c.forward()[0], 100, 128 * unit));
  EXPECT_TRUE(near(c.backward().k[1], 90, 128 * unit));
}

TEST(ReferenceSoftmax, LargeScoresDoNotOverflow) {
  // Scores 30000, 29999 and -30000: only the difference 1 counts.
  const auto c = one_query({.kernel = Kernel::softmax}, {1000}, {30, 29.999, -30}, {2, 6, 100});
  const Real x = std::fma(Real(1000), Real(29.999), Real(-30000));
  const Real w = std::exp(x), o = (2 + 6 * w) / (1 + w);
  EXPECT_TRUE(near(c.forward()[0], o, 16 * unit));
  EXPECT_TRUE(near(log_sums(c)[0], 30000 + std::log1p(w), 2 * unit * 30000));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.k[1], 1000 * (6 - o) * w / (1 + w), 1e5 * unit));
  EXPECT_EQ(gradient.k[2], 0);
  EXPECT_EQ(gradient.v[2], 0);
}

TEST(ReferenceSoftmax, LogSumsOfRowsAndWhatTheyAreMadeOf) {
  for (const bool causal : {false, true}) {
    reference::Settings settings{.kernel = Kernel::softmax, .causal = causal};
    settings.key_mask.assign(18, 1);
    for (const std::size_t j : {0u, 1u, 2u, 5u, 9u, 17u}) settings.key_mask[j] = 0;
    const auto c = random_case<Real>(grouped, settings, 601);
    auto plain = c;
    plain.settings.normalise = false;
    std::fill(plain.tensors.v.begin(), plain.tensors.v.end(), 1);
    const auto sums = plain.forward(), logs = log_sums(c);
    const auto size = reference::log_sum_magnitudes(c.problem, c.settings, c.tensors);
    ASSERT_EQ(logs.size(), 56u);
    for (std::size_t row = 0; row < logs.size(); ++row) {
      // Causal, the first query of the first entry sees the hidden keys 0, 1 and 2 only.
      const bool empty = causal && row % 7 == 0 && row < 28;
      EXPECT_EQ(logs[row] == -infinity, empty) << row;
      EXPECT_EQ(size[row] == 0, empty) << row;
      if (empty) continue;
      EXPECT_TRUE(near(logs[row], std::log(sums[row * 3]), 8 * unit * size[row])) << row;
    }
  }
}

TEST(ReferenceSoftmax, IsOneBlockOfAllKeys) {
  // The softmax of blocks is computed by a walk of its own; 1/sqrt(4) is exact.
  for (const bool causal : {false, true}) {
    Problem problem = grouped;
    if (!causal) problem.nq = problem.nk;
    auto c = random_case<Real>(problem, {.kernel = Kernel::softmax, .causal = causal}, 611);
    c.settings.score_scale = 0.5;
    auto blocks = c;
    blocks.settings.kernel = Kernel::lln_diag;
    blocks.settings.block = 9;
    blocks.settings.combine = reference::Combine::scale;
    blocks.settings.alpha.assign(4, 1);
    blocks.settings.beta.assign(2, 1);
    blocks.settings.diag_r.assign(12, 0);
    blocks.settings.diag_p.assign(12, 1);
    EXPECT_TRUE(same(c.forward(), blocks.forward()));
    const auto gradient = c.backward(), of_blocks = blocks.backward();
    const auto size = c.magnitudes();
    EXPECT_TRUE(within(gradient.q, of_blocks.q, size.q, unit, 4));
    EXPECT_TRUE(within(gradient.k, of_blocks.k, size.k, unit, 4));
    EXPECT_TRUE(within(gradient.v, of_blocks.v, size.v, unit, 4));
    // And so are their bounds, but for the rounding of p g.
    const auto size_of_blocks = blocks.magnitudes();
    for (std::size_t n = 0; n < size.k.size(); ++n) {
      EXPECT_LE(size.k[n], size_of_blocks.k[n]) << n;
      EXPECT_GE(size.k[n], 0.6 * size_of_blocks.k[n]) << n;
    }

    const auto matrices = reference::attention_matrices(c.problem, c.settings, c.tensors);
    const auto expected = reference::softmax_matrices(c.problem, c.settings, c.tensors);
    ASSERT_EQ(matrices.size(), 8u);
    for (std::size_t n = 0; n < 8; ++n) {
      EXPECT_TRUE(same(matrices[n].values, expected[n].values));
      EXPECT_EQ(matrices[n].visible, expected[n].visible);
    }
  }
}

TEST(ReferenceSoftmax, CommonShiftOfKeysIsNoMatter) {
  // It adds q_i . shift to all scores of a row.
  const auto c = random_case<Real>(grouped, {.kernel = Kernel::softmax, .causal = true}, 621);
  auto shifted = c;
  for (std::size_t n = 0; n < c.tensors.k.size(); ++n)
    shifted.tensors.k[n] += 0.75 - static_cast<Real>(n % 4);
  const auto size = shifted.magnitudes();
  EXPECT_TRUE(within(shifted.forward(), c.forward(), size.o, unit, 8));
  EXPECT_TRUE(within(shifted.backward().q, c.backward().q, size.q, unit, 8));
  EXPECT_FALSE(within(log_sums(shifted), log_sums(c),
                      reference::log_sum_magnitudes(c.problem, c.settings, c.tensors), unit, 1e6));
}

TEST(ReferenceTaylor, ByHand) {
  // x = (1, -1): w = (5/2, 1/2), s = 3, o = 4, dw = (-1/3, 5/3), dw/dx = (2, 0).
  auto c = one_query({.kernel = Kernel::taylor, .score_scale = 0.5}, {2}, {1, -1}, {3, 9});
  EXPECT_TRUE(same(c.forward(), {4}));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], -1 / Real(3), 4 * unit));
  EXPECT_TRUE(near(gradient.k[0], -2 / Real(3), 4 * unit));
  EXPECT_EQ(gradient.k[1], 0);
  EXPECT_TRUE(near(gradient.v[0], 2.5 / 3, 4 * unit));
  c.settings.normalise = false;
  c.settings.scale = -2;
  EXPECT_TRUE(same(c.forward(), {-24}));
  EXPECT_TRUE(same(c.backward().k, {-12, 0}));
  EXPECT_TRUE(same(c.backward().v, {-5, -1}));
}

TEST(ReferenceTaylor, IsExactAttentionToThirdOrder) {
  // |e^x - w| <= |x|^3 e^|x| / 6 and w >= 1/2, so that a weight is off by at most 2 of that, and
  // the output, a mean, by twice as much of the largest value.
  for (const Real scale : {0.25, 0.0625, 0.015625}) {
    auto c = random_case<Real>(grouped, {.kernel = Kernel::taylor}, 631);
    c.settings.score_scale = scale;
    auto exact = c;
    exact.settings.kernel = Kernel::softmax;
    Real score = 0, value = 0;
    for (const auto& matrix : {c.tensors.q, c.tensors.k}) {
      Real largest = 0;
      for (std::size_t row = 0; row < matrix.size(); row += 4) {
        Real squares = 0;
        for (std::size_t n = row; n < row + 4; ++n) squares += matrix[n] * matrix[n];
        largest = std::max(largest, std::sqrt(squares));
      }
      score = score == 0 ? largest : score * largest * scale;
    }
    for (const Real v : c.tensors.v) value = std::max(value, std::abs(v));
    const Real weight = score * score * score * std::exp(score) / 3;
    const auto o = c.forward(), expected = exact.forward();
    Real worst = 0;
    for (std::size_t n = 0; n < o.size(); ++n)
      worst = std::max(worst, std::abs(o[n] - expected[n]));
    EXPECT_LE(worst, 2 * weight * value) << scale;
    EXPECT_GE(worst, 1e-4 * weight * value) << scale;
  }
}

TEST(ReferenceTaylor, WeightsNeverVanish) {
  // x = -1 has the least weight, 1/2.
  auto c = one_query({.kernel = Kernel::taylor, .normalise = false}, {1}, {-1}, {1});
  EXPECT_TRUE(same(c.forward(), {0.5}));
  EXPECT_TRUE(same(c.backward().q, {0}));
  for (const Real k : {-2.0, -1.25, -0.875, 0.0}) {
    c.tensors.k = {k};
    EXPECT_GT(c.forward()[0], 0.5);
  }
}

TEST(ReferenceCosine, ByHand) {
  // q = (3, 4) has the norm 5; cos = (4/5, 3/5).
  auto c = one_query({.kernel = Kernel::cosine, .normalise = false, .norm_eps = 0}, {3, 4},
                     {0, 2, 5, 0}, {10, -5});
  EXPECT_TRUE(near(c.forward()[0], 5, 16 * unit));
  // dq = sum v (khat - qhat cos) / |q|: (10 (-12, 9) - 5 (16, -12)) / 125.
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], -1.6, 32 * unit));
  EXPECT_TRUE(near(gradient.q[1], 1.2, 32 * unit));
  // dk_0 = 10 (qhat - khat 4/5) / 2 = (3, 0).
  EXPECT_TRUE(near(gradient.k[0], 3, 32 * unit));
  EXPECT_TRUE(near(gradient.k[1], 0, 32 * unit));
  EXPECT_TRUE(near(gradient.v[0], 0.8, 4 * unit));
  // The norm has eps inside the root: 25 + 11 = 36.
  c.settings.norm_eps = 11;
  c.tensors.v = {1, 0};
  EXPECT_TRUE(near(c.forward()[0], (4.0 / 6) * (2 / std::sqrt(15.0)), 4 * unit));
}

TEST(ReferenceCosine, LengthsOfRowsAreNoMatter) {
  auto c = random_case<Real>(
      grouped, {.kernel = Kernel::cosine, .normalise = false, .scale = 0.75, .norm_eps = 0}, 641);
  auto longer = c;
  for (std::size_t n = 0; n < c.tensors.q.size(); ++n) longer.tensors.q[n] *= n / 4 % 2 ? 4 : 0.5;
  for (Real& x : longer.tensors.k) x *= 8;
  EXPECT_TRUE(same(longer.forward(), c.forward()));
  auto dk = longer.backward().k;
  for (Real& x : dk) x *= 8;
  EXPECT_TRUE(same(dk, c.backward().k));
  // A row of zeros has no direction and no weight.
  for (std::size_t n = 0; n < 4; ++n) c.tensors.q[n] = 0;
  EXPECT_TRUE(all_zero(row_range(c.forward(), 0, 1, 3)));
}

TEST(ReferenceCosine, IsAffineWithoutConstant) {
  for (const bool normalise : {false, true}) {
    const auto c = random_case<Real>(
        grouped, {.kernel = Kernel::cosine, .causal = true, .normalise = normalise}, 651);
    auto affine = c;
    affine.settings.kernel = Kernel::affine;
    affine.settings.alpha.assign(4, 1);
    affine.settings.constant.assign(4, 0);
    EXPECT_TRUE(same(c.forward(), affine.forward()));
    EXPECT_TRUE(same(c.backward().q, affine.backward().q));
    EXPECT_TRUE(same(c.backward().k, affine.backward().k));
    EXPECT_TRUE(same(c.magnitudes().q, affine.magnitudes().q));
  }
}

/// w_ij as it is written, in long double.
std::vector<long double> performer_weights(const Case<Real>& c) {
  const auto& p = c.problem;
  const auto d = static_cast<std::size_t>(p.d), features = c.settings.projection.size() / d;
  const long double root = std::pow(static_cast<long double>(d), 0.25L);
  std::vector<long double> weights;
  for (std::int64_t row = 0; row < p.batch * p.heads * p.nq; ++row)
    for (std::int64_t j = 0; j < p.nk; ++j) {
      const Real* q = c.tensors.q.data() + row * p.d;
      const Real* k = c.tensors.k.data() + (row / p.nq / p.group() * p.nk + j) * p.d;
      long double weight = 0;
      for (std::size_t m = 0; m < features; ++m) {
        long double exponent = 0;
        for (std::size_t n = 0; n < d; ++n) {
          const long double x = q[n] / root, y = k[n] / root;
          exponent += c.settings.projection[m * d + n] * (x + y) - (x * x + y * y) / 2;
        }
        weight += std::exp(exponent);
      }
      weights.push_back(weight / static_cast<long double>(features));
    }
  return weights;
}

TEST(ReferencePerformer, IsTheMeanOverRandomFeatures) {
  for (const bool normalise : {false, true}) {
    const auto c = random_case<Real>(
        grouped, {.kernel = Kernel::performer, .normalise = normalise, .scale = -1.5}, 661);
    const auto weights = performer_weights(c);
    const auto o = c.forward();
    const auto size = c.magnitudes();
    const auto& p = c.problem;
    for (std::int64_t row = 0; row < p.batch * p.heads * p.nq; ++row)
      for (std::size_t n = 0; n < 3; ++n) {
        long double sum = 0, denominator = 0;
        for (std::int64_t j = 0; j < p.nk; ++j) {
          const long double w = weights[static_cast<std::size_t>(row * p.nk + j)];
          const auto key = static_cast<std::size_t>(row / p.nq / p.group() * p.nk + j);
          sum += w * c.tensors.v[key * 3 + n];
          denominator += w;
        }
        const auto e = static_cast<std::size_t>(row * 3) + n;
        EXPECT_TRUE(near(o[e], normalise ? sum / denominator : -1.5L * sum, 4 * unit * size.o[e]))
            << e;
      }
  }
}

TEST(ReferencePerformer, ByHand) {
  // D = 16, so that y = x / 2. One feature w = 2 e_0: l(x) = x_0 - |x|^2 / 8, dl = 1 - x_0 / 4.
  std::vector<Real> q(16), k(32), w(16);
  w[0] = 2;
  q[0] = 2;
  k[0] = 4;
  k[16] = 2;
  k[17] = 2;
  // l = 3/2, 2 and 1.
  auto c = one_query({.kernel = Kernel::performer, .normalise = false}, q, k, {1, 3});
  c.settings.projection = w;
  const Real w0 = std::exp(3.5), w1 = std::exp(2.5);
  EXPECT_TRUE(near(c.forward()[0], w0 + 3 * w1, 16 * unit * (w0 + 3 * w1)));
  auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], (w0 + 3 * w1) * 0.5, 32 * unit * w0));
  EXPECT_TRUE(near(gradient.k[0], 0, 32 * unit * w0));  // 1 - 4/4
  EXPECT_TRUE(near(gradient.k[16], 3 * w1 * 0.5, 32 * unit * w0));
  EXPECT_TRUE(near(gradient.k[17], 3 * w1 * -0.5, 32 * unit * w0));
  // With a second feature of 0 the weights are means, with e^(-|y|^2 / 2 ...) for it.
  c.settings.projection.resize(32);
  const Real z0 = std::exp(-0.5 - 2), z1 = std::exp(-0.5 - 1);
  EXPECT_TRUE(near(c.forward()[0], (w0 + z0 + 3 * (w1 + z1)) / 2, 32 * unit * w0));
  c.settings.normalise = true;
  EXPECT_TRUE(near(c.forward()[0], (w0 + z0 + 3 * (w1 + z1)) / (w0 + z0 + w1 + z1), 32 * unit));
  // One feature alone leaves e^l(k): the query is no matter.
  c.settings.projection = w;
  EXPECT_TRUE(near(c.forward()[0], (w0 + 3 * w1) / (w0 + w1), 16 * unit));
  gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], 0, 32 * unit));
}

TEST(ReferencePerformer, OrderAndNumberOfFeatures) {
  const auto c = random_case<Real>(grouped, {.kernel = Kernel::performer, .causal = true}, 671);
  auto other = c;
  // The rows of the projection backwards, and all twice.
  other.settings.projection.clear();
  for (std::int64_t m = 5; m >= 0; --m)
    for (int n = 0; n < 2; ++n)
      append(other.settings.projection, row_range(c.settings.projection, m, 1, 4));
  for (const bool normalise : {true, false}) {
    auto a = c, b = other;
    a.settings.normalise = b.settings.normalise = normalise;
    const auto size = a.magnitudes();
    EXPECT_TRUE(within(b.forward(), a.forward(), size.o, unit, 8));
    EXPECT_TRUE(within(b.backward().q, a.backward().q, size.q, unit, 8));
    EXPECT_TRUE(within(b.backward().k, a.backward().k, size.k, unit, 8));
  }
}

TEST(ReferencePerformer, LogitsFarFromZeroDoNotOverflow) {
  // D = 1, w = 100: l(x) = 100 x - x^2 / 2, at 60 and 59 beyond the range of exp.
  const auto c = [] {
    auto x = one_query({.kernel = Kernel::performer}, {50}, {60, 59}, {1, 2});
    x.settings.projection = {100};
    return x;
  }();
  const Real w = std::exp(-100 + (60 * 60 - 59 * 59) / 2.0);
  EXPECT_TRUE(near(c.forward()[0], (1 + 2 * w) / (1 + w), 16 * unit));
  for (const Real x : c.backward().k) EXPECT_TRUE(std::isfinite(x));
}

TEST(ReferenceComparedKernels, WithoutFeaturesWeightsAreOne) {
  for (const auto kernel : {Kernel::softmax, Kernel::taylor, Kernel::performer}) {
    Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 2, .nk = 3, .d = 0, .dv = 1},
                 {.kernel = kernel, .causal = true},
                 {{}, {}, {3, 5, 10}},
                 {1, 1}};
    EXPECT_TRUE(same(c.forward(), {4, 6}));
    EXPECT_TRUE(near(c.backward().v[2], 1 / Real(3), unit));
    EXPECT_TRUE(c.backward().q.empty());
    c.settings.normalise = false;
    EXPECT_TRUE(same(c.forward(), {8, 18}));
  }
}

TEST(ReferenceComparedKernels, MagnitudesByHand) {
  // x = (1, -1), X = 1: softmax has chi = 2 + ln 2 for numerator and denominator.
  auto c = one_query({.kernel = Kernel::softmax, .score_scale = 0.5}, {2}, {1, -1}, {3, 9});
  const Real a = 1 / (1 + std::exp(-2.0)), o = 3 * a + 9 * (1 - a);
  EXPECT_TRUE(near(c.magnitudes().o[0], (2 + std::log(2.0)) * 2 * o, 1e-13));
  EXPECT_TRUE(near(reference::log_sum_magnitudes(c.problem, c.settings, c.tensors)[0],
                   2 + std::log(2.0), 1e-14));
  // Taylor: E(w) = 5/2 for both of s = 3, kappa = 5/3, o = 4.
  c.settings.kernel = Kernel::taylor;
  EXPECT_TRUE(near(c.magnitudes().o[0], 2.5 * 12 / 3 + 4 * 5 / Real(3), 1e-13));
  // Weights only: |dw/dk| = (1 + X) s |q| = 2, times |g v| and its error.
  c.settings.normalise = false;
  EXPECT_TRUE(near(c.magnitudes().k[0], 2 * (3 + 3), 1e-13));
  EXPECT_TRUE(near(c.magnitudes().k[1], 2 * (9 + 9), 1e-13));
  EXPECT_TRUE(near(c.magnitudes().q[0], 6 + 18.0, 1e-13));
  // Performer with D = 1, w = 2: l = 2 x - x^2 / 2, L(2) = 6, L(-1) = 5/2; l = 2 and -5/2.
  c = one_query({.kernel = Kernel::performer, .normalise = false}, {2}, {-1}, {3});
  c.settings.projection = {2};
  const Real weight = std::exp(-0.5), chi = 1 + 6 + 2.5;
  EXPECT_TRUE(near(c.magnitudes().o[0], weight * chi * 3, 1e-13));
  // F = t (chi B(dw) + E(dw)), and E(dx) = F (|w| + |x|).
  EXPECT_TRUE(near(c.magnitudes().q[0], weight * 3 * (chi + 1) * (2 + 2), 1e-12));
  EXPECT_TRUE(near(c.magnitudes().k[0], weight * 3 * (chi + 1) * (2 + 1), 1e-12));
}

TEST(ReferenceComparedKernels, RoundingCountsByHand) {
  const Problem problem{
      .batch = 2, .heads = 6, .kv_heads = 3, .nq = 100, .nk = 200, .d = 8, .dv = 5};
  // p = 8 + 13 + 4 * 200 + 2 = 823, dx = 823 + 5 + 6 = 834.
  const auto softmax = reference::rounding_counts(problem, {.kernel = Kernel::softmax});
  EXPECT_EQ(softmax.o, 823);
  EXPECT_EQ(softmax.q, 834 + 200 + 3);
  EXPECT_EQ(softmax.k, 834 + 200 + 3);
  EXPECT_EQ(softmax.v, 823 + 200);
  EXPECT_EQ(softmax.alpha, 0);
  // 45 features: p = 2 * 4 + 2 + 200 + 45 = 255, dw = 3 * 255 + 3 + 5 + 1 + 5 = 779.
  const auto taylor = reference::rounding_counts(problem, {.kernel = Kernel::taylor});
  EXPECT_EQ(taylor.o, 2 * 255 + 1);
  EXPECT_EQ(taylor.q, 779 + 10 + 200 + 9 + 3);
  // f = 8/2 + 4: p = 18 + 200 + 8 = 226, dw = 692.
  const auto cosine = reference::rounding_counts(problem, {.kernel = Kernel::cosine});
  EXPECT_EQ(cosine.o, 2 * 226 + 1);
  EXPECT_EQ(cosine.k, 692 + 18 + 200 + (8 + 8 + 4));
  // M = 12, f = 9 + 8 + 7: p = 50 + 200 + 12 = 262, dw = 800.
  reference::Settings settings{.kernel = Kernel::performer};
  settings.projection.resize(96);
  const auto performer = reference::rounding_counts(problem, settings);
  EXPECT_EQ(performer.o, 2 * 262 + 1);
  EXPECT_EQ(performer.q, 800 + 50 + 200 + 12 + 6);
  EXPECT_EQ(reference::feature_roundings(problem, settings), 24);
  EXPECT_EQ(reference::feature_roundings(Kernel::taylor), 4);
  for (const auto kernel : {Kernel::softmax, Kernel::cosine, Kernel::performer})
    EXPECT_THROW((void)reference::feature_roundings(kernel), InvalidArgument);
}

void expect_refused(const Case<Real>& c, std::initializer_list<const char*> words) {
  try {
    (void)c.forward();
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    for (const char* word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is missing in: " << error.what();
  }
}

TEST(ReferenceComparedKernels, Refusals) {
  auto c = random_case<Real>(grouped, {.kernel = Kernel::performer}, 681);
  c.settings.projection.pop_back();
  expect_refused(c, {"projection", "23", "D = 4"});
  c.settings.projection.clear();
  expect_refused(c, {"projection", " 0 ", "D = 4"});
  c = random_case<Real>(grouped, {.kernel = Kernel::softmax}, 682);
  c.settings.projection = {1, 2, 3, 4};
  expect_refused(c, {"projection", "4", "softmax"});
  c.settings.projection.clear();
  c.settings.least_normaliser = 0.5;
  expect_refused(c, {"softmax", "least_normaliser"});
  c.settings.kernel = Kernel::performer;
  c.settings.projection = {1, 2, 3, 4};
  expect_refused(c, {"performer", "least_normaliser"});
  for (const auto kernel : {Kernel::softmax, Kernel::taylor, Kernel::cosine}) {
    c = random_case<Real>(grouped, {.kernel = kernel}, 683);
    c.settings.alpha.assign(4, 1);
    expect_refused(c, {"alpha", "4"});
  }
  EXPECT_THROW((void)log_sums(random_case<Real>(grouped, {.kernel = Kernel::lln}, 684)),
               InvalidArgument);
}

TEST(ReferenceComparedKernels, HiddenKeysMayHoldAnything) {
  constexpr Real poison = std::numeric_limits<Real>::quiet_NaN();
  for (const auto kernel : {Kernel::softmax, Kernel::taylor, Kernel::cosine, Kernel::performer})
    for (const bool causal : {false, true}) {
      reference::Settings settings{.kernel = kernel, .causal = causal};
      settings.key_mask.assign(18, 1);
      for (const std::size_t j : {0u, 4u, 8u, 9u, 17u}) settings.key_mask[j] = 0;
      const auto c = random_case<Real>(grouped, settings, 691);
      auto poisoned = c;
      for (std::size_t n = 0; n < c.tensors.k.size(); ++n)
        if (settings.key_mask[n / 4 / 18 * 9 + n / 4 % 9] == 0) poisoned.tensors.k[n] = poison;
      for (std::size_t n = 0; n < c.tensors.v.size(); ++n)
        if (settings.key_mask[n / 3 / 18 * 9 + n / 3 % 9] == 0) poisoned.tensors.v[n] = poison;
      SCOPED_TRACE(describe(c.problem, c.settings));
      EXPECT_TRUE(same(poisoned.forward(), c.forward()));
      EXPECT_TRUE(same(poisoned.backward().q, c.backward().q));
      EXPECT_TRUE(same(poisoned.backward().k, c.backward().k));
      EXPECT_TRUE(same(poisoned.magnitudes().q, c.magnitudes().q));
      EXPECT_TRUE(same(poisoned.magnitudes().k, c.magnitudes().k));
      const auto effects = [](const Case<Real>& x) {
        return reference::rounded_output_effects(x.problem, x.settings, x.tensors, x.d_o,
                                                 Real(0x1p-8), Real(0));
      };
      EXPECT_TRUE(same(effects(poisoned).q, effects(c).q));
      EXPECT_TRUE(same(effects(poisoned).k, effects(c).k));
    }
}

}  // namespace
