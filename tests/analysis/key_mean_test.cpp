// SPDX-License-Identifier: BSD-3-Clause

// Keys without their mean against plain code, the invariance that it restores, and its gradient.

#include <linattn/analysis/key_mean.hpp>
#include <linattn/analysis/log_variance.hpp>

#include "finite_difference.hpp"
#include "moment_case.hpp"
#include "refusal.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class T, class ExecSpace>
struct KeyMeanRun {
  MomentCase c;
  PlacedTensor<T, 4, ExecSpace> k, out;
  PlacedTensor<std::uint8_t, 2, ExecSpace> mask;
  PlacedTensor<double, 3, ExecSpace> mean;
  ExecSpace exec;

  explicit KeyMeanRun(const MomentCase& moments, Layout layout = Layout::right)
      : c(moments),
        k({c.p.batch, c.p.kv_heads, c.p.nk, c.p.d}, layout),
        out({c.p.batch, c.p.kv_heads, c.p.nk, c.p.d}, layout),
        mask({c.p.batch, c.p.nk}, Layout::right),
        mean({c.p.batch, c.p.kv_heads, c.p.d}, layout == Layout::right ? Layout::right : Layout::gaps) {
    k.set(c.k);
    out.fill(static_cast<T>(7.0f));
    if (!c.key_mask.empty()) mask.set(c.key_mask);
  }
  TensorRef<const std::uint8_t, 2, ExecSpace> mask_ref() const {
    return c.key_mask.empty() ? TensorRef<const std::uint8_t, 2, ExecSpace>() : mask.input();
  }
  void remove() {
    using Arena = typename MomentRun<T, ExecSpace>::Arena;
    const Arena arena(key_mean_workspace_size<T>(exec, c.p));
    remove_key_mean<T>(exec, {k.input(), mask_ref()}, {out.ref(), mean.ref()}, arena.workspace());
    exec.fence();
    EXPECT_TRUE(arena.guards_intact() && out.guards_intact() && mean.guards_intact());
  }
};

std::vector<long double> plain_means(const MomentCase& c) {
  std::vector<long double> means;
  for (std::int64_t b = 0; b < c.p.batch; ++b)
    for (std::int64_t h = 0; h < c.p.kv_heads; ++h)
      for (std::int64_t f = 0; f < c.p.d; ++f) {
        long double sum = 0, n = 0;
        for (std::int64_t j = 0; j < c.p.nk; ++j)
          if (c.sees_key(b, j)) {
            sum += static_cast<long double>(c.k[c.k_at(b, h, j, f)]);
            n += 1;
          }
        means.push_back(n > 0 ? sum / n : 0);
      }
  return means;
}

template <class C>
class KeyMean : public ::testing::Test {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;
};
TYPED_TEST_SUITE(KeyMean, OverScalars, ConfigName);

// A mean of n numbers relative to one of them is off by n 2^-53 of their spread (below 20 here); the result is rounded
// once.
TYPED_TEST(KeyMean, AgreesWithPlainCode) {
  using T = typename TypeParam::T;
  for (const Problem& p : {Problem{2, 4, 2, 5, 700, 9, 0}, {1, 3, 3, 5, 33, 40, 0}, {2, 2, 1, 0, 1, 4, 0}})
    for (const bool masked : {false, true})
      for (const double offset : {0.0, 1e4})
        for (const Layout layout : all_layouts) {
          const MomentCase clean = random_moments<T>(p, masked, 21, offset);
          MomentCase c = clean;
          poison_hidden(c);
          KeyMeanRun<T, typename TypeParam::ExecSpace> run(c, layout);
          run.remove();
          const auto means = plain_means(clean);
          const auto found = run.mean.get();
          const double spread = 20 * static_cast<double>(p.nk + 4) * 0x1p-53 + 4 * 0x1p-53 * offset;
          for (std::size_t n = 0; n < means.size(); ++n) EXPECT_NEAR(found[n], static_cast<double>(means[n]), spread);
          const auto out = run.out.get();
          for (std::int64_t b = 0; b < p.batch; ++b)
            for (std::int64_t h = 0; h < p.kv_heads; ++h)
              for (std::int64_t j = 0; j < p.nk; ++j)
                for (std::int64_t f = 0; f < p.d; ++f) {
                  const std::size_t at = c.k_at(b, h, j, f);
                  if (!c.sees_key(b, j)) {
                    EXPECT_EQ(out[at], T(7));
                    continue;
                  }
                  const double expected =
                      static_cast<double>(static_cast<long double>(c.k[at]) -
                                          means[static_cast<std::size_t>((b * p.kv_heads + h) * p.d + f)]);
                  EXPECT_NEAR(out[at], expected, spread + std::numeric_limits<T>::epsilon() * std::abs(expected));
                }
        }
}

// LLN attention of keys to which one vector was added is what it was.
TYPED_TEST(KeyMean, RestoresTheInvariance) {
  using T = typename TypeParam::T;
  const MomentCase c = random_moments<T>({1, 1, 1, 40, 60, 8, 0}, false, 22);
  MomentCase moved = c;
  for (std::size_t n = 0; n < c.k.size(); ++n)
    moved.k[n] = static_cast<double>(static_cast<T>(c.k[n] + static_cast<double>(n % 8) - 3));
  KeyMeanRun<T, typename TypeParam::ExecSpace> first(c), second(moved);
  first.remove();
  second.remove();
  const auto matrix = [&](const std::vector<T>& k) {
    return measure_lln_matrix(c.q, std::vector<double>(k.begin(), k.end()), 8, 2, 2);
  };
  const double tolerance = std::is_same_v<T, float> ? 1e-4 : 1e-12;  // rounding of k + vector, times beta and a few
  EXPECT_NEAR(matrix(first.out.get()).variance, matrix(second.out.get()).variance, tolerance);
  const auto untouched = measure_lln_matrix(c.q, moved.k, 8, 2, 2).variance;
  EXPECT_GT(std::abs(untouched - matrix(first.out.get()).variance), 0.1);
}

// In place, a given mean, and a workspace of its own.
TYPED_TEST(KeyMean, OtherForms) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  const MomentCase c = random_moments<T>({2, 2, 2, 5, 30, 7, 0}, true, 23);
  KeyMeanRun<T, ExecSpace> expected(c), found(c), given(c);
  expected.remove();
  remove_key_mean<T>(found.exec, {found.k.input(), found.mask_ref()}, {.out = found.k.ref()});
  const auto in_place = found.k.get(), out = expected.out.get();
  for (std::size_t n = 0; n < out.size(); ++n)
    if (out[n] != T(7)) {
      EXPECT_EQ(in_place[n], out[n]);
    }
  PlacedTensor<double, 2, ExecSpace> mean({2, 7}, Layout::left);
  mean.set(Random(seed()).normals(14));
  const auto means = mean.get();
  remove_given_key_mean<T>(given.exec, {given.k.input(), given.mask_ref()}, mean.input(), given.out.ref());
  given.exec.fence();
  const auto relative = given.out.get();
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t j = 0; j < 30; ++j)
        for (std::int64_t f = 0; f < 7; ++f)
          if (c.sees_key(b, j)) {
            EXPECT_EQ(relative[c.k_at(b, h, j, f)],
                      static_cast<T>(c.k[c.k_at(b, h, j, f)] - means[static_cast<std::size_t>(h * 7 + f)]));
          }
  expect_refusal(
      [&] { remove_key_mean<T>(found.exec, {.k = found.k.input()}, {.out = found.out.ref()}, {.causal = true}); },
      {"future", "remove_given_key_mean"});
  expect_refusal([&] { remove_key_mean<T>(found.exec, {}, {.out = found.out.ref()}); }, {"k is missing"});
  expect_refusal([&] { remove_given_key_mean<T>(found.exec, {.k = found.k.input()}, {}, found.out.ref()); },
                 {"given mean", "(2, 7)"});
  // rows of no features, behind which there is no memory
  remove_key_mean<T>(found.exec, {.k = {nullptr, {1, 2, 7, 0}, {0, 0, 0, 1}}}, {.out = {nullptr, {1, 2, 7, 0}, {}}});
}

TYPED_TEST(KeyMean, Gradient) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  if (!std::is_same_v<T, double>) return;
  const MomentCase c = random_moments<double>({2, 2, 2, 5, 300, 3, 0}, true, 24);
  Random random(seed());
  std::vector<double> d_out = random.normals(static_cast<std::int64_t>(c.k.size()));
  MomentCase cotangent = c;
  cotangent.k = d_out;
  poison_hidden(cotangent);
  KeyMeanRun<T, ExecSpace> run(cotangent);
  remove_key_mean_backward<T>(run.exec, run.k.ref(), run.mask_ref());
  const auto pulled = run.k.get();
  std::vector<double> d_k(c.k.size(), 0.0);
  for (std::size_t n = 0; n < d_k.size(); ++n)
    if (std::isfinite(cotangent.k[n])) d_k[n] = static_cast<double>(pulled[n]);
  const auto loss = [&](const std::vector<double>& x) {
    MomentCase at = c;
    at.k = x;
    KeyMeanRun<T, ExecSpace> forward(at);
    forward.remove();
    const auto out = forward.out.get();
    double sum = 0;
    for (std::size_t n = 0; n < out.size(); ++n)
      if (std::isfinite(cotangent.k[n])) sum += d_out[n] * static_cast<double>(out[n]);
    return sum;
  };
  const auto check =
      check_direction<double>(loss, d_k, c.k, random.normals(static_cast<std::int64_t>(c.k.size())), 1e-2);
  EXPECT_NEAR(check.analytic, check.numeric, check.error + 1e-9);
}

}  // namespace
