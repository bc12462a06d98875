// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/attention.hpp>
#include <linattn/variants.hpp>

/// \file instantiations.hpp
/// The library holds the shipped variants for every storage type on every enabled execution space; these
/// declarations keep a user's translation unit from compiling them again.

/// Applies MACRO(prefix, T, ExecSpace, V) to each execution space that this Kokkos has.
#if defined(KOKKOS_ENABLE_SERIAL)
#define LINATTN_FOR_SERIAL(MACRO, PREFIX, T, V) MACRO(PREFIX, T, Kokkos::Serial, V)
#else
#define LINATTN_FOR_SERIAL(MACRO, PREFIX, T, V)
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
#define LINATTN_FOR_OPENMP(MACRO, PREFIX, T, V) MACRO(PREFIX, T, Kokkos::OpenMP, V)
#else
#define LINATTN_FOR_OPENMP(MACRO, PREFIX, T, V)
#endif
#if defined(KOKKOS_ENABLE_CUDA)
#define LINATTN_FOR_CUDA(MACRO, PREFIX, T, V) MACRO(PREFIX, T, Kokkos::Cuda, V)
#else
#define LINATTN_FOR_CUDA(MACRO, PREFIX, T, V)
#endif

#define LINATTN_INSTANTIATE_PASSES(PREFIX, T, EXEC, V)                                              \
  PREFIX template LinAttn::Plan LinAttn::plan<T, EXEC, V>(                                           \
      const EXEC&, const V&, const LinAttn::Problem&, LinAttn::Pass, const LinAttn::Options&);       \
  PREFIX template std::size_t LinAttn::workspace_size<T, EXEC, V>(                                   \
      const EXEC&, const V&, const LinAttn::Problem&, LinAttn::Pass, const LinAttn::Options&);       \
  PREFIX template void LinAttn::forward<T, EXEC, V>(                                                 \
      const EXEC&, const V&, const LinAttn::Inputs<EXEC, T>&, const LinAttn::Saved<EXEC, T>&,        \
      const LinAttn::Workspace<EXEC>&, const LinAttn::Options&);                                     \
  PREFIX template void LinAttn::backward<T, EXEC, V>(                                                \
      const EXEC&, const V&, const LinAttn::Inputs<EXEC, T>&, const LinAttn::Saved<EXEC, T>&,        \
      const LinAttn::Cotangents<EXEC, T>&, const LinAttn::Gradients<EXEC, T>&,                       \
      const LinAttn::Workspace<EXEC>&, const LinAttn::Options&);

#define LINATTN_INSTANTIATE_ONE(PREFIX, T, EXEC, V)                                                  \
  LINATTN_INSTANTIATE_PASSES(PREFIX, T, EXEC, V)                                                     \
  PREFIX template void LinAttn::step<T, EXEC, V>(                                                    \
      const EXEC&, const V&, const LinAttn::Token<EXEC, T>&, const LinAttn::ConstState<EXEC, T>&,    \
      const LinAttn::State<EXEC, T>&, const LinAttn::TensorRef<T, 3, EXEC>&,                         \
      const LinAttn::Workspace<EXEC>&, const LinAttn::StepOptions&);

#define LINATTN_INSTANTIATE_ONE_EXACT(PREFIX, T, EXEC, V)                                            \
  LINATTN_INSTANTIATE_PASSES(PREFIX, T, EXEC, V)                                                     \
  PREFIX template void LinAttn::step<T, EXEC, V>(                                                    \
      const EXEC&, const V&, const LinAttn::Token<EXEC, T>&, const LinAttn::KeyValueCache<EXEC, T>&, \
      const LinAttn::TensorRef<T, 3, EXEC>&, const LinAttn::Workspace<EXEC>&);

// The kernels that lln-diag and softmax share, for accumulators of type A.
#define LINATTN_INSTANTIATE_LOCAL_SOFTMAX_ONE(PREFIX, A, EXEC, V) \
  PREFIX template class LinAttn::detail::LocalSoftmax<A, EXEC>;

#define LINATTN_FOR_ALL_SPACES(MACRO, PREFIX, T, V) \
  LINATTN_FOR_SERIAL(MACRO, PREFIX, T, V)           \
  LINATTN_FOR_OPENMP(MACRO, PREFIX, T, V)           \
  LINATTN_FOR_CUDA(MACRO, PREFIX, T, V)

/// Declares (PREFIX = extern) or defines (PREFIX empty) everything the library holds for one variant. Kernels
/// depend on the accumulator only, so that the 16-bit types cost no more than their checks.
#define LINATTN_INSTANTIATE(PREFIX, V)                                                 \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE, PREFIX, float, V)                    \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE, PREFIX, double, V)                   \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE, PREFIX, LinAttn::float16, V)         \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE, PREFIX, LinAttn::bfloat16, V)

/// The same for exact attention.
#define LINATTN_INSTANTIATE_EXACT(PREFIX, V)                                                 \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE_EXACT, PREFIX, float, V)                    \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE_EXACT, PREFIX, double, V)                   \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE_EXACT, PREFIX, LinAttn::float16, V)         \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_ONE_EXACT, PREFIX, LinAttn::bfloat16, V)
#define LINATTN_INSTANTIATE_LOCAL_SOFTMAX(PREFIX)                                            \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_LOCAL_SOFTMAX_ONE, PREFIX, float, )             \
  LINATTN_FOR_ALL_SPACES(LINATTN_INSTANTIATE_LOCAL_SOFTMAX_ONE, PREFIX, double, )

#if !defined(LINATTN_DEFINES_LOCAL_SOFTMAX)
LINATTN_INSTANTIATE_LOCAL_SOFTMAX(extern)
#endif
#if !defined(LINATTN_DEFINES_INSTANTIATIONS)
LINATTN_INSTANTIATE(extern, LinAttn::Identity)
LINATTN_INSTANTIATE(extern, LinAttn::Elu)
LINATTN_INSTANTIATE(extern, LinAttn::Relu)
LINATTN_INSTANTIATE(extern, LinAttn::Quadratic)
LINATTN_INSTANTIATE(extern, LinAttn::Lln)
LINATTN_INSTANTIATE(extern, LinAttn::Affine)
LINATTN_INSTANTIATE(extern, LinAttn::Cosine)
LINATTN_INSTANTIATE(extern, LinAttn::Taylor)
LINATTN_INSTANTIATE(extern, LinAttn::Performer)
LINATTN_INSTANTIATE(extern, LinAttn::LlnDiag)
LINATTN_INSTANTIATE_EXACT(extern, LinAttn::Softmax)
#endif
