// SPDX-License-Identifier: BSD-3-Clause
//
// Forward and backward of the engine against the roofs of the machine, and the time of a token against the
// length of its sequence.
//
//   build/release/perf/attention [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Counters: tokens/s; GFLOP/s of the recurrent minimum (4 R (Dv+1) a token and head forward, 10 R (Dv+1)
// backward, 2 R (Dv+1) for each key and each query without a mask); eff = T_min / T with
// T_min = max(FLOPs / FMA rate, compulsory bytes / triad bandwidth), both measured in the same run.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <linattn/linattn.hpp>
#include <map>
#include <string>

#include "support/probes.hpp"

namespace {

using Exec = Kokkos::DefaultHostExecutionSpace;
using Memory = Exec::memory_space;
using LinAttn::Pass;
using LinAttn::Problem;

struct Roofs {
  double fma_float, fma_double, bandwidth;
};
const Roofs& roofs() {
  static const Roofs measured = [] {
    const Exec exec;
    const int threads = LinAttn::detail::concurrency(exec);
    const Roofs r{LinAttn::perf::fma_rate<float>(exec, threads), LinAttn::perf::fma_rate<double>(exec, threads),
                  LinAttn::perf::triad_bandwidth(exec)};
    std::fprintf(stderr, "roofs on %d threads: FMA %.1f GFLOP/s fp32, %.1f fp64; triad %.1f GB/s\n", threads,
                 r.fma_float * 1e-9, r.fma_double * 1e-9, r.bandwidth * 1e-9);
    return r;
  }();
  return measured;
}

/// Numbers in (-1, 1) from the index, never zero.
struct Fill {
  std::uint64_t seed;
  double operator()(std::uint64_t i) const {
    std::uint64_t z = (i + 1 + (seed << 40)) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return ((z >> 11) | 1) * 0x1p-52 - 1.0;
  }
};

template <class T, class V>
class Case {
 public:
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Memory>;

  Case(const V& variant, const Problem& problem, bool causal) : m_variant(variant), m_p(problem) {
    m_options.causal = causal;
    q = filled("q", m_p.heads, m_p.nq, m_p.d, 1);
    k = filled("k", m_p.kv_heads, m_p.nk, m_p.d, 2);
    v = filled("v", m_p.kv_heads, m_p.nk, m_p.dv, 3);
    d_o = filled("d_o", m_p.heads, m_p.nq, m_p.dv, 4);
    o = Tensor("o", m_p.batch, m_p.heads, m_p.nq, m_p.dv);
    d_q = Tensor("d_q", m_p.batch, m_p.heads, m_p.nq, m_p.d);
    d_k = Tensor("d_k", m_p.batch, m_p.kv_heads, m_p.nk, m_p.d);
    d_v = Tensor("d_v", m_p.batch, m_p.kv_heads, m_p.nk, m_p.dv);
    denominator = decltype(denominator)("denominator", m_p.batch, m_p.heads, m_p.nq);
    std::size_t bytes = 0;
    for (Pass pass : {Pass::forward, Pass::backward})
      bytes = std::max(bytes, LinAttn::workspace_size<T>(m_exec, m_variant, m_p, pass, m_options));
    m_workspace = decltype(m_workspace)("workspace", bytes);
    forward();
    m_exec.fence();
  }

  void run(Pass pass) { pass == Pass::forward ? forward() : backward(); }

  double seconds(Pass pass) {
    const double begin = LinAttn::perf::seconds();
    run(pass);
    m_exec.fence();
    return LinAttn::perf::seconds() - begin;
  }

  double tokens() const { return static_cast<double>(m_p.batch * m_p.heads * m_p.nq); }

  double flops(Pass pass) const {
    const double a_token = static_cast<double>(m_p.d) * (m_p.dv + 1);
    return tokens() * a_token * (pass == Pass::forward ? 4 : 10);
  }
  double bytes(Pass pass) const {
    const double row = sizeof(T);
    return pass == Pass::forward ? tokens() * (row * (2 * m_p.d + 2 * m_p.dv) + sizeof(T))
                                 : tokens() * (row * (4 * m_p.d + 4 * m_p.dv) + sizeof(T));
  }
  double least_seconds(Pass pass) const {
    const double rate = sizeof(T) == 4 ? roofs().fma_float : roofs().fma_double;
    return std::max(flops(pass) / rate, bytes(pass) / roofs().bandwidth);
  }

 private:
  Tensor filled(const char* name, std::int64_t heads, std::int64_t rows, std::int64_t columns,
                std::uint64_t seed) {
    Tensor t(std::string(name), m_p.batch, heads, rows, columns);
    for (std::size_t i = 0; i < t.span(); ++i) t.data()[i] = static_cast<T>(Fill{seed}(i));
    return t;
  }
  void forward() {
    LinAttn::forward<T>(m_exec, m_variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = denominator},
                        m_workspace, m_options);
  }
  void backward() {
    LinAttn::backward<T>(m_exec, m_variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = denominator},
                         d_o, {.q = d_q, .k = d_k, .v = d_v}, m_workspace, m_options);
  }

  Exec m_exec;
  V m_variant;
  Problem m_p;
  LinAttn::Options m_options;
  Tensor q, k, v, o, d_o, d_q, d_k, d_v;
  Kokkos::View<T***, Kokkos::LayoutRight, Memory> denominator;
  Kokkos::View<std::byte*, Memory> m_workspace;
};

template <class T, class V>
void time_pass(benchmark::State& state, const V& variant, const Problem& problem, bool causal, Pass pass) {
  Case<T, V> c(variant, problem, causal);
  double best = 1e300;
  for (auto _ : state) {
    const double seconds = c.seconds(pass);
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
  }
  state.counters["tokens/s"] = c.tokens() / best;
  state.counters["GFLOP/s"] = c.flops(pass) / best * 1e-9;
  state.counters["eff"] = c.least_seconds(pass) / best;
}

/// Both lengths in turn in every iteration, so that a drift of the machine meets both.
template <class T, class V>
void time_of_a_token(benchmark::State& state, const V& variant, bool causal, Pass pass) {
  const std::int64_t heads = 2 * LinAttn::detail::concurrency(Exec());
  const auto problem = [&](std::int64_t n) { return Problem{1, heads, heads, n, n, 64, 64}; };
  Case<T, V> brief(variant, problem(4096), causal), lengthy(variant, problem(65536), causal);
  double best_brief = 1e300, best_lengthy = 1e300;
  for (auto _ : state) {
    const double a = brief.seconds(pass), b = lengthy.seconds(pass);
    best_brief = std::min(best_brief, a / brief.tokens());
    best_lengthy = std::min(best_lengthy, b / lengthy.tokens());
    state.SetIterationTime(a + b);
  }
  state.counters["ns/token_4096"] = best_brief * 1e9;
  state.counters["ns/token_65536"] = best_lengthy * 1e9;
  state.counters["ratio"] = best_lengthy / best_brief;
}

template <class T, class V>
void add_variant(const V& variant, const char* type) {
  const auto name = [&](Pass pass, bool causal, const std::string& rest) {
    return LinAttn::detail::message(pass == Pass::forward ? "forward/" : "backward/", V::name, "/", type,
                                    causal ? "/causal/" : "/full/", rest);
  };
  for (Pass pass : {Pass::forward, Pass::backward}) {
    for (bool causal : {true, false}) {
      for (const Problem& p : {Problem{1, 8, 8, 4096, 4096, 64, 64}, Problem{1, 8, 8, 2048, 2048, 128, 128},
                               Problem{1, 1, 1, 65536, 65536, 64, 64},
                               Problem{1, 2, 1, 200, 200, 24, 40}}) {
        benchmark::RegisterBenchmark(
            name(pass, causal,
                 LinAttn::detail::message("B", p.batch, "/H", p.heads, "/N", p.nq, "/D", p.d))
                .c_str(),
            [=](benchmark::State& state) { time_pass<T>(state, variant, p, causal, pass); })
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
      benchmark::RegisterBenchmark(
          name(pass, causal, "linear_in_n").c_str(),
          [=](benchmark::State& state) { time_of_a_token<T>(state, variant, causal, pass); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

const bool registered = [] {
  LinAttn::for_each_variant([]<class V>(std::type_identity<V>) {
    add_variant<float>(V{}, "f32");
    add_variant<double>(V{}, "f64");
  });
  return true;
}();

}  // namespace
