// SPDX-License-Identifier: BSD-3-Clause
#include "execution.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <linattn/error.hpp>
#include <linattn/kokkos_compat.hpp>

#include "text.hpp"

#if !defined(KOKKOS_ENABLE_SERIAL) && !defined(KOKKOS_ENABLE_OPENMP) && !defined(KOKKOS_ENABLE_CUDA)
#error "linattn needs a Kokkos with Serial, OpenMP or CUDA"
#endif

namespace LinAttn::app {
namespace {

constexpr std::array all_spaces{Space::serial, Space::openmp, Space::cuda};

std::string names_of(const std::vector<Space>& spaces) {
  std::vector<std::string> names;
  for (const Space space : spaces) names.emplace_back(to_string(space));
  return join(names);
}

}  // namespace

std::string_view to_string(Space space) noexcept {
  switch (space) {
    case Space::serial:
      return "serial";
    case Space::openmp:
      return "openmp";
    case Space::cuda:
      return "cuda";
  }
  return "";
}

std::string_view to_string(Scalar scalar) noexcept {
  switch (scalar) {
    case Scalar::f64:
      return "f64";
    case Scalar::f32:
      return "f32";
    case Scalar::f16:
      return "f16";
    case Scalar::bf16:
      return "bf16";
  }
  return "";
}

std::vector<Scalar> scalars() { return {Scalar::f64, Scalar::f32, Scalar::f16, Scalar::bf16}; }

std::vector<Space> enabled_spaces() {
  return {
#if defined(KOKKOS_ENABLE_SERIAL)
    Space::serial,
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
        Space::openmp,
#endif
#if defined(KOKKOS_ENABLE_CUDA)
        Space::cuda,
#endif
  };
}

Space default_space() { return enabled_spaces().back(); }

Space space_from_name(std::string_view name) {
  const std::vector<Space> enabled = enabled_spaces();
  for (const Space space : all_spaces) {
    if (name != to_string(space)) continue;
    if (std::find(enabled.begin(), enabled.end(), space) != enabled.end()) return space;
    throw InvalidArgument(detail::message("expected one of ", names_of(enabled), ", found '", name,
                                          "', which the Kokkos of this build lacks"));
  }
  throw InvalidArgument(
      detail::message("expected one of ", names_of(enabled), ", found '", name, "'"));
}

Scalar scalar_from_name(std::string_view name) {
  for (const Scalar scalar : scalars())
    if (name == to_string(scalar)) return scalar;
  throw InvalidArgument(detail::message("expected f64, f32, f16 or bf16, found '", name, "'"));
}

int concurrency(Space space) {
#if defined(KOKKOS_ENABLE_SERIAL)
  if (space == Space::serial) return detail::concurrency(Kokkos::Serial());
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
  if (space == Space::openmp) return detail::concurrency(Kokkos::OpenMP());
#endif
#if defined(KOKKOS_ENABLE_CUDA)
  if (space == Space::cuda) return detail::concurrency(Kokkos::Cuda());
#endif
  return 0;
}

Runtime::Runtime() {
  setenv("KOKKOS_DISABLE_WARNINGS", "1", 0);  // standard error is for our one line
  try {
    static char name[] = "linattn";
    char* arguments[] = {name, nullptr};
    int count = 1;
    Kokkos::initialize(count, arguments);
  } catch (const std::exception& error) {
    throw EnvironmentFailure(
        one_line(detail::message("Kokkos cannot start on this machine: ", error.what())));
  }
}

Runtime::~Runtime() { Kokkos::finalize(); }

}  // namespace LinAttn::app
