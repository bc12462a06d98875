// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <linattn/linattn.hpp>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "case.hpp"
#include "measure.hpp"

/// \file rows.hpp
/// Rows of the benchmark programs. The name of a row is
///
///     group/pass/variant/type/mask/B1/H8/N4096/D64/Dv64
///
/// Its time (real_time) is the median of many runs. Counters:
///
///     eff           T_min / median time, T_min = max(FLOPs / FMA rate, bytes / triad bandwidth)
///     eff_best      the same with the shortest time
///     GFLOP/s, GB/s of the recurrent minimum and the compulsory bytes, by the median time
///     bytes         compulsory bytes; saved_bytes, workspace_bytes: memory beside inputs, outputs
///     tokens/s      a token is one position of one query head
///     best_s, spread, samples   shortest time, distance of the quartiles over the median, runs
///     roof_GFLOP/s, roof_GB/s   the probes around the row
///     drift, scaling, disturbed   of the FMA probe, and whether that discards the row

namespace LinAttn::perf {

using Exec = Kokkos::DefaultHostExecutionSpace;

/// The machine of this program.
Machine<Exec>& machine();

/// Every program registers its rows here, after Kokkos is initialised.
void register_rows();

inline std::string row_name(const std::string& group, const char* pass, const char* variant,
                            const char* type, bool causal, const Problem& p) {
  return detail::message(group, "/", pass, "/", variant, "/", type, causal ? "/causal" : "/full",
                         "/B", p.batch, "/H", p.heads, "/N", p.nq, "/D", p.d, "/Dv", p.dv);
}

/// What is to be attended, and under which name.
template <class T, class V>
struct Job {
  V variant{};
  const char* variant_name = V::name;
  Problem problem{};
  Options options{.causal = true};

  std::unique_ptr<Case<T, V, Exec>> make() const {
    return std::make_unique<Case<T, V, Exec>>(variant, problem, options);
  }
  std::string name(const char* group, Pass pass) const {
    return row_name(group, pass_name(pass), variant_name, type_name<T>(), options.causal, problem);
  }
};

inline Problem shape(std::int64_t batch, std::int64_t heads, std::int64_t n, std::int64_t d) {
  return {batch, heads, heads, n, n, d, d};
}

/// Enough heads for every thread, and at least 8.
inline std::int64_t many_heads() { return std::max<std::int64_t>(8, machine().threads()); }

inline void add_row(const std::string& name, std::function<void(benchmark::State&)> run) {
  benchmark::RegisterBenchmark(name.c_str(), std::move(run))
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

/// Times and probes of a row as counters.
inline void report(benchmark::State& state, const Machine<Exec>::Row& row) {
  state.SetIterationTime(row.times.median);
  auto& c = state.counters;
  c["best_s"] = row.times.least;
  c["spread"] = row.times.spread;
  c["samples"] = row.times.samples;
  c["drift"] = row.drift;
  c["scaling"] = row.scaling;
  c["disturbed"] = row.disturbed() ? 1 : 0;
}
inline void report(benchmark::State& state, const Machine<Exec>::Row& row, double flops,
                   double bytes, double tokens) {
  report(state, row);
  auto& c = state.counters;
  const double least = row.roof.least_seconds(flops, bytes);
  c["eff"] = least / row.times.median;
  c["eff_best"] = least / row.times.least;
  c["GFLOP/s"] = flops / row.times.median * 1e-9;
  c["GB/s"] = bytes / row.times.median * 1e-9;
  c["bytes"] = bytes;
  c["tokens/s"] = tokens / row.times.median;
  c["roof_GFLOP/s"] = row.roof.flops * 1e-9;
  c["roof_GB/s"] = row.roof.bandwidth * 1e-9;
}

/// One pass of one problem.
template <class T, class V>
void add_pass(const char* group, Pass pass, const Job<T, V>& job, const std::string& label = "") {
  add_row(job.name(group, pass), [=](benchmark::State& state) {
    const auto c = job.make();
    for (auto _ : state) {
      const auto row = machine().template row<accumulator_t<T>>(
          [&] { return seconds_of(c->exec(), [&] { c->run(pass); }); });
      report(state, row, c->flops(pass), c->bytes(pass), c->tokens());
    }
    state.counters["workspace_bytes"] = static_cast<double>(c->workspace_bytes(pass));
    state.counters["saved_bytes"] = static_cast<double>(c->saved_bytes());
    state.SetLabel(label);
  });
}
template <class T, class V>
void add_passes(const char* group, const Job<T, V>& job) {
  for (const Pass pass : {Pass::forward, Pass::backward}) add_pass(group, pass, job);
}

/// Two problems in turn, so that a drift of the machine meets both: `ratio` is the median of the
/// time of the second over that of the first, each for one unit of work as `unit` counts it.
template <class T, class V, class W, class Unit>
void add_ratio(const char* group, Pass pass, const Job<T, V>& first, const Job<T, W>& second,
               const Unit& unit) {
  add_row(first.name(group, pass), [=](benchmark::State& state) {
    const auto a = first.make();
    const auto b = second.make();
    std::vector<double> times_a, times_b, ratios;
    for (auto _ : state) {
      const auto row = machine().template row<accumulator_t<T>>([&] {
        const double time_a = seconds_of(a->exec(), [&] { a->run(pass); }) / unit(*a, pass);
        const double time_b = seconds_of(b->exec(), [&] { b->run(pass); }) / unit(*b, pass);
        times_a.push_back(time_a);
        times_b.push_back(time_b);
        ratios.push_back(time_b / time_a);
        return time_a * unit(*a, pass) + time_b * unit(*b, pass);
      });
      report(state, row);
    }
    const Times r = summary(ratios);
    state.counters["first"] = summary(times_a).median;
    state.counters["second"] = summary(times_b).median;
    state.counters["ratio"] = r.median;
    state.counters["ratio_spread"] = r.spread;
    state.SetLabel(second.name(group, pass));
  });
}

/// Units of work for add_ratio().
struct PerToken {
  template <class C>
  double operator()(const C& c, Pass) const {
    return c.tokens();
  }
};
struct PerFlop {
  template <class C>
  double operator()(const C& c, Pass pass) const {
    return c.flops(pass);
  }
};

}  // namespace LinAttn::perf
