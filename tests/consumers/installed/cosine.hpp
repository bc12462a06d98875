// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/linattn.hpp>

/// phi(x) = (x / |x|, 1) with |x|^2 = sum_d x_d^2 + epsilon, so that w_ij = 1 + cos(q_i, k_j).
struct CosineMap {
  double epsilon = 1e-6;

  std::int64_t features(std::int64_t d) const { return d + 1; }

  template <class T>
  KOKKOS_FUNCTION void row_value(LinAttn::ConstRow<T> x, LinAttn::Row<T> f) const {
    const T scale = T(1) / norm(x);
    for (std::int64_t d = 0; d < x.size; ++d) f[d] = scale * x[d];
    f[x.size] = T(1);
  }

  /// dx = (df - f (f . df)) / |x|, over the first D features.
  template <class T>
  KOKKOS_FUNCTION void row_pullback(LinAttn::ConstRow<T> x, LinAttn::ConstRow<T> f,
                                    LinAttn::ConstRow<T> df, LinAttn::Row<T> dx) const {
    const T scale = T(1) / norm(x);
    T along = T(0);
    for (std::int64_t d = 0; d < x.size; ++d) along += f[d] * df[d];
    for (std::int64_t d = 0; d < x.size; ++d) dx[d] = scale * (df[d] - along * f[d]);
  }

 private:
  template <class T>
  KOKKOS_FUNCTION T norm(LinAttn::ConstRow<T> x) const {
    using std::sqrt;
    T square = T(epsilon);
    for (std::int64_t d = 0; d < x.size; ++d) square += x[d] * x[d];
    return sqrt(square);
  }
};

struct Cosine : LinAttn::SameMapVariant<CosineMap> {
  static constexpr const char* name = "cosine";
};
