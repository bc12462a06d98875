// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <limits>
#include <linattn/analysis/row_record.hpp>
#include <linattn/error.hpp>
#include <string>
#include <vector>

/// \file diagnostics.hpp
/// What the instruments say of one attention matrix, and how it follows from sums over its rows.

namespace LinAttn {

/// How to measure.
struct DiagnoseOptions {
  bool causal = false;                 ///< query i sees keys j <= i + nk - nq, else all keys
  bool exact = false;                  ///< all rows, however many
  std::int64_t exact_up_to = 4096;     ///< queries and keys up to which all rows are measured anyway
  std::int64_t rows = 256;             ///< sampled rows of each batch entry and head, where not all are measured
  std::uint64_t seed = 0;              ///< of the sample, which depends on it, the head and the extents only
  bool gap = true;                     ///< whether the spectral gap is wanted; else it is NaN, and `absent` is silent
  std::int64_t largest_matrix = 4096;  ///< order up to which the gap of exact softmax attention is computed
};

/// The instruments for the matrix P of one batch entry and head. P_ij = w_ij / sum_l w_il over the visible keys l of
/// row i; entries that are not visible (hidden keys, keys after a causal row) are no entries of P. Rows without weight
/// are left out and counted in `empty_rows`. n is the number of visible keys, m_i of those that row i sees, U the
/// matrix of the same visible entries with U_ij = 1/m_i, bars are means over rows, Hs are entropies in bits.
///
/// A number that could not be measured is NaN and `absent` says why (but for a gap that DiagnoseOptions did not ask
/// for); without rows or entries all are 0, but for the gap, which is 1. Where q or k that were read are not finite, or
/// weights overflow, all are NaN: every visible key, and every query but those of softmax attention that are not in
/// the sample.
struct HeadDiagnostics {
  static constexpr double none = std::numeric_limits<double>::quiet_NaN();

  double entropy = 0;           ///< mean_i H_i, H_i = -sum_j P_ij log2 P_ij
  double entropy_biased = 0;    ///< H(ubar) - H(pbar), full: log2 n - H(pbar); what all rows have in common
  double entropy_unbiased = 0;  ///< mean_i (log2 m_i - H_i) - biased, full: H(pbar) - mean_i H_i, mutual information
  /// 1 - |lambda_2|; rows without weight count as uniform here. Causal: 1 - the second largest P_ii, which is 0 in rows
  /// without weight. Absent for Nq != Nk.
  double spectral_gap = 1;
  double variance = 0;           ///< Var P_ij over entries
  double relative_variance = 0;  ///< the same over the square of the mean entry; full: n^2 Var P_ij
  double log_mean = 0;           ///< mean of ln P_ij over entries that are not 0
  double logvar = 0;             ///< Var ln P_ij over these; causal: rows of different length are in it
  double log_skewness = 0;       ///< third and fourth standardised moments of ln P_ij; 0 and 0 for a normal
  double log_kurtosis = 0;       ///< distribution, the latter being the excess
  double logvar_within = 0;      ///< mean over rows of the variance of ln P_ij within the row
  double temperature = 0;        ///< 1 / sqrt(logvar); infinite where logvar is 0

  /// Standard errors; 0 where all rows were measured.
  double entropy_error = 0, entropy_unbiased_error = 0, variance_error = 0, relative_variance_error = 0;
  double log_mean_error = 0, logvar_error = 0, logvar_within_error = 0;

  std::int64_t rows = 0;          ///< measured, empty ones included
  std::int64_t empty_rows = 0;    ///< of these
  std::int64_t zero_entries = 0;  ///< visible entries of weight 0 (below 2e-308 of the row's largest feature) in them
  bool sampled = false;           ///< whether these are not all rows
  std::string absent{};           ///< what is NaN and why; empty if nothing is
};

/// (B, H) of them.
struct Diagnostics {
  std::int64_t batch = 0, heads = 0;
  std::vector<HeadDiagnostics> values;

  const HeadDiagnostics& operator()(std::int64_t b, std::int64_t h) const {
    return values[static_cast<std::size_t>(b * heads + h)];
  }
};

namespace detail {

/// What was measured of one head.
struct HeadSums {
  std::int64_t nq = 0, nk = 0;
  bool causal = false, sampled = false;
  const RowRecord* records = nullptr;       // (rows)
  const std::int64_t* positions = nullptr;  // of the rows; nullptr: row i is query i
  std::int64_t rows = 0;
  const std::uint8_t* visible = nullptr;  // (nk); nullptr: all
  const double* columns = nullptr;        // sum_i P_ij over all rows; nullptr: not measured
  const char* no_columns = "";            // why
  const double* row_sums = nullptr;       // (nq): 0 for rows without weight; where not all records are there
  const double* squares = nullptr;        // sum P^2 over all rows, where not all records are there
};

/// The instruments but for the gap, which is NaN if all are.
HeadDiagnostics summarise(const HeadSums& sums);

/// 1 - the second largest P_ii of a causal head of which all rows were measured.
double causal_gap(const HeadSums& sums);
/// The same from all P_ii.
double causal_gap(const double* diagonal, std::int64_t n);

/// Rows of a sample: one in each of `rows` equal parts of [0, n), so that every row has the same chance.
std::vector<std::int64_t> sampled_rows(std::uint64_t seed, std::int64_t unit, std::int64_t n, std::int64_t rows);

void append(std::string& text, const std::string& more);

}  // namespace detail
}  // namespace LinAttn
