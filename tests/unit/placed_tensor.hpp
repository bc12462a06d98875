// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <linattn/tensor.hpp>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

/// \file placed_tensor.hpp
/// Tensors in every memory layout a user may come with, between guards that show a stray access.

namespace LinAttn::test_support {

enum class Layout {
  right,              ///< last index fastest, contiguous: Kokkos::LayoutRight
  left,               ///< first index fastest, contiguous: Kokkos::LayoutLeft
  heads_inside_rows,  ///< (B,N,H,D) in memory, seen as (B,H,N,D)
  transposed,         ///< (B,H,D,N) in memory: rows are columns
  fused,              ///< the middle third of the columns of a wider buffer
  gaps                ///< every second element, and every dimension padded
};

inline constexpr Layout all_layouts[] = {
    Layout::right,      Layout::left,  Layout::heads_inside_rows,
    Layout::transposed, Layout::fused, Layout::gaps};

inline const char* to_string(Layout layout) {
  switch (layout) {
    case Layout::right:
      return "right";
    case Layout::left:
      return "left";
    case Layout::heads_inside_rows:
      return "heads_inside_rows";
    case Layout::transposed:
      return "transposed";
    case Layout::fused:
      return "fused";
    case Layout::gaps:
      return "gaps";
  }
  return "";
}

inline void PrintTo(Layout layout, std::ostream* out) { *out << to_string(layout); }

/// Bitwise equality: a NaN equals itself, zeros of different sign differ.
template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
::testing::AssertionResult same_bits(const std::vector<T>& found, const std::vector<T>& expected) {
  if (found.size() != expected.size())
    return ::testing::AssertionFailure()
           << found.size() << " elements, expected " << expected.size();
  for (std::size_t n = 0; n < found.size(); ++n)
    if (!same_bits(found[n], expected[n]))
      return ::testing::AssertionFailure() << "element " << n << " of " << found.size() << ": "
                                           << found[n] << " has other bits than " << expected[n];
  return ::testing::AssertionSuccess();
}

namespace detail {
template <class T, int Rank>
struct Pointer {
  using type = typename Pointer<T*, Rank - 1>::type;
};
template <class T>
struct Pointer<T, 0> {
  using type = T;
};
}  // namespace detail

/// A tensor in a buffer of its own, in the memory of ExecSpace with a mirror on the host. All of
/// the buffer that is not the tensor holds a NaN of a pattern of its own: a guard.
template <class T, int Rank, class ExecSpace>
class PlacedTensor {
 public:
  using Extents = std::array<std::int64_t, Rank>;

  PlacedTensor() = default;
  PlacedTensor(const Extents& extents, Layout layout) : m_extents(extents), m_layout(layout) {
    place();
    m_device = Buffer(Kokkos::view_alloc(std::string("test::tensor"), Kokkos::WithoutInitializing),
                      static_cast<std::size_t>(m_size));
    m_host = Kokkos::create_mirror_view(m_device);
    for (std::int64_t i = 0; i < m_size; ++i) m_host(i) = guard();
    Kokkos::deep_copy(m_device, m_host);
  }

  std::int64_t count() const {
    std::int64_t n = 1;
    for (const std::int64_t extent : m_extents) n *= extent;
    return n;
  }

  /// Fills with row-major values; the guards stay.
  template <class U>
  void set(const std::vector<U>& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), count());
    visit([&](std::int64_t n, std::int64_t at) {
      m_host(at) = static_cast<T>(values[static_cast<std::size_t>(n)]);
    });
    Kokkos::deep_copy(m_device, m_host);
  }
  void fill(T value) { set(std::vector<T>(static_cast<std::size_t>(count()), value)); }

  /// Row-major values as they are now.
  std::vector<T> get() {
    Kokkos::deep_copy(m_host, m_device);
    std::vector<T> values(static_cast<std::size_t>(count()));
    visit(
        [&](std::int64_t n, std::int64_t at) { values[static_cast<std::size_t>(n)] = m_host(at); });
    return values;
  }

  /// Whether nothing but the tensor was written.
  bool guards_intact() {
    Kokkos::deep_copy(m_host, m_device);
    std::vector<char> own(static_cast<std::size_t>(m_size), 0);
    visit([&](std::int64_t, std::int64_t at) { own[static_cast<std::size_t>(at)] = 1; });
    for (std::int64_t i = 0; i < m_size; ++i)
      if (!own[static_cast<std::size_t>(i)] && !same_bits(m_host(i), guard())) return false;
    return true;
  }

  /// As an argument of the library, through the View type that fits the layout.
  template <class U = T>
  TensorRef<U, Rank, ExecSpace> ref() const {
    using Data = typename detail::Pointer<U, Rank>::type;
    using Memory = typename ExecSpace::memory_space;
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    U* const begin = m_device.data() + m_begin;
    if (m_layout == Layout::right)
      return Kokkos::View<Data, Kokkos::LayoutRight, Memory, Unmanaged>(
          begin, layout<Kokkos::LayoutRight>());
    if (m_layout == Layout::left)
      return Kokkos::View<Data, Kokkos::LayoutLeft, Memory, Unmanaged>(
          begin, layout<Kokkos::LayoutLeft>());
    return Kokkos::View<Data, Kokkos::LayoutStride, Memory, Unmanaged>(begin, strided_layout());
  }
  /// Read by the library only.
  TensorRef<const T, Rank, ExecSpace> input() const { return ref<const T>(); }

  /// As a View of strides.
  auto view() const {
    using Data = typename detail::Pointer<const T, Rank>::type;
    return Kokkos::View<Data, Kokkos::LayoutStride, typename ExecSpace::memory_space,
                        Kokkos::MemoryTraits<Kokkos::Unmanaged>>(m_device.data() + m_begin,
                                                                 strided_layout());
  }

  const Extents& extents() const { return m_extents; }

  /// A NaN that no arithmetic makes; for integers a number that no test uses.
  static T guard() {
    T value;
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
      const Bits bits = sizeof(T) == 4 ? Bits(0x7fc5a5a5u) : static_cast<Bits>(0x7ff8a5a5a5a5a5a5u);
      std::memcpy(&value, &bits, sizeof value);
    } else {
      std::memset(&value, 0x5a, sizeof value);
    }
    return value;
  }

 private:
  using Buffer = Kokkos::View<T*, typename ExecSpace::memory_space>;
  static constexpr std::int64_t margin = 67;

  void place() {
    std::array<int, Rank> order{};  // from the fastest dimension to the slowest
    for (int r = 0; r < Rank; ++r) order[r] = m_layout == Layout::left ? r : Rank - 1 - r;
    if constexpr (Rank == 4) {
      if (m_layout == Layout::heads_inside_rows) order = {3, 1, 2, 0};
      if (m_layout == Layout::transposed) order = {2, 3, 1, 0};
    }
    std::int64_t stride = m_layout == Layout::gaps ? 2 : 1;
    m_begin = margin;
    for (int r = 0; r < Rank; ++r) {
      m_strides[order[r]] = stride;
      std::int64_t pitch = m_extents[order[r]];
      if (m_layout == Layout::fused && r == 0) {
        m_begin += pitch;
        pitch *= 3;
      }
      if (m_layout == Layout::gaps) pitch += 1 + r;
      stride *= pitch;
    }
    m_size = stride + m_begin + margin;
  }

  template <class Visit>
  void visit(const Visit& body) const {
    Extents index{};
    const std::int64_t n = count();
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t at = m_begin;
      for (int r = 0; r < Rank; ++r) at += index[r] * m_strides[r];
      body(i, at);
      for (int r = Rank - 1; r >= 0 && ++index[r] == m_extents[r]; --r) index[r] = 0;
    }
  }

  template <class L>
  L layout() const {
    L result;
    for (int r = 0; r < Rank; ++r) result.dimension[r] = static_cast<std::size_t>(m_extents[r]);
    return result;
  }
  Kokkos::LayoutStride strided_layout() const {
    Kokkos::LayoutStride result;
    for (int r = 0; r < Rank; ++r) {
      result.dimension[r] = static_cast<std::size_t>(m_extents[r]);
      result.stride[r] = static_cast<std::size_t>(m_strides[r]);
    }
    return result;
  }

  Extents m_extents{};
  Extents m_strides{};
  Layout m_layout = Layout::right;
  std::int64_t m_begin = 0;
  std::int64_t m_size = 0;
  Buffer m_device{};
  typename Buffer::HostMirror m_host{};
};

}  // namespace LinAttn::test_support
