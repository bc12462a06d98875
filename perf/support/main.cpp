// SPDX-License-Identifier: BSD-3-Clause
//
// The main program of every benchmark: options, configuration, and the probes at the begin and the
// end.
//
//   PROGRAM [--seconds=0.25] [options of Google Benchmark]
//
//   --seconds=S   about so long for a row; 0 runs everything once, as a smoke test

#include <benchmark/benchmark.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <linattn/version.hpp>
#include <string>

#include "rows.hpp"

namespace LinAttn::perf {
namespace {

Machine<Exec>* the_machine = nullptr;

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown";
}

std::string compiler() {
#if defined(__clang__)
  return detail::message("Clang ", __clang_major__, ".", __clang_minor__, ".",
                         __clang_patchlevel__);
#elif defined(__GNUC__)
  return detail::message("GCC ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#else
  return "unknown";
#endif
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string kokkos_version() {
  constexpr int version = KOKKOS_VERSION;
  return detail::message(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

void describe_configuration() {
  benchmark::AddCustomContext("linattn_version", LINATTN_VERSION);
  benchmark::AddCustomContext("kokkos_version", kokkos_version());
  benchmark::AddCustomContext("execution_space", Exec::name());
  benchmark::AddCustomContext("threads", std::to_string(machine().threads()));
  benchmark::AddCustomContext("cpu", processor());
  benchmark::AddCustomContext("compiler", compiler());
  benchmark::AddCustomContext("simd_bytes", std::to_string(LINATTN_SIMD_BYTES));
  benchmark::AddCustomContext("seconds_a_row", detail::message(machine().effort().seconds));
  benchmark::AddCustomContext("triad_bytes_an_array", std::to_string(machine().triad_bytes()));
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES"})
    benchmark::AddCustomContext(name, environment(name));
#if defined(NDEBUG)
  benchmark::AddCustomContext("assertions", "off");
#else
  benchmark::AddCustomContext("assertions", "on");
#endif
}

/// Both probes of all threads; `scaling` is their FMA rate over that of one thread times their
/// number.
void add_probes(const std::string& name) {
  add_row("probes/" + name, [](benchmark::State& state) {
    Machine<Exec>& m = machine();
    for (auto _ : state) {
      const double begin = seconds();
      const double all = m.fma<float>(m.threads());
      state.counters["fma_f32_GFLOP/s"] = all * 1e-9;
      state.counters["fma_f64_GFLOP/s"] = m.fma<double>(m.threads()) * 1e-9;
      state.counters["triad_GB/s"] = m.triad() * 1e-9;
      state.counters["scaling"] = m.scaling<float>(all);
      state.SetIterationTime(seconds() - begin);
    }
  });
}

int run(int argc, char** argv) {
  Effort effort;
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--seconds=", 10) == 0) {
      char* end = nullptr;
      effort.seconds = std::strtod(argv[i] + 10, &end);
      if (end == argv[i] + 10 || *end != '\0' || !(effort.seconds >= 0)) {
        std::fprintf(stderr, "%s: a number of seconds is needed\n", argv[i]);
        return 2;
      }
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  argv[argc] = nullptr;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;

  Machine<Exec> here(Exec(), effort);
  the_machine = &here;
  describe_configuration();
  add_probes("begin");
  register_rows();
  add_probes("end");
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace

Machine<Exec>& machine() { return *the_machine; }

}  // namespace LinAttn::perf

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  return LinAttn::perf::run(argc, argv);
}
