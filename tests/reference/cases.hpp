// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "../support/random.hpp"
#include "../support/seed.hpp"

/// \file cases.hpp
/// Random inputs for the tests of the reference and the comparisons they share.

namespace LinAttn::reference {

inline void PrintTo(Kernel kernel, std::ostream* out) { *out << kernel_name(kernel); }

}  // namespace LinAttn::reference

namespace LinAttn::test_support {

inline constexpr reference::Kernel all_kernels[] = {
    reference::Kernel::identity,  reference::Kernel::elu,    reference::Kernel::relu,
    reference::Kernel::quadratic, reference::Kernel::lln,    reference::Kernel::affine,
    reference::Kernel::softmax,   reference::Kernel::taylor, reference::Kernel::cosine,
    reference::Kernel::performer};

/// Whether a least normaliser is refused: sums of weights relative to the largest are 1 or more.
constexpr bool has_no_small_sums(reference::Kernel kernel) {
  return kernel == reference::Kernel::lln || kernel == reference::Kernel::softmax ||
         kernel == reference::Kernel::performer;
}

/// Unit roundoff.
template <class Real>
inline constexpr Real roundoff = std::numeric_limits<Real>::epsilon() / 2;

/// One call of the reference.
template <class Real>
struct Case {
  Problem problem;
  reference::Settings settings;
  reference::Tensors<Real> tensors;
  std::vector<Real> d_o;

  std::vector<Real> forward() const { return reference::forward(problem, settings, tensors); }
  reference::GradientSet<Real> backward() const {
    return reference::backward(problem, settings, tensors, d_o);
  }
  reference::Magnitudes<Real> magnitudes() const {
    return reference::magnitudes(problem, settings, tensors, d_o);
  }
};

template <class Real>
std::vector<Real> converted(const std::vector<double>& x) {
  return std::vector<Real>(x.begin(), x.end());
}

/// Multiples of 2^-10 in [low, high], so that a step of finite differences is exact in double.
inline std::vector<double> parameters(Random& random, std::int64_t n, double low, double high) {
  std::vector<double> x(static_cast<std::size_t>(n));
  for (double& element : x)
    element = static_cast<double>(random.integer(static_cast<std::int64_t>(low * 0x1p10),
                                                 static_cast<std::int64_t>(high * 0x1p10))) *
              0x1p-10;
  return x;
}

/// Normal inputs at a distance of at least 1/4 from 0, where features have a kink or a zero. A
/// normalised identity or cosine gets features near 1: with signed weights the denominator could
/// pass through 0. Affine without norm gets rows of norms between 1/2 and 1.
inline std::vector<double> features(Random& random, const reference::Settings& settings,
                                    std::int64_t rows, std::int64_t d) {
  const std::int64_t n = rows * d;
  if (settings.kernel == reference::Kernel::affine && settings.norm == reference::Norm::none) {
    auto x = random.normals(n);
    const auto width = static_cast<std::size_t>(d);
    for (std::size_t row = 0; row < x.size(); row += width) {
      double squares = 0;
      for (std::size_t c = 0; c < width; ++c) squares += x[row + c] * x[row + c];
      const double factor = random.uniform(0.5, 1) / std::sqrt(squares);
      for (std::size_t c = 0; c < width; ++c) x[row + c] *= factor;
    }
    return x;
  }
  const bool is_signed = settings.kernel == reference::Kernel::identity ||
                         settings.kernel == reference::Kernel::cosine;
  if (is_signed && settings.normalise) return random.normals(n, 1, 0.3);
  auto x = random.normals(n);
  for (double& element : x) element = std::copysign(std::max(std::abs(element), 0.25), element);
  return x;
}

/// Numbers of a case depend on the seed of the run and on `number`. Softmax and taylor get a scale
/// of scores of their own, performer D + 2 features.
template <class Real>
Case<Real> random_case(const Problem& problem, reference::Settings settings, std::uint64_t number) {
  Random random(seed() + number);
  const bool diag = settings.kernel == reference::Kernel::lln_diag;
  if (settings.kernel == reference::Kernel::lln || diag) {
    settings.alpha = parameters(random, problem.heads, 0.5, 1.2);
    settings.beta = parameters(random, problem.kv_heads, 0.5, 1.2);
  }
  if (settings.kernel == reference::Kernel::affine) {
    // Weights are positive while |s qhat . khat| <= 1.
    settings.alpha = parameters(random, problem.heads, 0.5, 1);
    settings.constant = parameters(random, problem.heads, 1.0625, 1.5);
  }
  if (reference::detail::is_of_scores(settings.kernel)) settings.score_scale = 0.4375;
  if (settings.kernel == reference::Kernel::performer)
    settings.projection = random.normals((problem.d + 2) * problem.d);
  const auto& p = problem;
  if (diag && settings.combine != reference::Combine::average)
    settings.diag_r = parameters(random, p.heads * p.dv, -1, 2);
  if (diag && settings.combine == reference::Combine::scale)
    settings.diag_p = parameters(random, p.heads * p.dv, -1, 2);
  Case<Real> result{problem, settings, {}, {}};
  result.tensors.q = converted<Real>(features(random, settings, p.batch * p.heads * p.nq, p.d));
  result.tensors.k = converted<Real>(features(random, settings, p.batch * p.kv_heads * p.nk, p.d));
  result.tensors.v = converted<Real>(random.normals(p.batch * p.kv_heads * p.nk * p.dv));
  result.d_o = converted<Real>(random.normals(p.batch * p.heads * p.nq * p.dv));
  return result;
}

/// Makes the first feature of every query and key positive, so that no relu row vanishes by chance.
template <class Real>
void keep_alive(Case<Real>& c) {
  for (auto* x : {&c.tensors.q, &c.tensors.k})
    for (std::size_t n = 0; n < x->size(); n += static_cast<std::size_t>(c.problem.d))
      (*x)[n] = std::abs((*x)[n]);
}

/// Makes the middle row of every sequence and head the longest by far, so that no step to take a
/// difference passes to another. \pre the mask does not hide it
template <class Real>
void lengthen_one_row(Case<Real>& c) {
  const auto lengthen = [&](std::vector<Real>& x, std::int64_t heads, std::int64_t rows,
                            std::vector<std::int64_t> cu) {
    if (cu.empty()) cu = {0, rows};
    const auto d = static_cast<std::size_t>(c.problem.d);
    for (std::int64_t n = 0; n < c.problem.batch * heads; ++n)
      for (std::size_t s = 0; s + 1 < cu.size(); ++s) {
        if (cu[s] == cu[s + 1]) continue;
        const auto row = static_cast<std::size_t>(n * rows + (cu[s] + cu[s + 1]) / 2);
        for (std::size_t m = 0; m < d; ++m) x[row * d + m] = static_cast<Real>(m % 2 ? -4 : 5);
      }
  };
  lengthen(c.tensors.q, c.problem.heads, c.problem.nq, c.settings.cu_seqlens_q);
  lengthen(c.tensors.k, c.problem.kv_heads, c.problem.nk, c.settings.cu_seqlens_k);
}

/// |s_i| / m_i of the rows that see a key, ascending.
template <class Real>
std::vector<Real> sum_ratios(const Case<Real>& c) {
  auto settings = c.settings;
  settings.least_normaliser.reset();
  std::vector<Real> ratios;
  const reference::detail::Rows<Real> rows(c.problem, settings, c.tensors);
  rows.for_each([&](const auto& row) {
    if (!row.keys.empty())
      ratios.push_back(std::abs(row.denominator) / static_cast<Real>(row.keys.size()));
  });
  std::sort(ratios.begin(), ratios.end());
  return ratios;
}

/// Sets the least normaliser where the ratios of the middle half of the rows have their widest gap,
/// so that some sums are replaced and none is near the limit. Returns the width of the gap relative
/// to the limit.
template <class Real>
double clamp_some_rows(Case<Real>& c) {
  const auto ratios = sum_ratios(c);
  if (ratios.size() < 2) return 0;
  std::size_t widest = ratios.size() / 4;
  for (std::size_t n = widest; n + 1 < ratios.size() && n <= 3 * ratios.size() / 4; ++n)
    if (ratios[n + 1] - ratios[n] > ratios[widest + 1] - ratios[widest]) widest = n;
  const Real limit = (ratios[widest] + ratios[widest + 1]) / 2;
  c.settings.least_normaliser = static_cast<double>(limit);
  return static_cast<double>((ratios[widest + 1] - ratios[widest]) / limit);
}

/// Elements of rows first, ..., first + count - 1 of a row-major matrix of the given width.
template <class Real>
std::vector<Real> row_range(const std::vector<Real>& x, std::int64_t first, std::int64_t count,
                            std::int64_t width) {
  return std::vector<Real>(x.begin() + first * width, x.begin() + (first + count) * width);
}

template <class Real>
void append(std::vector<Real>& to, const std::vector<Real>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Equality element by element, in which NaN differs from everything.
template <class Real>
::testing::AssertionResult same(const std::vector<Real>& found, const std::vector<Real>& expected) {
  if (found.size() != expected.size())
    return ::testing::AssertionFailure()
           << found.size() << " elements, expected " << expected.size();
  for (std::size_t n = 0; n < found.size(); ++n)
    if (!(found[n] == expected[n]))
      return ::testing::AssertionFailure()
             << "element " << n << ": " << found[n] << ", expected " << expected[n];
  return ::testing::AssertionSuccess();
}

/// Largest |found - expected| / (unit * magnitude); infinite where one of them is not finite or a
/// magnitude of 0 is not met exactly.
template <class Found, class Real>
Real worst_ratio(const std::vector<Found>& found, const std::vector<Real>& expected,
                 const std::vector<Real>& magnitude, Real unit) {
  if (found.size() != expected.size() || magnitude.size() != expected.size())
    return std::numeric_limits<Real>::infinity();
  Real worst = 0;
  for (std::size_t n = 0; n < found.size(); ++n) {
    const Real difference = std::abs(static_cast<Real>(found[n]) - expected[n]);
    if (difference == 0) continue;
    const Real ratio = difference / (unit * magnitude[n]);
    if (!(ratio <= worst))
      worst = std::isfinite(ratio) ? ratio : std::numeric_limits<Real>::infinity();
  }
  return worst;
}

/// |found - expected| <= count * unit * magnitude for every element.
template <class Found, class Real>
::testing::AssertionResult within(const std::vector<Found>& found,
                                  const std::vector<Real>& expected,
                                  const std::vector<Real>& magnitude, Real unit, double count) {
  const Real worst = worst_ratio(found, expected, magnitude, unit);
  if (worst <= static_cast<Real>(count)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "worst element is off by " << worst << " units of its magnitude, " << count
         << " are allowed (" << found.size() << " against " << expected.size() << " elements)";
}

/// EXPECT_NEAR compares in double, which is blind to what long double can hold.
inline ::testing::AssertionResult near(long double found, long double expected,
                                       long double tolerance) {
  if (std::abs(found - expected) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " differs from " << expected << " by "
                                       << found - expected << ", allowed " << tolerance;
}

template <class Real>
bool all_zero(const std::vector<Real>& x) {
  for (const Real element : x)
    if (!(element == 0)) return false;
  return true;
}

inline std::string describe(const Problem& problem, const reference::Settings& settings) {
  constexpr const char* norms[] = {" l2", " none", " max"};
  constexpr const char* combines[] = {" average", " scale", " ratio"};
  return std::string(reference::kernel_name(settings.kernel)) +
         (settings.kernel == reference::Kernel::affine ? norms[static_cast<int>(settings.norm)]
                                                       : "") +
         (settings.kernel == reference::Kernel::lln_diag
              ? combines[static_cast<int>(settings.combine)] + std::string(", block ") +
                    std::to_string(settings.block)
              : "") +
         (settings.dropout_p != 0 ? " noise" : "") + (settings.least_normaliser ? " clamped" : "") +
         (settings.causal ? " causal" : " full") +
         (settings.normalise ? " normalised " : " plain ") + problem.to_string();
}

}  // namespace LinAttn::test_support
