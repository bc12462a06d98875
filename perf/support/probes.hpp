// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <linattn/kokkos_compat.hpp>
#include <linattn/simd.hpp>
#include <string>
#include <type_traits>
#include <vector>

/// \file probes.hpp
/// The two roofs of a machine, measured with the threads that the benchmark uses: the rate of fused
/// multiply-adds that touch no memory, and the bandwidth of a triad that fits no cache.

namespace LinAttn::perf {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of one call of f, which may be asynchronous on exec.
template <class ExecSpace, class F>
double seconds_of(const ExecSpace& exec, const F& f) {
  const double begin = seconds();
  f();
  exec.fence();
  return seconds() - begin;
}

/// One host thread's share of the FMA probe: independent vector accumulators, nothing in memory.
template <class T>
struct HostFmaProbe {
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

/// The same for one thread of a device, whose lanes are threads.
template <class T, class Memory>
struct DeviceFmaProbe {
  std::int64_t steps;
  Kokkos::View<T*, Memory> sink;

  static constexpr int accumulators = 16;
  static double flops(std::int64_t steps) {
    return 2.0 * accumulators * static_cast<double>(steps);
  }

  KOKKOS_FUNCTION void operator()(int thread) const {
    T sum[accumulators];
    const T factor = T(1) - T(1e-6), term = T(1e-6) * T(thread % 64 + 1);
    for (int a = 0; a < accumulators; ++a) sum[a] = T(a + 1) * T(1e-3);
    for (std::int64_t i = 0; i < steps; ++i)
      for (int a = 0; a < accumulators; ++a) sum[a] = sum[a] * factor + term;
    T total = 0;
    for (int a = 0; a < accumulators; ++a) total += sum[a];
    sink(thread) = total;
  }
};

/// Of several runs of a probe. The best is what the machine can do, the median what it did.
struct Rate {
  double best = 0, median = 0;
};

/// FMA rate of `threads` threads in FLOP/s (an FMA counts 2), in `runs` runs of some `milliseconds`
/// each. The arithmetic is that of type T, float or double.
template <class T, class ExecSpace>
Rate fma_rate(const ExecSpace& exec, int threads, double milliseconds, int runs) {
  constexpr bool host = detail::is_host_space_v<ExecSpace>;
  using Memory = typename ExecSpace::memory_space;
  using Probe = std::conditional_t<host, HostFmaProbe<T>, DeviceFmaProbe<T, Memory>>;
  // Steps for the time asked for, if a step of a thread takes 3 ns (host) or 200 ns (device).
  const auto steps = static_cast<std::int64_t>(milliseconds * 1e6 / (host ? 3.0 : 200.0)) + 1;
  const Probe probe{steps, decltype(Probe::sink)("LinAttn::perf::sink", threads)};
  std::vector<double> rates;
  for (int run = 0; run < runs; ++run) {
    const double time = seconds_of(exec, [&] {
      Kokkos::parallel_for("LinAttn::perf::fma", Kokkos::RangePolicy<ExecSpace>(exec, 0, threads),
                           probe);
    });
    rates.push_back(threads * Probe::flops(steps) / time);
  }
  std::sort(rates.begin(), rates.end());
  return {rates.back(), rates[(rates.size() - 1) / 2]};
}

struct Triad {
  double *a, *b, *c;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { a[i] = b[i] + 0.5 * c[i]; }
};

/// Bytes of the last-level cache of the host, 0 where the system does not tell. Not from sysconf(),
/// which multiplies it by the cores on some machines.
inline std::int64_t last_level_cache() {
  std::int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    std::int64_t size = 0;
    char unit = 0;
    if (file >> size >> unit)
      largest = std::max(largest, size * (unit == 'M' ? 1 << 20 : unit == 'K' ? 1 << 10 : 1));
  }
  return largest;
}

/// Bandwidth of a triad, 24 bytes an element, on three arrays of at least four times the last-level
/// cache each.
template <class ExecSpace>
class TriadProbe {
 public:
  explicit TriadProbe(const ExecSpace& exec) : m_exec(exec) {
    constexpr std::int64_t usual = std::int64_t(1) << 26, most = std::int64_t(1) << 29;
    const std::int64_t cache = last_level_cache();
    m_n = detail::is_host_space_v<ExecSpace> && cache > 0
              ? std::min(most, 4 * cache / static_cast<std::int64_t>(sizeof(double)))
              : usual;
    for (auto* array : {&m_a, &m_b, &m_c}) *array = Array("LinAttn::perf::triad", m_n);
  }

  std::size_t bytes_an_array() const { return static_cast<std::size_t>(m_n) * sizeof(double); }

  double bandwidth(int runs) const {
    double best = 0;
    for (int run = 0; run < runs; ++run) {
      const double time = seconds_of(m_exec, [&] {
        Kokkos::parallel_for(
            "LinAttn::perf::triad",
            Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, m_n),
            Triad{m_a.data(), m_b.data(), m_c.data()});
      });
      best = std::max(best, 24.0 * static_cast<double>(m_n) / time);
    }
    return best;
  }

 private:
  using Array = Kokkos::View<double*, typename ExecSpace::memory_space>;
  ExecSpace m_exec;
  std::int64_t m_n;
  Array m_a, m_b, m_c;
};

}  // namespace LinAttn::perf
