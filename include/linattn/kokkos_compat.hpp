// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>

/// \file kokkos_compat.hpp
/// Every difference between Kokkos 3.4 and newer releases that LinAttn meets, in one place.

#if !defined(KOKKOS_VERSION) || KOKKOS_VERSION < 30400
#error "LinAttn needs Kokkos 3.4 or newer"
#endif

namespace LinAttn::detail {

/// Threads that can run at once on this execution-space instance.
template <class ExecSpace>
int concurrency(const ExecSpace& exec) {
#if KOKKOS_VERSION >= 40000
  return static_cast<int>(exec.concurrency());
#else
  (void)exec;
  return static_cast<int>(ExecSpace::concurrency());
#endif
}

/// Waits for one instance. Older releases take no label.
template <class ExecSpace>
void fence(const ExecSpace& exec, const char* label) {
#if KOKKOS_VERSION >= 30500
  exec.fence(label);
#else
  (void)label;
  exec.fence();
#endif
}

/// The policy, with the hint that its kernel is passed by value.
template <class Policy>
auto light_weight(const Policy& policy) {
  return Kokkos::Experimental::require(policy, Kokkos::Experimental::WorkItemProperty::HintLightWeight);
}

/// Whether this Kokkos reports fences to tools: 3.4 has the callback and never calls it.
inline constexpr bool reports_fences = KOKKOS_VERSION >= 40000;

/// A second instance of an execution space where this Kokkos can make one, else the default instance.
template <class ExecSpace>
ExecSpace another_instance() {
#if KOKKOS_VERSION >= 40300
  return Kokkos::Experimental::partition_space(ExecSpace(), 1, 1)[1];
#else
  return ExecSpace();
#endif
}

/// Whether kernels of ExecSpace run on the host, as one thread for each team.
template <class ExecSpace>
inline constexpr bool is_host_space_v =
    bool(Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename ExecSpace::memory_space>::accessible) &&
    bool(Kokkos::SpaceAccessibility<ExecSpace, Kokkos::HostSpace>::accessible);

}  // namespace LinAttn::detail
