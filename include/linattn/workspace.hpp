// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <linattn/kokkos_compat.hpp>
#include <linattn/tensor.hpp>

/// \file workspace.hpp
/// The caller's arena: every temporary of a call lives in it, so that a call allocates nothing.

namespace LinAttn {

/// Bytes that kernels of ExecSpace may scribble on, given by the caller.
///
/// Made from a contiguous rank-1 View of a one-byte type; workspace_size() says how many bytes a call
/// needs. The contents before a call do not matter and after it are unspecified: nothing passes from
/// forward to backward through it. Two calls that may run at the same time need two workspaces.
template <class ExecSpace>
class Workspace {
 public:
  /// Every block handed out begins at a multiple of this many bytes (and costs up to as many more).
  static constexpr std::size_t alignment = 128;

  Workspace() = default;

  template <class DataType, class... Properties>
  Workspace(const Kokkos::View<DataType, Properties...>& bytes) {  // NOLINT: implicit on purpose
    using View = Kokkos::View<DataType, Properties...>;
    static_assert(int(View::rank) == 1 && sizeof(typename View::value_type) == 1 &&
                      !std::is_const_v<typename View::value_type>,
                  "LinAttn: a workspace is a rank-1 View of a mutable one-byte type");
    static_assert(
        bool(Kokkos::SpaceAccessibility<ExecSpace, typename View::memory_space>::accessible),
        "LinAttn: the workspace lives in memory that the execution space cannot access");
    if (!bytes.span_is_contiguous())
      throw InvalidArgument(detail::message("LinAttn: a workspace must be contiguous, found stride ",
                                            bytes.stride(0), " of ", bytes.extent(0), " bytes"));
    m_data = reinterpret_cast<std::byte*>(bytes.data());
    m_size = static_cast<std::size_t>(bytes.span());
  }

  std::byte* data() const { return m_data; }
  std::size_t size() const { return m_size; }

 private:
  std::byte* m_data = nullptr;
  std::size_t m_size = 0;
};

namespace detail {

/// Hands out aligned blocks of an arena one after another. Without an arena it only counts, so that
/// the size query and the call itself run the same code.
class ArenaCursor {
 public:
  static constexpr std::size_t alignment = 128;

  ArenaCursor() = default;
  KOKKOS_FUNCTION explicit ArenaCursor(std::byte* begin) : m_begin(begin) {}

  template <class T>
  KOKKOS_FUNCTION T* take(std::int64_t count) {
    T* block = m_begin ? reinterpret_cast<T*>(aligned_begin() + m_used) : nullptr;
    m_used += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    return block;
  }

  /// Bytes an arena needs for all blocks taken so far, whatever the alignment of its first byte.
  KOKKOS_FUNCTION std::size_t required() const { return m_used == 0 ? 0 : m_used + alignment; }

 private:
  KOKKOS_FUNCTION std::byte* aligned_begin() const {
    const auto address = reinterpret_cast<std::uintptr_t>(m_begin);
    return m_begin + (alignment - address % alignment) % alignment;
  }

  std::byte* m_begin = nullptr;
  std::size_t m_used = 0;
};

}  // namespace detail
}  // namespace LinAttn
