// SPDX-License-Identifier: BSD-3-Clause
#include <cstdio>
#include <linattn/linattn.hpp>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  const Kokkos::DefaultHostExecutionSpace exec;
  using Tensor = Kokkos::View<double****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  const Tensor q("q", 2, 4, 6, 5), k("k", 2, 4, 6, 5), v("v", 2, 4, 6, 3);
  const Tensor o("o", 2, 4, 6, 3), d_q("d_q", 2, 4, 6, 5);
  const Kokkos::View<double***, Kokkos::HostSpace> s("s", 2, 4, 6);
  for (Tensor x : {q, k, v})
    for (std::size_t i = 0; i < x.size(); ++i) x.data()[i] = 0.25 * (5 * i % 9) - 1;
  LinAttn::forward<double>(exec, LinAttn::Elu{}, {.q = q, .k = k, .v = v},
                           {.o = o, .denominator = s}, {.causal = true});
  // L = |o|^2 / 2, so that dL/do = o
  LinAttn::backward<double>(exec, LinAttn::Elu{}, {.q = q, .k = k, .v = v},
                            {.o = o, .denominator = s}, o, {.q = d_q}, {.causal = true});
  std::printf("%.6f %.6f\n", o(1, 2, 3, 1), d_q(1, 2, 3, 1));
}
