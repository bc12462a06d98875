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

std::string_view to_string(Scalar scalar) noexcept { return scalar == Scalar::f64 ? "f64" : "f32"; }

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
  for (const Scalar scalar : {Scalar::f64, Scalar::f32})
    if (name == to_string(scalar)) return scalar;
  const bool is_16_bit = name == "f16" || name == "bf16";
  throw InvalidArgument(
      detail::message("expected f64 or f32, found '", name, "'",
                      is_16_bit ? ", which is not supported by this version" : ""));
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
