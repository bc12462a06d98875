// SPDX-License-Identifier: BSD-3-Clause

// What only exact attention has: log-sum-exps, ways to meet pairs of tiles, long rows, decoding over a cache. The rest
// is tested as of every variant.

#include <cmath>
#include <limits>

#include "placed_tensor.hpp"
#include "random.hpp"
#include "refusal.hpp"
#include "seed.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// q, k, v and dO of a problem in memory, and what a forward and a backward pass leave.
template <class T, class ExecSpace>
struct Exact {
  using A = accumulator_t<T>;

  explicit Exact(const Problem& p, double spread = 1) : problem(p) {
    Random random(seed() + static_cast<std::uint64_t>(p.nk));
    const auto numbers = [&](auto& tensor, double deviation) {
      auto x = random.normals(tensor.count(), 0, deviation);
      for (double& entry : x) entry = static_cast<double>(static_cast<T>(entry));
      tensor.set(x);
    };
    numbers(q, spread);
    numbers(k, 1);
    numbers(v, 1);
    numbers(d_o, 1);
  }

  Inputs<ExecSpace, T> inputs() const { return {.q = q.input(), .k = k.input(), .v = v.input()}; }
  Saved<ExecSpace, T> saved() const { return {.o = o.ref(), .denominator = logsum.ref()}; }
  Gradients<ExecSpace, T> gradients() const { return {.q = d_q.ref(), .k = d_k.ref(), .v = d_v.ref()}; }

  void run(const Options& options, const Softmax& softmax = {}) {
    forward<T>(exec, softmax, inputs(), saved(), options);
    backward<T>(exec, softmax, inputs(), saved(), d_o.input(), gradients(), options);
  }

  Problem problem;
  ExecSpace exec{};
  PlacedTensor<T, 4, ExecSpace> q{{problem.batch, problem.heads, problem.nq, problem.d}, Layout::right};
  PlacedTensor<T, 4, ExecSpace> k{{problem.batch, problem.kv_heads, problem.nk, problem.d}, Layout::right};
  PlacedTensor<T, 4, ExecSpace> v{{problem.batch, problem.kv_heads, problem.nk, problem.dv}, Layout::right};
  PlacedTensor<T, 4, ExecSpace> o{{problem.batch, problem.heads, problem.nq, problem.dv}, Layout::right};
  PlacedTensor<T, 4, ExecSpace> d_o{o.extents(), Layout::right}, d_q{q.extents(), Layout::right},
      d_k{k.extents(), Layout::right}, d_v{v.extents(), Layout::right};
  PlacedTensor<A, 3, ExecSpace> logsum{{problem.batch, problem.heads, problem.nq}, Layout::right};
};

template <class C>
class ExactAttention : public ::testing::Test {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;
};
TYPED_TEST_SUITE(ExactAttention, OverScalars, ConfigName);

TYPED_TEST(ExactAttention, KeepsTheLogarithmOfTheRowSum) {
  using T = typename TestFixture::T;
  const Problem p{1, 2, 1, 70, 150, 12, 5};
  Exact<T, typename TestFixture::ExecSpace> exact(p);
  exact.run({.causal = true});
  const auto q = exact.q.get(), k = exact.k.get();
  const auto found = exact.logsum.get();
  for (std::int64_t h = 0; h < p.heads; ++h)
    for (std::int64_t i = 0; i < p.nq; ++i) {
      double sum = 0, largest = 0;
      for (std::int64_t j = 0; j <= i + p.nk - p.nq; ++j) {
        double score = 0;
        for (std::int64_t d = 0; d < p.d; ++d)
          score += static_cast<double>(q[static_cast<std::size_t>((h * p.nq + i) * p.d + d)]) *
                   static_cast<double>(k[static_cast<std::size_t>(j * p.d + d)]);
        score /= std::sqrt(12.0);
        largest = std::max(largest, std::abs(score));
        sum += std::exp(score);
      }
      // D products and sums of a score, and a few roundings of its size in the exponential and the logarithm
      const double u = std::numeric_limits<T>::epsilon() / 2, bound = (2 * 12 + 8) * u * (largest + std::log(sum) + 1);
      EXPECT_NEAR(static_cast<double>(found[static_cast<std::size_t>(h * p.nq + i)]), std::log(sum), bound)
          << h << " " << i;
    }
}

TYPED_TEST(ExactAttention, OneScoreScaleOfRowsThatSeeNothing) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{2, 2, 2, 5, 0, 4, 3};
  Exact<T, ExecSpace> exact(p);
  exact.run({});
  for (const auto x : exact.o.get()) EXPECT_EQ(x, T(0));
  for (const auto x : exact.d_q.get()) EXPECT_EQ(x, T(0));
  for (const auto x : exact.logsum.get()) EXPECT_EQ(x, -std::numeric_limits<accumulator_t<T>>::infinity());
}

TYPED_TEST(ExactAttention, TheScaleIsThatOfTheScores) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{1, 1, 1, 90, 90, 8, 4};
  Exact<T, ExecSpace> given(p), scaled(p);
  given.run({}, Softmax{.scale = 0.25});
  auto q = scaled.q.get();  // powers of two and sqrt(16) change no bit
  std::vector<double> larger;
  for (const auto x : q) larger.push_back(static_cast<double>(x) * 0.25);
  scaled.q.set(larger);
  scaled.run({}, Softmax{.scale = 1});
  EXPECT_TRUE(same_bits(given.o.get(), scaled.o.get()));
  EXPECT_TRUE(same_bits(given.d_v.get(), scaled.d_v.get()));
}

// One head is shared out among the threads of OpenMP by rows and by keys; Serial meets each pair of tiles once.
TYPED_TEST(ExactAttention, PairsOfTilesMetOnceOrTwiceGiveTheSameBits) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  for (const bool causal : {false, true})
    for (const Problem& p : {Problem{1, 1, 1, 300, 300, 32, 32}, Problem{1, 2, 1, 131, 250, 20, 9}}) {
      if (!causal && p.nq == 131) continue;
      const Options options{.causal = causal};
      Exact<T, ExecSpace> exact(p);
      const auto plan_of = [&](const Problem& problem) {
        return plan<T>(exact.exec, Softmax{}, problem, Pass::backward, options);
      };
      Problem many = p;
      many.batch = 64;
      EXPECT_EQ(plan_of(many).pairs, LinAttn::detail::is_host_space_v<ExecSpace>);
      exact.run(options);
#if defined(KOKKOS_ENABLE_SERIAL)
      Exact<T, Kokkos::Serial> once(p);
      EXPECT_TRUE(plan<T>(once.exec, Softmax{}, p, Pass::backward, options).pairs);
      once.run(options);
      if (plan_of(p).chunk == plan<T>(once.exec, Softmax{}, p, Pass::backward, options).chunk &&
          LinAttn::detail::is_host_space_v<ExecSpace>) {
        EXPECT_TRUE(same_bits(exact.d_q.get(), once.d_q.get()));
        EXPECT_TRUE(same_bits(exact.d_k.get(), once.d_k.get()));
        EXPECT_TRUE(same_bits(exact.d_v.get(), once.d_v.get()));
      }
#endif
      // without gradients of keys there are no pairs to meet
      Exact<T, ExecSpace> rows(p);
      forward<T>(rows.exec, Softmax{}, rows.inputs(), rows.saved(), options);
      backward<T>(rows.exec, Softmax{}, rows.inputs(), rows.saved(), rows.d_o.input(), {.q = rows.d_q.ref()}, options);
      EXPECT_TRUE(same_bits(exact.d_q.get(), rows.d_q.get()));
      backward<T>(rows.exec, Softmax{}, rows.inputs(), rows.saved(), rows.d_o.input(),
                  {.k = rows.d_k.ref(), .v = rows.d_v.ref()}, options);
      EXPECT_TRUE(same_bits(exact.d_k.get(), rows.d_k.get()));
      EXPECT_TRUE(same_bits(exact.d_v.get(), rows.d_v.get()));
    }
}

TYPED_TEST(ExactAttention, LargeScoresOverflowNothing) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{1, 1, 1, 200, 200, 16, 16};
  Exact<T, ExecSpace> exact(p, 1e4);
  exact.run({.causal = true});
  for (auto* tensor : {&exact.o, &exact.d_q, &exact.d_k, &exact.d_v})
    for (const auto x : tensor->get()) ASSERT_TRUE(std::isfinite(x));
}

// Weights are exp(scale x - L) of numbers without digits behind the point: they must not grow beyond 1.
TYPED_TEST(ExactAttention, WeightsOfHugeScoresAreAtMostOne) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{1, 1, 1, 200, 200, 64, 16};
  Exact<T, ExecSpace> exact(p, std::is_same_v<T, float> ? 1e10 : 1e20);
  exact.run({});
  const auto d_o = exact.d_o.get(), d_v = exact.d_v.get();
  for (std::int64_t j = 0; j < p.dv; ++j) {
    double most = 0;
    for (std::int64_t i = 0; i < p.nq; ++i)
      most += std::abs(static_cast<double>(d_o[static_cast<std::size_t>(i * p.dv + j)]));
    for (std::int64_t i = 0; i < p.nk; ++i)
      EXPECT_LE(std::abs(static_cast<double>(d_v[static_cast<std::size_t>(i * p.dv + j)])), most * 1.001);
  }
}

TYPED_TEST(ExactAttention, ARowThatIsNoNumberStaysNone) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  for (const std::int64_t n : {100, 200}) {
    const Problem p{1, 1, 1, n, n, 4, 3};
    Exact<T, ExecSpace> exact(p);
    auto q = exact.q.get();
    q[4 * 7 + 2] = std::numeric_limits<T>::quiet_NaN();
    exact.q.set(q);
    exact.run({});
    EXPECT_TRUE(std::isnan(exact.logsum.get()[7]));
    EXPECT_TRUE(std::isnan(exact.o.get()[3 * 7]));
    EXPECT_TRUE(std::isnan(exact.d_v.get()[0]));  // every value has a weight in that row
    EXPECT_FALSE(std::isnan(exact.o.get()[3 * 8]));
  }
}

#if defined(KOKKOS_ENABLE_SERIAL)
TEST(ExactAttentionInFloat, LongRowsAreAsPreciseAsShortOnes) {
  for (const std::int64_t nk : {257, 4096, 131072}) {
    const Problem p{1, 1, 1, 8, nk, 32, 16};
    Exact<float, Kokkos::Serial> single(p);
    single.run({.causal = true});
    Exact<double, Kokkos::Serial> oracle(p);
    const auto same = [](auto& from, auto& to) {
      const auto x = from.get();
      to.set(std::vector<double>(x.begin(), x.end()));
    };
    same(single.q, oracle.q);
    same(single.k, oracle.k);
    same(single.v, oracle.v);
    same(single.d_o, oracle.d_o);
    oracle.run({.causal = true});
    const auto error = [](auto& found, auto& expected) {
      const auto x = found.get();
      const auto y = expected.get();
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        difference = std::max(difference, std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
        size = std::max(size, std::abs(static_cast<double>(y[i])));
      }
      return difference / size;
    };
    EXPECT_LT(error(single.o, oracle.o), 1e-6) << nk;
    EXPECT_LT(error(single.d_v, oracle.d_v), 2e-6) << nk;  // weights, with the rounding of L, as they are
    std::cout << "N = " << nk << ": o " << error(single.o, oracle.o) << " dq " << error(single.d_q, oracle.d_q)
              << " dk " << error(single.d_k, oracle.d_k) << " dv " << error(single.d_v, oracle.d_v) << "\n";
  }
}
#endif

// ---- decoding -----------------------------------------------------------------------------------

/// A cache and the rows of one token.
template <class T, class ExecSpace>
struct Decoder {
  Decoder(const Problem& p, std::int64_t capacity, Layout layout = Layout::right)
      : problem(p),
        k{{p.batch, p.kv_heads, capacity, p.d}, layout},
        v{{p.batch, p.kv_heads, capacity, p.dv}, layout},
        length{{p.batch}, Layout::right},
        q{{p.batch, p.heads, p.d}, Layout::right},
        new_k{{p.batch, p.kv_heads, p.d}, Layout::right},
        new_v{{p.batch, p.kv_heads, p.dv}, Layout::right},
        o{{p.batch, p.heads, p.dv}, Layout::right},
        mask{{p.batch}, Layout::right} {
    length.set(std::vector<std::int64_t>(static_cast<std::size_t>(p.batch), 0));
    Problem extents = p;
    extents.nq = 1;
    extents.nk = capacity;
    bytes = workspace_size<T>(exec, Softmax{}, extents, Pass::step);
    workspace = decltype(workspace)("workspace", bytes);
  }
  KeyValueCache<ExecSpace, T> cache() const { return {.k = k.ref(), .v = v.ref(), .length = length.ref()}; }
  Token<ExecSpace, T> token(bool masked) const {
    Token<ExecSpace, T> token{.q = q.input(), .k = new_k.input(), .v = new_v.input()};
    if (masked) token.key_mask = mask.input();
    return token;
  }
  void step(bool masked = false) {
    LinAttn::step<T>(exec, Softmax{}, token(masked), cache(), o.ref(), workspace);
    exec.fence();
  }

  Problem problem;
  ExecSpace exec{};
  PlacedTensor<T, 4, ExecSpace> k, v;
  PlacedTensor<std::int64_t, 1, ExecSpace> length;
  PlacedTensor<T, 3, ExecSpace> q, new_k, new_v, o;
  PlacedTensor<std::uint8_t, 1, ExecSpace> mask;
  std::size_t bytes = 0;
  Kokkos::View<std::byte*, typename ExecSpace::memory_space> workspace;
};

/// Row n of each (batch, head) of a tensor (B,H,N,D).
template <class X>
std::vector<double> row_of(const std::vector<X>& x, std::int64_t rows, std::int64_t n, std::int64_t columns) {
  std::vector<double> result;
  for (std::int64_t b = 0; b * rows * columns < static_cast<std::int64_t>(x.size()); ++b)
    for (std::int64_t j = 0; j < columns; ++j)
      result.push_back(static_cast<double>(x[static_cast<std::size_t>((b * rows + n) * columns + j)]));
  return result;
}

TYPED_TEST(ExactAttention, StepsAreTheRowsOfACausalPass) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const std::int64_t n = 1100;  // more than one split
  const Problem p{2, 4, 2, n, n, 9, 7};
  Exact<T, ExecSpace> exact(p);
  exact.run({.causal = true});
  const auto q = exact.q.get(), k = exact.k.get(), v = exact.v.get(), expected = exact.o.get();
  for (const Layout layout : {Layout::right, Layout::gaps}) {
    Decoder<T, ExecSpace> decoder(p, n, layout);
    double worst = 0;
    for (std::int64_t t = 0; t < n; ++t) {
      decoder.q.set(row_of(q, n, t, p.d));
      decoder.new_k.set(row_of(k, n, t, p.d));
      decoder.new_v.set(row_of(v, n, t, p.dv));
      decoder.step();
      const auto found = decoder.o.get();
      const auto wanted = row_of(expected, n, t, p.dv);
      for (std::size_t i = 0; i < wanted.size(); ++i)
        worst = std::max(worst, std::abs(static_cast<double>(found[i]) - wanted[i]));
    }
    EXPECT_LT(worst, 64 * std::numeric_limits<T>::epsilon());  // means of values of size 4, a few roundings each
    EXPECT_TRUE(same_bits(decoder.k.get(), k));
    EXPECT_EQ(decoder.length.get(), (std::vector<std::int64_t>{n, n}));
    EXPECT_TRUE(decoder.k.guards_intact() && decoder.v.guards_intact() && decoder.o.guards_intact());
  }
}

TYPED_TEST(ExactAttention, HiddenTokensAreAnsweredAndNotKept) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{2, 1, 1, 1, 1, 2, 1};
  Decoder<T, ExecSpace> decoder(p, 4);
  decoder.q.set(std::vector<double>{1, 0, 1, 0});
  decoder.new_k.set(std::vector<double>{0, 0, 0, 0});
  decoder.new_v.set(std::vector<double>{3, 5});
  decoder.mask.set(std::vector<std::uint8_t>{1, 0});
  decoder.step(true);
  EXPECT_EQ(decoder.length.get(), (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(decoder.o.get(), (std::vector<T>{3, 0}));  // the second sequence sees no key
  decoder.new_v.set(std::vector<double>{7, 9});
  decoder.mask.set(std::vector<std::uint8_t>{0, 1});
  decoder.step(true);
  EXPECT_EQ(decoder.length.get(), (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(decoder.o.get(), (std::vector<T>{3, 9}));
  const auto v = decoder.v.get();  // four places for each sequence, all of them NaN at first
  EXPECT_EQ(v[0], T(3));
  EXPECT_EQ(v[4], T(9));
  EXPECT_TRUE(std::isnan(v[1]) && std::isnan(v[5]));
}

TYPED_TEST(ExactAttention, AFullCacheIsLeftAloneAndAnswersNaN) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{2, 1, 1, 1, 1, 2, 1};
  Decoder<T, ExecSpace> decoder(p, 1);
  decoder.k.set(std::vector<double>{1, 2, 3, 4});
  decoder.v.set(std::vector<double>{8, 6});
  decoder.length.set(std::vector<std::int64_t>{1, 0});
  decoder.q.set(std::vector<double>{1, 0, 1, 0});
  decoder.new_k.set(std::vector<double>{9, 9, 5, 5});
  decoder.new_v.set(std::vector<double>{2, 4});
  decoder.step();
  const auto o = decoder.o.get();
  EXPECT_TRUE(std::isnan(o[0]));
  EXPECT_EQ(o[1], T(4));
  EXPECT_EQ(decoder.k.get(), (std::vector<T>{1, 2, 5, 5}));
  EXPECT_EQ(decoder.length.get(), (std::vector<std::int64_t>{1, 1}));
}

TYPED_TEST(ExactAttention, StepsRefuseWhatDoesNotFit) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{2, 4, 2, 1, 1, 3, 5};
  Decoder<T, ExecSpace> decoder(p, 6);
  const auto step_with = [&](const KeyValueCache<ExecSpace, T>& cache, const Workspace<ExecSpace>& workspace) {
    return [&, cache, workspace] {
      step<T>(decoder.exec, Softmax{}, decoder.token(false), cache, decoder.o.ref(), workspace);
    };
  };
  const auto cache = decoder.cache();
  auto other = cache;
  other.v = decoder.k.ref();
  expect_refusal(step_with(other, decoder.workspace), {"v of the cache", "(2, 2, 6, 5)", "(2, 2, 6, 3)"});
  other = cache;
  other.length = {};
  expect_refusal(step_with(other, decoder.workspace), {"length of a cache"});
  const Workspace<ExecSpace> small(
      Kokkos::subview(decoder.workspace, std::pair<std::size_t, std::size_t>(0, decoder.bytes - 1)));
  expect_refusal(step_with(cache, small),
                 {"workspace", std::to_string(decoder.bytes), std::to_string(decoder.bytes - 1)});
}

// ---- what is refused ----------------------------------------------------------------------------

TYPED_TEST(ExactAttention, RefusesWhatItHasNot) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const Problem p{1, 1, 1, 3, 3, 2, 2};
  Exact<T, ExecSpace> exact(p);
  const auto refuse = [&](const Softmax& softmax, const Options& options, const std::vector<std::string>& pieces) {
    expect_refusal([&] { forward<T>(exact.exec, softmax, exact.inputs(), exact.saved(), options); }, pieces);
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  refuse({.scale = -1}, {}, {"scale", "softmax", "positive", "-1"});
  refuse({.scale = nan}, {}, {"scale", "nan"});
  refuse({.scale = infinity}, {}, {"scale", "inf"});
  refuse({}, {.segments = -3}, {"segments", "-3"});
  refuse({}, {.tiles = -1}, {"tiles", "-1"});
  refuse({}, {.least_normaliser = nan}, {"least_normaliser"});
  if (sizeof(T) == 4) {
    refuse({.scale = 1e300}, {}, {"scale", "precision"});
    refuse({.scale = 1e-60}, {}, {"scale", "precision"});
  }
  refuse({}, {.normalise = false}, {"softmax", "without normalisation"});
  refuse({}, {.dropout = {.p = 0.1}}, {"softmax", "dropout"});
  refuse({}, {.small_normaliser = SmallNormaliser::clamp}, {"softmax", "clamp"});
  refuse({}, {.center_v = true}, {"softmax", "center_v"});
  refuse({}, {.chunk = -1}, {"chunk", "-1"});
  PlacedTensor<accumulator_t<T>, 4, ExecSpace> S{{1, 1, 2, 2}, Layout::right};
  auto saved = exact.saved();
  saved.state.S = S.ref();
  expect_refusal([&] { forward<T>(exact.exec, Softmax{}, exact.inputs(), saved); },
                 {"softmax", "final state", "KeyValueCache"});
  saved = exact.saved();
  saved.linear = exact.d_q.ref();
  expect_refusal([&] { forward<T>(exact.exec, Softmax{}, exact.inputs(), saved); }, {"softmax", "Saved::linear"});
  forward<T>(exact.exec, Softmax{}, exact.inputs(), exact.saved());
  saved = exact.saved();
  saved.denominator = {};
  expect_refusal(
      [&] { backward<T>(exact.exec, Softmax{}, exact.inputs(), saved, exact.d_o.input(), exact.gradients()); },
      {"denominator"});
  PlacedTensor<double, 1, ExecSpace> alpha{{1}, Layout::right};
  auto gradients = exact.gradients();
  gradients.query_parameter = alpha.ref();
  expect_refusal(
      [&] { backward<T>(exact.exec, Softmax{}, exact.inputs(), exact.saved(), exact.d_o.input(), gradients); },
      {"softmax", "query parameter"});
}

}  // namespace
