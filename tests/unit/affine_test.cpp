// SPDX-License-Identifier: BSD-3-Clause

// Affine attention: norms, the constant and its state, values relative to a centre, small row sums.
// What every variant is asked for is asked of affine (l2) by the typed suites.

#include <linattn/engine/row_norm.hpp>
#include <numeric>

#include "attention_case.hpp"
#include "finite_difference.hpp"
#include "refusal.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr QkNorm norms[] = {QkNorm::l2, QkNorm::none, QkNorm::max};

/// With weights of one sign, so that no row sum is near 0.
template <class T>
Case affine_case(const Problem& p, const Options& options, QkNorm norm, std::uint64_t salt = 0) {
  Case c = random_case<T, Affine>(p, options, salt);
  c.affine = {.scale = norm == QkNorm::none ? 0.3 : 0.9, .qk_norm = norm, .norm_eps = 1e-3};
  if (norm == QkNorm::none)
    for (double& b : c.constant) b += 3;
  return c;
}

void hide_every_third(Case& c) {
  for (std::int64_t n = 0; n < c.problem.batch * c.problem.nk; ++n)
    c.key_mask.push_back(static_cast<std::uint8_t>(n % 3 != 0));
}

template <class C>
class AffineAttention : public BoundedTest {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;

  static void check(const Case& c, const Options& options) {
    SCOPED_TRACE(describe(c.problem, options) + " norm " +
                 std::to_string(static_cast<int>(c.affine.qk_norm)));
    EXPECT_TRUE((engine_agrees<T, ExecSpace, Affine>(c, options)));
  }
};

TYPED_TEST_SUITE(AffineAttention, OverScalars, ConfigName);

// Nq != Nk and D no multiple of 8 among them; with the largest norm, queries and keys have a
// different number of rows and the largest stands anywhere.
TYPED_TEST(AffineAttention, AgreesWithTheReference) {
  using T = typename TypeParam::T;
  for (const QkNorm norm : norms)
    for (const bool causal : {false, true})
      for (const bool normalise : {true, false})
        for (const int segments : {1, 3}) {
          const Options options{.causal = causal, .normalise = normalise, .segments = segments};
          this->check(affine_case<T>({2, 4, 2, 37, 50, 5, 7}, options, norm), options);
          this->check(affine_case<T>({1, 1, 1, 48, 48, 32, 16}, options, norm, 1), options);
        }
}

TYPED_TEST(AffineAttention, HiddenKeysAndMembers) {
  using T = typename TypeParam::T;
  for (const QkNorm norm : norms)
    for (const bool causal : {false, true})
      for (const int segments : {1, 2}) {
        const Options options{.causal = causal, .chunk = 8, .segments = segments};
        Case masked = affine_case<T>({2, 2, 1, 40, 60, 5, 7}, options, norm);
        hide_every_third(masked);
        Case poisoned = masked;
        for (std::int64_t b = 0; b < 2; ++b)
          for (std::int64_t j = 0; j < 60; ++j) {
            if (masked.key_mask[static_cast<std::size_t>(b * 60 + j)] != 0) continue;
            std::fill_n(poisoned.k.begin() + (b * 60 + j) * 5, 5, std::nan(""));
            std::fill_n(poisoned.v.begin() + (b * 60 + j) * 7, 7, std::nan(""));
          }
        Attention<T, typename TypeParam::ExecSpace, Affine> call(poisoned, options);
        call.forward();
        call.backward();
        EXPECT_TRUE((agrees<T, Affine>(masked, call.outcome(),
                                       expected_of<T, Affine>(masked, options), options.chunk)));

        Case packed = affine_case<T>({1, 2, 1, 50, 60, 5, 7}, options, norm);
        pack(packed, {20, 0, 29, 1}, {25, 3, 31, 1});
        this->check(packed, options);
      }
}

// A hidden key may have the largest norm; a norm of 0 divides by 1.
TYPED_TEST(AffineAttention, LargestNorm) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = false};
  Case c = affine_case<T>({1, 2, 2, 10, 700, 3, 4}, options, QkNorm::max);  // more rows than a block
  hide_every_third(c);
  for (int d = 0; d < 3; ++d) c.k[static_cast<std::size_t>(3 * 3 + d)] = 50;  // hidden
  for (int d = 0; d < 3; ++d) c.k[static_cast<std::size_t>(3 * 601 + d)] = -9;  // the largest ...
  for (int d = 0; d < 3; ++d) c.k[static_cast<std::size_t>(3 * 650 + d)] = 9;   // ... and its equal
  this->check(c, options);
  Case zero = affine_case<T>({1, 2, 1, 9, 12, 3, 4}, options, QkNorm::max);
  std::fill(zero.k.begin(), zero.k.end(), 0.0);
  std::fill_n(zero.q.begin(), 27, 0.0);
  const auto found = attend<T, ExecSpace, Affine>(zero, options);
  for (const T x : found.o) EXPECT_TRUE(std::isfinite(x));
  this->check(zero, options);
}

// Norms whose squares leave the range of the type; rows of zeros.
TYPED_TEST(AffineAttention, NormsOfAnySize) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  const Case c = affine_case<T>({1, 1, 1, 20, 20, 3, 4}, options, QkNorm::l2);
  Case with = c;
  with.affine.norm_eps = 0;
  const auto expected = attend<T, ExecSpace, Affine>(with, options);
  const double large = std::is_same_v<T, float> ? 0x1p110 : 0x1p900;
  for (const double factor : {large, 1 / large}) {
    Case scaled = with;
    for (auto* x : {&scaled.q, &scaled.k})
      for (double& element : *x) element *= factor;
    const auto found = attend_forward<T, ExecSpace, Affine>(scaled, options);
    for (std::size_t n = 0; n < found.size(); ++n)
      // a mean of at most 20 values of size 3, whose weights are as good as two norms and a dot product
      EXPECT_NEAR(found[n], expected.o[n], 200 * std::numeric_limits<T>::epsilon()) << factor;
  }
  Case zeros = with;
  std::fill_n(zeros.q.begin(), 9, 0.0);
  std::fill_n(zeros.k.begin() + 3, 9, 0.0);
  this->check(zeros, options);
}

TYPED_TEST(AffineAttention, RowNormIsThatOfTheRow) {
  using T = typename TypeParam::T;
  Random random(seed());
  for (const int n : {1, 3, 16, 17, 64, 100})
    for (const double factor : {1.0, 1e-30, 1e30}) {
      std::vector<T> x;
      for (const double e : random.normals(n)) x.push_back(static_cast<T>(e * factor));
      long double sum = 1e-4L;
      for (const T e : x) sum += static_cast<long double>(e) * static_cast<long double>(e);
      const T found = LinAttn::detail::row_norm<LinAttn::detail::HostTeam>(x.data(), n, T(1e-4));
      EXPECT_NEAR(found, std::sqrt(sum), (n + 4) * std::numeric_limits<T>::epsilon() * std::sqrt(sum));
    }
}

// ---- finite differences -------------------------------------------------------------------------

template <class C>
class AffineDifferences : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;

  static double loss(const Case& c, const Options& options) {
    const auto o = attend_forward<double, ExecSpace, Affine>(c, options);
    long double sum = 0;
    for (std::size_t n = 0; n < o.size(); ++n) sum += static_cast<long double>(o[n]) * c.d_o[n];
    return static_cast<double>(sum);
  }

  static void check(Case c, const Options& options) {
    SCOPED_TRACE(describe(c.problem, options) + " norm " +
                 std::to_string(static_cast<int>(c.affine.qk_norm)));
    const auto found = attend<double, ExecSpace, Affine>(c, options);
    const double scale = std::accumulate(found.scale.begin(), found.scale.end(), 0.0);
    const auto expect = [&](const char* name, double& x, double gradient, double largest) {
      const double centre = x;
      const auto numeric = derivative<double>(
          [&](double t) {
            x = centre + t;
            return loss(c, options);
          },
          0x1p-8);
      x = centre;
      ASSERT_LT(numeric.error, 1e-8 * largest) << name << ": the differences say nothing";
      EXPECT_NEAR(gradient, numeric.value, 1e-8 * largest) << name;
    };
    const auto expect_all = [&](const char* name, std::vector<double>& x,
                                const std::vector<double>& gradient) {
      ASSERT_EQ(x.size(), gradient.size());
      double largest = 0.1;
      for (const double g : gradient) largest = std::max(largest, std::abs(g));
      for (std::size_t n = 0; n < x.size(); ++n) expect(name, x[n], gradient[n], largest);
    };
    expect_all("q", c.q, found.q);
    expect_all("k", c.k, found.k);
    expect_all("v", c.v, found.v);
    expect_all("a", c.alpha, found.alpha);
    expect_all("b", c.constant, found.constant);
    expect("scale", *c.affine.scale, scale, std::max(0.1, std::abs(scale)));
  }
};

TYPED_TEST_SUITE(AffineDifferences, OverSpaces, ConfigName);

TYPED_TEST(AffineDifferences, EveryCoordinate) {
  for (const QkNorm norm : norms)
    for (const bool causal : {false, true})
      for (const double p : {0.0, 0.4})
        for (const bool center : {false, true}) {
          const Options options{.causal = causal,
                                .chunk = 4,
                                .segments = 2,
                                .dropout = {.p = p, .seed = 11, .offset = 3},
                                .center_v = center};
          Case c = affine_case<double>({1, 2, 1, 5, 7, 3, 2}, options, norm);
          c.key_mask = {1, 1, 0, 1, 1, 1, 1};
          this->check(c, options);
        }
}

// No gradient flows through a row sum that was replaced; the limits lie between the sums.
TYPED_TEST(AffineDifferences, ReplacedRowSums) {
  for (const bool causal : {false, true})
    for (const bool center : {false, true}) {
      const Options options{.causal = causal,
                            .chunk = 4,
                            .dropout = {.p = 0.2},
                            .small_normaliser = SmallNormaliser::clamp,
                            .least_normaliser = causal ? 1.6 : 1.62,
                            .center_v = center};
      Case c = affine_case<double>({1, 2, 1, 6, 7, 3, 2}, options, QkNorm::l2);
      c.affine.scale = 2.0;
      Attention<double, typename TypeParam::ExecSpace, Affine> call(c, options);
      call.forward();
      int replaced = 0, kept = 0;
      const auto sums = call.denominator.get();
      for (std::size_t n = 0; n < sums.size(); ++n) {
        const double keys = causal ? static_cast<double>(n % 6 + 2) : 7.0;
        const double ratio = std::abs(sums[n]) / keys;
        ++(ratio < options.least_normaliser ? replaced : kept);
        ASSERT_GT(std::abs(ratio - options.least_normaliser), 0.02) << "a difference crosses the limit";
      }
      ASSERT_GT(replaced, 0);
      ASSERT_GT(kept, 0);
      this->check(c, options);
    }
}

// ---- states -------------------------------------------------------------------------------------

// m counts the visible keys, those of the caller included, in 64 bits.
TYPED_TEST(AffineAttention, MIsAnExactCount) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const int segments : {1, 3}) {
      const Options options{.causal = causal, .chunk = 16, .segments = segments};
      Case c = affine_case<T>({3, 2, 1, 30, 70, 3, 4}, options, QkNorm::l2);
      hide_every_third(c);
      c.wants_last = true;
      EXPECT_EQ((attend<T, ExecSpace, Affine>(c, options).m), (std::vector<std::int64_t>{46, 47, 47}));
      c.initial = StateValues{std::vector<double>(36, 0.5), std::vector<double>(9, 0.25), {}};
      c.initial->m = {std::int64_t(1) << 40, 0, 7};
      EXPECT_EQ((attend<T, ExecSpace, Affine>(c, options).m),
                (std::vector<std::int64_t>{(std::int64_t(1) << 40) + 46, 47, 54}));
    }
}

// ---- values relative to a centre ----------------------------------------------------------------

template <class T>
double largest_error(const std::vector<T>& found, const std::vector<oracle_t<T>>& expected) {
  double worst = 0, largest = 0;
  for (std::size_t n = 0; n < found.size(); ++n) {
    worst = std::max(worst, std::abs(static_cast<double>(found[n]) - static_cast<double>(expected[n])));
    largest = std::max(largest, std::abs(static_cast<double>(expected[n])));
  }
  return worst / largest;
}

// With an offset of 1000 in the values, dq and dk keep the precision that they have without one: a
// difference of numbers of size 1000 that are good to 6e-8 is good to 6e-5, or better where roundings
// average. With the rows of y alone the offset costs their last place, 3e-5 of the deviation of v.
TEST(AffineCentre, KeepsThePrecisionOfGradients) {
  using ExecSpace = Kokkos::DefaultHostExecutionSpace;
  using T = float;
  const auto errors = [](bool center, bool keep) {
    Options options{.causal = true, .center_v = center};
    Case c = affine_case<T>({1, 1, 1, 800, 800, 16, 8}, options, QkNorm::l2);
    for (double& v : c.v) v += 1000;
    round_to<T>(c.v);
    const auto expected = expected_of<T, Affine>(c, {.causal = true});
    Attention<T, ExecSpace, Affine> call(c, options);
    call.forward();
    auto saved = call.saved();
    if (!keep) saved.centred = {};
    Arena<ExecSpace> arena(call.workspace_bytes(Pass::backward));
    backward<T>(ExecSpace(), call.variant(), call.inputs(), saved, call.d_o.input(),
                call.gradients({}), arena.workspace(), options);
    return std::max(largest_error(call.d_q.get(), expected.gradient.q),
                    largest_error(call.d_k.get(), expected.gradient.k));
  };
  const double plain = errors(false, false), from_y = errors(true, false), kept = errors(true, true);
  EXPECT_GT(plain, 2e-5);   // what there is to gain
  EXPECT_LT(kept, 3e-6);
  EXPECT_LT(from_y, plain / 2);
}

TYPED_TEST(AffineAttention, CentreChangesRoundingOnly) {
  using T = typename TypeParam::T;
  for (const QkNorm norm : norms)
    for (const bool causal : {false, true})
      for (const double p : {0.0, 0.3}) {
        const Options options{.causal = causal,
                              .segments = 2,
                              .dropout = {.p = p, .seed = 3},
                              .center_v = true};
        Case c = affine_case<T>({2, 4, 2, 37, 50, 5, 7}, options, norm);
        hide_every_third(c);
        // the first visible value is 1 from a hidden one in the second batch entry
        this->check(c, options);
      }
}

// ---- small row sums -----------------------------------------------------------------------------

template <class ExecSpace>
using Records = Kokkos::View<NormaliserRecord**, Kokkos::LayoutRight, typename ExecSpace::memory_space>;

template <class T, class ExecSpace>
std::vector<NormaliserRecord> records_of(const Case& c, const Options& options) {
  Attention<T, ExecSpace, Affine> call(c, options);
  const Records<ExecSpace> records("test::records", static_cast<std::size_t>(c.problem.sequences()),
                                   static_cast<std::size_t>(c.problem.heads));
  auto saved = call.saved();
  saved.smallest = records;
  Arena<ExecSpace> arena(call.workspace_bytes(Pass::forward));
  const ExecSpace exec;
  forward<T>(exec, call.variant(), call.inputs(), saved, arena.workspace(), options);
  exec.fence();
  EXPECT_TRUE(arena.guards_intact());
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), records);
  return {host.data(), host.data() + host.size()};
}

// The record of each head is the smallest |s| / m of its row sums, to the bit.
TYPED_TEST(AffineAttention, RecordsTheSmallestRowSum) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const bool masked : {false, true})
      for (const int segments : {1, 3})
        for (const int tiles : {1, 2}) {
          const Options options{.causal = causal, .chunk = 8, .segments = segments, .tiles = tiles};
          SCOPED_TRACE(describe({2, 4, 2, 40, 60, 5, 40}, options));
          Case c = affine_case<T>({2, 4, 2, 40, 60, 5, 40}, options, QkNorm::none);
          for (double& b : c.constant) b = 0.5;  // of both signs
          if (masked) hide_every_third(c);
          Attention<T, ExecSpace, Affine> call(c, options);
          call.forward();
          const auto sums = call.denominator.get();
          const auto records = records_of<T, ExecSpace>(c, options);
          for (std::size_t h = 0; h < 8; ++h) {
            NormaliserRecord expected{std::numeric_limits<double>::infinity(), -1};
            std::int64_t keys = 0, j = 0;
            for (std::int64_t i = 0; i < 40; ++i) {
              for (; j < (causal ? i + 21 : 60); ++j)
                keys += !masked || c.key_mask[h / 4 * 60 + static_cast<std::size_t>(j)] != 0;
              const double ratio = std::abs(static_cast<double>(sums[h * 40 + static_cast<std::size_t>(i)])) /
                                   static_cast<double>(keys);
              if (ratio < expected.ratio) expected = {ratio, i};
            }
            EXPECT_EQ(records[h].row, expected.row) << "head " << h;
            EXPECT_EQ(records[h].ratio, expected.ratio) << "head " << h;
          }
        }
}

TYPED_TEST(AffineAttention, RecordsOfRowsThatSeeNothing) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = affine_case<T>({2, 1, 1, 4, 4, 3, 2}, {}, QkNorm::l2);
  c.key_mask = {0, 0, 0, 0, 1, 1, 1, 1};
  auto records = records_of<T, ExecSpace>(c, {});
  EXPECT_EQ(records[0].row, -1);
  EXPECT_TRUE(std::isinf(records[0].ratio));
  EXPECT_GE(records[1].row, 0);
  Case equal = c;
  std::fill(equal.q.begin(), equal.q.end(), 0.0);
  for (const int segments : {1, 3})
    EXPECT_EQ((records_of<T, ExecSpace>(equal, {.chunk = 1, .segments = segments}))[1].row, 0)
        << "the first of equals";
  c.q[12 + 4] = std::nan("");  // batch entry 1, row 1
  records = records_of<T, ExecSpace>(c, {});
  EXPECT_EQ(records[1].row, 1);
  EXPECT_TRUE(std::isnan(records[1].ratio));
  for (const Problem& p : {Problem{2, 2, 2, 0, 4, 3, 2}, Problem{2, 2, 2, 4, 0, 3, 2}}) {
    const Case empty = affine_case<T>(p, {}, QkNorm::l2);
    for (const NormaliserRecord& record : records_of<T, ExecSpace>(empty, {})) EXPECT_EQ(record.row, -1);
  }
}

// check() waits, and names sequence, head, row and value.
TYPED_TEST(AffineAttention, CheckRefusesASmallRowSum) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  Case c = affine_case<T>({2, 3, 1, 6, 6, 2, 2}, options, QkNorm::none);
  c.affine.scale = 1.0;
  c.alpha = {1, 1, 1};
  c.constant = {1, 1, 1};
  for (double& x : c.q) x = 0;
  for (double& x : c.k) x = 1;
  // batch entry 1, head 2, row 4: q . k = -1 for each key
  c.q[static_cast<std::size_t>(((1 * 3 + 2) * 6 + 4) * 2)] = -1;
  Attention<T, ExecSpace, Affine> call(c, options);
  const Records<ExecSpace> records("test::records", 2, 3);
  auto saved = call.saved();
  saved.smallest = records;
  const ExecSpace exec;
  const auto run = [&](const Options& with) {
    Arena<ExecSpace> arena(call.workspace_bytes(Pass::forward));
    forward<T>(exec, call.variant(), call.inputs(), saved, arena.workspace(), with);
    LinAttn::check(exec, saved, with);
  };
  expect_refusal([&] { run(options); },
                 {"sequence 1", "head 2", "row 4", "is 0 for each key", "1e-06", "qk_norm l2", "clamp"});
  c.q[static_cast<std::size_t>(((1 * 3 + 2) * 6 + 4) * 2)] = -0.5;
  Attention<T, ExecSpace, Affine> half(c, options);
  auto saved_half = half.saved();
  saved_half.smallest = records;
  Arena<ExecSpace> arena(half.workspace_bytes(Pass::forward));
  forward<T>(exec, half.variant(), half.inputs(), saved_half, arena.workspace(), options);
  EXPECT_NO_THROW(LinAttn::check(exec, saved_half, options));
  Options strict = options;
  strict.least_normaliser = 0.6;
  expect_refusal([&] { LinAttn::check(exec, saved_half, strict); }, {"row 4", "is 0.5", "0.6"});
  strict.small_normaliser = SmallNormaliser::ignore;
  EXPECT_NO_THROW(LinAttn::check(exec, saved_half, strict));
}

TYPED_TEST(AffineAttention, ReplacedRowSumsAgreeWithTheReference) {
  using T = typename TypeParam::T;
  for (const bool causal : {false, true})
    for (const bool masked : {false, true})
      for (const int segments : {1, 2}) {
        const Options options{.causal = causal,
                              .chunk = 8,
                              .segments = segments,
                              .small_normaliser = SmallNormaliser::clamp,
                              .least_normaliser = 1.65};
        Case c = affine_case<T>({2, 4, 2, 40, 60, 5, 7}, options, QkNorm::l2);
        if (masked) hide_every_third(c);
        this->check(c, options);
        Options with = options;
        with.center_v = true;
        this->check(c, with);
      }
}

// Largest norms of rows of any stride have the same bits: what a compiler does differently with rows
// side by side shows in doubles from 16 entries on, in one of some draws.
TYPED_TEST(AffineAttention, LargestNormOfAnyLayout) {
  using T = typename TypeParam::T;
  for (std::uint64_t draw = 0; draw < 60; ++draw) {
    const std::int64_t d = 16 + static_cast<std::int64_t>(draw % 30);
    const Options options{.normalise = false};
    const Case c = affine_case<T>({1, 1, 1, 7, 7, d, 4}, options, QkNorm::max, draw);
    Arrangement at;
    at.q = at.k = Layout::left;
    EXPECT_TRUE(same_bits(attend<T, typename TypeParam::ExecSpace, Affine>(c, options, at),
                          attend<T, typename TypeParam::ExecSpace, Affine>(c, options)))
        << "D = " << d;
  }
}

// States of variants without m cannot say how many keys a row sum is over.
TYPED_TEST(AffineAttention, SmallRowSumsNeedTheCountOfAState) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = random_case<T, Elu>({1, 1, 1, 4, 4, 2, 2}, {});
  c.initial = StateValues{std::vector<double>(4, 1), std::vector<double>(2, 1), {}};
  const Options clamp{.small_normaliser = SmallNormaliser::clamp};
  Attention<T, ExecSpace, Elu> call(c, clamp);
  const ExecSpace exec;
  Arena<ExecSpace> arena(call.workspace_bytes(Pass::forward));
  expect_refusal(
      [&] { forward<T>(exec, call.variant(), call.inputs(), call.saved(), arena.workspace(), clamp); },
      {"number of keys", "states of elu", "initial state"});
  const Records<ExecSpace> records("test::records", 1, 1);
  auto saved = call.saved();
  saved.smallest = records;
  Arena<ExecSpace> another(call.workspace_bytes(Pass::forward) + 4096);
  expect_refusal([&] { forward<T>(exec, call.variant(), call.inputs(), saved, another.workspace()); },
                 {"number of keys", "states of elu", "initial state"});
}

// A row sum of exactly 0 counts as positive; without the clamp the row is 0.
TYPED_TEST(AffineAttention, RowSumOfZero) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = affine_case<T>({1, 1, 1, 2, 2, 2, 1}, {}, QkNorm::none);
  c.alpha = {1};
  c.constant = {1};
  c.affine.scale = 1.0;
  c.q = {-1, 0, 2, 0};
  c.k = {1, 5, 1, -3};
  c.v = {3, 4};
  EXPECT_EQ((attend_forward<T, ExecSpace, Affine>(c, {})), (std::vector<T>{0, T(3.5)}));
  c.k = {2, 5, 0, -3};  // weights -1 and 1
  const Options clamp{.small_normaliser = SmallNormaliser::clamp, .least_normaliser = 0.25};
  EXPECT_EQ((attend_forward<T, ExecSpace, Affine>(c, clamp))[0], T(-3 + 4) / T(0.5));
  this->check(c, clamp);
}

// ---- what public kernels got wrong --------------------------------------------------------------

// The call leaves q, k, v, dO as they were.
TYPED_TEST(AffineAttention, InputsAreLeftAlone) {
  using T = typename TypeParam::T;
  for (const QkNorm norm : norms)
    for (const bool causal : {false, true})
      for (const Problem& p : {Problem{1, 4, 2, 20, 30, 8, 16}, Problem{2, 1, 1, 32, 32, 16, 16}}) {
        const Options options{.causal = causal, .dropout = {.p = 0.1}};
        const Case c = affine_case<T>(p, options, norm);
        Attention<T, typename TypeParam::ExecSpace, Affine> call(c, options);
        const auto q = call.q.get(), k = call.k.get(), v = call.v.get(), d_o = call.d_o.get();
        call.forward();
        call.backward();
        EXPECT_TRUE(same_bits(call.q.get(), q) && same_bits(call.k.get(), k));
        EXPECT_TRUE(same_bits(call.v.get(), v) && same_bits(call.d_o.get(), d_o));
      }
}

// b m is in every row sum: with a = 0 rows are running means, and s_i = b m_i.
TYPED_TEST(AffineAttention, WithoutAScoreRowsAreRunningMeans) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const QkNorm norm : norms) {
    Case c = affine_case<T>({1, 1, 1, 40, 40, 4, 1}, {}, norm);
    c.alpha = {0};
    c.constant = {2};
    for (std::size_t j = 0; j < 40; ++j) c.v[j] = static_cast<double>(j);
    Attention<T, ExecSpace, Affine> call(c, {.causal = true});
    call.forward();
    const auto o = call.o.get();
    const auto s = call.denominator.get();
    for (std::size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(s[i], T(2) * static_cast<T>(i + 1));
      EXPECT_NEAR(o[i], static_cast<double>(i) / 2, 40 * std::numeric_limits<T>::epsilon());
    }
  }
}

// ---- refusals -----------------------------------------------------------------------------------

TEST(AffineRefusals, NameWhatIsWrong) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  const ExecSpace exec;
  const Problem p{1, 2, 1, 4, 4, 3, 2};
  const auto ask = [&](const Affine& variant, const Options& options, Pass pass = Pass::forward) {
    return [=] {
      const Problem at = pass == Pass::step ? Problem{1, 2, 1, 1, 1, 3, 2} : p;
      (void)workspace_size<float>(exec, variant, at, pass, options);
    };
  };
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  expect_refusal(ask({.a = 0.0, .b = 0.0}, {}), {"a = b = 0", "a or b other than 0"});
  expect_refusal(ask({.b = 0.0, .scale = 0.0}, {}), {"b = 0 and a score scale of 0"});
  expect_refusal(ask({.a = nan}, {}), {"a must be finite", "found nan"});
  expect_refusal(ask({.b = inf}, {}), {"b must be finite", "found inf"});
  expect_refusal(ask({.scale = inf}, {}), {"score scale", "finite", "found inf"});
  expect_refusal(ask({.scale = 1e300}, {}), {"score scale", "precision of the sums", "found 1e+300"});
  expect_refusal(ask({.a = 1e30, .scale = 1e30}, {}), {"a times the score scale", "found 1e+60"});
  expect_refusal(ask({.b = 1e200}, {}), {"b must be finite", "found 1e+200"});
  expect_refusal(ask({.norm_eps = 1e300}, {}), {"norm_eps", "found 1e+300"});
  expect_refusal(ask({}, {.dropout = {.p = 1e300}}), {"dropout p", "found 1e+300"});
  expect_refusal(ask({}, {.dropout = {.p = 0.1, .heads = std::int64_t(1) << 60}}), {"63 bits"});
  expect_refusal(ask({.norm_eps = -1}, {}), {"norm_eps", "not negative", "found -1"});
  expect_refusal(ask({.norm_eps = nan}, {}), {"norm_eps", "found nan"});
  expect_refusal(ask({.qk_norm = QkNorm::max}, {.causal = true}),
                 {"qk_norm max", "later tokens", "max_norm_sees_future"});
  EXPECT_NO_THROW(ask({.qk_norm = QkNorm::max}, {})());
  EXPECT_NO_THROW(ask({.qk_norm = QkNorm::max, .max_norm_sees_future = true}, {.causal = true})());
  expect_refusal(ask({.qk_norm = QkNorm::max, .max_norm_sees_future = true}, {}, Pass::step),
                 {"a step cannot know", "qk_norm l2"});
  for (const double bad : {-0.1, nan, inf})
    expect_refusal(ask({}, {.dropout = {.p = bad}}), {"dropout p", "not negative", "found"});
  for (const double bad : {-1.0, nan, inf})
    expect_refusal(ask({}, {.least_normaliser = bad}), {"least_normaliser", "not negative", "found"});
  expect_refusal(ask({}, {.normalise = false, .center_v = true}), {"center_v needs normalised rows"});
  const auto lln_clamp = [&] {
    (void)workspace_size<float>(exec, Lln{}, p, Pass::forward,
                                {.small_normaliser = SmallNormaliser::clamp});
  };
  expect_refusal(lln_clamp, {"lln", "cannot vanish", "clamp"});
}

TEST(AffineRefusals, OfPartsOfACall) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  Case c = affine_case<float>({1, 2, 1, 4, 4, 3, 2}, {}, QkNorm::l2);
  c.initial = StateValues{std::vector<double>(6, 1), std::vector<double>(3, 1), {}};
  c.wants_last = true;
  Attention<float, ExecSpace, Affine> call(c, {});
  const ExecSpace exec;
  Arena<ExecSpace> arena(call.workspace_bytes(Pass::backward) + call.workspace_bytes(Pass::forward));
  const auto with = [&](auto&& change, const Options& options = {}) {
    return [&, options] {
      auto in = call.inputs();
      auto saved = call.saved();
      change(in, saved);
      forward<float>(exec, call.variant(), in, saved, arena.workspace(), options);
    };
  };
  expect_refusal(with([](auto& in, auto&) { in.state.t = {}; }), {"t of the initial state", "(1, 1, 2)", "found nothing"});
  expect_refusal(with([](auto& in, auto&) { in.state.m = {}; }), {"m of the initial state", "(1)", "found nothing"});
  expect_refusal(with([](auto&, auto& saved) { saved.state.m = {}; }), {"m of the final state", "found nothing"});
  expect_refusal(with([](auto&, auto&) {}, {.center_v = true}), {"center_v", "states"});
  {
    const Affine largest{.qk_norm = QkNorm::max, .max_norm_sees_future = true};
    expect_refusal(
        [&] { forward<float>(exec, largest, call.inputs(), call.saved(), arena.workspace()); },
        {"another largest norm", "qk_norm l2", "initial state"});
  }
  expect_refusal([&] { LinAttn::check(exec, call.saved()); }, {"Saved::smallest", "found nothing"});
  const Records<ExecSpace> records("test::records", 1, 3);
  expect_refusal(with([&](auto&, auto& saved) { saved.smallest = records; }), {"smallest", "(1, 2)", "(1, 3)"});
  const Records<ExecSpace> fits("test::records", 1, 2);
  expect_refusal(with([&](auto&, auto& saved) { saved.smallest = fits; },
                      {.small_normaliser = SmallNormaliser::ignore}),
                 {"smallest row sum", "small_normaliser is check"});
  expect_refusal(with([&](auto&, auto& saved) { saved.centred = call.o.ref(); }), {"centred", "center_v"});
  const auto gradient = [&](auto&& change) {
    return [&] {
      Gradients<ExecSpace, float> gradients;
      change(gradients);
      backward<float>(exec, call.variant(), call.inputs(), call.saved(), call.cotangents(), gradients,
                      arena.workspace());
    };
  };
  expect_refusal(gradient([&](auto& g) { g.constant = call.d_beta.ref(); }),
                 {"b must have shape (2)", "found (0)"});
  expect_refusal(gradient([&](auto& g) { g.key_parameter = call.d_scale.ref(); }),
                 {"affine has no key parameter"});
  expect_refusal(gradient([&](auto& g) {
                   g.state = {.S = call.d_initial.S.ref(), .z = call.d_initial.z.ref()};
                 }),
                 {"gradient of t", "found nothing"});
}

}  // namespace
