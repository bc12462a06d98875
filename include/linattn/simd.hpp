// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

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
#else
#define LINATTN_SIMD_BYTES 16
#define LINATTN_SIMD_ABI scalar
#define LINATTN_ALWAYS_INLINE inline
#endif

namespace LinAttn::detail {
// Code compiled for different vector widths must never share a symbol, or the linker would pick one
// of them for all; the width is therefore part of every name below.
inline namespace LINATTN_SIMD_ABI {

/// A vector of T that fills one register. T is float or double.
template <class T>
struct Vector;

#if defined(LINATTN_HAS_VECTOR_EXTENSIONS)

template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(LINATTN_SIMD_BYTES), may_alias));
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
    type& operator+=(const type& b) {
      for (std::size_t i = 0; i < LINATTN_SIMD_BYTES / sizeof(T); ++i) lane[i] += b.lane[i];
      return *this;
    }
  };
};

#endif

template <class T>
using vector_t = typename Vector<T>::type;
template <class T>
inline constexpr int vector_lanes = LINATTN_SIMD_BYTES / static_cast<int>(sizeof(T));

/// `address` must be a multiple of the vector size.
template <class T>
LINATTN_ALWAYS_INLINE vector_t<T> load(const T* address) {
  return *reinterpret_cast<const vector_t<T>*>(address);
}
template <class T>
LINATTN_ALWAYS_INLINE void store(T* address, const vector_t<T>& value) {
  *reinterpret_cast<vector_t<T>*>(address) = value;
}

template <class T>
LINATTN_ALWAYS_INLINE T horizontal_sum(const vector_t<T>& v) {
  T lanes[vector_lanes<T>];
  for (int i = 0; i < vector_lanes<T>; ++i) lanes[i] = v[i];
  for (int width = vector_lanes<T> / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

/// sum_i a_i b_i over n elements, n a multiple of the lanes, both aligned.
template <class T>
LINATTN_ALWAYS_INLINE T dot(const T* a, const T* b, int n) {
  vector_t<T> sum[2] = {};
  int i = 0;
  for (; i + 2 * vector_lanes<T> <= n; i += 2 * vector_lanes<T>) {
    sum[0] += load(a + i) * load(b + i);
    sum[1] += load(a + i + vector_lanes<T>) * load(b + i + vector_lanes<T>);
  }
  if (i < n) sum[0] += load(a + i) * load(b + i);
  sum[0] += sum[1];
  return horizontal_sum<T>(sum[0]);
}

/// sum_i a_i over n elements, n a multiple of the lanes, aligned.
template <class T>
LINATTN_ALWAYS_INLINE T sum(const T* a, int n) {
  vector_t<T> total = {};
  for (int i = 0; i < n; i += vector_lanes<T>) total += load(a + i);
  return horizontal_sum<T>(total);
}

}  // namespace LINATTN_SIMD_ABI
}  // namespace LinAttn::detail
