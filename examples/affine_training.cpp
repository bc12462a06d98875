// SPDX-License-Identifier: BSD-3-Clause

// Affine attention: a training step with dropout and the check of small row sums, then a sequence in two parts by a
// state, without dropout.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <linattn/linattn.hpp>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  using Exec = Kokkos::DefaultHostExecutionSpace;
  const Exec exec;
  using Tensor = Kokkos::View<float****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using Rows = Kokkos::View<float***, Kokkos::LayoutRight, Kokkos::HostSpace>;
  const int B = 2, H = 4, N = 50, D = 16;
  const Tensor q("q", B, H, N, D), k("k", B, H, N, D), v("v", B, H, N, D), o("o", B, H, N, D);
  const Tensor d_q("d_q", B, H, N, D), d_k("d_k", B, H, N, D), d_v("d_v", B, H, N, D);
  for (const Tensor& x : {q, k, v})
    for (std::size_t i = 0; i < x.size(); ++i) x.data()[i] = 0.25f * static_cast<float>(7 * i % 11) - 1;
  const Rows sums("sums", B, H, N);
  const Kokkos::View<LinAttn::NormaliserRecord**, Kokkos::HostSpace> smallest("smallest", B, H);

  const LinAttn::Affine affine{.a = 1.0, .b = 1.0, .qk_norm = LinAttn::QkNorm::l2};
  const LinAttn::Options training{.causal = true, .dropout = {.p = 0.1, .seed = 42, .offset = 7}};
  const LinAttn::Saved<Exec, float> saved{.o = o, .denominator = sums, .smallest = smallest};
  LinAttn::forward<float>(exec, affine, {.q = q, .k = k, .v = v}, saved, training);
  LinAttn::check<float>(exec, saved, training);  // throws if a row divided by next to nothing
  // L = |o|^2 / 2, so that dL/do = o; the same noise again
  LinAttn::backward<float>(exec, affine, {.q = q, .k = k, .v = v}, saved, o, {.q = d_q, .k = d_k, .v = d_v}, training);

  const Tensor whole("whole", B, H, N, D), parts("parts", B, H, N, D), S("S", B, H, D, D);
  const Rows z("z", B, H, D), t("t", B, H, D);
  const Kokkos::View<std::int64_t*, Kokkos::HostSpace> m("m", B);  // tokens so far
  const LinAttn::State<Exec, float> state{.S = S, .z = z, .t = t, .m = m};
  const auto rows = [](const Tensor& x, int begin, int end) {
    return Kokkos::subview(x, Kokkos::ALL, Kokkos::ALL, std::pair(begin, end), Kokkos::ALL);
  };
  LinAttn::forward<float>(exec, affine, {.q = q, .k = k, .v = v}, {.o = whole}, {.causal = true});
  LinAttn::forward<float>(exec, affine, {.q = rows(q, 0, 30), .k = rows(k, 0, 30), .v = rows(v, 0, 30)},
                          {.o = rows(parts, 0, 30), .state = state}, {.causal = true});
  LinAttn::forward<float>(exec, affine,
                          {.q = rows(q, 30, N), .k = rows(k, 30, N), .v = rows(v, 30, N), .state = state.as_const()},
                          {.o = rows(parts, 30, N)}, {.causal = true});

  float worst = 0;
  for (std::size_t i = 0; i < whole.size(); ++i)
    worst = std::max(worst, std::abs(parts.data()[i] - whole.data()[i]));
  std::printf("smallest row sum a key: %.2f, keys before the second part: %d, largest difference to one part: %.1e\n",
              smallest(0, 0).ratio, static_cast<int>(m(0)), worst);
  return worst < 1e-5f && m(0) == 30 ? 0 : 1;
}
