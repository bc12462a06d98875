# SPDX-License-Identifier: BSD-3-Clause

include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(kokkos_dir "${LINATTN_KOKKOS_DIR}")
if(NOT kokkos_dir)
  file(GLOB configs "${moved_prefix}/lib*/cmake/Kokkos/KokkosConfig.cmake"
    "${moved_prefix}/lib*/*/cmake/Kokkos/KokkosConfig.cmake")
  list(GET configs 0 config)
  cmake_path(GET config PARENT_PATH kokkos_dir)
endif()
build_and_run(subdirectory "-DLINATTN_SOURCE_DIR=${LINATTN_SOURCE_DIR}" "-DKokkos_DIR=${kokkos_dir}"
  -DCMAKE_BUILD_TYPE=Debug)

# Nothing of ours but the library is part of a user's project unless asked for.
set(build "${WORK_DIR}/build-subdirectory")
file(STRINGS "${build}/CMakeCache.txt" options REGEX "^LINATTN_(BUILD|ENABLE|NATIVE|WERROR)")
foreach(option IN LISTS options)
  if(NOT option MATCHES "=OFF$")
    message(FATAL_ERROR "on in a subdirectory: ${option}")
  endif()
endforeach()
