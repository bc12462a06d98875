// SPDX-License-Identifier: BSD-3-Clause

// The gradients of the engine against differences of the engine's own forward pass, in double.

#include "finite_difference.hpp"

#include <numeric>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr double tolerance = 1e-8;

template <class C>
class FiniteDifferences : public ::testing::Test {
 public:
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  /// Entries at a distance of at least 1/4 from 0, where features have a kink.
  static Case smooth_case(const Problem& problem, const Options& options) {
    Case c = random_case<double, V>(problem, options);
    for (auto* x : {&c.q, &c.k})
      for (double& element : *x)
        element = std::copysign(std::max(std::abs(element), 0.25), element);
    return c;
  }

  static double loss(const Case& c, const Options& options) {
    const auto o = attend_forward<double, ExecSpace, V>(c, options);
    long double sum = 0;
    for (std::size_t n = 0; n < o.size(); ++n) sum += static_cast<long double>(o[n]) * c.d_o[n];
    return static_cast<double>(sum);
  }

  /// The parts of the call that can be differentiated and what backward() says about them.
  struct Part {
    const char* name;
    std::vector<double> Case::*member;
    std::vector<double> gradient;
  };
  static std::vector<Part> parts(const Outcome<double>& outcome) {
    std::vector<Part> result{
        {"q", &Case::q, outcome.q}, {"k", &Case::k, outcome.k}, {"v", &Case::v, outcome.v}};
    if (has_query_parameter<V>) result.push_back({"alpha", &Case::alpha, outcome.alpha});
    if (has_key_parameter<V>) result.push_back({"beta", &Case::beta, outcome.beta});
    if (has_constant<V>) result.push_back({"constant", &Case::constant, outcome.constant});
    return result;
  }

  static double largest(const std::vector<double>& x) {
    double result = 0;
    for (const double element : x) result = std::max(result, std::abs(element));
    return result;
  }

  static void check_coordinates(const Problem& problem, const Options& options) {
    SCOPED_TRACE(describe(problem, options));
    Case c = smooth_case(problem, options);
    for (const Part& part : parts(attend<double, ExecSpace, V>(c, options))) {
      const double allowed = tolerance * largest(part.gradient);
      ASSERT_GT(allowed, 0);
      std::vector<double>& x = c.*part.member;
      for (std::size_t n = 0; n < x.size(); ++n) {
        const double centre = x[n];
        const auto numeric = derivative<double>(
            [&](double t) {
              x[n] = centre + t;
              return loss(c, options);
            },
            0x1p-8);
        x[n] = centre;
        ASSERT_LT(numeric.error, allowed)
            << part.name << " " << n << ": the differences say nothing";
        EXPECT_NEAR(part.gradient[n], numeric.value, allowed) << part.name << " " << n;
      }
    }
  }

  static void check_directions(const Problem& problem, const Options& options) {
    SCOPED_TRACE(describe(problem, options));
    Case c = smooth_case(problem, options);
    Random random(seed() + 17);
    for (const Part& part : parts(attend<double, ExecSpace, V>(c, options))) {
      const std::vector<double> centre = c.*part.member;
      auto direction = random.normals(static_cast<std::int64_t>(centre.size()));
      const double length =
          std::sqrt(std::inner_product(direction.begin(), direction.end(), direction.begin(), 0.0));
      for (double& element : direction) element /= length;
      const auto check = check_direction<double>(
          [&](const std::vector<double>& x) {
            c.*part.member = x;
            return loss(c, options);
          },
          part.gradient, centre, direction, 0x1p-8);
      c.*part.member = centre;
      const double allowed =
          tolerance * std::sqrt(std::inner_product(part.gradient.begin(), part.gradient.end(),
                                                   part.gradient.begin(), 0.0));
      ASSERT_LT(check.error, allowed) << part.name << ": the differences say nothing";
      EXPECT_NEAR(check.analytic, check.numeric, allowed) << part.name;
    }
  }
};

TYPED_TEST_SUITE(FiniteDifferences, OverAllVariantsInDouble, ConfigName);

TYPED_TEST(FiniteDifferences, EveryCoordinate) {
  for (const bool causal : {false, true})
    for (const bool normalise : {false, true}) {
      const Options options{.causal = causal, .normalise = normalise, .scale = 0.8, .chunk = 4};
      if (!takes<typename TypeParam::V>(options)) continue;
      this->check_coordinates({1, 2, 1, 5, 7, 3, 2}, options);
    }
}

TYPED_TEST(FiniteDifferences, AlongDirections) {
  for (const bool causal : {false, true})
    for (const int segments : {1, 3}) {
      const Options options{.causal = causal, .normalise = true, .chunk = 16, .segments = segments};
      this->check_directions({2, 4, 2, 70, 83, 5, 6}, options);
    }
}

}  // namespace
