// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/error.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/tensor.hpp>
#include <linattn/variant.hpp>
#include <linattn/workspace.hpp>
#include <optional>
#include <type_traits>

/// \file attention.hpp
/// Linear attention, forward and backward: the public calls.
///
///     o_i = sum_j w_ij v_j / sum_j w_ij        w_ij = phi_q(q_i) . phi_k(k_j)
///
/// summed over the visible keys: all of them, or those up to position i + nk - nq under a causal mask.
/// Time O(N R Dv) and memory O(N (D + Dv)) for N tokens and R features.
///
/// Calls enqueue kernels on the caller's execution-space instance and return; they neither fence nor
/// allocate, except for the overloads without a workspace, which do both and say so. Arguments are
/// non-owning references whose memory must live until the kernels have run. The same inputs, options
/// and plan give the same bits, whatever the number of threads.

namespace LinAttn {

/// Sums over keys that stand before the first key (initial) or after the last one (final), one for each
/// sequence and key/value head: S (M,Hkv,R,Dv), z (M,Hkv,R), where M is the batch or the number of packed
/// members. Maps with exponential growth (lln) also have shift (M,Hkv,R): the true sums are 2^shift S and
/// 2^shift z, and gradients are with respect to S and z at that shift.
template <class ExecSpace, class A, class I>
struct BasicState {
  TensorRef<A, 4, ExecSpace> S{};
  TensorRef<A, 3, ExecSpace> z{};
  TensorRef<I, 3, ExecSpace> shift{};

  /// The same state where one is only read.
  BasicState<ExecSpace, const A, const I> as_const() const { return {S, z, shift}; }
};
template <class ExecSpace, class T>
using State = BasicState<ExecSpace, accumulator_t<T>, int>;
template <class ExecSpace, class T>
using ConstState = BasicState<ExecSpace, const accumulator_t<T>, const int>;

/// Packed sequences: offsets (M+1) from 0 to Nq or Nk, in contiguous host memory.
using SequenceOffsets = TensorRef<const std::int64_t, 1, Kokkos::DefaultHostExecutionSpace>;

/// What attention reads: q (B,H,Nq,D), k (B,Hkv,Nk,D), v (B,Hkv,Nk,Dv).
///
/// Optional: `key_mask` (B,Nk), 1 where a key is visible; hidden keys are never read, take no part in any
/// sum or maximum, and have gradient 0. `cu_seqlens_q` and `cu_seqlens_k`, together and with B = 1: each
/// member attends inside itself. `state`: the sums over keys that come before.
template <class ExecSpace, class T>
struct Inputs {
  TensorRef<const T, 4, ExecSpace> q{};
  TensorRef<const T, 4, ExecSpace> k{};
  TensorRef<const T, 4, ExecSpace> v{};
  TensorRef<const std::uint8_t, 2, ExecSpace> key_mask{};
  SequenceOffsets cu_seqlens_q{};
  SequenceOffsets cu_seqlens_k{};
  ConstState<ExecSpace, T> state{};
};

/// What forward() leaves: o (B,H,Nq,Dv) and, for a later backward(), the row sums of the weights
/// (B,H,Nq) in accumulator precision. Nothing else is kept: O(N) numbers beside inputs and output.
/// Leave `denominator` out where no gradient follows or rows are not normalised. `state`, if given,
/// receives the sums after the last key; it may be the memory of the initial state.
/// For lln the row sum is relative to the largest exponent of the row, which backward() finds again.
template <class ExecSpace, class T>
struct Saved {
  TensorRef<T, 4, ExecSpace> o{};
  TensorRef<accumulator_t<T>, 3, ExecSpace> denominator{};
  State<ExecSpace, T> state{};

  /// Bytes kept for the backward pass beside inputs and output.
  static std::size_t bytes(const Problem& p) {
    return static_cast<std::size_t>(p.batch * p.heads * p.nq) * sizeof(accumulator_t<T>);
  }
};

/// What backward() starts from: dL/do (B,H,Nq,Dv) and, where a loss reads the final state, dL/dS and
/// dL/dz of it (with the shift of the final state where there is one).
template <class ExecSpace, class T>
struct Cotangents {
  TensorRef<const T, 4, ExecSpace> o{};
  ConstState<ExecSpace, T> state{};
};

/// Where backward() writes: gradients of q, k, v in their extents, of the variant's parameters, summed
/// over the batch (query_parameter (H), key_parameter (Hkv)), and of S and z of the initial state.
/// Those left out are not computed.
template <class ExecSpace, class T>
struct Gradients {
  TensorRef<T, 4, ExecSpace> q{};
  TensorRef<T, 4, ExecSpace> k{};
  TensorRef<T, 4, ExecSpace> v{};
  TensorRef<double, 1, ExecSpace> query_parameter{};
  TensorRef<double, 1, ExecSpace> key_parameter{};
  State<ExecSpace, T> state{};
};

/// How to attend. backward() must be given what forward() was given.
struct Options {
  bool causal = false;              ///< query i sees keys j <= i + nk - nq, else all keys
  std::optional<bool> normalise{};  ///< divide by the row sum; default: the variant's
  double scale = 1.0;               ///< o = scale * sum_j w_ij v_j where rows are not normalised
  int chunk = 0;                    ///< tokens of a chunk; 0: the plan decides
  int segments = 0;                 ///< pieces of a sequence worked on at once; 0: the plan decides
};

/// How a pass of this problem will be cut into work.
/// \throws InvalidArgument for extents, parameters or options that forward() would refuse
template <class T, class ExecSpace, Variant V>
Plan plan(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
          const Options& options = {});

/// Bytes of workspace that a pass of this problem needs.
/// \throws InvalidArgument as plan()
template <class T, class ExecSpace, Variant V>
std::size_t workspace_size(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
                           const Options& options = {});

/// o = attention(q, k, v) and, where given, the row sums.
///
/// A row that sees no key, and one whose row sum is exactly 0, gives o = 0. Rows in the future of a
/// causal row are never touched for it: a NaN there stays there. Overwrites `saved`; asynchronous.
///
///     LinAttn::forward<float>(exec, LinAttn::Elu{}, {.q = q, .k = k, .v = v},
///                             {.o = o, .denominator = denominator}, workspace, {.causal = true});
///
/// \throws InvalidArgument if extents do not fit each other, the variant's parameters do not fit the
/// heads, or the workspace is too small; the message names what was expected and found
template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved, const Options& options = {});

/// Gradients of L with respect to the inputs and parameters, given dL/do (B,H,Nq,Dv) and what
/// forward() left in `saved`. With G_i = dO_i / s_i and e_i = -G_i . o_i:
///
///     dQ_i = sum_j (G_i . v_j + e_i) K_j     dK_j = sum_i (G_i . v_j + e_i) Q_i     dV_j = sum_i w_ij G_i
///
/// followed by the pullbacks of the feature maps; exact, through the normalisation. Overwrites what
/// `gradients` names, computes nothing else; asynchronous; no atomics.
///
/// \throws InvalidArgument as forward(), and if a gradient of a parameter is asked for that the
/// variant does not have, or saved parts are missing
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {});

/// As above with dL/do alone.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {}) {
  backward<T>(exec, variant, inputs, saved, Cotangents<ExecSpace, T>{d_o, {}}, gradients, workspace, options);
}

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const Options& options = {});

/// As above with dL/do alone.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const Options& options = {}) {
  backward<T>(exec, variant, inputs, saved, Cotangents<ExecSpace, T>{d_o, {}}, gradients, options);
}

}  // namespace LinAttn

#include <linattn/engine/engine.hpp>
#include <linattn/instantiations.hpp>
