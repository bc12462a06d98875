// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/engine/engine.hpp>
#include <linattn/engine/step.hpp>
#include <linattn/exact.hpp>
#include <linattn/joined.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/projected.hpp>
#include <linattn/variant.hpp>
#include <linattn/workspace.hpp>
#include <exception>
#include <string>
#include <type_traits>

/// \file attention.hpp
/// Attention, forward and backward: the public calls.
///
///     o_i = sum_j w_ij v_j / sum_j w_ij        w_ij = phi_q(q_i) . phi_k(k_j)   (affine: + b)
///
/// summed over the visible keys: all of them, or those up to position i + nk - nq under a causal mask.
/// Time O(N R Dv) and memory O(N (D + Dv)) for N tokens and R features; exact attention (Softmax) needs time O(N^2) in the
/// same memory.
///
/// Calls enqueue kernels on the caller's execution-space instance and return; they neither fence nor
/// allocate, except for the overloads without a workspace and check(), which do both and say so. Their arguments
/// are declared in call.hpp. Arguments are
/// non-owning references whose memory must live until the kernels have run; an output must overlap neither
/// an input nor another output, except where said. The same inputs, options
/// and plan give the same bits, whatever the number of threads and (but for step()) the layout of the Views.

namespace LinAttn {

/// How a pass of this problem will be cut into work; of a variant with a local term the linear branch. For Pass::step
/// the problem has Nq = Nk = 1 (exact attention: Nk is the capacity of the cache), and of the options those that
/// StepOptions has count.
/// \throws InvalidArgument for extents, parameters or options that the call itself would refuse
template <class T, class ExecSpace, Variant V>
Plan plan(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
          const Options& options = {});

/// Bytes of workspace that a pass of this problem needs.
/// \throws InvalidArgument as plan()
template <class T, class ExecSpace, Variant V>
std::size_t workspace_size(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
                           const Options& options = {});

/// o = attention(q, k, v) and, where given, the row sums.
///
/// A row that sees no key gives o = 0, and so does one whose row sum is exactly 0 and not clamped. Rows in the
/// future of a causal row are never touched for it: a NaN there stays there. Overwrites `saved`; asynchronous.
///
///     LinAttn::forward<float>(exec, LinAttn::Elu{}, {.q = q, .k = k, .v = v},
///                             {.o = o, .denominator = denominator}, workspace, {.causal = true});
///
/// \throws InvalidArgument if extents do not fit each other, the variant's parameters do not fit the
/// heads, or the workspace is too small; the message names what was expected and found
template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved, const Options& options = {});

/// Gradients of L with respect to the inputs and parameters, given dL/do (B,H,Nq,Dv) and what
/// forward() left in `saved`. With G_i = dO_i / s_i and e_i = -G_i . o_i:
///
///     dQ_i = sum_j (G_i . v_j + e_i) K_j     dK_j = sum_i (G_i . v_j + e_i) Q_i     dV_j = sum_i w_ij G_i
///
/// followed by the pullbacks of the feature maps; exact, through the normalisation. Overwrites what
/// `gradients` names, computes nothing else; asynchronous; no atomics.
///
/// \throws InvalidArgument as forward(), and if a gradient of a parameter is asked for that the
/// variant does not have, or saved parts are missing
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {});

/// As above with dL/do alone.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options = {}) {
  backward<T>(exec, variant, inputs, saved, Cotangents<ExecSpace, T>{d_o, {}}, gradients, workspace, options);
}

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const Options& options = {});

/// As above with dL/do alone.
template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const Options& options = {}) {
  backward<T>(exec, variant, inputs, saved, Cotangents<ExecSpace, T>{d_o, {}}, gradients, options);
}

/// Waits for the kernels of a forward() that was given `saved` and these options, and refuses rows that divide by
/// next to nothing; for variants that record them (see Saved::smallest). Does nothing unless options.small_normaliser is
/// check and rows are normalised. Allocates memory for
/// the records.
///
/// \throws InvalidArgument if `saved.smallest` is missing; naming sequence, head, row and value where
/// |s| / m < options.least_normaliser, s a row sum and m the keys that the row sees, or where s is not finite
template <class T, class ExecSpace>
void check(const ExecSpace& exec, const Saved<ExecSpace, T>& saved, const Options& options = {});

/// One new token of every sequence: o (B,H,Dv) given the sums over all earlier keys, and the sums with its own.
///
///     S' = S + phi(k) v^T     z' = z + phi(k)     o = S'^T phi(q) / (z' . phi(q))
///     affine: t' = t + v, m' = m + 1, + b t' in the numerator, + b m' in the denominator
///
/// Time and memory traffic O(R Dv) a head, whatever the length so far; equals the next row of a causal
/// forward() to rounding, rows whose sum is exactly 0 included. Overwrites `after` (S, z; lln: shift;
/// affine: t, m) and `o`. `before` is left as it is; without it no key came before; it may be the memory of `after`,
/// or else must not overlap it. Gradients are those of backward() with Nq = Nk = 1 and states. Asynchronous.
///
///     LinAttn::step<float>(exec, LinAttn::Elu{}, {.q = q, .k = k, .v = v}, before, after, o, workspace);
///
/// \throws InvalidArgument if extents do not fit each other or the workspace is smaller than
/// workspace_size() says for Pass::step
template <class T, class ExecSpace, LinearVariant V>
void step(const ExecSpace& exec, const V& variant, const std::type_identity_t<Token<ExecSpace, T>>& token,
          const std::type_identity_t<ConstState<ExecSpace, T>>& before,
          const std::type_identity_t<State<ExecSpace, T>>& after,
          const std::type_identity_t<TensorRef<T, 3, ExecSpace>>& o,
          const std::type_identity_t<Workspace<ExecSpace>>& workspace, const StepOptions& options = {});

/// One new token of every sequence of exact attention: its key and value are written behind those of `cache`, and
///
///     o = sum_j exp(scale q . k_j) v_j / sum_j exp(scale q . k_j)
///
/// over all that the cache then holds, as the next row of a causal forward() to rounding. Time and memory traffic
/// O(n (D + Dv)) a head for n tokens so far. A hidden token (Token::key_mask) is not written, but answered. A sequence
/// whose cache has no place left keeps it as it is, and its o is NaN: lengths live where kernels run, and no call waits
/// for them. Asynchronous.
///
///     LinAttn::step<float>(exec, LinAttn::Softmax{}, {.q = q, .k = k, .v = v}, cache, o, workspace);
///
/// \throws InvalidArgument if extents do not fit each other or the workspace is smaller than workspace_size() says for
/// Pass::step and Nk = capacity
template <class T, class ExecSpace, ExactVariant V>
void step(const ExecSpace& exec, const V& variant, const std::type_identity_t<Token<ExecSpace, T>>& token,
          const std::type_identity_t<KeyValueCache<ExecSpace, T>>& cache,
          const std::type_identity_t<TensorRef<T, 3, ExecSpace>>& o,
          const std::type_identity_t<Workspace<ExecSpace>>& workspace);

/// As above with the state in place: `state` is read and then holds the sums with the new token.
template <class T, class ExecSpace, LinearVariant V>
void step_in_place(const ExecSpace& exec, const V& variant, const std::type_identity_t<Token<ExecSpace, T>>& token,
                   const std::type_identity_t<State<ExecSpace, T>>& state,
                   const std::type_identity_t<TensorRef<T, 3, ExecSpace>>& o,
                   const std::type_identity_t<Workspace<ExecSpace>>& workspace, const StepOptions& options = {}) {
  step<T>(exec, variant, token, state.as_const(), state, o, workspace, options);
}

}  // namespace LinAttn

// ---- definitions ----

namespace LinAttn {
namespace detail {
template <class Call, class ExecSpace, class T>
void enter_local(Call& call, const Inputs<ExecSpace, T>& inputs, const Saved<ExecSpace, T>& saved) {
  if constexpr (requires { call.enter_local(inputs, saved); })
    call.enter_local(inputs, saved);
  else if (saved.linear.present())
    throw InvalidArgument("LinAttn: a linear branch is kept where another one joins it (lln-diag), found Saved::linear");
}

inline StepOptions step_options(const Options& options) {
  return {options.normalise, options.scale, options.small_normaliser, options.least_normaliser};
}

/// The call of one pass of a variant.
template <class A, class ExecSpace, class V>
struct CallOfVariant;
template <class A, class ExecSpace, LinearVariant V>
struct CallOfVariant<A, ExecSpace, V> {
  using type = std::conditional_t<has_local_term_v<V>, JoinedCall<A, ExecSpace, V>, Call<A, ExecSpace, V>>;
};
template <class A, class ExecSpace, ProjectedVariant V>
struct CallOfVariant<A, ExecSpace, V> {
  using type = ProjectedCall<A, ExecSpace, V>;
};
template <class A, class ExecSpace, ExactVariant V>
struct CallOfVariant<A, ExecSpace, V> {
  using type = ExactCall<A, ExecSpace, V>;
};
template <class A, class ExecSpace, Variant V>
using CallOf = typename CallOfVariant<A, ExecSpace, V>::type;

/// What of a backward pass only a linear attention has.
template <class Call, class ExecSpace, class T>
void launch_linear_backward(Call& call, const Inputs<ExecSpace, T>& inputs, const Saved<ExecSpace, T>& saved,
                            const Cotangents<ExecSpace, T>& cotangents, const Gradients<ExecSpace, T>& gradients) {
  const Problem& p = call.problem();
  auto& args = call.arguments();
  call.enter_state("cotangent of the final state", cotangents.state, args.last_cotangent, false);
  call.enter_centred(saved.centred);
  enter_local(call, inputs, saved);
  if constexpr (requires { call.enter_factor_gradients(gradients.diag_r, gradients.diag_p, true); })
    call.enter_factor_gradients(gradients.diag_r, gradients.diag_p, saved.linear.present());
  if (gradients.state.S.present() || gradients.state.z.present() || gradients.state.t.present()) {
    if (!args.initial.present)
      throw InvalidArgument("LinAttn: a gradient of the initial state is asked for, but there is none");
    State<ExecSpace, T> target = gradients.state;
    require_output("gradient of S", target.S, {args.sequences, p.kv_heads, args.features, p.dv});
    require_output("gradient of z", target.z, {args.sequences, p.kv_heads, args.features});
    args.initial_gradient.values = decltype(args.initial_gradient.values)(target.S);
    args.initial_gradient.sums = decltype(args.initial_gradient.sums)(target.z);
    if (args.has_constant) {
      require_output("gradient of t", target.t, {args.sequences, p.kv_heads, p.dv});
      args.initial_gradient.value_sums = decltype(args.initial_gradient.value_sums)(target.t);
    }
    args.initial_gradient.present = true;
  }
  args.d_o = decltype(args.d_o)(cotangents.o);
  args.d_q = decltype(args.d_q)(gradients.q);
  args.d_k = decltype(args.d_k)(gradients.k);
  args.d_v = decltype(args.d_v)(gradients.v);
  call.launch_backward({.query_parameter = gradients.query_parameter,
                        .key_parameter = gradients.key_parameter,
                        .constant = gradients.constant,
                        .scale = gradients.scale,
                        .diag_r = gradients.diag_r,
                        .diag_p = gradients.diag_p});
}

/// The step of a variant.
template <class A, class ExecSpace, class V>
struct StepOfVariant;
template <class A, class ExecSpace, LinearVariant V>
struct StepOfVariant<A, ExecSpace, V> {
  using type = StepCall<A, ExecSpace, V>;
};
template <class A, class ExecSpace, ProjectedVariant V>
struct StepOfVariant<A, ExecSpace, V> {
  using type = ProjectedStep<A, ExecSpace, V>;
};
template <class A, class ExecSpace, LinearVariant V>
using StepOf = typename StepOfVariant<A, ExecSpace, V>::type;

template <class A, class ExecSpace, Variant V>
auto step_call(const ExecSpace& exec, const V& variant, const Problem& problem, const Options& options) {
  if constexpr (ExactVariant<V>) {
    require_exact_options<V>(options);
    return ExactStep<A, ExecSpace, V>(exec, variant, problem);
  } else {
    return StepOf<A, ExecSpace, V>(exec, variant, problem, step_options(options));
  }
}
}  // namespace detail

template <class T, class ExecSpace, Variant V>
Plan plan(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
          const Options& options) {
  if (pass == Pass::step)
    return detail::step_call<accumulator_t<T>>(exec, variant, problem, options).plan();
  return detail::CallOf<accumulator_t<T>, ExecSpace, V>(exec, variant, problem, pass, detail::storage_of<T>, options)
      .plan();
}

template <class T, class ExecSpace, Variant V>
std::size_t workspace_size(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass,
                           const Options& options) {
  if (pass == Pass::step)
    return detail::step_call<accumulator_t<T>>(exec, variant, problem, options).workspace_bytes();
  return detail::CallOf<accumulator_t<T>, ExecSpace, V>(exec, variant, problem, pass, detail::storage_of<T>, options)
      .workspace_bytes();
}

template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options) {
  const Problem p = detail::problem_of(inputs);
  detail::CallOf<accumulator_t<T>, ExecSpace, V> call(exec, variant, p, Pass::forward, detail::storage_of<T>, options);
  detail::require_output("o", saved.o, {p.batch, p.heads, p.nq, p.dv});
  if (saved.denominator.present())
    detail::require_output("denominator", saved.denominator, {p.batch, p.heads, p.nq});
  call.use_workspace(workspace);
  const detail::Region region("LinAttn::forward");
  call.bind(inputs, saved);
  if constexpr (LinearVariant<V>) {
    call.enter_state("final state", saved.state, call.arguments().last, true);
    call.enter_record(saved.smallest);
    call.enter_centred(saved.centred);
    detail::enter_local(call, inputs, saved);
  }
  call.launch_forward();
}

template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace, const Options& options) {
  const Problem p = detail::problem_of(inputs);
  detail::CallOf<accumulator_t<T>, ExecSpace, V> call(exec, variant, p, Pass::backward, detail::storage_of<T>, options);
  detail::require_shape("d_o", cotangents.o, {p.batch, p.heads, p.nq, p.dv});
  if (options.normalise.value_or(V::normalise_by_default)) {
    detail::require_shape("saved o", saved.o, {p.batch, p.heads, p.nq, p.dv});
    detail::require_shape("saved denominator", saved.denominator, {p.batch, p.heads, p.nq});
  }
  if (gradients.q.present())
    detail::require_output("gradient of q", gradients.q, {p.batch, p.heads, p.nq, p.d});
  if (gradients.k.present())
    detail::require_output("gradient of k", gradients.k, {p.batch, p.kv_heads, p.nk, p.d});
  if (gradients.v.present())
    detail::require_output("gradient of v", gradients.v, {p.batch, p.kv_heads, p.nk, p.dv});
  const auto require_parameter = [&](const char* what, const char* name, const auto& gradient,
                                     std::int64_t heads) {
    if (!gradient.present()) return;
    if (!name)
      throw InvalidArgument(detail::message("LinAttn: variant ", V::name, " has no ", what, " to differentiate"));
    detail::require_output(detail::message("gradient of ", name).c_str(), gradient, {heads});
  };
  require_parameter("query parameter", V::query_parameter, gradients.query_parameter, p.heads);
  require_parameter("key parameter", V::key_parameter, gradients.key_parameter, p.kv_heads);
  require_parameter("constant", constant_parameter_name<V>(), gradients.constant, p.heads);
  require_parameter("score scale", scale_parameter_name<V>(), gradients.scale, p.heads);
  call.use_workspace(workspace);
  const detail::Region region("LinAttn::backward");
  call.bind(inputs, saved);
  if constexpr (!has_local_term_v<V>)
    if (gradients.diag_r.present() || gradients.diag_p.present())
      throw InvalidArgument(detail::message("LinAttn: variant ", V::name, " joins no branches: it has no diag_r and diag_p"));
  if constexpr (ExactVariant<V>)
    call.launch_backward(cotangents, gradients);
  else
    detail::launch_linear_backward(call, inputs, saved, cotangents, gradients);
}

template <class T, class ExecSpace>
void check(const ExecSpace& exec, const Saved<ExecSpace, T>& saved, const Options& options) {
  if (options.small_normaliser != SmallNormaliser::check || !options.normalise.value_or(true)) return;
  if (!saved.smallest.present())
    throw InvalidArgument("LinAttn: check() reads Saved::smallest, which forward() was to be given, found nothing");
  const detail::Region region("LinAttn::check");
  const auto& records = saved.smallest;
  const auto sequences = static_cast<std::size_t>(records.extent(0));
  const auto heads = static_cast<std::size_t>(records.extent(1));
  using Records = Kokkos::View<const NormaliserRecord**, Kokkos::LayoutStride, typename ExecSpace::memory_space,
                               Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Records device(records.data(), Kokkos::LayoutStride(sequences, static_cast<std::size_t>(records.stride(0)),
                                                            heads, static_cast<std::size_t>(records.stride(1))));
  const Kokkos::View<NormaliserRecord**, Kokkos::LayoutRight, typename ExecSpace::memory_space> packed(
      Kokkos::view_alloc(exec, std::string("LinAttn::check::records"), Kokkos::WithoutInitializing), sequences, heads);
  Kokkos::deep_copy(exec, packed, device);
  const auto host = Kokkos::create_mirror_view(packed);
  Kokkos::deep_copy(exec, host, packed);
  detail::fence(exec, "LinAttn::check::records");
  const NormaliserRecord* worst = nullptr;
  std::size_t at_sequence = 0, at_head = 0;
  for (std::size_t s = 0; s < sequences; ++s)
    for (std::size_t h = 0; h < heads; ++h) {
      const NormaliserRecord& record = host(s, h);
      if (record.row < 0 || (worst && !detail::is_smaller(record, *worst))) continue;
      worst = &record;
      at_sequence = s;
      at_head = h;
    }
  if (!worst || worst->ratio >= options.least_normaliser) return;
  throw InvalidArgument(detail::message(
      "LinAttn: the row sum of sequence ", at_sequence, ", head ", at_head, ", row ", worst->row,
      worst->ratio == worst->ratio
          ? detail::message(" is ", worst->ratio, " for each key, expected at least ", options.least_normaliser)
          : detail::message(" is not a finite number"),
      "; use qk_norm l2 (affine), a larger b / (a scale), or small_normaliser clamp"));
}

template <class T, class ExecSpace, LinearVariant V>
void step(const ExecSpace& exec, const V& variant, const std::type_identity_t<Token<ExecSpace, T>>& token,
          const std::type_identity_t<ConstState<ExecSpace, T>>& before,
          const std::type_identity_t<State<ExecSpace, T>>& after,
          const std::type_identity_t<TensorRef<T, 3, ExecSpace>>& o,
          const std::type_identity_t<Workspace<ExecSpace>>& workspace, const StepOptions& options) {
  const detail::Region region("LinAttn::step");
  detail::StepOf<accumulator_t<T>, ExecSpace, V> call(exec, variant, detail::problem_of(token), options);
  call.template run<T>(token, before, after, o, workspace);
}

template <class T, class ExecSpace, ExactVariant V>
void step(const ExecSpace& exec, const V& variant, const std::type_identity_t<Token<ExecSpace, T>>& token,
          const std::type_identity_t<KeyValueCache<ExecSpace, T>>& cache,
          const std::type_identity_t<TensorRef<T, 3, ExecSpace>>& o,
          const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  const detail::Region region("LinAttn::step");
  detail::ExactStep<accumulator_t<T>, ExecSpace, V> call(exec, variant, detail::problem_of(token, cache));
  call.template run<T>(token, cache, o, workspace);
}

template <class T, class ExecSpace, Variant V>
void forward(const ExecSpace& exec, const V& variant,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Saved<ExecSpace, T>>& saved, const Options& options) {
  const auto arena = detail::allocate_workspace(
      exec, workspace_size<T>(exec, variant, detail::problem_of(inputs), Pass::forward, options));
  forward<T>(exec, variant, inputs, saved, Workspace<ExecSpace>(arena), options);
  detail::fence(exec, "LinAttn::forward::workspace_release");
}

template <class T, class ExecSpace, Variant V>
void backward(const ExecSpace& exec, const V& variant,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Saved<ExecSpace, T>>& saved,
              const std::type_identity_t<Cotangents<ExecSpace, T>>& cotangents,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients, const Options& options) {
  const auto arena = detail::allocate_workspace(
      exec, workspace_size<T>(exec, variant, detail::problem_of(inputs), Pass::backward, options));
  backward<T>(exec, variant, inputs, saved, cotangents, gradients, Workspace<ExecSpace>(arena), options);
  detail::fence(exec, "LinAttn::backward::workspace_release");
}

}  // namespace LinAttn
