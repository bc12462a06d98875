// SPDX-License-Identifier: BSD-3-Clause

// Which keys a row sees: key masks and packed members, each alone and with a causal mask.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Puts `value` into every key and value that the mask hides.
Case with_hidden(Case c, double value) {
  const Problem& p = c.problem;
  for (std::int64_t b = 0; b < p.batch; ++b)
    for (std::int64_t j = 0; j < p.nk; ++j) {
      if (c.key_mask[static_cast<std::size_t>(b * p.nk + j)] != 0) continue;
      for (std::int64_t h = 0; h < p.kv_heads; ++h) {
        const std::int64_t row = (b * p.kv_heads + h) * p.nk + j;
        std::fill_n(c.k.begin() + row * p.d, p.d, value);
        std::fill_n(c.v.begin() + row * p.dv, p.dv, value);
      }
    }
  return c;
}

/// One pattern for each batch entry: random, the first keys hidden, the last ones, all, none.
std::vector<std::uint8_t> mask_patterns(const Problem& p) {
  Random random(seed());
  std::vector<std::uint8_t> mask;
  for (std::int64_t b = 0; b < p.batch; ++b)
    for (std::int64_t j = 0; j < p.nk; ++j) {
      const bool visible[] = {random.integer(0, 2) > 0, j >= p.nk / 2, j < p.nk / 3, false, true};
      mask.push_back(visible[b % 5] ? static_cast<std::uint8_t>(1 + b) : 0);
    }
  return mask;
}

template <class C>
class Visibility : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  /// Every way to cut the work against one answer of the reference.
  static void check(const Case& given, const Case& for_reference, Options options) {
    const auto expected = expected_of<T, V>(for_reference, options);
    for (const int chunk : {0, 1, 16})
      for (const int segments : {1, 3}) {
        options.chunk = chunk;
        options.segments = segments;
        SCOPED_TRACE(describe(given.problem, options));
        Attention<T, ExecSpace, V> attention(given, options);
        attention.forward();
        attention.backward();
        EXPECT_TRUE((agrees<T, V>(given, attention.outcome(), expected,
                                  attention.plan(Pass::backward).chunk)));
      }
  }
};

TYPED_TEST_SUITE(Visibility, OverAllVariants, ConfigName);

// B32, B36: hidden keys are out of every sum and maximum, and get gradients of exactly 0. They hold
// NaN.
TYPED_TEST(Visibility, KeyMask) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Problem shapes[] = {{5, 2, 1, 41, 41, 4, 3}, {1, 2, 2, 20, 83, 3, 5}};
  for (const Problem& p : shapes)
    for (const bool causal : {false, true})
      for (const bool normalise : {true, false}) {
        const Options options{.causal = causal, .normalise = normalise};
        if (!takes<V>(options)) continue;
        Case c = random_case<T, V>(p, options);
        c.key_mask = mask_patterns(p);
        this->check(with_hidden(c, std::numeric_limits<double>::quiet_NaN()), c, options);
      }
}

// What hidden keys and values hold changes no bit.
TYPED_TEST(Visibility, HiddenKeysAreNotRead) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{5, 2, 1, 70, 70, 4, 3};
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .chunk = 16, .segments = segments};
      Case c = random_case<T, V>(p, options);
      c.key_mask = mask_patterns(p);
      const auto expected = attend<T, ExecSpace, V>(c, options);
      for (const double value :
           {0.0, 1e5, std::numeric_limits<double>::quiet_NaN(),
            std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()})
        EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(with_hidden(c, value), options), expected))
            << value;
    }
}

// The mask may have any strides: one row for all batches, columns first, gaps.
TYPED_TEST(Visibility, MaskOfAnyLayout) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{3, 2, 1, 30, 44, 4, 3};
  const Options options{.causal = true};
  Case c = random_case<T, V>(p, options);
  c.key_mask = mask_patterns({1, 2, 1, 30, 44, 4, 3});
  const auto one_row = c.key_mask;
  for (int b = 1; b < 3; ++b) c.key_mask.insert(c.key_mask.end(), one_row.begin(), one_row.end());
  const auto expected = attend<T, ExecSpace, V>(c, options);
  for (const Layout layout : {Layout::left, Layout::gaps}) {
    Arrangement at;
    at.mask = layout;
    EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options, at), expected));
  }
  Attention<T, ExecSpace, V> attention(c, options);
  auto inputs = attention.inputs();
  inputs.key_mask = TensorRef<const std::uint8_t, 2, ExecSpace>(attention.mask.input().data(),
                                                                {p.batch, p.nk}, {0, 1});
  const ExecSpace exec;
  forward<T>(exec, attention.variant(), inputs, attention.saved(), options);
  backward<T>(exec, attention.variant(), inputs, attention.saved(), attention.d_o.input(),
              attention.gradients({}), options);
  EXPECT_TRUE(same_bits(attention.outcome(), expected));
}

/// Numbers of queries and keys of members whose borders lie inside chunks, some of them empty.
struct Members {
  std::vector<std::int64_t> queries, keys;
};

Members member_extents(bool causal) {
  Members members{{5, 0, 33, 1, 0, 70, 16}, {5, 3, 40, 1, 0, 70, 18}};
  if (!causal) {  // a member without keys, and one with more queries than keys
    members.queries.insert(members.queries.end(), {4, 9});
    members.keys.insert(members.keys.end(), {0, 2});
  }
  return members;
}

template <class T, Variant V>
Case packed_case(const Members& members, const Options& options) {
  Problem p{1, 4, 2, 0, 0, 4, 3};
  for (const std::int64_t n : members.queries) p.nq += n;
  for (const std::int64_t n : members.keys) p.nk += n;
  Options unmasked = options;
  unmasked.causal = false;
  Case c = random_case<T, V>(p, unmasked);
  pack(c, members.queries, members.keys);
  return c;
}

TYPED_TEST(Visibility, PackedMembers) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false}) {
      const Options options{.causal = causal, .normalise = normalise};
      if (!takes<V>(options)) continue;
      const Case c = packed_case<T, V>(member_extents(causal), options);
      this->check(c, c, options);
    }
}

// A member alone gives its own bits (tiles of exact attention are as long as the longest member needs, and so are its
// sums), and a NaN in one member stays there.
TYPED_TEST(Visibility, MembersAreIndependent) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .chunk = 16, .segments = 1};
    const Members members = member_extents(causal);
    const Case c = packed_case<T, V>(members, options);
    const Problem& p = c.problem;
    const auto whole = attend<T, ExecSpace, V>(c, options);
    const auto rows = [](const auto& x, std::int64_t heads, std::int64_t total, std::int64_t width,
                         std::int64_t begin, std::int64_t count) {
      std::remove_cvref_t<decltype(x)> result;
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto at = x.begin() + (h * total + begin) * width;
        result.insert(result.end(), at, at + count * width);
      }
      return result;
    };
    Case poisoned = c;
    const std::size_t bad = 2;
    for (std::size_t m = 0; m < members.queries.size(); ++m) {
      const std::int64_t q0 = c.cu_seqlens_q[m], k0 = c.cu_seqlens_k[m];
      const std::int64_t nq = members.queries[m], nk = members.keys[m];
      Case alone = c;
      alone.cu_seqlens_q.clear();
      alone.cu_seqlens_k.clear();
      alone.problem = {1, p.heads, p.kv_heads, nq, nk, p.d, p.dv};
      alone.q = rows(c.q, p.heads, p.nq, p.d, q0, nq);
      alone.k = rows(c.k, p.kv_heads, p.nk, p.d, k0, nk);
      alone.v = rows(c.v, p.kv_heads, p.nk, p.dv, k0, nk);
      alone.d_o = rows(c.d_o, p.heads, p.nq, p.dv, q0, nq);
      if (!ExactVariant<V>) {
        const auto found = attend<T, ExecSpace, V>(alone, options);
        EXPECT_TRUE(same_bits(rows(whole.o, p.heads, p.nq, p.dv, q0, nq), found.o)) << "member " << m;
        EXPECT_TRUE(same_bits(rows(whole.q, p.heads, p.nq, p.d, q0, nq), found.q)) << "member " << m;
        EXPECT_TRUE(same_bits(rows(whole.k, p.kv_heads, p.nk, p.d, k0, nk), found.k))
            << "member " << m;
        EXPECT_TRUE(same_bits(rows(whole.v, p.kv_heads, p.nk, p.dv, k0, nk), found.v))
            << "member " << m;
      }
      if (m != bad) continue;
      const double nan = std::numeric_limits<double>::quiet_NaN();
      for (std::int64_t h = 0; h < p.kv_heads; ++h) {
        std::fill_n(poisoned.k.begin() + (h * p.nk + k0) * p.d, nk * p.d, nan);
        std::fill_n(poisoned.v.begin() + (h * p.nk + k0) * p.dv, nk * p.dv, nan);
      }
      for (std::int64_t h = 0; h < p.heads; ++h)
        std::fill_n(poisoned.q.begin() + (h * p.nq + q0) * p.d, nq * p.d, nan);
    }
    const auto found = attend<T, ExecSpace, V>(poisoned, options);
    for (std::size_t m = 0; m < members.queries.size(); ++m) {
      if (m == bad) continue;
      const std::int64_t q0 = c.cu_seqlens_q[m], k0 = c.cu_seqlens_k[m];
      const std::int64_t nq = members.queries[m], nk = members.keys[m];
      EXPECT_TRUE(same_bits(rows(whole.o, p.heads, p.nq, p.dv, q0, nq),
                            rows(found.o, p.heads, p.nq, p.dv, q0, nq)));
      EXPECT_TRUE(same_bits(rows(whole.k, p.kv_heads, p.nk, p.d, k0, nk),
                            rows(found.k, p.kv_heads, p.nk, p.d, k0, nk)));
    }
  }
}

// No members at all, and members without any token.
TYPED_TEST(Visibility, EmptyPacks) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const Members& members : {Members{{}, {}}, Members{{0}, {0}}, Members{{0, 0}, {0, 3}}}) {
      const Options options{.causal = causal, .segments = 2};
      const auto outcome = attend<T, ExecSpace, V>(packed_case<T, V>(members, options), options);
      EXPECT_TRUE(outcome.o.empty());
      for (const T x : outcome.k) EXPECT_EQ(x, T(0));
      for (const double x : outcome.alpha) EXPECT_EQ(x, 0.0);
      for (const double x : outcome.beta) EXPECT_EQ(x, 0.0);
    }
}

template <class C>
class ManyMembers : public ::testing::Test {};
TYPED_TEST_SUITE(ManyMembers, OverSpaces, ConfigName);

// B27: more packed sequences than a 16-bit launch limit, of 1 to 16 tokens.
TYPED_TEST(ManyMembers, B27EightyThousand) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  Random random(seed());
  Members members;
  for (int m = 0; m < 80000; ++m) members.keys.push_back(random.integer(1, 16));
  members.queries = members.keys;
  Problem p{1, 1, 1, 0, 0, 4, 2};
  for (const std::int64_t n : members.keys) p.nq = p.nk += n;
  Case c = random_case<float, Elu>(p, options);
  pack(c, members.queries, members.keys);
  const auto o = attend_forward<float, ExecSpace, Elu>(c, options);
  const auto feature = [](double x) { return x > 0 ? x + 1 : std::exp(x); };
  double worst = 0;
  for (std::size_t m = 0; m < members.keys.size(); ++m)
    for (std::int64_t i = c.cu_seqlens_k[m]; i < c.cu_seqlens_k[m + 1]; ++i) {
      double sum = 0, numerator[2] = {0, 0}, size[2] = {0, 0};
      for (std::int64_t j = c.cu_seqlens_k[m]; j <= i; ++j) {
        double w = 0;
        for (std::int64_t d = 0; d < 4; ++d)
          w += feature(c.q[static_cast<std::size_t>(4 * i + d)]) *
               feature(c.k[static_cast<std::size_t>(4 * j + d)]);
        sum += w;
        for (std::int64_t e = 0; e < 2; ++e) {
          numerator[e] += w * c.v[static_cast<std::size_t>(2 * j + e)];
          size[e] += w * std::abs(c.v[static_cast<std::size_t>(2 * j + e)]);
        }
      }
      // positive terms, at most 16 of them: 40 roundings are enough, and exp is good to a few
      for (std::int64_t e = 0; e < 2; ++e) {
        const double error = std::abs(o[static_cast<std::size_t>(2 * i + e)] - numerator[e] / sum);
        worst = std::max(worst, error / (60 * 0x1p-24 * size[e] / sum));
      }
    }
  EXPECT_LE(worst, 1);
}

}  // namespace
