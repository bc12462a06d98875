// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/plan.hpp>
#include <linattn/state.hpp>
#include <linattn/tensor.hpp>
#include <linattn/tile.hpp>
#include <linattn/workspace.hpp>

/// \file arguments.hpp
/// What kernels are given, and where a worker keeps its tiles.

namespace LinAttn::detail {

/// A tensor of rows, without the execution space: (batch, head, position) -> row of strided elements.
template <class T>
struct RowTensor {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t element_stride = 0;

  RowTensor() = default;
  template <class U, class ExecSpace>
  explicit RowTensor(const TensorRef<U, 4, ExecSpace>& t)
      : data(t.data()),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)),
        element_stride(t.stride(3)) {}
  template <class U, class ExecSpace>
  explicit RowTensor(const TensorRef<U, 3, ExecSpace>& t)
      : data(t.data()),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)) {}

  KOKKOS_FORCEINLINE_FUNCTION T* row(std::int64_t b, std::int64_t h, std::int64_t n) const {
    return data + b * batch_stride + h * head_stride + n * row_stride;
  }
  KOKKOS_FORCEINLINE_FUNCTION explicit operator bool() const { return data != nullptr; }
};

/// A state of the caller: values (sequence, head, feature) -> row of Dv, sums and shifts per feature.
template <class A, class I>
struct CallerState {
  RowTensor<A> values{};
  RowTensor<A> sums{};
  RowTensor<I> shifts{};
  bool present = false;
};

/// States of segments in the workspace, one for each (sequence, key/value head) and segment.
///
/// `values` holds S (R x Dv, features first; or its transpose), `sums` z. `shifts` are those of the
/// segment alone; `carried_shifts` those of the state that enters the segment, written by the scan.
template <class A>
struct SegmentStates {
  A* values = nullptr;
  A* sums = nullptr;
  int* shifts = nullptr;
  int* carried_shifts = nullptr;
  KOKKOS_FORCEINLINE_FUNCTION explicit operator bool() const { return sums != nullptr; }
};

/// Arguments of every kernel of the engine; a kernel reads what concerns it.
template <class T, class QueryMap, class KeyMap>
struct Arguments {
  using A = accumulator_t<T>;

  QueryMap query_map{};
  KeyMap key_map{};

  RowTensor<const T> q{}, k{}, v{};
  RowTensor<T> o{};            // forward: written; backward: read
  RowTensor<A> denominator{};  // likewise; absent if not normalised or not wanted
  RowTensor<const T> d_o{};
  RowTensor<T> d_q{}, d_k{}, d_v{};

  const std::uint8_t* key_mask = nullptr;  // (batch, nk); nullptr: every key is visible
  std::int64_t mask_batch_stride = 0, mask_stride = 0;
  const std::int64_t* cu_seqlens_q = nullptr;  // packed members; nullptr: one sequence a batch entry
  const std::int64_t* cu_seqlens_k = nullptr;

  CallerState<const A, const int> initial{};            // state before the first key
  CallerState<A, int> last{};                           // forward: receives the state after the last key
  CallerState<const A, const int> last_cotangent{};     // backward: dL / d(state after the last key)
  CallerState<A, const int> initial_gradient{};         // backward: receives dL / d(state before the first)

  std::int64_t sequences = 0, heads = 0, kv_heads = 0, group = 0, nq = 0, nk = 0;
  int d = 0, dv = 0, features = 0;
  bool causal = false, normalise = true;
  A scale = A(1);

  Plan plan{};
  std::int64_t tasks = 0;              // (sequence, key/value head, segment)
  std::byte* worker_memory = nullptr;  // tiles of all workers, unless in scratch
  SegmentStates<A> states{};           // empty: one segment, nothing spilled
  int* shift_table = nullptr;          // scaled maps, backward: maximum up to the end of each interval
  std::int64_t shift_entries = 0;      // entries of the table for one (sequence, key/value head)
  double* query_parameter_parts = nullptr;  // (task, group)
  double* key_parameter_parts = nullptr;    // (task)

  KOKKOS_FORCEINLINE_FUNCTION std::int64_t chunks(std::int64_t tokens) const {
    return (tokens + plan.chunk - 1) / plan.chunk;
  }
  /// First chunk of a segment: the chunks of a sequence are shared out evenly.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t first_chunk(std::int64_t tokens, std::int64_t segment) const {
    return chunks(tokens) * segment / plan.segments;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t state_size() const {
    return static_cast<std::int64_t>(features) * dv;
  }
  /// Tokens whose largest shift is one entry of the table.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t shift_interval() const {
    return static_cast<std::int64_t>(plan.shift_interval) * plan.chunk;
  }
};

/// Where one sequence lies in the tensors.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, nq = 0;
  std::int64_t k_begin = 0, nk = 0;

  template <class Args>
  KOKKOS_FORCEINLINE_FUNCTION static Sequence at(const Args& args, std::int64_t index) {
    if (!args.cu_seqlens_q) return {index, 0, args.nq, 0, args.nk};
    const std::int64_t q = args.cu_seqlens_q[index], k = args.cu_seqlens_k[index];
    return {0, q, args.cu_seqlens_q[index + 1] - q, k, args.cu_seqlens_k[index + 1] - k};
  }
};

/// The keys of one sequence that may be seen.
struct Visibility {
  const std::uint8_t* mask = nullptr;
  std::int64_t stride = 0;
  bool nothing = false;  // nobody looks at these keys

  template <class Args>
  KOKKOS_FORCEINLINE_FUNCTION static Visibility of(const Args& args, const Sequence& sequence) {
    if (!args.key_mask) return {};
    return {args.key_mask + sequence.batch * args.mask_batch_stride + sequence.k_begin * args.mask_stride,
            args.mask_stride, false};
  }
  KOKKOS_FORCEINLINE_FUNCTION bool operator()(std::int64_t key) const {
    return !nothing && (!mask || mask[key * stride] != 0);
  }
};

/// The walks a worker can be asked for.
enum class Walk { key_state, output, query_gradient, query_state, key_gradient };

/// Tiles of one worker. Leading dimensions are padded so that no product has a remainder.
template <class A>
struct Tiles {
  /// Long sums of states are compensated where the accumulator is not fp64.
  static constexpr bool compensated = sizeof(A) < 8;

  int ldr = 0, ldv = 0, ldc = 0;  // leading dimensions of rows of features, values, keys of a chunk
  A *keys = nullptr, *keys_t = nullptr;      // (C, R) and its transpose
  A *values = nullptr, *values_t = nullptr;  // (C, Dv) and its transpose
  A *queries = nullptr;                      // (C, R)
  A *cotangents = nullptr;                   // (C, Dv): G, cotangent of the numerator
  A *weights = nullptr;                      // (C, C): P_ij = phi_q(i) . phi_k(j)
  A *weight_cotangents = nullptr;            // (C, C): E_ij = dL / dP_ij
  A *out = nullptr;                          // numerators, or gradients of features
  A *value_gradients = nullptr, *value_gradients_t = nullptr;
  A *state = nullptr, *state_low = nullptr;  // S or its transpose, and what compensated sums lost
  A *sums = nullptr, *sums_low = nullptr;    // z; the mirrored state alike
  A *row_scale = nullptr;                    // (C): denominators or factors of rows
  A *row_terms = nullptr;                    // (C): cotangent of the denominator
  double* parameter_terms = nullptr;         // (C)
  int *shift = nullptr, *new_shift = nullptr;  // (R)
  int *running = nullptr;                      // (C, R) shift up to each key
  int *starts = nullptr;                       // (interval, R) shift before each chunk
  int *row_shift = nullptr;                    // (C)

  template <class Args>
  KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const Args& args, Walk walk, bool transposed, bool scaled) {
    const int c = padded_rows(args.plan.chunk);
    const int r = padded_rows(args.features);
    const int v = padded_rows(args.dv);
    ldr = padded_columns<A>(args.features);
    ldv = padded_columns<A>(args.dv);
    ldc = padded_columns<A>(args.plan.chunk);
    const bool has_keys = walk != Walk::query_state;
    const bool has_queries = walk != Walk::key_state;
    const bool gradient = walk == Walk::query_gradient || walk == Walk::key_gradient;
    const std::int64_t state_size = transposed ? std::int64_t(v) * ldr : std::int64_t(r) * ldv;
    state = arena.take<A>(state_size);
    sums = arena.take<A>(ldr);
    if (compensated) {
      state_low = arena.take<A>(state_size);
      sums_low = arena.take<A>(ldr);
    }
    if (has_keys) {
      keys = arena.take<A>(std::int64_t(c) * ldr);
      values = arena.take<A>(std::int64_t(c) * ldv);
      if (transposed) values_t = arena.take<A>(std::int64_t(v) * ldc);
    }
    if (walk == Walk::output || walk == Walk::key_gradient)
      keys_t = arena.take<A>(std::int64_t(r) * ldc);
    if (has_queries) {
      queries = arena.take<A>(std::int64_t(c) * ldr);
      row_scale = arena.take<A>(c);
      row_terms = arena.take<A>(c);
    }
    if (has_queries && walk != Walk::output) cotangents = arena.take<A>(std::int64_t(c) * ldv);
    if (walk == Walk::output || walk == Walk::key_gradient)
      weights = arena.take<A>(std::int64_t(c) * ldc);
    if (gradient) {
      weight_cotangents = arena.take<A>(std::int64_t(c) * ldc);
      parameter_terms = arena.take<double>(c);
      out = arena.take<A>(std::int64_t(c) * ldr);
    }
    if (walk == Walk::output) out = arena.take<A>(std::int64_t(c) * ldv);
    if (walk == Walk::key_gradient) {
      value_gradients = arena.take<A>(std::int64_t(c) * ldv);
      value_gradients_t = arena.take<A>(std::int64_t(v) * ldc);
    }
    if (scaled) {
      shift = arena.take<int>(ldr);
      new_shift = arena.take<int>(ldr);
      running = arena.take<int>(std::int64_t(c) * ldr);
      row_shift = arena.take<int>(c);
      if (walk == Walk::query_state || walk == Walk::key_gradient)
        starts = arena.take<int>(std::int64_t(args.plan.shift_interval) * ldr);
    }
  }
};

}  // namespace LinAttn::detail
