// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <linattn/kokkos_compat.hpp>
#include <optional>
#include <string_view>

/// \file moment_rule.hpp
/// The rules of moment matching: from the variance sigma_sm^2 of the logits of softmax attention to the variance
/// st2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2 of the exponents of LLN attention, shared out in equal halves.
///
/// A rule is a line in the enum, its name in moment_rule.cpp, and a case in RateRule and in bind_rule().

namespace LinAttn {

/// Which function of sigma_sm^2 gives st2.
enum class MomentRule {
  authors,  ///< st2 = (sigma_sm^2 - b) / a with the published a, b, which fit D = 64 and sigma_sm^2 of about 0.25 to 1
  table,    ///< inverse of the measured Var(log P) of the LLN matrix, any D, at sigma_sm^2 + sigma_sm^4 / (2 D)
  fit,      ///< as authors, with a line of the caller's, see fit_line()
  entropy,  ///< equal mean row entropy, by measured tables for N = 1024, in place of equal log-variance
  fixed     ///< alpha = beta = a given rate
};

/// "authors", "table", "fit", "entropy", "fixed": as files and the command line name them.
std::string_view to_string(MomentRule rule) noexcept;
/// \throws InvalidArgument for any other name
MomentRule moment_rule_from_name(std::string_view name);

/// Var(log P) = slope st2 + intercept.
struct MomentLine {
  double slope = 0;
  double intercept = 0;

  friend bool operator==(const MomentLine&, const MomentLine&) = default;
};

/// The line of the authors' code.
inline constexpr MomentLine published_line{0.14855178144710912, -0.35487039130661086};

/// What fit_line() simulates.
struct FitOptions {
  std::int64_t rows = 1024;       ///< N of q and k
  double first = 6, last = 20;    ///< range of st2
  int points = 8;                 ///< values of st2, evenly spaced from first to last
  std::uint64_t seed = 20250131;  ///< of the normal numbers
  bool numerator = false;  ///< regress Var(log numerator) in place of Var(log P), which the authors may have done
};

/// A line and how well it fits.
struct LineFit {
  MomentLine line;
  double r2 = 0;  ///< share of the variance of the measured values that the line explains
};

/// Least squares of the measured Var(log P) of LLN matrices of Gaussian q, k of D features on st2.
///
/// Every point draws a q and k of its own, brought to mean 0 and sample deviation 1. Host code without Kokkos; O(points
/// N^2 D), well below a second up to D = 128. The same arguments give the same line.
/// \throws InvalidArgument for D < 1, fewer than 2 rows or points, or a range that is not 0 < first < last
LineFit fit_line_with_quality(std::int64_t d, const FitOptions& options = {});
inline MomentLine fit_line(std::int64_t d, const FitOptions& options = {}) {
  return fit_line_with_quality(d, options).line;
}

namespace detail {

/// No deviation counts as smaller, no st2 as larger; there is no gradient through either.
inline constexpr double least_sigma = 1e-4, largest_st2 = 70;
/// What two deviations of that size give: sigma_sm^2 is never smaller.
inline constexpr double least_sm2 = 1e-16;

/// A function and its derivative at one point.
struct ValueAndSlope {
  double value = 0;
  double slope = 0;
};

/// log y as a piecewise linear function of log x, for two neighbouring head dimensions that are mixed linearly. The
/// end pieces go on beyond the table.
struct LogTable {
  static constexpr int points = 15;
  double x[2][points] = {};  // logarithms, increasing
  double y[2][points] = {};
  double share = 0;  // of the second dimension

  /// Of log y.
  KOKKOS_FUNCTION ValueAndSlope operator()(double log_x) const {
    ValueAndSlope result;
    for (int r = 0; r < 2; ++r) {
      int piece = 0;
      while (piece + 2 < points && log_x >= x[r][piece + 1]) ++piece;
      const double slope = (y[r][piece + 1] - y[r][piece]) / (x[r][piece + 1] - x[r][piece]);
      const double weight = r == 0 ? 1 - share : share;
      result.value += weight * (y[r][piece] + slope * (log_x - x[r][piece]));
      result.slope += weight * slope;
    }
    return result;
  }
};

/// A rule with its numbers, for kernels: st2 and d st2 / d sigma_sm^2.
struct RateRule {
  MomentRule rule = MomentRule::authors;
  MomentLine line = published_line;
  LogTable deficit{};  // entropy: of softmax attention, over sigma_sm^2
  LogTable inverse{};  // st2 over Var(log P) (table) or the deficit of LLN attention (entropy)
  double d = 1;
  double rate = 0;  // fixed

  KOKKOS_FUNCTION ValueAndSlope operator()(double sm2) const {
    using std::exp;
    using std::log;
    ValueAndSlope st2;
    switch (rule) {
      case MomentRule::authors:
      case MomentRule::fit:
        st2 = {(sm2 - line.intercept) / line.slope, 1 / line.slope};
        break;
      case MomentRule::table: {
        const double target = sm2 + sm2 * sm2 / (2 * d);
        const ValueAndSlope at = inverse(log(target));
        st2.value = exp(at.value);
        st2.slope = st2.value * at.slope * (1 + sm2 / d) / target;
        break;
      }
      case MomentRule::entropy: {
        const ValueAndSlope of_softmax = deficit(log(sm2));
        const ValueAndSlope at = inverse(of_softmax.value);
        st2.value = exp(at.value);
        st2.slope = st2.value * at.slope * of_softmax.slope / sm2;
        break;
      }
      case MomentRule::fixed:
        break;
    }
    if (st2.value > largest_st2) st2 = {largest_st2, 0};
    if (st2.value < 0) st2 = {0, 0};
    return st2;
  }
};

/// The rule for rows of D features. `line` is that of rule fit, `rate` that of rule fixed.
/// \throws InvalidArgument if the line is missing, not finite or falling, or the rate is not finite
RateRule bind_rule(MomentRule rule, std::int64_t d, const std::optional<MomentLine>& line, double rate);

}  // namespace detail
}  // namespace LinAttn
