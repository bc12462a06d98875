// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/io/tensor_file.hpp>
#include <string>
#include <vector>

#include "execution.hpp"

/// \file comparison.hpp
/// The layout's rule for "equal": max|found - expected| / max|expected|.

namespace LinAttn::app {

struct Comparison {
  std::string quantity;  ///< o, S, z, or the gradient of q, k, v, a parameter, state/S, state/z
  double error = 0;      ///< relative to the largest |expected|; absolute where all expected are 0
  double tolerance = 0;
  bool ok = true;
  std::int64_t elements = 0;
  std::vector<std::int64_t>
      worst{};          ///< index of the worst element; empty for a scalar or no elements
  double expected = 0;  ///< there
  double found = 0;     ///< there
};

/// Index of the element that is number `element` in row-major order.
std::vector<std::int64_t> index_of(std::int64_t element, const std::vector<std::int64_t>& extents);

/// Compares two arrays of the same extents. A NaN or an infinity on one side that the other does
/// not have at that element makes the error infinite. The tolerance is raised
/// to an absolute error of `allowed`. \throws std::logic_error if the extents differ
Comparison compare(const std::string& quantity, const io::Array& expected, const io::Array& found,
                   double tolerance, double allowed = 0);

/// Multiplies row r of an array by 2^(shift[r] - to[r]); a row is what one exponent belongs to.
io::Array rescaled(const io::Array& array, const io::Array& shift, const io::Array& to);

/// The larger of two exponents, element by element.
io::Array larger_shift(const io::Array& a, const io::Array& b);

/// The relative tolerance of a file for one precision, and at least 16 epsilon of the type that
/// stores the expected values; in f32 also of the type of the found ones.
double tolerance_for(const io::Tolerances& tolerances, Scalar scalar, io::ElementType expected);

/// Error that the storage in 16 bits excuses: the largest of `effects` of the rounding of o, and
/// the last place of the smallest numbers where the quantity itself is stored.
double allowed_error(Scalar scalar, const std::string& quantity, const io::Array& effects);

/// "o", "dq", "dalpha", "dS": heading of a quantity in tables.
std::string symbol(const std::string& quantity);

/// "[0, 3, 5, 1] expected 0.25, found 0.5".
std::string worst_element(const Comparison& comparison);

}  // namespace LinAttn::app
