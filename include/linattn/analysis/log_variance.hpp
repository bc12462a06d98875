// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <span>

/// \file log_variance.hpp
/// The matrix of attention of one head, measured entry by entry on the host in fp64, and what theory says of it.

namespace LinAttn {

/// Of log P over all entries, and of the entropy of the rows.
struct MatrixMoments {
  double variance = 0;         ///< Var(log P)
  double within = 0;           ///< mean over the rows of the variance within a row
  double numerator = 0;        ///< Var(log w), w the weight before it is divided by the row sum
  double mean = 0;             ///< of log P
  double skewness = 0;         ///< of log P
  double excess_kurtosis = 0;  ///< of log P
  double entropy = 0;          ///< mean over the rows of -sum_j P_ij log2 P_ij
  std::int64_t entries = 0;
};

/// Called with log P of one row after the other.
using LogRow = std::function<void(std::span<const double>)>;

/// P_ij = w_ij / sum_j w_ij with w_ij = sum_d exp(alpha q_id + beta k_jd) for the given rows of q and k (row-major, D
/// features each). Time O(Nq Nk D), memory O((Nq + Nk) D).
/// \throws InvalidArgument for D < 1, no rows, or sizes that are no multiples of D
MatrixMoments measure_lln_matrix(std::span<const double> q, std::span<const double> k, std::int64_t d, double alpha,
                                 double beta, const LogRow& visit = {});

/// The same with w_ij = exp(scale q_i . k_j).
MatrixMoments measure_softmax_matrix(std::span<const double> q, std::span<const double> k, std::int64_t d, double scale,
                                     const LogRow& visit = {});

/// Var(log P) of softmax attention by Prop 3.1 with the correction for the spread of |q_i|^2: s + s^2 / (2 D).
inline double softmax_log_variance(double sigma_sm2, double d) { return sigma_sm2 + sigma_sm2 * sigma_sm2 / (2 * d); }

/// Var(log w) of LLN attention by Prop 4.1 in the moderate case (Fenton): ln(1 + (exp(st2) - 1) / D).
double fenton_log_variance(double st2, double d);

}  // namespace LinAttn
