// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/kokkos_compat.hpp>

/// \file team.hpp
/// What a kernel body sees of the threads that run it together.
///
/// The body of every kernel is written once against this interface. On the host a team is one thread
/// and barriers vanish; on a device it is a Kokkos team. No body adds across threads of a team: each
/// output element is the work of one thread, in an order that does not depend on the team size.

namespace LinAttn::detail {

struct HostTeam {
  static constexpr bool on_host = true;
  KOKKOS_FUNCTION int rank() const { return 0; }
  KOKKOS_FUNCTION int size() const { return 1; }
  KOKKOS_FUNCTION void barrier() const {}
};

template <class Member>
struct DeviceTeam {
  static constexpr bool on_host = false;
  const Member& m_member;
  KOKKOS_FUNCTION int rank() const { return m_member.team_rank(); }
  KOKKOS_FUNCTION int size() const { return m_member.team_size(); }
  KOKKOS_FUNCTION void barrier() const { m_member.team_barrier(); }
};

/// body(i) for 0 <= i < n, shared among the threads of the team.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each(const Team& team, int n, const Body& body) {
  for (int i = team.rank(); i < n; i += team.size()) body(i);
}

/// body(row, column) for every element of a rows x columns tile. For a fixed column the rows come in
/// increasing order, one after another, in one thread.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each_down(const Team& team, int rows, int columns,
                                               const Body& body) {
  if constexpr (Team::on_host) {
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) body(row, column);
  } else {
    for (int column = team.rank(); column < columns; column += team.size())
      for (int row = 0; row < rows; ++row) body(row, column);
  }
}

/// body(row, column) for every element of a rows x columns tile, in any order; neighbouring threads
/// take neighbouring columns.
template <class Team, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each_element(const Team& team, int rows, int columns,
                                                  const Body& body) {
  if constexpr (Team::on_host) {
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) body(row, column);
  } else {
    for (int i = team.rank(); i < rows * columns; i += team.size()) body(i / columns, i % columns);
  }
}

}  // namespace LinAttn::detail
