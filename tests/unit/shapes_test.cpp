// SPDX-License-Identifier: BSD-3-Clause

// Empty extents, memory layouts, and gradients that are asked for or not, for every variant.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class Shapes : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;
};

TYPED_TEST_SUITE(Shapes, OverAllVariants, ConfigName);

// B22: every extent may be 0. What is left of outputs and gradients is exactly 0.
TYPED_TEST(Shapes, B22EmptyExtents) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Problem shapes[] = {{0, 2, 2, 9, 9, 3, 4}, {2, 0, 0, 9, 9, 3, 4}, {2, 2, 1, 0, 9, 3, 4},
                            {2, 2, 1, 9, 0, 3, 4}, {2, 2, 1, 0, 0, 3, 4}, {2, 2, 1, 9, 9, 0, 4},
                            {2, 2, 1, 9, 9, 3, 0}, {2, 2, 1, 9, 9, 0, 0}, {0, 0, 0, 0, 0, 0, 0}};
  for (const Problem& p : shapes)
    for (const bool causal : {false, true}) {
      if (causal && p.nq > p.nk) continue;
      for (const bool normalise : {false, true})
        for (const int segments : {0, 3}) {
          const Options options{
              .causal = causal, .normalise = normalise, .chunk = 4, .segments = segments};
          if (!takes<V>(options)) continue;
          SCOPED_TRACE(describe(p, options));
          const Case c = random_case<T, V>(p, options);
          const auto outcome = attend<T, typename TypeParam::ExecSpace, V>(c, options);
          EXPECT_TRUE((agrees<T, V>(c, outcome, expected_of<T, V>(c, options), 4)));
          if (p.nk > 0 && (p.d > 0 || weighs_empty_rows<V>)) continue;
          for (const auto sum : outcome.denominator)
            EXPECT_EQ(ExactVariant<V> ? std::exp(sum) : sum, 0);
        }
    }
}

// B19, B20: the same numbers whatever else is asked for, from one and two tokens on.
TYPED_TEST(Shapes, B20GradientsDoNotDependOnWhatElseIsWanted) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t n : {1, 2, 37})
    for (const bool causal : {false, true}) {
      const Options options{.causal = causal, .chunk = 16, .segments = 2};
      const Problem p{2, 4, 2, n, n, 5, 3};
      SCOPED_TRACE(describe(p, options));
      const Case c = random_case<T, V>(p, options);
      const auto all = attend<T, ExecSpace, V>(c, options);
      for (int bits = 0; bits < 32; ++bits) {
        const Wanted wanted{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0,
                            (bits & 16) != 0};
        auto expected = all;
        if (!wanted.q) expected.q.clear();
        if (!wanted.k) expected.k.clear();
        if (!wanted.v) expected.v.clear();
        if (!wanted.query_parameter) expected.alpha.clear();
        if (!wanted.key_parameter) expected.beta.clear();
        ASSERT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options, {}, wanted), expected)) << bits;
      }
    }
}

// Gradients that are not wanted are not written.
TYPED_TEST(Shapes, UnwantedGradientsStayAsTheyAre) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Options options{.causal = true};
  const Case c = random_case<T, V>({1, 2, 2, 20, 20, 3, 2}, options);
  Attention<T, typename TypeParam::ExecSpace, V> attention(c, options);
  attention.forward();
  attention.backward(
      {.q = false, .k = false, .v = true, .query_parameter = false, .key_parameter = false});
  const auto untouched = [](const auto& x, auto guard) {
    return std::all_of(x.begin(), x.end(), [&](auto element) { return same_bits(element, guard); });
  };
  EXPECT_TRUE(untouched(attention.d_q.get(), attention.d_q.guard()));
  EXPECT_TRUE(untouched(attention.d_k.get(), attention.d_k.guard()));
  EXPECT_TRUE(untouched(attention.d_alpha.get(), attention.d_alpha.guard()));
  EXPECT_TRUE(untouched(attention.d_beta.get(), attention.d_beta.guard()));
  EXPECT_FALSE(untouched(attention.d_v.get(), attention.d_v.guard()));
}

// B24, B26: any memory layout gives the right numbers; nothing between the elements is touched
// (Attention checks the guards).
TYPED_TEST(Shapes, B24EveryLayout) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 4, 2, 41, 70, 5, 7};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .normalise = true, .chunk = 16, .segments = 2};
    SCOPED_TRACE(describe(p, options));
    const Case c = random_case<T, V>(p, options);
    const auto expected = expected_of<T, V>(c, options);
    const auto check = [&](const Arrangement& at) {
      return agrees<T, V>(c, attend<T, ExecSpace, V>(c, options, at), expected, options.chunk);
    };
    for (const Layout l : all_layouts) {  // all alike
      Arrangement at{l, l, l, l, l, l, l, l, l, l, l};
      at.projection = l;
      EXPECT_TRUE(check(at)) << to_string(l);
    }
    for (int shift = 0; shift < 6; ++shift) {  // all different
      const auto l = [&](int n) { return all_layouts[(n + shift) % 6]; };
      EXPECT_TRUE(check({l(0), l(1), l(2), l(3), l(4), l(5), l(5), l(3), l(4), l(5), l(0)}))
          << shift;
    }
  }
}

// Row sums are optional in forward(), and harmless where rows are not normalised.
TYPED_TEST(Shapes, DenominatorIsOptional) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 1, 40, 40, 5, 3};
  for (const bool normalise : {false, true}) {
    const Options options{.causal = true, .normalise = normalise};
    if (!takes<V>(options)) continue;
    const Case c = random_case<T, V>(p, options);
    const auto expected = attend_forward<T, ExecSpace, V>(c, options);
    Attention<T, ExecSpace, V> attention(c, options);
    Arena<ExecSpace> arena(attention.workspace_bytes(Pass::forward));
    const ExecSpace exec;
    Saved<ExecSpace, T> saved{.o = attention.o.ref()};
    if (!normalise) saved.denominator = attention.denominator.ref();
    forward<T>(exec, attention.variant(), attention.inputs(), saved, arena.workspace(), options);
    exec.fence();
    EXPECT_TRUE(same_bits(attention.o.get(), expected));
  }
}

}  // namespace
