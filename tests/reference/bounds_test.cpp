// SPDX-License-Identifier: BSD-3-Clause
// The error bounds: true for a plain recurrence in float, close enough to see its mistakes, and
// small for the reference itself.

#include <gtest/gtest.h>

#include <tuple>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;

/// Mistakes that users of such libraries have reported.
enum class Mistake {
  none,
  no_denominator_gradient,
  last_key_dropped,
  neighbour_value_column,
  stale_output
};

template <class T>
struct Recurrence {
  std::vector<T> o;
  reference::GradientSet<T> gradient;
};

template <class T>
T phi(Kernel kernel, T parameter, T x) {
  switch (kernel) {
    case Kernel::identity:
      return x;
    case Kernel::elu:
      return x > 0 ? x + 1 : std::exp(x);
    case Kernel::relu:
      return std::max(x, T(0));
    case Kernel::quadratic:
      return x * x;
    case Kernel::lln:
      break;
  }
  return std::exp(parameter * x);
}

/// dphi/dx; for lln with respect to parameter * x.
template <class T>
T slope(Kernel kernel, T parameter, T x) {
  switch (kernel) {
    case Kernel::identity:
      return 1;
    case Kernel::elu:
      return x > 0 ? 1 : std::exp(x);
    case Kernel::relu:
      return x > 0 ? T(1) : T(0);
    case Kernel::quadratic:
      return 2 * x;
    case Kernel::lln:
      break;
  }
  return std::exp(parameter * x);
}

/// Linear attention in linear time: running sums S = sum phi(k) v^T, z = sum phi(k) forward, and
/// R = sum phi(q) [G, e]^T backward, in T throughout. Backward sees each element of o off by
/// max(unit |o|, least), to the side that changes the gradients most.
template <class T>
Recurrence<T> recurrence(const Case<T>& c, Mistake mistake, T unit = 0, T least = 0) {
  const auto& p = c.problem;
  const auto kernel = c.settings.kernel;
  const bool lln = kernel == Kernel::lln, causal = c.settings.causal,
             normalise = c.settings.normalise;
  const T scale = static_cast<T>(c.settings.scale);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t d = size(p.d), dv = size(p.dv), nq = size(p.nq), nk = size(p.nk);
  Recurrence<T> out;
  out.o.resize(c.d_o.size());
  out.gradient = {std::vector<T>(c.tensors.q.size()), std::vector<T>(c.tensors.k.size()),
                  std::vector<T>(c.tensors.v.size()), std::vector<T>(c.settings.alpha.size()),
                  std::vector<T>(c.settings.beta.size())};
  for (std::size_t b = 0; b < size(p.batch); ++b)
    for (std::size_t h = 0; h < size(p.heads); ++h) {
      const std::size_t g = h / size(p.group());
      const T alpha = lln ? static_cast<T>(c.settings.alpha[h]) : T(1);
      const T beta = lln ? static_cast<T>(c.settings.beta[g]) : T(1);
      const T* q = c.tensors.q.data() + (b * size(p.heads) + h) * nq * d;
      const T* k = c.tensors.k.data() + (b * size(p.kv_heads) + g) * nk * d;
      const T* v = c.tensors.v.data() + (b * size(p.kv_heads) + g) * nk * dv;
      const T* d_o = c.d_o.data() + (b * size(p.heads) + h) * nq * dv;
      T* o = out.o.data() + (b * size(p.heads) + h) * nq * dv;
      T* dq = out.gradient.q.data() + (b * size(p.heads) + h) * nq * d;
      T* dk = out.gradient.k.data() + (b * size(p.kv_heads) + g) * nk * d;
      T* dv_out = out.gradient.v.data() + (b * size(p.kv_heads) + g) * nk * dv;

      std::vector<T> S(d * dv), z(d), G(nq * dv), e(nq);
      std::size_t absorbed = 0;
      for (std::size_t i = 0; i < nq; ++i) {
        const std::size_t end = causal ? i + nk - nq + 1 : nk;
        for (; absorbed < (mistake == Mistake::last_key_dropped ? end - 1 : end); ++absorbed)
          for (std::size_t m = 0; m < d; ++m) {
            const T feature = phi(kernel, beta, k[absorbed * d + m]);
            z[m] += feature;
            for (std::size_t n = 0; n < dv; ++n) S[m * dv + n] += feature * v[absorbed * dv + n];
          }
        T denominator = 0;
        for (std::size_t m = 0; m < d; ++m) denominator += phi(kernel, alpha, q[i * d + m]) * z[m];
        if (normalise && denominator == 0) continue;
        T dot = 0;
        for (std::size_t n = 0; n < dv; ++n) {
          T sum = 0;
          const std::size_t column = mistake == Mistake::neighbour_value_column ? (n + 1) % dv : n;
          for (std::size_t m = 0; m < d; ++m)
            sum += phi(kernel, alpha, q[i * d + m]) * S[m * dv + column];
          o[i * dv + n] = normalise ? sum / denominator : scale * sum;
          G[i * dv + n] = normalise ? d_o[i * dv + n] / denominator : scale * d_o[i * dv + n];
          const std::size_t row = mistake == Mistake::stale_output && i > 0 ? i - 1 : i;
          const T seen = o[row * dv + n], off = std::max(unit * std::abs(seen), least);
          dot += d_o[i * dv + n] * (seen + std::copysign(off, d_o[i * dv + n]));
        }
        e[i] = normalise && mistake != Mistake::no_denominator_gradient ? -dot / denominator : T(0);
        for (std::size_t m = 0; m < d; ++m) {
          T sum = z[m] * e[i];
          for (std::size_t n = 0; n < dv; ++n) sum += S[m * dv + n] * G[i * dv + n];
          const T by_feature = slope(kernel, alpha, q[i * d + m]) * sum;
          dq[i * d + m] = lln ? alpha * by_feature : by_feature;
          if (lln) out.gradient.alpha[h] += q[i * d + m] * by_feature;
        }
      }

      std::vector<T> R(d * dv), r(d);
      std::size_t left = nq;
      for (std::size_t j = nk; j-- > 0;) {
        while (left > 0 && (!causal || left - 1 + nk - nq >= j)) {
          --left;
          for (std::size_t m = 0; m < d; ++m) {
            const T feature = phi(kernel, alpha, q[left * d + m]);
            r[m] += feature * e[left];
            for (std::size_t n = 0; n < dv; ++n) R[m * dv + n] += feature * G[left * dv + n];
          }
        }
        for (std::size_t m = 0; m < d; ++m) {
          T sum = r[m];
          for (std::size_t n = 0; n < dv; ++n) {
            sum += R[m * dv + n] * v[j * dv + n];
            dv_out[j * dv + n] += phi(kernel, beta, k[j * d + m]) * R[m * dv + n];
          }
          const T by_feature = slope(kernel, beta, k[j * d + m]) * sum;
          dk[j * d + m] += lln ? beta * by_feature : by_feature;
          if (lln) out.gradient.beta[g] += k[j * d + m] * by_feature;
        }
      }
    }
  return out;
}

/// Largest error of any output in units of its bound.
template <class T>
long double worst_of_bound(const Case<T>& c, const Recurrence<T>& found) {
  const auto exact = [](const std::vector<T>& x) {
    return std::vector<long double>(x.begin(), x.end());
  };
  const Case<long double> oracle{c.problem,
                                 c.settings,
                                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                                 exact(c.d_o)};
  const auto o = oracle.forward();
  const auto gradient = oracle.backward();
  const auto magnitude = oracle.magnitudes();
  const auto counts =
      reference::rounding_counts(c.problem, reference::feature_roundings(c.settings.kernel));
  const auto ratio = [](const std::vector<T>& x, const std::vector<long double>& expected,
                        const std::vector<long double>& size, double count) {
    return worst_ratio(x, expected, size, static_cast<long double>(count) * roundoff<T>);
  };
  return std::max({ratio(found.o, o, magnitude.o, counts.o),
                   ratio(found.gradient.q, gradient.q, magnitude.q, counts.q),
                   ratio(found.gradient.k, gradient.k, magnitude.k, counts.k),
                   ratio(found.gradient.v, gradient.v, magnitude.v, counts.v),
                   ratio(found.gradient.alpha, gradient.alpha, magnitude.alpha, counts.alpha),
                   ratio(found.gradient.beta, gradient.beta, magnitude.beta, counts.beta)});
}

class ReferenceBounds : public ::testing::TestWithParam<std::tuple<Kernel, bool, bool>> {
 protected:
  template <class T>
  Case<T> make(std::uint64_t seed) const {
    const auto [kernel, causal, normalise] = GetParam();
    const Problem problem{
        .batch = 2, .heads = 4, .kv_heads = 2, .nq = 37, .nk = 61, .d = 8, .dv = 5};
    return random_case<T>(
        problem, {.kernel = kernel, .causal = causal, .normalise = normalise, .scale = 0.3}, seed);
  }
};

INSTANTIATE_TEST_SUITE_P(All, ReferenceBounds,
                         ::testing::Combine(::testing::ValuesIn(all_kernels), ::testing::Bool(),
                                            ::testing::Bool()),
                         [](const auto& suite) {
                           return std::string(reference::kernel_name(std::get<0>(suite.param))) +
                                  (std::get<1>(suite.param) ? "_causal" : "_full") +
                                  (std::get<2>(suite.param) ? "_normalised" : "_plain");
                         });

TEST_P(ReferenceBounds, HoldForARecurrence) {
  for (const std::uint64_t seed : {151u, 152u, 153u}) {
    const auto narrow = make<float>(seed);
    const auto worst = worst_of_bound(narrow, recurrence(narrow, Mistake::none));
    EXPECT_LE(worst, 1);
    // A bound that no error comes near would say nothing.
    EXPECT_GE(worst, 2e-4L);
    const auto wide = make<double>(seed);
    EXPECT_LE(worst_of_bound(wide, recurrence(wide, Mistake::none)), 1);
  }
}

TEST_P(ReferenceBounds, SeeMistakes) {
  const auto c = make<float>(161);
  std::vector<Mistake> mistakes{Mistake::last_key_dropped, Mistake::neighbour_value_column};
  if (c.settings.normalise)
    append(mistakes, {Mistake::no_denominator_gradient, Mistake::stale_output});
  for (const auto mistake : mistakes)
    EXPECT_GT(worst_of_bound(c, recurrence(c, mistake)), 10)
        << "mistake " << static_cast<int>(mistake);
}

TEST_P(ReferenceBounds, EffectsOfARoundedOutputAreReached) {
  constexpr double unit = 0x1p-8, least = 0x1p-12;
  auto c = make<double>(191);
  keep_alive(c);
  const auto exact = recurrence(c, Mistake::none), off = recurrence(c, Mistake::none, unit, least);
  const auto effects =
      reference::rounded_output_effects(c.problem, c.settings, c.tensors, c.d_o, unit, least);
  for (std::size_t n = 0; n < exact.o.size(); ++n)
    EXPECT_TRUE(near(effects.o[n], std::max(unit * std::abs(exact.o[n]), least), 1e-10));
  EXPECT_EQ(*std::max_element(effects.v.begin(), effects.v.end()), 0);
  double largest = 0;
  const auto compare = [&](const std::vector<double>& a, const std::vector<double>& b,
                           const std::vector<double>& effect, bool reached) {
    for (std::size_t n = 0; n < a.size(); ++n) {
      const double change = std::abs(a[n] - b[n]), slack = 1e-10 * (std::abs(a[n]) + effect[n]);
      ASSERT_LE(change, effect[n] + slack) << n;
      if (reached) {
        ASSERT_GE(change, effect[n] - slack) << n;
      }
      largest = std::max(largest, effect[n]);
    }
  };
  const auto &x = exact.gradient, &y = off.gradient;
  // With features and slopes of one sign, rows do not cancel in a key, and with one row in nothing.
  const bool positive = c.settings.kernel == Kernel::elu || c.settings.kernel == Kernel::lln ||
                        c.settings.kernel == Kernel::relu;
  compare(x.q, y.q, effects.q, true);
  compare(x.k, y.k, effects.k, positive);
  compare(x.alpha, y.alpha, effects.alpha, false);
  compare(x.beta, y.beta, effects.beta, false);
  EXPECT_EQ(largest > 0, c.settings.normalise);
}

TEST_P(ReferenceBounds, ReferenceInDoubleIsGoodToAFewRoundings) {
  const auto c = make<double>(171);
  const auto exact = [](const std::vector<double>& x) {
    return std::vector<long double>(x.begin(), x.end());
  };
  const Case<long double> oracle{c.problem,
                                 c.settings,
                                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                                 exact(c.d_o)};
  const auto gradient = c.backward();
  const auto expected = oracle.backward();
  const auto magnitude = oracle.magnitudes();
  const long double unit = roundoff<double>;
  // Independent of the extents: the sums are compensated.
  EXPECT_TRUE(within(c.forward(), oracle.forward(), magnitude.o, unit, 4));
  EXPECT_TRUE(within(gradient.q, expected.q, magnitude.q, unit, 4));
  EXPECT_TRUE(within(gradient.k, expected.k, magnitude.k, unit, 4));
  EXPECT_TRUE(within(gradient.v, expected.v, magnitude.v, unit, 4));
  EXPECT_TRUE(within(gradient.alpha, expected.alpha, magnitude.alpha, unit, 4));
  EXPECT_TRUE(within(gradient.beta, expected.beta, magnitude.beta, unit, 4));
}

TEST(ReferenceBoundsOfLargeExponents, DoubleLosesNothingToTheSizeOfTheExponents) {
  // Exponents up to 1000: a product rounded to double would cost exp 1000 roundings.
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 9, .nk = 11, .d = 3, .dv = 2};
  auto c = random_case<double>(problem, {.kernel = Kernel::lln}, 181);
  for (auto& x : c.tensors.q) x = 400 + x / 8;
  for (auto& x : c.tensors.k) x = 500 + x / 8;
  const auto exact = [](const std::vector<double>& x) {
    return std::vector<long double>(x.begin(), x.end());
  };
  const Case<long double> oracle{c.problem,
                                 c.settings,
                                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                                 exact(c.d_o)};
  const auto o = c.forward();
  const auto expected = oracle.forward();
  for (std::size_t n = 0; n < o.size(); ++n)
    EXPECT_TRUE(near(o[n], expected[n], 8 * roundoff<double>));
}

TEST(ReferenceBoundsByHand, Magnitudes) {
  // w = (4, -10): s = -6, sum |t| of each key: |2| + |2| and |4| + |6|, kappa = 14/6, o = (12 -
  // 50)/-6.
  const Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 2, .dv = 1},
                       {},
                       {{1, 2}, {2, 1, -4, -3}, {3, 5}},
                       {-1}};
  const double s = 6, kappa = 14 / s, o = 38 / s, of_o = (4 * 3 + 10 * 5) / s + kappa * o;
  const auto magnitude = c.magnitudes();
  EXPECT_TRUE(near(magnitude.o[0], of_o, 1e-14));
  EXPECT_TRUE(near(magnitude.v[0], (4 + 4 * kappa) / s, 1e-14));
  EXPECT_TRUE(near(magnitude.v[1], (10 + 10 * kappa) / s, 1e-14));
  const double e = o / s, e_error = (of_o + kappa * o) / s;
  const double first = (1 + kappa) * 3 / s + e + e_error,
               second = (1 + kappa) * 5 / s + e + e_error;
  EXPECT_TRUE(near(magnitude.q[0], 2 * first + 4 * second, 1e-12));
  EXPECT_TRUE(near(magnitude.q[1], 1 * first + 3 * second, 1e-12));
  EXPECT_TRUE(near(magnitude.k[0], first, 1e-12));
  EXPECT_TRUE(near(magnitude.k[3], 2 * second, 1e-12));
}

TEST(ReferenceBoundsByHand, ExponentsCountTheRoundingsOfTheirArgument) {
  const Problem one{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 1, .d = 1, .dv = 1};
  // chi = 1 + |2 * 3| + |0.5 * -8|, for the numerator and for the denominator.
  const Case<double> lln{
      one, {.kernel = Kernel::lln, .alpha = {2}, .beta = {0.5}}, {{3}, {-8}, {-7}}, {1}};
  EXPECT_TRUE(near(lln.magnitudes().o[0], 2 * 11 * 7, 1e-12));
  // chi = 1 + 3, the exponent of the smaller feature; above 0 there is none.
  Case<double> elu{one, {.kernel = Kernel::elu, .normalise = false}, {{-3}, {1}, {-7}}, {1}};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 4 * 2 * std::exp(-3.0) * 7, 1e-14));
  elu.tensors.k = {-5};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 6 * std::exp(-8.0) * 7, 1e-14));
  elu.tensors.q = elu.tensors.k = {1};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 4 * 7, 1e-14));
}

TEST(ReferenceBoundsByHand, FloorBringsUnderflowIn) {
  // The second key has the relative weight e^-200, nothing in float, and 1e-30 with the floor.
  Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 1, .dv = 1},
                 {.kernel = Kernel::lln, .alpha = {1}, .beta = {1}},
                 {{0}, {0, -200}, {1, 2}},
                 {1}};
  const auto with = reference::magnitudes(c.problem, c.settings, c.tensors, c.d_o, 1e-30);
  EXPECT_LT(c.magnitudes().v[1], 1e-80);
  EXPECT_GE(with.v[1], 1e-30);
  EXPECT_LE(with.v[1], 1e-26);
  // elu: features e^-200 and 1.
  c.settings = {.kernel = Kernel::elu, .normalise = false};
  EXPECT_LT(c.magnitudes().v[1], 1e-80);
  const auto of_elu = reference::magnitudes(c.problem, c.settings, c.tensors, c.d_o, 1e-30);
  EXPECT_GE(of_elu.v[1], 1e-30);
  EXPECT_LE(of_elu.v[1], 1e-26);
}

TEST(ReferenceBoundsByHand, RoundingCounts) {
  const Problem problem{
      .batch = 2, .heads = 6, .kv_heads = 3, .nq = 100, .nk = 200, .d = 8, .dv = 5};
  // p = 2 * 1 + 2 + 200 + 8 = 212, e = 3 * 212 + 3 + 5 = 644, dw = 650.
  const auto loop = reference::rounding_counts(problem, 1);
  EXPECT_EQ(loop.o, 425);
  EXPECT_EQ(loop.q, 650 + 4 + 200);
  EXPECT_EQ(loop.k, 650 + 4 + 200);
  EXPECT_EQ(loop.v, 213 + 4 + 8 + 200);
  EXPECT_EQ(loop.alpha, loop.q + 1 + 1600);
  EXPECT_EQ(loop.beta, loop.k + 1 + 3200);
  // Runs of 16: 200 terms have depth 16 + 13.
  EXPECT_EQ(reference::rounding_counts(problem, 1, 16).o, 2 * (4 + 29 + 8) + 1);
}

}  // namespace
