// SPDX-License-Identifier: BSD-3-Clause

// The few parts of the engine that the probe needs: enough variants for every path, one execution space.

#define LINATTN_DEFINES_INSTANTIATIONS
#define LINATTN_DEFINES_LOCAL_SOFTMAX
#include <linattn/instantiations.hpp>

#define LINATTN_OF_BOTH(V)                                \
  LINATTN_INSTANTIATE_ONE(, float, Kokkos::Serial, V)     \
  LINATTN_INSTANTIATE_ONE(, double, Kokkos::Serial, V)

LINATTN_OF_BOTH(LinAttn::Identity)
LINATTN_OF_BOTH(LinAttn::Elu)
LINATTN_OF_BOTH(LinAttn::Lln)
LINATTN_OF_BOTH(LinAttn::Affine)
LINATTN_OF_BOTH(LinAttn::LlnDiag)
LINATTN_INSTANTIATE_LOCAL_SOFTMAX_ONE(, float, Kokkos::Serial, )
LINATTN_INSTANTIATE_LOCAL_SOFTMAX_ONE(, double, Kokkos::Serial, )
LINATTN_INSTANTIATE_ONE_EXACT(, float, Kokkos::Serial, LinAttn::Softmax)
LINATTN_INSTANTIATE_ONE_EXACT(, double, Kokkos::Serial, LinAttn::Softmax)
