// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <linattn/linattn.hpp>

/// phi(x) = log(1 + exp(x)), phi'(x) = 1 - exp(-phi(x)).
struct SoftplusMap {
  template <class T>
  KOKKOS_FUNCTION T value(T x) const {
    using std::abs, std::exp, std::log1p;
    return (x > T(0) ? x : T(0)) + log1p(exp(-abs(x)));
  }
  template <class T>
  KOKKOS_FUNCTION T derivative(T, T f) const {
    using std::expm1;
    return -expm1(-f);
  }
};

struct Softplus : LinAttn::SameMapVariant<SoftplusMap> {
  static constexpr const char* name = "softplus";
};
