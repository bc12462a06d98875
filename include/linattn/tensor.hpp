// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <linattn/error.hpp>
#include <linattn/half.hpp>
#include <linattn/kokkos_compat.hpp>
#include <string>
#include <type_traits>

/// \file tensor.hpp
/// The one canonical type to which every View of a caller is reduced before a kernel sees it.

namespace LinAttn {

/// Type in which sums over values of type T are taken: float or wider.
template <class T>
struct Accumulator {
  static_assert(sizeof(T) == 0,
                "LinAttn: tensors hold double, float, LinAttn::float16 or LinAttn::bfloat16");
};
template <>
struct Accumulator<float> {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <>
struct Accumulator<float16> {
  using type = float;
};
template <>
struct Accumulator<bfloat16> {
  using type = float;
};
template <class T>
using accumulator_t = typename Accumulator<std::remove_const_t<T>>::type;

/// Non-owning reference to a tensor that kernels of ExecSpace can reach.
///
/// Converts from any Kokkos::View of the same rank and element type: LayoutLeft, LayoutRight and
/// LayoutStride, padded, sliced, transposed or broadcast (stride 0), const, unmanaged. Offsets are
/// 64 bits wide. Default construction means "absent". The memory must outlive the kernels that use it.
/// An output must not have two elements at one address.
template <class T, int Rank, class ExecSpace>
class TensorRef {
 public:
  using value_type = T;
  static constexpr int rank = Rank;

  TensorRef() = default;

  template <class DataType, class... Properties>
  TensorRef(const Kokkos::View<DataType, Properties...>& view) {  // NOLINT: implicit on purpose
    using View = Kokkos::View<DataType, Properties...>;
    static_assert(int(View::rank) == Rank, "LinAttn: this argument needs a View of another rank");
    static_assert(std::is_convertible_v<typename View::value_type (*)[], T (*)[]>,
                  "LinAttn: this argument needs a View of another element type (or a non-const one)");
    static_assert(
        bool(Kokkos::SpaceAccessibility<ExecSpace, typename View::memory_space>::accessible),
        "LinAttn: this View lives in memory that the execution space cannot access");
    m_data = view.data();
    m_present = true;
    for (int r = 0; r < Rank; ++r) {
      m_extent[r] = static_cast<std::int64_t>(view.extent(r));
      m_stride[r] = static_cast<std::int64_t>(view.stride(r));
    }
  }

  /// From a pointer, extents and strides (in elements).
  TensorRef(T* data, const std::array<std::int64_t, Rank>& extents,
            const std::array<std::int64_t, Rank>& strides)
      : m_data(data), m_present(true) {
    for (int r = 0; r < Rank; ++r) {
      m_extent[r] = extents[r];
      m_stride[r] = strides[r];
    }
  }

  /// A tensor of mutable elements serves where const ones are read.
  template <class U>
    requires(!std::is_const_v<U> && std::is_same_v<const U, T>)
  TensorRef(const TensorRef<U, Rank, ExecSpace>& other)  // NOLINT: implicit on purpose
      : m_data(other.data()), m_present(other.present()) {
    for (int r = 0; r < Rank; ++r) {
      m_extent[r] = other.extent(r);
      m_stride[r] = other.stride(r);
    }
  }

  KOKKOS_FUNCTION T* data() const { return m_data; }
  KOKKOS_FUNCTION std::int64_t extent(int r) const { return m_extent[r]; }
  KOKKOS_FUNCTION std::int64_t stride(int r) const { return m_stride[r]; }
  /// Whether a tensor was given (it may have zero elements).
  KOKKOS_FUNCTION bool present() const { return m_present; }

  /// Address of the row at the given leading indices; its elements are stride(Rank - 1) apart.
  template <class... Index>
  KOKKOS_FUNCTION T* row(Index... index) const {
    static_assert(sizeof...(Index) + 1 == Rank, "one index for each leading dimension");
    const std::int64_t at[] = {static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (int r = 0; r + 1 < Rank; ++r) offset += at[r] * m_stride[r];
    return m_data + offset;
  }

  template <class... Index>
  KOKKOS_FUNCTION T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == Rank, "one index for each dimension");
    const std::int64_t at[] = {static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (int r = 0; r < Rank; ++r) offset += at[r] * m_stride[r];
    return m_data[offset];
  }

  std::string shape() const {
    std::string text = "(";
    for (int r = 0; r < Rank; ++r) text += (r ? ", " : "") + std::to_string(m_extent[r]);
    return text + ")";
  }

 private:
  T* m_data = nullptr;
  std::int64_t m_extent[Rank] = {};
  std::int64_t m_stride[Rank] = {};
  bool m_present = false;
};

/// One scalar parameter for each head: a single value for all of them, or a View of doubles.
///
/// The View must be accessible from the execution space that later reads it and outlive the kernels.
class Parameter {
 public:
  Parameter(double value) : m_value(value) {}  // NOLINT: implicit on purpose

  template <class DataType, class... Properties>
  Parameter(const Kokkos::View<DataType, Properties...>& view) {  // NOLINT: implicit on purpose
    using View = Kokkos::View<DataType, Properties...>;
    static_assert(int(View::rank) == 1 && std::is_same_v<typename View::non_const_value_type, double>,
                  "LinAttn: a parameter is a double or a rank-1 View of double");
    m_data = view.data();
    m_extent = static_cast<std::int64_t>(view.extent(0));
    m_stride = static_cast<std::int64_t>(view.stride(0));
    m_per_head = true;
    m_on_host = bool(
        Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename View::memory_space>::accessible);
    m_on_device = bool(Kokkos::SpaceAccessibility<Kokkos::DefaultExecutionSpace,
                                                  typename View::memory_space>::accessible);
  }

  KOKKOS_FUNCTION double operator()(std::int64_t head) const {
    return m_per_head ? m_data[head * m_stride] : m_value;
  }

  bool per_head() const { return m_per_head; }
  std::int64_t extent() const { return m_extent; }
  double value() const { return m_value; }

  /// \throws InvalidArgument if one value per head was given and their number is not `heads`, or if a
  /// kernel of ExecSpace could not read them, or if the single value is not finite.
  template <class ExecSpace>
  void validate(const char* name, std::int64_t heads) const {
    if (!m_per_head) {
      if (!(m_value - m_value == 0.0))
        throw InvalidArgument(detail::message("LinAttn: ", name, " must be finite, found ", m_value));
      return;
    }
    if (m_extent != heads)
      throw InvalidArgument(detail::message("LinAttn: ", name, " needs one value for each of ", heads,
                                            " heads, found ", m_extent));
    if (!(detail::is_host_space_v<ExecSpace> ? m_on_host : m_on_device))
      throw InvalidArgument(detail::message("LinAttn: ", name, " lives in memory that ",
                                            ExecSpace::name(), " cannot access"));
  }

 private:
  double m_value = 0.0;
  const double* m_data = nullptr;
  std::int64_t m_extent = 0;
  std::int64_t m_stride = 0;
  bool m_per_head = false;
  bool m_on_host = true;
  bool m_on_device = true;
};

/// One factor for each head and column of its rows: a single value for all of them, or a View (H, columns) of doubles.
///
/// The View must be accessible from the execution space that later reads it and outlive the kernels.
class ColumnFactors {
 public:
  ColumnFactors(double value) : m_value(value) {}  // NOLINT: implicit on purpose

  template <class DataType, class... Properties>
  ColumnFactors(const Kokkos::View<DataType, Properties...>& view) {  // NOLINT: implicit on purpose
    using View = Kokkos::View<DataType, Properties...>;
    static_assert(int(View::rank) == 2 && std::is_same_v<typename View::non_const_value_type, double>,
                  "LinAttn: column factors are a double or a rank-2 View of double");
    m_data = view.data();
    for (int r = 0; r < 2; ++r) {
      m_extent[r] = static_cast<std::int64_t>(view.extent(r));
      m_stride[r] = static_cast<std::int64_t>(view.stride(r));
    }
    m_per_head = true;
    m_on_host = bool(Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename View::memory_space>::accessible);
    m_on_device =
        bool(Kokkos::SpaceAccessibility<Kokkos::DefaultExecutionSpace, typename View::memory_space>::accessible);
  }

  /// The factors of one head: row[column].
  struct Row {
    const double* data;
    std::int64_t stride;
    double value;
    KOKKOS_FORCEINLINE_FUNCTION double operator[](std::int64_t column) const {
      return data ? data[column * stride] : value;
    }
  };
  KOKKOS_FUNCTION Row row(std::int64_t head) const {
    return {m_per_head ? m_data + head * m_stride[0] : nullptr, m_stride[1], m_value};
  }

  bool per_head() const { return m_per_head; }
  double value() const { return m_value; }

  /// \throws InvalidArgument if a View was given that is not (heads, columns) or that kernels of ExecSpace could not
  /// read, or if the single value is not finite.
  template <class ExecSpace>
  void validate(const char* name, std::int64_t heads, std::int64_t columns) const {
    if (!m_per_head) {
      if (!(m_value - m_value == 0.0))
        throw InvalidArgument(detail::message("LinAttn: ", name, " must be finite, found ", m_value));
      return;
    }
    if (m_extent[0] != heads || m_extent[1] != columns)
      throw InvalidArgument(detail::message("LinAttn: ", name, " must have shape (", heads, ", ", columns, "), found (",
                                            m_extent[0], ", ", m_extent[1], ")"));
    if (heads > 0 && columns > 0 && !m_data)
      throw InvalidArgument(detail::message("LinAttn: ", name, " has no memory behind it"));
    if (!(detail::is_host_space_v<ExecSpace> ? m_on_host : m_on_device))
      throw InvalidArgument(detail::message("LinAttn: ", name, " lives in memory that ", ExecSpace::name(),
                                            " cannot access"));
  }

 private:
  double m_value = 0.0;
  const double* m_data = nullptr;
  std::int64_t m_extent[2] = {};
  std::int64_t m_stride[2] = {};
  bool m_per_head = false;
  bool m_on_host = true;
  bool m_on_device = true;
};

/// A matrix of doubles (rows, columns) that rows of q and k are multiplied with, the same for all heads: a View of any
/// layout. Default construction means "absent".
///
/// The View must be accessible from the execution space that later reads it and outlive the kernels.
class Projection {
 public:
  Projection() = default;

  template <class DataType, class... Properties>
  Projection(const Kokkos::View<DataType, Properties...>& view) {  // NOLINT: implicit on purpose
    using View = Kokkos::View<DataType, Properties...>;
    static_assert(int(View::rank) == 2 && std::is_same_v<typename View::non_const_value_type, double>,
                  "LinAttn: a projection is a rank-2 View of double");
    m_data = view.data();
    for (int r = 0; r < 2; ++r) {
      m_extent[r] = static_cast<std::int64_t>(view.extent(r));
      m_stride[r] = static_cast<std::int64_t>(view.stride(r));
    }
    m_present = true;
    m_on_host = bool(Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename View::memory_space>::accessible);
    m_on_device =
        bool(Kokkos::SpaceAccessibility<Kokkos::DefaultExecutionSpace, typename View::memory_space>::accessible);
  }

  KOKKOS_FUNCTION double operator()(std::int64_t row, std::int64_t column) const {
    return m_data[row * m_stride[0] + column * m_stride[1]];
  }

  bool present() const { return m_present; }
  std::int64_t rows() const { return m_extent[0]; }

  /// \throws InvalidArgument if there is none, or it is not (one or more, columns), or kernels of ExecSpace could not
  /// read it.
  template <class ExecSpace>
  void validate(const char* name, std::int64_t columns) const {
    if (!m_present || m_extent[0] < 1 || m_extent[1] != columns)
      throw InvalidArgument(detail::message("LinAttn: ", name, " must have shape (M, ", columns, ") with M >= 1, found ",
                                            m_present ? detail::message("(", m_extent[0], ", ", m_extent[1], ")")
                                                      : std::string("nothing")));
    if (columns > 0 && !m_data) throw InvalidArgument(detail::message("LinAttn: ", name, " has no memory behind it"));
    if (!(detail::is_host_space_v<ExecSpace> ? m_on_host : m_on_device))
      throw InvalidArgument(detail::message("LinAttn: ", name, " lives in memory that ", ExecSpace::name(),
                                            " cannot access"));
  }

 private:
  const double* m_data = nullptr;
  std::int64_t m_extent[2] = {};
  std::int64_t m_stride[2] = {};
  bool m_present = false;
  bool m_on_host = true;
  bool m_on_device = true;
};

}  // namespace LinAttn
