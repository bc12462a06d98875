// SPDX-License-Identifier: BSD-3-Clause

// The instruments against their definitions in long double, over kernels, masks, extents, layouts and types.

#include <limits>

#include "diagnose_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// What rounding can do, relative to the larger of 1 and the value. Sums over rows are in double: 1e-11 covers some
/// thousand roundings. The gap and what is common to all rows come from features in the accumulator type A, each within
/// 4 ulp, and sums of up to 256 products in A; a probability is therefore off by at most (256 + 2 r + 16) eps, and an
/// entropy or an eigenvalue by a few times that (log2 e ln n and the condition of the eigenvalue, 8 together).
template <class T>
double allowance(const std::string& name, std::int64_t r) {
  const bool of_features = name == "spectral_gap" || name == "entropy_biased" || name == "entropy_unbiased";
  const double eps = std::numeric_limits<accumulator_t<T>>::epsilon();
  return 1e-9 + (of_features ? 8 * static_cast<double>(256 + 2 * r + 16) * eps : 0);
}

template <class T, class ExecSpace, class Kernel>
void expect_agreement(const Kernel& kernel, const DiagnoseCase& c, const DiagnoseOptions& options,
                      Layout layout = Layout::right) {
  const PlacedCase<T, ExecSpace> placed(c, layout);
  const Diagnostics found = diagnose<T>(ExecSpace(), kernel, placed.inputs(), options);
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const DenseInstruments dense = expected(kernel, c, options.causal, b, h);
      const HeadDiagnostics& head = found(b, h);
      const auto values = values_of(head);
      for (const auto& [name, value] : dense.values)
        EXPECT_NEAR(values.at(name), value, allowance<T>(name, c.d + 1) * std::max(1.0, std::abs(value)))
            << Kernel::name << " " << name << " b=" << b << " h=" << h << " Nq=" << c.nq << " Nk=" << c.nk
            << (options.causal ? " causal" : " full") << (c.mask.empty() ? "" : " masked");
      EXPECT_EQ(head.empty_rows, dense.empty);
      EXPECT_EQ(head.zero_entries, dense.zeros);
      EXPECT_EQ(head.rows, c.nq);
      EXPECT_FALSE(head.sampled);
      if (c.nq == c.nk) {
        EXPECT_EQ(head.absent, "");
      } else {
        EXPECT_TRUE(std::isnan(head.spectral_gap));
        EXPECT_NE(head.absent.find("Nq = " + std::to_string(c.nq)), std::string::npos) << head.absent;
      }
    }
}

template <class Body>
void for_each_kernel(const Body& body) {
  body(SoftmaxKernel{});
  body(Lln{2.1, 1.7});
  body(Elu{});
  body(Relu{});
  body(Quadratic{});
}

template <class C>
class Diagnose : public ::testing::Test {};
TYPED_TEST_SUITE(Diagnose, OverScalars, ConfigName);

TYPED_TEST(Diagnose, AgreesWithDefinitions) {
  using T = typename TypeParam::T;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    for (const bool causal : {false, true})
      for (const bool masked : {false, true})
        for (const std::int64_t nk : {70, 83}) {
          auto c = DiagnoseCase::random<T>(2, 4, 2, 70, nk, 9, 1.2);
          for (std::int64_t e = 0; masked && e < 2 * nk; ++e) c.mask.push_back(e % 5 != 1 && e != 0 && e != nk + 2);
          expect_agreement<T, typename TypeParam::ExecSpace>(kernel, c, {.causal = causal});
        }
  });
}

// More rows than a tile, more keys than one part of them.
TYPED_TEST(Diagnose, ManyTiles) {
  using T = typename TypeParam::T;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    for (const bool causal : {false, true})
      expect_agreement<T, typename TypeParam::ExecSpace>(kernel, DiagnoseCase::random<T>(1, 1, 1, 200, 200, 20, 0.9),
                                                         {.causal = causal});
  });
  expect_agreement<T, typename TypeParam::ExecSpace>(Lln{1.5, 1.5}, DiagnoseCase::random<T>(1, 1, 1, 131, 2200, 5, 1.0),
                                                     {});
  expect_agreement<T, typename TypeParam::ExecSpace>(
      SoftmaxKernel{0.7}, DiagnoseCase::random<T>(1, 1, 1, 131, 2200, 5, 1.0), {.causal = true});
}

TYPED_TEST(Diagnose, SmallExtents) {
  using T = typename TypeParam::T;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    for (const std::int64_t n : {2, 3, 16, 17})
      for (const std::int64_t d : {1, 16})
        for (const bool causal : {false, true}) {
          if (std::is_same_v<Kernel, Relu> && d == 1) continue;  // of weights that are 0 or alike nothing is left
          if (n == 2 && causal) continue;                        // fewer than three entries have no skewness
          expect_agreement<T, typename TypeParam::ExecSpace>(kernel, DiagnoseCase::random<T>(1, 2, 1, n, n, d, 1, 5),
                                                             {.causal = causal});
        }
  });
}

// A variant whose weights could be negative but are not.
TYPED_TEST(Diagnose, AffineOfPositiveWeights) {
  using T = typename TypeParam::T;
  for (const bool causal : {false, true})
    expect_agreement<T, typename TypeParam::ExecSpace>(
        Affine{.a = 0.8, .b = 1.0}, DiagnoseCase::random<T>(1, 2, 1, 60, 60, 7, 1), {.causal = causal});
}

TYPED_TEST(Diagnose, EveryLayout) {
  using T = typename TypeParam::T;
  auto c = DiagnoseCase::random<T>(2, 2, 1, 37, 37, 6, 1.1);
  for (std::int64_t e = 0; e < 2 * 37; ++e) c.mask.push_back(e % 7 != 3);
  for (const Layout layout : all_layouts) {
    expect_agreement<T, typename TypeParam::ExecSpace>(Lln{2.0, 2.0}, c, {}, layout);
    expect_agreement<T, typename TypeParam::ExecSpace>(SoftmaxKernel{}, c, {.causal = true}, layout);
  }
}

template <class C>
class DiagnoseSpaces : public ::testing::Test {};
TYPED_TEST_SUITE(DiagnoseSpaces, OverSpaces, ConfigName);

TYPED_TEST(DiagnoseSpaces, SixteenBits) {
  using E = typename TypeParam::ExecSpace;
  expect_agreement<float16, E>(Lln{2.1, 1.7}, DiagnoseCase::random<float16>(1, 2, 1, 50, 50, 8, 1), {});
  expect_agreement<bfloat16, E>(SoftmaxKernel{}, DiagnoseCase::random<bfloat16>(1, 2, 1, 50, 50, 8, 1), {});
}

// In double the gap from the D x D matrix is that of the N x N matrix to 1e-10.
TYPED_TEST(DiagnoseSpaces, GapOfFeaturesIsThatOfTheMatrix) {
  using E = typename TypeParam::ExecSpace;
  for (const double sigma : {0.8, 1.2, 1.8}) {
    const auto c = DiagnoseCase::random<double>(1, 1, 1, 160, 160, 24, sigma);
    const PlacedCase<double, E> placed(c);
    const auto check = [&]<class Kernel>(const Kernel& kernel) {
      const double found = diagnose<double>(E(), kernel, placed.inputs(), {})(0, 0).spectral_gap;
      EXPECT_NEAR(found, expected(kernel, c, false, 0, 0).values.at("spectral_gap"), 1e-10) << Kernel::name;
    };
    check(Lln{2.1, 2.1});
    check(Elu{});
    check(Relu{});
    check(Quadratic{});
  }
}

// One token; all keys hidden; no rows; no keys; rows without weight.
TYPED_TEST(DiagnoseSpaces, NothingToMeasure) {
  using E = typename TypeParam::ExecSpace;
  const auto check = [](const Diagnostics& d, std::int64_t empty) {
    for (const HeadDiagnostics& head : d.values) {
      for (const auto& [name, value] : values_of(head)) {
        if (name == "temperature")
          EXPECT_GT(value, 1e14);
        else
          EXPECT_NEAR(value, name == "spectral_gap" ? 1 : 0, 1e-14) << name;
      }
      EXPECT_EQ(head.empty_rows, empty);
      EXPECT_EQ(head.absent, "");
    }
  };
  for_each_kernel([&]<class Kernel>(const Kernel& kernel) {
    for (const bool causal : {false, true}) {
      auto one = DiagnoseCase::random<double>(2, 2, 2, 1, 1, 4, 1);
      if (std::is_same_v<Kernel, Relu>)
        for (auto* x : {&one.q, &one.k})
          for (double& value : *x) value = std::abs(value);
      check(diagnose<double>(E(), kernel, PlacedCase<double, E>(one).inputs(), {.causal = causal}), 0);
      auto hidden = DiagnoseCase::random<double>(1, 2, 2, 9, 9, 4, 1);
      hidden.mask.assign(9, 0);
      std::fill(hidden.k.begin(), hidden.k.end(), std::numeric_limits<double>::quiet_NaN());
      check(diagnose<double>(E(), kernel, PlacedCase<double, E>(hidden).inputs(), {.causal = causal}), 9);
      check(diagnose<double>(E(), kernel, PlacedCase<double, E>(hidden).inputs(),
                             {.causal = causal, .exact_up_to = 1, .rows = 8}),
            8);
      for (const std::int64_t n : {0, 3})
        check(diagnose<double>(
                  E(), kernel,
                  PlacedCase<double, E>(DiagnoseCase{1, 1, 1, 0, n, 4, {}, std::vector<double>(4 * n)}).inputs(),
                  {.causal = causal}),
              0);
      EXPECT_TRUE(diagnose<double>(E(), kernel, PlacedCase<double, E>(DiagnoseCase{0, 1, 1, 2, 2, 4}).inputs(), {})
                      .values.empty());
    }
  });
  auto zero = DiagnoseCase::random<double>(1, 1, 1, 9, 9, 4, 1);
  for (double& x : zero.q) x = -std::abs(x);
  check(diagnose<double>(E(), Relu{}, PlacedCase<double, E>(zero).inputs(), {}), 9);
}

// Every eighth query of relu attention has no feature: left out of the rows, uniform in the gap.
TYPED_TEST(DiagnoseSpaces, RowsWithoutWeight) {
  using E = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const bool masked : {false, true}) {
      auto c = DiagnoseCase::random<double>(1, 2, 1, 90, 90, 3, 1);
      for (std::int64_t j = 0; masked && j < 90; ++j) c.mask.push_back(j % 5 != 2);
      const auto found = diagnose<double>(E(), Relu{}, PlacedCase<double, E>(c).inputs(), {.causal = causal});
      EXPECT_GT(found(0, 0).empty_rows, 4);
      expect_agreement<double, E>(Relu{}, c, {.causal = causal});
    }
}

// Equal queries and keys: uniform rows, exactly.
TYPED_TEST(DiagnoseSpaces, ConstantInputs) {
  using E = typename TypeParam::ExecSpace;
  const DiagnoseCase c{1, 1, 1, 64, 64, 8, std::vector<double>(512, 0.7), std::vector<double>(512, 1.3)};
  for_each_kernel([&]<class Kernel>(const Kernel& kernel) {
    const auto d = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), {})(0, 0);
    EXPECT_NEAR(d.entropy, 6, 1e-12) << Kernel::name;
    EXPECT_NEAR(d.entropy_biased, 0, 1e-12);
    EXPECT_NEAR(d.entropy_unbiased, 0, 1e-12);
    EXPECT_NEAR(d.spectral_gap, 1, 1e-12);
    EXPECT_NEAR(d.relative_variance, 0, 1e-12);
    EXPECT_NEAR(d.logvar, 0, 1e-24);
    EXPECT_NEAR(d.log_mean, -std::log(64.0), 1e-12);
  });
}

// What is hidden, or in no row's sight, is never read: a NaN there changes nothing.
TYPED_TEST(DiagnoseSpaces, HiddenKeysDoNotLeak) {
  using E = typename TypeParam::ExecSpace;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    for (const bool causal : {false, true}) {
      auto c = DiagnoseCase::random<double>(1, 2, 1, 90, 90, 8, 1);
      for (std::int64_t j = 0; j < 90; ++j) c.mask.push_back(j % 4 != 1 && j != 89);
      const auto clean = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), {.causal = causal});
      for (std::int64_t j = 0; j < 90; ++j)
        for (std::int64_t e = 0; e < 8; ++e)
          if (!c.mask[j]) c.k[j * 8 + e] = std::numeric_limits<double>::quiet_NaN();
      const auto poisoned = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), {.causal = causal});
      for (std::int64_t h = 0; h < 2; ++h)
        for (const auto& [name, value] : values_of(clean(0, h)))
          EXPECT_EQ(values_of(poisoned(0, h)).at(name), value) << Kernel::name << " " << name;
    }
  });
}

// A visible NaN is said, and stays in its head.
TYPED_TEST(DiagnoseSpaces, VisibleNaN) {
  using E = typename TypeParam::ExecSpace;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    auto c = DiagnoseCase::random<double>(1, 2, 2, 40, 40, 8, 1);
    const auto clean = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), {});
    c.k[5] = std::numeric_limits<double>::quiet_NaN();
    const auto d = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), {});
    for (const auto& [name, value] : values_of(d(0, 0))) EXPECT_TRUE(std::isnan(value)) << Kernel::name << " " << name;
    EXPECT_NE(d(0, 0).absent.find("not finite"), std::string::npos);
    for (const auto& [name, value] : values_of(clean(0, 1))) EXPECT_EQ(values_of(d(0, 1)).at(name), value) << name;
  });
}

// A query that is not finite, in the sample or not: all is NaN, and said. Of softmax attention only the sample is read.
TYPED_TEST(DiagnoseSpaces, QueriesThatAreNotFinite) {
  using E = typename TypeParam::ExecSpace;
  for_each_kernel([]<class Kernel>(const Kernel& kernel) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      for (const bool causal : {false, true})
        for (const std::int64_t rows : {10, 40})
          for (std::int64_t at = 0; at < 40; at += 3) {
            if (std::isinf(bad) && (std::is_same_v<Kernel, Lln> || std::is_same_v<Kernel, Relu>)) continue;
            auto c = DiagnoseCase::random<double>(1, 1, 1, 40, 40, 8, 1);
            c.q[at * 8 + 2] = bad;
            const DiagnoseOptions options{.causal = causal, .exact_up_to = 10, .rows = rows};
            const auto d = diagnose<double>(E(), kernel, PlacedCase<double, E>(c).inputs(), options)(0, 0);
            if (std::is_same_v<Kernel, SoftmaxKernel> && rows < 40) {
              const auto sample = LinAttn::detail::sampled_rows(0, 0, 40, rows);
              if (std::find(sample.begin(), sample.end(), at) == sample.end()) continue;
            }
            for (const auto& [name, value] : values_of(d))
              EXPECT_TRUE(std::isnan(value)) << Kernel::name << " " << name << " " << at << " of " << rows << causal;
            EXPECT_NE(d.absent.find("not finite"), std::string::npos) << Kernel::name << at;
          }
  });
}

// One channel offset by +50 with queries at -60 there, and a key at 110: products of 1e-90 and probabilities of e^-400.
TYPED_TEST(DiagnoseSpaces, ExtremeInputs) {
  using E = typename TypeParam::ExecSpace;
  auto offset = DiagnoseCase::random<double>(1, 1, 1, 80, 80, 8, 1);
  for (std::int64_t j = 0; j < 80; ++j) {
    offset.k[j * 8 + 3] += 50;
    offset.q[j * 8 + 3] -= 60;
  }
  auto peak = DiagnoseCase::random<double>(1, 1, 1, 80, 80, 8, 1);
  peak.k[33 * 8 + 2] = 110;
  for (const auto& c : {offset, peak})
    for (const bool causal : {false, true}) {
      expect_agreement<double, E>(Lln{2.0, 2.0}, c, {.causal = causal});
      expect_agreement<double, E>(SoftmaxKernel{1.0}, c, {.causal = causal});
    }
  offset.round<float>();
  expect_agreement<float, E>(Lln{2.0, 2.0}, offset, {});
}

// 0.9 of the weight on one token, 0.1 on all: equal entropies, opposite gaps.
TYPED_TEST(DiagnoseSpaces, TargetsOf512Tokens) {
  using E = typename TypeParam::ExecSpace;
  constexpr std::int64_t n = 512, d = 16;
  // targets by logits: P_target = 0.9 + 0.1 / n against 0.1 / n. Tokens are told apart by the 2 n signs of d
  // dimensions, too few for exact rows, so that softmax has a dimension for each token
  const double logit = std::log((0.9 + 0.1 / n) / (0.1 / n));
  DiagnoseCase own{1, 1, 1, n, n, n, std::vector<double>(n * n), std::vector<double>(n * n)};
  for (std::int64_t i = 0; i < n; ++i) {
    own.q[i * n + i] = logit;
    own.k[i * n + i] = 1;
  }
  const double p = 0.9 + 0.1 / n, rest = 0.1 / n;
  const double entropy = -p * std::log2(p) - (n - 1) * rest * std::log2(rest);
  EXPECT_NEAR(entropy, 1.366, 5e-4);
  const auto unbiased = diagnose<double>(E(), SoftmaxKernel{1.0}, PlacedCase<double, E>(own).inputs(), {})(0, 0);
  EXPECT_NEAR(unbiased.entropy, entropy, 1e-11);
  EXPECT_NEAR(unbiased.spectral_gap, 0.1, 1e-8);
  EXPECT_NEAR(unbiased.entropy_biased, 0, 1e-11);
  EXPECT_NEAR(unbiased.entropy_unbiased, 9 - entropy, 1e-11);

  DiagnoseCase first{1, 1, 1, n, n, d, std::vector<double>(n * d, 1.0), std::vector<double>(n * d)};
  for (std::int64_t e = 0; e < d; ++e) first.k[e] = logit / d;
  const auto biased = diagnose<double>(E(), SoftmaxKernel{1.0}, PlacedCase<double, E>(first).inputs(), {})(0, 0);
  EXPECT_NEAR(biased.entropy, entropy, 1e-11);
  EXPECT_NEAR(biased.spectral_gap, 1, 1e-11);
  EXPECT_NEAR(biased.entropy_biased, 9 - entropy, 1e-11);
  EXPECT_NEAR(biased.entropy_unbiased, 0, 1e-11);
}

// Sampled rows lie within 4 standard errors of all rows; what is exact either way agrees.
TYPED_TEST(DiagnoseSpaces, SampledRows) {
  using E = typename TypeParam::ExecSpace;
  const auto c = DiagnoseCase::random<float>(1, 2, 1, 1500, 1500, 16, 1.1);
  const PlacedCase<float, E> placed(c);
  for_each_kernel([&]<class Kernel>(const Kernel& kernel) {
    const auto all = diagnose<float>(E(), kernel, placed.inputs(), {.exact = true, .gap = false});
    const auto some =
        diagnose<float>(E(), kernel, placed.inputs(), {.exact_up_to = 100, .rows = 100, .seed = 7, .gap = false});
    for (std::int64_t h = 0; h < 2; ++h) {
      const HeadDiagnostics &e = all(0, h), &s = some(0, h);
      EXPECT_TRUE(s.sampled);
      EXPECT_EQ(s.rows, 100);
      const auto near = [&](const char* name, double sampled, double exact, double error) {
        EXPECT_GT(error, 0) << name;
        EXPECT_NEAR(sampled, exact, 4 * error) << Kernel::name << " " << name;
      };
      near("entropy", s.entropy, e.entropy, s.entropy_error);
      near("log_mean", s.log_mean, e.log_mean, s.log_mean_error);
      near("logvar", s.logvar, e.logvar, s.logvar_error);
      near("logvar_within", s.logvar_within, e.logvar_within, s.logvar_within_error);
      if (std::is_same_v<Kernel, SoftmaxKernel>) {
        near("relative_variance", s.relative_variance, e.relative_variance, s.relative_variance_error);
        EXPECT_TRUE(std::isnan(s.entropy_biased));
        EXPECT_NE(s.absent.find("column means"), std::string::npos) << s.absent;
      } else {
        near("entropy_unbiased", s.entropy_unbiased, e.entropy_unbiased, s.entropy_unbiased_error);
        EXPECT_EQ(s.entropy_biased, e.entropy_biased);
        EXPECT_NEAR(s.relative_variance, e.relative_variance, 8 * 300 * 1.2e-7 * (1 + e.relative_variance));
      }
    }
    const auto again =
        diagnose<float>(E(), kernel, placed.inputs(), {.exact_up_to = 100, .rows = 100, .seed = 7, .gap = false});
    const auto other =
        diagnose<float>(E(), kernel, placed.inputs(), {.exact_up_to = 100, .rows = 100, .seed = 8, .gap = false});
    EXPECT_EQ(again(0, 0).entropy, some(0, 0).entropy);
    EXPECT_NE(other(0, 0).entropy, some(0, 0).entropy);
    EXPECT_NE(some(0, 0).entropy, some(0, 1).entropy);
  });
}

// Under a causal mask kernel attention gives its gap and column means away without all scores: by walks over the
// tokens, here over several segments, more keys than queries, and shifts that rise and fall on the way.
TYPED_TEST(DiagnoseSpaces, CausalWalks) {
  using E = typename TypeParam::ExecSpace;
  for (const std::int64_t nk : {2300, 2311}) {
    auto c = DiagnoseCase::random<double>(2, 2, 1, 2300, nk, 6, 1.1);
    for (std::int64_t j = 0; j < 2 * nk; ++j) c.mask.push_back(j % 3 != 1 && j != 0);
    for (std::int64_t j = 0; j < nk; ++j)
      for (std::int64_t e = 0; e < 6; ++e) {
        if (!c.mask[j]) c.k[j * 6 + e] = std::numeric_limits<double>::quiet_NaN();
        if (e == 2) c.k[(nk + j) * 6 + e] += 30 * std::sin(static_cast<double>(j) / 300);
      }
    const PlacedCase<double, E> placed(c);
    for_each_kernel([&]<class Kernel>(const Kernel& kernel) {
      if (std::is_same_v<Kernel, SoftmaxKernel>) return;
      const auto all = diagnose<double>(E(), kernel, placed.inputs(), {.causal = true, .exact = true});
      const auto some =
          diagnose<double>(E(), kernel, placed.inputs(), {.causal = true, .exact_up_to = 10, .rows = 100});
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t h = 0; h < 2; ++h) {
          const HeadDiagnostics &e = all(b, h), &s = some(b, h);
          EXPECT_TRUE(s.sampled);
          EXPECT_NEAR(s.entropy_biased, e.entropy_biased, 1e-10) << Kernel::name << " b=" << b << " Nk=" << nk;
          EXPECT_NEAR(s.entropy_unbiased, e.entropy_unbiased, 4 * s.entropy_unbiased_error) << Kernel::name;
          EXPECT_NEAR(s.relative_variance, e.relative_variance, 4 * s.relative_variance_error) << Kernel::name;
          if (nk == 2300) {
            EXPECT_NEAR(s.spectral_gap, e.spectral_gap, 1e-10) << Kernel::name;
          }
        }
    });
  }
}

// A standard error is the spread between samples: over 40 seeds the mean square of (sampled - exact) / error is about 1
// (chi-squared with 40 degrees of freedom: between 0.4 and 2.2 but once in 1e5 cases).
TYPED_TEST(DiagnoseSpaces, StandardErrorsAreThoseOfSamples) {
  using E = typename TypeParam::ExecSpace;
  const auto c = DiagnoseCase::random<double>(1, 1, 1, 700, 700, 16, 1.2);
  const PlacedCase<double, E> placed(c);
  const auto exact = diagnose<double>(E(), SoftmaxKernel{}, placed.inputs(), {.gap = false})(0, 0);
  double of_entropy = 0, of_logvar = 0, of_variance = 0, of_within = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const auto s = diagnose<double>(E(), SoftmaxKernel{}, placed.inputs(),
                                    {.exact_up_to = 10, .rows = 120, .seed = seed, .gap = false})(0, 0);
    const auto share = [](double difference, double error) { return difference * difference / (error * error) / 40; };
    of_entropy += share(s.entropy - exact.entropy, s.entropy_error);
    of_logvar += share(s.logvar - exact.logvar, s.logvar_error);
    of_variance += share(s.variance - exact.variance, s.variance_error);
    of_within += share(s.logvar_within - exact.logvar_within, s.logvar_within_error);
  }
  for (const double x : {of_entropy, of_logvar, of_variance, of_within}) {
    EXPECT_GT(x, 0.4);
    EXPECT_LT(x, 2.2);
  }
}

// Serial and the other host space, of more threads, agree in every bit.
TEST(DiagnoseThreads, SameBits) {
  const auto c = DiagnoseCase::random<float>(2, 2, 1, 600, 600, 16, 1.2);
  using One = Kokkos::DefaultHostExecutionSpace;
#if defined(KOKKOS_ENABLE_SERIAL)
  using Other = Kokkos::Serial;
#else
  using Other = One;
#endif
  for (const bool causal : {false, true})
    for (const std::int64_t rows : {64, 600})
      for_each_kernel([&]<class Kernel>(const Kernel& kernel) {
        const DiagnoseOptions options{.causal = causal, .exact_up_to = 64, .rows = rows};
        const auto a = diagnose<float>(One(), kernel, PlacedCase<float, One>(c).inputs(), options);
        const auto b = diagnose<float>(Other(), kernel, PlacedCase<float, Other>(c).inputs(), options);
        for (std::size_t at = 0; at < a.values.size(); ++at)
          for (const auto& [name, value] : values_of(a.values[at]))
            EXPECT_TRUE(same_bits(values_of(b.values[at]).at(name), value) || std::isnan(value))
                << Kernel::name << " " << name;
      });
}

template <class Body>
std::string refusal_of(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(DiagnoseRefusals, NameWhatIsWrong) {
  using E = Kokkos::DefaultHostExecutionSpace;
  const auto c = DiagnoseCase::random<double>(1, 2, 1, 12, 12, 4, 1);
  const PlacedCase<double, E> placed(c);
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto call = [&](const auto& kernel, const DiagnoseOptions& options = {}) {
    return refusal_of([&] { diagnose<double>(E(), kernel, placed.inputs(), options); });
  };
  expect(call(Identity{}), "weights of identity are negative here");
  expect(call(Affine{.a = 3.0, .b = 1.0}), "weights of affine are negative here");
  expect(call(Identity{}, {.exact_up_to = 5, .rows = 4}), "ask for exact");
  expect(call(Elu{}, {.rows = 1}), "found 1");
  expect(call(SoftmaxKernel{std::numeric_limits<double>::infinity()}), "scale of softmax must be finite");
  expect(call(Lln{std::numeric_limits<double>::quiet_NaN(), 1.0}), "alpha must be finite");
  const std::vector<std::int64_t> offsets{0, 12};
  auto packed = placed.inputs();
  packed.cu_seqlens_q = packed.cu_seqlens_k = {offsets.data(), {2}, {1}};
  expect(refusal_of([&] { diagnose<double>(E(), Elu{}, packed); }), "packed sequences");
  DiagnoseInputs<E, double> half{.q = placed.q.input()};
  expect(refusal_of([&] { diagnose<double>(E(), Elu{}, half); }), "input k is missing");
  const auto fewer = DiagnoseCase::random<double>(1, 1, 1, 12, 11, 4, 1);
  expect(refusal_of([&] { diagnose<double>(E(), Elu{}, PlacedCase<double, E>(fewer).inputs(), {.causal = true}); }),
         "causal attention needs Nq <= Nk");
  auto mask = placed.inputs();
  const PlacedTensor<std::uint8_t, 2, E> wrong({1, 11}, Layout::right);
  mask.key_mask = wrong.input();
  expect(refusal_of([&] { diagnose<double>(E(), Elu{}, mask); }), "key_mask must have shape (1, 12)");
}

// Weights of identity that are not negative are fine.
TEST(DiagnoseRefusals, MeasuredWeights) {
  using E = Kokkos::DefaultHostExecutionSpace;
  auto c = DiagnoseCase::random<double>(1, 1, 1, 30, 30, 4, 1);
  for (auto* x : {&c.q, &c.k})
    for (double& value : *x) value = std::abs(value);
  const PlacedCase<double, E> placed(c);
  const auto of_identity = diagnose<double>(E(), Identity{}, placed.inputs())(0, 0);
  const auto of_relu = diagnose<double>(E(), Relu{}, placed.inputs())(0, 0);
  for (const auto& [name, value] : values_of(of_relu)) EXPECT_EQ(values_of(of_identity).at(name), value) << name;
}

TEST(NaturalLog, OverTheRange) {
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const double x = std::exp(-700 + 0.00701 * i);
    const double exact = static_cast<double>(std::log(static_cast<long double>(x)));
    worst = std::max(worst, std::abs(LinAttn::detail::natural_log(x) - exact) / std::max(std::abs(exact), 1e-3));
  }
  for (int i = 1; i < 100000; ++i) {
    const double x = 0.5 + i * 2e-5;
    const double exact = static_cast<double>(std::log(static_cast<long double>(x)));
    if (exact == 0) continue;
    worst = std::max(worst, std::abs(LinAttn::detail::natural_log(x) - exact) / std::abs(exact));
  }
  EXPECT_LT(worst, 3 * std::numeric_limits<double>::epsilon());
  EXPECT_EQ(LinAttn::detail::natural_log(1), 0);
  EXPECT_NEAR(LinAttn::detail::natural_log(LinAttn::detail::least_weight), -708.3964185322641, 1e-12);
}

}  // namespace
