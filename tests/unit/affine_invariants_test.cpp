// SPDX-License-Identifier: BSD-3-Clause

// Identities of affine attention that need no reference, on 100,000 tokens in float. The bounds are
// a priori: the roundings on the way to each element times the sum of the absolute terms whose signed
// sum it is, which running sums of norms bound from above in O(N). A bound says something only where
// what it bounds could be much larger, which the tests make sure of.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr std::int64_t N = 100000, D = 16, Dv = 8;

double norm(const std::vector<double>& x, std::size_t row, std::size_t columns) {
  double sum = 0;
  for (std::size_t d = 0; d < columns; ++d) sum += x[row * columns + d] * x[row * columns + d];
  return std::sqrt(sum);
}

template <class C>
class AffineInvariants : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;
  static constexpr double u = std::numeric_limits<float>::epsilon() / 2;
  static constexpr double rate = 0.05;  // weights 1 + rate q . k stay positive

  /// Norm none, so that q . dq is that of the scores. Values go with keys along one direction, and
  /// all queries and cotangents lie along it: no sum over tokens cancels.
  static Case long_case() {
    Case c = random_case<float, Affine>({1, 1, 1, N, N, D, Dv}, {.causal = true});
    c.affine = {.scale = rate, .qk_norm = QkNorm::none};
    c.alpha = {1};
    c.constant = {1};
    for (std::size_t i = 0; i < N; ++i) {
      const double x = c.k[i * D];
      for (std::size_t d = 0; d < D; ++d) c.q[i * D + d] = d == 0 ? 1 + 0.25 * std::tanh(c.q[i * D]) : 0.1 * c.q[i * D + d];
      for (std::size_t e = 0; e < Dv; ++e) {
        c.v[i * Dv + e] = 1 + x + 0.1 * c.v[i * Dv + e];
        c.d_o[i * Dv + e] = 1 + 0.1 * c.d_o[i * Dv + e];
      }
    }
    for (auto* x : {&c.q, &c.v, &c.d_o}) round_to<float>(*x);
    return c;
  }

  /// For each row: bound of sum over the keys it sees of |E_ij| |k_j|, and of |E_ij|.
  static void row_bounds(const Case& c, const Outcome<float>& found, std::vector<double>& with_key,
                         std::vector<double>& alone) {
    double keys = 0, values = 0, both = 0;
    for (std::size_t i = 0; i < N; ++i) {
      const double k = norm(c.k, i, D), v = norm(c.v, i, Dv), g = norm(c.d_o, i, Dv);
      keys += k;
      values += v;
      both += k * v;
      double o = 0;
      for (std::size_t e = 0; e < Dv; ++e) o += static_cast<double>(found.o[i * Dv + e]) * found.o[i * Dv + e];
      const double s = std::abs(static_cast<double>(found.denominator[i]));
      with_key.push_back(g / s * (both + std::sqrt(o) * keys));
      alone.push_back(g / s * (values + std::sqrt(o) * static_cast<double>(i + 1)));
    }
  }

  static reference::RoundingCounts counts(const Case& c) {
    return reference::rounding_counts(c.problem, settings_of<Affine>(c, {.causal = true}), 16);
  }
};

TYPED_TEST_SUITE(AffineInvariants, OverSpaces, ConfigName);

// I1: sum q . dq = sum k . dk; I2: column sums of dV are those of dO; I5: a da + b db = 0, and
// a common factor of a and b, here a power of two, changes no bit of o.
TYPED_TEST(AffineInvariants, SumsOfGradients) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true};
  const Case c = this->long_case();
  const auto found = attend<float, ExecSpace, Affine>(c, options);
  const auto counts = this->counts(c);
  std::vector<double> with_key, alone;
  this->row_bounds(c, found, with_key, alone);

  long double by_queries = 0, by_keys = 0;
  double bound = 0, score_bound = 0, constant_bound = 0;
  for (std::size_t n = 0; n < N * D; ++n) {
    by_queries += static_cast<long double>(c.q[n]) * found.q[n];
    by_keys += static_cast<long double>(c.k[n]) * found.k[n];
  }
  for (std::size_t i = 0; i < N; ++i) {
    bound += this->rate * norm(c.q, i, D) * with_key[i];
    score_bound += this->rate * norm(c.q, i, D) * with_key[i];
    constant_bound += alone[i];
  }
  const double of_sums = (counts.q + counts.k) * this->u * bound;
  ASSERT_GT(std::abs(static_cast<double>(by_queries)), 10 * of_sums) << "the bound says nothing";
  EXPECT_LE(std::abs(static_cast<double>(by_queries - by_keys)), of_sums);
  const double of_parameters = this->u * (counts.q * score_bound + counts.q * constant_bound);
  ASSERT_GT(std::abs(found.alpha[0]), 10 * of_parameters) << "the bound says nothing";
  EXPECT_LE(std::abs(found.alpha[0] + found.constant[0]), of_parameters);

  for (std::size_t e = 0; e < Dv; ++e) {
    long double by_values = 0, by_rows = 0;
    double sizes = 0;
    for (std::size_t j = 0; j < N; ++j) {
      by_values += found.v[j * Dv + e];
      by_rows += c.d_o[j * Dv + e];
      sizes += std::abs(c.d_o[j * Dv + e]);
    }
    ASSERT_GT(std::abs(static_cast<double>(by_rows)), 10 * counts.v * this->u * sizes);
    EXPECT_LE(std::abs(static_cast<double>(by_values - by_rows)), counts.v * this->u * sizes) << "column " << e;
  }

  Case scaled = c;
  scaled.alpha = {8};
  scaled.constant = {8};
  EXPECT_TRUE(same_bits(attend_forward<float, ExecSpace, Affine>(scaled, options), found.o));
}

// I3: values of 1 give rows of 1 and no gradient of queries and keys: what a kernel that lost the
// term b m in its row sums gets wrong first.
TYPED_TEST(AffineInvariants, ValuesOfOne) {
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = this->long_case();
  std::fill(c.v.begin(), c.v.end(), 1.0);
  const auto found = attend<float, ExecSpace, Affine>(c, {.causal = true});
  const auto counts = this->counts(c);
  for (const float o : found.o) ASSERT_NEAR(o, 1, counts.o * this->u);
  std::vector<double> with_key, alone;
  this->row_bounds(c, found, with_key, alone);
  for (std::size_t i = 0; i < N; ++i)
    for (std::size_t d = 0; d < D; ++d)
      ASSERT_LE(std::abs(found.q[i * D + d]), counts.q * this->u * this->rate * with_key[i]) << i;
  double per_key = 0;  // sum over later rows of |E_ij| |q_i|, with |v_j| = sqrt(Dv)
  for (std::size_t j = N; j-- > 0;) {
    per_key += norm(c.q, j, D) * norm(c.d_o, j, Dv) / std::abs(static_cast<double>(found.denominator[j])) * 2 *
               std::sqrt(static_cast<double>(Dv));
    for (std::size_t d = 0; d < D; ++d)
      ASSERT_LE(std::abs(found.k[j * D + d]), counts.k * this->u * this->rate * per_key) << j;
  }
}

// I4: later tokens, NaN among them, change no bit of earlier rows.
TYPED_TEST(AffineInvariants, TheFutureChangesNoBit) {
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = this->long_case();
  c.affine = {};  // norms of rows, too
  const auto before = attend_forward<float, ExecSpace, Affine>(c, {.causal = true});
  const std::size_t from = 70001;
  std::fill(c.k.begin() + from * D, c.k.end(), std::nan(""));
  std::fill(c.v.begin() + from * Dv, c.v.end(), 1e30);
  const auto after = attend_forward<float, ExecSpace, Affine>(c, {.causal = true});
  const auto part = [](const std::vector<float>& x) {
    return std::vector<float>(x.begin(), x.begin() + from * Dv);
  };
  EXPECT_TRUE(same_bits(part(after), part(before)));
}

// I6: token after token is one pass. A step adds to plain sums, so that row i is good to 2 (i + 2 D)
// roundings of sum_j |w_ij| |v_j| / s_i, where 0 <= w <= 2, and the pass to less.
TYPED_TEST(AffineInvariants, DecodingIsThePass) {
  using ExecSpace = typename TypeParam::ExecSpace;
  Case c = this->long_case();
  c.affine = {};
  c.wants_last = true;
  Attention<float, ExecSpace, Affine> pass(c, {.causal = true});
  pass.forward();
  const auto expected = pass.o.get();
  const Problem one{1, 1, 1, 1, 1, D, Dv};
  PlacedState<float, ExecSpace, Affine> state(one, D, Layout::right);
  state.set({std::vector<double>(D * Dv), std::vector<double>(D), {}, std::vector<double>(Dv), {0}});
  Arena<ExecSpace> arena(workspace_size<float>(ExecSpace(), pass.variant(), one, Pass::step));
  PlacedTensor<float, 3, ExecSpace> o{{1, 1, Dv}, Layout::right};
  const auto at = [](const auto& tensor, std::int64_t i, std::int64_t columns) {
    return TensorRef<const float, 3, ExecSpace>(tensor.input().data() + i * columns, {1, 1, columns},
                                                {columns, columns, 1});
  };
  const auto sums = pass.denominator.get();
  double values = 0, largest_share = 0;
  for (std::int64_t i = 0; i < N; ++i) {
    step_in_place<float>(ExecSpace(), pass.variant(),
                         {.q = at(pass.q, i, D), .k = at(pass.k, i, D), .v = at(pass.v, i, Dv)}, state.ref(),
                         o.ref(), arena.workspace());
    const auto row = static_cast<std::size_t>(i);
    double here = 0;
    for (std::size_t e = 0; e < Dv; ++e) here = std::max(here, std::abs(c.v[row * Dv + e]));
    values += here;
    if (i > 300 && i % 997 != 0 && i + 1 != N) continue;
    ExecSpace().fence();
    const auto found = o.get();
    const double allowed =
        2 * 2 * static_cast<double>(i + 2 * D) * this->u * (2 * values / static_cast<double>(sums[row]));
    double size = 0;
    for (std::size_t e = 0; e < Dv; ++e) {
      ASSERT_NEAR(found[e], expected[row * Dv + e], allowed) << "token " << i;
      size = std::max(size, std::abs(static_cast<double>(expected[row * Dv + e])));
    }
    if (i >= 20) largest_share = std::max(largest_share, allowed / size);
  }
  EXPECT_LT(largest_share, 0.2) << "the bounds say nothing";
  EXPECT_EQ(state.m.get()[0], N);
  EXPECT_EQ(pass.last.m.get()[0], N);
}

}  // namespace
