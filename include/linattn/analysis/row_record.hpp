// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstring>
#include <linattn/feature_map.hpp>
#include <linattn/kokkos_compat.hpp>

/// \file row_record.hpp
/// What the instruments need of one row of an attention matrix, in a few sums over its visible entries.

namespace LinAttn::detail {

/// The smallest weight that counts as positive: smaller ones have lost digits of their logarithm.
inline constexpr double least_weight = 2.2250738585072014e-308;

/// ln x of a normal positive number, within 2 ulp; without branches, so that loops vectorise.
KOKKOS_FORCEINLINE_FUNCTION double natural_log(double x) {
  constexpr std::uint64_t one = 0x3ff0000000000000u, root_half = 0x3fe6a09e667f3bcdu;
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // x = 2^(e - 1023) (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
  const std::uint64_t e = (bits - (root_half - one)) >> 52;
  const std::uint64_t mantissa = bits - (e << 52) + one, integer = e | 0x4330000000000000u;
  double f, exponent;
  std::memcpy(&f, &mantissa, sizeof f);
  std::memcpy(&exponent, &integer, sizeof exponent);
  f -= 1.0;
  exponent -= 0x1p52 + 1023;
  // ln(1 + f) = 2 atanh s, |s| < 0.1716: the terms left out are below 2^-58
  const double s = f / (f + 2.0), t = s * s;
  double p = 2.0 / 21;
  p = p * t + 2.0 / 19;
  p = p * t + 2.0 / 17;
  p = p * t + 2.0 / 15;
  p = p * t + 2.0 / 13;
  p = p * t + 2.0 / 11;
  p = p * t + 2.0 / 9;
  p = p * t + 2.0 / 7;
  p = p * t + 2.0 / 5;
  p = p * t + 2.0 / 3;
  constexpr double ln2 = 0.6931471805599453, ln2_rest = 2.3190468138462996e-17;
  return exponent * ln2 + (exponent * ln2_rest + (2.0 * s + s * t * p));
}

/// Sums over the visible entries of a row with weights e^l: w = e^(l - reference), y = l - pivot.
struct RowRecord {
  double reference = 0;        ///< of the weights
  double sum = 0;              ///< sum w
  double weighted = 0;         ///< sum w y
  double squares = 0;          ///< sum w^2
  double pivot = 0;            ///< of the logarithms: that of the first positive weight
  double powers[4] = {};       ///< sum y, y^2, y^3, y^4 over positive weights
  double diagonal = 0;         ///< l of the key at the row's own position ...
  std::int64_t entries = 0;    ///< positive weights
  std::int64_t zeros = 0;      ///< visible entries of weight 0
  std::int64_t negative = -1;  ///< a key of negative weight
  bool has_diagonal = false;   ///< ... where that is positive

  /// The record with logarithms relative to another pivot.
  KOKKOS_FUNCTION void move_pivot(double to) {
    const double c = pivot - to, n = static_cast<double>(entries);
    const double a1 = powers[0], a2 = powers[1], a3 = powers[2], a4 = powers[3];
    powers[0] = a1 + n * c;
    powers[1] = a2 + 2 * c * a1 + n * c * c;
    powers[2] = a3 + 3 * c * a2 + 3 * c * c * a1 + n * c * c * c;
    powers[3] = a4 + 4 * c * a3 + 6 * c * c * a2 + 4 * c * c * c * a1 + n * c * c * c * c;
    weighted += c * sum;
    pivot = to;
  }
  /// The record with weights relative to a larger reference.
  KOKKOS_FUNCTION void raise_reference(double to) {
    const double factor = exp_nonpositive(reference - to);
    sum *= factor;
    weighted *= factor;
    squares *= factor * factor;
    reference = to;
  }
  /// With another part of the same row.
  KOKKOS_FUNCTION void add(RowRecord other) {
    if (other.entries > 0) {
      if (entries == 0) {
        pivot = other.pivot;
        reference = other.reference;
      }
      other.move_pivot(pivot);
      if (other.reference > reference) raise_reference(other.reference);
      if (reference > other.reference) other.raise_reference(reference);
    }
    sum += other.sum;
    weighted += other.weighted;
    squares += other.squares;
    for (int p = 0; p < 4; ++p) powers[p] += other.powers[p];
    entries += other.entries;
    zeros += other.zeros;
    if (negative < 0) negative = other.negative;
    if (other.has_diagonal) {
      has_diagonal = true;
      diagonal = other.diagonal;
    }
  }
};

}  // namespace LinAttn::detail
