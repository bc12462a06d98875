# SPDX-License-Identifier: BSD-3-Clause
#
# PROGRAM prints what the file EXPECTED holds. Skipped where the command NEEDS fails.

if(DEFINED NEEDS)
  execute_process(COMMAND ${NEEDS} RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0)
    message("skipped: no python3 with NumPy")
    return()
  endif()
endif()
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE status OUTPUT_VARIABLE output)
file(READ "${EXPECTED}" expected)
if(NOT status EQUAL 0 OR NOT output STREQUAL expected)
  message(FATAL_ERROR "exit status ${status}, found:\n${output}\nexpected:\n${expected}")
endif()
