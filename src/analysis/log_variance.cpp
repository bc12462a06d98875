// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <linattn/analysis/log_variance.hpp>
#include <linattn/error.hpp>
#include <vector>

namespace LinAttn {
namespace {

constexpr std::int64_t rows_at_once = 8, columns_at_once = 64;

/// Power sums of numbers relative to one of them.
class PowerSums {
 public:
  void add(double x) {
    if (m_n == 0) m_shift = x;
    const double y = x - m_shift, y2 = y * y;
    m_n += 1;
    m_1 += y;
    m_2 += y2;
    m_3 += y2 * y;
    m_4 += y2 * y2;
  }
  double mean() const { return m_shift + m_1 / m_n; }
  double variance() const { return m_2 / m_n - square(m_1 / m_n); }
  double skewness() const {
    const double m = m_1 / m_n;
    return (m_3 / m_n - 3 * m * m_2 / m_n + 2 * m * m * m) / std::pow(variance(), 1.5);
  }
  double excess_kurtosis() const {
    const double m = m_1 / m_n, m2 = m_2 / m_n, m3 = m_3 / m_n;
    return (m_4 / m_n - 4 * m * m3 + 6 * m * m * m2 - 3 * square(m * m)) / square(variance()) - 3;
  }
  double count() const { return m_n; }

 private:
  static double square(double x) { return x * x; }
  double m_shift = 0, m_n = 0, m_1 = 0, m_2 = 0, m_3 = 0, m_4 = 0;
};

/// Rows of the product of `left` (rows, D) and the transposed `columns` (D, n), a few at once: use(row, entries).
template <class Use>
void for_each_product_row(const std::vector<double>& left, const std::vector<double>& columns, std::int64_t d,
                          const Use& use) {
  const std::int64_t rows = static_cast<std::int64_t>(left.size()) / d;
  const std::int64_t n = static_cast<std::int64_t>(columns.size()) / d;
  std::vector<double> products(static_cast<std::size_t>(rows_at_once * n));
  for (std::int64_t first = 0; first < rows; first += rows_at_once) {
    const std::int64_t here = std::min(rows_at_once, rows - first);
    for (std::int64_t column = 0; column < n; column += columns_at_once) {
      const std::int64_t width = std::min(columns_at_once, n - column);
      double tile[rows_at_once][columns_at_once] = {};
      for (std::int64_t c = 0; c < d; ++c) {
        const double* const right = columns.data() + c * n + column;
        for (std::int64_t r = 0; r < here; ++r) {
          const double factor = left[static_cast<std::size_t>((first + r) * d + c)];
          for (std::int64_t j = 0; j < width; ++j) tile[r][j] += factor * right[j];
        }
      }
      for (std::int64_t r = 0; r < here; ++r) std::copy_n(tile[r], width, products.begin() + r * n + column);
    }
    for (std::int64_t r = 0; r < here; ++r)
      use(first + r, std::span(products).subspan(static_cast<std::size_t>(r * n), static_cast<std::size_t>(n)));
  }
}

/// Takes rows of log w and of w up to a factor of the row.
class Matrix {
 public:
  explicit Matrix(const LogRow& visit) : m_visit(visit) {}

  /// log_w becomes log P; `shift` is what was taken off every log w.
  void add_row(std::span<double> log_w, std::span<const double> w, double shift) {
    double sum = 0, with_log = 0;
    for (const double x : w) sum += x;
    const double log_sum = std::log(sum);
    PowerSums row;
    for (std::size_t j = 0; j < log_w.size(); ++j) {
      m_numerator.add(log_w[j] + shift);
      log_w[j] -= log_sum;
      with_log += w[j] * log_w[j];
      row.add(log_w[j]);
      m_all.add(log_w[j]);
    }
    m_within += row.variance();
    m_entropy -= with_log / sum;
    m_rows += 1;
    if (m_visit) m_visit(log_w);
  }

  MatrixMoments moments() const {
    return {m_all.variance(),
            m_within / m_rows,
            m_numerator.variance(),
            m_all.mean(),
            m_all.skewness(),
            m_all.excess_kurtosis(),
            m_entropy / m_rows / std::log(2.0),
            static_cast<std::int64_t>(m_all.count())};
  }

 private:
  const LogRow& m_visit;
  PowerSums m_all, m_numerator;
  double m_within = 0, m_entropy = 0, m_rows = 0;
};

void require_rows_of(std::span<const double> q, std::span<const double> k, std::int64_t d) {
  if (d < 1 || q.empty() || k.empty() || q.size() % static_cast<std::size_t>(d) != 0 ||
      k.size() % static_cast<std::size_t>(d) != 0)
    throw InvalidArgument(detail::message("LinAttn: a matrix needs rows of D >= 1 features, found D = ", d, ", ",
                                          q.size(), " numbers of q and ", k.size(), " of k"));
}

}  // namespace

MatrixMoments measure_lln_matrix(std::span<const double> q, std::span<const double> k, std::int64_t d, double alpha,
                                 double beta, const LogRow& visit) {
  require_rows_of(q, k, d);
  const std::int64_t rows = static_cast<std::int64_t>(q.size()) / d, n = static_cast<std::int64_t>(k.size()) / d;
  const auto at = [d](std::int64_t i, std::int64_t c) { return static_cast<std::size_t>(i * d + c); };
  std::vector<double> largest(static_cast<std::size_t>(d), -std::numeric_limits<double>::infinity());
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t c = 0; c < d; ++c) {
      double& most = largest[static_cast<std::size_t>(c)];
      most = std::max(most, beta * k[at(j, c)]);
    }
  std::vector<double> keys(k.size()), queries(q.size()), shifts(static_cast<std::size_t>(rows));
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t c = 0; c < d; ++c)
      keys[static_cast<std::size_t>(c * n + j)] = std::exp(beta * k[at(j, c)] - largest[static_cast<std::size_t>(c)]);
  for (std::int64_t i = 0; i < rows; ++i) {
    double& shift = shifts[static_cast<std::size_t>(i)];
    shift = -std::numeric_limits<double>::infinity();
    const auto exponent = [&](std::int64_t c) { return alpha * q[at(i, c)] + largest[static_cast<std::size_t>(c)]; };
    for (std::int64_t c = 0; c < d; ++c) shift = std::max(shift, exponent(c));
    for (std::int64_t c = 0; c < d; ++c) queries[at(i, c)] = std::exp(exponent(c) - shift);
  }
  const auto log_weight = [&](std::int64_t i, std::int64_t j) {
    const auto exponent = [&](std::int64_t c) { return alpha * q[at(i, c)] + beta * k[at(j, c)]; };
    double most = exponent(0), sum = 0;
    for (std::int64_t c = 1; c < d; ++c) most = std::max(most, exponent(c));
    for (std::int64_t c = 0; c < d; ++c) sum += std::exp(exponent(c) - most);
    return most + std::log(sum);
  };
  Matrix matrix(visit);
  std::vector<double> log_w(static_cast<std::size_t>(n));
  for_each_product_row(queries, keys, d, [&](std::int64_t i, std::span<const double> w) {
    constexpr double faint = 1e-290;  // below it products lose digits, or all
    const double shift = shifts[static_cast<std::size_t>(i)];
    for (std::size_t j = 0; j < w.size(); ++j)
      log_w[j] = w[j] > faint ? std::log(w[j]) : log_weight(i, static_cast<std::int64_t>(j)) - shift;
    matrix.add_row(log_w, w, shift);
  });
  return matrix.moments();
}

MatrixMoments measure_softmax_matrix(std::span<const double> q, std::span<const double> k, std::int64_t d, double scale,
                                     const LogRow& visit) {
  require_rows_of(q, k, d);
  const std::int64_t n = static_cast<std::int64_t>(k.size()) / d;
  std::vector<double> keys(k.size()), queries(q.begin(), q.end());
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t c = 0; c < d; ++c)
      keys[static_cast<std::size_t>(c * n + j)] = scale * k[static_cast<std::size_t>(j * d + c)];
  Matrix matrix(visit);
  std::vector<double> log_w(static_cast<std::size_t>(n)), w(static_cast<std::size_t>(n));
  for_each_product_row(queries, keys, d, [&](std::int64_t, std::span<const double> logits) {
    const double shift = *std::max_element(logits.begin(), logits.end());
    for (std::size_t j = 0; j < w.size(); ++j) {
      log_w[j] = logits[j] - shift;
      w[j] = std::exp(log_w[j]);
    }
    matrix.add_row(log_w, w, shift);
  });
  return matrix.moments();
}

double fenton_log_variance(double st2, double d) {
  if (st2 < 1) return std::log1p(std::expm1(st2) / d);
  return st2 + std::log1p((d - 1) * std::exp(-st2)) - std::log(d);  // the same without e^st2
}

}  // namespace LinAttn
