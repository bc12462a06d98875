# SPDX-License-Identifier: BSD-3-Clause

# What every compiled target of ours shares. All of it is private: users' flags are their own.
function(linattn_configure_target target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "INTERFACE_LIBRARY")
    return()
  endif()
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(NOT LINATTN_KOKKOS_DEVICES MATCHES "CUDA") # nvcc's own line markers are not pedantic
    target_compile_options(${target} PRIVATE -Wpedantic)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict) # misfires on string + string, GCC bug 105651
  endif()
  if(LINATTN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
    if(LINATTN_KOKKOS_DEVICES MATCHES "CUDA")
      # A host function called on the device is only warned of, and wrong at run time.
      target_compile_options(${target} PRIVATE -Werror=cross-execution-space-call
        "SHELL:-Xcudafe --diag_error=20013" "SHELL:-Xcudafe --diag_error=20015")
    endif()
  endif()
  if(LINATTN_NATIVE)
    target_compile_options(${target} PRIVATE -march=native)
  endif()
endfunction()
