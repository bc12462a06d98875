// SPDX-License-Identifier: BSD-3-Clause
// Affine attention and small sums: closed forms, what must not change, and mistakes of public
// implementations.

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using reference::Norm;
using Real = double;

constexpr Real unit = roundoff<Real>;
constexpr Real poison = std::numeric_limits<Real>::quiet_NaN();
constexpr Norm all_norms[] = {Norm::l2, Norm::none, Norm::max};
constexpr Problem base{.batch = 2, .heads = 6, .kv_heads = 2, .nq = 5, .nk = 9, .d = 4, .dv = 3};

reference::Settings affine(Norm norm, bool causal = false) {
  return {.kernel = Kernel::affine, .causal = causal, .norm = norm};
}

/// One head of one value column without norm, a = s = 1, b = 0.
Case<Real> one_head(std::vector<Real> q, std::vector<Real> k, std::vector<Real> v,
                    std::int64_t d = 1) {
  const auto nq = static_cast<std::int64_t>(q.size()) / d, nk = static_cast<std::int64_t>(v.size());
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = nq, .nk = nk, .d = d, .dv = 1},
               affine(Norm::none),
               {std::move(q), std::move(k), std::move(v)},
               std::vector<Real>(static_cast<std::size_t>(nq), 1)};
  c.settings.alpha = {1};
  c.settings.constant = {0};
  return c;
}

/// Calls visit for every norm and mask of positions.
void for_each_form(const std::function<void(const reference::Settings&)>& visit) {
  for (const Norm norm : all_norms)
    for (const bool causal : {false, true}) visit(affine(norm, causal));
}

TEST(ReferenceAffine, ByHand) {
  // a s = 1, w = (4, 10) + 3, s_i = 20, o = 86/20, dw = (-1.3, 0.7)/20.
  auto c = one_head({1, 2}, {2, 1, 4, 3}, {3, 5}, 2);
  c.settings.alpha = {2};
  c.settings.score_scale = 0.5;
  c.settings.constant = {3};
  EXPECT_TRUE(near(c.forward()[0], 4.3, 8 * unit));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], 0.01, 4 * unit));
  EXPECT_TRUE(near(gradient.q[1], 0.04, 4 * unit));
  EXPECT_TRUE(near(gradient.k[0], -0.065, 4 * unit));
  EXPECT_TRUE(near(gradient.k[1], -0.13, 4 * unit));
  EXPECT_TRUE(near(gradient.k[2], 0.035, 4 * unit));
  EXPECT_TRUE(near(gradient.k[3], 0.07, 4 * unit));
  EXPECT_TRUE(near(gradient.v[0], 0.35, 4 * unit));
  EXPECT_TRUE(near(gradient.v[1], 0.65, 4 * unit));
  EXPECT_TRUE(near(gradient.alpha[0], 0.045, 4 * unit));
  EXPECT_TRUE(near(gradient.constant[0], -0.03, 4 * unit));
  EXPECT_TRUE(near(gradient.score_scale[0], 0.18, 4 * unit));
  EXPECT_TRUE(gradient.beta.empty());

  // The factor of the output is not that of the score.
  c.settings.normalise = false;
  c.settings.scale = -2;
  EXPECT_TRUE(same(c.forward(), {-172}));
  const auto plain = c.backward();
  EXPECT_TRUE(same(plain.q, {-52, -36}));
  EXPECT_TRUE(same(plain.v, {-14, -26}));
  EXPECT_TRUE(same(plain.alpha, {-62}));
  EXPECT_TRUE(same(plain.constant, {-16}));
  EXPECT_TRUE(same(plain.score_scale, {-248}));
}

TEST(ReferenceAffine, NormOfEachRow) {
  // qhat = (3, 4)/6 with eps 11, khat = (0, 10)/sqrt(111); a zero row has norm sqrt(11).
  auto c = one_head({3, 4, 0, 0}, {0, 10}, {1}, 2);
  c.settings.normalise = false;
  c.settings.norm = Norm::l2;
  c.settings.norm_eps = 11;
  const Real root = std::sqrt(Real(111));
  EXPECT_TRUE(near(c.forward()[0], 4 / 6.0 * 10 / root, 4 * unit));
  EXPECT_EQ(c.forward()[1], 0);
  // dqhat = (0, 10/root) for both rows, xhat . dxhat = 2/3 * 10/root.
  const auto dq = c.backward().q;
  EXPECT_TRUE(near(dq[0], -0.5 * 2 / 3 * 10 / root / 6, 4 * unit));
  EXPECT_TRUE(near(dq[1], (1 - 4.0 / 9) * 10 / root / 6, 4 * unit));
  EXPECT_TRUE(near(dq[3], 10 / root / std::sqrt(Real(11)), 4 * unit));
  // Without eps a zero row divides by 1.
  c.settings.norm_eps = 0;
  EXPECT_TRUE(near(c.forward()[0], 0.8, 2 * unit));
  EXPECT_TRUE(same(row_range(c.backward().q, 1, 1, 2), {0, 1}));
}

TEST(ReferenceAffine, LargestNormOfTheSequence) {
  // Queries of norms 1, 4, 4 and keys of norms 2, 1, 2, 8 of which the last is hidden; the first
  // of equals carries the gradient.
  auto c = one_head({1, -4, 4}, {2, 1, -2, 8}, {1, 3, 5, poison});
  c.settings.normalise = false;
  c.settings.norm = Norm::max;
  c.settings.key_mask = {1, 1, 1, 0};
  // khat = (1, 1/2, -1), sum khat v = -2.5, qhat = (1/4, -1, 1).
  EXPECT_TRUE(same(c.forward(), {-0.625, 2.5, -2.5}));
  // dqhat = -2.5 each, qhat . dqhat = -0.625; the row x_* of qhat -1 gets -(-1) * -0.625 more.
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, {-0.625, (-2.5 - 0.625) / 4, -0.625}));
  // dkhat_j = v_j sum qhat = v_j / 4, khat . dkhat = (1 + 1.5 - 5)/4 = -0.625 from key 0.
  EXPECT_TRUE(same(gradient.k, {(0.25 + 0.625) / 2, 0.375, 0.625, 0}));
  // Keys that are all zero divide by 1.
  c.tensors.k = {0, 0, 0, 8};
  EXPECT_TRUE(same(c.forward(), {0, 0, 0}));
  EXPECT_TRUE(same(c.backward().k, {0.25, 0.75, 1.25, 0}));
  // Nothing to see: no largest row.
  c.settings.key_mask = {0, 0, 0, 0};
  EXPECT_TRUE(same(c.backward().k, {0, 0, 0, 0}));
  EXPECT_TRUE(same(c.backward().q, {0, 0, 0}));
}

/// Rows of norm 1 from plain loops.
std::vector<Real> normed(const Case<Real>& c, const std::vector<Real>& x, std::int64_t heads,
                         std::int64_t rows, const std::vector<std::uint8_t>& mask) {
  auto hat = x;
  if (c.settings.norm == Norm::none) return hat;
  const auto d = c.problem.d;
  const auto at = [&](std::int64_t row, std::int64_t m) {
    return static_cast<std::size_t>(row * d + m);
  };
  for (std::int64_t n = 0; n < c.problem.batch * heads; ++n) {
    Real largest = 0;
    const auto norm = [&](std::int64_t row) {
      Real squares = c.settings.norm == Norm::l2 ? c.settings.norm_eps : 0;
      for (std::int64_t m = 0; m < d; ++m) squares += x[at(row, m)] * x[at(row, m)];
      return std::sqrt(squares);
    };
    for (std::int64_t i = 0; i < rows; ++i)
      if (mask.empty() || mask[static_cast<std::size_t>(n / heads * rows + i)] != 0)
        largest = std::max(largest, norm(n * rows + i));
    for (std::int64_t i = 0; i < rows; ++i) {
      const Real rho = c.settings.norm == Norm::max ? largest : norm(n * rows + i);
      for (std::int64_t m = 0; m < d; ++m) hat[at(n * rows + i, m)] /= rho;
    }
  }
  return hat;
}

/// Rows x with one more column.
std::vector<Real> widened(const std::vector<Real>& x, std::int64_t d,
                          const std::function<Real(std::size_t)>& column) {
  std::vector<Real> result;
  for (std::size_t row = 0; row < x.size() / static_cast<std::size_t>(d); ++row) {
    append(result, row_range(x, static_cast<std::int64_t>(row), 1, d));
    result.push_back(column(row));
  }
  return result;
}

TEST(ReferenceAffine, IsIdentityOfWidenedRows) {
  // phi(q) = (a s qhat, b), psi(k) = (khat, 1).
  for (const bool masked : {false, true})
    for_each_form([&](reference::Settings settings) {
      settings.score_scale = 0.75;
      if (masked) settings.key_mask = {1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0};
      auto c = random_case<Real>(base, settings, 201);
      // A hidden key would be the longest.
      if (masked) c.tensors.k[4] = 100;
      SCOPED_TRACE(describe(c.problem, c.settings));
      const auto head = [&](std::size_t row) { return row / 5 % 6; };
      auto q = normed(c, c.tensors.q, 6, 5, {});
      const auto k = normed(c, c.tensors.k, 2, 9, settings.key_mask);
      for (std::size_t n = 0; n < q.size(); ++n)
        q[n] *= c.settings.alpha[head(n / 4)] * c.settings.score_scale;
      auto wide = c;
      wide.problem.d = 5;
      wide.settings.kernel = Kernel::identity;
      wide.settings.alpha.clear();
      wide.settings.constant.clear();
      wide.tensors.q =
          widened(q, 4, [&](std::size_t row) { return c.settings.constant[head(row)]; });
      wide.tensors.k = widened(k, 4, [](std::size_t) { return 1; });
      const auto magnitude = c.magnitudes();
      EXPECT_TRUE(within(wide.forward(), c.forward(), magnitude.o, unit, 16));
      const auto gradient = c.backward(), of_wide = wide.backward();
      EXPECT_TRUE(within(of_wide.v, gradient.v, magnitude.v, unit, 16));
      // The last column of q is b: its gradient is what rows add to db.
      std::vector<Real> db(6);
      for (std::size_t row = 0; row < of_wide.q.size() / 5; ++row)
        db[head(row)] += of_wide.q[row * 5 + 4];
      EXPECT_TRUE(within(db, gradient.constant, magnitude.constant, unit, 64));
      if (c.settings.norm != Norm::none) return;
      auto dq = gradient.q, dk = gradient.k;
      for (std::size_t n = 0; n < dq.size(); ++n)
        dq[n] =
            of_wide.q[n / 4 * 5 + n % 4] * c.settings.alpha[head(n / 4)] * c.settings.score_scale;
      for (std::size_t n = 0; n < dk.size(); ++n) dk[n] = of_wide.k[n / 4 * 5 + n % 4];
      EXPECT_TRUE(within(dq, gradient.q, magnitude.q, unit, 16));
      EXPECT_TRUE(within(dk, gradient.k, magnitude.k, unit, 16));
    });
}

TEST(ReferenceAffine, ConstantValuesComeBackAndLeaveNoGradientOfWeights) {
  // Fails where b m is missing from the normaliser.
  for_each_form([&](const reference::Settings& settings) {
    auto c = random_case<Real>(base, settings, 211);
    SCOPED_TRACE(describe(c.problem, c.settings));
    c.tensors.v.assign(c.tensors.v.size(), 1);
    for (const Real o : c.forward()) EXPECT_TRUE(near(o, 1, 8 * unit));
    const auto gradient = c.backward();
    const auto magnitude = c.magnitudes();
    const auto zero = [](const auto& x) { return std::vector<Real>(x.size()); };
    EXPECT_TRUE(within(gradient.q, zero(gradient.q), magnitude.q, unit, 8));
    EXPECT_TRUE(within(gradient.k, zero(gradient.k), magnitude.k, unit, 8));
    EXPECT_TRUE(within(gradient.alpha, zero(gradient.alpha), magnitude.alpha, unit, 8));
    EXPECT_TRUE(within(gradient.constant, zero(gradient.constant), magnitude.constant, unit, 8));
  });
}

TEST(ReferenceAffine, OnlyTheRatioOfAAndBCounts) {
  for_each_form([&](const reference::Settings& settings) {
    const auto c = random_case<Real>(base, settings, 221);
    SCOPED_TRACE(describe(c.problem, c.settings));
    auto scaled = c;
    for (auto* x : {&scaled.settings.alpha, &scaled.settings.constant})
      for (double& element : *x) element *= -2;
    EXPECT_TRUE(same(scaled.forward(), c.forward()));
    const auto gradient = c.backward(), of_scaled = scaled.backward();
    const auto magnitude = c.magnitudes();
    EXPECT_TRUE(same(of_scaled.q, gradient.q));
    EXPECT_TRUE(same(of_scaled.k, gradient.k));
    EXPECT_TRUE(same(of_scaled.v, gradient.v));
    for (std::size_t h = 0; h < 6; ++h) {
      const Real a = c.settings.alpha[h], b = c.settings.constant[h];
      EXPECT_EQ(gradient.alpha[h], -2 * of_scaled.alpha[h]);
      EXPECT_EQ(gradient.constant[h], -2 * of_scaled.constant[h]);
      EXPECT_TRUE(near(a * gradient.alpha[h] + b * gradient.constant[h], 0,
                       8 * unit * (a * magnitude.alpha[h] + b * magnitude.constant[h])));
      // s stands beside a in every weight.
      EXPECT_TRUE(near(gradient.score_scale[h] * c.settings.score_scale, a * gradient.alpha[h],
                       8 * unit * a * magnitude.alpha[h]));
    }
  });
}

TEST(ReferenceAffine, ColumnSumsOfValueGradientsAreThoseOfTheCotangent) {
  for_each_form([&](const reference::Settings& settings) {
    const Problem problem{.batch = 1, .heads = 3, .kv_heads = 1, .nq = 7, .nk = 9, .d = 4, .dv = 3};
    const auto c = random_case<Real>(problem, settings, 231);
    SCOPED_TRACE(describe(c.problem, c.settings));
    const auto gradient = c.backward();
    const auto magnitude = c.magnitudes();
    for (std::size_t column = 0; column < 3; ++column) {
      Real sum = 0, size = 0, expected = 0;
      for (std::size_t j = 0; j < 9; ++j)
        sum += gradient.v[j * 3 + column], size += magnitude.v[j * 3 + column];
      for (std::size_t i = 0; i < 21; ++i) expected += c.d_o[i * 3 + column];
      EXPECT_TRUE(near(sum, expected, 16 * unit * size));
    }
  });
}

TEST(ReferenceAffine, GradientsAreOrthogonalWhereTheyMustBe) {
  // Neither norm sees the length of its rows but for eps: q . dq = 0, for each row or in sum. With
  // none, sum q . dq = sum k . dk.
  for (const Norm norm : all_norms) {
    auto settings = affine(norm);
    settings.norm_eps = 0;
    const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 7, .nk = 9, .d = 4, .dv = 3};
    const auto c = random_case<Real>(problem, settings, 241);
    const auto gradient = c.backward();
    const auto magnitude = c.magnitudes();
    const auto dot = [](const auto& x, const auto& y, std::size_t begin, std::size_t end) {
      Real sum = 0;
      for (std::size_t n = begin; n < end; ++n) sum += x[n] * y[n];
      return sum;
    };
    const auto absolute = [](std::vector<Real> x) {
      for (Real& element : x) element = std::abs(element);
      return x;
    };
    const auto q_size = absolute(c.tensors.q), k_size = absolute(c.tensors.k);
    const Real q = dot(c.tensors.q, gradient.q, 0, 28), k = dot(c.tensors.k, gradient.k, 0, 36);
    const Real tolerance =
        16 * unit * (dot(q_size, magnitude.q, 0, 28) + dot(k_size, magnitude.k, 0, 36));
    if (norm == Norm::none) {
      EXPECT_TRUE(near(q, k, tolerance));
      EXPECT_FALSE(near(q, 0, tolerance));
      continue;
    }
    EXPECT_TRUE(near(q, 0, tolerance));
    EXPECT_TRUE(near(k, 0, tolerance));
    for (std::size_t j = 0; j < 9; ++j)
      EXPECT_EQ(near(dot(c.tensors.k, gradient.k, j * 4, j * 4 + 4), 0, tolerance),
                norm == Norm::l2);
  }
}

TEST(ReferenceAffine, WeightsThatIgnoreScoresGiveMeans) {
  // a = 0: o_i is the mean of the values up to position i + Nk - Nq.
  for (const Norm norm : all_norms) {
    auto settings = affine(norm, true);
    const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 4, .nk = 7, .d = 3, .dv = 1};
    auto c = random_case<Real>(problem, settings, 251);
    c.settings.alpha = {0};
    c.tensors.v = {1, 2, 4, 8, 16, 32, 64};
    c.d_o = {4, 5, 6, 7};
    EXPECT_TRUE(same(c.forward(), {15.0 / 4, 31.0 / 5, 63.0 / 6, 127.0 / 7}));
    const auto gradient = c.backward();
    EXPECT_TRUE(all_zero(gradient.q));
    EXPECT_TRUE(all_zero(gradient.k));
    EXPECT_TRUE(same(gradient.v, {4, 4, 4, 4, 3, 2, 1}));
    EXPECT_NE(gradient.alpha[0], 0);
    EXPECT_EQ(gradient.score_scale[0], 0);
  }
}

TEST(ReferenceAffine, OnlyTheLargestNormSeesTheFuture) {
  for (const Norm norm : all_norms) {
    const auto c = random_case<Real>(
        {.batch = 1, .heads = 1, .kv_heads = 1, .nq = 6, .nk = 6, .d = 4, .dv = 2},
        affine(norm, true), 261);
    auto longer = c;
    for (std::size_t n = 20; n < 24; ++n) longer.tensors.k[n] *= 5;
    EXPECT_EQ(same(row_range(longer.forward(), 0, 5, 2), row_range(c.forward(), 0, 5, 2)),
              norm != Norm::max);
  }
}

TEST(ReferenceAffine, PackedMembersAndBatchEntriesHaveTheirOwnLargestNorm) {
  for (const bool causal : {false, true}) {
    auto settings = affine(Norm::max, causal);
    settings.cu_seqlens_q = {0, 3, 3, 7};
    settings.cu_seqlens_k = {0, 4, 5, 9};
    const auto c = random_case<Real>(
        {.batch = 1, .heads = 2, .kv_heads = 1, .nq = 7, .nk = 9, .d = 3, .dv = 2}, settings, 271);
    auto moved = c;
    // Rows of the first member only.
    for (std::size_t n = 0; n < 12; ++n) moved.tensors.k[n] *= 7;
    for (std::size_t n = 0; n < 9; ++n) moved.tensors.q[n] *= 7, moved.tensors.q[21 + n] *= 7;
    const auto o = c.forward(), found = moved.forward();
    EXPECT_TRUE(same(row_range(found, 3, 4, 2), row_range(o, 3, 4, 2)));
    EXPECT_TRUE(same(row_range(found, 10, 4, 2), row_range(o, 10, 4, 2)));
    // All rows of one member were scaled alike.
    EXPECT_TRUE(within(found, o, c.magnitudes().o, unit, 16));
    const auto gradient = c.backward(), of_moved = moved.backward();
    EXPECT_TRUE(same(row_range(of_moved.k, 4, 5, 3), row_range(gradient.k, 4, 5, 3)));
    EXPECT_TRUE(same(row_range(of_moved.q, 10, 4, 3), row_range(gradient.q, 10, 4, 3)));
  }
}

TEST(ReferenceAffine, NothingToSee) {
  for_each_form([&](reference::Settings settings) {
    Problem problem = base;
    if (!settings.causal) {
      problem.nk = 0;
      const auto c = random_case<Real>(problem, settings, 281);
      EXPECT_TRUE(all_zero(c.forward()));
      const auto gradient = c.backward();
      EXPECT_TRUE(all_zero(gradient.q));
      EXPECT_TRUE(all_zero(gradient.constant));
      problem = base;
    }
    // No query of the first entry sees a key; in the other those before key 6 do not.
    settings.key_mask.assign(18, 0);
    settings.key_mask[15] = 1;
    settings.least_normaliser = 0.5;
    auto c = random_case<Real>(problem, settings, 282);
    c.tensors.q[0] = poison;
    const auto o = c.forward();
    const auto gradient = c.backward();
    EXPECT_TRUE(all_zero(row_range(o, 0, 30, 3)));
    EXPECT_TRUE(all_zero(row_range(gradient.q, 0, 30, 4)));
    EXPECT_EQ(all_zero(row_range(o, 30, 2, 3)), settings.causal);
    EXPECT_FALSE(all_zero(row_range(o, 32, 1, 3)));
    EXPECT_TRUE(all_zero(row_range(gradient.k, 0, 24, 4)));
  });
}

TEST(ReferenceAffine, NoFeaturesGiveTheMean) {
  for_each_form([&](const reference::Settings& settings) {
    Problem problem = base;
    problem.d = 0;
    auto c = random_case<Real>(problem, settings, 291);
    c.tensors.v.assign(c.tensors.v.size(), 3);
    for (const Real o : c.forward()) EXPECT_TRUE(near(o, 3, 4 * unit));
    EXPECT_TRUE(c.backward().q.empty());
  });
}

TEST(ReferenceSmallSums, ASumOfExactlyZeroGivesZero) {
  auto c = one_head({1, 2, 0}, {1, -2}, {3, 5});
  c.settings.constant = {0.5};
  // Row 0: w = (1.5, -1.5), row 1: (2.5, -3.5), row 2: (0.5, 0.5).
  EXPECT_TRUE(same(c.forward(), {0, 10, 4}));
  const auto gradient = c.backward();
  EXPECT_EQ(gradient.q[0], 0);
  auto without = c;
  without.d_o[0] = 100;
  EXPECT_TRUE(same(without.backward().v, gradient.v));
  EXPECT_TRUE(same(without.backward().constant, gradient.constant));
  EXPECT_EQ(c.magnitudes().o[0], 0);
}

TEST(ReferenceSmallSums, ByHand) {
  // Sums 0, -1 and 1 of m = 2 keys with least 3/4: +3/2, -3/2 and 3/2, and one of 4 that stays.
  auto c = one_head({1, 2, 0, -3}, {1, -2}, {3, 5});
  c.settings.constant = {0.5};
  c.settings.least_normaliser = 0.75;
  EXPECT_TRUE(same(c.forward(), {-3 / 1.5, -10 / -1.5, 4 / 1.5, 25.0 / 4}));
  // dw = v / s of rows 0, 1 and 2; row 3: (v - 6.25)/4.
  const auto gradient = c.backward();
  const Real third = Real(2) / 3;
  EXPECT_TRUE(near(gradient.q[0], third * (3 - 10), 8 * unit));
  EXPECT_TRUE(near(gradient.q[1], -third * (3 - 10), 8 * unit));
  EXPECT_TRUE(near(gradient.q[2], third * (3 - 10), 8 * unit));
  EXPECT_TRUE(near(gradient.q[3], (-3.25 + 2 * 1.25) / 4, 8 * unit));
  EXPECT_TRUE(near(gradient.constant[0], third * 8 + (-3.25 - 1.25) / 4, 16 * unit));
  EXPECT_TRUE(near(gradient.v[0], third * (1.5 - 2.5 + 0.5) - 2.5 / 4, 8 * unit));
  // At the limit a sum is its own.
  c.settings.least_normaliser = 0.5;
  EXPECT_TRUE(same(c.forward(), {-3, 10, 4, 25.0 / 4}));
  EXPECT_TRUE(near(c.backward().q[2], (3 - 4) - 2 * (5 - 4), 8 * unit));
  // Without division there is nothing to replace.
  c.settings.normalise = false;
  EXPECT_TRUE(same(c.forward(), {-3, -10, 4, 25}));
}

TEST(ReferenceSmallSums, NoLimitChangesNothing) {
  for (const auto kernel : all_kernels) {
    if (has_no_small_sums(kernel)) continue;
    const auto c = random_case<Real>(base, {.kernel = kernel}, 301);
    auto clamped = c;
    clamped.settings.least_normaliser = 0;
    EXPECT_TRUE(same(clamped.forward(), c.forward()));
    EXPECT_TRUE(same(clamped.backward().k, c.backward().k));
    EXPECT_TRUE(same(clamped.magnitudes().k, c.magnitudes().k));
    // A limit above all sums: o is the plain output over the number of keys.
    clamped.settings.least_normaliser = 0x1p20;
    auto plain = c;
    plain.settings.normalise = false;
    plain.settings.scale = 0x1p-20 / 9;
    EXPECT_TRUE(within(clamped.forward(), plain.forward(), plain.magnitudes().o, unit, 4));
    EXPECT_TRUE(within(clamped.backward().q, plain.backward().q, plain.magnitudes().q, unit, 4));
  }
}

/// forward() refuses the case, and the message holds all of the words.
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

TEST(ReferenceAffine, ArgumentsThatDoNotFit) {
  const auto good = random_case<Real>(base, affine(Norm::l2), 311);
  auto c = good;
  c.settings.constant.pop_back();
  expect_refused(c, {"constant", "5", "6", "affine"});
  c = good;
  c.settings.alpha.clear();
  expect_refused(c, {"alpha", "0", "6"});
  c = good;
  c.settings.beta = {1, 1};
  expect_refused(c, {"beta", "2", "0"});
  c = good;
  c.settings.norm_eps = -1;
  expect_refused(c, {"norm_eps", "-1"});
  c = good;
  c.settings.dropout_p = poison;
  expect_refused(c, {"dropout_p", "nan"});
  c = good;
  c.settings.least_normaliser = -0.5;
  expect_refused(c, {"least_normaliser", "-0.5"});
  c = random_case<Real>(base, {.kernel = Kernel::identity}, 312);
  c.settings.constant.assign(6, 1);
  expect_refused(c, {"constant", "identity"});
  c = random_case<Real>(base, {.kernel = Kernel::lln}, 313);
  c.settings.least_normaliser = 0.5;
  expect_refused(c, {"lln", "least_normaliser"});
}

}  // namespace
