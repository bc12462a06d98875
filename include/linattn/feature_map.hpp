// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <linattn/kokkos_compat.hpp>
#include <linattn/tensor.hpp>
#include <type_traits>

/// \file feature_map.hpp
/// Feature maps phi: the row of D entries of a query or key -> a row of R features, with pullback.
///
/// Four forms; a map is a small trivially copyable struct of one of them. All members are
/// KOKKOS_FUNCTIONs and T is the accumulator type (float or double).
///
/// **Elementwise** (R = D), f = phi(x) for each entry:
///
///     template <class T> T value(T x) const;
///     template <class T> T derivative(T x, T f) const;        // phi'(x), f = phi(x) is given too
///
/// **Row-wise** (any R), for maps that mix the entries of a row (normalisation, products, projections):
///
///     std::int64_t features(std::int64_t d) const;                                    // R
///     template <class T> void row_value(ConstRow<T> x, Row<T> f) const;               // f = phi(x)
///     template <class T> void row_pullback(ConstRow<T> x, ConstRow<T> f, ConstRow<T> df,
///                                          Row<T> dx) const;                          // dx = J(x)^T df
///
/// **Scaled** (elementwise, exponential growth): features are f(x) 2^-s with an integer shift s chosen
/// by the engine so that nothing overflows (see Exponential), and derivatives are proportional to f:
///
///     template <class T> int exponent(T x) const;             // n, |n| <= 2^24, with f(x) within a factor 2 of 2^n
///     template <class T> T value(T x, int shift) const;       // f(x) 2^-shift
///     template <class T> T derivative(T x, T f) const;        // homogeneous of degree 1 in f
///
/// **Row-norm** (R = D), rows divided by a norm: f = rate x / rho (see RowNormMap). The bound map has members
/// `T rate`, `T eps` and `bool per_row`: rho = sqrt(|x|^2 + eps) for each row, or else 1, or else, where the unbound
/// map's `bool of_sequence() const` asks for it, the largest |x| of the rows of the sequence and head. A rho too small
/// to divide by counts as 1. The rate is differentiable; the engine knows the pullback.
///
/// A map whose features are never negative may say so with `static constexpr bool is_nonnegative = true`, which spares
/// analysis looking for weights that are; scaled maps need not.
///
/// A map with one differentiable scalar for each head offers
///
///     template <class T> auto bind(std::int64_t head) const;  // the map of one head
///
/// whose result has `template <class T> T parameter_derivative(T x, T f) const` (elementwise and
/// scaled maps only), and `template <class ExecSpace> void validate(const char* name, std::int64_t
/// heads) const` on the unbound map, called on the host before any kernel.

namespace LinAttn {

/// A row of values in fast or global memory.
template <class T>
struct Row {
  T* data;
  std::int64_t size;
  std::int64_t stride;
  KOKKOS_FUNCTION T& operator[](std::int64_t i) const { return data[i * stride]; }
};
template <class T>
using ConstRow = Row<const T>;

/// The map of one head: a map without parameters is its own.
template <class T, class Map>
KOKKOS_FORCEINLINE_FUNCTION auto bind_map(const Map& map, std::int64_t head) {
  if constexpr (requires { map.template bind<T>(head); })
    return map.template bind<T>(head);
  else
    return map;
}

template <class Map, class T = double>
using BoundMap = decltype(bind_map<T>(std::declval<const Map&>(), std::int64_t(0)));

/// Elementwise map: see the top of this file.
template <class Map>
concept ElementwiseFeatureMap = requires(const BoundMap<Map>& map, double x) {
  { map.value(x) } -> std::same_as<double>;
  { map.derivative(x, x) } -> std::same_as<double>;
};

/// Scaled map: see the top of this file.
template <class Map>
concept ScaledFeatureMap = requires(const BoundMap<Map>& map, double x) {
  { map.exponent(x) } -> std::same_as<int>;
  { map.value(x, 0) } -> std::same_as<double>;
  { map.derivative(x, x) } -> std::same_as<double>;
};

/// Row-wise map: see the top of this file.
template <class Map>
concept RowFeatureMap = requires(const BoundMap<Map>& map, ConstRow<double> in, Row<double> out) {
  { map.features(std::int64_t(1)) } -> std::same_as<std::int64_t>;
  map.row_value(in, out);
  map.row_pullback(in, in, in, out);
};

/// Row-norm map: see the top of this file.
template <class Map>
concept RowNormFeatureMap = requires(const Map& unbound, const BoundMap<Map>& map, double x) {
  { unbound.of_sequence() } -> std::same_as<bool>;
  { map.rate + map.eps + x } -> std::same_as<double>;
  { map.per_row } -> std::convertible_to<bool>;
};

template <class Map>
concept FeatureMap = std::is_trivially_copyable_v<Map> &&
                     (ElementwiseFeatureMap<Map> || ScaledFeatureMap<Map> || RowFeatureMap<Map> ||
                      RowNormFeatureMap<Map>);

/// Whether the features of a row depend on all of its entries.
template <class Map>
inline constexpr bool mixes_entries_v = RowFeatureMap<Map> || RowNormFeatureMap<Map>;

/// Whether the map has one differentiable scalar for each head, elementwise.
template <class Map>
concept ParameterizedFeatureMap = requires(const BoundMap<Map>& map, double x) {
  { map.parameter_derivative(x, x) } -> std::same_as<double>;
};

/// R, the features of a row of d entries.
template <FeatureMap Map>
std::int64_t feature_count(const Map& map, std::int64_t d) {
  if constexpr (RowFeatureMap<Map>)
    return map.features(d);
  else
    return d;
}

/// A map that leaves rows as they are says so with `static constexpr bool is_identity = true`; the engine
/// then need not copy them.
template <class Map>
concept IdentityFeatureMap = ElementwiseFeatureMap<Map> && requires { requires Map::is_identity; };

/// phi(x) = x.
struct IdentityMap {
  static constexpr bool is_identity = true;
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T value(T x) const {
    return x;
  }
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T derivative(T, T) const {
    return T(1);
  }
};

/// phi(x) = max(x, 0), with phi'(0) = 0.
struct ReluMap {
  static constexpr bool is_nonnegative = true;
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T value(T x) const {
    return x < T(0) ? T(0) : x;  // a NaN stays a NaN
  }
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T derivative(T x, T) const {
    return x > T(0) ? T(1) : T(0);
  }
};

/// phi(x) = x^2.
struct QuadraticMap {
  static constexpr bool is_nonnegative = true;
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T value(T x) const {
    return x * x;
  }
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T derivative(T x, T) const {
    return T(2) * x;
  }
};

namespace detail {

/// 2^e for e from the exponent of 0 (which gives 0) to that of the largest number.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T power_of_two_in_range(int e) {
  T result;
  if constexpr (sizeof(T) == 4) {
    const std::uint32_t bits = static_cast<std::uint32_t>(e + 127) << 23;
    std::memcpy(&result, &bits, sizeof result);
  } else {
    const std::uint64_t bits = static_cast<std::uint64_t>(e + 1023) << 52;
    std::memcpy(&result, &bits, sizeof result);
  }
  return result;
}

/// 2^e exactly; 0 below the smallest normal number and infinity above the largest.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T power_of_two(int e) {
  constexpr int bias = sizeof(T) == 4 ? 127 : 1023;
  e = e < -bias ? -bias : e;
  e = e > bias + 1 ? bias + 1 : e;
  return power_of_two_in_range<T>(e);
}

/// 2^f for |f| <= 1/2 and a little beyond, by its Taylor polynomial (ln 2)^k / k!; the error of the
/// series is below 2^-26 (float) and 2^-56 (double), so that rounding dominates.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T exp2_fraction(T f) {
  T p;
  if constexpr (sizeof(T) == 4) {
    p = T(1.5252733804059841e-05);
  } else {
    p = T(1.3691488853904128e-12);
    p = p * f + T(2.5678435993488206e-11);
    p = p * f + T(4.4455382718708116e-10);
    p = p * f + T(7.0549116208011234e-09);
    p = p * f + T(1.0178086009239700e-07);
    p = p * f + T(1.3215486790144310e-06);
    p = p * f + T(1.5252733804059841e-05);
  }
  p = p * f + T(1.5403530393381609e-04);
  p = p * f + T(1.3333558146428443e-03);
  p = p * f + T(9.6181291076284769e-03);
  p = p * f + T(5.5504108664821583e-02);
  p = p * f + T(2.4022650695910072e-01);
  p = p * f + T(6.9314718055994529e-01);
  return p * f + T(1);
}

template <class T>
KOKKOS_FORCEINLINE_FUNCTION T fused_multiply_add(T a, T b, T c) {
  using std::fma;
  return fma(a, b, c);
}

template <class T>
KOKKOS_FORCEINLINE_FUNCTION T round_to_integer(T x) {
  using std::rint;
  return rint(x);
}

/// exp(rate x) split into mantissa and integer exponent of base 2.
template <class T>
struct BoundExponential {
  T rate;      // derivative of the logarithm
  T high;      // rate / ln 2, rounded to T ...
  T low;       // ... and what the rounding left
  T largest;   // |x| at which the logarithm saturates
  /// Logarithms to base 2 saturate at this size, where T resolves less than 1/16 of them.
  static constexpr T limit = T(1 << 20);

  /// x within the range where the logarithm does not saturate; a NaN passes.
  KOKKOS_FORCEINLINE_FUNCTION T within(T x) const {
    x = -largest > x ? -largest : x;
    return largest < x ? largest : x;
  }
  /// The logarithm to base 2, rounded; the least of all for a NaN.
  KOKKOS_FORCEINLINE_FUNCTION T nearest(T within_range) const {
    const T y = within_range * high;
    return round_to_integer(y > -limit ? y : -limit);
  }
  KOKKOS_FORCEINLINE_FUNCTION int exponent(T x) const { return static_cast<int>(nearest(within(x))); }
  KOKKOS_FORCEINLINE_FUNCTION T value(T x, int shift) const {
    x = within(x);
    const T n = nearest(x);
    const T f = fused_multiply_add(x, low, fused_multiply_add(x, high, -n));
    return exp2_fraction(f) * power_of_two<T>(static_cast<int>(n) - shift);
  }
  KOKKOS_FORCEINLINE_FUNCTION T derivative(T, T f) const { return rate * f; }
  KOKKOS_FORCEINLINE_FUNCTION T parameter_derivative(T x, T f) const { return x * f; }
};

/// exp(x) for x <= 0; 0 where it is below the smallest normal number, and for a NaN.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T exp_of_negative(T x) {
  constexpr double log2_e = 1.4426950408889634;
  constexpr int bias = sizeof(T) == 4 ? 127 : 1023;
  constexpr T high = T(log2_e);
  constexpr T low = T(sizeof(T) == 4 ? log2_e - double(T(log2_e)) : 2.0355273740931033e-17);
  constexpr T least = T(-bias / log2_e);  // its power of two has an exponent of zero bits, which is 0
  x = x > least ? x : least;
  const T n = round_to_integer(x * high);
  const T f = fused_multiply_add(x, low, fused_multiply_add(x, high, -n));
  return exp2_fraction(f) * power_of_two_in_range<T>(static_cast<int>(n));
}
/// The same where a NaN stays one.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T exp_nonpositive(T x) {
  const T e = exp_of_negative(x);
  return x == x ? e : x;
}

}  // namespace detail

/// phi(x) = x + 1 for x > 0, exp(x) else (elu + 1).
struct EluPlusOneMap {
  static constexpr bool is_nonnegative = true;
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T value(T x) const {
    const T below = detail::exp_of_negative(x < T(0) ? x : T(0));  // both, so that loops vectorise
    return x < T(0) ? below : x + T(1);
  }
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION T derivative(T x, T f) const {
    return x > T(0) ? T(1) : f;
  }
};

/// phi(x) = exp(rate x), one rate for each head (alpha of the queries, beta of the keys of LLN).
///
/// Evaluated to within 2 ulp for |rate x| / ln 2 up to 2^20, where it saturates; exp(-inf) = 0,
/// exp(+inf) saturates, a NaN stays one. Rates are at most 1e30 in size (unchecked for values per head). Source: specs of LLN attention, 5.1; base-2 integer shifts make
/// every later rescaling an exact change of exponent.
struct ExponentialMap {
  Parameter rate = 1.0;

  template <class T>
  KOKKOS_FUNCTION detail::BoundExponential<T> bind(std::int64_t head) const {
    // log2(e) as the sum of two doubles; the product with the rate keeps about 100 bits.
    constexpr double log2_e_high = 1.4426950408889634;
    constexpr double log2_e_low = 2.0355273740931033e-17;
    const double r = rate(head);
    const double product = r * log2_e_high;
    const double rest = detail::fused_multiply_add(r, log2_e_high, -product) + r * log2_e_low;
    const T high = static_cast<T>(product);
    const T low = static_cast<T>((product - static_cast<double>(high)) + rest);
    constexpr T finite = sizeof(T) == 4 ? T(3.4028234663852886e+38) : T(1.7976931348623157e+308);
    const T size = high < T(0) ? -high : high;
    const T largest = detail::BoundExponential<T>::limit / size;  // infinite for a rate near 0
    return {static_cast<T>(r), high, low, largest < finite ? largest : finite};
  }

  template <class ExecSpace>
  void validate(const char* name, std::int64_t heads) const {
    rate.validate<ExecSpace>(name, heads);
    constexpr double largest = 1e30;  // beyond it 1 / ln 2 takes it out of the range of float
    if (!rate.per_head() && (rate.value() > largest || rate.value() < -largest))
      throw InvalidArgument(detail::message("LinAttn: ", name, " must be at most ", largest, " in size, found ",
                                            rate.value()));
  }
};

}  // namespace LinAttn
