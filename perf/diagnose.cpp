// SPDX-License-Identifier: BSD-3-Clause
//
// The instruments of analysis: what kernel attention gives away in O(N D^2) time (z, G, M, sum P^2 and column sums,
// with the shifts of lln), against the FMA probe. Counted are three products of 2 N D^2 FLOPs; exponentials earn no
// credit. support/rows.hpp says what the counters are; eff >= 0.3 is wanted at N = 65,536, D = 64 for lln in fp32.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/diagnose
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   features   the part above
//   rows       256 sampled rows of full exact softmax attention, whose scores are in double: 2 R N D FLOPs
//   calls      diagnose() of lln as a whole, with 256 sampled rows: full, which takes the features too, and causal,
//              which walks over all tokens; times only
//   small      smoke test

#include <linattn/analysis/diagnose.hpp>
#include <string>

#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

template <class T>
struct Rows {
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Exec::memory_space>;
  Tensor q, k;

  Rows(const Exec& exec, const Problem& p)
      : q("q", p.batch, p.heads, p.nq, p.d), k("k", p.batch, p.kv_heads, p.nk, p.d) {
    fill(exec, q, {1, false});
    fill(exec, k, {2, false});
    exec.fence();
  }
  DiagnoseInputs<Exec, T> inputs() const { return {.q = q, .k = k}; }
};

template <class T, class V>
void add_features(const char* group, const V& variant, const Problem& p) {
  add_row(row_name(group, "features", V::name, type_name<T>(), false, p), [=](benchmark::State& state) {
    const Exec exec;
    const Rows<T> rows(exec, p);
    using Source = detail::FeatureSource<T, query_map_t<V>, key_map_t<V>>;
    Source source;
    Problem found;
    detail::bind_inputs(rows.inputs(), {}, source, found);
    source.query_map = variant.query_map();
    source.key_map = variant.key_map();
    source.mapped = source.features = source.d;
    const double flops = 6.0 * static_cast<double>(p.batch * p.heads * p.nq * p.d) * static_cast<double>(p.d);
    const double bytes = 2.0 * static_cast<double>(p.batch * p.heads * p.nq * p.d) * sizeof(T);
    for (auto _ : state) {
      const auto row = machine().row<accumulator_t<T>>([&] {
        return seconds_of(exec, [&] {
          detail::Diagnosis<T, Exec, query_map_t<V>, key_map_t<V>, false> diagnosis(exec, V::name, source, {});
          diagnosis.prepare();
          diagnosis.measure_features();
        });
      });
      report(state, row, flops, bytes, static_cast<double>(p.batch * p.heads * p.nq));
    }
  });
}

/// Sampled rows only, once the gap is left out: full softmax attention has no features.
template <class T>
void add_rows(const char* group, const Problem& p, std::int64_t sampled) {
  add_row(row_name(group, "rows", SoftmaxKernel::name, type_name<T>(), false, p), [=](benchmark::State& state) {
    const Exec exec;
    const Rows<T> rows(exec, p);
    const double flops = 2.0 * static_cast<double>(p.batch * p.heads * sampled * p.nk * p.d);
    for (auto _ : state) {
      const auto row = machine().row<double>([&] {
        return seconds_of(exec, [&] {
          diagnose<T>(exec, SoftmaxKernel{}, rows.inputs(), {.exact_up_to = 0, .rows = sampled, .gap = false});
        });
      });
      report(state, row, flops, static_cast<double>((sampled + p.nk) * p.d) * sizeof(T), static_cast<double>(sampled));
    }
  });
}

template <class T, class Kernel>
void add_calls(const char* group, const Kernel& kernel, const Problem& p, std::int64_t sampled) {
  for (const bool causal : {false, true})
    add_row(row_name(group, "call", Kernel::name, type_name<T>(), causal, p), [=](benchmark::State& state) {
      const Exec exec;
      const Rows<T> rows(exec, p);
      for (auto _ : state)
        report(state, machine().row<accumulator_t<T>>([&] {
          return seconds_of(exec, [&] {
            diagnose<T>(exec, kernel, rows.inputs(), {.causal = causal, .exact_up_to = 0, .rows = sampled});
          });
        }));
    });
}

}  // namespace

void register_rows() {
  const Lln lln{2.1, 2.1};
  add_features<float>("small", lln, shape(1, 1, 200, 24));
  add_rows<float>("small", shape(1, 1, 200, 24), 64);
  add_calls<float>("small", lln, shape(1, 1, 200, 24), 64);
  for (const std::int64_t d : {32, 64, 128}) {
    add_features<float>("features", lln, shape(1, 1, 65536, d));
    add_features<float>("features", Elu{}, shape(1, 1, 65536, d));
  }
  add_features<float>("features", lln, shape(1, 8, 8192, 64));
  add_features<double>("features", lln, shape(1, 1, 65536, 64));
  add_rows<float>("rows", shape(1, 1, 65536, 64), 256);
  add_calls<float>("calls", lln, shape(1, 1, 65536, 64), 256);
}

}  // namespace LinAttn::perf
