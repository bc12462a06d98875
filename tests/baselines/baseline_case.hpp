// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <linattn/linattn.hpp>
#include <string>
#include <vector>

#include "finite_difference.hpp"
#include "placed_tensor.hpp"
#include "random.hpp"
#include "refusal.hpp"
#include "seed.hpp"
#include "spaces.hpp"

/// \file baseline_case.hpp
/// One problem of a baseline in memory, dense oracles by loops, and gradients by differences of them.

namespace LinAttn::test_support {

/// Row-major matrix of doubles.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> x{};

  Matrix(std::int64_t r, std::int64_t c) : rows(r), columns(c), x(static_cast<std::size_t>(r * c)) {}
  Matrix(std::int64_t r, std::int64_t c, const double* from) : Matrix(r, c) { std::copy_n(from, x.size(), x.begin()); }
  double& operator()(std::int64_t i, std::int64_t j) { return x[static_cast<std::size_t>(i * columns + j)]; }
  double operator()(std::int64_t i, std::int64_t j) const { return x[static_cast<std::size_t>(i * columns + j)]; }
};

/// Simulated rounding: every term is off by a factor 1 + unit or 1 - unit, by chance. Nothing happens with unit = 0.
struct Rounding {
  double unit = 0;
  Random random{0};
  double operator()(double x) { return unit == 0 ? x : x * ((random.bits() & 1) != 0 ? 1 + unit : 1 - unit); }
};
inline Rounding rounding;

inline Matrix times(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t l = 0; l < a.columns; ++l)
      for (std::int64_t j = 0; j < b.columns; ++j) c(i, j) += rounding(a(i, l) * b(l, j));
  return c;
}
inline Matrix transposed(const Matrix& a) {
  Matrix c(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < a.columns; ++j) c(j, i) = a(i, j);
  return c;
}
/// Softmax over the rows of scale a b^T.
inline Matrix softmax(const Matrix& a, const Matrix& b, double scale) {
  Matrix c = times(a, transposed(b));
  for (std::int64_t i = 0; i < c.rows; ++i) {
    double largest = -1e300, sum = 0;
    for (std::int64_t j = 0; j < c.columns; ++j) largest = std::max(largest, scale * c(i, j));
    for (std::int64_t j = 0; j < c.columns; ++j) sum += c(i, j) = rounding(std::exp(scale * c(i, j) - largest));
    for (std::int64_t j = 0; j < c.columns; ++j) c(i, j) /= sum;
  }
  return c;
}

/// q, k, v, dO of a problem as numbers.
struct Numbers {
  Problem p;
  std::vector<double> q, k, v, d_o;

  template <class T>
  static Numbers of(const Problem& p) {
    Random random(seed() + static_cast<std::uint64_t>(p.nq + 3 * p.nk));
    Numbers n{p, random.normals(p.batch * p.heads * p.nq * p.d), random.normals(p.batch * p.kv_heads * p.nk * p.d),
              random.normals(p.batch * p.kv_heads * p.nk * p.dv), random.normals(p.batch * p.heads * p.nq * p.dv)};
    for (auto* x : {&n.q, &n.k, &n.v, &n.d_o})
      for (double& entry : *x) entry = static_cast<double>(static_cast<T>(entry));
    return n;
  }
  static Matrix head(const std::vector<double>& x, std::int64_t unit, std::int64_t rows, std::int64_t columns) {
    return {rows, columns, x.data() + unit * rows * columns};
  }
  /// o of all heads, where one(q, k, v) is that of one.
  std::vector<double> attend(const std::function<Matrix(const Matrix&, const Matrix&, const Matrix&)>& one) const {
    std::vector<double> o;
    for (std::int64_t b = 0; b < p.batch; ++b)
      for (std::int64_t h = 0; h < p.heads; ++h) {
        const std::int64_t kv = b * p.kv_heads + h / p.group();
        const Matrix result = one(head(q, b * p.heads + h, p.nq, p.d), head(k, kv, p.nk, p.d), head(v, kv, p.nk, p.dv));
        o.insert(o.end(), result.x.begin(), result.x.end());
      }
    return o;
  }
  double loss(const std::vector<double>& o) const {
    double total = 0;
    for (std::size_t i = 0; i < o.size(); ++i) total += o[i] * d_o[i];
    return total;
  }
};

/// The tensors of a call.
template <class T, class ExecSpace>
struct Placed {
  explicit Placed(const Numbers& n, Layout layout = Layout::right)
      : p(n.p),
        q{{p.batch, p.heads, p.nq, p.d}, layout},
        k{{p.batch, p.kv_heads, p.nk, p.d}, layout},
        v{{p.batch, p.kv_heads, p.nk, p.dv}, layout},
        o{{p.batch, p.heads, p.nq, p.dv}, layout},
        d_o{o.extents(), layout},
        d_q{q.extents(), layout},
        d_k{k.extents(), layout},
        d_v{v.extents(), layout},
        denominator{{p.batch, p.heads, p.nq}, Layout::right} {
    q.set(n.q);
    k.set(n.k);
    v.set(n.v);
    d_o.set(n.d_o);
  }
  Inputs<ExecSpace, T> inputs() const { return {.q = q.input(), .k = k.input(), .v = v.input()}; }
  Gradients<ExecSpace, T> gradients() const { return {.q = d_q.ref(), .k = d_k.ref(), .v = d_v.ref()}; }
  bool intact() {
    return q.guards_intact() && k.guards_intact() && v.guards_intact() && o.guards_intact() && d_q.guards_intact() &&
           d_k.guards_intact() && d_v.guards_intact() && denominator.guards_intact();
  }

  Problem p;
  PlacedTensor<T, 4, ExecSpace> q, k, v, o, d_o, d_q, d_k, d_v;
  PlacedTensor<T, 3, ExecSpace> denominator;
};

template <class ExecSpace>
using Bytes = Kokkos::View<std::byte*, typename ExecSpace::memory_space>;

template <class ExecSpace>
Bytes<ExecSpace> bytes_of_nan(std::size_t count) {
  const Bytes<ExecSpace> bytes("workspace", count);
  Kokkos::deep_copy(bytes, std::byte{0xff});
  return bytes;
}

/// max |found - expected| / max |expected|
template <class X>
double relative_error(const std::vector<X>& found, const std::vector<double>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(found[i]) - expected[i]);
    difference = error <= difference ? difference : error;  // a NaN counts
    size = std::max(size, std::abs(expected[i]));
  }
  return size > 0 ? difference / size : difference;
}

/// What rounding to T may do to a result, relative to its largest entry: the largest deviation of eight simulations, in
/// which every term of every sum is rounded once, times `terms`. A term of a sum of n terms takes part in at most n - 1
/// additions and one product, so that to first order n simulated roundings cover it, and 4 more the functions of an
/// entry. The deviation is a sample, not a bound: its signs are random, where those of a bound would be the worst.
template <class T, class Result>
double rounding_error(const Result& result, std::int64_t longest_sum) {
  const std::vector<double> expected = result();
  double worst = 0;
  for (std::uint64_t i = 0; i < 8; ++i) {
    rounding = {std::numeric_limits<T>::epsilon() / 2, Random(seed() + i)};
    worst = std::max(worst, relative_error(result(), expected));
  }
  rounding = {};
  return static_cast<double>(longest_sum + 4) * worst;
}

/// The longest sum of a problem that is cut down to `few` keys or queries.
inline std::int64_t longest_sum(const Problem& p, std::int64_t few) { return std::max({p.nk, p.nq, p.d, p.dv, few}); }

/// The numbers with every entry off by one rounding to T, up or down by chance.
template <class T>
Numbers rounded_by_chance(const Numbers& n, std::uint64_t draw) {
  Rounding by_chance{std::numeric_limits<T>::epsilon() / 2, Random(seed() + 100 + draw)};
  Numbers moved = n;
  for (auto* x : {&moved.q, &moved.k, &moved.v, &moved.d_o})
    for (double& entry : *x) entry = by_chance(entry);
  return moved;
}

/// Gradients in T against those in double of the same numbers. What rounding may do is taken from eight calls in double
/// whose inputs are off by one rounding to T, times the longest sum, as in rounding_error(). `gradients(numbers, T())`
/// returns a list of tensors.
template <class T, class AllGradients>
void expect_gradients_of_double(const Numbers& n, std::int64_t longest, const AllGradients& gradients) {
  const std::vector<std::vector<double>> expected = gradients(n, 0.0);
  std::vector<double> deviation(expected.size());
  for (std::uint64_t draw = 0; draw < 8; ++draw) {
    const auto moved = gradients(rounded_by_chance<T>(n, draw), 0.0);
    for (std::size_t i = 0; i < expected.size(); ++i)
      deviation[i] = std::max(deviation[i], relative_error(moved[i], expected[i]));
  }
  const std::vector<std::vector<double>> found = gradients(n, T(0));
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(relative_error(found[i], expected[i]), static_cast<double>(longest + 4) * deviation[i])
        << "gradient " << i;
}

inline std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }
inline std::vector<double> doubles(const std::vector<double>& x) { return x; }

/// A gradient along a few random directions against differences of loss(x).
template <class Loss>
void expect_gradient(const char* name, const std::vector<double>& gradient, const std::vector<double>& x,
                     const Loss& loss) {
  Random random(seed() + x.size());
  double size = 0;
  for (const double g : gradient) size += g * g;
  for (int i = 0; i < 3; ++i) {
    const auto direction = random.normals(static_cast<std::int64_t>(x.size()));
    const auto check = check_direction<double>(loss, gradient, x, direction, 2e-3);
    EXPECT_NEAR(check.analytic, check.numeric, check.error + 1e-8 * std::sqrt(size)) << name;
  }
}

}  // namespace LinAttn::test_support
