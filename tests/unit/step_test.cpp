// SPDX-License-Identifier: BSD-3-Clause

// Decoding: token by token equals one pass, and nothing is touched that should not be.

#include <numeric>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Host memory of one token of every sequence, and of states, with any layout of the rows.
template <class T, class ExecSpace, class V>
class Decoder {
 public:
  using A = accumulator_t<T>;
  using Memory = typename ExecSpace::memory_space;
  template <class U, int Rank>
  using Placed = PlacedTensor<U, Rank, ExecSpace>;

  Decoder(const Case& c, const Options& options, Layout layout)
      : m_case(c),
        m_options{options.normalise, options.scale, options.small_normaliser,
                  options.least_normaliser},
        m_layout(layout) {
    const Problem& p = c.problem;
    m_problem = {p.batch, p.heads, p.kv_heads, 1, 1, p.d, p.dv};
    o = {{p.batch, p.heads, p.dv}, layout};
    alpha = {{static_cast<std::int64_t>(c.alpha.size())}, Layout::right};
    beta = {{static_cast<std::int64_t>(c.beta.size())}, Layout::right};
    constant = {{static_cast<std::int64_t>(c.constant.size())}, Layout::right};
    constant.set(c.constant);
    alpha.set(c.alpha);
    beta.set(c.beta);
    projection = {{ProjectedVariant<V> ? features_of_row<V>(p.d) : 0, p.d}, layout};
    projection.set(c.projection);
    const std::int64_t features = features_of_row<V>(p.d);
    before = {p, features, layout};
    after = {p, features, layout};
  }

  V variant() const {
    return make_variant<V>(alpha.view(), beta.view(), constant.view(), m_case.affine, projection.view());
  }
  std::size_t bytes() const {
    return workspace_size<T>(m_exec, variant(), m_problem, Pass::step,
                             {.normalise = m_options.normalise});
  }

  /// The row of every head at one position, as a tensor without positions.
  Placed<T, 3> token_of(const std::vector<double>& x, std::int64_t heads, std::int64_t rows,
                        std::int64_t columns, std::int64_t position) const {
    Placed<T, 3> token{{m_problem.batch, heads, columns}, m_layout};
    std::vector<double> values;
    for (std::int64_t h = 0; h < m_problem.batch * heads; ++h) {
      const auto begin = x.begin() + (h * rows + position) * columns;
      values.insert(values.end(), begin, begin + columns);
    }
    token.set(values);
    return token;
  }

  /// One token; the state is `before` (none if !has_before) and becomes `after`, or it is `before`
  /// in place.
  void step(std::int64_t position, bool has_before, bool in_place) {
    const Problem& p = m_case.problem;
    auto q = token_of(m_case.q, p.heads, p.nq, p.d, position);
    auto k = token_of(m_case.k, p.kv_heads, p.nk, p.d, position);
    auto v = token_of(m_case.v, p.kv_heads, p.nk, p.dv, position);
    Placed<std::uint8_t, 1> mask{{p.batch}, Layout::right};
    Token<ExecSpace, T> token{.q = q.input(), .k = k.input(), .v = v.input()};
    if (!m_case.key_mask.empty()) {
      std::vector<std::uint8_t> visible;
      for (std::int64_t b = 0; b < p.batch; ++b)
        visible.push_back(m_case.key_mask[static_cast<std::size_t>(b * p.nk + position)]);
      mask.set(visible);
      token.key_mask = mask.input();
    }
    Arena<ExecSpace> arena(bytes());
    if (in_place)
      step_in_place<T>(m_exec, variant(), token, before.ref(), o.ref(), arena.workspace(),
                       m_options);
    else
      LinAttn::step<T>(m_exec, variant(), token,
                       has_before ? before.ref().as_const() : ConstState<ExecSpace, T>{},
                       after.ref(), o.ref(), arena.workspace(), m_options);
    m_exec.fence();
    EXPECT_TRUE(arena.guards_intact()) << "step wrote outside its workspace";
    EXPECT_TRUE(o.guards_intact() && before.guards_intact() && after.guards_intact());
  }

  Placed<T, 3> o;
  Placed<double, 1> alpha, beta, constant;
  Placed<double, 2> projection;
  PlacedState<T, ExecSpace, V> before, after;

 private:
  const Case& m_case;
  StepOptions m_options;
  Layout m_layout;
  ExecSpace m_exec;
  Problem m_problem;
};

template <class C>
class Step : public ::testing::Test {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  /// Largest difference over the largest reference value.
  template <class X, class Y>
  static double difference(const std::vector<X>& found, const std::vector<Y>& expected) {
    EXPECT_EQ(found.size(), expected.size());
    double worst = 0, largest = 0;
    for (std::size_t n = 0; n < expected.size(); ++n) {
      worst = std::max(worst,
                       std::abs(static_cast<double>(found[n]) - static_cast<double>(expected[n])));
      largest = std::max(largest, std::abs(static_cast<double>(expected[n])));
      if (std::isnan(static_cast<double>(found[n]))) return std::numeric_limits<double>::infinity();
    }
    return largest > 0 ? worst / largest : worst;
  }

  /// Row i of every head of o.
  template <class X>
  static std::vector<X> row(const std::vector<X>& o, const Problem& p, std::int64_t i) {
    std::vector<X> result;
    for (std::int64_t h = 0; h < p.batch * p.heads; ++h) {
      const auto begin = o.begin() + (h * p.nq + i) * p.dv;
      result.insert(result.end(), begin, begin + p.dv);
    }
    return result;
  }

  /// Prefill of the first `prefill` tokens and the rest one by one, against one causal pass.
  static void check(const Case& c, Options options, std::int64_t prefill, Layout layout,
                    bool in_place) {
    options.causal = true;
    const Problem& p = c.problem;
    SCOPED_TRACE(describe(p, options) + " prefill=" + std::to_string(prefill) +
                 (in_place ? " in place" : ""));
    Case whole = c;
    whole.wants_last = true;
    Attention<T, ExecSpace, V> pass(whole, options);
    pass.forward();
    const auto expected = pass.o.get();
    Decoder<T, ExecSpace, V> decoder(c, options, layout);
    const double allowed = 40 * static_cast<double>(p.nk + p.d) * std::numeric_limits<T>::epsilon();
    const auto set = [](auto& state, auto& from) {
      state.S.set(from.S.get());
      state.z.set(from.z.get());
      if (is_scaled<V>) state.shift.set(from.shift.get());
      if (has_constant<V>) {
        state.t.set(from.t.get());
        state.m.set(from.m.get());
      }
    };
    if (prefill > 0) {
      Case first = c;
      first.problem.nq = first.problem.nk = prefill;
      const auto cut = [&](std::vector<double>& x, std::int64_t heads, std::int64_t columns) {
        std::vector<double> part;
        for (std::int64_t h = 0; h < p.batch * heads; ++h)
          part.insert(part.end(), x.begin() + h * p.nk * columns,
                      x.begin() + (h * p.nk + prefill) * columns);
        x = part;
      };
      cut(first.q, p.heads, p.d);
      cut(first.k, p.kv_heads, p.d);
      cut(first.v, p.kv_heads, p.dv);
      cut(first.d_o, p.heads, p.dv);
      std::vector<std::uint8_t> mask;
      for (std::int64_t b = 0; !c.key_mask.empty() && b < p.batch; ++b)
        mask.insert(mask.end(), c.key_mask.begin() + b * p.nk,
                    c.key_mask.begin() + b * p.nk + prefill);
      first.key_mask = mask;
      first.wants_last = true;
      Attention<T, ExecSpace, V> begin(first, options);
      begin.forward();
      set(decoder.before, begin.last);
    }
    for (std::int64_t i = prefill; i < p.nq; ++i) {
      const bool has_before = i > 0;
      if (in_place && !has_before) {
        const std::size_t sums = decoder.before.z.get().size();
        decoder.before.set({std::vector<double>(decoder.before.S.get().size()),
                            std::vector<double>(sums),
                            std::vector<int>(is_scaled<V> ? sums : 0, no_shift),
                            std::vector<double>(decoder.before.t.get().size()),
                            std::vector<std::int64_t>(decoder.before.m.get().size())});
      }
      const auto S = decoder.before.S.get();
      const auto z = decoder.before.z.get();
      const auto shift = decoder.before.shift.get();
      const auto t = decoder.before.t.get();
      const auto m = decoder.before.m.get();
      decoder.step(i, has_before, in_place);
      ASSERT_LE(difference(decoder.o.get(), row(expected, p, i)), allowed) << "token " << i;
      if (in_place) continue;
      if (has_before) {
        EXPECT_TRUE(same_bits(decoder.before.S.get(), S)) << "the state before was changed";
        EXPECT_TRUE(same_bits(decoder.before.z.get(), z));
        EXPECT_TRUE(same_bits(decoder.before.shift.get(), shift));
        EXPECT_TRUE(same_bits(decoder.before.t.get(), t));
        EXPECT_TRUE(same_bits(decoder.before.m.get(), m));
      }
      set(decoder.before, decoder.after);
    }
    EXPECT_LE(difference(decoder.before.S.get(), pass.last.S.get()), allowed);
    EXPECT_LE(difference(decoder.before.z.get(), pass.last.z.get()), allowed);
    if (is_scaled<V>) {
      EXPECT_EQ(decoder.before.shift.get(), pass.last.shift.get());
    }
    if (has_constant<V>) {
      EXPECT_LE(difference(decoder.before.t.get(), pass.last.t.get()), allowed);
      EXPECT_EQ(decoder.before.m.get(), pass.last.m.get());
    }
  }

  using A = accumulator_t<T>;
};

TYPED_TEST_SUITE(Step, OverVariants, ConfigName);

TYPED_TEST(Step, TokenByTokenIsOnePass) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool normalise : {true, false})
    for (const std::int64_t prefill : {0, 1, 16, 20}) {
      const Options options{
          .causal = true, .normalise = normalise, .scale = normalise ? 1.0 : -0.7};
      const Case c = random_case<T, V>({2, 4, 2, 21, 21, 5, 7}, options);
      this->check(c, options, prefill, Layout::right, false);
      this->check(c, options, prefill, Layout::gaps, true);
    }
}

// Affine attention without norms, and with replaced row sums: the numbers of keys count.
TYPED_TEST(Step, AffineTokens) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  if constexpr (!std::is_same_v<V, Affine>) {
    GTEST_SKIP() << "settings of affine attention";
  } else {
    for (const QkNorm norm : {QkNorm::none, QkNorm::l2})
      for (const bool clamp : {false, true}) {
        const Options options{
            .causal = true,
            .small_normaliser = clamp ? SmallNormaliser::clamp : SmallNormaliser::check,
            .least_normaliser = clamp ? 1.7 : 0};
        Case c = random_case<T, V>({2, 4, 2, 21, 21, 5, 7}, options);
        c.affine = {.scale = 0.2, .qk_norm = norm};
        for (int n = 0; n < 42; ++n) c.key_mask.push_back(static_cast<std::uint8_t>(n % 5 != 2));
        this->check(c, options, 0, Layout::right, false);
        this->check(c, options, 9, Layout::gaps, true);
      }
  }
}

TYPED_TEST(Step, HiddenKeysChangeNoSum) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Options options{.causal = true, .normalise = true};
  Case c = random_case<T, V>({2, 2, 2, 12, 12, 3, 4}, options);
  for (int n = 0; n < 24; ++n)
    c.key_mask.push_back(static_cast<std::uint8_t>(n % 3 != 0));  // the first, too
  for (int n = 0; n < 24; ++n)  // what is hidden in the first batch entry is not even read
    if (n % 3 == 0)
      for (int d = 0; d < 3; ++d)
        for (int h = 0; h < 2; ++h)
          c.k[static_cast<std::size_t>(((n / 12 * 2 + h) * 12 + n % 12) * 3 + d)] =
              std::numeric_limits<double>::quiet_NaN();
  this->check(c, options, 0, Layout::right, false);
  this->check(c, options, 5, Layout::left, true);
}

// One head with a large state: more threads than heads share it out.
TYPED_TEST(Step, WindowsOfALargeState) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Options options{.causal = true, .normalise = true};
  if (!has_small_state<V>(250)) GTEST_SKIP() << features_of_row<V>(250) << " features";
  const Case c = random_case<T, V>({1, 2, 1, 6, 6, 250, 300}, options);
  const typename TypeParam::ExecSpace exec;
  if (LinAttn::detail::concurrency(exec) > 1) {
    const V variant = variant_for_plans<V, typename TypeParam::ExecSpace>(250);
    EXPECT_GT(LinAttn::plan<T>(exec, variant, {1, 2, 1, 1, 1, 250, 300}, Pass::step).tiles, 1);
  }
  this->check(c, options, 3, Layout::right, false);
  this->check(c, options, 3, Layout::right, true);
}

TYPED_TEST(Step, NothingToDo) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  using V = typename TypeParam::V;
  for (const Problem& p :
       {Problem{0, 2, 1, 1, 1, 3, 4}, Problem{2, 0, 0, 1, 1, 3, 4}, Problem{2, 2, 1, 1, 1, 3, 0}}) {
    const Case c = random_case<T, V>(p, {});
    Decoder<T, ExecSpace, V> decoder(c, {}, Layout::right);
    decoder.step(0, false, false);
  }
}

template <class C>
class StepRefusals : public ::testing::Test {};
TYPED_TEST_SUITE(StepRefusals, OverSpaces, ConfigName);

TYPED_TEST(StepRefusals, NameExpectedAndFound) {
  using Exec = typename TypeParam::ExecSpace;
  using Memory = typename Exec::memory_space;
  const auto tensor = [](const char* name, std::int64_t heads, std::int64_t columns) {
    return Kokkos::View<float***, Kokkos::LayoutRight, Memory>(std::string(name), 2, heads,
                                                               columns);
  };
  const auto q = tensor("q", 4, 3), k = tensor("k", 2, 3), v = tensor("v", 2, 5),
             o = tensor("o", 4, 5);
  const Kokkos::View<float****, Kokkos::LayoutRight, Memory> S("S", 2, 2, 3, 5);
  const auto z = tensor("z", 2, 3);
  const State<Exec, float> state{.S = S, .z = z};
  const Exec exec;
  const Kokkos::View<std::byte*, Memory> arena(
      "arena", workspace_size<float>(exec, Elu{}, {2, 4, 2, 1, 1, 3, 5}, Pass::step));
  const auto refusal = [&](const Token<Exec, float>& token, const ConstState<Exec, float>& before,
                           const State<Exec, float>& after, const TensorRef<float, 3, Exec>& out,
                           const Workspace<Exec>& workspace) -> std::string {
    try {
      step<float>(exec, Elu{}, token, before, after, out, workspace);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  const Token<Exec, float> token{.q = q, .k = k, .v = v};
  EXPECT_EQ(refusal(token, {}, state, o, arena), "accepted");
  EXPECT_EQ(refusal({.q = q, .k = k}, {}, state, o, arena), "LinAttn: input v is missing");
  EXPECT_EQ(refusal({.q = q, .k = tensor("k", 2, 4), .v = v}, {}, state, o, arena),
            "LinAttn: k must have shape (2, 2, 3), found (2, 2, 4)");
  EXPECT_EQ(refusal({.q = q, .k = tensor("k", 3, 3), .v = tensor("v", 3, 5)}, {}, state, o, arena),
            "LinAttn: 3 key/value heads do not divide 4 query heads");
  EXPECT_EQ(refusal(token, {}, {}, o, arena),
            "LinAttn: a step needs a state to write to, found nothing");
  EXPECT_EQ(refusal(token, {.S = S}, state, o, arena),
            "LinAttn: z of the state before the token must have shape (2, 2, 3), found nothing");
  EXPECT_EQ(refusal(token, {}, {.S = S, .z = tensor("z", 2, 4)}, o, arena),
            "LinAttn: z of the state after the token must have shape (2, 2, 3), found (2, 2, 4)");
  EXPECT_EQ(refusal(token, {}, state, tensor("o", 4, 4), arena),
            "LinAttn: o must have shape (2, 4, 5), found (2, 4, 4)");
  EXPECT_EQ(refusal(token, {}, state, o, {}).rfind("LinAttn: the workspace needs ", 0), 0u);
  EXPECT_THROW(workspace_size<float>(exec, Elu{}, {2, 4, 2, 2, 1, 3, 5}, Pass::step),
               InvalidArgument);
}

}  // namespace
