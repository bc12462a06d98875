// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <linattn/call.hpp>
#include <linattn/engine/engine.hpp>
#include <linattn/engine/step.hpp>
#include <linattn/launch.hpp>
#include <linattn/plan.hpp>
#include <linattn/rows.hpp>
#include <linattn/team.hpp>
#include <linattn/tile.hpp>
#include <linattn/variant.hpp>
#include <linattn/workspace.hpp>

/// \file projected.hpp
/// A linear attention whose features are of logits of the rows of q and k, not of their entries: see Performer.
///
///     forward     u_m = w_m . y - |y|^2 / 2        y = x c, c = D^(-1/4)
///     backward    dx = c sum_m du_m w_m - c^2 x sum_m du_m
///
/// Before the linear attention one kernel each forms the logits of queries (B,H,Nq,M) and keys (B,Hkv,Nk,M), in the type
/// of the sums, in the workspace; after its backward pass one kernel each brings their gradients back. Rows are
/// independent of each other. Hidden keys are never read; a row all of whose logits have gradient 0 is not read either.

namespace LinAttn::detail {

/// Rows of q or k, their logits, and what is to be done with them.
template <class A>
struct ProjectionArguments {
  StoredTensor<A> x{};          // (batch, head, row) -> D
  StoredTensor<A> d_x{};        // likewise; pull_back: written
  A* logits = nullptr;          // (batch, head, row) -> M; project: u, written; pull_back: du, read
  const A* weights = nullptr;   // (M, D): c w, rows padded
  const A* weights_t = nullptr; // (D, M): its transpose, rows padded
  A square = A(0);              // c^2
  const std::uint8_t* key_mask = nullptr;  // (batch, row); nullptr: every row is visible
  std::int64_t mask_batch_stride = 0, mask_stride = 0;
  std::int64_t batch = 0, heads = 0, rows = 0;
  int d = 0, features = 0;
  int chunk = 1;  // rows of a tile
  bool in_scratch = false;
  std::size_t tile_bytes = 0;
  std::byte* worker_memory = nullptr;

  KOKKOS_FORCEINLINE_FUNCTION std::int64_t tiles() const { return (rows + chunk - 1) / chunk; }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t tasks() const { return batch * heads * tiles(); }
};

/// Tiles of one worker, padded as in engine/arguments.hpp.
template <class A>
struct ProjectionTiles {
  int ldd = 0, ldm = 0;
  A* rows = nullptr;    // (C, D): x, or its gradient
  A* logits = nullptr;  // (C, M): w . y, or du
  A* sums = nullptr;    // (C): |x|^2, or sum_m du_m
  int* counts = nullptr;  // (C): whether a row is to be read

  template <class Args>
  KOKKOS_FUNCTION ProjectionTiles(ArenaCursor& arena, const Args& args) {
    const int c = padded_rows(args.chunk);
    ldd = padded_columns<A>(args.d);
    ldm = padded_columns<A>(args.features);
    rows = arena.take<A>(std::int64_t(c) * ldd);
    logits = arena.take<A>(std::int64_t(c) * ldm);
    sums = arena.take<A>(c);
    counts = arena.take<int>(c);
  }
};

/// c w in both orders, zero in the padding.
template <class A>
struct ConvertProjection {
  Projection w;
  double factor;
  int d, features, ldd, ldm;
  A *weights, *weights_t;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t straight = std::int64_t(features) * ldd;
    if (i < straight) {
      const std::int64_t m = i / ldd, j = i % ldd;
      weights[i] = j < d ? static_cast<A>(w(m, j) * factor) : A(0);
    } else {
      const std::int64_t at = i - straight, j = at / ldm, m = at % ldm;
      weights_t[at] = m < features ? static_cast<A>(w(m, j) * factor) : A(0);
    }
  }
};

/// Workers at all tiles of rows. On the host a worker is an index, on a device a team.
template <class ExecSpace, class A, bool PullsBack>
struct ProjectionWorkers {
  ProjectionArguments<A> args;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}, nullptr); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    std::byte* scratch =
        args.in_scratch ? static_cast<std::byte*>(member.team_shmem().get_shmem(args.tile_bytes)) : nullptr;
    work(member.league_rank(), DeviceTeam<Member>{member, false}, scratch);
  }

  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team, std::byte* scratch) const {
    std::byte* memory = scratch ? scratch : args.worker_memory + worker * static_cast<std::int64_t>(args.tile_bytes);
    // padding takes part in vector arithmetic and must hold numbers
    for_each(team, static_cast<int>(args.tile_bytes / sizeof(int)),
             [&](int i) { reinterpret_cast<int*>(memory)[i] = 0; });
    team.barrier();
    ArenaCursor arena(memory);
    const ProjectionTiles<A> tiles(arena, args);
    for (std::int64_t task = worker; task < args.tasks(); task += workers) {
      const std::int64_t unit = task / args.tiles(), begin = task % args.tiles() * args.chunk;
      const std::int64_t left = args.rows - begin;
      const int count = static_cast<int>(left < args.chunk ? left : args.chunk);
      A* const logits = args.logits + (unit * args.rows + begin) * args.features;
      if constexpr (PullsBack)
        pull_back(team, tiles, unit / args.heads, unit % args.heads, begin, count, logits);
      else
        project(team, tiles, unit / args.heads, unit % args.heads, begin, count, logits);
      team.barrier();
    }
  }

 private:
  template <class Team>
  KOKKOS_FUNCTION void project(const Team& team, const ProjectionTiles<A>& t, std::int64_t b, std::int64_t head,
                               std::int64_t begin, int count, A* logits) const {
    const auto visible = [=, this](int r) {
      return !args.key_mask || args.key_mask[b * args.mask_batch_stride + (begin + r) * args.mask_stride] != 0;
    };
    const int d = args.d, features = args.features, ldd = t.ldd, ldm = t.ldm;
    A* const rows = t.rows;
    with_storage<A>(args.x.storage, [&]<class S>(std::type_identity<S>) {
      const S* from = args.x.template row<S>(b, head, begin);
      const std::int64_t row = args.x.row_stride;
      with_stride<Team>(args.x.element_stride, [&](auto element) {
        for_each_in_counted_rows(
            team, count, d, visible,
            [=](int r) {
              const S* x = from + r * row;
              A* to = rows + std::int64_t(r) * ldd;
              return [=](int j) { to[j] = static_cast<A>(x[j * element]); };
            },
            [=](int r) { return [=](int j) { rows[std::int64_t(r) * ldd + j] = A(0); }; });
      });
    });
    team.barrier();
    multiply(team, count, features, Product<A>{{rows, ldd, 1}, args.weights_t, ldm, d}, Target<A>{t.logits, ldm});
    sum_rows(team, count, RowSums<A>{rows, ldd, rows, ldd, d}, t.sums);
    team.barrier();
    const A half = A(0.5) * args.square;
    for_each_in_counted_rows(
        team, count, features, visible,
        [=](int r) {
          const A* from = t.logits + std::int64_t(r) * ldm;
          A* to = logits + std::int64_t(r) * features;
          const A less = half * t.sums[r];
          return [=](int m) { to[m] = from[m] - less; };
        },
        [](int) { return [](int) {}; });
  }

  template <class Team>
  KOKKOS_FUNCTION void pull_back(const Team& team, const ProjectionTiles<A>& t, std::int64_t b, std::int64_t head,
                                 std::int64_t begin, int count, const A* d_logits) const {
    const int d = args.d, features = args.features, ldd = t.ldd, ldm = t.ldm;
    for_each_in_rows(team, count, features, [=](int r) {
      const A* from = d_logits + std::int64_t(r) * features;
      A* to = t.logits + std::int64_t(r) * ldm;
      return [=](int m) { to[m] = from[m]; };
    });
    team.barrier();
    multiply(team, count, d, Product<A>{{t.logits, ldm, 1}, args.weights, ldd, features}, Target<A>{t.rows, ldd});
    sum_rows(team, count, RowSums<A>{t.logits, ldm, t.logits, ldm, 0, t.logits, ldm, features}, t.sums);
    for_each(team, count, [=](int r) {
      const A* from = t.logits + std::int64_t(r) * ldm;
      int any = 0;
      for (int m = 0; m < features; ++m) any |= from[m] == A(0) ? 0 : 1;  // a NaN counts
      t.counts[r] = any;
    });
    team.barrier();
    const A square = args.square;
    with_storage<A>(args.x.storage, [&]<class S>(std::type_identity<S>) {  // that of d_x, too
      const S* x = args.x.template row<S>(b, head, begin);
      S* d_x = args.d_x.template row<S>(b, head, begin);
      const std::int64_t row = args.x.row_stride, d_row = args.d_x.row_stride;
      with_stride<Team>(args.x.element_stride, [&](auto element) {
        with_stride<Team>(args.d_x.element_stride, [&](auto d_element) {
          for_each_in_counted_rows(
              team, count, d, [=](int r) { return t.counts[r] != 0; },
              [=](int r) {
                const A* along = t.rows + std::int64_t(r) * ldd;
                const S* from = x + r * row;
                S* to = d_x + r * d_row;
                const A factor = square * t.sums[r];
                return [=](int j) {
                  to[j * d_element] = static_cast<S>(along[j] - factor * static_cast<A>(from[j * element]));
                };
              },
              [=](int r) { return [=](int j) { d_x[r * d_row + j * d_element] = static_cast<S>(A(0)); }; });
        });
      });
    });
  }
};

/// The options of the linear attention: the features' 1 / M goes into the scale of rows that are not normalised.
template <class AnyOptions, ProjectedVariant V>
AnyOptions projected_options(AnyOptions options, const V& variant) {
  options.scale /= static_cast<double>(std::max<std::int64_t>(1, variant.projection.rows()));
  return options;
}
/// The problem that the linear attention sees, checked.
template <class ExecSpace, ProjectedVariant V>
Problem projected_problem(const Problem& problem, const V& variant) {
  variant.projection.template validate<ExecSpace>("projection", problem.d);
  require_rows(problem, variant.projection.rows());
  Problem projected = problem;
  projected.d = variant.projection.rows();
  return projected;
}

/// The kernels of a projection, with what they need of the workspace.
template <class A, class ExecSpace>
class Projector {
 public:
  /// `queries` and `keys`: rows of a head.
  Projector(const ExecSpace& exec, const Projection& projection, const Problem& problem, std::int64_t queries,
            std::int64_t keys)
      : m_exec(exec), m_projection(projection) {
    const double root = problem.d > 0 ? std::sqrt(static_cast<double>(problem.d)) : 1;
    m_factor = 1 / std::sqrt(root);
    m_args.square = static_cast<A>(1 / root);
    m_args.batch = problem.batch;
    m_args.d = static_cast<int>(problem.d);
    m_args.features = static_cast<int>(projection.rows());
    m_plan = make_projection_plan(problem.batch * problem.heads, std::max(queries, keys), machine_of(exec), [this](int chunk) {
      ProjectionArguments<A> trial = m_args;
      trial.chunk = chunk;
      ArenaCursor counter;
      ProjectionTiles<A>(counter, trial);
      return counter.required();
    });
    m_args.chunk = m_plan.chunk;
    m_args.in_scratch = m_plan.tiles_in_scratch;
    m_args.tile_bytes = m_plan.tile_bytes;
  }

  /// Takes the weights and the tiles of the workers from the arena.
  void place(ArenaCursor& arena) {
    m_weights = arena.take<A>(std::int64_t(m_args.features) * padded_columns<A>(m_args.d));
    m_weights_t = arena.take<A>(std::int64_t(m_args.d) * padded_columns<A>(m_args.features));
    m_args.weights = m_weights;
    m_args.weights_t = m_weights_t;
    if (!m_plan.tiles_in_scratch)
      m_args.worker_memory = arena.take<std::byte>(static_cast<std::int64_t>(m_plan.tile_bytes) * m_plan.workers);
  }

  void convert(const char* label) const {
    const int ldd = padded_columns<A>(m_args.d), ldm = padded_columns<A>(m_args.features);
    if (m_args.d == 0) return;
    launch(label,
           Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(
               m_exec, 0, std::int64_t(m_args.features) * ldd + std::int64_t(m_args.d) * ldm),
           ConvertProjection<A>{m_projection, m_factor, m_args.d, m_args.features, ldd, ldm, m_weights, m_weights_t});
  }

  /// Logits (B,heads,rows,M) of x; `mask` says which rows of a batch entry are read.
  struct Mask {
    const std::uint8_t* data = nullptr;
    std::int64_t batch_stride = 0, stride = 0;
  };
  void project(const char* label, const StoredTensor<A>& x, std::int64_t heads, std::int64_t rows, A* logits,
               const Mask& mask) const {
    ProjectionArguments<A> args = m_args;
    args.x = x;
    args.heads = heads;
    args.rows = rows;
    args.logits = logits;
    args.key_mask = mask.data;
    args.mask_batch_stride = mask.batch_stride;
    args.mask_stride = mask.stride;
    run<false>(label, args);
  }
  /// d_x from the gradients of the logits.
  void pull_back(const char* label, const StoredTensor<A>& x, std::int64_t heads, std::int64_t rows, A* d_logits,
                 const StoredTensor<A>& d_x) const {
    ProjectionArguments<A> args = m_args;
    args.x = x;
    args.d_x = d_x;
    args.heads = heads;
    args.rows = rows;
    args.logits = d_logits;
    run<true>(label, args);
  }

 private:
  template <bool PullsBack>
  void run(const char* label, const ProjectionArguments<A>& args) const {
    const int workers = static_cast<int>(std::min<std::int64_t>(args.tasks(), m_plan.workers));
    if (workers == 0) return;
    launch_workers(m_exec, label, workers, m_plan, ProjectionWorkers<ExecSpace, A, PullsBack>{args, workers});
  }

  ExecSpace m_exec;
  Projection m_projection;
  double m_factor = 1;
  Plan m_plan{};
  ProjectionArguments<A> m_args{};
  A *m_weights = nullptr, *m_weights_t = nullptr;
};

/// Rows of numbers one after the other, (batch, heads, rows, columns).
template <class A>
StoredTensor<A> packed_rows(A* data, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
  StoredTensor<A> t;
  t.data = data;
  t.batch_stride = heads * rows * columns;
  t.head_stride = rows * columns;
  t.row_stride = columns;
  t.element_stride = 1;
  return t;
}

/// One call of one pass; as Call, whose linear attention sees the logits.
template <class A, class ExecSpace, ProjectedVariant V>
class ProjectedCall : public Call<A, ExecSpace, V> {
  using Base = Call<A, ExecSpace, V>;

 public:
  ProjectedCall(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass, Storage storage,
                const Options& options)
      : Base(exec, variant, projected_problem<ExecSpace>(problem, variant), pass, storage, projected_options(options, variant)),
        m_problem(problem),
        m_pass(pass),
        m_projector(exec, variant.projection, problem, problem.nq, problem.nk) {}

  const Problem& problem() const { return m_problem; }

  std::size_t workspace_bytes() {
    return Base::workspace_bytes([this](ArenaCursor& arena) { place_logits(arena); });
  }
  void use_workspace(const Workspace<ExecSpace>& workspace) {
    require_size(workspace, workspace_bytes(), m_problem.to_string());
    Base::use_workspace(workspace, [this](ArenaCursor& arena) { place_logits(arena); });
  }

  void launch_forward() {
    project("LinAttn::forward::projection", "LinAttn::forward::project_queries", "LinAttn::forward::project_keys");
    Base::launch_forward();
  }

  void launch_backward(const Gradients<ExecSpace, A>& parameters) {
    auto& args = this->arguments();
    const StoredTensor<A> q = args.q, k = args.k, d_q = args.d_q, d_k = args.d_k;
    const Problem& p = m_problem;
    project("LinAttn::backward::projection", "LinAttn::backward::project_queries", "LinAttn::backward::project_keys");
    if (d_q) args.d_q = packed_rows(m_d_queries, p.heads, p.nq, features());
    if (d_k) args.d_k = packed_rows(m_d_keys, p.kv_heads, p.nk, features());
    Base::launch_backward(parameters);
    if (d_q) m_projector.pull_back("LinAttn::backward::query_logits", q, p.heads, p.nq, m_d_queries, d_q);
    if (d_k) m_projector.pull_back("LinAttn::backward::key_logits", k, p.kv_heads, p.nk, m_d_keys, d_k);
  }

 private:
  std::int64_t features() { return this->arguments().features; }

  void place_logits(ArenaCursor& arena) {
    const std::int64_t queries = m_problem.batch * m_problem.heads * m_problem.nq * features();
    const std::int64_t keys = m_problem.batch * m_problem.kv_heads * m_problem.nk * features();
    m_projector.place(arena);
    m_queries = arena.take<A>(queries);
    m_keys = arena.take<A>(keys);
    if (m_pass != Pass::backward) return;
    m_d_queries = arena.take<A>(queries);
    m_d_keys = arena.take<A>(keys);
  }

  /// Logits of q and k, which then stand for them.
  void project(const char* convert, const char* of_queries, const char* of_keys) {
    auto& args = this->arguments();
    const Problem& p = m_problem;
    m_projector.convert(convert);
    m_projector.project(of_queries, args.q, p.heads, p.nq, m_queries, {});
    m_projector.project(of_keys, args.k, p.kv_heads, p.nk, m_keys,
                        {args.key_mask, args.mask_batch_stride, args.mask_stride});
    args.q = packed_rows(m_queries, p.heads, p.nq, features());
    args.k = packed_rows(m_keys, p.kv_heads, p.nk, features());
  }

  Problem m_problem;
  Pass m_pass;
  Projector<A, ExecSpace> m_projector;
  A *m_queries = nullptr, *m_keys = nullptr, *m_d_queries = nullptr, *m_d_keys = nullptr;
};

/// Everything between the public function and the kernels of a step; as StepCall. Heads are the rows of a token.
template <class A, class ExecSpace, ProjectedVariant V>
class ProjectedStep : public StepCall<A, ExecSpace, V> {
  using Base = StepCall<A, ExecSpace, V>;

 public:
  ProjectedStep(const ExecSpace& exec, const V& variant, const Problem& problem, const StepOptions& options)
      : Base(exec, variant, projected_problem<ExecSpace>(problem, variant), projected_options(options, variant)),
        m_problem(problem),
        m_features(variant.projection.rows()),
        m_projector(exec, variant.projection, problem, problem.heads, problem.kv_heads) {}

  std::size_t workspace_bytes() {
    return Base::workspace_bytes([this](ArenaCursor& arena) { place_logits(arena); });
  }

  template <class T>
  void run(const Token<ExecSpace, T>& token, const ConstState<ExecSpace, T>& before, const State<ExecSpace, T>& after,
           const TensorRef<T, 3, ExecSpace>& o, const Workspace<ExecSpace>& workspace) {
    require_size(workspace, workspace_bytes(), "a step of " + m_problem.to_string());
    Base::run(token, before, after, o, workspace, [this](ArenaCursor& arena, auto& args) {
      const Problem& p = m_problem;
      place_logits(arena);
      m_projector.convert("LinAttn::step::projection");
      m_projector.project("LinAttn::step::project_queries", heads_as_rows(args.q), 1, p.heads, m_queries, {});
      m_projector.project("LinAttn::step::project_keys", heads_as_rows(args.k), 1, p.kv_heads, m_keys,
                          {args.key_mask, args.mask_stride, 0});
      args.q = packed_rows(m_queries, p.heads, 1, m_features);
      args.k = packed_rows(m_keys, p.kv_heads, 1, m_features);
    });
  }

 private:
  static StoredTensor<A> heads_as_rows(StoredTensor<A> x) {
    x.row_stride = x.head_stride;
    return x;
  }
  void place_logits(ArenaCursor& arena) {
    m_projector.place(arena);
    m_queries = arena.take<A>(m_problem.batch * m_problem.heads * m_features);
    m_keys = arena.take<A>(m_problem.batch * m_problem.kv_heads * m_features);
  }

  Problem m_problem;
  std::int64_t m_features;
  Projector<A, ExecSpace> m_projector;
  A *m_queries = nullptr, *m_keys = nullptr;
};

}  // namespace LinAttn::detail
