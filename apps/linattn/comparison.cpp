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
                   double tolerance, const std::vector<double>& excused) {
  if (expected.extents() != found.extents())
    throw std::logic_error("compared extents " + io::to_string(expected.extents()) + " with " +
                           io::to_string(found.extents()));
  const std::vector<double> x = expected.as<double>(), y = found.as<double>();
  if (!excused.empty() && excused.size() != x.size())
    throw std::logic_error(
        detail::message("excused ", excused.size(), " of ", x.size(), " elements"));
  Comparison result{.quantity = quantity, .tolerance = tolerance, .elements = expected.size()};
  if (x.empty()) return result;
  double scale = 0;
  for (const double e : x)
    if (std::isfinite(e)) scale = std::max(scale, std::abs(e));
  const auto relative = [&](double absolute) { return scale > 0 ? absolute / scale : absolute; };
  // the worst element is the one that goes furthest beyond its tolerance, or comes nearest to it
  double most = 0;
  std::size_t worst = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double error = relative(difference(x[n], y[n]));
    if (error == 0) continue;
    const double allowed = excused.empty() ? tolerance : std::max(tolerance, relative(excused[n]));
    const bool passes = std::isfinite(error) && error <= allowed;
    const double share = std::isfinite(error) ? error / allowed : error;
    result.ok = result.ok && passes;
    if (share < most || (share == most && error <= result.error)) continue;
    most = share;
    worst = n;
    result.error = error;
    result.tolerance = allowed;
  }
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

std::vector<double> excused_errors(Scalar scalar, const std::string& quantity,
                                   const io::Array& effects) {
  std::vector<double> errors = effects.as<double>();
  for (double& error : errors) error += least_step(scalar, quantity);
  return errors;
}

std::string symbol(const std::string& quantity) {
  for (const char* output : {"o", "S", "z", "t", "m"})
    if (quantity == output) return quantity;
  for (const std::string group : {"moments/", "diagnostics/"})
    if (quantity.starts_with(group)) return quantity.substr(group.size());
  return "d" + (quantity.starts_with("state/") ? quantity.substr(6) : quantity);
}

std::string worst_element(const Comparison& c) {
  if (c.elements == 0) return "no elements";
  const std::string index = index_text(c.worst);
  return detail::message(index, index.empty() ? "" : " ", "expected ", exact(c.expected),
                         ", found ", exact(c.found));
}

}  // namespace LinAttn::app
