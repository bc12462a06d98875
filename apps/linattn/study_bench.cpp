// SPDX-License-Identifier: BSD-3-Clause
#include "study_bench.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "study_methods.hpp"

namespace LinAttn::app {
namespace {

volatile std::sig_atomic_t caught_signal = 0;

extern "C" void remember_signal(int signal) { caught_signal = signal; }

/// Standard normal numbers, each from its index, by Box and Muller.
struct Normal {
  std::uint64_t key;

  KOKKOS_FUNCTION static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  KOKKOS_FUNCTION double uniform(std::uint64_t i) const {
    return (static_cast<double>(mix(key + (i + 1) * 0x9e3779b97f4a7c15u) >> 12) + 0.5) * 0x1p-52;
  }
  KOKKOS_FUNCTION double operator()(std::uint64_t i) const {
    const std::uint64_t pair = i / 2;
    const double radius = std::sqrt(-2 * std::log(uniform(2 * pair)));
    const double angle = 6.283185307179586 * uniform(2 * pair + 1);
    return radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }
};

template <class T>
struct FillNormal {
  Normal normal;
  T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    data[i] = static_cast<T>(static_cast<accumulator_t<T>>(normal(static_cast<std::uint64_t>(i))));
  }
};

/// A part of a tensor, by the place of its elements in row-major order.
template <class T, class ExecSpace>
struct Part {
  TensorRef<T, 4, ExecSpace> tensor;
  KOKKOS_FUNCTION T& operator[](std::int64_t i) const {
    const std::int64_t c = i % tensor.extent(3), row = i / tensor.extent(3);
    const std::int64_t n = row % tensor.extent(2), head = row / tensor.extent(2);
    return tensor(head / tensor.extent(1), head % tensor.extent(1), n, c);
  }
  std::int64_t size() const { return tensor.extent(0) * tensor.extent(1) * tensor.extent(2) * tensor.extent(3); }
};

template <class T, class ExecSpace>
struct Widen {
  Part<const T, ExecSpace> from;
  double* to;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    to[i] = static_cast<double>(static_cast<accumulator_t<T>>(from[i]));
  }
};

/// Largest |x - y|, or largest |y|; infinity where one is no number.
template <class T, class ExecSpace>
struct Largest {
  Part<const T, ExecSpace> x;
  Part<const double, ExecSpace> y;
  bool difference;
  KOKKOS_FUNCTION void operator()(std::int64_t i, double& largest) const {
    const double a = static_cast<double>(static_cast<accumulator_t<T>>(x[i])), b = y[i];
    double value = difference ? a - b : b;
    value = value < 0 ? -value : value;
    if (!(a - b == a - b)) value = HUGE_VAL;
    if (value > largest) largest = value;
  }
};

/// Bytes in use, as Kokkos tells its tools of allocations, while this exists; one at a time.
class AllocationMeter {
 public:
  AllocationMeter() : m_before(Kokkos::Tools::Experimental::get_callbacks()) {
    count() = {};
    Kokkos::Tools::Experimental::set_allocate_data_callback(allocate);
    Kokkos::Tools::Experimental::set_deallocate_data_callback(release);
  }
  ~AllocationMeter() { Kokkos::Tools::Experimental::set_callbacks(m_before); }
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;

  /// The most at once since the last call.
  double peak() {
    const auto found = static_cast<double>(count().peak);
    count().peak = count().now;
    return found;
  }

 private:
  struct Count {
    std::int64_t now = 0, peak = 0;
  };
  static Count& count() {
    static Count the_count;
    return the_count;
  }
  static void allocate(const Kokkos_Profiling_SpaceHandle, const char*, const void*, const std::uint64_t bytes) {
    count().now += static_cast<std::int64_t>(bytes);
    count().peak = std::max(count().peak, count().now);
  }
  static void release(const Kokkos_Profiling_SpaceHandle, const char*, const void*, const std::uint64_t bytes) {
    count().now -= static_cast<std::int64_t>(bytes);
  }

  Kokkos::Tools::Experimental::EventSet m_before;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const std::size_t n = x.size();
  return n % 2 == 1 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

void enter_times(PassMeasure& pass, const std::vector<double>& times) {
  pass.status = RowStatus::measured;
  pass.seconds = median(times);
  pass.least = *std::min_element(times.begin(), times.end());
  pass.most = *std::max_element(times.begin(), times.end());
  pass.samples = static_cast<double>(times.size());
}

template <class ExecSpace, class T>
class TypedBench : public Bench {
 public:
  using Run = StudyRun<ExecSpace, T>;
  using Reference = StudyRun<ExecSpace, double>;
  using Tensor = typename Run::Tensor;
  using Tensors = typename Run::Tensors;
  using Arena = typename Run::Arena;
  template <class E>
  using TensorOf = typename StudyRun<ExecSpace, E>::Tensor;

  TypedBench(const StudyShape& shape, const BenchOptions& options)
      : m_p(shape.problem), m_causal(shape.causal), m_options(options) {}

  RowMeasure measure(const std::string& method, double forward, double backward) override {
    RowMeasure row;
    const auto stop = [&](std::size_t from, RowStatus status) {
      for (std::size_t pass = from; pass < study_passes; ++pass) row.passes[pass].status = status;
      return row;
    };
    try {
      const auto run = make_run<ExecSpace, T>(method, m_exec, m_p, m_causal);
      const std::size_t forward_arena = run->workspace_bytes(Pass::forward);
      const std::size_t backward_arena = run->workspace_bytes(Pass::backward);
      row.kept_bytes = static_cast<double>(run->kept_bytes());
      const double o_bytes = bytes(m_p.heads, m_p.nq, m_p.dv);
      const double d_bytes = bytes(m_p.heads, m_p.nq, m_p.d) + bytes(m_p.kv_heads, m_p.nk, m_p.d + m_p.dv);
      const double input_bytes = d_bytes + o_bytes;  // q, k, v and d_o
      const double forward_bytes = o_bytes + row.kept_bytes + static_cast<double>(forward_arena);
      const double backward_bytes =
          o_bytes + row.kept_bytes + d_bytes + static_cast<double>(std::max(forward_arena, backward_arena));
      if (input_bytes + forward_bytes > m_options.memory_limit) return stop(0, RowStatus::memory);
      if (forward > m_options.time_cap) return stop(0, RowStatus::time);
      std::optional<RowStatus> no_backward;
      if (forward + backward > m_options.time_cap) no_backward = RowStatus::time;
      if (input_bytes + backward_bytes > m_options.memory_limit) no_backward = RowStatus::memory;
      time_passes(*run, row, forward_arena, backward_arena, no_backward);
      if (no_backward) stop(1, *no_backward);
      measure_errors(method, row);
    } catch (const InvalidArgument& error) {
      row = {};
      row.reason = error.what();
      stop(0, RowStatus::mode);
    } catch (const std::bad_alloc&) {
      return ran_short(row);
    } catch (const EnvironmentFailure&) {
      return ran_short(row);
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()).find("allocat") == std::string::npos) throw;
      return ran_short(row);  // as Kokkos says it
    }
    m_o = {};
    m_gradients = {};
    return row;
  }

  std::array<double, 2> probe(const std::string& method) override {
    try {
      const auto run = make_run<ExecSpace, T>(method, m_exec, m_p, m_causal);
      RowMeasure row;
      time_passes(*run, row, run->workspace_bytes(Pass::forward), run->workspace_bytes(Pass::backward), {});
      m_o = {};
      m_gradients = {};
      return {row.passes[0].least, row.passes[1].least};
    } catch (const InvalidArgument&) {
      return {PassMeasure::none, PassMeasure::none};
    }
  }

 private:
  double bytes(std::int64_t heads, std::int64_t rows, std::int64_t columns) const {
    return static_cast<double>(m_p.batch * heads) * static_cast<double>(rows * columns) * sizeof(T);
  }

  RowMeasure ran_short(RowMeasure row) {
    m_o = {};
    m_gradients = {};
    for (PassMeasure& pass : row.passes)
      if (pass.status != RowStatus::measured) pass.status = RowStatus::memory;
    return row;
  }

  template <class E>
  static TensorOf<E> tensor(const char* name, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
    return TensorOf<E>(Kokkos::view_alloc(std::string("LinAttn::app::") + name, Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(b), static_cast<std::size_t>(h), static_cast<std::size_t>(n),
                       static_cast<std::size_t>(d));
  }
  template <class E>
  static typename StudyRun<ExecSpace, E>::Arena arena(std::size_t size) {
    using Bytes = typename StudyRun<ExecSpace, E>::Arena;
    return Bytes(Kokkos::view_alloc(std::string("LinAttn::app::workspace"), Kokkos::WithoutInitializing), size);
  }

  void make_inputs() {
    if (m_inputs.q.data() != nullptr) return;
    const auto make = [&](const char* name, std::uint64_t stream, std::int64_t h, std::int64_t n, std::int64_t d) {
      const Tensor x = tensor<T>(name, m_p.batch, h, n, d);
      const Normal normal{Normal::mix(Normal::mix(m_options.seed) + stream)};
      Kokkos::parallel_for("LinAttn::app::normal",
                           Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(
                               m_exec, 0, static_cast<std::int64_t>(x.size())),
                           FillNormal<T>{normal, x.data()});
      return x;
    };
    m_inputs.q = make("q", 1, m_p.heads, m_p.nq, m_p.d);
    m_inputs.k = make("k", 2, m_p.kv_heads, m_p.nk, m_p.d);
    m_inputs.v = make("v", 3, m_p.kv_heads, m_p.nk, m_p.dv);
    m_d_o = make("d_o", 4, m_p.heads, m_p.nq, m_p.dv);
    detail::fence(m_exec, "LinAttn::app::inputs");
  }

  template <class F>
  double timed(const F& call) const {
    throw_if_interrupted();
    detail::fence(m_exec, "LinAttn::app::before_run");
    const auto start = std::chrono::steady_clock::now();
    call();
    detail::fence(m_exec, "LinAttn::app::timed_run");
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void time_passes(Run& run, RowMeasure& row, std::size_t forward_arena, std::size_t backward_arena,
                   const std::optional<RowStatus>& no_backward) {
    make_inputs();
    auto& [forward, backward, both] = row.passes;
    std::vector<double> forwards, backwards, sums;
    {
      AllocationMeter meter;
      m_o = tensor<T>("o", m_p.batch, m_p.heads, m_p.nq, m_p.dv);
      run.keep();
      Arena workspace = arena<T>(forward_arena);
      const auto run_forward = [&] { return timed([&] { run.forward(m_inputs, m_o, workspace); }); };
      forwards.push_back(run_forward());
      forward.peak_bytes = meter.peak();
      if (!no_backward) {
        workspace = {};
        m_gradients = {tensor<T>("d_q", m_p.batch, m_p.heads, m_p.nq, m_p.d),
                       tensor<T>("d_k", m_p.batch, m_p.kv_heads, m_p.nk, m_p.d),
                       tensor<T>("d_v", m_p.batch, m_p.kv_heads, m_p.nk, m_p.dv)};
        run.allocate_gradients();
        workspace = arena<T>(backward_arena);
        meter.peak();
        const auto first = timed([&] { run.backward(m_inputs, m_o, m_d_o, m_gradients, workspace); });
        backwards.push_back(first);
        sums.push_back(forwards[0] + first);
        backward.peak_bytes = meter.peak();
        both.peak_bytes = std::max(forward.peak_bytes, backward.peak_bytes);
        if (forward_arena > backward_arena) workspace = {};
        if (forward_arena > backward_arena) workspace = arena<T>(forward_arena);
      }
      const double once = no_backward ? forwards[0] : sums[0];
      if (once <= m_options.time_cap) {  // what is longer is not run again
        forwards.clear();
        backwards.clear();
        sums.clear();
        double passed = 0;
        do {
          forwards.push_back(run_forward());
          if (!no_backward) {
            backwards.push_back(timed([&] { run.backward(m_inputs, m_o, m_d_o, m_gradients, workspace); }));
            sums.push_back(forwards.back() + backwards.back());
          }
          passed += no_backward ? forwards.back() : sums.back();
        } while ((passed < m_options.seconds || static_cast<int>(forwards.size()) < m_options.least_samples) &&
                 forwards.size() < 1000 && passed + once <= std::max(m_options.seconds, m_options.time_cap / 2));
      }
    }
    enter_times(forward, forwards);
    if (no_backward) return;
    enter_times(backward, backwards);
    enter_times(both, sums);
  }

  template <class E>
  TensorRef<const E, 4, ExecSpace> part_of(const TensorOf<E>& x, std::int64_t batch, std::int64_t heads,
                                           std::int64_t rows) const {
    const auto n = static_cast<std::int64_t>(x.extent(2)), d = static_cast<std::int64_t>(x.extent(3)),
               h = static_cast<std::int64_t>(x.extent(1));
    return {x.data() + (n - rows) * d, {batch, heads, rows, d}, {h * n * d, n * d, d, 1}};
  }

  TensorOf<double> widened(const char* name, const TensorRef<const T, 4, ExecSpace>& x) const {
    const TensorOf<double> wide = tensor<double>(name, x.extent(0), x.extent(1), x.extent(2), x.extent(3));
    Kokkos::parallel_for("LinAttn::app::widen",
                         Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(
                             m_exec, 0, static_cast<std::int64_t>(wide.size())),
                         Widen<T, ExecSpace>{{x}, wide.data()});
    return wide;
  }

  double error(const TensorRef<const T, 4, ExecSpace>& x, const TensorRef<const double, 4, ExecSpace>& y) const {
    double found[2] = {0, 0};
    for (const bool difference : {true, false}) {
      const Largest<T, ExecSpace> largest{{x}, {y}, difference};
      Kokkos::parallel_reduce("LinAttn::app::largest",
                              Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0,
                                                                                              largest.x.size()),
                              largest, Kokkos::Max<double>(found[difference ? 0 : 1]));
      detail::fence(m_exec, "LinAttn::app::largest");
    }
    return found[1] > 0 ? found[0] / found[1] : found[0];
  }

  /// Against the same method in double on the rounded inputs: all of it if that is little work, else the first key/value
  /// head with its queries, else of that its last rows.
  void measure_errors(const std::string& method, RowMeasure& row) {
    const bool backward = row.passes[1].status == RowStatus::measured;
    constexpr std::int64_t sampled_rows = 256;
    Problem p = m_p;
    ErrorOf of = ErrorOf::all;
    const double work = study_work(method, p, m_causal, Pass::forward) + study_work(method, p, m_causal, Pass::backward);
    const double heads = static_cast<double>(p.batch * p.kv_heads);
    if (work > m_options.whole_work && heads > 1) {
      p.batch = p.kv_heads = 1;
      p.heads = m_p.group();
      of = ErrorOf::head;
    }
    if (work / heads > m_options.head_work && is_quadratic(method) && p.nq > sampled_rows) {
      p.nq = sampled_rows;
      of = ErrorOf::rows;
    }
    const bool all_rows = p.nq == m_p.nq;
    // the last keys of causal attention are those of the last queries
    const std::int64_t key_rows = all_rows ? p.nk : m_causal ? p.nq : 0;
    throw_if_interrupted();
    const auto run = make_run<ExecSpace, double>(method, m_exec, p, m_causal);
    const typename Reference::Tensors in{widened("q", part_of<T>(m_inputs.q, p.batch, p.heads, p.nq)),
                                         widened("k", part_of<T>(m_inputs.k, p.batch, p.kv_heads, p.nk)),
                                         widened("v", part_of<T>(m_inputs.v, p.batch, p.kv_heads, p.nk))};
    const auto o = tensor<double>("o", p.batch, p.heads, p.nq, p.dv);
    run->keep();
    auto workspace = arena<double>(run->workspace_bytes(Pass::forward));
    run->forward(in, o, workspace);
    auto& [forward_pass, backward_pass, both] = row.passes;
    forward_pass.error = error(part_of<T>(m_o, p.batch, p.heads, p.nq), o);
    forward_pass.error_of = of;
    if (!backward) return;
    throw_if_interrupted();
    const auto d_o = widened("d_o", part_of<T>(m_d_o, p.batch, p.heads, p.nq));
    const typename Reference::Tensors gradients{tensor<double>("d_q", p.batch, p.heads, p.nq, p.d),
                                                tensor<double>("d_k", p.batch, p.kv_heads, p.nk, p.d),
                                                tensor<double>("d_v", p.batch, p.kv_heads, p.nk, p.dv)};
    run->allocate_gradients();
    workspace = arena<double>(run->workspace_bytes(Pass::backward));
    run->backward(in, o, d_o, gradients, workspace);
    backward_pass.error = error(part_of<T>(m_gradients.q, p.batch, p.heads, p.nq), gradients.q);
    if (key_rows > 0) {
      const auto of_keys = [&](const Tensor& found, const TensorOf<double>& expected) {
        return error(part_of<T>(found, p.batch, p.kv_heads, key_rows),
                     part_of<double>(expected, p.batch, p.kv_heads, key_rows));
      };
      backward_pass.error = std::max({backward_pass.error, of_keys(m_gradients.k, gradients.k),
                                      of_keys(m_gradients.v, gradients.v)});
    }
    backward_pass.error_of = both.error_of = of;
    both.error = std::max(forward_pass.error, backward_pass.error);
  }

  ExecSpace m_exec;
  Problem m_p;
  bool m_causal;
  BenchOptions m_options;
  Tensors m_inputs, m_gradients;
  Tensor m_o, m_d_o;
};

template <class ExecSpace>
std::unique_ptr<Bench> make_bench_in(const StudyShape& shape, const BenchOptions& options) {
  switch (options.scalar) {
    case Scalar::f64:
      return std::make_unique<TypedBench<ExecSpace, double>>(shape, options);
    case Scalar::f32:
      return std::make_unique<TypedBench<ExecSpace, float>>(shape, options);
    case Scalar::f16:
      return std::make_unique<TypedBench<ExecSpace, float16>>(shape, options);
    case Scalar::bf16:
      return std::make_unique<TypedBench<ExecSpace, bfloat16>>(shape, options);
  }
  throw std::logic_error("a precision that there is not was asked for");
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = remember_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second one ends the process at once
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void throw_if_interrupted() {
  if (caught_signal != 0) throw Interrupted();
}

void end_by_signal() {
  const int signal = caught_signal;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
  std::abort();
}

std::unique_ptr<Bench> make_bench(const StudyShape& shape, const BenchOptions& options) {
  switch (options.space) {
    case Space::serial:
#if defined(KOKKOS_ENABLE_SERIAL)
      return make_bench_in<Kokkos::Serial>(shape, options);
#else
      break;
#endif
    case Space::openmp:
#if defined(KOKKOS_ENABLE_OPENMP)
      return make_bench_in<Kokkos::OpenMP>(shape, options);
#else
      break;
#endif
    case Space::cuda:
#if defined(KOKKOS_ENABLE_CUDA)
      return make_bench_in<Kokkos::Cuda>(shape, options);
#else
      break;
#endif
  }
  throw std::logic_error("an execution space that is not enabled was asked for");
}

}  // namespace LinAttn::app
