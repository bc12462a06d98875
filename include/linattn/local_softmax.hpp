// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <linattn/block_diagonal.hpp>
#include <linattn/call.hpp>
#include <linattn/launch.hpp>
#include <linattn/local_softmax/walker.hpp>
#include <linattn/workspace.hpp>

/// \file local_softmax.hpp
/// Exact attention, forward and backward, from the arguments of a public call to kernels: inside blocks, joined to a
/// linear attention, or alone and of whole sequences.

namespace LinAttn::detail {

/// Workers walking all tasks of one kind. On the host a worker is an index, on a device a team.
template <class ExecSpace, class A>
struct SoftmaxWorkers {
  SoftmaxArguments<A> args;
  SoftmaxWalk walk;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}, nullptr); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    std::byte* scratch = args.plan.tiles_in_scratch
                             ? static_cast<std::byte*>(member.team_shmem().get_shmem(args.plan.tile_bytes))
                             : nullptr;
    work(member.league_rank(), DeviceTeam<Member>{member, false}, scratch);
  }

  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team, std::byte* scratch) const {
    std::byte* memory = scratch ? scratch : args.worker_memory + worker * static_cast<std::int64_t>(args.plan.tile_bytes);
    // padding takes part in vector arithmetic and must hold numbers
    for_each(team, static_cast<int>(args.plan.tile_bytes / sizeof(int)),
             [&](int i) { reinterpret_cast<int*>(memory)[i] = 0; });
    team.barrier();
    ArenaCursor arena(memory);
    const SoftmaxTiles<A> tiles(arena, args, walk);
    SoftmaxWalker<Team, A> walker(team, args, tiles);
    for (std::int64_t task = worker; task < args.tasks; task += workers) walker.run(walk, task);
  }
};

/// dr and dp of a head and column from their parts: parts of r less `less` times those of p, or those of p.
template <class ExecSpace>
struct SumColumnParts {
  const double *parts, *less;  // (sequence, kv_heads, runs, group, Dv); nullptr: none
  double* gradient;
  std::int64_t head_stride, column_stride;
  std::int64_t sequences, kv_heads, runs, group, dv;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = i / dv, column = i % dv;
    double total = 0;
    for (std::int64_t b = 0; b < sequences; ++b)
      for (std::int64_t s = 0; s < runs; ++s) {
        const std::int64_t at = (((b * kv_heads + head / group) * runs + s) * group + head % group) * dv + column;
        total += parts[at] - (less ? less[at] : 0.0);
      }
    gradient[head * head_stride + column * column_stride] = total;
  }
};

/// The scale of scores as kernels have it.
template <class A>
A score_scale_as(double scale) {
  const A rounded = static_cast<A>(scale);
  if (!(rounded > A(0)) || !(rounded - rounded == A(0)))
    throw InvalidArgument(
        message("LinAttn: the scale of the scores must be positive and finite in the precision of the sums, found ", scale));
  return rounded;
}

/// One call of one pass of exact attention, for sums of type A and any storage that is summed in it.
template <class A, class ExecSpace>
class LocalSoftmax {
 public:
  using Args = SoftmaxArguments<A>;

  /// Of whole sequences, alone. Makes the plan.
  LocalSoftmax(const ExecSpace& exec, double scale, const Problem& problem, Pass pass, Storage storage, bool causal,
               int chunk)
      : m_exec(exec), m_problem(problem), m_pass(pass), m_wants_factors(false) {
    m_args.scale = score_scale_as<A>(scale);
    make_plan(std::numeric_limits<std::int64_t>::max(), storage, causal, chunk);
  }

  /// Inside blocks, joined. Checks the variant's term and makes the plan.
  LocalSoftmax(const ExecSpace& exec, const BlockDiagonal& term, const Problem& problem, Pass pass, Storage storage,
               bool causal, int chunk, bool wants_factors)
      : m_exec(exec), m_problem(problem), m_pass(pass), m_wants_factors(wants_factors) {
    if (term.block < 0)
      throw InvalidArgument(message("LinAttn: block must be positive (0: D), found ", term.block));
    if (!causal && !problem.packed() && problem.nq != problem.nk)
      throw InvalidArgument(message("LinAttn: blocks of keys need Nq = Nk without a causal mask, found Nq = ", problem.nq,
                                    " and Nk = ", problem.nk));
    if (term.combine != Combine::average) term.r.template validate<ExecSpace>("diag_r", problem.heads, problem.dv);
    if (term.combine == Combine::scale) term.p.template validate<ExecSpace>("diag_p", problem.heads, problem.dv);
    Args& a = m_args;
    a.joined = true;
    a.scale = problem.d > 0 ? static_cast<A>(1 / std::sqrt(static_cast<double>(problem.d))) : A(1);
    a.combine = term.combine;
    a.r = term.r;
    a.p = term.p;
    make_plan(term.block > 0 ? term.block : std::max<std::int64_t>(1, problem.d), storage, causal, chunk);
  }

  const Plan& plan() const { return m_args.plan; }
  Args& arguments() { return m_args; }

  /// Takes from the arena what only this branch needs.
  void place(ArenaCursor& arena) {
    Args& a = m_args;
    if (!a.plan.tiles_in_scratch)
      a.worker_memory = arena.take<std::byte>(static_cast<std::int64_t>(a.plan.tile_bytes) * a.plan.workers);
    if (m_pass != Pass::backward) return;
    if (a.tiles_of_block > 1) {
      const auto rows = [&] {
        return RowTensor<A>(arena.take<A>(m_problem.batch * a.heads * a.nq), a.heads * a.nq, a.nq, 1);
      };
      if (a.joined) a.logsums = rows();
      a.deltas = rows();
    }
    if (m_wants_factors) {
      a.r_parts = arena.take<double>(a.tasks * a.group * a.dv);
      a.p_parts = arena.take<double>(a.tasks * a.group * a.dv);
    }
  }

  /// Rows, masks and offsets as `linear` has them, whose offsets are those that kernels can read. `linear_dots` (B,H,Nq)
  /// receives in the backward pass what the linear branch needs.
  template <class LinearArguments>
  void bind(const LinearArguments& linear, A* linear_dots) {
    Args& a = m_args;
    a.q = linear.q;
    a.k = linear.k;
    a.v = linear.v;
    a.o = linear.o;
    a.d_o = linear.d_o;
    a.d_q = linear.d_q;
    a.d_k = linear.d_k;
    a.d_v = linear.d_v;
    a.key_mask = linear.key_mask;
    a.mask_batch_stride = linear.mask_batch_stride;
    a.mask_stride = linear.mask_stride;
    a.cu_seqlens_q = linear.cu_seqlens_q;
    a.cu_seqlens_k = linear.cu_seqlens_k;
    a.linear_dots = {linear_dots, a.heads * a.nq, a.nq, 1};
  }
  void keep_linear(const StoredTensor<A>& linear) { m_args.linear = linear; }

  /// Alone writes o, joined adds o_block to the o_linear that o holds.
  void launch_forward() {
    if (m_args.nq > 0)
      walk(m_args.joined ? "LinAttn::forward::blocks" : "LinAttn::forward::softmax", SoftmaxWalk::output);
  }

  /// Gradients of this branch and, joined, the dots of the other.
  void launch_backward(const TensorRef<double, 2, ExecSpace>& d_r, const TensorRef<double, 2, ExecSpace>& d_p) {
    Args& a = m_args;
    if (!d_r.present() && !d_p.present()) a.r_parts = a.p_parts = nullptr;
    launch_gradients();
    sum_parts(d_r, a.r_parts, a.combine == Combine::ratio ? a.p_parts : nullptr);
    sum_parts(d_p, a.p_parts, nullptr);
  }
  void launch_backward() { launch_gradients(); }

 private:
  void make_plan(std::int64_t block, Storage storage, bool causal, int chunk) {
    Args& a = m_args;
    const Problem& problem = m_problem;
    a.sequences = problem.sequences();
    a.heads = problem.heads;
    a.kv_heads = problem.kv_heads;
    a.group = problem.group();
    a.nq = problem.nq;
    a.nk = problem.nk;
    a.d = static_cast<int>(problem.d);
    a.dv = static_cast<int>(problem.dv);
    a.causal = causal;
    a.host = is_host_space_v<ExecSpace>;
    const std::int64_t longest = std::max<std::int64_t>({1, problem.longest_keys(), problem.longest_queries()});
    a.block = std::min(longest, block);
    a.plan = make_softmax_plan(problem, machine_of(m_exec), {.pass = m_pass,
                                                             .block = a.block,
                                                             .chunk = chunk,
                                                             .stores_native = storage == Storage::native,
                                                             .exact = sizeof(A) >= 8,
                                                             .tile_bytes = [&](const Plan& plan) {
                                                               Args trial = m_args;
                                                               trial.plan = plan;
                                                               return worker_bytes(trial);
                                                             }});
    a.tiles_of_block = (a.block + a.plan.chunk - 1) / a.plan.chunk;
    a.tiles = (longest + a.block - 1) / a.block * a.tiles_of_block;
    a.tasks = a.sequences * a.kv_heads * a.plan.segments;
    constexpr auto most = static_cast<std::size_t>(std::numeric_limits<int>::max());
    if (a.plan.tile_bytes / sizeof(int) > most)
      throw InvalidArgument(message("LinAttn: tiles of ", a.plan.chunk, " rows of D = ", problem.d, " and Dv = ",
                                    problem.dv, " are too large for one worker"));
  }

  std::size_t worker_bytes(const Args& args) const {
    ArenaCursor counter;  // of all gradients those of a block that is one tile need most
    SoftmaxTiles<A>(counter, args, m_pass == Pass::forward ? SoftmaxWalk::output : SoftmaxWalk::block_gradient);
    return counter.required();
  }

  void launch_gradients() {
    Args& a = m_args;
    if (a.tiles_of_block == 1)
      return walk(a.joined ? "LinAttn::backward::block_gradient" : "LinAttn::backward::softmax",
                  SoftmaxWalk::block_gradient);
    if (a.joined)
      walk("LinAttn::backward::block_rows", SoftmaxWalk::row_sum);  // clears the parts, too
    else
      walk("LinAttn::backward::softmax_rows", SoftmaxWalk::row_delta);
    const bool wants_keys = a.d_k || a.d_v;
    if (a.plan.pairs && a.d_q && wants_keys)
      return walk(a.joined ? "LinAttn::backward::block_pairs" : "LinAttn::backward::softmax_pairs",
                  SoftmaxWalk::pair_gradient);
    if (a.d_q)
      walk(a.joined ? "LinAttn::backward::block_queries" : "LinAttn::backward::softmax_queries",
           SoftmaxWalk::row_gradient);
    if (wants_keys)
      walk(a.joined ? "LinAttn::backward::block_keys" : "LinAttn::backward::softmax_keys", SoftmaxWalk::key_gradient);
  }

  void walk(const char* label, SoftmaxWalk kind) {
    Args args = m_args;
    if (kind == SoftmaxWalk::pair_gradient) args.tasks = args.sequences * args.kv_heads;
    if (args.tasks == 0) return;
    const int workers = static_cast<int>(std::min<std::int64_t>(args.tasks, args.plan.workers));
    launch_workers(m_exec, label, workers, args.plan, SoftmaxWorkers<ExecSpace, A>{args, kind, workers});
  }

  void sum_parts(const TensorRef<double, 2, ExecSpace>& gradient, const double* parts, const double* less) {
    if (!gradient.present() || gradient.extent(0) == 0 || gradient.extent(1) == 0) return;
    launch("LinAttn::backward::block_factors",
           Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, m_args.heads * m_args.dv),
           SumColumnParts<ExecSpace>{parts, less, gradient.data(), gradient.stride(0), gradient.stride(1),
                                     m_args.sequences, m_args.kv_heads, m_args.plan.segments, m_args.group, m_args.dv});
  }

  ExecSpace m_exec;
  Problem m_problem;
  Pass m_pass;
  bool m_wants_factors;
  Args m_args{};
};

}  // namespace LinAttn::detail
