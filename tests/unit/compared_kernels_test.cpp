// SPDX-License-Identifier: BSD-3-Clause

// What only the kernels have that LLN and affine attention are compared with: the features of taylor, the random ones
// of performer and their limit, states, refusals. The rest is tested as of every variant.

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "attention_case.hpp"
#include "refusal.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Weights of one query and one key by their definition.
template <Variant V>
long double weight(const Case& c, const double* q, const double* k) {
  const std::int64_t d = c.problem.d;
  const auto dot = [d](const double* x, const double* y) {
    long double sum = 0;
    for (std::int64_t i = 0; i < d; ++i) sum += static_cast<long double>(x[i]) * y[i];
    return sum;
  };
  const long double root = std::sqrt(static_cast<long double>(d));
  if constexpr (std::is_same_v<V, Cosine>) {
    return dot(q, k) / std::sqrt((dot(q, q) + 1e-6L) * (dot(k, k) + 1e-6L));
  } else if constexpr (std::is_same_v<V, Taylor>) {
    const long double x = dot(q, k) * (c.affine.scale ? static_cast<long double>(*c.affine.scale) : 1 / root);
    return 1 + x + x * x / 2;
  } else if constexpr (std::is_same_v<V, Performer>) {
    const auto features = static_cast<std::int64_t>(c.projection.size()) / d;
    long double sum = 0;
    for (std::int64_t m = 0; m < features; ++m) {
      const double* w = c.projection.data() + m * d;
      sum += std::exp((dot(w, q) + dot(w, k)) / std::sqrt(root) - (dot(q, q) + dot(k, k)) / (2 * root));
    }
    return sum / static_cast<long double>(features);
  } else {
    return std::exp(dot(q, k) / root);
  }
}

/// o of the definition, and the sums of the absolute terms.
template <Variant V>
void attend_by_definition(const Case& c, const Options& options, std::vector<long double>& o,
                          std::vector<long double>& size) {
  const Problem& p = c.problem;
  const bool normalise = options.normalise.value_or(V::normalise_by_default);
  o.assign(static_cast<std::size_t>(output_count(p)), 0);
  size = o;
  for (std::int64_t row = 0; row < p.batch * p.heads * p.nq; ++row) {
    const std::int64_t i = row % p.nq, head = row / p.nq, kv = head / p.group();
    const std::int64_t keys = options.causal ? i + p.nk - p.nq + 1 : p.nk;
    long double sum = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      const long double w = weight<V>(c, c.q.data() + row * p.d, c.k.data() + (kv * p.nk + j) * p.d);
      sum += w;
      for (std::int64_t e = 0; e < p.dv; ++e) {
        const long double term = w * c.v[static_cast<std::size_t>((kv * p.nk + j) * p.dv + e)];
        o[static_cast<std::size_t>(row * p.dv + e)] += term;
        size[static_cast<std::size_t>(row * p.dv + e)] += std::abs(term);
      }
    }
    for (std::int64_t e = 0; e < p.dv; ++e) {
      const long double factor = normalise ? 1 / sum : static_cast<long double>(options.scale);
      o[static_cast<std::size_t>(row * p.dv + e)] *= factor;
      size[static_cast<std::size_t>(row * p.dv + e)] *= std::abs(factor);
    }
  }
}

template <class C>
class ComparedKernel : public ::testing::Test {};
using Compared = decltype(LinAttn::test_support::detail::as_google(
    LinAttn::test_support::detail::variants<VariantList<Taylor, Cosine, Performer>>(
        LinAttn::test_support::detail::with_scalar<double>(Spaces{}))));
TYPED_TEST_SUITE(ComparedKernel, Compared, ConfigName);

// 1e-12 of the absolute terms: logits and scores here are below 20, so their exponentials are good to 20 ulp or so.
TYPED_TEST(ComparedKernel, IsItsDefinition) {
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const bool normalise : {false, true})
      for (const Problem& p : {Problem{2, 4, 2, 21, 33, 5, 3}, Problem{1, 2, 1, 70, 70, 16, 8}}) {
        const Options options{.causal = causal, .normalise = normalise, .scale = 0.7, .segments = 2};
        SCOPED_TRACE(describe(p, options));
        Case c = random_case<double, V>(p, options);
        if (causal) c.affine.scale = 0.8;  // of taylor; the others have none
        std::vector<long double> expected, size;
        attend_by_definition<V>(c, options, expected, size);
        const auto o = attend_forward<double, ExecSpace, V>(c, options);
        for (std::size_t n = 0; n < o.size(); ++n)
          ASSERT_LE(std::abs(o[n] - expected[n]), 1e-12L * size[n]) << n;
      }
}

// A causal row is the full attention of its prefix.
TYPED_TEST(ComparedKernel, CausalRowsAreThoseOfPrefixes) {
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 1, 40, 40, 6, 3};
  const Options options{.causal = true, .normalise = true, .chunk = 16};
  const Case c = random_case<double, V>(p, options);
  const auto causal = attend_forward<double, ExecSpace, V>(c, options);
  const auto head = [](const std::vector<double>& x, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
    std::vector<double> result;
    const auto all = static_cast<std::int64_t>(x.size()) / heads;
    for (std::int64_t h = 0; h < heads; ++h)
      result.insert(result.end(), x.begin() + h * all, x.begin() + h * all + rows * columns);
    return result;
  };
  for (const std::int64_t n : {1, 2, 15, 16, 17, 33, 40}) {
    Case prefix = c;
    prefix.problem.nq = prefix.problem.nk = n;
    prefix.q = head(c.q, 2, n, p.d);
    prefix.k = head(c.k, 1, n, p.d);
    prefix.v = head(c.v, 1, n, p.dv);
    prefix.d_o = head(c.d_o, 2, n, p.dv);
    const auto full = attend_forward<double, ExecSpace, V>(prefix, {.causal = false, .normalise = true});
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t e = 0; e < p.dv; ++e)
        EXPECT_NEAR(causal[static_cast<std::size_t>((h * 40 + n - 1) * p.dv + e)],
                    full[static_cast<std::size_t>((h * n + n - 1) * p.dv + e)], 1e-12)
            << "row " << n - 1;
  }
}

// Later keys of any size change no bit of an earlier row, nor of its gradient: exponents are compensated feature by
// feature, and a row of one key that is longer than all others is one of them.
TYPED_TEST(ComparedKernel, NoLaterKeyChangesABit) {
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 1, 60, 60, 4, 3};
  for (const int segments : {1, 2}) {
    const Options options{.causal = true, .chunk = 16, .segments = segments};
    const Case c = random_case<double, V>(p, options);
    const auto expected = attend<double, ExecSpace, V>(c, options);
    for (const double size : {30.0, 1e3, 1e8})
      for (const std::int64_t seen : {5, 16, 37, 59}) {
        Case later = c;
        for (std::int64_t j = seen; j < p.nk; ++j)
          for (std::int64_t d = 0; d < p.d; ++d)
            later.k[static_cast<std::size_t>(j * p.d + d)] = size * static_cast<double>(1 + (j + d) % 3);
        const auto found = attend<double, ExecSpace, V>(later, options);
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t n = 0; n < seen * p.dv; ++n) {
            const auto at = static_cast<std::size_t>(h * p.nq * p.dv + n);
            ASSERT_EQ(found.o[at], expected.o[at]) << "o, size " << size << ", seen " << seen;
          }
          for (std::int64_t n = 0; n < seen * p.d; ++n) {
            const auto at = static_cast<std::size_t>(h * p.nq * p.d + n);
            ASSERT_EQ(found.q[at], expected.q[at]) << "dq, size " << size << ", seen " << seen;
          }
        }
      }
  }
}

// S and z after the last key, for maps whose features are not of single entries: S[r] phi_r(q) summed is the numerator.
TYPED_TEST(ComparedKernel, StatesAnswerQueries) {
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 1, 1, 50, 5, 3};
  const Options options{.normalise = true};
  Case c = random_case<double, V>(p, options);
  c.wants_last = true;
  Attention<double, ExecSpace, V> whole(c, options);
  whole.forward();
  const auto all = whole.outcome();
  // the same query once more, with no key but the state
  Case after = c;
  after.problem.nk = 0;
  after.k.clear();
  after.v.clear();
  after.initial = StateValues{all.S, all.z, all.shift, all.t, all.m};
  Attention<double, ExecSpace, V> again(after, options);
  again.forward();
  const auto o = again.o.get();
  for (std::size_t n = 0; n < o.size(); ++n) EXPECT_NEAR(o[n], all.o[n], 1e-13 * (1 + std::abs(all.o[n])));
}

// ---- taylor -----------------------------------------------------------------------------------------------------

TEST(TaylorFeatures, ProductsArePolynomials) {
  Random random(seed());
  for (const std::int64_t d : {0, 1, 2, 7, 20})
    for (const double scale : {1.0, 0.3}) {
      const TaylorMap map{scale};
      const std::int64_t r = map.features(d);
      EXPECT_EQ(r, 1 + d + d * (d + 1) / 2);
      // rows of every second element, features of every third
      const auto q = random.normals(2 * d), k = random.normals(2 * d);
      std::vector<double> f(static_cast<std::size_t>(3 * r)), g(f);
      map.row_value(ConstRow<double>{q.data(), d, 2}, Row<double>{f.data(), r, 3});
      map.row_value(ConstRow<double>{k.data(), d, 2}, Row<double>{g.data(), r, 3});
      double x = 0, product = 0, size = 0;
      for (std::size_t i = 0; i < q.size(); i += 2) x += scale * q[i] * k[i];
      for (std::size_t i = 0; i < f.size(); i += 3) product += f[i] * g[i], size += std::abs(f[i] * g[i]);
      EXPECT_NEAR(product, 1 + x + x * x / 2, 1e-14 * size);
    }
}

TEST(TaylorFeatures, PullbackIsTheJacobian) {
  Random random(seed());
  const std::int64_t d = 6;
  const TaylorMap map{0.4};
  const std::int64_t r = map.features(d);
  auto x = random.normals(d);
  const auto df = random.normals(r);
  std::vector<double> f(static_cast<std::size_t>(r)), dx(static_cast<std::size_t>(d));
  const auto along = [&] {
    map.row_value(ConstRow<double>{x.data(), d, 1}, Row<double>{f.data(), r, 1});
    return std::inner_product(f.begin(), f.end(), df.begin(), 0.0);
  };
  along();
  map.row_pullback(ConstRow<double>{x.data(), d, 1}, ConstRow<double>{f.data(), r, 1},
                   ConstRow<double>{df.data(), r, 1}, Row<double>{dx.data(), d, 1});
  for (std::size_t i = 0; i < dx.size(); ++i) {
    const double centre = x[i], step = 0x1p-10;
    x[i] = centre + step;
    const double above = along();
    x[i] = centre - step;
    const double below = along();
    x[i] = centre;
    EXPECT_NEAR(dx[i], (above - below) / (2 * step), 1e-11);  // a quadratic: differences are exact but for rounding
  }
}

TEST(TaylorRefusals, ScalesAndRowsThatAreTooLong) {
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  const Problem p{1, 1, 1, 9, 9, 4, 3};
  for (const double scale : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    expect_refusal([&] { workspace_size<float>(exec, Taylor{scale}, p, Pass::forward); },
                   {"the scale of the scores of taylor must be positive", LinAttn::detail::message("found ", scale)});
  EXPECT_NO_THROW(workspace_size<float>(exec, Taylor{}, {1, 1, 1, 9, 9, 360, 1}, Pass::forward));
  expect_refusal([&] { workspace_size<float>(exec, Taylor{}, {1, 1, 1, 9, 9, 361, 1}, Pass::forward); },
                 {"rows of at most 65536 entries", "D=361", "features=65703"});
  expect_refusal([&] { workspace_size<float>(exec, Taylor{}, {0, 1, 1, 9, 9, std::int64_t(1) << 60, 1}, Pass::step); },
                 {"LinAttn: "});
}

TEST(CosineRefusals, HasNoParameters) {
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  const Problem p{1, 2, 2, 9, 9, 4, 3};
  const Case c = random_case<double, Cosine>(p, {});
  Attention<double, Exec, Cosine> call(c, {});
  call.forward();
  const Kokkos::View<double*, Exec> d("test::d", 2);
  for (const char* what : {"query parameter", "score scale"}) {
    auto gradients = call.gradients({});
    (what[0] == 'q' ? gradients.query_parameter : gradients.scale) = d;
    expect_refusal(
        [&] { backward<double>(exec, Cosine{}, call.inputs(), call.saved(), call.d_o.input(), gradients); },
        {"variant cosine has no", what});
  }
}

// ---- performer --------------------------------------------------------------------------------------------------

TEST(OrthogonalFeatures, RowsOfABlockAreOrthogonal) {
  for (const auto& [features, d] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 1}, {20, 8}, {130, 64}, {5, 0}}) {
    const auto rows = LinAttn::detail::orthogonal_rows(features, d, seed());
    ASSERT_EQ(static_cast<std::int64_t>(rows.size()), features * d);
    const auto dot = [&, d = d](std::int64_t a, std::int64_t b) {
      return std::inner_product(rows.begin() + a * d, rows.begin() + (a + 1) * d, rows.begin() + b * d, 0.0);
    };
    for (std::int64_t a = 0; d > 0 && a < features; ++a)
      for (std::int64_t b = a / d * d; b < a; ++b)
        ASSERT_LE(std::abs(dot(a, b)), 1e-14 * std::sqrt(dot(a, a) * dot(b, b))) << a << " and " << b;
  }
}

// Directions and lengths are those of rows of normals: entries have mean 0 and variance 1, squared lengths the mean d
// and the variance 2 d. The bounds are five standard errors of as many independent rows; those of a block are not
// independent in direction, which makes the mean of the entries' squares vary less, not more.
TEST(OrthogonalFeatures, HaveTheMomentsOfNormals) {
  const std::int64_t features = 4000, d = 10;
  const auto rows = LinAttn::detail::orthogonal_rows(features, d, seed());
  double mean = 0, square = 0, length = 0, spread = 0;
  for (const double x : rows) mean += x, square += x * x;
  const double n = static_cast<double>(rows.size());
  EXPECT_NEAR(mean / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(square / n, 1, 5 * std::sqrt(2 / n));
  for (std::int64_t m = 0; m < features; ++m) {
    const auto row = rows.begin() + m * d;
    const double squared = std::inner_product(row, row + d, row, 0.0);
    length += squared;
    spread += (squared - 10) * (squared - 10);
  }
  EXPECT_NEAR(length / 4000, 10, 5 * std::sqrt(20.0 / 4000));
  // fourth central moment of chi square with d degrees: 12 d (d + 4), less the square of the variance
  EXPECT_NEAR(spread / 4000, 20, 5 * std::sqrt((12.0 * 10 * 14 - 400) / 4000));
}

TEST(OrthogonalFeatures, AreAFunctionOfSeedAndPlace) {
  using Exec = Kokkos::DefaultExecutionSpace;
  const auto many = LinAttn::detail::orthogonal_rows(50, 8, 3), few = LinAttn::detail::orthogonal_rows(13, 8, 3),
             other = LinAttn::detail::orthogonal_rows(13, 8, 4);
  EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
  EXPECT_NE(few, other);
  const auto view = orthogonal_features(Exec(), 13, 8, 3);
  ASSERT_EQ(view.extent(0), 13u);
  ASSERT_EQ(view.extent(1), 8u);
  const auto host = Kokkos::create_mirror_view(view);
  Kokkos::deep_copy(host, view);
  for (std::size_t m = 0; m < 13; ++m)
    for (std::size_t j = 0; j < 8; ++j) EXPECT_EQ(host(m, j), few[m * 8 + j]);
  expect_refusal([] { orthogonal_features(Exec(), -1, 8, 3); }, {"cannot be negative, found -1 of 8"});
}

template <class C>
class PerformerLimit : public ::testing::Test {};
TYPED_TEST_SUITE(PerformerLimit, OverSpaces, ConfigName);

// The error against exact attention falls as 1 / sqrt(M): its variance is inversely proportional to the number of
// blocks of D orthogonal rows, which are independent. That is so where a row, a quotient of two estimates, is nearly
// linear in them. A weight of M features has a relative variance of at most v(M) = (exp(|q + k|^2 / sqrt(D)) - 1) / M,
// and what is not linear changes the variance of a row by a factor within 1 +- 2 v. The logarithm of an error at the
// fewest features, 64, is off by v(64) then, and the slope of a line through the logarithms to base 4 of four errors by
// 0.3 v(64) / ln 4 + 0.1 v(256) / ln 4 < 0.24 v(64). For each seed the slope is fitted; their mean is -1/2 within this
// and four of its standard errors.
TYPED_TEST(PerformerLimit, ErrorsFallAsTheRootOfTheFeatures) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 2, 2, 24, 24, 8, 4};
  const Options options{.causal = true};
  Case c = random_case<double, Performer>(p, options);
  Random random(seed());
  random.fill_normal(c.q, 0, 0.25);
  random.fill_normal(c.k, 0, 0.25);
  double v = 0;
  for (std::int64_t i = 0; i < 48; ++i)
    for (std::int64_t j = 0; j < 24; ++j) {
      double square = 0;
      for (std::int64_t d = 0; d < 8; ++d)
        square += std::pow(c.q[static_cast<std::size_t>(i * 8 + d)] +
                               c.k[static_cast<std::size_t>((i / 24 * 24 + j) * 8 + d)], 2);
      v = std::max(v, (std::exp(square / std::sqrt(8.0)) - 1) / 64);
    }
  std::vector<long double> exact, size;
  attend_by_definition<Softmax>(c, options, exact, size);
  const ExecSpace exec;
  Attention<double, ExecSpace, Performer> call(c, options);
  const auto error = [&](std::int64_t features, std::uint64_t at) {
    const auto w = orthogonal_features(exec, features, p.d, at);
    forward<double>(exec, Performer{w}, call.inputs(), call.saved(), options);
    const auto o = call.o.get();
    double total = 0;
    for (std::size_t n = 0; n < o.size(); ++n) {
      const double e = o[n] - static_cast<double>(exact[n]);
      total += e * e;
    }
    return std::sqrt(total);
  };
  const std::vector<std::int64_t> features{64, 256, 1024, 4096};
  const int seeds = 64;
  double mean = 0, squares = 0;
  std::vector<double> errors(features.size());
  for (int s = 0; s < seeds; ++s) {
    double slope = 0;  // log4 M = 3, 4, 5, 6
    for (std::size_t n = 0; n < features.size(); ++n) {
      const double e = error(features[n], seed() + 1000 + static_cast<std::uint64_t>(s));
      errors[n] += e / seeds;
      slope += (static_cast<double>(n) - 1.5) * std::log(e) / std::log(4.0) / 5;
    }
    mean += slope / seeds;
    squares += slope * slope / seeds;
  }
  const double standard_error = std::sqrt((squares - mean * mean) / (seeds - 1));
  std::cout << "[ slope ] " << mean << " +- " << standard_error << ", v " << v << ", mean errors";
  for (const double e : errors) std::cout << " " << e;
  std::cout << std::endl;
  EXPECT_LE(std::abs(mean + 0.5), 4 * standard_error + 0.24 * v);
  EXPECT_LE(4 * standard_error + 0.24 * v, 0.1);  // or it says nothing
}

TEST(PerformerRefusals, NameTheProjection) {
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  const Problem p{1, 2, 2, 9, 9, 4, 3}, token{1, 2, 2, 1, 1, 4, 3};
  const auto w = [&](std::int64_t features, std::int64_t d) { return orthogonal_features(exec, features, d, 0); };
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::step}) {
    const Problem& of = pass == Pass::step ? token : p;
    expect_refusal([&] { workspace_size<float>(exec, Performer{}, of, pass); },
                   {"projection must have shape (M, 4) with M >= 1, found nothing"});
    expect_refusal([&] { workspace_size<float>(exec, Performer{w(8, 5)}, of, pass); },
                   {"projection must have shape (M, 4) with M >= 1, found (8, 5)"});
    expect_refusal([&] { workspace_size<float>(exec, Performer{w(0, 4)}, of, pass); }, {"found (0, 4)"});
    EXPECT_NO_THROW(workspace_size<float>(exec, Performer{w(1, 4)}, of, pass));
  }
  expect_refusal([&] { w(70000, 1); }, {"at most 65536 features", "found 70000 of 1"});
  const Kokkos::View<double**, Exec::memory_space> many("many", 70000, 1);
  expect_refusal([&] { workspace_size<float>(exec, Performer{many}, {1, 2, 2, 9, 9, 1, 3}, Pass::forward); },
                 {"rows of at most 65536 entries", "features=70000"});
  expect_refusal(
      [&] {
        workspace_size<float>(exec, Performer{w(8, 4)}, p, Pass::forward,
                              {.small_normaliser = SmallNormaliser::clamp});
      },
      {"performer", "clamp"});
  // the workspace is that of the problem of the caller
  const Case c = random_case<float, Performer>(p, {});
  Attention<float, Exec, Performer> call(c, {});
  expect_refusal([&] { forward<float>(exec, call.variant(), call.inputs(), call.saved(), Workspace<Exec>{}); },
                 {"the workspace needs", p.to_string()});
}

}  // namespace
