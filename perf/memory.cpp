// SPDX-License-Identifier: BSD-3-Clause
//
// Memory of training: what is kept between forward and backward beside q, k, v and o, and what each
// pass takes for itself. By the allocation hooks of Kokkos and by the resident memory of the
// process.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/memory
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   memory      N = 1,024 ... 32,768 at D = 32, 64, 128
//   one_head    B H = 1, where sequences are cut into segments
//   layer       attention of one layer of known models
//   local       lln with exact attention inside blocks, D = 64
//   small       smoke test
//
// Variants: those of the library, with dropout, centred values and the largest norm as the names
// say, and `affine_states`: affine attention as it is first written, with the prefix state of every
// token kept for the backward pass. It computes the same; `difference` is the largest to the
// engine, of o and the gradients, over the largest element. Where it would need more than the
// machine has to spare, or than 2.5 GB, the row has fits = 0 and the bytes by its formula.
//
// Counters, all in bytes; the time of a row means nothing:
//   tensors_hooks, gradients_hooks   q, k, v, o; d_o and the gradients of q, k, v
//   kept_model, kept_hooks, kept_process   beside q, k, v, o, from forward to backward
//   forward_*, backward_*            of a pass at its peak, beyond what stays
//   saved_process, transient_process   q, k, v, o and what is kept; d_o, gradients and temporaries
//   number_bytes, element_bytes, tokens

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "support/memory.hpp"
#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

using Memory = Exec::memory_space;
template <class E>
using Array = Kokkos::View<E, Kokkos::LayoutRight, Memory>;

/// All that a pass reads and writes.
template <class T>
struct Tensors {
  Array<T****> q, k, v, o, d_o, d_q, d_k, d_v;

  void make_inputs(const Exec& exec, const Problem& p) {
    q = Array<T****>("q", p.batch, p.heads, p.nq, p.d);
    k = Array<T****>("k", p.batch, p.kv_heads, p.nk, p.d);
    v = Array<T****>("v", p.batch, p.kv_heads, p.nk, p.dv);
    o = Array<T****>("o", p.batch, p.heads, p.nq, p.dv);
    fill(exec, q, {1, false});
    fill(exec, k, {2, false});
    fill(exec, v, {3, false});
    exec.fence();
  }
  void make_gradients(const Exec& exec, const Problem& p) {
    d_o = Array<T****>("d_o", p.batch, p.heads, p.nq, p.dv);
    d_q = Array<T****>("d_q", p.batch, p.heads, p.nq, p.d);
    d_k = Array<T****>("d_k", p.batch, p.kv_heads, p.nk, p.d);
    d_v = Array<T****>("d_v", p.batch, p.kv_heads, p.nk, p.dv);
    fill(exec, d_o, {4, false});
    exec.fence();
  }
};

// ---- forms --------------------------------------------------------------------------------------

/// The engine.
template <class T, class V>
struct Engine {
  using A = accumulator_t<T>;
  static constexpr bool may_record = !ScaledFeatureMap<key_map_t<V>>;

  V variant{};
  Options options{.causal = true};

  struct Kept {
    Array<A***> denominator;
    Array<NormaliserRecord**> smallest;
    Array<T****> centred;
  };

  Kept keep(const Problem& p) const {
    Kept kept{Array<A***>("denominator", p.batch, p.heads, p.nq), {}, {}};
    if (may_record) kept.smallest = Array<NormaliserRecord**>("smallest", p.batch, p.heads);
    if (options.center_v) kept.centred = Array<T****>("centred", p.batch, p.heads, p.nq, p.dv);
    return kept;
  }
  double kept_bytes(const Problem& p) const {
    const double rows = static_cast<double>(p.batch * p.heads * p.nq);
    return rows * sizeof(A) +
           (may_record ? static_cast<double>(p.batch * p.heads) * sizeof(NormaliserRecord) : 0) +
           (options.center_v ? rows * static_cast<double>(p.dv) * sizeof(T) : 0);
  }
  Saved<Exec, T> saved(const Tensors<T>& x, const Kept& kept) const {
    Saved<Exec, T> result{.o = x.o, .denominator = kept.denominator};
    if (may_record) result.smallest = kept.smallest;
    if (options.center_v) result.centred = kept.centred;
    return result;
  }
  void forward(const Exec& exec, const Tensors<T>& x, const Kept& kept) const {
    LinAttn::forward<T>(exec, variant, {.q = x.q, .k = x.k, .v = x.v}, saved(x, kept), options);
  }
  void backward(const Exec& exec, const Tensors<T>& x, const Kept& kept) const {
    LinAttn::backward<T>(exec, variant, {.q = x.q, .k = x.k, .v = x.v}, saved(x, kept), x.d_o,
                         {.q = x.d_q, .k = x.d_k, .v = x.d_v}, options);
  }
};

/// Affine attention with a = b = 1, causal, without normalised rows, as a scan over tokens that
/// keeps the state S, z of every prefix for the backward pass. B H heads in parallel.
struct TokenStates {
  using T = float;

  struct Kept {
    Array<T****> states;  // (B H, N, D, Dv)
    Array<T***> sums;     // (B H, N, D)
    Array<T**> row_sums;  // (B H, N)
  };

  static double kept_bytes(const Problem& p) {
    return static_cast<double>(p.batch * p.heads * p.nq) *
           static_cast<double>(p.d * p.dv + p.d + 1) * sizeof(T);
  }
  static Kept keep(const Problem& p) {
    const std::int64_t heads = p.batch * p.heads;
    return {Array<T****>(Kokkos::view_alloc(std::string("states"), Kokkos::WithoutInitializing),
                         heads, p.nq, p.d, p.dv),
            Array<T***>("sums", heads, p.nq, p.d), Array<T**>("row_sums", heads, p.nq)};
  }
  static T scale(std::int64_t d) { return static_cast<T>(1 / std::sqrt(static_cast<double>(d))); }

  template <class Body>
  static void for_each_head(const Exec& exec, const Tensors<T>& x, const Body& body) {
    const auto heads = static_cast<std::int64_t>(x.q.extent(0) * x.q.extent(1));
    Kokkos::parallel_for("LinAttn::perf::token_states",
                         Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, heads),
                         body);
    exec.fence();
  }

  static void forward(const Exec& exec, const Tensors<T>& x, const Kept& kept) {
    for_each_head(exec, x, [=](std::int64_t head) {
      const auto n = static_cast<std::int64_t>(x.q.extent(2)),
                 d = static_cast<std::int64_t>(x.q.extent(3)),
                 dv = static_cast<std::int64_t>(x.v.extent(3));
      const T alpha = scale(d);
      std::vector<T> t(static_cast<std::size_t>(dv)), first(static_cast<std::size_t>(d * dv));
      const T *S_before = first.data(), *z_before = first.data();
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t row = head * n + i;
        const T *q = x.q.data() + row * d, *k = x.k.data() + row * d, *v = x.v.data() + row * dv;
        T *o = x.o.data() + row * dv, *S = kept.states.data() + row * d * dv,
          *z = kept.sums.data() + row * d;
        T sum = static_cast<T>(i + 1);
        for (std::int64_t c = 0; c < dv; ++c) o[c] = t[c] += v[c];
        for (std::int64_t r = 0; r < d; ++r) {
          z[r] = z_before[r] + k[r];
          sum += alpha * q[r] * z[r];
          for (std::int64_t c = 0; c < dv; ++c) {
            S[r * dv + c] = S_before[r * dv + c] + k[r] * v[c];
            o[c] += alpha * q[r] * S[r * dv + c];
          }
        }
        for (std::int64_t c = 0; c < dv; ++c) o[c] /= sum;
        kept.row_sums.data()[row] = sum;
        S_before = S;
        z_before = z;
      }
    });
  }

  static void backward(const Exec& exec, const Tensors<T>& x, const Kept& kept) {
    for_each_head(exec, x, [=](std::int64_t head) {
      const auto n = static_cast<std::int64_t>(x.q.extent(2)),
                 d = static_cast<std::int64_t>(x.q.extent(3)),
                 dv = static_cast<std::int64_t>(x.v.extent(3));
      const T alpha = scale(d);
      const auto zeros = [](std::int64_t size) {
        return std::vector<T>(static_cast<std::size_t>(size));
      };
      std::vector<T> R = zeros(d * dv), y = zeros(d), r_sum = zeros(dv), u = zeros(dv);
      for (std::int64_t i = n - 1; i >= 0; --i) {
        const std::int64_t row = head * n + i;
        const T *q = x.q.data() + row * d, *k = x.k.data() + row * d, *v = x.v.data() + row * dv,
                *o = x.o.data() + row * dv, *d_o = x.d_o.data() + row * dv,
                *S = kept.states.data() + row * d * dv, *z = kept.sums.data() + row * d;
        T *d_q = x.d_q.data() + row * d, *d_k = x.d_k.data() + row * d,
          *d_v = x.d_v.data() + row * dv, e = 0;
        for (std::int64_t c = 0; c < dv; ++c) {
          u[c] = d_o[c] / kept.row_sums.data()[row];
          e += u[c] * o[c];
          d_v[c] = r_sum[c] += u[c];
        }
        for (std::int64_t r = 0; r < d; ++r) {
          T of_query = -e * z[r], of_key = -(y[r] += e * q[r]);
          for (std::int64_t c = 0; c < dv; ++c) {
            T& mirrored = R[r * dv + c];
            mirrored += q[r] * u[c];
            of_query += S[r * dv + c] * u[c];
            of_key += mirrored * v[c];
            d_v[c] += alpha * mirrored * k[r];
          }
          d_q[r] = alpha * of_query;
          d_k[r] = alpha * of_key;
        }
      }
    });
  }
};

/// Largest difference of o and the gradients to those of the engine, over the largest element.
double difference_to_engine(const Exec& exec, const Problem& p, const Tensors<float>& x) {
  const Engine<float, Affine> engine{.variant = {.qk_norm = QkNorm::none}};
  Tensors<float> y;
  y.make_inputs(exec, p);
  y.make_gradients(exec, p);
  const auto kept = engine.keep(p);
  engine.forward(exec, y, kept);
  engine.backward(exec, y, kept);
  double worst = 0;
  for (const auto& [a, b] : {std::pair{x.o, y.o}, {x.d_q, y.d_q}, {x.d_k, y.d_k}, {x.d_v, y.d_v}}) {
    double largest = 0, apart = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(b.data()[i])));
      apart = std::max(apart, std::abs(static_cast<double>(a.data()[i]) - b.data()[i]));
    }
    worst = std::max(worst, apart / largest);
  }
  return worst;
}

// ---- rows ---------------------------------------------------------------------------------------

/// One forward and one backward pass; each tensor comes when it is first needed.
template <class T, class Form>
void train(const Exec& exec, const Meter& meter, const Problem& p, const Form& form, Tensors<T>& x,
           benchmark::UserCounters& c) {
  const auto begin = meter.now();
  x.make_inputs(exec, p);
  const auto inputs = meter.now();
  typename Form::Kept kept;
  const auto forward_peak = meter.peak([&] {
    kept = form.keep(p);
    form.forward(exec, x, kept);
  });
  const auto between = meter.now();
  x.make_gradients(exec, p);
  const auto gradients = meter.now();
  const auto backward_peak = meter.peak([&] { form.backward(exec, x, kept); });

  c["tensors_hooks"] = (inputs - begin).hooks;
  c["gradients_hooks"] = (gradients - between).hooks;
  const bool known = meter.knows_process();
  const auto enter = [&](const std::string& what, const Meter::Bytes& bytes) {
    c[what + "_hooks"] = bytes.hooks;
    c[what + "_process"] = known ? bytes.process : -1;
  };
  enter("kept", between - inputs);
  enter("forward", forward_peak - between);
  enter("backward", backward_peak - gradients);
  c["saved_process"] = known ? (between - begin).process : -1;
  c["transient_process"] = known ? (backward_peak - between).process : -1;
}

/// What a naive form may take.
double spare_bytes() {
  const double available = proc_bytes("/proc/meminfo", "MemAvailable");
  return std::min(available > 0 ? available / 2 : 1e30, 2.5e9);
}

template <class T, class Form>
void add(const char* group, const char* variant, const Problem& p, const Form& form,
         bool causal = true) {
  const std::string name = row_name(group, "forward_backward", variant, type_name<T>(), causal, p);
  add_row(name, [=](benchmark::State& state) {
    constexpr bool naive = std::is_same_v<Form, TokenStates>;
    auto& c = state.counters;
    c["tokens"] = static_cast<double>(p.batch * p.heads * p.nq);
    c["number_bytes"] = sizeof(accumulator_t<T>);
    c["element_bytes"] = sizeof(T);
    c["kept_model"] = form.kept_bytes(p);
    for (auto _ : state) {
      const double begin = seconds();
      const bool fits = !naive || form.kept_bytes(p) <= spare_bytes();
      c["fits"] = fits;
      if (fits) {
        const Exec exec;
        Tensors<T> x;
        {
          const Meter meter;
          Problem brief = p;  // whatever a first call leaves behind
          brief.nq = brief.nk = std::min<std::int64_t>(p.nq, 256);
          train(exec, meter, brief, form, x, c);
          x = {};
          train(exec, meter, p, form, x, c);
        }
        if constexpr (naive) {
          const double difference = difference_to_engine(exec, p, x);
          c["difference"] = difference;
          if (!(difference < 1e-3)) state.SkipWithError("this form computes something else");
        }
      } else {
        state.SetLabel(detail::message("does not fit: ", form.kept_bytes(p), " bytes kept"));
      }
      state.SetIterationTime(seconds() - begin);
    }
  });
}

}  // namespace

void register_rows() {
  const Engine<float, Affine> affine;
  const Engine<float, Affine> dropout{
      .options = {.causal = true, .dropout = {.p = 0.1, .seed = 1}}};
  const Engine<float, Affine> centred{.options = {.causal = true, .center_v = true}};
  const Engine<float, Affine> largest{.variant = {.qk_norm = QkNorm::max}, .options = {}};
  const Engine<float, Lln> lln;
  const Engine<float, LlnDiag> lln_diag;

  const Problem little = shape(1, 2, 200, 24);
  add<float>("small", "affine", little, affine);
  add<float>("small", "affine_dropout", little, dropout);
  add<float>("small", "affine_center_v", little, centred);
  add<float>("small", "affine_max", little, largest, false);
  add<float>("small", "lln", little, lln);
  add<float>("small", "lln_diag", little, lln_diag);
  add<double>("small", "affine", little, Engine<double, Affine>());
  add<float>("small", "affine_states", little, TokenStates());

  for (const std::int64_t d : {32, 64, 128})
    for (std::int64_t n = 1024; n <= 32768; n *= 2) {
      const Problem p = shape(1, many_heads(), n, d);
      add<float>("memory", "affine", p, affine);
      if (d == 64) {
        add<double>("memory", "affine", p, Engine<double, Affine>());
        add<float>("memory", "affine_dropout", p, dropout);
        add<float>("memory", "affine_center_v", p, centred);
        add<float>("memory", "affine_max", p, largest, false);
      }
      add<float>("memory", "lln", p, lln);
      add<float>("memory", "affine_states", p, TokenStates());
    }
  for (std::int64_t n = 2048; n <= 65536; n *= 2)
    add<float>("one_head", "affine", shape(1, 1, n, 64), affine);
  for (std::int64_t n = 1024; n <= 32768; n *= 2)
    add<float>("local", "lln_diag", shape(1, many_heads(), n, 64), lln_diag);
  // TinyLlama, Llama-3.2-1B, Pythia-1.4B
  for (const Problem& p : {shape(1, 32, 2048, 64), shape(1, 32, 4096, 64), shape(1, 16, 8192, 128)})
    add<float>("layer", "affine", p, affine);
}

}  // namespace LinAttn::perf
