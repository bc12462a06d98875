// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/block_diagonal.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/plan.hpp>
#include <linattn/rows.hpp>
#include <linattn/team.hpp>
#include <linattn/tile.hpp>
#include <linattn/workspace.hpp>

/// \file walker.hpp
/// One worker at the tiles of one sequence and key/value head: exact attention in memory O(N).
///
/// A sequence is cut into blocks, each attends inside itself; a block may be the whole sequence. With scores
/// x_ij = q_i . k_j, m_i the largest of a row, l_i = sum_j exp(scale (x_ij - m_i)), L_i = scale m_i + log l_i and weights
/// P_ij = exp(scale (x_ij - m_i)) / l_i = exp(scale x_ij - L_i):
///
///     forward     o_i = sum_j P_ij v_j
///     backward    dP_ij = g_i . v_j      delta_i = sum_j P_ij dP_ij      dx_ij = scale P_ij (dP_ij - delta_i)
///                 dq_i = sum_j dx_ij k_j     dk_j = sum_i dx_ij q_i      dv_j = sum_i P_ij g_i
///
/// Tiles of queries meet tiles of keys; m, l and what is summed with P are brought from one maximum to the next as in
/// the online softmax of Milakov and Gimelshein (2018). Tiles begin where blocks begin, so that a pair of tiles is either
/// seen as a whole, or lies on the diagonal of a causal mask, where products leave out what lies above it.
///
/// A block of one tile has its gradients from one walk (block_gradient, five products of N block D). A longer one knows
/// L and delta of its rows first, then meets each pair of tiles once, walking over tiles of keys and adding to dq in
/// memory (pair_gradient, five products), where there are heads enough for all workers; otherwise twice, over tiles of
/// queries (row_gradient, three products) and over tiles of keys (key_gradient, four). The bits are the same.
///
/// **Alone**, o is that of this branch, the forward pass keeps L, and delta_i = dO_i . o_i (row_delta).
///
/// **Joined** to a linear attention: o = r o_linear + p o_block, where o holds o_linear before and o afterwards. The
/// cotangent of this branch is g = p dO. The other one is told dO . (r o_linear) = dO . o - delta, which it would
/// otherwise need o_linear for. Nothing is kept: L and delta are found again (row_sum, two products).
///
/// Hidden keys and keys of other blocks are never read.

namespace LinAttn::detail {

/// What is attended to, and how the result joins what is there.
template <class A>
struct SoftmaxArguments {
  StoredTensor<A> q{}, k{}, v{};
  StoredTensor<A> o{};  // forward: written (joined: read before); backward: read
  StoredTensor<A> d_o{};
  StoredTensor<A> d_q{}, d_k{}, d_v{};
  bool joined = false;         // to a linear attention
  StoredTensor<A> linear{};    // o_linear, if it is kept
  RowTensor<A> linear_dots{};  // backward: receives dO . (r o_linear) of each row
  RowTensor<A> logsums{};      // L; alone: written by the forward pass, if wanted, and read by the backward pass
  RowTensor<A> deltas{};       // backward, for blocks of several tiles; as logsums where joined

  const std::uint8_t* key_mask = nullptr;  // (batch, nk); nullptr: every key is visible
  std::int64_t mask_batch_stride = 0, mask_stride = 0;
  const std::int64_t* cu_seqlens_q = nullptr;
  const std::int64_t* cu_seqlens_k = nullptr;

  std::int64_t sequences = 0, heads = 0, kv_heads = 0, group = 0, nq = 0, nk = 0;
  std::int64_t block = 1;  // keys of a block
  int d = 0, dv = 0;
  bool causal = false;
  bool host = true;    // workers are threads of the host
  A scale = A(1);      // positive
  Combine combine = Combine::average;
  ColumnFactors r = 0.5, p = 0.5;

  Plan plan{};                       // chunk: rows of a tile; segments: runs of tiles, one for each task
  std::int64_t tiles_of_block = 1;   // of the longest
  std::int64_t tiles = 0;            // of the longest sequence
  std::int64_t tasks = 0;            // (sequence, key/value head, run)
  std::byte* worker_memory = nullptr;
  double *r_parts = nullptr, *p_parts = nullptr;  // (task, group, Dv)
};

/// The walks a worker can be asked for.
enum class SoftmaxWalk { output, block_gradient, row_delta, row_sum, row_gradient, key_gradient, pair_gradient };

/// Tiles of one worker, padded as in engine/arguments.hpp.
template <class A>
struct SoftmaxTiles {
  int ldd = 0, ldv = 0, ldc = 0;
  A *queries = nullptr;                          // (C, D)
  A *keys = nullptr, *keys_t = nullptr;          // (C, D) and its transpose
  A *values = nullptr, *values_t = nullptr;      // (C, Dv) and its transpose
  A *weights = nullptr, *cotangents_of_weights = nullptr;  // (C, C): x, then P; dP, then dx
  A *cotangents = nullptr;                       // (C, Dv): dO, then g
  A *out = nullptr;                              // (C, Dv): numerators; o or r o_linear
  A *query_gradients = nullptr, *key_gradients = nullptr;  // (C, D)
  A *value_gradients = nullptr;                  // (C, Dv)
  A *hidden = nullptr;                           // (C): 0 for a visible key, else -infinity
  A *out_low = nullptr, *sums_low = nullptr;     // what long sums lost, if compensated
  A *maxima = nullptr, *sums = nullptr, *corrections = nullptr;  // (C)
  A *logsums = nullptr, *deltas = nullptr, *dots = nullptr;      // (C)

  template <class Args>
  KOKKOS_FUNCTION SoftmaxTiles(ArenaCursor& arena, const Args& args, SoftmaxWalk walk) {
    const int c = padded_rows(args.plan.chunk);
    ldd = padded_columns<A>(args.d);
    ldv = padded_columns<A>(args.dv);
    ldc = padded_columns<A>(args.plan.chunk);
    queries = arena.take<A>(std::int64_t(c) * ldd);
    keys = arena.take<A>(std::int64_t(c) * ldd);
    keys_t = arena.take<A>(std::int64_t(padded_rows(args.d)) * ldc);
    values = arena.take<A>(std::int64_t(c) * ldv);
    weights = arena.take<A>(std::int64_t(c) * ldc);
    out = arena.take<A>(std::int64_t(c) * ldv);
    hidden = arena.take<A>(ldc);
    maxima = arena.take<A>(c);
    sums = arena.take<A>(c);
    corrections = arena.take<A>(c);
    logsums = arena.take<A>(c);
    if (args.plan.compensated) {
      sums_low = arena.take<A>(c);
      out_low = arena.take<A>(std::int64_t(c) * ldv);
    }
    if (walk == SoftmaxWalk::output) return;
    values_t = arena.take<A>(std::int64_t(padded_rows(args.dv)) * ldc);
    cotangents = arena.take<A>(std::int64_t(c) * ldv);
    cotangents_of_weights = arena.take<A>(std::int64_t(c) * ldc);
    deltas = arena.take<A>(c);
    dots = arena.take<A>(c);
    if (walk != SoftmaxWalk::key_gradient) query_gradients = arena.take<A>(std::int64_t(c) * ldd);
    if (walk == SoftmaxWalk::block_gradient || walk == SoftmaxWalk::key_gradient || walk == SoftmaxWalk::pair_gradient) {
      key_gradients = arena.take<A>(std::int64_t(c) * ldd);
      value_gradients = arena.take<A>(std::int64_t(c) * ldv);
    }
  }
};

template <class T>
KOKKOS_FORCEINLINE_FUNCTION T minus_infinity() {
  return -power_of_two<T>(sizeof(T) == 4 ? 128 : 1024);
}

// Compiled differently for another vector width, as in tile.hpp.
inline namespace LINATTN_SIMD_ABI {

/// What a tile makes of a row of weights: the largest score so far, the sum of the tile relative to it, and what earlier
/// sums with P are to be multiplied by.
template <class A>
struct SoftmaxRow {
  A maximum, sum, correction;
};

/// The sum, or the largest, of the lanes of a vector, in an order that the compiler can keep in registers.
template <int Lanes, class A>
KOKKOS_FORCEINLINE_FUNCTION A sum_of_lanes(A* lane) {
  if constexpr (Lanes > 1) {
    for (int l = 0; l < Lanes / 2; ++l) lane[l] += lane[l + Lanes / 2];
    return sum_of_lanes<Lanes / 2>(lane);
  }
  return lane[0];
}
template <int Lanes, class A>
KOKKOS_FORCEINLINE_FUNCTION A largest_of_lanes(A* lane) {
  if constexpr (Lanes > 1) {
    for (int l = 0; l < Lanes / 2; ++l) lane[l] = lane[l] > lane[l + Lanes / 2] ? lane[l] : lane[l + Lanes / 2];
    return largest_of_lanes<Lanes / 2>(lane);
  }
  return lane[0];
}

/// Scores of a row to exp(scale (x - m)) with m the largest of them and `before`, zero from `end` to the padding.
/// On the host the lanes of a vector are summed apart, so that the loops vectorise.
template <class Team, class A>
KOKKOS_FORCEINLINE_FUNCTION SoftmaxRow<A> exponentials_of_row(A* row, int end, const A* hidden, A scale,
                                                              A before) {
  const A nothing = minus_infinity<A>();
  A m = before;
  if constexpr (Team::on_host) {
    constexpr int lanes = tile_columns<A>;
    A largest[lanes];
    for (int l = 0; l < lanes; ++l) largest[l] = m;
    for (int j0 = 0; j0 < end; j0 += lanes) {
      LINATTN_INDEPENDENT
      for (int l = 0; l < lanes; ++l) {
        const int j = j0 + l;
        const A x = j < end ? row[j] + hidden[j] : nothing;
        row[j] = x;
        largest[l] = x > largest[l] ? x : largest[l];
      }
    }
    m = largest_of_lanes<lanes>(largest);
    const A reference = m == nothing ? A(0) : m;
    A sums[lanes] = {};
    for (int j0 = 0; j0 < end; j0 += lanes) {
      LINATTN_INDEPENDENT
      for (int l = 0; l < lanes; ++l) {
        const A e = exp_nonpositive((row[j0 + l] - reference) * scale);
        row[j0 + l] = e;
        sums[l] += e;
      }
    }
    const A sum = sum_of_lanes<lanes>(sums);
    const A correction = before == nothing ? A(0) : exp_nonpositive((before - reference) * scale);
    return {m, sum, correction};
  } else {
    for (int j = 0; j < end; ++j) {
      row[j] += hidden[j];
      m = row[j] > m ? row[j] : m;
    }
    const A reference = m == nothing ? A(0) : m;
    A sum = A(0);
    for (int j = 0; j < end; ++j) {
      row[j] = exp_nonpositive((row[j] - reference) * scale);
      sum += row[j];
    }
    const A correction = before == nothing ? A(0) : exp_nonpositive((before - reference) * scale);
    return {m, sum, correction};
  }
}

/// body(j) for 0 <= j < end, in whole vectors on the host: what lies up to the padding is overwritten.
template <class Team, class A, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_padded_row(int end, const Body& body) {
  if constexpr (Team::on_host) {
    constexpr int lanes = tile_columns<A>;
    for (int j0 = 0; j0 < end; j0 += lanes) {
      LINATTN_INDEPENDENT
      for (int l = 0; l < lanes; ++l) body(j0 + l);
    }
  } else {
    for (int j = 0; j < end; ++j) body(j);
  }
}

/// sum_{j < end} a_j b_j of padded rows.
template <class Team, class A>
KOKKOS_FORCEINLINE_FUNCTION A dot_of_row(const A* a, const A* b, int end) {
  if constexpr (Team::on_host) {
    constexpr int lanes = tile_columns<A>;
    A sums[lanes] = {};
    for (int j0 = 0; j0 < end; j0 += lanes) {
      LINATTN_INDEPENDENT
      for (int l = 0; l < lanes; ++l) sums[l] += j0 + l < end ? a[j0 + l] * b[j0 + l] : A(0);
    }
    return sum_of_lanes<lanes>(sums);
  } else {
    A sum = A(0);
    for (int j = 0; j < end; ++j) sum += a[j] * b[j];
    return sum;
  }
}

}  // namespace LINATTN_SIMD_ABI

template <class Team, class A>
class SoftmaxWalker {
 public:
  using Args = SoftmaxArguments<A>;

  KOKKOS_FUNCTION SoftmaxWalker(const Team& team, const Args& args, const SoftmaxTiles<A>& tiles)
      : m_team(team), m_args(args), m_tiles(tiles) {}

  KOKKOS_FUNCTION void run(SoftmaxWalk walk, std::int64_t task) {
    m_walk = walk;
    const std::int64_t runs = walk == SoftmaxWalk::pair_gradient ? 1 : m_args.plan.segments;
    const std::int64_t units = m_args.sequences * m_args.kv_heads;
    const std::int64_t run = task / units, unit = task % units;  // runs of different heads go to different workers
    m_task = unit * runs + run;                                  // where its parts lie
    m_kv_head = unit % m_args.kv_heads;
    m_sequence = Sequence::at(m_args, unit / m_args.kv_heads);
    m_visible = Visibility::of(m_args, m_sequence);
    clear_parts();
    const std::int64_t last = first_tile(run + 1, runs);
    for (std::int64_t t = first_tile(run, runs); t < last; ++t) {
      m_block = t / m_args.tiles_of_block;
      const std::int64_t index = t % m_args.tiles_of_block;
      prefetch_tile(t + 1);
      switch (walk) {
        case SoftmaxWalk::output: output(index); break;
        case SoftmaxWalk::block_gradient: block_gradient(); break;
        case SoftmaxWalk::row_delta: row_delta(index); break;
        case SoftmaxWalk::row_sum: row_sum(index); break;
        case SoftmaxWalk::row_gradient: row_gradient(index); break;
        case SoftmaxWalk::key_gradient:
        case SoftmaxWalk::pair_gradient: key_gradient(index); break;
      }
    }
  }

 private:
  /// Rows of a tile, from a position in the sequence; queries stand at those from `first` on.
  struct Tile {
    std::int64_t begin;
    int rows;
    int first;
  };
  /// A factor with element stride 1.
  struct Factored {
    const A* data;
    std::int64_t ld;
  };

  /// Tile at which a run begins. Runs of one causal block have about the same number of pairs of tiles.
  KOKKOS_FUNCTION std::int64_t first_tile(std::int64_t run, std::int64_t runs) const {
    using std::sqrt;
    const std::int64_t tiles = m_args.tiles;
    if (!m_args.causal || tiles != m_args.tiles_of_block || m_walk == SoftmaxWalk::row_delta) return tiles * run / runs;
    const auto begin = [=](std::int64_t r) {
      return static_cast<std::int64_t>(static_cast<double>(tiles) * sqrt(static_cast<double>(r) / static_cast<double>(runs)));
    };
    return m_walk == SoftmaxWalk::key_gradient ? tiles - begin(runs - run) : begin(run);
  }

  // ---- the walks ------------------------------------------------------------------------------

  KOKKOS_FUNCTION void output(std::int64_t index) {
    const Tile queries = query_tile(index);
    if (queries.first >= queries.rows) return;
    const std::int64_t seen = key_tiles_seen(index);
    if (seen == 1) {
      load_keys(key_tile(0));
      load_values(key_tile(0), false);
    }
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_queries(queries, g);
      begin_rows(queries);
      for (std::int64_t u = 0; u < seen; ++u) {
        const Tile keys = key_tile(u);
        const bool diagonal = m_args.causal && u == index;
        if (seen > 1) {
          load_keys(keys);
          load_values(keys, false);
        }
        form_scores(queries, keys, diagonal);
        absorb_scores(queries, keys, diagonal);
        absorb_values(queries, keys, diagonal, u == 0);
      }
      write_output(queries, g, seen > 0);
    }
  }

  /// Gradients of a block that is one tile.
  KOKKOS_FUNCTION void block_gradient() {
    const Tile keys = key_tile(0);
    if (keys.rows == 0) return clear_query_gradients();
    const Tile queries = query_tile(0);
    const bool some = queries.first < queries.rows;
    if (some) {
      load_keys(keys);
      load_values(keys, true);
    }
    aim_key_gradients(keys);
    for (std::int64_t g = 0; some && g < m_args.group; ++g) {
      load_queries(queries, g);
      if (m_args.joined) load_dots(queries, g);
      load_cotangents(queries, g, m_args.joined);
      begin_rows(queries);
      form_scores(queries, keys, m_args.causal);
      absorb_scores(queries, keys, m_args.causal);
      divide_weights(queries, keys, m_args.causal);
      form_weight_cotangents(queries, keys, m_args.causal);
      find_deltas(queries, keys, m_args.causal);
      tell_linear_dots(queries, g);
      gather_block_parts(queries, keys, g, m_args.causal);
      form_score_cotangents(queries, keys, m_args.causal);
      add_query_gradients(queries, keys, g, m_args.causal, true);
      write_query_gradients(queries, g);
      add_key_gradients(queries, keys, m_args.causal, g == 0);
    }
    write_key_gradients(keys, some && m_args.group > 0);
  }

  /// delta = dO . o.
  KOKKOS_FUNCTION void row_delta(std::int64_t index) {
    const Tile queries = query_tile(index);
    if (queries.first >= queries.rows) return;
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_dots(queries, g);
      const A* dots = m_tiles.dots;
      for_each(m_team, queries.rows - queries.first,
               [&](int i) { *row_of(m_args.deltas, queries, g, queries.first + i) = dots[queries.first + i]; });
      m_team.barrier();
    }
  }

  /// L and delta of rows of several tiles, and all that is summed over rows.
  KOKKOS_FUNCTION void row_sum(std::int64_t index) {
    const Tile queries = query_tile(index);
    if (queries.first >= queries.rows) return;
    const std::int64_t seen = key_tiles_seen(index);
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_queries(queries, g);
      load_dots(queries, g);
      load_cotangents(queries, g, true);
      begin_rows(queries);
      for (std::int64_t u = 0; u < seen; ++u) {
        const Tile keys = key_tile(u);
        const bool diagonal = m_args.causal && u == index;
        load_keys(keys);
        load_values(keys, true);
        form_scores(queries, keys, diagonal);
        absorb_scores(queries, keys, diagonal);
        form_weight_cotangents(queries, keys, diagonal);
        absorb_deltas(queries, keys, diagonal);
        if (m_args.p_parts) absorb_values(queries, keys, diagonal, u == 0);
      }
      finish_rows(queries, g);
      tell_linear_dots(queries, g);
      if (m_args.p_parts) {
        divide_numerators(queries, seen > 0);
        add_columns(m_args.p_parts, queries, g);
      }
    }
  }

  KOKKOS_FUNCTION void row_gradient(std::int64_t index) {
    const Tile queries = query_tile(index);
    if (queries.first >= queries.rows) return;
    const std::int64_t seen = key_tiles_seen(index);
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      load_queries(queries, g);
      load_cotangents(queries, g);
      recall_rows(queries, g);
      for (std::int64_t u = 0; u < seen; ++u) {
        const Tile keys = key_tile(u);
        const bool diagonal = m_args.causal && u == index;
        load_keys(keys);
        load_values(keys, true);
        form_scores(queries, keys, diagonal);
        known_weights(queries, keys, diagonal);
        form_weight_cotangents(queries, keys, diagonal);
        form_score_cotangents(queries, keys, diagonal);
        add_query_gradients(queries, keys, g, diagonal, u == 0);
      }
      if (seen == 0) {
        m_queries_direct = false;
        clear(m_tiles.query_gradients, queries.rows, m_tiles.ldd);
      }
      write_query_gradients(queries, g);
    }
  }

  /// Gradients of keys and values; in pair_gradient what their tile adds to those of queries, too.
  KOKKOS_FUNCTION void key_gradient(std::int64_t index) {
    const Tile keys = key_tile(index);
    const bool pairs = m_walk == SoftmaxWalk::pair_gradient;
    if (keys.rows == 0) {
      if (pairs && index == 0) clear_query_gradients();
      return;
    }
    load_keys(keys);
    load_values(keys, true);
    aim_key_gradients(keys);
    bool begins = true;
    const std::int64_t first = m_args.causal ? index : 0, last = query_tiles();
    for (std::int64_t g = 0; g < m_args.group; ++g) {
      for (std::int64_t w = first; w < last; ++w) {
        const Tile queries = query_tile(w);
        if (queries.first >= queries.rows) continue;
        const bool diagonal = m_args.causal && w == index;
        load_queries(queries, g);
        load_cotangents(queries, g);
        recall_rows(queries, g);
        form_scores(queries, keys, diagonal);
        known_weights(queries, keys, diagonal);
        form_weight_cotangents(queries, keys, diagonal);
        form_score_cotangents(queries, keys, diagonal);
        if (pairs) {
          add_query_gradients(queries, keys, g, diagonal, true, index > 0);
          write_query_gradients(queries, g, index > 0);
        }
        add_key_gradients(queries, keys, diagonal, begins);
        begins = false;
      }
    }
    write_key_gradients(keys, !begins);
  }

  // ---- tiles and blocks -----------------------------------------------------------------------

  /// Query i stands at position i + offset().
  KOKKOS_FUNCTION std::int64_t offset() const { return m_args.causal ? m_sequence.nk - m_sequence.nq : 0; }
  KOKKOS_FUNCTION std::int64_t block_begin() const { return m_block * m_args.block; }
  KOKKOS_FUNCTION std::int64_t within_block(std::int64_t tokens) const {
    const std::int64_t left = tokens - block_begin();
    return left < 0 ? 0 : left < m_args.block ? left : m_args.block;
  }
  KOKKOS_FUNCTION std::int64_t tiles_of(std::int64_t tokens) const {
    return (tokens + m_args.plan.chunk - 1) / m_args.plan.chunk;
  }
  /// Positions of the block at which queries may stand.
  KOKKOS_FUNCTION std::int64_t query_positions() const {
    return within_block(m_args.causal ? m_sequence.nk : m_sequence.nq);
  }
  KOKKOS_FUNCTION std::int64_t query_tiles() const { return tiles_of(query_positions()); }
  KOKKOS_FUNCTION std::int64_t key_tiles_seen(std::int64_t index) const {
    return m_args.causal ? index + 1 : tiles_of(within_block(m_sequence.nk));
  }
  KOKKOS_FUNCTION Tile tile_at(std::int64_t index, std::int64_t positions) const {
    const std::int64_t begin = index * m_args.plan.chunk, left = positions - begin;
    const std::int64_t rows = left < 0 ? 0 : left < m_args.plan.chunk ? left : m_args.plan.chunk;
    return {block_begin() + begin, static_cast<int>(rows), 0};
  }
  KOKKOS_FUNCTION Tile key_tile(std::int64_t index) const { return tile_at(index, within_block(m_sequence.nk)); }
  KOKKOS_FUNCTION Tile query_tile(std::int64_t index) const {
    Tile tile = tile_at(index, query_positions());
    const std::int64_t first = offset() - tile.begin;
    tile.first = static_cast<int>(first < 0 ? 0 : first < tile.rows ? first : tile.rows);
    return tile;
  }

  KOKKOS_FUNCTION std::int64_t query_head(std::int64_t g) const { return m_kv_head * m_args.group + g; }
  /// Row of the tensors of q that the first row of a tile would be.
  KOKKOS_FUNCTION std::int64_t at_queries(Tile tile) const { return m_sequence.q_begin + tile.begin - offset(); }
  KOKKOS_FUNCTION std::int64_t at_keys(Tile tile) const { return m_sequence.k_begin + tile.begin; }
  /// Keys that a row of the tile sees: those before this row.
  KOKKOS_FUNCTION static int row_end(int row, Tile keys, bool diagonal) { return diagonal ? row + 1 : keys.rows; }

  // ---- rows of the caller ---------------------------------------------------------------------

  KOKKOS_FUNCTION bool in_place(const StoredTensor<A>& t, int rows, int columns) const {
    return Team::on_host && t.storage == Storage::native && t.element_stride == 1 && rows % tile_rows == 0 &&
           columns % tile_columns<A> == 0;
  }

  /// Rows where counts(row) as numbers in a tile, zeros elsewhere.
  template <class Counts>
  LINATTN_OUTLINE KOKKOS_FUNCTION void copy_rows(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows,
                                                 int columns, A* tile, int ld, const Counts& counts) {
    const std::int64_t batch = m_sequence.batch;
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      with_stride<Team>(t.element_stride, [&](auto element) {
        for_each_in_counted_rows(
            m_team, rows, columns, counts,
            [=](int r) {
              const S* from = t.template row<S>(batch, head, begin + r);
              A* to = tile + r * ld;
              return [=](int j) { to[j] = static_cast<A>(from[j * element]); };
            },
            [=](int r) { return [=](int j) { tile[r * ld + j] = A(0); }; });
      });
    });
    m_team.barrier();
  }

  /// The same where they lie, if they can stand in for a tile.
  template <class Counts>
  KOKKOS_FUNCTION Factored load_rows(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows,
                                     int columns, A* tile, int ld, bool all, const Counts& counts) {
    if (all && in_place(t, rows, columns))
      return {t.template row<A>(m_sequence.batch, head, begin), t.row_stride};
    copy_rows(t, head, begin, rows, columns, tile, ld, counts);
    return {tile, ld};
  }

  /// Rows of a tile from `first` on to the caller, zeros where not counts(row).
  template <class Counts>
  LINATTN_OUTLINE KOKKOS_FUNCTION void put(const A* tile, int ld, const StoredTensor<A>& t, std::int64_t head,
                                           std::int64_t begin, int first, int rows, int columns, const Counts& counts) {
    const std::int64_t batch = m_sequence.batch;
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      with_stride<Team>(t.element_stride, [&](auto element) {
        for_each_in_counted_rows(
            m_team, rows - first, columns, [=](int r) { return counts(first + r); },
            [=](int r) {
              const A* from = tile + (first + r) * ld;
              S* to = t.template row<S>(batch, head, begin + first + r);
              return [=](int j) { to[j * element] = static_cast<S>(from[j]); };
            },
            [=](int r) {
              S* to = t.template row<S>(batch, head, begin + first + r);
              return [=](int j) { to[j * element] = static_cast<S>(A(0)); };
            });
      });
    });
    m_team.barrier();
  }

  /// Rows of a tile from `first` on, added to those of the caller, which are stored in the type of the sums.
  LINATTN_OUTLINE KOKKOS_FUNCTION void add_to_rows(const A* tile, int ld, const StoredTensor<A>& t, std::int64_t head,
                                                   std::int64_t begin, int first, int rows, int columns) {
    const std::int64_t batch = m_sequence.batch;
    with_stride<Team>(t.element_stride, [&](auto element) {
      for_each_in_rows(m_team, rows - first, columns, [=](int r) {
        const A* from = tile + (first + r) * ld;
        A* to = t.template row<A>(batch, head, begin + first + r);
        return [=](int j) { to[j * element] += from[j]; };
      });
    });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void clear(A* tile, int rows, int ld) {
    for_each_in_rows(m_team, rows, ld, [=](int r) { return [=](int j) { tile[r * ld + j] = A(0); }; });
    m_team.barrier();
  }

  /// Has the rows of a tile asked for while the products of the one before are formed.
  KOKKOS_FUNCTION void prefetch_tile(std::int64_t t) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    if constexpr (Team::on_host) {
      m_team.ahead.clear();
      m_team.lines_at_once = 0;
      if (t >= m_args.tiles || m_args.tiles_of_block > 1) return;  // longer blocks meet the same keys again
      const std::int64_t block = m_block;
      m_block = t;
      const Tile keys = key_tile(0), queries = query_tile(0);
      m_block = block;
      if (keys.rows == 0) return;
      const bool backward = m_walk != SoftmaxWalk::output;
      prefetch_rows(m_args.k, m_kv_head, at_keys(keys), keys.rows, m_args.d, false);
      prefetch_rows(m_args.v, m_kv_head, at_keys(keys), keys.rows, m_args.dv, false);
      const std::int64_t at = at_queries(queries) + queries.first;
      const int rows = queries.rows - queries.first;
      prefetch_rows(m_args.q, query_head(0), at, rows, m_args.d, false);
      prefetch_rows(m_args.o, query_head(0), at, rows, m_args.dv, !backward);
      if (backward) {
        prefetch_rows(m_args.d_o, query_head(0), at, rows, m_args.dv, false);
        prefetch_rows(m_args.d_q, query_head(0), at, rows, m_args.d, true);
        prefetch_rows(m_args.d_k, m_kv_head, at_keys(keys), keys.rows, m_args.d, true);
        prefetch_rows(m_args.d_v, m_kv_head, at_keys(keys), keys.rows, m_args.dv, true);
      }
      const auto tiles = [](int rows, int columns) {
        constexpr int width = 2 * vector_lanes<A>;
        return (rows + register_rows - 1) / register_rows * ((columns + width - 1) / width);
      };
      const int c = m_args.plan.chunk;
      const int all = backward ? 2 * tiles(c, c) + 3 * tiles(c, m_args.d) : tiles(c, c) + tiles(c, m_args.dv);
      m_team.lines_at_once = all > 0 ? m_team.ahead.lines() / all + 1 : 0;
    }
#endif
    (void)t;
  }

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  void prefetch_rows(const StoredTensor<A>& t, std::int64_t head, std::int64_t begin, int rows, int columns,
                     bool to_write) const {
    if (!t || t.element_stride != 1 || rows <= 0) return;
    const int size = t.element_bytes();
    m_team.ahead.add(static_cast<const char*>(t.data) +
                         (m_sequence.batch * t.batch_stride + head * t.head_stride + begin * t.row_stride) * size,
                     t.row_stride * size, rows, columns * size, to_write);
  }
#endif

  KOKKOS_FUNCTION void load_queries(Tile tile, std::int64_t g) {
    const int first = tile.first;
    m_queries = load_rows(m_args.q, query_head(g), at_queries(tile), tile.rows, m_args.d, m_tiles.queries, m_tiles.ldd,
                          first == 0, [=](int r) { return r >= first; });
  }

  KOKKOS_FUNCTION void load_keys(Tile tile) {
    const Visibility visible = m_visible;
    const auto seen = [=](int r) { return visible(tile.begin + r); };
    A* hidden = m_tiles.hidden;
    m_all_visible = true;
    if (!visible.everything())
      for (int r = 0; r < tile.rows; ++r) m_all_visible = m_all_visible && seen(r);
    for_each(m_team, tile.rows, [=](int r) { hidden[r] = seen(r) ? A(0) : minus_infinity<A>(); });
    m_keys = load_rows(m_args.k, m_kv_head, at_keys(tile), tile.rows, m_args.d, m_tiles.keys, m_tiles.ldd, m_all_visible,
                       seen);
    transpose(m_team, tile.rows, m_args.d, m_keys.data, m_keys.ld, m_tiles.keys_t, m_tiles.ldc);
    m_team.barrier();
  }

  KOKKOS_FUNCTION void load_values(Tile tile, bool transposed) {
    const Visibility visible = m_visible;
    m_values = load_rows(m_args.v, m_kv_head, at_keys(tile), tile.rows, m_args.dv, m_tiles.values, m_tiles.ldv,
                         m_all_visible, [=](int r) { return visible(tile.begin + r); });
    if (!transposed) return;
    transpose(m_team, tile.rows, m_args.dv, m_values.data, m_values.ld, m_tiles.values_t, m_tiles.ldc);
    m_team.barrier();
  }

  /// g = p dO. `loaded`: load_dots() has left dO in the tile.
  KOKKOS_FUNCTION void load_cotangents(Tile tile, std::int64_t g, bool loaded = false) {
    const int first = tile.first;
    const std::int64_t head = query_head(g), begin = at_queries(tile);
    const auto counts = [=](int r) { return r >= first; };
    if (!m_args.joined) {
      m_cotangents = load_rows(m_args.d_o, head, begin, tile.rows, m_args.dv, m_tiles.cotangents, m_tiles.ldv, first == 0,
                               counts);
      return;
    }
    if (!loaded) copy_rows(m_args.d_o, head, begin, tile.rows, m_args.dv, m_tiles.cotangents, m_tiles.ldv, counts);
    multiply_columns(m_tiles.cotangents, tile.rows, block_factors(head));
    m_cotangents = {m_tiles.cotangents, m_tiles.ldv};
  }

  /// dO . o, or dO . (r o_linear) where that is kept. Overwrites `out` and the tile of cotangents.
  KOKKOS_FUNCTION void load_dots(Tile tile, std::int64_t g) {
    const int first = tile.first, ld = m_tiles.ldv;
    const std::int64_t head = query_head(g), begin = at_queries(tile);
    const auto counts = [=](int r) { return r >= first; };
    const bool kept = bool(m_args.linear);
    A *cotangents = m_tiles.cotangents, *out = m_tiles.out, *dots = m_tiles.dots;
    copy_rows(m_args.d_o, head, begin, tile.rows, m_args.dv, cotangents, ld, counts);
    copy_rows(kept ? m_args.linear : m_args.o, head, begin, tile.rows, m_args.dv, out, ld, counts);
    if (m_args.r_parts) add_columns(m_args.r_parts, tile, g);
    if (kept) multiply_columns(out, tile.rows, linear_factors(head));
    const int dv = m_args.dv;
    for_each(m_team, tile.rows - first, [=](int r) {
      dots[first + r] = dot_of_row<Team>(cotangents + (first + r) * ld, out + (first + r) * ld, dv);
    });
    m_team.barrier();
  }

  // ---- how the branches join --------------------------------------------------------------------

  /// The factors of one head, of which those of a ratio are told by the other branch.
  struct Factors {
    ColumnFactors::Row row;
    bool complement;
    KOKKOS_FORCEINLINE_FUNCTION A operator()(int j) const {
      const double x = row[j];
      return static_cast<A>(complement ? 1 - x : x);
    }
    KOKKOS_FUNCTION bool uniform() const { return !row.data; }
  };
  KOKKOS_FUNCTION Factors linear_factors(std::int64_t head) const {
    if (m_args.combine == Combine::average) return {{nullptr, 0, 0.5}, false};
    return {m_args.r.row(head), false};
  }
  KOKKOS_FUNCTION Factors block_factors(std::int64_t head) const {
    if (m_args.combine == Combine::average) return {{nullptr, 0, 0.5}, false};
    return m_args.combine == Combine::ratio ? Factors{m_args.r.row(head), true} : Factors{m_args.p.row(head), false};
  }

  KOKKOS_FUNCTION void multiply_columns(A* tile, int rows, const Factors& factors) {
    const int ld = m_tiles.ldv;
    if (factors.uniform()) {
      const A factor = factors(0);
      for_each_in_rows(m_team, rows, m_args.dv, [=](int r) {
        A* x = tile + r * ld;
        return [=](int j) { x[j] *= factor; };
      });
    } else {
      for_each_in_rows(m_team, rows, m_args.dv, [=](int r) {
        A* x = tile + r * ld;
        return [=](int j) { x[j] *= factors(j); };
      });
    }
    m_team.barrier();
  }

  /// o = n / l, and L.
  KOKKOS_FUNCTION void write_alone(Tile tile, std::int64_t g) {
    const std::int64_t batch = m_sequence.batch, head = query_head(g), begin = at_queries(tile);
    const int ld = m_tiles.ldv, first = tile.first;
    const A *out = m_tiles.out, *sums = m_tiles.sums;
    const StoredTensor<A> o = m_args.o;
    with_storage<A>(o.storage, [&]<class S>(std::type_identity<S>) {
      with_stride<Team>(o.element_stride, [&](auto element) {
        for_each_in_rows(m_team, tile.rows - first, m_args.dv, [=](int r) {
          const A* x = out + (first + r) * ld;
          S* to = o.template row<S>(batch, head, begin + first + r);
          const A share = reciprocal(sums[first + r]);
          return [=](int j) { to[j * element] = static_cast<S>(share * x[j]); };
        });
      });
    });
    if (m_args.logsums)
      for_each(m_team, tile.rows - first, [&](int i) { *row_of(m_args.logsums, tile, g, first + i) = logsum(first + i); });
    m_team.barrier();
  }

  /// Alone as above; joined o = r o + p n / l, where no key was seen o = r o, and o_linear is handed on if it is wanted.
  KOKKOS_FUNCTION void write_output(Tile tile, std::int64_t g, bool some) {
    if (!some) clear(m_tiles.out, tile.rows, m_tiles.ldv);
    if (!m_args.joined) return write_alone(tile, g);
    const std::int64_t head = query_head(g), begin = at_queries(tile);
    const Factors linear = linear_factors(head), block = block_factors(head);
    if (linear.uniform() && block.uniform())
      join(tile, head, begin, [a = linear(0), b = block(0)](int) { return JoinFactors{a, b}; });
    else
      join(tile, head, begin, [=](int j) { return JoinFactors{linear(j), block(j)}; });
  }
  struct JoinFactors {
    A linear, block;
  };
  template <class At>
  LINATTN_OUTLINE KOKKOS_FUNCTION void join(Tile tile, std::int64_t head, std::int64_t begin, const At& at) {
    const std::int64_t batch = m_sequence.batch;
    const int ld = m_tiles.ldv, first = tile.first;
    const A *out = m_tiles.out, *sums = m_tiles.sums;
    const StoredTensor<A> o = m_args.o, kept = m_args.linear;
    with_storage<A>(o.storage, [&]<class S>(std::type_identity<S>) {
      if (kept) {
        for_each_in_rows(m_team, tile.rows - first, m_args.dv, [=](int r) {
          const S* from = o.template row<S>(batch, head, begin + first + r);
          S* to = kept.template row<S>(batch, head, begin + first + r);
          return [=](int j) { to[j * kept.element_stride] = from[j * o.element_stride]; };
        });
        m_team.barrier();
      }
      with_stride<Team>(o.element_stride, [&](auto element) {
        for_each_in_rows(m_team, tile.rows - first, m_args.dv, [=](int r) {
          const A* x = out + (first + r) * ld;
          S* to = o.template row<S>(batch, head, begin + first + r);
          const A share = reciprocal(sums[first + r]);
          return [=](int j) {
            const JoinFactors f = at(j);
            to[j * element] =
                static_cast<S>(fused_multiply_add(f.linear, static_cast<A>(to[j * element]), f.block * (share * x[j])));
          };
        });
      });
    });
    m_team.barrier();
  }

  // ---- scores and weights -----------------------------------------------------------------------

  KOKKOS_FUNCTION void begin_rows(Tile tile) {
    A *maxima = m_tiles.maxima, *sums = m_tiles.sums, *sums_low = m_tiles.sums_low, *deltas = m_tiles.deltas;
    for_each(m_team, tile.rows, [=](int r) {
      maxima[r] = minus_infinity<A>();
      sums[r] = A(0);
      if (sums_low) sums_low[r] = A(0);
      if (deltas) deltas[r] = A(0);
    });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void form_scores(Tile queries, Tile keys, bool diagonal) {
    multiply(m_team, queries.rows, keys.rows,
             Product<A>{{m_queries.data, m_queries.ld, 1}, m_tiles.keys_t, m_tiles.ldc, m_args.d},
             Target<A>{.c = m_tiles.weights, .ldc = m_tiles.ldc, .lower_only = diagonal});
    m_team.barrier();
  }

  /// Weights relative to the largest score so far, and their sums.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void absorb_scores(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    const A scale = m_args.scale;
    const A* hidden = m_tiles.hidden;
    A *weights = m_tiles.weights, *maxima = m_tiles.maxima, *corrections = m_tiles.corrections;
    A *sums = m_tiles.sums, *sums_low = m_tiles.sums_low;
    for_each(m_team, queries.rows - first, [=](int i) {
      const int r = first + i;
      const SoftmaxRow<A> row =
          exponentials_of_row<Team>(weights + r * ld, row_end(r, keys, diagonal), hidden, scale, maxima[r]);
      maxima[r] = row.maximum;
      corrections[r] = row.correction;
      sums[r] *= row.correction;
      if (sums_low) {
        sums_low[r] *= row.correction;
        compensated_add(sums[r], sums_low[r], row.sum);
      } else {
        sums[r] += row.sum;
      }
    });
    m_team.barrier();
  }

  /// Numerators n += P V, what is there brought to the new maximum first.
  KOKKOS_FUNCTION void absorb_values(Tile queries, Tile keys, bool diagonal, bool begins) {
    A *const parts[2] = {m_tiles.out, m_tiles.out_low};
    const int ld = m_tiles.ldv;
    const A* corrections = m_tiles.corrections;
    for (int part = 0; !begins && part < (parts[1] ? 2 : 1); ++part) {
      A* out = parts[part];
      for_each_in_counted_rows(
          m_team, queries.rows, m_args.dv, [=](int r) { return corrections[r] != A(1); },
          [=](int r) {
            A* row = out + r * ld;
            const A factor = corrections[r];
            return [=](int j) { row[j] *= factor; };
          },
          [](int) { return [](int) {}; });
      m_team.barrier();
    }
    if (begins && parts[1]) clear(parts[1], queries.rows, ld);
    multiply(m_team, queries.rows, m_args.dv,
             Product<A>{{m_tiles.weights, m_tiles.ldc, 1}, m_values.data, m_values.ld, keys.rows,
                        diagonal ? Band::lower : Band::all},
             Target<A>{.c = parts[0],
                       .ldc = ld,
                       .store = begins ? Store::overwrite : parts[1] ? Store::compensated : Store::add,
                       .low = parts[1]});
    m_team.barrier();
  }

  KOKKOS_FUNCTION void divide_numerators(Tile tile, bool some) {
    A* out = m_tiles.out;
    const int ld = m_tiles.ldv;
    const A* sums = m_tiles.sums;
    for_each_in_counted_rows(
        m_team, tile.rows, m_args.dv, [=](int r) { return some && sums[r] != A(0); },
        [=](int r) {
          A* row = out + r * ld;
          const A factor = A(1) / sums[r];
          return [=](int j) { row[j] *= factor; };
        },
        [=](int r) { return [=](int j) { out[r * ld + j] = A(0); }; });
    m_team.barrier();
  }

  /// What a row divides by, as a factor.
  KOKKOS_FORCEINLINE_FUNCTION static A reciprocal(A sum) { return sum == A(0) ? A(0) : A(1) / sum; }

  /// P in place of exponentials; zero above the diagonal and in rows without a query.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void divide_weights(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    A* weights = m_tiles.weights;
    const A* sums = m_tiles.sums;
    for_each(m_team, queries.rows, [=](int r) {
      A* row = weights + r * ld;
      const int end = r < first ? 0 : row_end(r, keys, diagonal);
      const A factor = r < first ? A(0) : reciprocal(sums[r]);
      for_padded_row<Team, A>(keys.rows, [=](int j) { row[j] = j < end ? row[j] * factor : A(0); });
    });
    m_team.barrier();
  }

  /// P from scores, for rows whose L is known.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void known_weights(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    const A scale = m_args.scale;
    const A* hidden = m_tiles.hidden;
    A* weights = m_tiles.weights;
    const A* logsums = m_tiles.logsums;
    for_each(m_team, queries.rows, [=](int r) {
      A* row = weights + r * ld;
      const bool sees = r >= first && logsums[r] != minus_infinity<A>();
      const int end = sees ? row_end(r, keys, diagonal) : 0;
      const A logsum = sees ? logsums[r] : A(0);
      for_padded_row<Team, A>(keys.rows, [=](int j) {
        const A x = fused_multiply_add(row[j] + hidden[j], scale, -logsum);  // above 0 by the rounding of L
        row[j] = j < end ? exp_nonpositive(x > A(0) ? A(0) : x) : A(0);
      });
    });
    m_team.barrier();
  }

  /// dP = g V^T.
  KOKKOS_FUNCTION void form_weight_cotangents(Tile queries, Tile keys, bool diagonal) {
    multiply(m_team, queries.rows, keys.rows,
             Product<A>{{m_cotangents.data, m_cotangents.ld, 1}, m_tiles.values_t, m_tiles.ldc, m_args.dv},
             Target<A>{.c = m_tiles.cotangents_of_weights, .ldc = m_tiles.ldc, .lower_only = diagonal});
    m_team.barrier();
  }

  /// delta = sum_j P dP of a row that is one tile.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void find_deltas(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    const A *weights = m_tiles.weights, *cotangents = m_tiles.cotangents_of_weights;
    A* deltas = m_tiles.deltas;
    for_each(m_team, queries.rows - first, [=](int i) {
      const int r = first + i;
      deltas[r] = dot_of_row<Team>(weights + r * ld, cotangents + r * ld, row_end(r, keys, diagonal));
    });
    m_team.barrier();
  }

  /// The same sum relative to the largest score so far.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void absorb_deltas(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    const A *weights = m_tiles.weights, *cotangents = m_tiles.cotangents_of_weights, *corrections = m_tiles.corrections;
    A* deltas = m_tiles.deltas;
    for_each(m_team, queries.rows - first, [=](int i) {
      const int r = first + i;
      deltas[r] = deltas[r] * corrections[r] +
                  dot_of_row<Team>(weights + r * ld, cotangents + r * ld, row_end(r, keys, diagonal));
    });
    m_team.barrier();
  }

  /// L of a row whose sum is complete.
  KOKKOS_FUNCTION A logsum(int row) const {
    using std::log;
    const A m = m_tiles.maxima[row], l = m_tiles.sums[row];
    return m == minus_infinity<A>() && l == A(0) ? m : fused_multiply_add(m, m_args.scale, log(l));  // a NaN stays one
  }
  /// One number of each row of q.
  KOKKOS_FUNCTION A* row_of(const RowTensor<A>& t, Tile tile, std::int64_t g, int row) const {
    return t.row(m_sequence.batch, query_head(g), at_queries(tile) + row);
  }

  /// L and delta of finished rows, for the walks to come.
  KOKKOS_FUNCTION void finish_rows(Tile tile, std::int64_t g) {
    const int first = tile.first;
    for_each(m_team, tile.rows - first, [&](int i) {
      const int r = first + i;
      m_tiles.deltas[r] *= reciprocal(m_tiles.sums[r]);
      *row_of(m_args.logsums, tile, g, r) = logsum(r);
      *row_of(m_args.deltas, tile, g, r) = m_tiles.deltas[r];
    });
    m_team.barrier();
  }
  KOKKOS_FUNCTION void recall_rows(Tile tile, std::int64_t g) {
    const int first = tile.first;
    for_each(m_team, tile.rows - first, [&](int i) {
      const int r = first + i;
      m_tiles.logsums[r] = *row_of(m_args.logsums, tile, g, r);
      m_tiles.deltas[r] = *row_of(m_args.deltas, tile, g, r);
    });
    m_team.barrier();
  }

  /// dx = scale P (dP - delta), zero where nothing counts.
  LINATTN_OUTLINE LINATTN_FLATTEN KOKKOS_FUNCTION void form_score_cotangents(Tile queries, Tile keys, bool diagonal) {
    const int ld = m_tiles.ldc, first = queries.first;
    const A scale = m_args.scale;
    const A *weights = m_tiles.weights, *deltas = m_tiles.deltas;
    A* cotangents = m_tiles.cotangents_of_weights;
    for_each(m_team, queries.rows, [=](int r) {
      const A* p = weights + r * ld;
      A* row = cotangents + r * ld;
      const int end = r < first ? 0 : row_end(r, keys, diagonal);
      const A delta = r < first ? A(0) : deltas[r];
      for_padded_row<Team, A>(keys.rows, [=](int j) { row[j] = j < end ? p[j] * (row[j] - delta) * scale : A(0); });
    });
    m_team.barrier();
  }

  // ---- gradients to the caller ------------------------------------------------------------------

  KOKKOS_FUNCTION void aim_query_gradients(Tile tile, std::int64_t g) {
    m_queries_direct = tile.first == 0 && in_place(m_args.d_q, tile.rows, m_args.d);
    m_query_target = {.c = m_tiles.query_gradients, .ldc = m_tiles.ldd};
    if (m_queries_direct)
      m_query_target = {.c = m_args.d_q.template row<A>(m_sequence.batch, query_head(g), at_queries(tile)),
                        .ldc = m_args.d_q.row_stride};
  }

  /// dq += dx K. `begins`: these are the first keys of this walk; `adds`: to what the caller's memory holds.
  KOKKOS_FUNCTION void add_query_gradients(Tile queries, Tile keys, std::int64_t g, bool diagonal, bool begins,
                                           bool adds = false) {
    if (!m_args.d_q) return;
    if (begins) aim_query_gradients(queries, g);
    m_query_target.store = begins && !(adds && m_queries_direct) ? Store::overwrite : Store::add;
    multiply(m_team, queries.rows, m_args.d,
             Product<A>{{m_tiles.cotangents_of_weights, m_tiles.ldc, 1}, m_keys.data, m_keys.ld, keys.rows,
                        diagonal ? Band::lower : Band::all},
             m_query_target);
    m_team.barrier();
  }
  KOKKOS_FUNCTION void write_query_gradients(Tile tile, std::int64_t g, bool adds = false) {
    if (!m_args.d_q || m_queries_direct) return;
    if (adds) return add_to_rows(m_tiles.query_gradients, m_tiles.ldd, m_args.d_q, query_head(g), at_queries(tile),
                                 tile.first, tile.rows, m_args.d);
    put(m_tiles.query_gradients, m_tiles.ldd, m_args.d_q, query_head(g), at_queries(tile), tile.first, tile.rows, m_args.d,
        [](int) { return true; });
  }
  /// Gradient 0 of the queries of a block without keys.
  KOKKOS_FUNCTION void clear_query_gradients() {
    if (!m_args.d_q) return;
    clear(m_tiles.query_gradients, m_args.plan.chunk, m_tiles.ldd);
    m_queries_direct = false;
    for (std::int64_t g = 0; g < m_args.group; ++g)
      for (std::int64_t w = 0; w < query_tiles(); ++w) write_query_gradients(query_tile(w), g);
  }

  KOKKOS_FUNCTION void aim_key_gradients(Tile keys) {
    m_key_target = {.c = m_tiles.key_gradients, .ldc = m_tiles.ldd};
    m_value_target = {.c = m_tiles.value_gradients, .ldc = m_tiles.ldv};
    const bool one = m_args.group == 1 && m_all_visible && m_walk == SoftmaxWalk::block_gradient;
    m_keys_direct = one && m_args.d_k && in_place(m_args.d_k, keys.rows, m_args.d);
    m_values_direct = one && m_args.d_v && in_place(m_args.d_v, keys.rows, m_args.dv);
    if (m_keys_direct)
      m_key_target = {.c = m_args.d_k.template row<A>(m_sequence.batch, m_kv_head, at_keys(keys)),
                      .ldc = m_args.d_k.row_stride};
    if (m_values_direct)
      m_value_target = {.c = m_args.d_v.template row<A>(m_sequence.batch, m_kv_head, at_keys(keys)),
                        .ldc = m_args.d_v.row_stride};
  }

  /// dk += dx^T Q, dv += P^T g.
  KOKKOS_FUNCTION void add_key_gradients(Tile queries, Tile keys, bool diagonal, bool begins) {
    m_key_target.store = m_value_target.store = begins ? Store::overwrite : Store::add;
    const Band band = diagonal ? Band::upper : Band::all;
    if (m_args.d_k)
      multiply(m_team, keys.rows, m_args.d,
               Product<A>{{m_tiles.cotangents_of_weights, 1, m_tiles.ldc}, m_queries.data, m_queries.ld, queries.rows, band},
               m_key_target);
    if (m_args.d_v)
      multiply(m_team, keys.rows, m_args.dv,
               Product<A>{{m_tiles.weights, 1, m_tiles.ldc}, m_cotangents.data, m_cotangents.ld, queries.rows, band},
               m_value_target);
    m_team.barrier();
  }

  KOKKOS_FUNCTION void write_key_gradients(Tile keys, bool some) {
    const Visibility visible = m_visible;
    const auto counts = [=](int r) { return some && visible(keys.begin + r); };
    if (m_args.d_k && !(m_keys_direct && some))
      put(m_tiles.key_gradients, m_tiles.ldd, m_args.d_k, m_kv_head, at_keys(keys), 0, keys.rows, m_args.d, counts);
    if (m_args.d_v && !(m_values_direct && some))
      put(m_tiles.value_gradients, m_tiles.ldv, m_args.d_v, m_kv_head, at_keys(keys), 0, keys.rows, m_args.dv, counts);
  }

  // ---- what the other branch and the factors are told ---------------------------------------------

  /// dO . (r o_linear) to the workspace.
  KOKKOS_FUNCTION void tell_linear_dots(Tile tile, std::int64_t g) {
    if (!m_args.linear_dots) return;
    const int first = tile.first;
    const bool kept = bool(m_args.linear);
    for_each(m_team, tile.rows - first, [&](int i) {
      const int r = first + i;
      *m_args.linear_dots.row(m_sequence.batch, query_head(g), at_queries(tile) + r) =
          kept ? m_tiles.dots[r] : m_tiles.dots[r] - m_tiles.deltas[r];
    });
    m_team.barrier();
  }

  /// The part of dp of one tile, for a block that is one tile. Overwrites `out`.
  KOKKOS_FUNCTION void gather_block_parts(Tile queries, Tile keys, std::int64_t g, bool diagonal) {
    if (!m_args.p_parts) return;
    absorb_values(queries, keys, diagonal, true);
    add_columns(m_args.p_parts, queries, g);
  }

  /// part_j += sum over rows of dO_ij out_ij. dO is read again: its tile may hold g.
  KOKKOS_FUNCTION void add_columns(double* parts, Tile tile, std::int64_t g) {
    const std::int64_t batch = m_sequence.batch, head = query_head(g), begin = at_queries(tile);
    double* part = parts + (m_task * m_args.group + g) * m_args.dv;
    const A* out = m_tiles.out;
    const int ld = m_tiles.ldv;
    const StoredTensor<A> d_o = m_args.d_o;
    with_storage<A>(d_o.storage, [&]<class S>(std::type_identity<S>) {
      for_each(m_team, m_args.dv, [=](int j) {
        double total = 0;
        for (int r = tile.first; r < tile.rows; ++r)
          total += static_cast<double>(
                       static_cast<A>(d_o.template row<S>(batch, head, begin + r)[j * d_o.element_stride])) *
                   static_cast<double>(out[r * ld + j]);
        part[j] += total;
      });
    });
    m_team.barrier();
  }

  KOKKOS_FUNCTION void clear_parts() {
    if (m_walk != SoftmaxWalk::block_gradient && m_walk != SoftmaxWalk::row_sum) return;
    clear_parts(m_args.r_parts);
    clear_parts(m_args.p_parts);
    m_team.barrier();
  }
  KOKKOS_FUNCTION void clear_parts(double* parts) {
    if (!parts) return;
    double* part = parts + m_task * m_args.group * m_args.dv;
    for_each(m_team, static_cast<int>(m_args.group) * m_args.dv, [=](int j) { part[j] = 0; });
  }

  const Team& m_team;
  const Args& m_args;
  const SoftmaxTiles<A>& m_tiles;
  SoftmaxWalk m_walk{};
  std::int64_t m_task = 0, m_block = 0, m_kv_head = 0;
  Sequence m_sequence{};
  Visibility m_visible{};
  Factored m_queries{}, m_keys{}, m_values{}, m_cotangents{};  // of the tiles at hand
  Target<A> m_query_target{}, m_key_target{}, m_value_target{};
  bool m_all_visible = true, m_queries_direct = false, m_keys_direct = false, m_values_direct = false;
};

}  // namespace LinAttn::detail
