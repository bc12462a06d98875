// SPDX-License-Identifier: BSD-3-Clause
//
// Moments of q and k, which are read once, against the triad: eff is the bytes of q and k a second over the bandwidth
// of the triad of the same run; support/rows.hpp says what the other counters are. eff >= 0.8 is wanted.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/moments
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows, named tensor or head by the scope where others have the pass:
//   moments   sigma_q and sigma_k of 8 heads, N = 65,536 and, of a batch, 1,024
//   small     smoke test

#include <cstddef>
#include <linattn/analysis/moments.hpp>
#include <string>

#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

template <class T>
void add_moments(const char* group, MomentScope scope, const Problem& p) {
  const std::string name = row_name(group, std::string(to_string(scope)).c_str(), "sigma", type_name<T>(), false, p);
  add_row(name, [=](benchmark::State& state) {
    using Memory = Exec::memory_space;
    const Exec exec;
    const Kokkos::View<T****, Kokkos::LayoutRight, Memory> q("q", p.batch, p.heads, p.nq, p.d),
        k("k", p.batch, p.kv_heads, p.nk, p.d);
    const Kokkos::View<double*, Memory> sigma_q("sigma_q", p.kv_heads), sigma_k("sigma_k", p.kv_heads);
    fill(exec, q, {1, false});
    fill(exec, k, {2, false});
    exec.fence();
    const MomentOptions options{.scope = scope};
    const Kokkos::View<std::byte*, Memory> workspace("workspace",
                                                     moments_workspace_size<T>(exec, p, Pass::forward, options));
    const double bytes = static_cast<double>((q.size() + k.size()) * sizeof(T));
    for (auto _ : state) {
      const auto row = machine().row<accumulator_t<T>>([&] {
        return seconds_of(exec, [&] {
          measure_moments<T>(exec, {.q = q, .k = k}, {.sigma_q = sigma_q, .sigma_k = sigma_k},
                             Workspace<Exec>(workspace), options);
        });
      });
      report(state, row, 0, bytes, static_cast<double>(p.batch * p.heads * p.nq));
    }
  });
}

}  // namespace

void register_rows() {
  for (const MomentScope scope : {MomentScope::tensor, MomentScope::head}) {
    add_moments<float>("small", scope, shape(1, 2, 200, 24));
    add_moments<float>("moments", scope, shape(1, 8, 65536, 64));
    add_moments<double>("moments", scope, shape(1, 8, 65536, 64));
    add_moments<bfloat16>("moments", scope, shape(1, 8, 65536, 64));
    add_moments<float>("moments", scope, shape(64, 8, 1024, 64));
  }
}

}  // namespace LinAttn::perf
