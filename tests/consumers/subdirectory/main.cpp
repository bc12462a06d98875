// SPDX-License-Identifier: BSD-3-Clause
//
// Attention whose values do not depend on the key gives back that value, and no gradient in q, k,
// alpha and beta.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <linattn/linattn.hpp>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  using Exec = Kokkos::DefaultHostExecutionSpace;
  using Tensor = Kokkos::View<float****, Kokkos::LayoutLeft, Kokkos::HostSpace>;
  const Exec exec;
  const Tensor q("q", 1, 4, 37, 7), k("k", 1, 2, 53, 7), v("v", 1, 2, 53, 6), o("o", 1, 4, 37, 6);
  const Tensor d_o("d_o", 1, 4, 37, 6), d_q("d_q", 1, 4, 37, 7), d_k("d_k", 1, 2, 53, 7);
  const Kokkos::View<float***, Kokkos::HostSpace> s("s", 1, 4, 37);
  const Kokkos::View<double*, Kokkos::HostSpace> d_alpha("d_alpha", 4), d_beta("d_beta", 2);
  for (const Tensor& x : {q, k, d_o})
    for (std::size_t i = 0; i < x.size(); ++i)
      x.data()[i] = 0.25f * static_cast<float>(5 * i % 9) - 1.0f;
  for (int g = 0; g < 2; ++g)
    for (int j = 0; j < 53; ++j)
      for (int d = 0; d < 6; ++d) v(0, g, j, d) = static_cast<float>(1 + g + 2 * d);

  const LinAttn::Lln variant{.alpha = 1.5, .beta = 2.5};
  const LinAttn::Options options{.causal = true};
  const LinAttn::Problem problem{
      .batch = 1, .heads = 4, .kv_heads = 2, .nq = 37, .nk = 53, .d = 7, .dv = 6};
  using LinAttn::Pass;
  const std::size_t bytes =
      std::max(LinAttn::workspace_size<float>(exec, variant, problem, Pass::forward, options),
               LinAttn::workspace_size<float>(exec, variant, problem, Pass::backward, options));
  const Kokkos::View<std::byte*, Kokkos::HostSpace> workspace("workspace", bytes);
  LinAttn::forward<float>(exec, variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = s},
                          workspace, options);
  LinAttn::backward<float>(
      exec, variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = s}, d_o,
      {.q = d_q, .k = d_k, .query_parameter = d_alpha, .key_parameter = d_beta}, workspace,
      options);
  exec.fence();

  double error = 0;
  for (int h = 0; h < 4; ++h)
    for (int i = 0; i < 37; ++i)
      for (int d = 0; d < 6; ++d)
        error = std::max<double>(error,
                                 std::abs(o(0, h, i, d) - static_cast<float>(1 + h / 2 + 2 * d)));
  double gradient = 0;
  for (const Tensor& x : {d_q, d_k})
    for (std::size_t i = 0; i < x.size(); ++i)
      gradient = std::max<double>(gradient, std::abs(x.data()[i]));
  for (int h = 0; h < 4; ++h) gradient = std::max(gradient, std::abs(d_alpha(h)));
  for (int h = 0; h < 2; ++h) gradient = std::max(gradient, std::abs(d_beta(h)));
  std::printf("LinAttn %s on %s: output off by %.1e, gradients up to %.1e\n", LINATTN_VERSION,
              Exec::name(), error, gradient);
  // 53 terms of size 12 at most, each with a few roundings
  return error < 53 * 12 * 6e-8 && gradient < 1e-3 ? 0 : 1;
}
