// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/half.hpp>
#include <linattn/tensor.hpp>
#include <type_traits>

/// \file rows.hpp
/// Tensors of the caller as kernels see them, whatever their storage and strides: rows, sequences, visible keys.

namespace LinAttn::detail {

/// How the elements of a tensor are stored; in kernels they are of the accumulator type.
enum class Storage : std::uint8_t { native, float16, bfloat16 };

template <class T>
inline constexpr Storage storage_of = Storage::native;
template <>
inline constexpr Storage storage_of<float16> = Storage::float16;
template <>
inline constexpr Storage storage_of<bfloat16> = Storage::bfloat16;

/// body(std::type_identity<S>{}) for the type S in which elements of accumulator type A are stored.
template <class A, class Body>
KOKKOS_FORCEINLINE_FUNCTION void with_storage(Storage storage, const Body& body) {
  if constexpr (std::is_same_v<A, float>) {
    if (storage == Storage::float16) return body(std::type_identity<float16>{});
    if (storage == Storage::bfloat16) return body(std::type_identity<bfloat16>{});
  }
  body(std::type_identity<A>{});
}

/// A tensor of the caller, (batch, head, position) -> row of strided elements, whatever their storage.
template <class A>
struct StoredTensor {
  void* data = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0, element_stride = 0;  // in elements
  Storage storage = Storage::native;

  StoredTensor() = default;
  /// Of rank 4, or of rank 3 where there are no positions.
  template <class U, int Rank, class ExecSpace>
  explicit StoredTensor(const TensorRef<U, Rank, ExecSpace>& t)
      : data(const_cast<std::remove_const_t<U>*>(t.data())),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(Rank == 4 ? t.stride(2) : 0),
        element_stride(t.stride(Rank - 1)),
        storage(storage_of<std::remove_const_t<U>>) {
    static_assert((Rank == 3 || Rank == 4) && std::is_same_v<accumulator_t<U>, A>);
  }

  /// Row of a tensor whose elements are stored as S.
  template <class S>
  KOKKOS_FORCEINLINE_FUNCTION S* row(std::int64_t b, std::int64_t h, std::int64_t n) const {
    return static_cast<S*>(data) + (b * batch_stride + h * head_stride + n * row_stride);
  }
  KOKKOS_FORCEINLINE_FUNCTION int element_bytes() const {
    return storage == Storage::native ? static_cast<int>(sizeof(A)) : 2;
  }
  KOKKOS_FORCEINLINE_FUNCTION explicit operator bool() const { return data != nullptr; }
};

/// Rows in memory as numbers: element (r, j) is data[r * row + j * element].
template <class A>
struct Rows {
  const A* data = nullptr;
  std::int64_t row = 0;
  std::int64_t element = 1;
};

/// A tensor of rows, without the execution space: (batch, head, position) -> row of strided elements.
template <class T>
struct RowTensor {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t element_stride = 0;

  RowTensor() = default;
  KOKKOS_FUNCTION RowTensor(T* data_, std::int64_t batch, std::int64_t head, std::int64_t row)
      : data(data_), batch_stride(batch), head_stride(head), row_stride(row) {}
  template <class U, class ExecSpace>
  explicit RowTensor(const TensorRef<U, 4, ExecSpace>& t)
      : data(t.data()),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)),
        element_stride(t.stride(3)) {}
  template <class U, class ExecSpace>
  explicit RowTensor(const TensorRef<U, 3, ExecSpace>& t)
      : data(t.data()),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)) {}

  KOKKOS_FORCEINLINE_FUNCTION T* row(std::int64_t b, std::int64_t h, std::int64_t n) const {
    return data + b * batch_stride + h * head_stride + n * row_stride;
  }
  KOKKOS_FORCEINLINE_FUNCTION explicit operator bool() const { return data != nullptr; }
};

/// Where one sequence lies in the tensors.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, nq = 0;
  std::int64_t k_begin = 0, nk = 0;

  template <class Args>
  KOKKOS_FORCEINLINE_FUNCTION static Sequence at(const Args& args, std::int64_t index) {
    if (!args.cu_seqlens_q) return {index, 0, args.nq, 0, args.nk};
    const std::int64_t q = args.cu_seqlens_q[index], k = args.cu_seqlens_k[index];
    return {0, q, args.cu_seqlens_q[index + 1] - q, k, args.cu_seqlens_k[index + 1] - k};
  }
};

/// The keys of one sequence that may be seen.
struct Visibility {
  const std::uint8_t* mask = nullptr;
  std::int64_t stride = 0;
  bool nothing = false;  // nobody looks at these keys

  template <class Args>
  KOKKOS_FORCEINLINE_FUNCTION static Visibility of(const Args& args, const Sequence& sequence) {
    if (!args.key_mask) return {};
    return {args.key_mask + sequence.batch * args.mask_batch_stride + sequence.k_begin * args.mask_stride,
            args.mask_stride, false};
  }
  KOKKOS_FORCEINLINE_FUNCTION bool operator()(std::int64_t key) const {
    return !nothing && (!mask || mask[key * stride] != 0);
  }
  KOKKOS_FORCEINLINE_FUNCTION bool everything() const { return !nothing && !mask; }
};

}  // namespace LinAttn::detail
