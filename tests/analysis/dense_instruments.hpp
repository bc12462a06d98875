// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <linattn/reference/analysis.hpp>
#include <map>
#include <string>
#include <vector>

/// \file dense_instruments.hpp
/// The instruments by their definitions, from a dense matrix in long double; nothing of it is the library's. The gap is
/// that of the reference.

namespace LinAttn::test_support {

using Real = long double;

/// A matrix of ln w_ij and which entries there are.
struct DenseMatrix {
  std::int64_t nq = 0, nk = 0;
  bool causal = false;
  std::vector<Real> logs;     // -infinity for a weight of 0
  std::vector<char> visible;  // (nq, nk)

  Real log_weight(std::int64_t i, std::int64_t j) const { return logs[static_cast<std::size_t>(i * nk + j)]; }
  bool is_entry(std::int64_t i, std::int64_t j) const { return visible[static_cast<std::size_t>(i * nk + j)] != 0; }
};

struct DenseInstruments {
  std::map<std::string, double> values;
  std::int64_t empty = 0, zeros = 0;
};

inline DenseInstruments dense_instruments(const DenseMatrix& a) {
  const Real infinity = std::numeric_limits<Real>::infinity();
  std::vector<Real> p(a.logs.size(), 0), log_p(a.logs.size(), -infinity), column(a.nk, 0), uniform(a.nk, 0);
  std::vector<char> empty(a.nq, 0);
  Real entropy = 0, deficit = 0, within = 0, rows = 0;
  std::vector<Real> entries, logs;
  DenseInstruments result;
  std::int64_t visible_anywhere = 0;
  std::vector<char> seen(a.nk, 0);
  for (std::int64_t i = 0; i < a.nq; ++i) {
    Real most = -infinity;
    std::int64_t m = 0;
    for (std::int64_t j = 0; j < a.nk; ++j) {
      if (!a.is_entry(i, j)) continue;
      seen[j] = 1;
      ++m;
      most = std::max(most, a.log_weight(i, j));
      if (a.log_weight(i, j) == -infinity) ++result.zeros;
    }
    if (most == -infinity) {
      empty[i] = 1;
      ++result.empty;
      continue;
    }
    ++rows;
    Real sum = 0, h = 0, mean = 0, variance = 0, count = 0;
    for (std::int64_t j = 0; j < a.nk; ++j)
      if (a.is_entry(i, j)) sum += std::exp(a.log_weight(i, j) - most);
    for (std::int64_t j = 0; j < a.nk; ++j) {
      if (!a.is_entry(i, j)) continue;
      const std::size_t at = static_cast<std::size_t>(i * a.nk + j);
      log_p[at] = a.log_weight(i, j) - most - std::log(sum);
      p[at] = std::exp(log_p[at]);
      entries.push_back(p[at]);
      column[j] += p[at];
      uniform[j] += 1 / static_cast<Real>(m);
      if (log_p[at] == -infinity) continue;
      h -= p[at] * log_p[at] / std::log(Real(2));
      mean += log_p[at];
      count += 1;
      logs.push_back(log_p[at]);
    }
    mean /= count;
    for (std::int64_t j = 0; j < a.nk; ++j) {
      const Real l = log_p[static_cast<std::size_t>(i * a.nk + j)];
      if (l != -infinity) variance += (l - mean) * (l - mean) / count;
    }
    entropy += h;
    deficit += std::log2(static_cast<Real>(m)) - h;
    within += variance;
  }
  for (const char s : seen) visible_anywhere += s;
  const auto moment = [](const std::vector<Real>& x, int power) {
    Real mean = 0, sum = 0;
    for (const Real value : x) mean += value / static_cast<Real>(x.size());
    if (power == 1) return mean;
    for (const Real value : x) sum += std::pow(value - mean, power) / static_cast<Real>(x.size());
    return sum;
  };
  const auto entropy_of = [&](const std::vector<Real>& sums) {
    Real h = 0;
    for (const Real s : sums)
      if (s > 0) h -= s / rows * std::log2(s / rows);
    return h;
  };
  auto& v = result.values;
  v["entropy"] = static_cast<double>(entropy / rows);
  const Real biased = entropy_of(uniform) - entropy_of(column);
  v["entropy_biased"] = static_cast<double>(biased);
  v["entropy_unbiased"] = static_cast<double>(deficit / rows - biased);
  v["variance"] = static_cast<double>(moment(entries, 2));
  v["relative_variance"] = static_cast<double>(moment(entries, 2) / moment(entries, 1) / moment(entries, 1));
  v["log_mean"] = static_cast<double>(moment(logs, 1));
  v["logvar"] = static_cast<double>(moment(logs, 2));
  v["log_skewness"] = static_cast<double>(moment(logs, 3) / std::pow(moment(logs, 2), Real(1.5)));
  v["log_kurtosis"] = static_cast<double>(moment(logs, 4) / moment(logs, 2) / moment(logs, 2) - 3);
  v["logvar_within"] = static_cast<double>(within / rows);
  v["temperature"] = static_cast<double>(1 / std::sqrt(moment(logs, 2)));
  if (a.nq == a.nk) {
    std::vector<double> matrix(p.size());
    for (std::size_t at = 0; at < p.size(); ++at) {
      const auto i = static_cast<std::int64_t>(at) / a.nk, j = static_cast<std::int64_t>(at) % a.nk;
      matrix[at] = static_cast<double>(p[at]);
      if (empty[i] && !a.causal) matrix[at] = seen[j] ? 1 / static_cast<double>(visible_anywhere) : 0;
    }
    if (!a.causal) {
      v["spectral_gap"] = 1 - reference::second_eigenvalue(matrix, static_cast<std::size_t>(a.nq));
    } else {
      std::vector<double> diagonal;
      for (std::int64_t i = 0; i < a.nq; ++i) diagonal.push_back(matrix[static_cast<std::size_t>(i * a.nk + i)]);
      std::sort(diagonal.begin(), diagonal.end());
      v["spectral_gap"] = 1 - (diagonal.size() > 1 ? diagonal[diagonal.size() - 2] : 0);
    }
  }
  return result;
}

}  // namespace LinAttn::test_support
