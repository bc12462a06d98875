# SPDX-License-Identifier: BSD-3-Clause

include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

file(REMOVE_RECURSE "${installed_prefix}" "${moved_prefix}" "${WORK_DIR}/build-installed")
run("${CMAKE_COMMAND}" --install "${LINATTN_BINARY_DIR}" --prefix "${installed_prefix}")
file(RENAME "${installed_prefix}" "${moved_prefix}")

# What was moved must know neither the source, nor the build tree, nor where it was first.
file(GLOB_RECURSE files "${moved_prefix}/*LinAttn*.cmake" "${moved_prefix}/include/linattn/*")
if(NOT files)
  message(FATAL_ERROR "nothing was installed")
endif()
foreach(file IN LISTS files)
  file(READ "${file}" text)
  string(REGEX REPLACE "[\";) \n]" "/" text "${text}") # the end of a path, so that no longer name is taken for it
  foreach(place IN ITEMS "${LINATTN_SOURCE_DIR}/" "${installed_prefix}/")
    string(FIND "${text}" "${place}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${file} names ${place}")
    endif()
  endforeach()
endforeach()

build_and_run(installed "-DCMAKE_PREFIX_PATH=${moved_prefix}" -DCMAKE_BUILD_TYPE=Release "-DCONSUMER_WITH_IO=${HAVE_IO}")

# A version that is not there, and a component that does not exist, are refused.
foreach(request IN ITEMS "99.0" "0.1.0;COMPONENTS;teleportation")
  set(folder "${WORK_DIR}/refused")
  file(REMOVE_RECURSE "${folder}")
  list(JOIN request " " words)
  file(CONFIGURE OUTPUT "${folder}/CMakeLists.txt" @ONLY CONTENT [[
cmake_minimum_required(VERSION 3.25)
project(Refused LANGUAGES CXX)
set(CMAKE_CXX_EXTENSIONS OFF)
find_package(LinAttn @words@)
if(LinAttn_FOUND)
  message(FATAL_ERROR "found LinAttn @words@")
endif()
]])
  run("${CMAKE_COMMAND}" -S "${folder}" -B "${folder}/build" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
    "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" "-DCMAKE_PREFIX_PATH=${moved_prefix}")
endforeach()
