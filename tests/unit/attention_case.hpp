// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <linattn/linattn.hpp>
#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>
#include <linattn/variants.hpp>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "placed_tensor.hpp"
#include "random.hpp"
#include "seed.hpp"

/// \file attention_case.hpp
/// One attention call: its numbers, the engine's answer, the reference's answer and what lies
/// between.

namespace LinAttn::test_support {

/// Type in which the reference judges results of type T.
template <class T>
using oracle_t = std::conditional_t<std::is_same_v<T, float>, double, long double>;

template <Variant V>
inline constexpr bool has_query_parameter = V::query_parameter != nullptr;
template <Variant V>
inline constexpr bool has_key_parameter = V::key_parameter != nullptr;
template <Variant V>
inline constexpr bool is_scaled = is_scaled_v<V>;
template <Variant V>
inline constexpr bool has_constant = has_constant_v<V>;
template <Variant V>
inline constexpr bool has_score_scale = scale_parameter_name<V>() != nullptr;
template <Variant V>
inline constexpr bool has_local_term = has_local_term_v<V>;
/// Whether rows of no entries have weights.
template <Variant V>
inline constexpr bool weighs_empty_rows =
    has_constant<V> || ExactVariant<V> || ProjectedVariant<V> || std::is_same_v<V, Taylor>;

/// R of a row of d entries, as test cases have it; 0 of exact attention.
template <Variant V>
std::int64_t features_of_row(std::int64_t d) {
  if (ProjectedVariant<V>)  // blocks of orthogonal rows and a part of one; few for the reference where rows are wide
    return d <= 32 ? 2 * d + 3 : d / 2 + 3;
  return LinAttn::detail::features_of(V{}, d);
}
/// Whether a state of rows of d entries is small enough for the reference and for many calls.
template <Variant V>
bool has_small_state(std::int64_t d) {
  return features_of_row<V>(d) <= 4096;
}

/// Whether the variant takes these options. Exact attention is normalised, and has no noise and no centre.
template <Variant V>
bool takes(const Options& options) {
  return LinearVariant<V> || (options.normalise.value_or(true) && !(options.dropout.p > 0) && !options.center_v &&
                              options.small_normaliser == SmallNormaliser::check);
}

/// Sums over keys, row-major: S (M,Hkv,R,Dv), z (M,Hkv,R), shift (M,Hkv,R) of scaled maps, t (M,Hkv,Dv)
/// and m (M) of variants with a constant, for which some numbers are taken if there are none.
struct StateValues {
  std::vector<double> S, z;
  std::vector<int> shift;
  std::vector<double> t{};
  std::vector<std::int64_t> m{};
};

/// Settings of affine attention that other variants lack; softmax and taylor have a scale, too.
struct AffineSettings {
  std::optional<double> scale{};
  QkNorm qk_norm = QkNorm::l2;
  double norm_eps = 1e-6;
};

/// Settings of the block branch that other variants lack. Factors (H,Dv) where they are combined by some.
struct BlockSettings {
  std::int64_t block = 0;
  Combine combine = Combine::average;
  std::vector<double> diag_r{}, diag_p{};
  bool keeps_linear = true;  ///< whether the linear branch is kept where factors have gradients
};

/// The numbers of one call, row-major and exactly representable in the scalar of the call.
struct Case {
  Problem problem;
  std::vector<double> q, k, v, d_o;
  std::vector<double> alpha, beta;  ///< parameters by head; empty where the variant has none
  std::vector<double> constant;     ///< likewise
  std::vector<double> projection;   ///< (features_of_row(D), D); empty where the variant has none
  AffineSettings affine{};
  BlockSettings diag{};

  std::vector<std::uint8_t> key_mask;                    ///< (B,Nk), or empty
  std::vector<std::int64_t> cu_seqlens_q, cu_seqlens_k;  ///< offsets of packed members, or empty
  std::optional<StateValues> initial;                    ///< state before the first key
  std::optional<StateValues> last_cotangent;  ///< S and z only: dL / d(state after the last key)
  bool wants_last = false;                    ///< whether the state after the last key is wanted
};

/// Makes a case one of packed members with these numbers of queries and keys.
inline void pack(Case& c, const std::vector<std::int64_t>& queries,
                 const std::vector<std::int64_t>& keys) {
  const auto offsets = [](const std::vector<std::int64_t>& extents) {
    std::vector<std::int64_t> result{0};
    for (const std::int64_t extent : extents) result.push_back(result.back() + extent);
    return result;
  };
  const auto longest = [](const std::vector<std::int64_t>& extents) {
    return extents.empty() ? 0 : *std::max_element(extents.begin(), extents.end());
  };
  c.cu_seqlens_q = offsets(queries);
  c.cu_seqlens_k = offsets(keys);
  c.problem.members = static_cast<std::int64_t>(queries.size());
  c.problem.longest_q = longest(queries);
  c.problem.longest_k = longest(keys);
}

inline std::int64_t query_count(const Problem& p) { return p.batch * p.heads * p.nq * p.d; }
inline std::int64_t key_count(const Problem& p) { return p.batch * p.kv_heads * p.nk * p.d; }
inline std::int64_t value_count(const Problem& p) { return p.batch * p.kv_heads * p.nk * p.dv; }
inline std::int64_t output_count(const Problem& p) { return p.batch * p.heads * p.nq * p.dv; }

template <class T>
void round_to(std::vector<double>& x) {
  for (double& element : x) element = static_cast<double>(static_cast<T>(element));
}

/// Normal entries, some of them exactly 0. Normalised identity and cosine get entries near 1: with weights
/// of both signs their row sums could pass through 0.
template <class T, Variant V>
std::vector<double> random_entries(Random& random, std::int64_t n, bool normalise) {
  const auto kernel = reference::kernel_from_name(V::name);
  const bool signed_weights = kernel == reference::Kernel::identity || kernel == reference::Kernel::cosine;
  auto x = signed_weights && normalise ? random.normals(n, 1, 0.3) : random.normals(n);
  if (!(signed_weights && normalise))
    for (std::size_t i = 5; i < x.size(); i += 11) x[i] = 0;
  round_to<T>(x);
  return x;
}

template <class T, Variant V>
Case random_case(const Problem& problem, const Options& options, std::uint64_t salt = 0) {
  Random random(seed() + salt);
  const bool normalise = options.normalise.value_or(V::normalise_by_default);
  Case c;
  c.problem = problem;
  c.q = random_entries<T, V>(random, query_count(problem), normalise);
  c.k = random_entries<T, V>(random, key_count(problem), normalise);
  c.v = random.normals(value_count(problem));
  c.d_o = random.normals(output_count(problem));
  round_to<T>(c.v);
  round_to<T>(c.d_o);
  if (has_query_parameter<V>) c.alpha = random.uniforms(problem.heads, 0.5, 1.2);
  if (has_key_parameter<V>) c.beta = random.uniforms(problem.kv_heads, 0.5, 1.2);
  if (ProjectedVariant<V>)
    c.projection = LinAttn::detail::orthogonal_rows(features_of_row<V>(problem.d), problem.d, seed());
  if (has_constant<V>) c.constant = random.uniforms(problem.heads, 1.2, 2);  // beyond a: weights are positive
  return c;
}

template <Variant V>
V make_variant(const Parameter& query, const Parameter& key, const Parameter& constant = 1.0,
               const AffineSettings& affine = {}, const Projection& projection = {}) {
  if constexpr (std::is_same_v<V, Affine>)
    return {.a = query,
            .b = constant,
            .scale = affine.scale,
            .qk_norm = affine.qk_norm,
            .norm_eps = affine.norm_eps,
            .max_norm_sees_future = true};
  else if constexpr (std::is_same_v<V, Softmax> || std::is_same_v<V, Taylor>)
    return {.scale = affine.scale.value_or(0)};
  else if constexpr (ProjectedVariant<V>)
    return {.projection = projection};
  else if constexpr (has_query_parameter<V> && has_key_parameter<V>)
    return V{query, key};
  else
    return V{};
}

/// A variant to ask for plans and sizes with, for rows of d entries: nothing lies behind its projection.
template <Variant V, class ExecSpace>
V variant_for_plans(std::int64_t d) {
  static double nothing = 0;
  using View = Kokkos::View<double**, ExecSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  return make_variant<V>(1.0, 1.0, 1.0, {},
                         View(&nothing, static_cast<std::size_t>(features_of_row<V>(d)), static_cast<std::size_t>(d)));
}

/// What the reference has to be told. A variant that it does not know fails here, by its name.
template <Variant V>
reference::Settings settings_of(const Case& c, const Options& options) {
  reference::Settings settings;
  settings.kernel = reference::kernel_from_name(V::name);
  settings.causal = options.causal;
  settings.normalise = options.normalise.value_or(V::normalise_by_default);
  settings.scale = options.scale;
  settings.alpha = c.alpha;
  settings.beta = c.beta;
  settings.key_mask = c.key_mask;
  settings.cu_seqlens_q = c.cu_seqlens_q;
  settings.cu_seqlens_k = c.cu_seqlens_k;
  if constexpr (std::is_same_v<V, Affine>) {
    settings.constant = c.constant;
    settings.score_scale = make_variant<V>(1.0, 1.0, 1.0, c.affine).score_scale(c.problem.d);
    settings.norm = c.affine.qk_norm == QkNorm::l2     ? reference::Norm::l2
                    : c.affine.qk_norm == QkNorm::none ? reference::Norm::none
                                                       : reference::Norm::max;
    settings.norm_eps = c.affine.norm_eps;
  }
  settings.projection = c.projection;
  if constexpr (std::is_same_v<V, Softmax> || std::is_same_v<V, Taylor>)
    settings.score_scale = make_variant<V>(1.0, 1.0, 1.0, c.affine).score_scale(c.problem.d);
  if constexpr (has_local_term<V>) {
    settings.block = c.diag.block;
    settings.combine = c.diag.combine == Combine::average ? reference::Combine::average
                       : c.diag.combine == Combine::scale ? reference::Combine::scale
                                                          : reference::Combine::ratio;
    settings.diag_r = c.diag.diag_r;
    settings.diag_p = c.diag.diag_p;
  }
  if (options.small_normaliser == SmallNormaliser::clamp) settings.least_normaliser = options.least_normaliser;
  settings.dropout_p = options.dropout.p;
  settings.seed = options.dropout.seed;
  settings.offset = options.dropout.offset;
  return settings;
}

/// What a call left; a part that was not asked for is empty.
template <class T>
struct Outcome {
  std::vector<T> o;
  std::vector<accumulator_t<T>> denominator;
  std::vector<T> q, k, v;
  std::vector<double> alpha, beta, constant, scale;
  std::vector<accumulator_t<T>> S, z, t;  ///< state after the last key
  std::vector<int> shift;
  std::vector<std::int64_t> m;
  std::vector<accumulator_t<T>> d_S, d_z, d_t;  ///< gradient of the initial state
  std::vector<T> centred;                       ///< o before the centre was added
  std::vector<T> linear;                        ///< the linear branch of a joined one
  std::vector<double> diag_r, diag_p;
};

template <class T>
::testing::AssertionResult same_bits(const Outcome<T>& found, const Outcome<T>& expected) {
  const auto check = [](const char* name, const auto& a,
                        const auto& b) -> ::testing::AssertionResult {
    const ::testing::AssertionResult same = same_bits(a, b);
    if (same) return same;
    return ::testing::AssertionFailure() << name << ": " << same.message();
  };
  for (const auto& result :
       {check("o", found.o, expected.o),
        check("denominator", found.denominator, expected.denominator),
        check("dq", found.q, expected.q), check("dk", found.k, expected.k),
        check("dv", found.v, expected.v), check("d alpha", found.alpha, expected.alpha),
        check("d beta", found.beta, expected.beta), check("S", found.S, expected.S),
        check("z", found.z, expected.z), check("shift", found.shift, expected.shift),
        check("dS", found.d_S, expected.d_S), check("dz", found.d_z, expected.d_z),
        check("d constant", found.constant, expected.constant),
        check("d scale", found.scale, expected.scale), check("t", found.t, expected.t),
        check("m", found.m, expected.m), check("dt", found.d_t, expected.d_t),
        check("centred", found.centred, expected.centred),
        check("linear", found.linear, expected.linear),
        check("d diag_r", found.diag_r, expected.diag_r),
        check("d diag_p", found.diag_p, expected.diag_p)})
    if (!result) return result;
  return ::testing::AssertionSuccess();
}

/// Bytes for a workspace, all of them set, at an odd address and between guards.
template <class ExecSpace>
class Arena {
 public:
  explicit Arena(std::size_t bytes, std::size_t shift = 3, unsigned char content = 0xff)
      : m_bytes(bytes), m_begin(margin + shift) {
    m_device = Buffer(Kokkos::view_alloc(std::string("test::arena"), Kokkos::WithoutInitializing),
                      m_begin + bytes + margin);
    m_host = Kokkos::create_mirror_view(m_device);
    for (std::size_t i = 0; i < m_host.extent(0); ++i) m_host(i) = inside(i) ? content : guard;
    Kokkos::deep_copy(m_device, m_host);
  }

  Workspace<ExecSpace> workspace() const {
    return Kokkos::View<unsigned char*, typename ExecSpace::memory_space,
                        Kokkos::MemoryTraits<Kokkos::Unmanaged>>(m_device.data() + m_begin,
                                                                 m_bytes);
  }

  bool guards_intact() {
    Kokkos::deep_copy(m_host, m_device);
    for (std::size_t i = 0; i < m_host.extent(0); ++i)
      if (!inside(i) && m_host(i) != guard) return false;
    return true;
  }

 private:
  using Buffer = Kokkos::View<unsigned char*, typename ExecSpace::memory_space>;
  static constexpr std::size_t margin = 256;
  static constexpr unsigned char guard = 0xa5;
  bool inside(std::size_t i) const { return i >= m_begin && i < m_begin + m_bytes; }

  std::size_t m_bytes;
  std::size_t m_begin;
  Buffer m_device{};
  typename Buffer::HostMirror m_host{};
};

/// Memory layout of every argument.
struct Arrangement {
  Layout q = Layout::right, k = Layout::right, v = Layout::right;
  Layout o = Layout::right, denominator = Layout::right, d_o = Layout::right;
  Layout d_q = Layout::right, d_k = Layout::right, d_v = Layout::right;
  Layout parameter = Layout::right, d_parameter = Layout::right;
  Layout mask = Layout::right, state = Layout::right, d_state = Layout::right;
  Layout centred = Layout::right, linear = Layout::right;
  Layout factors = Layout::right, d_factors = Layout::right;
  Layout projection = Layout::right;
};

/// Which gradients to ask for; parameters only where the variant has them.
struct Wanted {
  bool q = true, k = true, v = true, query_parameter = true, key_parameter = true, state = true;
  bool constant = true, scale = true, factors = true;
};

/// A state of a problem in memory.
template <class T, class ExecSpace, Variant V>
struct PlacedState {
  PlacedTensor<accumulator_t<T>, 4, ExecSpace> S;
  PlacedTensor<accumulator_t<T>, 3, ExecSpace> z;
  PlacedTensor<int, 3, ExecSpace> shift;
  PlacedTensor<accumulator_t<T>, 3, ExecSpace> t;
  PlacedTensor<std::int64_t, 1, ExecSpace> m;

  PlacedState() = default;
  PlacedState(const Problem& p, std::int64_t features, Layout layout)
      : S{{p.sequences(), p.kv_heads, features, p.dv}, layout},
        z{{p.sequences(), p.kv_heads, features}, layout},
        shift{{p.sequences(), p.kv_heads, features}, layout},
        t{{p.sequences(), p.kv_heads, p.dv}, layout},
        m{{p.sequences()}, layout} {}

  State<ExecSpace, T> ref() const {
    State<ExecSpace, T> result{.S = S.ref(), .z = z.ref()};
    if (is_scaled<V>) result.shift = shift.ref();
    if (has_constant<V>) {
      result.t = t.ref();
      result.m = m.ref();
    }
    return result;
  }
  void set(const StateValues& values) {
    S.set(values.S);
    z.set(values.z);
    if (!values.shift.empty()) shift.set(values.shift);
    std::vector<double> sums(static_cast<std::size_t>(t.count()));
    for (std::size_t n = 0; n < sums.size(); ++n) sums[n] = 0.25 * static_cast<double>(n % 7) - 0.5;
    t.set(values.t.empty() ? sums : values.t);
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(m.count()), 50);
    m.set(values.m.empty() ? counts : values.m);
  }
  bool guards_intact() {
    return S.guards_intact() && z.guards_intact() && shift.guards_intact() && t.guards_intact() &&
           m.guards_intact();
  }
};

/// A call of the engine with all its memory. Every output starts as NaN, every tensor lies between
/// NaNs, and the workspace has exactly the bytes asked for, all set to NaN.
template <class T, class ExecSpace, Variant V>
class Attention {
 public:
  using A = accumulator_t<T>;

  Attention(const Case& c, const Options& options, const Arrangement& at = {},
            const ExecSpace& exec = ExecSpace());

  bool normalise() const { return m_options.normalise.value_or(V::normalise_by_default); }
  V variant() const {
    V result = make_variant<V>(alpha.view(), beta.view(), constant.view(), m_case.affine, projection.view());
    if constexpr (has_local_term<V>) {
      result.block = m_case.diag.block;
      result.combine = m_case.diag.combine;
      if (result.combine != Combine::average) result.diag_r = diag_r.view();
      if (result.combine == Combine::scale) result.diag_p = diag_p.view();
    }
    return result;
  }
  Inputs<ExecSpace, T> inputs() const;
  Saved<ExecSpace, T> saved() const;
  Cotangents<ExecSpace, T> cotangents() const;
  Gradients<ExecSpace, T> gradients(const Wanted& wanted) const;
  std::size_t workspace_bytes(Pass pass) const {
    return LinAttn::workspace_size<T>(m_exec, variant(), m_case.problem, pass, m_options);
  }
  Plan plan(Pass pass) const {
    return LinAttn::plan<T>(m_exec, variant(), m_case.problem, pass, m_options);
  }

  void forward();
  void backward(const Wanted& wanted = {});

  /// All results; complains if anything else was touched.
  Outcome<T> outcome(const Wanted& wanted = {});

  PlacedTensor<T, 4, ExecSpace> q, k, v, o, d_o, d_q, d_k, d_v;
  PlacedTensor<A, 3, ExecSpace> denominator;
  PlacedTensor<double, 1, ExecSpace> alpha, beta, d_alpha, d_beta;
  PlacedTensor<double, 1, ExecSpace> constant, d_constant, d_scale;
  PlacedTensor<double, 2, ExecSpace> projection;
  PlacedTensor<std::uint8_t, 2, ExecSpace> mask;
  PlacedTensor<T, 4, ExecSpace> centred;  ///< used with center_v
  PlacedTensor<T, 4, ExecSpace> linear;   ///< used where factors have gradients
  PlacedTensor<double, 2, ExecSpace> diag_r, diag_p, d_diag_r, d_diag_p;

  PlacedState<T, ExecSpace, V> initial, last, d_initial, d_last;

 private:
  bool has_factors() const { return has_local_term<V> && m_case.diag.combine != Combine::average; }
  bool keeps_linear() const { return has_factors() && m_case.diag.keeps_linear; }
  static SequenceOffsets offsets(const std::vector<std::int64_t>& values) {
    return {values.data(), {static_cast<std::int64_t>(values.size())}, {1}};
  }

  const Case& m_case;
  Options m_options;
  ExecSpace m_exec;
};

template <class T, class ExecSpace, Variant V>
Attention<T, ExecSpace, V>::Attention(const Case& c, const Options& options, const Arrangement& at,
                                      const ExecSpace& exec)
    : m_case(c), m_options(options), m_exec(exec) {
  const Problem& p = c.problem;
  q = {{p.batch, p.heads, p.nq, p.d}, at.q};
  k = {{p.batch, p.kv_heads, p.nk, p.d}, at.k};
  v = {{p.batch, p.kv_heads, p.nk, p.dv}, at.v};
  o = {{p.batch, p.heads, p.nq, p.dv}, at.o};
  denominator = {{p.batch, p.heads, p.nq}, at.denominator};
  d_o = {{p.batch, p.heads, p.nq, p.dv}, at.d_o};
  d_q = {q.extents(), at.d_q};
  d_k = {k.extents(), at.d_k};
  d_v = {v.extents(), at.d_v};
  alpha = {{static_cast<std::int64_t>(c.alpha.size())}, at.parameter};
  beta = {{static_cast<std::int64_t>(c.beta.size())}, at.parameter};
  d_alpha = {alpha.extents(), at.d_parameter};
  d_beta = {beta.extents(), at.d_parameter};
  constant = {{static_cast<std::int64_t>(c.constant.size())}, at.parameter};
  d_constant = {constant.extents(), at.d_parameter};
  d_scale = {{has_score_scale<V> ? p.heads : 0}, at.d_parameter};
  constant.set(c.constant);
  projection = {{ProjectedVariant<V> ? features_of_row<V>(p.d) : 0, p.d}, at.projection};
  projection.set(c.projection);
  if (options.center_v) centred = {o.extents(), at.centred};
  if (has_factors()) {
    linear = {o.extents(), at.linear};
    diag_r = {{p.heads, p.dv}, at.factors};
    diag_r.set(c.diag.diag_r);
    d_diag_r = {{p.heads, p.dv}, at.d_factors};
    if (c.diag.combine == Combine::scale) {
      diag_p = {{p.heads, p.dv}, at.factors};
      diag_p.set(c.diag.diag_p);
      d_diag_p = {{p.heads, p.dv}, at.d_factors};
    }
  }
  q.set(c.q);
  k.set(c.k);
  v.set(c.v);
  d_o.set(c.d_o);
  alpha.set(c.alpha);
  beta.set(c.beta);
  if (!c.key_mask.empty()) {
    mask = {{p.batch, p.nk}, at.mask};
    mask.set(c.key_mask);
  }
  const std::int64_t features = features_of_row<V>(p.d);
  last = {p, features, at.state};
  if (c.initial) {
    initial = {p, features, at.state};
    d_initial = {p, features, at.d_state};
    initial.set(*c.initial);
  }
  if (c.last_cotangent) {
    d_last = {p, features, at.d_state};
    d_last.set(*c.last_cotangent);
  }
}

template <class T, class ExecSpace, Variant V>
Inputs<ExecSpace, T> Attention<T, ExecSpace, V>::inputs() const {
  Inputs<ExecSpace, T> result{.q = q.input(), .k = k.input(), .v = v.input()};
  if (!m_case.key_mask.empty()) result.key_mask = mask.input();
  if (!m_case.cu_seqlens_q.empty()) {
    result.cu_seqlens_q = offsets(m_case.cu_seqlens_q);
    result.cu_seqlens_k = offsets(m_case.cu_seqlens_k);
  }
  if (m_case.initial) result.state = initial.ref().as_const();
  return result;
}

template <class T, class ExecSpace, Variant V>
Saved<ExecSpace, T> Attention<T, ExecSpace, V>::saved() const {
  Saved<ExecSpace, T> result{.o = o.ref()};
  if (normalise()) result.denominator = denominator.ref();
  if (m_case.wants_last) result.state = last.ref();
  if (m_options.center_v) result.centred = centred.ref();
  if (keeps_linear()) result.linear = linear.ref();
  return result;
}

template <class T, class ExecSpace, Variant V>
Cotangents<ExecSpace, T> Attention<T, ExecSpace, V>::cotangents() const {
  Cotangents<ExecSpace, T> result{.o = d_o.input()};
  if (m_case.last_cotangent) {
    result.state = {.S = d_last.S.input(), .z = d_last.z.input()};
    if (has_constant<V>) result.state.t = d_last.t.input();
    if (is_scaled<V>) result.state.shift = last.shift.input();
  }
  return result;
}

template <class T, class ExecSpace, Variant V>
Gradients<ExecSpace, T> Attention<T, ExecSpace, V>::gradients(const Wanted& wanted) const {
  Gradients<ExecSpace, T> result;
  if (wanted.q) result.q = d_q.ref();
  if (wanted.k) result.k = d_k.ref();
  if (wanted.v) result.v = d_v.ref();
  if (has_query_parameter<V> && wanted.query_parameter) result.query_parameter = d_alpha.ref();
  if (has_key_parameter<V> && wanted.key_parameter) result.key_parameter = d_beta.ref();
  if (has_constant<V> && wanted.constant) result.constant = d_constant.ref();
  if (has_score_scale<V> && wanted.scale) result.scale = d_scale.ref();
  if (keeps_linear() && wanted.factors) {
    result.diag_r = d_diag_r.ref();
    if (m_case.diag.combine == Combine::scale) result.diag_p = d_diag_p.ref();
  }
  if (m_case.initial && wanted.state) {
    result.state = {.S = d_initial.S.ref(), .z = d_initial.z.ref()};
    if (has_constant<V>) result.state.t = d_initial.t.ref();
  }
  return result;
}

template <class T, class ExecSpace, Variant V>
void Attention<T, ExecSpace, V>::forward() {
  Arena<ExecSpace> arena(workspace_bytes(Pass::forward));
  LinAttn::forward<T>(m_exec, variant(), inputs(), saved(), arena.workspace(), m_options);
  m_exec.fence();
  EXPECT_TRUE(arena.guards_intact()) << "forward wrote outside its workspace";
}

template <class T, class ExecSpace, Variant V>
void Attention<T, ExecSpace, V>::backward(const Wanted& wanted) {
  Arena<ExecSpace> arena(workspace_bytes(Pass::backward), 5);
  LinAttn::backward<T>(m_exec, variant(), inputs(), saved(), cotangents(), gradients(wanted),
                       arena.workspace(), m_options);
  m_exec.fence();
  EXPECT_TRUE(arena.guards_intact()) << "backward wrote outside its workspace";
}

template <class T, class ExecSpace, Variant V>
Outcome<T> Attention<T, ExecSpace, V>::outcome(const Wanted& wanted) {
  Outcome<T> result;
  result.o = o.get();
  if (normalise()) result.denominator = denominator.get();
  if (wanted.q) result.q = d_q.get();
  if (wanted.k) result.k = d_k.get();
  if (wanted.v) result.v = d_v.get();
  if (wanted.query_parameter) result.alpha = d_alpha.get();
  if (wanted.key_parameter) result.beta = d_beta.get();
  if (wanted.constant) result.constant = d_constant.get();
  if (wanted.scale) result.scale = d_scale.get();
  if (m_options.center_v) result.centred = centred.get();
  if (keeps_linear()) {
    result.linear = linear.get();
    if (wanted.factors) {
      result.diag_r = d_diag_r.get();
      if (m_case.diag.combine == Combine::scale) result.diag_p = d_diag_p.get();
    }
  }
  if (m_case.wants_last) {
    result.S = last.S.get();
    result.z = last.z.get();
    if (is_scaled<V>) result.shift = last.shift.get();
    if (has_constant<V>) {
      result.t = last.t.get();
      result.m = last.m.get();
    }
  }
  if (m_case.initial && wanted.state) {
    result.d_S = d_initial.S.get();
    result.d_z = d_initial.z.get();
    if (has_constant<V>) result.d_t = d_initial.t.get();
  }
  EXPECT_TRUE(last.guards_intact() && initial.guards_intact() && d_initial.guards_intact() &&
              d_last.guards_intact())
      << "memory between or around the states was written";
  EXPECT_TRUE(q.guards_intact() && k.guards_intact() && v.guards_intact() && o.guards_intact() &&
              denominator.guards_intact() && d_o.guards_intact() && d_q.guards_intact() &&
              d_k.guards_intact() && d_v.guards_intact() && d_alpha.guards_intact() &&
              d_beta.guards_intact() && projection.guards_intact() && d_constant.guards_intact() && d_scale.guards_intact() &&
              centred.guards_intact() && linear.guards_intact() && d_diag_r.guards_intact() &&
              d_diag_p.guards_intact())
      << "memory between or around the tensors was written";
  return result;
}

/// Forward and backward of one case.
template <class T, class ExecSpace, Variant V>
Outcome<T> attend(const Case& c, const Options& options, const Arrangement& at = {},
                  const Wanted& wanted = {}) {
  Attention<T, ExecSpace, V> attention(c, options, at);
  attention.forward();
  attention.backward(wanted);
  return attention.outcome(wanted);
}

/// Forward alone.
template <class T, class ExecSpace, Variant V>
std::vector<T> attend_forward(const Case& c, const Options& options) {
  Attention<T, ExecSpace, V> attention(c, options);
  attention.forward();
  return attention.o.get();
}

// ---- the reference ------------------------------------------------------------------------------

/// The reference's answer and the magnitudes of its terms.
template <class Real>
struct Expected {
  reference::Settings settings;
  std::vector<Real> o;
  reference::GradientSet<Real> gradient;
  reference::Magnitudes<Real> magnitude;
};

/// Smallest magnitude of an exponential feature below which type T resolves no more.
template <class T>
inline constexpr double underflow_floor = static_cast<double>(std::numeric_limits<T>::min()) /
                                          (std::numeric_limits<T>::epsilon() / 2);

template <class T, Variant V>
Expected<oracle_t<T>> expected_of(const Case& c, const Options& options, double floor = 0) {
  using Real = oracle_t<T>;
  const auto converted = [](const std::vector<double>& x) {
    return std::vector<Real>(x.begin(), x.end());
  };
  const auto settings = settings_of<V>(c, options);
  const reference::Tensors<Real> tensors{converted(c.q), converted(c.k), converted(c.v)};
  const auto d_o = converted(c.d_o);
  return {settings, reference::forward(c.problem, settings, tensors),
          reference::backward(c.problem, settings, tensors, d_o),
          reference::magnitudes(c.problem, settings, tensors, d_o, static_cast<Real>(floor))};
}

/// Largest error of each quantity in units of its bound, over a test.
inline std::map<std::string, double>& worst_ratios() {
  static std::map<std::string, double> ratios;
  return ratios;
}

/// |found - expected| <= roundings u magnitude + u |expected| for every element, u the unit
/// roundoff of T. `found` may be of a wider type than T (sums of parameters).
template <class T, class Found, class Real>
::testing::AssertionResult within_bounds(const char* name, const std::vector<Found>& found,
                                         const std::vector<Real>& expected,
                                         const std::vector<Real>& magnitude, double roundings) {
  if (found.size() != expected.size() || magnitude.size() != expected.size())
    return ::testing::AssertionFailure()
           << name << " has " << found.size() << " elements, expected " << expected.size();
  const Real u = std::numeric_limits<T>::epsilon() / 2;
  double worst = 0;
  std::size_t where = 0;
  for (std::size_t n = 0; n < found.size(); ++n) {
    const Real error = std::abs(static_cast<Real>(found[n]) - expected[n]);
    if (error == 0) continue;
    const Real bound = static_cast<Real>(roundings) * u * magnitude[n] + u * std::abs(expected[n]);
    const double ratio = error <= bound ? static_cast<double>(error / bound)
                                        : std::max(2.0, static_cast<double>(error / bound));
    if (!(ratio <= worst)) {
      worst = std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
      where = n;
    }
  }
  double& seen = worst_ratios()[name];
  seen = std::max(seen, worst);
  if (worst <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << ": worst is element " << where << " of " << found.size() << ": " << found[where]
         << ", expected " << expected[where] << ", off by " << worst
         << " times its bound (magnitude " << magnitude[where] << ", " << roundings
         << " roundings)";
}

/// The engine's answer lies within the a-priori bounds of the reference's, element by element.
/// \param run tokens that the engine adds up before it adds to a total: the chunk of its plan
template <class T, Variant V>
::testing::AssertionResult agrees(const Case& c, const Outcome<T>& found,
                                  const Expected<oracle_t<T>>& expected, int run) {
  const auto counts = reference::rounding_counts(c.problem, expected.settings, run);
  const auto& g = expected.gradient;
  const auto& m = expected.magnitude;
  for (const auto& result :
       {within_bounds<T>("o", found.o, expected.o, m.o, counts.o),
        within_bounds<T>("dq", found.q, g.q, m.q, counts.q),
        within_bounds<T>("dk", found.k, g.k, m.k, counts.k),
        within_bounds<T>("dv", found.v, g.v, m.v, counts.v),
        within_bounds<T>("d alpha", found.alpha, g.alpha, m.alpha, counts.alpha),
        within_bounds<T>("d beta", found.beta, g.beta, m.beta, counts.beta),
        within_bounds<T>("d constant", found.constant, g.constant, m.constant, counts.constant),
        within_bounds<T>("d scale", found.scale, g.score_scale, m.score_scale,
                         counts.score_scale)})
    if (!result) return result;
  for (const auto& result : {found.diag_r.empty() ? ::testing::AssertionSuccess()
                                                  : within_bounds<T>("d diag_r", found.diag_r, g.diag_r, m.diag_r, counts.diag_r),
                             found.diag_p.empty() ? ::testing::AssertionSuccess()
                                                  : within_bounds<T>("d diag_p", found.diag_p, g.diag_p, m.diag_p, counts.diag_p)})
    if (!result) return result;
  return ::testing::AssertionSuccess();
}

/// Runs the engine and holds it to the reference.
template <class T, class ExecSpace, Variant V>
::testing::AssertionResult engine_agrees(const Case& c, const Options& options,
                                         const Arrangement& at = {}, double floor = 0) {
  Attention<T, ExecSpace, V> attention(c, options, at);
  attention.forward();
  attention.backward();
  return agrees<T, V>(c, attention.outcome(), expected_of<T, V>(c, options, floor),
                      attention.plan(Pass::backward).chunk);
}

/// Prints, after each test, how near to their bounds its results came.
class BoundedTest : public ::testing::Test {
 protected:
  void SetUp() override { worst_ratios().clear(); }
  void TearDown() override {
    if (worst_ratios().empty()) return;
    std::cout << "[  error/bound ]";
    for (const auto& [name, ratio] : worst_ratios()) std::cout << "  " << name << " " << ratio;
    std::cout << std::endl;
  }
};

inline std::string describe(const Problem& problem, const Options& options) {
  std::string text = problem.to_string() + (options.causal ? " causal" : " full");
  if (options.normalise) text += *options.normalise ? " normalised" : " plain";
  return text + " scale=" + std::to_string(options.scale) +
         " chunk=" + std::to_string(options.chunk) +
         " segments=" + std::to_string(options.segments);
}

}  // namespace LinAttn::test_support

// Tests share what attention_case.cpp holds of all this for the shipped variants; another variant
// is compiled where it is used.
#define LINATTN_TEST_INSTANTIATE_ONE(PREFIX, T, EXEC, V)                                       \
  PREFIX template class LinAttn::test_support::Attention<T, EXEC, V>;                          \
  PREFIX template LinAttn::test_support::Outcome<T> LinAttn::test_support::attend<T, EXEC, V>( \
      const LinAttn::test_support::Case&, const LinAttn::Options&,                             \
      const LinAttn::test_support::Arrangement&, const LinAttn::test_support::Wanted&);        \
  PREFIX template std::vector<T> LinAttn::test_support::attend_forward<T, EXEC, V>(            \
      const LinAttn::test_support::Case&, const LinAttn::Options&);                            \
  PREFIX template ::testing::AssertionResult LinAttn::test_support::engine_agrees<T, EXEC, V>( \
      const LinAttn::test_support::Case&, const LinAttn::Options&,                             \
      const LinAttn::test_support::Arrangement&, double);
#define LINATTN_TEST_INSTANTIATE_REFERENCE(PREFIX, T, V)                                \
  PREFIX template LinAttn::test_support::Case LinAttn::test_support::random_case<T, V>( \
      const LinAttn::Problem&, const LinAttn::Options&, std::uint64_t);                 \
  PREFIX template LinAttn::test_support::Expected<LinAttn::test_support::oracle_t<T>>   \
  LinAttn::test_support::expected_of<T, V>(const LinAttn::test_support::Case&,          \
                                           const LinAttn::Options&, double);            \
  PREFIX template ::testing::AssertionResult LinAttn::test_support::agrees<T, V>(       \
      const LinAttn::test_support::Case&, const LinAttn::test_support::Outcome<T>&,     \
      const LinAttn::test_support::Expected<LinAttn::test_support::oracle_t<T>>&, int);
#if defined(LINATTN_TEST_FEW)
#define LINATTN_TEST_SPACES LINATTN_FOR_SERIAL
#else
#define LINATTN_TEST_SPACES LINATTN_FOR_ALL_SPACES
#endif
#define LINATTN_TEST_INSTANTIATE(PREFIX, V)                            \
  LINATTN_TEST_SPACES(LINATTN_TEST_INSTANTIATE_ONE, PREFIX, float, V)  \
  LINATTN_TEST_SPACES(LINATTN_TEST_INSTANTIATE_ONE, PREFIX, double, V) \
  LINATTN_TEST_INSTANTIATE_REFERENCE(PREFIX, float, V)                 \
  LINATTN_TEST_INSTANTIATE_REFERENCE(PREFIX, double, V)
#if defined(LINATTN_TEST_FEW)
#define LINATTN_TEST_INSTANTIATE_ALL(PREFIX)          \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Identity) \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Elu)      \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Lln)      \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Affine)   \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::LlnDiag)  \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Softmax)
#else
#define LINATTN_TEST_INSTANTIATE_ALL(PREFIX)           \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Identity)  \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Elu)       \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Relu)      \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Quadratic) \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Lln)       \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Affine)    \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Taylor)    \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Cosine)    \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Performer) \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::LlnDiag)   \
  LINATTN_TEST_INSTANTIATE(PREFIX, LinAttn::Softmax)
#endif

#if !defined(LINATTN_DEFINES_TEST_INSTANTIATIONS)
LINATTN_TEST_INSTANTIATE_ALL(extern)
#endif
