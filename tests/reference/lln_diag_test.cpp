// SPDX-License-Identifier: BSD-3-Clause
// LLN+Diag: closed forms, what must not change, what a block is, and refusals.

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Combine;
using reference::Kernel;
using Real = double;

constexpr Real unit = roundoff<Real>;
constexpr Real poison = std::numeric_limits<Real>::quiet_NaN();
constexpr Problem square{
    .batch = 2, .heads = 4, .kv_heads = 2, .nq = 11, .nk = 11, .d = 4, .dv = 3};
constexpr Problem cross{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 5, .nk = 11, .d = 4, .dv = 3};

reference::Settings lln_diag(bool causal, std::int64_t block = 0,
                             Combine combine = Combine::average) {
  return {.kernel = Kernel::lln_diag, .causal = causal, .block = block, .combine = combine};
}

/// o = o_diag.
template <class T>
Case<T> only_blocks(Case<T> c) {
  const auto size = static_cast<std::size_t>(c.problem.heads * c.problem.dv);
  c.settings.combine = Combine::scale;
  c.settings.diag_r.assign(size, 0);
  c.settings.diag_p.assign(size, 1);
  return c;
}

/// The same call of lln.
template <class T>
Case<T> only_lln(Case<T> c) {
  c.settings.kernel = Kernel::lln;
  c.settings.diag_r.clear();
  c.settings.diag_p.clear();
  return c;
}

/// One head without lln, D = Dv = 1.
Case<Real> one_head(std::vector<Real> q, std::vector<Real> k, std::vector<Real> v,
                    std::int64_t block, bool causal) {
  const auto nq = static_cast<std::int64_t>(q.size()), nk = static_cast<std::int64_t>(k.size());
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = nq, .nk = nk, .d = 1, .dv = 1},
               lln_diag(causal, block),
               {std::move(q), std::move(k), std::move(v)},
               std::vector<Real>(static_cast<std::size_t>(nq), 1)};
  c.settings.alpha = c.settings.beta = {1};
  return only_blocks(c);
}

TEST(ReferenceLlnDiag, ByHand) {
  // Scores ln 1, ln 3: A = (1/4, 3/4), o = 25; dx = A (v - 25) = (-15/4, 15/4).
  const Real log3 = std::log(Real(3));
  auto c = one_head({1, 0}, {0, log3}, {10, 30}, 2, false);
  EXPECT_TRUE(near(c.forward()[0], 25, 64 * unit));
  EXPECT_TRUE(near(c.forward()[1], 20, 32 * unit));
  const auto gradient = c.backward();
  EXPECT_TRUE(near(gradient.q[0], 3.75 * log3, 32 * unit));
  EXPECT_TRUE(near(gradient.q[1], 5 * log3, 32 * unit));  // A = (1/2, 1/2), dx = -+5
  EXPECT_TRUE(near(gradient.k[0], -3.75, 32 * unit));
  EXPECT_TRUE(near(gradient.k[1], 3.75, 32 * unit));
  EXPECT_TRUE(near(gradient.v[0], 0.75, 4 * unit));
  EXPECT_TRUE(near(gradient.v[1], 1.25, 4 * unit));
  // dr = sum o_lln, dp = sum o_diag.
  const auto lln = only_lln(c).forward();
  EXPECT_TRUE(near(gradient.diag_r[0], lln[0] + lln[1], 128 * unit));
  EXPECT_TRUE(near(gradient.diag_p[0], 45, 128 * unit));

  // r and p of o = 3 o_lln - 2 o_diag, as scale and as ratio.
  c.settings.diag_r = {3};
  c.settings.diag_p = {-2};
  EXPECT_TRUE(near(c.forward()[0], 3 * lln[0] - 2 * 25, 512 * unit));
  const auto scaled = c.backward();
  c.settings.combine = Combine::ratio;
  c.settings.diag_p.clear();
  EXPECT_TRUE(near(c.forward()[0], 3 * lln[0] - 2 * 25, 512 * unit));
  const auto shared = c.backward();
  EXPECT_TRUE(near(shared.diag_r[0], scaled.diag_r[0] - scaled.diag_p[0], 512 * unit));
  EXPECT_TRUE(shared.diag_p.empty());
  EXPECT_TRUE(same(shared.k, scaled.k));
  // Half and half is what scale and ratio default to.
  c.settings.diag_r.clear();
  const auto o = c.forward();
  EXPECT_TRUE(near(o[0], (lln[0] + 25) / 2, 128 * unit));
  EXPECT_EQ(c.backward().diag_r.size(), 1u);
  c.settings.combine = Combine::average;
  EXPECT_TRUE(same(c.forward(), o));
  EXPECT_TRUE(c.backward().diag_r.empty());
  c.settings.combine = Combine::scale;
  EXPECT_TRUE(same(c.forward(), o));
  EXPECT_EQ(c.backward().diag_p.size(), 1u);
}

TEST(ReferenceLlnDiag, ScoresAreDividedByTheRootOfD) {
  // q . k / sqrt(4) = ln 3.
  const Real log3 = std::log(Real(3));
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 2, .nk = 2, .d = 4, .dv = 1},
               lln_diag(false, 2),
               {{log3, log3, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 1, 1, 7, 7}, {0, 4}},
               {1, 0}};
  c.settings.alpha = c.settings.beta = {1};
  c = only_blocks(c);
  EXPECT_TRUE(near(c.forward()[0], 3, 32 * unit));
  EXPECT_TRUE(near(c.backward().q[0], 0.75 * 1 / 2.0, 16 * unit));
  EXPECT_TRUE(near(c.backward().k[4], 0.75 * log3 / 2.0, 16 * unit));
}

TEST(ReferenceLlnDiag, WhatARowSees) {
  // Scores 0: o is the mean of the block's values. Five keys in blocks of 2: (0 1)(2 3)(4).
  const std::vector<Real> zeros(5), v{1, 2, 4, 8, 16};
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 2, false).forward(), {1.5, 1.5, 6, 6, 16}));
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 2, true).forward(), {1, 1.5, 4, 6, 16}));
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 1, false).forward(), v));
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 0, true).forward(), v));  // D = 1
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 5, false).forward(),
                   one_head(zeros, zeros, v, 1 << 30, false).forward()));
  EXPECT_TRUE(same(one_head(zeros, zeros, v, 4, true).forward(), {1, 1.5, 7 / 3.0, 3.75, 16}));
  // Two queries stand at the positions 3 and 4.
  EXPECT_TRUE(same(one_head({0, 0}, zeros, v, 2, true).forward(), {6, 16}));
  EXPECT_TRUE(same(one_head({0, 0}, zeros, v, 3, true).forward(), {8, 12}));
  // Hidden keys keep their positions; a block without a visible key gives 0.
  auto c = one_head(zeros, zeros, v, 2, false);
  c.settings.key_mask = {0, 1, 0, 0, 1};
  c.tensors.k[0] = c.tensors.v[0] = c.tensors.k[2] = c.tensors.v[3] = poison;
  EXPECT_TRUE(same(c.forward(), {2, 2, 0, 0, 16}));
  EXPECT_TRUE(same(c.backward().v, {0, 2, 0, 0, 1}));
  c.settings.causal = true;
  EXPECT_TRUE(same(c.forward(), {0, 2, 0, 0, 16}));
  // The combination stays as it is: a quarter of lln's output.
  c.settings.diag_r = {0.25};
  const auto lln = only_lln(c).forward();
  EXPECT_TRUE(same(row_range(c.forward(), 2, 2, 1), {lln[2] / 4, lln[3] / 4}));
  EXPECT_GT(lln[2], 0);

  // Packed: (0 1 2)(3 4) in blocks of 2 is (0 1)(2)(3 4).
  c = one_head(zeros, zeros, v, 2, false);
  c.settings.cu_seqlens_q = c.settings.cu_seqlens_k = {0, 3, 3, 5};
  EXPECT_TRUE(same(c.forward(), {1.5, 1.5, 4, 12, 12}));
  // One query at position 2 of the first member, one at 1 of the second.
  c = one_head({0, 0}, zeros, v, 2, true);
  c.settings.cu_seqlens_q = {0, 1, 2};
  c.settings.cu_seqlens_k = {0, 3, 5};
  EXPECT_TRUE(same(c.forward(), {4, 12}));
}

TEST(ReferenceLlnDiag, EitherPartAlone) {
  for (const bool causal : {false, true}) {
    auto c = random_case<Real>(causal ? cross : square, lln_diag(causal, 3, Combine::scale), 401);
    c.settings.diag_r.assign(12, 1);
    c.settings.diag_p.assign(12, 0);
    const auto lln = only_lln(c);
    EXPECT_TRUE(same(c.forward(), lln.forward()));
    const auto gradient = c.backward(), of_lln = lln.backward();
    EXPECT_TRUE(same(gradient.q, of_lln.q));
    EXPECT_TRUE(same(gradient.k, of_lln.k));
    EXPECT_TRUE(same(gradient.v, of_lln.v));
    EXPECT_TRUE(same(gradient.alpha, of_lln.alpha));
    EXPECT_TRUE(same(gradient.beta, of_lln.beta));
    // The blocks have neither alpha nor beta.
    const auto blocks = only_blocks(c);
    EXPECT_TRUE(all_zero(blocks.backward().alpha));
    EXPECT_TRUE(all_zero(blocks.backward().beta));
    EXPECT_FALSE(all_zero(blocks.backward().q));
    // Both gradients are linear in r and p.
    auto both = c;
    both.settings.diag_p.assign(12, 1);
    const auto sum = both.backward(), part = blocks.backward();
    for (std::size_t n = 0; n < sum.k.size(); ++n)
      EXPECT_TRUE(near(sum.k[n], of_lln.k[n] + part.k[n], 2 * unit * std::abs(sum.k[n])));
  }
}

TEST(ReferenceLlnDiag, OneBlockIsSoftmaxAttention) {
  // By the definition, in long double.
  for (const bool causal : {false, true}) {
    const auto c =
        only_blocks(random_case<Real>(causal ? cross : square, lln_diag(causal, 11), 411));
    const auto o = c.forward();
    const auto& p = c.problem;
    const auto magnitude = c.magnitudes();
    for (std::int64_t row = 0; row < p.batch * p.heads * p.nq; ++row) {
      const std::int64_t keys = row / p.nq / p.group() * p.nk;
      const std::int64_t end = causal ? row % p.nq + p.nk - p.nq + 1 : p.nk;
      std::vector<long double> sums(3);
      long double denominator = 0;
      for (std::int64_t j = 0; j < end; ++j) {
        long double x = 0;
        for (std::int64_t n = 0; n < 4; ++n)
          x += static_cast<long double>(c.tensors.q[static_cast<std::size_t>(row * 4 + n)]) *
               c.tensors.k[static_cast<std::size_t>((keys + j) * 4 + n)];
        const long double weight = std::exp(x / 2);
        denominator += weight;
        for (std::size_t n = 0; n < 3; ++n)
          sums[n] += weight * c.tensors.v[static_cast<std::size_t>((keys + j) * 3) + n];
      }
      for (std::size_t n = 0; n < 3; ++n) {
        const auto e = static_cast<std::size_t>(row * 3) + n;
        EXPECT_TRUE(near(o[e], sums[n] / denominator, 4 * unit * magnitude.o[e])) << e;
      }
    }
  }
}

TEST(ReferenceLlnDiag, CommonShiftOfABlocksKeysIsNoMatter) {
  // It adds q_i . shift to all scores of a row.
  for (const bool causal : {false, true}) {
    const auto c = only_blocks(random_case<Real>(square, lln_diag(causal, 4), 421));
    auto shifted = c;
    for (std::size_t n = 0; n < c.tensors.k.size(); ++n) {
      const std::size_t block = n / 4 % 11 / 4;
      shifted.tensors.k[n] += static_cast<Real>(block) - 0.5 * static_cast<Real>(n % 4);
    }
    EXPECT_TRUE(within(shifted.forward(), c.forward(), shifted.magnitudes().o, unit, 8));
    EXPECT_TRUE(within(shifted.backward().v, c.backward().v, shifted.magnitudes().v, unit, 8));
    // So the gradients of a block's keys cancel, for the heads of a group together.
    const auto gradient = c.backward().k, size = c.magnitudes().k;
    for (std::size_t entry = 0; entry < 4; ++entry)
      for (std::size_t begin : {0u, 4u, 8u})
        for (std::size_t n = 0; n < 4; ++n) {
          Real sum = 0, sizes = 0;
          for (std::size_t j = begin; j < std::min<std::size_t>(begin + 4, 11); ++j) {
            sum += gradient[(entry * 11 + j) * 4 + n];
            sizes += size[(entry * 11 + j) * 4 + n];
          }
          EXPECT_TRUE(near(sum, 0, 8 * unit * sizes));
        }
  }
}

TEST(ReferenceLlnDiag, BlocksAreIndependent) {
  const auto c = only_blocks(random_case<Real>(square, lln_diag(false, 4), 431));
  auto moved = c;
  for (std::size_t n = 0; n < c.tensors.k.size(); ++n)
    if (n / 4 % 11 / 4 == 1) moved.tensors.k[n] = -3 * moved.tensors.k[n];
  const auto o = c.forward(), other = moved.forward();
  for (std::int64_t head = 0; head < 8; ++head) {
    EXPECT_TRUE(same(row_range(other, head * 11, 4, 3), row_range(o, head * 11, 4, 3)));
    EXPECT_FALSE(same(row_range(other, head * 11 + 4, 4, 3), row_range(o, head * 11 + 4, 4, 3)));
    EXPECT_TRUE(same(row_range(other, head * 11 + 8, 3, 3), row_range(o, head * 11 + 8, 3, 3)));
  }
}

TEST(ReferenceLlnDiag, TheFutureIsNotSeen) {
  const auto c = random_case<Real>(cross, lln_diag(true, 4, Combine::ratio), 441);
  auto poisoned = c;
  // The last key of every head: only the last query sees it.
  for (std::size_t entry = 0; entry < 4; ++entry)
    for (std::size_t n = 0; n < 4; ++n) poisoned.tensors.k[(entry * 11 + 10) * 4 + n] = poison;
  const auto o = c.forward(), found = poisoned.forward();
  for (std::int64_t head = 0; head < 8; ++head) {
    EXPECT_TRUE(same(row_range(found, head * 5, 4, 3), row_range(o, head * 5, 4, 3)));
    EXPECT_TRUE(std::isnan(found[static_cast<std::size_t>(head * 5 + 4) * 3]));
  }
}

TEST(ReferenceLlnDiag, HiddenKeysMayHoldAnything) {
  for (const bool causal : {false, true}) {
    auto settings = lln_diag(causal, 4, Combine::scale);
    settings.key_mask.assign(22, 1);
    for (const std::size_t j : {0u, 4u, 5u, 6u, 7u, 10u, 11u, 20u}) settings.key_mask[j] = 0;
    const auto c = random_case<Real>(square, settings, 451);
    auto poisoned = c;
    for (std::size_t n = 0; n < c.tensors.k.size(); ++n)
      if (settings.key_mask[n / 4 / 22 * 11 + n / 4 % 11] == 0) poisoned.tensors.k[n] = poison;
    for (std::size_t n = 0; n < c.tensors.v.size(); ++n)
      if (settings.key_mask[n / 3 / 22 * 11 + n / 3 % 11] == 0) poisoned.tensors.v[n] = poison;
    EXPECT_TRUE(same(poisoned.forward(), c.forward()));
    const auto gradient = poisoned.backward(), expected = c.backward();
    EXPECT_TRUE(same(gradient.q, expected.q));
    EXPECT_TRUE(same(gradient.k, expected.k));
    EXPECT_TRUE(same(gradient.v, expected.v));
    EXPECT_TRUE(same(gradient.diag_p, expected.diag_p));
    EXPECT_TRUE(all_zero(row_range(gradient.k, 4, 4, 4)));
    EXPECT_TRUE(same(poisoned.magnitudes().k, c.magnitudes().k));
    const auto effects = reference::rounded_output_effects(c.problem, c.settings, poisoned.tensors,
                                                           c.d_o, Real(0x1p-8), Real(0));
    for (const auto* x : {&effects.o, &effects.q, &effects.k, &effects.diag_p})
      for (const Real element : *x) EXPECT_TRUE(std::isfinite(element));
  }
}

TEST(ReferenceLlnDiag, PackedMembersAreCallsOfTheirOwn) {
  for (const bool causal : {false, true}) {
    auto settings = lln_diag(causal, 3, Combine::ratio);
    settings.cu_seqlens_q =
        causal ? std::vector<std::int64_t>{0, 2, 2, 5} : std::vector<std::int64_t>{0, 4, 4, 11};
    settings.cu_seqlens_k = {0, 4, 4, 11};
    Problem problem = causal ? cross : square;
    problem.batch = 1;
    const auto c = random_case<Real>(problem, settings, 461);
    const auto o = c.forward();
    const auto gradient = c.backward();
    std::vector<Real> dr(12);
    for (const std::size_t m : {0u, 2u}) {
      const std::int64_t q = settings.cu_seqlens_q[m], k = settings.cu_seqlens_k[m];
      auto part = c;
      part.settings.cu_seqlens_q.clear();
      part.settings.cu_seqlens_k.clear();
      part.problem.nq = settings.cu_seqlens_q[m + 1] - q;
      part.problem.nk = settings.cu_seqlens_k[m + 1] - k;
      part.tensors = {};
      part.d_o.clear();
      std::vector<Real> expected_o, expected_k;
      for (std::int64_t h = 0; h < 4; ++h) {
        const std::int64_t row = h * problem.nq + q;
        append(part.tensors.q, row_range(c.tensors.q, row, part.problem.nq, 4));
        append(part.d_o, row_range(c.d_o, row, part.problem.nq, 3));
        append(expected_o, row_range(o, row, part.problem.nq, 3));
      }
      for (std::int64_t h = 0; h < 2; ++h) {
        append(part.tensors.k, row_range(c.tensors.k, h * 11 + k, part.problem.nk, 4));
        append(part.tensors.v, row_range(c.tensors.v, h * 11 + k, part.problem.nk, 3));
        append(expected_k, row_range(gradient.k, h * 11 + k, part.problem.nk, 4));
      }
      EXPECT_TRUE(same(part.forward(), expected_o));
      EXPECT_TRUE(same(part.backward().k, expected_k));
      const auto of_part = part.backward().diag_r;
      for (std::size_t n = 0; n < 12; ++n) dr[n] += of_part[n];
    }
    EXPECT_TRUE(within(dr, gradient.diag_r, c.magnitudes().diag_r, unit, 4));
  }
}

TEST(ReferenceLlnDiag, GroupedHeadsShareKeys) {
  const auto c = random_case<Real>(square, lln_diag(true, 0, Combine::scale), 471);
  auto repeated = c;
  repeated.problem.kv_heads = 4;
  repeated.settings.beta = {c.settings.beta[0], c.settings.beta[0], c.settings.beta[1],
                            c.settings.beta[1]};
  repeated.tensors.k.clear();
  repeated.tensors.v.clear();
  for (std::int64_t entry = 0; entry < 4; ++entry)
    for (int copy = 0; copy < 2; ++copy) {
      append(repeated.tensors.k, row_range(c.tensors.k, entry * 11, 11, 4));
      append(repeated.tensors.v, row_range(c.tensors.v, entry * 11, 11, 3));
    }
  EXPECT_TRUE(same(repeated.forward(), c.forward()));
  const auto gradient = c.backward(), parts = repeated.backward();
  EXPECT_TRUE(same(parts.diag_r, gradient.diag_r));
  EXPECT_TRUE(same(parts.q, gradient.q));
  std::vector<Real> dk(gradient.k.size());
  for (std::size_t n = 0; n < parts.k.size(); ++n) dk[n / 88 * 44 + n % 44] += parts.k[n];
  EXPECT_TRUE(within(dk, gradient.k, c.magnitudes().k, unit, 4));
}

TEST(ReferenceLlnDiag, LargeScoresAreExact) {
  // Scores near 1e4 whose differences are a few units: a rounded score would cost 1e4 roundings.
  auto c = only_blocks(
      random_case<Real>({.batch = 1, .heads = 1, .kv_heads = 1, .nq = 9, .nk = 9, .d = 3, .dv = 2},
                        lln_diag(false, 5), 481));
  for (auto& x : c.tensors.q) x = 100 + x / 8;
  for (auto& x : c.tensors.k) x = 100 + x / 512;
  const Case<long double> oracle{
      c.problem,
      c.settings,
      {converted<long double>(c.tensors.q), converted<long double>(c.tensors.k),
       converted<long double>(c.tensors.v)},
      converted<long double>(c.d_o)};
  const auto o = c.forward();
  const auto expected = oracle.forward();
  for (std::size_t n = 0; n < o.size(); ++n) EXPECT_TRUE(near(o[n], expected[n], 16 * unit));
  EXPECT_GT(c.magnitudes().o[0], 1e4);
}

TEST(ReferenceLlnDiag, BoundsByHand) {
  // X = (2, 6) / 2: chi = 1 + ln 2 + 3; A = (1/(1 + e^2), ...) from the scores 1 and 3.
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 4, .dv = 1},
               lln_diag(true, 2),
               {{1, 1, 1, 1}, {1, 1, 0, 0, 3, 3, 0, 0}, {5, -7}},
               {-2}};
  c.settings.alpha = c.settings.beta = {0};
  const Real chi = 4 + std::log(Real(2)), a0 = 1 / (1 + std::exp(Real(2))), a1 = 1 - a0;
  const Real o = std::abs(5 * a0 - 7 * a1), of_o = chi * (5 * a0 + 7 * a1 + o);
  const auto blocks = only_blocks(c).magnitudes();
  EXPECT_TRUE(near(blocks.o[0], of_o, 1e-13));
  EXPECT_TRUE(near(blocks.v[0], a0 * (2 * chi + 1) * 2, 1e-13));
  const Real delta_error = 2 * (of_o + o);
  const Real dx0 = a0 * (2 * chi * (10 + 2 * o) + 10 + delta_error),
             dx1 = a1 * (2 * chi * (14 + 2 * o) + 14 + delta_error);
  EXPECT_TRUE(near(blocks.k[0], dx0 / 2, 1e-12));
  EXPECT_TRUE(near(blocks.q[0], (dx0 + 3 * dx1) / 2, 1e-12));
  EXPECT_TRUE(near(blocks.q[3], 0, 0));
  EXPECT_TRUE(near(blocks.diag_p[0], 2 * (of_o + o), 1e-13));
  // Ratio with r = 3: p = -2 is off by a rounding of 3 more. lln has the mean of the values, -1.
  c.settings.combine = Combine::ratio;
  c.settings.diag_r = {3};
  const auto lln = only_lln(c).magnitudes();
  const auto ratio = c.magnitudes();
  EXPECT_TRUE(near(ratio.o[0], 3 * lln.o[0] + 2 * of_o + 3 * o, 1e-12));
  EXPECT_TRUE(near(ratio.diag_r[0], 2 * (lln.o[0] + 1 + of_o + o), 1e-12));
  EXPECT_TRUE(near(ratio.v[0], 3 * lln.v[0] + a0 * (2 * chi * 4 + 4 + 6), 1e-12));
}

TEST(ReferenceLlnDiag, RoundingCounts) {
  const Problem problem{
      .batch = 2, .heads = 6, .kv_heads = 3, .nq = 100, .nk = 100, .d = 8, .dv = 5};
  auto settings = lln_diag(false, 64, Combine::scale);
  const auto lln = reference::rounding_counts(problem, reference::feature_roundings(Kernel::lln));
  const auto counts = reference::rounding_counts(problem, settings);
  // p = 8 + 13 + 4 * 64 + 2 = 279, dx = 279 + 5 + 6 = 290; blocks meet 128 queries of a group.
  EXPECT_EQ(counts.o, std::max(lln.o, 279.0) + 4);
  EXPECT_EQ(counts.o, 283);
  EXPECT_EQ(counts.q, std::max(lln.q, 290.0 + 64 + 3) + 4);
  EXPECT_EQ(counts.k, std::max(lln.k, 290.0 + 128 + 3) + 4);
  EXPECT_EQ(counts.v, std::max(lln.v, 279.0 + 128) + 4);
  EXPECT_EQ(counts.alpha, lln.alpha + 4);
  EXPECT_EQ(counts.diag_r, 283 + 2 + 200);
  EXPECT_EQ(counts.diag_p, counts.diag_r);
  // Runs of 16: depth 20 for a block, 23 for the 100 keys of lln.
  EXPECT_EQ(reference::rounding_counts(problem, settings, 16).o,
            std::max(2 * (20 + 23.0 + 8) + 1, 8 + 13 + 80 + 2.0) + 4);
}

/// Rounds o_lln and o_diag to `digits` bits and combines them, as a program does that stores them.
TEST(ReferenceLlnDiag, EffectsOfStoredBranches) {
  constexpr int digits = 8;
  constexpr Real stored = 0x1p-8;
  const auto rounded = [](std::vector<Real> x) {
    for (Real& element : x) {
      int exponent = 0;
      const Real fraction = std::frexp(element, &exponent);
      element = std::ldexp(std::nearbyint(std::ldexp(fraction, digits)), exponent - digits);
    }
    return x;
  };
  for (const auto combine : {Combine::average, Combine::scale, Combine::ratio}) {
    const auto c = random_case<Real>(square, lln_diag(true, 4, combine), 491);
    const auto blocks = only_blocks(c);
    const auto exact_lln = only_lln(c).forward(), exact_diag = blocks.forward();
    const auto o_lln = rounded(exact_lln), o_diag = rounded(exact_diag);
    std::vector<Real> o(o_lln.size()), dr(12), dp(12);
    for (std::size_t e = 0; e < o.size(); ++e) {
      const std::size_t n = e / 33 % 4 * 3 + e % 3;
      const Real r = c.settings.diag_r.empty() ? 0.5 : c.settings.diag_r[n];
      const Real p = combine == Combine::ratio   ? 1 - r
                     : c.settings.diag_p.empty() ? 0.5
                                                 : c.settings.diag_p[n];
      o[e] = r * o_lln[e] + p * o_diag[e];
      dr[n] += c.d_o[e] * (o_lln[e] - (combine == Combine::ratio ? o_diag[e] : 0));
      dp[n] += c.d_o[e] * o_diag[e];
    }
    o = rounded(o);
    const auto effects =
        reference::rounded_output_effects(c.problem, c.settings, c.tensors, c.d_o, stored, Real(0));
    const auto gradient = c.backward();
    const auto near_enough = [&](const std::vector<Real>& x, const std::vector<Real>& expected,
                                 const std::vector<Real>& effect) {
      // To first order: the last rounding is that of a value off by one already.
      EXPECT_TRUE(within(x, expected, effect, Real(1), 1 + 2 * stored));
      EXPECT_GT(worst_ratio(x, expected, effect, Real(1)), 0.2);
    };
    near_enough(o, c.forward(), effects.o);
    EXPECT_EQ(effects.diag_r.size(), gradient.diag_r.size());
    if (combine != Combine::average) near_enough(dr, gradient.diag_r, effects.diag_r);
    if (combine == Combine::scale) near_enough(dp, gradient.diag_p, effects.diag_p);
  }
}

TEST(ReferenceLlnDiag, EmptyExtents) {
  for (const auto combine : {Combine::average, Combine::scale, Combine::ratio})
    for (const auto member : {&Problem::batch, &Problem::heads, &Problem::nq, &Problem::nk,
                              &Problem::d, &Problem::dv}) {
      Problem problem = square;
      problem.*member = 0;
      if (member == &Problem::heads) problem.kv_heads = 0;
      if (member == &Problem::nk) problem.nq = 0;
      if (member == &Problem::nq) problem.nk = 0;
      const auto c = random_case<Real>(problem, lln_diag(true, 0, combine), 501);
      EXPECT_EQ(c.forward().size(), c.d_o.size());
      EXPECT_EQ(c.backward().k.size(), c.tensors.k.size());
      EXPECT_EQ(c.magnitudes().diag_r.size(), c.backward().diag_r.size());
      // Without features every score is 0, and a block has one key.
      if (member == &Problem::d) {
        EXPECT_TRUE(
            same(row_range(only_blocks(c).forward(), 0, 11, 3), row_range(c.tensors.v, 0, 11, 3)));
      }
    }
  Problem problem = square;
  problem.nk = 0;
  EXPECT_THROW((void)random_case<Real>(problem, lln_diag(false), 502).forward(), InvalidArgument);
}

TEST(ReferenceLlnDiag, NoVisibleKeyGivesZero) {
  for (const bool causal : {false, true}) {
    auto settings = lln_diag(causal, 4, Combine::scale);
    settings.key_mask.assign(22, 0);
    auto c = random_case<Real>(square, settings, 511);
    c.tensors.q[0] = poison;
    EXPECT_TRUE(all_zero(c.forward()));
    const auto gradient = c.backward();
    for (const auto* x : {&gradient.q, &gradient.k, &gradient.v, &gradient.alpha, &gradient.beta,
                          &gradient.diag_r, &gradient.diag_p})
      EXPECT_TRUE(all_zero(*x));
    EXPECT_TRUE(all_zero(c.magnitudes().q));
  }
}

TEST(ReferenceLlnDiag, VisibleNaNIsNotSwallowed) {
  for (const bool causal : {false, true}) {
    auto c = only_blocks(random_case<Real>(square, lln_diag(causal, 4), 521));
    c.settings.diag_r.assign(12, 1);
    c.tensors.k[0] = poison;
    EXPECT_TRUE(std::isnan(c.forward()[0]));
    // Row 3 of the first head has key 0 in its block; without lln, row 4 has not.
    c.settings.kernel = Kernel::lln_diag;
    EXPECT_TRUE(std::isnan(c.forward()[9]));
  }
}

/// Every entry point refuses the case, and the message holds all of the words.
void expect_refused(const Case<Real>& c, std::initializer_list<const char*> words) {
  for (const std::function<void()>& call : {std::function<void()>([&] { (void)c.forward(); }),
                                            std::function<void()>([&] { (void)c.backward(); }),
                                            std::function<void()>([&] { (void)c.magnitudes(); })}) {
    try {
      call();
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      for (const char* word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
            << "'" << word << "' is missing in: " << error.what();
    }
  }
}

TEST(ReferenceLlnDiag, ArgumentsThatDoNotFit) {
  EXPECT_EQ(reference::kernel_from_name("lln-diag"), Kernel::lln_diag);
  EXPECT_EQ(reference::kernel_name(Kernel::lln_diag), "lln-diag");
  const auto good = random_case<Real>(cross, lln_diag(true, 0, Combine::scale), 531);
  EXPECT_NO_THROW((void)good.forward());
  auto c = good;
  c.settings.causal = false;
  expect_refused(c, {"5", "11", "causal"});
  c = good;
  c.settings.block = -1;
  expect_refused(c, {"block", "-1"});
  c = good;
  c.settings.diag_r.pop_back();
  expect_refused(c, {"diag_r", "11", "12"});
  c = good;
  c.settings.diag_p.push_back(1);
  expect_refused(c, {"diag_p", "13", "12"});
  c = good;
  c.settings.combine = Combine::ratio;
  expect_refused(c, {"diag_p", "12", " 0 "});
  c = good;
  c.settings.combine = Combine::average;
  expect_refused(c, {"diag_r", "12", " 0 "});
  c = good;
  c.settings.kernel = Kernel::lln;
  expect_refused(c, {"diag_r", "lln"});
  c = good;
  c.settings.normalise = false;
  expect_refused(c, {"normalised"});
  c = good;
  c.settings.dropout_p = 0.5;
  expect_refused(c, {"noise"});
  c = good;
  c.settings.least_normaliser = 0.5;
  expect_refused(c, {"least_normaliser"});
  c = good;
  c.settings.alpha.clear();
  expect_refused(c, {"alpha", "lln-diag"});

  Problem one = square;
  one.batch = 1;
  c = random_case<Real>(one, lln_diag(false), 532);
  c.settings.cu_seqlens_q = {0, 4, 11};
  c.settings.cu_seqlens_k = {0, 5, 11};
  expect_refused(c, {"member 0", "4", "5"});
}

}  // namespace
