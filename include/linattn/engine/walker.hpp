// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/arguments.hpp>
#include <linattn/engine/team.hpp>
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

namespace LinAttn::detail {

inline constexpr int largest_rise = 60;

template <class Team, class T, class QueryMap, class KeyMap>
class Walker {
 public:
  using A = accumulator_t<T>;
  using Args = Arguments<T, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;

  KOKKOS_FUNCTION Walker(const Team& team, const Args& args, const Tiles<A>& tiles, bool transposed)
      : m_team(team), m_args(args), m_tiles(tiles), m_transposed(transposed) {}

  KOKKOS_FUNCTION void run(Walk walk, std::int64_t task) {
    const std::int64_t unit = task / m_args.plan.segments;
    m_task = task;
    m_segment = task % m_args.plan.segments;
    m_unit = unit;
    m_batch = unit / m_args.kv_heads;
    m_kv_head = unit % m_args.kv_heads;
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

  // ---- the walks ------------------------------------------------------------------------------

  /// State of the keys of one segment, to the workspace.
  KOKKOS_FUNCTION void walk_key_state() {
    clear_state();
    const auto [first, last] = segment_chunks(m_args.nk);
    for (std::int64_t c = first; c < last; ++c) absorb_keys(chunk(c, m_args.nk));
    spill_state(1);
  }

  KOKKOS_FUNCTION void walk_output() {
    enter_state(1);
    if (m_args.causal) {
      const auto [first, last] = segment_chunks(m_args.nk);
      for (std::int64_t c = first; c < last; ++c) {
        const Chunk keys = chunk(c, m_args.nk);
        if (keys.begin + keys.rows <= offset()) {
          absorb_keys(keys);
          continue;
        }
        for_each_piece(keys, [&](Chunk piece, const int* running) {
          load_piece_keys(piece, running);
          load_values(piece);
          for (std::int64_t g = 0; g < m_args.group; ++g) {
            load_queries(piece, g, running);
            causal_weights(piece);
            numerators(piece, true);
            write_output(piece, g, true);
          }
          absorb_loaded_keys(piece);
        });
      }
    } else {
      if (!m_args.states) absorb_all_keys();
      const auto [first, last] = segment_chunks(m_args.nq);
      for (std::int64_t c = first; c < last; ++c) {
        const Chunk queries = chunk(c, m_args.nq);
        for (std::int64_t g = 0; g < m_args.group; ++g) {
          load_queries(queries, g, nullptr);
          numerators(queries, false);
          write_output(queries, g, false);
        }
      }
    }
  }

  KOKKOS_FUNCTION void walk_query_gradient() {
    enter_state(1);
    clear_parameter_parts(m_args.query_parameter_parts, m_args.group);
    if (m_args.causal) {
      const auto [first, last] = segment_chunks(m_args.nk);
      for (std::int64_t c = first; c < last; ++c) {
        const Chunk keys = chunk(c, m_args.nk);
        if (keys.begin + keys.rows <= offset()) {
          absorb_keys(keys);
          continue;
        }
        for_each_piece(keys, [&](Chunk piece, const int* running) {
          load_piece_keys(piece, running);
          load_values(piece);
          for (std::int64_t g = 0; g < m_args.group; ++g) {
            load_queries(piece, g, running);
            load_cotangents(piece, g);
            causal_weight_cotangents(piece);
            query_gradients(piece, true);
            write_query_gradients(piece, g);
          }
          absorb_loaded_keys(piece);
        });
      }
    } else {
      if (!m_args.states) absorb_all_keys();
      const auto [first, last] = segment_chunks(m_args.nq);
      for (std::int64_t c = first; c < last; ++c) {
        const Chunk queries = chunk(c, m_args.nq);
        for (std::int64_t g = 0; g < m_args.group; ++g) {
          load_queries(queries, g, nullptr);
          load_cotangents(queries, g);
          query_gradients(queries, false);
          write_query_gradients(queries, g);
        }
      }
    }
  }

  /// Mirrored state (R, y) of the queries of one segment, to the workspace.
  KOKKOS_FUNCTION void walk_query_state() {
    clear_state();
    if (m_args.causal) {
      const auto [first, last] = segment_chunks(m_args.nk);
      if constexpr (scaled) fill(m_tiles.shift, m_tiles.ldr, -no_shift);
      for (std::int64_t c = last; c-- > first;) {
        const Chunk keys = chunk(c, m_args.nk);
        if (keys.begin + keys.rows <= offset()) break;  // no query stands here or before
        for_each_piece_backward(keys, c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          absorb_queries_of_group(piece, running);
        });
      }
    } else {
      enter_total_shift();
      const auto [first, last] = segment_chunks(m_args.nq);
      for (std::int64_t c = first; c < last; ++c)
        absorb_queries_of_group(chunk(c, m_args.nq), nullptr);
    }
    spill_state(-1);
  }

  KOKKOS_FUNCTION void walk_key_gradient() {
    enter_state(-1);
    clear_parameter_parts(m_args.key_parameter_parts, 1);
    const auto [first, last] = segment_chunks(m_args.nk);
    if (m_args.causal) {
      for (std::int64_t c = last; c-- > first;) {
        for_each_piece_backward(chunk(c, m_args.nk), c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          load_keys(piece);
          load_values(piece);
          key_gradients(piece);
          if (piece.begin + piece.rows > offset()) {
            for (std::int64_t g = 0; g < m_args.group; ++g) {
              load_queries(piece, g, running);
              load_cotangents(piece, g);
              causal_weights(piece);
              causal_weight_cotangents(piece);
              add_chunk_key_gradients(piece);
              absorb_loaded_queries(piece);
            }
          }
          write_key_gradients(piece);
        });
      }
    } else {
      if (!m_args.states) {
        enter_total_shift();
        for (std::int64_t c = 0; c < m_args.chunks(m_args.nq); ++c)
          absorb_queries_of_group(chunk(c, m_args.nq), nullptr);
      }
      for (std::int64_t c = first; c < last; ++c) {
        const Chunk keys = chunk(c, m_args.nk);
        load_keys(keys);
        load_values(keys);
        key_gradients(keys);
        write_key_gradients(keys);
      }
    }
  }

  // ---- chunks and pieces ----------------------------------------------------------------------

  struct Range {
    std::int64_t first, last;
  };
  KOKKOS_FUNCTION Range segment_chunks(std::int64_t tokens) const {
    return {m_args.first_chunk(tokens, m_segment), m_args.first_chunk(tokens, m_segment + 1)};
  }
  KOKKOS_FUNCTION Chunk chunk(std::int64_t c, std::int64_t tokens) const {
    const std::int64_t begin = c * m_args.plan.chunk;
    const std::int64_t left = tokens - begin;
    return {begin, static_cast<int>(left < m_args.plan.chunk ? left : m_args.plan.chunk)};
  }
  KOKKOS_FUNCTION std::int64_t offset() const { return m_args.nk - m_args.nq; }
  /// First row of the chunk at which a query stands under a causal mask.
  KOKKOS_FUNCTION int first_query_row(Chunk keys) const {
    const std::int64_t first = offset() - keys.begin;
    return first < 0 ? 0 : static_cast<int>(first < keys.rows ? first : keys.rows);
  }

  /// running(r, d) = max(before[d], exponents of keys 0..r of the chunk).
  KOKKOS_FUNCTION void running_shifts(Chunk keys, const int* before) {
    if constexpr (scaled) {
      const auto map = bind_map<A>(m_args.key_map, m_kv_head);
      const T* k = m_args.k.row(m_batch, m_kv_head, keys.begin);
      const int ld = m_tiles.ldr;
      int* running = m_tiles.running;
      m_team.barrier();
      for_each_down(m_team, keys.rows, m_args.features, [&](int r, int d) {
        const A x = static_cast<A>(k[r * m_args.k.row_stride + d * m_args.k.element_stride]);
        const int e = map.exponent(x);
        const int above = r == 0 ? before[d] : running[(r - 1) * ld + d];
        running[r * ld + d] = e > above ? e : above;
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
        for (int d = 0; d < m_args.features; ++d)
          if (m_tiles.running[row * ld + d] - first[d] > largest_rise) return true;
        return false;
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
      const int* table = shift_table_entry(entry);
      m_team.barrier();
      for_each(m_team, m_args.features, [&](int d) { m_tiles.starts[d] = table[d]; });
      for (int i = 0; i + 1 < interval && entry * interval + i < c; ++i) {
        const Chunk keys = chunk(entry * interval + i, m_args.nk);
        running_shifts(keys, m_tiles.starts + i * ld);
        for_each(m_team, m_args.features, [&](int d) {
          m_tiles.starts[(i + 1) * ld + d] = m_tiles.running[(keys.rows - 1) * ld + d];
        });
        m_team.barrier();
      }
      m_team.barrier();
    }
    return m_tiles.starts + (c % interval) * ld;
  }

  KOKKOS_FUNCTION const int* shift_table_entry(std::int64_t entry) const {
    return m_args.shift_table + (m_unit * m_args.shift_entries + entry) * m_args.features;
  }

  // ---- the state ------------------------------------------------------------------------------

  KOKKOS_FUNCTION int state_rows() const { return m_transposed ? m_args.dv : m_args.features; }
  KOKKOS_FUNCTION int state_columns() const { return m_transposed ? m_args.features : m_args.dv; }
  KOKKOS_FUNCTION int state_ld() const { return m_transposed ? m_tiles.ldr : m_tiles.ldv; }

  template <class U>
  KOKKOS_FUNCTION void fill(U* data, int n, U value) const {
    for_each(m_team, n, [&](int i) { data[i] = value; });
  }

  KOKKOS_FUNCTION void clear_state() {
    m_team.barrier();
    fill(m_tiles.state, state_rows() * state_ld(), A(0));
    fill(m_tiles.sums, m_tiles.ldr, A(0));
    if constexpr (scaled) fill(m_tiles.shift, m_tiles.ldr, no_shift);
    m_loaded_interval = -1;
    m_team.barrier();
  }

  /// The state that enters the segment; `sign` is -1 for the mirrored state, whose true sums are
  /// 2^-shift times what is kept.
  KOKKOS_FUNCTION void enter_state(int sign) {
    clear_state();
    if (m_args.states) {
      // without a mask every segment enters with the total, which the scan left in the first place
      const std::int64_t place = m_args.causal ? m_task : m_unit * m_args.plan.segments;
      const A* values = m_args.states.values + place * m_args.state_size();
      const A* sums = m_args.states.sums + place * m_args.features;
      const int columns = state_columns();
      for_each_element(m_team, state_rows(), columns, [&](int i, int j) {
        m_tiles.state[i * state_ld() + j] = values[std::int64_t(i) * columns + j];
      });
      for_each(m_team, m_args.features, [&](int d) { m_tiles.sums[d] = sums[d]; });
      if constexpr (scaled) {
        const int* shifts = m_args.states.carried_shifts + place * m_args.features;
        for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = sign * shifts[d]; });
      }
    } else if constexpr (scaled) {
      fill(m_tiles.shift, m_tiles.ldr, sign * no_shift);
    }
    m_team.barrier();
  }

  KOKKOS_FUNCTION void spill_state(int sign) {
    const std::int64_t size = m_args.state_size();
    A* values = m_args.states.values + m_task * size;
    A* sums = m_args.states.sums + m_task * m_args.features;
    const int columns = state_columns();
    m_team.barrier();
    for_each_element(m_team, state_rows(), columns, [&](int i, int j) {
      values[std::int64_t(i) * columns + j] = m_tiles.state[i * state_ld() + j];
    });
    for_each(m_team, m_args.features, [&](int d) { sums[d] = m_tiles.sums[d]; });
    if constexpr (scaled) {
      int* shifts = m_args.states.shifts + m_task * m_args.features;
      for_each(m_team, m_args.features, [&](int d) { shifts[d] = sign * m_tiles.shift[d]; });
    }
  }

  /// Without a mask one shift serves all rows: the maximum over all keys.
  KOKKOS_FUNCTION void enter_total_shift() {
    if constexpr (scaled) {
      const int* total = shift_table_entry(m_args.shift_entries - 1);
      m_team.barrier();
      for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = total[d]; });
      m_team.barrier();
    }
  }

  /// Brings the state to the shifts `to`, which become the current ones.
  template <int Sign>
  KOKKOS_FUNCTION void rescale_state(const int* to) {
    if constexpr (scaled) {
      const int ld = state_ld();
      const auto factor = [&](int d) {
        return power_of_two<A>(Sign * (m_tiles.shift[d] - to[d]));
      };
      m_team.barrier();
      if (m_transposed) {
        for_each_element(m_team, m_args.dv, m_args.features,
                         [&](int v, int d) { m_tiles.state[v * ld + d] *= factor(d); });
      } else {
        for_each_element(m_team, m_args.features, m_args.dv,
                         [&](int d, int v) { m_tiles.state[d * ld + v] *= factor(d); });
      }
      for_each(m_team, m_args.features, [&](int d) { m_tiles.sums[d] *= factor(d); });
      m_team.barrier();
      for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = to[d]; });
      m_team.barrier();
    } else {
      (void)to;
    }
  }

  /// Mirrored state, walking down: the shift falls, and what later rows left shrinks with it.
  KOKKOS_FUNCTION void rescale_to_piece(Chunk piece, const int* running) {
    if constexpr (scaled)
      rescale_state<-1>(running + (piece.rows - 1) * m_tiles.ldr);
    else
      (void)piece, (void)running;
  }

  // ---- keys -----------------------------------------------------------------------------------

  /// A whole chunk into the state, with no row to answer.
  KOKKOS_FUNCTION void absorb_keys(Chunk keys) {
    if constexpr (scaled) {
      const auto map = bind_map<A>(m_args.key_map, m_kv_head);
      const T* k = m_args.k.row(m_batch, m_kv_head, keys.begin);
      m_team.barrier();
      for_each_down(m_team, keys.rows, m_args.features, [&](int r, int d) {
        const A x = static_cast<A>(k[r * m_args.k.row_stride + d * m_args.k.element_stride]);
        const int e = map.exponent(x);
        const int above = r == 0 ? m_tiles.shift[d] : m_tiles.new_shift[d];
        m_tiles.new_shift[d] = e > above ? e : above;
      });
      rescale_state<1>(m_tiles.new_shift);
    }
    load_keys(keys);
    load_values(keys);
    absorb_loaded_keys(keys);
  }

  KOKKOS_FUNCTION void absorb_all_keys() {
    for (std::int64_t c = 0; c < m_args.chunks(m_args.nk); ++c) absorb_keys(chunk(c, m_args.nk));
  }

  KOKKOS_FUNCTION void load_piece_keys(Chunk piece, const int* running) {
    if constexpr (scaled)
      rescale_state<1>(running + (piece.rows - 1) * m_tiles.ldr);
    else
      (void)running;
    load_keys(piece);
  }

  /// Features of the keys of a chunk at the current shifts, and their transpose if the walk has one.
  KOKKOS_FUNCTION void load_keys(Chunk keys) {
    const auto map = bind_map<A>(m_args.key_map, m_kv_head);
    const T* k = m_args.k.row(m_batch, m_kv_head, keys.begin);
    m_team.barrier();
    features<KeyMap>(map, k, m_args.k, keys.rows, m_tiles.keys, [&](int, int d) { return m_tiles.shift[d]; });
    m_team.barrier();
    if (m_tiles.keys_t) transpose(m_tiles.keys, m_tiles.ldr, keys.rows, m_args.features, m_tiles.keys_t,
                                  m_tiles.ldc);
    m_team.barrier();
  }

  /// Values of a chunk: as rows in the forward pass, transposed in the backward pass.
  KOKKOS_FUNCTION void load_values(Chunk keys) {
    const T* v = m_args.v.row(m_batch, m_kv_head, keys.begin);
    const std::int64_t row = m_args.v.row_stride, element = m_args.v.element_stride;
    if (m_transposed) {
      for_each_element(m_team, keys.rows, m_args.dv, [&](int r, int j) {
        m_tiles.values_t[j * m_tiles.ldc + r] = static_cast<A>(v[r * row + j * element]);
      });
    } else {
      for_each_element(m_team, keys.rows, m_args.dv, [&](int r, int j) {
        m_tiles.values[r * m_tiles.ldv + j] = static_cast<A>(v[r * row + j * element]);
      });
    }
    m_team.barrier();
  }

  /// S += K^T V, z += sum of K.
  KOKKOS_FUNCTION void absorb_loaded_keys(Chunk keys) {
    if (m_transposed)
      multiply(m_team, m_args.dv, m_args.features, keys.rows, Factor<A>{m_tiles.values_t, m_tiles.ldc, 1},
               m_tiles.keys, m_tiles.ldr, m_tiles.state, m_tiles.ldr, Band::all, true);
    else
      multiply(m_team, m_args.features, m_args.dv, keys.rows, Factor<A>{m_tiles.keys, 1, m_tiles.ldr},
               m_tiles.values, m_tiles.ldv, m_tiles.state, m_tiles.ldv, Band::all, true);
    add_rows_to_sums(m_tiles.keys, keys.rows, [](int) { return A(1); });
    m_team.barrier();
  }

  /// z += sum over rows of weight(row) * rows; the chunk is summed first.
  template <class Weight>
  KOKKOS_FUNCTION void add_rows_to_sums(const A* rows, int count, const Weight& weight) {
    const int ld = m_tiles.ldr;
    if constexpr (Team::on_host) {
      constexpr int block = tile_columns<A>;
      for (int d0 = 0; d0 < m_args.features; d0 += block) {
        A part[block] = {};
        for (int r = 0; r < count; ++r) {
          const A w = weight(r);
          for (int d = 0; d < block; ++d) part[d] += w * rows[r * ld + d0 + d];
        }
        for (int d = 0; d < block; ++d) m_tiles.sums[d0 + d] += part[d];
      }
    } else {
      for_each(m_team, m_args.features, [&](int d) {
        A part = A(0);
        for (int r = 0; r < count; ++r) part += weight(r) * rows[r * ld + d];
        m_tiles.sums[d] += part;
      });
    }
  }

  // ---- queries --------------------------------------------------------------------------------

  KOKKOS_FUNCTION std::int64_t query_head(std::int64_t g) const { return m_kv_head * m_args.group + g; }
  /// Index of the query at row 0 of the chunk (negative where none stands there).
  KOKKOS_FUNCTION std::int64_t query_begin(Chunk rows) const {
    return m_args.causal ? rows.begin - offset() : rows.begin;
  }
  KOKKOS_FUNCTION int first_row(Chunk rows) const { return m_args.causal ? first_query_row(rows) : 0; }

  /// Features of the queries of a chunk; rows without a query are zero. `running` holds the shifts over
  /// exactly the keys that a row sees (causal), otherwise the current shifts are those of all keys.
  KOKKOS_FUNCTION void load_queries(Chunk rows, std::int64_t g, const int* running) {
    const std::int64_t head = query_head(g);
    const auto map = bind_map<A>(m_args.query_map, head);
    const int first = first_row(rows);
    const T* q = m_args.q.row(m_batch, head, query_begin(rows) + first);
    const int ld = m_tiles.ldr;
    m_team.barrier();
    if constexpr (scaled) {
      for_each(m_team, rows.rows - first, [&](int r) {
        const int* seen = running ? running + (first + r) * ld : m_tiles.shift;
        const T* x = q + r * m_args.q.row_stride;
        int largest = no_shift;
        for (int d = 0; d < m_args.features; ++d) {
          const int e = map.exponent(static_cast<A>(x[d * m_args.q.element_stride])) + seen[d];
          largest = e > largest ? e : largest;
        }
        m_tiles.row_shift[first + r] = largest;
      });
      m_team.barrier();
    } else {
      (void)running;
    }
    for_each_element(m_team, first, m_args.features, [&](int r, int d) { m_tiles.queries[r * ld + d] = A(0); });
    features<QueryMap>(map, q, m_args.q, rows.rows - first, m_tiles.queries + first * ld, [&](int r, int d) {
      return m_tiles.row_shift[first + r] - m_tiles.shift[d];
    });
    m_team.barrier();
  }

  /// P = Q K^T on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weights(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows, m_args.features, Factor<A>{m_tiles.queries, m_tiles.ldr, 1},
             m_tiles.keys_t, m_tiles.ldc, m_tiles.weights, m_tiles.ldc, Band::all, false, true);
    m_team.barrier();
    keep_lower(piece, m_tiles.weights, [](int, A w) { return w; });
  }

  /// Assigns change(row, w) on and below the diagonal and zero elsewhere, in place.
  template <class Change>
  KOKKOS_FUNCTION void keep_lower(Chunk piece, A* tile, const Change& change) {
    const int first = first_row(piece);
    const int ld = m_tiles.ldc;
    for_each_element(m_team, piece.rows, ld, [&](int i, int j) {
      A& w = tile[i * ld + j];
      w = i >= first && j <= i ? change(i, w) : A(0);
    });
    m_team.barrier();
  }

  /// N = Q S (+ P V of the chunk).
  KOKKOS_FUNCTION void numerators(Chunk rows, bool with_chunk) {
    multiply(m_team, rows.rows, m_args.dv, m_args.features, Factor<A>{m_tiles.queries, m_tiles.ldr, 1},
             m_tiles.state, m_tiles.ldv, m_tiles.out, m_tiles.ldv, Band::all, false);
    if (with_chunk) {
      m_team.barrier();
      multiply(m_team, rows.rows, m_args.dv, rows.rows, Factor<A>{m_tiles.weights, m_tiles.ldc, 1},
               m_tiles.values, m_tiles.ldv, m_tiles.out, m_tiles.ldv, Band::lower, true);
    }
    m_team.barrier();
  }

  /// 2^row_shift, which undoes the scaling of a row where no division does.
  KOKKOS_FUNCTION A unscale(A x, int row) const {
    if constexpr (scaled) {
      const int half = m_tiles.row_shift[row] / 2;
      return x * power_of_two<A>(half) * power_of_two<A>(m_tiles.row_shift[row] - half);
    } else {
      (void)row;
      return x;
    }
  }

  /// An overflowed denominator must not pass as a row of zeros.
  KOKKOS_FUNCTION static A divisor(A s) { return s - s == A(0) ? s : s - s; }

  /// x / s, and 0 where s vanishes; x times the scale without normalisation.
  KOKKOS_FUNCTION A apply_row_scale(A x, A row_scale) const {
    if (!m_args.normalise) return x * row_scale;
    return row_scale == A(0) ? A(0) : x / row_scale;
  }

  KOKKOS_FUNCTION void write_output(Chunk rows, std::int64_t g, bool with_chunk) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    if (m_args.normalise) {
      for_each(m_team, rows.rows - first, [&](int r) {
        const int i = first + r;
        A s = row_dot(m_team, m_tiles.queries + i * m_tiles.ldr, m_tiles.sums, m_tiles.ldr);
        if (with_chunk) s += row_sum(m_team, m_tiles.weights + i * m_tiles.ldc, m_tiles.ldc);
        if (m_args.denominator) *m_args.denominator.row(m_batch, head, begin + i) = s;
        m_tiles.row_scale[i] = divisor(s);
      });
    } else {
      for_each(m_team, rows.rows - first,
               [&](int r) { m_tiles.row_scale[first + r] = unscale(m_args.scale, first + r); });
    }
    m_team.barrier();
    T* o = m_args.o.row(m_batch, head, begin + first);
    const std::int64_t row = m_args.o.row_stride, element = m_args.o.element_stride;
    for_each_element(m_team, rows.rows - first, m_args.dv, [&](int r, int j) {
      o[r * row + j * element] = static_cast<T>(
          apply_row_scale(m_tiles.out[(first + r) * m_tiles.ldv + j], m_tiles.row_scale[first + r]));
    });
    m_team.barrier();
  }

  // ---- backward -------------------------------------------------------------------------------

  /// G and e of a chunk; rows without a query are zero.
  KOKKOS_FUNCTION void load_cotangents(Chunk rows, std::int64_t g) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    const int ld = m_tiles.ldv;
    for_each(m_team, rows.rows, [&](int i) {
      A row_scale = A(0);
      if (i >= first)
        row_scale = m_args.normalise ? divisor(*m_args.denominator.row(m_batch, head, begin + i))
                                     : unscale(m_args.scale, i);
      m_tiles.row_scale[i] = row_scale;
      m_tiles.row_terms[i] = A(0);
    });
    m_team.barrier();
    const T* d_o = m_args.d_o.row(m_batch, head, begin + first);
    const std::int64_t row = m_args.d_o.row_stride, element = m_args.d_o.element_stride;
    for_each_element(m_team, rows.rows, m_args.dv, [&](int i, int j) {
      m_tiles.cotangents[i * ld + j] =
          i < first ? A(0)
                    : apply_row_scale(static_cast<A>(d_o[(i - first) * row + j * element]),
                                      m_tiles.row_scale[i]);
    });
    m_team.barrier();
    if (m_args.normalise) {
      for_each(m_team, rows.rows - first, [&](int r) {
        const T* o = m_args.o.row(m_batch, head, begin + first + r);
        if (m_tiles.row_scale[first + r] != A(0))
          m_tiles.row_terms[first + r] =
              -strided_dot(m_tiles.cotangents + (first + r) * ld, o, m_args.o.element_stride, m_args.dv);
      });
      m_team.barrier();
    }
  }

  KOKKOS_FUNCTION static A strided_dot(const A* a, const T* b, std::int64_t stride, int n) {
    constexpr int parts = 16;
    A part[parts] = {};
    int i = 0;
    for (; i + parts <= n; i += parts)
      for (int p = 0; p < parts; ++p) part[p] += a[i + p] * static_cast<A>(b[(i + p) * stride]);
    for (; i < n; ++i) part[i % parts] += a[i] * static_cast<A>(b[i * stride]);
    A total = A(0);
    for (int p = 0; p < parts; ++p) total += part[p];
    return total;
  }

  /// E = G V^T + e on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weight_cotangents(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows, m_args.dv, Factor<A>{m_tiles.cotangents, m_tiles.ldv, 1},
             m_tiles.values_t, m_tiles.ldc, m_tiles.weight_cotangents, m_tiles.ldc, Band::all, false, true);
    m_team.barrier();
    keep_lower(piece, m_tiles.weight_cotangents, [&](int i, A w) { return w + m_tiles.row_terms[i]; });
  }

  /// dQ = G S^T + e z^T (+ E K of the chunk).
  KOKKOS_FUNCTION void query_gradients(Chunk rows, bool with_chunk) {
    const int ld = m_tiles.ldr;
    multiply(m_team, rows.rows, m_args.features, m_args.dv, Factor<A>{m_tiles.cotangents, m_tiles.ldv, 1},
             m_tiles.state, ld, m_tiles.out, ld, Band::all, false);
    if (with_chunk) {
      m_team.barrier();
      multiply(m_team, rows.rows, m_args.features, rows.rows,
               Factor<A>{m_tiles.weight_cotangents, m_tiles.ldc, 1}, m_tiles.keys, ld, m_tiles.out, ld,
               Band::lower, true);
    }
    m_team.barrier();
    for_each_element(m_team, rows.rows, m_args.features, [&](int i, int d) {
      m_tiles.out[i * ld + d] += m_tiles.row_terms[i] * m_tiles.sums[d];
    });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void write_query_gradients(Chunk rows, std::int64_t g) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    const auto map = bind_map<A>(m_args.query_map, head);
    pull_back<QueryMap>(map, m_args.q.row(m_batch, head, begin + first), m_args.q, rows.rows - first,
              m_tiles.queries + first * m_tiles.ldr, m_tiles.out + first * m_tiles.ldr,
              m_args.d_q ? m_args.d_q.row(m_batch, head, begin + first) : nullptr, m_args.d_q,
              m_args.query_parameter_parts ? m_args.query_parameter_parts + m_task * m_args.group + g
                                           : nullptr);
  }

  /// R += Q^T G, y += Q^T e (R is kept transposed).
  KOKKOS_FUNCTION void absorb_loaded_queries(Chunk rows) {
    multiply(m_team, m_args.dv, m_args.features, rows.rows, Factor<A>{m_tiles.cotangents, 1, m_tiles.ldv},
             m_tiles.queries, m_tiles.ldr, m_tiles.state, m_tiles.ldr, Band::all, true);
    add_rows_to_sums(m_tiles.queries, rows.rows, [&](int i) { return m_tiles.row_terms[i]; });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void absorb_queries_of_group(Chunk rows, const int* running) {
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_queries(rows, g, running);
      load_cotangents(rows, g);
      absorb_loaded_queries(rows);
    }
  }

  /// dK = V R^T + y, dV^T = R^T K^T: what the queries outside the chunk ask for.
  KOKKOS_FUNCTION void key_gradients(Chunk keys) {
    const int ldr = m_tiles.ldr, ldv = m_tiles.ldv, ldc = m_tiles.ldc;
    multiply(m_team, keys.rows, m_args.features, m_args.dv, Factor<A>{m_tiles.values_t, 1, ldc},
             m_tiles.state, ldr, m_tiles.out, ldr, Band::all, false);
    multiply(m_team, m_args.dv, keys.rows, m_args.features, Factor<A>{m_tiles.state, ldr, 1},
             m_tiles.keys_t, ldc, m_tiles.value_gradients_t, ldc, Band::all, false);
    m_team.barrier();
    for_each_element(m_team, keys.rows, m_args.features,
                     [&](int j, int d) { m_tiles.out[j * ldr + d] += m_tiles.sums[d]; });
    for_each_element(m_team, keys.rows, m_args.dv,
                     [&](int j, int v) { m_tiles.value_gradients[j * ldv + v] = m_tiles.value_gradients_t[v * ldc + j]; });
    m_team.barrier();
  }

  /// dK += E^T Q, dV += P^T G: what the queries of the chunk ask for.
  KOKKOS_FUNCTION void add_chunk_key_gradients(Chunk piece) {
    const int ldr = m_tiles.ldr, ldv = m_tiles.ldv, ldc = m_tiles.ldc;
    multiply(m_team, piece.rows, m_args.features, piece.rows,
             Factor<A>{m_tiles.weight_cotangents, 1, ldc}, m_tiles.queries, ldr, m_tiles.out, ldr,
             Band::upper, true);
    multiply(m_team, piece.rows, m_args.dv, piece.rows, Factor<A>{m_tiles.weights, 1, ldc},
             m_tiles.cotangents, ldv, m_tiles.value_gradients, ldv, Band::upper, true);
    m_team.barrier();
  }

  KOKKOS_FUNCTION void write_key_gradients(Chunk keys) {
    const auto map = bind_map<A>(m_args.key_map, m_kv_head);
    pull_back<KeyMap>(map, m_args.k.row(m_batch, m_kv_head, keys.begin), m_args.k, keys.rows, m_tiles.keys,
              m_tiles.out, m_args.d_k ? m_args.d_k.row(m_batch, m_kv_head, keys.begin) : nullptr,
              m_args.d_k, m_args.key_parameter_parts ? m_args.key_parameter_parts + m_task : nullptr);
    if (m_args.d_v) {
      T* d_v = m_args.d_v.row(m_batch, m_kv_head, keys.begin);
      const std::int64_t row = m_args.d_v.row_stride, element = m_args.d_v.element_stride;
      for_each_element(m_team, keys.rows, m_args.dv, [&](int j, int v) {
        d_v[j * row + v * element] = static_cast<T>(m_tiles.value_gradients[j * m_tiles.ldv + v]);
      });
    }
    m_team.barrier();
  }

  // ---- feature maps on tiles ------------------------------------------------------------------

  /// f = phi(x) for `count` rows; shift(row, feature) matters to scaled maps only.
  template <class Map, class Bound, class Shift>
  KOKKOS_FUNCTION void features(const Bound& map, const T* x, const RowTensor<const T>& layout, int count,
                                A* f, const Shift& shift) {
    const int ld = m_tiles.ldr;
    const std::int64_t row = layout.row_stride, element = layout.element_stride;
    if constexpr (RowFeatureMap<Map>) {
      static_assert(std::is_same_v<A, T>);
      for_each(m_team, count, [&](int r) {
        map.row_value(ConstRow<A>{x + r * row, m_args.d, element}, Row<A>{f + r * ld, m_args.features, 1});
      });
    } else {
      for_each_element(m_team, count, m_args.d, [&](int r, int d) {
        const A value = static_cast<A>(x[r * row + d * element]);
        if constexpr (scaled)
          f[r * ld + d] = map.value(value, shift(r, d));
        else
          f[r * ld + d] = map.value(value);
      });
    }
  }

  KOKKOS_FUNCTION void transpose(const A* from, int ld_from, int rows, int columns, A* to, int ld_to) {
    for_each_element(m_team, rows, columns, [&](int r, int c) { to[c * ld_to + r] = from[r * ld_from + c]; });
  }

  /// dx = J(x)^T df for `count` rows, to `d_x` unless it is null; adds the parameter's part to `part`.
  template <class Map, class Bound>
  KOKKOS_FUNCTION void pull_back(const Bound& map, const T* x, const RowTensor<const T>& layout, int count,
                                 const A* f, const A* df, T* d_x, const RowTensor<T>& d_layout,
                                 double* part) {
    const int ld = m_tiles.ldr;
    const std::int64_t row = layout.row_stride, element = layout.element_stride;
    const std::int64_t d_row = d_layout.row_stride, d_element = d_layout.element_stride;
    if constexpr (RowFeatureMap<Map>) {
      if (d_x) {
        for_each(m_team, count, [&](int r) {
          map.row_pullback(ConstRow<A>{x + r * row, m_args.d, element},
                           ConstRow<A>{f + r * ld, m_args.features, 1},
                           ConstRow<A>{df + r * ld, m_args.features, 1},
                           Row<A>{d_x + r * d_row, m_args.d, d_element});
        });
      }
    } else {
      if (d_x) {
        for_each_element(m_team, count, m_args.d, [&](int r, int d) {
          const A value = static_cast<A>(x[r * row + d * element]);
          d_x[r * d_row + d * d_element] =
              static_cast<T>(map.derivative(value, f[r * ld + d]) * df[r * ld + d]);
        });
      }
      if constexpr (ParameterizedFeatureMap<Map>) {
        if (part) {
          for_each(m_team, count, [&](int r) {
            A term = A(0);
            for (int d = 0; d < m_args.d; ++d) {
              const A value = static_cast<A>(x[r * row + d * element]);
              term += map.parameter_derivative(value, f[r * ld + d]) * df[r * ld + d];
            }
            m_tiles.parameter_terms[r] = term;
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
  std::int64_t m_task = 0, m_segment = 0, m_unit = 0, m_batch = 0, m_kv_head = 0;
  std::int64_t m_loaded_interval = -1;
};

}  // namespace LinAttn::detail
