// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <linattn/analysis/diagnostics.hpp>
#include <linattn/noise.hpp>
#include <numbers>

namespace LinAttn::detail {
namespace {

constexpr double bits = 1 / std::numbers::ln2;

/// Mean and standard error of terms of sampled rows.
class Mean {
 public:
  void add(double x) {
    ++m_count;
    const double step = x - m_mean;
    m_mean += step / static_cast<double>(m_count);
    m_squares += step * (x - m_mean);
  }
  double value() const { return m_mean; }
  /// Of a sample without replacement of this many of `all`.
  double error(std::int64_t all) const {
    if (m_count < 2 || m_count >= all) return 0;
    const auto n = static_cast<double>(m_count);
    return std::sqrt(m_squares / (n - 1) / n * (1 - n / static_cast<double>(all)));
  }

 private:
  std::int64_t m_count = 0;
  double m_mean = 0, m_squares = 0;
};

/// Number of visible keys before each key, and of all.
std::vector<std::int64_t> visible_before(const HeadSums& s) {
  std::vector<std::int64_t> before(static_cast<std::size_t>(s.nk) + 1, 0);
  for (std::int64_t j = 0; j < s.nk; ++j) before[j + 1] = before[j] + (!s.visible || s.visible[j] != 0 ? 1 : 0);
  return before;
}

double entropy_of(const std::vector<double>& p) {
  double h = 0;
  for (const double x : p)
    if (x != 0) h -= x * std::log(x);  // a NaN stays
  return h * bits;
}

double log_sum(const RowRecord& r) { return r.reference + std::log(r.sum); }

/// What a row contributes, relative to its sum.
struct RowTerms {
  double entropy, squares, log_mean, log_variance;
  explicit RowTerms(const RowRecord& r)
      : entropy((log_sum(r) - (r.weighted / r.sum + r.pivot)) * bits), squares(r.squares / (r.sum * r.sum)) {
    const double n = static_cast<double>(r.entries), mean = n > 0 ? r.powers[0] / n : 0;
    log_mean = n > 0 ? r.pivot + mean - log_sum(r) : 0;
    log_variance = n > 0 ? std::max(0.0, r.powers[1] / n - mean * mean) : 0;
    entropy = std::max(0.0, entropy);
    if (r.sum != r.sum) entropy = log_variance = r.sum;
  }
};

}  // namespace

void append(std::string& text, const std::string& more) { text += (text.empty() ? "" : "; ") + more; }

HeadDiagnostics summarise(const HeadSums& s) {
  HeadDiagnostics d;
  d.rows = s.rows;
  d.sampled = s.sampled;
  const auto before = visible_before(s);
  const auto sees = [&](std::int64_t query) { return before[s.causal ? query + s.nk - s.nq + 1 : s.nk]; };
  const auto position = [&](std::int64_t row) { return s.positions ? s.positions[row] : row; };

  // first what lies about where, then moments about that
  Mean entropy, deficit, squares, seen, log_mean, log_variance;
  double entries = 0, log_sum_all = 0;
  std::vector<RowTerms> terms;
  std::vector<std::int64_t> counted;
  bool finite = !s.squares || std::isfinite(*s.squares);
  for (std::int64_t j = 0; s.columns && j < s.nk; ++j) finite = finite && std::isfinite(s.columns[j]);
  for (std::int64_t i = 0; s.row_sums && i < s.nq; ++i) finite = finite && std::isfinite(s.row_sums[i]);
  for (std::int64_t row = 0; row < s.rows; ++row) {
    const RowRecord& r = s.records[row];
    finite = finite && std::isfinite(r.sum) && std::isfinite(r.squares) && std::isfinite(r.powers[3]);
    d.zero_entries += r.zeros;
    if (r.sum == 0) {
      ++d.empty_rows;
      continue;
    }
    const RowTerms t(r);
    const auto m = static_cast<double>(sees(position(row)));
    entropy.add(t.entropy);
    deficit.add(std::log2(m) - t.entropy);
    squares.add(t.squares);
    seen.add(m);
    log_mean.add(t.log_mean);
    log_variance.add(t.log_variance);
    entries += static_cast<double>(r.entries);
    log_sum_all += static_cast<double>(r.entries) * t.log_mean;
    terms.push_back(t);
    counted.push_back(row);
  }
  if (!finite) {
    d.entropy = d.entropy_biased = d.entropy_unbiased = d.spectral_gap = d.variance = d.relative_variance = d.log_mean =
        d.logvar = d.log_skewness = d.log_kurtosis = d.logvar_within = d.temperature = HeadDiagnostics::none;
    append(d.absent, "q or k hold numbers that are not finite, or weights overflow");
    return d;
  }
  const auto rows = static_cast<std::int64_t>(terms.size());
  if (rows == 0) {
    d.temperature = std::numeric_limits<double>::infinity();
    return d;
  }
  // rows with weight among all: those measured are a sample of them, or all
  const std::int64_t with_weight = static_cast<std::int64_t>(
      std::llround(static_cast<double>(s.nq) * static_cast<double>(rows) / static_cast<double>(s.rows)));
  d.entropy = entropy.value();
  d.entropy_error = entropy.error(with_weight);

  // variance: mean entry 1 / mean of m
  const double mean_entry = 1 / seen.value();
  double mean_square = squares.value();  // of a row
  if (s.squares) {                       // of all rows, a share of which has no weight
    mean_square = *s.squares / (static_cast<double>(s.nq) * static_cast<double>(rows) / static_cast<double>(s.rows));
  } else if (s.sampled) {
    Mean both;
    for (std::int64_t i = 0; i < rows; ++i)
      both.add(terms[i].squares * seen.value() +
               mean_square * (static_cast<double>(sees(position(counted[i]))) - seen.value()));
    d.relative_variance_error = both.error(with_weight);
  }
  d.relative_variance = std::max(0.0, mean_square * seen.value() - 1);
  d.variance = d.relative_variance * mean_entry * mean_entry;
  d.variance_error = d.relative_variance_error * mean_entry * mean_entry;

  // logarithms
  d.log_mean = log_sum_all / entries;
  double central[5] = {};
  Mean log_share, variance_share;
  for (std::int64_t i = 0; i < rows; ++i) {
    RowRecord r = s.records[counted[i]];
    r.move_pivot(d.log_mean + log_sum(r));
    for (int p = 0; p < 4; ++p) central[p + 1] += r.powers[p] / entries;
  }
  d.logvar = std::max(0.0, central[2] - central[1] * central[1]);
  if (d.logvar > 0) {
    d.log_skewness = central[3] / std::pow(d.logvar, 1.5);
    d.log_kurtosis = central[4] / (d.logvar * d.logvar) - 3;
  }
  d.logvar_within = log_variance.value();
  d.logvar_within_error = log_variance.error(with_weight);
  d.temperature = 1 / std::sqrt(d.logvar);
  if (s.sampled) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const double weight = static_cast<double>(s.records[counted[i]].entries) * static_cast<double>(rows) / entries;
      const double away = terms[i].log_mean - d.log_mean;
      log_share.add(weight * away);
      variance_share.add(weight * (terms[i].log_variance + away * away - d.logvar));
    }
    d.log_mean_error = log_share.error(with_weight);
    d.logvar_error = variance_share.error(with_weight);
  }

  // what rows have in common
  if (!s.columns) {
    d.entropy_biased = d.entropy_unbiased = HeadDiagnostics::none;
    append(d.absent, s.no_columns);
    return d;
  }
  std::vector<double> p, u;
  double total = 0;
  for (std::int64_t j = 0; j < s.nk; ++j) total += s.columns[j];
  for (std::int64_t j = 0; j < s.nk; ++j) p.push_back(s.columns[j] / total);
  double most = std::log2(static_cast<double>(before[s.nk]));
  if (s.causal) {
    u.assign(static_cast<std::size_t>(s.nk), 0);
    double later = 0, all = 0;
    const auto count = [&](std::int64_t query) {
      u[query + s.nk - s.nq] += 1 / static_cast<double>(sees(query));
      all += 1;
    };
    for (const std::int64_t row : counted)
      if (!s.row_sums) count(position(row));
    for (std::int64_t query = 0; s.row_sums && query < s.nq; ++query)
      if (s.row_sums[query] != 0) count(query);

    for (std::int64_t j = s.nk; j-- > 0;) {
      later += u[j];
      u[j] = !s.visible || s.visible[j] != 0 ? later / all : 0;
    }
    most = entropy_of(u);
  }
  d.entropy_biased = most - entropy_of(p);
  d.entropy_unbiased = deficit.value() - d.entropy_biased;
  d.entropy_unbiased_error = deficit.error(with_weight);
  return d;
}

double causal_gap(const double* diagonal, std::int64_t n) {
  double first = 0, second = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double p = diagonal[i];
    if (p != p) return p;
    second = std::max(second, std::min(first, p));
    first = std::max(first, p);
  }
  return 1 - std::min(1.0, second);
}

double causal_gap(const HeadSums& s) {
  std::vector<double> diagonal;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    const RowRecord& r = s.records[row];
    diagonal.push_back(r.has_diagonal ? std::exp(r.diagonal - log_sum(r)) : 0);
  }
  return causal_gap(diagonal.data(), s.rows);
}

std::vector<std::int64_t> sampled_rows(std::uint64_t seed, std::int64_t unit, std::int64_t n, std::int64_t rows) {
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto words = words_of_counter(seed, static_cast<std::uint64_t>(unit), static_cast<std::uint64_t>(i));
    const double u = (static_cast<double>(words.v[0]) + 0.5) * 0x1p-32;
    const double at = (static_cast<double>(i) + u) * (static_cast<double>(n) / static_cast<double>(rows));
    positions.push_back(std::clamp<std::int64_t>(static_cast<std::int64_t>(at), 0, n - 1));
  }
  return positions;
}

}  // namespace LinAttn::detail
