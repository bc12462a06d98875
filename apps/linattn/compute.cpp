// SPDX-License-Identifier: BSD-3-Clause
#include "compute.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <chrono>
#include <exception>
#include <limits>
#include <linattn/analysis/moments.hpp>
#include <linattn/io/views.hpp>
#include <linattn/linattn.hpp>
#include <linattn/variants.hpp>
#include <stdexcept>

#include "variant_settings.hpp"

namespace LinAttn::app {
namespace {

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

/// Rows of accumulator type, their exponents and counts, where ExecSpace can reach them.
template <class ExecSpace, class T>
struct StateViews {
  using Memory = typename ExecSpace::memory_space;
  using Sums = Kokkos::View<accumulator_t<T>****, Kokkos::LayoutRight, Memory>;
  using Rows = Kokkos::View<accumulator_t<T>***, Kokkos::LayoutRight, Memory>;
  using Exponents = Kokkos::View<int***, Kokkos::LayoutRight, Memory>;
  using Counts = Kokkos::View<std::int64_t*, Memory>;

  Sums S;
  Rows z, t;
  Exponents shift;
  Counts m;
  bool present = false;
  bool has_shift = false, has_t = false, has_m = false;

  StateViews() = default;

  StateViews(const ExecSpace& exec, const char* name, const HostState& state)
      : S(allocate<Sums>(name, state.S.extent(0), state.S.extent(1), state.S.extent(2),
                         state.S.extent(3))),
        z(allocate<Rows>(name, state.z.extent(0), state.z.extent(1), state.z.extent(2))),
        present(true),
        has_shift(state.shift),
        has_t(state.t),
        has_m(state.m) {
    io::copy_into(exec, state.S, S);
    io::copy_into(exec, state.z, z);
    if (has_t) {
      t = allocate<Rows>(name, state.t->extent(0), state.t->extent(1), state.t->extent(2));
      io::copy_into(exec, *state.t, t);
    }
    if (has_m) {
      m = allocate<Counts>(name, state.m->extent(0));
      io::copy_into(exec, *state.m, m);
    }
    if (!has_shift) return;
    shift = allocate<Exponents>(name, z.extent(0), z.extent(1), z.extent(2));
    const auto host = Kokkos::create_mirror_view(shift);
    const auto values = state.shift->values<std::int64_t>();
    std::transform(values.begin(), values.end(), host.data(),
                   [](std::int64_t x) { return static_cast<int>(x); });
    Kokkos::deep_copy(exec, shift, host);
    exec.fence();  // before the host copy ends its life
  }

  /// An output for `features` features: a state, or a gradient, which has neither exponents nor
  /// counts.
  StateViews(const ExecSpace& exec, const char* name, const Problem& p, std::int64_t features,
             const VariantInfo& info, bool is_gradient)
      : S(allocate_output<Sums>(exec, name, p.sequences(), p.kv_heads, features, p.dv)),
        z(allocate_output<Rows>(exec, name, p.sequences(), p.kv_heads, features)),
        present(true),
        has_shift(info.has_shift && !is_gradient),
        has_t(info.has_counts),
        has_m(info.has_counts && !is_gradient) {
    if (has_shift) shift = allocate<Exponents>(name, p.sequences(), p.kv_heads, features);
    if (has_t) t = allocate_output<Rows>(exec, name, p.sequences(), p.kv_heads, p.dv);
    if (has_m) {
      m = allocate<Counts>(name, p.sequences());
      Kokkos::deep_copy(exec, m, std::int64_t(-1));  // no number of keys
    }
  }

  State<ExecSpace, T> reference() const {
    if (!present) return {};
    State<ExecSpace, T> state{.S = S, .z = z};
    if (has_shift) state.shift = shift;
    if (has_t) state.t = t;
    if (has_m) state.m = m;
    return state;
  }

  HostState to_host(const ExecSpace& exec) const {
    HostState state{io::to_array(exec, S), io::to_array(exec, z), {}, {}, {}};
    if (has_t) state.t = io::to_array(exec, t);
    if (has_m) state.m = io::to_array(exec, m);
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
  using Factors = Kokkos::View<double**, Kokkos::LayoutRight, Memory>;
  using Mask = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, Memory>;
  using Records = Kokkos::View<NormaliserRecord**, Kokkos::LayoutRight, Memory>;

  Tensor q, k, v, o, centred, linear, d_o, d_q, d_k, d_v;
  Rows denominator;
  Records smallest;  // of extents (0, 0) where row sums are not checked
  std::vector<PerHead> parameters, d_parameters;  // in the order of the variant's
  Factors diag_r, diag_p, d_diag_r, d_diag_p;     // of extents (0, 0) where there are none
  Factors projection;                             // likewise
  PerHead sigma_q, sigma_k;                       // of extent 0 where they are not measured
  Mask key_mask;
  StateViews<ExecSpace, T> first, last, d_first, d_last;  // states before and after the keys

  Buffers(const ExecSpace& exec, const Job& job, const VariantInfo& info, std::int64_t features,
          const Options& options)
      : centres(options.center_v),
        checks(job.normalise() && job.settings.has("small_g") &&
               options.small_normaliser == SmallNormaliser::check) {
    const Problem& p = job.problem;
    q = input(exec, "q", *job.q);
    k = input(exec, "k", *job.k);
    v = input(exec, "v", *job.v);
    for (std::size_t i = 0; i < info.parameters.size(); ++i)
      parameters.push_back(
          job.parameters[i].empty()
              ? allocate_output<PerHead>(exec, "matched parameter", info.parameters[i].heads(p))
              : parameter(exec, "parameter", job.parameters[i]));
    if (job.diag_r != nullptr) diag_r = factors(exec, "diag_r", *job.diag_r);
    if (job.diag_p != nullptr) diag_p = factors(exec, "diag_p", *job.diag_p);
    if (job.projection != nullptr) projection = factors(exec, "projection", *job.projection);
    if (job.key_mask != nullptr) {
      key_mask = allocate<Mask>("key mask", p.batch, p.nk);
      io::copy_into(exec, *job.key_mask, key_mask);
    }
    if (matches_moments(job.settings) || job.wants_moments) {
      sigma_q = allocate_output<PerHead>(exec, "deviation of q", p.kv_heads);
      sigma_k = allocate_output<PerHead>(exec, "deviation of k", p.kv_heads);
      measure(exec, job, info);
    }
    if (job.state) first = {exec, "initial state", *job.state};
    if (job.wants_state) last = {exec, "final state", p, features, info, false};
    o = allocate_output<Tensor>(exec, "o", p.batch, p.heads, p.nq, p.dv);
    if (checks) smallest = allocate<Records>("smallest row sums", p.sequences(), p.heads);
    if (job.d_o == nullptr) return;
    d_o = input(exec, "cotangent of o", *job.d_o);
    if (job.d_state) d_last = {exec, "cotangent of the final state", *job.d_state};
    denominator = allocate_output<Rows>(exec, "denominators", p.batch, p.heads, p.nq);
    if (centres)
      centred = allocate_output<Tensor>(exec, "o without its centre", p.batch, p.heads, p.nq, p.dv);
    d_q = allocate_output<Tensor>(exec, "gradient of q", p.batch, p.heads, p.nq, p.d);
    d_k = allocate_output<Tensor>(exec, "gradient of k", p.batch, p.kv_heads, p.nk, p.d);
    d_v = allocate_output<Tensor>(exec, "gradient of v", p.batch, p.kv_heads, p.nk, p.dv);
    for (const ParameterInfo& info_of : info.parameters)
      d_parameters.push_back(
          allocate_output<PerHead>(exec, "gradient of a parameter", info_of.heads(p)));
    if (job.uses_diag_r()) {
      linear = allocate_output<Tensor>(exec, "linear part of o", p.batch, p.heads, p.nq, p.dv);
      d_diag_r = allocate_output<Factors>(exec, "gradient of diag_r", p.heads, p.dv);
    }
    if (job.uses_diag_p())
      d_diag_p = allocate_output<Factors>(exec, "gradient of diag_p", p.heads, p.dv);
    if (job.state) d_first = {exec, "gradient of the initial state", p, features, info, true};
  }

  /// Fills in sigma_q and sigma_k, and the parameters that are matched to them. Where there are as
  /// many queries as keys, a hidden key also hides the query of its number.
  void measure(const ExecSpace& exec, const Job& job, const VariantInfo& info) {
    MomentInputs<ExecSpace, T> tensors{.q = q, .k = k};
    if (job.key_mask != nullptr) {
      tensors.key_mask = key_mask;
      if (job.problem.nq == job.problem.nk) tensors.query_mask = key_mask;
    }
    const Moments<ExecSpace> moments{.sigma_q = sigma_q, .sigma_k = sigma_k};
    MomentOptions options = moment_options_of(job);
    if (!matches_moments(job.settings)) {
      options.causal = false;  // nothing depends on them
      measure_moments<T>(exec, tensors, moments, options);
      return;
    }
    Rates<ExecSpace> rates;
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      if (info.parameters[i].name == "alpha") rates.alpha = parameters[i];
      if (info.parameters[i].name == "beta") rates.beta = parameters[i];
    }
    match_moments<T>(exec, tensors, moments, rates, options);
  }

  /// What measure() found, and the parameters that go with it.
  HostMoments host_moments(const ExecSpace& exec, const Job& job, const VariantInfo& info) const {
    const auto values = [&](const PerHead& view) {
      const io::Array array = io::to_array(exec, view);
      return array.as<double>();
    };
    HostMoments moments{{"sigma_q", values(sigma_q)}, {"sigma_k", values(sigma_k)}};
    for (std::size_t i = 0; i < info.parameters.size(); ++i)
      if (info.parameters[i].name == "alpha" || info.parameters[i].name == "beta")
        moments[info.parameters[i].name] =
            job.parameters[i].empty() ? values(parameters[i]) : job.per_head(info.parameters[i]);
    if (!matches_moments(job.settings)) return moments;
    for (const auto& [name, found] : moments)
      for (std::size_t head = 0; head < found.size(); ++head)
        if (!std::isfinite(found[head]))
          throw InvalidArgument(detail::message("alpha and beta cannot be matched to q and k: ", name, " of head ", head,
                                                " is ", found[head], ", expected a finite number"));
    return moments;
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
    if (job.d_o != nullptr && centres) saved.centred = centred;
    if (job.d_o != nullptr && job.uses_diag_r()) saved.linear = linear;
    if (checks) saved.smallest = smallest;
    saved.state = last.reference();
    return saved;
  }

  /// What forward keeps for backward beside o.
  std::size_t saved_bytes(const Job& job) const {
    return Saved<ExecSpace, T>::bytes(job.problem) + (centred.size() + linear.size()) * sizeof(T);
  }

  /// Parameters for kernels: those given once as a number, the others as Views of these buffers.
  Parameters parameters_of(const Job& job, const VariantInfo& info) const {
    Parameters result;
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      const std::vector<double>& values = job.parameters[i];
      result.by_name.emplace(info.parameters[i].name,
                             values.size() == 1 ? Parameter(values[0]) : Parameter(parameters[i]));
    }
    if (job.diag_r != nullptr) result.diag_r = diag_r;
    if (job.diag_p != nullptr) result.diag_p = diag_p;
    if (job.projection != nullptr) result.projection = projection;
    return result;
  }

  Gradients<ExecSpace, T> gradients(const VariantInfo& info) const {
    Gradients<ExecSpace, T> result{.q = d_q, .k = d_k, .v = d_v};
    for (std::size_t i = 0; i < info.parameters.size(); ++i)
      info.parameters[i].pick(result.query_parameter, result.key_parameter, result.constant,
                              result.scale) = d_parameters[i];
    if (d_diag_r.data() != nullptr) result.diag_r = d_diag_r;
    if (d_diag_p.data() != nullptr) result.diag_p = d_diag_p;
    result.state = d_first.reference();
    return result;
  }

  Results results(const ExecSpace& exec, const Job& job, const VariantInfo& info) const {
    Results results{io::to_array(exec, o)};
    if (matches_moments(job.settings) || job.wants_moments)
      results.moments = host_moments(exec, job, info);
    if (job.wants_state) results.state = last.to_host(exec);
    if (job.d_o == nullptr) return results;
    auto& gradients = results.gradients;
    gradients.push_back({"q", io::to_array(exec, d_q)});
    gradients.push_back({"k", io::to_array(exec, d_k)});
    gradients.push_back({"v", io::to_array(exec, d_v)});
    for (std::size_t i = 0; i < info.parameters.size(); ++i)
      gradients.push_back({info.parameters[i].name, io::to_array(exec, d_parameters[i])});
    if (job.uses_diag_r()) gradients.push_back({"diag_r", io::to_array(exec, d_diag_r)});
    if (job.uses_diag_p()) gradients.push_back({"diag_p", io::to_array(exec, d_diag_p)});
    if (d_first.present)
      for (NamedArray& sum : d_first.to_host(exec).sums())
        gradients.push_back({"state/" + sum.name, std::move(sum.array)});
    return results;
  }

 private:
  bool centres, checks;

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

  static Factors factors(const ExecSpace& exec, const char* name, const io::Array& array) {
    const auto view = allocate<Factors>(name, array.extent(0), array.extent(1));
    io::copy_into(exec, array, view);
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

/// check() with advice in the words of files and of the command line.
template <class T, class ExecSpace>
void require_large_row_sums(const ExecSpace& exec, const Saved<ExecSpace, T>& saved,
                            const Options& options) {
  if (!saved.smallest.present()) return;
  try {
    check(exec, saved, options);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(detail::message(error.what(),
                                          " (in a file qk_norm='l2', small_g='clamp'; as options ",
                                          "--qk-norm l2, --small-g clamp)"));
  }
}

/// Rows of a state; 0 of a variant without states.
template <class V>
std::int64_t features_of(const Job& job) {
  return ProjectedVariant<V> ? job.projection->extent(0) : detail::features_of(V{}, job.problem.d);
}

template <class T, class ExecSpace, class V>
Outcome compute_variant(const ExecSpace& exec, const Job& job, const Execution& execution) {
  const VariantInfo& info = variant_info(job.variant);
  const std::int64_t features = features_of<V>(job);
  const Options options = options_of(job, execution);
  const Buffers<ExecSpace, T> buffers(exec, job, info, features, options);
  const V variant = make_variant(std::type_identity<V>{}, job, buffers.parameters_of(job, info));
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
    outcome.saved_bytes = buffers.saved_bytes(job);
    arena_bytes = std::max(arena_bytes, outcome.backward->workspace_bytes);
  }
  using Arena = Kokkos::View<unsigned char*, typename ExecSpace::memory_space>;
  const auto arena = allocate<Arena>("workspace", arena_bytes);
  Kokkos::deep_copy(exec, arena, static_cast<unsigned char>(0xff));  // NaN, whatever the type

  const Inputs<ExecSpace, T> inputs = buffers.inputs(job);
  const Saved<ExecSpace, T> saved = buffers.saved(job);
  run_pass(exec, execution.repeat, outcome.forward,
           [&] { forward<T>(exec, variant, inputs, saved, arena, options); });
  require_large_row_sums<T>(exec, saved, options);
  if (job.d_o != nullptr) {
    const Cotangents<ExecSpace, T> cotangents{.o = buffers.d_o,
                                              .state = buffers.d_last.reference().as_const()};
    const Gradients<ExecSpace, T> gradients = buffers.gradients(info);
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
    using Role = ParameterInfo::Role;
    std::vector<VariantInfo> infos;
    for_each_variant([&]<class V>(std::type_identity<V>) {
      VariantInfo info{.name = V::name,
                       .normalise_by_default = V::normalise_by_default,
                       .parameters = {},
                       .has_shift = is_scaled_v<V>,
                       .has_counts = has_constant_v<V>,
                       .has_blocks = has_local_term_v<V>,
                       .has_states = LinearVariant<V> && !has_local_term_v<V>,
                       .may_be_plain = LinearVariant<V> && !has_local_term_v<V>,
                       .has_own_scale = requires(const V& variant) { variant.scale; },
                       .has_projection = ProjectedVariant<V>};
      const auto add = [&](const char* name, Role role) {
        if (name != nullptr) info.parameters.push_back({name, role, role == Role::scale});
      };
      add(V::query_parameter, Role::query);
      add(V::key_parameter, Role::key);
      add(constant_parameter_name<V>(), Role::constant);
      add(scale_parameter_name<V>(), Role::scale);
      infos.push_back(std::move(info));
    });
    return infos;
  }();
  return list;
}

const ParameterInfo* VariantInfo::parameter(std::string_view wanted) const {
  for (const ParameterInfo& info : parameters)
    if (info.name == wanted) return &info;
  return nullptr;
}

std::vector<NamedArray> HostState::sums() const {
  std::vector<NamedArray> result{{"S", S}, {"z", z}};
  if (t) result.push_back({"t", *t});
  return result;
}

double Job::output_scale() const {
  return variant_info(variant).has_own_scale ? 1.0 : settings.real("scale", 1.0);
}

std::vector<double> Job::per_head(const ParameterInfo& parameter) const {
  const auto& all = variant_info(variant).parameters;
  std::size_t i = 0;
  while (all[i].name != parameter.name) ++i;
  const std::vector<double>& values = parameters[i];
  return values.size() == 1
             ? std::vector<double>(static_cast<std::size_t>(parameter.heads(problem)), values[0])
             : values;
}

std::string variant_names() { return LinAttn::variant_names(); }

void draw_projection(Job& job) {
  if (!variant_info(job.variant).has_projection || job.projection != nullptr) return;
  const std::int64_t features = job.settings.integer("features", 1), d = job.problem.d;
  try {
    job.drawn_projection = std::make_shared<const io::Array>(
        detail::orthogonal_rows(features, d, job.settings.counter("seed", 0)), std::vector<std::int64_t>{features, d});
  } catch (const InvalidArgument&) {
    throw;
  } catch (const std::exception&) {
    throw EnvironmentFailure(
        detail::message("not enough memory: cannot draw a projection of ", features, " features of ", d, " entries"));
  }
  job.projection = job.drawn_projection.get();
}

const VariantInfo& variant_info(std::string_view name) {
  for (const VariantInfo& info : variants())
    if (info.name == name) return info;
  throw InvalidArgument(detail::message("expected a variant of this version (", variant_names(),
                                        "), found '", name, "'"));
}

double PassReport::median() const {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t n = sorted.size();
  if (n == 0) return 0;
  return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

void require_valid_settings(const Job& job) {
  with_variant(job.variant, [&]<class V>(std::type_identity<V> type) {
    Parameters parameters;
    const VariantInfo& info = variant_info(job.variant);
    // of a projection the library judges the extents, and these are right
    if constexpr (ProjectedVariant<V>) return;
    for (std::size_t i = 0; i < info.parameters.size(); ++i)
      if (job.parameters[i].size() <= 1)  // any rate will do for one that is yet to be matched
        parameters.by_name.emplace(info.parameters[i].name,
                                   job.parameters[i].empty() ? 1.0 : job.parameters[i][0]);
    const V variant = make_variant(type, job, parameters);
    detail::validate_variant<Kokkos::DefaultHostExecutionSpace>(
        detail::resolved(variant, job.problem), job.problem, Pass::forward, job.causal());
    dropout_of(job.settings).validate(job.problem);
    if (!info.may_be_plain && !job.normalise())
      throw InvalidArgument(
          detail::message("normalise: expected 1 for variant ", info.name, ", found 0"));
    if (info.has_blocks && !job.causal() && job.problem.nq != job.problem.nk)
      throw InvalidArgument(detail::message(
          "expected Nq = Nk because ", info.name,
          " with causal = 0 needs it, found Nq = ", job.problem.nq, " and Nk = ", job.problem.nk));
    if (job.settings.flag("center_v", false) && !job.normalise())
      throw InvalidArgument("center_v: expected 0 where rows are not normalised, found 1");
  });
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
