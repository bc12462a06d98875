// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "probes.hpp"

/// \file measure.hpp
/// Times with their spread, each between two probes of the machine.

namespace LinAttn::perf {

/// How long to measure. `seconds` = 0 is a smoke test: everything runs once.
struct Effort {
  double seconds = 0.25;  ///< about so much for a row
  int least_samples = 9;  ///< but not fewer runs, or a third of them where one is so long
  int attempts = 3;       ///< a row that was disturbed is measured again, so often in all
  double patience = 60;   ///< seconds for measuring again, all rows together

  bool smoke() const { return seconds <= 0; }
};

/// Of many runs of the same work, in seconds.
struct Times {
  double median = 0, least = 0;
  double spread = 0;  ///< distance of the quartiles over the median
  int samples = 0;
};

inline Times summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(times.size() - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, times.size() - 1);
    return times[below] + (place - static_cast<double>(below)) * (times[above] - times[below]);
  };
  Times result;
  result.median = at(0.5);
  result.least = times.front();
  result.spread = (at(0.75) - at(0.25)) / result.median;
  result.samples = static_cast<int>(times.size());
  return result;
}

/// Calls sample(), which returns its own seconds, after two calls for warming up.
template <class F>
std::vector<double> sampled(const Effort& effort, const F& sample) {
  constexpr int most_samples = 100'000;
  if (effort.smoke()) return {sample()};
  for (int i = 0; i < 2; ++i) sample();
  std::vector<double> times;
  const double begin = seconds();
  const auto enough = [&] {
    const double passed = seconds() - begin;
    const auto taken = static_cast<int>(times.size());
    if (passed < effort.seconds) return taken >= most_samples;
    return taken >= effort.least_samples ||
           (passed > 3 * effort.seconds && taken >= effort.least_samples / 3);
  };
  do times.push_back(sample());
  while (!enough());
  return times;
}

/// What the machine can do at most: FLOP/s and bytes/s.
struct Roof {
  double flops = 0, bandwidth = 0;

  /// T_min of work that has to do so much.
  double least_seconds(double work, double bytes) const {
    return std::max(work / flops, bytes / bandwidth);
  }
};

/// The probes of a run. Drift is the change between the FMA probes before and after a row over the
/// larger of them; scaling is what they reached in the median over that of one thread at the begin
/// of the run times the threads. The best of a few short probes alone would not see another program
/// that takes turns.
template <class ExecSpace>
class Machine {
 public:
  static constexpr double largest_drift = 0.05, least_scaling = 0.9, largest_delay = 1.4;

  Machine(const ExecSpace& exec, const Effort& effort)
      : m_exec(exec), m_effort(effort), m_triad(exec) {
    m_one_float = fma<float>(one_worker());
    m_one_double = fma<double>(one_worker());
    m_bandwidth = m_triad.bandwidth(effort.smoke() ? 1 : 5);
    m_when = seconds();
  }

  int threads() const { return detail::concurrency(m_exec); }
  const ExecSpace& exec() const { return m_exec; }
  const Effort& effort() const { return m_effort; }
  std::size_t triad_bytes() const { return m_triad.bytes_an_array(); }

  /// FMA rate in the arithmetic of T of so many threads, well measured.
  template <class T>
  double fma(int threads) const {
    return fma_rate<T>(m_exec, threads, m_effort.smoke() ? 0.1 : 30, m_effort.smoke() ? 1 : 5).best;
  }
  /// That of all threads over what one thread promised.
  template <class T>
  double scaling(double rate) const {
    const double one = std::is_same_v<T, float> ? m_one_float : m_one_double;
    return rate * one_worker() / (one * threads());
  }
  double triad() const { return m_triad.bandwidth(m_effort.smoke() ? 1 : 5); }

  struct Row {
    Times times;
    Roof roof;                      ///< the higher one of the two probes around the row
    double drift = 0, scaling = 0;  ///< of the FMA rate
    /// Of the median over the shortest time.
    double delay() const { return times.median / times.least; }
    /// More than 1 if something else had the machine.
    double disturbance() const {
      return std::max({drift / largest_drift, least_scaling / scaling, delay() / largest_delay});
    }
    bool disturbed() const { return disturbance() > 1; }
  };

  /// Times sample(), which returns its own seconds, in units of the roofs for arithmetic of type T.
  /// A row that was disturbed is taken again; if all are, the one that was least is returned.
  template <class T, class F>
  Row row(const F& sample) {
    Row best;
    for (int attempt = 0; attempt < m_effort.attempts; ++attempt) {
      if (attempt > 0 && m_again > m_effort.patience) break;
      const double begin = seconds();
      Row now;
      const Rate before = brief_fma<T>();
      now.times = summary(sampled(m_effort, sample));
      const Rate after = brief_fma<T>();
      now.roof = {std::max(before.best, after.best), bandwidth()};
      now.drift = std::abs(before.best - after.best) / now.roof.flops;
      now.scaling = scaling<T>(std::min(before.median, after.median));
      if (attempt == 0 || now.disturbance() < best.disturbance()) best = now;
      if (attempt > 0) m_again += seconds() - begin;
      if (!best.disturbed() || m_effort.smoke()) break;
    }
    return best;
  }

 private:
  /// Threads of the probe that promises what all can do; a device has no use for one.
  int one_worker() const { return detail::is_host_space_v<ExecSpace> ? 1 : threads(); }
  template <class T>
  Rate brief_fma() const {
    return fma_rate<T>(m_exec, threads(), m_effort.smoke() ? 0.1 : 3, m_effort.smoke() ? 1 : 5);
  }
  /// Measured anew every few seconds.
  double bandwidth() {
    if (!m_effort.smoke() && seconds() - m_when > 5) {
      m_bandwidth = m_triad.bandwidth(3);
      m_when = seconds();
    }
    return m_bandwidth;
  }

  ExecSpace m_exec;
  Effort m_effort;
  TriadProbe<ExecSpace> m_triad;
  double m_one_float = 0, m_one_double = 0, m_bandwidth = 0, m_when = 0, m_again = 0;
};

}  // namespace LinAttn::perf
