// SPDX-License-Identifier: BSD-3-Clause
// What the output must not depend on, and what must split, permute or disappear.

#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using Real = double;

constexpr Real unit = roundoff<Real>;
constexpr Real poison = std::numeric_limits<Real>::quiet_NaN();

/// Parameters: kernel, normaliser.
class ReferenceMask : public ::testing::TestWithParam<std::tuple<Kernel, bool>> {
 protected:
  reference::Settings settings(bool causal) const {
    const auto [kernel, normalise] = GetParam();
    return {.kernel = kernel, .causal = causal, .normalise = normalise, .scale = 0.75};
  }
};

/// Parameters: kernel, normaliser, causal.
class ReferenceInvariance : public ::testing::TestWithParam<std::tuple<Kernel, bool, bool>> {
 protected:
  reference::Settings settings() const {
    const auto [kernel, normalise, causal] = GetParam();
    return {.kernel = kernel, .causal = causal, .normalise = normalise, .scale = 0.75};
  }
};

template <class Parameters>
std::string kernel_and_normaliser(const Parameters& parameters) {
  return std::string(reference::kernel_name(std::get<0>(parameters))) +
         (std::get<1>(parameters) ? "_normalised" : "_plain");
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceMask,
                         ::testing::Combine(::testing::ValuesIn(all_kernels), ::testing::Bool()),
                         [](const auto& suite) { return kernel_and_normaliser(suite.param); });

INSTANTIATE_TEST_SUITE_P(All, ReferenceInvariance,
                         ::testing::Combine(::testing::ValuesIn(all_kernels), ::testing::Bool(),
                                            ::testing::Bool()),
                         [](const auto& suite) {
                           return kernel_and_normaliser(suite.param) +
                                  (std::get<2>(suite.param) ? "_causal" : "_full");
                         });

/// Queries [q_first, q_first + nq) and keys [k_first, k_first + nk) of a case with B = H = Hkv = 1.
Case<Real> part(const Case<Real>& c, std::int64_t q_first, std::int64_t nq, std::int64_t k_first,
                std::int64_t nk) {
  Case<Real> result{c.problem, c.settings, {}, {}};
  result.problem.nq = nq;
  result.problem.nk = nk;
  result.settings.cu_seqlens_q.clear();
  result.settings.cu_seqlens_k.clear();
  result.tensors.q = row_range(c.tensors.q, q_first, nq, c.problem.d);
  result.tensors.k = row_range(c.tensors.k, k_first, nk, c.problem.d);
  result.tensors.v = row_range(c.tensors.v, k_first, nk, c.problem.dv);
  result.d_o = row_range(c.d_o, q_first, nq, c.problem.dv);
  return result;
}

/// Blocks of `size` elements in a new order: block n of the result is block order[n] of x.
template <class T>
std::vector<T> permuted(const std::vector<T>& x, const std::vector<std::size_t>& order,
                        std::int64_t size) {
  std::vector<T> result;
  for (const std::size_t n : order)
    append(result, row_range(x, static_cast<std::int64_t>(n), 1, size));
  return result;
}

TEST_P(ReferenceMask, CausalRowIsFullAttentionOverItsPrefix) {
  auto s = settings(true);
  const auto c = random_case<Real>(
      {.batch = 1, .heads = 1, .kv_heads = 1, .nq = 6, .nk = 9, .d = 5, .dv = 4}, s, 51);
  const auto o = c.forward();
  const auto gradient = c.backward();
  std::vector<Real> dk(c.tensors.k.size()), dv(c.tensors.v.size());
  for (std::int64_t i = 0; i < 6; ++i) {
    auto row = part(c, i, 1, 0, i + 4);
    row.settings.causal = false;
    EXPECT_TRUE(same(row_range(o, i, 1, 4), row.forward()));
    const auto of_row = row.backward();
    EXPECT_TRUE(same(row_range(gradient.q, i, 1, 5), of_row.q));
    for (std::size_t n = 0; n < of_row.k.size(); ++n) dk[n] += of_row.k[n];
    for (std::size_t n = 0; n < of_row.v.size(); ++n) dv[n] += of_row.v[n];
  }
  const auto magnitude = c.magnitudes();
  EXPECT_TRUE(within(gradient.k, dk, magnitude.k, unit, 8));
  EXPECT_TRUE(within(gradient.v, dv, magnitude.v, unit, 8));
}

TEST_P(ReferenceMask, FullAttentionDoesNotKnowTheOrderOfKeys) {
  auto s = settings(false);
  const auto c = random_case<Real>(
      {.batch = 1, .heads = 1, .kv_heads = 1, .nq = 4, .nk = 11, .d = 5, .dv = 3}, s, 61);
  const auto order = Random(seed() + 62).permutation(11);
  auto moved = c;
  moved.tensors.k = permuted(c.tensors.k, order, 5);
  moved.tensors.v = permuted(c.tensors.v, order, 3);
  const auto magnitude = moved.magnitudes();
  EXPECT_TRUE(within(moved.forward(), c.forward(), magnitude.o, unit, 8));
  const auto gradient = c.backward(), of_moved = moved.backward();
  EXPECT_TRUE(within(of_moved.q, gradient.q, magnitude.q, unit, 8));
  EXPECT_TRUE(within(of_moved.k, permuted(gradient.k, order, 5), magnitude.k, unit, 8));
  EXPECT_TRUE(within(of_moved.v, permuted(gradient.v, order, 3), magnitude.v, unit, 8));
}

TEST_P(ReferenceInvariance, HeadsAreIndependent) {
  const Problem problem{.batch = 1, .heads = 3, .kv_heads = 3, .nq = 5, .nk = 8, .d = 4, .dv = 7};
  const auto c = random_case<Real>(problem, settings(), 71);
  const auto o = c.forward();
  const auto gradient = c.backward();

  const std::vector<std::size_t> order{2, 0, 1};
  auto moved = c;
  moved.tensors = {permuted(c.tensors.q, order, 5 * 4), permuted(c.tensors.k, order, 8 * 4),
                   permuted(c.tensors.v, order, 8 * 7)};
  moved.d_o = permuted(c.d_o, order, 5 * 7);
  for (auto* parameter : {&moved.settings.alpha, &moved.settings.beta, &moved.settings.constant})
    if (!parameter->empty()) *parameter = permuted(*parameter, order, 1);
  const auto of_moved = moved.backward();
  EXPECT_TRUE(same(moved.forward(), permuted(o, order, 5 * 7)));
  EXPECT_TRUE(same(of_moved.q, permuted(gradient.q, order, 5 * 4)));
  EXPECT_TRUE(same(of_moved.k, permuted(gradient.k, order, 8 * 4)));
  EXPECT_TRUE(same(of_moved.v, permuted(gradient.v, order, 8 * 7)));
  const auto moved_like = [&](const std::vector<Real>& found, const std::vector<Real>& x) {
    return same(found, x.empty() ? x : permuted(x, order, 1));
  };
  EXPECT_TRUE(moved_like(of_moved.alpha, gradient.alpha));
  EXPECT_TRUE(moved_like(of_moved.beta, gradient.beta));
  EXPECT_TRUE(moved_like(of_moved.constant, gradient.constant));
  EXPECT_TRUE(moved_like(of_moved.score_scale, gradient.score_scale));

  auto first = part(c, 0, 5, 0, 8);
  first.problem.heads = first.problem.kv_heads = 1;
  for (auto* parameter : {&first.settings.alpha, &first.settings.beta, &first.settings.constant})
    if (!parameter->empty()) *parameter = {parameter->front()};
  EXPECT_TRUE(same(first.forward(), row_range(o, 0, 5, 7)));
  EXPECT_TRUE(same(first.backward().k, row_range(gradient.k, 0, 8, 4)));
}

TEST_P(ReferenceInvariance, BatchEntriesAreIndependent) {
  const Problem problem{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 3, .nk = 5, .d = 6, .dv = 7};
  const auto c = random_case<Real>(problem, settings(), 81);
  auto second = c;
  second.problem.batch = 1;
  second.tensors = {row_range(c.tensors.q, 1, 1, 4 * 3 * 6),
                    row_range(c.tensors.k, 1, 1, 2 * 5 * 6),
                    row_range(c.tensors.v, 1, 1, 2 * 5 * 7)};
  second.d_o = row_range(c.d_o, 1, 1, 4 * 3 * 7);
  EXPECT_TRUE(same(second.forward(), row_range(c.forward(), 1, 1, 4 * 3 * 7)));
  const auto gradient = c.backward(), of_second = second.backward();
  EXPECT_TRUE(same(of_second.q, row_range(gradient.q, 1, 1, 4 * 3 * 6)));
  EXPECT_TRUE(same(of_second.k, row_range(gradient.k, 1, 1, 2 * 5 * 6)));
  EXPECT_TRUE(same(of_second.v, row_range(gradient.v, 1, 1, 2 * 5 * 7)));
}

TEST_P(ReferenceInvariance, GroupedHeadsEqualRepeatedKeysAndValues) {
  for (const std::int64_t kv_heads : {1, 2, 8}) {
    const Problem problem{
        .batch = 2, .heads = 8, .kv_heads = kv_heads, .nq = 3, .nk = 5, .d = 4, .dv = 7};
    SCOPED_TRACE(problem.to_string());
    const auto c = random_case<Real>(problem, settings(), 91);
    auto repeated = c;
    repeated.problem.kv_heads = 8;
    std::vector<std::size_t> source;
    for (std::size_t b = 0; b < 2; ++b)
      for (std::size_t h = 0; h < 8; ++h)
        source.push_back(b * static_cast<std::size_t>(kv_heads) +
                         h / static_cast<std::size_t>(problem.group()));
    repeated.tensors.k = permuted(c.tensors.k, source, 5 * 4);
    repeated.tensors.v = permuted(c.tensors.v, source, 5 * 7);
    const bool lln = c.settings.kernel == Kernel::lln;
    if (lln)
      repeated.settings.beta = permuted(c.settings.beta, {source.begin(), source.begin() + 8}, 1);
    EXPECT_TRUE(same(c.forward(), repeated.forward()));

    const auto gradient = c.backward(), separate = repeated.backward();
    EXPECT_TRUE(same(gradient.q, separate.q));
    EXPECT_TRUE(same(gradient.alpha, separate.alpha));
    EXPECT_TRUE(same(gradient.constant, separate.constant));
    EXPECT_TRUE(same(gradient.score_scale, separate.score_scale));
    std::vector<Real> dk(gradient.k.size()), dv(gradient.v.size()), dbeta(gradient.beta.size());
    for (std::size_t n = 0; n < source.size(); ++n) {
      for (std::size_t m = 0; m < 20; ++m) dk[source[n] * 20 + m] += separate.k[n * 20 + m];
      for (std::size_t m = 0; m < 35; ++m) dv[source[n] * 35 + m] += separate.v[n * 35 + m];
    }
    for (std::size_t h = 0; lln && h < 8; ++h) dbeta[source[h]] += separate.beta[h];
    const auto magnitude = c.magnitudes();
    EXPECT_TRUE(within(gradient.k, dk, magnitude.k, unit, 16));
    EXPECT_TRUE(within(gradient.v, dv, magnitude.v, unit, 16));
    EXPECT_TRUE(within(gradient.beta, dbeta, magnitude.beta, unit, 16));
  }
}

/// Hides keys and fills them with NaN; the result must be that of the problem without them.
TEST_P(ReferenceMask, HiddenKeysAreAsIfDeleted) {
  auto s = settings(false);
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 4, .nk = 9, .d = 5, .dv = 3};
  s.key_mask = {1, 0, 1, 1, 0, 0, 1, 1, 0};
  auto c = random_case<Real>(problem, s, 101);
  std::vector<std::size_t> visible;
  for (std::size_t j = 0; j < 9; ++j) {
    if (s.key_mask[j] != 0) {
      visible.push_back(j);
      continue;
    }
    for (std::size_t n = 0; n < 5; ++n) c.tensors.k[j * 5 + n] = poison;
    for (std::size_t n = 0; n < 3; ++n) c.tensors.v[j * 3 + n] = poison;
  }
  auto deleted = c;
  deleted.settings.key_mask.clear();
  deleted.problem.nk = 5;
  deleted.tensors.k = permuted(c.tensors.k, visible, 5);
  deleted.tensors.v = permuted(c.tensors.v, visible, 3);
  EXPECT_TRUE(same(c.forward(), deleted.forward()));
  const auto gradient = c.backward(), expected = deleted.backward();
  EXPECT_TRUE(same(gradient.q, expected.q));
  EXPECT_TRUE(same(permuted(gradient.k, visible, 5), expected.k));
  EXPECT_TRUE(same(permuted(gradient.v, visible, 3), expected.v));
  EXPECT_TRUE(same(gradient.alpha, expected.alpha));
  EXPECT_TRUE(same(gradient.beta, expected.beta));
  EXPECT_TRUE(same(gradient.constant, expected.constant));
  EXPECT_TRUE(same(gradient.score_scale, expected.score_scale));
  EXPECT_TRUE(same(c.magnitudes().q, deleted.magnitudes().q));
  EXPECT_TRUE(same(permuted(c.magnitudes().k, visible, 5), deleted.magnitudes().k));
  for (std::size_t j = 0; j < 9; ++j)
    if (s.key_mask[j] == 0) {
      EXPECT_TRUE(all_zero(row_range(gradient.k, static_cast<std::int64_t>(j), 1, 5)));
      EXPECT_TRUE(all_zero(row_range(gradient.v, static_cast<std::int64_t>(j), 1, 3)));
    }
}

TEST_P(ReferenceMask, HiddenKeysKeepTheirPositionUnderACausalMask) {
  auto s = settings(true);
  // With key 1 hidden, query i of 3 sees keys 0, ..., i + 1 of 4 but key 1.
  s.key_mask = {1, 0, 1, 1};
  const auto c = random_case<Real>(
      {.batch = 1, .heads = 1, .kv_heads = 1, .nq = 3, .nk = 4, .d = 5, .dv = 2}, s, 111);
  const auto o = c.forward();
  const std::vector<std::vector<std::size_t>> seen{{0}, {0, 2}, {0, 2, 3}};
  for (std::int64_t i = 0; i < 3; ++i) {
    auto row = part(c, i, 1, 0, 4);
    const auto& keys = seen[static_cast<std::size_t>(i)];
    row.settings.causal = false;
    row.settings.key_mask.clear();
    row.problem.nk = static_cast<std::int64_t>(keys.size());
    row.tensors.k = permuted(c.tensors.k, keys, 5);
    row.tensors.v = permuted(c.tensors.v, keys, 2);
    EXPECT_TRUE(same(row_range(o, i, 1, 2), row.forward()));
  }
}

TEST_P(ReferenceInvariance, TheMaskBelongsToItsBatchEntry) {
  auto s = settings();
  const Problem problem{.batch = 2, .heads = 2, .kv_heads = 2, .nq = 4, .nk = 5, .d = 6, .dv = 3};
  s.key_mask = {1, 1, 1, 1, 1, 0, 1, 1, 1, 0};
  const auto c = random_case<Real>(problem, s, 121);
  auto open = c;
  open.settings.key_mask.clear();
  const auto o = c.forward(), unmasked = open.forward();
  EXPECT_TRUE(same(row_range(o, 0, 8, 3), row_range(unmasked, 0, 8, 3)));
  EXPECT_FALSE(same(row_range(o, 8, 4, 3), row_range(unmasked, 8, 4, 3)));
  EXPECT_FALSE(same(row_range(o, 12, 4, 3), row_range(unmasked, 12, 4, 3)));
}

TEST_P(ReferenceInvariance, PackedMembersAreSeparateCalls) {
  auto s = settings();
  // A causal member has as many keys as queries or more; one member has no query, one nothing at
  // all.
  s.cu_seqlens_q = {0, 3, 3, 3, 4, 8};
  s.cu_seqlens_k = {0, 3, 4, 4, 6, 11};
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 8, .nk = 11, .d = 5, .dv = 2};
  const auto c = random_case<Real>(problem, s, 131);
  std::vector<Real> o;
  reference::GradientSet<Real> separate;
  std::vector<Real> alpha(c.settings.alpha.size()), beta(c.settings.beta.size());
  for (std::size_t m = 0; m + 1 < s.cu_seqlens_q.size(); ++m) {
    const auto member = part(c, s.cu_seqlens_q[m], s.cu_seqlens_q[m + 1] - s.cu_seqlens_q[m],
                             s.cu_seqlens_k[m], s.cu_seqlens_k[m + 1] - s.cu_seqlens_k[m]);
    append(o, member.forward());
    const auto gradient = member.backward();
    append(separate.q, gradient.q);
    append(separate.k, gradient.k);
    append(separate.v, gradient.v);
    for (std::size_t n = 0; n < alpha.size(); ++n) alpha[n] += gradient.alpha[n];
    for (std::size_t n = 0; n < beta.size(); ++n) beta[n] += gradient.beta[n];
  }
  EXPECT_TRUE(same(c.forward(), o));
  const auto gradient = c.backward();
  EXPECT_TRUE(same(gradient.q, separate.q));
  EXPECT_TRUE(same(gradient.k, separate.k));
  EXPECT_TRUE(same(gradient.v, separate.v));
  const auto magnitude = c.magnitudes();
  EXPECT_TRUE(within(gradient.alpha, alpha, magnitude.alpha, unit, 8));
  EXPECT_TRUE(within(gradient.beta, beta, magnitude.beta, unit, 8));

  // What stands in one member cannot be seen in another.
  auto poisoned = c;
  for (std::size_t n = 0; n < 3 * 5; ++n) poisoned.tensors.k[n] = poisoned.tensors.q[n] = poison;
  for (std::size_t n = 0; n < 3 * 2; ++n) poisoned.tensors.v[n] = poison;
  EXPECT_TRUE(same(row_range(poisoned.forward(), 3, 5, 2), row_range(o, 3, 5, 2)));
  const auto of_poisoned = poisoned.backward();
  EXPECT_TRUE(same(row_range(of_poisoned.q, 3, 5, 5), row_range(gradient.q, 3, 5, 5)));
  EXPECT_TRUE(same(row_range(of_poisoned.k, 3, 8, 5), row_range(gradient.k, 3, 8, 5)));
  EXPECT_TRUE(same(row_range(of_poisoned.v, 3, 8, 2), row_range(gradient.v, 3, 8, 2)));
}

TEST_P(ReferenceMask, FutureKeysDoNotLeak) {
  auto s = settings(true);
  const Problem problem{.batch = 1, .heads = 2, .kv_heads = 1, .nq = 6, .nk = 8, .d = 5, .dv = 3};
  const auto c = random_case<Real>(problem, s, 141);
  auto poisoned = c;
  // Key 5 is the future of queries 0, 1 and 2, which see keys up to 4.
  for (std::size_t n = 5 * 5; n < 8 * 5; ++n) poisoned.tensors.k[n] = poison;
  for (std::size_t n = 5 * 3; n < 8 * 3; ++n) poisoned.tensors.v[n] = poison;
  const auto o = c.forward(), found = poisoned.forward();
  const auto dq = c.backward().q, found_dq = poisoned.backward().q;
  for (const std::int64_t head : {0, 1}) {
    EXPECT_TRUE(same(row_range(found, head * 6, 3, 3), row_range(o, head * 6, 3, 3)));
    EXPECT_TRUE(same(row_range(found_dq, head * 6, 3, 5), row_range(dq, head * 6, 3, 5)));
    // The other rows do see it: the mask hides no more than it should, and NaN is not swallowed.
    for (std::size_t n = static_cast<std::size_t>(head * 6 + 3) * 3;
         n < static_cast<std::size_t>(head * 6 + 6) * 3; ++n)
      EXPECT_TRUE(std::isnan(found[n]));
  }
}

}  // namespace
