// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/analysis/moment_rule.hpp>
#include <linattn/launch.hpp>
#include <linattn/plan.hpp>
#include <linattn/team.hpp>

/// \file moment_sums.hpp
/// Sums of deviations that can be merged, and the order in which they are.
///
/// Numbers are summed relative to one of their own block, in fp64: with n of them in a block the sum of squared
/// deviations is then off by at most a few n 2^-53 of itself, whatever offset all numbers share. Blocks are merged as
/// Chan, Golub and LeVeque do, which is exact but for rounding.

namespace LinAttn::detail {

/// Number, mean and sum of squared deviations of some values.
struct MomentSum {
  double n = 0, mean = 0, squares = 0;

  KOKKOS_FUNCTION void merge(const MomentSum& other) {
    if (other.n == 0) return;
    const double total = n + other.n, share = other.n / total, delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * (n * share);
    n = total;
  }
  /// Standard deviation with divisor n - 1, at least least_sigma; a NaN stays one.
  KOKKOS_FUNCTION double sigma() const {
    using std::sqrt;
    const double measured = n < 2 ? 0 : sqrt(squares / (n - 1));
    return measured < least_sigma ? least_sigma : measured;
  }
};

/// The same of pairs (x, y), and of their squares: means and sums of products of deviations.
struct CrossSum {
  double n = 0;
  double x = 0, y = 0, xy = 0;      // of the values
  double x2 = 0, y2 = 0, x2y2 = 0;  // of their squares

  KOKKOS_FUNCTION void merge(const CrossSum& other) {
    if (other.n == 0) return;
    const double total = n + other.n, share = other.n / total, weight = n * share;
    const double dx = other.x - x, dy = other.y - y, dx2 = other.x2 - x2, dy2 = other.y2 - y2;
    xy += other.xy + dx * dy * weight;
    x2y2 += other.x2y2 + dx2 * dy2 * weight;
    x += dx * share;
    y += dy * share;
    x2 += dx2 * share;
    y2 += dy2 * share;
    n = total;
  }
  /// Cov(x, y), divisor n.
  KOKKOS_FUNCTION double covariance() const { return n > 0 ? xy / n : 0; }
  /// C_cross = Cov(x^2, y^2) - Cov(x, y)^2.
  KOKKOS_FUNCTION double cross() const { return n > 0 ? x2y2 / n - covariance() * covariance() : 0; }
};

/// entry(0), ..., entry(length - 1) merged in an order that depends on `length` only. `lanes` is memory of the team for
/// MomentPlan::lanes sums; on the host it is not used.
template <class Sum, class Team, class Entry>
KOKKOS_FUNCTION Sum merged(const Team& team, Sum* lanes, std::int64_t length, const Entry& entry) {
  if constexpr (Team::on_host) {
    Sum total;
    for (std::int64_t i = 0; i < length; ++i) total.merge(entry(i));
    return total;
  } else {
    team.barrier();
    for_each(team, MomentPlan::lanes, [&](int lane) {
      Sum part;
      for (std::int64_t i = lane; i < length; i += MomentPlan::lanes) part.merge(entry(i));
      lanes[lane] = part;
    });
    for (int width = MomentPlan::lanes / 2; width > 0; width /= 2) {
      team.barrier();
      for_each(team, width, [&](int lane) { lanes[lane].merge(lanes[lane + width]); });
    }
    team.barrier();
    return lanes[0];
  }
}

/// body.work(team, lanes, task) for each task: on the host by one thread, on a device by a team with memory for the
/// lanes of `merged`. Workers take every `workers`-th task.
template <class ExecSpace, class Sum, class Body>
struct TeamKernel {
  Body body;
  std::int64_t tasks;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { run(HostTeam{}, static_cast<Sum*>(nullptr), worker); }
  template <class Member>
  requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    Sum* const lanes = static_cast<Sum*>(member.team_shmem().get_shmem(sizeof(Sum) * MomentPlan::lanes));
    run(DeviceTeam<Member>{member}, lanes, member.league_rank());
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, Sum* lanes, int worker) const {
    for (std::int64_t task = worker; task < tasks; task += workers) {
      body.work(team, lanes, task);
      team.barrier();
    }
  }
};

template <class Sum, class ExecSpace, class Body>
void launch_teams(const ExecSpace& exec, const char* label, std::int64_t tasks, const Body& body) {
  if (tasks == 0) return;
  const MomentPlan cut = make_moment_plan(tasks, machine_of(exec));
  Plan plan;
  plan.team_size = cut.team_size;
  plan.tiles_in_scratch = true;
  plan.tile_bytes = sizeof(Sum) * MomentPlan::lanes + 64;
  launch_workers(exec, label, cut.workers, plan, TeamKernel<ExecSpace, Sum, Body>{body, tasks, cut.workers});
}

}  // namespace LinAttn::detail
