// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/arguments.hpp>
#include <linattn/team.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/state.hpp>
#include <linattn/tile.hpp>

/// \file walker.hpp
/// One worker walking the chunks of one sequence and key/value head: the mathematics of the engine.
///
/// With features Q_i = phi_q(q_i), K_j = phi_k(k_j), weights P_ij = Q_i . K_j, saved denominators s_i:
///
///     forward     n_i = Q_i^T S_i          s_i = Q_i . z_i         o_i = n_i / s_i
///     backward    G_i = dO_i / s_i         e_i = -G_i . o_i        E_ij = G_i . v_j + e_i
///                 dQ_i = S_i G_i + z_i e_i           S_i = sum_{j<=i} K_j v_j^T    z_i = sum_{j<=i} K_j
///                 dK_j = R_j v_j + y_j               R_j = sum_{i>=j} Q_i G_i^T    y_j = sum_{i>=j} Q_i e_i
///                 dV_j = R_j^T K_j
///
/// where the part of a sum that lies in the chunk itself goes through P and E. Without normalisation
/// G_i = scale dO_i and e_i = 0. S is kept features x values in the forward pass and transposed in the
/// backward pass, where every product then finds its right factor row-major.
///
/// **Scaled maps.** Feature d of all keys is kept relative to 2^m_d, with the integer m_d at least the
/// exponent of every key summed; the query compensates: Q_id = 2^(q + m_d - c_i), K_jd = 2^(k - m_d), and
/// the row scale 2^c_i cancels in the ratio. c_i = max_d (q + m_d(i)) uses the maximum over exactly the
/// keys that row i sees, so 1/2 <= s_i <= 2 R N holds for every row and s_i does not depend on the chunks.
/// m_d only grows; where it would grow by more than `largest_rise` bits inside a chunk, the chunk is cut
/// into pieces, so that the features of earlier keys do not underflow. Every rescaling is by a power of
/// two: no key changes a bit of an earlier causal row.
///
/// **Hidden keys** have features 0 and value 0, are never read, and are out of every shift. **States** that
/// the caller hands in stand before the first key; the cotangent of the last state stands after the last
/// query of the mirrored walk.

namespace LinAttn::detail {

inline constexpr int largest_rise = 60;

template <class Team, class T, class QueryMap, class KeyMap>
class Walker {
 public:
  using A = accumulator_t<T>;
  using Args = Arguments<T, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;
  static constexpr bool compensated = Tiles<A>::compensated;

  KOKKOS_FUNCTION Walker(const Team& team, const Args& args, const Tiles<A>& tiles, bool transposed)
      : m_team(team), m_args(args), m_tiles(tiles), m_transposed(transposed) {}

  KOKKOS_FUNCTION void run(Walk walk, std::int64_t task) {
    m_task = task;
    m_segment = task % m_args.plan.segments;
    m_unit = task / m_args.plan.segments;
    m_member = m_unit / m_args.kv_heads;
    m_kv_head = m_unit % m_args.kv_heads;
    m_sequence = Sequence::at(m_args, m_member);
    m_visible = Visibility::of(m_args, m_sequence);
    // keys that no query and no later loss looks at have gradient 0, whatever they hold
    m_visible.nothing = walk == Walk::key_gradient && m_sequence.nq == 0 && !m_args.last_cotangent.present;
    switch (walk) {
      case Walk::key_state: return walk_key_state();
      case Walk::output: return walk_output();
      case Walk::query_gradient: return walk_query_gradient();
      case Walk::query_state: return walk_query_state();
      case Walk::key_gradient: return walk_key_gradient();
    }
  }

 private:
  struct Chunk {
    std::int64_t begin;
    int rows;
  };
  struct Range {
    std::int64_t first, last;
  };

  // ---- the walks ------------------------------------------------------------------------------

  /// State of the keys of one segment, to the workspace.
  KOKKOS_FUNCTION void walk_key_state() {
    clear_state(1);
    const Range range = segment_chunks(m_sequence.nk);
    for (std::int64_t c = range.first; c < range.last; ++c) absorb_keys(chunk(c, m_sequence.nk));
    spill_state(1);
  }

  KOKKOS_FUNCTION void walk_output() {
    enter_key_state();
    if (m_args.causal) {
      causal_walk([&](Chunk piece, const int* running, std::int64_t g) {
        load_queries(piece, g, running);
        causal_weights(piece);
        numerators(piece, true);
        write_output(piece, g, true);
      });
    } else {
      full_walk([&](Chunk queries, std::int64_t g) {
        load_queries(queries, g, nullptr);
        numerators(queries, false);
        write_output(queries, g, false);
      });
    }
    if (m_args.last.present && m_segment == (m_args.causal ? m_args.plan.segments - 1 : 0))
      hand_out_state();
  }

  KOKKOS_FUNCTION void walk_query_gradient() {
    enter_key_state();
    clear_parameter_parts(m_args.query_parameter_parts, m_args.group);
    if (m_args.causal) {
      causal_walk([&](Chunk piece, const int* running, std::int64_t g) {
        load_queries(piece, g, running);
        load_cotangents(piece, g);
        causal_weight_cotangents(piece);
        query_gradients(piece, true);
        write_query_gradients(piece, g);
      });
    } else {
      full_walk([&](Chunk queries, std::int64_t g) {
        load_queries(queries, g, nullptr);
        load_cotangents(queries, g);
        query_gradients(queries, false);
        write_query_gradients(queries, g);
      });
    }
  }

  /// Mirrored state (R, y) of the queries of one segment, to the workspace.
  KOKKOS_FUNCTION void walk_query_state() {
    clear_state(-1);
    if (m_args.causal) {
      const Range range = segment_chunks(m_sequence.nk);
      for (std::int64_t c = range.last; c-- > range.first;) {
        const Chunk keys = chunk(c, m_sequence.nk);
        if (keys.begin + keys.rows <= offset()) break;  // no query stands here or before
        for_each_piece_backward(keys, c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          absorb_queries_of_group(piece, running);
        });
      }
    } else {
      enter_total_shift();
      absorb_queries(segment_chunks(m_sequence.nq));
    }
    spill_state(-1);
  }

  KOKKOS_FUNCTION void walk_key_gradient() {
    enter_query_state();
    clear_parameter_parts(m_args.key_parameter_parts, 1);
    const Range range = segment_chunks(m_sequence.nk);
    if (m_args.causal) {
      for (std::int64_t c = range.last; c-- > range.first;) {
        prefetch_chunk(c - 1, m_sequence.nk);
        for_each_piece_backward(chunk(c, m_sequence.nk), c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          load_keys(piece);
          load_values(piece);
          const bool has_queries = piece.begin + piece.rows > offset();
          if (!has_queries) key_gradients(piece, false);
          for (std::int64_t g = 0; has_queries && g < m_args.group; ++g) {
            load_queries(piece, g, running);
            load_cotangents(piece, g);
            causal_weights(piece);
            causal_weight_cotangents(piece);
            if (g == 0)
              key_gradients(piece, true);
            else
              add_chunk_key_gradients(piece);
            absorb_loaded_queries(piece);
          }
          write_key_gradients(piece);
        });
      }
    } else {
      for (std::int64_t c = range.first; c < range.last; ++c) {
        const Chunk keys = chunk(c, m_sequence.nk);
        load_keys(keys);
        load_values(keys);
        key_gradients(keys, false);
        write_key_gradients(keys);
      }
    }
    if (m_args.initial_gradient.present && m_segment == 0) hand_out_initial_gradient();
  }

  /// Every chunk of the segment in order: body(piece, running shifts, query head of the group) where
  /// queries stand, with keys and values loaded; then the keys enter the state.
  template <class Body>
  KOKKOS_FUNCTION void causal_walk(const Body& body) {
    const Range range = segment_chunks(m_sequence.nk);
    const bool state_is_wanted = m_args.last.present;
    for (std::int64_t c = range.first; c < range.last; ++c) {
      const Chunk keys = chunk(c, m_sequence.nk);
      prefetch_chunk(c + 1, m_sequence.nk);
      if (keys.begin + keys.rows <= offset()) {
        absorb_keys(keys);
        continue;
      }
      for_each_piece(keys, [&](Chunk piece, const int* running) {
        if constexpr (scaled) rescale_state<1>(running + (piece.rows - 1) * m_tiles.ldr);
        load_keys(piece);
        load_values(piece);
        for (std::int64_t g = 0; g < m_args.group; ++g) body(piece, running, g);
        const bool ends = c + 1 == range.last && piece.begin + piece.rows == keys.begin + keys.rows;
        if (!ends || state_is_wanted) absorb_loaded_keys(piece);
      });
    }
  }

  /// Every chunk of queries of the segment, against the state of all keys.
  template <class Body>
  KOKKOS_FUNCTION void full_walk(const Body& body) {
    const Range range = segment_chunks(m_sequence.nq);
    for (std::int64_t c = range.first; c < range.last; ++c) {
      for (std::int64_t g = 0; g < m_args.group; ++g) body(chunk(c, m_sequence.nq), g);
    }
  }

  // ---- chunks and pieces ----------------------------------------------------------------------

  KOKKOS_FUNCTION Range segment_chunks(std::int64_t tokens) const {
    return {m_args.first_chunk(tokens, m_segment), m_args.first_chunk(tokens, m_segment + 1)};
  }
  KOKKOS_FUNCTION Chunk chunk(std::int64_t c, std::int64_t tokens) const {
    const std::int64_t begin = c * m_args.plan.chunk;
    const std::int64_t left = tokens - begin;
    return {begin, static_cast<int>(left < m_args.plan.chunk ? left : m_args.plan.chunk)};
  }
  KOKKOS_FUNCTION std::int64_t offset() const { return m_sequence.nk - m_sequence.nq; }
  /// First row of the chunk at which a query stands under a causal mask.
  KOKKOS_FUNCTION int first_query_row(Chunk keys) const {
    const std::int64_t first = offset() - keys.begin;
    return first < 0 ? 0 : static_cast<int>(first < keys.rows ? first : keys.rows);
  }
  KOKKOS_FUNCTION const T* key_row(std::int64_t j) const {
    return m_args.k.row(m_sequence.batch, m_kv_head, m_sequence.k_begin + j);
  }

  /// Asks for the rows of a causal chunk before they are needed.
  KOKKOS_FUNCTION void prefetch_chunk(std::int64_t c, std::int64_t tokens) const {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    if constexpr (Team::on_host) {
      if (c < 0 || c >= m_args.chunks(tokens)) return;
      const Chunk keys = chunk(c, tokens);
      prefetch_rows(m_args.k, m_kv_head, m_sequence.k_begin + keys.begin, keys.rows, m_args.d);
      prefetch_rows(m_args.v, m_kv_head, m_sequence.k_begin + keys.begin, keys.rows, m_args.dv);
      const std::int64_t query = keys.begin - offset();
      if (query < 0) return;
      const std::int64_t at = m_sequence.q_begin + query;
      prefetch_rows(m_args.q, query_head(0), at, keys.rows, m_args.d);
      if (m_args.d_o) prefetch_rows(m_args.d_o, query_head(0), at, keys.rows, m_args.dv);
      if (m_args.d_o && m_args.o) prefetch_rows(m_args.o, query_head(0), at, keys.rows, m_args.dv);
    }
#endif
    (void)c, (void)tokens;
  }

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  template <class U>
  void prefetch_rows(const RowTensor<U>& tensor, std::int64_t head, std::int64_t row, int rows,
                     int columns) const {
    if (tensor.element_stride != 1) return;
    constexpr int line = 64 / static_cast<int>(sizeof(T));
    for (int r = 0; r < rows; ++r)
      for (int d = 0; d < columns; d += line) prefetch(tensor.row(m_sequence.batch, head, row + r) + d);
  }
#endif

  /// running(r, d) = max(before[d], exponents of the visible keys 0..r of the chunk).
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void running_shifts(Chunk keys, const int* before) {
    if constexpr (scaled) {
      const auto map = bind_map<A>(m_args.key_map, m_kv_head);
      const T* k = key_row(keys.begin);
      const std::int64_t row = m_args.k.row_stride;
      const int ld = m_tiles.ldr;
      int* running = m_tiles.running;
      const Visibility visible = m_visible;
      m_team.barrier();
      with_stride<Team>(m_args.k.element_stride, [&](auto element) {
        const auto seen = [=](int r) { return visible(keys.begin + r); };
        for_each_down(m_team, keys.rows, m_args.features, seen, [=](int r) {
          const int* above = r == 0 ? before : running + (r - 1) * ld;
          int* here = running + r * ld;
          const T* x = k + r * row;
          return [=](int d) {
            const int e = map.exponent(static_cast<A>(x[d * element]));
            here[d] = e > above[d] ? e : above[d];
          };
        }, [=](int r) {
          const int* above = r == 0 ? before : running + (r - 1) * ld;
          int* here = running + r * ld;
          return [=](int d) { here[d] = above[d]; };
        });
      });
      m_team.barrier();
    } else {
      (void)keys;
      (void)before;
    }
  }

  /// End of the piece that begins at row `begin`: the first row at which a shift has risen too far.
  KOKKOS_FUNCTION int piece_end(int begin, int rows) const {
    if constexpr (scaled) {
      const int ld = m_tiles.ldr;
      const int* first = m_tiles.running + begin * ld;
      const auto too_far = [&](int row) {
        int rise = 0;
        for (int d = 0; d < m_args.features; ++d) {
          const int here = m_tiles.running[row * ld + d] - first[d];
          rise = here > rise ? here : rise;
        }
        return rise > largest_rise;
      };
      if (!too_far(rows - 1)) return rows;
      int end = begin + 1;
      while (!too_far(end)) ++end;
      return end;
    } else {
      (void)begin;
      return rows;
    }
  }

  template <class Body>
  KOKKOS_FUNCTION void for_each_piece(Chunk keys, const Body& body) {
    running_shifts(keys, m_tiles.shift);
    for (int begin = 0; begin < keys.rows;) {
      const int end = piece_end(begin, keys.rows);
      body(Chunk{keys.begin + begin, end - begin}, running_row(begin));
      begin = end;
    }
  }

  /// The same pieces from the last to the first. The shift before chunk `c` comes from the table.
  template <class Body>
  KOKKOS_FUNCTION void for_each_piece_backward(Chunk keys, std::int64_t c, const Body& body) {
    if constexpr (scaled) running_shifts(keys, shift_before_chunk(c));
    for (int end = keys.rows; end > 0;) {
      int begin = 0;
      for (int next = piece_end(0, keys.rows); next < end; next = piece_end(next, keys.rows)) begin = next;
      body(Chunk{keys.begin + begin, end - begin}, running_row(begin));
      end = begin;
    }
  }

  KOKKOS_FUNCTION const int* running_row(int row) const {
    return scaled ? m_tiles.running + row * m_tiles.ldr : nullptr;
  }

  /// Shifts before chunk c, computed for a whole interval of chunks when the walk enters it.
  KOKKOS_FUNCTION const int* shift_before_chunk(std::int64_t c) {
    const int interval = m_args.plan.shift_interval;
    const std::int64_t entry = c / interval;
    const int ld = m_tiles.ldr;
    if (entry != m_loaded_interval) {
      m_loaded_interval = entry;
      m_team.barrier();
      if (entry == 0) {
        initial_shifts(m_tiles.starts);
      } else {
        const int* table = shift_table_entry(entry - 1);
        for_each(m_team, m_args.features, [&](int d) { m_tiles.starts[d] = table[d]; });
      }
      m_team.barrier();
      for (int i = 0; i + 1 < interval && entry * interval + i < c; ++i) {
        const Chunk keys = chunk(entry * interval + i, m_sequence.nk);
        running_shifts(keys, m_tiles.starts + i * ld);
        for_each(m_team, m_args.features, [&](int d) {
          m_tiles.starts[(i + 1) * ld + d] = m_tiles.running[(keys.rows - 1) * ld + d];
        });
        m_team.barrier();
      }
    }
    return m_tiles.starts + (c % interval) * ld;
  }

  KOKKOS_FUNCTION const int* shift_table_entry(std::int64_t entry) const {
    return m_args.shift_table + (m_unit * m_args.shift_entries + entry) * m_args.features;
  }

  /// Shifts before the first key.
  KOKKOS_FUNCTION void initial_shifts(int* shifts) const {
    const bool given = m_args.initial.present;
    const int* from = m_args.initial.shifts.row(m_member, m_kv_head, 0);
    const std::int64_t stride = m_args.initial.shifts.row_stride;
    for_each(m_team, m_args.features, [=](int d) { shifts[d] = given ? from[d * stride] : no_shift; });
  }

  // ---- the state ------------------------------------------------------------------------------

  KOKKOS_FUNCTION int state_rows() const { return m_transposed ? m_args.dv : m_args.features; }
  KOKKOS_FUNCTION int state_columns() const { return m_transposed ? m_args.features : m_args.dv; }
  KOKKOS_FUNCTION int state_ld() const { return m_transposed ? m_tiles.ldr : m_tiles.ldv; }

  template <class U>
  KOKKOS_FUNCTION void fill(U* data, int n, U value) const {
    for_each(m_team, n, [=](int i) { data[i] = value; });
  }

  /// No key seen (sign 1), or no query (sign -1).
  KOKKOS_FUNCTION void clear_state(int sign) {
    m_team.barrier();
    fill(m_tiles.state, state_rows() * state_ld(), A(0));
    fill(m_tiles.sums, m_tiles.ldr, A(0));
    clear_low();
    if constexpr (scaled) fill(m_tiles.shift, m_tiles.ldr, sign * no_shift);
    (void)sign;
    m_loaded_interval = -1;
    m_team.barrier();
  }
  KOKKOS_FUNCTION void clear_low() {
    if constexpr (compensated) {
      fill(m_tiles.state_low, state_rows() * state_ld(), A(0));
      fill(m_tiles.sums_low, m_tiles.ldr, A(0));
    }
  }

  /// The state before the first key of the segment; without a mask, of all keys.
  KOKKOS_FUNCTION void enter_key_state() {
    clear_state(1);
    if (m_args.states) {
      enter_segment(1);
    } else {
      if (m_args.initial.present) enter_caller_state(m_args.initial);
      if (!m_args.causal) {
        for (std::int64_t c = 0; c < m_args.chunks(m_sequence.nk); ++c) absorb_keys(chunk(c, m_sequence.nk));
      }
    }
  }

  /// The mirrored state after the last query of the segment; without a mask, of all queries.
  KOKKOS_FUNCTION void enter_query_state() {
    clear_state(-1);
    if (m_args.states) return enter_segment(-1);
    if (m_args.last_cotangent.present) enter_caller_state(m_args.last_cotangent);
    if (!m_args.causal) {
      enter_total_shift();
      absorb_queries({0, m_args.chunks(m_sequence.nq)});
    }
  }

  /// `sign` is -1 for the mirrored state, whose true sums are 2^-shift times what is kept.
  KOKKOS_FUNCTION void enter_segment(int sign) {
    // without a mask every segment enters with the total, which the scan left in the first place
    const std::int64_t place = m_args.causal ? m_task : m_unit * m_args.plan.segments;
    const A* values = m_args.states.values + place * m_args.state_size();
    const A* sums = m_args.states.sums + place * m_args.features;
    const int columns = state_columns(), ld = state_ld();
    A* state = m_tiles.state;
    for_each_in_rows(m_team, state_rows(), columns, [=](int i) {
      return [=](int j) { state[i * ld + j] = values[std::int64_t(i) * columns + j]; };
    });
    for_each(m_team, m_args.features, [&](int d) { m_tiles.sums[d] = sums[d]; });
    if constexpr (scaled) {
      const int* shifts = m_args.states.carried_shifts + place * m_args.features;
      for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = sign * shifts[d]; });
    }
    m_team.barrier();
  }

  KOKKOS_FUNCTION void enter_caller_state(const CallerState<const A, const int>& from) {
    m_team.barrier();
    for_each_in_rows(m_team, m_args.features, m_args.dv, [&](int d) {
      const A* values = from.values.row(m_member, m_kv_head, d);
      const std::int64_t element = from.values.element_stride;
      A* state = m_tiles.state + (m_transposed ? d : d * m_tiles.ldv);
      const int step = m_transposed ? m_tiles.ldr : 1;
      return [=](int v) { state[v * step] = values[v * element]; };
    });
    for_each(m_team, m_args.features,
             [&](int d) { m_tiles.sums[d] = *from.sums.row(m_member, m_kv_head, d); });
    if constexpr (scaled) {
      for_each(m_team, m_args.features,
               [&](int d) { m_tiles.shift[d] = *from.shifts.row(m_member, m_kv_head, d); });
    }
    m_team.barrier();
  }

  /// The state as it stands, to the caller.
  template <class State>
  KOKKOS_FUNCTION void copy_state_to(const State& to) {
    m_team.barrier();
    for_each_in_rows(m_team, m_args.features, m_args.dv, [&](int d) {
      A* values = to.values.row(m_member, m_kv_head, d);
      const std::int64_t element = to.values.element_stride;
      const int at = m_transposed ? d : d * m_tiles.ldv;
      const int step = m_transposed ? m_tiles.ldr : 1;
      const A* state = m_tiles.state + at;
      const A* low = compensated ? m_tiles.state_low + at : nullptr;
      return [=](int v) { values[v * element] = low ? state[v * step] - low[v * step] : state[v * step]; };
    });
    for_each(m_team, m_args.features, [&](int d) {
      *to.sums.row(m_member, m_kv_head, d) =
          compensated ? m_tiles.sums[d] - m_tiles.sums_low[d] : m_tiles.sums[d];
    });
  }

  KOKKOS_FUNCTION void hand_out_state() {
    copy_state_to(m_args.last);
    if constexpr (scaled) {
      for_each(m_team, m_args.features, [&](int d) {
        *m_args.last.shifts.row(m_member, m_kv_head, d) = m_tiles.shift[d];
      });
    }
    m_team.barrier();
  }

  KOKKOS_FUNCTION void hand_out_initial_gradient() {
    if constexpr (scaled) {
      initial_shifts(m_tiles.new_shift);
      rescale_state<-1>(m_tiles.new_shift);
    }
    copy_state_to(m_args.initial_gradient);
    m_team.barrier();
  }

  KOKKOS_FUNCTION void spill_state(int sign) {
    A* values = m_args.states.values + m_task * m_args.state_size();
    A* sums = m_args.states.sums + m_task * m_args.features;
    const int columns = state_columns(), ld = state_ld();
    const A* state = m_tiles.state;
    const A* low = m_tiles.state_low;
    m_team.barrier();
    for_each_in_rows(m_team, state_rows(), columns, [=](int i) {
      return [=](int j) {
        values[std::int64_t(i) * columns + j] =
            compensated ? state[i * ld + j] - low[i * ld + j] : state[i * ld + j];
      };
    });
    for_each(m_team, m_args.features, [&](int d) {
      sums[d] = compensated ? m_tiles.sums[d] - m_tiles.sums_low[d] : m_tiles.sums[d];
    });
    if constexpr (scaled) {
      int* shifts = m_args.states.shifts + m_task * m_args.features;
      for_each(m_team, m_args.features, [&](int d) { shifts[d] = sign * m_tiles.shift[d]; });
    }
  }

  /// Without a mask one shift serves all rows: the maximum over all keys.
  KOKKOS_FUNCTION void enter_total_shift() {
    if constexpr (scaled) {
      m_team.barrier();
      if (m_args.shift_entries > 0) {
        const int* total = shift_table_entry(m_args.shift_entries - 1);
        for_each(m_team, m_args.features, [&](int d) { m_tiles.new_shift[d] = total[d]; });
        m_team.barrier();
      } else {
        initial_shifts(m_tiles.new_shift);
        m_team.barrier();
        for (std::int64_t c = 0; c < m_args.chunks(m_sequence.nk); ++c) {
          const Chunk keys = chunk(c, m_sequence.nk);
          running_shifts(keys, m_tiles.new_shift);
          for_each(m_team, m_args.features, [&](int d) {
            m_tiles.new_shift[d] = m_tiles.running[(keys.rows - 1) * m_tiles.ldr + d];
          });
          m_team.barrier();
        }
      }
      rescale_state<-1>(m_tiles.new_shift);
    }
  }

  /// Brings the state to the shifts `to`, which become the current ones.
  template <int Sign>
  KOKKOS_FUNCTION void rescale_state(const int* to) {
    if constexpr (scaled) {
      m_team.barrier();
      if (shifts_differ(to)) {
        const int ld = state_ld();
        const int* from = m_tiles.shift;
        A* const parts[2] = {m_tiles.state, m_tiles.state_low};
        for (int part = 0; part < (compensated ? 2 : 1); ++part) {
          A* state = parts[part];
          if (m_transposed) {
            for_each_in_rows(m_team, m_args.dv, m_args.features, [=](int v) {
              return [=](int d) { state[v * ld + d] *= power_of_two<A>(Sign * (from[d] - to[d])); };
            });
          } else {
            for_each_in_rows(m_team, m_args.features, m_args.dv, [=](int d) {
              const A factor = power_of_two<A>(Sign * (from[d] - to[d]));
              return [=](int v) { state[d * ld + v] *= factor; };
            });
          }
        }
        for_each(m_team, m_args.features, [&](int d) {
          const A factor = power_of_two<A>(Sign * (from[d] - to[d]));
          m_tiles.sums[d] *= factor;
          if (compensated) m_tiles.sums_low[d] *= factor;
        });
        m_team.barrier();
        for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = to[d]; });
      }
      m_team.barrier();
    } else {
      (void)to;
    }
  }

  KOKKOS_FUNCTION bool shifts_differ(const int* to) const {
    int difference = 0;
    for (int d = 0; d < m_args.features; ++d) difference |= m_tiles.shift[d] ^ to[d];
    return difference != 0;
  }

  /// Mirrored state, walking down: the shift falls, and what later rows left shrinks with it.
  KOKKOS_FUNCTION void rescale_to_piece(Chunk piece, const int* running) {
    if constexpr (scaled)
      rescale_state<-1>(running + (piece.rows - 1) * m_tiles.ldr);
    else
      (void)piece, (void)running;
  }

  KOKKOS_FUNCTION Target<A> state_target() const {
    return {m_tiles.state, state_ld(), compensated ? Store::compensated : Store::add, m_tiles.state_low};
  }

  /// z += sum over rows of weight(row) * row; the chunk is summed first.
  template <class Weight>
  LINATTN_OUTLINE KOKKOS_FUNCTION void add_rows_to_sums(const A* rows, int count, const Weight& weight) {
    const int ld = m_tiles.ldr;
    const auto add = [&](int d, A part) {
      if constexpr (compensated)
        compensated_add(m_tiles.sums[d], m_tiles.sums_low[d], part);
      else
        m_tiles.sums[d] += part;
    };
    if constexpr (Team::on_host) {
      constexpr int block = tile_columns<A>;
      for (int d0 = 0; d0 < m_args.features; d0 += block) {
        A part[block] = {};
        for (int r = 0; r < count; ++r) {
          const A w = weight(r);
          for (int d = 0; d < block; ++d) part[d] += w * rows[r * ld + d0 + d];
        }
        for (int d = 0; d < block; ++d) add(d0 + d, part[d]);
      }
    } else {
      for_each(m_team, m_args.features, [&](int d) {
        A part = A(0);
        for (int r = 0; r < count; ++r) part += weight(r) * rows[r * ld + d];
        add(d, part);
      });
    }
  }

  // ---- keys -----------------------------------------------------------------------------------

  /// A whole chunk into the state, with no row to answer.
  KOKKOS_FUNCTION void absorb_keys(Chunk keys) {
    if constexpr (scaled) {
      running_shifts(keys, m_tiles.shift);
      rescale_state<1>(m_tiles.running + (keys.rows - 1) * m_tiles.ldr);
    }
    load_keys(keys);
    load_values(keys);
    absorb_loaded_keys(keys);
  }

  /// Features of the keys of a chunk at the current shifts, and their transpose if the walk has one.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_keys(Chunk keys) {
    const auto map = bind_map<A>(m_args.key_map, m_kv_head);
    const int* shift = m_tiles.shift;
    const Visibility visible = m_visible;
    m_team.barrier();
    features<KeyMap>(
        map, key_row(keys.begin), m_args.k, keys.rows, m_tiles.keys,
        [=](int) { return [=](int d) { return shift[d]; }; },
        [=](int r) { return visible(keys.begin + r); });
    m_team.barrier();
    if (m_tiles.keys_t) {
      transpose(m_team, keys.rows, m_args.features, m_tiles.keys, m_tiles.ldr, m_tiles.keys_t, m_tiles.ldc);
      m_team.barrier();
    }
  }

  /// Values of a chunk, and their transpose in the backward pass.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_values(Chunk keys) {
    const T* v = m_args.v.row(m_sequence.batch, m_kv_head, m_sequence.k_begin + keys.begin);
    const std::int64_t row = m_args.v.row_stride;
    A* values = m_tiles.values;
    const int ld = m_tiles.ldv;
    const Visibility visible = m_visible;
    with_stride<Team>(m_args.v.element_stride, [&](auto element) {
      for_each_in_counted_rows(
          m_team, keys.rows, m_args.dv, [=](int r) { return visible(keys.begin + r); },
          [=](int r) {
            const T* x = v + r * row;
            A* to = values + r * ld;
            return [=](int j) { to[j] = static_cast<A>(x[j * element]); };
          },
          [=](int r) { return [=](int j) { values[r * ld + j] = A(0); }; });
    });
    m_team.barrier();
    if (m_transposed) {
      transpose(m_team, keys.rows, m_args.dv, m_tiles.values, m_tiles.ldv, m_tiles.values_t, m_tiles.ldc);
      m_team.barrier();
    }
  }

  /// S += K^T V, z += sum of K.
  KOKKOS_FUNCTION void absorb_loaded_keys(Chunk keys) {
    if (m_transposed)
      multiply(m_team, m_args.dv, m_args.features,
               Product<A>{{m_tiles.values, 1, m_tiles.ldv}, m_tiles.keys, m_tiles.ldr, keys.rows},
               state_target());
    else
      multiply(m_team, m_args.features, m_args.dv,
               Product<A>{{m_tiles.keys, 1, m_tiles.ldr}, m_tiles.values, m_tiles.ldv, keys.rows},
               state_target());
    add_rows_to_sums(m_tiles.keys, keys.rows, [](int) { return A(1); });
    m_team.barrier();
  }

  // ---- queries --------------------------------------------------------------------------------

  KOKKOS_FUNCTION std::int64_t query_head(std::int64_t g) const { return m_kv_head * m_args.group + g; }
  /// Row of the tensors that holds the query at row 0 of the chunk (none where first_row() is later).
  KOKKOS_FUNCTION std::int64_t query_begin(Chunk rows) const {
    return m_sequence.q_begin + (m_args.causal ? rows.begin - offset() : rows.begin);
  }
  KOKKOS_FUNCTION int first_row(Chunk rows) const { return m_args.causal ? first_query_row(rows) : 0; }

  /// Features of the queries of a chunk; rows without a query, or without a key to see, are zero.
  /// `running` holds the shifts over exactly the keys that a row sees (causal), otherwise the current
  /// shifts are those of all keys.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void load_queries(Chunk rows, std::int64_t g, const int* running) {
    const std::int64_t head = query_head(g);
    const auto map = bind_map<A>(m_args.query_map, head);
    const int first = first_row(rows);
    const T* q = m_args.q.row(m_sequence.batch, head, query_begin(rows) + first);
    const int ld = m_tiles.ldr;
    const int* shift = m_tiles.shift;
    int* row_shift = m_tiles.row_shift;
    A* queries = m_tiles.queries;
    m_team.barrier();
    if constexpr (scaled) {
      with_stride<Team>(m_args.q.element_stride, [&](auto element) {
        const int count = m_args.features;
        const std::int64_t row = m_args.q.row_stride;
        for_each(m_team, rows.rows - first, [=](int r) {
          const int* seen = running ? running + (first + r) * ld : shift;
          const T* x = q + r * row;
          int largest = 2 * no_shift;
          for (int d = 0; d < count; ++d) {
            const int e = map.exponent(static_cast<A>(x[d * element])) + seen[d];
            largest = e > largest ? e : largest;
          }
          row_shift[first + r] = largest;
        });
      });
      m_team.barrier();
    } else {
      (void)running;
    }
    for_each_in_rows(m_team, first, m_args.features,
                     [=](int r) { return [=](int d) { queries[r * ld + d] = A(0); }; });
    features<QueryMap>(
        map, q, m_args.q, rows.rows - first, queries + first * ld,
        [=](int r) {
          const int scale = scaled ? row_shift[first + r] : 0;
          return [=](int d) { return scale - shift[d]; };
        },
        [=](int r) {
          if constexpr (scaled) return row_shift[first + r] > no_shift / 2;  // it sees a key
          (void)r;
          return true;
        });
    m_team.barrier();
  }

  /// P = Q K^T on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weights(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows,
             Product<A>{{m_tiles.queries, m_tiles.ldr, 1}, m_tiles.keys_t, m_tiles.ldc, m_args.features},
             Target<A>{m_tiles.weights, m_tiles.ldc, Store::overwrite, nullptr, true});
    m_team.barrier();
    keep_lower(piece, m_tiles.weights, [](int) { return A(0); });
  }

  /// Adds term(row) on and below the diagonal and assigns zero elsewhere, in place.
  template <class Term>
  LINATTN_OUTLINE KOKKOS_FUNCTION void keep_lower(Chunk piece, A* tile, const Term& term) {
    const int first = first_row(piece);
    const int ld = m_tiles.ldc;
    for_each_in_rows(m_team, piece.rows, ld, [=](int i) {
      A* row = tile + i * ld;
      const int end = i >= first ? i + 1 : 0;
      const A more = term(i);
      return [=](int j) { row[j] = j < end ? row[j] + more : A(0); };
    });
    m_team.barrier();
  }

  /// N = Q S (+ P V of the chunk).
  KOKKOS_FUNCTION void numerators(Chunk rows, bool with_chunk) {
    const Product<A> outside{{m_tiles.queries, m_tiles.ldr, 1}, m_tiles.state, m_tiles.ldv, m_args.features};
    const Target<A> target{m_tiles.out, m_tiles.ldv};
    if (with_chunk)
      multiply(m_team, rows.rows, m_args.dv, outside,
               Product<A>{{m_tiles.weights, m_tiles.ldc, 1}, m_tiles.values, m_tiles.ldv, rows.rows, Band::lower},
               target);
    else
      multiply(m_team, rows.rows, m_args.dv, outside, target);
    m_team.barrier();
  }

  /// 2^row_shift, which undoes the scaling of a row where no division does.
  KOKKOS_FUNCTION A unscale(A x, int row) const {
    if constexpr (scaled) {
      const int shift = m_tiles.row_shift[row];
      if (shift <= no_shift / 2) return x;  // an empty row
      const int half = shift / 2;
      return x * power_of_two<A>(half) * power_of_two<A>(shift - half);
    } else {
      (void)row;
      return x;
    }
  }

  /// An overflowed denominator must not pass as a row of zeros.
  KOKKOS_FUNCTION static A divisor(A s) { return s - s == A(0) ? s : s - s; }

  /// x / s, or x times the scale without normalisation; 1 / s could overflow where x / s does not.
  struct RowScale {
    A factor, divisor;
    KOKKOS_FUNCTION RowScale(bool normalise, A row_scale)
        : factor(normalise ? A(1) : row_scale), divisor(normalise ? row_scale : A(1)) {}
    KOKKOS_FORCEINLINE_FUNCTION A operator()(A x) const { return x * factor / divisor; }
  };

  LINATTN_OUTLINE KOKKOS_FUNCTION void write_output(Chunk rows, std::int64_t g, bool with_chunk) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    if (m_args.normalise) {
      for_each(m_team, rows.rows - first, [&](int r) {
        const int i = first + r;
        A s = row_dot(m_team, m_tiles.queries + i * m_tiles.ldr, m_tiles.sums, m_tiles.ldr);
        if (with_chunk) s += row_sum(m_team, m_tiles.weights + i * m_tiles.ldc, m_tiles.ldc);
        if (m_args.denominator) *m_args.denominator.row(m_sequence.batch, head, begin + i) = s;
        m_tiles.row_scale[i] = divisor(s);
      });
    } else {
      for_each(m_team, rows.rows - first,
               [&](int r) { m_tiles.row_scale[first + r] = unscale(m_args.scale, first + r); });
    }
    m_team.barrier();
    T* o = m_args.o.row(m_sequence.batch, head, begin + first);
    const std::int64_t row = m_args.o.row_stride;
    const bool normalise = m_args.normalise;
    const int ld = m_tiles.ldv;
    const A* out = m_tiles.out;
    const A* row_scale = m_tiles.row_scale;
    with_stride<Team>(m_args.o.element_stride, [&](auto element) {
      for_each_in_counted_rows(
          m_team, rows.rows - first, m_args.dv,
          [=](int r) { return !(normalise && row_scale[first + r] == A(0)); },
          [=](int r) {
            const RowScale scale(normalise, row_scale[first + r]);
            const A* from = out + (first + r) * ld;
            T* to = o + r * row;
            return [=](int j) { to[j * element] = static_cast<T>(scale(from[j])); };
          },
          [=](int r) { return [=](int j) { o[r * row + j * element] = T(0); }; });
    });
    m_team.barrier();
  }

  // ---- backward -------------------------------------------------------------------------------

  /// G and e of a chunk; rows without a query are zero.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_cotangents(Chunk rows, std::int64_t g) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    const int ld = m_tiles.ldv;
    for_each(m_team, rows.rows, [&](int i) {
      A row_scale = A(0);
      if (i >= first)
        row_scale = m_args.normalise
                        ? divisor(*m_args.denominator.row(m_sequence.batch, head, begin + i))
                        : unscale(m_args.scale, i);
      m_tiles.row_scale[i] = row_scale;
      m_tiles.row_terms[i] = A(0);
    });
    m_team.barrier();
    const T* d_o = m_args.d_o.row(m_sequence.batch, head, begin + first);
    const std::int64_t row = m_args.d_o.row_stride;
    const bool normalise = m_args.normalise;
    A* cotangents = m_tiles.cotangents;
    const A* row_scale = m_tiles.row_scale;
    with_stride<Team>(m_args.d_o.element_stride, [&](auto element) {
      for_each_in_counted_rows(
          m_team, rows.rows, m_args.dv,
          [=](int i) { return i >= first && !(normalise && row_scale[i] == A(0)); },
          [=](int i) {
            const RowScale scale(normalise, row_scale[i]);
            const T* from = d_o + (i - first) * row;
            A* to = cotangents + i * ld;
            return [=](int j) { to[j] = scale(static_cast<A>(from[j * element])); };
          },
          [=](int i) { return [=](int j) { cotangents[i * ld + j] = A(0); }; });
    });
    m_team.barrier();
    if (m_args.normalise) {
      with_stride<Team>(m_args.o.element_stride, [&](auto element) {
        for_each(m_team, rows.rows - first, [&](int r) {
          const T* o = m_args.o.row(m_sequence.batch, head, begin + first + r);
          if (m_tiles.row_scale[first + r] != A(0))
            m_tiles.row_terms[first + r] =
                -strided_dot(m_tiles.cotangents + (first + r) * ld, o, element, m_args.dv);
        });
      });
      m_team.barrier();
    }
  }

  template <class Stride>
  KOKKOS_FUNCTION static A strided_dot(const A* a, const T* b, Stride stride, int n) {
    constexpr int parts = 16;
    A part[parts] = {};
    int i = 0;
    for (; i + parts <= n; i += parts)
      for (int p = 0; p < parts; ++p) part[p] += a[i + p] * static_cast<A>(b[(i + p) * stride]);
    A total = A(0);
    for (; i < n; ++i) total += a[i] * static_cast<A>(b[i * stride]);
    for (int p = 0; p < parts; ++p) total += part[p];
    return total;
  }

  /// E = G V^T + e on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weight_cotangents(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows,
             Product<A>{{m_tiles.cotangents, m_tiles.ldv, 1}, m_tiles.values_t, m_tiles.ldc, m_args.dv},
             Target<A>{m_tiles.weight_cotangents, m_tiles.ldc, Store::overwrite, nullptr, true});
    m_team.barrier();
    const A* row_terms = m_tiles.row_terms;
    keep_lower(piece, m_tiles.weight_cotangents, [=](int i) { return row_terms[i]; });
  }

  /// dQ = G S^T + e z^T (+ E K of the chunk).
  KOKKOS_FUNCTION void query_gradients(Chunk rows, bool with_chunk) {
    const int ld = m_tiles.ldr;
    const Product<A> outside{{m_tiles.cotangents, m_tiles.ldv, 1}, m_tiles.state, ld, m_args.dv};
    const Target<A> target{m_tiles.out, ld};
    if (with_chunk)
      multiply(m_team, rows.rows, m_args.features, outside,
               Product<A>{{m_tiles.weight_cotangents, m_tiles.ldc, 1}, m_tiles.keys, ld, rows.rows, Band::lower},
               target);
    else
      multiply(m_team, rows.rows, m_args.features, outside, target);
    m_team.barrier();
    if (m_args.normalise) add_outer(rows.rows, m_tiles.row_terms);
  }

  /// out(i, :) += weight[i] * z, or z itself without weights.
  LINATTN_OUTLINE KOKKOS_FUNCTION void add_outer(int rows, const A* weight) {
    const int ld = m_tiles.ldr;
    A* out = m_tiles.out;
    const A* sums = m_tiles.sums;
    for_each_in_rows(m_team, rows, m_args.features, [=](int i) {
      const A w = weight ? weight[i] : A(1);
      A* to = out + i * ld;
      return [=](int d) { to[d] += w * sums[d]; };
    });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void write_query_gradients(Chunk rows, std::int64_t g) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    const auto map = bind_map<A>(m_args.query_map, head);
    pull_back<QueryMap>(
        map, m_args.q.row(m_sequence.batch, head, begin + first), m_args.q, rows.rows - first,
        m_tiles.queries + first * m_tiles.ldr, m_tiles.out + first * m_tiles.ldr,
        m_args.d_q ? m_args.d_q.row(m_sequence.batch, head, begin + first) : nullptr, m_args.d_q,
        m_args.query_parameter_parts ? m_args.query_parameter_parts + m_task * m_args.group + g : nullptr,
        [](int) { return true; });
  }

  /// R += Q^T G, y += Q^T e (R is kept transposed).
  KOKKOS_FUNCTION void absorb_loaded_queries(Chunk rows) {
    multiply(m_team, m_args.dv, m_args.features,
             Product<A>{{m_tiles.cotangents, 1, m_tiles.ldv}, m_tiles.queries, m_tiles.ldr, rows.rows},
             state_target());
    const A* row_terms = m_tiles.row_terms;
    if (m_args.normalise) add_rows_to_sums(m_tiles.queries, rows.rows, [=](int i) { return row_terms[i]; });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void absorb_queries_of_group(Chunk rows, const int* running) {
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_queries(rows, g, running);
      load_cotangents(rows, g);
      absorb_loaded_queries(rows);
    }
  }

  KOKKOS_FUNCTION void absorb_queries(Range range) {
    for (std::int64_t c = range.first; c < range.last; ++c)
      absorb_queries_of_group(chunk(c, m_sequence.nq), nullptr);
  }

  /// dK = V R^T + y, dV^T = R^T K^T: what the queries outside the chunk ask for; with the chunk also
  /// the parts of add_chunk_key_gradients().
  KOKKOS_FUNCTION void key_gradients(Chunk keys, bool with_chunk) {
    const int ldr = m_tiles.ldr, ldc = m_tiles.ldc;
    const Product<A> outside{{m_tiles.values, m_tiles.ldv, 1}, m_tiles.state, ldr, m_args.dv};
    const Target<A> target{m_tiles.out, ldr};
    if (with_chunk) {
      multiply(m_team, keys.rows, m_args.features, outside, chunk_key_gradients(keys), target);
      multiply(m_team, keys.rows, m_args.dv, chunk_value_gradients(keys),
               Target<A>{m_tiles.value_gradients, m_tiles.ldv});
    } else {
      multiply(m_team, keys.rows, m_args.features, outside, target);
      fill(m_tiles.value_gradients, keys.rows * m_tiles.ldv, A(0));
    }
    multiply(m_team, m_args.dv, keys.rows,
             Product<A>{{m_tiles.state, ldr, 1}, m_tiles.keys_t, ldc, m_args.features},
             Target<A>{m_tiles.value_gradients_t, ldc});
    m_team.barrier();
    add_outer(keys.rows, nullptr);
  }

  /// dK += E^T Q, dV += P^T G: what the queries of the chunk ask for.
  KOKKOS_FUNCTION void add_chunk_key_gradients(Chunk piece) {
    multiply(m_team, piece.rows, m_args.features, chunk_key_gradients(piece),
             Target<A>{m_tiles.out, m_tiles.ldr, Store::add});
    multiply(m_team, piece.rows, m_args.dv, chunk_value_gradients(piece),
             Target<A>{m_tiles.value_gradients, m_tiles.ldv, Store::add});
    m_team.barrier();
  }
  KOKKOS_FUNCTION Product<A> chunk_key_gradients(Chunk piece) const {
    return {{m_tiles.weight_cotangents, 1, m_tiles.ldc}, m_tiles.queries, m_tiles.ldr, piece.rows, Band::upper};
  }
  KOKKOS_FUNCTION Product<A> chunk_value_gradients(Chunk piece) const {
    return {{m_tiles.weights, 1, m_tiles.ldc}, m_tiles.cotangents, m_tiles.ldv, piece.rows, Band::upper};
  }

  LINATTN_OUTLINE KOKKOS_FUNCTION void write_key_gradients(Chunk keys) {
    const auto map = bind_map<A>(m_args.key_map, m_kv_head);
    const Visibility visible = m_visible;
    const std::int64_t at = m_sequence.k_begin + keys.begin;
    const auto seen = [=](int r) { return visible(keys.begin + r); };
    pull_back<KeyMap>(map, key_row(keys.begin), m_args.k, keys.rows, m_tiles.keys, m_tiles.out,
                      m_args.d_k ? m_args.d_k.row(m_sequence.batch, m_kv_head, at) : nullptr, m_args.d_k,
                      m_args.key_parameter_parts ? m_args.key_parameter_parts + m_task : nullptr, seen);
    if (m_args.d_v) {
      // the values of the chunk are no longer needed: their tile takes the transposed part
      transpose(m_team, m_args.dv, keys.rows, m_tiles.value_gradients_t, m_tiles.ldc, m_tiles.values,
                m_tiles.ldv);
      m_team.barrier();
      T* d_v = m_args.d_v.row(m_sequence.batch, m_kv_head, at);
      const std::int64_t row = m_args.d_v.row_stride;
      const int ld = m_tiles.ldv;
      const A* outside = m_tiles.values;
      const A* inside = m_tiles.value_gradients;
      with_stride<Team>(m_args.d_v.element_stride, [&](auto element) {
        for_each_in_counted_rows(
            m_team, keys.rows, m_args.dv, seen,
            [=](int j) {
              const A* one = outside + j * ld;
              const A* two = inside + j * ld;
              T* to = d_v + j * row;
              return [=](int v) { to[v * element] = static_cast<T>(one[v] + two[v]); };
            },
            [=](int j) { return [=](int v) { d_v[j * row + v * element] = T(0); }; });
      });
    }
    m_team.barrier();
  }

  // ---- feature maps on tiles ------------------------------------------------------------------

  /// f = phi(x) for `count` rows, zero where not visible(row); shift(row)(feature) matters to
  /// scaled maps only. Rows that are not visible are not read.
  template <class Map, class Bound, class Shift, class Visible>
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void features(const Bound& map, const T* x, const RowTensor<const T>& layout, int count,
                                A* f, const Shift& shift, const Visible& visible) {
    const int ld = m_tiles.ldr;
    const std::int64_t row = layout.row_stride;
    if constexpr (RowFeatureMap<Map>) {
      static_assert(std::is_same_v<A, T>);
      const int size = m_args.d, rank = m_args.features;
      const std::int64_t element = layout.element_stride;
      for_each(m_team, count, [=](int r) {
        const Row<A> to{f + r * ld, rank, 1};
        if (visible(r))
          map.row_value(ConstRow<A>{x + r * row, size, element}, to);
        else
          for (int d = 0; d < rank; ++d) to[d] = A(0);
      });
    } else {
      with_stride<Team>(layout.element_stride, [&](auto element) {
        for_each_in_counted_rows(
            m_team, count, m_args.d, visible,
            [=](int r) {
              const T* from = x + r * row;
              A* to = f + r * ld;
              const auto shift_of = shift(r);
              return [=](int d) {
                if constexpr (scaled)
                  to[d] = map.value(static_cast<A>(from[d * element]), shift_of(d));
                else
                  to[d] = map.value(static_cast<A>(from[d * element]));
              };
            },
            [=](int r) { return [=](int d) { f[r * ld + d] = A(0); }; });
      });
    }
  }

  /// dx = J(x)^T df for `count` rows, to `d_x` unless it is null, zero where not visible(row); adds the
  /// parameter's part to `part`.
  template <class Map, class Bound, class Visible>
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void pull_back(const Bound& map, const T* x, const RowTensor<const T>& layout, int count,
                                 const A* f, const A* df, T* d_x, const RowTensor<T>& d_layout,
                                 double* part, const Visible& visible) {
    const int ld = m_tiles.ldr;
    const std::int64_t row = layout.row_stride;
    const std::int64_t d_row = d_layout.row_stride;
    if constexpr (RowFeatureMap<Map>) {
      if (d_x) {
        const int size = m_args.d, rank = m_args.features;
        const std::int64_t element = layout.element_stride, d_element = d_layout.element_stride;
        for_each(m_team, count, [=](int r) {
          const Row<A> to{d_x + r * d_row, size, d_element};
          if (visible(r))
            map.row_pullback(ConstRow<A>{x + r * row, size, element}, ConstRow<A>{f + r * ld, rank, 1},
                             ConstRow<A>{df + r * ld, rank, 1}, to);
          else
            for (int d = 0; d < size; ++d) to[d] = A(0);
        });
      }
    } else {
      if (d_x) {
        const auto write = [&](auto element, auto d_element) {
          for_each_in_counted_rows(
              m_team, count, m_args.d, visible,
              [=](int r) {
                const T* from = x + r * row;
                const A* f_row = f + r * ld;
                const A* df_row = df + r * ld;
                T* to = d_x + r * d_row;
                return [=](int d) {
                  to[d * d_element] = static_cast<T>(
                      map.derivative(static_cast<A>(from[d * element]), f_row[d]) * df_row[d]);
                };
              },
              [=](int r) { return [=](int d) { d_x[r * d_row + d * d_element] = T(0); }; });
        };
        if (Team::on_host && layout.element_stride == 1 && d_layout.element_stride == 1)
          write(Constant<1>{}, Constant<1>{});
        else
          write(layout.element_stride, d_layout.element_stride);
      }
      if constexpr (ParameterizedFeatureMap<Map>) {
        if (part) {
          const std::int64_t element = layout.element_stride;
          for_each(m_team, count, [&](int r) {
            constexpr int parts = 8;
            A term[parts] = {};
            for (int d = 0; visible(r) && d < m_args.d; ++d)
              term[d % parts] +=
                  map.parameter_derivative(static_cast<A>(x[r * row + d * element]), f[r * ld + d]) *
                  df[r * ld + d];
            double total = 0;
            for (int p = 0; p < parts; ++p) total += term[p];
            m_tiles.parameter_terms[r] = total;
          });
          m_team.barrier();
          if (m_team.rank() == 0) {
            double total = 0;
            for (int r = 0; r < count; ++r) total += m_tiles.parameter_terms[r];
            *part += total;
          }
        }
      }
    }
    m_team.barrier();
  }

  KOKKOS_FUNCTION void clear_parameter_parts(double* parts, std::int64_t count) {
    if (parts && m_team.rank() == 0)
      for (std::int64_t i = 0; i < count; ++i) parts[m_task * count + i] = 0.0;
    m_team.barrier();
  }

  const Team& m_team;
  const Args& m_args;
  const Tiles<A>& m_tiles;
  bool m_transposed;
  std::int64_t m_task = 0, m_segment = 0, m_unit = 0, m_member = 0, m_kv_head = 0;
  Sequence m_sequence{};
  Visibility m_visible{};
  std::int64_t m_loaded_interval = -1;
};

}  // namespace LinAttn::detail
