// SPDX-License-Identifier: BSD-3-Clause

// LLN+Diag: a training step with alpha and beta matched to the moments of q and k, the gradient of q and k through them,
// and how concentrated the attention is next to exact attention.

#include <cmath>
#include <cstdio>
#include <linattn/analysis/diagnose.hpp>
#include <linattn/analysis/moments.hpp>
#include <linattn/linattn.hpp>
#include <random>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  using Tensor = Kokkos::View<float****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using Heads = Kokkos::View<double*, Kokkos::HostSpace>;
  const int B = 2, H = 4, N = 200, D = 32;
  const Tensor q("q", B, H, N, D), k("k", B, H, N, D), v("v", B, H, N, D), o("o", B, H, N, D);
  const Tensor d_q("d_q", B, H, N, D), d_k("d_k", B, H, N, D), d_v("d_v", B, H, N, D);
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const Tensor& x : {q, k, v})
    for (std::size_t i = 0; i < x.size(); ++i) x.data()[i] = normal(generator);
  const Kokkos::View<float***, Kokkos::LayoutRight, Kokkos::HostSpace> sums("sums", B, H, N);
  const Heads alpha("alpha", H), beta("beta", H), d_alpha("d_alpha", H), d_beta("d_beta", H);
  const Heads sigma_q("sigma_q", H), sigma_k("sigma_k", H), mean_q("mean_q", H), mean_k("mean_k", H);
  const Heads count_q("count_q", H), count_k("count_k", H);

  const LinAttn::Moments<Exec> moments{.sigma_q = sigma_q, .sigma_k = sigma_k, .mean_q = mean_q, .mean_k = mean_k,
                                       .count_q = count_q, .count_k = count_k};
  const LinAttn::MomentOptions matching{.scope = LinAttn::MomentScope::head, .rule = LinAttn::MomentRule::table};
  LinAttn::match_moments<float>(exec, {.q = q, .k = k}, moments, {.alpha = alpha, .beta = beta}, matching);
  const LinAttn::LlnDiag lln{.alpha = alpha, .beta = beta};  // blocks of D keys, half of each branch
  const LinAttn::Saved<Exec, float> saved{.o = o, .denominator = sums};
  LinAttn::forward<float>(exec, lln, {.q = q, .k = k, .v = v}, saved);
  // L = |o|^2 / 2, so that dL/do = o
  LinAttn::backward<float>(exec, lln, {.q = q, .k = k, .v = v}, saved, o,
                           {.q = d_q, .k = d_k, .v = d_v, .query_parameter = d_alpha, .key_parameter = d_beta});
  // what flows to q and k through alpha and beta; the paper leaves it out
  LinAttn::match_moments_backward<float>(exec, {.q = q, .k = k}, moments.as_const(), {.alpha = d_alpha, .beta = d_beta},
                                         {.q = d_q, .k = d_k}, matching);
  std::printf("sigma_q %.3f, sigma_k %.3f, alpha %.3f, beta %.3f, d_q %.4e\n", sigma_q(0), sigma_k(0), alpha(0), beta(0),
              d_q(1, 2, 3, 4));
  return alpha(0) > 1 && alpha(0) < 3 && std::isfinite(d_q(1, 2, 3, 4)) ? 0 : 1;
}
