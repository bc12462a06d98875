// SPDX-License-Identifier: BSD-3-Clause

// What must not change a result, and identities that hold for every input.

#include <numeric>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Copies blocks of `width` numbers: block n of the result is block order[n] of x.
template <class T>
std::vector<T> reordered(const std::vector<T>& x, const std::vector<std::size_t>& order,
                         std::int64_t width) {
  std::vector<T> result;
  result.reserve(x.size());
  for (const std::size_t n : order) {
    const auto begin = x.begin() + static_cast<std::int64_t>(n) * width;
    result.insert(result.end(), begin, begin + width);
  }
  return result;
}

/// The same order in each of `groups` runs of order.size() blocks.
std::vector<std::size_t> in_each(const std::vector<std::size_t>& order, std::int64_t groups) {
  std::vector<std::size_t> result;
  for (std::int64_t g = 0; g < groups; ++g)
    for (const std::size_t n : order)
      result.push_back(static_cast<std::size_t>(g) * order.size() + n);
  return result;
}

template <class C>
class Invariance : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;
  static constexpr double u = std::numeric_limits<T>::epsilon() / 2;
};

TYPED_TEST_SUITE(Invariance, OverAllVariants, ConfigName);

// Without a mask keys are a set. Both orders are held to the bounds of the reference of one of
// them.
TYPED_TEST(Invariance, KeysAreASetWithoutAMask) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Problem p{2, 2, 1, 33, 90, 4, 3};
  const Options options{.normalise = true, .chunk = 16, .segments = 2};
  const Case c = random_case<T, V>(p, options);
  Random random(seed());
  const auto order =
      in_each(random.permutation(static_cast<std::size_t>(p.nk)), p.batch * p.kv_heads);
  Case permuted = c;
  permuted.k = reordered(c.k, order, p.d);
  permuted.v = reordered(c.v, order, p.dv);
  auto expected = expected_of<T, V>(c, options);
  for (auto* of : {&expected.gradient.k, &expected.magnitude.k}) *of = reordered(*of, order, p.d);
  for (auto* of : {&expected.gradient.v, &expected.magnitude.v}) *of = reordered(*of, order, p.dv);
  const auto found = attend<T, typename TypeParam::ExecSpace, V>(permuted, options);
  EXPECT_TRUE((agrees<T, V>(permuted, found, expected, options.chunk)));
}

// Windows of a state, whatever their number, change no bit: masks, members, states and segments
// included.
TYPED_TEST(Invariance, WindowsChangeNoBit) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  if (ExactVariant<V>) GTEST_SKIP() << V::name << " has no state";
  const auto check = [](const Case& c, Options options) {
    options.tiles = 1;
    const auto whole = attend<T, ExecSpace, V>(c, options);
    for (const int tiles : {2, 3, 5}) {
      options.tiles = tiles;
      SCOPED_TRACE(describe(c.problem, options) + " tiles=" + std::to_string(tiles));
      EXPECT_EQ((Attention<T, ExecSpace, V>(c, options).plan(Pass::forward).tiles),
                std::min<int>(tiles, 50 / (64 / static_cast<int>(sizeof(T)))));
      auto found = attend<T, ExecSpace, V>(c, options);
      for (auto [sums, expected] :
           {std::pair{&found.alpha, &whole.alpha}, {&found.beta, &whole.beta}}) {
        ASSERT_EQ(sums->size(), expected->size());
        for (std::size_t h = 0; h < sums->size(); ++h)  // sums over windows, in fp64
          EXPECT_NEAR((*sums)[h], (*expected)[h], 1e-9 * (1 + std::abs((*expected)[h])));
        *sums = *expected;
      }
      EXPECT_TRUE(same_bits(found, whole));
    }
  };
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false})
      for (const int segments : {1, 2}) {
        const Options options{.causal = causal, .normalise = normalise, .segments = segments};
        check(random_case<T, V>({1, 4, 2, 37, 50, 41, 50}, options), options);
        Case stateful = random_case<T, V>({1, 2, 1, 20, 35, 41, 50}, options);
        Random random(seed());
        const std::int64_t sums = features_of_row<V>(41);
        stateful.initial = StateValues{random.normals(sums * 50), random.uniforms(sums, 1, 2), {}};
        if (is_scaled<V>)
          for (int d = 0; d < sums; ++d) stateful.initial->shift.push_back(d % 5 - 2);
        stateful.last_cotangent = StateValues{random.normals(sums * 50), random.normals(sums), {}};
        stateful.wants_last = true;
        for (int n = 0; n < 35; ++n)
          stateful.key_mask.push_back(static_cast<std::uint8_t>(n % 4 != 1));
        check(stateful, options);
      }
}

// Rows that can serve where they lie give the bits of rows that must be copied first.
TYPED_TEST(Invariance, PlacesChangeNoBit) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false}) {
      const Options options{.causal = causal, .normalise = normalise};
      if (!takes<V>(options)) continue;
      const Case c = random_case<T, V>({1, 2, 2, 70, 70, 64, 32}, options);
      const auto in_place = attend<T, ExecSpace, V>(c, options);
      for (const Layout layout : {Layout::left, Layout::gaps, Layout::transposed}) {
        Arrangement at;
        at.q = at.k = at.v = at.o = at.d_o = at.d_q = at.d_k = at.d_v = layout;
        EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options, at), in_place))
            << describe(c.problem, options);
      }
    }
}

// A batch is many calls.
TYPED_TEST(Invariance, BatchesAreIndependent) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{3, 4, 2, 50, 70, 5, 3};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .normalise = true, .segments = 2};
    const Case c = random_case<T, V>(p, options);
    const auto whole = attend<T, ExecSpace, V>(c, options);
    Outcome<T> joined;
    std::vector<double> Outcome<T>::* const parameters[] = {&Outcome<T>::alpha, &Outcome<T>::beta,
                                                            &Outcome<T>::constant, &Outcome<T>::scale};
    for (const auto parameter : parameters) (joined.*parameter).resize((whole.*parameter).size());
    for (std::int64_t b = 0; b < p.batch; ++b) {
      Case one = c;
      one.problem.batch = 1;
      const auto slice = [&](auto& x) {
        const auto n = static_cast<std::int64_t>(x.size()) / p.batch;
        x = {x.begin() + b * n, x.begin() + (b + 1) * n};
      };
      slice(one.q);
      slice(one.k);
      slice(one.v);
      slice(one.d_o);
      const auto part = attend<T, ExecSpace, V>(one, options);
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(joined.o, part.o);
      append(joined.denominator, part.denominator);
      append(joined.q, part.q);
      append(joined.k, part.k);
      append(joined.v, part.v);
      for (const auto parameter : parameters)
        for (std::size_t h = 0; h < (part.*parameter).size(); ++h)
          (joined.*parameter)[h] += (part.*parameter)[h];
    }
    for (const auto parameter : parameters) {
      const auto& expected = whole.*parameter;
      for (std::size_t h = 0; h < expected.size(); ++h)
        EXPECT_NEAR((joined.*parameter)[h], expected[h], 1e-13 * std::abs(expected[h])) << h;
      joined.*parameter = expected;
    }
    EXPECT_TRUE(same_bits(whole, joined));
  }
}

// B39: heads do not mix: permuted heads give permuted results, and a head alone gives its own.
TYPED_TEST(Invariance, B39HeadsAreIndependent) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 3, 3, 70, 70, 5, 4};
  const std::vector<std::size_t> order{2, 0, 1};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .normalise = true};
    const Case c = random_case<T, V>(p, options);
    const auto expected = attend<T, ExecSpace, V>(c, options);
    const auto by_head = in_each(order, p.batch);
    const auto reorder = [&](auto& x) {
      x = reordered(x, by_head, static_cast<std::int64_t>(x.size()) / (p.batch * p.heads));
    };
    Case permuted = c;
    for (auto* x : {&permuted.q, &permuted.k, &permuted.v, &permuted.d_o}) reorder(*x);
    if (!c.alpha.empty()) permuted.alpha = reordered(c.alpha, order, 1);
    if (!c.beta.empty()) permuted.beta = reordered(c.beta, order, 1);
    if (!c.constant.empty()) permuted.constant = reordered(c.constant, order, 1);
    auto permuted_expected = expected;
    reorder(permuted_expected.o);
    reorder(permuted_expected.denominator);
    reorder(permuted_expected.q);
    reorder(permuted_expected.k);
    reorder(permuted_expected.v);
    if (!c.alpha.empty()) permuted_expected.alpha = reordered(expected.alpha, order, 1);
    if (!c.beta.empty()) permuted_expected.beta = reordered(expected.beta, order, 1);
    for (auto* x : {&permuted_expected.constant, &permuted_expected.scale})
      if (!x->empty()) *x = reordered(*x, order, 1);
    EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(permuted, options), permuted_expected));

    Case alone = c;
    alone.problem = {1, 1, 1, p.nq, p.nk, p.d, p.dv};
    const auto first = [&](auto& x) {
      x.resize(x.size() / static_cast<std::size_t>(p.batch * p.heads));
    };
    for (auto* x : {&alone.q, &alone.k, &alone.v, &alone.d_o}) first(*x);
    if (!alone.alpha.empty()) alone.alpha.resize(1);
    if (!alone.beta.empty()) alone.beta.resize(1);
    if (!alone.constant.empty()) alone.constant.resize(1);
    Options one_segment = options;
    one_segment.segments = 1;
    auto found = attend<T, ExecSpace, V>(alone, one_segment);
    auto whole = attend<T, ExecSpace, V>(c, one_segment);
    first(whole.o);
    EXPECT_TRUE(same_bits(found.o, whole.o));
    first(whole.k);
    EXPECT_TRUE(same_bits(found.k, whole.k));
  }
}

// B42: query heads that share a key head give what repeated keys give, and their key gradients add
// up.
TYPED_TEST(Invariance, B42GroupedQueriesEqualRepeatedKeys) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t kv_heads : {1, 2, 8})
    for (const bool causal : {false, true}) {
      const Problem p{1, 8, kv_heads, 40, 70, 4, 3};
      const Options options{.causal = causal, .normalise = true, .segments = 2};
      SCOPED_TRACE(describe(p, options));
      const Case c = random_case<T, V>(p, options);
      const auto grouped = attend<T, ExecSpace, V>(c, options);
      std::vector<std::size_t> owner;
      for (std::int64_t h = 0; h < p.heads; ++h)
        owner.push_back(static_cast<std::size_t>(h / p.group()));
      Case repeated = c;
      repeated.problem.kv_heads = p.heads;
      repeated.k = reordered(c.k, owner, p.nk * p.d);
      repeated.v = reordered(c.v, owner, p.nk * p.dv);
      if (!c.beta.empty()) repeated.beta = reordered(c.beta, owner, 1);
      const auto separate = attend<T, ExecSpace, V>(repeated, options);
      EXPECT_TRUE(same_bits(grouped.o, separate.o));
      EXPECT_TRUE(same_bits(grouped.denominator, separate.denominator));
      EXPECT_TRUE(same_bits(grouped.q, separate.q));
      const auto expected = expected_of<T, V>(c, options);
      const auto& magnitude = expected.magnitude;
      const auto counts = reference::rounding_counts(p, expected.settings, 64);
      const auto summed = [&](const std::vector<T>& x) {
        using Real = oracle_t<T>;
        const std::size_t width = x.size() / static_cast<std::size_t>(p.heads);
        std::vector<Real> result(width * static_cast<std::size_t>(kv_heads));
        for (std::size_t n = 0; n < x.size(); ++n)
          result[owner[n / width] * width + n % width] += static_cast<Real>(x[n]);
        return result;
      };
      EXPECT_TRUE(
          (within_bounds<T>("dk", grouped.k, summed(separate.k), magnitude.k, 2 * counts.k)));
      EXPECT_TRUE(
          (within_bounds<T>("dv", grouped.v, summed(separate.v), magnitude.v, 2 * counts.v)));
    }
}

// B40: the scale cancels where rows are normalised, and is a plain factor where they are not.
TYPED_TEST(Invariance, B40Scale) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 2, 60, 80, 5, 3};
  for (const bool causal : {false, true}) {
    Options options{.causal = causal, .normalise = true};
    const Case c = random_case<T, V>(p, options);
    const auto normalised = attend<T, ExecSpace, V>(c, options);
    for (const double scale : {0.1, -2.0}) {
      options.scale = scale;
      EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options), normalised)) << scale;
    }
    options = {.causal = causal, .normalise = false};
    if (!takes<V>(options)) continue;
    const auto plain = attend<T, ExecSpace, V>(c, options);
    for (const double scale : {0.1, -2.0}) {
      options.scale = scale;
      const auto found = attend<T, ExecSpace, V>(c, options);
      EXPECT_TRUE((engine_agrees<T, ExecSpace, V>(c, options))) << scale;
      if (scale != -2.0) continue;  // a power of two is an exact factor
      const auto exact = [](const auto& scaled, const auto& original) {
        for (std::size_t n = 0; n < scaled.size(); ++n)
          if (scaled[n] != -2 * original[n]) return false;
        return scaled.size() == original.size();
      };
      EXPECT_TRUE(exact(found.o, plain.o) && exact(found.q, plain.q) && exact(found.k, plain.k) &&
                  exact(found.v, plain.v) && exact(found.alpha, plain.alpha) &&
                  exact(found.beta, plain.beta));
    }
  }
}

// B41: rows of weights sum to 1: values of 1 give outputs of 1, and column sums of dV are those of
// dO.
TYPED_TEST(Invariance, B41WeightsSumToOne) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 1, 1, 50, 70, 6, 3};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .normalise = true};
    Case c = random_case<T, V>(p, options);
    const auto general = attend<T, ExecSpace, V>(c, options);
    const auto expected = expected_of<T, V>(c, options);
    const auto counts = reference::rounding_counts(p, expected.settings, 64);
    for (std::int64_t e = 0; e < p.dv; ++e) {
      long double by_keys = 0, by_rows = 0, allowed = 0;
      for (std::int64_t j = 0; j < p.nk; ++j) {
        const auto at = static_cast<std::size_t>(j * p.dv + e);
        by_keys += static_cast<long double>(general.v[at]);
        allowed += static_cast<long double>(counts.v * this->u) * expected.magnitude.v[at] +
                   static_cast<long double>(this->u) * std::abs(general.v[at]);
      }
      for (std::int64_t i = 0; i < p.nq; ++i)
        if (general.denominator[static_cast<std::size_t>(i)] != 0)
          by_rows += c.d_o[static_cast<std::size_t>(i * p.dv + e)];
      EXPECT_LE(std::abs(by_keys - by_rows), allowed) << "column " << e;
    }
    std::fill(c.v.begin(), c.v.end(), 1.0);
    const auto ones = attend<T, ExecSpace, V>(c, options);
    const auto magnitude = expected_of<T, V>(c, options).magnitude;
    for (std::size_t n = 0; n < ones.o.size(); ++n) {
      if (ones.denominator[n / 3] == 0) continue;
      ASSERT_NEAR(static_cast<double>(ones.o[n]), 1.0,
                  counts.o * this->u * static_cast<double>(magnitude.o[n]));
    }
  }
}

// Euler's identity. Homogeneous features of degree r: sum q dq = sum k dk = r (dO . O), which is 0
// where rows are normalised, for every row of queries. Rows divided by their norm have degree 0. LLN: sum_d dq_d = 0 for every row, sum_jd
// dk_jd = 0.
TYPED_TEST(Invariance, GradientsAlongSymmetries) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  using reference::Kernel;
  const auto kernel = reference::kernel_from_name(V::name);
  for (const auto none : {Kernel::elu, Kernel::softmax, Kernel::taylor, Kernel::performer,
                          Kernel::cosine})  // whose eps is not to be set to 0
    if (kernel == none) GTEST_SKIP() << V::name << " has no such symmetry";
  const bool lln = kernel == reference::Kernel::lln;
  const bool affine = kernel == reference::Kernel::affine;
  const double degree = affine ? 0 : kernel == reference::Kernel::quadratic ? 2 : 1;
  const Problem p{1, 2, 2, 40, 60, 5, 3};
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false}) {
      if (lln && !normalise) continue;
      const Options options{.causal = causal, .normalise = normalise, .scale = 0.5};
      SCOPED_TRACE(describe(p, options));
      Case c = random_case<T, V>(p, options);
      c.affine.norm_eps = 0;
      const auto found = attend<T, ExecSpace, V>(c, options);
      const auto expected = expected_of<T, V>(c, options);
      const auto counts = reference::rounding_counts(p, expected.settings, 64);
      const auto along = [&](const std::vector<double>& x, std::size_t n) {
        return lln ? 1.0 : x[n];
      };
      double keys = 0, keys_allowed = 0;
      for (std::size_t n = 0; n < found.k.size(); ++n) {
        keys += along(c.k, n) * static_cast<double>(found.k[n]);
        keys_allowed += std::abs(along(c.k, n)) * this->u *
                        (counts.k * static_cast<double>(expected.magnitude.k[n]) +
                         static_cast<double>(std::abs(found.k[n])));
      }
      double total = 0, total_allowed = 0;
      for (std::int64_t i = 0; i < p.heads * p.nq; ++i) {
        double row = 0, row_allowed = 0, loss = 0;
        for (std::int64_t d = 0; d < p.d; ++d) {
          const auto n = static_cast<std::size_t>(i * p.d + d);
          row += along(c.q, n) * static_cast<double>(found.q[n]);
          row_allowed += std::abs(along(c.q, n)) * this->u *
                         (counts.q * static_cast<double>(expected.magnitude.q[n]) +
                          static_cast<double>(std::abs(found.q[n])));
        }
        if (!normalise)
          for (std::int64_t e = 0; e < p.dv; ++e) {
            const auto n = static_cast<std::size_t>(i * p.dv + e);
            loss += c.d_o[n] * static_cast<double>(expected.o[n]);
          }
        EXPECT_LE(std::abs(row - degree * loss), row_allowed) << "row " << i;
        total += degree * loss;
        total_allowed += row_allowed;
      }
      EXPECT_LE(std::abs(keys - total), keys_allowed + total_allowed);
    }
}

// B50: the same call gives the same bits every time.
TYPED_TEST(Invariance, B50TenRunsGiveTheSameBits) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 4, 2, 300, 300, 9, 11};
  for (const bool causal : {false, true})
    for (const int segments : {0, 3}) {
      const Options options{.causal = causal, .segments = segments};
      const Case c = random_case<T, V>(p, options);
      const auto first = attend<T, ExecSpace, V>(c, options);
      for (int run = 1; run < 10; ++run)
        ASSERT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options), first)) << "run " << run;
    }
}

}  // namespace
