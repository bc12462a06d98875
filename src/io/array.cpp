// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <linattn/io/array.hpp>

namespace LinAttn::io {
namespace {

constexpr int half_fraction_bits = 10;
constexpr std::uint16_t half_fraction_mask = 0x3ff;

template <class From, class To>
void copy_converted(const std::byte* source, std::int64_t count, To* destination) {
  const auto* values = reinterpret_cast<const From*>(source);
  std::transform(values, values + count, destination, [](From x) { return static_cast<To>(x); });
}

std::uint16_t half_bits(const std::byte* source, std::int64_t index) {
  std::uint16_t bits;
  std::memcpy(&bits, source + index * 2, 2);
  return bits;
}

[[noreturn]] void fail_conversion(ElementType from, ElementType to) {
  throw InvalidArgument(
      detail::message("LinAttn::io: no conversion from ", to_string(from), " to ", to_string(to)));
}

template <class To>
void to_floating(const Array& array, To* destination) {
  switch (array.type()) {
    case ElementType::f64:
      return copy_converted<double>(array.data(), array.size(), destination);
    case ElementType::f32:
      return copy_converted<float>(array.data(), array.size(), destination);
    case ElementType::u8:
      return copy_converted<std::uint8_t>(array.data(), array.size(), destination);
    case ElementType::i64:
      return copy_converted<std::int64_t>(array.data(), array.size(), destination);
    case ElementType::f16:
      for (std::int64_t i = 0; i < array.size(); ++i) {
        if constexpr (std::is_same_v<To, float>)
          destination[i] = half_to_float(half_bits(array.data(), i));
        else
          destination[i] = half_to_double(half_bits(array.data(), i));
      }
      return;
  }
}

}  // namespace

std::string_view to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::f64:
      return "float64";
    case ElementType::f32:
      return "float32";
    case ElementType::f16:
      return "float16";
    case ElementType::u8:
      return "uint8";
    case ElementType::i64:
      return "int64";
  }
  return "unknown";
}

std::size_t size_of(ElementType type) noexcept {
  switch (type) {
    case ElementType::f64:
    case ElementType::i64:
      return 8;
    case ElementType::f32:
      return 4;
    case ElementType::f16:
      return 2;
    case ElementType::u8:
      return 1;
  }
  return 0;
}

std::string to_string(std::span<const std::int64_t> extents) {
  std::string text = "(";
  for (std::size_t r = 0; r < extents.size(); ++r)
    text += (r == 0 ? "" : ", ") + std::to_string(extents[r]);
  return text + ")";
}

std::int64_t element_count(std::span<const std::int64_t> extents) {
  std::int64_t count = 1;
  for (const std::int64_t extent : extents)
    if (extent < 0)
      throw InvalidArgument(
          detail::message("LinAttn::io: negative extent in ", to_string(extents)));
  if (std::find(extents.begin(), extents.end(), 0) != extents.end()) return 0;
  for (const std::int64_t extent : extents) {
    if (count > std::numeric_limits<std::int64_t>::max() / extent)
      throw InvalidArgument(detail::message("LinAttn::io: extents ", to_string(extents),
                                            " have more elements than 63 bits can count"));
    count *= extent;
  }
  return count;
}

float half_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> half_fraction_bits) & 0x1fu;
  const std::uint32_t fraction = bits & half_fraction_mask;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t wide_exponent = exponent == 0x1f ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | wide_exponent << 23 | fraction << (23 - half_fraction_bits));
}

double half_to_double(std::uint16_t bits) noexcept {
  const std::uint64_t sign = std::uint64_t(bits & 0x8000u) << 48;
  const std::uint64_t exponent = (bits >> half_fraction_bits) & 0x1fu;
  const std::uint64_t fraction = bits & half_fraction_mask;
  if (exponent == 0) {
    const double magnitude = std::ldexp(static_cast<double>(fraction), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint64_t wide_exponent = exponent == 0x1f ? 0x7ffu : exponent + (1023 - 15);
  return std::bit_cast<double>(sign | wide_exponent << 52 | fraction << (52 - half_fraction_bits));
}

Array::Array(ElementType type, std::vector<std::int64_t> extents)
    : m_type(type), m_extents(std::move(extents)), m_size(element_count(m_extents)) {
  const auto bytes = static_cast<std::int64_t>(size_of(type));
  if (m_size > std::numeric_limits<std::int64_t>::max() / bytes)
    throw InvalidArgument(detail::message("LinAttn::io: extents ", to_string(m_extents), " of ",
                                          to_string(type),
                                          " have more bytes than 63 bits can count"));
  m_bytes.resize(static_cast<std::size_t>(m_size * bytes));
}

void Array::assign(const void* values, std::size_t count) {
  if (count != static_cast<std::size_t>(m_size))
    throw InvalidArgument(detail::message("LinAttn::io: extents ", to_string(m_extents), " need ",
                                          m_size, " values, found ", count));
  if (count > 0) std::memcpy(m_bytes.data(), values, m_bytes.size());
}

void Array::require_type(ElementType wanted) const {
  if (wanted != m_type)
    throw InvalidArgument(detail::message("LinAttn::io: the array holds ", to_string(m_type),
                                          ", not ", to_string(wanted)));
}

void Array::convert_to(double* destination) const { to_floating(*this, destination); }

void Array::convert_to(float* destination) const { to_floating(*this, destination); }

void Array::convert_to(std::int64_t* destination) const {
  switch (m_type) {
    case ElementType::i64:
      return copy_converted<std::int64_t>(data(), m_size, destination);
    case ElementType::u8:
      return copy_converted<std::uint8_t>(data(), m_size, destination);
    default:
      fail_conversion(m_type, ElementType::i64);
  }
}

void Array::convert_to(std::uint8_t* destination) const {
  if (m_type != ElementType::u8) fail_conversion(m_type, ElementType::u8);
  copy_converted<std::uint8_t>(data(), m_size, destination);
}

}  // namespace LinAttn::io
