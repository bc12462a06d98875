// SPDX-License-Identifier: BSD-3-Clause
#include "comparison.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "rounding.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

/// 0 for equal values, infinities and NaNs included; infinite if only one of them is finite.
double difference(double expected, double found) {
  if (expected == found || (std::isnan(expected) && std::isnan(found))) return 0;
  if (!std::isfinite(expected) || !std::isfinite(found))
    return std::numeric_limits<double>::infinity();
  return std::abs(found - expected);
}

double epsilon(io::ElementType type) {
  switch (type) {
    case io::ElementType::f16:
      return 0x1p-10;
    case io::ElementType::f32:
      return std::numeric_limits<float>::epsilon();
    default:
      return std::numeric_limits<double>::epsilon();
  }
}

}  // namespace

std::vector<std::int64_t> index_of(std::int64_t element, const std::vector<std::int64_t>& extents) {
  std::vector<std::int64_t> index(extents.size());
  for (std::size_t r = extents.size(); r-- > 0;) {
    index[r] = element % extents[r];
    element /= extents[r];
  }
  return index;
}

Comparison compare(const std::string& quantity, const io::Array& expected, const io::Array& found,
                   double tolerance, double allowed) {
  if (expected.extents() != found.extents())
    throw std::logic_error("compared extents " + io::to_string(expected.extents()) + " with " +
                           io::to_string(found.extents()));
  const std::vector<double> x = expected.as<double>(), y = found.as<double>();
  double largest = 0, scale = 0;
  std::size_t worst = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (std::isfinite(x[n])) scale = std::max(scale, std::abs(x[n]));
    const double here = difference(x[n], y[n]);
    if (here > largest) {
      largest = here;
      worst = n;
    }
  }
  tolerance = std::max(tolerance, scale > 0 ? allowed / scale : allowed);
  Comparison result{.quantity = quantity, .tolerance = tolerance, .elements = expected.size()};
  if (x.empty()) return result;
  result.error = scale > 0 ? largest / scale : largest;
  result.ok = result.error <= tolerance;
  result.worst = index_of(static_cast<std::int64_t>(worst), expected.extents());
  result.expected = x[worst];
  result.found = y[worst];
  return result;
}

io::Array rescaled(const io::Array& array, const io::Array& shift, const io::Array& to) {
  std::vector<double> values = array.as<double>();
  const auto from = shift.values<std::int64_t>(), target = to.values<std::int64_t>();
  const std::size_t row = from.empty() ? 0 : values.size() / from.size();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t power =
        std::clamp<std::int64_t>(from[i / row] - target[i / row], -10000, 10000);
    values[i] = std::ldexp(values[i], static_cast<int>(power));
  }
  return io::Array(values, array.extents());
}

io::Array larger_shift(const io::Array& a, const io::Array& b) {
  io::Array result = a;
  const auto from = b.values<std::int64_t>();
  const auto larger = result.values<std::int64_t>();
  for (std::size_t i = 0; i < larger.size(); ++i) larger[i] = std::max(larger[i], from[i]);
  return result;
}

double tolerance_for(const io::Tolerances& tolerances, Scalar scalar, io::ElementType expected) {
  const auto at_least = [](double tolerance, double stored) {
    return std::max(tolerance, 16 * stored);
  };
  switch (scalar) {
    case Scalar::f64:
      return at_least(tolerances.f64, epsilon(expected));
    case Scalar::f32:
      return at_least(tolerances.f32, std::max(epsilon(expected), epsilon(io::ElementType::f32)));
    case Scalar::f16:
      return at_least(tolerances.f16, epsilon(expected));
    case Scalar::bf16:
      return at_least(tolerances.bf16, epsilon(expected));
  }
  return 0;
}

double allowed_error(Scalar scalar, const std::string& quantity, const io::Array& effects) {
  double largest = 0;
  for (const double effect : effects.as<double>()) largest = std::max(largest, effect);
  return largest + least_step(scalar, quantity);
}

std::string symbol(const std::string& quantity) {
  if (quantity == "o" || quantity == "S" || quantity == "z") return quantity;
  return "d" + (quantity.starts_with("state/") ? quantity.substr(6) : quantity);
}

std::string worst_element(const Comparison& c) {
  if (c.elements == 0) return "no elements";
  const std::string index = index_text(c.worst);
  return detail::message(index, index.empty() ? "" : " ", "expected ", exact(c.expected),
                         ", found ", exact(c.found));
}

}  // namespace LinAttn::app
