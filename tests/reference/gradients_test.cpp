// SPDX-License-Identifier: BSD-3-Clause
// The gradients of the reference against finite differences of its forward, in long double.

#include <gtest/gtest.h>

#include <span>
#include <tuple>

#include "../support/finite_difference.hpp"
#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using Real = long double;

enum class Shape { cross, grouped, single_kv_head, more_queries, masked, packed };

struct Named {
  const char* name;
  Shape shape;
};
void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }

constexpr Named shapes[] = {{"cross", Shape::cross},
                            {"grouped", Shape::grouped},
                            {"single_kv_head", Shape::single_kv_head},
                            {"more_queries", Shape::more_queries},
                            {"masked", Shape::masked},
                            {"packed", Shape::packed}};

/// A case of this shape; settings keep what else they say.
Case<Real> make_case(reference::Settings settings, Shape shape, std::uint64_t number) {
  const bool causal = settings.causal;
  settings.scale = -0.75;
  Problem problem{.batch = 2, .heads = 1, .kv_heads = 1, .nq = 4, .nk = 7, .d = 5, .dv = 3};
  switch (shape) {
    case Shape::cross:
      break;
    case Shape::grouped:
      problem.heads = 6, problem.kv_heads = 2, problem.batch = 1;
      break;
    case Shape::single_kv_head:
      problem.heads = 3, problem.dv = 1;
      break;
    case Shape::more_queries:
      problem.nq = causal ? 6 : 8, problem.nk = 6, problem.heads = 2, problem.kv_heads = 2;
      break;
    case Shape::masked:
      problem.heads = 2;
      settings.key_mask = {0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0};
      if (causal) problem.nq = problem.nk;
      break;
    case Shape::packed:
      problem.batch = 1, problem.heads = 2, problem.nq = 8, problem.nk = 11;
      settings.cu_seqlens_q = {0, 3, 3, 4, 8};
      settings.cu_seqlens_k = {0, 3, 4, 6, 11};
      break;
  }
  if (settings.kernel == Kernel::lln_diag && !causal) {
    problem.nq = problem.nk;
    settings.cu_seqlens_q = settings.cu_seqlens_k;
  }
  return random_case<Real>(problem, settings, number);
}

Case<Real> make_case(Kernel kernel, bool causal, bool normalise, Shape shape) {
  const auto number = 1000 + 100 * static_cast<std::uint64_t>(kernel) +
                      10 * static_cast<std::uint64_t>(shape) + 2 * causal + normalise;
  return make_case({.kernel = kernel, .causal = causal, .normalise = normalise}, shape, number);
}

/// dL/dx for L = sum d_o o, x one of the tensors or parameters reached by `slot`.
template <class Slot>
void check(const char* name, const Case<Real>& original, Slot slot,
           const std::vector<Real>& gradient, const std::vector<Real>& magnitude,
           std::uint64_t number) {
  SCOPED_TRACE(name);
  Case<Real> moved = original;
  using Element = typename decltype(slot(moved))::value_type;
  const auto place = slot(moved);
  const std::vector<Real> x(place.begin(), place.end());
  ASSERT_EQ(gradient.size(), x.size());
  ASSERT_EQ(magnitude.size(), x.size());
  if (x.empty()) return;
  const auto loss = [&](const std::vector<Real>& at) {
    for (std::size_t n = 0; n < at.size(); ++n) place[n] = static_cast<Element>(at[n]);
    const auto o = moved.forward();
    Real sum = 0;
    for (std::size_t n = 0; n < o.size(); ++n) sum += o[n] * original.d_o[n];
    return sum;
  };
  Real noise = 0;
  const auto of_o = original.magnitudes().o;
  for (std::size_t n = 0; n < of_o.size(); ++n)
    noise += 8 * roundoff<Real> * of_o[n] * std::abs(original.d_o[n]);

  // Steps are powers of two on values that doubles hold, so that a parameter kept as double moves
  // too.
  const Real step = 0x1p-11L;

  Random random(seed() + number);
  const int directions = 3;
  for (int n = 0; n < directions; ++n) {
    std::vector<Real> direction(x.size());
    Real terms = 0;
    for (std::size_t m = 0; m < x.size(); ++m) {
      direction[m] =
          static_cast<Real>(random.integer(1, 16)) * (random.bits() & 1 ? 0x1p-4L : -0x1p-4L);
      terms += magnitude[m] * std::abs(direction[m]);
    }
    const auto result = check_direction<Real>(loss, gradient, x, direction, step, noise);
    EXPECT_LE(std::abs(result.analytic - result.numeric),
              result.error + 32 * roundoff<Real> * terms)
        << "direction " << n << ": " << result.analytic << " against " << result.numeric;
    EXPECT_LE(result.error, 1e-10L * terms) << "differences too coarse to tell";
  }
  for (std::size_t count = 0; count < std::min<std::size_t>(x.size(), 8); ++count) {
    const std::size_t m =
        x.size() <= 8
            ? count
            : static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(x.size()) - 1));
    const auto numeric = coordinate_derivative<Real>(loss, x, m, step, noise);
    EXPECT_LE(std::abs(gradient[m] - numeric.value),
              numeric.error + 32 * roundoff<Real> * magnitude[m])
        << "element " << m << ": " << gradient[m] << " against " << numeric.value;
  }
}

void check_all(const Case<Real>& c, std::uint64_t number) {
  SCOPED_TRACE(describe(c.problem, c.settings));
  const auto gradient = c.backward();
  const auto magnitude = c.magnitudes();
  const auto all = [](auto& x) { return std::span(x); };
  const auto of = [&](const char* name, auto slot, const auto& of_gradient,
                      const auto& of_magnitude) {
    check(name, c, slot, of_gradient, of_magnitude, number);
  };
  of(
      "q", [&](auto& x) { return all(x.tensors.q); }, gradient.q, magnitude.q);
  of(
      "k", [&](auto& x) { return all(x.tensors.k); }, gradient.k, magnitude.k);
  of(
      "v", [&](auto& x) { return all(x.tensors.v); }, gradient.v, magnitude.v);
  // A parameter that the kernel does not have is empty, and so is its gradient.
  of(
      "alpha", [&](auto& x) { return all(x.settings.alpha); }, gradient.alpha, magnitude.alpha);
  of(
      "beta", [&](auto& x) { return all(x.settings.beta); }, gradient.beta, magnitude.beta);
  of(
      "constant", [&](auto& x) { return all(x.settings.constant); }, gradient.constant,
      magnitude.constant);
  of(
      "diag_r", [&](auto& x) { return all(x.settings.diag_r); }, gradient.diag_r, magnitude.diag_r);
  of(
      "diag_p", [&](auto& x) { return all(x.settings.diag_p); }, gradient.diag_p, magnitude.diag_p);
  if (c.settings.kernel != Kernel::affine) {
    EXPECT_TRUE(gradient.score_scale.empty());
    return;
  }
  // What a head adds to the gradient of the scale, alone and with the others.
  const auto of_scale = [&](const Case<Real>& part, Real expected, Real size) {
    check(
        "score_scale", part, [](auto& x) { return std::span(&x.settings.score_scale, 1); },
        {expected}, {size}, number);
  };
  ASSERT_EQ(gradient.score_scale.size(), static_cast<std::size_t>(c.problem.heads));
  Real sum = 0, size = 0;
  for (std::int64_t h = 0; h < c.problem.heads; ++h) {
    auto part = c;
    const std::int64_t block = c.problem.nq * c.problem.dv;
    for (std::size_t n = 0; n < part.d_o.size(); ++n)
      if (static_cast<std::int64_t>(n) / block % c.problem.heads != h) part.d_o[n] = 0;
    const auto n = static_cast<std::size_t>(h);
    of_scale(part, gradient.score_scale[n], magnitude.score_scale[n]);
    sum += gradient.score_scale[n], size += magnitude.score_scale[n];
  }
  of_scale(c, sum, size);
}

class ReferenceGradients : public ::testing::TestWithParam<std::tuple<Kernel, bool, bool, Named>> {
};

TEST_P(ReferenceGradients, MatchFiniteDifferences) {
  const auto [kernel, causal, normalise, named] = GetParam();
  check_all(make_case(kernel, causal, normalise, named.shape), 77);
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceGradients,
                         ::testing::Combine(::testing::ValuesIn(all_kernels), ::testing::Bool(),
                                            ::testing::Bool(), ::testing::ValuesIn(shapes)),
                         [](const auto& suite) {
                           return std::string(reference::kernel_name(std::get<0>(suite.param))) +
                                  (std::get<1>(suite.param) ? "_causal" : "_full") +
                                  (std::get<2>(suite.param) ? "_normalised_" : "_plain_") +
                                  std::get<3>(suite.param).name;
                         });

using reference::Combine;
constexpr const char* combine_names[] = {"average", "scale", "ratio"};

/// Parameters: how the parts are combined, block, causal, shape.
class ReferenceGradientsOfLlnDiag
    : public ::testing::TestWithParam<std::tuple<Combine, std::int64_t, bool, Named>> {};

TEST_P(ReferenceGradientsOfLlnDiag, MatchFiniteDifferences) {
  const auto [combine, block, causal, named] = GetParam();
  const auto number = 7000 + 100 * static_cast<std::uint64_t>(combine) +
                      10 * static_cast<std::uint64_t>(named.shape) + 2 * causal;
  check_all(
      make_case({.kernel = Kernel::lln_diag, .causal = causal, .block = block, .combine = combine},
                named.shape, number),
      80);
}

INSTANTIATE_TEST_SUITE_P(
    All, ReferenceGradientsOfLlnDiag,
    ::testing::Combine(::testing::Values(Combine::average, Combine::scale, Combine::ratio),
                       ::testing::Values(0, 1, 3, 100), ::testing::Bool(),
                       ::testing::ValuesIn(shapes)),
    [](const auto& suite) {
      return std::string(combine_names[static_cast<int>(std::get<0>(suite.param))]) + "_block" +
             std::to_string(std::get<1>(suite.param)) +
             (std::get<2>(suite.param) ? "_causal_" : "_full_") + std::get<3>(suite.param).name;
    });

using reference::Norm;

/// What becomes of the sums.
enum class Sums { kept, plain, clamped };
constexpr const char* sums_names[] = {"_normalised", "_plain", "_clamped"};
constexpr const char* norm_names[] = {"l2", "none", "max"};

/// A clamped case has replaced sums, and none that a step brings to the limit or to the other sign.
Case<Real> with_sums(Sums sums, const reference::Settings& settings, Shape shape,
                     std::uint64_t number) {
  for (std::uint64_t attempt = 0; attempt < 100; ++attempt) {
    auto c = make_case(settings, shape, number + 1000 * attempt);
    if (settings.norm == Norm::max) lengthen_one_row(c);
    if (sums != Sums::clamped) return c;
    if (clamp_some_rows(c) > 0.02 && (settings.kernel != Kernel::affine || sum_ratios(c)[0] > 0.05))
      return c;
  }
  throw std::runtime_error("no case has sums at a distance from the limit");
}

class ReferenceGradientsOfAffine
    : public ::testing::TestWithParam<std::tuple<Norm, bool, Sums, bool, Named>> {};

TEST_P(ReferenceGradientsOfAffine, MatchFiniteDifferences) {
  const auto [norm, causal, sums, noise, named] = GetParam();
  reference::Settings settings{.kernel = Kernel::affine,
                               .causal = causal,
                               .normalise = sums != Sums::plain,
                               .score_scale = sums == Sums::kept ? 0.875 : -2.5,
                               .norm = norm,
                               .norm_eps = 0.125};
  if (noise) settings.dropout_p = 0.3, settings.seed = 11, settings.offset = 7;
  const auto number = 3000 + 100 * static_cast<std::uint64_t>(norm) +
                      10 * static_cast<std::uint64_t>(named.shape) + causal;
  check_all(with_sums(sums, settings, named.shape, number), 78);
}

INSTANTIATE_TEST_SUITE_P(
    All, ReferenceGradientsOfAffine,
    ::testing::Combine(::testing::Values(Norm::l2, Norm::none, Norm::max), ::testing::Bool(),
                       ::testing::Values(Sums::kept, Sums::plain, Sums::clamped), ::testing::Bool(),
                       ::testing::ValuesIn(shapes)),
    [](const auto& suite) {
      return std::string(norm_names[static_cast<int>(std::get<0>(suite.param))]) +
             (std::get<1>(suite.param) ? "_causal" : "_full") +
             sums_names[static_cast<int>(std::get<2>(suite.param))] +
             (std::get<3>(suite.param) ? "_noise_" : "_") + std::get<4>(suite.param).name;
    });

/// Parameters: kernel, causal, clamped, shape.
class ReferenceGradientsWithNoise
    : public ::testing::TestWithParam<std::tuple<Kernel, bool, bool, Named>> {};

TEST_P(ReferenceGradientsWithNoise, MatchFiniteDifferences) {
  const auto [kernel, causal, clamped, named] = GetParam();
  if (clamped && has_no_small_sums(kernel)) return;
  const reference::Settings settings{
      .kernel = kernel, .causal = causal, .dropout_p = 0.3, .seed = 5, .offset = 3};
  const auto number = 5000 + 100 * static_cast<std::uint64_t>(kernel) +
                      10 * static_cast<std::uint64_t>(named.shape) + causal;
  check_all(with_sums(clamped ? Sums::clamped : Sums::kept, settings, named.shape, number), 79);
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceGradientsWithNoise,
                         ::testing::Combine(::testing::ValuesIn(all_kernels), ::testing::Bool(),
                                            ::testing::Bool(), ::testing::ValuesIn(shapes)),
                         [](const auto& suite) {
                           return std::string(reference::kernel_name(std::get<0>(suite.param))) +
                                  (std::get<1>(suite.param) ? "_causal" : "_full") +
                                  (std::get<2>(suite.param) ? "_clamped_" : "_kept_") +
                                  std::get<3>(suite.param).name;
                         });

TEST(ReferenceGradientsOfParameters, HoldAtZeroAndBelow) {
  for (const bool causal : {false, true}) {
    auto c = make_case(Kernel::lln, causal, true, Shape::grouped);
    c.settings.alpha = {0, -0.5, 1.25, 0.75, -1, 2};
    c.settings.beta = {0, -0.75};
    check_all(c, 5);
    // A parameter of 0 hides its input, not its own gradient.
    const auto gradient = c.backward();
    const auto nq = c.problem.nq, d = c.problem.d, nk = c.problem.nk;
    EXPECT_TRUE(all_zero(row_range(gradient.q, 0, nq, d)));
    EXPECT_TRUE(all_zero(row_range(gradient.k, 0, nk, d)));
    EXPECT_NE(gradient.beta[0], 0);
    EXPECT_FALSE(all_zero(row_range(gradient.q, nq, nq, d)));
  }
}

}  // namespace
