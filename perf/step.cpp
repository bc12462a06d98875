// SPDX-License-Identifier: BSD-3-Clause
//
// Decoding: one token for every head, with the state of all before it, in place. support/rows.hpp
// says what is counted; bytes are those of the token and of the state, read and written. eff above
// 1 means that the states stay in a cache, whose bandwidth is higher than the triad's.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/step
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   step    every variant that has states in fp32; elu and lln in fp64
//   small   smoke test (N200: 200 sequences)

#include <string>

#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

template <class T, class V>
class Decoder {
 public:
  using A = accumulator_t<T>;
  using Memory = Exec::memory_space;
  template <class E>
  using Tensor = Kokkos::View<E, Kokkos::LayoutRight, Memory>;

  explicit Decoder(const Problem& p)
      : m_p(p), m_features(features_of_row<V>(p.d)), m_completed(V{}, m_exec, p.d) {
    q = Tensor<T***>("q", p.batch, p.heads, p.d);
    k = Tensor<T***>("k", p.batch, p.kv_heads, p.d);
    v = Tensor<T***>("v", p.batch, p.kv_heads, p.dv);
    o = Tensor<T***>("o", p.batch, p.heads, p.dv);
    fill(q, 1);
    fill(k, 2);
    fill(v, 3);
    S = Tensor<A****>("S", p.batch, p.kv_heads, m_features, p.dv);
    z = Tensor<A***>("z", p.batch, p.kv_heads, m_features);
    if constexpr (ScaledFeatureMap<key_map_t<V>>)
      shift = Tensor<int***>("shift", p.batch, p.kv_heads, m_features);
    if constexpr (has_constant_v<V>) {
      t = Tensor<A***>("t", p.batch, p.kv_heads, p.dv);
      fill(t, 6);
      m = Tensor<std::int64_t*>("m", p.batch);
      Kokkos::deep_copy(m, 1000);
    }
    fill(S, 4);
    fill(z, 5);
    m_workspace = Tensor<std::byte*>("workspace", workspace_bytes());
  }

  const Exec& exec() const { return m_exec; }
  double tokens() const { return static_cast<double>(m_p.batch * m_p.heads); }
  double flops() const { return recurrent_flops(m_p, m_features, V::normalise_by_default, Pass::forward); }
  double bytes() const {
    const double state =
        static_cast<double>((S.size() + z.size() + t.size()) * sizeof(A) +
                            shift.size() * sizeof(int) + m.size() * sizeof(std::int64_t));
    return static_cast<double>((q.size() + k.size() + v.size() + o.size()) * sizeof(T)) + 2 * state;
  }

  std::size_t workspace_bytes() const {
    return LinAttn::workspace_size<T>(m_exec, m_completed.variant, m_p, Pass::step);
  }
  void run() {
    LinAttn::step_in_place<T>(m_exec, m_completed.variant, {.q = q, .k = k, .v = v}, state(), o, m_workspace);
  }

 private:
  State<Exec, T> state() const {
    State<Exec, T> result{.S = S, .z = z};
    if constexpr (ScaledFeatureMap<key_map_t<V>>) result.shift = shift;
    if constexpr (has_constant_v<V>) {
      result.t = t;
      result.m = m;
    }
    return result;
  }
  template <class View>
  static void fill(const View& x, std::uint64_t seed) {
    using E = typename View::value_type;
    for (std::size_t i = 0; i < x.size(); ++i)
      x.data()[i] = static_cast<E>(static_cast<A>(Fill{seed, true}(i)));
  }

  Exec m_exec;
  Problem m_p;
  std::int64_t m_features;
  Completed<V, Exec> m_completed;
  Tensor<T***> q, k, v, o;
  Tensor<A****> S;
  Tensor<A***> z, t;
  Tensor<int***> shift;
  Tensor<std::int64_t*> m;
  Tensor<std::byte*> m_workspace;
};

template <class T, class V>
void add(const std::string& group, std::int64_t batch, std::int64_t heads, std::int64_t d,
         const std::string& extents) {
  const Problem p = shape(batch, heads, 1, d);
  add_row(detail::message(group, "/", V::name, "/", type_name<T>(), "/causal/", extents),
          [=](benchmark::State& state) {
            Decoder<T, V> decoder(p);
            for (auto _ : state) {
              const auto row = machine().row<accumulator_t<T>>(
                  [&] { return seconds_of(decoder.exec(), [&] { decoder.run(); }); });
              report(state, row, decoder.flops(), decoder.bytes(), decoder.tokens());
            }
            state.counters["workspace_bytes"] = static_cast<double>(decoder.workspace_bytes());
          });
}

template <class T, class V>
void add_all() {
  for (const std::int64_t d : {32, 64, 128, 256}) {
    if (features_of_row<V>(d) > 4096) continue;  // states of gigabytes
    for (const auto& [batch, heads] :
         {std::pair<std::int64_t, std::int64_t>{1, many_heads()}, {32, many_heads()}})
      add<T, V>("step/step", batch, heads, d,
                detail::message("B", batch, "/H", heads, "/N1/D", d, "/Dv", d));
  }
}

}  // namespace

void register_rows() {
  for_each_linear_variant([]<class V>(std::type_identity<V>) {
    add<float, V>("small/step", 200, 1, 24, "N200/B200/H1/D24/Dv24");
    add_all<float, V>();
  });
  add_all<double, Elu>();
  add_all<double, Lln>();
}

}  // namespace LinAttn::perf
