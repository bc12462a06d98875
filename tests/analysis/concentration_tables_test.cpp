// SPDX-License-Identifier: BSD-3-Clause

// The measured tables of LLN attention's theory (entropy, gap, variance and the split against temperature), again from
// draws of our own. A number of a table is a mean over six draws: it and ours scatter by what our draws show, so that
// they lie within 4 standard errors of their difference and half a unit of the last printed digit.
//
// Gaps scatter with a long tail (now and then a real eigenvalue stands alone), which a few draws do not show; where the
// table says by how much (0.018 for softmax at 1, 0.1 to 0.2 for lln from 1.4 up), that is what its draws scatter by.
// Two of its numbers lie further off: 0.942 for lln at 0.6, where eight matrices by a general eigenvalue solver give
// 0.9605 with a deviation of 0.0065, and 0.987 for quadratic attention at 2.6, which cannot depend on the temperature
// and is 0.989 elsewhere. Those numbers are used instead.

#include "diagnose_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using Exec = Kokkos::DefaultHostExecutionSpace;

constexpr std::int64_t n = 512, d = 64, draws = 6, draws_of_gaps = 12;

/// The rate of the published rule for sigma_q = sigma_k = sigma.
double authors_rate(double sigma_sm) {
  constexpr double a = 0.14855178144710912, b = -0.35487039130661086;
  return std::sqrt((sigma_sm * sigma_sm - b) / (2 * a)) / std::sqrt(sigma_sm);
}

/// Draws as heads.
template <class Kernel>
std::vector<HeadDiagnostics> measured(const Kernel& kernel, double sigma_sm, std::int64_t tokens = n,
                                      bool gap = false) {
  const std::int64_t count = gap ? draws_of_gaps : draws;
  const auto c = DiagnoseCase::random<double>(1, count, count, tokens, tokens, d, std::sqrt(sigma_sm), 11);
  return diagnose<double>(Exec(), kernel, PlacedCase<double, Exec>(c).inputs(), {.gap = gap}).values;
}

struct Sample {
  double mean = 0, error = 0;
  Sample(const std::vector<HeadDiagnostics>& heads, double HeadDiagnostics::*value) {
    for (const auto& h : heads) mean += h.*value / static_cast<double>(heads.size());
    for (const auto& h : heads) error += (h.*value - mean) * (h.*value - mean);
    const auto count = static_cast<double>(heads.size());
    error = std::sqrt(error / (count - 1) / count);
  }
};

/// `ours` draws against the six of the table, which scatter by `theirs` if that is known.
void expect(const char* what, double sigma_sm, const Sample& s, double table, double digit, double ours = draws,
            double theirs = 0) {
  const double of_table = theirs > 0 ? theirs / std::sqrt(6.0) : s.error * std::sqrt(ours / 6);
  EXPECT_NEAR(s.mean, table, 4 * std::hypot(s.error, of_table) + digit / 2)
      << what << " at sigma_sm " << sigma_sm << ", standard error " << s.error;
}

using H = HeadDiagnostics;

struct TemperatureRow {
  double sigma_sm, h_softmax, h_lln, h_quadratic, h_relu, gap_softmax, gap_lln, gap_quadratic, gap_relu;
};

TEST(Tables, EntropyAndGapAgainstTemperature) {
  const TemperatureRow table[] = {{0.6, 8.744, 8.685, 8.938, 8.924, 0.969, 0.9605, 0.989, 0.987},
                                  {1.0, 8.288, 7.859, 8.938, 8.925, 0.928, 0.899, 0.988, 0.988},
                                  {1.4, 7.613, 6.297, 8.938, 8.923, 0.883, 0.60, 0.989, 0.988},
                                  {2.6, 5.105, 2.775, 8.938, 8.923, 0.635, 0.36, 0.989, 0.988}};
  for (const TemperatureRow& row : table) {
    const double rate = authors_rate(row.sigma_sm), sigma = row.sigma_sm;
    const auto check = [&](const auto& kernel, double entropy, double gap, double digit, double theirs) {
      const auto heads = measured(kernel, sigma, n, true);
      const std::string name = kernel.name;
      expect(("entropy of " + name).c_str(), sigma, {heads, &H::entropy}, entropy, 0.001, draws_of_gaps);
      expect(("gap of " + name).c_str(), sigma, {heads, &H::spectral_gap}, gap, digit, draws_of_gaps, theirs);
    };
    check(SoftmaxKernel{}, row.h_softmax, row.gap_softmax, 0.001, sigma == 1.0 ? 0.018 : 0);
    check(Lln{rate, rate}, row.h_lln, row.gap_lln, sigma < 1.3 ? 0.001 : 0.01, sigma < 1.3 ? 0 : 0.15);
    check(Quadratic{}, row.h_quadratic, row.gap_quadratic, 0.001, 0);
    check(Relu{}, row.h_relu, row.gap_relu, 0.001, 0);
  }
}

// Scaling q or k cancels in quadratic and relu attention: exactly for powers of two.
TEST(Tables, QuadraticAndReluDoNotReact) {
  auto c = DiagnoseCase::random<double>(1, 1, 1, 200, 200, 16, 1);
  const auto of = [&](const auto& kernel) {
    return values_of(diagnose<double>(Exec(), kernel, PlacedCase<double, Exec>(c).inputs(), {})(0, 0));
  };
  const auto quadratic = of(Quadratic{}), relu = of(Relu{});
  for (double& x : c.q) x *= 4;
  for (double& x : c.k) x *= 2;
  for (const auto& [name, value] : of(Quadratic{}))
    EXPECT_NEAR(value, quadratic.at(name), 1e-12 * std::abs(value)) << name;
  for (const auto& [name, value] : of(Relu{})) EXPECT_NEAR(value, relu.at(name), 1e-12 * std::abs(value)) << name;
}

TEST(Tables, EluIsAlmostFlat) {
  const Sample cold(measured(Elu{}, 2.6), &H::entropy), hot(measured(Elu{}, 0.3), &H::entropy);
  expect("entropy of elu", 0.3, hot, 8.997, 0.001);
  expect("entropy of elu", 2.6, cold, 8.983, 0.001);
}

TEST(Tables, SplitOfTheEntropy) {
  const double table[][9] = {{0.6, 0.001, 0.258, 0.086, 0.214, 0.023, 0.040, 0.025, 0.052},
                             {1.0, 0.008, 0.712, 0.374, 0.845, 0.023, 0.040, 0.023, 0.052},
                             {1.4, 0.027, 1.356, 0.805, 1.763, 0.023, 0.040, 0.025, 0.052},
                             {1.8, 0.067, 2.139, 1.549, 2.693, 0.022, 0.040, 0.025, 0.051}};
  for (const auto& row : table) {
    const double rate = authors_rate(row[0]);
    const auto check = [&](const auto& heads, const char* what, int column) {
      // the table has one draw or a few: its scatter is that of a draw
      for (const auto& [value, at] : {std::pair{&H::entropy_biased, column}, {&H::entropy_unbiased, column + 1}}) {
        Sample s(heads, value);
        s.error *= std::sqrt(static_cast<double>(draws));
        expect(what, row[0], s, row[at], 0.001);
      }
      for (const auto& h : heads) EXPECT_NEAR(h.entropy_biased + h.entropy_unbiased, 9 - h.entropy, 1e-12);
    };
    check(measured(SoftmaxKernel{}, row[0]), "softmax", 1);
    check(measured(Lln{rate, rate}, row[0]), "lln", 3);
    check(measured(Quadratic{}, row[0]), "quadratic", 5);
    check(measured(Relu{}, row[0]), "relu", 7);
  }
}

// N^2 Var P = exp(sigma_sm^2) - 1 of log-normal entries, and what finite N leaves of it.
TEST(Tables, VarianceOfTheMatrix) {
  const double table[][2] = {{0.6, 0.43}, {1.0, 1.69}, {1.2, 3.17}, {1.4, 5.57}};
  for (const auto& [sigma_sm, measured_there] : table) {
    Sample s(measured(SoftmaxKernel{}, sigma_sm), &H::relative_variance);
    const double theory = std::expm1(sigma_sm * sigma_sm);
    s.error *= std::sqrt(static_cast<double>(draws));
    expect("N^2 Var P", sigma_sm, s, measured_there, 0.01);
    EXPECT_LE(s.mean, theory * 1.05);
    EXPECT_GE(s.mean, theory * 0.85);
  }
}

// Prop 3.1: Var ln P = sigma_sm^2 (+ sigma_sm^4 / (2 D) from the row normaliser), mean ln P = -ln N - sigma_sm^2 / 2.
TEST(Tables, LogNormalityOfSoftmax) {
  const double table[][4] = {{0.64, 0.4094, 0.4081, -7.135},
                             {1.0, 1.0088, 1.0003, -7.431},
                             {1.44, 2.1059, 2.0685, -7.963},
                             {1.96, 3.9455, 3.8067, -8.821},
                             {3.24, 11.464, 10.477, -11.84}};
  for (const auto& [sigma_sm, variance, within, mean] : table) {
    const auto heads = measured(SoftmaxKernel{}, sigma_sm, 1024);
    const auto check = [&](const char* what, double H::*value, double there, double digit) {
      Sample s(heads, value);
      expect(what, sigma_sm, s, there, digit);
    };
    check("Var ln P", &H::logvar, variance, sigma_sm > 3 ? 0.001 : 0.0001);
    check("Var ln P within", &H::logvar_within, within, sigma_sm > 3 ? 0.001 : 0.0001);
    check("mean ln P", &H::log_mean, mean, sigma_sm > 3 ? 0.01 : 0.001);
    const double sm2 = sigma_sm * sigma_sm;
    const Sample s(heads, &H::logvar);
    EXPECT_NEAR(s.mean, sm2 + sm2 * sm2 / (2 * d), 4 * s.error + 0.02 * sm2);
  }
}

// dH/dtau = Var_P(a) / tau^3 in nats for one row, a of any kind, and >= 0: entropy grows with temperature.
TEST(Tables, EntropyGrowsWithTemperature) {
  constexpr double step = 1e-4;
  const auto c = DiagnoseCase::random<double>(1, 1, 1, 1, 300, 16, 1);
  const auto entropy_at = [&](double tau) {
    return diagnose<double>(Exec(), SoftmaxKernel{1 / tau}, PlacedCase<double, Exec>(c).inputs(), {.gap = false})(0, 0)
               .entropy *
           std::numbers::ln2;
  };
  for (const double tau : {1.5, 2.0, 4.0, 10.0}) {
    std::vector<double> a, p;
    double sum = 0, mean = 0, variance = 0;
    for (std::int64_t j = 0; j < 300; ++j) {
      double dot = 0;
      for (std::int64_t e = 0; e < 16; ++e) dot += c.query(0, 0, 0, e) * c.key(0, 0, j, e);
      a.push_back(dot);
      p.push_back(std::exp(dot / tau));
      sum += p.back();
    }
    for (std::size_t j = 0; j < a.size(); ++j) mean += p[j] / sum * a[j];
    for (std::size_t j = 0; j < a.size(); ++j) variance += p[j] / sum * (a[j] - mean) * (a[j] - mean);
    const double slope = (entropy_at(tau + step) - entropy_at(tau - step)) / (2 * step);
    EXPECT_GE(slope, 0);
    // the third derivative is below 10 here, times step^2 / 6; roundings of H over 2 step
    EXPECT_NEAR(slope, variance / (tau * tau * tau), 2e-8 + 1e-14 / step);
  }
}

}  // namespace
