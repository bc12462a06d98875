// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <linattn/analysis/moment_kernels.hpp>
#include <linattn/analysis/moment_rule.hpp>
#include <linattn/engine/engine.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/tensor.hpp>
#include <linattn/workspace.hpp>
#include <optional>
#include <string_view>
#include <type_traits>

/// \file moments.hpp
/// Moment matching: alpha and beta of LLN attention from the moments of q and k (Nahshan, Kampeas, Haleva 2024).
///
///     sigma_sm^2 = sigma_q^2 sigma_k^2 + C_cross        st2 = rule(sigma_sm^2)
///     alpha = sqrt(st2 / 2) / sigma_q                   beta = sqrt(st2 / 2) / sigma_k
///
/// so that the log-variance of the LLN matrix is that of the softmax matrix (rule entropy: its mean row entropy).
/// Deviations below 1e-4 are taken as 1e-4, st2 above 70 as 70, sigma_sm^2 below 1e-16 (C_cross can be negative) as
/// 1e-16; gradients do not pass through these limits. NaN or infinity in a visible row gives what they give.
///
/// Calls enqueue kernels on the caller's instance and return; those without a workspace allocate one and fence. The
/// same numbers give the same bits, whatever the number of threads and the layout of the Views.

namespace LinAttn {

/// Over which entries a moment is taken.
enum class MomentScope {
  tensor,  ///< all of q; all of k
  head     ///< for each key/value head over the batch; of q over the query heads of its group
};

/// C_cross = Cov(q^2, k^2) - Cov(q, k)^2 (divisors n), over all pairs of visible rows and equal features, or over the
/// pairs whose rows have the same number (needs Nq = Nk).
enum class CrossTerm { none, all_pairs, same_position };

/// "tensor", "head".
std::string_view to_string(MomentScope scope) noexcept;
/// "none", "all_pairs", "same_position".
std::string_view to_string(CrossTerm cross) noexcept;
/// \throws InvalidArgument for any other name
MomentScope moment_scope_from_name(std::string_view name);
CrossTerm cross_term_from_name(std::string_view name);

/// q (B,H,Nq,D), k (B,Hkv,Nk,D), and what counts of them: key_mask (B,Nk), query_mask (B,Nq), 1 where visible. Hidden
/// rows are never read.
template <class ExecSpace, class T>
struct MomentInputs {
  TensorRef<const T, 4, ExecSpace> q{};
  TensorRef<const T, 4, ExecSpace> k{};
  TensorRef<const std::uint8_t, 2, ExecSpace> key_mask{};
  TensorRef<const std::uint8_t, 2, ExecSpace> query_mask{};
};

/// One value for each key/value head (Hkv), all equal where the scope is the tensor: standard deviations with divisor
/// n - 1 and at least 1e-4 (also of constants and for n < 2), means, numbers of entries, C_cross. Those left out are
/// not written.
template <class ExecSpace, class Number = double>
struct BasicMoments {
  TensorRef<Number, 1, ExecSpace> sigma_q{};
  TensorRef<Number, 1, ExecSpace> sigma_k{};
  TensorRef<Number, 1, ExecSpace> mean_q{};
  TensorRef<Number, 1, ExecSpace> mean_k{};
  TensorRef<Number, 1, ExecSpace> count_q{};
  TensorRef<Number, 1, ExecSpace> count_k{};
  TensorRef<Number, 1, ExecSpace> cross{};

  /// The same where they are only read.
  BasicMoments<ExecSpace, const Number> as_const() const {
    return {sigma_q, sigma_k, mean_q, mean_k, count_q, count_k, cross};
  }
};
template <class ExecSpace>
using Moments = BasicMoments<ExecSpace>;
template <class ExecSpace>
using ConstMoments = BasicMoments<ExecSpace, const double>;

/// alpha (H), beta (Hkv): Views that Lln takes as parameters, or their gradients.
template <class ExecSpace, class Number = double>
struct BasicRates {
  TensorRef<Number, 1, ExecSpace> alpha{};
  TensorRef<Number, 1, ExecSpace> beta{};
};
template <class ExecSpace>
using Rates = BasicRates<ExecSpace>;
template <class ExecSpace>
using ConstRates = BasicRates<ExecSpace, const double>;

/// Where match_moments_backward() adds: dL/dq, dL/dk. Those left out are not computed.
template <class ExecSpace, class T>
struct MomentGradients {
  TensorRef<T, 4, ExecSpace> q{};
  TensorRef<T, 4, ExecSpace> k{};
};

/// How to measure and to match. The backward pass must be given what the forward pass was given.
struct MomentOptions {
  MomentScope scope = MomentScope::tensor;
  MomentRule rule = MomentRule::authors;
  CrossTerm cross = CrossTerm::none;
  std::optional<MomentLine> line{};  ///< of rule fit
  double rate = 1.9;                 ///< of rule fixed: alpha = beta
  /// The rates are for attention under a causal mask. Moments over whole sequences then let later tokens change
  /// earlier rows: refused unless asked for by sees_future. Running averages (update_running_moments) do not.
  bool causal = false;
  bool sees_future = false;
};

/// Bytes of workspace for measure_moments() and match_moments() (Pass::forward) or match_moments_backward()
/// (Pass::backward); of the problem Dv does not count.
/// \throws InvalidArgument as the calls
template <class T, class ExecSpace>
std::size_t moments_workspace_size(const ExecSpace& exec, const Problem& problem, Pass pass,
                                   const MomentOptions& options = {});

/// sigma_q, sigma_k and what else `moments` names, each tensor read once. Overwrites `moments`; asynchronous.
///
///     LinAttn::measure_moments<float>(exec, {.q = q, .k = k}, {.sigma_q = sq, .sigma_k = sk}, workspace,
///                                     {.scope = LinAttn::MomentScope::head});
///
/// \throws InvalidArgument if extents do not fit each other, the workspace is too small, C_cross is asked for and has
/// nowhere to go or the other way round, or whole sequences are measured for causal use without sees_future
template <class T, class ExecSpace>
void measure_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<Moments<ExecSpace>>& moments,
                     const std::type_identity_t<Workspace<ExecSpace>>& workspace, const MomentOptions& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace>
void measure_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<Moments<ExecSpace>>& moments, const MomentOptions& options = {});

/// alpha and beta from given moments, measured or a running average, for rows of D features. Of `moments` sigma_q,
/// sigma_k and, if present, cross are read; of `options` rule, line and rate. Overwrites `rates`; asynchronous.
///
/// \throws InvalidArgument if extents do not fit each other or the rule lacks its line
template <class ExecSpace>
void match_rates(const ExecSpace& exec, const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                 const std::type_identity_t<Rates<ExecSpace>>& rates, std::int64_t d,
                 const MomentOptions& options = {});

/// measure_moments() and match_rates(). For a later backward pass `moments` must have all but cross, and cross where
/// C_cross is asked for.
///
///     LinAttn::match_moments<float>(exec, {.q = q, .k = k}, moments, {.alpha = alpha, .beta = beta}, workspace);
///     LinAttn::forward<float>(exec, LinAttn::Lln{.alpha = alpha, .beta = beta}, ...);
///
/// \throws InvalidArgument as both
template <class T, class ExecSpace>
void match_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                   const std::type_identity_t<Moments<ExecSpace>>& moments,
                   const std::type_identity_t<Rates<ExecSpace>>& rates,
                   const std::type_identity_t<Workspace<ExecSpace>>& workspace, const MomentOptions& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace>
void match_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                   const std::type_identity_t<Moments<ExecSpace>>& moments,
                   const std::type_identity_t<Rates<ExecSpace>>& rates, const MomentOptions& options = {});

/// Adds to dL/dq and dL/dk what flows through alpha and beta, given dL/dalpha (H) and dL/dbeta (Hkv). With
/// T = sqrt(st2 / 2), sums over the heads of one scope, n entries under sigma_q:
///
///     dT = dalpha / sigma_q + dbeta / sigma_k           dtarget = dT rule'(sigma_sm^2) / (4 T)
///     dsigma_q = -dalpha T / sigma_q^2 + 2 dtarget sigma_q sigma_k^2
///     dq += dsigma_q (q - mean_q) / ((n - 1) sigma_q) + dtarget dC_cross/dq
///
/// likewise k. Hidden rows are not touched; `moments` is what match_moments() left. The fixed rule adds nothing.
/// Asynchronous; no atomics.
///
/// \throws InvalidArgument as match_moments(), or if a moment is missing
template <class T, class ExecSpace>
void match_moments_backward(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                            const std::type_identity_t<ConstRates<ExecSpace>>& d_rates,
                            const std::type_identity_t<MomentGradients<ExecSpace, T>>& gradients,
                            const std::type_identity_t<Workspace<ExecSpace>>& workspace,
                            const MomentOptions& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace>
void match_moments_backward(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                            const std::type_identity_t<ConstRates<ExecSpace>>& d_rates,
                            const std::type_identity_t<MomentGradients<ExecSpace, T>>& gradients,
                            const MomentOptions& options = {});

/// running <- (1 - momentum) running + momentum measured, for sigma_q, sigma_k and, where both have it, cross.
///
/// For causal models: measure and update in training, rates by match_rates() from `running`, which inference leaves as
/// it is. momentum = 1 takes the measured values, whatever `running` held: the first update. Asynchronous.
/// \throws InvalidArgument if extents do not fit each other, or momentum is not in (0, 1]
template <class ExecSpace>
void update_running_moments(const ExecSpace& exec, const std::type_identity_t<Moments<ExecSpace>>& running,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& measured, double momentum);

}  // namespace LinAttn

// ---- definitions ----

namespace LinAttn {
namespace detail {

/// run(workspace), then a fence.
template <class ExecSpace, class Run>
void with_own_workspace(const ExecSpace& exec, std::size_t bytes, const Run& run) {
  const auto memory = allocate_workspace(exec, bytes);
  run(Workspace<ExecSpace>(memory));
  fence(exec, "LinAttn::workspace_release");
}

template <class ExecSpace, class T>
Problem problem_of(const MomentInputs<ExecSpace, T>& in) {
  for (const auto& [name, tensor] : {std::pair{"q", &in.q}, {"k", &in.k}})
    if (!tensor->present()) throw InvalidArgument(message("LinAttn: input ", name, " is missing"));
  Problem p;
  p.batch = in.q.extent(0);
  p.heads = in.q.extent(1);
  p.kv_heads = in.k.extent(1);
  p.nq = in.q.extent(2);
  p.nk = in.k.extent(2);
  p.d = in.q.extent(3);
  require_memory("q", in.q);
  require_shape("k", in.k, {p.batch, p.kv_heads, p.nk, p.d});
  if (in.key_mask.present()) require_shape("key_mask", in.key_mask, {p.batch, p.nk});
  if (in.query_mask.present()) require_shape("query_mask", in.query_mask, {p.batch, p.nq});
  return p;
}

/// One call: checks, workspace, launches.
template <class T, class ExecSpace>
class MomentCall {
 public:
  MomentCall(const ExecSpace& exec, const Problem& problem, Pass pass, const MomentOptions& options)
      : m_exec(exec), m_problem(problem), m_options(options), m_backward(pass == Pass::backward) {
    problem.validate(false);
    require_rows(problem, 0);
    if (options.causal && !options.sees_future)
      throw InvalidArgument(
          "LinAttn: moments of whole sequences see the future, so later tokens would change earlier "
          "rows under a causal mask; use a running average of moments (update_running_moments), or "
          "ask for them with sees_future");
    if (options.cross == CrossTerm::same_position && problem.nq != problem.nk)
      throw InvalidArgument(message("LinAttn: C_cross over the same positions needs Nq = Nk, found Nq = ", problem.nq,
                                    " and Nk = ", problem.nk));
    m_values = options.scope == MomentScope::head ? problem.kv_heads : std::min<std::int64_t>(1, problem.kv_heads);
    m_group = std::max<std::int64_t>(1, problem.group());
    m_q.batch = m_k.batch = problem.batch;
    m_q.heads = problem.heads;
    m_k.heads = problem.kv_heads;
    m_q.rows = problem.nq;
    m_k.rows = problem.nk;
    m_q.d = m_k.d = static_cast<int>(problem.d);
    m_features_q = m_q;
    m_features_k = m_k;
    const std::int64_t rows = MomentPlan::block_elements / std::max<std::int64_t>(1, problem.d);
    m_q.cut(rows);
    m_k.cut(rows);
    m_features_q.cut(MomentPlan::feature_rows);
    m_features_k.cut(MomentPlan::feature_rows);
  }

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

  void bind(const MomentInputs<ExecSpace, T>& in) {
    for (MomentRows<T>* rows : {&m_q, &m_features_q}) {
      rows->data = RowTensor<const T>(in.q);
      rows->mask = in.query_mask.data();
      rows->mask_batch_stride = in.query_mask.stride(0);
      rows->mask_stride = in.query_mask.stride(1);
    }
    for (MomentRows<T>* rows : {&m_k, &m_features_k}) {
      rows->data = RowTensor<const T>(in.k);
      rows->mask = in.key_mask.data();
      rows->mask_batch_stride = in.key_mask.stride(0);
      rows->mask_stride = in.key_mask.stride(1);
    }
  }

  void measure(const Moments<ExecSpace>& moments) {
    if (m_problem.kv_heads == 0) return;
    launch_teams<MomentSum>(m_exec, "LinAttn::moments::sum_blocks", m_q.tasks() + m_k.tasks(),
                            SumBlocks<T>{m_q, m_k, m_blocks});
    launch_teams<MomentSum>(
        m_exec, "LinAttn::moments::merge_blocks", m_q.lists() + m_k.lists(),
        MergeBlocks<MomentSum>{
            {m_blocks, m_q.lists(), m_q.blocks}, {m_blocks + m_q.tasks(), m_k.lists(), m_k.blocks}, m_sums});
    FinishMoments finish;
    finish.q_groups = groups(m_q.heads, m_group);
    finish.k_groups = groups(m_k.heads, 1);
    finish.q_sums = m_sums;
    finish.k_sums = m_sums + m_q.lists();
    finish.sigma_q = MomentOutput(moments.sigma_q);
    finish.sigma_k = MomentOutput(moments.sigma_k);
    finish.mean_q = MomentOutput(moments.mean_q);
    finish.mean_k = MomentOutput(moments.mean_k);
    finish.count_q = MomentOutput(moments.count_q);
    finish.count_k = MomentOutput(moments.count_k);
    finish.values = m_values;
    finish.kv_heads = m_problem.kv_heads;
    launch_teams<MomentSum>(m_exec, "LinAttn::moments::finish", 2 * m_values, finish);
    measure_cross(MomentOutput(moments.cross));
  }

  void pull(const RateRule& rule, const ConstMoments<ExecSpace>& moments, const ConstRates<ExecSpace>& d_rates,
            const MomentGradients<ExecSpace, T>& gradients) {
    if (m_problem.kv_heads == 0) return;
    measure_cross(MomentOutput());
    FindPulls find;
    find.rule = rule;
    find.sigma_q = MomentInput(moments.sigma_q);
    find.sigma_k = MomentInput(moments.sigma_k);
    find.mean_q = MomentInput(moments.mean_q);
    find.mean_k = MomentInput(moments.mean_k);
    find.count_q = MomentInput(moments.count_q);
    find.count_k = MomentInput(moments.count_k);
    if (m_options.cross != CrossTerm::none) find.cross = MomentInput(moments.cross);
    find.d_alpha = MomentInput(d_rates.alpha);
    find.d_beta = MomentInput(d_rates.beta);
    find.values = m_values;
    find.kv_heads = m_problem.kv_heads;
    find.group = m_group;
    find.pulls = m_pulls;
    launch("LinAttn::moments::find_pulls", range(m_values), find);
    AddPulls<T> add;
    add.q = m_q;
    add.k = m_k;
    add.pulls = m_pulls;
    add.group = m_group;
    add.values = m_values;
    if (m_options.cross == CrossTerm::same_position) add.same_position = m_cross_totals;
    if (m_options.cross == CrossTerm::all_pairs) {
      launch_teams<double>(m_exec, "LinAttn::moments::find_feature_pulls", m_q.lists() + m_k.lists(),
                           FindFeaturePulls{m_of_q, m_of_k, m_cross_totals, m_pulls, m_pulls_of_q, m_pulls_of_k,
                                            m_q.heads, m_group, m_q.lists(), m_values, m_q.d});
      add.of_q = m_pulls_of_q;
      add.of_k = m_pulls_of_k;
    }
    if (gradients.q.present()) {
      add.d_q = RowTensor<T>(gradients.q);
      add.q_tasks = m_q.tasks();
    }
    if (gradients.k.present()) add.d_k = RowTensor<T>(gradients.k);
    launch_teams<double>(m_exec, "LinAttn::moments::add_pulls", add.q_tasks + (gradients.k.present() ? m_k.tasks() : 0),
                         add);
  }

 private:
  Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>> range(std::int64_t count) const {
    return {m_exec, 0, count};
  }

  MomentGroups groups(std::int64_t heads, std::int64_t group) const {
    return {m_problem.batch, heads, group, m_options.scope == MomentScope::head};
  }

  void measure_cross(const MomentOutput& cross) {
    if (m_options.cross == CrossTerm::none) return;
    if (m_options.cross == CrossTerm::all_pairs) {
      launch_teams<double>(m_exec, "LinAttn::moments::sum_features", m_features_q.tasks() + m_features_k.tasks(),
                           SumFeatures<T>{m_features_q, m_features_k, m_of_q, m_of_k});
      launch_teams<double>(
          m_exec, "LinAttn::moments::finish_features", m_q.lists() + m_k.lists(),
          FinishFeatures{m_of_q, m_of_k, m_q.lists(), m_features_q.blocks, m_features_k.blocks, m_q.d});
      launch_teams<CrossSum>(m_exec, "LinAttn::moments::sum_feature_pairs", m_q.lists(),
                             SumFeaturePairs{m_of_q, m_of_k, m_q.heads, m_group, m_q.d, m_cross_sums});
    } else {
      launch_teams<CrossSum>(m_exec, "LinAttn::moments::sum_pairs", m_q.tasks(),
                             SumPairs<T>{m_q, m_k, m_group, m_cross_blocks});
      launch_teams<CrossSum>(m_exec, "LinAttn::moments::merge_pairs", m_q.lists(),
                             MergeBlocks<CrossSum>{{m_cross_blocks, m_q.lists(), m_q.blocks}, {}, m_cross_sums});
    }
    launch_teams<CrossSum>(
        m_exec, "LinAttn::moments::finish_cross", m_values,
        FinishCross{groups(m_q.heads, m_group), m_cross_sums, m_cross_totals, cross, m_values, m_problem.kv_heads});
  }

  void place(ArenaCursor& arena) {
    if (m_backward) {
      m_pulls = arena.take<MomentPull>(m_values);
    } else {
      m_blocks = arena.take<MomentSum>(m_q.tasks() + m_k.tasks());
      m_sums = arena.take<MomentSum>(m_q.lists() + m_k.lists());
    }
    if (m_options.cross == CrossTerm::none) return;
    m_cross_sums = arena.take<CrossSum>(m_q.lists());
    m_cross_totals = arena.take<CrossSum>(m_values);
    if (m_options.cross == CrossTerm::same_position) {
      m_cross_blocks = arena.take<CrossSum>(m_q.tasks());
      return;
    }
    const auto features = [&](const MomentRows<T>& rows, FeatureMoments& moments) {
      moments.sums = arena.take<double>(rows.tasks() * 2 * rows.d);
      moments.counts = arena.take<double>(rows.tasks());
      moments.first = arena.take<double>(rows.lists() * rows.d);
      moments.second = arena.take<double>(rows.lists() * rows.d);
      moments.rows = arena.take<double>(rows.lists());
    };
    features(m_features_q, m_of_q);
    features(m_features_k, m_of_k);
    if (m_backward) {
      m_pulls_of_q = arena.take<FeaturePull>(m_q.lists() * m_q.d);
      m_pulls_of_k = arena.take<FeaturePull>(m_k.lists() * m_k.d);
    }
  }

  ExecSpace m_exec;
  Problem m_problem;
  MomentOptions m_options;
  bool m_backward;
  std::int64_t m_values = 0, m_group = 1;
  MomentRows<T> m_q{}, m_k{}, m_features_q{}, m_features_k{};
  MomentSum *m_blocks = nullptr, *m_sums = nullptr;
  CrossSum *m_cross_blocks = nullptr, *m_cross_sums = nullptr, *m_cross_totals = nullptr;
  FeatureMoments m_of_q{}, m_of_k{};
  MomentPull* m_pulls = nullptr;
  FeaturePull *m_pulls_of_q = nullptr, *m_pulls_of_k = nullptr;
};

/// Checks the moments that are written (or read). \throws InvalidArgument
template <class Tensors>
void require_moments(const Tensors& moments, std::int64_t kv_heads, bool all, CrossTerm cross) {
  const auto require = [&](const char* name, const auto& tensor, bool needed) {
    if (!tensor.present() && !needed) return;
    if constexpr (std::is_const_v<typename std::remove_cvref_t<decltype(tensor)>::value_type>)
      require_shape(name, tensor, {kv_heads});
    else
      require_output(name, tensor, {kv_heads});
  };
  require("sigma_q", moments.sigma_q, true);
  require("sigma_k", moments.sigma_k, true);
  require("mean_q", moments.mean_q, all);
  require("mean_k", moments.mean_k, all);
  require("count_q", moments.count_q, all);
  require("count_k", moments.count_k, all);
  require("cross", moments.cross, cross != CrossTerm::none);
  if (cross == CrossTerm::none && moments.cross.present())
    throw InvalidArgument("LinAttn: there is a place for C_cross, but options.cross is none");
}

/// Checks the rates that are written (or read) and returns the heads of a group. \throws InvalidArgument
template <class Tensors>
std::int64_t require_rates(const Tensors& rates, std::int64_t heads, std::int64_t kv_heads) {
  if ((heads == 0) != (kv_heads == 0) || (kv_heads > 0 && heads % kv_heads != 0))
    throw InvalidArgument(message("LinAttn: ", kv_heads, " key/value heads do not divide ", heads, " query heads"));
  const auto require = [&](const char* name, const auto& tensor, std::int64_t extent) {
    if constexpr (std::is_const_v<typename std::remove_cvref_t<decltype(tensor)>::value_type>)
      require_shape(name, tensor, {extent});
    else
      require_output(name, tensor, {extent});
  };
  require("alpha", rates.alpha, heads);
  require("beta", rates.beta, kv_heads);
  return std::max<std::int64_t>(1, kv_heads == 0 ? 0 : heads / kv_heads);
}

/// running <- (1 - momentum) running + momentum measured.
struct UpdateRunning {
  MomentOutput running[3];
  MomentInput measured[3];
  double momentum;

  KOKKOS_FUNCTION void operator()(std::int64_t g) const {
    for (int m = 0; m < 3; ++m) {
      if (!running[m].data || !measured[m].data) continue;
      const double now = measured[m](g), old = running[m](g);
      running[m].set(g, momentum == 1 ? now : fused_multiply_add(momentum, now - old, old));
    }
  }
};

/// measure_moments() and match_rates() without a region of their own.
template <class T, class ExecSpace>
void measure(const ExecSpace& exec, const MomentInputs<ExecSpace, T>& inputs, const Moments<ExecSpace>& moments,
             const Workspace<ExecSpace>& workspace, const MomentOptions& options) {
  const Problem p = problem_of(inputs);
  MomentCall<T, ExecSpace> call(exec, p, Pass::forward, options);
  require_moments(moments, p.kv_heads, false, options.cross);
  call.use_workspace(workspace);
  call.bind(inputs);
  call.measure(moments);
}

template <class ExecSpace>
void match(const ExecSpace& exec, const ConstMoments<ExecSpace>& moments, const Rates<ExecSpace>& rates, std::int64_t d,
           const MomentOptions& options) {
  const std::int64_t heads = rates.alpha.extent(0), kv_heads = rates.beta.extent(0);
  FindRates find;
  find.group = require_rates(rates, heads, kv_heads);
  find.rule = bind_rule(options.rule, d, options.line, options.rate);
  if (options.rule != MomentRule::fixed) {
    require_shape("sigma_q", moments.sigma_q, {kv_heads});
    require_shape("sigma_k", moments.sigma_k, {kv_heads});
    if (moments.cross.present()) require_shape("cross", moments.cross, {kv_heads});
    find.sigma_q = MomentInput(moments.sigma_q);
    find.sigma_k = MomentInput(moments.sigma_k);
    find.cross = MomentInput(moments.cross);
  }
  find.alpha = MomentOutput(rates.alpha);
  find.beta = MomentOutput(rates.beta);
  if (heads == 0) return;
  launch("LinAttn::moments::find_rates",
         Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, heads), find);
}

}  // namespace detail

template <class T, class ExecSpace>
std::size_t moments_workspace_size(const ExecSpace& exec, const Problem& problem, Pass pass,
                                   const MomentOptions& options) {
  return detail::MomentCall<T, ExecSpace>(exec, problem, pass, options).workspace_bytes();
}

template <class T, class ExecSpace>
void measure_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<Moments<ExecSpace>>& moments,
                     const std::type_identity_t<Workspace<ExecSpace>>& workspace, const MomentOptions& options) {
  const detail::Region region("LinAttn::measure_moments");
  detail::measure<T, ExecSpace>(exec, inputs, moments, workspace, options);
}

template <class T, class ExecSpace>
void measure_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<Moments<ExecSpace>>& moments, const MomentOptions& options) {
  const std::size_t bytes = moments_workspace_size<T>(exec, detail::problem_of(inputs), Pass::forward, options);
  detail::with_own_workspace(exec, bytes, [&](const Workspace<ExecSpace>& workspace) {
    measure_moments<T>(exec, inputs, moments, workspace, options);
  });
}

template <class ExecSpace>
void match_rates(const ExecSpace& exec, const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                 const std::type_identity_t<Rates<ExecSpace>>& rates, std::int64_t d, const MomentOptions& options) {
  const detail::Region region("LinAttn::match_rates");
  detail::match<ExecSpace>(exec, moments, rates, d, options);
}

template <class T, class ExecSpace>
void match_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                   const std::type_identity_t<Moments<ExecSpace>>& moments,
                   const std::type_identity_t<Rates<ExecSpace>>& rates,
                   const std::type_identity_t<Workspace<ExecSpace>>& workspace, const MomentOptions& options) {
  const detail::Region region("LinAttn::match_moments");
  const Problem p = detail::problem_of(inputs);
  detail::require_rates(rates, p.heads, p.kv_heads);
  detail::bind_rule(options.rule, p.d, options.line, options.rate);
  detail::measure<T, ExecSpace>(exec, inputs, moments, workspace, options);
  detail::match<ExecSpace>(exec, moments.as_const(), rates, p.d, options);
}

template <class T, class ExecSpace>
void match_moments(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                   const std::type_identity_t<Moments<ExecSpace>>& moments,
                   const std::type_identity_t<Rates<ExecSpace>>& rates, const MomentOptions& options) {
  const std::size_t bytes = moments_workspace_size<T>(exec, detail::problem_of(inputs), Pass::forward, options);
  detail::with_own_workspace(exec, bytes, [&](const Workspace<ExecSpace>& workspace) {
    match_moments<T>(exec, inputs, moments, rates, workspace, options);
  });
}

template <class T, class ExecSpace>
void match_moments_backward(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                            const std::type_identity_t<ConstRates<ExecSpace>>& d_rates,
                            const std::type_identity_t<MomentGradients<ExecSpace, T>>& gradients,
                            const std::type_identity_t<Workspace<ExecSpace>>& workspace, const MomentOptions& options) {
  const detail::Region region("LinAttn::match_moments_backward");
  const Problem p = detail::problem_of(inputs);
  detail::MomentCall<T, ExecSpace> call(exec, p, Pass::backward, options);
  detail::require_moments(moments, p.kv_heads, true, options.cross);
  detail::require_rates(d_rates, p.heads, p.kv_heads);
  if (gradients.q.present()) detail::require_output("gradient of q", gradients.q, {p.batch, p.heads, p.nq, p.d});
  if (gradients.k.present()) detail::require_output("gradient of k", gradients.k, {p.batch, p.kv_heads, p.nk, p.d});
  const detail::RateRule rule = detail::bind_rule(options.rule, p.d, options.line, options.rate);
  call.use_workspace(workspace);
  if (options.rule == MomentRule::fixed) return;
  call.bind(inputs);
  call.pull(rule, moments, d_rates, gradients);
}

template <class T, class ExecSpace>
void match_moments_backward(const ExecSpace& exec, const std::type_identity_t<MomentInputs<ExecSpace, T>>& inputs,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& moments,
                            const std::type_identity_t<ConstRates<ExecSpace>>& d_rates,
                            const std::type_identity_t<MomentGradients<ExecSpace, T>>& gradients,
                            const MomentOptions& options) {
  const std::size_t bytes = moments_workspace_size<T>(exec, detail::problem_of(inputs), Pass::backward, options);
  detail::with_own_workspace(exec, bytes, [&](const Workspace<ExecSpace>& workspace) {
    match_moments_backward<T>(exec, inputs, moments, d_rates, gradients, workspace, options);
  });
}

template <class ExecSpace>
void update_running_moments(const ExecSpace& exec, const std::type_identity_t<Moments<ExecSpace>>& running,
                            const std::type_identity_t<ConstMoments<ExecSpace>>& measured, double momentum) {
  const detail::Region region("LinAttn::update_running_moments");
  if (!(momentum > 0 && momentum <= 1))
    throw InvalidArgument(detail::message("LinAttn: momentum must be above 0 and at most 1, found ", momentum));
  const std::int64_t kv_heads = running.sigma_q.extent(0);
  detail::UpdateRunning update;
  const auto enter = [&](int m, const char* name, const auto& to, const auto& from) {
    detail::require_output(name, to, {kv_heads});
    detail::require_shape(name, from, {kv_heads});
    update.running[m] = detail::MomentOutput(to);
    update.measured[m] = detail::MomentInput(from);
  };
  enter(0, "sigma_q", running.sigma_q, measured.sigma_q);
  enter(1, "sigma_k", running.sigma_k, measured.sigma_k);
  if (running.cross.present() && measured.cross.present()) enter(2, "cross", running.cross, measured.cross);
  update.momentum = momentum;
  if (kv_heads == 0) return;
  detail::launch("LinAttn::moments::update_running",
                 Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, kv_heads), update);
}

}  // namespace LinAttn
