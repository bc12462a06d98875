// SPDX-License-Identifier: BSD-3-Clause

// What flows through alpha and beta into q and k, by finite differences of the library's own forward pass, which
// measure_test.cpp and moment_rule_test.cpp hold against other code.

#include "finite_difference.hpp"
#include "moment_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr MomentRule all_rules[] = {MomentRule::authors, MomentRule::table, MomentRule::fit, MomentRule::entropy,
                                    MomentRule::fixed};
constexpr CrossTerm all_cross_terms[] = {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position};

MomentOptions options_of(MomentScope scope, MomentRule rule, CrossTerm cross) {
  return {.scope = scope, .rule = rule, .cross = cross, .line = MomentLine{0.2, -0.6}, .rate = 1.7};
}

/// sum_h a_h alpha_h + sum_g b_g beta_g.
template <class T, class ExecSpace>
double loss_of(const MomentCase& c, const MomentOptions& options, const std::vector<double>& a,
               const std::vector<double>& b) {
  MomentRun<T, ExecSpace> run(c, options);
  run.match();
  double sum = 0;
  for (std::size_t h = 0; h < a.size(); ++h) sum += a[h] * run.alpha()[h];
  for (std::size_t g = 0; g < b.size(); ++g) sum += b[g] * run.beta()[g];
  return sum;
}

std::vector<double> as_double(const auto& values) {
  std::vector<double> result;
  for (const auto x : values) result.push_back(LinAttn::detail::widened(x));
  return result;
}

template <class C>
class MomentGradient : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;

  static void check(const MomentCase& c, const MomentOptions& options, std::uint64_t salt) {
    SCOPED_TRACE(c.p.to_string() + " " + std::string(to_string(options.scope)) + " " +
                 std::string(to_string(options.rule)) + " " + std::string(to_string(options.cross)));
    Random random(seed() + salt);
    const std::vector<double> a = random.normals(c.p.heads), b = random.normals(c.p.kv_heads);
    const std::vector<double> q0 = random.normals(static_cast<std::int64_t>(c.q.size()));
    const std::vector<double> k0 = random.normals(static_cast<std::int64_t>(c.k.size()));
    MomentCase poisoned = c;
    poison_hidden(poisoned);
    MomentRun<double, ExecSpace> run(poisoned, options, Layout::gaps);
    run.match();
    run.pull(a, b, q0, k0);
    std::vector<double> d_q = run.d_q(), d_k = run.d_k();
    for (std::size_t n = 0; n < d_q.size(); ++n) d_q[n] -= q0[n];
    for (std::size_t n = 0; n < d_k.size(); ++n) d_k[n] -= k0[n];
    // hidden rows keep every bit
    for (std::int64_t bb = 0; bb < c.p.batch; ++bb)
      for (std::int64_t h = 0; h < c.p.heads; ++h)
        for (std::int64_t i = 0; i < c.p.nq; ++i)
          for (std::int64_t f = 0; f < c.p.d; ++f) {
            const double x = d_q[c.q_at(bb, h, i, f)];
            if (options.rule == MomentRule::fixed || !c.sees_query(bb, i)) {
              EXPECT_EQ(x, 0);
            }
          }
    for (const bool of_q : {true, false}) {
      const std::vector<double>& x = of_q ? c.q : c.k;
      const auto f = [&](const std::vector<double>& moved) {
        MomentCase at = c;
        (of_q ? at.q : at.k) = moved;
        return loss_of<double, ExecSpace>(at, options, a, b);
      };
      // the product with a random direction is of the size of the gradient's norm
      double size = 0;
      for (const double g : of_q ? d_q : d_k) size += g * g;
      const double tolerance = 1e-8 * std::sqrt(size);
      if (options.rule == MomentRule::fixed) {
        EXPECT_EQ(size, 0);
        continue;
      }
      // a rule with a table has kinks: differences across one have a large error and tell nothing
      DirectionalCheck<double> result;
      for (const double step : {1e-3, 3e-4, 1e-4}) {
        const std::vector<double> direction = random.normals(static_cast<std::int64_t>(x.size()));
        result = check_direction<double>(f, of_q ? d_q : d_k, x, direction, step);
        if (result.error <= tolerance) break;
      }
      EXPECT_LE(result.error, tolerance);
      EXPECT_NEAR(result.analytic, result.numeric, tolerance);
    }
  }
};
TYPED_TEST_SUITE(MomentGradient, OverSpaces, ConfigName);

TYPED_TEST(MomentGradient, EveryRuleScopeAndCrossTerm) {
  std::uint64_t salt = 0;
  for (const MomentRule rule : all_rules)
    for (const MomentScope scope : {MomentScope::tensor, MomentScope::head})
      for (const CrossTerm cross : all_cross_terms)
        for (const bool masked : {false, true}) {
          const MomentOptions options = options_of(scope, rule, cross);
          salt += 2;
          if (cross != CrossTerm::same_position)
            this->check(random_moments<double>({2, 4, 2, 7, 9, 3, 0}, masked, salt), options, salt);
          this->check(random_moments<double>({2, 4, 2, 8, 8, 17, 0}, masked, salt + 1), options, salt + 1);
        }
}

// Many blocks of rows, and a head dimension of its own.
TYPED_TEST(MomentGradient, LongRows) {
  for (const CrossTerm cross : all_cross_terms)
    this->check(random_moments<double>({1, 2, 1, 700, 700, 64, 0}, true, 77),
                options_of(MomentScope::head, MomentRule::table, cross), 77);
}

// Deviations and st2 at their limits let no gradient pass; of what is left nothing is NaN.
TYPED_TEST(MomentGradient, NothingThroughLimits) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const auto pulled = [&](const MomentCase& c, MomentRule rule, CrossTerm cross) {
    MomentRun<double, ExecSpace> run(c, options_of(MomentScope::tensor, rule, cross));
    run.match();
    run.pull(std::vector<double>(static_cast<std::size_t>(c.p.heads), 1.0),
             std::vector<double>(static_cast<std::size_t>(c.p.kv_heads), 1.0), std::vector<double>(c.q.size(), 0.0),
             std::vector<double>(c.k.size(), 0.0));
    return std::pair(run.d_q(), run.d_k());
  };
  for (const MomentRule rule : all_rules) {
    for (const CrossTerm cross : all_cross_terms) {
      MomentCase constant = random_moments<double>({1, 2, 1, 12, 12, 5, 0}, false, 5);
      std::fill(constant.q.begin(), constant.q.end(), 2.0);
      const auto [d_q, d_k] = pulled(constant, rule, cross);
      for (const double x : d_k) EXPECT_TRUE(std::isfinite(x));
      for (const double x : d_q) EXPECT_TRUE(cross == CrossTerm::none ? x == 0 : std::isfinite(x));
      const MomentCase one = random_moments<double>({1, 1, 1, 1, 1, 1, 0}, false, 6);
      const auto [q1, k1] = pulled(one, rule, cross);
      EXPECT_EQ(q1[0], 0);
      EXPECT_EQ(k1[0], 0);
    }
    if (rule == MomentRule::fixed) continue;
    // st2 at 70: alpha = sqrt(35) / sigma_q depends on q alone
    MomentCase wide = random_moments<double>({1, 1, 1, 12, 12, 5, 0}, false, 7);
    for (double& x : wide.q) x *= 50;
    MomentRun<double, ExecSpace> run(wide, options_of(MomentScope::tensor, rule, CrossTerm::none));
    run.match();
    EXPECT_NEAR(run.alpha()[0] * run.moment(0)[0], std::sqrt(35.0), 1e-14 * 6);
    run.pull({1.0}, {0.0}, std::vector<double>(wide.q.size(), 0.0), std::vector<double>(wide.k.size(), 0.0));
    for (const double x : run.d_k()) EXPECT_EQ(x, 0);
    double size = 0;
    for (const double x : run.d_q()) size += std::abs(x);
    EXPECT_GT(size, 0);
  }
}

// Gradients that are not asked for are not computed, and those of narrow types are the wide ones, rounded once.
TYPED_TEST(MomentGradient, PartsAndNarrowTypes) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const ExecSpace exec;
  for (const CrossTerm cross : all_cross_terms) {
    const MomentOptions options = options_of(MomentScope::head, MomentRule::table, cross);
    const MomentCase c = random_moments<bfloat16>({1, 4, 2, 40, 40, 9, 0}, true, 9);
    const std::vector<double> a{0.4, -0.3, 0.2, 0.7}, b{0.9, -0.8};
    const std::vector<double> zeros_q(c.q.size(), 0.0), zeros_k(c.k.size(), 0.0);
    MomentRun<double, ExecSpace> wide(c, options);
    wide.match();
    wide.pull(a, b, zeros_q, zeros_k);
    const auto compare = [&]<class T>(std::type_identity<T>) {
      MomentRun<T, ExecSpace> narrow(c, options);
      narrow.match();
      narrow.pull(a, b, zeros_q, zeros_k);
      const auto expect_rounded = [](const std::vector<T>& found, const std::vector<double>& expected) {
        for (std::size_t n = 0; n < found.size(); ++n) {
          const double unit = std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, float16> ? 0x1p-11 : 0x1p-8;
          const double least = std::is_same_v<T, float16> ? 0x1p-25 : 0;  // half the smallest number
          EXPECT_NEAR(LinAttn::detail::widened(found[n]), expected[n],
                      unit * std::abs(expected[n]) * (1 + 1e-9) + least);
        }
      };
      expect_rounded(narrow.d_q(), wide.d_q());
      expect_rounded(narrow.d_k(), wide.d_k());
    };
    compare(std::type_identity<float>{});
    compare(std::type_identity<float16>{});
    compare(std::type_identity<bfloat16>{});
    const std::vector<double> both_q = wide.d_q(), both_k = wide.d_k();
    wide.pull(a, b, zeros_q, zeros_k);
    EXPECT_TRUE(same_bits(wide.d_q(), both_q));
    MomentRun<double, ExecSpace> part(c, options);
    part.match();
    part.pull({0, 0, 0, 0}, {0, 0}, zeros_q, zeros_k);
    match_moments_backward<double>(exec, part.inputs(), part.moments().as_const(), wide.d_rates(),
                                   {.q = {}, .k = part.gradients().k}, options);
    EXPECT_EQ(part.d_q(), zeros_q);
    EXPECT_TRUE(same_bits(part.d_k(), both_k));
  }
}

}  // namespace
