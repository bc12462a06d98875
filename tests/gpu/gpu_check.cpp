// SPDX-License-Identifier: BSD-3-Clause
//
// A program that needs Kokkos and LinAttn alone, for a machine with a device:
//
//   gpu_check check [--seed=N]
//       the device against the host and the dense reference
//   gpu_check bench [--seconds=S] [--json=FILE] [--device=NAME]
//       forward and backward against the roofs of the device
//
// The device is CUDA where Kokkos has it. Without one, Serial is held against the default host
// space, and the benchmark runs on the latter, so that the program itself is tested everywhere.
// Exit status: 0, 1 if results differ, 2 for a wrong command line.

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <linattn/linattn.hpp>
#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "../../perf/support/case.hpp"
#include "../../perf/support/measure.hpp"

namespace LinAttn::gpu_check {
namespace {

using perf::Fill;
using perf::pass_name;
using perf::type_name;

using Host = Kokkos::DefaultHostExecutionSpace;
#if defined(KOKKOS_ENABLE_CUDA)
using Device = Kokkos::Cuda;
using Timed = Kokkos::Cuda;
#elif defined(KOKKOS_ENABLE_SERIAL)
using Device = Kokkos::Serial;
using Timed = Host;
#else
using Device = Host;
using Timed = Host;
#endif

template <class Body>
void for_each_type(const Body& body) {
  body(std::type_identity<float>{});
  body(std::type_identity<double>{});
  body(std::type_identity<float16>{});
  body(std::type_identity<bfloat16>{});
}

/// Unit roundoff of storage where it is coarser than that of the sums, else 0.
template <class T>
double storage_roundoff() {
  if (std::is_same_v<T, float16>) return 0x1p-11;
  if (std::is_same_v<T, bfloat16>) return 0x1p-8;
  return 0;
}

/// Unit roundoff of the factors of products where TF32 is allowed, else 0.
template <class T>
double factor_roundoff(const Options& options) {
  return options.allow_tf32 && std::is_same_v<accumulator_t<T>, float> ? 0x1p-11 : 0;
}

/// Largest rounding error of storage below the normal range.
template <class T>
double storage_floor() {
  return std::is_same_v<T, float16> ? 0x1p-25 : 0;
}

// ---- cases --------------------------------------------------------------------------------------

struct Spec {
  const char* what;
  Problem problem;
  Options options{};
  bool masked = false;                               ///< a key mask
  std::vector<std::int64_t> packed_q{}, packed_k{};  ///< lengths of members
  bool states = false;                 ///< initial state, final state and its cotangent
  bool decoding = false;               ///< step() instead of the passes
  QkNorm norm = QkNorm::l2;            ///< of affine attention
  Combine combine = Combine::average;  ///< of lln-diag, as is the next
  std::int64_t block = 0;
};

/// Whether a variant has what a case is about.
template <class V>
bool applies(const Spec& spec) {
  const Options& options = spec.options;
  if (ExactVariant<V>)
    return spec.block == 0 && !spec.states && !spec.decoding && options.normalise.value_or(true) &&
           options.dropout.p == 0 && !options.center_v &&
           options.small_normaliser == SmallNormaliser::check;
  if (is_scaled_v<V> && options.small_normaliser == SmallNormaliser::clamp)
    return false;  // row sums that cannot vanish
  if (!has_local_term_v<V>) return spec.block == 0;
  const bool square =
      spec.packed_q.empty() ? spec.problem.nq == spec.problem.nk : spec.packed_q == spec.packed_k;
  return !spec.states && !spec.decoding && options.normalise.value_or(true) &&
         options.dropout.p == 0 && !options.center_v && (options.causal || square);
}

std::vector<Spec> specs() {
  std::vector<Spec> list{
      {"causal", {2, 4, 4, 67, 67, 24, 40}, {.causal = true}},
      {"causal, grouped, Nq < Nk", {1, 4, 2, 50, 131, 64, 33}, {.causal = true}},
      {"full, one key/value head", {2, 3, 1, 45, 83, 33, 65}, {.causal = false}},
      {"causal, plain rows",
       {1, 2, 2, 70, 70, 16, 24},
       {.causal = true, .normalise = false, .scale = 0.25}},
      {"full, plain rows",
       {1, 2, 1, 35, 70, 16, 24},
       {.causal = false, .normalise = false, .scale = -0.5}},
      {"causal, segments", {1, 1, 1, 301, 301, 20, 16}, {.causal = true, .segments = 4}},
      {"full, segments", {1, 1, 1, 150, 301, 20, 16}, {.causal = false, .segments = 3}},
      {"causal, D = Dv = 128", {1, 2, 2, 90, 90, 128, 128}, {.causal = true}},
      {"causal, one head", {1, 1, 1, 130, 130, 96, 112}, {.causal = true}},
      {"full, one head", {1, 1, 1, 90, 130, 40, 72}, {.causal = false}},
      {"causal, windows", {1, 2, 1, 70, 90, 40, 40}, {.causal = true, .tiles = 2}},
      {"full, windows", {1, 2, 1, 70, 90, 40, 40}, {.causal = false, .tiles = 2}},
      {"causal, windows, segments",
       {1, 2, 1, 260, 260, 40, 40},
       {.causal = true, .segments = 3, .tiles = 2}},
      {"causal, noise",
       {1, 4, 2, 70, 90, 24, 39},
       {.causal = true, .dropout = {.p = 0.3, .seed = 5, .offset = 7}}},
      {"full, noise, windows",
       {1, 2, 1, 70, 90, 40, 40},
       {.causal = false, .tiles = 2, .dropout = {.p = 0.3, .seed = 5, .offset = 7}}},
      {"causal, noise, centred values",
       {1, 2, 1, 70, 90, 24, 39},
       {.causal = true, .normalise = true, .dropout = {.p = 0.3}, .center_v = true}},
      {"causal, replaced row sums",
       {1, 2, 1, 70, 90, 24, 20},
       {.causal = true,
        .normalise = true,
        .small_normaliser = SmallNormaliser::clamp,
        .least_normaliser = 1.65}},
      {"full, largest norm, Nq < Nk",
       {2, 4, 2, 300, 700, 24, 20},
       {.causal = false, .segments = 2},
       false,
       {},
       {},
       false,
       false,
       QkNorm::max},
      {"causal, TF32", {1, 4, 2, 90, 131, 64, 64}, {.causal = true, .allow_tf32 = true}},
      {"full, TF32", {1, 2, 1, 90, 131, 64, 128}, {.causal = false, .allow_tf32 = true}},
      {"causal, TF32, plain rows",
       {1, 2, 2, 131, 131, 40, 72},
       {.causal = true, .normalise = false, .scale = 0.25, .allow_tf32 = true}},
      {"one token", {3, 2, 1, 1, 1, 12, 20}, {.causal = true}},
      {"causal, key mask", {2, 2, 1, 61, 75, 24, 20}, {.causal = true}, true},
      {"full, key mask", {2, 2, 1, 61, 75, 24, 20}, {.causal = false}, true},
      {"causal, packed",
       {1, 2, 1, 0, 0, 24, 36},
       {.causal = true},
       false,
       {17, 0, 40, 1},
       {33, 5, 40, 2}},
      {"full, packed", {1, 2, 1, 0, 0, 24, 36}, {.causal = false}, false, {17, 3, 40}, {33, 0, 21}},
      {"causal, states", {2, 4, 2, 70, 70, 24, 40}, {.causal = true}, false, {}, {}, true},
      {"full, states", {2, 4, 2, 40, 70, 24, 40}, {.causal = false}, false, {}, {}, true},
      {"causal, states, windows",
       {1, 2, 1, 70, 70, 40, 40},
       {.causal = true, .tiles = 2},
       false,
       {},
       {},
       true},
      {"causal, states, segments",
       {1, 2, 1, 260, 260, 16, 24},
       {.causal = true, .segments = 3},
       false,
       {},
       {},
       true},
      {"decoding", {3, 4, 2, 1, 1, 40, 72}, {.causal = true}, false, {}, {}, true, true},
      {"decoding, D = Dv = 128",
       {2, 2, 2, 1, 1, 128, 128},
       {.causal = true},
       false,
       {},
       {},
       true,
       true},
      {.what = "causal, blocks of 17, both scaled",
       .problem = {2, 4, 2, 61, 75, 24, 40},
       .options = {.causal = true},
       .combine = Combine::scale,
       .block = 17},
      {.what = "full, blocks of 40, one ratio, key mask",
       .problem = {2, 4, 1, 131, 131, 64, 33},
       .options = {.causal = false},
       .masked = true,
       .combine = Combine::ratio,
       .block = 40},
      {.what = "full, blocks of 16, packed",
       .problem = {1, 2, 1, 0, 0, 64, 64},
       .options = {.causal = false},
       .packed_q = {17, 0, 70, 3},
       .packed_k = {17, 0, 70, 3},
       .block = 16},
      {.what = "causal, blocks of 128, segments, TF32",
       .problem = {1, 1, 1, 301, 301, 64, 128},
       .options = {.causal = true, .segments = 3, .allow_tf32 = true},
       .combine = Combine::scale,
       .block = 128},
  };
  for (Spec& spec : list) {
    if (spec.packed_q.empty()) continue;
    Problem& p = spec.problem;
    p.members = static_cast<std::int64_t>(spec.packed_q.size());
    for (std::size_t m = 0; m < spec.packed_q.size(); ++m) {
      p.nq += spec.packed_q[m];
      p.nk += spec.packed_k[m];
      p.longest_q = std::max(p.longest_q, spec.packed_q[m]);
      p.longest_k = std::max(p.longest_k, spec.packed_k[m]);
    }
  }
  return list;
}

using Numbers = std::vector<double>;

/// What a call reads, rounded to its type.
struct Data {
  Numbers q, k, v, d_o, alpha, beta, constant, projection, diag_r, diag_p, S, z, t, d_S, d_z, d_t;
  std::vector<std::int64_t> m;
  std::vector<int> shift;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> cu_q, cu_k;
};

Numbers numbers(std::int64_t count, std::uint64_t seed, double low, double high) {
  Numbers x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = low + (high - low) * Fill{seed, true}(i);
  return x;
}

template <class T>
Numbers rounded(Numbers x) {
  using A = accumulator_t<T>;
  for (double& e : x) e = static_cast<double>(static_cast<A>(static_cast<T>(static_cast<A>(e))));
  return x;
}

template <class T, class V>
Data make_data(const Spec& spec, std::uint64_t seed) {
  const Problem& p = spec.problem;
  const bool normalise = spec.options.normalise.value_or(V::normalise_by_default);
  // Normalised weights of both signs could have a row sum near 0.
  const bool signed_weights = std::is_same_v<V, Identity> || std::is_same_v<V, Cosine>;
  const double low = signed_weights && normalise ? 0.25 : -1.5;
  using A = accumulator_t<T>;
  Data data;
  data.q = rounded<T>(numbers(p.batch * p.heads * p.nq * p.d, seed + 1, low, 1.5));
  data.k = rounded<T>(numbers(p.batch * p.kv_heads * p.nk * p.d, seed + 2, low, 1.5));
  data.v = rounded<T>(numbers(p.batch * p.kv_heads * p.nk * p.dv, seed + 3, -1, 1));
  data.d_o = rounded<T>(numbers(p.batch * p.heads * p.nq * p.dv, seed + 4, -1, 1));
  if (V::query_parameter) data.alpha = numbers(p.heads, seed + 5, 0.5, 1.2);
  if (V::key_parameter) data.beta = numbers(p.kv_heads, seed + 6, 0.5, 1.2);
  if (ProjectedVariant<V>)
    data.projection = detail::orthogonal_rows(perf::features_of_row<V>(p.d), p.d, seed);
  if (has_constant_v<V>) data.constant = numbers(p.heads, seed + 13, 1.2, 2);
  if (spec.combine != Combine::average) data.diag_r = numbers(p.heads * p.dv, seed + 16, -1, 1);
  if (spec.combine == Combine::scale) data.diag_p = numbers(p.heads * p.dv, seed + 17, -1, 1);
  if (spec.masked) {
    data.mask.resize(static_cast<std::size_t>(p.batch * p.nk));
    for (std::size_t i = 0; i < data.mask.size(); ++i) data.mask[i] = Fill{seed + 7, true}(i) < 0.7;
  }
  if (!spec.packed_q.empty()) {
    data.cu_q = data.cu_k = {0};
    for (const std::int64_t n : spec.packed_q) data.cu_q.push_back(data.cu_q.back() + n);
    for (const std::int64_t n : spec.packed_k) data.cu_k.push_back(data.cu_k.back() + n);
  }
  if (spec.states) {
    const std::int64_t sums = p.sequences() * p.kv_heads * perf::features_of_row<V>(p.d);
    data.S = rounded<A>(numbers(sums * p.dv, seed + 8, -2, 2));
    data.z = rounded<A>(numbers(sums, seed + 9, 1, 5));
    data.d_S = rounded<A>(numbers(sums * p.dv, seed + 10, -1, 1));
    data.d_z = rounded<A>(numbers(sums, seed + 11, -1, 1));
    data.shift.resize(static_cast<std::size_t>(sums));
    for (std::size_t i = 0; i < data.shift.size(); ++i)
      data.shift[i] = static_cast<int>(7 * Fill{seed + 12, true}(i)) - 3;
    data.t = rounded<A>(numbers(p.sequences() * p.kv_heads * p.dv, seed + 14, -2, 2));
    data.d_t = rounded<A>(numbers(p.sequences() * p.kv_heads * p.dv, seed + 15, -1, 1));
    data.m.assign(static_cast<std::size_t>(p.sequences()), 50);
  }
  return data;
}

// ---- calls --------------------------------------------------------------------------------------

template <class E, class Space>
class Buffer {
 public:
  using View = Kokkos::View<E*, typename Space::memory_space>;

  Buffer() = default;
  explicit Buffer(std::int64_t count)
      : m_view("LinAttn::gpu_check", static_cast<std::size_t>(count)) {}
  template <class From>
  explicit Buffer(const std::vector<From>& from) : Buffer(static_cast<std::int64_t>(from.size())) {
    const auto host = Kokkos::create_mirror_view(m_view);
    for (std::size_t i = 0; i < from.size(); ++i) host(i) = convert(from[i]);
    Kokkos::deep_copy(m_view, host);
  }

  template <int Rank>
  TensorRef<E, Rank, Space> ref(const std::array<std::int64_t, Rank>& extents) const {
    std::array<std::int64_t, Rank> strides{};
    std::int64_t stride = 1;
    for (int r = Rank - 1; r >= 0; --r) {
      strides[static_cast<std::size_t>(r)] = stride;
      stride *= extents[static_cast<std::size_t>(r)];
    }
    return {m_view.data(), extents, strides};
  }
  const View& view() const { return m_view; }
  /// Factors by head and column, or 1/2 if there are none.
  ColumnFactors factors(std::int64_t heads, std::int64_t columns) const {
    using Matrix = Kokkos::View<E**, Kokkos::LayoutRight, typename Space::memory_space,
                                Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    if (m_view.size() == 0) return 0.5;
    return Matrix(m_view.data(), static_cast<std::size_t>(heads),
                  static_cast<std::size_t>(columns));
  }

  /// Rows of logits, or none.
  Projection projection(std::int64_t columns) const {
    using Matrix = Kokkos::View<E**, Kokkos::LayoutRight, typename Space::memory_space,
                                Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    if (m_view.size() == 0) return {};
    const auto d = static_cast<std::size_t>(columns);
    return Matrix(m_view.data(), m_view.size() / d, d);
  }

  Numbers get() const {
    const auto host = Kokkos::create_mirror_view(m_view);
    Kokkos::deep_copy(host, m_view);
    Numbers x(host.extent(0));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = widen(host(i));
    return x;
  }

 private:
  template <class From>
  static E convert(From x) {
    if constexpr (std::is_integral_v<E>)
      return static_cast<E>(x);
    else
      return static_cast<E>(static_cast<accumulator_t<E>>(x));
  }
  static double widen(E x) {
    if constexpr (std::is_integral_v<E>)
      return static_cast<double>(x);
    else
      return static_cast<double>(static_cast<accumulator_t<E>>(x));
  }
  View m_view{};
};

/// Results by name.
using Outcome = std::map<std::string, Numbers>;

template <class V>
V make_variant(const Spec& spec, const Parameter& alpha, const Parameter& beta,
               const Parameter& constant, const Projection& projection,
               const ColumnFactors& diag_r = 0.5, const ColumnFactors& diag_p = 0.5) {
  if constexpr (std::is_same_v<V, Affine>)
    return {.a = alpha, .b = constant, .qk_norm = spec.norm};
  else if constexpr (ProjectedVariant<V>)
    return {.projection = projection};
  else if constexpr (has_local_term_v<V>)
    return {.alpha = alpha,
            .beta = beta,
            .block = spec.block,
            .combine = spec.combine,
            .diag_r = diag_r,
            .diag_p = diag_p};
  else if constexpr (V::query_parameter != nullptr && V::key_parameter != nullptr)
    return V{alpha, beta};
  else
    return V{};
}

/// Forward and backward on Space.
template <class T, class V, class Space>
Outcome attend(const Spec& spec, const Data& data) {
  using A = accumulator_t<T>;
  const Space exec;
  const Problem& p = spec.problem;
  const bool normalise = spec.options.normalise.value_or(V::normalise_by_default);
  const bool scaled = is_scaled_v<V>;
  const std::int64_t features = perf::features_of_row<V>(p.d);
  const std::array<std::int64_t, 4> at_q{p.batch, p.heads, p.nq, p.d},
      at_k{p.batch, p.kv_heads, p.nk, p.d}, at_v{p.batch, p.kv_heads, p.nk, p.dv},
      at_o{p.batch, p.heads, p.nq, p.dv};
  const std::array<std::int64_t, 4> at_S{p.sequences(), p.kv_heads, features, p.dv};
  const std::array<std::int64_t, 3> at_z{p.sequences(), p.kv_heads, features},
      at_s{p.batch, p.heads, p.nq};
  const auto count = [](const auto& extents) {
    std::int64_t n = 1;
    for (const std::int64_t e : extents) n *= e;
    return n;
  };

  const Buffer<T, Space> q(data.q), k(data.k), v(data.v), d_o(data.d_o);
  const Buffer<T, Space> o(count(at_o)), d_q(count(at_q)), d_k(count(at_k)), d_v(count(at_v));
  const Buffer<A, Space> s(count(at_s));
  const bool has_r = has_local_term_v<V> && spec.combine != Combine::average,
             has_p = has_local_term_v<V> && spec.combine == Combine::scale;
  const Buffer<T, Space> linear(has_r ? count(at_o) : 0);
  const Buffer<double, Space> diag_r(data.diag_r), diag_p(data.diag_p), d_diag_r(p.heads * p.dv),
      d_diag_p(p.heads * p.dv);
  const Buffer<double, Space> projection(data.projection), alpha(data.alpha), beta(data.beta),
      constant(data.constant), d_alpha(p.heads), d_beta(p.kv_heads), d_constant(p.heads), d_scale(p.heads);
  const Buffer<std::uint8_t, Space> mask(data.mask);
  const Buffer<A, Space> S(data.S), z(data.z), last_d_S(data.d_S), last_d_z(data.d_z);
  const Buffer<int, Space> shift(data.shift);
  const std::int64_t state = spec.states ? count(at_S) : 0, sums = spec.states ? count(at_z) : 0;
  const Buffer<A, Space> last_S(state), last_z(sums), d_S(state), d_z(sums);
  const Buffer<int, Space> last_shift(sums);
  const std::array<std::int64_t, 3> at_t{p.sequences(), p.kv_heads, p.dv};
  const Buffer<A, Space> t(data.t), last_d_t(data.d_t);
  const Buffer<A, Space> last_t(spec.states ? count(at_t) : 0), d_t(spec.states ? count(at_t) : 0);
  const Buffer<std::int64_t, Space> m(data.m), last_m(p.sequences());

  const V variant = make_variant<V>(spec, alpha.view(), beta.view(), constant.view(), projection.projection(p.d),
                                    diag_r.factors(p.heads, p.dv), diag_p.factors(p.heads, p.dv));
  Inputs<Space, T> inputs{
      .q = q.template ref<4>(at_q), .k = k.template ref<4>(at_k), .v = v.template ref<4>(at_v)};
  Saved<Space, T> saved{.o = o.template ref<4>(at_o)};
  Cotangents<Space, T> cotangents{.o = d_o.template ref<4>(at_o)};
  Gradients<Space, T> gradients{.q = d_q.template ref<4>(at_q),
                                .k = d_k.template ref<4>(at_k),
                                .v = d_v.template ref<4>(at_v)};
  if (normalise) saved.denominator = s.template ref<3>(at_s);
  if (spec.masked) inputs.key_mask = mask.template ref<2>({p.batch, p.nk});
  if (!data.cu_q.empty()) {
    inputs.cu_seqlens_q = {data.cu_q.data(), {static_cast<std::int64_t>(data.cu_q.size())}, {1}};
    inputs.cu_seqlens_k = {data.cu_k.data(), {static_cast<std::int64_t>(data.cu_k.size())}, {1}};
  }
  if (V::query_parameter) gradients.query_parameter = d_alpha.template ref<1>({p.heads});
  if (V::key_parameter) gradients.key_parameter = d_beta.template ref<1>({p.kv_heads});
  if (has_constant_v<V>) gradients.constant = d_constant.template ref<1>({p.heads});
  if (scale_parameter_name<V>()) gradients.scale = d_scale.template ref<1>({p.heads});
  if (has_r) {
    saved.linear = linear.template ref<4>(at_o);
    gradients.diag_r = d_diag_r.template ref<2>({p.heads, p.dv});
  }
  if (has_p) gradients.diag_p = d_diag_p.template ref<2>({p.heads, p.dv});
  if (spec.states) {
    inputs.state = {.S = S.template ref<4>(at_S), .z = z.template ref<3>(at_z)};
    saved.state = {.S = last_S.template ref<4>(at_S), .z = last_z.template ref<3>(at_z)};
    cotangents.state = {.S = last_d_S.template ref<4>(at_S), .z = last_d_z.template ref<3>(at_z)};
    gradients.state = {.S = d_S.template ref<4>(at_S), .z = d_z.template ref<3>(at_z)};
    if (scaled) {
      inputs.state.shift = shift.template ref<3>(at_z);
      saved.state.shift = last_shift.template ref<3>(at_z);
      cotangents.state.shift = saved.state.shift;
    }
    if (has_constant_v<V>) {
      inputs.state.t = t.template ref<3>(at_t);
      inputs.state.m = m.template ref<1>({p.sequences()});
      saved.state.t = last_t.template ref<3>(at_t);
      saved.state.m = last_m.template ref<1>({p.sequences()});
      cotangents.state.t = last_d_t.template ref<3>(at_t);
      gradients.state.t = d_t.template ref<3>(at_t);
    }
  }
  LinAttn::forward<T>(exec, variant, inputs, saved, spec.options);
  LinAttn::backward<T>(exec, variant, inputs, saved, cotangents, gradients, spec.options);
  exec.fence();

  Outcome result{{"o", o.get()}, {"dq", d_q.get()}, {"dk", d_k.get()}, {"dv", d_v.get()}};
  if (V::query_parameter) result["d alpha"] = d_alpha.get();
  if (V::key_parameter) result["d beta"] = d_beta.get();
  if (has_constant_v<V>) result["d constant"] = d_constant.get();
  if (scale_parameter_name<V>()) result["d scale"] = d_scale.get();
  if (has_r) result["d diag_r"] = d_diag_r.get();
  if (has_p) result["d diag_p"] = d_diag_p.get();
  if (spec.states) {
    result["S"] = last_S.get();
    result["z"] = last_z.get();
    if (scaled) result["shift"] = last_shift.get();
    result["dS"] = d_S.get();
    result["dz"] = d_z.get();
    if (has_constant_v<V>) {
      result["t"] = last_t.get();
      result["m"] = last_m.get();
      result["dt"] = d_t.get();
    }
  }
  return result;
}

/// Two tokens one after the other: the first from a given state to another, the second in place.
template <class T, class V, class Space>
Outcome decode(const Spec& spec, const Data& data) {
  using A = accumulator_t<T>;
  const Space exec;
  const Problem& p = spec.problem;
  const std::int64_t features = perf::features_of_row<V>(p.d);
  const std::array<std::int64_t, 4> at_S{p.batch, p.kv_heads, features, p.dv};
  const std::array<std::int64_t, 3> at_z{p.batch, p.kv_heads, features};
  const Buffer<T, Space> q(data.q), k(data.k), v(data.v);
  const Buffer<T, Space> o(p.batch * p.heads * p.dv), next_o(p.batch * p.heads * p.dv);
  const Buffer<double, Space> projection(data.projection), alpha(data.alpha), beta(data.beta),
      constant(data.constant);
  const Buffer<A, Space> S(data.S), z(data.z);
  const Buffer<int, Space> shift(data.shift);
  const auto sums = static_cast<std::int64_t>(data.z.size());
  const Buffer<A, Space> last_S(sums * p.dv), last_z(sums);
  const Buffer<int, Space> last_shift(sums);
  const std::array<std::int64_t, 3> at_t{p.batch, p.kv_heads, p.dv};
  const Buffer<A, Space> t(data.t), last_t(static_cast<std::int64_t>(data.t.size()));
  const Buffer<std::int64_t, Space> m(data.m), last_m(p.batch);
  const V variant =
      make_variant<V>(spec, alpha.view(), beta.view(), constant.view(), projection.projection(p.d));
  const Token<Space, T> token{.q = q.template ref<3>({p.batch, p.heads, p.d}),
                              .k = k.template ref<3>({p.batch, p.kv_heads, p.d}),
                              .v = v.template ref<3>({p.batch, p.kv_heads, p.dv})};
  ConstState<Space, T> before{.S = S.template ref<4>(at_S), .z = z.template ref<3>(at_z)};
  State<Space, T> after{.S = last_S.template ref<4>(at_S), .z = last_z.template ref<3>(at_z)};
  if (is_scaled_v<V>) {
    before.shift = shift.template ref<3>(at_z);
    after.shift = last_shift.template ref<3>(at_z);
  }
  if (has_constant_v<V>) {
    before.t = t.template ref<3>(at_t);
    before.m = m.template ref<1>({p.batch});
    after.t = last_t.template ref<3>(at_t);
    after.m = last_m.template ref<1>({p.batch});
  }
  const Buffer<std::uint8_t, Space> workspace(
      static_cast<std::int64_t>(LinAttn::workspace_size<T>(exec, variant, p, Pass::step)));
  const std::array<std::int64_t, 3> at_o{p.batch, p.heads, p.dv};
  LinAttn::step<T>(exec, variant, token, before, after, o.template ref<3>(at_o), workspace.view());
  LinAttn::step_in_place<T>(exec, variant, token, after, next_o.template ref<3>(at_o),
                            workspace.view());
  exec.fence();
  Outcome result{
      {"o", o.get()}, {"next o", next_o.get()}, {"S", last_S.get()}, {"z", last_z.get()}};
  if (is_scaled_v<V>) result["shift"] = last_shift.get();
  if (has_constant_v<V>) {
    result["t"] = last_t.get();
    result["m"] = last_m.get();
  }
  return result;
}

// ---- comparison ---------------------------------------------------------------------------------

/// The worst element so far, in units of its bound.
struct Worst {
  double ratio = 0;
  std::string where;
  int failures = 0;

  void see(double found, double expected, double bound, const std::string& name,
           std::size_t element) {
    const double error = std::abs(found - expected);
    const bool holds = error <= bound;  // false for NaN
    const double now = error == 0                    ? 0
                       : holds                       ? error / bound
                       : bound > 0 && error == error ? error / bound
                                                     : INFINITY;
    if (!holds) ++failures;
    if (!(now > ratio)) return;
    ratio = now;
    char text[160];
    std::snprintf(text, sizeof text, "%s[%zu] = %.9g, not %.9g", name.c_str(), element, found,
                  expected);
    where = text;
  }
};

/// Factors rounded to TF32 in the longest chain of products to a result: of a gradient by q or k
/// the weights' two and the product's two, and those that o came from.
constexpr double tf32_factors = 8;

/// Elementwise a-priori bounds of the sums as reference/bounds.hpp derives them, and of what
/// storage in 16 bits adds: each stored tensor is rounded once, and o is read again by the backward
/// pass.
template <class T, class V>
void compare_by_bounds(const Spec& spec, const Data& data, const Outcome& device,
                       const Outcome& host, Worst& worst) {
  reference::Settings settings;
  settings.kernel = reference::kernel_from_name(V::name);
  settings.causal = spec.options.causal;
  settings.normalise = spec.options.normalise.value_or(V::normalise_by_default);
  settings.scale = spec.options.scale;
  settings.alpha = data.alpha;
  settings.beta = data.beta;
  settings.constant = data.constant;
  settings.projection = data.projection;
  if constexpr (std::is_same_v<V, Softmax> || std::is_same_v<V, Taylor>)
    settings.score_scale = V{}.score_scale(spec.problem.d);
  if (spec.norm == QkNorm::max) settings.norm = reference::Norm::max;
  settings.block = spec.block;
  settings.combine = spec.combine == Combine::scale   ? reference::Combine::scale
                     : spec.combine == Combine::ratio ? reference::Combine::ratio
                                                      : reference::Combine::average;
  settings.diag_r = data.diag_r;
  settings.diag_p = data.diag_p;
  if (spec.options.small_normaliser == SmallNormaliser::clamp)
    settings.least_normaliser = spec.options.least_normaliser;
  settings.dropout_p = spec.options.dropout.p;
  settings.seed = spec.options.dropout.seed;
  settings.offset = spec.options.dropout.offset;
  settings.key_mask = data.mask;
  settings.cu_seqlens_q = data.cu_q;
  settings.cu_seqlens_k = data.cu_k;
  using Real =
      double;  // its compensated sums are good to a few roundings, of which the bounds have many
  const auto wide = [](const Numbers& x) { return std::vector<Real>(x.begin(), x.end()); };
  const reference::Tensors<Real> tensors{wide(data.q), wide(data.k), wide(data.v)};
  const auto d_o = wide(data.d_o);
  const auto o = reference::forward(spec.problem, settings, tensors);
  const auto g = reference::backward(spec.problem, settings, tensors, d_o);
  const auto m = reference::magnitudes(spec.problem, settings, tensors, d_o);
  const Buffer<double, Device> projection(data.projection);
  const V variant = make_variant<V>(spec, 1.0, 1.0, 1.0, projection.projection(spec.problem.d));
  const int chunk = LinAttn::plan<T>(Device(), variant, spec.problem, Pass::backward, spec.options)
                        .chunk;
  const auto counts = reference::rounding_counts(spec.problem, settings, chunk);
  const double u = std::numeric_limits<accumulator_t<T>>::epsilon() / 2,
               stored = storage_roundoff<T>(), factors = factor_roundoff<T>(spec.options);
  const auto check = [&](const char* name, const auto& expected, const auto& magnitude,
                         double roundings) {
    if (expected.empty()) return;
    const Numbers &on_device = device.at(name), &on_host = host.at(name);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto e = static_cast<double>(expected[i]);
      const double bound = (roundings * u + 4 * stored + tf32_factors * factors) *
                               static_cast<double>(magnitude[i]) +
                           (u + stored) * std::abs(e) + 2 * storage_floor<T>();
      worst.see(on_device[i], e, bound, name, i);
      worst.see(on_device[i], on_host[i], 2 * bound, name, i);
    }
  };
  check("o", o, m.o, counts.o);
  check("dq", g.q, m.q, counts.q);
  check("dk", g.k, m.k, counts.k);
  check("dv", g.v, m.v, counts.v);
  check("d alpha", g.alpha, m.alpha, counts.alpha);
  check("d beta", g.beta, m.beta, counts.beta);
  check("d constant", g.constant, m.constant, counts.constant);
  check("d scale", g.score_scale, m.score_scale, counts.score_scale);
  check("d diag_r", g.diag_r, m.diag_r, counts.diag_r);
  check("d diag_p", g.diag_p, m.diag_p, counts.diag_p);
}

/// Relative to the largest element of the tensor: the reference knows no states.
template <class T>
void compare_by_scale(const Outcome& device, const Outcome& host, Worst& worst) {
  const double relative =
      std::max(std::is_same_v<T, double> ? 1e-13 : 1e-5, 16 * storage_roundoff<T>());
  for (const auto& [name, expected] : host) {
    if (name == "shift") continue;
    Numbers found = device.at(name);
    if ((name == "S" || name == "z") &&
        host.count("shift")) {  // the same number may have another shift
      const Numbers &from = device.at("shift"), &to = host.at("shift");
      const std::size_t columns = found.size() / from.size();
      for (std::size_t i = 0; i < found.size(); ++i)
        found[i] = std::ldexp(found[i], static_cast<int>(from[i / columns] - to[i / columns]));
    }
    double scale = 0;
    for (const double e : expected) scale = std::max(scale, std::abs(e));
    for (std::size_t i = 0; i < expected.size(); ++i)
      worst.see(found[i], expected[i], relative * scale, name, i);
  }
}

template <class T, class V, class Space>
Outcome run_on(const Spec& spec, const Data& data) {
  if constexpr (LinearVariant<V> && !has_local_term_v<V>)
    if (spec.decoding) return decode<T, V, Space>(spec, data);
  return attend<T, V, Space>(spec, data);
}

template <class T, class V>
int check_variant(std::uint64_t seed) {
  int failed = 0, cases = 0;
  double nearest = 0;
  std::string what;
  for (const Spec& spec : specs()) {
    if (!applies<V>(spec)) continue;
    ++cases;
    Worst worst;
    try {
      const Data data = make_data<T, V>(spec, seed + 100 * static_cast<std::uint64_t>(cases));
      const Outcome device = run_on<T, V, Device>(spec, data),
                    host = run_on<T, V, Host>(spec, data);
      if (spec.states)
        compare_by_scale<T>(device, host, worst);
      else
        compare_by_bounds<T, V>(spec, data, device, host, worst);
      if (run_on<T, V, Device>(spec, data) != device) {
        std::printf("FAILED  %s %s, %s: two runs gave different bits\n", type_name<T>(), V::name,
                    spec.what);
        ++failed;
      }
    } catch (const std::exception& error) {
      std::printf("FAILED  %s %s, %s: %s\n", type_name<T>(), V::name, spec.what, error.what());
      ++failed;
      continue;
    }
    if (worst.failures > 0) {
      std::printf("FAILED  %s %s, %s: %d elements, the worst %.3g times its bound: %s\n",
                  type_name<T>(), V::name, spec.what, worst.failures, worst.ratio,
                  worst.where.c_str());
      ++failed;
    } else if (worst.ratio > nearest) {
      nearest = worst.ratio;
      what = spec.what;
    }
  }
  std::printf("%-7s %-4s %-10s %2d cases; nearest to its bound: %.2f (%s)\n",
              failed ? "FAILED" : "ok", type_name<T>(), V::name, cases, nearest, what.c_str());
  std::fflush(stdout);
  return failed;
}

int check(std::uint64_t seed) {
  std::printf("%s against %s and the dense reference, seed %llu\n", Device::name(), Host::name(),
              static_cast<unsigned long long>(seed));
  int failed = 0;
  for_each_type([&]<class T>(std::type_identity<T>) {
    for_each_variant([&]<class V>(std::type_identity<V>) { failed += check_variant<T, V>(seed); });
  });
  std::printf(failed ? "%d cases failed\n" : "all results agree\n", failed);
  return failed ? 1 : 0;
}

// ---- benchmark ----------------------------------------------------------------------------------

struct Bench {
  perf::Effort effort{.seconds = 0.2};
  std::string json, device;
};

/// Rows in the format of Google Benchmark, for perf/bars.py, compare.py and plot.py.
class Json {
 public:
  void context(const std::string& name, const std::string& value) {
    m_context += (m_context.empty() ? "" : ",\n") + std::string("    \"") + name + "\": \"" +
                 escaped(value) + "\"";
  }
  void row(const std::string& name, double seconds,
           const std::vector<std::pair<const char*, double>>& counters) {
    char number[64];
    std::snprintf(number, sizeof number, "%.9g", seconds * 1e3);
    m_rows += (m_rows.empty() ? "" : ",\n") + std::string("    {\"name\": \"") + name +
              "\", \"run_type\": \"iteration\", \"time_unit\": \"ms\", \"real_time\": " + number;
    for (const auto& [key, value] : counters) {
      std::snprintf(number, sizeof number, "%.9g", value);
      m_rows += std::string(", \"") + key + "\": " + number;
    }
    m_rows += "}";
  }
  bool write(const std::string& path) const {
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (!file) return false;
    std::fprintf(file, "{\n  \"context\": {\n%s\n  },\n  \"benchmarks\": [\n%s\n  ]\n}\n",
                 m_context.c_str(), m_rows.c_str());
    return std::fclose(file) == 0;
  }

 private:
  static std::string escaped(const std::string& text) {
    std::string result;
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return result;
  }
  std::string m_context, m_rows;
};

template <class T, class V>
void bench_rows(perf::Machine<Timed>& machine, const char* name, const Problem& p,
                const Options& options, Json& json) {
  perf::Case<T, V, Timed> c(V{}, p, options);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto row = machine.template row<accumulator_t<T>>(
        [&] { return perf::seconds_of(c.exec(), [&] { c.run(pass); }); });
    const double least = row.roof.least_seconds(c.flops(pass), c.bytes(pass));
    const std::string full =
        detail::message("main/", pass_name(pass), "/", name, "/", type_name<T>(),
                        options.causal ? "/causal" : "/full", "/B", p.batch, "/H", p.heads, "/N",
                        p.nq, "/D", p.d, "/Dv", p.dv);
    std::printf("%-66s %9.3f ms  eff %.3f  %8.0f GFLOP/s  %7.1f GB/s%s\n", full.c_str() + 5,
                row.times.median * 1e3, least / row.times.median,
                c.flops(pass) / row.times.median * 1e-9, c.bytes(pass) / row.times.median * 1e-9,
                row.disturbed() ? "  (disturbed)" : "");
    std::fflush(stdout);
    json.row(full, row.times.median,
             {{"eff", least / row.times.median},
              {"eff_best", least / row.times.least},
              {"GFLOP/s", c.flops(pass) / row.times.median * 1e-9},
              {"GB/s", c.bytes(pass) / row.times.median * 1e-9},
              {"bytes", c.bytes(pass)},
              {"tokens/s", c.tokens() / row.times.median},
              {"best_s", row.times.least},
              {"spread", row.times.spread},
              {"samples", row.times.samples},
              {"roof_GFLOP/s", row.roof.flops * 1e-9},
              {"roof_GB/s", row.roof.bandwidth * 1e-9},
              {"drift", row.drift},
              {"scaling", row.scaling},
              {"disturbed", row.disturbed() ? 1 : 0},
              {"workspace_bytes", static_cast<double>(c.workspace_bytes(pass))},
              {"saved_bytes", static_cast<double>(c.saved_bytes())}});
  }
}

/// Both probes; their row in the JSON file.
template <class Machine>
void probe(const Machine& machine, const char* when, Json& json) {
  const double single = machine.template fma<float>(machine.threads()),
               twice = machine.template fma<double>(machine.threads()), triad = machine.triad();
  std::printf(
      "roofs at the %s: FMA %.0f GFLOP/s fp32, %.0f fp64; triad %.0f GB/s (portable: no tensor "
      "cores)\n",
      when, single * 1e-9, twice * 1e-9, triad * 1e-9);
  json.row(std::string("probes/") + when, 0,
           {{"fma_f32_GFLOP/s", single * 1e-9},
            {"fma_f64_GFLOP/s", twice * 1e-9},
            {"triad_GB/s", triad * 1e-9},
            {"scaling", machine.template scaling<float>(single)}});
}

int bench(const Bench& settings) {
  constexpr bool host = detail::is_host_space_v<Timed>;
  perf::Machine<Timed> machine(Timed(), settings.effort);
  Json json;
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", std::gmtime(&now));
  json.context("date", date);
  json.context("linattn_version", LINATTN_VERSION);
  json.context("kokkos_version",
               detail::message(KOKKOS_VERSION / 10000, ".", KOKKOS_VERSION / 100 % 100, ".",
                               KOKKOS_VERSION % 100));
  json.context("execution_space", Timed::name());
  json.context("threads", std::to_string(host ? machine.threads() : 1));
  if (!settings.device.empty()) json.context("device", settings.device);
  std::printf("%s%s%s\n", Timed::name(), settings.device.empty() ? "" : ", ",
              settings.device.c_str());
  probe(machine, "begin", json);

  const std::int64_t heads = host ? 2 : 32, batch = host ? 1 : 4,
                     n = settings.effort.smoke() ? 200
                         : host                  ? 1024
                                                 : 4096;
  for (const std::int64_t d : {64, 128}) {
    const Problem p{batch, heads, heads, n, n, d, d};
    for_each_type([&]<class T>(std::type_identity<T>) {
      for_each_variant([&]<class V>(std::type_identity<V>) {
        bench_rows<T, V>(machine, V::name, p, {.causal = true}, json);
      });
      bench_rows<T, Identity>(machine, "normalised_identity", p,
                              {.causal = true, .normalise = true}, json);
    });
    bench_rows<float, Elu>(machine, Elu::name, p, {.causal = false}, json);
  }
  const std::int64_t length = settings.effort.smoke() ? 200 : host ? 4096 : 65536;
  bench_rows<float, Relu>(machine, Relu::name, {1, 1, 1, length, length, 64, 64}, {.causal = true},
                          json);
  probe(machine, "end", json);
  if (!settings.json.empty() && !json.write(settings.json)) {
    std::fprintf(stderr, "gpu_check: cannot write %s\n", settings.json.c_str());
    return 2;
  }
  return 0;
}

// ---- command line -------------------------------------------------------------------------------

/// Whether `argument` is --name=VALUE, which is then put into value.
bool option(const char* argument, const char* name, std::string& value) {
  const std::size_t length = std::strlen(name);
  if (std::strncmp(argument, name, length) != 0 || argument[length] != '=') return false;
  value = argument + length + 1;
  return true;
}

int usage() {
  std::fprintf(stderr,
               "usage: gpu_check check [--seed=N]\n       gpu_check bench [--seconds=S] "
               "[--json=FILE] [--device=NAME]\n");
  return 2;
}

int run(int argc, char** argv) {
  if (argc < 2) return usage();
  const std::string mode = argv[1];
  std::uint64_t seed = 20250131;
  Bench settings;
  for (int i = 2; i < argc; ++i) {
    std::string value;
    char* end = nullptr;
    if (mode == "check" && option(argv[i], "--seed", value))
      seed = std::strtoull(value.c_str(), &end, 10);
    else if (mode == "bench" && option(argv[i], "--seconds", value))
      settings.effort.seconds = std::strtod(value.c_str(), &end);
    else if (mode == "bench" && (option(argv[i], "--json", settings.json) ||
                                 option(argv[i], "--device", settings.device)))
      continue;
    else
      return usage();
    if (value.empty() || *end != '\0') return usage();
  }
  return mode == "check" ? check(seed) : mode == "bench" ? bench(settings) : usage();
}

}  // namespace
}  // namespace LinAttn::gpu_check

int main(int argc, char** argv) {
  try {
    const Kokkos::ScopeGuard guard(argc, argv);
    return LinAttn::gpu_check::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_check: %s\n", error.what());
    return 1;
  }
}
