// SPDX-License-Identifier: BSD-3-Clause

// States that go in and come out: a sequence in parts is the sequence, forward and backward.

#include <numeric>

#include "attention_case.hpp"
#include "finite_difference.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// `count` numbers from the `begin`-th on of every head of a row-major tensor.
template <class T>
std::vector<T> rows_of(const std::vector<T>& x, std::int64_t heads, std::int64_t begin,
                       std::int64_t count) {
  std::vector<T> result;
  const auto size = static_cast<std::int64_t>(x.size()) / heads;
  for (std::int64_t h = 0; h < heads; ++h)
    result.insert(result.end(), x.begin() + h * size + begin, x.begin() + h * size + begin + count);
  return result;
}

/// The call with queries [q0, q1) and keys [k0, k1) of a case.
Case part_of(const Case& c, std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) {
  const Problem& p = c.problem;
  Case part = c;
  part.problem.nq = q1 - q0;
  part.problem.nk = k1 - k0;
  part.q = rows_of(c.q, p.batch * p.heads, q0 * p.d, (q1 - q0) * p.d);
  part.d_o = rows_of(c.d_o, p.batch * p.heads, q0 * p.dv, (q1 - q0) * p.dv);
  part.k = rows_of(c.k, p.batch * p.kv_heads, k0 * p.d, (k1 - k0) * p.d);
  part.v = rows_of(c.v, p.batch * p.kv_heads, k0 * p.dv, (k1 - k0) * p.dv);
  return part;
}

/// Puts the rows of two parts behind each other, head by head.
template <class T>
std::vector<T> joined(const std::vector<T>& first, const std::vector<T>& second,
                      std::int64_t heads) {
  std::vector<T> result;
  const auto a = static_cast<std::int64_t>(first.size()) / heads;
  const auto b = static_cast<std::int64_t>(second.size()) / heads;
  for (std::int64_t h = 0; h < heads; ++h) {
    result.insert(result.end(), first.begin() + h * a, first.begin() + (h + 1) * a);
    result.insert(result.end(), second.begin() + h * b, second.begin() + (h + 1) * b);
  }
  return result;
}

template <class T>
StateValues last_state(const Outcome<T>& outcome) {
  return {{outcome.S.begin(), outcome.S.end()},
          {outcome.z.begin(), outcome.z.end()},
          outcome.shift,
          {outcome.t.begin(), outcome.t.end()},
          outcome.m};
}

/// forward() with the final state in the memory of the initial one gives what it gives beside it.
template <class T, class ExecSpace, Variant V>
void expect_in_place(const Case& c, const Options& options) {
  const auto separate = attend<T, ExecSpace, V>(c, options);
  Attention<T, ExecSpace, V> in_place(c, options);
  Arena<ExecSpace> arena(in_place.workspace_bytes(Pass::forward));
  auto saved = in_place.saved();
  saved.state = in_place.initial.ref();
  const ExecSpace exec;
  forward<T>(exec, in_place.variant(), in_place.inputs(), saved, arena.workspace(), options);
  exec.fence();
  EXPECT_TRUE(same_bits(in_place.o.get(), separate.o));
  EXPECT_TRUE(same_bits(in_place.initial.S.get(), separate.S));
  EXPECT_TRUE(same_bits(in_place.initial.z.get(), separate.z));
  if (is_scaled<V>) {
    EXPECT_EQ(in_place.initial.shift.get(), separate.shift);
  }
  if (has_constant<V>) {
    EXPECT_TRUE(same_bits(in_place.initial.t.get(), separate.t));
    EXPECT_EQ(in_place.initial.m.get(), separate.m);
  }
}

template <class C>
class StateFlow : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  /// Forward of both parts, then backward of both in reverse, joined.
  static Outcome<T> in_two_parts(const Case& first, const Case& second, const Options& options) {
    return in_two_parts(first, second, options, options);
  }
  /// The same where the second part has options of its own.
  static Outcome<T> in_two_parts(Case first, Case second, const Options& options,
                                 const Options& later) {
    first.wants_last = true;
    Attention<T, ExecSpace, V> before(first, options);
    before.forward();
    second.initial = last_state(before.outcome());
    const auto after = attend<T, ExecSpace, V>(second, later);
    first.last_cotangent = StateValues{{after.d_S.begin(), after.d_S.end()},
                                       {after.d_z.begin(), after.d_z.end()},
                                       {},
                                       {after.d_t.begin(), after.d_t.end()}};
    const auto earlier = attend<T, ExecSpace, V>(first, options);
    const std::int64_t q_heads = first.problem.batch * first.problem.heads;
    const std::int64_t k_heads = first.problem.batch * first.problem.kv_heads;
    Outcome<T> result;
    result.o = joined(earlier.o, after.o, q_heads);
    result.q = joined(earlier.q, after.q, q_heads);
    result.k = joined(earlier.k, after.k, k_heads);
    result.v = joined(earlier.v, after.v, k_heads);
    const auto sum = [](std::vector<double> a, const std::vector<double>& b) {
      for (std::size_t n = 0; n < a.size(); ++n) a[n] += b[n];
      return a;
    };
    result.alpha = sum(earlier.alpha, after.alpha);
    result.beta = sum(earlier.beta, after.beta);
    result.constant = sum(earlier.constant, after.constant);
    result.scale = sum(earlier.scale, after.scale);
    return result;
  }
};

TYPED_TEST_SUITE(StateFlow, OverVariants, ConfigName);

// B43, B44: a sequence cut anywhere gives what one call gives, gradients included.
TYPED_TEST(StateFlow, B44CutSequenceIsTheSequence) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Problem p{2, 4, 2, 150, 150, 4, 3};
  for (const bool normalise : {true, false}) {
    const Options options{.causal = true, .normalise = normalise};
    const Case c = random_case<T, V>(p, options);
    const auto expected = expected_of<T, V>(c, options);
    for (const std::int64_t cut : {1, 63, 64, 128, 149})
      for (const int segments : {1, 2}) {
        SCOPED_TRACE(cut);
        Options with = options;
        with.segments = segments;
        const auto found =
            this->in_two_parts(part_of(c, 0, cut, 0, cut), part_of(c, cut, 150, cut, 150), with);
        EXPECT_TRUE((agrees<T, V>(c, found, expected, 64)));
      }
  }
}

// Affine attention without norms, with noise that knows where a part begins.
TYPED_TEST(StateFlow, AffinePartsWithNoise) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  if constexpr (!std::is_same_v<V, Affine>) {
    GTEST_SKIP() << "settings of affine attention";
  } else {
    const Problem p{2, 4, 2, 90, 90, 4, 3};
    Options options{.causal = true, .dropout = {.p = 0.3, .seed = 4}};
    Case c = random_case<T, V>(p, options);
    c.affine = {.scale = 0.2, .qk_norm = QkNorm::none};
    const auto expected = expected_of<T, V>(c, options);
    options.dropout.queries = 90;
    Options later = options;
    later.dropout.first_query = 40;
    const auto found =
        this->in_two_parts(part_of(c, 0, 40, 0, 40), part_of(c, 40, 90, 40, 90), options, later);
    EXPECT_TRUE((agrees<T, V>(c, found, expected, 64)));
  }
}

// Without a mask a part of the keys may be absorbed before any query is known.
TYPED_TEST(StateFlow, CutKeysWithoutAMask) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Problem p{2, 2, 1, 40, 100, 4, 3};
  for (const int segments : {1, 2}) {
    const Options options{.normalise = true, .segments = segments};
    const Case c = random_case<T, V>(p, options);
    const auto found =
        this->in_two_parts(part_of(c, 0, 0, 0, 70), part_of(c, 0, 40, 70, 100), options);
    EXPECT_TRUE((agrees<T, V>(c, found, expected_of<T, V>(c, options), 64)));
  }
}

// B43: token by token, as a decoder does it.
TYPED_TEST(StateFlow, B43TokenByToken) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 4, 2, 40, 40, 5, 3};
  const Options options{.causal = true, .normalise = true};
  const Case c = random_case<T, V>(p, options);
  const auto expected = expected_of<T, V>(c, options);
  std::optional<StateValues> state;
  std::vector<T> o;
  for (std::int64_t t = 0; t < p.nq; ++t) {
    Case step = part_of(c, t, t + 1, t, t + 1);
    step.initial = state;
    step.wants_last = true;
    Attention<T, ExecSpace, V> attention(step, options);
    attention.forward();
    const auto outcome = attention.outcome();
    state = last_state(outcome);
    o = joined(o, outcome.o, p.heads);
  }
  const auto counts = reference::rounding_counts(p, expected.settings, 1);
  EXPECT_TRUE(within_bounds<T>("o", o, expected.o, expected.magnitude.o, 2 * counts.o));
}

// The state after the last key holds sum phi(k) v and sum phi(k) over visible keys, at any cut.
TYPED_TEST(StateFlow, LastStateIsTheSum) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 2, 50, 90, 4, 3};
  if (features_of_row<V>(p.d) != p.d) GTEST_SKIP() << "features are not of entries";
  for (const bool causal : {false, true})
    for (const bool masked : {false, true})
      for (const int segments : {1, 3}) {
        const Options options{.causal = causal, .chunk = 16, .segments = segments};
        SCOPED_TRACE(describe(p, options));
        Case c = random_case<T, V>(p, options);
        c.wants_last = true;
        if (masked)
          for (std::int64_t n = 0; n < p.batch * p.nk; ++n)
            c.key_mask.push_back(static_cast<std::uint8_t>(n % 3 != 0));
        Attention<T, ExecSpace, V> attention(c, options);
        attention.forward();
        const auto found = attention.outcome();
        // the reference's feature of a key, as its weight against a query that is 1 in one entry
        const auto kernel = reference::kernel_from_name(V::name);
        for (std::int64_t h = 0; h < p.batch * p.kv_heads; ++h)
          for (std::int64_t d = 0; d < p.d; ++d) {
            long double sum = 0, size = 0;
            std::vector<long double> values(static_cast<std::size_t>(p.dv)), sizes(values);
            const auto at = static_cast<std::size_t>(h * p.d + d);
            const int shift = is_scaled<V> ? found.shift[at] : 0;
            for (std::int64_t j = 0; j < p.nk; ++j) {
              const std::int64_t b = h / p.kv_heads;
              if (masked && c.key_mask[static_cast<std::size_t>(b * p.nk + j)] == 0) continue;
              const auto row = c.k.begin() + (h * p.nk + j) * p.d;
              const long double norm =
                  std::is_same_v<V, Affine> || std::is_same_v<V, Cosine>
                      ? std::sqrt(std::inner_product(row, row + p.d, row, 1e-6L))
                      : 1.0L;
              const long double x = row[d] / norm;
              const double rate =
                  c.beta.empty() ? 0 : c.beta[static_cast<std::size_t>(h % p.kv_heads)];
              const auto f = reference::detail::feature<long double>(kernel, rate, x);
              const long double phi =
                  is_scaled<V> ? std::exp(f.exponent.high + f.exponent.low - shift * std::log(2.0L))
                               : f.value;
              sum += phi;
              size += std::abs(phi);
              for (std::int64_t e = 0; e < p.dv; ++e) {
                const long double v = c.v[static_cast<std::size_t>((h * p.nk + j) * p.dv + e)];
                values[static_cast<std::size_t>(e)] += phi * v;
                sizes[static_cast<std::size_t>(e)] += std::abs(phi * v);
              }
            }
            const long double u = std::numeric_limits<T>::epsilon() / 2;
            EXPECT_LE(std::abs(found.z[at] - sum), 40 * u * size);
            for (std::int64_t e = 0; e < p.dv; ++e)
              EXPECT_LE(
                  std::abs(
                      found.S[at * static_cast<std::size_t>(p.dv) + static_cast<std::size_t>(e)] -
                      values[static_cast<std::size_t>(e)]),
                  40 * u * sizes[static_cast<std::size_t>(e)]);
          }
      }
}

// The state of no key changes no bit; without keys the state passes through with its bits; the
// caller's initial state is left alone, and may be the memory of the last one.
TYPED_TEST(StateFlow, IdentityAndPassage) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 4, 2, 40, 70, 4, 3};
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .chunk = 16, .segments = segments};
      SCOPED_TRACE(describe(p, options));
      Case c = random_case<T, V>(p, options);
      c.wants_last = true;
      const auto plain = attend<T, ExecSpace, V>(c, options);
      const std::size_t sums = plain.z.size(), values = plain.S.size();
      Case with = c;
      with.initial = StateValues{std::vector<double>(values), std::vector<double>(sums),
                                 std::vector<int>(plain.shift.size(), no_shift),
                                 std::vector<double>(plain.t.size()),
                                 std::vector<std::int64_t>(plain.m.size())};
      auto found = attend<T, ExecSpace, V>(with, options);
      found.d_S.clear();
      found.d_z.clear();
      found.d_t.clear();
      EXPECT_TRUE(same_bits(found, plain));

      Random random(seed());
      with.initial = StateValues{random.normals(static_cast<std::int64_t>(values)),
                                 random.uniforms(static_cast<std::int64_t>(sums), 1, 2),
                                 std::vector<int>(plain.shift.size(), 3),
                                 random.normals(static_cast<std::int64_t>(plain.t.size())),
                                 std::vector<std::int64_t>(plain.m.size(), 40)};
      round_to<T>(with.initial->S);
      round_to<T>(with.initial->z);
      round_to<T>(with.initial->t);
      Case nothing = part_of(with, 0, causal ? 0 : 40, 0, 0);
      const auto passed = attend<T, ExecSpace, V>(nothing, options);
      EXPECT_EQ(std::vector<double>(passed.S.begin(), passed.S.end()), with.initial->S);
      EXPECT_EQ(std::vector<double>(passed.z.begin(), passed.z.end()), with.initial->z);
      EXPECT_EQ(passed.shift, with.initial->shift);
      EXPECT_EQ(std::vector<double>(passed.t.begin(), passed.t.end()), with.initial->t);
      EXPECT_EQ(passed.m, with.initial->m);

      expect_in_place<T, ExecSpace, V>(with, options);
    }
}

// With windows, too, the final state may lie where the initial one was.
TYPED_TEST(StateFlow, InPlaceWithWindows) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 1, 40, 40, 40, 40};
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .chunk = 16, .segments = segments, .tiles = 2};
      SCOPED_TRACE(describe(p, options));
      Case c = random_case<T, V>(p, options);
      c.wants_last = true;
      Random random(seed());
      const std::int64_t sums = 2 * features_of_row<V>(p.d);
      c.initial = StateValues{random.normals(sums * p.dv), random.uniforms(sums, 1, 2),
                              std::vector<int>(static_cast<std::size_t>(is_scaled<V> ? sums : 0), 3)};
      round_to<T>(c.initial->S);
      round_to<T>(c.initial->z);
      ASSERT_EQ((Attention<T, ExecSpace, V>(c, options).plan(Pass::forward).tiles), 2);
      expect_in_place<T, ExecSpace, V>(c, options);
    }
}

// States in any memory layout.
TYPED_TEST(StateFlow, AnyLayout) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 1, 40, 40, 4, 3};
  for (const int segments : {1, 2}) {
    const Options options{.causal = true, .chunk = 16, .segments = segments};
    Case c = random_case<T, V>(p, options);
    c.wants_last = true;
    Random random(seed());
    const std::int64_t sums = 2 * features_of_row<V>(p.d);
    c.initial = StateValues{random.normals(sums * p.dv), random.uniforms(sums, 1, 2),
                            std::vector<int>(static_cast<std::size_t>(is_scaled<V> ? sums : 0), -2)};
    c.last_cotangent = StateValues{random.normals(sums * p.dv), random.normals(sums), {}};
    const auto expected = attend<T, ExecSpace, V>(c, options);
    for (const Layout layout : {Layout::left, Layout::transposed, Layout::fused, Layout::gaps}) {
      Arrangement at;
      at.state = layout;
      at.d_state = layout;
      EXPECT_TRUE(same_bits(attend<T, ExecSpace, V>(c, options, at), expected))
          << to_string(layout);
    }
  }
}

// A state for each packed member.
TYPED_TEST(StateFlow, PackedMembersHaveStatesOfTheirOwn) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true, .normalise = true};
  // members of 20 and 30 tokens: first 8 and 17 of each, then the rest
  const Case c = random_case<T, V>({1, 2, 1, 50, 50, 4, 3}, options);
  const auto piece = [&](std::int64_t a0, std::int64_t a1, std::int64_t b0, std::int64_t b1) {
    const Case a = part_of(c, a0, a1, a0, a1), b = part_of(c, b0, b1, b0, b1);
    Case both = a;
    both.problem.nq = both.problem.nk = a1 - a0 + b1 - b0;
    both.q = joined(a.q, b.q, 2);
    both.d_o = joined(a.d_o, b.d_o, 2);
    both.k = joined(a.k, b.k, 1);
    both.v = joined(a.v, b.v, 1);
    pack(both, {a1 - a0, b1 - b0}, {a1 - a0, b1 - b0});
    return both;
  };
  Case whole = c;
  pack(whole, {20, 30}, {20, 30});
  const auto expected = attend<T, ExecSpace, V>(whole, options);
  const Case first = piece(0, 8, 20, 37), second = piece(8, 20, 37, 50);
  Case with_last = first;
  with_last.wants_last = true;
  Attention<T, ExecSpace, V> before(with_last, options);
  before.forward();
  Case continued = second;
  continued.initial = last_state(before.outcome());
  const auto after = attend<T, ExecSpace, V>(continued, options);
  const auto reference = expected_of<T, V>(whole, options);
  const auto& magnitude = reference.magnitude;
  const auto counts = reference::rounding_counts(whole.problem, reference.settings, 64);
  const auto rest = [&](const auto& x) {  // tokens 8..19 and 37..49 of every query head
    return joined(rows_of(x, 2, 8 * 3, 12 * 3), rows_of(x, 2, 37 * 3, 13 * 3), 2);
  };
  using Real = oracle_t<T>;
  EXPECT_TRUE(within_bounds<T>("o", after.o,
                               rest(std::vector<Real>(expected.o.begin(), expected.o.end())),
                               rest(magnitude.o), 2 * counts.o));
}

// B11: without normalisation dS0 = dST + sum_i scale q_i dO_i^T, dz0 = dzT.
TEST(StateFlowClosedForm, B11GradientOfTheInitialState) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  const Problem p{1, 1, 1, 200, 200, 3, 2};
  for (const int segments : {1, 3}) {
    const Options options{.causal = true, .scale = 0.5, .segments = segments};
    Case c = random_case<double, Identity>(p, options);
    Random random(seed());
    c.initial = StateValues{random.normals(6), random.normals(3), {}};
    c.last_cotangent = StateValues{random.normals(6), random.normals(3), {}};
    const auto found = attend<double, ExecSpace, Identity>(c, options);
    for (std::size_t d = 0; d < 3; ++d) {
      EXPECT_EQ(found.d_z[d], c.last_cotangent->z[d]);
      for (std::size_t e = 0; e < 2; ++e) {
        long double sum = c.last_cotangent->S[2 * d + e];
        for (std::size_t i = 0; i < 200; ++i) sum += 0.5L * c.q[3 * i + d] * c.d_o[2 * i + e];
        EXPECT_NEAR(found.d_S[2 * d + e], static_cast<double>(sum), 1e-13);
      }
    }
  }
}

template <class C>
class StateGradients : public ::testing::Test {
 public:
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  /// sum o dO + sum S dS + sum z dz, the last state brought to the shifts `at`.
  static double loss(const Case& c, const Options& options, const std::vector<int>& at) {
    Attention<double, ExecSpace, V> attention(c, options);
    attention.forward();
    const auto outcome = attention.outcome();
    long double sum = 0;
    for (std::size_t n = 0; n < outcome.o.size(); ++n)
      sum += static_cast<long double>(outcome.o[n]) * c.d_o[n];
    const std::size_t dv = static_cast<std::size_t>(c.problem.dv);
    for (std::size_t n = 0; n < outcome.z.size(); ++n) {
      const long double factor = is_scaled<V> ? std::ldexp(1.0L, outcome.shift[n] - at[n]) : 1.0L;
      sum += factor * outcome.z[n] * c.last_cotangent->z[n];
      for (std::size_t e = 0; e < dv; ++e)
        sum += factor * outcome.S[n * dv + e] * c.last_cotangent->S[n * dv + e];
    }
    for (std::size_t n = 0; n < outcome.t.size(); ++n)
      sum += static_cast<long double>(outcome.t[n]) * c.last_cotangent->t[n];
    return static_cast<double>(sum);
  }
};

TYPED_TEST_SUITE(StateGradients, OverVariantsInDouble, ConfigName);

// B19: gradients through states on both sides, from one token on, by differences.
TYPED_TEST(StateGradients, B19EveryCoordinate) {
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t n : {1, 2, 6})
    for (const bool causal : {false, true})
      for (const bool normalise : {true, false}) {
        const Options options{.causal = causal,
                              .normalise = normalise,
                              .scale = 0.7,
                              .chunk = 4,
                              .segments = n == 6 ? 2 : 1};
        const Problem p{1, 2, 1, n, n, 3, 2};
        SCOPED_TRACE(describe(p, options));
        Case c = random_case<double, V>(p, options);
        for (auto* x : {&c.q, &c.k})  // away from kinks, and positive for signed weights
          for (double& element : *x)
            element = std::copysign(
                std::max(std::abs(element), 0.25),
                V::normalise_by_default && !std::is_same_v<V, Taylor> ? element : 1);
        Random random(seed() + 5);
        const std::int64_t sums = features_of_row<V>(p.d);
        c.initial = StateValues{random.normals(sums * p.dv), random.uniforms(sums, 1, 2), {}};
        if (is_scaled<V>)
          for (std::int64_t r = 0; r < sums; ++r)
            c.initial->shift.push_back(static_cast<int>(r % 3 + r % 3 / 2) - 1);  // -1, 0, 2
        c.last_cotangent = StateValues{random.normals(sums * p.dv), random.normals(sums), {}};
        if (has_constant<V>) {
          c.initial->t = random.normals(2);
          c.initial->m = {7};
          c.last_cotangent->t = random.normals(2);
        }
        c.wants_last = true;
        const auto found = attend<double, ExecSpace, V>(c, options);
        std::vector<std::pair<std::vector<double>*, const std::vector<double>*>> parts{
            {&c.q, &found.q},           {&c.k, &found.k},       {&c.v, &found.v},
            {&c.alpha, &found.alpha},   {&c.beta, &found.beta}, {&c.initial->S, &found.d_S},
            {&c.initial->z, &found.d_z}, {&c.constant, &found.constant}, {&c.initial->t, &found.d_t}};
        for (std::size_t part = 0; part < parts.size(); ++part) {
          const auto& [x, gradient] = parts[part];
          ASSERT_EQ(x->size(), gradient->size());
          double largest = 1;
          for (const double g : *gradient) largest = std::max(largest, std::abs(g));
          for (std::size_t i = 0; i < x->size(); ++i) {
            const double centre = (*x)[i];
            const auto numeric = derivative<double>(
                [&, x = x](double t) {
                  (*x)[i] = centre + t;
                  return this->loss(c, options, found.shift);
                },
                0x1p-8);
            (*x)[i] = centre;
            EXPECT_NEAR((*gradient)[i], numeric.value, 1e-8 * largest)
                << "part " << part << " " << i;
          }
        }
      }
}

}  // namespace
