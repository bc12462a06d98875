// SPDX-License-Identifier: BSD-3-Clause

// The engine against the dense reference: every variant, scalar, execution space and way to cut the
// work, with extents pairwise different.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class Agreement : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;

  /// Every chunk length and number of segments against one answer of the reference.
  static void check(const Problem& problem, Options options) {
    const Case c = random_case<T, V>(problem, options);
    const auto expected = expected_of<T, V>(c, options);
    for (const int chunk : {0, 1, 7, 16, 64})
      for (const int segments : {1, 2, 5}) {
        options.chunk = chunk;
        options.segments = segments;
        SCOPED_TRACE(describe(problem, options));
        Attention<T, typename C::ExecSpace, V> attention(c, options);
        attention.forward();
        attention.backward();
        EXPECT_TRUE(
            (agrees<T, V>(c, attention.outcome(), expected, attention.plan(Pass::backward).chunk)));
      }
  }

  static void check_all(bool causal, bool normalise) {
    const Options options{
        .causal = causal, .normalise = normalise, .scale = normalise ? 1.0 : 0.37};
    if (!takes<V>(options)) GTEST_SKIP() << V::name << " is normalised";
    //     B  H  Hkv Nq   Nk   D   Dv
    check({2, 3, 3, 37, 37, 5, 7}, options);     // less than a chunk
    check({1, 2, 1, 130, 130, 17, 9}, options);  // no multiple of a chunk; grouped queries
    check({3, 2, 1, 1, 1, 3, 5}, options);       // one token; one key head for all
    check({2, 1, 1, 2, 2, 4, 3}, options);       // two tokens
    check({1, 6, 3, 23, 87, 8, 3}, options);     // fewer queries than keys
    check({1, 2, 2, 64, 64, 16, 33}, options);   // exactly one chunk
    check({1, 1, 1, 65, 65, 20, 1}, options);    // one token more
    check({1, 2, 2, 1, 50, 7, 2}, options);      // one query of a decoder
    check({1, 1, 1, 193, 257, 9, 4}, options);   // many chunks
    if (!causal) check({2, 2, 1, 53, 37, 6, 11}, options);
  }
};

TYPED_TEST_SUITE(Agreement, OverAllVariants, ConfigName);

TYPED_TEST(Agreement, CausalNormalised) { this->check_all(true, true); }
TYPED_TEST(Agreement, CausalPlain) { this->check_all(true, false); }
TYPED_TEST(Agreement, FullNormalised) { this->check_all(false, true); }
TYPED_TEST(Agreement, FullPlain) { this->check_all(false, false); }

// Without options the variant says whether rows are divided by their sums.
TYPED_TEST(Agreement, Defaults) {
  using V = typename TypeParam::V;
  using T = typename TypeParam::T;
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    const Case c = random_case<T, V>({2, 4, 2, 71, 71, 6, 5}, options);
    SCOPED_TRACE(describe(c.problem, options));
    EXPECT_TRUE((engine_agrees<T, typename TypeParam::ExecSpace, V>(c, options)));
  }
}

// B12, B13, B15: any head dimension, powers of two or not, below the width of a vector and above a
// tile, and values of another width than keys.
TYPED_TEST(Agreement, HeadDimensions) {
  using V = typename TypeParam::V;
  using T = typename TypeParam::T;
  const std::pair<int, int> dimensions[] = {
      {1, 1},    {1, 96},  {3, 5},   {5, 192},   {7, 1},    {8, 8},    {8, 96},   {15, 17},
      {16, 5},   {20, 96}, {32, 31}, {60, 1},    {64, 128}, {80, 5},   {96, 192}, {100, 96},
      {128, 32}, {180, 1}, {192, 5}, {192, 192}, {257, 96}, {257, 257}};
  for (const auto& [d, dv] : dimensions) {
    if (!has_small_state<V>(d)) continue;
    const Options options{.causal = d % 2 == 0, .normalise = true, .segments = d % 3 == 0 ? 2 : 0};
    for (const std::int64_t n : {5, 33}) {
      const Problem problem{1, 1, 1, n, n, d, dv};
      SCOPED_TRACE(describe(problem, options));
      const Case c = random_case<T, V>(problem, options);
      EXPECT_TRUE((engine_agrees<T, typename TypeParam::ExecSpace, V>(c, options)));
    }
  }
}

// B18: heads whose state fits no small scratch memory.
TYPED_TEST(Agreement, WideHeads) {
  using V = typename TypeParam::V;
  using T = typename TypeParam::T;
  if (!has_small_state<V>(512)) GTEST_SKIP() << features_of_row<V>(512) << " features";
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .normalise = true};
    const Problem problem{1, 1, 1, 19, 19, 512, 300};
    SCOPED_TRACE(describe(problem, options));
    const Case c = random_case<T, V>(problem, options);
    EXPECT_TRUE((engine_agrees<T, typename TypeParam::ExecSpace, V>(c, options)));
  }
}

}  // namespace
