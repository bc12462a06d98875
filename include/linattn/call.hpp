// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <linattn/dropout.hpp>
#include <linattn/normaliser.hpp>
#include <linattn/problem.hpp>
#include <linattn/tensor.hpp>
#include <optional>
#include <type_traits>

/// \file call.hpp
/// What the public calls of attention.hpp take and give.

namespace LinAttn {

/// Sums over keys that stand before the first key (initial) or after the last one (final), one for each
/// sequence and key/value head: S (M,Hkv,R,Dv), z (M,Hkv,R), where M is the batch or the number of packed
/// members. Maps with exponential growth (lln) also have shift (M,Hkv,R): the true sums are 2^shift S and
/// 2^shift z, |shift| <= 2^24, and gradients are with respect to S and z at that shift. Variants with a constant
/// in their weights (affine) also have t (M,Hkv,Dv), the sum of the values, and m (M) >= 0, the number of keys;
/// cotangents and gradients have no m.
template <class ExecSpace, class A, class I>
struct BasicState {
  using Count = std::conditional_t<std::is_const_v<I>, const std::int64_t, std::int64_t>;

  TensorRef<A, 4, ExecSpace> S{};
  TensorRef<A, 3, ExecSpace> z{};
  TensorRef<I, 3, ExecSpace> shift{};
  TensorRef<A, 3, ExecSpace> t{};
  TensorRef<Count, 1, ExecSpace> m{};

  /// The same state where one is only read.
  BasicState<ExecSpace, const A, const I> as_const() const { return {S, z, shift, t, m}; }
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
/// backward() reads `o` and `denominator` of normalised rows only. Leave `denominator` out where no
/// gradient follows or rows are not normalised. `state`, if given, receives the sums after the last key;
/// it may be the memory of the initial state where no backward() follows, which reads the initial state.
/// For lln the row sum is relative to the largest exponent of the row, which backward() finds again; for exact attention
/// `denominator` is its logarithm, log sum_j exp(scale q_i . k_j), -infinity where no key is seen.
///
/// With dropout `o` is what the noise has multiplied. Kept beside those only if given: `smallest` (M,H), which receives
/// for each sequence and head where a row sum was smallest, for check() (normalised rows under SmallNormaliser::check,
/// not of variants whose row sums cannot vanish: lln, lln-diag, performer, softmax; refused otherwise). `centred` (B,H,Nq,Dv), if given together with Options::center_v,
/// receives o before the centre was added back and before noise; backward() is more accurate with it.
/// `linear` (B,H,Nq,Dv), for variants with a local term: receives the linear branch before it is combined, which
/// backward() needs for the gradients of r and p (and is more accurate with it); without it nothing more is kept.
template <class ExecSpace, class T>
struct Saved {
  TensorRef<T, 4, ExecSpace> o{};
  TensorRef<accumulator_t<T>, 3, ExecSpace> denominator{};
  State<ExecSpace, T> state{};
  TensorRef<NormaliserRecord, 2, ExecSpace> smallest{};
  TensorRef<T, 4, ExecSpace> centred{};
  TensorRef<T, 4, ExecSpace> linear{};

  /// Bytes of the row sums: what the backward pass needs beside inputs and output.
  static std::size_t bytes(const Problem& p) {
    return static_cast<std::size_t>(p.batch * p.heads * p.nq) * sizeof(accumulator_t<T>);
  }
};

/// What backward() starts from: dL/do (B,H,Nq,Dv) and, where a loss reads the final state, dL/dS and
/// dL/dz of it (with the shift of the final state where there is one; affine: and dL/dt).
template <class ExecSpace, class T>
struct Cotangents {
  TensorRef<const T, 4, ExecSpace> o{};
  ConstState<ExecSpace, T> state{};
};

/// Where backward() writes: gradients of q, k, v in their extents, of the variant's parameters, summed over the batch
/// (query_parameter (H), key_parameter (Hkv); affine: a is the query's, and constant (H) is that of b, scale (H) that
/// of the score scale, to be summed over heads as it is one for all; lln-diag: diag_r and diag_p (H,Dv), of r and p),
/// and of S, z and t of the initial state.
/// Those left out are not computed. Of `state` the shift is ignored: S and z are those at the shift of
/// the initial state.
template <class ExecSpace, class T>
struct Gradients {
  TensorRef<T, 4, ExecSpace> q{};
  TensorRef<T, 4, ExecSpace> k{};
  TensorRef<T, 4, ExecSpace> v{};
  TensorRef<double, 1, ExecSpace> query_parameter{};
  TensorRef<double, 1, ExecSpace> key_parameter{};
  State<ExecSpace, T> state{};
  TensorRef<double, 1, ExecSpace> constant{};
  TensorRef<double, 1, ExecSpace> scale{};
  TensorRef<double, 2, ExecSpace> diag_r{};
  TensorRef<double, 2, ExecSpace> diag_p{};
};

/// How to attend. backward() must be given what forward() was given.
struct Options {
  bool causal = false;              ///< query i sees keys j <= i + nk - nq, else all keys
  std::optional<bool> normalise{};  ///< divide by the row sum; default: the variant's
  double scale = 1.0;               ///< o = scale * sum_j w_ij v_j where rows are not normalised
  int chunk = 0;                    ///< tokens of a chunk; 0: the plan decides
  int segments = 0;                 ///< pieces of a sequence worked on at once; 0: the plan decides
  int tiles = 0;                    ///< windows of a state worked on at once; 0: the plan decides
  /// Products of floats may use tensor cores where there are some, which round their factors to TF32, 11
  /// significant bits (those of float16 and bfloat16 tensors have no more). Sums stay in float.
  bool allow_tf32 = false;
  Dropout dropout{};  ///< noise on the output, in training
  /// What becomes of row sums that nearly vanish, with the limit of |s| / m; of normalised rows, and not of lln, lln-diag, performer and softmax,
  /// whose row sums cannot vanish. To clamp or record those of calls with states, states must have m (affine).
  SmallNormaliser small_normaliser = SmallNormaliser::check;
  double least_normaliser = 1e-6;
  /// Values are taken relative to the first that is visible, and o gets it back: rows are weighted means, so this
  /// changes rounding only, for values with a large common offset. For normalised rows without states.
  bool center_v = false;
};

/// What step() reads of one new token of every sequence: q (B,H,D), k (B,Hkv,D), v (B,Hkv,Dv) and, optional,
/// `key_mask` (B), 0 where the token's key is hidden: it then changes no sum, but its query is answered.
template <class ExecSpace, class T>
struct Token {
  TensorRef<const T, 3, ExecSpace> q{};
  TensorRef<const T, 3, ExecSpace> k{};
  TensorRef<const T, 3, ExecSpace> v{};
  TensorRef<const std::uint8_t, 1, ExecSpace> key_mask{};
};

/// Keys k (B,Hkv,capacity,D) and values v (B,Hkv,capacity,Dv) of the tokens so far, for step() of exact attention:
/// position n of a sequence holds those of its token n, for n < length (B). A step writes the new token behind them,
/// and adds 1 to the length. A prefill is a copy of k and v, and their number.
template <class ExecSpace, class T>
struct KeyValueCache {
  TensorRef<T, 4, ExecSpace> k{};
  TensorRef<T, 4, ExecSpace> v{};
  TensorRef<std::int64_t, 1, ExecSpace> length{};
};

/// How step() attends; as in Options.
struct StepOptions {
  std::optional<bool> normalise{};
  double scale = 1.0;
  SmallNormaliser small_normaliser = SmallNormaliser::check;  ///< a step records nothing
  double least_normaliser = 1e-6;
};

}  // namespace LinAttn
