// SPDX-License-Identifier: BSD-3-Clause
#include "compute.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <linattn/io/views.hpp>
#include <linattn/linattn.hpp>
#include <linattn/variants.hpp>
#include <stdexcept>

namespace LinAttn::app {
namespace {

/// The variant with its parameters, which its aggregate lists queries first.
template <class V>
V make_variant(Parameter query, Parameter key) {
  if constexpr (V::query_parameter != nullptr && V::key_parameter != nullptr)
    return V{query, key};
  else if constexpr (V::query_parameter != nullptr)
    return V{query};
  else if constexpr (V::key_parameter != nullptr)
    return V{key};
  else
    return V{};
}

template <class View, class... Extents>
View allocate(const char* name, Extents... extents) {
  try {
    return View(
        Kokkos::view_alloc(std::string("LinAttn::app::") + name, Kokkos::WithoutInitializing),
        static_cast<std::size_t>(extents)...);
  } catch (const std::exception&) {
    const std::size_t size =
        (sizeof(typename View::value_type) * ... * static_cast<std::size_t>(extents));
    throw EnvironmentFailure(detail::message("not enough memory: cannot allocate ", size,
                                             " bytes for ", name, " in ",
                                             View::memory_space::name(), " memory"));
  }
}

/// Filled with NaN, so that an element which no kernel writes is seen.
template <class View, class ExecSpace, class... Extents>
View allocate_output(const ExecSpace& exec, const char* name, Extents... extents) {
  const auto view = allocate<View>(name, extents...);
  using Value = typename View::value_type;
  Kokkos::deep_copy(exec, view, Value(std::numeric_limits<float>::quiet_NaN()));
  return view;
}

/// Rows of accumulator type and their exponents, where ExecSpace can reach them.
template <class ExecSpace, class T>
struct StateViews {
  using Memory = typename ExecSpace::memory_space;
  using Sums = Kokkos::View<accumulator_t<T>****, Kokkos::LayoutRight, Memory>;
  using Rows = Kokkos::View<accumulator_t<T>***, Kokkos::LayoutRight, Memory>;
  using Exponents = Kokkos::View<int***, Kokkos::LayoutRight, Memory>;

  Sums S;
  Rows z;
  Exponents shift;
  bool present = false;
  bool has_shift = false;

  StateViews() = default;

  StateViews(const ExecSpace& exec, const char* name, const HostState& state)
      : S(allocate<Sums>(name, state.S.extent(0), state.S.extent(1), state.S.extent(2),
                         state.S.extent(3))),
        z(allocate<Rows>(name, state.z.extent(0), state.z.extent(1), state.z.extent(2))),
        present(true) {
    io::copy_into(exec, state.S, S);
    io::copy_into(exec, state.z, z);
    if (!state.shift) return;
    has_shift = true;
    shift = allocate<Exponents>(name, z.extent(0), z.extent(1), z.extent(2));
    const auto host = Kokkos::create_mirror_view(shift);
    const auto values = state.shift->values<std::int64_t>();
    std::transform(values.begin(), values.end(), host.data(),
                   [](std::int64_t x) { return static_cast<int>(x); });
    Kokkos::deep_copy(exec, shift, host);
    exec.fence();  // before the host copy ends its life
  }

  /// An output for `features` features.
  StateViews(const ExecSpace& exec, const char* name, const Problem& p, std::int64_t features,
             bool with_shift)
      : S(allocate_output<Sums>(exec, name, p.sequences(), p.kv_heads, features, p.dv)),
        z(allocate_output<Rows>(exec, name, p.sequences(), p.kv_heads, features)),
        present(true),
        has_shift(with_shift) {
    if (with_shift) shift = allocate<Exponents>(name, p.sequences(), p.kv_heads, features);
  }

  State<ExecSpace, T> reference() const {
    if (!present) return {};
    State<ExecSpace, T> state{.S = S, .z = z};
    if (has_shift) state.shift = shift;
    return state;
  }

  HostState to_host(const ExecSpace& exec) const {
    HostState state{io::to_array(exec, S), io::to_array(exec, z), {}};
    if (!has_shift) return state;
    const auto host = Kokkos::create_mirror_view(shift);
    Kokkos::deep_copy(exec, host, shift);
    exec.fence();
    state.shift = io::Array(io::ElementType::i64, state.z.extents());
    std::copy(host.data(), host.data() + host.size(), state.shift->values<std::int64_t>().begin());
    return state;
  }
};

/// Everything of a job that depends on space and precision but not on the variant.
template <class ExecSpace, class T>
struct Buffers {
  using Memory = typename ExecSpace::memory_space;
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Memory>;
  using Rows = Kokkos::View<accumulator_t<T>***, Kokkos::LayoutRight, Memory>;
  using PerHead = Kokkos::View<double*, Memory>;
  using Mask = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, Memory>;

  Tensor q, k, v, o, d_o, d_q, d_k, d_v;
  Rows denominator;
  PerHead query_parameter, key_parameter, d_query_parameter, d_key_parameter;
  Mask key_mask;
  StateViews<ExecSpace, T> first, last, d_first, d_last;  // states before and after the keys

  Buffers(const ExecSpace& exec, const Job& job, const VariantInfo& info, std::int64_t features) {
    const Problem& p = job.problem;
    q = input(exec, "q", *job.q);
    k = input(exec, "k", *job.k);
    v = input(exec, "v", *job.v);
    query_parameter = parameter(exec, "query parameter", job.query_parameter);
    key_parameter = parameter(exec, "key parameter", job.key_parameter);
    if (job.key_mask != nullptr) {
      key_mask = allocate<Mask>("key mask", p.batch, p.nk);
      io::copy_into(exec, *job.key_mask, key_mask);
    }
    if (job.state) first = {exec, "initial state", *job.state};
    if (job.wants_state) last = {exec, "final state", p, features, info.has_shift};
    o = allocate_output<Tensor>(exec, "o", p.batch, p.heads, p.nq, p.dv);
    if (job.d_o == nullptr) return;
    d_o = input(exec, "cotangent of o", *job.d_o);
    if (job.d_state) d_last = {exec, "cotangent of the final state", *job.d_state};
    denominator = allocate_output<Rows>(exec, "denominators", p.batch, p.heads, p.nq);
    d_q = allocate_output<Tensor>(exec, "gradient of q", p.batch, p.heads, p.nq, p.d);
    d_k = allocate_output<Tensor>(exec, "gradient of k", p.batch, p.kv_heads, p.nk, p.d);
    d_v = allocate_output<Tensor>(exec, "gradient of v", p.batch, p.kv_heads, p.nk, p.dv);
    d_query_parameter = allocate_output<PerHead>(exec, "gradient of the query parameter",
                                                 job.query_parameter.size());
    d_key_parameter =
        allocate_output<PerHead>(exec, "gradient of the key parameter", job.key_parameter.size());
    if (job.state) d_first = {exec, "gradient of the initial state", p, features, false};
  }

  Inputs<ExecSpace, T> inputs(const Job& job) const {
    Inputs<ExecSpace, T> inputs{.q = q, .k = k, .v = v};
    if (job.key_mask != nullptr) inputs.key_mask = key_mask;
    if (job.cu_seqlens_q != nullptr) {
      inputs.cu_seqlens_q = offsets(*job.cu_seqlens_q);
      inputs.cu_seqlens_k = offsets(*job.cu_seqlens_k);
    }
    inputs.state = first.reference().as_const();
    return inputs;
  }

  Saved<ExecSpace, T> saved(const Job& job) const {
    Saved<ExecSpace, T> saved{.o = o};
    if (job.d_o != nullptr) saved.denominator = denominator;
    saved.state = last.reference();
    return saved;
  }

  Results results(const ExecSpace& exec, const Job& job, const VariantInfo& info) const {
    Results results{io::to_array(exec, o), {}, {}};
    if (job.wants_state) results.state = last.to_host(exec);
    if (job.d_o == nullptr) return results;
    auto& gradients = results.gradients;
    gradients.push_back({"q", io::to_array(exec, d_q)});
    gradients.push_back({"k", io::to_array(exec, d_k)});
    gradients.push_back({"v", io::to_array(exec, d_v)});
    if (!info.query_parameter.empty())
      gradients.push_back({info.query_parameter, io::to_array(exec, d_query_parameter)});
    if (!info.key_parameter.empty())
      gradients.push_back({info.key_parameter, io::to_array(exec, d_key_parameter)});
    if (d_first.present) {
      HostState state = d_first.to_host(exec);
      gradients.push_back({"state/S", std::move(state.S)});
      gradients.push_back({"state/z", std::move(state.z)});
    }
    return results;
  }

 private:
  static Tensor input(const ExecSpace& exec, const char* name, const io::Array& array) {
    const auto view =
        allocate<Tensor>(name, array.extent(0), array.extent(1), array.extent(2), array.extent(3));
    io::copy_into(exec, array, view);
    return view;
  }

  static PerHead parameter(const ExecSpace& exec, const char* name,
                           const std::vector<double>& values) {
    const auto view = allocate<PerHead>(name, values.size());
    io::copy_into(exec, io::Array(values, {static_cast<std::int64_t>(values.size())}), view);
    return view;
  }

  static SequenceOffsets offsets(const io::Array& array) {
    return {array.values<std::int64_t>().data(), {array.size()}, {1}};
  }
};

template <class ExecSpace, class Pass>
void run_pass(const ExecSpace& exec, int repeat, PassReport& report, const Pass& pass) {
  using Clock = std::chrono::steady_clock;
  pass();
  detail::fence(exec, "LinAttn::app::first_run");
  for (int run = 0; run < repeat; ++run) {
    const auto start = Clock::now();
    pass();
    detail::fence(exec, "LinAttn::app::timed_run");
    report.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
}

template <class T, class ExecSpace, class V>
Outcome compute_variant(const ExecSpace& exec, const Job& job, const Execution& execution) {
  const VariantInfo& info = variant_info(job.variant);
  const std::int64_t features = feature_count(V{}.key_map(), job.problem.d);
  const Buffers<ExecSpace, T> buffers(exec, job, info, features);
  const V variant = make_variant<V>(buffers.query_parameter, buffers.key_parameter);
  const Options options{.causal = job.causal,
                        .normalise = job.normalise,
                        .scale = job.scale,
                        .chunk = execution.chunk,
                        .segments = execution.segments,
                        .tiles = execution.tiles};
  Outcome outcome;
  const auto prepare = [&](Pass pass) {
    return PassReport{plan<T>(exec, variant, job.problem, pass, options),
                      workspace_size<T>(exec, variant, job.problem, pass, options),
                      {}};
  };
  outcome.forward = prepare(Pass::forward);
  std::size_t arena_bytes = outcome.forward.workspace_bytes;
  if (job.d_o != nullptr) {
    outcome.backward = prepare(Pass::backward);
    outcome.saved_bytes = Saved<ExecSpace, T>::bytes(job.problem);
    arena_bytes = std::max(arena_bytes, outcome.backward->workspace_bytes);
  }
  using Arena = Kokkos::View<unsigned char*, typename ExecSpace::memory_space>;
  const auto arena = allocate<Arena>("workspace", arena_bytes);
  Kokkos::deep_copy(exec, arena, static_cast<unsigned char>(0xff));  // NaN, whatever the type

  const Inputs<ExecSpace, T> inputs = buffers.inputs(job);
  const Saved<ExecSpace, T> saved = buffers.saved(job);
  run_pass(exec, execution.repeat, outcome.forward,
           [&] { forward<T>(exec, variant, inputs, saved, arena, options); });
  if (job.d_o != nullptr) {
    const Cotangents<ExecSpace, T> cotangents{.o = buffers.d_o,
                                              .state = buffers.d_last.reference().as_const()};
    Gradients<ExecSpace, T> gradients{.q = buffers.d_q, .k = buffers.d_k, .v = buffers.d_v};
    if constexpr (V::query_parameter != nullptr)
      gradients.query_parameter = buffers.d_query_parameter;
    if constexpr (V::key_parameter != nullptr) gradients.key_parameter = buffers.d_key_parameter;
    gradients.state = buffers.d_first.reference();
    run_pass(exec, execution.repeat, *outcome.backward, [&] {
      backward<T>(exec, variant, inputs, saved, cotangents, gradients, arena, options);
    });
  }
  outcome.results = buffers.results(exec, job, info);
  return outcome;
}

template <class T, class ExecSpace>
Outcome compute_as(const ExecSpace& exec, const Job& job, const Execution& execution) {
  Outcome outcome;
  with_variant(job.variant, [&]<class V>(std::type_identity<V>) {
    outcome = compute_variant<T, ExecSpace, V>(exec, job, execution);
  });
  return outcome;
}

template <class ExecSpace>
Outcome compute_in(const Job& job, const Execution& execution) {
  const ExecSpace exec{};
  switch (execution.scalar) {
    case Scalar::f64:
      return compute_as<double>(exec, job, execution);
    case Scalar::f32:
      return compute_as<float>(exec, job, execution);
    case Scalar::f16:
      return compute_as<float16>(exec, job, execution);
    case Scalar::bf16:
      return compute_as<bfloat16>(exec, job, execution);
  }
  throw std::logic_error("a precision that there is not was asked for");
}

}  // namespace

const std::vector<VariantInfo>& variants() {
  static const std::vector<VariantInfo> list = [] {
    const auto text = [](const char* name) { return std::string(name == nullptr ? "" : name); };
    std::vector<VariantInfo> infos;
    for_each_variant([&]<class V>(std::type_identity<V>) {
      infos.push_back({V::name, V::normalise_by_default, text(V::query_parameter),
                       text(V::key_parameter), ScaledFeatureMap<key_map_t<V>>});
    });
    return infos;
  }();
  return list;
}

std::string variant_names() { return LinAttn::variant_names(); }

const VariantInfo& variant_info(std::string_view name) {
  for (const VariantInfo& info : variants())
    if (info.name == name) return info;
  throw InvalidArgument(detail::message("expected a variant of this version (", variant_names(),
                                        "), found '", name, "'"));
}

std::vector<std::string> parameter_names() {
  std::vector<std::string> names;
  for (const VariantInfo& info : variants())
    for (const std::string& name : {info.query_parameter, info.key_parameter})
      if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end())
        names.push_back(name);
  return names;
}

double PassReport::median() const {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t n = sorted.size();
  if (n == 0) return 0;
  return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

Outcome compute(const Job& job, const Execution& execution) {
  switch (execution.space) {
    case Space::serial:
#if defined(KOKKOS_ENABLE_SERIAL)
      return compute_in<Kokkos::Serial>(job, execution);
#else
      break;
#endif
    case Space::openmp:
#if defined(KOKKOS_ENABLE_OPENMP)
      return compute_in<Kokkos::OpenMP>(job, execution);
#else
      break;
#endif
    case Space::cuda:
#if defined(KOKKOS_ENABLE_CUDA)
      return compute_in<Kokkos::Cuda>(job, execution);
#else
      break;
#endif
  }
  throw std::logic_error("an execution space that is not enabled was asked for");
}

}  // namespace LinAttn::app
