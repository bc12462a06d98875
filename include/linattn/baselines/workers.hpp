// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <linattn/call.hpp>
#include <linattn/inputs.hpp>
#include <linattn/launch.hpp>
#include <linattn/plan.hpp>
#include <linattn/rows.hpp>
#include <linattn/team.hpp>
#include <linattn/tile.hpp>
#include <linattn/workspace.hpp>

/// \file workers.hpp
/// Tasks shared out among workers with memory of their own, and matrices of a few rows, for the baselines.

namespace LinAttn::baselines::detail {

using namespace LinAttn::detail;

/// Workers walking the tasks of `Body`, which offers
///
///     std::int64_t tasks() const;
///     void place(ArenaCursor&, Memory&) const;         what a worker needs
///     template <class Team> void run(const Team&, const Memory&, std::int64_t task) const;
///
/// with a default-constructible type Memory of its own.
template <class Body>
struct Workers {
  Body body;
  int workers;
  std::byte* memory;
  std::int64_t worker_bytes;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}); }

  template <class Member>
  requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    work(member.league_rank(), DeviceTeam<Member>{member, false});
  }

 private:
  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team) const {
    std::byte* mine = memory + worker * worker_bytes;
    // padding takes part in vector arithmetic and must hold numbers
    for (std::int64_t i = team.rank(); i < worker_bytes / static_cast<std::int64_t>(sizeof(int)); i += team.size())
      reinterpret_cast<int*>(mine)[i] = 0;
    team.barrier();
    ArenaCursor arena(mine);
    typename Body::Memory own;
    body.place(arena, own);
    for (std::int64_t task = worker; task < body.tasks(); task += workers) body.run(team, own, task);
  }
};

/// Launches of bodies on one instance, with the memory of their workers.
template <class ExecSpace>
class Launcher {
 public:
  explicit Launcher(const ExecSpace& exec) : m_exec(exec), m_machine(machine_of(exec)) {}

  /// Bytes that the workers of a body need.
  template <class Body>
  std::int64_t bytes(const Body& body) const {
    return worker_bytes(body) * make_worker_plan(body.tasks(), m_machine).workers;
  }
  template <class Body>
  void launch(const char* label, const Body& body, std::byte* memory) const {
    if (body.tasks() == 0) return;
    const Plan plan = make_worker_plan(body.tasks(), m_machine);
    launch_workers(m_exec, label, plan.workers, plan, Workers<Body>{body, plan.workers, memory, worker_bytes(body)});
  }

 private:
  template <class Body>
  static std::int64_t worker_bytes(const Body& body) {
    ArenaCursor counter;
    typename Body::Memory own;
    body.place(counter, own);
    return static_cast<std::int64_t>(counter.required());
  }

  ExecSpace m_exec;
  MachineTraits m_machine;
};

/// Matrices (batch, head) of `rows` rows, padded so that they can be factors and targets of products of tiles.
template <class A>
struct Matrices {
  A* data = nullptr;
  std::int64_t heads = 0;
  int rows = 0, columns = 0, ld = 0;

  Matrices() = default;
  /// In memory from `begin` on, which may be nowhere.
  Matrices(A* begin, std::int64_t heads_, std::int64_t rows_, std::int64_t columns_)
      : data(begin),
        heads(heads_),
        rows(static_cast<int>(rows_)),
        columns(static_cast<int>(columns_)),
        ld(padded_columns<A>(columns_)) {}
  Matrices(ArenaCursor& arena, std::int64_t batch, std::int64_t heads_, std::int64_t rows_, std::int64_t columns_)
      : heads(heads_),
        rows(static_cast<int>(rows_)),
        columns(static_cast<int>(columns_)),
        ld(padded_columns<A>(columns_)) {
    data = arena.take<A>(batch * heads * size());
  }
  KOKKOS_FUNCTION std::int64_t size() const { return static_cast<std::int64_t>(padded_rows(rows)) * ld; }
  KOKKOS_FUNCTION A* at(std::int64_t b, std::int64_t h) const { return data + (b * heads + h) * size(); }

  template <class T, class ExecSpace>
  TensorRef<T, 4, ExecSpace> ref(std::int64_t batch) const {
    return {data, {batch, heads, rows, columns}, {heads * size(), size(), ld, 1}};
  }
};

/// C = (or +=) A B of matrices in memory, all padded.
template <class Team, class A>
KOKKOS_FUNCTION void product(const Team& team, int m, int n, int inner, Factor<A> a, const A* b, int ldb, A* c, int ldc,
                             Store store = Store::overwrite) {
  multiply(team, m, n, Product<A>{a, b, ldb, inner}, Target<A>{.c = c, .ldc = ldc, .store = store});
  team.barrier();
}

/// Rows of a tensor of the caller as a tile.
template <class Team, class A>
KOKKOS_FUNCTION void load_rows(const Team& team, const StoredTensor<A>& t, std::int64_t b, std::int64_t h,
                               std::int64_t begin, int rows, int columns, A* to, int ld) {
  with_stride<Team>(t.element_stride, [&](auto element) {
    for_each_in_rows(team, rows, columns, [&](int r) {
      const A* x = t.template row<A>(b, h, begin + r);
      A* y = to + r * ld;
      return [=](int j) { y[j] = x[j * element]; };
    });
  });
  team.barrier();
}
template <class Team, class A>
KOKKOS_FUNCTION void store_rows(const Team& team, const A* from, int ld, const StoredTensor<A>& t, std::int64_t b,
                                std::int64_t h, std::int64_t begin, int rows, int columns) {
  with_stride<Team>(t.element_stride, [&](auto element) {
    for_each_in_rows(team, rows, columns, [&](int r) {
      const A* x = from + r * ld;
      A* y = t.template row<A>(b, h, begin + r);
      return [=](int j) { y[j * element] = x[j]; };
    });
  });
  team.barrier();
}

[[noreturn]] inline void refuse_plain(const char* name, const char* because, const char* what) {
  throw InvalidArgument(
      message("LinAttn: ", name, " is for full attention of whole sequences and has no ", what, ": ", because));
}
[[noreturn]] inline void refuse_packed(const char* name, const char* because) {
  refuse_plain(name, because, "packed sequences");
}

/// Gradients that a baseline has not.
template <class ExecSpace, class T>
void require_plain_gradients(const char* name, const Gradients<ExecSpace, T>& g) {
  if (g.query_parameter.present() || g.key_parameter.present() || g.constant.present() || g.scale.present() ||
      g.diag_r.present() || g.diag_p.present() || g.state.S.present() || g.state.z.present() || g.state.t.present())
    throw InvalidArgument(message("LinAttn: ", name, " has gradients of q, k and v only"));
}

/// What a baseline for full attention takes, beside the extents. `because` says what stands in the way.
template <class ExecSpace, class T>
void require_plain(const char* name, const char* because, const Inputs<ExecSpace, T>& in, const Problem& p) {
  const auto refuse = [&](const char* what) { refuse_plain(name, because, what); };
  if (in.key_mask.present()) refuse("key mask");
  if (p.packed()) refuse("packed sequences");
  const auto& s = in.state;
  if (s.S.present() || s.z.present() || s.shift.present() || s.t.present() || s.m.present()) refuse("state");
  constexpr std::int64_t largest = 1 << 16;
  if (p.d > largest || p.dv > largest)
    throw InvalidArgument(
        message("LinAttn: rows of at most ", largest, " entries are supported, found D=", p.d, " Dv=", p.dv));
}

/// A part of a workspace for a call inside.
template <class ExecSpace>
Workspace<ExecSpace> part(std::byte* data, std::size_t bytes) {
  return Kokkos::View<std::byte*, typename ExecSpace::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(data,
                                                                                                             bytes);
}

}  // namespace LinAttn::baselines::detail
