// SPDX-License-Identifier: BSD-3-Clause

// LLN attention: shifts are exact, causal and strong enough.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class T>
std::vector<T> rows_before(const std::vector<T>& x, std::int64_t heads, std::int64_t rows,
                           std::int64_t end) {
  std::vector<T> result;
  const std::size_t width = x.size() / static_cast<std::size_t>(heads * rows);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto begin = x.begin() + static_cast<std::int64_t>(width) * h * rows;
    result.insert(result.end(), begin, begin + static_cast<std::int64_t>(width) * end);
  }
  return result;
}

/// max |a - b| / max |b|
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  double worst = 0, largest = 0;
  for (std::size_t n = 0; n < b.size(); ++n) {
    const double error = std::abs(static_cast<double>(a[n]) - static_cast<double>(b[n]));
    worst = error <= worst ? worst : error;
    largest = std::max(largest, std::abs(static_cast<double>(b[n])));
  }
  return worst / largest;
}

template <class C>
class LlnAttention : public BoundedTest {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;
};

TYPED_TEST_SUITE(LlnAttention, OverScalars, ConfigName);

// A larger last key changes no bit of an earlier row, of its own chunk included.
TYPED_TEST(LlnAttention, LastKeyChangesNoBitOfEarlierRows) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t n : {16, 61, 64, 130})
    for (const double factor : {4.0, 60.0}) {
      const Problem p{2, 2, 1, n, n, 16, 8};
      const Options options{.causal = true};
      SCOPED_TRACE(describe(p, options));
      Case c = random_case<T, Lln>(p, options);
      c.alpha = {2.1, 1.9};
      c.beta = {2.0};
      const auto before = attend<T, ExecSpace, Lln>(c, options);
      for (std::int64_t b = 0; b < p.batch; ++b)
        for (std::int64_t d = 0; d < p.d; ++d) {
          auto& last = c.k[static_cast<std::size_t>((b * n + n - 1) * p.d + d)];
          last = static_cast<double>(static_cast<T>(last * factor));
        }
      const auto after = attend<T, ExecSpace, Lln>(c, options);
      const auto earlier = [&](const auto& x) {
        return rows_before(x, p.batch * p.heads, n, n - 1);
      };
      EXPECT_TRUE(same_bits(earlier(after.o), earlier(before.o)));
      EXPECT_TRUE(same_bits(earlier(after.denominator), earlier(before.denominator)));
      EXPECT_TRUE(same_bits(earlier(after.q), earlier(before.q)));
      EXPECT_FALSE(same_bits(after.o, before.o)) << "the last row should change";
    }
}

// A key far above the others in the middle of a chunk: earlier features must survive it, and rows
// after it are right too.
TYPED_TEST(LlnAttention, KeyAt110InsideAChunk) {
  using T = typename TypeParam::T;
  for (const double peak : {110.0, -110.0, 2000.0})
    for (const bool causal : {false, true})
      for (const int chunk : {0, 16}) {
        const Problem p{1, 2, 2, 50, 50, 4, 3};
        const Options options{.causal = causal, .chunk = chunk};
        SCOPED_TRACE(describe(p, options));
        Case c = random_case<T, Lln>(p, options);
        c.alpha = {1, 1};
        c.beta = {1, 1};
        for (std::int64_t d = 0; d < p.d; ++d) {
          c.k[static_cast<std::size_t>(21 * p.d + d)] = peak;             // every feature
          c.k[static_cast<std::size_t>((50 + 20) * p.d + 2)] = peak;      // one feature
          c.k[static_cast<std::size_t>((50 + 22) * p.d + 2)] = 2 * peak;  // twice in one chunk
          c.k[static_cast<std::size_t>((50 + 23) * p.d + 1)] = 3 * peak;
        }
        Attention<T, typename TypeParam::ExecSpace, Lln> attention(c, options);
        attention.forward();
        attention.backward();
        const auto found = attention.outcome();
        for (const T o : found.o) ASSERT_TRUE(std::isfinite(o));
        EXPECT_TRUE((agrees<T, Lln>(c, found, expected_of<T, Lln>(c, options, underflow_floor<T>),
                                    attention.plan(Pass::backward).chunk)));
      }
}

// Keys that rise by a few bits at every token, through many cuts of a chunk, and keys that fall.
TYPED_TEST(LlnAttention, RisingAndFallingKeys) {
  using T = typename TypeParam::T;
  for (const double step : {0.5, 9.0, 70.0, -9.0})
    for (const bool causal : {false, true})
      for (const int segments : {1, 3}) {
        const Problem p{1, 1, 1, 90, 90, 3, 2};
        const Options options{.causal = causal, .segments = segments};
        SCOPED_TRACE(describe(p, options));
        Case c = random_case<T, Lln>(p, options);
        c.alpha = {1};
        c.beta = {1};
        for (std::size_t n = 0; n < c.k.size(); ++n) {
          const double token = static_cast<double>(n / 3);
          c.k[n] += step * (n % 3 == 1 ? token : 90 - token);
        }
        round_to<T>(c.k);
        Attention<T, typename TypeParam::ExecSpace, Lln> attention(c, options);
        attention.forward();
        attention.backward();
        EXPECT_TRUE((agrees<T, Lln>(c, attention.outcome(),
                                    expected_of<T, Lln>(c, options, underflow_floor<T>),
                                    attention.plan(Pass::backward).chunk)));
      }
}

// One strong key channel, and queries that point away from it.
TYPED_TEST(LlnAttention, ChannelOffset) {
  using T = typename TypeParam::T;
  const Problem p{1, 1, 1, 200, 200, 16, 8};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    Case c = random_case<T, Lln>(p, options);
    c.alpha = {1};
    c.beta = {1};
    for (std::int64_t n = 0; n < p.nk; ++n) {
      c.k[static_cast<std::size_t>(n * p.d + 3)] += 50;
      c.q[static_cast<std::size_t>(n * p.d + 3)] -= 60;
    }
    round_to<T>(c.q);
    round_to<T>(c.k);
    const auto o = attend_forward<T, typename TypeParam::ExecSpace, Lln>(c, options);
    const auto expected = reference::forward(p, settings_of<Lln>(c, options),
                                             reference::Tensors<double>{c.q, c.k, c.v});
    EXPECT_LE(relative_error(o, expected), sizeof(T) == 4 ? 1e-6 : 1e-14);
  }
}

// 1/2 <= s <= 2 R N for every row, whatever the data.
TYPED_TEST(LlnAttention, DenominatorsAreTame) {
  using T = typename TypeParam::T;
  const Problem p{1, 2, 1, 80, 100, 6, 2};
  for (const double spread : {0.0, 1.0, 30.0, 400.0})
    for (const bool causal : {false, true})
      for (const int chunk : {0, 7})
        for (const int segments : {1, 2}) {
          const Options options{.causal = causal, .chunk = chunk, .segments = segments};
          Case c = random_case<T, Lln>(p, options);
          for (auto* x : {&c.q, &c.k})
            for (double& element : *x) element *= spread;
          round_to<T>(c.q);
          round_to<T>(c.k);
          Attention<T, typename TypeParam::ExecSpace, Lln> attention(c, options);
          attention.forward();
          const auto sums = attention.denominator.get();
          for (std::size_t n = 0; n < sums.size(); ++n) {
            const auto row = static_cast<std::int64_t>(n) % p.nq;
            const auto seen = static_cast<double>(causal ? row + p.nk - p.nq + 1 : p.nk);
            ASSERT_GE(static_cast<double>(sums[n]), 0.5) << "row " << row << " spread " << spread;
            ASSERT_LE(static_cast<double>(sums[n]), 2 * static_cast<double>(p.d) * seen);
          }
        }
}

// Parameters: zero, negative, one for all heads.
TYPED_TEST(LlnAttention, ParametersOfAnySign) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 4, 2, 45, 70, 5, 3};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .segments = 2};
    Case c = random_case<T, Lln>(p, options);
    c.alpha = {0, -1.3, 2, 0.7};
    c.beta = {-0.6, 0};
    EXPECT_TRUE((engine_agrees<T, ExecSpace, Lln>(c, options)));
    c.alpha.assign(4, 1.7);
    c.beta.assign(2, -0.4);
    const auto by_head = attend<T, ExecSpace, Lln>(c, options);
    Attention<T, ExecSpace, Lln> attention(c, options);
    Arena<ExecSpace> arena(attention.workspace_bytes(Pass::backward) +
                           attention.workspace_bytes(Pass::forward));
    const ExecSpace exec;
    const Lln one_for_all{1.7, -0.4};
    forward<T>(exec, one_for_all, attention.inputs(), attention.saved(), arena.workspace(),
               options);
    backward<T>(exec, one_for_all, attention.inputs(), attention.saved(), attention.d_o.input(),
                attention.gradients({}), arena.workspace(), options);
    exec.fence();
    EXPECT_TRUE(same_bits(attention.outcome(), by_head));
  }
}

// Parameters as Views of any stride.
TYPED_TEST(LlnAttention, StridedParameters) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  const Case c = random_case<T, Lln>({1, 4, 2, 40, 40, 5, 3}, options);
  const auto expected = attend<T, ExecSpace, Lln>(c, options);
  Arrangement at;
  at.parameter = Layout::gaps;
  at.d_parameter = Layout::gaps;
  EXPECT_TRUE(same_bits(attend<T, ExecSpace, Lln>(c, options, at), expected));
}

template <class C>
class LlnInFloat : public ::testing::Test {};
TYPED_TEST_SUITE(LlnInFloat, OverSpaces, ConfigName);

// A realistic size: float against double of the same engine on the same numbers.
TYPED_TEST(LlnInFloat, AgreesWithDoubleAt4096) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 1, 1, 4096, 4096, 64, 64};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    Case c = random_case<float, Lln>(p, options);
    c.alpha = {2.135};
    c.beta = {2.135};
    const auto narrow = attend<float, ExecSpace, Lln>(c, options);
    const auto wide = attend<double, ExecSpace, Lln>(c, options);
    EXPECT_LE(relative_error(narrow.o, wide.o), 1e-6);
    EXPECT_LE(relative_error(narrow.q, wide.q), 3e-6);
    EXPECT_LE(relative_error(narrow.k, wide.k), 3e-6);
    EXPECT_LE(relative_error(narrow.v, wide.v), 3e-6);
    // A parameter's gradient is one sum of 262,144 terms of both signs; what can be asked of it is
    // relative to the sum of their sizes, which is 60 to 1700 times as large.
    const auto terms = [](const std::vector<double>& x, const std::vector<double>& dx,
                          double rate) {
      double sum = 0;
      for (std::size_t n = 0; n < x.size(); ++n) sum += std::abs(x[n] * dx[n] / rate);
      return sum;
    };
    const double u = std::numeric_limits<float>::epsilon() / 2;
    EXPECT_LE(std::abs(narrow.alpha[0] - wide.alpha[0]), u * terms(c.q, wide.q, c.alpha[0]));
    EXPECT_LE(std::abs(narrow.beta[0] - wide.beta[0]), u * terms(c.k, wide.k, c.beta[0]));
    std::cout << "[  float/double  ]  o " << relative_error(narrow.o, wide.o) << "  dq "
              << relative_error(narrow.q, wide.q) << "  dk " << relative_error(narrow.k, wide.k)
              << "  dv " << relative_error(narrow.v, wide.v) << "  d alpha "
              << relative_error(narrow.alpha, wide.alpha) << "  d beta "
              << relative_error(narrow.beta, wide.beta) << std::endl;
  }
}

}  // namespace
