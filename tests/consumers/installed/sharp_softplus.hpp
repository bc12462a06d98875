// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/linattn.hpp>

#include "softplus.hpp"

/// phi(x) = log(1 + exp(rate x)) with one learnable rate for each head.
struct SharpSoftplusMap {
  LinAttn::Parameter rate = 1.0;

  /// The map of one head.
  template <class T>
  struct Bound {
    T rate;
    KOKKOS_FUNCTION T value(T x) const { return SoftplusMap{}.value(rate * x); }
    KOKKOS_FUNCTION T derivative(T, T f) const { return rate * slope(f); }
    KOKKOS_FUNCTION T parameter_derivative(T x, T f) const { return x * slope(f); }
    KOKKOS_FUNCTION T slope(T f) const { return SoftplusMap{}.derivative(T(0), f); }
  };
  template <class T>
  KOKKOS_FUNCTION Bound<T> bind(std::int64_t head) const {
    return {static_cast<T>(rate(head))};
  }

  template <class ExecSpace>
  void validate(const char* name, std::int64_t heads) const {
    rate.validate<ExecSpace>(name, heads);
  }
};

struct SharpSoftplus {
  static constexpr const char* name = "sharp-softplus";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = "query_rate";
  static constexpr const char* key_parameter = "key_rate";

  LinAttn::Parameter query_rate = 1.0;
  LinAttn::Parameter key_rate = 1.0;

  SharpSoftplusMap query_map() const { return {query_rate}; }
  SharpSoftplusMap key_map() const { return {key_rate}; }
};
