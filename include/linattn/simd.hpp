// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

/// \file simd.hpp
/// The widest vector type of the host, behind one name.
///
/// Compiler vector extensions are used because they reach the peak of the machine with GCC, Clang and
/// the host pass of nvcc, and compile to plain code where the machine has no such registers.

#if defined(__GNUC__) || defined(__clang__)
#define LINATTN_HAS_VECTOR_EXTENSIONS 1
#if defined(__AVX512F__)
#define LINATTN_SIMD_BYTES 64
#define LINATTN_SIMD_ABI simd512
#elif defined(__AVX__)
#define LINATTN_SIMD_BYTES 32
#define LINATTN_SIMD_ABI simd256
#else
#define LINATTN_SIMD_BYTES 16
#define LINATTN_SIMD_ABI simd128
#endif
#define LINATTN_ALWAYS_INLINE __attribute__((always_inline)) inline
#if !defined(__CUDACC__) && !defined(__HIPCC__)
#define LINATTN_FLATTEN __attribute__((flatten))
#else
#define LINATTN_FLATTEN
#endif
#define LINATTN_INLINE_LAMBDA __attribute__((always_inline))
#else
#define LINATTN_SIMD_BYTES 16
#define LINATTN_SIMD_ABI scalar
#define LINATTN_ALWAYS_INLINE inline
#define LINATTN_FLATTEN
#define LINATTN_INLINE_LAMBDA
#endif

/// GCC before 12 has no __builtin_shufflevector, and nvcc cannot expand packs in it.
#if defined(LINATTN_HAS_VECTOR_EXTENSIONS) && defined(__has_builtin) && !defined(__CUDACC__)
#if __has_builtin(__builtin_shufflevector)
#define LINATTN_HAS_SHUFFLE 1
#endif
#endif

/// A function that stays one of its own on the host: loops of a large caller are vectorised less well.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDACC__) && !defined(__HIPCC__)
#define LINATTN_OUTLINE __attribute__((noinline))
#else
#define LINATTN_OUTLINE
#endif

/// Before a loop whose iterations are independent: the compiler need not prove that for its pointers.
#if defined(__CUDACC__)
#define LINATTN_INDEPENDENT
#elif defined(__clang__)
#define LINATTN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define LINATTN_INDEPENDENT _Pragma("GCC ivdep")
#else
#define LINATTN_INDEPENDENT
#endif

namespace LinAttn::detail {
// Code compiled for different vector widths must never share a symbol, or the linker would pick one
// of them for all; the width is therefore part of every name below and of those of tile.hpp.
inline namespace LINATTN_SIMD_ABI {

/// A vector of T that fills one register. T is float or double.
template <class T>
struct Vector;

#if defined(LINATTN_HAS_VECTOR_EXTENSIONS)

template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias));
  typedef float unaligned __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias, aligned(alignof(float))));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias));
  typedef double unaligned __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias, aligned(alignof(double))));
};

#else

template <class T>
struct Vector {
  struct type {
    T lane[LINATTN_SIMD_BYTES / sizeof(T)];
    T& operator[](int i) { return lane[i]; }
    const T& operator[](int i) const { return lane[i]; }
    friend type operator*(T a, const type& b) {
      type c;
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) c.lane[i] = a * b.lane[i];
      return c;
    }
    friend type operator*(const type& a, const type& b) {
      type c;
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i)
        c.lane[i] = a.lane[i] * b.lane[i];
      return c;
    }
    friend type operator+(const type& a, const type& b) {
      type c = a;
      return c += b;
    }
    friend type operator-(const type& a, const type& b) {
      type c;
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) c.lane[i] = a.lane[i] - b.lane[i];
      return c;
    }
    type& operator+=(const type& b) {
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) lane[i] += b.lane[i];
      return *this;
    }
    friend type operator+(const type& a, T b) {
      type c;
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) c.lane[i] = a.lane[i] + b;
      return c;
    }
    friend type operator/(const type& a, T b) {
      type c;
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) c.lane[i] = a.lane[i] / b;
      return c;
    }
  };
  using unaligned = type;
};

#endif

template <class T>
using vector_t = typename Vector<T>::type;
template <class T>
inline constexpr int vector_lanes = LINATTN_SIMD_BYTES / static_cast<int>(sizeof(T));

/// Any address of an element will do: where it is a multiple of the vector size, nothing is lost.
template <class T>
LINATTN_ALWAYS_INLINE vector_t<T> load(const T* address) {
  return *reinterpret_cast<const typename Vector<T>::unaligned*>(address);
}
template <class T>
LINATTN_ALWAYS_INLINE void store(T* address, const vector_t<T>& value) {
  *reinterpret_cast<typename Vector<T>::unaligned*>(address) = value;
}

#if defined(LINATTN_HAS_SHUFFLE)

// One stage of an in-register transposition: exchanges the bit `Distance` of row and lane numbers.
template <int Distance, class V, int... Lane>
LINATTN_ALWAYS_INLINE void exchange(V& a, V& b, std::integer_sequence<int, Lane...>) {
  constexpr int lanes = sizeof...(Lane);
  const V low = __builtin_shufflevector(a, b, ((Lane & Distance) ? lanes + Lane - Distance : Lane)...);
  b = __builtin_shufflevector(a, b, ((Lane & Distance) ? lanes + Lane : Lane + Distance)...);
  a = low;
}

template <class T, int Distance>
LINATTN_ALWAYS_INLINE void transpose_stages(vector_t<T>* rows) {
  constexpr int lanes = vector_lanes<T>;
  if constexpr (Distance < lanes) {
    [&]<int... I>(std::integer_sequence<int, I...>) LINATTN_INLINE_LAMBDA {
      ((I & Distance ? void()
                     : exchange<Distance>(rows[I], rows[I | Distance],
                                          std::make_integer_sequence<int, lanes>{})),
       ...);
    }(std::make_integer_sequence<int, lanes>{});
    transpose_stages<T, 2 * Distance>(rows);
  }
}

/// to[c][r] = from[r][c] for one square block as wide as a vector.
template <class T>
LINATTN_ALWAYS_INLINE void transpose_block(const T* from, std::int64_t ld_from, T* to,
                                           std::int64_t ld_to) {
  constexpr int lanes = vector_lanes<T>;
  vector_t<T> rows[lanes];
  for (int r = 0; r < lanes; ++r) rows[r] = load(from + r * ld_from);
  transpose_stages<T, 1>(rows);
  for (int r = 0; r < lanes; ++r) store(to + r * ld_to, rows[r]);
}

#else

template <class T>
void transpose_block(const T* from, std::int64_t ld_from, T* to, std::int64_t ld_to) {
  for (int r = 0; r < vector_lanes<T>; ++r)
    for (int c = 0; c < vector_lanes<T>; ++c) to[c * ld_to + r] = from[r * ld_from + c];
}

#endif

/// The first `count` lanes, zeros in the others (which may hold anything).
template <class T>
LINATTN_ALWAYS_INLINE vector_t<T> keep_first(vector_t<T> v, int count) {
#if defined(LINATTN_HAS_SHUFFLE)
  using Index = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  typedef Index Lanes __attribute__((vector_size(LINATTN_SIMD_BYTES)));
  const Lanes lane = [&]<int... I>(std::integer_sequence<int, I...>) LINATTN_INLINE_LAMBDA {
    return Lanes{I...};
  }(std::make_integer_sequence<int, vector_lanes<T>>{});
  return lane < static_cast<Index>(count) ? v : vector_t<T>{};
#else
  for (int i = count < 0 ? 0 : count; i < vector_lanes<T>; ++i) v[i] = T(0);
  return v;
#endif
}

/// Transposes a square block held in vectors, one a row.
template <class T>
LINATTN_ALWAYS_INLINE void transpose_in_place(vector_t<T>* rows) {
#if defined(LINATTN_HAS_SHUFFLE)
  transpose_stages<T, 1>(rows);
#else
  constexpr int lanes = vector_lanes<T>;
  for (int r = 0; r < lanes; ++r) {
    for (int c = 0; c < r; ++c) {
      const T lower = rows[r][c];
      rows[r][c] = rows[c][r];
      rows[c][r] = lower;
    }
  }
#endif
}

/// Lane r of the result is the sum of rows[r], added in a fixed order; the rows are overwritten.
template <class T>
LINATTN_ALWAYS_INLINE vector_t<T> sum_along_rows(vector_t<T>* rows) {
  transpose_in_place<T>(rows);
  for (int width = vector_lanes<T> / 2; width > 0; width /= 2)
    for (int r = 0; r < width; ++r) rows[r] += rows[r + width];
  return rows[0];
}

template <bool ToWrite = false>
inline void prefetch([[maybe_unused]] const void* address) {
#if defined(LINATTN_HAS_SHUFFLE)
  __builtin_prefetch(address, ToWrite ? 1 : 0);
#endif
}

}  // namespace LINATTN_SIMD_ABI
}  // namespace LinAttn::detail
