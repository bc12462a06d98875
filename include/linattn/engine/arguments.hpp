// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/dropout.hpp>
#include <linattn/noise.hpp>
#include <linattn/normaliser.hpp>
#include <linattn/plan.hpp>
#include <linattn/rows.hpp>
#include <linattn/state.hpp>
#include <linattn/tensor.hpp>
#include <linattn/tile.hpp>
#include <linattn/workspace.hpp>
#include <type_traits>

/// \file arguments.hpp
/// What kernels are given, and where a worker keeps its tiles.

namespace LinAttn::detail {

/// A state of the caller: values (sequence, head, feature) -> row of Dv, sums and shifts per feature, sums of values,
/// numbers of keys.
template <class A, class I>
struct CallerState {
  using Count = std::conditional_t<std::is_const_v<I>, const std::int64_t, std::int64_t>;

  RowTensor<A> values{};
  RowTensor<A> sums{};
  RowTensor<I> shifts{};
  RowTensor<A> value_sums{};
  Count* counts = nullptr;
  std::int64_t count_stride = 0;
  bool present = false;

  KOKKOS_FORCEINLINE_FUNCTION std::int64_t count(std::int64_t sequence) const {
    return counts ? counts[sequence * count_stride] : 0;
  }
};

/// The part of a state that one worker keeps: all of it, or a window of its columns (`of_values`, each
/// worker then answers for these columns of o or dV) or of its features (of dQ or dK). Windows depend on
/// each other in nothing but the small products Q K^T or G V^T, which each of them forms again, so their
/// number changes no bit of a result, except that gradients of parameters are sums over windows.
struct Window {
  int features = 0;  // largest width of a window
  int values = 0;
  int tiles = 1;  // windows
  bool of_values = true;

  KOKKOS_FORCEINLINE_FUNCTION int first_feature(int tile) const { return of_values ? 0 : tile * features; }
  KOKKOS_FORCEINLINE_FUNCTION int first_value(int tile) const { return of_values ? tile * values : 0; }
};

/// States of segments in the workspace, one for each task: (sequence, key/value head), window, segment.
///
/// `values` holds the window of S (features first; or its transpose), `sums` that of z, `value_sums` that of t, if
/// there is one. `shifts` are those
/// of all features of the segment alone; `carried_shifts` those of the state that enters the segment,
/// written by the scan.
template <class A>
struct SegmentStates {
  A* values = nullptr;
  A* sums = nullptr;
  A* value_sums = nullptr;
  int* shifts = nullptr;
  int* carried_shifts = nullptr;
  KOKKOS_FORCEINLINE_FUNCTION explicit operator bool() const { return sums != nullptr; }
};

/// Rows among which the largest norm is looked for by one thread.
inline constexpr std::int64_t norm_block = 256;

/// The largest norm of the rows of each sequence and head, and the row where it stands.
template <class A>
struct LargestRows {
  A* block_norms = nullptr;            // (sequence, head, block)
  std::int64_t* block_rows = nullptr;
  A* factors = nullptr;                // (sequence, head): 1 / largest norm
  std::int64_t* rows = nullptr;        // (sequence, head): row of the tensor, -1 where the norm is 0
  A* gradients = nullptr;              // (sequence, head, D): gradient of that row but for what rho adds; backward
  std::int64_t blocks = 0, heads = 0;
  bool of_keys = false;
};

/// Arguments of every kernel of the engine; a kernel reads what concerns it.
template <class Accumulator, class QueryMap, class KeyMap>
struct Arguments {
  using A = Accumulator;

  QueryMap query_map{};
  KeyMap key_map{};

  StoredTensor<A> q{}, k{}, v{};
  StoredTensor<A> o{};         // forward: written; backward: read
  RowTensor<A> denominator{};  // likewise; absent if not normalised or not wanted
  StoredTensor<A> d_o{};
  StoredTensor<A> d_q{}, d_k{}, d_v{};

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
  bool causal = false, normalise = true, allow_tf32 = false;
  bool host = true;  // workers are threads of the host
  A scale = A(1);

  bool has_constant = false;        // weights have a constant, states t and m
  Parameter constant = 0.0;         // of each query head
  Dropout dropout{};                // with the heads and queries of the whole filled in
  bool clamp = false;               // small row sums are replaced
  A least_normaliser = A(0);
  bool center_v = false;
  StoredTensor<A> centred{};        // o before centre and noise
  LargestRows<A> largest_queries{}, largest_keys{};  // for maps that divide by the largest norm
  // backward of a variant with a local term: dO is r dO, dO . o of a row is known, gradients add to what is there
  bool joined = false;
  ColumnFactors output_factors = 1.0;
  RowTensor<A> row_dots{};
  bool may_record = false;               // small row sums may be asked for
  NormaliserRecord* records = nullptr;  // (task, group); nullptr: they are not

  Plan plan{};
  Window window{};                     // of the kernel at hand
  bool wants_keys = true;              // key_gradient: dK, the key parameter, dL/d(initial state)
  bool wants_values = true;            // key_gradient: dV
  std::int64_t tasks = 0;              // (sequence, key/value head, window, segment)
  std::byte* worker_memory = nullptr;  // tiles of all workers, unless in scratch
  SegmentStates<A> states{};           // empty: one segment, nothing spilled
  int* shift_table = nullptr;          // scaled maps, backward: maximum up to the end of each interval
  std::int64_t shift_entries = 0;      // entries of the table for one (sequence, key/value head)
  double* query_parameter_parts = nullptr;  // (task, group)
  double* key_parameter_parts = nullptr;    // (task)
  double* constant_parts = nullptr;         // (task, group)

  KOKKOS_FORCEINLINE_FUNCTION std::int64_t chunks(std::int64_t tokens) const {
    return (tokens + plan.chunk - 1) / plan.chunk;
  }
  /// First chunk of a segment: the chunks of a sequence are shared out evenly.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t first_chunk(std::int64_t tokens, std::int64_t segment) const {
    return chunks(tokens) * segment / plan.segments;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t state_size() const {
    return static_cast<std::int64_t>(window.features) * window.values;
  }
  KOKKOS_FORCEINLINE_FUNCTION bool has_noise() const { return dropout.p > 0; }
  /// Whether somebody asks how many keys a row sees.
  KOKKOS_FORCEINLINE_FUNCTION bool counts_keys() const { return has_constant || clamp || records; }
  KOKKOS_FORCEINLINE_FUNCTION bool stores_native() const {
    // tensors of a call are stored alike, but for logits in the place of q and k
    return q.storage == Storage::native && v.storage == Storage::native;
  }
  /// Tokens whose largest shift is one entry of the table.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t shift_interval() const {
    return static_cast<std::int64_t>(plan.shift_interval) * plan.chunk;
  }
};

/// Normals of one row of a window begin at a multiple of this many, if rows are not side by side: they are made four at
/// a time, on the host in blocks.
KOKKOS_FORCEINLINE_FUNCTION std::int64_t noise_stride(std::int64_t values, bool host) {
  const std::int64_t block = host ? noise_block : 4;
  return (values + 3 + block - 1) / block * block;
}
/// Numbers that hold the normals of `rows` rows, wherever the first stands among the four of its counter.
KOKKOS_FORCEINLINE_FUNCTION std::int64_t noise_size(std::int64_t rows, std::int64_t values, bool host) {
  return rows * noise_stride(values, host) + noise_block;
}

/// The walks a worker can be asked for.
enum class Walk { key_state, output, query_gradient, query_state, key_gradient };

/// Tiles of one worker. Leading dimensions are padded so that no product has a remainder.
template <class A>
struct Tiles {
  int ldr = 0, ldv = 0, ldc = 0;  // leading dimensions of rows of features, values, keys of a chunk
  int ld_shift = 0, ld_staging = 0;
  A *keys = nullptr, *keys_t = nullptr;      // (C, R) and its transpose
  A *values = nullptr, *values_t = nullptr;  // (C, Dv) and its transpose
  A *queries = nullptr;                      // (C, R)
  A *cotangents = nullptr;                   // (C, Dv): G, cotangent of the numerator
  A *outputs = nullptr;                      // (C, Dv): rows of o, on the host or relative to a centre
  A *weights = nullptr;                      // (C, C): P_ij = phi_q(i) . phi_k(j)
  A *weight_cotangents = nullptr;            // (C, C): E_ij = dL / dP_ij
  A *out = nullptr;                          // numerators, or gradients of features
  A *value_gradients = nullptr;              // (C, Dv)
  A *state = nullptr, *state_low = nullptr;  // S or its transpose, and what sums lost, if compensated
  A *sums = nullptr, *sums_low = nullptr;    // z; the mirrored state alike
  A *row_scale = nullptr;                    // (C): denominators or factors of rows
  A *row_terms = nullptr;                    // (C): cotangent of the denominator
  A *one = nullptr;                          // 1
  A *staging = nullptr;                      // twice (C, D or Dv): rows of 16-bit storage as numbers, or side by side
  double* parameter_terms = nullptr;         // (C)
  A *value_sums = nullptr, *value_sums_low = nullptr;  // t, or what mirrors it
  A *constants = nullptr;                      // (C): the constant of the head
  A *row_counts = nullptr;                     // (C): keys that a row sees
  A *centre = nullptr;                         // (Dv): what values are taken relative to
  A *query_factors = nullptr, *key_factors = nullptr;  // (C): 1 / norm of rows
  A *noise = nullptr;                          // normals of the rows of a chunk
  int *shift = nullptr, *new_shift = nullptr;  // (R), of all features
  int *running = nullptr;                      // (C, R) shift up to each key
  int *starts = nullptr;                       // (interval, R) shift before each chunk
  int *row_shift = nullptr;                    // (C)

  /// Tiles for `walk` with the window of `args`.
  template <class Args>
  KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const Args& args, Walk walk, bool transposed, bool scaled,
                        bool divides_by_norm) {
    const int c = padded_rows(args.plan.chunk);
    const int r = padded_rows(args.window.features);
    const int v = padded_rows(args.window.values);
    ldr = padded_columns<A>(args.window.features);
    ldv = padded_columns<A>(args.window.values);
    ldc = padded_columns<A>(args.plan.chunk);
    ld_shift = padded_columns<int>(args.features);
    ld_staging = padded_columns<A>(args.d > args.dv ? args.d : args.dv);
    const bool has_keys = walk != Walk::query_state;
    const bool has_queries = walk != Walk::key_state;
    const bool gradient = walk == Walk::query_gradient || walk == Walk::key_gradient;
    const std::int64_t state_size = transposed ? std::int64_t(v) * ldr : std::int64_t(r) * ldv;
    state = arena.take<A>(state_size);
    sums = arena.take<A>(ldr);
    if (args.plan.compensated) {
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
    if (has_queries && walk != Walk::output) {
      cotangents = arena.take<A>(std::int64_t(c) * ldv);
      if (args.host || args.center_v) outputs = arena.take<A>(std::int64_t(c) * ldv);
    }
    if (walk == Walk::output || walk == Walk::key_gradient)
      weights = arena.take<A>(std::int64_t(c) * ldc);
    if (gradient) {
      weight_cotangents = arena.take<A>(std::int64_t(c) * ldc);
      parameter_terms = arena.take<double>(c);
      out = arena.take<A>(std::int64_t(c) * ldr);
      one = arena.take<A>(1);
    }
    if (walk == Walk::output) out = arena.take<A>(std::int64_t(c) * ldv);
    if (walk == Walk::key_gradient) value_gradients = arena.take<A>(std::int64_t(c) * ldv);
    if (args.has_constant) {
      value_sums = arena.take<A>(ldv);
      if (args.plan.compensated) value_sums_low = arena.take<A>(ldv);
      constants = arena.take<A>(c);
    }
    if (args.counts_keys() || args.may_record) row_counts = arena.take<A>(c);
    if (args.center_v) centre = arena.take<A>(ldv);
    if (divides_by_norm && has_keys) key_factors = arena.take<A>(c);
    if (divides_by_norm && has_queries) query_factors = arena.take<A>(c);
    if (args.has_noise() && has_queries) noise = arena.take<A>(noise_size(c, args.window.values, args.host));
    if (!args.stores_native() || divides_by_norm) staging = arena.take<A>(2 * std::int64_t(c) * ld_staging);
    if (scaled) {
      shift = arena.take<int>(ld_shift);
      new_shift = arena.take<int>(ld_shift);
      running = arena.take<int>(std::int64_t(c) * ld_shift);
      row_shift = arena.take<int>(c);
      if (walk == Walk::query_state || walk == Walk::key_gradient)
        starts = arena.take<int>(std::int64_t(args.plan.shift_interval) * ld_shift);
    }
  }
};

}  // namespace LinAttn::detail
