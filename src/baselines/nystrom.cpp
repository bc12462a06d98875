// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/baselines/nystrom.hpp>
#include <linattn/baselines/nystrom_kernels.hpp>
#include <linattn/instantiations.hpp>

namespace LinAttn::baselines {
namespace detail {
namespace {

constexpr const char* because = "its landmarks average all rows of a segment";

/// `kept` is handed out in blocks, so that its elements have to be neighbours.
template <class T, class ExecSpace>
void require_kept(const TensorRef<T, 1, ExecSpace>& kept, std::int64_t count) {
  require_output("kept", kept, {count});
  if (count > 1 && kept.stride(0) != 1)
    throw InvalidArgument(
        message("LinAttn: kept must be contiguous, found stride ", kept.stride(0), " of ", count, " numbers"));
}

/// One call of one pass.
template <class T, class ExecSpace>
class NystromCall {
 public:
  NystromCall(const ExecSpace& exec, const Nystrom& options, const Problem& problem, Pass pass, bool keeps)
      : m_exec(exec), m_p(problem), m_softmax{options.scale}, m_m(options.landmarks), m_pass(pass), m_keeps(keeps) {
    problem.validate(false);
    if (problem.packed()) refuse_packed(Nystrom::name, because);
    validate_variant<ExecSpace>(m_softmax, problem, Pass::forward, false);
    if (options.iterations < 1 || options.iterations > 64)
      throw InvalidArgument(message("LinAttn: nystrom needs 1 to 64 iterations, found ", options.iterations));
    if (m_m < 1 || m_m > problem.nq || m_m > problem.nk || m_m > 4096)
      throw InvalidArgument(message("LinAttn: nystrom needs 1 to 4096 landmarks and not more than rows, found ", m_m,
                                    " for Nq = ", problem.nq, " and Nk = ", problem.nk));
    m_inverse.batch = problem.batch;
    m_inverse.heads = problem.heads;
    m_inverse.iterations = options.iterations;
    m_inverse.scale = static_cast<T>(m_softmax.score_scale(problem.d));
    m_inverse.backward = pass == Pass::backward;
  }

  std::int64_t kept() { return place_kept(nullptr); }

  std::size_t workspace_bytes() {
    ArenaCursor counter;
    place(counter);
    return counter.required();
  }

  void use(const Workspace<ExecSpace>& workspace, T* kept) {
    const std::size_t needed = workspace_bytes();
    require_size(workspace, needed, "nystrom of " + m_p.to_string());
    if (needed > 0) require_memory(workspace);
    ArenaCursor arena(workspace.data());
    place(arena);
    if (m_keeps) place_kept(kept);
  }

  void forward(const Inputs<ExecSpace, T>& in, const NystromSaved<ExecSpace, T>& saved) {
    if (m_p.batch == 0 || m_p.heads == 0) return;
    const StoredTensor<T> q(in.q), k(in.k);
    m_launcher.launch("LinAttn::baselines::nystrom_landmarks",
                      FormLandmarks<T>{q, k, m_p.batch, m_p.heads, m_p.group(), m_p.nq, m_p.nk, static_cast<int>(m_p.d),
                                       m_queries, m_keys},
                      m_memory);
    LinAttn::forward<T>(m_exec, m_softmax, {.q = ref(m_queries), .k = in.k, .v = in.v},
                        {.o = ref(m_attended), .denominator = sums_ref()}, inner());
    m_inverse.queries = m_queries;
    m_inverse.keys = m_keys;
    m_inverse.attended = m_attended;
    m_inverse.values = m_values;
    m_launcher.launch("LinAttn::baselines::nystrom_inverse", m_inverse, m_memory);
    LinAttn::forward<T>(m_exec, m_softmax, {.q = in.q, .k = ref(m_keys), .v = ref(m_values)},
                        {.o = saved.o, .denominator = saved.denominator}, inner());
  }

  void backward(const Inputs<ExecSpace, T>& in, const NystromSaved<ExecSpace, T>& saved,
                const TensorRef<const T, 4, ExecSpace>& d_o, const Gradients<ExecSpace, T>& gradients) {
    if (m_p.batch == 0 || m_p.heads == 0) return;
    LinAttn::backward<T>(m_exec, m_softmax, {.q = in.q, .k = ref(m_keys), .v = ref(m_values)},
                         {.o = saved.o, .denominator = saved.denominator}, d_o,
                         {.q = gradients.q, .k = ref(m_d_keys), .v = ref(m_d_values)}, inner());
    m_inverse.queries = m_queries;
    m_inverse.keys = m_keys;
    m_inverse.attended = m_attended;
    m_inverse.d_values = m_d_values;
    m_inverse.d_attended = m_d_attended;
    m_inverse.d_queries = m_d_queries_of_inverse;
    m_inverse.d_keys = m_d_keys;
    m_launcher.launch("LinAttn::baselines::nystrom_inverse_gradient", m_inverse, m_memory);
    LinAttn::backward<T>(m_exec, m_softmax, {.q = ref(m_queries), .k = in.k, .v = in.v},
                         {.o = ref(m_attended), .denominator = sums_ref()}, ref(m_d_attended),
                         {.q = ref(m_d_queries), .k = gradients.k, .v = gradients.v}, inner());
    const SpreadLandmarkGradients<T> spread{StoredTensor<T>(gradients.q),
                                            StoredTensor<T>(gradients.k),
                                            m_p.batch,
                                            m_p.heads,
                                            m_p.kv_heads,
                                            m_p.nq,
                                            m_p.nk,
                                            static_cast<int>(m_p.d),
                                            m_d_queries,
                                            m_d_keys};
    m_launcher.launch("LinAttn::baselines::nystrom_landmark_gradient", spread, m_memory);
    SpreadLandmarkGradients<T> more = spread;  // the part of the inverse, of queries alone
    more.queries = m_d_queries_of_inverse;
    more.keys = m_d_queries_of_inverse;
    more.kv_heads = 0;
    m_launcher.launch("LinAttn::baselines::nystrom_query_gradient", more, m_memory);
  }

 private:
  TensorRef<T, 4, ExecSpace> ref(const Matrices<T>& x) const { return x.template ref<T, ExecSpace>(m_p.batch); }
  TensorRef<T, 3, ExecSpace> sums_ref() const {
    return {m_sums, {m_p.batch, m_p.heads, m_m}, {m_p.heads * m_m, m_m, 1}};
  }
  Workspace<ExecSpace> inner() const { return part<ExecSpace>(m_inner, m_inner_bytes); }
  Matrices<T> matrices(ArenaCursor& arena, std::int64_t columns) const {
    return {arena, m_p.batch, m_p.heads, m_m, columns};
  }
  /// Lays out what is kept one behind the other, wherever it begins: a copy of it serves as well. Returns its length.
  std::int64_t place_kept(T* begin) {
    std::int64_t used = 0;
    const auto matrices_of = [&](std::int64_t columns) {
      const Matrices<T> x(begin ? begin + used : nullptr, m_p.heads, m_m, columns);
      used += m_p.batch * m_p.heads * x.size();
      return x;
    };
    m_queries = matrices_of(m_p.d);
    m_keys = matrices_of(m_p.d);
    m_attended = matrices_of(m_p.dv);
    m_values = matrices_of(m_p.dv);
    m_sums = begin ? begin + used : nullptr;
    return used + m_p.batch * m_p.heads * m_m;
  }

  void place(ArenaCursor& arena) {
    if (!m_keeps) place_kept(arena.take<T>(place_kept(nullptr)));
    std::int64_t bytes = 0;
    const auto count = [&](const auto& body) { bytes = std::max(bytes, m_launcher.bytes(body)); };
    ArenaCursor counter;
    LandmarkInverse<T> inverse = m_inverse;
    inverse.queries = Matrices<T>(counter, m_p.batch, m_p.heads, m_m, m_p.d);
    inverse.attended = Matrices<T>(counter, m_p.batch, m_p.heads, m_m, m_p.dv);
    count(inverse);
    if (m_pass == Pass::forward)
      count(FormLandmarks<T>{
          {}, {}, m_p.batch, m_p.heads, 1, m_p.nq, m_p.nk, static_cast<int>(m_p.d), inverse.queries, inverse.queries});
    else
      count(SpreadLandmarkGradients<T>{{},
                                       {},
                                       m_p.batch,
                                       m_p.heads,
                                       m_p.kv_heads,
                                       m_p.nq,
                                       m_p.nk,
                                       static_cast<int>(m_p.d),
                                       inverse.queries,
                                       inverse.queries});
    m_memory = arena.take<std::byte>(bytes);
    if (m_pass == Pass::backward) {
      m_d_queries = matrices(arena, m_p.d);
      m_d_queries_of_inverse = matrices(arena, m_p.d);
      m_d_keys = matrices(arena, m_p.d);
      m_d_values = matrices(arena, m_p.dv);
      m_d_attended = matrices(arena, m_p.dv);
    }
    Problem few_queries = m_p, few_keys = m_p;
    few_queries.nq = m_m;
    few_keys.nk = m_m;
    few_keys.kv_heads = m_p.heads;
    m_inner_bytes = std::max(LinAttn::workspace_size<T>(m_exec, m_softmax, few_queries, m_pass),
                             LinAttn::workspace_size<T>(m_exec, m_softmax, few_keys, m_pass));
    m_inner = arena.take<std::byte>(static_cast<std::int64_t>(m_inner_bytes));
  }

  ExecSpace m_exec;
  Problem m_p;
  Softmax m_softmax;
  std::int64_t m_m;
  Pass m_pass;
  bool m_keeps;
  Launcher<ExecSpace> m_launcher{m_exec};
  LandmarkInverse<T> m_inverse{};
  Matrices<T> m_queries{}, m_keys{}, m_attended{}, m_values{};
  T* m_sums = nullptr;
  Matrices<T> m_d_queries{}, m_d_queries_of_inverse{}, m_d_keys{}, m_d_values{}, m_d_attended{};
  std::byte *m_memory = nullptr, *m_inner = nullptr;
  std::size_t m_inner_bytes = 0;
};

}  // namespace
}  // namespace detail

template <class T>
std::int64_t Nystrom::kept(const Problem& problem) const {
  const Kokkos::DefaultHostExecutionSpace host;
  return detail::NystromCall<T, Kokkos::DefaultHostExecutionSpace>(host, *this, problem, Pass::forward, true).kept();
}

template <class T, class ExecSpace>
std::size_t workspace_size(const ExecSpace& exec, const Nystrom& nystrom, const Problem& problem, Pass pass,
                           bool keeps) {
  return detail::NystromCall<T, ExecSpace>(exec, nystrom, problem, pass, keeps || pass == Pass::backward)
      .workspace_bytes();
}

template <class T, class ExecSpace>
void forward(const ExecSpace& exec, const Nystrom& nystrom, const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<NystromSaved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  const Problem p = detail::problem_of(inputs);
  detail::require_plain(Nystrom::name, detail::because, inputs, p);
  detail::NystromCall<T, ExecSpace> call(exec, nystrom, p, Pass::forward, saved.kept.present());
  detail::require_output("o", saved.o, {p.batch, p.heads, p.nq, p.dv});
  if (saved.denominator.present()) detail::require_output("denominator", saved.denominator, {p.batch, p.heads, p.nq});
  if (saved.kept.present()) detail::require_kept(saved.kept, call.kept());
  call.use(workspace, saved.kept.data());
  const detail::Region region("LinAttn::baselines::nystrom_forward");
  call.forward(inputs, saved);
}

template <class T, class ExecSpace>
void backward(const ExecSpace& exec, const Nystrom& nystrom, const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<NystromSaved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  const Problem p = detail::problem_of(inputs);
  detail::require_plain(Nystrom::name, detail::because, inputs, p);
  detail::NystromCall<T, ExecSpace> call(exec, nystrom, p, Pass::backward, true);
  detail::require_shape("d_o", d_o, {p.batch, p.heads, p.nq, p.dv});
  detail::require_shape("saved o", saved.o, {p.batch, p.heads, p.nq, p.dv});
  detail::require_shape("saved denominator", saved.denominator, {p.batch, p.heads, p.nq});
  detail::require_kept(saved.kept, call.kept());
  detail::require_plain_gradients(Nystrom::name, gradients);
  detail::require_output("gradient of q", gradients.q, {p.batch, p.heads, p.nq, p.d});
  detail::require_output("gradient of k", gradients.k, {p.batch, p.kv_heads, p.nk, p.d});
  detail::require_output("gradient of v", gradients.v, {p.batch, p.kv_heads, p.nk, p.dv});
  call.use(workspace, saved.kept.data());
  const detail::Region region("LinAttn::baselines::nystrom_backward");
  call.backward(inputs, saved, d_o, gradients);
}

#define LINATTN_NYSTROM(PREFIX, T, EXEC, V)                                                                          \
  template std::size_t workspace_size<T, EXEC>(const EXEC&, const Nystrom&, const Problem&, Pass, bool);             \
  template void forward<T, EXEC>(const EXEC&, const Nystrom&, const Inputs<EXEC, T>&, const NystromSaved<EXEC, T>&,  \
                                 const Workspace<EXEC>&);                                                            \
  template void backward<T, EXEC>(const EXEC&, const Nystrom&, const Inputs<EXEC, T>&, const NystromSaved<EXEC, T>&, \
                                  const TensorRef<const T, 4, EXEC>&, const Gradients<EXEC, T>&,                     \
                                  const Workspace<EXEC>&);

LINATTN_FOR_ALL_SPACES(LINATTN_NYSTROM, , float, )
LINATTN_FOR_ALL_SPACES(LINATTN_NYSTROM, , double, )
template std::int64_t Nystrom::kept<float>(const Problem&) const;
template std::int64_t Nystrom::kept<double>(const Problem&) const;

}  // namespace LinAttn::baselines
