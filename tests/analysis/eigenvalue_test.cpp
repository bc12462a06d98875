// SPDX-License-Identifier: BSD-3-Clause

// Moduli of eigenvalues against matrices whose spectra are known.

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <limits>
#include <linattn/analysis/eigenvalue.hpp>
#include <numbers>
#include <vector>

namespace {

using namespace LinAttn;

/// A dense matrix, row-major.
struct Dense {
  std::int64_t n;
  std::vector<double> values;

  explicit Dense(std::int64_t n_) : n(n_), values(static_cast<std::size_t>(n_ * n_)) {}
  Dense(std::int64_t n_, std::vector<double> given) : n(n_), values(std::move(given)) {}
  double& operator()(std::int64_t i, std::int64_t j) { return values[static_cast<std::size_t>(i * n + j)]; }
  HostMatrix ref() const { return {values.data(), {n, n}, {n, 1}}; }
};

/// share * target + (1 - share) / n
template <class Target>
Dense mixed(std::int64_t n, double share, const Target& target) {
  Dense p(n);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j) p(i, j) = (target(i) == j ? share : 0) + (1 - share) / static_cast<double>(n);
  return p;
}

// A product of order n rounds by n eps of the norms, which are up to sqrt(n) of the radius of a normal matrix, and
// these add up with weights 2^-k; the logarithms of 50 steps, and what the limit leaves, by a few eps each.
double rounding(std::int64_t n) {
  const auto order = static_cast<double>(n);
  return (2 * order * std::sqrt(order) + 100) * std::numeric_limits<double>::epsilon();
}

TEST(SpectralRadius, SmallMatrices) {
  EXPECT_EQ(spectral_radius(Dense(0).ref()), 0);
  EXPECT_NEAR(spectral_radius(Dense(1, {-3}).ref()), 3, rounding(1));
  EXPECT_NEAR(spectral_radius(Dense(2, {2, 1, 1, 2}).ref()), 3, rounding(2));
  EXPECT_NEAR(spectral_radius(Dense(2, {0, 2, -2, 0}).ref()), 2, rounding(2)) << "a complex pair";
  EXPECT_NEAR(spectral_radius(Dense(2, {3, 0, 0, -3}).ref()), 3, rounding(2)) << "equal moduli";
  EXPECT_NEAR(spectral_radius(Dense(2, {0.5, 1e6, 0, 0.5}).ref()), 0.5, 1e-10) << "a Jordan block";
  EXPECT_EQ(spectral_radius(Dense(2, {0, 1, 0, 0}).ref()), 0) << "nilpotent";
  EXPECT_NEAR(spectral_radius(Dense(3, {0, 0, 8, 1, 0, 0, 0, 1, 0}).ref()), 2, rounding(3)) << "cube roots of 8";
}

TEST(SpectralRadius, NumbersFarFromOne) {
  EXPECT_NEAR(spectral_radius(Dense(2, {2e200, 1e200, 1e200, 2e200}).ref()) / 3e200, 1, 1e-13);
  EXPECT_NEAR(spectral_radius(Dense(2, {2e-200, 1e-200, 1e-200, 2e-200}).ref()) / 3e-200, 1, 1e-13);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(spectral_radius(Dense(2, {1, 2, nan, 4}).ref())));
  EXPECT_TRUE(std::isnan(spectral_radius(Dense(2, {1, 2, 1 / 0.0, 4}).ref())));
}

// Eigenvalues of a circulant matrix: the transform of its row.
TEST(SpectralRadius, CirculantMatrices) {
  for (const std::int64_t n : {5, 17, 64, 67}) {
    std::vector<double> row;
    for (std::int64_t j = 0; j < n; ++j) row.push_back(std::sin(static_cast<double>(j * j + 1)));
    Dense a(n);
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < n; ++j) a(i, j) = row[static_cast<std::size_t>((j - i + n) % n)];
    double largest = 0;
    for (std::int64_t f = 0; f < n; ++f) {
      std::complex<double> sum = 0;
      for (std::int64_t j = 0; j < n; ++j)
        sum += row[static_cast<std::size_t>(j)] *
               std::polar(1.0, 2 * std::numbers::pi * static_cast<double>(f * j) / static_cast<double>(n));
      largest = std::max(largest, std::abs(sum));
    }
    EXPECT_NEAR(spectral_radius(a.ref()) / largest, 1, rounding(n)) << n;
  }
}

TEST(SpectralRadius, StridesDoNotMatter) {
  const Dense a(2, {1, 2, 3, 4});
  const double of_rows = spectral_radius({a.values.data(), {2, 2}, {2, 1}});
  EXPECT_NEAR(of_rows, (5 + std::sqrt(33.0)) / 2, 1e-14);
  EXPECT_NEAR(spectral_radius({a.values.data(), {2, 2}, {1, 2}}), of_rows, 1e-14) << "the transpose";
  EXPECT_THROW(spectral_radius({a.values.data(), {2, 1}, {1, 1}}), InvalidArgument);
}

TEST(SecondEigenvalue, KnownAnswers) {
  EXPECT_EQ(second_eigenvalue(Dense(0).ref()).modulus, 0);
  EXPECT_EQ(second_eigenvalue(Dense(1, {1}).ref()).modulus, 0);
  EXPECT_NEAR(second_eigenvalue(Dense(2, {0.9, 0.1, 0.4, 0.6}).ref()).modulus, 0.5, 1e-9);
  // a permutation without fixed points: all moduli are 1
  EXPECT_NEAR(second_eigenvalue(mixed(7, 1, [](auto i) { return (i + 1) % 7; }).ref()).modulus, 1, 1e-9);
  // all rows alike
  EXPECT_LT(second_eigenvalue(mixed(96, 0.9, [](auto) { return 0; }).ref()).modulus, 1e-13);
  // rotation mixed with uniform: complex pairs of modulus 0.7
  EXPECT_NEAR(second_eigenvalue(mixed(33, 0.7, [](auto i) { return (i + 5) % 33; }).ref()).modulus, 0.7, 1e-9);
}

TEST(SecondEigenvalue, TargetsOf512Tokens) {
  EXPECT_NEAR(second_eigenvalue(mixed(512, 0.9, [](auto i) { return i; }).ref()).modulus, 0.9, 1e-9);
  EXPECT_LT(second_eigenvalue(mixed(512, 0.9, [](auto) { return 0; }).ref()).modulus, 1e-12);
}

// Above 512 tokens the power iteration, exact here because all moduli but the first are equal.
TEST(SecondEigenvalue, LargeMatrices) {
  const auto found = second_eigenvalue(mixed(640, 0.7, [](auto i) { return (i + 5) % 640; }).ref());
#if defined(LINATTN_HAS_KOKKOS_KERNELS)
  EXPECT_NEAR(found.modulus, 0.7, 1e-12);
  EXPECT_EQ(found.absent, "");
  EXPECT_LT(second_eigenvalue(mixed(640, 0.9, [](auto) { return 0; }).ref()).modulus, 1e-12);
#else
  EXPECT_TRUE(std::isnan(found.modulus));
  EXPECT_NE(found.absent.find("640"), std::string::npos) << found.absent;
#endif
}

// The same number by squaring (n = 512) and by power iteration (the same matrix beside one more token that nobody
// looks at: its eigenvalue is 0).
TEST(SecondEigenvalue, BothWaysAgree) {
#if defined(LINATTN_HAS_KOKKOS_KERNELS)
  constexpr std::int64_t n = 512;
  Dense p(n), larger(n + 1);
  for (std::int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (std::int64_t j = 0; j < n; ++j) sum += p(i, j) = std::exp(1.3 * std::sin(double(i * 97 + j * j * 31)));
    for (std::int64_t j = 0; j < n; ++j) larger(i, j) = p(i, j) /= sum;
  }
  for (std::int64_t j = 0; j < n; ++j) larger(n, j) = p(0, j);
  const double exact = second_eigenvalue(p.ref()).modulus;
  // a complex pair c^steps cos(angle) is seen up to the phases of the first and last step
  EXPECT_NEAR(second_eigenvalue(larger.ref()).modulus / exact, 1, 5e-3);
#endif
}

// diag(1/s) Q K^T and K^T diag(1/s) Q have the same spectrum but for zeros.
TEST(SecondEigenvalue, OfFeatures) {
  constexpr std::int64_t n = 40, r = 5;
  std::vector<double> q(n * r), k(n * r), z(r), m(r * r);
  for (std::size_t e = 0; e < q.size(); ++e) {
    q[e] = std::exp(std::sin(3.7 * static_cast<double>(e)));
    k[e] = std::exp(std::sin(1.9 * static_cast<double>(e) + 1));
  }
  Dense p(n);
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t d = 0; d < r; ++d) z[d] += k[j * r + d];
  for (std::int64_t i = 0; i < n; ++i) {
    double s = 0;
    for (std::int64_t d = 0; d < r; ++d) s += q[i * r + d] * z[d];
    for (std::int64_t d = 0; d < r; ++d)
      for (std::int64_t e = 0; e < r; ++e) m[d * r + e] += k[i * r + d] * q[i * r + e] / s;
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t d = 0; d < r; ++d) p(i, j) += q[i * r + d] * k[j * r + d] / s;
  }
  EXPECT_NEAR(detail::second_eigenvalue_of_features(m, z), second_eigenvalue(p.ref()).modulus, 1e-9);
  EXPECT_EQ(detail::second_eigenvalue_of_features({}, {}), 0);
  EXPECT_NEAR(detail::second_eigenvalue_of_features({1}, {3}), 0, 1e-15) << "one feature: all rows alike";
}

}  // namespace
