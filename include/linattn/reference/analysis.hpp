// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <linattn/error.hpp>
#include <linattn/problem.hpp>
#include <linattn/reference/dense.hpp>
#include <vector>

/// \file analysis.hpp
/// The oracle of moments and of diagnostics: two passes over q and k, and matrices of attention
/// held as a whole. Needs neither Kokkos nor the engine.

namespace LinAttn::reference {

/// What one deviation is taken over.
enum class MomentScope {
  tensor,  ///< all of q, all of k
  head     ///< the batch entries of a key/value head, for q of all heads of its group
};

/// Deviations of the visible entries and what the authors' rule makes of them.
template <class Real>
struct Moments {
  std::vector<Real> sigma_q, sigma_k;  ///< one for the tensor, or (Hkv)
  std::vector<Real> alpha;             ///< (H)
  std::vector<Real> beta;              ///< (Hkv)
};

namespace detail {

inline constexpr double authors_slope = 0.14855178144710912;
inline constexpr double authors_intercept = -0.35487039130661086;
inline constexpr double least_deviation = 1e-4;
inline constexpr double largest_st2 = 70;

/// sqrt(sum (x - mean)^2 / (n - 1)), and at least least_deviation, also for n < 2.
template <class Real>
Real deviation(const std::vector<Real>& x) {
  const Real least = static_cast<Real>(least_deviation);
  if (x.size() < 2) return least;
  Sum<Real> sum, squares, rest;
  for (const Real element : x) sum.add(element);
  const Real n = static_cast<Real>(x.size()), mean = sum.value() / n;
  for (const Real element : x) {
    squares.add((element - mean) * (element - mean));
    rest.add(element - mean);
  }
  // The mean is a rounded one.
  const Real variance = (squares.value() - rest.value() * rest.value() / n) / (n - 1);
  return std::max(std::sqrt(std::max(variance, Real(0))), least);
}

/// Appends the rows of one batch entry and head whose mask is not 0. An empty mask hides nothing.
template <class Real>
void append_visible(const std::vector<Real>& x, std::int64_t b, std::int64_t head,
                    std::int64_t heads, std::int64_t rows, std::int64_t d,
                    const std::vector<std::uint8_t>& mask, std::vector<Real>& to) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!mask.empty() && mask[static_cast<std::size_t>(b * rows + row)] == 0) continue;
    const auto begin = x.begin() + ((b * heads + head) * rows + row) * d;
    to.insert(to.end(), begin, begin + d);
  }
}

}  // namespace detail

/// sigma_q and sigma_k of the rows that the masks (B, Nq) and (B, Nk) leave, 1 = visible, empty =
/// all, and by the authors' rule
///
///     st2 = min((sigma_q^2 sigma_k^2 - b) / a, 70),  alpha = sqrt(st2 / 2) / sigma_q,
///     beta = sqrt(st2 / 2) / sigma_k,                a = 0.1485..., b = -0.3548...
///
/// A deviation is at least 1e-4. \throws InvalidArgument if sizes do not fit together
template <ReferenceReal Real>
Moments<Real> moments(const Problem& problem, const Tensors<Real>& tensors, MomentScope scope,
                      const std::vector<std::uint8_t>& key_mask = {},
                      const std::vector<std::uint8_t>& query_mask = {}) {
  const auto& p = problem;
  p.validate(false);
  const auto check = [&](const char* name, std::size_t found, std::int64_t expected) {
    if (found != static_cast<std::size_t>(expected))
      throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: ", name, " has ", found,
                                                     " elements, expected ", expected, " for ",
                                                     p.to_string()));
  };
  check("q", tensors.q.size(), p.batch * p.heads * p.nq * p.d);
  check("k", tensors.k.size(), p.batch * p.kv_heads * p.nk * p.d);
  if (!key_mask.empty()) check("key_mask", key_mask.size(), p.batch * p.nk);
  if (!query_mask.empty()) check("query_mask", query_mask.size(), p.batch * p.nq);

  const bool per_head = scope == MomentScope::head;
  const auto count = static_cast<std::size_t>(per_head ? p.kv_heads : 1);
  std::vector<std::vector<Real>> q(count), k(count);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads; ++h)
      detail::append_visible(tensors.q, b, h, p.heads, p.nq, p.d, query_mask,
                             q[static_cast<std::size_t>(per_head ? h / p.group() : 0)]);
    for (std::int64_t h = 0; h < p.kv_heads; ++h)
      detail::append_visible(tensors.k, b, h, p.kv_heads, p.nk, p.d, key_mask,
                             k[static_cast<std::size_t>(per_head ? h : 0)]);
  }
  Moments<Real> result;
  std::vector<Real> root;  // sqrt(st2 / 2)
  for (std::size_t n = 0; n < count; ++n) {
    result.sigma_q.push_back(detail::deviation(q[n]));
    result.sigma_k.push_back(detail::deviation(k[n]));
    const Real product = result.sigma_q[n] * result.sigma_k[n];
    const Real st2 = (product * product - static_cast<Real>(detail::authors_intercept)) /
                     static_cast<Real>(detail::authors_slope);
    root.push_back(std::sqrt(std::min(st2, static_cast<Real>(detail::largest_st2)) / 2));
  }
  const auto of_kv_head = [&](std::int64_t h) {
    return static_cast<std::size_t>(per_head ? h : 0);
  };
  for (std::int64_t h = 0; h < p.heads; ++h) {
    const std::size_t n = of_kv_head(h / p.group());
    result.alpha.push_back(root[n] / result.sigma_q[n]);
  }
  for (std::int64_t h = 0; h < p.kv_heads; ++h)
    result.beta.push_back(root[of_kv_head(h)] / result.sigma_k[of_kv_head(h)]);
  return result;
}

/// The matrix of one batch entry and query head, row-major.
template <class Real>
struct Matrix {
  std::size_t rows = 0, columns = 0;
  std::vector<Real> values;           ///< 0 where a row sees nothing
  std::vector<std::uint8_t> visible;  ///< whether the row sees the column

  Matrix(std::size_t r, std::size_t c) : rows(r), columns(c), values(r * c), visible(r * c) {}
  Real operator()(std::size_t i, std::size_t j) const { return values[i * columns + j]; }
};

namespace detail {

template <class Real>
std::vector<Matrix<Real>> empty_matrices(const Problem& problem) {
  return std::vector<Matrix<Real>>(
      static_cast<std::size_t>(problem.batch * problem.heads),
      Matrix<Real>(static_cast<std::size_t>(problem.nq), static_cast<std::size_t>(problem.nk)));
}

/// Writes the values of one row; `keys` are row numbers of k.
template <class Real, class Value>
void set_row(std::vector<Matrix<Real>>& matrices, const Problem& problem, std::size_t query,
             const std::vector<std::size_t>& keys, const Value& value) {
  const auto nq = static_cast<std::size_t>(problem.nq), nk = static_cast<std::size_t>(problem.nk);
  Matrix<Real>& matrix = matrices[query / nq];
  for (std::size_t j = 0; j < keys.size(); ++j) {
    const std::size_t n = query % nq * nk + keys[j] % nk;
    matrix.values[n] = value(j);
    matrix.visible[n] = 1;
  }
}

}  // namespace detail

/// A_ij = w_ij / s_i of a normalised kernel, for every batch entry and query head (B H).
/// \throws InvalidArgument if extents, sizes, masks or borders do not fit together, and for
/// lln-diag, which has no single matrix
template <ReferenceReal Real>
std::vector<Matrix<Real>> attention_matrices(const Problem& problem, const Settings& settings,
                                             const Tensors<Real>& tensors) {
  if (settings.kernel == Kernel::lln_diag || !settings.normalise)
    throw InvalidArgument("LinAttn::reference: a matrix needs a normalised kernel without blocks");
  const detail::Rows<Real> rows(problem, settings, tensors);
  auto matrices = detail::empty_matrices<Real>(problem);
  rows.for_each([&](const detail::Row<Real>& row) {
    detail::set_row(matrices, problem, row.query, row.keys, [&](std::size_t j) {
      return row.vanishes(true) ? Real(0) : row.weights[j] / row.denominator;
    });
  });
  return matrices;
}

/// The same of exact attention, A_ij = exp(q_i . k_j / sqrt(D)) / sum; of the settings causal, the
/// mask and the borders count. \throws InvalidArgument as above
template <ReferenceReal Real>
std::vector<Matrix<Real>> softmax_matrices(const Problem& problem, Settings settings,
                                           const Tensors<Real>& tensors) {
  settings = {.causal = settings.causal,
              .key_mask = settings.key_mask,
              .cu_seqlens_q = settings.cu_seqlens_q,
              .cu_seqlens_k = settings.cu_seqlens_k};
  const detail::Rows<Real> checked(problem, settings, tensors);
  settings.block = problem.nq + problem.nk + 1;
  auto matrices = detail::empty_matrices<Real>(problem);
  detail::Blocks<Real>(problem, settings, tensors).for_each([&](const detail::BlockRow<Real>& row) {
    detail::set_row(matrices, problem, row.query, row.keys,
                    [&](std::size_t j) { return row.attention(j); });
  });
  return matrices;
}

/// What one matrix P tells of concentration. NaN: has no meaning for this matrix.
template <class Real>
struct Diagnostics {
  Real entropy = 0;           ///< bits, mean over rows of -sum_j P_ij log2 P_ij
  Real entropy_biased = 0;    ///< log2 N - H(pbar), pbar the mean of the rows; not if causal
  Real entropy_unbiased = 0;  ///< H(pbar) - entropy; not if causal
  Real spectral_gap = 0;      ///< 1 - |lambda_2|; square matrices whose rows have the sum 1
  Real variance = 0;          ///< of the visible entries P_ij; not if causal
  Real logvar = 0;            ///< of their natural logarithms, zeros left out
  Real logvar_within = 0;     ///< mean over rows of the variance of a row's logarithms
};

/// Largest modulus of the eigenvalues of a square matrix of n rows.
///
/// With A = s_0 B_0 and B_m^2 = s_{m+1} B_{m+1}, all B of Frobenius norm 1, it is the limit of
/// |A^(2^m)|^(1/2^m) = exp(sum_l 2^-l ln s_l). Complex and multiple eigenvalues need no care.
template <ReferenceReal Real>
Real spectral_radius(std::vector<Real> a, std::size_t n) {
  if (a.size() != n * n)
    throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: a square matrix of ", n,
                                                   " rows has ", n * n, " elements, found ",
                                                   a.size()));
  Real logarithm = 0, share = 1;
  std::vector<Real> square(a.size());
  for (int m = 0; m <= std::numeric_limits<Real>::digits; ++m) {
    Real size = 0;
    for (const Real x : a) {
      if (!std::isfinite(x)) return std::numeric_limits<Real>::quiet_NaN();
      size = std::max(size, std::abs(x));
    }
    if (size == 0) return 0;
    Real squares = 0;
    for (const Real x : a) squares += (x / size) * (x / size);
    size *= std::sqrt(squares);
    logarithm += share * std::log(size);
    share /= 2;
    for (Real& x : a) x /= size;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j) square[i * n + j] = 0;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t l = 0; l < n; ++l)
        for (std::size_t j = 0; j < n; ++j) square[i * n + j] += a[i * n + l] * a[l * n + j];
    std::swap(a, square);
  }
  return std::exp(logarithm);
}

/// |lambda_2| of a square matrix whose rows have the sum 1: the largest modulus of eigenvalues but
/// for one of 1. P - 1 pbar^T, pbar the mean of the rows, has the others and a 0. What is left of a
/// matrix of equal rows is rounding, and counts as 0.
template <ReferenceReal Real>
Real second_eigenvalue(const std::vector<Real>& p, std::size_t n) {
  std::vector<Real> rest(p.size());
  bool equal = true;  // all rows, but for rounding
  for (std::size_t j = 0; j < n; ++j) {
    detail::Sum<Real> sum;
    for (std::size_t i = 0; i < n; ++i) sum.add(p[i * n + j]);
    const Real mean = sum.value() / static_cast<Real>(n);
    for (std::size_t i = 0; i < n; ++i) {
      rest[i * n + j] = p[i * n + j] - mean;
      equal = equal && std::abs(rest[i * n + j]) <=
                           2 * std::numeric_limits<Real>::epsilon() * std::abs(mean);
    }
  }
  return equal ? Real(0) : spectral_radius(rest, n);
}

/// Concentration of one matrix. Rows that see nothing are no rows, columns that no row sees no
/// columns, and N is the number of those that are left. Variances have the divisor n.
///
/// A causal matrix is triangular: its eigenvalues are its diagonal, of which the largest is the
/// first. Its invisible entries are no entries.
template <ReferenceReal Real>
Diagnostics<Real> diagnostics(const Matrix<Real>& p, bool causal) {
  using detail::Sum;
  constexpr Real none = std::numeric_limits<Real>::quiet_NaN();
  const auto bits = [](Real x) { return x > 0 ? -x * std::log2(x) : x * 0; };
  const auto variance = [](const std::vector<Real>& x) {
    Sum<Real> sum, squares;  // of differences to the first: equal numbers have exactly none
    const Real n = static_cast<Real>(x.size());
    for (const Real element : x) sum.add(element - x.front());
    const Real mean = sum.value() / n;
    for (const Real element : x) {
      const Real off = (element - x.front()) - mean;
      squares.add(off * off);
    }
    return squares.value() / n;
  };

  Sum<Real> entropy, within;
  std::vector<Real> entries, logs, row_logs;
  std::vector<Sum<Real>> columns(p.columns);
  std::vector<std::uint8_t> seen(p.columns);
  std::size_t rows = 0, rows_with_logs = 0;
  bool stochastic = true;
  for (std::size_t i = 0; i < p.rows; ++i) {
    bool any = false;
    Sum<Real> row_sum;
    row_logs.clear();
    for (std::size_t j = 0; j < p.columns; ++j) {
      if (p.visible[i * p.columns + j] == 0) continue;
      any = true;
      seen[j] = 1;
      const Real x = p(i, j);
      entropy.add(bits(x));
      row_sum.add(x);
      columns[j].add(x);
      entries.push_back(x);
      if (x > 0) row_logs.push_back(std::log(x));
    }
    rows += any;
    stochastic = stochastic && (!any || std::abs(row_sum.value() - 1) < Real(1e-6));
    if (row_logs.empty()) continue;
    ++rows_with_logs;
    within.add(variance(row_logs));
    logs.insert(logs.end(), row_logs.begin(), row_logs.end());
  }
  Diagnostics<Real> result{none, none, none, none, none, none, none};
  if (rows == 0) return result;
  const Real count = static_cast<Real>(rows);
  result.entropy = entropy.value() / count;
  if (rows_with_logs > 0) {
    result.logvar = variance(logs);
    result.logvar_within = within.value() / static_cast<Real>(rows_with_logs);
  }
  if (!causal) {
    Sum<Real> of_columns;
    for (const auto& column : columns) of_columns.add(bits(column.value() / count));
    const auto n = static_cast<Real>(std::count(seen.begin(), seen.end(), 1));
    result.entropy_biased = std::log2(n) - of_columns.value();
    result.entropy_unbiased = of_columns.value() - result.entropy;
    result.variance = variance(entries);
  }
  if (p.rows != p.columns || !stochastic) return result;
  if (!causal) {
    result.spectral_gap = 1 - second_eigenvalue(p.values, p.rows);
  } else {
    Real first = 0, second = 0;
    for (std::size_t i = 0; i < p.rows; ++i) {
      const Real x = std::abs(p(i, i));
      second = std::max(second, std::min(x, first));
      first = std::max(first, x);
    }
    result.spectral_gap = 1 - second;
  }
  return result;
}

}  // namespace LinAttn::reference
