// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/analysis/moments.hpp>

/// \file key_mean.hpp
/// Keys without their mean. Adding one vector to all keys leaves softmax attention as it is, and LLN attention not; it
/// also inflates sigma_k. Attention of the keys relative to their mean has the invariance again.
///
///     out_jd = k_jd - mean_d        mean_d = (1 / n) sum over the n visible keys of k_jd, or given
///
/// for each sequence and key/value head. Calls are asynchronous on the caller's instance, except for those without a
/// workspace, which allocate one and fence.

namespace LinAttn {

/// How the mean is found.
struct KeyMeanOptions {
  /// For attention under a causal mask: the mean of a whole sequence looks at later keys and is refused unless asked
  /// for by sees_future; a given mean is not.
  bool causal = false;
  bool sees_future = false;
};

/// k (B,Hkv,Nk,D) and key_mask (B,Nk), 1 where visible, which may be absent.
template <class ExecSpace, class T>
struct KeyMeanInputs {
  TensorRef<const T, 4, ExecSpace> k{};
  TensorRef<const std::uint8_t, 2, ExecSpace> key_mask{};
};

/// out (B,Hkv,Nk,D) and mean (B,Hkv,D), which may be absent.
template <class ExecSpace, class T>
struct KeyMeanOutputs {
  TensorRef<T, 4, ExecSpace> out{};
  TensorRef<double, 3, ExecSpace> mean{};
};

/// Bytes of workspace for remove_key_mean() and its backward pass, of keys (B,Hkv,Nk,D).
/// \throws InvalidArgument for extents that no tensor has
template <class T, class ExecSpace>
std::size_t key_mean_workspace_size(const ExecSpace& exec, const Problem& problem);

/// out = k - mean of the visible keys; `mean`, if present, receives the means (0 where no key is visible). Hidden keys
/// are neither read nor written, so that `out` may be the memory of `k`. Overwrites `out` and `mean`.
///
///     LinAttn::remove_key_mean<float>(exec, {.k = k, .key_mask = mask}, {.out = centred}, workspace);
///
/// \throws InvalidArgument if extents do not fit each other, the workspace is too small, or options.causal without
/// sees_future
template <class T, class ExecSpace>
void remove_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<KeyMeanOutputs<ExecSpace, T>>& outputs,
                     const std::type_identity_t<Workspace<ExecSpace>>& workspace, const KeyMeanOptions& options = {});

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace>
void remove_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<KeyMeanOutputs<ExecSpace, T>>& outputs,
                     const KeyMeanOptions& options = {});

/// out = k - mean with a given mean (Hkv,D), one for all sequences: for causal models, a running average that inference
/// leaves as it is. Its gradient is the identity. Needs no workspace.
/// \throws InvalidArgument if extents do not fit each other
template <class T, class ExecSpace>
void remove_given_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                           const std::type_identity_t<TensorRef<const double, 2, ExecSpace>>& mean,
                           const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& out);

/// The gradient of remove_key_mean(): d_k, on entry dL/dout, becomes dL/dk = dL/dout - its mean over the visible keys.
/// Hidden keys are not touched. \throws InvalidArgument as remove_key_mean()
template <class T, class ExecSpace>
void remove_key_mean_backward(const ExecSpace& exec, const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& d_k,
                              const std::type_identity_t<TensorRef<const std::uint8_t, 2, ExecSpace>>& key_mask,
                              const std::type_identity_t<Workspace<ExecSpace>>& workspace);

/// As above with a workspace of its own: allocates it, and fences `exec` before returning.
template <class T, class ExecSpace>
void remove_key_mean_backward(const ExecSpace& exec, const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& d_k,
                              const std::type_identity_t<TensorRef<const std::uint8_t, 2, ExecSpace>>& key_mask);

}  // namespace LinAttn

// ---- definitions ----

namespace LinAttn {
namespace detail {

/// Sums of the features of a block relative to its first visible key, so that a common offset costs no digits.
template <class T>
struct SumKeyFeatures {
  MomentRows<T> k;
  double* sums;    // (list, block, 2, D): the key, the sums relative to it
  double* counts;  // (list, block)

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    const MomentBlock block(k, task);
    double* const shift = sums + task * 2 * k.d;
    double* const sum = shift + k.d;
    const std::int64_t element = k.data.element_stride;
    std::int64_t first = block.first;
    while (first < block.last && !k.counts(block.b, first)) ++first;
    for_each(team, k.d, [&](int c) {
      shift[c] = first < block.last ? widened(k.data.row(block.b, block.h, first)[c * element]) : 0;
      sum[c] = 0;
    });
    team.barrier();
    std::int64_t count = 0;
    for (std::int64_t n = first; n < block.last; ++n) {
      if (!k.counts(block.b, n)) continue;
      ++count;
      const T* const row = k.data.row(block.b, block.h, n);
      with_stride<Team>(element, [&](auto stride) {
        const auto at = [&](int c) { sum[c] += widened(row[c * stride]) - shift[c]; };
        if constexpr (Team::on_host) {
          for_each_along(k.d, at);
        } else {
          for_each(team, k.d, at);
        }
      });
    }
    if (team.rank() == 0) counts[task] = static_cast<double>(count);
  }
};

/// Means of the features from those of the blocks, merged in order.
struct FinishKeyMean {
  const double *sums, *counts;
  double* means;      // (list, D)
  MomentOutput copy;  // of the caller; strides below
  std::int64_t copy_batch = 0, copy_head = 0, heads = 1, blocks = 0;
  int d = 0;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t list) const {
    for_each(team, d, [&](int c) {
      double n = 0, mean = 0;
      for (std::int64_t i = 0; i < blocks; ++i) {
        const double count = counts[list * blocks + i];
        if (count == 0) continue;
        const double* const shift = sums + (list * blocks + i) * 2 * d;
        n += count;
        mean += (shift[c] + shift[d + c] / count - mean) * (count / n);
      }
      means[list * d + c] = mean;
      if (copy.data) copy.data[list / heads * copy_batch + list % heads * copy_head + c * copy.stride] = mean;
    });
  }
};

/// out = k - mean in the rows that count.
template <class T>
struct SubtractMean {
  MomentRows<T> k;
  RowTensor<T> out;
  const double* mean;
  std::int64_t batch_stride, head_stride, element_stride;  // of the mean

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    const MomentBlock block(k, task);
    const double* const own = mean + block.b * batch_stride + block.h * head_stride;
    for (std::int64_t n = block.first; n < block.last; ++n) {
      if (!k.counts(block.b, n)) continue;
      const T* const row = k.data.row(block.b, block.h, n);
      T* const to = out.row(block.b, block.h, n);
      const auto at = [&](int c) {
        to[c * out.element_stride] = static_cast<T>(widened(row[c * k.data.element_stride]) - own[c * element_stride]);
      };
      if constexpr (Team::on_host) {
        for_each_along(k.d, at);
      } else {
        for_each(team, k.d, at);
      }
    }
  }
};

/// One call: checks, workspace, launches.
template <class T, class ExecSpace>
class KeyMeanCall {
 public:
  KeyMeanCall(const ExecSpace& exec, const Problem& problem) : m_exec(exec), m_problem(problem) {
    m_problem.heads = m_problem.kv_heads;
    m_problem.validate(false);
    require_rows(m_problem, 0);
    m_k.batch = problem.batch;
    m_k.heads = problem.kv_heads;
    m_k.rows = problem.nk;
    m_k.d = static_cast<int>(problem.d);
    m_k.cut(MomentPlan::feature_rows);
  }
  KeyMeanCall(const ExecSpace& exec, const KeyMeanInputs<ExecSpace, T>& in) : KeyMeanCall(exec, problem_of_keys(in.k)) {
    require_memory("k", in.k);
    if (in.key_mask.present()) require_shape("key_mask", in.key_mask, {m_problem.batch, m_problem.nk});
    m_k.data = RowTensor<const T>(in.k);
    m_k.mask = in.key_mask.data();
    m_k.mask_batch_stride = in.key_mask.stride(0);
    m_k.mask_stride = in.key_mask.stride(1);
  }

  static Problem problem_of_keys(const TensorRef<const T, 4, ExecSpace>& k) {
    if (!k.present()) throw InvalidArgument("LinAttn: input k is missing");
    Problem p;
    p.batch = k.extent(0);
    p.heads = p.kv_heads = k.extent(1);
    p.nq = p.nk = k.extent(2);
    p.d = k.extent(3);
    return p;
  }
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

  void find_mean(const TensorRef<double, 3, ExecSpace>& copy) {
    launch_teams<double>(m_exec, "LinAttn::key_mean::sum_features", m_k.tasks(),
                         SumKeyFeatures<T>{m_k, m_sums, m_counts});
    FinishKeyMean finish;
    finish.sums = m_sums;
    finish.counts = m_counts;
    finish.means = m_means;
    if (copy.present()) {
      finish.copy.data = copy.data();
      finish.copy.stride = copy.stride(2);
      finish.copy_batch = copy.stride(0);
      finish.copy_head = copy.stride(1);
    }
    finish.heads = m_k.heads;
    finish.blocks = m_k.blocks;
    finish.d = m_k.d;
    launch_teams<double>(m_exec, "LinAttn::key_mean::finish", m_k.lists(), finish);
  }
  void subtract(const TensorRef<T, 4, ExecSpace>& out) { subtract(out, m_means, m_k.heads * m_k.d, m_k.d, 1); }
  void subtract(const TensorRef<T, 4, ExecSpace>& out, const double* mean, std::int64_t batch_stride,
                std::int64_t head_stride, std::int64_t element_stride) {
    launch_teams<double>(m_exec, "LinAttn::key_mean::subtract", m_k.tasks(),
                         SubtractMean<T>{m_k, RowTensor<T>(out), mean, batch_stride, head_stride, element_stride});
  }

 private:
  void place(ArenaCursor& arena) {
    m_sums = arena.take<double>(m_k.tasks() * 2 * m_k.d);
    m_counts = arena.take<double>(m_k.tasks());
    m_means = arena.take<double>(m_k.lists() * m_k.d);
  }

  ExecSpace m_exec;
  Problem m_problem;
  MomentRows<T> m_k{};
  double *m_sums = nullptr, *m_counts = nullptr, *m_means = nullptr;
};

}  // namespace detail

template <class T, class ExecSpace>
std::size_t key_mean_workspace_size(const ExecSpace& exec, const Problem& problem) {
  return detail::KeyMeanCall<T, ExecSpace>(exec, problem).workspace_bytes();
}

template <class T, class ExecSpace>
void remove_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<KeyMeanOutputs<ExecSpace, T>>& outputs,
                     const std::type_identity_t<Workspace<ExecSpace>>& workspace, const KeyMeanOptions& options) {
  const auto& [out, mean] = outputs;
  if (options.causal && !options.sees_future)
    throw InvalidArgument(
        "LinAttn: the mean of all keys sees the future, so later tokens would change earlier rows "
        "under a causal mask; use remove_given_key_mean, or ask for it with sees_future");
  detail::KeyMeanCall<T, ExecSpace> call(exec, inputs);
  const Problem& p = call.problem();
  detail::require_output("k without its mean", out, {p.batch, p.kv_heads, p.nk, p.d});
  if (mean.present()) detail::require_output("mean of k", mean, {p.batch, p.kv_heads, p.d});
  call.use_workspace(workspace);
  const detail::Region region("LinAttn::remove_key_mean");
  call.find_mean(mean);
  call.subtract(out);
}

template <class T, class ExecSpace>
void remove_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                     const std::type_identity_t<KeyMeanOutputs<ExecSpace, T>>& outputs, const KeyMeanOptions& options) {
  const std::size_t bytes = detail::KeyMeanCall<T, ExecSpace>(exec, inputs).workspace_bytes();
  detail::with_own_workspace(exec, bytes, [&](const Workspace<ExecSpace>& workspace) {
    remove_key_mean<T>(exec, inputs, outputs, workspace, options);
  });
}

template <class T, class ExecSpace>
void remove_given_key_mean(const ExecSpace& exec, const std::type_identity_t<KeyMeanInputs<ExecSpace, T>>& inputs,
                           const std::type_identity_t<TensorRef<const double, 2, ExecSpace>>& mean,
                           const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& out) {
  detail::KeyMeanCall<T, ExecSpace> call(exec, inputs);
  const Problem& p = call.problem();
  detail::require_output("k without its mean", out, {p.batch, p.kv_heads, p.nk, p.d});
  detail::require_shape("given mean of k", mean, {p.kv_heads, p.d});
  const detail::Region region("LinAttn::remove_given_key_mean");
  call.subtract(out, mean.data(), 0, mean.stride(0), mean.stride(1));
}

template <class T, class ExecSpace>
void remove_key_mean_backward(const ExecSpace& exec, const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& d_k,
                              const std::type_identity_t<TensorRef<const std::uint8_t, 2, ExecSpace>>& key_mask,
                              const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  detail::KeyMeanCall<T, ExecSpace> call(exec, {d_k, key_mask});
  const Problem& p = call.problem();
  detail::require_output("gradient of k", d_k, {p.batch, p.kv_heads, p.nk, p.d});
  call.use_workspace(workspace);
  const detail::Region region("LinAttn::remove_key_mean_backward");
  call.find_mean({});
  call.subtract(d_k);
}

template <class T, class ExecSpace>
void remove_key_mean_backward(const ExecSpace& exec, const std::type_identity_t<TensorRef<T, 4, ExecSpace>>& d_k,
                              const std::type_identity_t<TensorRef<const std::uint8_t, 2, ExecSpace>>& key_mask) {
  const std::size_t bytes = detail::KeyMeanCall<T, ExecSpace>(exec, {d_k, key_mask}).workspace_bytes();
  detail::with_own_workspace(exec, bytes, [&](const Workspace<ExecSpace>& workspace) {
    remove_key_mean_backward<T>(exec, d_k, key_mask, workspace);
  });
}

}  // namespace LinAttn
