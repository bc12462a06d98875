// SPDX-License-Identifier: BSD-3-Clause
// Moments and diagnostics of the oracle: closed forms, what must not change, edges.

#include <gtest/gtest.h>

#include <complex>
#include <linattn/reference/analysis.hpp>
#include <numbers>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Diagnostics;
using reference::Kernel;
using reference::Matrix;
using reference::MomentScope;
using Real = long double;

constexpr Real unit = roundoff<Real>;
constexpr Real poison = std::numeric_limits<Real>::quiet_NaN();

/// All entries visible, or those on and below the diagonal.
Matrix<Real> matrix(std::size_t n, bool causal, const auto& entry) {
  Matrix<Real> p(n, n);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < (causal ? i + 1 : n); ++j) {
      p.values[i * n + j] = entry(i, j);
      p.visible[i * n + j] = 1;
    }
  return p;
}

TEST(ReferenceMoments, ByHand) {
  // q: 1, 2, 3, 6 with mean 3 and squares 4, 1, 0, 9; k: 2, 4 and 1, 5 without the hidden ones.
  const Problem problem{.batch = 1, .heads = 2, .kv_heads = 2, .nq = 2, .nk = 3, .d = 1, .dv = 1};
  const reference::Tensors<Real> tensors{{1, 2, 3, 6}, {2, poison, 4, 1, poison, 5}, {}};
  const auto whole = reference::moments(problem, tensors, MomentScope::tensor, {1, 0, 1});
  ASSERT_EQ(whole.sigma_q.size(), 1u);
  EXPECT_TRUE(near(whole.sigma_q[0], std::sqrt(Real(14) / 3), 4 * unit));
  EXPECT_TRUE(near(whole.sigma_k[0], std::sqrt(Real(10) / 3), 4 * unit));
  const Real st2 = (Real(140) / 9 + 0.35487039130661086L) / 0.14855178144710912L;
  EXPECT_GT(st2, 70);
  ASSERT_EQ(whole.alpha.size(), 2u);
  for (const Real alpha : whole.alpha)
    EXPECT_TRUE(near(alpha * whole.sigma_q[0], std::sqrt(Real(35)), 16 * unit));
  const auto heads = reference::moments(problem, tensors, MomentScope::head, {1, 0, 1});
  EXPECT_TRUE(near(heads.sigma_q[0], std::sqrt(Real(0.5)), 4 * unit));
  EXPECT_TRUE(near(heads.sigma_q[1], std::sqrt(Real(4.5)), 4 * unit));
  EXPECT_TRUE(near(heads.sigma_k[0], std::sqrt(Real(2)), 4 * unit));
  EXPECT_TRUE(near(heads.sigma_k[1], std::sqrt(Real(8)), 4 * unit));
  // Head 0: sigma_q^2 sigma_k^2 = 1. The constants are rounded to double.
  const Real of_one = (1 + 0.35487039130661086L) / 0.14855178144710912L;
  EXPECT_TRUE(near(heads.alpha[0], std::sqrt(of_one), 1e-15L));
  EXPECT_TRUE(near(heads.beta[0], std::sqrt(of_one) / 2, 1e-15L));
  EXPECT_TRUE(near(heads.beta[1] * heads.sigma_k[1], std::sqrt(Real(35)), 16 * unit));
}

TEST(ReferenceMoments, TheRuleOfTheSpecifiedSizes) {
  // sigma_q = sigma_k = s: alpha = beta = 2.005, 2.135, 2.382 for s = 0.8, 1, 1.2.
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 2, .nk = 2, .d = 1, .dv = 1};
  for (const auto& [s, expected] : {std::pair{0.8L, 2.005L}, {1.0L, 2.135L}, {1.2L, 2.382L}}) {
    const Real x = s / std::sqrt(Real(2));
    const auto found = reference::moments(problem, reference::Tensors<Real>{{x, -x}, {-x, x}, {}},
                                          MomentScope::tensor);
    EXPECT_TRUE(near(found.sigma_q[0], s, 4 * unit));
    EXPECT_TRUE(near(found.alpha[0], expected, 0.0005L));
    EXPECT_TRUE(near(found.beta[0], expected, 0.0005L));
  }
}

TEST(ReferenceMoments, GroupsShiftsAndScales) {
  const Problem problem{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 5, .nk = 7, .d = 3, .dv = 1};
  auto c = random_case<Real>(problem, {.kernel = Kernel::lln}, 601);
  const auto base = reference::moments(problem, c.tensors, MomentScope::head);
  EXPECT_EQ(base.sigma_q.size(), 2u);
  EXPECT_EQ(base.alpha.size(), 4u);
  EXPECT_EQ(base.alpha[0], base.alpha[1]);
  EXPECT_NE(base.alpha[1], base.alpha[2]);
  // Head 1 belongs to group 0, head 2 to group 1; of both batch entries.
  for (const std::int64_t h : {1, 2}) {
    auto moved = c.tensors;
    for (std::int64_t n = 0; n < 15; ++n) moved.q[static_cast<std::size_t>((4 + h) * 15 + n)] *= 2;
    const auto found = reference::moments(problem, moved, MomentScope::head);
    EXPECT_EQ(found.sigma_q[0] != base.sigma_q[0], h == 1);
    EXPECT_EQ(found.sigma_q[1] != base.sigma_q[1], h == 2);
    EXPECT_TRUE(same(found.sigma_k, base.sigma_k));
  }
  // An offset is no part of a deviation, also one of 1e9.
  auto shifted = c.tensors;
  for (auto& x : shifted.q) x += 1e9L;
  for (auto& x : shifted.k) x = 4 * x;
  const auto found = reference::moments(problem, shifted, MomentScope::head);
  for (std::size_t n = 0; n < 2; ++n) {
    EXPECT_TRUE(near(found.sigma_q[n], base.sigma_q[n], 1e9L * 4 * unit));
    EXPECT_TRUE(near(found.sigma_k[n], 4 * base.sigma_k[n], 8 * unit));
  }
}

TEST(ReferenceMoments, Edges) {
  const Problem problem{.batch = 1, .heads = 2, .kv_heads = 1, .nq = 2, .nk = 2, .d = 2, .dv = 1};
  const reference::Tensors<Real> constant{std::vector<Real>(8, 3), {1, 2, 3, 4}, {}};
  const auto clamped = reference::moments(problem, constant, MomentScope::tensor);
  EXPECT_EQ(clamped.sigma_q[0], static_cast<Real>(1e-4));
  EXPECT_TRUE(std::isfinite(clamped.alpha[1]));
  const auto hidden = reference::moments(problem, constant, MomentScope::head, {0, 0});
  EXPECT_EQ(hidden.sigma_k[0], static_cast<Real>(1e-4));
  EXPECT_TRUE(std::isfinite(hidden.beta[0]));
  auto with_nan = constant;
  with_nan.q = {1, 2, poison, poison, 3, 4, poison, poison};
  const auto masked = reference::moments(problem, with_nan, MomentScope::head, {}, {1, 0});
  EXPECT_TRUE(near(masked.sigma_q[0], std::sqrt(Real(5) / 3), 4 * unit));
  // A mask of its own for each batch entry.
  Problem two = problem;
  two.batch = 2, two.heads = 1;
  const reference::Tensors<Real> keys{
      std::vector<Real>(8), {1, 2, poison, poison, poison, poison, 3, 4}, {}};
  EXPECT_TRUE(near(reference::moments(two, keys, MomentScope::tensor, {1, 0, 0, 1}).sigma_k[0],
                   std::sqrt(Real(5) / 3), 4 * unit));
  EXPECT_THROW((void)reference::moments(problem, constant, MomentScope::head, {1}),
               InvalidArgument);
  EXPECT_THROW((void)reference::moments(problem, constant, MomentScope::head, {}, {1, 1, 1}),
               InvalidArgument);
}

TEST(ReferenceDiagnostics, OneEntryInEveryRowAndColumn) {
  // 0.9 of a cyclic permutation and 0.1 of uniform rows: eigenvalues 0.9 exp(2 pi i m turn / n).
  const std::size_t n = 12;
  const Real on = 0.9L + 0.1L / n, off = 0.1L / n;
  for (const std::size_t turn : {0u, 1u, 5u}) {
    const auto found = reference::diagnostics(
        matrix(n, false, [&](auto i, auto j) { return (i + turn) % n == j ? on : off; }), false);
    const Real entropy = -on * std::log2(on) - (n - 1) * off * std::log2(off);
    EXPECT_TRUE(near(found.entropy, entropy, 32 * unit));
    EXPECT_TRUE(near(found.entropy_biased, 0, 64 * unit));
    EXPECT_TRUE(near(found.entropy_unbiased, std::log2(Real(n)) - entropy, 64 * unit));
    EXPECT_TRUE(near(found.spectral_gap, 0.1L, 64 * unit));
    EXPECT_TRUE(near(found.variance, (on - off) * (on - off) * (n - 1) / (n * n), 8 * unit));
    const Real ratio = std::log(on / off), logvar = ratio * ratio * (n - 1) / (n * n);
    EXPECT_TRUE(near(found.logvar, logvar, 64 * unit));
    EXPECT_TRUE(near(found.logvar_within, logvar, 64 * unit));
  }
}

TEST(ReferenceDiagnostics, ConcentrationOnOneTokenIsBiased) {
  // 512 rows: entropy 1.366, gap 1; the identity in its place has the gap 0.1.
  const std::size_t n = 512;
  const double on = 0.9 + 0.1 / n, off = 0.1 / n;
  Matrix<double> p(n, n);
  p.visible.assign(n * n, 1);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) p.values[i * n + j] = j == 0 ? on : off;
  const auto found = reference::diagnostics(p, false);
  EXPECT_NEAR(found.entropy, 1.366, 5e-4);
  EXPECT_EQ(found.spectral_gap, 1);
  EXPECT_NEAR(found.entropy_biased, 9 - found.entropy, 1e-12);
  EXPECT_NEAR(found.entropy_unbiased, 0, 1e-12);
  EXPECT_NEAR(found.logvar, found.logvar_within, 1e-12);
}

TEST(ReferenceDiagnostics, UniformRows) {
  const auto uniform = [](auto, auto) { return Real(1) / 8; };
  const auto full = reference::diagnostics(matrix(8, false, uniform), false);
  EXPECT_EQ(full.entropy, 3);
  EXPECT_EQ(full.entropy_biased, 0);
  EXPECT_EQ(full.entropy_unbiased, 0);
  EXPECT_EQ(full.spectral_gap, 1);
  EXPECT_EQ(full.variance, 0);
  EXPECT_EQ(full.logvar, 0);
  // Causal: row i is 1/i.
  const auto causal = reference::diagnostics(
      matrix(4, true, [](auto i, auto) { return 1 / static_cast<Real>(i + 1); }), true);
  EXPECT_TRUE(near(causal.entropy, (1 + std::log2(Real(3)) + 2) / 4, 8 * unit));
  EXPECT_EQ(causal.spectral_gap, 0.5L);
  EXPECT_TRUE(near(causal.logvar_within, 0, unit));
  const Real a = std::log(Real(2)), b = std::log(Real(3)), c = std::log(Real(4));
  const Real mean = (2 * a + 3 * b + 4 * c) / 10;
  EXPECT_TRUE(
      near(causal.logvar, (2 * a * a + 3 * b * b + 4 * c * c) / 10 - mean * mean, 16 * unit));
  for (const Real x : {causal.entropy_biased, causal.entropy_unbiased, causal.variance})
    EXPECT_TRUE(std::isnan(x));
}

TEST(ReferenceDiagnostics, EigenvaluesOfTwoByTwo) {
  // (1 - a, a; b, 1 - b) has the eigenvalues 1 and 1 - a - b, of either sign.
  for (const auto& [a, b] :
       {std::pair{0.25L, 0.5L}, {0.875L, 0.75L}, {0.5L, 0.5L}, {0.0L, 0.0L}, {1.0L, 1.0L}}) {
    EXPECT_TRUE(near(reference::second_eigenvalue<Real>({1 - a, a, b, 1 - b}, 2),
                     std::abs(1 - a - b), 8 * unit));
  }
}

TEST(ReferenceDiagnostics, EigenvaluesOfCirculants) {
  // Row i is c turned by i: eigenvalues sum_j c_j exp(2 pi i j m / n), complex in pairs.
  Random random(seed() + 611);
  for (const std::size_t n : {3u, 7u, 16u, 31u}) {
    std::vector<Real> c(n);
    Real sum = 0, expected = 0;
    for (auto& x : c) sum += x = random.uniform(0, 1) * random.uniform(0, 1);
    for (auto& x : c) x /= sum;
    for (std::size_t m = 1; m < n; ++m) {
      std::complex<Real> value = 0;
      for (std::size_t j = 0; j < n; ++j)
        value += std::polar(c[j], 2 * std::numbers::pi_v<Real> * static_cast<Real>(j * m % n) /
                                      static_cast<Real>(n));
      expected = std::max(expected, std::abs(value));
    }
    const auto p = matrix(n, false, [&](auto i, auto j) { return c[(j + n - i) % n]; });
    EXPECT_TRUE(near(reference::second_eigenvalue(p.values, n), expected, 64 * unit)) << n;
  }
}

TEST(ReferenceDiagnostics, SpectralRadius) {
  // Nilpotent: nothing remains. A Jordan block converges slowly, but 2^64 is far.
  EXPECT_EQ(reference::spectral_radius<Real>({0, 1, 5, 0, 0, 2, 0, 0, 0}, 3), 0);
  EXPECT_TRUE(near(reference::spectral_radius<Real>({0.5L, 1, 0, 0.5L}, 2), 0.5L, 256 * unit));
  EXPECT_TRUE(near(reference::spectral_radius<Real>({0, -4, 1, 0}, 2), 2, 16 * unit));
  EXPECT_TRUE(
      near(reference::spectral_radius<Real>({1e-300L, 0, 0, -3e-300L}, 2) * 1e300L, 3, 1e-16L));
  EXPECT_TRUE(
      near(reference::spectral_radius<double>({0.5, 1, 0, 0.5}, 2), 0.5, 256 * roundoff<double>));
  EXPECT_EQ(reference::spectral_radius<Real>({}, 0), 0);
  for (const Real x : {poison, std::numeric_limits<Real>::infinity()})
    EXPECT_TRUE(std::isnan(reference::spectral_radius<Real>({1, 0, x, 1}, 2)));
  EXPECT_THROW((void)reference::spectral_radius<Real>({1, 2}, 2), InvalidArgument);
}

TEST(ReferenceDiagnostics, RelabellingTokensChangesNothing) {
  Random random(seed() + 621);
  const std::size_t n = 9;
  auto p = matrix(n, false,
                  [&](auto, auto) { return static_cast<Real>(std::exp(2 * random.normal())); });
  for (std::size_t i = 0; i < n; ++i) {
    Real sum = 0;
    for (std::size_t j = 0; j < n; ++j) sum += p.values[i * n + j];
    for (std::size_t j = 0; j < n; ++j) p.values[i * n + j] /= sum;
  }
  const auto order = random.permutation(static_cast<std::int64_t>(n));
  const auto turned = matrix(n, false, [&](auto i, auto j) {
    return p(static_cast<std::size_t>(order[i]), static_cast<std::size_t>(order[j]));
  });
  const auto a = reference::diagnostics(p, false), b = reference::diagnostics(turned, false);
  for (const auto member : {&Diagnostics<Real>::entropy, &Diagnostics<Real>::entropy_biased,
                            &Diagnostics<Real>::entropy_unbiased, &Diagnostics<Real>::spectral_gap,
                            &Diagnostics<Real>::variance, &Diagnostics<Real>::logvar,
                            &Diagnostics<Real>::logvar_within})
    EXPECT_TRUE(near(a.*member, b.*member, 64 * unit));
  EXPECT_GT(a.entropy_unbiased, 0.01L);
  EXPECT_GT(a.entropy_biased, 0.01L);
  EXPECT_GT(a.logvar, a.logvar_within);
  EXPECT_TRUE(
      near(a.entropy + a.entropy_biased + a.entropy_unbiased, std::log2(Real(n)), 64 * unit));
}

TEST(ReferenceDiagnostics, MatricesOfAttention) {
  const Problem problem{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 6, .nk = 6, .d = 3, .dv = 2};
  for (const bool causal : {false, true}) {
    reference::Settings settings{.kernel = Kernel::lln, .causal = causal};
    settings.key_mask = {1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1};
    auto c = random_case<Real>(problem, settings, 631);
    c.tensors.k[2 * 3] = poison;
    const auto matrices = reference::attention_matrices(problem, c.settings, c.tensors);
    ASSERT_EQ(matrices.size(), 8u);
    // P v is the output.
    const auto o = c.forward();
    for (std::size_t n = 0; n < o.size(); ++n) {
      const std::size_t row = n / 2, head = row / 6;
      Real sum = 0;
      for (std::size_t j = 0; j < 6; ++j)
        if (matrices[head].visible[row % 6 * 6 + j])
          sum += matrices[head](row % 6, j) * c.tensors.v[(head / 2 * 6 + j) * 2 + n % 2];
      EXPECT_TRUE(near(sum, o[n], 16 * unit));
    }
    EXPECT_EQ(matrices[0].visible[2], 0);
    EXPECT_EQ(matrices[0].visible[5], causal ? 0 : 1);
    // Softmax is o_diag of one block.
    auto blocks = c;
    blocks.settings.kernel = Kernel::lln_diag;
    blocks.settings.block = 6;
    blocks.settings.combine = reference::Combine::scale;
    blocks.settings.diag_r.assign(8, 0);
    blocks.settings.diag_p.assign(8, 1);
    const auto of_softmax = blocks.forward();
    const auto softmax = reference::softmax_matrices(problem, c.settings, c.tensors);
    for (std::size_t n = 0; n < o.size(); ++n) {
      const std::size_t row = n / 2, head = row / 6;
      Real sum = 0;
      for (std::size_t j = 0; j < 6; ++j)
        if (softmax[head].visible[row % 6 * 6 + j])
          sum += softmax[head](row % 6, j) * c.tensors.v[(head / 2 * 6 + j) * 2 + n % 2];
      EXPECT_TRUE(near(sum, of_softmax[n], 16 * unit));
    }
    for (const auto& p : {matrices[0], matrices[7], softmax[3]}) {
      const auto found = reference::diagnostics(p, causal);
      EXPECT_TRUE(std::isfinite(found.entropy));
      EXPECT_GT(found.spectral_gap, 0);
      EXPECT_LE(found.spectral_gap, 1);
      // Five or four visible keys.
      EXPECT_LT(found.entropy, std::log2(Real(5)));
    }
  }
  auto c = random_case<Real>(problem, {.kernel = Kernel::lln}, 632);
  c.settings.alpha.assign(4, 0);
  c.settings.beta.assign(2, 0);
  for (const auto& p : reference::attention_matrices(problem, c.settings, c.tensors))
    EXPECT_TRUE(near(reference::diagnostics(p, false).spectral_gap, 1, 0));
  c.settings.normalise = false;
  EXPECT_THROW((void)reference::attention_matrices(problem, c.settings, c.tensors),
               InvalidArgument);
  c.settings.normalise = true;
  c.settings.kernel = Kernel::lln_diag;
  EXPECT_THROW((void)reference::attention_matrices(problem, c.settings, c.tensors),
               InvalidArgument);
}

TEST(ReferenceDiagnostics, NothingToSee) {
  const Matrix<Real> nothing(3, 3), rectangular(2, 3), empty(0, 0);
  for (const auto* p : {&nothing, &empty})
    for (const bool causal : {false, true}) {
      const auto found = reference::diagnostics(*p, causal);
      EXPECT_TRUE(std::isnan(found.entropy));
      EXPECT_TRUE(std::isnan(found.spectral_gap));
    }
  // Two rows of a rectangular matrix, one hidden key: all but the gap.
  Matrix<Real> p(2, 3);
  p.values = {0.25L, 0, 0.75L, 0.25L, 0, 0.75L};
  p.visible = {1, 0, 1, 1, 0, 1};
  const auto found = reference::diagnostics(p, false);
  EXPECT_TRUE(std::isnan(found.spectral_gap));
  EXPECT_TRUE(near(found.entropy_biased, 1 - found.entropy, 4 * unit));
  EXPECT_TRUE(near(found.entropy_unbiased, 0, 4 * unit));
  EXPECT_TRUE(near(found.variance, 0.0625L, unit));
  // A row without weight, as relu can have, and a NaN.
  EXPECT_TRUE(std::isnan(
      reference::diagnostics(
          matrix(3, false, [](auto i, auto) { return i == 1 ? Real(0) : 1 / Real(3); }), false)
          .spectral_gap));
  EXPECT_TRUE(std::isnan(reference::second_eigenvalue<Real>({poison, 1, 0.5L, 0.5L}, 2)));
  // A weight of 0 has no logarithm.
  p.visible.assign(6, 1);
  EXPECT_TRUE(near(reference::diagnostics(p, false).logvar, found.logvar, unit));
  EXPECT_NE(reference::diagnostics(p, false).variance, found.variance);
}

}  // namespace
