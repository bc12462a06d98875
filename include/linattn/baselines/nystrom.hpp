// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/workspace.hpp>
#include <type_traits>

/// \file nystrom.hpp
/// Nystromformer attention (Xiong et al. 2021), to compare with: full attention of whole sequences, forward and
/// backward.

namespace LinAttn::baselines {

/// Landmarks qt, kt (m rows) are the means of consecutive segments of q and k: segment s has the rows from floor(s N /
/// m) up to floor((s + 1) N / m). With softmax over rows and scale 1 / sqrt(D),
///
///     F1 = softmax(scale q kt^T)   A = softmax(scale qt kt^T)   F2 = softmax(scale qt k^T)
///     o = F1 Z (F2 v)              Z ~ A^+
///
/// Z is what a fixed number of iterations make of Z_0 = A^T / (largest row sum of A * largest column sum of A), head by
/// head:
///
///     Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4
///
/// Rows of o sum weights of both signs that add up to about 1. There is no convolution beside it. Every row sees all
/// keys through the landmarks: no causal mask, no decoding, no hidden keys.
struct Nystrom {
  static constexpr const char* name = "nystrom";
  std::int64_t landmarks = 64;  ///< m, at most Nq, Nk and 4096
  int iterations = 6;           ///< 1 to 64
  double scale = 0;             ///< positive and finite; 0: 1 / sqrt(D)

  /// Numbers that the forward pass keeps for the backward pass beside o and the logarithms of the sums of F1:
  /// landmarks, F2 v with the logarithms of its sums, and Z F2 v, with rows padded to whole vectors.
  template <class T>
  std::int64_t kept(const Problem& problem) const;
};

/// What forward() leaves. `denominator` (B,H,Nq) receives the logarithms of the row sums of F1, `kept`, contiguous, the
/// numbers that Nystrom::kept() counts; both are needed by backward() and may be left out where none follows.
template <class ExecSpace, class T>
struct NystromSaved {
  TensorRef<T, 4, ExecSpace> o{};
  TensorRef<T, 3, ExecSpace> denominator{};
  TensorRef<T, 1, ExecSpace> kept{};
};

/// Bytes of workspace of a pass. `keeps`: whether the forward pass is given NystromSaved::kept.
/// \throws InvalidArgument for extents, landmarks or a scale that the call itself would refuse
template <class T, class ExecSpace>
std::size_t workspace_size(const ExecSpace& exec, const Nystrom& nystrom, const Problem& problem, Pass pass,
                           bool keeps = true);

/// o as above, for T float or double. Asynchronous, no allocation, no fence.
/// \throws InvalidArgument if extents do not fit each other, there are more landmarks than rows, a mask, packed
/// sequences or a state are given, `kept` is not contiguous, or the workspace is too small
template <class T, class ExecSpace>
void forward(const ExecSpace& exec, const Nystrom& nystrom, const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<NystromSaved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace);

/// dq, dk and dv (all three), exact through landmarks, softmaxes and iterations, the largest sums of Z_0 included,
/// whose first maximum carries the gradient. Deterministic.
///
/// \throws InvalidArgument as forward(), and if saved parts or a gradient are missing
template <class T, class ExecSpace>
void backward(const ExecSpace& exec, const Nystrom& nystrom, const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<NystromSaved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace);

}  // namespace LinAttn::baselines
