// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "compute.hpp"

/// \file oracle.hpp
/// The dense fp64 reference for a job, and how much of it is bearable.

namespace LinAttn::app {

/// B H Nq Nk (D + Dv): what the dense reference multiplies.
double reference_work(const Problem& problem) noexcept;

/// Work beyond which the dense reference is refused: one or two minutes of one core.
inline constexpr double largest_reference_work = 4e9;

/// Why the reference cannot be had for this problem; empty if it can.
std::string reference_obstacle(const std::string& variant, const Problem& problem);

/// The same, states included.
std::string reference_obstacle(const Job& job);

/// Queries and keys beyond which the reference of diagnostics, which holds matrices, is refused.
inline constexpr std::int64_t largest_reference_matrix = 512;

/// Results of the dense reference in float64, in the order of compute(); what diagnostics have no
/// meaning for a matrix are NaN.
/// \throws InvalidArgument if there is an obstacle
Results compute_reference(const Job& job);

/// What results are held against: the reference, and how far from it each element may be whatever
/// the tolerance says.
struct RoundedReference {
  Results values;
  Results effects;
};

/// The reference for a job whose inputs are rounded to 16 bits; `effects` are those of rounding o
/// alone, on gradients too, which are computed from o. \throws InvalidArgument if there is an
/// obstacle
RoundedReference compute_rounded_reference(const Job& job, Scalar scalar);

/// The reference for float and double; `effects` are `conditioned_roundings` roundings of the terms
/// whose sum an element is: where they cancel, as in a gradient that is exactly 0, a relative error
/// means nothing. \throws InvalidArgument if there is an obstacle
RoundedReference compute_conditioned_reference(const Job& job, Scalar scalar);
inline constexpr double conditioned_roundings = 64;

}  // namespace LinAttn::app
