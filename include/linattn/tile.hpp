// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/simd.hpp>
#include <linattn/team.hpp>
#include <linattn/tile_product.hpp>
#include <linattn/tile_tensor_core.hpp>
#include <type_traits>
#include <utility>

/// \file tile.hpp
/// Products of small matrices in fast memory: the arithmetic of every kernel goes through multiply().
///
/// Tiles are row-major; leading dimensions are multiples of tile_columns<T>, and the memory behind them
/// reaches up to a multiple of tile_rows rows, so that no register tile needs a remainder. What lies in
/// that padding never reaches a real element. Rows of the caller can stand in for a tile where their
/// number and length are such multiples.

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

template <class T, int Rows, int Vectors>
struct RegisterTile {
  static constexpr int lanes = vector_lanes<T>;
  vector_t<T> sum[Rows][Vectors];

  LINATTN_ALWAYS_INLINE void clear() {
    each([&](auto r, auto v) LINATTN_INLINE_LAMBDA { sum[r][v] = vector_t<T>{}; });
  }

  template <int First, int Last>
  LINATTN_ALWAYS_INLINE void step(const T* left, std::int64_t a_row, const T* b) {
    vector_t<T> right[Vectors];
    unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { right[v] = load(b + v * lanes); });
    unroll<Last - First>([&](auto r) LINATTN_INLINE_LAMBDA {
      const T factor = left[(First + r) * a_row];
      unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { sum[First + r][v] += factor * right[v]; });
    });
  }

  LINATTN_ALWAYS_INLINE void add(int i0, int j0, const Product<T>& p) {
    const std::int64_t row = p.a.row, column = p.a.column, ldb = p.ldb;
    const T* a = p.a.data + i0 * row;
    const T* b = p.b + j0;
    int begin = 0;
    int end = p.inner;
    if (p.band == Band::upper) {
      unroll<Rows - 1>([&](auto e) LINATTN_INLINE_LAMBDA {  // on the diagonal: row r starts at l = i0 + r
        const int l = i0 + e;
        if (l < p.inner) step<0, e + 1>(a + l * column, row, b + l * ldb);
      });
      begin = i0 + Rows - 1;
    } else if (p.band == Band::lower) {
      end = i0 + 1 < p.inner ? i0 + 1 : p.inner;
    }
    for (int l = begin; l < end; ++l) step<0, Rows>(a + l * column, row, b + l * ldb);
    if (p.band == Band::lower) {
      unroll<Rows - 1>([&](auto e) LINATTN_INLINE_LAMBDA {  // on the diagonal: row r ends at l = i0 + r
        const int l = i0 + 1 + e;
        if (l < p.inner) step<e + 1, Rows>(a + l * column, row, b + l * ldb);
      });
    }
  }

  LINATTN_ALWAYS_INLINE void finish(int i0, int j0, const Target<T>& t) {
    const std::int64_t ldc = t.ldc;  // what is stored below could be part of t, for all the compiler knows
    T* c = t.c + i0 * ldc + j0;
    const auto each_row = [&](const auto& body) LINATTN_INLINE_LAMBDA {
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { body(r, v); });
        c += ldc;
      });
    };
    if (t.store == Store::compensated) {
      const std::int64_t to_low = t.low - t.c;
      each_row([&](auto r, auto v) LINATTN_INLINE_LAMBDA {
        T* const at = c + v * lanes;
        vector_t<T> high_v = load(at), low_v = load(at + to_low);
        compensated_add(high_v, low_v, sum[r][v]);
        store(at, high_v);
        store(at + to_low, low_v);
      });
    } else if (t.store == Store::add) {
      each_row([&](auto r, auto v) LINATTN_INLINE_LAMBDA { store(c + v * lanes, load(c + v * lanes) + sum[r][v]); });
    } else if (t.divisor) {
      const T* const divisor = t.divisor + i0;
      each_row([&](auto r, auto v) LINATTN_INLINE_LAMBDA { store(c + v * lanes, sum[r][v] / divisor[r]); });
    } else {
      each_row([&](auto r, auto v) LINATTN_INLINE_LAMBDA { store(c + v * lanes, sum[r][v]); });
    }
  }

  /// As finish() for a square tile and a transposed target.
  LINATTN_ALWAYS_INLINE void finish_transposed(int i0, int j0, const Target<T>& t) {
    static_assert(Rows == lanes && Vectors == 1);
    const std::int64_t ldc = t.ldc;
    const bool adds = t.store == Store::add;
    T* const c = t.c + j0 * ldc + i0;
    vector_t<T> rows[lanes];
    unroll<lanes>([&](auto r) LINATTN_INLINE_LAMBDA { rows[r] = sum[r][0]; });
    transpose_in_place<T>(rows);
    for (int r = 0; r < lanes; ++r) {
      T* const to = c + r * ldc;
      store(to, adds ? load(to) + rows[r] : rows[r]);
    }
  }

 private:
  template <class Body>
  LINATTN_ALWAYS_INLINE static void each(const Body& body) {
    unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA { unroll<Vectors>([&](auto v) LINATTN_INLINE_LAMBDA { body(r, v); }); });
  }
};

// Whatever the inlining budget of the translation unit: a call inside would spill the accumulators.
template <class T, int Vectors>
LINATTN_FLATTEN inline void multiply_register_tile(int i0, int j0, const Product<T>* products, int count,
                                                   const Target<T>& target) {
  RegisterTile<T, register_rows, Vectors> tile;
  tile.clear();
  for (int p = 0; p < count; ++p) tile.add(i0, j0, products[p]);
  tile.finish(i0, j0, target);
}

template <class T>
LINATTN_FLATTEN inline void multiply_transposed_tile(int i0, int j0, const Product<T>* products, int count,
                                                     const Target<T>& target) {
  RegisterTile<T, vector_lanes<T>, 1> tile;
  tile.clear();
  for (int p = 0; p < count; ++p) tile.add(i0, j0, products[p]);
  tile.finish_transposed(i0, j0, target);
}

// A panel of columns at a time: what all rows read of the right factor stays in the first cache.
template <class Team, class T>
inline void multiply_on_host(const Team& team, int m, int n, const Product<T>* products, int count,
                             const Target<T>& target) {
  constexpr int lanes = vector_lanes<T>;
  if (target.transposed) {
    for (int j0 = 0; j0 < n; j0 += lanes) {
      for (int i0 = 0; i0 < m; i0 += lanes) {
        multiply_transposed_tile<T>(i0, j0, products, count, target);
        team.between_tiles();
      }
    }
    return;
  }
  for (int j0 = 0; j0 < n; j0 += 2 * lanes) {
    for (int i0 = 0; i0 < m; i0 += register_rows) {
      const int columns = target.lower_only && i0 + register_rows < n ? i0 + register_rows : n;
      if (j0 + lanes < columns)
        multiply_register_tile<T, 2>(i0, j0, products, count, target);
      else if (j0 < columns)
        multiply_register_tile<T, 1>(i0, j0, products, count, target);
      team.between_tiles();
    }
  }
}

template <class Team, class T>
KOKKOS_FUNCTION void multiply_on_device(const Team& team, int m, int n, const Product<T>* products,
                                        int count, const Target<T>& target) {
#if defined(LINATTN_HAS_TENSOR_CORES)
  if constexpr (std::is_same_v<T, float>) {
    if (team.allow_tf32 && team.size() % tensor_core::warp == 0 && target.store != Store::compensated)
      return multiply_on_tensor_cores(team, m, n, products, count, target);
  }
#endif
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
    const auto add = [&](const Product<T>& p) {
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
    };
    // one after the other by name: an index that the compiler does not know would put them into local memory
    add(products[0]);
    if (count > 1) add(products[1]);
    if (count > 2) add(products[2]);
    for (int r = 0; r < side; ++r) {
      const T divisor = target.divisor ? target.divisor[i0 + r] : T(1);
      for (int s = 0; s < side; ++s) {
        const std::int64_t at =
            target.transposed ? (j0 + s) * target.ldc + i0 + r : (i0 + r) * target.ldc + j0 + s;
        if (target.store == Store::compensated)
          compensated_add(target.c[at], target.low[at], sum[r][s]);
        else if (target.store == Store::add)
          target.c[at] += sum[r][s];
        else
          target.c[at] = target.divisor ? sum[r][s] / divisor : sum[r][s];
      }
    }
  }
}

/// C = (or +=) the sum of a few products; C is m x n. The terms of an element are added in increasing
/// order of l, product after product, and their sum once to C: long sums over many tiles are at least
/// two-level. A barrier is the caller's duty.
template <class Team, class T>
KOKKOS_FUNCTION void multiply(const Team& team, int m, int n, const Product<T>* products, int count,
                              const Target<T>& target) {
  if constexpr (Team::on_host) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    multiply_on_host(team, m, n, products, count, target);
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
KOKKOS_FORCEINLINE_FUNCTION void multiply(const Team& team, int m, int n, const ProductSum<T>& sum,
                                          const Target<T>& target) {
  multiply(team, m, n, sum.terms, sum.count, target);
}

/// to[c][r] = from[r][c] for a rows x columns tile. The padding of `to` up to whole vectors is
/// overwritten with what lies in the padding of `from`.
template <class Team, class T>
KOKKOS_FUNCTION void transpose(const Team& team, int rows, int columns, const T* from, std::int64_t ld_from,
                               T* to, std::int64_t ld_to) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) {
    constexpr int lanes = vector_lanes<T>;
    for (int r = 0; r < rows; r += lanes)
      for (int c = 0; c < columns; c += lanes)
        transpose_block(from + r * ld_from + c, ld_from, to + c * ld_to + r, ld_to);
    return;
  }
#endif
  for_each_in_rows(team, rows, columns, [&](int r) {
    return [=](int c) { to[c * ld_to + r] = from[r * ld_from + c]; };
  });
}

/// Adds terms[i] to the elements on and below the diagonal of a square tile and sets those above it, all
/// rows before `first` and the padding up to `padded` to zero. A barrier is the caller's duty.
template <class Team, class T>
KOKKOS_FUNCTION void keep_lower_triangle(const Team& team, int rows, int first, int padded, T* tile,
                                         std::int64_t ld, const T* terms) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) {
    constexpr int lanes = vector_lanes<T>;
    for (int i = 0; i < rows; ++i) {
      const int end = i >= first ? i + 1 : 0;
      const T term = terms ? terms[i] : T(0);
      for (int j = 0; j < padded; j += lanes)
        store(tile + i * ld + j, keep_first<T>(load(tile + i * ld + j) + term, end - j));
    }
    return;
  }
#endif
  for_each_in_rows(team, rows, padded, [=](int i) {
    T* row = tile + i * ld;
    const int end = i >= first ? i + 1 : 0;
    const T term = terms ? terms[i] : T(0);
    return [=](int j) { row[j] = j < end ? row[j] + term : T(0); };
  });
}

/// One or two sums along each row of a tile, added up.
///
///     out_r = sum_{j < n} a(r, j) b(r, j) + sum_{j < more_n} more(r, j)
///
/// b may be one row for all (ldb = 0), `more` absent. Row lengths are padded with zeros to multiples of
/// tile_columns<T>, and the rows (and out) reach to a multiple of tile_rows. A barrier is the caller's duty.
template <class T>
struct RowSums {
  const T* a;
  std::int64_t lda;
  const T* b;
  std::int64_t ldb;
  int n;
  const T* more = nullptr;
  std::int64_t ld_more = 0;
  int more_n = 0;
};

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
template <class T>
LINATTN_FLATTEN inline void sum_rows_on_host(int rows, const RowSums<T>& s, T* out) {
  constexpr int lanes = vector_lanes<T>;
  for (int r0 = 0; r0 < rows; r0 += lanes) {
    vector_t<T> sum[lanes];
    for (int r = 0; r < lanes; ++r) {
      const T* a = s.a + (r0 + r) * s.lda;
      const T* b = s.b + (r0 + r) * s.ldb;
      vector_t<T> total = {};
      for (int j = 0; j < s.n; j += lanes) total += load(a + j) * load(b + j);
      if (s.more) {
        const T* more = s.more + (r0 + r) * s.ld_more;
        for (int j = 0; j < s.more_n; j += lanes) total += load(more + j);
      }
      sum[r] = total;
    }
    store(out + r0, sum_along_rows<T>(sum));
  }
}
#endif

template <class Team, class T>
KOKKOS_FUNCTION void sum_rows(const Team& team, int rows, const RowSums<T>& s, T* out) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) return sum_rows_on_host(rows, s, out);
#endif
  for_each(team, rows, [&](int r) {
    T total = T(0);
    for (int j = 0; j < s.n; ++j) total += s.a[r * s.lda + j] * s.b[r * s.ldb + j];
    for (int j = 0; s.more && j < s.more_n; ++j) total += s.more[r * s.ld_more + j];
    out[r] = total;
  });
}

/// out_r = sum_{j < n} a(r, j) b(r, j), the terms added in increasing order of j as multiply() adds them: of
/// equal factors the two make equal sums, which then cancel exactly. Padding as in RowSums. A barrier is the
/// caller's duty.
template <class Team, class T>
KOKKOS_FUNCTION void dot_rows(const Team& team, int rows, const T* a, std::int64_t lda, const T* b, std::int64_t ldb,
                              int n, T* out) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  if constexpr (Team::on_host) {
    constexpr int lanes = vector_lanes<T>;
    for (int r0 = 0; r0 < rows; r0 += lanes) {
      vector_t<T> total = {};
      for (int j0 = 0; j0 < n; j0 += lanes) {
        vector_t<T> left[lanes], right[lanes];
        for (int r = 0; r < lanes; ++r) {
          left[r] = load(a + (r0 + r) * lda + j0);
          right[r] = load(b + (r0 + r) * ldb + j0);
        }
        transpose_in_place<T>(left);
        transpose_in_place<T>(right);
        for (int j = 0; j < lanes; ++j) total += left[j] * right[j];
      }
      store(out + r0, total);
    }
    return;
  }
#endif
  for_each(team, rows, [&](int r) {
    T total = T(0);
    for (int j = 0; j < n; ++j) total += a[r * lda + j] * b[r * ldb + j];
    out[r] = total;
  });
}

}  // namespace LINATTN_SIMD_ABI
}  // namespace LinAttn::detail
