// SPDX-License-Identifier: BSD-3-Clause

// Measured moments against plain two-pass code in long double, and what must not change a bit of them.

#include <linattn/reference/analysis.hpp>

#include "moment_case.hpp"
#include "refusal.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class MeasuredMoments : public ::testing::Test {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;

  /// A sum of n numbers relative to one of them has an error of at most n 2^-53 of the sum of sizes, a sum of squares
  /// one of at most (n + 2) 2^-53 of itself, which is at most n times the squared deviations (of a block); merging m
  /// blocks adds a few m 2^-53.
  static double relative_bound(const Problem& p) {
    const double block = static_cast<double>(LinAttn::MomentPlan::block_elements + p.d);
    const double blocks = static_cast<double>(p.batch * p.heads * (1 + std::max(p.nq, p.nk) * p.d / 4096));
    return (8 * block + 8 * blocks) * 0x1p-53;
  }

  static void check(const MomentCase& c, const MomentOptions& options, Layout layout = Layout::right) {
    SCOPED_TRACE(c.p.to_string() + " " + std::string(to_string(options.scope)) + " " +
                 std::string(to_string(options.cross)) + " " + to_string(layout));
    MomentRun<T, ExecSpace> run(c, options, layout);
    run.match();
    const double bound = relative_bound(c.p);
    for (std::int64_t g = 0; g < c.p.kv_heads; ++g) {
      const auto at = static_cast<std::size_t>(g);
      const PlainMoments m = plain_moments(c, options.scope == MomentScope::head ? g : -1, options.cross);
      EXPECT_NEAR(run.moment(0)[at], static_cast<double>(m.sigma_q), bound * static_cast<double>(m.sigma_q));
      EXPECT_NEAR(run.moment(1)[at], static_cast<double>(m.sigma_k), bound * static_cast<double>(m.sigma_k));
      // relative to a value of the sample, whose distance from the mean is at most sigma sqrt(n)
      const auto mean_bound = [&](long double mean, long double sigma, long double n) {
        return static_cast<double>(bound * sigma * std::sqrt(n + 1) + 4 * 0x1p-53 * std::abs(mean));
      };
      EXPECT_NEAR(run.moment(2)[at], static_cast<double>(m.mean_q), mean_bound(m.mean_q, m.sigma_q, m.count_q));
      EXPECT_NEAR(run.moment(3)[at], static_cast<double>(m.mean_k), mean_bound(m.mean_k, m.sigma_k, m.count_k));
      EXPECT_EQ(run.moment(4)[at], static_cast<double>(m.count_q));
      EXPECT_EQ(run.moment(5)[at], static_cast<double>(m.count_k));
      if (options.cross != CrossTerm::none) {
        const double size = static_cast<double>((m.sigma_q * m.sigma_q + m.mean_q * m.mean_q) *
                                                (m.sigma_k * m.sigma_k + m.mean_k * m.mean_k));
        EXPECT_NEAR(run.moment(6)[at], static_cast<double>(m.cross), 10 * bound * size);
      }
    }
  }
};

template <class E>
using AllScalars = TypeList<Config<E, float>, Config<E, double>, Config<E, float16>, Config<E, bfloat16>>;
template <class... E>
auto with_all_scalars(TypeList<E...>) -> typename Concatenated<TypeList<>, AllScalars<E>...>::type;
using OverAllScalars = decltype(LinAttn::test_support::detail::as_google(with_all_scalars(Spaces{})));

struct Name {
  template <class C>
  static std::string GetName(int index) {
    const std::string name = ConfigName::GetName<C>(index);
    if (std::is_same_v<typename C::T, float16>) return name + "_float16";
    if (std::is_same_v<typename C::T, bfloat16>) return name + "_bfloat16";
    return name;
  }
};
TYPED_TEST_SUITE(MeasuredMoments, OverAllScalars, Name);

TYPED_TEST(MeasuredMoments, AgreeWithPlainCode) {
  using T = typename TypeParam::T;
  const Problem shapes[] = {{2, 4, 2, 37, 50, 5, 0},    {1, 3, 3, 33, 33, 64, 0}, {3, 2, 1, 300, 300, 1, 0},
                            {1, 1, 1, 700, 600, 33, 0}, {2, 6, 3, 1, 1, 16, 0},   {1, 2, 1, 9, 0, 4, 0}};
  for (const Problem& p : shapes)
    for (const bool masked : {false, true})
      for (const MomentScope scope : {MomentScope::tensor, MomentScope::head})
        for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position}) {
          if (cross == CrossTerm::same_position && p.nq != p.nk) continue;
          if (cross == CrossTerm::all_pairs && p.nq > 300) continue;  // the plain code takes long
          MomentCase c = random_moments<T>(p, masked);
          this->check(c, {.scope = scope, .cross = cross});
        }
}

// All numbers have a common offset ten thousand times their deviation.
TYPED_TEST(MeasuredMoments, LargeOffset) {
  using T = typename TypeParam::T;
  if (sizeof(T) < 4) return;  // 16 bits cannot tell such numbers apart
  for (const double offset : {1e4, -1e4, 1e6})
    this->check(random_moments<T>({2, 2, 1, 400, 500, 24, 0}, true, 1, offset), {.scope = MomentScope::head});
}

// The first entry of the tensor, to which its block is summed relative, is far off.
TYPED_TEST(MeasuredMoments, OutlierInFront) {
  using T = typename TypeParam::T;
  for (const double outlier : {100.0, 1e4}) {
    MomentCase c = random_moments<T>({1, 1, 1, 500, 500, 24, 0}, false, 2);
    c.q[0] = c.k[0] = LinAttn::detail::widened(static_cast<T>(outlier));
    this->check(c, {});
  }
}

TYPED_TEST(MeasuredMoments, HiddenRowsAreNeverRead) {
  using T = typename TypeParam::T;
  for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position}) {
    const MomentCase clean = random_moments<T>({2, 4, 2, 45, 45, 6, 0}, true, 3);
    MomentCase poisoned = clean;
    poison_hidden(poisoned);
    const MomentOptions options{.scope = MomentScope::head, .rule = MomentRule::table, .cross = cross};
    MomentRun<T, typename TypeParam::ExecSpace> expected(clean, options), found(poisoned, options);
    expected.match();
    found.match();
    for (int m = 0; m < (cross == CrossTerm::none ? 6 : 7); ++m)
      EXPECT_TRUE(same_bits(found.moment(m), expected.moment(m))) << m;
    EXPECT_TRUE(same_bits(found.alpha(), expected.alpha()));
  }
}

TYPED_TEST(MeasuredMoments, EveryLayoutGivesTheSameBits) {
  using T = typename TypeParam::T;
  for (const std::int64_t d : {5, 37})
    for (const CrossTerm cross : {CrossTerm::all_pairs, CrossTerm::same_position}) {
      const MomentCase c = random_moments<T>({2, 4, 2, 61, 61, d, 0}, true, 4);
      const MomentOptions options{.scope = MomentScope::head, .cross = cross};
      MomentRun<T, typename TypeParam::ExecSpace> expected(c, options);
      expected.match();
      for (const Layout layout : all_layouts) {
        MomentRun<T, typename TypeParam::ExecSpace> found(c, options, layout);
        found.match();
        for (int m = 0; m < 7; ++m)
          EXPECT_TRUE(same_bits(found.moment(m), expected.moment(m))) << m << to_string(layout);
        EXPECT_TRUE(same_bits(found.alpha(), expected.alpha()));
        EXPECT_TRUE(same_bits(found.beta(), expected.beta()));
      }
    }
}

// Host spaces cut the work alike, so one thread and several give the same bits.
TYPED_TEST(MeasuredMoments, ThreadsChangeNoBit) {
#if defined(KOKKOS_ENABLE_SERIAL)
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  if (!LinAttn::detail::is_host_space_v<ExecSpace>) return;
  const MomentCase c = random_moments<T>({2, 4, 2, 900, 900, 40, 0}, true, 5);
  for (const CrossTerm cross : {CrossTerm::all_pairs, CrossTerm::same_position}) {
    const MomentOptions options{.scope = MomentScope::head, .cross = cross};
    MomentRun<T, Kokkos::Serial> expected(c, options);
    MomentRun<T, ExecSpace> found(c, options);
    expected.match();
    found.match();
    for (int m = 0; m < 7; ++m) EXPECT_TRUE(same_bits(found.moment(m), expected.moment(m))) << m;
  }
#endif
}

// A constant tensor, a single token, nothing visible, nothing at all: sigma is at its limit, rates are finite.
TYPED_TEST(MeasuredMoments, NothingToMeasure) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const MomentRule rules[] = {MomentRule::authors, MomentRule::table, MomentRule::fit, MomentRule::entropy,
                              MomentRule::fixed};
  const auto expect_finite = [&](const MomentCase& c, CrossTerm cross, double sigma_q, double sigma_k) {
    for (const MomentRule rule : rules) {
      MomentRun<T, ExecSpace> run(c, {.rule = rule, .cross = cross, .line = published_line});
      run.match();
      for (const double a : run.alpha()) EXPECT_TRUE(std::isfinite(a)) << to_string(rule);
      for (const double b : run.beta()) EXPECT_TRUE(std::isfinite(b)) << to_string(rule);
      for (const double s : run.moment(0)) EXPECT_EQ(s, sigma_q);
      for (const double s : run.moment(1)) EXPECT_EQ(s, sigma_k);
    }
  };
  for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position}) {
    MomentCase constant = random_moments<T>({2, 2, 1, 30, 30, 7, 0}, true, 6);
    std::fill(constant.q.begin(), constant.q.end(), 3.0);
    std::fill(constant.k.begin(), constant.k.end(), -0.1);
    constant.k = std::vector<double>(constant.k.size(), LinAttn::detail::widened(static_cast<T>(-0.1)));
    expect_finite(constant, cross, 1e-4, 1e-4);
    expect_finite(random_moments<T>({1, 1, 1, 1, 1, 1, 0}, false, 7), cross, 1e-4, 1e-4);
    MomentCase hidden = constant;
    std::fill(hidden.key_mask.begin(), hidden.key_mask.end(), std::uint8_t{0});
    poison_hidden(hidden);
    expect_finite(hidden, cross, 1e-4, 1e-4);
    expect_finite(random_moments<T>({0, 2, 1, 4, 4, 3, 0}, false), cross, 1e-4, 1e-4);
    expect_finite(random_moments<T>({2, 2, 1, 0, 0, 3, 0}, false), cross, 1e-4, 1e-4);
    expect_finite(random_moments<T>({2, 2, 1, 4, 4, 0, 0}, false), cross, 1e-4, 1e-4);
    expect_finite(random_moments<T>({2, 0, 0, 4, 4, 3, 0}, false), cross, 1e-4, 1e-4);
  }
}

// The limit of a deviation and the rates there are those of the reference: of constants, of less than two numbers, and
// of deviations that are not 0 but below it.
TYPED_TEST(MeasuredMoments, LimitsAreThoseOfTheReference) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const double size : {0.0, 1e-5, 3e-4})
    for (const std::int64_t n : {1, 12}) {
      MomentCase c = random_moments<T>({1, 2, 1, n, n, n == 1 ? 1 : 4, 0}, false, 12);
      for (auto* x : {&c.q, &c.k})
        for (double& value : *x) value = LinAttn::detail::widened(static_cast<T>(size * value));
      for (const bool each : {false, true}) {
        const auto expected = reference::moments<double>(
            c.p, {c.q, c.k, {}}, each ? reference::MomentScope::head : reference::MomentScope::tensor);
        MomentRun<T, ExecSpace> run(c, {.scope = each ? MomentScope::head : MomentScope::tensor});
        run.match();
        EXPECT_NEAR(run.moment(0)[0], expected.sigma_q[0], 1e-12 * expected.sigma_q[0]);
        EXPECT_NEAR(run.moment(1)[0], expected.sigma_k[0], 1e-12 * expected.sigma_k[0]);
        for (std::size_t h = 0; h < 2; ++h) EXPECT_NEAR(run.alpha()[h], expected.alpha[h], 1e-11 * expected.alpha[h]);
        EXPECT_NEAR(run.beta()[0], expected.beta[0], 1e-11 * expected.beta[0]);
      }
    }
}

// More tasks than workers, and more than an int can count.
TYPED_TEST(MeasuredMoments, ManyTasks) {
  using T = typename TypeParam::T;
  this->check(random_moments<T>({35000, 2, 1, 1, 1, 1, 0}, false, 13), {.scope = MomentScope::head});
  for (const MachineTraits& machine : {MachineTraits{true, 8, 0}, MachineTraits{false, 1 << 18, 1 << 15}}) {
    const MomentPlan plan = make_moment_plan(std::int64_t(1) << 40, machine);
    EXPECT_GE(plan.workers, 1024);
    EXPECT_LE(plan.workers, 1 << 20);
    EXPECT_EQ(make_moment_plan(3, machine).workers, 3);
  }
  EXPECT_EQ(make_moment_plan(3, {false, 40, 1 << 15}).team_size, 40);
}

// Tensors without elements have no memory: rows of no features, and then no rows or no heads.
TYPED_TEST(MeasuredMoments, NoMemoryBehindNothing) {
  using T = typename TypeParam::T;
  using E = typename TypeParam::ExecSpace;
  const auto nothing = [](const Problem& p) {
    const auto of = [&](std::int64_t heads, std::int64_t rows) {
      return TensorRef<const T, 4, E>(nullptr, {p.batch, heads, rows, p.d}, {heads * rows * p.d, rows * p.d, p.d, 1});
    };
    return MomentInputs<E, T>{.q = of(p.heads, p.nq), .k = of(p.kv_heads, p.nk)};
  };
  const Problem problems[] = {
      {1, 1, 1, 7, 7, 0, 0}, {2, 4, 2, 7, 7, 0, 0}, {2, 4, 2, 0, 0, 0, 0}, {0, 4, 2, 7, 7, 3, 0}};
  for (const Problem& p : problems)
    for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position}) {
      const MomentCase c{p, {}, {}, {}, {}};
      MomentRun<T, E> run(c, {.cross = cross});
      const MomentInputs<E, T> in = nothing(p);
      match_moments<T>(E(), in, run.moments(), run.rates(), {.cross = cross});
      const MomentGradients<E, T> gradients{
          .q = {nullptr, {p.batch, p.heads, p.nq, p.d}, {0, 0, 0, 0}},
          .k = {nullptr, {p.batch, p.kv_heads, p.nk, p.d}, {0, 0, 0, 0}},
      };
      match_moments_backward<T>(E(), in, run.moments().as_const(), run.d_rates(), gradients, {.cross = cross});
      for (std::size_t g = 0; g < static_cast<std::size_t>(p.kv_heads); ++g) {
        EXPECT_EQ(run.moment(0)[g], 1e-4);
        EXPECT_EQ(run.moment(2)[g], 0);
        EXPECT_EQ(run.moment(4)[g], 0);
        EXPECT_TRUE(std::isfinite(run.beta()[g]));
      }
    }
}

TYPED_TEST(MeasuredMoments, WithAWorkspaceOfTheirOwn) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const MomentCase c = random_moments<T>({1, 2, 1, 20, 30, 8, 0}, false, 8);
  MomentRun<T, ExecSpace> expected(c, {}), found(c, {});
  expected.match();
  match_moments<T>(ExecSpace(), found.inputs(), found.moments(), found.rates());
  EXPECT_TRUE(same_bits(found.alpha(), expected.alpha()));
}

TYPED_TEST(MeasuredMoments, RunningAverage) {
  using ExecSpace = typename TypeParam::ExecSpace;
  using Values = PlacedTensor<double, 1, ExecSpace>;
  const ExecSpace exec;
  Values running[3], measured[3];
  for (int m = 0; m < 3; ++m) {
    running[m] = Values({3}, Layout::gaps);
    measured[m] = Values({3}, Layout::right);
    running[m].set(std::vector<double>(3, std::nan("")));
  }
  const Moments<ExecSpace> to{.sigma_q = running[0].ref(), .sigma_k = running[1].ref(), .cross = running[2].ref()};
  const ConstMoments<ExecSpace> from{
      .sigma_q = measured[0].input(), .sigma_k = measured[1].input(), .cross = measured[2].input()};
  std::vector<std::vector<double>> expected(3);
  for (int step = 0; step < 5; ++step) {
    const double momentum = step == 0 ? 1 : 0.25;
    for (int m = 0; m < 3; ++m) {
      const auto at = static_cast<std::size_t>(m);
      const std::vector<double> now{1.0 + m + step, 2.0 - step, 0.5 * m * step};
      measured[m].set(now);
      if (step == 0) expected[at] = now;
      for (std::size_t g = 0; g < 3; ++g) expected[at][g] = (1 - momentum) * expected[at][g] + momentum * now[g];
    }
    update_running_moments(exec, to, from, momentum);
    exec.fence();
    for (int m = 0; m < 3; ++m)
      for (std::size_t g = 0; g < 3; ++g)
        EXPECT_NEAR(running[m].get()[g], expected[static_cast<std::size_t>(m)][g], 1e-14);
  }
  for (const double momentum : {0.0, -0.5, 1.5, std::nan("")})
    expect_refusal([&] { update_running_moments(exec, to, from, momentum); }, {"momentum"});
}

TYPED_TEST(MeasuredMoments, Refusals) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const ExecSpace exec;
  const MomentCase c = random_moments<T>({2, 4, 2, 9, 11, 5, 0}, true);
  const MomentRun<T, ExecSpace> run(c, {});
  const auto refuse = [&](MomentInputs<ExecSpace, T> in, const Moments<ExecSpace>& moments,
                          const MomentOptions& options, const std::vector<std::string>& pieces) {
    expect_refusal([&] { match_moments<T>(exec, in, moments, run.rates(), options); }, pieces);
  };
  MomentInputs<ExecSpace, T> wrong = run.inputs();
  wrong.k = {};
  refuse(wrong, run.moments(), {}, {"k is missing"});
  wrong = run.inputs();
  wrong.query_mask = wrong.key_mask;
  refuse(wrong, run.moments(), {}, {"query_mask", "(2, 9)", "(2, 11)"});
  Moments<ExecSpace> lacking = run.moments();
  lacking.sigma_k = {};
  refuse(run.inputs(), lacking, {}, {"sigma_k", "(2)"});
  refuse(run.inputs(), run.moments(), {.cross = CrossTerm::all_pairs}, {"cross", "nothing"});
  refuse(run.inputs(), run.moments(), {.cross = CrossTerm::same_position}, {"Nq = 9", "Nk = 11"});
  refuse(run.inputs(), run.moments(), {.causal = true}, {"future", "sees_future"});
  refuse(run.inputs(), run.moments(), {.rule = MomentRule::fit}, {"fit_line"});
  refuse(run.inputs(), run.moments(), {.rule = MomentRule::fit, .line = MomentLine{-1, 0}}, {"slope -1"});
  refuse(run.inputs(), run.moments(), {.rule = MomentRule::fixed, .rate = std::nan("")}, {"rate", "nan"});
  match_moments<T>(exec, run.inputs(), run.moments(), run.rates(), {.causal = true, .sees_future = true});
  const Moments<ExecSpace> with_cross = MomentRun<T, ExecSpace>(c, {.cross = CrossTerm::all_pairs}).moments();
  refuse(run.inputs(), with_cross, {}, {"cross is none"});
  const auto arena = run.arena(Pass::forward);
  const Workspace<ExecSpace> small(
      Kokkos::subview(arena.bytes, std::pair<std::size_t, std::size_t>(0, arena.size - 1)));
  expect_refusal([&] { match_moments<T>(exec, run.inputs(), run.moments(), run.rates(), small); },
                 {"needs " + std::to_string(arena.size), "found " + std::to_string(arena.size - 1)});
}

}  // namespace
