# shellcheck shell=bash
# Shared by the scripts beside this file, which source it.

# Kokkos's compiler for CUDA, from its source folder $1, written to $2. The default architecture of the original may be
# one that this nvcc no longer knows.
make_nvcc_wrapper() {
  sed "s/^default_arch=.*/default_arch=\"$(nvcc --list-gpu-code | head -n 1)\"/" "$1/bin/nvcc_wrapper" >"$2"
  chmod +x "$2"
}

# Kokkos's name of the architecture of compute capability $1 (9.0), or nothing.
kokkos_cuda_arch() {
  case $1 in
    7.0) echo VOLTA70 ;;
    7.2) echo VOLTA72 ;;
    7.5) echo TURING75 ;;
    8.0) echo AMPERE80 ;;
    8.6) echo AMPERE86 ;;
    8.7) echo AMPERE87 ;;
    8.9) echo ADA89 ;;
    9.0) echo HOPPER90 ;;
    10.0) echo BLACKWELL100 ;;
    12.0) echo BLACKWELL120 ;;
  esac
}
