// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <linattn/analysis/eigenvalue.hpp>
#include <linattn/noise.hpp>
#include <linattn/plan.hpp>
#include <linattn/tile.hpp>

#if defined(LINATTN_HAS_KOKKOS_KERNELS)
#include <KokkosBlas2_gemv.hpp>
#endif

namespace LinAttn {
namespace {

using Host = Kokkos::DefaultHostExecutionSpace;
using Matrix = Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace>;
using Vector = Kokkos::View<double*, Kokkos::HostSpace>;

std::int64_t order_of(const HostMatrix& matrix) {
  if (matrix.extent(0) != matrix.extent(1))
    throw InvalidArgument(detail::message("LinAttn: eigenvalues need a square matrix, found ", matrix.shape()));
  return matrix.extent(0);
}

/// A square matrix padded as tiles are, so that products have no remainder.
class PaddedMatrix {
 public:
  explicit PaddedMatrix(std::int64_t n)
      : m_n(static_cast<int>(n)),
        m_ld(detail::padded_columns<double>(n)),
        m_data(static_cast<std::size_t>(detail::padded_rows(n)) * static_cast<std::size_t>(m_ld)) {}

  int order() const { return m_n; }
  double& operator()(std::int64_t i, std::int64_t j) { return m_data[static_cast<std::size_t>(i * m_ld + j)]; }
  double operator()(std::int64_t i, std::int64_t j) const { return m_data[static_cast<std::size_t>(i * m_ld + j)]; }

  /// The norm of Frobenius, row by row; NaN where an element is one.
  double norm() const {
    double largest = 0;
    for (int i = 0; i < m_n; ++i)
      for (int j = 0; j < m_n; ++j) {
        const double size = std::abs((*this)(i, j));
        if (!(size <= largest) && largest == largest) largest = size;
      }
    if (!(largest > 0) || !std::isfinite(largest)) return largest;
    double sum = 0;
    for (int i = 0; i < m_n; ++i) {
      double row = 0;
      for (int j = 0; j < m_n; ++j) row += ((*this)(i, j) / largest) * ((*this)(i, j) / largest);
      sum += row;
    }
    return largest * std::sqrt(sum);
  }
  void divide(double by) {
    for (int i = 0; i < m_n; ++i)
      for (int j = 0; j < m_n; ++j) (*this)(i, j) /= by;
  }
  /// this = a a
  void set_square(const PaddedMatrix& a) {
    constexpr int block = EigenvaluePlan::block;
    const int n = m_n, ld = m_ld;
    double* const to = m_data.data();
    const double* const from = a.m_data.data();
    const auto rows = [=](int b) {
      const int first = b * block;
      const std::int64_t at = static_cast<std::int64_t>(first) * ld;
      const detail::HostTeam team{};
      detail::multiply(team, std::min(block, n - first), n, detail::Product<double>{{from + at, ld, 1}, from, ld, n},
                       detail::Target<double>{to + at, ld});
    };
    const int blocks = (n + block - 1) / block;
    if (blocks < EigenvaluePlan::blocks_worth_a_launch) {
      for (int b = 0; b < blocks; ++b) rows(b);
    } else {
      Kokkos::parallel_for("LinAttn::spectral_radius::square", Kokkos::RangePolicy<Host>(0, blocks), rows);
      detail::fence(Host{}, "LinAttn::spectral_radius::square");
    }
  }

 private:
  int m_n, m_ld;
  std::vector<double> m_data;
};

/// The spectral radius of a matrix that is overwritten.
double radius_of(PaddedMatrix& a, int squarings) {
  if (a.order() == 0) return 0;
  PaddedMatrix square(a.order());
  double logarithm = 0, share = 1;  // of the norm of A^n, over n; 1/n
  for (int k = 0;; ++k) {
    const double norm = a.norm();
    if (!std::isfinite(norm)) return std::numeric_limits<double>::quiet_NaN();
    if (norm == 0) return 0;
    logarithm += share * std::log(norm);
    if (k == squarings) return std::exp(logarithm);
    a.divide(norm);
    square.set_square(a);
    std::swap(a, square);
    share /= 2;
  }
}

#if defined(LINATTN_HAS_KOKKOS_KERNELS)
/// Numbers of both signs that depend on the index alone.
double start_of(std::int64_t i) {
  const auto words = detail::words_of_counter(0, 0, static_cast<std::uint64_t>(i));
  return static_cast<double>(words.v[0]) * 0x1p-31 - 1;
}

double norm_of(const Vector& x) {
  double squares = 0;
  for (std::size_t i = 0; i < x.extent(0); ++i) squares += x(i) * x(i);
  return std::sqrt(squares);
}

double growth_of(const HostMatrix& p) {
  constexpr int before = EigenvaluePlan::steps_before, steps = EigenvaluePlan::steps;
  const std::int64_t n = p.extent(0);
  const Kokkos::View<const double**, Kokkos::LayoutStride, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      matrix(p.data(), Kokkos::LayoutStride(static_cast<std::size_t>(n), static_cast<std::size_t>(p.stride(0)),
                                            static_cast<std::size_t>(n), static_cast<std::size_t>(p.stride(1))));
  const auto count = static_cast<std::size_t>(n);
  // zeros of a View would be set by a kernel of its own
  const auto vector = [&](const char* label) {
    return Vector(Kokkos::view_alloc(std::string(label), Kokkos::WithoutInitializing), count);
  };
  const Vector x = vector("LinAttn::second_eigenvalue::x"), y = vector("LinAttn::second_eigenvalue::y");
  for (std::int64_t i = 0; i < n; ++i) {
    x(i) = start_of(i);
    y(i) = 0;
  }
  // in one order: reductions of Kokkos depend on the number of threads
  double logarithm = 0, size = norm_of(x);
  for (int step = 0; step < before + steps; ++step) {
    double mean = 0;
    for (std::int64_t i = 0; i < n; ++i) mean += x(i);
    mean /= static_cast<double>(n);
    KokkosBlas::gemv("N", 1.0, matrix, x, 0.0, y);
    detail::fence(Host{}, "LinAttn::second_eigenvalue::product");
    for (std::int64_t i = 0; i < n; ++i) y(i) -= mean;
    const double next = norm_of(y);
    if (!std::isfinite(next)) return std::numeric_limits<double>::quiet_NaN();
    if (next == 0) return 0;
    if (step >= before) logarithm += std::log(next / size);
    for (std::int64_t i = 0; i < n; ++i) x(i) = y(i) / next;
    size = 1;
  }
  return std::exp(logarithm / steps);
}
#endif

}  // namespace

double spectral_radius(const HostMatrix& matrix, int squarings) {
  const std::int64_t n = order_of(matrix);
  PaddedMatrix a(n);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j) a(i, j) = matrix(i, j);
  return radius_of(a, squarings);
}

SecondEigenvalue second_eigenvalue(const HostMatrix& p) {
  constexpr std::int64_t largest_squared = EigenvaluePlan::largest_squared;
  const std::int64_t n = order_of(p);
  SecondEigenvalue result;
  if (n <= 1) {
    result.modulus = 0;
  } else if (n <= largest_squared) {
    PaddedMatrix a(n);
    for (std::int64_t j = 0; j < n; ++j) {
      // P - 1 w^T with w = column means: of all w with sum 1 the one that leaves the smallest matrix
      double mean = 0;
      for (std::int64_t i = 0; i < n; ++i) mean += p(i, j);
      mean /= static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i) a(i, j) = p(i, j) - mean;
    }
    // to the last digit where that costs nothing
    result.modulus = radius_of(a, n <= EigenvaluePlan::block ? EigenvaluePlan::squarings
                                                             : EigenvaluePlan::squarings_of_second);
  } else {
#if defined(LINATTN_HAS_KOKKOS_KERNELS)
    result.modulus = growth_of(p);
#else
    result.absent = detail::message("the second eigenvalue of a matrix of order ", n, " > ", largest_squared,
                                    " needs LinAttn with Kokkos Kernels");
#endif
  }
  return result;
}

double detail::second_eigenvalue_of_features(const std::vector<double>& m, const std::vector<double>& z) {
  const auto r = static_cast<std::int64_t>(z.size());
  double largest = 0;  // squares of z may leave the range
  for (const double x : z) largest = std::max(largest, std::abs(x));
  if (!(largest > 0)) return 0;
  std::vector<double> direction = z, w(z.size());
  double squares = 0;
  for (double& x : direction) {
    x /= largest;
    squares += x * x;
  }
  for (std::int64_t i = 0; i < r; ++i)
    for (std::int64_t j = 0; j < r; ++j) w[j] += m[static_cast<std::size_t>(i * r + j)] * direction[i] / squares;
  PaddedMatrix a(r);
  for (std::int64_t i = 0; i < r; ++i)
    for (std::int64_t j = 0; j < r; ++j) a(i, j) = m[static_cast<std::size_t>(i * r + j)] - direction[i] * w[j];
  return radius_of(a, EigenvaluePlan::squarings);
}

}  // namespace LinAttn
