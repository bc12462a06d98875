// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/io/tensor_file.hpp>
#include <string>
#include <vector>

#include "execution.hpp"

/// \file comparison.hpp
/// The layout's rule for "equal": max|found - expected| / max|expected|, but for elements whose
/// error is excused.

namespace LinAttn::app {

struct Comparison {
  std::string quantity;  ///< o, S, z, t, m, or the gradient of q, k, v, a parameter, state/S ...;
                         ///< what begins with moments/ or diagnostics/ is itself
  double error = 0;      ///< relative to the largest |expected|; absolute where all expected are 0
  double tolerance =
      0;  ///< of the worst element: wider than that of the others if it is excused more
  bool ok = true;
  std::int64_t elements = 0;
  std::vector<std::int64_t> worst{};  ///< index of the element nearest to its tolerance or beyond
                                      ///< it; empty for a scalar or no elements
  double expected = 0;                ///< there
  double found = 0;                   ///< there
};

/// Index of the element that is number `element` in row-major order.
std::vector<std::int64_t> index_of(std::int64_t element, const std::vector<std::int64_t>& extents);

/// Compares two arrays of the same extents. A NaN or an infinity on one side that the other does
/// not have at that element makes the error infinite. An element whose absolute error is at most
/// its own of `excused` passes whatever the tolerance is. \throws std::logic_error if the extents,
/// or the number of `excused` unless there are none, differ
Comparison compare(const std::string& quantity, const io::Array& expected, const io::Array& found,
                   double tolerance, const std::vector<double>& excused = {});

/// Multiplies row r of an array by 2^(shift[r] - to[r]); a row is what one exponent belongs to.
io::Array rescaled(const io::Array& array, const io::Array& shift, const io::Array& to);

/// The larger of two exponents, element by element.
io::Array larger_shift(const io::Array& a, const io::Array& b);

/// The relative tolerance of a file for one precision, and at least 16 epsilon of the type that
/// stores the expected values; in f32 also of the type of the found ones.
double tolerance_for(const io::Tolerances& tolerances, Scalar scalar, io::ElementType expected);

/// Absolute error that is excused of each element: its own of `effects`, and the last place of the
/// smallest numbers where the quantity itself is stored in 16 bits.
std::vector<double> excused_errors(Scalar scalar, const std::string& quantity,
                                   const io::Array& effects);

/// "o", "dq", "dalpha", "dS": heading of a quantity in tables.
std::string symbol(const std::string& quantity);

/// "[0, 3, 5, 1] expected 0.25, found 0.5".
std::string worst_element(const Comparison& comparison);

}  // namespace LinAttn::app
