// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/analysis/row_record.hpp>
#include <linattn/engine/arguments.hpp>
#include <linattn/engine/row_norm.hpp>
#include <linattn/state.hpp>
#include <linattn/tile.hpp>
#include <linattn/variant.hpp>
#include <type_traits>

/// \file diagnose_kernels.hpp
/// Kernels of the instruments.
///
/// Rows of an attention matrix are looked at in tiles of scores, in double: once for the sums of a RowRecord, and again
/// where column sums or the matrix itself are wanted. What kernel attention gives away without its scores comes from
/// two walks over the tokens, whose products are those of the engine:
///
///     keys:     z = sum_j K_j     G = sum_j K_j K_j^T
///     queries:  s_i = Q_i . z     M = sum_i K_i (Q_i / s_i)^T     u = sum_i Q_i / s_i     sum_i Q_i^T G Q_i / s_i^2
///
/// Sequences are cut into segments that do not depend on the number of threads; tiles are added up in double.

namespace LinAttn::detail {

/// Where rows of q and k are, and what becomes of them. T is the type in which they are stored.
template <class T_, class QueryMap_, class KeyMap_>
struct FeatureSource {
  using T = T_;
  using QueryMap = QueryMap_;
  using KeyMap = KeyMap_;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;

  QueryMap query_map{};
  KeyMap key_map{};
  RowTensor<const T> q{}, k{};
  const std::uint8_t* key_mask = nullptr;
  std::int64_t mask_batch_stride = 0, mask_stride = 0;
  std::int64_t batch = 0, heads = 0, kv_heads = 0, group = 0, nq = 0, nk = 0;
  int d = 0;
  int mapped = 0;    // features of the maps
  int features = 0;  // with that of the constant, which is 1 for a key
  bool causal = false;
  double query_scale = 1;  // of scores that are no features: exact softmax
  Parameter constant = 0.0;
  const int* shift = nullptr;                                     // (batch, kv head, features)
  const double *largest_query = nullptr, *largest_key = nullptr;  // norms, for maps that divide by them

  KOKKOS_FORCEINLINE_FUNCTION bool is_visible(std::int64_t b, std::int64_t key) const {
    return !key_mask || key_mask[b * mask_batch_stride + key * mask_stride] != 0;
  }
  /// Keys before this one may be seen by a query.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t key_end(std::int64_t query) const {
    return causal ? query + nk - nq + 1 : nk;
  }
};

/// Tiles of features for one worker: rows as they are stored, as numbers, and their features.
template <class C>
struct FeatureTile {
  C* raw = nullptr;
  C* features = nullptr;
  int* row_shift = nullptr;
  int ld_raw = 0, ld = 0;

  FeatureTile() = default;
  KOKKOS_FUNCTION FeatureTile(ArenaCursor& arena, int rows, int d, int features_)
      : ld_raw(padded_columns<C>(d)), ld(padded_columns<C>(features_)) {
    raw = arena.take<C>(std::int64_t(padded_rows(rows)) * ld_raw);
    features = arena.take<C>(std::int64_t(padded_rows(rows)) * ld);
    row_shift = arena.take<int>(padded_rows(rows));
  }
};

/// Rows of a tensor as numbers; those without a position are 0 and not read.
template <class C, class Team, class T, class PositionOf>
KOKKOS_FUNCTION void load_rows(const Team& team, const RowTensor<const T>& x, std::int64_t b, std::int64_t head,
                               int rows, int d, const PositionOf& position_of, C* to, int ld) {
  const auto counts = [&](int row) { return position_of(row) >= 0; };
  with_stride<Team>(x.element_stride, [&](auto element) {
    for_each_in_counted_rows(
        team, rows, d, counts,
        [&](int row) {
          const T* from = x.row(b, head, position_of(row));
          C* out = to + std::int64_t(row) * ld;
          return [=](int j) { out[j] = static_cast<C>(static_cast<accumulator_t<T>>(from[j * element])); };
        },
        [&](int row) {
          C* out = to + std::int64_t(row) * ld;
          return [=](int j) { out[j] = C(0); };
        });
  });
  team.barrier();
}

/// Features of the rows of a tile whose numbers are loaded. `shift_of(row, feature)` matters to scaled maps.
template <class Map, class C, class Team, class Bound, class Counts, class ShiftOf>
KOKKOS_FUNCTION void map_rows(const Team& team, const Bound& map, int rows, int d, int features, const Counts& counts,
                              const ShiftOf& shift_of, C norm, const FeatureTile<C>& tile) {
  const FeatureTile<C> t = tile;
  const auto zero = [=](int row) {
    C* f = t.features + std::int64_t(row) * t.ld;
    return [=](int j) { f[j] = C(0); };
  };
  if constexpr (RowFeatureMap<Map>) {
    for_each(team, rows, [&](int row) {
      C* f = t.features + std::int64_t(row) * t.ld;
      if (counts(row))
        return map.row_value(ConstRow<C>{t.raw + std::int64_t(row) * t.ld_raw, d, 1}, Row<C>{f, features, 1});
      for (int j = 0; j < features; ++j) f[j] = C(0);
    });
  } else if constexpr (RowNormFeatureMap<Map>) {
    const C rate = map.rate, eps = map.eps;
    const bool per_row = map.per_row;
    for_each_in_counted_rows(
        team, rows, features, counts,
        [=](int row) {
          const C* x = t.raw + std::int64_t(row) * t.ld_raw;
          C* f = t.features + std::int64_t(row) * t.ld;
          const C factor = rate * inverse_norm(per_row ? row_norm<Team>(x, d, eps) : norm);
          return [=](int j) { f[j] = x[j] * factor; };
        },
        zero);
  } else {
    for_each_in_counted_rows(
        team, rows, features, counts,
        [=](int row) {
          const C* x = t.raw + std::int64_t(row) * t.ld_raw;
          C* f = t.features + std::int64_t(row) * t.ld;
          const auto shift = shift_of(row);
          return [=](int j) {
            if constexpr (ScaledFeatureMap<Map>)
              f[j] = map.value(x[j], shift(j));
            else
              f[j] = map.value(x[j]);
          };
        },
        zero);
  }
  team.barrier();
}

/// Has rows of a tensor asked for while the products of those before are formed, whose register tiles are `tiles`.
/// begin_prefetch() forgets earlier wishes.
template <class Team>
KOKKOS_FUNCTION void begin_prefetch(const Team& team) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) team.ahead.clear();
#endif
  (void)team;
}
template <class Team, class T>
KOKKOS_FUNCTION void prefetch_rows(const Team& team, const RowTensor<const T>& x, std::int64_t b, std::int64_t head,
                                   std::int64_t first, std::int64_t end, int most, int d, int tiles) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) {
    if (x.element_stride != 1 || first >= end) return;
    constexpr int size = static_cast<int>(sizeof(T));
    team.ahead.add(x.row(b, head, first), x.row_stride * size,
                   static_cast<int>(end - first < most ? end - first : most), d * size, false);
    team.lines_at_once = tiles > 0 ? team.ahead.lines() / tiles + 1 : 0;
  }
#endif
  (void)team, (void)x, (void)b, (void)head, (void)first, (void)end, (void)most, (void)d, (void)tiles;
}
/// Register tiles of an m x n product on the host.
template <class C>
KOKKOS_FUNCTION constexpr int register_tiles(int m, int n) {
  constexpr int width = 2 * vector_lanes<C>;
  return (m + register_rows - 1) / register_rows * ((n + width - 1) / width);
}

/// Features of keys first, ..., first + rows - 1; those of hidden keys, which are not read, are 0.
template <class C, class Team, class Source>
KOKKOS_FUNCTION void load_keys(const Team& team, const Source& s, std::int64_t b, std::int64_t kv_head,
                               std::int64_t first, int rows, const FeatureTile<C>& tile) {
  using Map = typename Source::KeyMap;
  const auto position = [=](int row) { return s.is_visible(b, first + row) ? first + row : std::int64_t(-1); };
  load_rows(team, s.k, b, kv_head, rows, s.d, position, tile.raw, tile.ld_raw);
  const int* shift = s.shift + (b * s.kv_heads + kv_head) * s.features;
  const C norm = s.largest_key ? static_cast<C>(s.largest_key[b * s.kv_heads + kv_head]) : C(1);
  map_rows<Map>(
      team, bind_map<C>(s.key_map, kv_head), rows, s.d, s.mapped, [=](int row) { return position(row) >= 0; },
      [=](int) { return [=](int j) { return shift[j]; }; }, norm, tile);
  if (s.features > s.mapped) {
    for_each(team, rows, [&](int row) {
      tile.features[std::int64_t(row) * tile.ld + s.mapped] = position(row) >= 0 ? C(1) : C(0);
    });
    team.barrier();
  }
}

/// Features of queries, row i of the tile being that at position_of(i).
template <class C, class Team, class Source, class PositionOf>
KOKKOS_FUNCTION void load_queries(const Team& team, const Source& s, std::int64_t b, std::int64_t head, int rows,
                                  const PositionOf& position_of, const FeatureTile<C>& tile) {
  using Map = typename Source::QueryMap;
  load_rows(team, s.q, b, head, rows, s.d, position_of, tile.raw, tile.ld_raw);
  const auto map = bind_map<C>(s.query_map, head);
  const int* shift = s.shift + (b * s.kv_heads + head / s.group) * s.features;
  int* const row_shift = tile.row_shift;
  if constexpr (Source::scaled) {  // the largest feature of a row lies between 1/2 and 2
    for_each(team, rows, [&](int row) {
      const C* x = tile.raw + std::int64_t(row) * tile.ld_raw;
      int largest = 2 * no_shift;
      for (int j = 0; j < s.mapped; ++j) {
        const int e = map.exponent(x[j]) + shift[j];
        largest = e > largest ? e : largest;
      }
      row_shift[row] = largest;
    });
    team.barrier();
  }
  const C norm = s.largest_query ? static_cast<C>(s.largest_query[b * s.heads + head]) : C(1);
  map_rows<Map>(
      team, map, rows, s.d, s.mapped, [](int) { return true; },
      [=](int row) {
        const int largest = row_shift[row];
        return [=](int j) { return largest - shift[j]; };
      },
      norm, tile);
  if (s.features > s.mapped) {
    const C constant = static_cast<C>(s.constant(head));
    for_each(team, rows, [&](int row) { tile.features[std::int64_t(row) * tile.ld + s.mapped] = constant; });
    team.barrier();
  }
  if (s.query_scale != 1) {
    const C scale = static_cast<C>(s.query_scale);
    for_each_in_rows(team, rows, s.mapped, [=](int row) {
      C* f = tile.features + std::int64_t(row) * tile.ld;
      return [=](int j) { f[j] *= scale; };
    });
    team.barrier();
  }
}

/// A kernel whose body has `tasks`, `workers`, `worker_memory`, `worker_bytes` and run(team, task, arena).
template <class Body>
struct OnWorkers {
  Body body;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}); }
  template <class Member>
  requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    work(member.league_rank(), DeviceTeam<Member>{member});
  }
  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team) const {
    std::byte* const memory = body.worker_memory + worker * static_cast<std::int64_t>(body.worker_bytes);
    // padding takes part in vector arithmetic; what an earlier launch left there may be no numbers
    const auto words = static_cast<std::int64_t>(body.worker_bytes / sizeof(std::uint64_t));
    for (std::int64_t i = team.rank(); i < words; i += team.size()) reinterpret_cast<std::uint64_t*>(memory)[i] = 0;
    team.barrier();
    for (std::int64_t task = worker; task < body.tasks; task += body.workers) {
      ArenaCursor arena(memory);
      body.run(team, task, arena);
      team.barrier();
    }
  }
};

/// What every body has.
struct WorkerBody {
  std::int64_t tasks = 0;
  int workers = 1;
  std::byte* worker_memory = nullptr;
  std::size_t worker_bytes = 0;
};

/// The largest norm of some rows: (unit, block), unit = (batch, head).
template <class T>
struct BlockNorms {
  RowTensor<const T> x{};
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_batch_stride = 0, mask_stride = 0, heads = 0, n = 0, blocks = 0;
  int d = 0;
  double* norms = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t task) const {
    const std::int64_t unit = task / blocks, b = unit / heads, block = task % blocks;
    const std::int64_t last = (block + 1) * norm_block < n ? (block + 1) * norm_block : n;
    double largest = 0;
    for (std::int64_t row = block * norm_block; row < last; ++row) {
      if (mask && mask[b * mask_batch_stride + row * mask_stride] == 0) continue;
      const double norm =
          static_cast<double>(strided_norm<accumulator_t<T>>(x.row(b, unit % heads, row), x.element_stride, d));
      if (!(norm <= largest) && largest == largest) largest = norm;
    }
    norms[task] = largest;
  }
};
struct LargestNorm {
  const double* norms = nullptr;
  std::int64_t blocks = 0;
  double* largest = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t unit) const {
    double found = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const double norm = norms[unit * blocks + block];
      if (!(norm <= found) && found == found) found = norm;
    }
    largest[unit] = found;
  }
};

/// The largest exponent of each feature among the keys of a segment: (batch, kv head, segment, feature).
template <class Source>
struct SegmentShifts : WorkerBody {
  using C = accumulator_t<typename Source::T>;
  Source s{};
  int chunk = 0;
  std::int64_t segment = 0, segments = 0;
  int* shifts = nullptr;

  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    FeatureTile<C>(arena, chunk, s.d, s.features);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t unit = task / segments, b = unit / s.kv_heads, kv_head = unit % s.kv_heads;
    const FeatureTile<C> tile(arena, chunk, s.d, s.features);
    int* const shift = shifts + task * s.features;
    for_each(team, s.features, [=](int j) { shift[j] = no_shift; });
    team.barrier();
    if constexpr (Source::scaled) {
      const auto map = bind_map<C>(s.key_map, kv_head);
      const std::int64_t begin = task % segments * segment, end = begin + segment < s.nk ? begin + segment : s.nk;
      for (std::int64_t first = begin; first < end; first += chunk) {
        const int rows = static_cast<int>(end - first < chunk ? end - first : chunk);
        const auto position = [&](int row) { return s.is_visible(b, first + row) ? first + row : std::int64_t(-1); };
        load_rows(team, s.k, b, kv_head, rows, s.d, position, tile.raw, tile.ld_raw);
        for_each_down(
            team, rows, s.mapped, [&](int row) { return position(row) >= 0; },
            [=](int row) {
              const C* x = tile.raw + std::int64_t(row) * tile.ld_raw;
              return [=](int j) {
                const int e = map.exponent(x[j]);
                shift[j] = e > shift[j] ? e : shift[j];
              };
            },
            [](int) { return [](int) {}; });
        team.barrier();
      }
    }
  }
};
struct LargestShift {
  const int* shifts = nullptr;
  std::int64_t segments = 0;
  int features = 0;
  int* shift = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t at) const {
    const std::int64_t unit = at / features, j = at % features;
    int largest = no_shift;
    for (std::int64_t g = 0; g < segments; ++g) {
      const int e = shifts[(unit * segments + g) * features + j];
      largest = e > largest ? e : largest;
    }
    shift[at] = largest;
  }
};

/// z and the lower triangle of G over the keys of a segment: (batch, kv head, segment) -> R R + R numbers.
template <class Source>
struct KeySums : WorkerBody {
  using C = accumulator_t<typename Source::T>;
  Source s{};
  int chunk = 0, chunks_at_once = 0;
  std::int64_t segment = 0, segments = 0;
  double* parts = nullptr;

  struct Tiles {
    FeatureTile<C> keys;
    C* product;
    KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const KeySums& k) : keys(arena, k.chunk, k.s.d, k.s.features) {
      product = arena.take<C>(std::int64_t(padded_rows(k.s.features)) * keys.ld);
    }
  };
  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    Tiles(arena, *this);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t unit = task / segments, b = unit / s.kv_heads, kv_head = unit % s.kv_heads;
    const Tiles tiles(arena, *this);
    const int r = s.features, ld = tiles.keys.ld;
    const C* const f = tiles.keys.features;
    C* const product = tiles.product;
    double* const gram = parts + task * (std::int64_t(r) * r + r);
    double* const z = gram + std::int64_t(r) * r;
    for_each_in_rows(team, r + 1, r, [=](int i) { return [=](int j) { gram[std::int64_t(i) * r + j] = 0; }; });
    team.barrier();
    const std::int64_t begin = task % segments * segment, end = begin + segment < s.nk ? begin + segment : s.nk;
    const auto flush = [&] {
      for_each_in_rows(team, r, r, [=](int i) {
        return [=](int j) { gram[std::int64_t(i) * r + j] += static_cast<double>(product[std::int64_t(i) * ld + j]); };
      });
      team.barrier();
    };
    int held = 0;
    for (std::int64_t first = begin; first < end; first += chunk) {
      const int rows = static_cast<int>(end - first < chunk ? end - first : chunk);
      load_keys(team, s, b, kv_head, first, rows, tiles.keys);
      begin_prefetch(team);
      prefetch_rows(team, s.k, b, kv_head, first + chunk, end, chunk, s.d, register_tiles<C>(r, r) / 2);
      Target<C> target{product, ld, held ? Store::add : Store::overwrite};
      target.lower_only = true;
      multiply(team, r, r, Product<C>{{f, 1, ld}, f, ld, rows}, target);
      for_each_down(
          team, rows, r, [](int) { return true; },
          [=](int row) { return [=](int j) { z[j] += static_cast<double>(f[std::int64_t(row) * ld + j]); }; },
          [](int) { return [](int) {}; });
      team.barrier();
      if (++held == chunks_at_once) {
        flush();
        held = 0;
      }
    }
    if (held) flush();
  }
};

/// The sums of all segments: G in full, z, and both in the type of the tiles.
template <class C>
struct TotalKeySums {
  const double* parts = nullptr;
  std::int64_t segments = 0;
  int r = 0, ld = 0;
  double* z = nullptr;     // (unit, R)
  C* z_tile = nullptr;     // (unit, ld)
  C* gram_tile = nullptr;  // (unit, padded R, ld)

  KOKKOS_FUNCTION void operator()(std::int64_t at) const {
    const std::int64_t size = std::int64_t(r) * r + r, unit = at / size, i = at % size / r, j = at % r;
    const std::int64_t from = i < r && j > i ? j * r + i : i * r + j;
    double sum = 0;
    for (std::int64_t g = 0; g < segments; ++g) sum += parts[(unit * segments + g) * size + from];
    if (i == r) {
      z[unit * r + j] = sum;
      z_tile[unit * ld + j] = static_cast<C>(sum);
    } else {
      gram_tile[(unit * padded_rows(r) + i) * ld + j] = static_cast<C>(sum);
    }
  }
};

/// What a segment of queries adds up to, in this order.
struct QuerySumLayout {
  int r = 0;
  bool square = false;  // whether keys stand at the positions of queries
  KOKKOS_FUNCTION std::int64_t u() const { return square ? std::int64_t(r) * r : 0; }  // after M (R x R)
  /// Of queries at the positions of visible keys, with a mask.
  KOKKOS_FUNCTION std::int64_t visible_u() const { return u() + r; }
  KOKKOS_FUNCTION std::int64_t squares() const { return visible_u() + r; }  // sum P^2
  KOKKOS_FUNCTION std::int64_t empty() const { return squares() + 1; }      // rows without weight
  KOKKOS_FUNCTION std::int64_t visible_empty() const { return squares() + 2; }
  KOKKOS_FUNCTION std::int64_t size() const { return squares() + 3; }
};

/// M, u, sum P^2 over the queries of a segment: (batch, head, segment).
template <class Source>
struct QuerySums : WorkerBody {
  using C = accumulator_t<typename Source::T>;
  Source s{};
  QuerySumLayout layout{};
  int chunk = 0, chunks_at_once = 0;
  std::int64_t segment = 0, segments = 0;
  const C* z_tile = nullptr;
  const C* gram_tile = nullptr;
  double* parts = nullptr;

  struct Tiles {
    FeatureTile<C> queries, keys;
    C *images, *product;  // Q G; M
    C* row_sums;
    double* row_squares;
    KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const QuerySums& k) : queries(arena, k.chunk, k.s.d, k.s.features) {
      if (k.layout.square) keys = FeatureTile<C>(arena, k.chunk, k.s.d, k.s.features);
      images = arena.take<C>(std::int64_t(padded_rows(k.chunk)) * queries.ld);
      product = arena.take<C>(std::int64_t(padded_rows(k.s.features)) * queries.ld);
      row_sums = arena.take<C>(padded_rows(k.chunk));
      row_squares = arena.take<double>(padded_rows(k.chunk));
    }
  };
  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    Tiles(arena, *this);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t unit = task / segments, b = unit / s.heads, head = unit % s.heads, kv_head = head / s.group;
    const std::int64_t kv_unit = b * s.kv_heads + kv_head;
    const Tiles tiles(arena, *this);
    const int r = s.features, ld = tiles.queries.ld;
    const C* const z = z_tile + kv_unit * ld;
    C* const f = tiles.queries.features;
    const C* const k = tiles.keys.features;
    C *const images = tiles.images, *const product = tiles.product, *const row_sums = tiles.row_sums;
    double* const row_squares = tiles.row_squares;
    double* const part = parts + task * layout.size();
    double *const u = part + layout.u(), *const visible_u = part + layout.visible_u();
    for (std::int64_t i = team.rank(); i < layout.size(); i += team.size()) part[i] = 0;
    team.barrier();
    const auto flush = [&] {
      for_each_in_rows(team, r, r, [=](int i) {
        return [=](int j) { part[std::int64_t(i) * r + j] += static_cast<double>(product[std::int64_t(i) * ld + j]); };
      });
      team.barrier();
    };
    const std::int64_t begin = task % segments * segment, end = begin + segment < s.nq ? begin + segment : s.nq;
    int held = 0;
    for (std::int64_t first = begin; first < end; first += chunk) {
      const int rows = static_cast<int>(end - first < chunk ? end - first : chunk);
      load_queries(
          team, s, b, head, rows, [=](int row) { return first + row; }, tiles.queries);
      begin_prefetch(team);
      if (layout.square) prefetch_rows(team, s.k, b, kv_head, first, end, chunk, s.d, register_tiles<C>(rows, r));
      multiply(team, rows, r, Product<C>{{f, ld, 1}, gram_tile + kv_unit * padded_rows(r) * ld, ld, r},
               Target<C>{images, ld});
      for_each(team, rows, [=](int row) {
        const C* x = f + std::int64_t(row) * ld;
        row_sums[row] = sum_along<Team, C>(r, [=](int j) { return x[j] * z[j]; });
      });
      team.barrier();
      for_each(team, rows, [=](int row) {
        const C *x = f + std::int64_t(row) * ld, *y = images + std::int64_t(row) * ld;
        const double sum = static_cast<double>(row_sums[row]);
        const double squares = static_cast<double>(sum_along<Team, C>(r, [=](int j) { return x[j] * y[j]; }));
        row_squares[row] = sum == 0 ? 0 : squares / sum / sum;
      });
      team.barrier();
      for_each_in_rows(team, rows, r, [=](int row) {
        C* x = f + std::int64_t(row) * ld;
        const C sum = row_sums[row], factor = sum == C(0) ? C(0) : C(1) / sum;
        return [=](int j) { x[j] *= factor; };
      });
      if (team.rank() == 0) {
        for (int row = 0; row < rows; ++row) {
          part[layout.squares()] += row_squares[row];
          if (row_sums[row] != C(0)) continue;
          part[layout.empty()] += 1;
          if (layout.square && s.is_visible(b, first + row)) part[layout.visible_empty()] += 1;
        }
      }
      team.barrier();
      const auto nothing = [](int) { return [](int) {}; };
      for_each_down(
          team, rows, r, [](int) { return true; },
          [=](int row) { return [=](int j) { u[j] += static_cast<double>(f[std::int64_t(row) * ld + j]); }; }, nothing);
      if (!layout.square) continue;
      if (s.key_mask)
        for_each_down(
            team, rows, r, [&](int row) { return s.is_visible(b, first + row); },
            [=](int row) { return [=](int j) { visible_u[j] += static_cast<double>(f[std::int64_t(row) * ld + j]); }; },
            nothing);
      load_keys(team, s, b, kv_head, first, rows, tiles.keys);
      begin_prefetch(team);
      prefetch_rows(team, s.q, b, head, first + chunk, end, chunk, s.d, register_tiles<C>(r, r));
      multiply(team, r, r, Product<C>{{k, 1, ld}, f, ld, rows},
               Target<C>{product, ld, held ? Store::add : Store::overwrite});
      team.barrier();
      if (++held == chunks_at_once) {
        flush();
        held = 0;
      }
    }
    if (held) flush();
  }
};

/// out[unit][i] = the sum over segments.
struct TotalParts {
  const double* parts = nullptr;
  std::int64_t segments = 0, size = 0;
  double* out = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t at) const {
    const std::int64_t unit = at / size, i = at % size;
    double sum = 0;
    for (std::int64_t g = 0; g < segments; ++g) sum += parts[(unit * segments + g) * size + i];
    out[at] = sum;
  }
};

/// Column sums of kernel attention, sum_i P_ij = K_j . u: (batch, head, segment of keys).
template <class Source>
struct FeatureColumns : WorkerBody {
  using C = accumulator_t<typename Source::T>;
  Source s{};
  QuerySumLayout layout{};
  int chunk = 0;
  std::int64_t segment = 0, segments = 0;
  const double* totals = nullptr;
  double* columns = nullptr;  // (unit, nk)

  struct Tiles {
    FeatureTile<C> keys;
    C* u;
    KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const FeatureColumns& f) : keys(arena, f.chunk, f.s.d, f.s.features) {
      u = arena.take<C>(keys.ld);
    }
  };
  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    Tiles(arena, *this);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t unit = task / segments, b = unit / s.heads, head = unit % s.heads;
    const std::int64_t begin = task % segments * segment, end = begin + segment < s.nk ? begin + segment : s.nk;
    const Tiles t(arena, *this);
    const int r = s.features, ld = t.keys.ld;
    const double* const total = totals + unit * layout.size() + layout.u();
    C* const u = t.u;
    const C* const k = t.keys.features;
    for_each(team, r, [=](int j) { u[j] = static_cast<C>(total[j]); });
    team.barrier();
    for (std::int64_t first = begin; first < end; first += chunk) {
      const int rows = static_cast<int>(end - first < chunk ? end - first : chunk);
      load_keys(team, s, b, head / s.group, first, rows, t.keys);
      double* const out = columns + unit * s.nk + first;
      for_each(team, rows, [=](int row) {
        const C* x = k + std::int64_t(row) * ld;
        out[row] = static_cast<double>(sum_along<Team, C>(r, [=](int j) { return x[j] * u[j]; }));
      });
      team.barrier();
    }
  }
};

/// Tiles of scores and what they are made of.
struct ScoreTiles {
  FeatureTile<double> queries, keys;
  double *keys_t = nullptr, *scores = nullptr, *logarithms = nullptr, *visible = nullptr;
  int ld = 0;  // of scores and of transposed keys

  KOKKOS_FUNCTION ScoreTiles(ArenaCursor& arena, int query_tile, int key_tile, int d, int features)
      : queries(arena, query_tile, d, features),
        keys(arena, key_tile, d, features),
        ld(padded_columns<double>(key_tile)) {
    keys_t = arena.take<double>(std::int64_t(padded_rows(features)) * padded_rows(key_tile));
    scores = arena.take<double>(std::int64_t(padded_rows(query_tile)) * ld);
    logarithms = arena.take<double>(std::int64_t(padded_rows(query_tile)) * ld);
    visible = arena.take<double>(ld);
  }
};

/// Scores of the loaded queries with keys first, ..., first + columns - 1.
template <class Team, class Source>
KOKKOS_FUNCTION void form_scores(const Team& team, const Source& s, std::int64_t b, std::int64_t kv_head, int rows,
                                 std::int64_t first, int columns, const ScoreTiles& t) {
  load_keys(team, s, b, kv_head, first, columns, t.keys);
  const int ld_t = padded_rows(t.ld);
  transpose(team, columns, s.features, t.keys.features, t.keys.ld, t.keys_t, ld_t);
  for_each(team, columns, [&](int c) { t.visible[c] = s.is_visible(b, first + c) ? 1.0 : 0.0; });
  team.barrier();
  multiply(team, rows, columns, Product<double>{{t.queries.features, t.queries.ld, 1}, t.keys_t, ld_t, s.features},
           Target<double>{t.scores, t.ld});
  team.barrier();
}

/// Sums of columns [0, n) of a row in eight parts, so that they vectorise; term(c, part) adds to the parts.
template <int Count, class Term>
KOKKOS_FORCEINLINE_FUNCTION void sum_in_parts(int n, const Term& term, double* totals) {
  constexpr int width = 8;
  double part[Count][width];
  for (int k = 0; k < Count; ++k)
    for (int j = 0; j < width; ++j) part[k][j] = 0;
  int c = 0;
  for (; c + width <= n; c += width) {
    LINATTN_INDEPENDENT
    for (int j = 0; j < width; ++j) {
      double terms[Count];
      term(c + j, terms);
      for (int k = 0; k < Count; ++k) part[k][j] += terms[k];
    }
  }
  for (int j = 0; c + j < n; ++j) {
    double terms[Count];
    term(c + j, terms);
    for (int k = 0; k < Count; ++k) part[k][j] += terms[k];
  }
  for (int k = 0; k < Count; ++k) {
    for (int w = width / 2; w > 0; w /= 2)
      for (int j = 0; j < w; ++j) part[k][j] += part[k][j + w];
    totals[k] = part[k][0];
  }
}

/// One row of a tile into the record of the row. Softmax: scores are logarithms; else they are weights, whose
/// logarithms are given where they are positive.
template <bool Softmax>
KOKKOS_FUNCTION void absorb_row(RowRecord& record, double* w, const double* l, const double* visible, int n) {
  double positive = 0, negative = 0, seen = 0;
  if constexpr (Softmax) {
    double largest = 0;
    bool any = false;
    for (int c = 0; c < n; ++c)
      if (visible[c] != 0 && (!any || !(w[c] <= largest))) {
        any = true;
        largest = w[c];
      }
    if (!any) return;
    if (record.entries == 0)
      record.reference = largest;
    else if (!(largest <= record.reference))
      record.raise_reference(largest);
    const double reference = record.reference;
    double counts[1];
    sum_in_parts<1>(
        n, [=](int c, double* t) { t[0] = visible[c]; }, counts);
    seen = positive = counts[0];
    if (record.entries == 0)
      for (int c = 0; c < n; ++c)
        if (visible[c] != 0) {
          record.pivot = w[c];
          break;
        }
    const double pivot = record.pivot;
    double totals[7];
    sum_in_parts<7>(
        n,
        [=](int c, double* t) {
          const bool counts_here = visible[c] != 0;
          const double y = counts_here ? w[c] - pivot : 0.0;
          const double weight = exp_nonpositive(counts_here ? w[c] - reference : -1e4);
          t[0] = weight;
          t[1] = weight * y;
          t[2] = weight * weight;
          t[3] = y;
          t[4] = y * y;
          t[5] = y * y * y;
          t[6] = y * y * (y * y);
        },
        totals);
    record.sum += totals[0];
    record.weighted += totals[1];
    record.squares += totals[2];
    for (int p = 0; p < 4; ++p) record.powers[p] += totals[3 + p];
  } else {
    double counts[3];
    sum_in_parts<3>(
        n,
        [=](int c, double* t) {
          t[0] = visible[c];
          t[1] = visible[c] != 0 && w[c] >= least_weight ? 1.0 : 0.0;
          t[2] = visible[c] != 0 && w[c] < 0 ? 1.0 : 0.0;
        },
        counts);
    seen = counts[0];
    positive = counts[1];
    negative = counts[2];
    if (record.entries == 0 && positive > 0)
      for (int c = 0; c < n; ++c)
        if (visible[c] != 0 && w[c] >= least_weight) {
          record.pivot = l[c];
          break;
        }
    const double pivot = record.pivot;
    double totals[7];
    sum_in_parts<7>(
        n,
        [=](int c, double* t) {
          const double weight = visible[c] != 0 ? w[c] : 0.0;
          const double y = visible[c] != 0 && w[c] >= least_weight ? l[c] - pivot : 0.0;
          t[0] = weight;
          t[1] = weight * y;
          t[2] = weight * weight;
          t[3] = y;
          t[4] = y * y;
          t[5] = y * y * y;
          t[6] = y * y * (y * y);
        },
        totals);
    record.sum += totals[0];
    record.weighted += totals[1];
    record.squares += totals[2];
    for (int p = 0; p < 4; ++p) record.powers[p] += totals[3 + p];
  }
  record.entries += static_cast<std::int64_t>(positive);
  record.zeros += static_cast<std::int64_t>(seen - positive);
  if (negative > 0) record.negative = 0;  // which key: told by the caller
}

/// Records of rows: (batch, head, tile of rows, split of the keys).
template <class Source, bool Softmax>
struct RowRecords : WorkerBody {
  Source s{};
  int query_tile = 0, key_tile = 0;
  std::int64_t rows = 0, tiles = 0, splits = 0;
  const std::int64_t* positions = nullptr;  // (unit, rows); nullptr: row i is query i
  RowRecord* records = nullptr;             // (unit, rows, splits)

  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    ScoreTiles(arena, query_tile, key_tile, s.d, s.features);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t split = task % splits, tile = task / splits % tiles, unit = task / splits / tiles;
    const std::int64_t b = unit / s.heads, head = unit % s.heads, first_row = tile * query_tile;
    const int count = static_cast<int>(rows - first_row < query_tile ? rows - first_row : query_tile);
    const ScoreTiles t(arena, query_tile, key_tile, s.d, s.features);
    const auto position = [=, this](int row) {
      return positions ? positions[unit * rows + first_row + row] : first_row + row;
    };
    const auto record = [=, this](int row) -> RowRecord& {
      return records[((unit * rows) + first_row + row) * splits + split];
    };
    for_each(team, count, [&](int row) { record(row) = RowRecord{}; });
    load_queries(team, s, b, head, count, position, t.queries);
    std::int64_t last = 0;  // keys that any of the rows sees
    for (int row = 0; row < count; ++row) {
      const std::int64_t end = s.key_end(position(row));
      last = end > last ? end : last;
    }
    const std::int64_t blocks = (s.nk + key_tile - 1) / key_tile;
    for (std::int64_t block = blocks * split / splits; block < blocks * (split + 1) / splits; ++block) {
      const std::int64_t first = block * key_tile;
      if (first >= last) break;
      const int columns = static_cast<int>(s.nk - first < key_tile ? s.nk - first : key_tile);
      form_scores(team, s, b, head / s.group, count, first, columns, t);
      double* const scores = t.scores;
      double* const logarithms = t.logarithms;
      const int ld = t.ld;
      if constexpr (!Softmax) {
        for_each_in_rows(team, count, columns, [=](int row) {
          const double* w = scores + std::int64_t(row) * ld;
          double* l = logarithms + std::int64_t(row) * ld;
          return [=](int c) { l[c] = natural_log(w[c] >= least_weight ? w[c] : 1.0); };
        });
        team.barrier();
      }
      for_each(team, count, [&](int row) {
        const std::int64_t at = position(row), sees = s.key_end(at) - first;
        const int n = static_cast<int>(sees < columns ? sees : columns);
        if (n <= 0) return;
        double* const w = scores + std::int64_t(row) * ld;
        const double* const l = logarithms + std::int64_t(row) * ld;
        RowRecord& r = record(row);
        const std::int64_t before = r.negative;
        absorb_row<Softmax>(r, w, l, t.visible, n);
        if (before < 0 && r.negative >= 0)
          for (int c = n - 1; c >= 0; --c)
            if (t.visible[c] != 0 && w[c] < 0) r.negative = first + c;
        if (before >= 0) r.negative = before;
        const std::int64_t c = at + (s.nk - s.nq) - first;
        if (c >= 0 && c < n && t.visible[c] != 0 && (Softmax || w[c] >= least_weight)) {
          r.has_diagonal = true;
          r.diagonal = Softmax ? w[c] : l[c];
        }
      });
      team.barrier();
    }
  }
};

/// The splits of a row into one record, and what turns scores into probabilities: the logarithm of the row sum
/// (softmax), or its inverse, 0 for a row without weight.
struct CompleteRecords {
  const RowRecord* parts = nullptr;
  std::int64_t splits = 0;
  bool softmax = false;
  RowRecord* records = nullptr;
  double* normaliser = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t at) const {
    using std::log;
    RowRecord record = parts[at * splits];
    for (std::int64_t g = 1; g < splits; ++g) record.add(parts[at * splits + g]);
    records[at] = record;
    if (softmax)
      normaliser[at] = record.reference + log(record.sum);
    else
      normaliser[at] = record.sum == 0 ? 0 : 1 / record.sum;
  }
};

/// Column sums of any attention matrix, all rows: (batch, head, block of keys) -> sum_i P_ij. With `matrix`, the matrix
/// itself, of one unit.
template <class Source, bool Softmax>
struct ScoreColumns : WorkerBody {
  Source s{};
  int query_tile = 0, key_tile = 0;
  std::int64_t blocks = 0, first_unit = 0;
  const double* normaliser = nullptr;  // (unit, nq)
  double* columns = nullptr;           // (unit, nk), or
  double* matrix = nullptr;            // (nq, nk) of the unit first_unit

  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    ScoreTiles(arena, query_tile, key_tile, s.d, s.features);
    return arena.required();
  }
  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t unit = first_unit + task / blocks, first = task % blocks * key_tile;
    const std::int64_t b = unit / s.heads, head = unit % s.heads;
    const int columns_here = static_cast<int>(s.nk - first < key_tile ? s.nk - first : key_tile);
    const ScoreTiles t(arena, query_tile, key_tile, s.d, s.features);
    double* const scores = t.scores;
    const double* const visible = t.visible;
    const int ld = t.ld;
    double* const sums = columns ? columns + unit * s.nk + first : nullptr;
    if (sums) for_each(team, columns_here, [=](int c) { sums[c] = 0; });
    // queries before this one see none of these keys
    const std::int64_t offset = s.causal ? first - (s.nk - s.nq) : 0;
    const std::int64_t start = offset > 0 && !matrix ? offset / query_tile * query_tile : 0;
    for (std::int64_t row0 = start; row0 < s.nq; row0 += query_tile) {
      const int rows = static_cast<int>(s.nq - row0 < query_tile ? s.nq - row0 : query_tile);
      load_queries(
          team, s, b, head, rows, [=](int row) { return row0 + row; }, t.queries);
      form_scores(team, s, b, head / s.group, rows, first, columns_here, t);
      const double* const of_rows = normaliser + unit * s.nq + row0;
      for_each_in_rows(team, rows, columns_here, [=, this](int row) {
        double* w = scores + std::int64_t(row) * ld;
        const double of_row = of_rows[row];
        const std::int64_t sees = s.key_end(row0 + row) - first;
        return [=](int c) {
          const bool counts = c < sees && visible[c] != 0;
          double p;
          if constexpr (Softmax) {
            const double x = counts ? w[c] - of_row : -1e4;
            p = exp_nonpositive(x > 0 ? 0.0 : x);
          } else {
            p = counts ? w[c] * of_row : 0.0;
          }
          w[c] = p;
        };
      });
      team.barrier();
      if (sums)
        for_each_down(
            team, rows, columns_here, [](int) { return true; },
            [=](int row) {
              const double* p = scores + std::int64_t(row) * ld;
              return [=](int c) { sums[c] += p[c]; };
            },
            [](int) { return [](int) {}; });
      if (matrix) {
        double* const to = matrix + row0 * s.nk + first;
        const std::int64_t nk = s.nk;
        for_each_in_rows(team, rows, columns_here, [=](int row) {
          const double* p = scores + std::int64_t(row) * ld;
          double* out = to + row * nk;
          return [=](int c) { out[c] = p[c]; };
        });
      }
      team.barrier();
    }
  }
};

/// Kernel attention under a causal mask, without its scores: a walk over the tokens with z, the sum of the features of
/// the keys so far, gives every row sum s_i and P_ii; a walk back with y, the sum of Q_i / s_i from the last query on,
/// the column sums K_j . y. Each feature of z and y has an exponent of its own, so that nothing overflows: see
/// state.hpp. Segments are walked at once: first their totals are formed, then what stands before or after each.
enum class CausalPart { key_totals, rows, query_totals, columns };

template <class Source, CausalPart Part>
struct CausalWalk : WorkerBody {
  Source s{};
  int chunk = 0;
  std::int64_t segment = 0, segments = 0;  // of positions of keys
  ScaledSum<double>* states = nullptr;     // (batch, kv head, segment, R) of keys, (batch, head, segment, R) of queries
  double* row_sums = nullptr;              // (unit, nq): s_i ...
  int* row_shifts = nullptr;               // ... 2^shift
  double* diagonal = nullptr;              // (unit, nq): P_ii
  double* columns = nullptr;               // (unit, nk)

  static constexpr bool of_keys = Part == CausalPart::key_totals, back = Part == CausalPart::columns;

  struct Tiles {
    FeatureTile<double> queries, keys;
    ScaledSum<double>* state;
    double* terms;
    KOKKOS_FUNCTION Tiles(ArenaCursor& arena, const CausalWalk& w)
        : queries(arena, w.chunk, w.s.d, w.s.features), keys(arena, w.chunk, w.s.d, w.s.features) {
      state = arena.take<ScaledSum<double>>(w.s.features);
      terms = arena.take<double>(2 * padded_columns<double>(w.s.features));
    }
  };
  KOKKOS_FUNCTION std::size_t bytes() const {
    ArenaCursor arena;
    Tiles(arena, *this);
    return arena.required();
  }

  /// A feature as mantissa and exponent; maps without exponential growth have exponent 0.
  template <class Bound>
  KOKKOS_FORCEINLINE_FUNCTION static ScaledSum<double> feature(const Bound& map, const FeatureTile<double>& t, int row,
                                                               int j) {
    if constexpr (Source::scaled) {
      const double x = t.raw[std::int64_t(row) * t.ld_raw + j];
      const int e = map.exponent(x);
      return {map.value(x, e), e};
    } else {
      return {t.features[std::int64_t(row) * t.ld + j], 0};
    }
  }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, std::int64_t task, ArenaCursor& arena) const {
    const std::int64_t heads = of_keys ? s.kv_heads : s.heads;
    const std::int64_t unit = task / segments, g = task % segments, b = unit / heads, head = unit % heads;
    const std::int64_t kv_head = of_keys ? head : head / s.group, offset = s.nk - s.nq;
    const Tiles t(arena, *this);
    const int r = s.features;
    ScaledSum<double>* const state = t.state;
    double* const terms = t.terms;
    double* const own = terms + padded_columns<double>(r);
    const auto key_map = bind_map<double>(s.key_map, kv_head);
    const auto query_map = bind_map<double>(s.query_map, of_keys ? head * s.group : head);
    const std::int64_t state_unit = Part == CausalPart::rows ? b * s.kv_heads + kv_head : unit;
    ScaledSum<double>* const stored = states + (state_unit * segments + g) * r;
    const bool totals = Part == CausalPart::key_totals || Part == CausalPart::query_totals;
    for_each(team, r, [=](int j) { state[j] = totals ? ScaledSum<double>{} : stored[j]; });
    team.barrier();
    const std::int64_t begin = g * segment, end = begin + segment < s.nk ? begin + segment : s.nk;
    const std::int64_t chunks = (end - begin + chunk - 1) / chunk;
    for (std::int64_t step = 0; step < chunks; ++step) {
      const std::int64_t first = begin + (back ? chunks - 1 - step : step) * chunk;
      const int rows = static_cast<int>(end - first < chunk ? end - first : chunk);
      if (Part != CausalPart::query_totals) load_keys(team, s, b, kv_head, first, rows, t.keys);
      if (!of_keys)
        load_queries(
            team, s, b, head, rows,
            [=](int row) { return first + row >= offset ? first + row - offset : std::int64_t(-1); }, t.queries);
      for (int at = 0; at < rows; ++at) {
        const int row = back ? rows - 1 - at : at;
        const std::int64_t key = first + row, query = key - offset;
        const bool visible = s.is_visible(b, key);
        if constexpr (Part == CausalPart::key_totals || Part == CausalPart::rows) {
          if (visible) for_each(team, r, [&](int j) { state[j] += feature(key_map, t.keys, row, j); });
          team.barrier();
          if (Part == CausalPart::key_totals || query < 0) continue;
          int largest = 2 * no_shift;
          for (int j = 0; j < r; ++j) {
            const int e = state[j].shift + feature(query_map, t.queries, row, j).shift;
            largest = e > largest ? e : largest;
          }
          for_each(team, r, [&](int j) {
            const ScaledSum<double> f = feature(query_map, t.queries, row, j);
            terms[j] = f.value * state[j].value * power_of_two<double>(f.shift + state[j].shift - largest);
            own[j] = 0;
            if (!visible) return;
            const ScaledSum<double> k = feature(key_map, t.keys, row, j);
            own[j] = f.value * k.value * power_of_two<double>(f.shift + k.shift - largest);
          });
          team.barrier();
          if (team.rank() == 0) {
            const double sum = sum_along<Team, double>(r, [=](int j) { return terms[j]; });
            const double diag = sum_along<Team, double>(r, [=](int j) { return own[j]; });
            row_sums[unit * s.nq + query] = sum;
            row_shifts[unit * s.nq + query] = largest;
            diagonal[unit * s.nq + query] = sum == 0 ? 0 : diag / sum;
          }
        } else {
          const double sum = query >= 0 ? row_sums[unit * s.nq + query] : 0;
          if (sum != 0) {
            const int shift = row_shifts[unit * s.nq + query];
            for_each(team, r, [&](int j) {
              ScaledSum<double> f = feature(query_map, t.queries, row, j);
              f.value /= sum;
              f.shift -= shift;
              state[j] += f;
            });
            team.barrier();
          }
          if (Part == CausalPart::query_totals) continue;
          for_each(team, r, [&](int j) {
            terms[j] = 0;
            if (!visible) return;
            const ScaledSum<double> k = feature(key_map, t.keys, row, j);
            terms[j] = k.value * state[j].value * power_of_two<double>(k.shift + state[j].shift);
          });
          team.barrier();
          if (team.rank() == 0)
            columns[unit * s.nk + key] = sum_along<Team, double>(r, [=](int j) { return terms[j]; });
        }
        team.barrier();
      }
    }
    if (totals) for_each(team, r, [=](int j) { stored[j] = state[j]; });
  }
};

/// From the totals of segments to what stands before each of them, or after.
struct ScanSegments {
  ScaledSum<double>* states = nullptr;
  std::int64_t segments = 0;
  int features = 0;
  bool back = false;

  KOKKOS_FUNCTION void operator()(std::int64_t at) const {
    ScaledSum<double>* const first = states + at / features * segments * features + at % features;
    ScaledSum<double> sum;
    for (std::int64_t step = 0; step < segments; ++step) {
      ScaledSum<double>& here = first[(back ? segments - 1 - step : step) * features];
      const ScaledSum<double> own = here;
      here = sum;
      sum += own;
    }
  }
};

template <class E>
struct Clear {
  E* data = nullptr;
  KOKKOS_FUNCTION void operator()(std::int64_t at) const { data[at] = E(0); }
};

/// A mask side by side.
struct PackMask {
  const std::uint8_t* mask = nullptr;
  std::int64_t batch_stride = 0, stride = 0, nk = 0;
  std::uint8_t* out = nullptr;

  KOKKOS_FUNCTION void operator()(std::int64_t at) const { out[at] = mask[at / nk * batch_stride + at % nk * stride]; }
};

}  // namespace LinAttn::detail
