// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <linattn/linattn.hpp>
#include <string>
#include <type_traits>

/// \file case.hpp
/// One attention problem with all its memory, and what it has to compute and to move at least.

namespace LinAttn::perf {

/// Numbers in (-1, 1), or in (0, 1), from the index; never zero.
struct Fill {
  std::uint64_t seed;
  bool positive;
  KOKKOS_FUNCTION double operator()(std::uint64_t i) const {
    std::uint64_t z = (i + 1 + (seed << 40)) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    const double x = static_cast<double>((z >> 11) | 1) * 0x1p-53;
    return positive ? x : 2 * x - 1;
  }
};

template <class T>
struct FillKernel {
  Fill fill;
  T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    data[i] = static_cast<T>(static_cast<accumulator_t<T>>(fill(static_cast<std::uint64_t>(i))));
  }
};

/// Enqueues filling all of a contiguous View.
template <class ExecSpace, class View>
void fill(const ExecSpace& exec, const View& x, const Fill& numbers) {
  using T = typename View::value_type;
  Kokkos::parallel_for("LinAttn::perf::fill",
                       Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(
                           exec, 0, static_cast<std::int64_t>(x.size())),
                       FillKernel<T>{numbers, x.data()});
}

/// Features of a row of d entries: those of the variant, 2 D for one with a projection, 0 for exact attention.
template <class V>
std::int64_t features_of_row(std::int64_t d) {
  if constexpr (ProjectedVariant<V>)
    return 2 * d;
  else
    return LinAttn::detail::features_of(V{}, d);
}

/// A variant with a projection of 2 D orthogonal rows where it needs one and has none.
template <class V, class ExecSpace>
struct Completed {
  Completed(const V& given, const ExecSpace& exec, std::int64_t d) : variant(given) {
    if constexpr (ProjectedVariant<V>) {
      if (variant.projection.present()) return;
      projection = orthogonal_features(exec, features_of_row<V>(d), d, 1);
      variant.projection = projection;
    }
  }
  V variant;
  Kokkos::View<double**, typename ExecSpace::memory_space> projection{};
};

/// FLOPs of the recurrent minimum (an FMA counts 2) with R features and M = Dv + 1 values a row where
/// rows are normalised: forward 2 R M for each key (state) and each query (output); backward 6 R M for
/// each key (state, dk, dv) and 4 R M for each query (dq, mirrored state). What chunks add earns no
/// credit.
inline double recurrent_flops(const Problem& p, std::int64_t features, bool normalise, Pass pass) {
  const double a_row =
      2.0 * static_cast<double>(features) * static_cast<double>(p.dv + (normalise ? 1 : 0));
  const auto queries = static_cast<double>(p.batch * p.heads * p.nq);
  const auto keys = static_cast<double>(p.batch * p.kv_heads * p.nk);
  return pass == Pass::backward ? a_row * (2 * queries + 3 * keys) : a_row * (queries + keys);
}

/// Pairs of a query and a key of its block in all heads, where blocks of `block` keys have exact
/// attention of their own.
inline double block_pairs(const Problem& p, std::int64_t block, bool causal) {
  double pairs = 0;
  for (std::int64_t i = 0; i < p.nq; ++i) {
    const std::int64_t position = i + p.nk - p.nq, begin = position / block * block;
    pairs += static_cast<double>((causal ? position + 1 : std::min(begin + block, p.nk)) - begin);
  }
  return pairs * static_cast<double>(p.batch * p.heads);
}

/// FLOPs of exact attention inside blocks: forward 2 D for a score and 2 Dv for a weighted value of
/// each pair; backward twice that (dq, dk; dv and the gradient of a weight). Scores that are
/// computed again earn no credit.
inline double block_flops(const Problem& p, std::int64_t block, bool causal, Pass pass) {
  const double forward = 2.0 * block_pairs(p, block, causal) * static_cast<double>(p.d + p.dv);
  return pass == Pass::backward ? 2 * forward : forward;
}

/// Bytes that a pass has to read and write at least: q, k, v, o and, normalised, the denominators
/// forward; q, k, v, do, dq, dk, dv and, normalised, o and the denominators backward.
inline double compulsory_bytes(const Problem& p, bool normalise, Pass pass, std::size_t element,
                               std::size_t accumulator) {
  const auto queries = static_cast<double>(p.batch * p.heads * p.nq);
  const auto keys = static_cast<double>(p.batch * p.kv_heads * p.nk);
  const auto d = static_cast<double>(p.d), dv = static_cast<double>(p.dv);
  const double denominators = normalise ? queries * static_cast<double>(accumulator) : 0;
  const double once = queries * (d + dv) + keys * (d + dv);
  const double elements =
      pass == Pass::backward ? once + queries * d + keys * (d + dv) + (normalise ? queries * dv : 0)
                             : once;
  return elements * static_cast<double>(element) + denominators;
}

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, float>) return "f32";
  if constexpr (std::is_same_v<T, double>) return "f64";
  if constexpr (std::is_same_v<T, float16>) return "f16";
  if constexpr (std::is_same_v<T, bfloat16>) return "bf16";
}

inline const char* pass_name(Pass pass) { return pass == Pass::backward ? "backward" : "forward"; }

/// Tensors, workspace and calls of one problem. Constructing it runs the forward pass once.
template <class T, class V, class ExecSpace>
class Case {
 public:
  using A = accumulator_t<T>;
  using Memory = typename ExecSpace::memory_space;
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Memory>;

  Case(const V& variant, const Problem& problem, const Options& options)
      : m_completed(variant, m_exec, problem.d), m_variant(m_completed.variant), m_p(problem), m_options(options) {
    // Normalised weights of both signs could have a row sum of 0.
    const bool positive = (std::is_same_v<V, Identity> || std::is_same_v<V, Cosine>) && normalise();
    q = filled("q", m_p.heads, m_p.nq, m_p.d, {1, positive});
    k = filled("k", m_p.kv_heads, m_p.nk, m_p.d, {2, positive});
    v = filled("v", m_p.kv_heads, m_p.nk, m_p.dv, {3, false});
    d_o = filled("d_o", m_p.heads, m_p.nq, m_p.dv, {4, false});
    o = Tensor("o", m_p.batch, m_p.heads, m_p.nq, m_p.dv);
    d_q = Tensor("d_q", m_p.batch, m_p.heads, m_p.nq, m_p.d);
    d_k = Tensor("d_k", m_p.batch, m_p.kv_heads, m_p.nk, m_p.d);
    d_v = Tensor("d_v", m_p.batch, m_p.kv_heads, m_p.nk, m_p.dv);
    if (normalise())
      denominator = decltype(denominator)("denominator", m_p.batch, m_p.heads, m_p.nq);
    m_workspace = decltype(m_workspace)(
        "workspace", std::max(workspace_bytes(Pass::forward), workspace_bytes(Pass::backward)));
    run(Pass::forward);
    m_exec.fence();
  }

  const ExecSpace& exec() const { return m_exec; }
  const Problem& problem() const { return m_p; }
  bool normalise() const { return m_options.normalise.value_or(V::normalise_by_default); }
  /// A token is one position of one query head.
  double tokens() const { return static_cast<double>(m_p.batch * m_p.heads * m_p.nq); }
  double flops(Pass pass) const {
    if constexpr (ExactVariant<V>) return block_flops(m_p, std::max<std::int64_t>(m_p.nk, 1), m_options.causal, pass);
    const std::int64_t features = features_of_row<V>(m_p.d);
    const double linear = recurrent_flops(m_p, features, normalise(), pass);
    if constexpr (ProjectedVariant<V>)  // logits, and what their gradients bring back
      return linear + 2.0 * static_cast<double>(features * m_p.d) *
                          static_cast<double>(m_p.batch * (m_p.heads * m_p.nq + m_p.kv_heads * m_p.nk));
    if constexpr (has_local_term_v<V>) {
      const std::int64_t block = m_variant.local_term().block;
      return linear + block_flops(m_p, block > 0 ? block : std::max<std::int64_t>(m_p.d, 1),
                                  m_options.causal, pass);
    }
    return linear;
  }
  double bytes(Pass pass) const {
    return compulsory_bytes(m_p, normalise(), pass, sizeof(T), sizeof(A));
  }
  std::size_t workspace_bytes(Pass pass) const {
    return LinAttn::workspace_size<T>(m_exec, m_variant, m_p, pass, m_options);
  }
  std::size_t saved_bytes() const { return normalise() ? Saved<ExecSpace, T>::bytes(m_p) : 0; }

  /// Enqueues the pass.
  void run(Pass pass) {
    if (pass == Pass::forward)
      LinAttn::forward<T>(m_exec, m_variant, inputs(), saved(), m_workspace, m_options);
    else
      LinAttn::backward<T>(m_exec, m_variant, inputs(), saved(), d_o, gradients(), m_workspace,
                           m_options);
  }
  /// The same in a workspace that is allocated and freed inside.
  void run_with_own_workspace(Pass pass) {
    if (pass == Pass::forward)
      LinAttn::forward<T>(m_exec, m_variant, inputs(), saved(), m_options);
    else
      LinAttn::backward<T>(m_exec, m_variant, inputs(), saved(), d_o, gradients(), m_options);
  }

  Tensor q, k, v, o, d_o, d_q, d_k, d_v;
  Kokkos::View<A***, Kokkos::LayoutRight, Memory> denominator;

 private:
  Inputs<ExecSpace, T> inputs() const { return {.q = q, .k = k, .v = v}; }
  Saved<ExecSpace, T> saved() const {
    Saved<ExecSpace, T> result{.o = o};
    if (normalise()) result.denominator = denominator;
    return result;
  }
  Gradients<ExecSpace, T> gradients() const { return {.q = d_q, .k = d_k, .v = d_v}; }

  Tensor filled(const char* name, std::int64_t heads, std::int64_t rows, std::int64_t columns,
                const Fill& numbers) {
    const Tensor t(Kokkos::view_alloc(std::string(name), Kokkos::WithoutInitializing), m_p.batch,
                   heads, rows, columns);
    fill(m_exec, t, numbers);
    return t;
  }

  ExecSpace m_exec;
  Completed<V, ExecSpace> m_completed;
  V m_variant;
  Problem m_p;
  Options m_options;
  Kokkos::View<std::byte*, Memory> m_workspace;
};

}  // namespace LinAttn::perf
