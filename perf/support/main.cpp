// SPDX-License-Identifier: BSD-3-Clause

#include <benchmark/benchmark.h>

#include <Kokkos_Core.hpp>
#include <linattn/version.hpp>
#include <string>

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::AddCustomContext("linattn_version", LINATTN_VERSION);
  benchmark::AddCustomContext("kokkos_version", std::to_string(KOKKOS_VERSION));
  benchmark::AddCustomContext("execution_space", Kokkos::DefaultExecutionSpace::name());
  benchmark::AddCustomContext("concurrency",
                              std::to_string(Kokkos::DefaultExecutionSpace().concurrency()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
