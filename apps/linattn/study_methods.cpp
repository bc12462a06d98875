// SPDX-License-Identifier: BSD-3-Clause
#include "study_methods.hpp"

#include <algorithm>
#include <cmath>
#include <linattn/baselines/linformer.hpp>
#include <linattn/baselines/nystrom.hpp>
#include <linattn/variants.hpp>
#include <type_traits>

#include "random.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

/// A variant with what it points to.
template <class V, class ExecSpace>
struct Prepared {
  V variant{};
  Prepared(const ExecSpace&, const Problem&, const MethodSettings&) {}
};

template <class ExecSpace>
struct Rated {
  using PerHead = Kokkos::View<double*, typename ExecSpace::memory_space>;
  PerHead alpha, beta;

  Rated(const ExecSpace& exec, const Problem& p, const MethodSettings& settings) {
    const LlnRates rates = settings.rates ? *settings.rates : usual(p);
    alpha = copied(exec, rates.alpha);
    beta = copied(exec, rates.beta);
  }

  static LlnRates usual(const Problem& p) {
    const std::vector<double> ones(static_cast<std::size_t>(p.kv_heads), 1.0);
    return rates_of_deviations({ones, ones}, p.group(), p.d, {.scope = MomentScope::head});
  }
  static PerHead copied(const ExecSpace& exec, const std::vector<double>& values) {
    const PerHead view("LinAttn::app::rates", values.size());
    const auto host = Kokkos::create_mirror_view(view);
    std::copy(values.begin(), values.end(), host.data());
    Kokkos::deep_copy(exec, view, host);
    detail::fence(exec, "LinAttn::app::rates");
    return view;
  }
};
template <class ExecSpace>
struct Prepared<Lln, ExecSpace> : Rated<ExecSpace> {
  Lln variant;
  Prepared(const ExecSpace& exec, const Problem& p, const MethodSettings& settings)
      : Rated<ExecSpace>(exec, p, settings), variant{this->alpha, this->beta} {}
};
template <class ExecSpace>
struct Prepared<LlnDiag, ExecSpace> : Rated<ExecSpace> {
  LlnDiag variant;
  Prepared(const ExecSpace& exec, const Problem& p, const MethodSettings& settings)
      : Rated<ExecSpace>(exec, p, settings), variant{.alpha = this->alpha, .beta = this->beta} {}
};

std::int64_t random_features_of(const Problem& p) { return 2 * p.d; }

template <class ExecSpace>
struct Prepared<Performer, ExecSpace> {
  Kokkos::View<double**, typename ExecSpace::memory_space> projection;
  Performer variant;
  Prepared(const ExecSpace& exec, const Problem& p, const MethodSettings&)
      : projection(orthogonal_features(exec, random_features_of(p), p.d, 1)), variant{.projection = projection} {}
};

/// A variant of the library.
template <class ExecSpace, class T, class V>
class VariantRun : public StudyRun<ExecSpace, T> {
 public:
  using Base = StudyRun<ExecSpace, T>;
  using typename Base::Arena;
  using typename Base::Tensor;
  using typename Base::Tensors;

  VariantRun(const ExecSpace& exec, const Problem& problem, bool causal, const MethodSettings& settings)
      : m_exec(exec), m_p(problem), m_prepared(exec, problem, settings) {
    m_options.causal = causal;
    if (!V::normalise_by_default) m_options.scale = settings.scale;
    plan<T>(m_exec, m_prepared.variant, m_p, Pass::forward, m_options);
  }

  std::size_t workspace_bytes(Pass pass) const override {
    return workspace_size<T>(m_exec, m_prepared.variant, m_p, pass, m_options);
  }
  std::size_t kept_bytes() const override {
    return V::normalise_by_default ? Saved<ExecSpace, T>::bytes(m_p) : 0;
  }
  void keep() override {
    if (V::normalise_by_default)
      m_denominator = Rows(Kokkos::view_alloc(std::string("LinAttn::app::denominators"), Kokkos::WithoutInitializing),
                           static_cast<std::size_t>(m_p.batch), static_cast<std::size_t>(m_p.heads),
                           static_cast<std::size_t>(m_p.nq));
  }
  void forward(const Tensors& in, const Tensor& o, const Arena& workspace) override {
    LinAttn::forward<T>(m_exec, m_prepared.variant, {.q = in.q, .k = in.k, .v = in.v}, saved(o), workspace, m_options);
  }
  void backward(const Tensors& in, const Tensor& o, const Tensor& d_o, const Tensors& gradients,
                const Arena& workspace) override {
    const TensorRef<const T, 4, ExecSpace> cotangent = d_o;
    LinAttn::backward<T>(m_exec, m_prepared.variant, {.q = in.q, .k = in.k, .v = in.v}, saved(o), cotangent,
                         {.q = gradients.q, .k = gradients.k, .v = gradients.v}, workspace, m_options);
  }

 private:
  using Rows = Kokkos::View<accumulator_t<T>***, Kokkos::LayoutRight, typename Base::Memory>;

  Saved<ExecSpace, T> saved(const Tensor& o) const {
    Saved<ExecSpace, T> result{.o = o};
    if (m_denominator.data() != nullptr) result.denominator = m_denominator;
    return result;
  }

  ExecSpace m_exec;
  Problem m_p;
  Prepared<V, ExecSpace> m_prepared;
  Options m_options{};
  Rows m_denominator;
};

template <class View, class... Extents>
View allocated(const char* name, Extents... extents) {
  return View(Kokkos::view_alloc(std::string("LinAttn::app::") + name, Kokkos::WithoutInitializing),
              static_cast<std::size_t>(extents)...);
}

/// \throws InvalidArgument for what no baseline has
template <class T>
void require_baseline(const char* name, bool causal) {
  if (!std::is_same_v<T, float> && !std::is_same_v<T, double>)
    throw InvalidArgument(detail::message(name, " takes f32 and f64 only"));
  if (causal)
    throw InvalidArgument(detail::message(name, " has no causal form: each of its rows mixes all keys"));
}

std::int64_t landmarks_of(const Problem& p) { return std::min<std::int64_t>({64, p.nq, p.nk}); }
std::int64_t rank_of(const Problem& p) { return std::min<std::int64_t>(256, p.nk); }

template <class ExecSpace, class T>
class NystromRun : public StudyRun<ExecSpace, T> {
 public:
  using Base = StudyRun<ExecSpace, T>;
  using typename Base::Arena;
  using typename Base::Tensor;
  using typename Base::Tensors;

  NystromRun(const ExecSpace& exec, const Problem& problem) : m_exec(exec), m_p(problem) {
    m_nystrom.landmarks = landmarks_of(m_p);
  }
  std::size_t workspace_bytes(Pass pass) const override {
    return baselines::workspace_size<T>(m_exec, m_nystrom, m_p, pass);
  }
  std::size_t kept_bytes() const override {
    return static_cast<std::size_t>(m_p.batch * m_p.heads * m_p.nq + m_nystrom.kept<T>(m_p)) * sizeof(T);
  }
  void keep() override {
    m_denominator = allocated<decltype(m_denominator)>("denominators", m_p.batch, m_p.heads, m_p.nq);
    m_kept = allocated<decltype(m_kept)>("kept", m_nystrom.kept<T>(m_p));
  }
  void forward(const Tensors& in, const Tensor& o, const Arena& workspace) override {
    baselines::forward<T>(m_exec, m_nystrom, {.q = in.q, .k = in.k, .v = in.v}, saved(o), workspace);
  }
  void backward(const Tensors& in, const Tensor& o, const Tensor& d_o, const Tensors& gradients,
                const Arena& workspace) override {
    baselines::backward<T>(m_exec, m_nystrom, {.q = in.q, .k = in.k, .v = in.v}, saved(o), d_o,
                           {.q = gradients.q, .k = gradients.k, .v = gradients.v}, workspace);
  }

 private:
  baselines::NystromSaved<ExecSpace, T> saved(const Tensor& o) const {
    return {.o = o, .denominator = m_denominator, .kept = m_kept};
  }

  ExecSpace m_exec;
  Problem m_p;
  baselines::Nystrom m_nystrom;
  Kokkos::View<T***, Kokkos::LayoutRight, typename Base::Memory> m_denominator;
  Kokkos::View<T*, typename Base::Memory> m_kept;
};

/// With projections E and F that are not trained: normal numbers of variance 1 / rank, those of float.
template <class ExecSpace, class T>
class LinformerRun : public StudyRun<ExecSpace, T> {
 public:
  using Base = StudyRun<ExecSpace, T>;
  using typename Base::Arena;
  using typename Base::Tensor;
  using typename Base::Tensors;

  LinformerRun(const ExecSpace& exec, const Problem& problem)
      : m_exec(exec), m_p(problem), m_e(projection(1)), m_f(projection(2)) {}

  std::size_t workspace_bytes(Pass pass) const override {
    return baselines::workspace_size<T>(m_exec, m_linformer, m_p, rank_of(m_p), pass);
  }
  std::size_t kept_bytes() const override {
    return static_cast<std::size_t>(m_p.batch * m_p.heads * m_p.nq) * sizeof(T);
  }
  void keep() override {
    m_denominator = allocated<decltype(m_denominator)>("denominators", m_p.batch, m_p.heads, m_p.nq);
  }
  void allocate_gradients() override {
    m_d_e = allocated<Projection>("d_e", rank_of(m_p), m_p.nk);
    m_d_f = allocated<Projection>("d_f", rank_of(m_p), m_p.nk);
  }
  void forward(const Tensors& in, const Tensor& o, const Arena& workspace) override {
    baselines::forward<T>(m_exec, m_linformer, {.q = in.q, .k = in.k, .v = in.v}, {.e = m_e, .f = m_f}, saved(o),
                          workspace);
  }
  void backward(const Tensors& in, const Tensor& o, const Tensor& d_o, const Tensors& gradients,
                const Arena& workspace) override {
    baselines::backward<T>(m_exec, m_linformer, {.q = in.q, .k = in.k, .v = in.v}, {.e = m_e, .f = m_f}, saved(o), d_o,
                           {.q = gradients.q, .k = gradients.k, .v = gradients.v}, {.e = m_d_e, .f = m_d_f}, workspace);
  }

 private:
  using Projection = Kokkos::View<T**, Kokkos::LayoutRight, typename Base::Memory>;

  Projection projection(std::uint64_t stream) const {
    const Projection view = allocated<Projection>("projection", rank_of(m_p), m_p.nk);
    const auto host = Kokkos::create_mirror_view(view);
    const CounterRandom normals(0, stream);
    const double deviation = 1 / std::sqrt(static_cast<double>(rank_of(m_p)));
    for (std::size_t i = 0; i < host.size(); ++i)
      host.data()[i] = static_cast<T>(static_cast<float>(deviation * normals.normal(i)));
    Kokkos::deep_copy(m_exec, view, host);
    detail::fence(m_exec, "LinAttn::app::projection");
    return view;
  }
  baselines::LinformerSaved<ExecSpace, T> saved(const Tensor& o) const {
    return {.o = o, .denominator = m_denominator};
  }

  ExecSpace m_exec;
  Problem m_p;
  baselines::Linformer m_linformer;
  Projection m_e, m_f, m_d_e, m_d_f;
  Kokkos::View<T***, Kokkos::LayoutRight, typename Base::Memory> m_denominator;
};

bool is_nystrom(const std::string& method) { return method == baselines::Nystrom::name; }
bool is_linformer(const std::string& method) { return method == baselines::Linformer::name; }

double pairs(const Problem& p, bool causal) {
  const double all = static_cast<double>(p.batch * p.heads) * static_cast<double>(p.nq) * static_cast<double>(p.nk);
  return causal ? all / 2 : all;
}

}  // namespace

const std::vector<std::string>& study_methods() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for_each_variant([&]<class V>(std::type_identity<V>) {
      found.insert(ExactVariant<V> ? found.begin() : found.end(), V::name);
    });
    found.insert(found.end(), {baselines::Nystrom::name, baselines::Linformer::name});
    return found;
  }();
  return names;
}

void require_study_method(const std::string& name) {
  const auto& names = study_methods();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw InvalidArgument("expected one of " + join(names) + ", found '" + name + "'");
}

bool is_quadratic(const std::string& method) {
  bool quadratic = false;
  if (is_nystrom(method) || is_linformer(method)) return false;
  with_variant(method, [&]<class V>(std::type_identity<V>) { quadratic = ExactVariant<V>; });
  return quadratic;
}

double study_work(const std::string& method, const Problem& p, bool causal, Pass pass) {
  double work = 0;
  const double queries = static_cast<double>(p.batch * p.heads * p.nq);
  const double keys = static_cast<double>(p.batch * p.kv_heads * p.nk);
  const double columns = static_cast<double>(p.d + p.dv);
  if (is_nystrom(method) || is_linformer(method)) {
    const double rank = static_cast<double>(is_nystrom(method) ? landmarks_of(p) : rank_of(p));
    work = 2 * (queries + keys) * rank * columns;
    if (is_nystrom(method)) work += 48 * rank * rank * rank * static_cast<double>(p.batch * p.heads);
    return pass == Pass::backward ? 2.5 * work : work;
  }
  with_variant(method, [&]<class V>(std::type_identity<V>) {
    if constexpr (ExactVariant<V>) {
      work = (pass == Pass::backward ? 5 : 2) * pairs(p, causal) * columns;
    } else {
      const auto features =
          static_cast<double>(ProjectedVariant<V> ? random_features_of(p) : detail::features_of(V{}, p.d));
      const double row = 2 * features * static_cast<double>(p.dv + 1);
      work = row * (pass == Pass::backward ? 2 * queries + 3 * keys : queries + keys);
      if (ProjectedVariant<V>)
        work += (pass == Pass::backward ? 4 : 2) * (queries + keys) * features * static_cast<double>(p.d);
      if constexpr (has_local_term_v<V>)
        work += (pass == Pass::backward ? 5 : 2) * queries * static_cast<double>(p.d) * columns / (causal ? 2 : 1);
    }
  });
  return work;
}

template <class ExecSpace, class T>
std::unique_ptr<StudyRun<ExecSpace, T>> make_run(const std::string& method, const ExecSpace& exec,
                                                 const Problem& problem, bool causal, const MethodSettings& settings) {
  std::unique_ptr<StudyRun<ExecSpace, T>> run;
  if (is_nystrom(method) || is_linformer(method)) {
    require_baseline<T>(method.c_str(), causal);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      if (is_nystrom(method))
        run = std::make_unique<NystromRun<ExecSpace, T>>(exec, problem);
      else
        run = std::make_unique<LinformerRun<ExecSpace, T>>(exec, problem);
    }
    return run;
  }
  with_variant(method, [&]<class V>(std::type_identity<V>) {
    run = std::make_unique<VariantRun<ExecSpace, T, V>>(exec, problem, causal, settings);
  });
  return run;
}

#define LINATTN_APP_MAKE_RUN(EXEC, T)                                                       \
  template std::unique_ptr<StudyRun<EXEC, T>> make_run<EXEC, T>(                            \
      const std::string&, const EXEC&, const Problem&, bool, const MethodSettings&);
#define LINATTN_APP_MAKE_RUNS(EXEC)   \
  LINATTN_APP_MAKE_RUN(EXEC, double)  \
  LINATTN_APP_MAKE_RUN(EXEC, float)   \
  LINATTN_APP_MAKE_RUN(EXEC, float16) \
  LINATTN_APP_MAKE_RUN(EXEC, bfloat16)
#if defined(KOKKOS_ENABLE_SERIAL)
LINATTN_APP_MAKE_RUNS(Kokkos::Serial)
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
LINATTN_APP_MAKE_RUNS(Kokkos::OpenMP)
#endif
#if defined(KOKKOS_ENABLE_CUDA)
LINATTN_APP_MAKE_RUNS(Kokkos::Cuda)
#endif

}  // namespace LinAttn::app
