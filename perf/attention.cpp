// SPDX-License-Identifier: BSD-3-Clause
//
// The rows from which perf/bars.py makes the table of bars: forward and backward of the engine
// against the roofs of the machine, ratios, and memory. support/rows.hpp says what is counted.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/attention
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   main           every variant in fp32 and fp64, D = 64 and 128, no fewer heads than threads
//   lln_over_elu, lln_diag_over_lln   ratio of times
//   few_heads      ratio of times of a token, one head over many, and the same number of tokens
//   next_n         ratio of times of a FLOP, N + 1 over N
//   linear_in_n    ratio of times of a token, N = 65,536 over N = 4,096
//   d_sweep        D = Dv = 16, 32, ..., 512
//   short          N = 1 ... 256, and exact attention beside it
//   exact          exact attention, full and causal; one head
//   crossover      ratio of times of a token, exact attention over a linear one, N = 2 D + 64
//   memory         bytes kept and of temporaries at N and 2 N, by the size query and measured
//   small          smoke test

#include <algorithm>
#include <string>

#include "support/memory.hpp"
#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

template <class T, class V>
Job<T, V> job(const Problem& problem, bool causal = true) {
  return {.problem = problem, .options = {.causal = causal}};
}

/// Identity with positive q and k, normalised: the free feature map of the bars, as relu is.
template <class T>
Job<T, Identity> normalised_identity(const Problem& problem) {
  return {.variant_name = "normalised_identity",
          .problem = problem,
          .options = {.causal = true, .normalise = true}};
}

template <class T>
void add_main() {
  for (const Problem& p : {shape(1, many_heads(), 4096, 64), shape(1, many_heads(), 2048, 128)}) {
    for_each_variant([&]<class V>(std::type_identity<V>) { add_passes("main", job<T, V>(p)); });
    add_passes("main", normalised_identity<T>(p));
  }
}

template <class T>
void add_ratios() {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Problem& p : {shape(1, many_heads(), 4096, 64), shape(1, many_heads(), 2048, 128)})
      add_ratio("lln_over_elu", pass, job<T, Elu>(p), job<T, Lln>(p), PerToken{});
    for (const bool causal : {true, false}) {
      const Problem p = shape(1, many_heads(), 4096, 64);
      add_ratio("lln_diag_over_lln", pass, job<T, Lln>(p, causal), job<T, LlnDiag>(p, causal),
                PerToken{});
    }
  }
}

void add_long_and_next() {
  const std::int64_t few = std::max(2, machine().threads());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Problem many = shape(1, many_heads(), 65536 / many_heads(), 64),
                  one = shape(1, 1, 65536, 64);
    add_ratio("few_heads", pass, job<float, Relu>(many), job<float, Relu>(one), PerToken{});
    add_ratio("few_heads", pass, job<float, Elu>(many), job<float, Elu>(one), PerToken{});
    for (const std::int64_t n : {16, 64, 256, 1024, 4096})
      add_ratio("next_n", pass, job<float, Relu>(shape(1, few, n, 64)),
                job<float, Relu>(shape(1, few, n + 1, 64)), PerFlop{});
    add_ratio("linear_in_n", pass, job<float, Elu>(shape(1, few, 4096, 64)),
              job<float, Elu>(shape(1, few, 65536, 64)), PerToken{});
  }
}

void add_d_sweep() {
  const std::int64_t few = std::max(2, machine().threads());
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (std::int64_t d = 16; d <= 512; d += 16)
      add_pass("d_sweep", pass, job<float, Relu>(shape(1, few, 1024, d)));
}

void add_short() {
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const std::int64_t n : {1, 16, 32, 64, 128, 256}) {
      add_pass("short", pass, job<float, Elu>(shape(1, many_heads(), n, 64)));
      add_pass("short", pass, job<float, Softmax>(shape(1, many_heads(), n, 64)));
    }
}

template <class T>
void add_exact() {
  for (const bool causal : {false, true}) {
    for (const std::int64_t d : {64, 128})
      add_passes("exact", job<T, Softmax>(shape(1, many_heads(), 2048, d), causal));
    add_passes("exact", job<T, Softmax>(shape(1, 1, 4096, 64), causal));
  }
}

void add_crossover() {
  for (const std::int64_t d : {64, 128}) {
    const Problem p = shape(1, many_heads(), 2 * d + 64, d);
    add_ratio("crossover", Pass::forward, job<float, Elu>(p), job<float, Softmax>(p), PerToken{});
    add_ratio("crossover", Pass::forward, job<float, Lln>(p), job<float, Softmax>(p), PerToken{});
  }
}

// ---- memory -------------------------------------------------------------------------------------

template <class T, class V>
void add_memory(Pass pass) {
  const auto once = job<T, V>(shape(1, many_heads(), 16384, 64)),
             twice = job<T, V>(shape(1, many_heads(), 32768, 64));
  add_row(once.name("memory", pass), [=](benchmark::State& state) {
    const auto measure = [&](const Job<T, V>& j, const std::string& at) {
      const auto c = j.make();
      const Plan plan = LinAttn::plan<T>(c->exec(), j.variant, j.problem, pass, j.options);
      const auto states =
          static_cast<double>(plan.segments * j.problem.heads * j.problem.d * (j.problem.dv + 1));
      state.counters["tokens_" + at] = c->tokens();
      state.counters["saved_" + at] = static_cast<double>(c->saved_bytes());
      state.counters["workspace_" + at] = static_cast<double>(c->workspace_bytes(pass));
      state.counters["states_" + at] = states * sizeof(accumulator_t<T>);
      state.counters["measured_" + at] = peak_growth([&] { c->run_with_own_workspace(pass); });
    };
    for (auto _ : state) {
      const double begin = seconds();
      measure(once, "N");
      measure(twice, "2N");
      state.SetIterationTime(seconds() - begin);
    }
    state.counters["number_bytes"] = sizeof(accumulator_t<T>);
    state.SetLabel(twice.name("memory", pass));
  });
}

}  // namespace

void register_rows() {
  for_each_variant([]<class V>(std::type_identity<V>) {
    for (const bool causal : {true, false}) {
      Problem p{1, 2, 1, 200, 200, 24, 40};
      add_passes("small", job<float, V>(p, causal));
      add_passes("small", job<double, V>(p, causal));
    }
  });
  add_main<float>();
  add_main<double>();
  add_ratios<float>();
  add_ratios<double>();
  add_long_and_next();
  add_d_sweep();
  add_short();
  add_exact<float>();
  add_exact<double>();
  add_crossover();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    add_memory<float, Elu>(pass);
    add_memory<float, Lln>(pass);
    add_memory<double, Elu>(pass);
  }
}

}  // namespace LinAttn::perf
