// SPDX-License-Identifier: BSD-3-Clause

// The dropout substitute in the engine: which noise, the same everywhere, none without p.

#include <linattn/noise.hpp>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr Dropout noise{.p = 0.3, .seed = 0x123456789abcdef0, .offset = 0xfedcba9876543210};

template <class C>
class DropoutNoise : public BoundedTest {};
TYPED_TEST_SUITE(DropoutNoise, OverVariants, ConfigName);

// Forward and backward of every variant, Dv no multiple of 4, windows, masks, packed members.
TYPED_TEST(DropoutNoise, AgreesWithTheReference) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false})
      for (const int tiles : {1, 2}) {
        const Options options{.causal = causal,
                              .normalise = normalise,
                              .scale = 0.7,
                              .segments = 2,
                              .tiles = tiles,
                              .dropout = noise};
        SCOPED_TRACE(describe({}, options));
        const Case c = random_case<T, V>({2, 4, 2, 37, 50, 5, 39}, options);
        EXPECT_TRUE((engine_agrees<T, ExecSpace, V>(c, options)));
        Case packed = random_case<T, V>({1, 2, 1, 50, 60, 5, 6}, options);
        pack(packed, {20, 0, 29, 1}, {25, 3, 31, 1});
        EXPECT_TRUE((engine_agrees<T, ExecSpace, V>(packed, options)));
        Case in_place = random_case<T, V>({1, 2, 1, 32, 32, 16, 32}, options);
        EXPECT_TRUE((engine_agrees<T, ExecSpace, V>(in_place, options)));
      }
}

// y = o (1 + p n) for each element: two roundings, and two normals that are each good to 4 units in
// the last place of max(1, |n|).
TYPED_TEST(DropoutNoise, MultipliesTheOutput) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 1, 19, 19, 3, 7};
  const Case c = random_case<T, V>(p, {.causal = true});
  const auto o = attend_forward<T, ExecSpace, V>(c, {.causal = true});
  const auto y = attend_forward<T, ExecSpace, V>(c, {.causal = true, .dropout = noise});
  T n[4];
  for (std::size_t e = 0; e < o.size(); ++e) {
    LinAttn::detail::four_normals(noise.seed, noise.offset, e / 4, n);
    const T expected = o[e] * (T(1) + static_cast<T>(noise.p) * n[e % 4]);
    const double size = 2 + 8 * noise.p * std::max(1.0, std::abs(static_cast<double>(n[e % 4])));
    EXPECT_NEAR(y[e], expected, size * std::numeric_limits<T>::epsilon() * std::abs(o[e])) << e;
  }
}

// The plan, the layout and the execution space change no normal, so they change what they change
// without noise: here, nothing.
TYPED_TEST(DropoutNoise, TheSameForAnyWindowsAndLayout) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true}) {
    Options options{.causal = causal, .chunk = 16, .tiles = 1, .dropout = noise};
    const Case c = random_case<T, V>({2, 2, 1, 37, 50, 9, 50}, options);
    const auto expected = attend<T, ExecSpace, V>(c, options);
    options.tiles = 3;
    auto found = attend<T, ExecSpace, V>(c, options);
    EXPECT_TRUE(same_bits(found.o, expected.o) && same_bits(found.q, expected.q));
    EXPECT_TRUE(same_bits(found.k, expected.k) && same_bits(found.v, expected.v));
    options.tiles = 1;
    Arrangement at;
    at.o = at.d_o = at.v = at.q = Layout::gaps;
    EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options, at), expected));
    EXPECT_TRUE(same_bits(attend<T, Kokkos::Serial, V>(c, options), expected));
  }
}

// With other chunks and segments rounding differs, the noise does not.
TYPED_TEST(DropoutNoise, TheSameForAnyChunk) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Case c = random_case<T, V>({1, 2, 1, 90, 90, 4, 6}, {.causal = true});
  for (const int chunk : {1, 7, 64})
    for (const int segments : {1, 3}) {
      const Options options{.causal = true, .chunk = chunk, .segments = segments, .dropout = noise};
      SCOPED_TRACE(describe(c.problem, options));
      EXPECT_TRUE((engine_agrees<T, ExecSpace, V>(c, options)));
    }
}

// p = 0 is no noise at all, whatever the seed.
TYPED_TEST(DropoutNoise, NoneWithoutP) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Case c = random_case<T, V>({1, 2, 1, 40, 40, 16, 16}, {.causal = true});
  EXPECT_TRUE(same_bits(
      attend<T, ExecSpace, V>(c, {.causal = true, .dropout = {.seed = 5, .offset = 7}}),
      attend<T, ExecSpace, V>(c, {.causal = true})));
}

// Parts of the batch, of the heads and of the queries, told where they lie, see the noise of the
// whole.
TEST(DropoutPlacement, PartsSeeTheNoiseOfTheWhole) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  using T = float;
  const Problem p{4, 6, 6, 10, 10, 3, 5};
  const Options options{.causal = false, .dropout = noise};
  const Case c = random_case<T, Elu>(p, options);
  const auto whole = attend_forward<T, ExecSpace, Elu>(c, options);
  const auto part = [&](std::int64_t b, std::int64_t batch, std::int64_t h, std::int64_t heads,
                        std::int64_t i, std::int64_t queries) {
    Case of = c;
    of.problem = {batch, heads, heads, queries, 10, 3, 5};
    const auto cut = [&](const std::vector<double>& x, std::int64_t first, std::int64_t rows,
                         std::int64_t columns) {
      std::vector<double> result;
      for (std::int64_t s = b; s < b + batch; ++s)
        for (std::int64_t head = h; head < h + heads; ++head) {
          const auto begin = x.begin() + ((s * 6 + head) * 10 + first) * columns;
          result.insert(result.end(), begin, begin + rows * columns);
        }
      return result;
    };
    of.q = cut(c.q, i, queries, 3);
    of.d_o = cut(c.d_o, i, queries, 5);
    of.k = cut(c.k, 0, 10, 3);
    of.v = cut(c.v, 0, 10, 5);
    Options with = options;
    with.dropout.first_batch = b;
    with.dropout.first_head = h;
    with.dropout.first_query = i;
    with.dropout.heads = 6;
    with.dropout.queries = 10;
    const auto found = attend_forward<T, ExecSpace, Elu>(of, with);
    const std::vector<double> wide(whole.begin(), whole.end());
    const auto expected = cut(wide, i, queries, 5);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t n = 0; n < found.size(); ++n) EXPECT_EQ(found[n], static_cast<T>(expected[n])) << n;
  };
  part(0, 4, 0, 6, 0, 10);
  part(2, 2, 0, 6, 0, 10);
  part(1, 2, 3, 2, 0, 10);
  part(3, 1, 5, 1, 7, 3);
}

TEST(DropoutPlacement, RefusesAPlaceOutsideTheWhole) {
  const Problem p{2, 3, 3, 10, 10, 3, 5};
  const auto refused = [&](const Dropout& d) {
    EXPECT_THROW(d.validate(p), InvalidArgument);
  };
  refused({.p = 0.1, .first_batch = -1});
  refused({.p = 0.1, .first_head = 1});
  refused({.p = 0.1, .first_head = 4, .heads = 6});
  refused({.p = 0.1, .first_query = 1, .queries = 10});
  refused({.p = 0.1, .queries = 9});
  constexpr auto least = std::numeric_limits<std::int64_t>::min(), most = std::numeric_limits<std::int64_t>::max();
  refused({.p = 0.1, .first_batch = most});
  refused({.p = 0.1, .heads = least});
  refused({.p = 0.1, .queries = least});
  refused({.p = 0.1, .first_query = most, .queries = most});
  EXPECT_NO_THROW((Dropout{.p = 0.1, .first_head = 3, .first_query = 5, .heads = 6, .queries = 15}.validate(p)));
}

}  // namespace
