// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <linattn/io/array.hpp>
#include <linattn/kokkos_compat.hpp>
#include <linattn/tensor.hpp>
#include <string>
#include <type_traits>
#include <vector>

/// \file views.hpp
/// Copies between Kokkos Views of any layout, stride and memory space and row-major host arrays.

namespace LinAttn::io {
namespace views_detail {

/// Offset in a strided tensor of the element that is number i in row-major order.
template <class T, int Rank, class ExecSpace>
KOKKOS_FUNCTION std::int64_t offset_of(const TensorRef<T, Rank, ExecSpace>& tensor,
                                       std::int64_t i) {
  std::int64_t offset = 0;
  for (int r = Rank - 1; r > 0; --r) {
    const std::int64_t extent = tensor.extent(r);
    offset += i % extent * tensor.stride(r);
    i /= extent;
  }
  return offset + i * tensor.stride(0);
}

/// packed[i] = element i of the tensor in row-major order.
template <class T, int Rank, class ExecSpace>
struct Pack {
  TensorRef<const T, Rank, ExecSpace> tensor;
  T* packed;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    packed[i] = tensor.data()[offset_of(tensor, i)];
  }
};

/// The inverse of Pack.
template <class T, int Rank, class ExecSpace>
struct Unpack {
  TensorRef<T, Rank, ExecSpace> tensor;
  const T* packed;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    tensor.data()[offset_of(tensor, i)] = packed[i];
  }
};

template <class T, int Rank, class ExecSpace>
std::vector<std::int64_t> extents_of(const TensorRef<T, Rank, ExecSpace>& tensor) {
  std::vector<std::int64_t> extents;
  for (int r = 0; r < Rank; ++r) extents.push_back(tensor.extent(r));
  return extents;
}

template <class T, int Rank, class ExecSpace>
bool is_row_major(const TensorRef<T, Rank, ExecSpace>& tensor) {
  std::int64_t stride = 1;
  for (int r = Rank - 1; r >= 0; --r) {
    if (tensor.extent(r) != 1 && tensor.stride(r) != stride) return false;
    stride *= tensor.extent(r);
  }
  return true;
}

template <class ExecSpace, class Functor>
void for_each_element(const ExecSpace& exec, const char* label, std::int64_t size,
                      const Functor& functor) {
  using Policy = Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for(label, Policy(exec, 0, size), functor);
}

template <class T, class MemorySpace>
using Flat = Kokkos::View<T*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

template <class T, class ExecSpace>
using Buffer = Kokkos::View<T*, typename ExecSpace::memory_space>;

template <class T, class ExecSpace>
Buffer<T, ExecSpace> make_buffer(const ExecSpace& exec, std::int64_t size) {
  return Buffer<T, ExecSpace>(
      Kokkos::view_alloc(exec, std::string("LinAttn::io::buffer"), Kokkos::WithoutInitializing),
      static_cast<std::size_t>(size));
}

/// Copies `size` elements between host memory and memory of ExecSpace, in the order of the
/// instance.
template <class ToSpace, class FromSpace, class ExecSpace, class T>
void copy_flat(const ExecSpace& exec, T* to, const T* from, std::int64_t size) {
  const auto count = static_cast<std::size_t>(size);
  Kokkos::deep_copy(exec, Flat<T, ToSpace>(to, count), Flat<const T, FromSpace>(from, count));
}

/// Writes the elements in row-major order to host[0 .. size) and waits for them.
template <class ExecSpace, class T, int Rank>
void copy_to_host(const ExecSpace& exec, const TensorRef<const T, Rank, ExecSpace>& source, T* host,
                  std::int64_t size) {
  using DeviceSpace = typename ExecSpace::memory_space;
  if (size == 0) return;
  if constexpr (detail::is_host_space_v<ExecSpace>) {
    for_each_element(exec, "LinAttn::io::pack", size, Pack<T, Rank, ExecSpace>{source, host});
    detail::fence(exec, "LinAttn::io::to_array");
  } else if (is_row_major(source)) {
    copy_flat<Kokkos::HostSpace, DeviceSpace>(exec, host, source.data(), size);
    detail::fence(exec, "LinAttn::io::to_array");
  } else {
    const auto buffer = make_buffer<T>(exec, size);
    for_each_element(exec, "LinAttn::io::pack", size,
                     Pack<T, Rank, ExecSpace>{source, buffer.data()});
    copy_flat<Kokkos::HostSpace, DeviceSpace>(exec, host, static_cast<const T*>(buffer.data()),
                                              size);
    detail::fence(exec, "LinAttn::io::to_array");
  }
}

/// What a tensor may hold to be copied: the types of files, and bfloat16, which is converted.
template <class T>
concept Copyable = Storable<T> || std::is_same_v<T, bfloat16>;

}  // namespace views_detail

/// Row-major copy of a tensor of double, float, float16, int64, uint8 or bfloat16 on the host. That
/// of bfloat16, which files do not have, is one of float.
///
/// Packing runs on `exec`, where the tensor lives; what crosses to the host is contiguous. Returns
/// when the copy is complete, which fences `exec`. A device tensor that is not row-major needs a
/// temporary of its size there.
template <class ExecSpace, class T, int Rank>
Array to_array(const ExecSpace& exec, const TensorRef<T, Rank, ExecSpace>& tensor) {
  using Value = std::remove_const_t<T>;
  static_assert(views_detail::Copyable<Value>,
                "LinAttn: files hold double, float, float16, int64 and uint8 elements");
  const TensorRef<const Value, Rank, ExecSpace> source = tensor;
  if constexpr (Storable<Value>) {
    Array array(ElementTypeOf<Value>::value, views_detail::extents_of(source));
    views_detail::copy_to_host(exec, source, array.values<Value>().data(), array.size());
    return array;
  } else {
    Array array(ElementType::f32, views_detail::extents_of(source));
    std::vector<Value> narrow(static_cast<std::size_t>(array.size()));
    views_detail::copy_to_host(exec, source, narrow.data(), array.size());
    std::transform(narrow.begin(), narrow.end(), array.values<float>().begin(),
                   [](Value x) { return static_cast<float>(x); });
    return array;
  }
}

/// The same for a View, packed by an instance of an execution space that can reach it.
template <class ExecSpace, class DataType, class... Properties>
Array to_array(const ExecSpace& exec, const Kokkos::View<DataType, Properties...>& view) {
  using View = Kokkos::View<DataType, Properties...>;
  return to_array(exec,
                  TensorRef<typename View::const_value_type, int(View::rank), ExecSpace>(view));
}

/// The same on the default instance of the View's execution space.
template <class DataType, class... Properties>
Array to_array(const Kokkos::View<DataType, Properties...>& view) {
  return to_array(typename Kokkos::View<DataType, Properties...>::execution_space(), view);
}

/// Overwrites a tensor with an array of the same extents, converted to the tensor's element type.
///
/// Returns when the copy is complete, which fences `exec`. A device tensor that is not row-major
/// needs a temporary of its size there. \throws InvalidArgument if the extents differ, or as
/// Array::convert_to().
template <class ExecSpace, class T, int Rank>
void copy_into(const ExecSpace& exec, const Array& array,
               const TensorRef<T, Rank, ExecSpace>& tensor) {
  static_assert(views_detail::Copyable<T>,
                "LinAttn: files hold double, float, float16, int64 and uint8 elements");
  using DeviceSpace = typename ExecSpace::memory_space;
  if (views_detail::extents_of(tensor) != array.extents())
    throw InvalidArgument(detail::message("LinAttn::io: expected an array with extents ",
                                          tensor.shape(), ", found ", to_string(array.extents())));
  std::vector<T> converted;
  const T* host = nullptr;
  if constexpr (Storable<T>)
    if (array.type() == ElementTypeOf<T>::value) host = array.values<T>().data();
  if (host == nullptr) {
    converted = array.as<T>();
    host = converted.data();
  }
  if (array.size() == 0) return;
  if constexpr (detail::is_host_space_v<ExecSpace>) {
    views_detail::for_each_element(exec, "LinAttn::io::unpack", array.size(),
                                   views_detail::Unpack<T, Rank, ExecSpace>{tensor, host});
    detail::fence(exec, "LinAttn::io::copy_into");
  } else if (views_detail::is_row_major(tensor)) {
    views_detail::copy_flat<DeviceSpace, Kokkos::HostSpace>(exec, tensor.data(), host,
                                                            array.size());
    detail::fence(exec, "LinAttn::io::copy_into");
  } else {
    const auto buffer = views_detail::make_buffer<T>(exec, array.size());
    views_detail::copy_flat<DeviceSpace, Kokkos::HostSpace>(exec, buffer.data(), host,
                                                            array.size());
    views_detail::for_each_element(exec, "LinAttn::io::unpack", array.size(),
                                   views_detail::Unpack<T, Rank, ExecSpace>{tensor, buffer.data()});
    detail::fence(exec, "LinAttn::io::copy_into");
  }
}

/// The same for a View.
template <class ExecSpace, class DataType, class... Properties>
void copy_into(const ExecSpace& exec, const Array& array,
               const Kokkos::View<DataType, Properties...>& view) {
  using View = Kokkos::View<DataType, Properties...>;
  copy_into(exec, array, TensorRef<typename View::value_type, int(View::rank), ExecSpace>(view));
}

/// The same on the default instance of the View's execution space.
template <class DataType, class... Properties>
void copy_into(const Array& array, const Kokkos::View<DataType, Properties...>& view) {
  copy_into(typename Kokkos::View<DataType, Properties...>::execution_space(), array, view);
}

}  // namespace LinAttn::io
