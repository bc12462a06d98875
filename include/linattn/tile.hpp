// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/team.hpp>
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

/// Rows of a tile are padded to a multiple of this.
inline constexpr int tile_rows = 8;
/// Columns of a tile are padded to a multiple of this: 64 bytes, for every vector width.
template <class T>
inline constexpr int tile_columns = 64 / static_cast<int>(sizeof(T));

template <class T>
constexpr int padded_columns(std::int64_t n) {
  return static_cast<int>((n + tile_columns<T> - 1) / tile_columns<T> * tile_columns<T>);
}
constexpr int padded_rows(std::int64_t n) {
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

inline namespace LINATTN_SIMD_ABI {

// Rows of the register tile: its accumulators and two vectors of B fit the register file.
inline constexpr int register_rows = LINATTN_SIMD_BYTES == 64 ? 8 : 4;

template <int N, class Body>
LINATTN_ALWAYS_INLINE void unroll(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

/// One register tile: rows i0 .. i0 + register_rows, Vectors vectors of columns from column j0.
template <int Vectors, class T>
inline void multiply_register_tile(int i0, int j0, int inner, Factor<T> a, const T* b, int ldb, T* c,
                                   int ldc, Band band, bool accumulate) {
  constexpr int rows = register_rows;
  constexpr int lanes = vector_lanes<T>;
  vector_t<T> sum[rows][Vectors];
  T* c_tile = c + static_cast<std::int64_t>(i0) * ldc + j0;
  unroll<rows>([&](auto r) {
    unroll<Vectors>([&](auto v) {
      sum[r][v] = vector_t<T>{};
    });
  });
  const T* a_tile = a.data + static_cast<std::int64_t>(i0) * a.row;
  const auto step = [&](int l, auto first, auto last) {
    vector_t<T> right[Vectors];
    unroll<Vectors>([&](auto v) {
      right[v] = load(b + static_cast<std::int64_t>(l) * ldb + j0 + v * lanes);
    });
    const T* left = a_tile + static_cast<std::int64_t>(l) * a.column;
    unroll<last - first>([&](auto r) {
      const T factor = left[(first + r) * a.row];
      unroll<Vectors>([&](auto v) { sum[first + r][v] += factor * right[v]; });
    });
  };
  using Zero = std::integral_constant<int, 0>;
  using Rows = std::integral_constant<int, rows>;
  int begin = 0;
  int end = inner;
  if (band == Band::upper) {
    unroll<rows - 1>([&](auto e) {  // on the diagonal: row r starts at l = i0 + r
      if (i0 + e < inner) step(i0 + e, Zero{}, std::integral_constant<int, e + 1>{});
    });
    begin = i0 + rows - 1;
  } else if (band == Band::lower) {
    end = i0 + 1 < inner ? i0 + 1 : inner;
  }
  for (int l = begin; l < end; ++l) step(l, Zero{}, Rows{});
  if (band == Band::lower) {
    unroll<rows - 1>([&](auto e) {  // on the diagonal: row r ends at l = i0 + r
      if (i0 + 1 + e < inner) step(i0 + 1 + e, std::integral_constant<int, e + 1>{}, Rows{});
    });
  }
  unroll<rows>([&](auto r) {
    unroll<Vectors>([&](auto v) {
      T* target = c_tile + r * ldc + v * lanes;
      if (accumulate) sum[r][v] += load(target);
      store(target, sum[r][v]);
    });
  });
}

template <class T>
inline void multiply_on_host(int m, int n, int inner, Factor<T> a, const T* b, int ldb, T* c, int ldc,
                             Band band, bool accumulate, bool lower_only) {
  constexpr int lanes = vector_lanes<T>;
  for (int i0 = 0; i0 < m; i0 += register_rows) {
    const int columns = lower_only && i0 + register_rows < n ? i0 + register_rows : n;
    int j0 = 0;
    for (; j0 + lanes < columns; j0 += 2 * lanes)
      multiply_register_tile<2>(i0, j0, inner, a, b, ldb, c, ldc, band, accumulate);
    if (j0 < columns)
      multiply_register_tile<1>(i0, j0, inner, a, b, ldb, c, ldc, band, accumulate);
  }
}

}  // namespace LINATTN_SIMD_ABI

template <class Team, class T>
KOKKOS_FUNCTION void multiply_on_device(const Team& team, int m, int n, int inner, Factor<T> a,
                                        const T* b, int ldb, T* c, int ldc, Band band, bool accumulate,
                                        bool lower_only) {
  constexpr int side = 4;
  const int tiles_across = (n + side - 1) / side;
  const int tiles = (m + side - 1) / side * tiles_across;
  for (int tile = team.rank(); tile < tiles; tile += team.size()) {
    const int i0 = tile / tiles_across * side;
    const int j0 = tile % tiles_across * side;
    if (lower_only && j0 > i0 + side - 1) continue;
    T sum[side][side];
    for (int r = 0; r < side; ++r)
      for (int s = 0; s < side; ++s) sum[r][s] = T(0);
    const int begin = band == Band::upper ? i0 : 0;
    const int end = band == Band::lower && i0 + side < inner ? i0 + side : inner;
    for (int l = begin; l < end; ++l) {
      T right[side];
      for (int s = 0; s < side; ++s) right[s] = b[l * ldb + j0 + s];
      for (int r = 0; r < side; ++r) {
        const bool counts = band == Band::all || (band == Band::lower ? l <= i0 + r : l >= i0 + r);
        if (!counts) continue;
        const T left = a.data[(i0 + r) * a.row + l * a.column];
        for (int s = 0; s < side; ++s) sum[r][s] += left * right[s];
      }
    }
    for (int r = 0; r < side; ++r)
      for (int s = 0; s < side; ++s) {
        T& target = c[(i0 + r) * ldc + j0 + s];
        target = accumulate ? target + sum[r][s] : sum[r][s];
      }
  }
}

/// C = A B, or C += A B if `accumulate`: C is m x n, the sum has `inner` terms, of which `band` selects.
/// With `lower_only` elements above the diagonal are unspecified, and cost nothing where possible.
/// The terms of an element are added in increasing order of l, and their sum once to C: sums over many
/// tiles are two-level. A barrier is the caller's duty.
template <class Team, class T>
KOKKOS_FUNCTION void multiply(const Team& team, int m, int n, int inner, Factor<T> a, const T* b,
                              int ldb, T* c, int ldc, Band band, bool accumulate,
                              bool lower_only = false) {
  if constexpr (Team::on_host) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    multiply_on_host(m, n, inner, a, b, ldb, c, ldc, band, accumulate, lower_only);
#endif
  } else {
    multiply_on_device(team, m, n, inner, a, b, ldb, c, ldc, band, accumulate, lower_only);
  }
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

}  // namespace LinAttn::detail
