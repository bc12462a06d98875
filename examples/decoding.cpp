// SPDX-License-Identifier: BSD-3-Clause

// A prompt in one pass, then token by token: the outputs are those of one pass over everything.

#include <cmath>
#include <cstdio>
#include <linattn/linattn.hpp>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  using Memory = Kokkos::HostSpace;
  using Tensor = Kokkos::View<float****, Kokkos::LayoutRight, Memory>;
  using Sums = Kokkos::View<float***, Kokkos::LayoutRight, Memory>;
  const LinAttn::Elu variant;
  const int heads = 4, tokens = 50, prompt = 40, d = 16;

  const Tensor q("q", 1, heads, tokens, d), k("k", 1, heads, tokens, d), v("v", 1, heads, tokens, d);
  const Tensor whole("whole", 1, heads, tokens, d), o("o", 1, heads, tokens, d);
  for (const Tensor& x : {q, k, v})
    for (std::size_t i = 0; i < x.size(); ++i) x.data()[i] = 0.25f * static_cast<float>(7 * i % 11) - 1;
  LinAttn::forward<float>(exec, variant, {.q = q, .k = k, .v = v}, {.o = whole}, {.causal = true});

  // the prompt: outputs, and the state after its last key
  const Tensor S("S", 1, heads, d, d);
  const Sums z("z", 1, heads, d);
  const LinAttn::State<Exec, float> state{.S = S, .z = z};
  const auto rows = [](const Tensor& x, int begin, int end) {
    return Kokkos::subview(x, Kokkos::ALL, Kokkos::ALL, std::pair(begin, end), Kokkos::ALL);
  };
  LinAttn::forward<float>(exec, variant,
                          {.q = rows(q, 0, prompt), .k = rows(k, 0, prompt), .v = rows(v, 0, prompt)},
                          {.o = rows(o, 0, prompt), .state = state}, {.causal = true});

  // then one token at a time; a copy of S and z is all it takes to come back here
  const Kokkos::View<std::byte*, Memory> workspace(
      "workspace",
      LinAttn::workspace_size<float>(exec, variant, {1, heads, heads, 1, 1, d, d}, LinAttn::Pass::step));
  const auto token = [](const Tensor& x, int i) { return Kokkos::subview(x, Kokkos::ALL, Kokkos::ALL, i, Kokkos::ALL); };
  for (int i = prompt; i < tokens; ++i)
    LinAttn::step_in_place<float>(exec, variant, {.q = token(q, i), .k = token(k, i), .v = token(v, i)}, state,
                                  token(o, i), workspace);
  exec.fence();

  float worst = 0;
  for (std::size_t i = 0; i < o.size(); ++i) worst = std::max(worst, std::abs(o.data()[i] - whole.data()[i]));
  std::printf("largest difference to one pass: %.1e\n", worst);
  return worst < 1e-5f ? 0 : 1;
}
