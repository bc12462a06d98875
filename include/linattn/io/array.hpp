// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <linattn/error.hpp>
#include <linattn/half.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// \file array.hpp
/// A tensor on the host in the form a file stores it: element type, extents, row-major elements.

namespace LinAttn::io {

/// Element types of layout version 1.
enum class ElementType { f64, f32, f16, u8, i64 };

/// "float64", "float32", "float16", "uint8" or "int64".
std::string_view to_string(ElementType type) noexcept;

/// Bytes of one element.
std::size_t size_of(ElementType type) noexcept;

/// Whether the type is one of the floating-point ones.
constexpr bool is_floating(ElementType type) noexcept {
  return type == ElementType::f64 || type == ElementType::f32 || type == ElementType::f16;
}

/// "(2, 3, 5)"; "()" for a scalar.
std::string to_string(std::span<const std::int64_t> extents);

/// Number of elements.
/// \throws InvalidArgument if an extent is negative or the product does not fit 63 bits.
std::int64_t element_count(std::span<const std::int64_t> extents);

/// The ElementType that stores T. Only the types below have one; bfloat16 is a type to compute
/// with, none of files.
template <class T>
struct ElementTypeOf;
template <>
struct ElementTypeOf<double> : std::integral_constant<ElementType, ElementType::f64> {};
template <>
struct ElementTypeOf<float> : std::integral_constant<ElementType, ElementType::f32> {};
template <>
struct ElementTypeOf<float16> : std::integral_constant<ElementType, ElementType::f16> {};
template <>
struct ElementTypeOf<std::uint8_t> : std::integral_constant<ElementType, ElementType::u8> {};
template <>
struct ElementTypeOf<std::int64_t> : std::integral_constant<ElementType, ElementType::i64> {};

/// A C++ type that an Array can hold and hand out.
template <class T>
concept Storable =
    std::is_same_v<T, double> || std::is_same_v<T, float> || std::is_same_v<T, float16> ||
    std::is_same_v<T, std::uint8_t> || std::is_same_v<T, std::int64_t>;

/// Host tensor, row-major (the last extent is contiguous), in native byte order.
class Array {
 public:
  /// A tensor of rank 1 without elements.
  Array() : Array(ElementType::f64, {0}) {}

  /// Zeros.
  /// \throws InvalidArgument if an extent is negative or the size does not fit 63 bits.
  Array(ElementType type, std::vector<std::int64_t> extents);

  /// Copies row-major values.
  /// \throws InvalidArgument if the number of values is not the product of the extents.
  template <Storable T>
  Array(std::span<const T> values, std::vector<std::int64_t> extents)
      : Array(ElementTypeOf<T>::value, std::move(extents)) {
    assign(values.data(), values.size());
  }

  template <Storable T>
  Array(const std::vector<T>& values, std::vector<std::int64_t> extents)
      : Array(std::span<const T>(values), std::move(extents)) {}

  ElementType type() const noexcept { return m_type; }
  const std::vector<std::int64_t>& extents() const noexcept { return m_extents; }
  int rank() const noexcept { return static_cast<int>(m_extents.size()); }
  std::int64_t extent(int r) const { return m_extents.at(static_cast<std::size_t>(r)); }

  /// Number of elements: the product of the extents, 1 for a scalar.
  std::int64_t size() const noexcept { return m_size; }

  /// Row-major elements, size() * size_of(type()) bytes.
  const std::byte* data() const noexcept { return m_bytes.data(); }
  std::byte* data() noexcept { return m_bytes.data(); }
  std::size_t size_bytes() const noexcept { return m_bytes.size(); }

  /// The elements in place.
  /// \throws InvalidArgument if T is not the stored type.
  template <Storable T>
  std::span<const T> values() const {
    require_type(ElementTypeOf<T>::value);
    return {reinterpret_cast<const T*>(m_bytes.data()), static_cast<std::size_t>(m_size)};
  }
  template <Storable T>
  std::span<T> values() {
    require_type(ElementTypeOf<T>::value);
    return {reinterpret_cast<T*>(m_bytes.data()), static_cast<std::size_t>(m_size)};
  }

  /// Writes all elements, converted, to destination[0 .. size()). Integers convert to floating
  /// point and to wider integers; floating point rounds once to a narrower type, to infinity where
  /// that has no number so large (integers pass through double on their way to 16 bits). \throws
  /// InvalidArgument where values could be lost: floating point to integers, int64 to uint8.
  void convert_to(double* destination) const;
  void convert_to(float* destination) const;
  void convert_to(float16* destination) const;
  void convert_to(bfloat16* destination) const;
  void convert_to(std::int64_t* destination) const;
  void convert_to(std::uint8_t* destination) const;

  /// A copy of the elements converted to T, a type of files, long double or bfloat16, row-major.
  template <class T>
  requires(Storable<T> || std::is_same_v<T, long double> ||
           std::is_same_v<T, bfloat16>) std::vector<T> as()
  const {
    if constexpr (std::is_same_v<T, long double>) {
      const std::vector<double> wide = as<double>();
      return {wide.begin(), wide.end()};
    } else {
      std::vector<T> result(static_cast<std::size_t>(m_size));
      convert_to(result.data());
      return result;
    }
  }

 private:
  void assign(const void* values, std::size_t count);
  void require_type(ElementType wanted) const;

  ElementType m_type;
  std::vector<std::int64_t> m_extents;
  std::int64_t m_size = 0;
  std::vector<std::byte> m_bytes;
};

}  // namespace LinAttn::io
