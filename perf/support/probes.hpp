// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <linattn/simd.hpp>
#include <vector>

/// \file probes.hpp
/// The two roofs of the host, measured with the threads that the benchmark uses.

namespace LinAttn::perf {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One thread's share of the FMA probe: independent vector accumulators, nothing in memory.
template <class T>
struct FmaProbe {
  std::int64_t steps;
  Kokkos::View<T*, Kokkos::HostSpace> sink;

  static constexpr int accumulators = 12;
  static double flops(std::int64_t steps) {
    return 2.0 * accumulators * detail::vector_lanes<T> * static_cast<double>(steps);
  }

  void operator()(int thread) const {
    detail::vector_t<T> sum[accumulators] = {};
    detail::vector_t<T> factor = {}, term = {};
    for (int lane = 0; lane < detail::vector_lanes<T>; ++lane) {
      factor[lane] = T(1) - T(1e-6);
      term[lane] = T(1e-6) * T(lane + thread + 1);
      for (int a = 0; a < accumulators; ++a) sum[a][lane] = T(a + 1) * T(1e-3);
    }
    for (std::int64_t i = 0; i < steps; ++i)
      for (int a = 0; a < accumulators; ++a) sum[a] = sum[a] * factor + term;
    T total = 0;
    for (int a = 0; a < accumulators; ++a)
      for (int lane = 0; lane < detail::vector_lanes<T>; ++lane) total += sum[a][lane];
    sink(thread) = total;
  }
};

/// Peak FMA rate of all threads of a host space, in FLOP/s (an FMA counts 2): the best of several runs.
template <class T, class ExecSpace>
double fma_rate(const ExecSpace& exec, int threads) {
  const FmaProbe<T> probe{20'000'000, Kokkos::View<T*, Kokkos::HostSpace>("LinAttn::perf::sink", threads)};
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    const double begin = seconds();
    Kokkos::parallel_for("LinAttn::perf::fma", Kokkos::RangePolicy<ExecSpace>(exec, 0, threads), probe);
    exec.fence();
    best = std::max(best, threads * FmaProbe<T>::flops(probe.steps) / (seconds() - begin));
  }
  return best;
}

struct Triad {
  double *a, *b, *c;
  void operator()(std::int64_t i) const { a[i] = b[i] + 0.5 * c[i]; }
};

/// Bandwidth of a triad on three arrays of 32 Mi doubles, 24 bytes an element: the best of several runs.
template <class ExecSpace>
double triad_bandwidth(const ExecSpace& exec) {
  constexpr std::int64_t n = std::int64_t(1) << 25;
  Kokkos::View<double*, typename ExecSpace::memory_space> a("LinAttn::perf::a", n), b("LinAttn::perf::b", n),
      c("LinAttn::perf::c", n);
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    const double begin = seconds();
    Kokkos::parallel_for("LinAttn::perf::triad", Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, n),
                         Triad{a.data(), b.data(), c.data()});
    exec.fence();
    best = std::max(best, 24.0 * n / (seconds() - begin));
  }
  return best;
}

}  // namespace LinAttn::perf
