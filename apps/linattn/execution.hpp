// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>
#include <string_view>
#include <vector>

/// \file execution.hpp
/// Where and in which precision to compute: the choices of this build.

namespace LinAttn::app {

enum class Space { serial, openmp, cuda };
enum class Scalar { f64, f32, f16, bf16 };

/// "serial", "openmp", "cuda": as the command line names them.
std::string_view to_string(Space space) noexcept;
/// "f64", "f32", "f16", "bf16".
std::string_view to_string(Scalar scalar) noexcept;

/// All of them, the widest first.
std::vector<Scalar> scalars();
/// Whether tensors are stored in 16 bits; sums are float then.
constexpr bool is_16_bit(Scalar scalar) noexcept {
  return scalar == Scalar::f16 || scalar == Scalar::bf16;
}

/// The execution spaces this build has.
std::vector<Space> enabled_spaces();
/// The fastest of them.
Space default_space();

/// \throws InvalidArgument for a space that there is not, or not in this build.
Space space_from_name(std::string_view name);
/// \throws InvalidArgument for anything but f64, f32, f16 and bf16.
Scalar scalar_from_name(std::string_view name);

/// What work can be in flight at once.
int concurrency(Space space);

/// Kokkos, from construction to destruction. It is given no argument of ours and prints no advice.
class Runtime {
 public:
  /// \throws EnvironmentFailure if Kokkos cannot start, for one because there is no device.
  Runtime();
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
};

}  // namespace LinAttn::app
