// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/kokkos_compat.hpp>

/// \file tile_product.hpp
/// What a product of tiles is made of: factors, the terms that count, and what becomes of the sum.

namespace LinAttn::detail {

/// Which terms of sum_l A(i,l) B(l,j) count: all, those with l <= i, those with l >= i. Terms that do
/// not count are left out, never multiplied by zero, so that a NaN in them stays where it is.
enum class Band { all, lower, upper };

/// The left factor of a product, or its transpose: element (i, l) is data[i * row + l * column].
template <class T>
struct Factor {
  const T* data;
  std::int64_t row;
  std::int64_t column;
};

/// sum_l A(i,l) B(l,j) over 0 <= l < inner, of which `band` selects; B is row-major.
template <class T>
struct Product {
  Factor<T> a;
  const T* b;
  std::int64_t ldb;
  int inner;
  Band band = Band::all;
};

/// What becomes of the sum: C = sum, C += sum, or a compensated C += sum, where C - low is the value
/// and the error of a long sum stays that of its last addition (Kahan).
enum class Store { overwrite, add, compensated };

template <class T>
struct Target {
  T* c;
  std::int64_t ldc;
  Store store = Store::overwrite;
  T* low = nullptr;             // laid out as c
  bool lower_only = false;      // elements above the diagonal are unspecified, and cost nothing where possible
  bool transposed = false;      // element (i, j) of the sum goes to c[j * ldc + i]; not for compensated sums
  const T* divisor = nullptr;   // row i of the sum is divided by divisor[i] first; for Store::overwrite
};

/// A sum of up to three products that is put together step by step.
template <class T>
struct ProductSum {
  Product<T> terms[3];
  int count = 0;
  KOKKOS_FORCEINLINE_FUNCTION void add(const Product<T>& product) { terms[count++] = product; }
};

}  // namespace LinAttn::detail
