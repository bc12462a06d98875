// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/workspace.hpp>
#include <type_traits>

/// \file linformer.hpp
/// Linformer attention (Wang et al. 2020), to compare with: full attention of whole sequences, forward and backward.

namespace LinAttn::baselines {

/// Keys and values are projected along the sequence, by the same matrices for all sequences and heads:
///
///     k' = E k    v' = F v    o = softmax(scale q k'^T) v'
///
/// with E and F (rank, Nk), learned for one length Nk. A projected key mixes all positions: no causal mask, no
/// decoding, no hidden keys, and no other length.
struct Linformer {
  static constexpr const char* name = "linformer";
  double scale = 0;  ///< positive and finite; 0: 1 / sqrt(D)
};

/// E and F (rank, Nk); without F it is E.
template <class ExecSpace, class T>
struct Projections {
  TensorRef<T, 2, ExecSpace> e{};
  TensorRef<T, 2, ExecSpace> f{};
};

/// What forward() leaves: o, and for a backward() the logarithms of the row sums (B,H,Nq).
template <class ExecSpace, class T>
struct LinformerSaved {
  TensorRef<T, 4, ExecSpace> o{};
  TensorRef<T, 3, ExecSpace> denominator{};
};

/// Bytes of workspace of a pass with projections of `rank` rows.
/// \throws InvalidArgument for extents or a scale that the call itself would refuse
template <class T, class ExecSpace>
std::size_t workspace_size(const ExecSpace& exec, const Linformer& linformer, const Problem& problem, std::int64_t rank,
                           Pass pass);

/// o as above, for T float or double. Asynchronous, no allocation, no fence.
/// \throws InvalidArgument if extents do not fit each other, a mask, packed sequences or a state are given, or the
/// workspace is too small
template <class T, class ExecSpace>
void forward(const ExecSpace& exec, const Linformer& linformer,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Projections<ExecSpace, const T>>& projections,
             const std::type_identity_t<LinformerSaved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace);

/// dq, dk, dv and, where given, the gradients of E and F, summed over sequences and heads (of both in that of E where
/// there is no F). Deterministic.
///
/// \throws InvalidArgument as forward(), and if saved parts or dq, dk or dv are missing
template <class T, class ExecSpace>
void backward(const ExecSpace& exec, const Linformer& linformer,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Projections<ExecSpace, const T>>& projections,
              const std::type_identity_t<LinformerSaved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Projections<ExecSpace, T>>& projection_gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace);

}  // namespace LinAttn::baselines
