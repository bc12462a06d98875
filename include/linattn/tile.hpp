// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/team.hpp>
#include <linattn/simd.hpp>
#include <type_traits>
#include <utility>

/// \file tile.hpp
/// Products of small matrices in fast memory: the arithmetic of every kernel goes through multiply().
///
/// Tiles are row-major; leading dimensions are multiples of tile_columns<T>, the first element is
/// aligned to 64 bytes, and the memory behind them reaches up to a multiple of tile_rows rows, so that
/// no register tile needs a remainder. What lies in that padding never reaches a real element.

namespace LinAttn::detail {

/// Rows of a tile are padded to a multiple of this: a register tile, and a block of a transposition.
inline constexpr int tile_rows = 16;
/// Columns of a tile are padded to a multiple of this: 64 bytes, for every vector width.
template <class T>
inline constexpr int tile_columns = 64 / static_cast<int>(sizeof(T));

template <class T>
KOKKOS_FUNCTION constexpr int padded_columns(std::int64_t n) {
  return static_cast<int>((n + tile_columns<T> - 1) / tile_columns<T> * tile_columns<T>);
}
KOKKOS_FUNCTION constexpr int padded_rows(std::int64_t n) {
  return static_cast<int>((n + tile_rows - 1) / tile_rows * tile_rows);
}

/// Which terms of sum_l A(i,l) B(l,j) count: all, those with l <= i, those with l >= i. Terms that do
/// not count are left out, never multiplied by zero, so that a NaN in them stays where it is.
enum class Band { all, lower, upper };

/// The left factor of a product, or its transpose: element (i, l) is data[i * row + l * column].
template <class T>
struct Factor {
  const T* data;
  int row;
  int column;
};

/// sum_l A(i,l) B(l,j) over 0 <= l < inner, of which `band` selects; B is row-major.
template <class T>
struct Product {
  Factor<T> a;
  const T* b;
  int ldb;
  int inner;
  Band band = Band::all;
};

/// What becomes of the sum: C = sum, C += sum, or a compensated C += sum, where C - low is the value
/// and the error of a long sum stays that of its last addition (Kahan).
enum class Store { overwrite, add, compensated };

template <class T>
struct Target {
  T* c;
  int ldc;
  Store store = Store::overwrite;
  T* low = nullptr;         // laid out as c
  bool lower_only = false;  // elements above the diagonal are unspecified, and cost nothing where possible
};

template <class V>
KOKKOS_FORCEINLINE_FUNCTION void compensated_add(V& high, V& low, const V& term) {
  const V y = term - low;
  const V t = high + y;
  low = (t - high) - y;
  high = t;
}

// As in simd.hpp: what is compiled differently for another vector width has another name.
inline namespace LINATTN_SIMD_ABI {

// Rows of the register tile: its accumulators and two vectors of B fit the register file.
inline constexpr int register_rows = LINATTN_SIMD_BYTES == 64 ? 8 : 4;

template <int N, class Body>
LINATTN_ALWAYS_INLINE void unroll(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) LINATTN_INLINE_LAMBDA {
    (body(Constant<I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <class T, int Vectors>
struct RegisterTile {
  static constexpr int rows = register_rows;
  static constexpr int lanes = vector_lanes<T>;
  vector_t<T> sum[rows][Vectors];

  LINATTN_ALWAYS_INLINE void clear() {
    unroll<rows>([&](auto r) LINATTN_INLINE_LAMBDA { unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { sum[r][v] = vector_t<T>{}; }); });
  }

  template <int First, int Last>
  LINATTN_ALWAYS_INLINE void step(const T* left, int a_row, const T* b) {
    vector_t<T> right[Vectors];
    unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { right[v] = load(b + v * lanes); });
    unroll<Last - First>([&](auto r) LINATTN_INLINE_LAMBDA {
      const T factor = left[(First + r) * a_row];
      unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { sum[First + r][v] += factor * right[v]; });
    });
  }

  LINATTN_ALWAYS_INLINE void add(int i0, int j0, const Product<T>& p) {
    const T* a = p.a.data + static_cast<std::int64_t>(i0) * p.a.row;
    const T* b = p.b + j0;
    const std::int64_t column = p.a.column, ldb = p.ldb;
    int begin = 0;
    int end = p.inner;
    if (p.band == Band::upper) {
      unroll<rows - 1>([&](auto e) LINATTN_INLINE_LAMBDA {  // on the diagonal: row r starts at l = i0 + r
        const int l = i0 + e;
        if (l < p.inner) step<0, e + 1>(a + l * column, p.a.row, b + l * ldb);
      });
      begin = i0 + rows - 1;
    } else if (p.band == Band::lower) {
      end = i0 + 1 < p.inner ? i0 + 1 : p.inner;
    }
    for (int l = begin; l < end; ++l) step<0, rows>(a + l * column, p.a.row, b + l * ldb);
    if (p.band == Band::lower) {
      unroll<rows - 1>([&](auto e) LINATTN_INLINE_LAMBDA {  // on the diagonal: row r ends at l = i0 + r
        const int l = i0 + 1 + e;
        if (l < p.inner) step<e + 1, rows>(a + l * column, p.a.row, b + l * ldb);
      });
    }
  }

  LINATTN_ALWAYS_INLINE void finish(int i0, int j0, const Target<T>& t) {
    const std::int64_t at = static_cast<std::int64_t>(i0) * t.ldc + j0;
    T* c = t.c + at;
    if (t.store == Store::compensated) {
      T* low = t.low + at;
      unroll<rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA {
          const std::int64_t k = std::int64_t(r) * t.ldc + v * lanes;
          vector_t<T> high_v = load(c + k), low_v = load(low + k);
          compensated_add(high_v, low_v, sum[r][v]);
          store(c + k, high_v);
          store(low + k, low_v);
        });
      });
    } else {
      unroll<rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA {
          T* target = c + std::int64_t(r) * t.ldc + v * lanes;
          if (t.store == Store::add) sum[r][v] += load(target);
          store(target, sum[r][v]);
        });
      });
    }
  }
};

// Whatever the inlining budget of the translation unit: a call inside would spill the accumulators.
template <class T, int Vectors>
LINATTN_FLATTEN inline void multiply_register_tile(int i0, int j0, const Product<T>* products, int count,
                                   const Target<T>& target) {
  RegisterTile<T, Vectors> tile;
  tile.clear();
  tile.add(i0, j0, products[0]);
  if (count > 1) tile.add(i0, j0, products[1]);
  tile.finish(i0, j0, target);
}

template <class T>
inline void multiply_on_host(int m, int n, const Product<T>* products, int count,
                             const Target<T>& target) {
  constexpr int lanes = vector_lanes<T>;
  for (int i0 = 0; i0 < m; i0 += register_rows) {
    const int columns = target.lower_only && i0 + register_rows < n ? i0 + register_rows : n;
    int j0 = 0;
    for (; j0 + lanes < columns; j0 += 2 * lanes)
      multiply_register_tile<T, 2>(i0, j0, products, count, target);
    if (j0 < columns) multiply_register_tile<T, 1>(i0, j0, products, count, target);
  }
}

template <class Team, class T>
KOKKOS_FUNCTION void multiply_on_device(const Team& team, int m, int n, const Product<T>* products,
                                        int count, const Target<T>& target) {
  constexpr int side = 4;
  const int tiles_across = (n + side - 1) / side;
  const int tiles = (m + side - 1) / side * tiles_across;
  for (int tile = team.rank(); tile < tiles; tile += team.size()) {
    const int i0 = tile / tiles_across * side;
    const int j0 = tile % tiles_across * side;
    if (target.lower_only && j0 > i0 + side - 1) continue;
    T sum[side][side];
    for (int r = 0; r < side; ++r)
      for (int s = 0; s < side; ++s) sum[r][s] = T(0);
    for (int which = 0; which < count; ++which) {
      const Product<T>& p = products[which];
      const int begin = p.band == Band::upper ? i0 : 0;
      const int end = p.band == Band::lower && i0 + side < p.inner ? i0 + side : p.inner;
      for (int l = begin; l < end; ++l) {
        T right[side];
        for (int s = 0; s < side; ++s) right[s] = p.b[l * p.ldb + j0 + s];
        for (int r = 0; r < side; ++r) {
          const bool counts =
              p.band == Band::all || (p.band == Band::lower ? l <= i0 + r : l >= i0 + r);
          if (!counts) continue;
          const T left = p.a.data[(i0 + r) * p.a.row + l * p.a.column];
          for (int s = 0; s < side; ++s) sum[r][s] += left * right[s];
        }
      }
    }
    for (int r = 0; r < side; ++r) {
      for (int s = 0; s < side; ++s) {
        const int at = (i0 + r) * target.ldc + j0 + s;
        if (target.store == Store::compensated)
          compensated_add(target.c[at], target.low[at], sum[r][s]);
        else
          target.c[at] = target.store == Store::add ? target.c[at] + sum[r][s] : sum[r][s];
      }
    }
  }
}

/// C = (or +=) the sum of one or two products; C is m x n. The terms of an element are added in
/// increasing order of l, first those of the first product, and their sum once to C: long sums over many
/// tiles are at least two-level. A barrier is the caller's duty.
template <class Team, class T>
KOKKOS_FUNCTION void multiply(const Team& team, int m, int n, const Product<T>* products, int count,
                              const Target<T>& target) {
  if constexpr (Team::on_host) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    multiply_on_host(m, n, products, count, target);
#endif
  } else {
    multiply_on_device(team, m, n, products, count, target);
  }
}

template <class Team, class T>
KOKKOS_FORCEINLINE_FUNCTION void multiply(const Team& team, int m, int n, const Product<T>& product,
                                          const Target<T>& target) {
  multiply(team, m, n, &product, 1, target);
}

template <class Team, class T>
KOKKOS_FORCEINLINE_FUNCTION void multiply(const Team& team, int m, int n, const Product<T>& first,
                                          const Product<T>& second, const Target<T>& target) {
  const Product<T> products[2] = {first, second};
  multiply(team, m, n, products, 2, target);
}

/// to[c][r] = from[r][c] for a rows x columns tile. The padding of `to` up to whole vectors is
/// overwritten with what lies in the padding of `from`.
template <class Team, class T>
KOKKOS_FUNCTION void transpose(const Team& team, int rows, int columns, const T* from, int ld_from,
                               T* to, int ld_to) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) {
    constexpr int lanes = vector_lanes<T>;
    for (int r = 0; r < rows; r += lanes)
      for (int c = 0; c < columns; c += lanes)
        transpose_block(from + std::int64_t(r) * ld_from + c, ld_from, to + std::int64_t(c) * ld_to + r,
                        ld_to);
    return;
  }
#endif
  for_each_in_rows(team, rows, columns, [&](int r) {
    return [=](int c) { to[c * ld_to + r] = from[r * ld_from + c]; };
  });
}

/// sum_i a_i b_i of two aligned rows padded with zeros to `n`, a multiple of tile_columns<T>.
template <class Team, class T>
KOKKOS_FUNCTION T row_dot(const Team&, const T* a, const T* b, int n) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) return dot(a, b, n);
#endif
  T total = 0;
  for (int i = 0; i < n; ++i) total += a[i] * b[i];
  return total;
}

/// sum_i a_i of an aligned row padded with zeros to `n`, a multiple of tile_columns<T>.
template <class Team, class T>
KOKKOS_FUNCTION T row_sum(const Team&, const T* a, int n) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) return sum(a, n);
#endif
  T total = 0;
  for (int i = 0; i < n; ++i) total += a[i];
  return total;
}

}  // namespace LINATTN_SIMD_ABI
}  // namespace LinAttn::detail
