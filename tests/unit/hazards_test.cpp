// SPDX-License-Identifier: BSD-3-Clause

// Reproductions of what users of such libraries have reported, by the number of the project's list.

#include <numeric>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Inputs of the given problem that all are zero, and d_o that is one.
Case constant_case(const Problem& p) {
  Case c;
  c.problem = p;
  c.q.assign(static_cast<std::size_t>(query_count(p)), 0);
  c.k.assign(static_cast<std::size_t>(key_count(p)), 0);
  c.v.assign(static_cast<std::size_t>(value_count(p)), 0);
  c.d_o.assign(static_cast<std::size_t>(output_count(p)), 1);
  return c;
}

template <class T>
bool all_finite(const std::vector<T>& x) {
  return std::all_of(x.begin(), x.end(), [](T element) { return std::isfinite(element); });
}

template <class T>
bool all_finite(const Outcome<T>& x) {
  return all_finite(x.o) && all_finite(x.denominator) && all_finite(x.q) && all_finite(x.k) &&
         all_finite(x.v) && all_finite(x.alpha) && all_finite(x.beta);
}

template <class T>
std::vector<T> part(const std::vector<T>& x, std::int64_t begin, std::int64_t count) {
  return {x.begin() + begin, x.begin() + begin + count};
}

template <class C>
class Hazards : public BoundedTest {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;
};

TYPED_TEST_SUITE(Hazards, OverScalars, ConfigName);

// B01: weights of 5 over 20,000 tokens; every sum is exact in float.
TYPED_TEST(Hazards, B01EqualValuesOverALongSequence) {
  using T = typename TypeParam::T;
  for (const bool causal : {false, true}) {
    Case c = constant_case({1, 1, 1, 20000, 20000, 1, 1});
    std::fill(c.k.begin(), c.k.end(), 4.0);
    std::fill(c.v.begin(), c.v.end(), 1.0);
    const auto o = attend_forward<T, typename TypeParam::ExecSpace, Elu>(c, {.causal = causal});
    for (std::size_t i = 0; i < o.size(); ++i) ASSERT_EQ(o[i], T(1)) << "row " << i;
  }
}

// Equal values again, of which no sum is exact: one running sum in float is off by 6e-4 here. A
// chunk is summed by itself, and many chunks are added with compensation in float: the error is that of
// one chunk. Few are added plainly, and so are all in double.
TYPED_TEST(Hazards, B01TwoLevelSums) {
  using T = typename TypeParam::T;
  const std::int64_t n = 65536;
  Case c = constant_case({1, 1, 1, n, n, 1, 1});
  const double k = static_cast<double>(static_cast<T>(0.7));
  const double v = static_cast<double>(static_cast<T>(0.3));
  std::fill(c.q.begin(), c.q.end(), 1.0);
  std::fill(c.k.begin(), c.k.end(), k);
  std::fill(c.v.begin(), c.v.end(), v);
  for (const auto& [chunk, segments] : {std::pair{64, 1}, {64, 3}, {8, 1}, {4, 3}})
    for (const bool normalise : {false, true}) {
      const Options options{
          .causal = true, .normalise = normalise, .chunk = chunk, .segments = segments};
      Attention<T, typename TypeParam::ExecSpace, Identity> attention(c, options);
      attention.forward();
      const bool compensated = attention.plan(Pass::forward).compensated;
      EXPECT_EQ(compensated, sizeof(T) == 4 && chunk <= 8);
      const double allowed = static_cast<double>(chunk + 8 + (compensated ? 0 : n / chunk)) *
                             static_cast<double>(std::numeric_limits<T>::epsilon() / 2);
      double worst = 0;
      const auto sums = normalise ? attention.denominator.get() : attention.o.get();
      for (std::int64_t i = 0; i < n; ++i) {
        const double expected = static_cast<double>(i + 1) * k * (normalise ? 1 : v);
        const double found = static_cast<double>(sums[static_cast<std::size_t>(i)]);
        worst = std::max(worst, std::abs(found / expected - 1));
      }
      EXPECT_LE(worst, allowed) << segments << " segments" << (normalise ? ", row sums" : "");
    }
}

// B03: one key whose exponential alone overflows the type.
TYPED_TEST(Hazards, B03OneKeyBeyondTheExponentialRange) {
  using T = typename TypeParam::T;
  for (const bool causal : {false, true})
    for (const std::int64_t at : {0, 5, 15}) {
      Case c = constant_case({1, 1, 1, 16, 16, 4, 1});
      c.k[static_cast<std::size_t>(at * 4 + 2)] = sizeof(T) == 4 ? 89 : 710;
      std::iota(c.v.begin(), c.v.end(), 0.0);
      c.alpha = {1};
      c.beta = {1};
      const Options options{.causal = causal};
      Attention<T, typename TypeParam::ExecSpace, Lln> attention(c, options);
      attention.forward();
      attention.backward();
      const auto outcome = attention.outcome();
      EXPECT_TRUE(all_finite(outcome));
      EXPECT_TRUE((agrees<T, Lln>(c, outcome, expected_of<T, Lln>(c, options, underflow_floor<T>),
                                  attention.plan(Pass::backward).chunk)));
    }
}

// B05: products near the largest number; beyond it the rows concerned say so and no other head
// suffers.
TYPED_TEST(Hazards, B05ProductsNearOverflow) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 2, 64, 64, 4, 3};
  const Options options{.causal = true};
  const auto half_k = static_cast<std::size_t>(key_count(p) / 2);
  const auto half_q = static_cast<std::size_t>(query_count(p) / 2);
  const std::int64_t half_o = output_count(p) / 2;
  const Case usual = random_case<T, Elu>(p, options);
  const auto calm = attend<T, ExecSpace, Elu>(usual, options);
  const auto with_head_of = [&](double large) {
    Case c = usual;
    std::fill_n(c.q.begin(), half_q, static_cast<double>(static_cast<T>(large)));
    std::fill_n(c.k.begin(), half_k, static_cast<double>(static_cast<T>(large)));
    return c;
  };
  {
    const Case c = with_head_of(sizeof(T) == 4 ? 1e18 : 5e152);
    const auto found = attend<T, ExecSpace, Elu>(c, options);
    EXPECT_TRUE(all_finite(found));
    for (std::int64_t e = 0; e < p.dv; ++e) {
      long double sum = 0;
      for (std::int64_t i = 0; i < p.nq; ++i) {
        const auto at = static_cast<std::size_t>(i * p.dv + e);
        sum += c.v[at];
        const auto mean = static_cast<double>(sum / static_cast<long double>(i + 1));
        EXPECT_NEAR(static_cast<double>(found.o[at]), mean,
                    150 * std::numeric_limits<T>::epsilon());
      }
    }
  }
  const Case c = with_head_of(sizeof(T) == 4 ? 1e19 : 1e154);
  const auto found = attend<T, ExecSpace, Elu>(c, options);
  EXPECT_TRUE(same_bits(part(found.o, half_o, half_o), part(calm.o, half_o, half_o)));
  EXPECT_TRUE(same_bits(part(found.q, query_count(p) / 2, query_count(p) / 2),
                        part(calm.q, query_count(p) / 2, query_count(p) / 2)));
  EXPECT_TRUE(same_bits(part(found.k, key_count(p) / 2, key_count(p) / 2),
                        part(calm.k, key_count(p) / 2, key_count(p) / 2)));
  for (std::int64_t i = 0; i < p.nq; ++i)
    EXPECT_FALSE(std::isfinite(found.o[static_cast<std::size_t>(i * p.dv)])) << "row " << i;
}

// B09: a length that is no multiple of the chunk, with wild exponents.
TYPED_TEST(Hazards, B09PartialChunkOfWildExponents) {
  using T = typename TypeParam::T;
  const std::pair<std::int64_t, int> cuts[] = {{257, 256}, {65, 0}, {130, 64}};
  for (const auto& [n, chunk] : cuts)
    for (const bool causal : {false, true}) {
      const Problem p{1, 1, 1, n, n, 8, 5};
      const Options options{.causal = causal, .chunk = chunk};
      SCOPED_TRACE(describe(p, options));
      Case c = random_case<T, Lln>(p, options);
      for (auto* x : {&c.q, &c.k})
        for (double& element : *x) element *= 8;
      c.alpha = {1};
      c.beta = {1};
      Attention<T, typename TypeParam::ExecSpace, Lln> attention(c, options);
      attention.forward();
      attention.backward();
      const auto outcome = attention.outcome();
      EXPECT_TRUE(all_finite(outcome));
      EXPECT_TRUE((agrees<T, Lln>(c, outcome, expected_of<T, Lln>(c, options, underflow_floor<T>),
                                  attention.plan(Pass::backward).chunk)));
    }
}

// B37: a causal mask is aligned at the end: fewer queries are the last rows of as many as there are
// keys.
TYPED_TEST(Hazards, B37CausalMaskIsAlignedAtTheEnd) {
  using T = typename TypeParam::T;
  const Options options{.causal = true};
  const Problem whole{1, 1, 1, 5, 5, 3, 2};
  const Case c = random_case<T, Elu>(whole, options);
  const auto expected = expected_of<T, Elu>(c, options);
  for (const std::int64_t queries : {1, 2, 4}) {
    Case last = c;
    last.problem.nq = queries;
    last.q = part(c.q, (5 - queries) * whole.d, queries * whole.d);
    last.d_o = part(c.d_o, (5 - queries) * whole.dv, queries * whole.dv);
    const auto o = attend_forward<T, typename TypeParam::ExecSpace, Elu>(last, options);
    EXPECT_TRUE((within_bounds<T>(
        "o", o, part(expected.o, (5 - queries) * whole.dv, queries * whole.dv),
        part(expected.magnitude.o, (5 - queries) * whole.dv, queries * whole.dv), 40)))
        << queries << " queries";
  }
}

// B38: with equal values the output does not depend on q and k: the path through the denominator
// must cancel the one through the numerator.
TYPED_TEST(Hazards, B38EqualValuesLeaveNoGradientForKeys) {
  using T = typename TypeParam::T;
  const Problem p{2, 2, 2, 64, 64, 8, 3};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    Case c = constant_case(p);
    Random random(seed());
    c.q = random.uniforms(query_count(p), 0.1, 1.1);
    c.k = random.uniforms(key_count(p), 0.1, 1.1);
    round_to<T>(c.q);
    round_to<T>(c.k);
    for (std::size_t i = 0; i < c.v.size(); ++i) c.v[i] = static_cast<double>(i % 3) - 0.75;
    Attention<T, typename TypeParam::ExecSpace, Elu> attention(c, options);
    attention.forward();
    attention.backward();
    const auto found = attention.outcome();
    EXPECT_TRUE((agrees<T, Elu>(c, found, expected_of<T, Elu>(c, options), 64)));
    const double epsilon = std::numeric_limits<T>::epsilon();
    for (std::size_t i = 0; i < found.o.size(); ++i)
      ASSERT_NEAR(static_cast<double>(found.o[i]), c.v[i % 3], 16 * epsilon);
    // dq and dk are sums of up to 64 terms of size 1/row that cancel
    for (std::size_t i = 0; i < found.q.size(); ++i)
      ASSERT_NEAR(static_cast<double>(found.q[i]), 0, 64 * epsilon);
    for (std::size_t i = 0; i < found.k.size(); ++i)
      ASSERT_NEAR(static_cast<double>(found.k[i]), 0, 64 * epsilon);
  }
}

// B41: q = k = 0..9 and one token: the row sum is the dot product, and o = v.
TYPED_TEST(Hazards, B41RowSumIsADotProduct) {
  using T = typename TypeParam::T;
  Case c = constant_case({1, 1, 1, 1, 1, 10, 2});
  std::iota(c.q.begin(), c.q.end(), 0.0);
  std::iota(c.k.begin(), c.k.end(), 0.0);
  c.v = {3.5, -2};
  for (const bool causal : {false, true}) {
    const auto found = attend<T, typename TypeParam::ExecSpace, Identity>(
        c, {.causal = causal, .normalise = true});
    EXPECT_EQ(found.denominator, std::vector<accumulator_t<T>>({285}));
    EXPECT_EQ(found.o, std::vector<T>({T(3.5), T(-2)}));
  }
}

// X2: a cotangent that repeats one row, or one number, by strides of 0, and keys shared by all
// batches.
TYPED_TEST(Hazards, X2BroadcastCotangentAndInputs) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 3, 3, 70, 70, 4, 5};
  const Options options{.causal = true};
  Case c = random_case<T, Elu>(p, options);
  const auto repeat = [](std::vector<double>& x, std::int64_t period) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = x[i % static_cast<std::size_t>(period)];
  };
  repeat(c.k, p.kv_heads * p.nk * p.d);
  repeat(c.v, p.kv_heads * p.nk * p.dv);
  for (const bool one_number : {false, true}) {
    repeat(c.d_o, one_number ? 1 : p.dv);
    Attention<T, ExecSpace, Elu> attention(c, options);
    Arena<ExecSpace> arena(std::max(attention.workspace_bytes(Pass::forward),
                                    attention.workspace_bytes(Pass::backward)));
    const auto extent = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    using Strided =
        Kokkos::View<const T****, Kokkos::LayoutStride, typename ExecSpace::memory_space,
                     Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    const Strided d_o(attention.d_o.input().data(),
                      Kokkos::LayoutStride(extent(p.batch), 0, extent(p.heads), 0, extent(p.nq), 0,
                                           extent(p.dv), one_number ? 0 : 1));
    const auto shared_batch = [&](const T* data, std::int64_t width) {
      return Strided(
          data, Kokkos::LayoutStride(extent(p.batch), 0, extent(p.kv_heads), extent(p.nk * width),
                                     extent(p.nk), extent(width), extent(width), 1));
    };
    const Inputs<ExecSpace, T> inputs{.q = attention.q.input(),
                                      .k = shared_batch(attention.k.input().data(), p.d),
                                      .v = shared_batch(attention.v.input().data(), p.dv)};
    const ExecSpace exec;
    forward<T>(exec, Elu{}, inputs, attention.saved(), arena.workspace(), options);
    backward<T>(exec, Elu{}, inputs, attention.saved(), d_o, attention.gradients({}),
                arena.workspace(), options);
    exec.fence();
    EXPECT_TRUE((agrees<T, Elu>(c, attention.outcome(), expected_of<T, Elu>(c, options), 64)));
  }
}

// X4: numbers known without any reference: equal weights give running means, and dv their
// transpose.
TYPED_TEST(Hazards, X4RunningMeansInClosedForm) {
  using T = typename TypeParam::T;
  const std::int64_t n = 333;
  Case c = constant_case({1, 1, 1, n, n, 3, 2});
  std::fill(c.q.begin(), c.q.end(), 0.5);
  std::fill(c.k.begin(), c.k.end(), 0.5);
  Random random(seed());
  c.v = random.normals(2 * n);
  c.d_o = random.normals(2 * n);
  round_to<T>(c.v);
  round_to<T>(c.d_o);
  const auto found =
      attend<T, typename TypeParam::ExecSpace, Elu>(c, {.causal = true, .chunk = 32});
  const double allowed = 100 * std::numeric_limits<T>::epsilon();
  for (std::int64_t e = 0; e < 2; ++e) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(2 * i + e);
      sum += c.v[at];
      ASSERT_NEAR(static_cast<double>(found.o[at]), sum / static_cast<double>(i + 1), allowed);
    }
    double later = 0;
    for (std::int64_t j = n; j-- > 0;) {
      const auto at = static_cast<std::size_t>(2 * j + e);
      later += c.d_o[at] / static_cast<double>(j + 1);
      ASSERT_NEAR(static_cast<double>(found.v[at]), later, 4 * allowed);
    }
  }
}

template <class C>
class FloatHazards : public BoundedTest {};

TYPED_TEST_SUITE(FloatHazards, OverSpaces, ConfigName);

// B06: a long sequence of one head. The last rows are those of a short problem with the same keys.
TYPED_TEST(FloatHazards, B06LongSequence) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 1, 1, 43884, 43884, 64, 64};
  const Options options{.causal = true};
  const Case c = random_case<float, Elu>(p, options);
  const auto found = attend<float, ExecSpace, Elu>(c, options);
  EXPECT_TRUE(all_finite(found));

  const std::int64_t rows = 4;
  Case last = c;
  last.problem.nq = rows;
  last.q = part(c.q, (p.nq - rows) * p.d, rows * p.d);
  last.d_o = part(c.d_o, (p.nq - rows) * p.dv, rows * p.dv);
  const auto settings = settings_of<Elu>(last, options);
  const reference::Tensors<double> tensors{last.q, last.k, last.v};
  const auto magnitude = reference::magnitudes(last.problem, settings, tensors, last.d_o);
  const auto counts =
      reference::rounding_counts(p, reference::feature_roundings(reference::Kernel::elu), 64);
  EXPECT_TRUE((within_bounds<float>("o", part(found.o, (p.nq - rows) * p.dv, rows * p.dv),
                                    reference::forward(last.problem, settings, tensors),
                                    magnitude.o, counts.o)));
  EXPECT_TRUE((within_bounds<float>(
      "dq", part(found.q, (p.nq - rows) * p.d, rows * p.d),
      reference::backward(last.problem, settings, tensors, last.d_o).q, magnitude.q, counts.q)));
}

// B27: more batches or heads than a 16-bit launch limit.
TYPED_TEST(FloatHazards, B27ManyBatchesOrHeads) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  const auto check = [&]<class V>(const V&, const Problem& p) {
    SCOPED_TRACE(describe(p, options));
    EXPECT_TRUE((engine_agrees<float, ExecSpace, V>(random_case<float, V>(p, options), options)));
  };
  check(Elu{}, {70000, 1, 1, 3, 3, 4, 4});
  check(Lln{}, {1, 70000, 70000, 3, 3, 4, 4});
  check(Elu{}, {1, 70000, 1, 3, 3, 4, 4});
}

}  // namespace
