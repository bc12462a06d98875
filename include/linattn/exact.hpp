// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/inputs.hpp>
#include <linattn/launch.hpp>
#include <linattn/local_softmax.hpp>
#include <linattn/local_softmax/decode.hpp>
#include <linattn/variant.hpp>
#include <linattn/workspace.hpp>
#include <utility>

/// \file exact.hpp
/// Exact attention, from the arguments of a public call to kernels.

namespace LinAttn::detail {

/// Extents that tiles can have.
template <class V>
void require_exact(const V& variant, const Problem& problem, bool causal) {
  problem.validate(causal);
  validate_variant<Kokkos::DefaultHostExecutionSpace>(variant, problem, Pass::forward, causal);
  constexpr std::int64_t largest = 1 << 16;
  if (problem.d > largest || problem.dv > largest)
    throw InvalidArgument(message("LinAttn: rows of at most ", largest, " entries are supported, found D=", problem.d,
                                  " Dv=", problem.dv));
}

template <ExactVariant V>
[[noreturn]] void refuse_of_exact(const char* what) {
  throw InvalidArgument(message("LinAttn: ", V::name, " is normalised and has no ", what));
}

/// Options that have no meaning here are those that linear attention would refuse, too, or have their default.
template <ExactVariant V>
void require_exact_options(const Options& options) {
  if (!options.normalise.value_or(true)) refuse_of_exact<V>("form without normalisation");
  if (!(options.dropout.p == 0)) refuse_of_exact<V>("dropout");
  if (options.center_v) refuse_of_exact<V>("center_v");
  if (options.small_normaliser == SmallNormaliser::clamp) refuse_of_exact<V>("small_normaliser clamp");
  for (const auto& [name, wish] : {std::pair{"segments", options.segments}, {"tiles", options.tiles}})
    if (wish < 0)
      throw InvalidArgument(message("LinAttn: ", name, " must be positive (0 lets the plan decide), found ", wish));
  if (!(options.least_normaliser >= 0))
    throw InvalidArgument(message("LinAttn: least_normaliser must not be negative, found ", options.least_normaliser));
}

/// One call of one pass of exact attention, for sums of type A and any storage that is summed in it.
template <class A, class ExecSpace, ExactVariant V>
class ExactCall {
 public:
  ExactCall(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass, Storage storage,
            const Options& options)
      : m_exec(exec), m_problem(problem), m_softmax(make(exec, variant, problem, pass, storage, options)) {}

  const Plan& plan() const { return m_softmax.plan(); }
  const Problem& problem() const { return m_problem; }

  std::size_t workspace_bytes() {
    ArenaCursor counter;
    place(counter);
    return counter.required();
  }
  void use_workspace(const Workspace<ExecSpace>& workspace) {
    const std::size_t needed = workspace_bytes();
    require_size(workspace, needed, m_problem.to_string());
    if (needed == 0) return;
    require_memory(workspace);
    ArenaCursor arena(workspace.data());
    place(arena);
  }

  /// Enters what the caller gave, checked, into the arguments.
  template <class T>
  void bind(const Inputs<ExecSpace, T>& in, const Saved<ExecSpace, T>& saved) {
    refuse_state("initial state", in.state);
    refuse_state("final state", saved.state);
    if (saved.smallest.present()) refuse("row sums that can vanish (Saved::smallest)");
    if (saved.centred.present()) refuse("centred rows (Saved::centred)");
    if (saved.linear.present()) refuse("linear branch (Saved::linear)");
    auto& args = m_softmax.arguments();
    args.q = StoredTensor<A>(in.q);
    args.k = StoredTensor<A>(in.k);
    args.v = StoredTensor<A>(in.v);
    args.o = StoredTensor<A>(saved.o);
    if (saved.denominator.present()) args.logsums = RowTensor<A>(saved.denominator);
    bind_visibility(m_exec, in, m_problem, args.causal, m_device_offsets, args);
  }

  void launch_forward() { m_softmax.launch_forward(); }

  template <class T>
  void launch_backward(const Cotangents<ExecSpace, T>& cotangents, const Gradients<ExecSpace, T>& gradients) {
    refuse_state("cotangent of the final state", cotangents.state);
    refuse_state("gradient of the initial state", gradients.state);
    auto& args = m_softmax.arguments();
    args.d_o = StoredTensor<A>(cotangents.o);
    args.d_q = StoredTensor<A>(gradients.q);
    args.d_k = StoredTensor<A>(gradients.k);
    args.d_v = StoredTensor<A>(gradients.v);
    m_softmax.launch_backward();
  }

 private:
  [[noreturn]] static void refuse(const char* what) { refuse_of_exact<V>(what); }
  template <class StateRef>
  static void refuse_state(const char* name, const StateRef& state) {
    if (state.S.present() || state.z.present() || state.shift.present() || state.t.present() || state.m.present())
      throw InvalidArgument(message("LinAttn: ", V::name, " has no state of a size that does not grow, found: ", name,
                                    "; step() takes a KeyValueCache"));
  }

  static LocalSoftmax<A, ExecSpace> make(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
                                         Storage storage, const Options& options) {
    require_exact(variant, problem, options.causal);
    require_exact_options<V>(options);
    return {exec, variant.score_scale(problem.d), problem, pass, storage, options.causal, options.chunk};
  }

  void place(ArenaCursor& arena) {
    m_device_offsets = place_offsets<ExecSpace>(arena, m_problem);
    m_softmax.place(arena);
  }

  ExecSpace m_exec;
  Problem m_problem;
  LocalSoftmax<A, ExecSpace> m_softmax;
  std::int64_t* m_device_offsets = nullptr;
};

/// Everything between the public function and the kernels of a step over a cache of problem.nk positions.
template <class A, class ExecSpace, ExactVariant V>
class ExactStep {
 public:
  ExactStep(const ExecSpace& exec, const V& variant, const Problem& problem) : m_exec(exec), m_problem(problem) {
    if (problem.packed() || problem.nq != 1)
      throw InvalidArgument(message("LinAttn: a step takes one query of every sequence and a cache of Nk positions, found ",
                                    problem.to_string()));
    require_exact(variant, problem, false);
    auto& a = m_args;
    a.sequences = problem.batch;
    a.heads = problem.heads;
    a.kv_heads = problem.kv_heads;
    a.group = problem.group();
    a.capacity = problem.nk;
    a.d = static_cast<int>(problem.d);
    a.dv = static_cast<int>(problem.dv);
    a.scale = score_scale_as<A>(variant.score_scale(problem.d));
    a.plan = make_decode_plan(problem, machine_of(exec));
    a.split = decode_split;
    ArenaCursor counter;
    DecodeRows<A>(counter, a);
    a.worker_bytes = static_cast<std::int64_t>(counter.required());
  }

  const Plan& plan() const { return m_args.plan; }

  std::size_t workspace_bytes() {
    ArenaCursor counter;
    place(counter);
    return counter.required();
  }

  template <class T>
  void run(const Token<ExecSpace, T>& token, const KeyValueCache<ExecSpace, T>& cache,
           const TensorRef<T, 3, ExecSpace>& o, const Workspace<ExecSpace>& workspace) {
    const Problem& p = m_problem;
    auto& a = m_args;
    require_output("o", o, {p.batch, p.heads, p.dv});
    require_output("k of the cache", cache.k, {p.batch, p.kv_heads, p.nk, p.d});
    require_output("v of the cache", cache.v, {p.batch, p.kv_heads, p.nk, p.dv});
    require_output("length of the cache", cache.length, {p.batch});
    if (token.key_mask.present()) {
      require_shape("key_mask", token.key_mask, {p.batch});
      a.key_mask = token.key_mask.data();
      a.mask_stride = token.key_mask.stride(0);
    }
    require_size(workspace, workspace_bytes(), "a step of " + p.to_string());
    if (p.batch == 0) return;
    a.length = cache.length.data();
    a.length_stride = cache.length.stride(0);
    if (p.heads > 0) {
      require_memory(workspace);
      ArenaCursor arena(workspace.data());
      place(arena);
      a.q = StoredTensor<A>(token.q);
      a.k = StoredTensor<A>(token.k);
      a.v = StoredTensor<A>(token.v);
      a.o = StoredTensor<A>(o);
      a.cache_k = StoredTensor<A>(cache.k);
      a.cache_v = StoredTensor<A>(cache.v);
      launch_workers(m_exec, "LinAttn::step::splits", a.plan.workers, a.plan, DecodeSplits<A>{a, a.plan.workers});
      if (p.dv > 0) launch_range("LinAttn::step::output", p.batch * p.heads, DecodeOutput<A>{a});
    }
    launch_range("LinAttn::step::length", p.batch, DecodeLength<A>{a});
  }

 private:
  template <class Kernel>
  void launch_range(const char* label, std::int64_t count, const Kernel& kernel) {
    launch(label, Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, count), kernel);
  }

  void place(ArenaCursor& arena) {
    auto& a = m_args;
    const std::int64_t parts = a.sequences * a.plan.segments * a.heads;
    a.memory = arena.take<std::byte>(a.worker_bytes * a.plan.workers);
    a.maxima = arena.take<A>(parts);
    a.sums = arena.take<A>(parts);
    a.numerators = arena.take<A>(parts * a.dv);
  }

  ExecSpace m_exec;
  Problem m_problem;
  DecodeArguments<A> m_args{};
};

/// The extents of a step with a cache, checked.
template <class ExecSpace, class T>
Problem problem_of(const Token<ExecSpace, T>& token, const KeyValueCache<ExecSpace, T>& cache) {
  require_present(token);
  if (!cache.k.present() || !cache.v.present() || !cache.length.present())
    throw InvalidArgument("LinAttn: a step of exact attention needs k, v and length of a cache");
  Problem p;
  p.batch = token.q.extent(0);
  p.heads = token.q.extent(1);
  p.kv_heads = token.k.extent(1);
  p.nq = 1;
  p.nk = cache.k.extent(2);
  p.d = token.q.extent(2);
  p.dv = token.v.extent(2);
  require_memory("q", token.q);
  require_shape("k", token.k, {p.batch, p.kv_heads, p.d});
  require_shape("v", token.v, {p.batch, p.kv_heads, p.dv});
  return p;
}

}  // namespace LinAttn::detail
