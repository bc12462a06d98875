// SPDX-License-Identifier: BSD-3-Clause

// What must not reach a row: tokens in its future, and for keys the queries of their past. They are
// replaced by NaN or infinity; not one bit of the row may change.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Rows [first, last) of every (batch, head) of a row-major (B,H,N,width) tensor.
struct Rows {
  std::int64_t heads, tokens, width, first, last;

  template <class T, class Body>
  void visit(std::vector<T>& x, const Body& body) const {
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = first * width; i < last * width; ++i)
        body(x[static_cast<std::size_t>(h * tokens * width + i)]);
  }
  template <class T>
  std::vector<T> of(std::vector<T> x) const {
    std::vector<T> result;
    visit(x, [&](T& element) { result.push_back(element); });
    return result;
  }
  template <class T>
  void poison(std::vector<T>& x, T value) const {
    visit(x, [&](T& element) { element = value; });
  }
};

template <class C>
class Causality : public ::testing::Test {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;

  template <class Body>
  static void for_each_cut(const Body& body) {
    //                      B  H  Hkv Nq   Nk  D  Dv
    const Problem shapes[] = {{2, 2, 1, 150, 150, 5, 7}, {1, 2, 2, 61, 97, 9, 3}};
    for (const Problem& problem : shapes)
      for (const int chunk : {0, 7, 16})
        for (const int segments : {1, 3})
          for (const bool normalise : {true, false}) {
            const Options options{
                .causal = true, .normalise = normalise, .chunk = chunk, .segments = segments};
            if (!takes<V>(options)) continue;
            SCOPED_TRACE(describe(problem, options));
            body(problem, options);
          }
  }
};

TYPED_TEST_SUITE(Causality, OverAllVariants, ConfigName);

TYPED_TEST(Causality, NoFutureTokenTouchesARow) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  this->for_each_cut([&](const Problem& p, const Options& options) {
    const Case clean = random_case<T, V>(p, options);
    const auto expected = attend<T, ExecSpace, V>(clean, options);
    for (const std::int64_t seen : {1, 10, 33, 60})  // queries before the poison
      for (const double poison :
           {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        SCOPED_TRACE(seen);
        const std::int64_t keys_seen = seen + p.nk - p.nq;
        Case poisoned = clean;
        Rows{p.batch * p.kv_heads, p.nk, p.d, keys_seen, p.nk}.poison(poisoned.k, poison);
        Rows{p.batch * p.kv_heads, p.nk, p.dv, keys_seen, p.nk}.poison(poisoned.v, poison);
        Rows{p.batch * p.heads, p.nq, p.d, seen, p.nq}.poison(poisoned.q, poison);
        Rows{p.batch * p.heads, p.nq, p.dv, seen, p.nq}.poison(poisoned.d_o, poison);
        const auto found = attend<T, ExecSpace, V>(poisoned, options);
        const Rows outputs{p.batch * p.heads, p.nq, p.dv, 0, seen};
        EXPECT_TRUE(same_bits(outputs.of(found.o), outputs.of(expected.o))) << "o";
        const Rows queries{p.batch * p.heads, p.nq, p.d, 0, seen};
        EXPECT_TRUE(same_bits(queries.of(found.q), queries.of(expected.q))) << "dq";
        if (options.normalise.value()) {
          const Rows sums{p.batch * p.heads, p.nq, 1, 0, seen};
          EXPECT_TRUE(same_bits(sums.of(found.denominator), sums.of(expected.denominator)));
        }
      }
  });
}

TYPED_TEST(Causality, NoEarlierQueryTouchesAKey) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  this->for_each_cut([&](const Problem& p, const Options& options) {
    const Case clean = random_case<T, V>(p, options);
    const auto expected = attend<T, ExecSpace, V>(clean, options);
    for (const std::int64_t lost : {1, 12, 35, 60}) {  // poisoned queries at the front
      SCOPED_TRACE(lost);
      Case poisoned = clean;
      const double nan = std::numeric_limits<double>::quiet_NaN();
      Rows{p.batch * p.heads, p.nq, p.d, 0, lost}.poison(poisoned.q, nan);
      Rows{p.batch * p.heads, p.nq, p.dv, 0, lost}.poison(poisoned.d_o, nan);
      const auto found = attend<T, ExecSpace, V>(poisoned, options);
      const std::int64_t first = lost + p.nk - p.nq;  // the first key that none of them sees
      const Rows keys{p.batch * p.kv_heads, p.nk, p.d, first, p.nk};
      EXPECT_TRUE(same_bits(keys.of(found.k), keys.of(expected.k))) << "dk";
      const Rows values{p.batch * p.kv_heads, p.nk, p.dv, first, p.nk};
      EXPECT_TRUE(same_bits(values.of(found.v), values.of(expected.v))) << "dv";
      const Rows queries{p.batch * p.heads, p.nq, p.d, lost, p.nq};
      EXPECT_TRUE(same_bits(queries.of(found.q), queries.of(expected.q))) << "dq";
    }
  });
}

// A NaN must not vanish either: the rows that see it show it.
TYPED_TEST(Causality, RowsThatSeeANaNShowIt) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{1, 1, 1, 90, 90, 3, 2};
  for (const int segments : {1, 2})
    for (auto member : {&Case::q, &Case::k, &Case::v}) {
      const Options options{.causal = true, .normalise = true, .chunk = 16, .segments = segments};
      Case c = random_case<T, V>(p, options);
      const std::int64_t width = member == &Case::v ? p.dv : p.d;
      for (auto* x : {&c.q, &c.k})  // no row of weights may vanish
        for (double& element : *x) element = std::abs(element) + 0.5;
      round_to<T>(c.q);
      round_to<T>(c.k);
      (c.*member)[static_cast<std::size_t>(37 * width)] = std::numeric_limits<double>::quiet_NaN();
      const auto o = attend_forward<T, ExecSpace, V>(c, options);
      for (std::int64_t i = 0; i < p.nq; ++i) {
        const bool sees = member == &Case::q ? i == 37 : i >= 37;
        EXPECT_EQ(std::isnan(o[static_cast<std::size_t>(i * p.dv)]), sees) << "row " << i;
      }
    }
}

}  // namespace
