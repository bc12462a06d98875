// SPDX-License-Identifier: BSD-3-Clause
#include <charconv>
#include <cmath>
#include <linattn/io/value.hpp>

namespace LinAttn::io {
namespace {

constexpr double two_to_63 = 9223372036854775808.0;
constexpr double two_to_64 = 2.0 * two_to_63;

[[noreturn]] void fail(const char* expected, const Value& found) {
  throw InvalidArgument(detail::message("expected ", expected, ", found ", found.to_string()));
}

bool is_whole(double value) { return std::floor(value) == value; }

}  // namespace

std::int64_t Value::as_int64() const {
  if (const auto* integer = std::get_if<std::int64_t>(&m_value)) return *integer;
  if (const auto* real = std::get_if<double>(&m_value))
    if (is_whole(*real) && *real >= -two_to_63 && *real < two_to_63)
      return static_cast<std::int64_t>(*real);
  fail("a 64-bit integer", *this);
}

std::uint64_t Value::as_uint64() const {
  if (const auto* large = std::get_if<std::uint64_t>(&m_value)) return *large;
  if (const auto* integer = std::get_if<std::int64_t>(&m_value))
    if (*integer >= 0) return static_cast<std::uint64_t>(*integer);
  if (const auto* real = std::get_if<double>(&m_value))
    if (is_whole(*real) && *real >= 0.0 && *real < two_to_64)
      return static_cast<std::uint64_t>(*real);
  fail("an integer from 0 to 2^64 - 1", *this);
}

double Value::as_double() const {
  if (const auto* real = std::get_if<double>(&m_value)) return *real;
  if (const auto* integer = std::get_if<std::int64_t>(&m_value))
    return static_cast<double>(*integer);
  if (const auto* large = std::get_if<std::uint64_t>(&m_value)) return static_cast<double>(*large);
  fail("a number", *this);
}

const std::string& Value::as_string() const {
  if (const auto* text = std::get_if<std::string>(&m_value)) return *text;
  fail("a string", *this);
}

std::string Value::to_string() const {
  if (const auto* text = std::get_if<std::string>(&m_value)) return "'" + *text + "'";
  if (const auto* integer = std::get_if<std::int64_t>(&m_value)) return std::to_string(*integer);
  if (const auto* large = std::get_if<std::uint64_t>(&m_value)) return std::to_string(*large);
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, std::get<double>(m_value)).ptr;
  return {buffer, end};
}

}  // namespace LinAttn::io
