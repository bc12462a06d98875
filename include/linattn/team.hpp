// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/kokkos_compat.hpp>
#include <linattn/simd.hpp>

/// \file team.hpp
/// What a kernel body sees of the threads that run it together.
///
/// The body of every kernel is written once against this interface. On the host a team is one thread
/// and barriers vanish; on a device it is a Kokkos team. No body adds across threads of a team: each
/// output element is the work of one thread, in an order that does not depend on the team size.

namespace LinAttn::detail {

/// An int known to the compiler, for host and device.
template <int N>
struct Constant {
  static constexpr int value = N;
  KOKKOS_FUNCTION constexpr operator int() const { return N; }
};

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
/// Rows that will be needed soon, to be asked for a few cache lines at a time while products are formed:
/// all at once would fill the buffers for outstanding loads and stall what runs.
class RowsAhead {
 public:
  void clear() { m_streams = m_stream = m_row = m_lines = m_asked = 0; }
  /// `rows` rows of `bytes` bytes, `stride` bytes apart.
  void add(const void* first, std::int64_t stride, int rows, int bytes, bool to_write) {
    if (rows <= 0 || bytes <= 0 || m_streams == capacity) return;
    m_list[m_streams++] = {static_cast<const char*>(first), stride, rows, bytes, to_write};
    m_lines += rows * ((bytes + line - 1) / line);
  }
  int lines() const { return m_lines; }
  /// Lines asked for so far.
  int asked() const { return m_asked; }
  /// Asks for about the next `count` lines, in whole rows.
  void advance(int count) {
    while (count > 0 && m_stream < m_streams) {
      const Stream& s = m_list[m_stream];
      const char* const row = s.first + m_row * s.stride;
      if (s.to_write)
        for (int b = 0; b < s.bytes; b += line) prefetch<true>(row + b);
      else
        for (int b = 0; b < s.bytes; b += line) prefetch<false>(row + b);
      count -= (s.bytes + line - 1) / line;
      m_asked += (s.bytes + line - 1) / line;
      if (++m_row < s.rows) continue;
      m_row = 0;
      ++m_stream;
    }
  }

 private:
  static constexpr int capacity = 8, line = 64;
  struct Stream {
    const char* first;
    std::int64_t stride;
    int rows, bytes;
    bool to_write;
  };
  Stream m_list[capacity];
  int m_streams = 0, m_stream = 0, m_row = 0, m_lines = 0, m_asked = 0;
};
#endif

struct HostTeam {
  static constexpr bool on_host = true;
  KOKKOS_FUNCTION int rank() const { return 0; }
  KOKKOS_FUNCTION int size() const { return 1; }
  KOKKOS_FUNCTION void barrier() const {}
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  /// Called by products between register tiles.
  void between_tiles() const { ahead.advance(lines_at_once); }
  mutable RowsAhead ahead;
  mutable int lines_at_once = 0;
#endif
};

template <class Member>
struct DeviceTeam {
  static constexpr bool on_host = false;
  const Member& m_member;
  bool allow_tf32 = false;  // products may round their factors to TF32
  KOKKOS_FUNCTION int rank() const { return m_member.team_rank(); }
  KOKKOS_FUNCTION int size() const { return m_member.team_size(); }
  KOKKOS_FUNCTION void barrier() const { m_member.team_barrier(); }
};

/// along(column) for the columns of a row on the host, in blocks of a known length so that they vectorise.
template <class Along>
KOKKOS_FORCEINLINE_FUNCTION void for_each_along(int columns, const Along& along) {
  constexpr int block = 16;
  int column = 0;
  for (; column + block <= columns; column += block) {
    LINATTN_INDEPENDENT
    for (int j = 0; j < block; ++j) along(column + j);
  }
  LINATTN_INDEPENDENT
  for (int j = column; j < columns; ++j) along(j);
}

/// body(i) for 0 <= i < n, shared among the threads of the team.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each(const Team& team, int n, const Body& body) {
  for (int i = team.rank(); i < n; i += team.size()) body(i);
}

/// body(row)(column) for every element of a rows x columns tile where counts(row), otherwise(row)(column)
/// elsewhere: both return what is to be done along the row. For a fixed column the rows come in
/// increasing order, one after another, in one thread.
template <class Team, class Counts, class Body, class Otherwise>
KOKKOS_FORCEINLINE_FUNCTION void for_each_down(const Team& team, int rows, int columns,
                                               const Counts& counts, const Body& body,
                                               const Otherwise& otherwise) {
  if constexpr (Team::on_host) {
    for (int row = 0; row < rows; ++row) {
      if (counts(row)) {
        for_each_along(columns, body(row));
      } else {
        for_each_along(columns, otherwise(row));
      }
    }
  } else {
    for (int column = team.rank(); column < columns; column += team.size()) {
      for (int row = 0; row < rows; ++row) {
        if (counts(row))
          body(row)(column);
        else
          otherwise(row)(column);
      }
    }
  }
}

/// body(row)(column) for every element of a rows x columns tile, in any order: body(row) returns what is
/// to be done along the row. Neighbouring threads take neighbouring columns.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each_in_rows(const Team& team, int rows, int columns,
                                                  const Body& body) {
  if constexpr (Team::on_host) {
    for (int row = 0; row < rows; ++row) for_each_along(columns, body(row));
  } else {
    for (int i = team.rank(); i < rows * columns; i += team.size()) body(i / columns)(i % columns);
  }
}

/// As for_each_in_rows() in the rows where counts(row); zero(row) returns what clears an element elsewhere.
template <class Team, class Counts, class Body, class Zero>
KOKKOS_FORCEINLINE_FUNCTION void for_each_in_counted_rows(const Team& team, int rows, int columns,
                                                          const Counts& counts, const Body& body,
                                                          const Zero& zero) {
  if constexpr (Team::on_host) {
    for (int row = 0; row < rows; ++row) {
      if (counts(row)) {
        for_each_along(columns, body(row));
      } else {
        for_each_along(columns, zero(row));
      }
    }
  } else {
    for (int i = team.rank(); i < rows * columns; i += team.size()) {
      if (counts(i / columns))
        body(i / columns)(i % columns);
      else
        zero(i / columns)(i % columns);
    }
  }
}

/// body(stride), on the host with a constant where the stride is 1, so that loops along a row vectorise.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void with_stride(std::int64_t stride, const Body& body) {
  if constexpr (Team::on_host) {
    if (stride == 1) return body(Constant<1>{});
  }
  body(stride);
}

}  // namespace LinAttn::detail
