// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/baselines/workers.hpp>

/// \file linformer_kernels.hpp
/// Projections along the sequence and their gradients, by products of tiles.

namespace LinAttn::baselines::detail {

/// A matrix (rank, Nk) of the caller.
template <class A>
struct Strip {
  A* data = nullptr;
  std::int64_t row = 0, column = 0;

  Strip() = default;
  template <class T, class ExecSpace>
  explicit Strip(const TensorRef<T, 2, ExecSpace>& t)
      : data(const_cast<A*>(t.data())), row(t.stride(0)), column(t.stride(1)) {}
  KOKKOS_FUNCTION explicit operator bool() const { return data != nullptr; }

  /// A part of it as a tile.
  template <class Team>
  KOKKOS_FUNCTION void load(const Team& team, std::int64_t r0, int rows, std::int64_t c0, int columns, A* to,
                            int ld) const {
    for_each_in_rows(team, rows, columns, [&](int r) {
      const A* x = data + (r0 + r) * row + c0 * column;
      A* y = to + r * ld;
      return [=, step = column](int j) { y[j] = x[j * step]; };
    });
    team.barrier();
  }
  template <class Team>
  KOKKOS_FUNCTION void store(const Team& team, const A* from, int ld, std::int64_t r0, int rows, std::int64_t c0,
                             int columns) const {
    for_each_in_rows(team, rows, columns, [&](int r) {
      A* x = data + (r0 + r) * row + c0 * column;
      const A* y = from + r * ld;
      return [=, step = column](int j) { x[j * step] = y[j]; };
    });
    team.barrier();
  }
};

inline constexpr int linformer_tile = 64;

KOKKOS_FUNCTION inline std::int64_t tiles_of(std::int64_t n) { return (n + linformer_tile - 1) / linformer_tile; }
KOKKOS_FUNCTION inline int tile_rows_at(std::int64_t tile, std::int64_t n) {
  const std::int64_t left = n - tile * linformer_tile;
  return static_cast<int>(left < linformer_tile ? left : linformer_tile);
}

/// Tiles of a worker: a part of a projection, rows of a tensor, and a result.
template <class A>
struct StripTiles {
  int ld = 0, ldx = 0;
  A *part = nullptr, *rows = nullptr, *rows_t = nullptr, *out = nullptr;

  KOKKOS_FUNCTION void place(ArenaCursor& arena, int columns) {
    constexpr int c = linformer_tile;
    ld = padded_columns<A>(c);
    ldx = padded_columns<A>(columns);
    part = arena.take<A>(std::int64_t(c) * ld);
    rows = arena.take<A>(std::int64_t(c) * ldx);
    rows_t = arena.take<A>(std::int64_t(padded_rows(columns)) * ld);
    out = arena.take<A>(std::int64_t(c) * (ldx > ld ? ldx : ld));
  }
};

/// x' = E x for all sequences and heads.
template <class A>
struct Project {
  StoredTensor<A> x;
  Strip<A> projection;
  std::int64_t batch, heads, n;
  Matrices<A> to;  // (batch, head) of rank rows

  using Memory = StripTiles<A>;
  KOKKOS_FUNCTION std::int64_t tasks() const { return batch * heads * tiles_of(to.rows); }
  KOKKOS_FUNCTION void place(ArenaCursor& arena, Memory& own) const { own.place(arena, to.columns); }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory& own, std::int64_t task) const {
    const std::int64_t strips = tiles_of(to.rows), strip = task % strips, unit = task / strips;
    const std::int64_t b = unit / heads, h = unit % heads, first = strip * linformer_tile;
    const int rows = tile_rows_at(strip, to.rows);
    A* c = to.at(b, h) + first * to.ld;
    for_each_in_rows(team, rows, to.columns, [&](int r) { return [=, ld = to.ld](int j) { c[r * ld + j] = A(0); }; });
    team.barrier();
    for (std::int64_t t = 0; t < tiles_of(n); ++t) {
      const int count = tile_rows_at(t, n);
      projection.load(team, first, rows, t * linformer_tile, count, own.part, own.ld);
      load_rows(team, x, b, h, t * linformer_tile, count, to.columns, own.rows, own.ldx);
      product(team, rows, to.columns, count, {own.part, own.ld, 1}, own.rows, own.ldx, c, to.ld, Store::add);
    }
  }
};

/// dx = E^T dx'.
template <class A>
struct PullBackRows {
  Matrices<A> from;  // dx'
  Strip<A> projection;
  std::int64_t batch, heads, n;
  StoredTensor<A> to;

  using Memory = StripTiles<A>;
  KOKKOS_FUNCTION std::int64_t tasks() const { return batch * heads * tiles_of(n); }
  KOKKOS_FUNCTION void place(ArenaCursor& arena, Memory& own) const { own.place(arena, from.columns); }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory& own, std::int64_t task) const {
    const std::int64_t strips = tiles_of(n), strip = task % strips, unit = task / strips;
    const std::int64_t b = unit / heads, h = unit % heads, begin = strip * linformer_tile;
    const int count = tile_rows_at(strip, n);
    for (std::int64_t t = 0; t < tiles_of(from.rows); ++t) {
      const int rows = tile_rows_at(t, from.rows);
      projection.load(team, t * linformer_tile, rows, begin, count, own.part, own.ld);
      product(team, count, from.columns, rows, {own.part, 1, own.ld}, from.at(b, h) + t * linformer_tile * from.ld,
              from.ld, own.out, own.ldx, t == 0 ? Store::overwrite : Store::add);
    }
    store_rows(team, own.out, own.ldx, to, b, h, begin, count, from.columns);
  }
};

/// dE = sum over sequences and heads of dx' x^T, of one tensor or of both.
template <class A>
struct PullBackProjection {
  Matrices<A> from[2];
  StoredTensor<A> x[2];
  int tensors;
  std::int64_t batch, heads, n;
  Strip<A> to;

  using Memory = StripTiles<A>;
  KOKKOS_FUNCTION int widest() const {
    return tensors == 2 && from[1].columns > from[0].columns ? from[1].columns : from[0].columns;
  }
  KOKKOS_FUNCTION std::int64_t tasks() const { return tiles_of(from[0].rows) * tiles_of(n); }
  KOKKOS_FUNCTION void place(ArenaCursor& arena, Memory& own) const { own.place(arena, widest()); }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory& own, std::int64_t task) const {
    const std::int64_t across = tiles_of(n), begin = task % across * linformer_tile,
                       first = task / across * linformer_tile;
    const int count = tile_rows_at(task % across, n), rows = tile_rows_at(task / across, from[0].rows);
    bool begins = true;
    for (int i = 0; i < tensors; ++i)
      for (std::int64_t unit = 0; unit < batch * heads; ++unit) {
        const std::int64_t b = unit / heads, h = unit % heads;
        const int columns = from[i].columns;
        load_rows(team, x[i], b, h, begin, count, columns, own.rows, own.ldx);
        transpose(team, count, columns, own.rows, own.ldx, own.rows_t, own.ld);
        team.barrier();
        product(team, rows, count, columns, {from[i].at(b, h) + first * from[i].ld, from[i].ld, 1}, own.rows_t, own.ld,
                own.out, own.ld, begins ? Store::overwrite : Store::add);
        begins = false;
      }
    if (begins)
      for_each_in_rows(team, rows, count, [&](int r) { return [=, o = own](int j) { o.out[r * o.ld + j] = A(0); }; });
    team.barrier();
    to.store(team, own.out, own.ld, first, rows, begin, count);
  }
};

}  // namespace LinAttn::baselines::detail
