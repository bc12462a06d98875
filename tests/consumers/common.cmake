# SPDX-License-Identifier: BSD-3-Clause

set(installed_prefix "${WORK_DIR}/installed-here")
set(moved_prefix "${WORK_DIR}/moved-there")

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  list(JOIN ARGV " " command)
  message("> ${command}\n${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "exit status ${status}: ${command}")
  endif()
endfunction()

# Configures, builds and runs a consumer; the rest are arguments for CMake.
function(build_and_run consumer)
  set(build "${WORK_DIR}/build-${consumer}")
  run("${CMAKE_COMMAND}" -S "${CONSUMERS_DIR}/${consumer}" -B "${build}" -G "${GENERATOR}"
    "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}"
    ${ARGN})
  run("${CMAKE_COMMAND}" --build "${build}" --target consumer)
  run("${build}/consumer")
endfunction()
