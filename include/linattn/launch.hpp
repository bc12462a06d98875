// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <linattn/error.hpp>
#include <linattn/kokkos_compat.hpp>
#include <linattn/plan.hpp>
#include <linattn/tensor.hpp>
#include <linattn/workspace.hpp>
#include <string>

/// \file launch.hpp
/// What public calls have in common between their arguments and their kernels: checks of what the caller gave, and
/// launches.

namespace LinAttn::detail {

/// A region of the profiling tools that ends with the scope.
class Region {
 public:
  explicit Region(const char* label) { Kokkos::Profiling::pushRegion(label); }
  ~Region() { Kokkos::Profiling::popRegion(); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
};

/// Kernels travel as launch arguments: the constant memory that large functors take otherwise would make a
/// launch wait for the previous one.
template <class Policy, class Kernel>
void launch(const char* label, const Policy& policy, const Kernel& kernel) {
  static_assert(sizeof(Kernel) < 4000, "launch arguments of a device are limited");
  Kokkos::parallel_for(label, light_weight(policy), kernel);
}

/// kernel(worker) for each worker on the host: plain ranges, which touch nothing that threads of the caller
/// share; one team for each worker on a device.
template <class ExecSpace, class Kernel>
void launch_workers(const ExecSpace& exec, const char* label, int workers, const Plan& plan, const Kernel& kernel) {
  if constexpr (is_host_space_v<ExecSpace>) {
    launch(label, Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<int>>(exec, 0, workers), kernel);
  } else {
    Kokkos::TeamPolicy<ExecSpace> policy(exec, workers, plan.team_size);
    if (plan.tiles_in_scratch)
      policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(plan.tile_bytes)));
    launch(label, policy, kernel);
  }
}

template <class ExecSpace>
MachineTraits machine_of(const ExecSpace& exec) {
  MachineTraits machine;
  machine.host = is_host_space_v<ExecSpace>;
  machine.concurrency = concurrency(exec);
  if (!machine.host)
    machine.scratch_bytes = static_cast<std::size_t>(Kokkos::TeamPolicy<ExecSpace>::scratch_size_max(0));
  return machine;
}

/// A tensor with elements has an address.
template <class Tensor>
void require_memory(const char* name, const Tensor& tensor) {
  bool empty = false;
  for (int r = 0; r < Tensor::rank; ++r) empty = empty || tensor.extent(r) == 0;
  if (!empty && tensor.data() == nullptr)
    throw InvalidArgument(message("LinAttn: ", name, " ", tensor.shape(), " has no memory behind it"));
}

template <class ExecSpace>
void require_size(const Workspace<ExecSpace>& workspace, std::size_t needed, const std::string& what) {
  if (workspace.size() < needed)
    throw InvalidArgument(
        message("LinAttn: the workspace needs ", needed, " bytes for ", what, ", found ", workspace.size()));
}

template <class ExecSpace>
void require_memory(const Workspace<ExecSpace>& workspace) {
  if (workspace.data() == nullptr)
    throw InvalidArgument(message("LinAttn: the workspace of ", workspace.size(), " bytes has no memory behind it"));
}

/// Memory for calls that have a workspace of their own. \throws EnvironmentFailure
template <class ExecSpace>
auto allocate_workspace(const ExecSpace& exec, std::size_t bytes) {
  using View = Kokkos::View<std::byte*, typename ExecSpace::memory_space>;
  try {
    return View(Kokkos::view_alloc(exec, std::string("LinAttn::workspace"), Kokkos::WithoutInitializing), bytes);
  } catch (const std::exception&) {
    throw EnvironmentFailure(message("LinAttn: cannot allocate ", bytes, " bytes of workspace"));
  }
}

template <class Tensor>
void require_shape(const char* name, const Tensor& tensor, const std::array<std::int64_t, Tensor::rank>& expected) {
  std::string shape = "(";
  bool same = tensor.present();
  for (int r = 0; r < Tensor::rank; ++r) {
    shape += (r ? ", " : "") + std::to_string(expected[r]);
    same = same && tensor.extent(r) == expected[r];
  }
  if (!same)
    throw InvalidArgument(message("LinAttn: ", name, " must have shape ", shape, "), found ",
                                  tensor.present() ? tensor.shape() : std::string("nothing")));
  require_memory(name, tensor);
}

template <class Tensor>
void require_output(const char* name, const Tensor& tensor, const std::array<std::int64_t, Tensor::rank>& expected) {
  require_shape(name, tensor, expected);
  for (int r = 0; r < Tensor::rank; ++r)
    if (tensor.extent(r) == 0) return;  // strides of a View without elements mean nothing
  for (int r = 0; r < Tensor::rank; ++r)
    if (tensor.extent(r) > 1 && tensor.stride(r) == 0)
      throw InvalidArgument(message("LinAttn: ", name, " is written and cannot be a broadcast View ",
                                    "(stride 0 in dimension ", r, " of ", tensor.shape(), ")"));
}

}  // namespace LinAttn::detail
