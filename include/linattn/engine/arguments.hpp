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

/// States of segments in the workspace, one for each (batch, key/value head) and segment.
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

  std::int64_t batch = 0, heads = 0, kv_heads = 0, group = 0, nq = 0, nk = 0;
  int d = 0, dv = 0, features = 0;
  bool causal = false, normalise = true;
  A scale = A(1);

  Plan plan{};
  std::int64_t tasks = 0;            // (batch, key/value head, segment)
  std::byte* worker_memory = nullptr;  // tiles of all workers, unless in scratch
  SegmentStates<A> states{};         // empty: one segment, nothing spilled
  int* shift_table = nullptr;        // scaled maps, backward: shift before each interval, then in total
  std::int64_t shift_entries = 0;    // entries of the table for one (batch, key/value head)
  double* query_parameter_parts = nullptr;  // (task, group)
  double* key_parameter_parts = nullptr;    // (task)

  /// Keys, or queries when not causal, of one sequence that segments share out.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t chunks(std::int64_t tokens) const {
    return (tokens + plan.chunk - 1) / plan.chunk;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t first_chunk(std::int64_t tokens, std::int64_t segment) const {
    return chunks(tokens) * segment / plan.segments;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t state_size() const {
    return static_cast<std::int64_t>(features) * dv;
  }
};

/// The walks a worker can be asked for.
enum class Walk { key_state, output, query_gradient, query_state, key_gradient };

/// Tiles of one worker. Leading dimensions are padded so that no product has a remainder.
template <class A>
struct Tiles {
  int ldr = 0, ldv = 0, ldc = 0;  // leading dimensions of rows of features, values, keys of a chunk
  A *keys = nullptr, *keys_t = nullptr;      // (C, R) and its transpose
  A *values = nullptr, *values_t = nullptr;  // (C, Dv) and its transpose
  A *queries = nullptr;                      // (C, R)
  A *cotangents = nullptr;                   // (C, Dv): G, cotangent of the numerator
  A *weights = nullptr;                      // (C, C): P_ij = phi_q(i) . phi_k(j)
  A *weight_cotangents = nullptr;            // (C, C): E_ij = dL / dP_ij
  A *out = nullptr;                          // numerators, or gradients of features
  A *value_gradients = nullptr, *value_gradients_t = nullptr;
  A *state = nullptr, *sums = nullptr;       // S or its transpose, z; the mirrored state alike
  A *row_scale = nullptr;                    // (C): denominators or their reciprocals
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
    state = transposed ? arena.take<A>(std::int64_t(v) * ldr) : arena.take<A>(std::int64_t(r) * ldv);
    sums = arena.take<A>(ldr);
    if (has_keys) {
      keys = arena.take<A>(std::int64_t(c) * ldr);
      if (transposed)
        values_t = arena.take<A>(std::int64_t(v) * ldc);
      else
        values = arena.take<A>(std::int64_t(c) * ldv);
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
