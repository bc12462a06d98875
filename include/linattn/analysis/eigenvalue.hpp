// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <limits>
#include <linattn/plan.hpp>
#include <linattn/tensor.hpp>
#include <string>
#include <vector>

/// \file eigenvalue.hpp
/// Moduli of eigenvalues of dense matrices on the host, in double: what the spectral gap needs.

namespace LinAttn {

/// A matrix in host memory, of any strides.
using HostMatrix = TensorRef<const double, 2, Kokkos::DefaultHostExecutionSpace>;

/// The largest modulus of the eigenvalues of a square matrix,
///
///     rho(A) = lim_n |A^n|^(1/n)   at n = 2^squarings,
///
/// by repeated squaring with normalisation. Complex pairs and equal moduli need no special care: what is left of the
/// limit falls as 1/n. Costs squarings * 2 n^3 FLOPs and three copies of the matrix. 0 for a matrix without elements;
/// NaN where an element is not finite. Fences the default host execution space.
///
/// \throws InvalidArgument if the matrix is not square
double spectral_radius(const HostMatrix& matrix, int squarings = EigenvaluePlan::squarings);

/// The second largest modulus of a row-stochastic matrix P (n x n) whose largest eigenvalue is 1.
struct SecondEigenvalue {
  double modulus = std::numeric_limits<double>::quiet_NaN();
  std::string absent{};  ///< why there is none; empty otherwise
};

/// |lambda_2| of a row-stochastic matrix: P - 1 w^T, for any w with sum 1, has the eigenvalues of P with the 1 replaced
/// by 0, so that no stationary distribution is needed.
///
/// Up to n = 512 the matrix for w = column means is squared as in spectral_radius(), to 1e-9 of the modulus. Above, a
/// power iteration x -> P x - mean(x) 1 takes the geometric mean of the growth over 300 steps after 100, which is right
/// for complex pairs too, to about 1e-3 of the modulus; it needs Kokkos Kernels and reports nothing without. A matrix
/// of order 0 or 1 has no second eigenvalue: 0. Fences the default host execution space.
///
/// \throws InvalidArgument if the matrix is not square
SecondEigenvalue second_eigenvalue(const HostMatrix& p);

namespace detail {

/// |lambda_2| of the matrix diag(1/s) Q K^T by way of M = K^T diag(1/s) Q (r x r, row-major) of the same spectrum but
/// for zeros, and z = K^T 1, which M maps to itself: the spectral radius of M - z w^T with w = M^T z / |z|^2, for which
/// w . z = 1 and what is left is smallest.
double second_eigenvalue_of_features(const std::vector<double>& m, const std::vector<double>& z);

}  // namespace detail
}  // namespace LinAttn
