# SPDX-License-Identifier: BSD-3-Clause
#
# Which Kokkos a build uses, in this order:
#   0. a target Kokkos::kokkos that the enclosing project already has, or FETCHCONTENT_SOURCE_DIR_KOKKOS;
#   1. what find_package sees, if it has the execution spaces asked for;
#   2. what scripts/setup built before (.deps/<compiler>.cmake);
#   3. the official release, pinned, by FetchContent, if a short probe finds it reachable.
#
# LINATTN_REQUIRE_SPACES names the execution spaces asked for. A Kokkos that the user points at with Kokkos_ROOT or
# Kokkos_DIR is taken as it is unless LINATTN_REQUIRE_SPACES is given too.

cmake_path(SET LINATTN_DEPS_DIR NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../.deps")
set(LINATTN_KOKKOS_OLDEST 3.4)
set(LINATTN_KOKKOS_RELEASE 4.6.02)
set(LINATTN_KOKKOS_SHA256 baf1ebbe67abe2bbb8bb6aed81b4247d53ae98ab8475e516d9c87e87fa2422ce)
set(LINATTN_KOKKOS_URL https://github.com/kokkos/kokkos/releases/download/${LINATTN_KOKKOS_RELEASE})

# Version and execution spaces (upper case) of the Kokkos configured in a folder, read without loading it.
function(linattn_read_kokkos_config folder out_version out_devices)
  set(version 0)
  set(devices "")
  if(EXISTS "${folder}/KokkosConfigVersion.cmake")
    file(STRINGS "${folder}/KokkosConfigVersion.cmake" lines REGEX "^set\\(PACKAGE_VERSION \"")
    if(lines MATCHES "\"([0-9.]+)\"")
      set(version "${CMAKE_MATCH_1}")
    endif()
  endif()
  if(EXISTS "${folder}/KokkosConfigCommon.cmake")
    file(STRINGS "${folder}/KokkosConfigCommon.cmake" lines REGEX "^[Ss][Ee][Tt]\\(Kokkos_DEVICES ")
    string(REGEX REPLACE "^[^ ]* ([^)]*)\\).*$" "\\1" devices "${lines}")
    string(REPLACE "\"" "" devices "${devices}")
    string(REPLACE "\\;" ";" devices "${devices}")
  endif()
  set(${out_version} "${version}" PARENT_SCOPE)
  set(${out_devices} "${devices}" PARENT_SCOPE)
endfunction()

# Sets out to the folder of a suitable KokkosConfig.cmake, or to "", and out_report to what was seen. No config file
# is loaded: imported targets cannot be taken back, and the first Kokkos found need not be the one wanted.
function(linattn_locate_kokkos out out_report)
  if(DEFINED LINATTN_REQUIRE_SPACES)
    set(spaces "${LINATTN_REQUIRE_SPACES}")
  else()
    set(spaces OpenMP Serial)
  endif()
  string(TOUPPER "${spaces}" spaces)

  set(pointed_at "")
  if(NOT DEFINED LINATTN_REQUIRE_SPACES)
    set(pointed_at ${Kokkos_DIR} ${Kokkos_ROOT} $ENV{Kokkos_DIR} $ENV{Kokkos_ROOT})
  endif()

  # No version satisfies this request, so CMake lists every candidate in its order of search and loads none.
  if(EXISTS "${Kokkos_DIR}/KokkosConfig.cmake")
    set(configs "${Kokkos_DIR}/KokkosConfig.cmake")
  else()
    find_package(Kokkos 99999 QUIET CONFIG)
    set(configs "${Kokkos_CONSIDERED_CONFIGS}")
    unset(Kokkos_DIR CACHE)
  endif()

  include("${LINATTN_DEPS_DIR}/${CMAKE_CXX_COMPILER_ID}-${CMAKE_CXX_COMPILER_VERSION}.cmake" OPTIONAL)
  if(LINATTN_SETUP_PREFIX)
    file(GLOB from_setup "${LINATTN_SETUP_PREFIX}/lib*/cmake/Kokkos/KokkosConfig.cmake"
         "${LINATTN_SETUP_PREFIX}/KokkosConfig.cmake")
    list(APPEND configs ${from_setup})
  endif()

  set(report "")
  foreach(config IN LISTS configs)
    cmake_path(GET config PARENT_PATH folder)
    linattn_read_kokkos_config("${folder}" version devices)
    set(missing ${spaces})
    list(REMOVE_ITEM missing ${devices})
    set(as_it_is FALSE)
    foreach(place IN LISTS pointed_at)
      cmake_path(IS_PREFIX place "${folder}" NORMALIZE inside)
      if(inside)
        set(as_it_is TRUE)
      endif()
    endforeach()
    if(version VERSION_LESS LINATTN_KOKKOS_OLDEST)
      string(APPEND report "\n  ${folder}: version ${version}, needs ${LINATTN_KOKKOS_OLDEST}")
    elseif(missing AND NOT as_it_is)
      string(APPEND report "\n  ${folder}: has ${devices}, lacks ${missing}")
    else()
      set(${out} "${folder}" PARENT_SCOPE)
      set(${out_report} "" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
  set(${out_report} "${report}" PARENT_SCOPE)
endfunction()

# True in out if the official release can be downloaded: asks for its list of checksums, for a few seconds at most.
function(linattn_probe_kokkos_release out)
  set(file "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/kokkos-release-probe.txt")
  file(DOWNLOAD "${LINATTN_KOKKOS_URL}/kokkos-${LINATTN_KOKKOS_RELEASE}-SHA-256.txt" "${file}"
       TIMEOUT 5 INACTIVITY_TIMEOUT 4 STATUS status)
  list(GET status 0 code)
  set(reachable FALSE)
  if(code EQUAL 0)
    file(STRINGS "${file}" lines REGEX "${LINATTN_KOKKOS_SHA256}")
    if(lines)
      set(reachable TRUE)
    endif()
  endif()
  set(${out} ${reachable} PARENT_SCOPE)
endfunction()

# Builds Kokkos as a part of this build, from the pinned release or from FETCHCONTENT_SOURCE_DIR_KOKKOS.
function(linattn_fetch_kokkos)
  include(FetchContent)
  foreach(space IN ITEMS OpenMP Serial ${LINATTN_REQUIRE_SPACES})
    string(TOUPPER "${space}" option)
    if(NOT DEFINED Kokkos_ENABLE_${option} AND NOT DEFINED LINATTN_REQUIRE_SPACES
       OR space IN_LIST LINATTN_REQUIRE_SPACES)
      set(Kokkos_ENABLE_${option} ON CACHE BOOL "Kokkos execution space")
    endif()
  endforeach()
  set(CMAKE_CXX_STANDARD 20)
  set(CMAKE_CXX_EXTENSIONS OFF)
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  FetchContent_Declare(Kokkos SYSTEM
    URL "${LINATTN_KOKKOS_URL}/kokkos-${LINATTN_KOKKOS_RELEASE}.tar.gz"
    URL_HASH "SHA256=${LINATTN_KOKKOS_SHA256}"
    DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
  FetchContent_MakeAvailable(Kokkos)
endfunction()

# Defines Kokkos::kokkos, and LINATTN_KOKKOS_VERSION and LINATTN_KOKKOS_DEVICES ("" where unknown). A macro, for the targets and variables of the package belong to the caller.
macro(linattn_find_kokkos)
  if(TARGET Kokkos::kokkos)
    set(LINATTN_KOKKOS_ORIGIN "the enclosing project")
  elseif(FETCHCONTENT_SOURCE_DIR_KOKKOS)
    linattn_fetch_kokkos()
    set(LINATTN_KOKKOS_ORIGIN "${FETCHCONTENT_SOURCE_DIR_KOKKOS}")
  else()
    linattn_locate_kokkos(_linattn_kokkos_dir _linattn_kokkos_report)
    if(_linattn_kokkos_dir)
      set(Kokkos_DIR "${_linattn_kokkos_dir}" CACHE PATH "Folder of KokkosConfig.cmake" FORCE)
      find_package(Kokkos REQUIRED CONFIG GLOBAL)
      set(LINATTN_KOKKOS_ORIGIN "${Kokkos_DIR}")
    else()
      linattn_probe_kokkos_release(_linattn_kokkos_reachable)
      if(NOT _linattn_kokkos_reachable)
        message(FATAL_ERROR
          "No suitable Kokkos (>= ${LINATTN_KOKKOS_OLDEST}), and ${LINATTN_KOKKOS_URL} is not reachable. Run "
          "scripts/setup, or set Kokkos_ROOT to an installation or FETCHCONTENT_SOURCE_DIR_KOKKOS to a source folder; "
          "LINATTN_REQUIRE_SPACES names the execution spaces it must have (default OpenMP;Serial)."
          "${_linattn_kokkos_report}")
      endif()
      linattn_fetch_kokkos()
      set(LINATTN_KOKKOS_ORIGIN "official release ${LINATTN_KOKKOS_RELEASE}")
    endif()
  endif()
  if(Kokkos_DIR)
    linattn_read_kokkos_config("${Kokkos_DIR}" LINATTN_KOKKOS_VERSION LINATTN_KOKKOS_DEVICES)
  else()
    linattn_read_kokkos_config("${Kokkos_BINARY_DIR}" LINATTN_KOKKOS_VERSION LINATTN_KOKKOS_DEVICES)
  endif()
  message(STATUS "LinAttn: Kokkos ${LINATTN_KOKKOS_VERSION} (${LINATTN_KOKKOS_DEVICES}) from ${LINATTN_KOKKOS_ORIGIN}")
endmacro()

# Kokkos Kernels for the Kokkos in use: the one of the enclosing project, or of the same version beside Kokkos or where
# KokkosKernels_DIR says. Optional; Kokkos_DIR is cached by now, so that its config file loads no other Kokkos.
macro(linattn_find_kokkos_kernels)
  if(NOT TARGET Kokkos::kokkoskernels AND Kokkos_DIR)
    find_package(KokkosKernels "${LINATTN_KOKKOS_VERSION}" EXACT QUIET CONFIG GLOBAL
      PATHS "${Kokkos_DIR}/../KokkosKernels" NO_DEFAULT_PATH)
  endif()
  if(TARGET Kokkos::kokkoskernels)
    message(STATUS "LinAttn: Kokkos Kernels from ${KokkosKernels_DIR}")
  else()
    message(STATUS "LinAttn: without Kokkos Kernels")
  endif()
endmacro()
