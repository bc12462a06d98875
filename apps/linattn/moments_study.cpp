// SPDX-License-Identifier: BSD-3-Clause
#include "moments_study.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <linattn/analysis/log_variance.hpp>
#include <linattn/analysis/moments.hpp>
#include <linattn/io/writer.hpp>
#include <linattn/version.hpp>
#include <vector>

#include "execution.hpp"
#include "instruments.hpp"
#include "json_output.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

using Numbers = std::vector<double>;

const Numbers dimensions{32, 64, 128};
const Numbers st2_grid{0.5, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 26, 34, 50, 70};
const Numbers sigmas{0.8, 1.0, 1.2, 1.4, 1.6, 1.8};
const Numbers correlations{0, 0.3, 0.6, 0.9};
constexpr MomentRule rules[] = {MomentRule::authors, MomentRule::fit, MomentRule::table, MomentRule::entropy};
constexpr int rule_count = 4;

/// How much is simulated.
struct Effort {
  std::int64_t rows = 1024;  ///< N
  std::size_t curve_draws = 4;
  std::size_t matching_draws = 12;
  std::int64_t correlated_pairs = 65536;
  int line_points = 16;
};
constexpr Effort quick_effort{128, 2, 2, 16384, 8};

/// Runs the jobs, each of which writes where no other does, on all threads.
void run_all(const std::vector<std::function<void()>>& jobs) {
  using Policy = Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::Schedule<Kokkos::Dynamic>,
                                     Kokkos::IndexType<std::int64_t>>;
  const std::function<void()>* const first = jobs.data();
  const Kokkos::DefaultHostExecutionSpace exec;
  Kokkos::parallel_for("LinAttn::app::study", Policy(exec, 0, static_cast<std::int64_t>(jobs.size())),
                       [first](std::int64_t i) { first[i](); });
  detail::fence(exec, "LinAttn::app::study");
}

/// A table of numbers on its way to HDF5 and JSON.
struct Dataset {
  std::string path;
  std::vector<std::int64_t> extents;
  Numbers values;
};

double mean_of(const double* x, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += x[i];
  return sum / static_cast<double>(n);
}

/// Means over the last extent.
Numbers means(const Numbers& x, std::size_t draws) {
  Numbers result;
  for (std::size_t i = 0; i < x.size(); i += draws) result.push_back(mean_of(x.data() + i, draws));
  return result;
}

/// Standard errors of the means.
Numbers errors(const Numbers& x, std::size_t draws) {
  Numbers result;
  for (std::size_t i = 0; i < x.size(); i += draws) {
    const double mean = mean_of(x.data() + i, draws);
    double squares = 0;
    for (std::size_t n = 0; n < draws; ++n) squares += std::pow(x[i + n] - mean, 2);
    result.push_back(std::sqrt(squares / static_cast<double>(draws * (draws - 1))));
  }
  return result;
}

/// Numbers of the first pair of each part; every pair (q, k) has a number of its own, and so random numbers of its own.
enum FirstPair : std::uint64_t {
  softmax_pairs = 10000,
  lln_pairs = 20000,
  cross_pairs = 40000,
  matching_pairs = 50000,
  histogram_pair = 60000
};
CounterRandom queries_of(std::uint64_t seed, std::uint64_t pair) { return {seed, 2 * pair}; }
CounterRandom keys_of(std::uint64_t seed, std::uint64_t pair) { return {seed, 2 * pair + 1}; }

/// q, k of N rows, normal.
struct Pair {
  Numbers q, k;

  Pair(std::uint64_t seed, std::uint64_t number, std::int64_t rows, std::int64_t d, double sigma_q, double sigma_k) {
    const CounterRandom of_q = queries_of(seed, number), of_k = keys_of(seed, number);
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rows * d); ++i) {
      q.push_back(sigma_q * of_q.normal(i));
      k.push_back(sigma_k * of_k.normal(i));
    }
  }
};

double deviation(const Numbers& x) {
  const double mean = mean_of(x.data(), x.size());
  double squares = 0;
  for (const double value : x) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(x.size() - 1));
}

MatrixMoments softmax_of(const Pair& pair, std::int64_t d) {
  return measure_softmax_matrix(pair.q, pair.k, d, 1 / std::sqrt(static_cast<double>(d)));
}

/// The study, part by part.
class Study {
 public:
  Study(std::uint64_t seed, const Effort& effort) : m_seed(seed), m_effort(effort) {}

  const std::vector<Dataset>& datasets() const { return m_datasets; }

  /// Prop 3.1 with the correction for finite D: (D, sigma).
  void softmax() {
    const std::size_t count = dimensions.size() * sigmas.size() * m_effort.curve_draws;
    Numbers variance(count), within(count), sm2, predicted;
    std::vector<std::function<void()>> jobs;
    for (std::size_t i = 0; i < count; ++i)
      jobs.push_back([&, i] {
        const auto d = static_cast<std::int64_t>(dimensions[i / m_effort.curve_draws / sigmas.size()]);
        const double sigma = sigmas[i / m_effort.curve_draws % sigmas.size()];
        const MatrixMoments m = softmax_of(Pair(m_seed, softmax_pairs + i, m_effort.rows, d, sigma, sigma), d);
        variance[i] = m.variance;
        within[i] = m.within;
      });
    run_all(jobs);
    for (const double d : dimensions)
      for (const double sigma : sigmas) {
        sm2.push_back(std::pow(sigma, 4));
        predicted.push_back(softmax_log_variance(sm2.back(), d));
      }
    const std::vector<std::int64_t> shape{extent(dimensions), extent(sigmas)};
    add("softmax/d", {extent(dimensions)}, dimensions);
    add("softmax/sigma", {extent(sigmas)}, sigmas);
    add("softmax/prop_3_1", shape, sm2);
    add("softmax/finite_d", shape, predicted);
    add("softmax/log_variance", shape, means(variance, m_effort.curve_draws));
    add("softmax/log_variance_error", shape, errors(variance, m_effort.curve_draws));
    add("softmax/within", shape, means(within, m_effort.curve_draws));
  }

  /// Var(q_i . k_i / sqrt(D)) of correlated entries: 1 + rho^2 = sigma_q^2 sigma_k^2 + C_cross.
  void cross() {
    constexpr std::int64_t d = 64;
    const std::int64_t pairs = m_effort.correlated_pairs;
    Numbers predicted(correlations.size()), measured(correlations.size()), c_cross(correlations.size());
    for (std::size_t i = 0; i < correlations.size(); ++i) {
      const double rho = correlations[i];
      const CounterRandom of_q = queries_of(m_seed, cross_pairs + i), of_k = keys_of(m_seed, cross_pairs + i);
      Numbers q(static_cast<std::size_t>(pairs * d)), k(q.size()), logits(static_cast<std::size_t>(pairs));
      std::vector<std::function<void()>> jobs;
      for (std::int64_t first = 0; first < pairs; first += 1024)
        jobs.push_back([&, first] {
          for (std::int64_t n = first; n < first + 1024; ++n)
            for (std::int64_t c = 0; c < d; ++c) {
              const auto at = static_cast<std::size_t>(n * d + c);
              q[at] = of_q.normal(at);
              k[at] = rho * q[at] + std::sqrt(1 - rho * rho) * of_k.normal(at);
              logits[static_cast<std::size_t>(n)] += q[at] * k[at] / std::sqrt(static_cast<double>(d));
            }
        });
      run_all(jobs);
      predicted[i] = 1 + rho * rho;
      measured[i] = std::pow(deviation(logits), 2);
      const DiagnosedTensors tensors{{1, 1, 1, pairs, pairs, d, d}, std::move(q), std::move(k)};
      c_cross[i] = measured_deviations(tensors, {.cross = CrossTerm::same_position}).cross[0];
    }
    add("cross/rho", {extent(correlations)}, correlations);
    add("cross/predicted", {extent(correlations)}, predicted);
    add("cross/logit_variance", {extent(correlations)}, measured);
    add("cross/c_cross", {extent(correlations)}, c_cross);
  }

  /// Prop 4.1, moderate (Fenton) and broad (Romeo, the published line): (D, st2).
  void lln() {
    const std::size_t count = dimensions.size() * st2_grid.size() * m_effort.curve_draws;
    Numbers numerator(count), variance(count), within(count), fenton, romeo;
    std::vector<std::function<void()>> jobs;
    for (std::size_t i = 0; i < count; ++i)
      jobs.push_back([&, i] {
        const auto d = static_cast<std::int64_t>(dimensions[i / m_effort.curve_draws / st2_grid.size()]);
        const double rate = std::sqrt(st2_grid[i / m_effort.curve_draws % st2_grid.size()] / 2);
        const Pair pair(m_seed, lln_pairs + i, m_effort.rows, d, 1, 1);
        const MatrixMoments m = measure_lln_matrix(pair.q, pair.k, d, rate, rate);
        numerator[i] = m.numerator;
        variance[i] = m.variance;
        within[i] = m.within;
      });
    run_all(jobs);
    for (const double d : dimensions)
      for (const double st2 : st2_grid) {
        fenton.push_back(fenton_log_variance(st2, d));
        romeo.push_back(published_line.slope * st2 + published_line.intercept);
      }
    const std::vector<std::int64_t> shape{extent(dimensions), extent(st2_grid)};
    add("lln/d", {extent(dimensions)}, dimensions);
    add("lln/st2", {extent(st2_grid)}, st2_grid);
    add("lln/fenton", shape, fenton);
    add("lln/romeo", shape, romeo);
    add("lln/log_variance_numerator", shape, means(numerator, m_effort.curve_draws));
    add("lln/log_variance_numerator_error", shape, errors(numerator, m_effort.curve_draws));
    add("lln/log_variance", shape, means(variance, m_effort.curve_draws));
    add("lln/log_variance_error", shape, errors(variance, m_effort.curve_draws));
    add("lln/within", shape, means(within, m_effort.curve_draws));
  }

  /// Regression lines: (D, range), of the numerator on [4, 9.5] and of log P on [6, 20] and [6, 58].
  void lines() {
    struct Range {
      double first, last;
      bool numerator;
    };
    const Range ranges[] = {{4, 9.5, true}, {6, 20, false}, {6, 58, false}};
    const std::size_t count = dimensions.size() * 3;
    Numbers slope(count), intercept(count), r2(count);
    std::vector<std::function<void()>> jobs;
    for (std::size_t i = 0; i < count; ++i)
      jobs.push_back([&, i] {
        const Range& range = ranges[i % 3];
        const LineFit fit =
            fit_line_with_quality(static_cast<std::int64_t>(dimensions[i / 3]), {.rows = m_effort.rows,
                                                                                 .first = range.first,
                                                                                 .last = range.last,
                                                                                 .points = m_effort.line_points,
                                                                                 .seed = m_seed + 30000 + i,
                                                                                 .numerator = range.numerator});
        slope[i] = fit.line.slope;
        intercept[i] = fit.line.intercept;
        r2[i] = fit.r2;
      });
    run_all(jobs);
    add("lines/d", {extent(dimensions)}, dimensions);
    add("lines/first", {3}, {4, 6, 6});
    add("lines/last", {3}, {9.5, 20, 58});
    add("lines/numerator", {3}, {1, 0, 0});
    add("lines/slope", {extent(dimensions), 3}, slope);
    add("lines/intercept", {extent(dimensions), 3}, intercept);
    add("lines/r2", {extent(dimensions), 3}, r2);
    m_line = {slope[4], intercept[4]};  // D = 64 on [6, 20]
  }

  /// Matching at D = 64: (sigma_k = sigma or 1, sigma, rule). Errors are relative, of sums over the draws.
  void matching() {
    constexpr std::int64_t d = 64;
    const std::size_t count = 2 * sigmas.size() * m_effort.matching_draws;
    std::vector<MatrixMoments> softmax(count), matrices(count * rule_count);
    const auto draw = [&](std::size_t i) {
      const double sigma = sigmas[i / m_effort.matching_draws % sigmas.size()];
      const bool same = i / m_effort.matching_draws / sigmas.size() == 0;
      return Pair(m_seed, matching_pairs + i, m_effort.rows, d, sigma, same ? sigma : 1);
    };
    HostDeviations found{Numbers(count), Numbers(count)};
    std::vector<std::function<void()>> jobs;
    for (std::size_t i = 0; i < count; ++i)
      jobs.push_back([&, i] {
        const Pair pair = draw(i);
        found.sigma_q[i] = deviation(pair.q);
        found.sigma_k[i] = deviation(pair.k);
        softmax[i] = softmax_of(pair, d);
      });
    run_all(jobs);
    std::vector<LlnRates> rates;
    for (const MomentRule rule : rules)
      rates.push_back(rates_of_deviations(found, 1, d, {.rule = rule, .line = m_line}));
    jobs.clear();
    for (std::size_t i = 0; i < count; ++i)
      jobs.push_back([&, i] {
        const Pair pair = draw(i);
        for (std::size_t r = 0; r < rule_count; ++r)
          matrices[i * rule_count + r] = measure_lln_matrix(pair.q, pair.k, d, rates[r].alpha[i], rates[r].beta[i]);
      });
    run_all(jobs);
    const double draws = static_cast<double>(m_effort.matching_draws);
    Numbers error, numerator_error, entropy, softmax_entropy;
    for (std::size_t group = 0; group < 2 * sigmas.size(); ++group) {
      double of_softmax = 0, bits = 0;
      const double sigma = sigmas[group % sigmas.size()];
      const double sm2 = group < sigmas.size() ? std::pow(sigma, 4) : sigma * sigma;
      for (std::size_t n = 0; n < m_effort.matching_draws; ++n) {
        of_softmax += softmax[group * m_effort.matching_draws + n].variance / draws;
        bits += softmax[group * m_effort.matching_draws + n].entropy / draws;
      }
      softmax_entropy.push_back(bits);
      for (std::size_t r = 0; r < rule_count; ++r) {
        MatrixMoments mean;
        for (std::size_t n = 0; n < m_effort.matching_draws; ++n) {
          const MatrixMoments& m = matrices[(group * m_effort.matching_draws + n) * rule_count + r];
          mean.variance += m.variance / draws;
          mean.numerator += m.numerator / draws;
          mean.entropy += m.entropy / draws;
        }
        error.push_back(mean.variance / of_softmax - 1);
        numerator_error.push_back(mean.numerator / sm2 - 1);
        entropy.push_back(mean.entropy);
      }
    }
    const std::vector<std::int64_t> shape{2, extent(sigmas), rule_count};
    add("matching/sigma", {extent(sigmas)}, sigmas);
    add("matching/log_variance_error", shape, error);
    add("matching/numerator_error", shape, numerator_error);
    add("matching/entropy", shape, entropy);
    add("matching/softmax_entropy", {2, extent(sigmas)}, softmax_entropy);
  }

  /// Histograms of log P at D = 64, sigma_q = sigma_k = 1: softmax, LLN with alpha = beta = 1, matched by the published
  /// line and by the table; with mean and deviation of the normal distribution that fits each.
  void histograms() {
    constexpr std::int64_t d = 64;
    constexpr std::size_t bins = 120, curves = 4;
    constexpr double low = -15, high = 3;  // of log (N P)
    const Pair pair(m_seed, histogram_pair, m_effort.rows, d, 1, 1);
    const HostDeviations found{{deviation(pair.q)}, {deviation(pair.k)}};
    const LlnRates given{{1.0}, {1.0}}, authors = rates_of_deviations(found, 1, d, {.rule = MomentRule::authors}),
                   table = rates_of_deviations(found, 1, d, {.rule = MomentRule::table});
    const LlnRates* const rates[curves] = {nullptr, &given, &authors, &table};
    const double log_n = std::log(static_cast<double>(m_effort.rows));
    Numbers density(curves * bins), mean(curves), width(curves), skewness(curves), kurtosis(curves), edges;
    const auto count = [&](std::size_t curve) {
      return [&, curve](std::span<const double> row) {
        for (const double log_p : row) {
          const double bin = (log_p + log_n - low) / (high - low) * static_cast<double>(bins);
          if (bin >= 0 && bin < static_cast<double>(bins)) density[curve * bins + static_cast<std::size_t>(bin)] += 1;
        }
      };
    };
    std::vector<std::function<void()>> jobs;
    for (std::size_t curve = 0; curve < curves; ++curve)
      jobs.push_back([&, curve] {
        const LlnRates* const of_lln = rates[curve];
        const MatrixMoments m =
            of_lln == nullptr ? measure_softmax_matrix(pair.q, pair.k, d, 1 / 8.0, count(curve))
                              : measure_lln_matrix(pair.q, pair.k, d, of_lln->alpha[0], of_lln->beta[0], count(curve));
        mean[curve] = m.mean + log_n;
        width[curve] = std::sqrt(m.variance);
        skewness[curve] = m.skewness;
        kurtosis[curve] = m.excess_kurtosis;
        for (std::size_t bin = 0; bin < bins; ++bin)
          density[curve * bins + bin] /= static_cast<double>(m.entries) * (high - low) / static_cast<double>(bins);
      });
    run_all(jobs);
    for (std::size_t bin = 0; bin <= bins; ++bin)
      edges.push_back(low + (high - low) * static_cast<double>(bin) / static_cast<double>(bins));
    add("histograms/edges", {bins + 1}, edges);
    add("histograms/density", {curves, bins}, density);
    add("histograms/mean", {curves}, mean);
    add("histograms/deviation", {curves}, width);
    add("histograms/skewness", {curves}, skewness);
    add("histograms/excess_kurtosis", {curves}, kurtosis);
  }

 private:
  static std::int64_t extent(const Numbers& x) { return static_cast<std::int64_t>(x.size()); }

  void add(const std::string& name, std::vector<std::int64_t> extents, Numbers values) {
    m_datasets.push_back({"/study/" + name, std::move(extents), std::move(values)});
  }

  std::uint64_t m_seed;
  Effort m_effort;
  MomentLine m_line{};
  std::vector<Dataset> m_datasets;
};

/// Arrays in arrays.
Json nested(const Dataset& data, std::size_t level, std::size_t& at) {
  Json json = Json::array();
  for (std::int64_t i = 0; i < data.extents[level]; ++i)
    json.push_back(level + 1 == data.extents.size() ? Json(data.values[at++]) : nested(data, level + 1, at));
  return json;
}

}  // namespace

ExitStatus write_moments_study(const MomentsStudyOptions& options) {
  const JsonOutput json(options.json, {options.output});
  io::Writer writer(options.output);
  const Runtime runtime;
  const Progress progress;
  const Effort effort = options.quick ? quick_effort : Effort();
  Study study(options.seed, effort);
  const std::pair<const char*, void (Study::*)()> parts[] = {
      {"softmax attention", &Study::softmax}, {"C_cross", &Study::cross},
      {"LLN attention", &Study::lln},         {"lines", &Study::lines},
      {"matching", &Study::matching},         {"histograms", &Study::histograms}};
  for (const auto& [name, part] : parts) {
    progress.show(name);
    (study.*part)();
  }
  progress.show("");

  writer.attribute("/", "producer", "linattn moments " LINATTN_VERSION);
  writer.attribute("/study", "rows", effort.rows);
  writer.attribute("/study", "seed", options.seed);
  writer.attribute("/study", "curve_draws", static_cast<std::int64_t>(effort.curve_draws));
  writer.attribute("/study", "matching_draws", static_cast<std::int64_t>(effort.matching_draws));
  writer.attribute("/study", "rules", "authors, fit, table, entropy");
  writer.attribute("/study", "histograms", "softmax, lln alpha = beta = 1, lln authors, lln table; of log(N P)");
  Json document = json_document("moments");
  document["study"] = {{"rows", effort.rows},
                       {"seed", options.seed},
                       {"curve_draws", effort.curve_draws},
                       {"matching_draws", effort.matching_draws},
                       {"rules", {"authors", "fit", "table", "entropy"}},
                       {"histogram_curves", {"softmax", "lln", "lln authors", "lln table"}}};
  for (const Dataset& data : study.datasets()) {
    writer.write(data.path, data.values, data.extents);
    std::size_t at = 0;
    Json* place = &document;
    std::size_t begin = 1;
    for (std::size_t end; (end = data.path.find('/', begin)) != std::string::npos; begin = end + 1)
      place = &(*place)[data.path.substr(begin, end - begin)];
    (*place)[data.path.substr(begin)] = nested(data, 0, at);
  }
  writer.commit();
  if (!json.is_stdout()) std::cout << options.output << ": " << study.datasets().size() << " datasets below /study\n";
  json.write(document);
  return ExitStatus::done;
}

}  // namespace LinAttn::app
