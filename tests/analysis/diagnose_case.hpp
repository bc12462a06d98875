// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <linattn/analysis/diagnose.hpp>
#include <linattn/variants.hpp>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "dense_instruments.hpp"
#include "placed_tensor.hpp"
#include "spaces.hpp"

/// \file diagnose_case.hpp
/// Inputs for the instruments, and the log-weights that they stand for by another route.

namespace LinAttn::test_support {

/// Standard normal numbers that depend on (seed, index) only.
inline double normal(std::uint64_t seed, std::uint64_t index) {
  const auto uniform = [&](std::uint64_t i) {
    std::uint64_t z = (i + 1 + (seed << 40)) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (static_cast<double>((z ^ (z >> 31)) >> 12) + 0.5) * 0x1p-52;
  };
  return std::sqrt(-2 * std::log(uniform(2 * index))) * std::cos(2 * std::numbers::pi * uniform(2 * index + 1));
}

/// Queries, keys and mask, row-major in double; of the precision of T.
struct DiagnoseCase {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, nq = 0, nk = 0, d = 0;
  std::vector<double> q{}, k{};
  std::vector<std::uint8_t> mask{};  // empty: all visible

  template <class T>
  static DiagnoseCase random(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads, std::int64_t nq,
                             std::int64_t nk, std::int64_t d, double sigma, std::uint64_t seed = 1) {
    DiagnoseCase c{batch, heads, kv_heads, nq, nk, d};
    for (std::int64_t e = 0; e < batch * heads * nq * d; ++e) c.q.push_back(sigma * normal(2 * seed, e));
    for (std::int64_t e = 0; e < batch * kv_heads * nk * d; ++e) c.k.push_back(sigma * normal(2 * seed + 1, e));
    c.round<T>();
    return c;
  }
  template <class T>
  void round() {
    for (auto* values : {&q, &k})
      for (double& x : *values)
        x = static_cast<double>(static_cast<accumulator_t<T>>(static_cast<T>(static_cast<accumulator_t<T>>(x))));
  }
  double query(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return q[static_cast<std::size_t>(((b * heads + h) * nq + i) * d + j)];
  }
  double key(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return k[static_cast<std::size_t>(((b * kv_heads + h / (heads / kv_heads)) * nk + i) * d + j)];
  }
  bool is_visible(std::int64_t b, std::int64_t j) const {
    return mask.empty() || mask[static_cast<std::size_t>(b * nk + j)] != 0;
  }
};

/// Log-weights by their definitions.
inline Real log_weight(const SoftmaxKernel& kernel, const DiagnoseCase& c, std::int64_t b, std::int64_t h,
                       std::int64_t i, std::int64_t j) {
  Real x = 0;
  for (std::int64_t e = 0; e < c.d; ++e) x += static_cast<Real>(c.query(b, h, i, e)) * c.key(b, h, j, e);
  return x * kernel.scale.value_or(1 / std::sqrt(static_cast<double>(c.d)));
}
inline Real log_weight(const Lln& lln, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) {
  std::vector<Real> x;
  for (std::int64_t e = 0; e < c.d; ++e)
    x.push_back(static_cast<Real>(lln.alpha.value()) * c.query(b, h, i, e) +
                static_cast<Real>(lln.beta.value()) * c.key(b, h, j, e));
  const Real most = *std::max_element(x.begin(), x.end());
  Real sum = 0;
  for (const Real value : x) sum += std::exp(value - most);
  return most + std::log(sum);
}
template <class Phi>
Real log_of_features(const Phi& phi, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t j) {
  Real sum = 0;
  for (std::int64_t e = 0; e < c.d; ++e) sum += phi(Real(c.query(b, h, i, e))) * phi(Real(c.key(b, h, j, e)));
  return std::log(sum);
}
inline Real log_weight(const Elu&, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) {
  return log_of_features([](Real x) { return x > 0 ? x + 1 : std::exp(x); }, c, b, h, i, j);
}
inline Real log_weight(const Relu&, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) {
  return log_of_features([](Real x) { return x > 0 ? x : Real(0); }, c, b, h, i, j);
}
inline Real log_weight(const Quadratic&, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) {
  return log_of_features([](Real x) { return x * x; }, c, b, h, i, j);
}
/// Affine with qk_norm l2.
inline Real log_weight(const Affine& v, const DiagnoseCase& c, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) {
  Real dot = 0, of_query = v.norm_eps, of_key = v.norm_eps;
  for (std::int64_t e = 0; e < c.d; ++e) {
    dot += Real(c.query(b, h, i, e)) * c.key(b, h, j, e);
    of_query += Real(c.query(b, h, i, e)) * c.query(b, h, i, e);
    of_key += Real(c.key(b, h, j, e)) * c.key(b, h, j, e);
  }
  return std::log(v.a.value() * v.score_scale(c.d) * dot / std::sqrt(of_query * of_key) + v.b.value());
}

template <class Kernel>
DenseInstruments expected(const Kernel& kernel, const DiagnoseCase& c, bool causal, std::int64_t b, std::int64_t h) {
  DenseMatrix a{c.nq, c.nk, causal, {}, {}};
  for (std::int64_t i = 0; i < c.nq; ++i)
    for (std::int64_t j = 0; j < c.nk; ++j) {
      const bool counts = c.is_visible(b, j) && (!causal || j <= i + c.nk - c.nq);
      a.visible.push_back(counts);
      a.logs.push_back(counts ? log_weight(kernel, c, b, h, i, j) : 0);
    }
  return dense_instruments(a);
}

/// The case as the library sees it.
template <class T, class ExecSpace>
struct PlacedCase {
  PlacedTensor<T, 4, ExecSpace> q, k;
  PlacedTensor<std::uint8_t, 2, ExecSpace> mask;
  bool has_mask;

  explicit PlacedCase(const DiagnoseCase& c, Layout layout = Layout::right)
      : q({c.batch, c.heads, c.nq, c.d}, layout),
        k({c.batch, c.kv_heads, c.nk, c.d}, layout),
        mask({c.batch, c.nk}, layout == Layout::left ? layout : Layout::right),
        has_mask(!c.mask.empty()) {
    const auto stored = [](const std::vector<double>& values) {
      std::vector<T> result;
      for (const double x : values) result.push_back(static_cast<T>(static_cast<accumulator_t<T>>(x)));
      return result;
    };
    q.set(stored(c.q));
    k.set(stored(c.k));
    if (has_mask) mask.set(c.mask);
  }
  DiagnoseInputs<ExecSpace, T> inputs() const {
    DiagnoseInputs<ExecSpace, T> in{.q = q.input(), .k = k.input()};
    if (has_mask) in.key_mask = mask.input();
    return in;
  }
};

inline std::map<std::string, double> values_of(const HeadDiagnostics& d) {
  return {{"entropy", d.entropy},
          {"entropy_biased", d.entropy_biased},
          {"entropy_unbiased", d.entropy_unbiased},
          {"spectral_gap", d.spectral_gap},
          {"variance", d.variance},
          {"relative_variance", d.relative_variance},
          {"log_mean", d.log_mean},
          {"logvar", d.logvar},
          {"log_skewness", d.log_skewness},
          {"log_kurtosis", d.log_kurtosis},
          {"logvar_within", d.logvar_within},
          {"temperature", d.temperature}};
}

}  // namespace LinAttn::test_support
