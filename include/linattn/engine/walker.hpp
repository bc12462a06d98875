// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/arguments.hpp>
#include <linattn/engine/row_norm.hpp>
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
/// G_i = scale dO_i and e_i = 0. A constant b in the weights adds b to P, b t_i to n_i, b m_i to s_i and, to dV_j, the
/// sum of b G_i over the rows that see key j; db = sum E. Sums t and m of values and keys belong to the state. S is kept
/// features x values in the forward pass and transposed in the backward pass, where every product then finds its right
/// factor row-major.
///
/// **Scaled maps.** Feature d of all keys is kept relative to 2^m_d, with the integer m_d at least the
/// exponent of every key summed; the query compensates: Q_id = 2^(q + m_d - c_i), K_jd = 2^(k - m_d), and
/// the row scale 2^c_i cancels in the ratio. c_i = max_d (q + m_d(i)) uses the maximum over exactly the
/// keys that row i sees, so 1/2 <= s_i <= 2 R N holds for every row and s_i does not depend on the chunks.
/// m_d only grows; where it would grow by more than `largest_rise` bits inside a chunk, the chunk is cut
/// into pieces, so that the features of earlier keys do not underflow. Every rescaling is by a power of
/// two: no key changes a bit of an earlier causal row.
///
/// **Windows.** A worker may keep only a window of the state: some of the columns of S, for which it forms
/// the same columns of o or dV, or some of the features, for which it forms the same entries of dQ or dK.
/// Products Q K^T and G V^T are over all features and columns, and formed by each of them.
///
/// **In place.** On the host, rows that need no change (a map that is the identity, values, cotangents of
/// a sum) take part in the products where the caller keeps them, and results are stored there, if they
/// fill whole tiles. Otherwise they go through tiles; the numbers are the same.
///
/// **Row-norm maps** keep 1/rho of each row of a chunk, which the pullback needs again.
///
/// **Noise** multiplies rows of o on their way out, and rows of dO on their way in, after e_i = -(dO_i . y_i)/s_i is
/// formed from the rows y that the noise has multiplied: no division by 1 + p n.
///
/// **Centred values** are v_j - mu with the first visible value mu of the sequence; o_i - mu comes out, e_i is formed
/// from it.
///
/// **Hidden keys** have features 0 and value 0, are never read, and are out of every shift. **States** that
/// the caller hands in stand before the first key; the cotangent of the last state stands after the last
/// query of the mirrored walk.

namespace LinAttn::detail {

inline constexpr int largest_rise = 60;

template <class Team, class A, class QueryMap, class KeyMap>
class Walker {
 public:
  using Args = Arguments<A, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;
  static constexpr bool divides_by_norm = RowNormFeatureMap<KeyMap>;

  KOKKOS_FUNCTION Walker(const Team& team, const Args& args, const Tiles<A>& tiles, bool transposed)
      : m_team(team), m_args(args), m_tiles(tiles), m_transposed(transposed) {}

  KOKKOS_FUNCTION void run(Walk walk, std::int64_t task) {
    m_walk = walk;
    m_task = task;
    m_segment = task % m_args.plan.segments;
    const std::int64_t windowed = task / m_args.plan.segments;
    m_unit = windowed / m_args.window.tiles;
    enter_window(static_cast<int>(windowed % m_args.window.tiles));
    m_member = m_unit / m_args.kv_heads;
    m_kv_head = m_unit % m_args.kv_heads;
    m_sequence = Sequence::at(m_args, m_member);
    m_visible = Visibility::of(m_args, m_sequence);
    // keys that no query and no later loss looks at have gradient 0, whatever they hold
    m_visible.nothing = walk == Walk::key_gradient && m_sequence.nq == 0 && !m_args.last_cotangent.present;
    if (m_args.center_v) load_centre();
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
  /// A factor with element stride 1.
  struct Factored {
    const A* data;
    std::int64_t ld;
  };

  KOKKOS_FUNCTION void enter_window(int tile) {
    const Window& w = m_args.window;
    m_first_feature = w.first_feature(tile);
    m_first_value = w.first_value(tile);
    const int features = m_args.features - m_first_feature, values = m_args.dv - m_first_value;
    m_features = features < w.features ? features : w.features;
    m_dv = values < w.values ? values : w.values;
  }

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
    clear_records();
    if (m_args.causal) {
      causal_walk([&](Chunk piece, const int* running, std::int64_t g) {
        load_queries(piece, g, running);
        causal_weights(piece);
        answer(piece, g, true);
      });
    } else {
      full_walk([&](Chunk queries, std::int64_t g) {
        load_queries(queries, g, nullptr);
        answer(queries, g, false);
      });
    }
    if (m_args.last.present && m_segment == (m_args.causal ? m_args.plan.segments - 1 : 0))
      hand_out_state();
  }

  KOKKOS_FUNCTION void walk_query_gradient() {
    enter_key_state();
    clear_parameter_parts(m_args.query_parameter_parts, m_args.group);
    clear_parameter_parts(m_args.constant_parts, m_args.group);
    if (m_args.causal) {
      causal_walk([&](Chunk piece, const int* running, std::int64_t g) {
        load_queries(piece, g, running);
        load_cotangents(piece, g);
        causal_weight_cotangents(piece);
        query_gradients(piece, g, true);
      });
    } else {
      full_walk([&](Chunk queries, std::int64_t g) {
        load_queries(queries, g, nullptr);
        load_cotangents(queries, g);
        query_gradients(queries, g, false);
      });
    }
  }

  /// Mirrored state (R, y) of the queries of one segment, to the workspace.
  KOKKOS_FUNCTION void walk_query_state() {
    clear_state(-1);
    count_keys_before_end();
    if (m_args.causal) {
      const Range range = segment_chunks(m_sequence.nk);
      for (std::int64_t c = range.last; c-- > range.first;) {
        const Chunk keys = chunk(c, m_sequence.nk);
        if (keys.begin + keys.rows <= offset()) break;  // no query stands here or before
        for_each_piece_backward(keys, c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          uncount_keys(piece);
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
    count_keys_before_end();
    enter_query_state();
    if (m_args.wants_keys) clear_parameter_parts(m_args.key_parameter_parts, 1);
    const Range range = segment_chunks(m_sequence.nk);
    if (m_args.causal) {
      for (std::int64_t c = range.last; c-- > range.first;) {
        prefetch_chunk(c - 1, m_sequence.nk);
        for_each_piece_backward(chunk(c, m_sequence.nk), c, [&](Chunk piece, const int* running) {
          rescale_to_piece(piece, running);
          uncount_keys(piece);
          load_keys(piece, m_args.wants_values);
          load_values(piece, wants_key_features());
          const bool has_queries = piece.begin + piece.rows > offset();
          if (!has_queries) key_gradients(piece, false, true);
          for (std::int64_t g = 0; has_queries && g < m_args.group; ++g) {
            load_queries(piece, g, running);
            load_cotangents(piece, g);
            if (m_args.wants_values) causal_weights(piece);
            if (wants_key_features()) causal_weight_cotangents(piece);
            key_gradients(piece, true, g == 0);
            absorb_loaded_queries(piece);
          }
          write_key_gradients(piece);
        });
      }
    } else {
      for (std::int64_t c = range.first; c < range.last; ++c) {
        const Chunk keys = chunk(c, m_sequence.nk);
        load_keys(keys, m_args.wants_values);
        load_values(keys, false);
        key_gradients(keys, false, true);
        write_key_gradients(keys);
      }
    }
    if (m_args.initial_gradient.present && m_args.wants_keys && m_segment == 0) hand_out_initial_gradient();
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
        count_keys(keys);
        continue;
      }
      for_each_piece(keys, [&](Chunk piece, const int* running) {
        if constexpr (scaled) rescale_state<1>(running + (piece.rows - 1) * m_tiles.ld_shift);
        load_keys(piece, m_walk == Walk::output);
        load_values(piece, m_walk == Walk::query_gradient);
        for (std::int64_t g = 0; g < m_args.group; ++g) body(piece, running, g);
        const bool ends = c + 1 == range.last && piece.begin + piece.rows == keys.begin + keys.rows;
        if (!ends || state_is_wanted) absorb_loaded_keys(piece);
        count_keys(piece);
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

  // ---- rows of the caller ---------------------------------------------------------------------

  /// Position in the tensors of k and v of the first row of a chunk.
  KOKKOS_FUNCTION std::int64_t key_begin(Chunk keys) const { return m_sequence.k_begin + keys.begin; }
  KOKKOS_FUNCTION bool all_visible(Chunk keys) const {
    if (m_visible.everything()) return true;
    bool all = true;
    for (int r = 0; r < keys.rows; ++r) all = all && m_visible(keys.begin + r);
    return all;
  }

  /// Whether rows can serve as a tile, for reading or for writing: they fill whole register tiles.
  KOKKOS_FUNCTION bool in_place(const StoredTensor<A>& t, int rows, int columns) const {
    return Team::on_host && t.storage == Storage::native && t.element_stride == 1 && rows % tile_rows == 0 &&
           columns % tile_columns<A> == 0;
  }

  /// `columns` columns of rows as numbers: where they lie, or converted into the staging tile, where they
  /// stay until the next call. Rows where not visible(row) are not read. SideBySide: entries are next to each other.
  template <bool SideBySide = false, class Visible>
  KOKKOS_FUNCTION Rows<A> fetch(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows,
                                int first_column, int columns, const Visible& visible) {
    if (t.storage == Storage::native && (!SideBySide || t.element_stride == 1))
      return {t.template row<A>(m_sequence.batch, head, begin) + first_column * t.element_stride, t.row_stride,
              t.element_stride};
    A* staging = m_tiles.staging;
    const int ld = m_tiles.ld_staging;
    m_team.barrier();
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      if constexpr (SideBySide || !std::is_same_v<S, A>) {
        const S* from = t.template row<S>(m_sequence.batch, head, begin) + first_column * t.element_stride;
        const std::int64_t row = t.row_stride;
        with_stride<Team>(t.element_stride, [&](auto element) {
          for_each_in_counted_rows(
              m_team, rows, columns, visible,
              [=](int r) {
                const S* x = from + r * row;
                A* to = staging + r * ld;
                return [=](int j) { to[j] = static_cast<A>(x[j * element]); };
              },
              [=](int r) { return [=](int j) { staging[r * ld + j] = A(0); }; });
        });
      }
    });
    m_team.barrier();
    return {staging, ld, 1};
  }

  /// Rows of a tile to the caller, zeros where not counts(row). Joined gradients add to what is there.
  template <class Counts>
  LINATTN_OUTLINE KOKKOS_FUNCTION void put(const A* tile, std::int64_t ld, const StoredTensor<A>& t,
                                           std::int64_t head, std::int64_t begin, int rows, int first_column,
                                           int columns, const Counts& counts) {
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      S* to = t.template row<S>(m_sequence.batch, head, begin) + first_column * t.element_stride;
      const std::int64_t row = t.row_stride;
      with_stride<Team>(t.element_stride, [&](auto element) {
        if (m_args.joined)
          return for_each_in_counted_rows(
              m_team, rows, columns, counts,
              [=](int r) {
                const A* x = tile + r * ld;
                S* here = to + r * row;
                return [=](int j) { here[j * element] = static_cast<S>(static_cast<A>(here[j * element]) + x[j]); };
              },
              [](int) { return [](int) {}; });
        for_each_in_counted_rows(
            m_team, rows, columns, counts,
            [=](int r) {
              const A* x = tile + r * ld;
              S* here = to + r * row;
              return [=](int j) { here[j * element] = static_cast<S>(x[j]); };
            },
            [=](int r) { return [=](int j) { to[r * row + j * element] = static_cast<S>(A(0)); }; });
      });
    });
    m_team.barrier();
  }

  /// Has the rows of a causal chunk asked for while the products of the one before are formed.
  KOKKOS_FUNCTION void prefetch_chunk(std::int64_t c, std::int64_t tokens) const {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    if constexpr (Team::on_host) {
      m_team.ahead.clear();
      if (c < 0 || c >= m_args.chunks(tokens)) return;
      const Chunk keys = chunk(c, tokens);
      const std::int64_t at_keys = key_begin(keys), query = keys.begin - offset();
      prefetch_rows(m_args.k, m_kv_head, at_keys, keys.rows, m_first_feature, m_features, false);
      prefetch_rows(m_args.v, m_kv_head, at_keys, keys.rows, m_first_value, m_dv, false);
      if (query >= 0) {
        const std::int64_t at = m_sequence.q_begin + query, head = query_head(0);
        prefetch_rows(m_args.q, head, at, keys.rows, m_first_feature, m_features, false);
        if (m_walk == Walk::output) {
          prefetch_rows(m_args.o, head, at, keys.rows, m_first_value, m_dv, true);
        } else {
          prefetch_rows(m_args.d_o, head, at, keys.rows, m_first_value, m_dv, false);
          if (wants_row_terms() && !m_args.row_dots) prefetch_rows(m_args.o, head, at, keys.rows, m_first_value, m_dv, false);
          if (m_walk == Walk::query_gradient)
            prefetch_rows(m_args.d_q, head, at, keys.rows, m_first_feature, m_features, true);
        }
      }
      if (m_walk == Walk::key_gradient) {
        if (m_args.wants_keys)
          prefetch_rows(m_args.d_k, m_kv_head, at_keys, keys.rows, m_first_feature, m_features, true);
        if (m_args.wants_values) prefetch_rows(m_args.d_v, m_kv_head, at_keys, keys.rows, m_first_value, m_dv, true);
      }
      // spread over the register tiles of the products with the state
      const auto tiles = [](int rows, int columns) {
        constexpr int width = 2 * vector_lanes<A>;
        return (rows + register_rows - 1) / register_rows * ((columns + width - 1) / width);
      };
      const int products = m_walk == Walk::key_gradient ? 3 : 1;
      const int all = tiles(state_rows(), state_columns()) + products * tiles(keys.rows, state_columns());
      m_team.lines_at_once = all > 0 ? m_team.ahead.lines() / all + 1 : 0;
    }
#endif
    (void)c, (void)tokens;
  }

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  void prefetch_rows(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows, int first_column,
                     int columns, bool to_write) const {
    if (!t || t.element_stride != 1) return;
    const int size = t.element_bytes();
    m_team.ahead.add(static_cast<const char*>(t.data) +
                         (m_sequence.batch * t.batch_stride + head * t.head_stride + begin * t.row_stride +
                          first_column) * size,
                     t.row_stride * size, rows, columns * size, to_write);
  }
#endif

  /// running(r, d) = max(before[d], exponents of the visible keys 0..r of the chunk).
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void running_shifts(Chunk keys, const int* before) {
    if constexpr (scaled) {
      const auto map = bind_map<A>(m_args.key_map, m_kv_head);
      const int ld = m_tiles.ld_shift;
      int* running = m_tiles.running;
      const Visibility visible = m_visible;
      const auto seen = [=](int r) { return visible(keys.begin + r); };
      const Rows<A> k = fetch(m_args.k, m_kv_head, key_begin(keys), keys.rows, 0, m_args.d, seen);
      m_team.barrier();
      with_stride<Team>(k.element, [&](auto element) {
        for_each_down(m_team, keys.rows, m_args.features, seen, [=](int r) {
          const int* above = r == 0 ? before : running + (r - 1) * ld;
          int* here = running + r * ld;
          const A* x = k.data + r * k.row;
          return [=](int d) {
            const int e = map.exponent(x[d * element]);
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
      const int ld = m_tiles.ld_shift;
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
    return scaled ? m_tiles.running + row * m_tiles.ld_shift : nullptr;
  }

  /// Shifts before chunk c, computed for a whole interval of chunks when the walk enters it.
  KOKKOS_FUNCTION const int* shift_before_chunk(std::int64_t c) {
    const int interval = m_args.plan.shift_interval;
    const std::int64_t entry = c / interval;
    const int ld = m_tiles.ld_shift;
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

  KOKKOS_FUNCTION int state_rows() const { return m_transposed ? m_dv : m_features; }
  KOKKOS_FUNCTION int state_columns() const { return m_transposed ? m_features : m_dv; }
  KOKKOS_FUNCTION int state_ld() const { return m_transposed ? m_tiles.ldr : m_tiles.ldv; }
  /// Leading dimension of a spilled state.
  KOKKOS_FUNCTION int spilled_ld() const { return m_transposed ? m_args.window.features : m_args.window.values; }

  template <class U>
  KOKKOS_FUNCTION void fill(U* data, int n, U value) const {
    for_each(m_team, n, [=](int i) { data[i] = value; });
  }

  /// No key seen (sign 1), or no query (sign -1).
  KOKKOS_FUNCTION void clear_state(int sign) {
    m_team.barrier();
    fill(m_tiles.state, state_rows() * state_ld(), A(0));
    fill(m_tiles.sums, m_tiles.ldr, A(0));
    if (m_args.has_constant) fill(m_tiles.value_sums, m_tiles.ldv, A(0));
    clear_low();
    if constexpr (scaled) fill(m_tiles.shift, m_tiles.ld_shift, sign * no_shift);
    (void)sign;
    m_loaded_interval = -1;
    m_team.barrier();
  }
  KOKKOS_FUNCTION void clear_low() {
    if (compensated()) {
      fill(m_tiles.state_low, state_rows() * state_ld(), A(0));
      fill(m_tiles.sums_low, m_tiles.ldr, A(0));
      if (m_args.has_constant) fill(m_tiles.value_sums_low, m_tiles.ldv, A(0));
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
    const std::int64_t first = segment_chunks(m_sequence.nk).first * m_args.plan.chunk;
    count_keys_before(m_args.causal ? first : m_sequence.nk);
  }

  // ---- numbers of keys ------------------------------------------------------------------------

  /// Keys of the state: the caller's and the visible ones before position `end`.
  KOKKOS_FUNCTION void count_keys_before(std::int64_t end) {
    if (!m_args.counts_keys()) return;
    m_count = m_args.initial.count(m_member) + visible_keys(0, end < m_sequence.nk ? end : m_sequence.nk);
  }
  KOKKOS_FUNCTION std::int64_t visible_keys(std::int64_t begin, std::int64_t end) const {
    if (m_visible.everything()) return end - begin;
    std::int64_t count = 0;
    for (std::int64_t j = begin; j < end; ++j) count += m_visible(j) ? 1 : 0;
    return count;
  }
  KOKKOS_FUNCTION void count_keys(Chunk keys) {
    if (m_args.counts_keys()) m_count += visible_keys(keys.begin, keys.begin + keys.rows);
  }

  /// The same for walks down, of which only clamped row sums ask.
  KOKKOS_FUNCTION void count_keys_before_end() {
    if (m_args.clamp) count_keys_before(m_args.causal ? segment_chunks(m_sequence.nk).last * m_args.plan.chunk : m_sequence.nk);
  }
  KOKKOS_FUNCTION void uncount_keys(Chunk keys) {
    if (m_args.clamp) m_count -= visible_keys(keys.begin, keys.begin + keys.rows);
  }

  /// How many keys each row of a chunk sees.
  KOKKOS_FUNCTION void count_rows(Chunk rows) {
    A* counts = m_tiles.row_counts;
    if (!m_args.causal) {
      fill(counts, rows.rows, static_cast<A>(m_count));
    } else if (m_visible.everything()) {
      const std::int64_t before = m_count;
      for_each(m_team, rows.rows, [=](int i) { counts[i] = static_cast<A>(before + i + 1); });
    } else if (m_team.rank() == 0) {
      std::int64_t seen = m_count;
      for (int i = 0; i < rows.rows; ++i) {
        seen += m_visible(rows.begin + i) ? 1 : 0;
        counts[i] = static_cast<A>(seen);
      }
    }
    m_team.barrier();
  }

  // ---- the state to and from memory -----------------------------------------------------------

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
    const std::int64_t place = m_args.causal ? m_task : m_task - m_segment;
    const A* values = m_args.states.values + place * m_args.state_size();
    const A* sums = m_args.states.sums + place * m_args.window.features;
    const int columns = state_columns(), ld = state_ld(), from = spilled_ld();
    A* state = m_tiles.state;
    for_each_in_rows(m_team, state_rows(), columns, [=](int i) {
      return [=](int j) { state[i * ld + j] = values[std::int64_t(i) * from + j]; };
    });
    for_each(m_team, m_features, [&](int d) { m_tiles.sums[d] = sums[d]; });
    if (m_args.has_constant) {
      const A* value_sums = m_args.states.value_sums + place * m_args.window.values;
      for_each(m_team, m_dv, [&](int v) { m_tiles.value_sums[v] = value_sums[v]; });
    }
    if constexpr (scaled) {
      const int* shifts = m_args.states.carried_shifts + place * m_args.features;
      for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = sign * shifts[d]; });
    }
    m_team.barrier();
  }

  KOKKOS_FUNCTION void enter_caller_state(const CallerState<const A, const int>& from) {
    m_team.barrier();
    for_each_in_rows(m_team, m_features, m_dv, [&](int d) {
      const std::int64_t element = from.values.element_stride;
      const A* values = from.values.row(m_member, m_kv_head, m_first_feature + d) + m_first_value * element;
      A* state = m_tiles.state + (m_transposed ? d : d * m_tiles.ldv);
      const int step = m_transposed ? m_tiles.ldr : 1;
      return [=](int v) { state[v * step] = values[v * element]; };
    });
    for_each(m_team, m_features, [&](int d) {
      m_tiles.sums[d] = *from.sums.row(m_member, m_kv_head, m_first_feature + d);
    });
    if (m_args.has_constant)
      for_each(m_team, m_dv, [&](int v) {
        m_tiles.value_sums[v] = *from.value_sums.row(m_member, m_kv_head, m_first_value + v);
      });
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
    for_each_in_rows(m_team, m_features, m_dv, [&](int d) {
      const std::int64_t element = to.values.element_stride;
      A* values = to.values.row(m_member, m_kv_head, m_first_feature + d) + m_first_value * element;
      const int at = m_transposed ? d : d * m_tiles.ldv;
      const int step = m_transposed ? m_tiles.ldr : 1;
      const A* state = m_tiles.state + at;
      const A* low = compensated() ? m_tiles.state_low + at : nullptr;
      return [=](int v) { values[v * element] = low ? state[v * step] - low[v * step] : state[v * step]; };
    });
    if (m_args.has_constant && m_first_feature == 0)
      for_each(m_team, m_dv, [&](int v) {
        *to.value_sums.row(m_member, m_kv_head, m_first_value + v) =
            compensated() ? m_tiles.value_sums[v] - m_tiles.value_sums_low[v] : m_tiles.value_sums[v];
      });
    if (m_first_value > 0) return;  // another window of the same features has them
    for_each(m_team, m_features, [&](int d) {
      *to.sums.row(m_member, m_kv_head, m_first_feature + d) =
          compensated() ? m_tiles.sums[d] - m_tiles.sums_low[d] : m_tiles.sums[d];
    });
  }

  KOKKOS_FUNCTION void hand_out_state() {
    copy_state_to(m_args.last);
    if constexpr (scaled) {
      if (m_first_value == 0)
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
    A* sums = m_args.states.sums + m_task * m_args.window.features;
    const int columns = state_columns(), ld = state_ld(), to = spilled_ld();
    const A* state = m_tiles.state;
    const A* low = m_tiles.state_low;
    m_team.barrier();
    for_each_in_rows(m_team, state_rows(), columns, [=](int i) {
      return [=](int j) {
        values[std::int64_t(i) * to + j] = low ? state[i * ld + j] - low[i * ld + j] : state[i * ld + j];
      };
    });
    for_each(m_team, m_features, [&](int d) {
      sums[d] = compensated() ? m_tiles.sums[d] - m_tiles.sums_low[d] : m_tiles.sums[d];
    });
    if (m_args.has_constant) {
      A* value_sums = m_args.states.value_sums + m_task * m_args.window.values;
      for_each(m_team, m_dv, [&](int v) {
        value_sums[v] = compensated() ? m_tiles.value_sums[v] - m_tiles.value_sums_low[v] : m_tiles.value_sums[v];
      });
    }
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
            m_tiles.new_shift[d] = m_tiles.running[(keys.rows - 1) * m_tiles.ld_shift + d];
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
        const int* old = m_tiles.shift + m_first_feature;
        const int* now = to + m_first_feature;
        A* const parts[2] = {m_tiles.state, m_tiles.state_low};
        for (int part = 0; part < (compensated() ? 2 : 1); ++part) {
          A* state = parts[part];
          if (m_transposed) {
            for_each_in_rows(m_team, m_dv, m_features, [=](int v) {
              return [=](int d) { state[v * ld + d] *= power_of_two<A>(Sign * (old[d] - now[d])); };
            });
          } else {
            for_each_in_rows(m_team, m_features, m_dv, [=](int d) {
              const A factor = power_of_two<A>(Sign * (old[d] - now[d]));
              return [=](int v) { state[d * ld + v] *= factor; };
            });
          }
        }
        for_each(m_team, m_features, [&](int d) {
          const A factor = power_of_two<A>(Sign * (old[d] - now[d]));
          m_tiles.sums[d] *= factor;
          if (compensated()) m_tiles.sums_low[d] *= factor;
        });
        m_team.barrier();
        for_each(m_team, m_args.features, [&](int d) { m_tiles.shift[d] = to[d]; });
      }
      m_team.barrier();
    } else {
      (void)to;
    }
  }

  KOKKOS_FUNCTION bool compensated() const { return m_args.plan.compensated; }

  KOKKOS_FUNCTION bool shifts_differ(const int* to) const {
    int difference = 0;
    for (int d = 0; d < m_args.features; ++d) difference |= m_tiles.shift[d] ^ to[d];
    return difference != 0;
  }

  /// Mirrored state, walking down: the shift falls, and what later rows left shrinks with it.
  KOKKOS_FUNCTION void rescale_to_piece(Chunk piece, const int* running) {
    if constexpr (scaled)
      rescale_state<-1>(running + (piece.rows - 1) * m_tiles.ld_shift);
    else
      (void)piece, (void)running;
  }

  KOKKOS_FUNCTION Target<A> state_target() const {
    return {m_tiles.state, state_ld(), compensated() ? Store::compensated : Store::add, m_tiles.state_low};
  }

  /// Sums over rows, and what they lost to rounding if they are compensated.
  struct Sums {
    A *high, *low;
    int size;
  };
  KOKKOS_FUNCTION Sums feature_sums() const { return {m_tiles.sums, m_tiles.sums_low, m_features}; }
  KOKKOS_FUNCTION Sums value_sums() const { return {m_tiles.value_sums, m_tiles.value_sums_low, m_dv}; }

  /// sums += sum over rows of weight(row) * row; the chunk is summed first.
  template <class Weight>
  LINATTN_OUTLINE KOKKOS_FUNCTION void add_rows(Factored rows, int count, const Weight& weight, Sums sums) {
    const auto add = [&](int d, A part) {
      if (compensated())
        compensated_add(sums.high[d], sums.low[d], part);
      else
        sums.high[d] += part;
    };
    if constexpr (Team::on_host) {
      constexpr int block = tile_columns<A>;
      for (int d0 = 0; d0 < sums.size; d0 += block) {
        A part[block] = {};
        for (int r = 0; r < count; ++r) {
          const A w = weight(r);
          const A* row = rows.data + r * rows.ld + d0;
          for (int d = 0; d < block; ++d) part[d] += w * row[d];
        }
        for (int d = 0; d < block; ++d) add(d0 + d, part[d]);
      }
    } else {
      for_each(m_team, sums.size, [&](int d) {
        A part = A(0);
        for (int r = 0; r < count; ++r) part += weight(r) * rows.data[r * rows.ld + d];
        add(d, part);
      });
    }
  }

  // ---- keys -----------------------------------------------------------------------------------

  /// A whole chunk into the state, with no row to answer.
  KOKKOS_FUNCTION void absorb_keys(Chunk keys) {
    if constexpr (scaled) {
      running_shifts(keys, m_tiles.shift);
      rescale_state<1>(m_tiles.running + (keys.rows - 1) * m_tiles.ld_shift);
    }
    load_keys(keys, false);
    load_values(keys, false);
    absorb_loaded_keys(keys);
  }

  /// Features of the keys of a chunk at the current shifts, and their transpose if asked for.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_keys(Chunk keys, bool transposed_too) {
    m_team.barrier();
    m_keys = {m_tiles.keys, m_tiles.ldr};
    bool loaded = false;
    if constexpr (IdentityFeatureMap<KeyMap>) {
      loaded = in_place(m_args.k, keys.rows, m_features) && all_visible(keys);
      if (loaded) m_keys = rows_of(m_args.k, m_kv_head, key_begin(keys), m_first_feature);
    }
    if (!loaded) {
      const Visibility visible = m_visible;
      const auto seen = [=](int r) { return visible(keys.begin + r); };
      const int* shift = m_tiles.shift + m_first_feature;
      features<KeyMap>(bind_map<A>(m_args.key_map, m_kv_head),
                       fetch_features<KeyMap>(m_args.k, m_kv_head, key_begin(keys), keys.rows, seen), keys.rows,
                       m_tiles.keys, [=](int) { return [=](int d) { return shift[d]; }; }, seen, key_factors());
    }
    m_team.barrier();
    if (transposed_too) {
      transpose(m_team, keys.rows, m_features, m_keys.data, m_keys.ld, m_tiles.keys_t, m_tiles.ldc);
      m_team.barrier();
    }
  }

  /// Rows of the caller as a factor; only where in_place().
  KOKKOS_FUNCTION Factored rows_of(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin,
                                   int first_column) const {
    return {t.template row<A>(m_sequence.batch, head, begin) + first_column, t.row_stride};
  }

  /// Values of a chunk, and their transpose if asked for.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_values(Chunk keys, bool transposed_too) {
    if (!m_args.center_v && in_place(m_args.v, keys.rows, m_dv) && all_visible(keys)) {
      m_values = rows_of(m_args.v, m_kv_head, key_begin(keys), m_first_value);
    } else {
      m_values = {m_tiles.values, m_tiles.ldv};
      const Visibility visible = m_visible;
      const auto seen = [=](int r) { return visible(keys.begin + r); };
      const Rows<A> v = fetch(m_args.v, m_kv_head, key_begin(keys), keys.rows, m_first_value, m_dv, seen);
      A* values = m_tiles.values;
      const int ld = m_tiles.ldv;
      with_stride<Team>(v.element, [&](auto element) {
        for_each_in_counted_rows(
            m_team, keys.rows, m_dv, seen,
            [=](int r) {
              const A* x = v.data + r * v.row;
              A* to = values + r * ld;
              return [=](int j) { to[j] = x[j * element]; };
            },
            [=](int r) { return [=](int j) { values[r * ld + j] = A(0); }; });
      });
      if (m_args.center_v) {
        const A* centre = m_tiles.centre;
        m_team.barrier();
        for_each_in_counted_rows(
            m_team, keys.rows, m_dv, seen,
            [=](int r) {
              A* to = values + r * ld;
              return [=](int j) { to[j] -= centre[j]; };
            },
            [](int) { return [](int) {}; });
      }
    }
    m_team.barrier();
    if (transposed_too) {
      transpose(m_team, keys.rows, m_dv, m_values.data, m_values.ld, m_tiles.values_t, m_tiles.ldc);
      m_team.barrier();
    }
  }

  /// What values are taken relative to: the first that is visible.
  KOKKOS_FUNCTION void load_centre() {
    std::int64_t first = 0;
    while (first < m_sequence.nk && !m_visible(first)) ++first;
    A* centre = m_tiles.centre;
    m_team.barrier();
    if (first == m_sequence.nk) {
      fill(centre, m_dv, A(0));
    } else {
      const Rows<A> v = fetch(m_args.v, m_kv_head, m_sequence.k_begin + first, 1, m_first_value, m_dv,
                              [](int) { return true; });
      for_each(m_team, m_dv, [=](int j) { centre[j] = v.data[j * v.element]; });
    }
    m_team.barrier();
  }

  /// S += K^T V, z += sum of K, t += sum of V.
  KOKKOS_FUNCTION void absorb_loaded_keys(Chunk keys) {
    if (m_transposed)
      multiply(m_team, m_dv, m_features,
               Product<A>{{m_values.data, 1, m_values.ld}, m_keys.data, m_keys.ld, keys.rows}, state_target());
    else
      multiply(m_team, m_features, m_dv,
               Product<A>{{m_keys.data, 1, m_keys.ld}, m_values.data, m_values.ld, keys.rows}, state_target());
    const auto once = [](int) { return A(1); };
    if (m_args.normalise || m_args.last.present) add_rows(m_keys, keys.rows, once, feature_sums());
    if (m_args.has_constant) add_rows(m_values, keys.rows, once, value_sums());
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
    const int first = first_row(rows);
    const int count = rows.rows - first;
    m_team.barrier();
    if (m_args.has_constant) {
      m_constant = static_cast<A>(m_args.constant(head));
      fill(m_tiles.constants, rows.rows, m_constant);
    }
    if (m_args.counts_keys() && (m_walk == Walk::output || m_args.clamp)) count_rows(rows);
    m_queries = {m_tiles.queries, m_tiles.ldr};
    if constexpr (IdentityFeatureMap<QueryMap>) {
      if (first == 0 && in_place(m_args.q, rows.rows, m_features)) {
        m_queries = rows_of(m_args.q, head, query_begin(rows), m_first_feature);
        return;
      }
    }
    const auto map = bind_map<A>(m_args.query_map, head);
    const auto all = [](int) { return true; };
    const int ld = m_tiles.ldr;
    A* queries = m_tiles.queries;
    for_each_in_rows(m_team, first, m_features,
                     [=](int r) { return [=](int d) { queries[r * ld + d] = A(0); }; });
    if constexpr (scaled) {
      // the scale of a row is that of all its features, whatever the window
      Rows<A> q = fetch(m_args.q, head, query_begin(rows) + first, count, 0, m_args.d, all);
      const int* shift = m_tiles.shift;
      int* row_shift = m_tiles.row_shift;
      const int ld_shift = m_tiles.ld_shift;
      with_stride<Team>(q.element, [&](auto element) {
        const int features = m_args.features;
        for_each(m_team, count, [=](int r) {
          const int* seen = running ? running + (first + r) * ld_shift : shift;
          const A* x = q.data + r * q.row;
          int largest = 2 * no_shift;
          for (int d = 0; d < features; ++d) {
            const int e = map.exponent(x[d * element]) + seen[d];
            largest = e > largest ? e : largest;
          }
          row_shift[first + r] = largest;
        });
      });
      m_team.barrier();
      q.data += m_first_feature * q.element;
      const int* window = shift + m_first_feature;
      this->template features<QueryMap>(
          map, q, count, queries + first * ld,
          [=](int r) {
            const int scale = row_shift[first + r];
            return [=](int d) { return scale - window[d]; };
          },
          [=](int r) { return row_shift[first + r] > no_shift / 2; }, no_factors());  // it sees a key
    } else {
      (void)running;
      features<QueryMap>(map, fetch_features<QueryMap>(m_args.q, head, query_begin(rows) + first, count, all),
                         count, queries + first * ld, [](int) { return [](int) { return 0; }; }, all,
                         query_factors(head, first));
    }
    m_team.barrier();
  }

  /// P = Q K^T + b on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weights(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows,
             Product<A>{{m_queries.data, m_queries.ld, 1}, m_tiles.keys_t, m_tiles.ldc, m_features},
             Target<A>{.c = m_tiles.weights, .ldc = m_tiles.ldc, .lower_only = true});
    m_team.barrier();
    keep_lower_triangle(m_team, piece.rows, first_row(piece), m_tiles.ldc, m_tiles.weights, m_tiles.ldc,
                        static_cast<const A*>(m_args.has_constant ? m_tiles.constants : nullptr));
    m_team.barrier();
    clear_hidden_keys(piece, m_tiles.weights);
  }

  /// Features and values of hidden keys are 0, and so is what they add to products, but a constant is not.
  KOKKOS_FUNCTION void clear_hidden_keys(Chunk piece, A* tile) {
    if (!m_args.has_constant || all_visible(piece)) return;
    const Visibility visible = m_visible;
    const int ld = m_tiles.ldc;
    for_each_in_rows(m_team, piece.rows, piece.rows, [=](int i) {
      return [=](int j) {
        if (!visible(piece.begin + j)) tile[i * ld + j] = A(0);
      };
    });
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
  /// Whether rows of a plain sum are what the products give.
  KOKKOS_FUNCTION bool unit_scale() const { return !m_args.normalise && !scaled && m_args.scale == A(1); }

  /// What the row with the sum s is divided by.
  KOKKOS_FUNCTION RowSum<A> row_sum(A s, int row) const {
    return clamped_row_sum(s, m_args.clamp ? m_args.least_normaliser * m_tiles.row_counts[row] : A(0));
  }

  KOKKOS_FUNCTION void clear_records() {
    if (m_args.records && m_team.rank() == 0)
      for (std::int64_t g = 0; g < m_args.group; ++g)
        m_args.records[m_task * m_args.group + g] = {power_of_two<double>(1024), -1};
  }

  /// Keeps the smallest |s| / m so far; sums that are no numbers are the smallest.
  KOKKOS_FUNCTION void record(const A* sums, int first, int rows, std::int64_t begin, std::int64_t g) {
    if (!m_args.records || m_first_value > 0 || m_team.rank() != 0) return;
    NormaliserRecord& record = m_args.records[m_task * m_args.group + g];
    for (int i = first; i < rows; ++i) {
      const A s = divisor(sums[i]), count = m_tiles.row_counts[i];
      const NormaliserRecord here{static_cast<double>(s < A(0) ? -s : s) / static_cast<double>(count), begin + i};
      if (count > A(0) && is_smaller(here, record)) record = here;
    }
  }

  /// o = n / s with n = Q S + b t (+ P V of the chunk), s = Q z + b m (+ sums of rows of P), to the caller.
  LINATTN_OUTLINE KOKKOS_FUNCTION void answer(Chunk rows, std::int64_t g, bool with_chunk) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    A* row_scale = m_tiles.row_scale;
    bool direct = first == 0 && !m_args.has_noise() && !m_args.center_v && in_place(m_args.o, rows.rows, m_dv);
    if (m_args.normalise) {
      RowSums<A> sums{m_queries.data, m_queries.ld, m_tiles.sums, 0, padded_columns<A>(m_features)};
      if (with_chunk) {
        sums.more = m_tiles.weights;
        sums.ld_more = sums.more_n = m_tiles.ldc;
      }
      sum_rows(m_team, rows.rows, sums, row_scale);
      m_team.barrier();
      if (m_args.has_constant) {
        const A constant = m_constant * static_cast<A>(m_count);
        for_each(m_team, rows.rows, [=](int i) { row_scale[i] += constant; });
        m_team.barrier();
      }
      if (m_args.records) {
        record(row_scale, first, rows.rows, begin, g);
        m_team.barrier();
      }
      for_each(m_team, rows.rows - first, [&](int r) {
        const A s = row_scale[first + r];
        if (m_args.denominator && m_first_value == 0)
          *m_args.denominator.row(m_sequence.batch, head, begin + first + r) = s;
        if (m_args.center_v) m_tiles.row_terms[first + r] = divisor(s);
        row_scale[first + r] = row_sum(s, first + r).value;
        direct = direct && row_scale[first + r] != A(0);
      });
    } else {
      direct = direct && unit_scale();
      for_each(m_team, rows.rows - first,
               [&](int r) { row_scale[first + r] = unscale(m_args.scale, first + r); });
    }
    m_team.barrier();
    ProductSum<A> sum;
    sum.add({{m_queries.data, m_queries.ld, 1}, m_tiles.state, m_tiles.ldv, m_features});
    if (with_chunk)
      sum.add({{m_tiles.weights, m_tiles.ldc, 1}, m_values.data, m_values.ld, rows.rows, Band::lower});
    if (m_args.has_constant) sum.add({{m_tiles.constants, 1, 0}, m_tiles.value_sums, 0, 1});
    Target<A> target{.c = m_tiles.out, .ldc = m_tiles.ldv};
    if (direct) {
      target.c = m_args.o.template row<A>(m_sequence.batch, head, begin) + m_first_value;
      target.ldc = m_args.o.row_stride;
      if (m_args.normalise) target.divisor = row_scale;
    }
    multiply(m_team, rows.rows, m_dv, sum, target);
    m_team.barrier();
    if (direct) return;
    A* out = m_tiles.out;
    const int ld = m_tiles.ldv;
    const bool normalise = m_args.normalise;
    for_each_in_rows(m_team, rows.rows, m_dv, [=](int i) {
      A* row = out + i * ld;
      const A factor = normalise ? A(1) : row_scale[i], divisor = normalise ? row_scale[i] : A(1);
      return [=](int j) { row[j] = row[j] * factor / divisor; };
    });
    m_team.barrier();
    const auto counts = [=](int r) { return !(normalise && row_scale[first + r] == A(0)); };
    if (m_args.center_v) {
      if (m_args.centred)
        put(out + first * ld, ld, m_args.centred, head, begin + first, rows.rows - first, m_first_value, m_dv, counts);
      add_centre(rows.rows, first);
    }
    if (m_args.has_noise()) multiply_by_noise(out, first, rows.rows, make_noise(head, begin + first, rows.rows - first));
    put(out + first * ld, ld, m_args.o, head, begin + first, rows.rows - first, m_first_value, m_dv, counts);
  }

  /// o = (n + s mu) / s, with the own row sum even where another has taken its place.
  KOKKOS_FUNCTION void add_centre(int rows, int first) {
    A* out = m_tiles.out;
    const int ld = m_tiles.ldv;
    const A* centre = m_tiles.centre;
    const A* row_scale = m_tiles.row_scale;
    const A* own = m_tiles.row_terms;
    for_each_in_rows(m_team, rows - first, m_dv, [=](int r) {
      A* row = out + (first + r) * ld;
      const A share = own[first + r] == row_scale[first + r] ? A(1) : own[first + r] / row_scale[first + r];
      return [=](int j) { row[j] += share * centre[j]; };
    });
    m_team.barrier();
  }

  // ---- noise ----------------------------------------------------------------------------------

  /// Normals of the rows of a chunk: that of row r, column j of the window is row(r)[j].
  struct Noise {
    const A* data;
    std::int64_t first;  // element of the whole problem that row 0 begins with
    std::int64_t row;    // elements from row to row there, and in `data`
    std::int64_t ld;
    bool side_by_side;   // rows follow each other without a gap
    KOKKOS_FORCEINLINE_FUNCTION const A* operator()(int r) const {
      return data + r * ld + ((side_by_side ? first : first + r * row) & 3);
    }
  };

  KOKKOS_FUNCTION Noise make_noise(std::int64_t head, std::int64_t begin, int rows) {
    const Dropout& d = m_args.dropout;
    const std::int64_t dv = m_args.dv;
    const std::int64_t row =
        ((m_sequence.batch + d.first_batch) * d.heads + head + d.first_head) * d.queries + begin + d.first_query;
    const bool whole_rows = m_dv == dv;
    const Noise noise{m_tiles.noise, row * dv + m_first_value, dv,
                      whole_rows ? dv : noise_stride(m_dv, Team::on_host), whole_rows};
    const auto counters = [](std::int64_t first, std::int64_t count) { return ((first + count - 1) >> 2) - (first >> 2) + 1; };
    m_team.barrier();
    if (rows > 0 && m_dv > 0) {
      if (whole_rows) {
        fill_normals(m_team, d.seed, d.offset, static_cast<std::uint64_t>(noise.first >> 2),
                     counters(noise.first, rows * dv), m_tiles.noise);
      } else if constexpr (Team::on_host) {
        for (int r = 0; r < rows; ++r) {
          const std::int64_t first = noise.first + r * dv;
          fill_normals(m_team, d.seed, d.offset, static_cast<std::uint64_t>(first >> 2), counters(first, m_dv),
                       m_tiles.noise + r * noise.ld);
        }
      } else {
        const int each = static_cast<int>(noise.ld / 4);  // counters of a row, some of which it may not need
        A* const to = m_tiles.noise;
        for_each(m_team, rows * each, [=](int i) {
          const std::int64_t first = noise.first + i / each * dv;
          four_normals(d.seed, d.offset, static_cast<std::uint64_t>((first >> 2) + i % each),
                       to + i / each * noise.ld + i % each * 4);
        });
      }
    }
    m_team.barrier();
    return noise;
  }

  /// Rows `first` to `rows` of a tile *= 1 + p n.
  KOKKOS_FUNCTION void multiply_by_noise(A* tile, int first, int rows, const Noise& noise) {
    const int ld = m_tiles.ldv;
    const A p = static_cast<A>(m_args.dropout.p);
    for_each_in_rows(m_team, rows - first, m_dv, [=](int r) {
      A* x = tile + (first + r) * ld;
      const A* n = noise(r);
      return [=](int j) { x[j] *= A(1) + p * n[j]; };
    });
    m_team.barrier();
  }

  // ---- backward -------------------------------------------------------------------------------

  /// Whether the gradients of the features of keys are wanted, and so E.
  KOKKOS_FUNCTION bool wants_key_features() const {
    return m_args.wants_keys && (m_args.d_k || m_args.key_parameter_parts);
  }
  /// Whether e is.
  KOKKOS_FUNCTION bool wants_row_terms() const {
    return m_args.normalise && (m_walk == Walk::query_gradient || m_args.wants_keys);
  }

  /// x / s without a division for each element: 1 / s may overflow where x / s does not, so it comes in
  /// two factors, of which the second is a power of two.
  struct Quotient {
    A first, second;
    KOKKOS_FUNCTION explicit Quotient(A s) {
      const A size = s < A(0) ? -s : s;
      const int shift = size < power_of_two<A>(-100) ? 64 : size > power_of_two<A>(100) ? -64 : 0;
      first = A(1) / (s * power_of_two<A>(shift));
      second = power_of_two<A>(shift);
    }
    KOKKOS_FUNCTION Quotient(A factor, A more) : first(factor), second(more) {}
    KOKKOS_FORCEINLINE_FUNCTION A operator()(A x) const { return x * first * second; }
  };

  /// G and e of a chunk; rows without a query are zero.
  LINATTN_OUTLINE KOKKOS_FUNCTION void load_cotangents(Chunk rows, std::int64_t g) {
    const std::int64_t head = query_head(g);
    const std::int64_t begin = query_begin(rows);
    const int first = first_row(rows);
    const int count = rows.rows - first;
    const bool normalise = m_args.normalise;
    if (unit_scale() && !m_args.has_noise() && first == 0 && in_place(m_args.d_o, rows.rows, m_dv)) {
      m_cotangents = rows_of(m_args.d_o, head, begin, m_first_value);
      return;  // the terms of rows are zero and stay so
    }
    m_cotangents = {m_tiles.cotangents, m_tiles.ldv};
    A* row_scale = m_tiles.row_scale;
    A* row_terms = m_tiles.row_terms;
    for_each(m_team, rows.rows, [&](int i) {
      A scale = A(0);
      if (i >= first)
        scale = normalise ? row_sum(*m_args.denominator.row(m_sequence.batch, head, begin + i), i).value
                          : unscale(m_args.scale, i);
      row_scale[i] = scale;
      row_terms[i] = A(0);
    });
    m_team.barrier();
    const auto counts = [=](int i) { return i >= first && !(normalise && row_scale[i] == A(0)); };
    A* cotangents = m_tiles.cotangents;
    const int ld = m_tiles.ldv;
    const Rows<A> d_o = fetch(m_args.d_o, head, begin + first, count, m_first_value, m_dv,
                              [=](int r) { return counts(first + r); });
    const ColumnFactors::Row factors = m_args.output_factors.row(head);
    const A uniform = m_args.joined && !factors.data ? static_cast<A>(factors.value) : A(1);
    with_stride<Team>(d_o.element, [&](auto element) {
      for_each_in_counted_rows(
          m_team, rows.rows, m_dv, counts,
          [=](int i) {
            Quotient scale = normalise ? Quotient(row_scale[i]) : Quotient(row_scale[i], A(1));
            scale.first *= uniform;
            const A* from = d_o.data + (i - first) * d_o.row;
            A* to = cotangents + i * ld;
            return [=](int j) { to[j] = scale(from[j * element]); };
          },
          [=](int i) { return [=](int j) { cotangents[i * ld + j] = A(0); }; });
    });
    m_team.barrier();
    if (m_args.joined && factors.data) {
      const int first_value = m_first_value;
      for_each_in_rows(m_team, rows.rows, m_dv, [=](int i) {
        A* x = cotangents + i * ld;
        return [=](int j) { x[j] *= static_cast<A>(factors[first_value + j]); };
      });
      m_team.barrier();
    }
    if (m_args.row_dots) {
      if (!wants_row_terms()) return;
      for_each(m_team, rows.rows, [&](int i) {
        if (counts(i)) row_terms[i] = -Quotient(row_scale[i])(*m_args.row_dots.row(m_sequence.batch, head, begin + i));
      });
      m_team.barrier();
      return;
    }
    const bool noisy = m_args.has_noise();
    const Noise noise = noisy ? make_noise(head, begin + first, count) : Noise{};
    // e from the rows that the noise has multiplied and dO before it, or from centred rows and dO after it
    const bool by_centred = m_args.center_v && m_args.centred;
    if (noisy && (by_centred || !wants_row_terms())) multiply_by_noise(cotangents, first, rows.rows, noise);
    if (!wants_row_terms()) return;
    load_row_terms(rows, head, begin, first, counts, noisy && !by_centred ? &noise : nullptr);
    if (noisy && !by_centred) multiply_by_noise(cotangents, first, rows.rows, noise);
    if (m_args.clamp) clear_replaced_row_terms(rows, head, begin, first);
  }

  /// e_i = -G_i . o_i with o relative to the centre, if there is one; `noise`: that of the rows y.
  template <class Counts>
  KOKKOS_FUNCTION void load_row_terms(Chunk rows, std::int64_t head, std::int64_t begin, int first,
                                      const Counts& counts, const Noise* noise) {
    const int count = rows.rows - first;
    const A* cotangents = m_tiles.cotangents;
    A* row_terms = m_tiles.row_terms;
    const int ld = m_tiles.ldv;
    const bool is_centred = m_args.center_v && m_args.centred, to_centre = m_args.center_v && !is_centred;
    const StoredTensor<A>& kept = is_centred ? m_args.centred : m_args.o;
    Rows<A> o = fetch(kept, head, begin + first, count, m_first_value, m_dv,
                      [=](int r) { return counts(first + r); });
    if (to_centre || (Team::on_host && (first > 0 || !in_place(kept, rows.rows, m_dv)))) {
      A* outputs = m_tiles.outputs;
      with_stride<Team>(o.element, [&](auto element) {
        for_each_in_rows(m_team, count, m_dv, [=](int r) {
          const A* from = o.data + r * o.row;
          A* to = outputs + (first + r) * ld;
          return [=](int j) { to[j] = from[j * element]; };
        });
      });
      m_team.barrier();
      if (to_centre) subtract_centre(outputs, first, rows.rows, noise);
      o = {outputs + first * ld, ld, 1};
    }
    if constexpr (Team::on_host) {
      // every row is summed in the same order, wherever it lies
      dot_rows(m_team, rows.rows, cotangents, ld, o.data - first * o.row, o.row, padded_columns<A>(m_dv), row_terms);
      for_each(m_team, rows.rows, [&](int i) { row_terms[i] = counts(i) ? -row_terms[i] : A(0); });
    } else {
      for_each(m_team, count, [&](int r) {
        A total = A(0);
        for (int j = 0; j < m_dv; ++j) total += cotangents[(first + r) * ld + j] * o.data[r * o.row + j * o.element];
        if (counts(first + r)) row_terms[first + r] = -total;
      });
    }
    m_team.barrier();
  }

  /// y - (1 + p n) mu.
  KOKKOS_FUNCTION void subtract_centre(A* tile, int first, int rows, const Noise* noise) {
    const int ld = m_tiles.ldv;
    const A* centre = m_tiles.centre;
    const A p = static_cast<A>(m_args.dropout.p);
    for_each_in_rows(m_team, rows - first, m_dv, [=](int r) {
      A* y = tile + (first + r) * ld;
      const A* n = noise ? (*noise)(r) : nullptr;
      return [=](int j) { y[j] -= n ? (A(1) + p * n[j]) * centre[j] : centre[j]; };
    });
    m_team.barrier();
  }

  /// No gradient flows through a row sum that was replaced; what is left of e comes from the centre.
  KOKKOS_FUNCTION void clear_replaced_row_terms(Chunk rows, std::int64_t head, std::int64_t begin, int first) {
    const A* cotangents = m_tiles.cotangents;
    const int ld = m_tiles.ldv;
    for_each(m_team, rows.rows - first, [&](int r) {
      const int i = first + r;
      if (!row_sum(*m_args.denominator.row(m_sequence.batch, head, begin + i), i).replaced) return;
      A term = A(0);
      for (int j = 0; m_args.center_v && j < m_dv; ++j) term += cotangents[i * ld + j] * m_tiles.centre[j];
      m_tiles.row_terms[i] = term;
    });
    m_team.barrier();
  }

  /// E = G V^T + e on and below the diagonal, zero above it and in rows without a query.
  KOKKOS_FUNCTION void causal_weight_cotangents(Chunk piece) {
    multiply(m_team, piece.rows, piece.rows,
             Product<A>{{m_cotangents.data, m_cotangents.ld, 1}, m_tiles.values_t, m_tiles.ldc, m_dv},
             Target<A>{.c = m_tiles.weight_cotangents, .ldc = m_tiles.ldc, .lower_only = true});
    m_team.barrier();
    keep_lower_triangle<Team, A>(m_team, piece.rows, first_row(piece), m_tiles.ldc, m_tiles.weight_cotangents,
                                 m_tiles.ldc, m_tiles.row_terms);
    m_team.barrier();
    clear_hidden_keys(piece, m_tiles.weight_cotangents);
  }

  /// dQ = G S^T + e z^T (+ E K of the chunk), and dq to the caller.
  KOKKOS_FUNCTION void query_gradients(Chunk rows, std::int64_t g, bool with_chunk) {
    const std::int64_t head = query_head(g);
    if (m_args.constant_parts && m_first_feature == 0) constant_gradient(rows, g, with_chunk);
    const int first = first_row(rows);
    const std::int64_t begin = query_begin(rows) + first;
    ProductSum<A> sum;
    sum.add({{m_cotangents.data, m_cotangents.ld, 1}, m_tiles.state, m_tiles.ldr, m_dv});
    if (with_chunk)
      sum.add({{m_tiles.weight_cotangents, m_tiles.ldc, 1}, m_keys.data, m_keys.ld, rows.rows, Band::lower});
    if (m_args.normalise) sum.add({{m_tiles.row_terms, 1, 0}, m_tiles.sums, 0, 1});
    Target<A> target{.c = m_tiles.out, .ldc = m_tiles.ldr};
    bool direct = false;
    if constexpr (IdentityFeatureMap<QueryMap>) {
      direct = m_args.d_q && first == 0 && !m_args.joined && in_place(m_args.d_q, rows.rows, m_features);
      if (direct) {
        target.c = m_args.d_q.template row<A>(m_sequence.batch, head, begin) + m_first_feature;
        target.ldc = m_args.d_q.row_stride;
      }
    }
    multiply(m_team, rows.rows, m_features, sum, target);
    m_team.barrier();
    if (direct) return;
    pull_back<QueryMap>(
        bind_map<A>(m_args.query_map, head), m_args.q, head, begin, rows.rows - first,
        {m_queries.data + first * m_queries.ld, m_queries.ld}, m_tiles.out + first * m_tiles.ldr, m_args.d_q,
        m_args.query_parameter_parts ? m_args.query_parameter_parts + m_task * m_args.group + g : nullptr,
        [](int) { return true; }, query_factors(head, first));
  }

  /// db = sum of E = G . t + e m for the keys of the state, and the sums of the rows of E for those of the chunk.
  KOKKOS_FUNCTION void constant_gradient(Chunk rows, std::int64_t g, bool with_chunk) {
    A* sums = m_tiles.row_scale;
    RowSums<A> terms{m_cotangents.data, m_cotangents.ld, m_tiles.value_sums, 0, padded_columns<A>(m_dv)};
    if (with_chunk) {
      terms.more = m_tiles.weight_cotangents;
      terms.ld_more = terms.more_n = m_tiles.ldc;
    }
    sum_rows(m_team, rows.rows, terms, sums);
    m_team.barrier();
    if (m_team.rank() == 0) {
      const double count = static_cast<double>(m_count);
      double total = 0;
      for (int i = first_row(rows); i < rows.rows; ++i)
        total += static_cast<double>(sums[i]) + static_cast<double>(m_tiles.row_terms[i]) * count;
      m_args.constant_parts[m_task * m_args.group + g] += total;
    }
    m_team.barrier();
  }

  /// R += Q^T G, y += Q^T e (R is kept transposed).
  KOKKOS_FUNCTION void absorb_loaded_queries(Chunk rows) {
    multiply(m_team, m_dv, m_features,
             Product<A>{{m_cotangents.data, 1, m_cotangents.ld}, m_queries.data, m_queries.ld, rows.rows},
             state_target());
    const A* row_terms = m_tiles.row_terms;
    if (wants_row_terms()) add_rows(m_queries, rows.rows, [=](int i) { return row_terms[i]; }, feature_sums());
    if (m_args.has_constant) {
      const A constant = m_constant;
      add_rows(m_cotangents, rows.rows, [=](int) { return constant; }, value_sums());
    }
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

  /// dK = V R^T + y and dV = K R + r, what later queries ask for and so to be had before those of the chunk
  /// enter R; with_chunk adds E^T Q and P^T G for the loaded queries. `begins`: nothing is there yet.
  KOKKOS_FUNCTION void key_gradients(Chunk keys, bool with_chunk, bool begins) {
    if (begins) aim_key_gradients(keys);
    if (wants_key_features()) {
      ProductSum<A> sum;
      if (begins) sum.add({{m_values.data, m_values.ld, 1}, m_tiles.state, m_tiles.ldr, m_dv});
      if (with_chunk)
        sum.add({{m_tiles.weight_cotangents, 1, m_tiles.ldc}, m_queries.data, m_queries.ld, keys.rows, Band::upper});
      if (begins) sum.add({{m_tiles.one, 0, 0}, m_tiles.sums, 0, 1});
      m_key_target.store = begins ? Store::overwrite : Store::add;
      multiply(m_team, keys.rows, m_features, sum, m_key_target);
    }
    if (m_args.wants_values) {
      ProductSum<A> sum;
      if (with_chunk)
        sum.add({{m_tiles.weights, 1, m_tiles.ldc}, m_cotangents.data, m_cotangents.ld, keys.rows, Band::upper});
      if (begins && m_args.has_constant) sum.add({{m_tiles.one, 0, 0}, m_tiles.value_sums, 0, 1});
      if (sum.count > 0) {
        m_value_target.store = begins ? Store::overwrite : Store::add;
        multiply(m_team, keys.rows, m_dv, sum, m_value_target);
        m_team.barrier();
      }
      if (begins) {
        Target<A> target = m_value_target;
        target.store = sum.count > 0 ? Store::add : Store::overwrite;
        target.transposed = true;
        multiply(m_team, m_dv, keys.rows,
                 Product<A>{{m_tiles.state, m_tiles.ldr, 1}, m_tiles.keys_t, m_tiles.ldc, m_features}, target);
      }
    }
    m_team.barrier();
  }

  /// Where the gradients of a chunk of keys gather: with the caller if they need no change there.
  KOKKOS_FUNCTION void aim_key_gradients(Chunk keys) {
    m_key_target = {.c = m_tiles.out, .ldc = m_tiles.ldr};
    m_value_target = {.c = m_tiles.value_gradients, .ldc = m_tiles.ldv};
    m_keys_direct = m_values_direct = false;
    if (!Team::on_host || m_args.group > 1 || m_args.joined || !all_visible(keys)) return;
    if constexpr (IdentityFeatureMap<KeyMap>) {
      if (m_args.d_k && in_place(m_args.d_k, keys.rows, m_features)) {
        m_keys_direct = true;
        m_key_target = {
            .c = m_args.d_k.template row<A>(m_sequence.batch, m_kv_head, key_begin(keys)) + m_first_feature,
            .ldc = m_args.d_k.row_stride};
      }
    }
    if (m_args.d_v && in_place(m_args.d_v, keys.rows, m_dv)) {
      m_values_direct = true;
      m_value_target = {
          .c = m_args.d_v.template row<A>(m_sequence.batch, m_kv_head, key_begin(keys)) + m_first_value,
          .ldc = m_args.d_v.row_stride};
    }
  }

  LINATTN_OUTLINE KOKKOS_FUNCTION void write_key_gradients(Chunk keys) {
    const Visibility visible = m_visible;
    const auto seen = [=](int r) { return visible(keys.begin + r); };
    if (wants_key_features() && !m_keys_direct)
      pull_back<KeyMap>(bind_map<A>(m_args.key_map, m_kv_head), m_args.k, m_kv_head, key_begin(keys), keys.rows,
                        m_keys, m_tiles.out, m_args.d_k,
                        m_args.key_parameter_parts ? m_args.key_parameter_parts + m_task : nullptr, seen,
                        key_factors());
    if (m_args.wants_values && m_args.d_v && !m_values_direct)
      put(m_tiles.value_gradients, m_tiles.ldv, m_args.d_v, m_kv_head, key_begin(keys), keys.rows, m_first_value,
          m_dv, seen);
    m_team.barrier();
  }

  // ---- feature maps on tiles ------------------------------------------------------------------

  /// The entries of rows that a map needs for the window: its own, or all of them.
  template <class Map, class Visible>
  KOKKOS_FUNCTION Rows<A> fetch_features(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows,
                                         const Visible& visible) {
    if constexpr (mixes_entries_v<Map>)
      return fetch<RowNormFeatureMap<Map>>(t, head, begin, rows, 0, m_args.d, visible);
    else
      return fetch(t, head, begin, rows, m_first_feature, m_features, visible);
  }

  /// Factors 1/rho of rows, for row-norm maps: where they are kept, that of the sequence, and the row it is taken
  /// from, whose gradient is kept until all rows have added to that of rho.
  struct RowFactors {
    A* rows = nullptr;
    A of_sequence = A(1);
    std::int64_t largest_row = -1;
    A* largest_gradient = nullptr;
  };
  KOKKOS_FUNCTION static RowFactors no_factors() { return {}; }
  KOKKOS_FUNCTION RowFactors row_factors(const LargestRows<A>& largest, A* rows, std::int64_t head) const {
    if (!largest.rows) return {rows};
    const std::int64_t at = m_member * largest.heads + head;
    return {rows, largest.factors[at], largest.rows[at],
            largest.gradients ? largest.gradients + at * m_args.d : nullptr};
  }
  KOKKOS_FUNCTION RowFactors key_factors() const {
    return row_factors(m_args.largest_keys, m_tiles.key_factors, m_kv_head);
  }
  KOKKOS_FUNCTION RowFactors query_factors(std::int64_t head, int first) const {
    return row_factors(m_args.largest_queries, m_tiles.query_factors + first, head);
  }

  /// f = phi(x) for `count` rows, zero where not visible(row); shift(row)(feature) matters to
  /// scaled maps only. Rows that are not visible are not read.
  template <class Map, class Bound, class Shift, class Visible>
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void features(const Bound& map, const Rows<A>& x, int count, A* f,
                                                                const Shift& shift, const Visible& visible,
                                                                RowFactors factors) {
    const int ld = m_tiles.ldr;
    if constexpr (RowNormFeatureMap<Map>) {
      const int size = m_args.d;
      for_each(m_team, count, [=](int r) {
        factors.rows[r] = map.per_row && visible(r) ? inverse_norm(row_norm<Team>(x.data + r * x.row, size, map.eps))
                                                    : factors.of_sequence;
      });
      m_team.barrier();
      for_each_in_counted_rows(
          m_team, count, size, visible,
          [=](int r) {
            const A* from = x.data + r * x.row;
            A* to = f + r * ld;
            const A factor = factors.rows[r] * map.rate;
            return [=](int d) { to[d] = from[d] * factor; };
          },
          [=](int r) { return [=](int d) { f[r * ld + d] = A(0); }; });
    } else if constexpr (RowFeatureMap<Map>) {
      const int size = m_args.d, rank = m_args.features;
      for_each(m_team, count, [=](int r) {
        const Row<A> to{f + r * ld, rank, 1};
        if (visible(r))
          map.row_value(ConstRow<A>{x.data + r * x.row, size, x.element}, to);
        else
          for (int d = 0; d < rank; ++d) to[d] = A(0);
      });
    } else {
      with_stride<Team>(x.element, [&](auto element) {
        for_each_in_counted_rows(
            m_team, count, m_features, visible,
            [=](int r) {
              const A* from = x.data + r * x.row;
              A* to = f + r * ld;
              const auto shift_of = shift(r);
              return [=](int d) {
                if constexpr (scaled)
                  to[d] = map.value(from[d * element], shift_of(d));
                else
                  to[d] = map.value(from[d * element]);
              };
            },
            [=](int r) { return [=](int d) { f[r * ld + d] = A(0); }; });
      });
    }
  }

  /// dx = J(x)^T df for `count` rows of `t`, to `d_t` unless it is absent, zero where not visible(row); adds
  /// the parameter's part to `part`. Overwrites df.
  template <class Map, class Bound, class Visible>
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void pull_back(const Bound& map, const StoredTensor<A>& t,
                                                                 std::int64_t head, std::int64_t begin, int count,
                                                                 Factored f, A* df, const StoredTensor<A>& d_t,
                                                                 double* part, const Visible& visible,
                                                                 RowFactors factors) {
    const Rows<A> x = fetch_features<Map>(t, head, begin, count, visible);
    const int ld = m_tiles.ldr;
    if constexpr (RowNormFeatureMap<Map>) {
      pull_back_norm(map, x, head, begin, count, df, d_t, part, visible, factors);
    } else if constexpr (RowFeatureMap<Map>) {
      if (d_t) {
        const int size = m_args.d, rank = m_args.features;
        const bool native = d_t.storage == Storage::native;
        A* to = native ? d_t.template row<A>(m_sequence.batch, head, begin)
                       : m_tiles.staging + padded_rows(m_args.plan.chunk) * m_tiles.ld_staging;
        const std::int64_t row = native ? d_t.row_stride : m_tiles.ld_staging;
        const std::int64_t element = native ? d_t.element_stride : 1;
        for_each(m_team, count, [=](int r) {
          const Row<A> dx{to + r * row, size, element};
          if (visible(r))
            map.row_pullback(ConstRow<A>{x.data + r * x.row, size, x.element},
                             ConstRow<A>{f.data + r * f.ld, rank, 1}, ConstRow<A>{df + r * ld, rank, 1}, dx);
          else
            for (int d = 0; d < size; ++d) dx[d] = A(0);
        });
        m_team.barrier();
        if (!native) put(to, row, d_t, head, begin, count, 0, size, visible);
      }
    } else {
      if constexpr (ParameterizedFeatureMap<Map>) {
        if (part) {
          for_each(m_team, count, [&](int r) {
            constexpr int parts = 8;
            double term[parts] = {};  // terms of both signs that may be much larger than their sum
            for (int d = 0; visible(r) && d < m_features; ++d)
              term[d % parts] += static_cast<double>(map.parameter_derivative(
                                     x.data[r * x.row + d * x.element], f.data[r * f.ld + d])) *
                                 static_cast<double>(df[r * ld + d]);
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
      if (d_t) {
        // rows side by side are written at once; everything else goes through the tile
        const bool direct =
            Team::on_host && d_t.storage == Storage::native && d_t.element_stride == 1 && !m_args.joined;
        A* to = direct ? d_t.template row<A>(m_sequence.batch, head, begin) + m_first_feature : df;
        const std::int64_t row = direct ? d_t.row_stride : ld;
        with_stride<Team>(x.element, [&](auto element) {
          for_each_in_counted_rows(
              m_team, count, m_features, visible,
              [=](int r) {
                const A* from = x.data + r * x.row;
                const A* f_row = f.data + r * f.ld;
                const A* df_row = df + r * ld;
                A* here = to + r * row;
                return [=](int d) { here[d] = map.derivative(from[d * element], f_row[d]) * df_row[d]; };
              },
              [=](int r) { return [=](int d) { to[r * row + d] = A(0); }; });
        });
        m_team.barrier();
        if (!direct) put(df, ld, d_t, head, begin, count, m_first_feature, m_features, visible);
      }
    }
    m_team.barrier();
  }

  /// f = rate xhat, xhat = x / rho: dx = rate (df - xhat (xhat . df)) / rho where rho is that of the row, else
  /// rate df / rho; the rate's part is xhat . df.
  template <class Bound, class Visible>
  KOKKOS_FUNCTION void pull_back_norm(const Bound& map, const Rows<A>& x, std::int64_t head, std::int64_t begin,
                                      int count, A* df, const StoredTensor<A>& d_t, double* part,
                                      const Visible& visible, RowFactors factors) {
    const int ld = m_tiles.ldr, size = m_features;
    double* dots = m_tiles.parameter_terms;
    if (part || map.per_row) {
      for_each(m_team, count, [=](int r) {
        dots[r] = visible(r) ? static_cast<double>(
                                   scaled_dot<Team>(factors.rows[r], x.data + r * x.row, df + r * ld, size))
                             : 0.0;
      });
      m_team.barrier();
    }
    if (part && m_team.rank() == 0) {
      double total = 0;
      for (int r = 0; r < count; ++r) total += dots[r];
      *part += total;
    }
    if (!d_t) return;
    const bool direct = Team::on_host && d_t.storage == Storage::native && d_t.element_stride == 1;
    A* to = direct ? d_t.template row<A>(m_sequence.batch, head, begin) + m_first_feature : df;
    const std::int64_t row = direct ? d_t.row_stride : ld;
    for_each_in_counted_rows(
        m_team, count, size, visible,
        [=](int r) {
          const A factor = factors.rows[r];
          const A along = map.per_row ? static_cast<A>(dots[r]) * factor : A(0), rate = map.rate * factor;
          const A* from = x.data + r * x.row;
          const A* df_row = df + r * ld;
          A* here = to + r * row;
          return [=](int d) { here[d] = rate * (df_row[d] - from[d] * along); };
        },
        [=](int r) { return [=](int d) { to[r * row + d] = A(0); }; });
    m_team.barrier();
    const std::int64_t largest = factors.largest_row - begin;
    if (factors.largest_gradient && largest >= 0 && largest < count)
      for_each(m_team, size, [=](int d) { factors.largest_gradient[d] = to[largest * row + d]; });
    if (!direct) put(df, ld, d_t, head, begin, count, m_first_feature, size, visible);
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
  Walk m_walk{};
  std::int64_t m_task = 0, m_segment = 0, m_unit = 0, m_member = 0, m_kv_head = 0;
  int m_first_feature = 0, m_features = 0, m_first_value = 0, m_dv = 0;
  Sequence m_sequence{};
  Visibility m_visible{};
  std::int64_t m_loaded_interval = -1;
  std::int64_t m_count = 0;  // keys of the state, if anybody asks
  A m_constant = A(0);       // of the query head at hand
  Factored m_keys{}, m_values{}, m_queries{}, m_cotangents{};  // of the chunk at hand
  Target<A> m_key_target{}, m_value_target{};
  bool m_keys_direct = false, m_values_direct = false;
};

}  // namespace LinAttn::detail
