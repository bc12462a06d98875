// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstring>
#include <limits>
#include <linattn/io/array.hpp>

namespace LinAttn::io {
namespace {

/// One element. What is neither float nor double passes through the one that holds it.
template <class To, class From>
To converted(From x) {
  constexpr bool to_half = std::is_same_v<To, float16> || std::is_same_v<To, bfloat16>;
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<From, float16>)
    return static_cast<To>(static_cast<float>(x));
  else if constexpr (to_half && std::is_integral_v<From>)
    return To(static_cast<double>(x));
  else
    return static_cast<To>(x);
}

template <class From, class To>
void copy_converted(const std::byte* source, std::int64_t count, To* destination) {
  const auto* values = reinterpret_cast<const From*>(source);
  std::transform(values, values + count, destination, converted<To, From>);
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
      return copy_converted<float16>(array.data(), array.size(), destination);
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

void Array::convert_to(float16* destination) const { to_floating(*this, destination); }

void Array::convert_to(bfloat16* destination) const { to_floating(*this, destination); }

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
