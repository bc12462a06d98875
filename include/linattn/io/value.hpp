// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <cstdint>
#include <linattn/error.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

/// \file value.hpp
/// The value of an attribute.

namespace LinAttn::io {

/// An integer, a real number or a string.
class Value {
 public:
  Value() = default;  ///< the integer 0

  /// bool gives 0 or 1; unsigned values above the range of int64 are kept.
  template <std::integral T>
  Value(T value) : m_value(stored(value)) {}                      // NOLINT: implicit on purpose
  Value(double value) : m_value(value) {}                         // NOLINT: implicit on purpose
  Value(std::string value) : m_value(std::move(value)) {}         // NOLINT: implicit on purpose
  Value(std::string_view value) : m_value(std::string(value)) {}  // NOLINT: implicit on purpose
  Value(const char* value) : m_value(std::string(value)) {}       // NOLINT: implicit on purpose

  bool is_string() const noexcept { return std::holds_alternative<std::string>(m_value); }
  bool is_real() const noexcept { return std::holds_alternative<double>(m_value); }
  bool is_integer() const noexcept { return !is_string() && !is_real(); }
  /// Whether it is an integer above the range of int64.
  bool is_large() const noexcept { return std::holds_alternative<std::uint64_t>(m_value); }

  /// A number without a fractional part counts as an integer.
  /// \throws InvalidArgument if it is a string, has a fractional part or is out of range.
  std::int64_t as_int64() const;
  std::uint64_t as_uint64() const;
  /// \throws InvalidArgument if it is a string.
  double as_double() const;
  /// \throws InvalidArgument if it is a number.
  const std::string& as_string() const;

  /// As a message shows it: 3, 0.5 or 'text'. A real number prints with the digits that restore it.
  std::string to_string() const;

  friend bool operator==(const Value&, const Value&) = default;

 private:
  using Variant = std::variant<std::int64_t, std::uint64_t, double, std::string>;

  template <std::integral T>
  static Variant stored(T value) {
    if constexpr (std::is_unsigned_v<T> && sizeof(T) == 8)
      if (value > static_cast<T>(INT64_MAX)) return Variant(static_cast<std::uint64_t>(value));
    return Variant(static_cast<std::int64_t>(value));
  }

  Variant m_value = std::int64_t{0};
};

}  // namespace LinAttn::io
