// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/baselines/linformer.hpp>
#include <linattn/baselines/linformer_kernels.hpp>
#include <linattn/instantiations.hpp>

namespace LinAttn::baselines {
namespace detail {
namespace {

constexpr const char* because = "its projected keys mix all positions";

/// One call of one pass.
template <class T, class ExecSpace>
class LinformerCall {
 public:
  using In = Inputs<ExecSpace, T>;
  using Given = Projections<ExecSpace, const T>;
  using Saved = LinformerSaved<ExecSpace, T>;

  LinformerCall(const ExecSpace& exec, const Linformer& options, const Problem& problem, std::int64_t rank, Pass pass)
      : m_exec(exec), m_p(problem), m_softmax{options.scale}, m_rank(rank), m_pass(pass) {
    problem.validate(false);
    if (problem.packed()) refuse_packed(Linformer::name, because);
    validate_variant<ExecSpace>(m_softmax, problem, Pass::forward, false);
    if (rank < 1 || rank > (1 << 16))
      throw InvalidArgument(message("LinAttn: linformer needs projections of 1 to ", 1 << 16, " rows, found ", rank));
  }

  std::size_t workspace_bytes() {
    ArenaCursor counter;
    place(counter);
    return counter.required();
  }
  void use(const Workspace<ExecSpace>& workspace) {
    const std::size_t needed = workspace_bytes();
    require_size(workspace, needed, "linformer of " + m_p.to_string());
    if (needed > 0) require_memory(workspace);
    ArenaCursor arena(workspace.data());
    place(arena);
  }

  void forward(const In& in, const Given& given, const Saved& saved) {
    if (m_p.batch == 0 || m_p.heads == 0) return;
    project(in, given);
    LinAttn::forward<T>(m_exec, m_softmax, {.q = in.q, .k = ref(m_keys), .v = ref(m_values)},
                        {.o = saved.o, .denominator = saved.denominator}, inner());
  }

  void backward(const In& in, const Given& given, const Saved& saved, const TensorRef<const T, 4, ExecSpace>& d_o,
                const Gradients<ExecSpace, T>& gradients, const Projections<ExecSpace, T>& wanted) {
    if (m_p.batch > 0 && m_p.heads > 0) {
      project(in, given);
      LinAttn::backward<T>(m_exec, m_softmax, {.q = in.q, .k = ref(m_keys), .v = ref(m_values)},
                           {.o = saved.o, .denominator = saved.denominator}, d_o,
                           {.q = gradients.q, .k = ref(m_d_keys), .v = ref(m_d_values)}, inner());
      const Strip<T> e(given.e), f(given.f.present() ? given.f : given.e);
      launch("LinAttn::baselines::linformer_keys",
             PullBackRows<T>{m_d_keys, e, m_p.batch, m_p.kv_heads, m_p.nk, StoredTensor<T>(gradients.k)});
      launch("LinAttn::baselines::linformer_values",
             PullBackRows<T>{m_d_values, f, m_p.batch, m_p.kv_heads, m_p.nk, StoredTensor<T>(gradients.v)});
    }
    const StoredTensor<T> k(in.k), v(in.v);
    const int tensors = given.f.present() ? 1 : 2;
    const auto of = [&](const Matrices<T>& first, const StoredTensor<T>& x, int count,
                        const TensorRef<T, 2, ExecSpace>& to) {
      return PullBackProjection<T>{{first, m_d_values}, {x, v}, count, m_p.batch, m_p.kv_heads, m_p.nk, Strip<T>(to)};
    };
    if (wanted.e.present()) launch("LinAttn::baselines::linformer_projection_e", of(m_d_keys, k, tensors, wanted.e));
    if (wanted.f.present()) launch("LinAttn::baselines::linformer_projection_f", of(m_d_values, v, 1, wanted.f));
  }

 private:
  TensorRef<T, 4, ExecSpace> ref(const Matrices<T>& x) const { return x.template ref<T, ExecSpace>(m_p.batch); }
  Workspace<ExecSpace> inner() const { return part<ExecSpace>(m_inner, m_inner_bytes); }
  Matrices<T> matrices(ArenaCursor& arena, std::int64_t columns) const {
    return {arena, m_p.batch, m_p.kv_heads, m_rank, columns};
  }
  template <class Body>
  void launch(const char* label, const Body& body) const {
    m_launcher.launch(label, body, m_memory);
  }

  void project(const In& in, const Given& given) const {
    const Strip<T> e(given.e), f(given.f.present() ? given.f : given.e);
    launch("LinAttn::baselines::linformer_project_keys",
           Project<T>{StoredTensor<T>(in.k), e, m_p.batch, m_p.kv_heads, m_p.nk, m_keys});
    launch("LinAttn::baselines::linformer_project_values",
           Project<T>{StoredTensor<T>(in.v), f, m_p.batch, m_p.kv_heads, m_p.nk, m_values});
  }

  void place(ArenaCursor& arena) {
    m_keys = matrices(arena, m_p.d);
    m_values = matrices(arena, m_p.dv);
    std::int64_t bytes = 0;
    const auto count = [&](const auto& body) { bytes = std::max(bytes, m_launcher.bytes(body)); };
    for (const Matrices<T>& x : {m_keys, m_values}) {
      count(Project<T>{{}, {}, m_p.batch, m_p.kv_heads, m_p.nk, x});
      if (m_pass == Pass::forward) continue;
      count(PullBackRows<T>{x, {}, m_p.batch, m_p.kv_heads, m_p.nk, {}});
      count(PullBackProjection<T>{{x, m_values}, {}, 2, m_p.batch, m_p.kv_heads, m_p.nk, {}});
    }
    m_memory = arena.take<std::byte>(bytes);
    if (m_pass == Pass::backward) {
      m_d_keys = matrices(arena, m_p.d);
      m_d_values = matrices(arena, m_p.dv);
    }
    Problem few = m_p;
    few.nk = m_rank;
    m_inner_bytes = LinAttn::workspace_size<T>(m_exec, m_softmax, few, m_pass);
    m_inner = arena.take<std::byte>(static_cast<std::int64_t>(m_inner_bytes));
  }

  ExecSpace m_exec;
  Problem m_p;
  Softmax m_softmax;
  std::int64_t m_rank;
  Pass m_pass;
  Launcher<ExecSpace> m_launcher{m_exec};
  Matrices<T> m_keys{}, m_values{}, m_d_keys{}, m_d_values{};
  std::byte *m_memory = nullptr, *m_inner = nullptr;
  std::size_t m_inner_bytes = 0;
};

template <class ExecSpace, class T>
std::int64_t rank_of(const Projections<ExecSpace, const T>& given, const Problem& p) {
  if (!given.e.present()) throw InvalidArgument("LinAttn: linformer needs the projection E (rank, Nk), found nothing");
  const std::int64_t rank = given.e.extent(0);
  require_shape("projection E", given.e, {rank, p.nk});
  if (given.f.present()) require_shape("projection F", given.f, {rank, p.nk});
  return rank;
}

}  // namespace
}  // namespace detail

template <class T, class ExecSpace>
std::size_t workspace_size(const ExecSpace& exec, const Linformer& linformer, const Problem& problem, std::int64_t rank,
                           Pass pass) {
  return detail::LinformerCall<T, ExecSpace>(exec, linformer, problem, rank, pass).workspace_bytes();
}

template <class T, class ExecSpace>
void forward(const ExecSpace& exec, const Linformer& linformer,
             const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
             const std::type_identity_t<Projections<ExecSpace, const T>>& projections,
             const std::type_identity_t<LinformerSaved<ExecSpace, T>>& saved,
             const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  const Problem p = detail::problem_of(inputs);
  detail::require_plain(Linformer::name, detail::because, inputs, p);
  detail::LinformerCall<T, ExecSpace> call(exec, linformer, p, detail::rank_of(projections, p), Pass::forward);
  detail::require_output("o", saved.o, {p.batch, p.heads, p.nq, p.dv});
  if (saved.denominator.present()) detail::require_output("denominator", saved.denominator, {p.batch, p.heads, p.nq});
  call.use(workspace);
  const detail::Region region("LinAttn::baselines::linformer_forward");
  call.forward(inputs, projections, saved);
}

template <class T, class ExecSpace>
void backward(const ExecSpace& exec, const Linformer& linformer,
              const std::type_identity_t<Inputs<ExecSpace, T>>& inputs,
              const std::type_identity_t<Projections<ExecSpace, const T>>& projections,
              const std::type_identity_t<LinformerSaved<ExecSpace, T>>& saved,
              const std::type_identity_t<TensorRef<const T, 4, ExecSpace>>& d_o,
              const std::type_identity_t<Gradients<ExecSpace, T>>& gradients,
              const std::type_identity_t<Projections<ExecSpace, T>>& projection_gradients,
              const std::type_identity_t<Workspace<ExecSpace>>& workspace) {
  const Problem p = detail::problem_of(inputs);
  detail::require_plain(Linformer::name, detail::because, inputs, p);
  const std::int64_t rank = detail::rank_of(projections, p);
  detail::LinformerCall<T, ExecSpace> call(exec, linformer, p, rank, Pass::backward);
  detail::require_shape("d_o", d_o, {p.batch, p.heads, p.nq, p.dv});
  detail::require_shape("saved o", saved.o, {p.batch, p.heads, p.nq, p.dv});
  detail::require_shape("saved denominator", saved.denominator, {p.batch, p.heads, p.nq});
  detail::require_plain_gradients(Linformer::name, gradients);
  detail::require_output("gradient of q", gradients.q, {p.batch, p.heads, p.nq, p.d});
  detail::require_output("gradient of k", gradients.k, {p.batch, p.kv_heads, p.nk, p.d});
  detail::require_output("gradient of v", gradients.v, {p.batch, p.kv_heads, p.nk, p.dv});
  if (projection_gradients.e.present()) detail::require_output("gradient of E", projection_gradients.e, {rank, p.nk});
  if (projection_gradients.f.present()) {
    if (!projections.f.present())
      throw InvalidArgument("LinAttn: a gradient of F is asked for, but E projects the values, too");
    detail::require_output("gradient of F", projection_gradients.f, {rank, p.nk});
  }
  call.use(workspace);
  const detail::Region region("LinAttn::baselines::linformer_backward");
  call.backward(inputs, projections, saved, d_o, gradients, projection_gradients);
}

#define LINATTN_LINFORMER(PREFIX, T, EXEC, V)                                                                      \
  template std::size_t workspace_size<T, EXEC>(const EXEC&, const Linformer&, const Problem&, std::int64_t, Pass); \
  template void forward<T, EXEC>(const EXEC&, const Linformer&, const Inputs<EXEC, T>&,                            \
                                 const Projections<EXEC, const T>&, const LinformerSaved<EXEC, T>&,                \
                                 const Workspace<EXEC>&);                                                          \
  template void backward<T, EXEC>(const EXEC&, const Linformer&, const Inputs<EXEC, T>&,                           \
                                  const Projections<EXEC, const T>&, const LinformerSaved<EXEC, T>&,               \
                                  const TensorRef<const T, 4, EXEC>&, const Gradients<EXEC, T>&,                   \
                                  const Projections<EXEC, T>&, const Workspace<EXEC>&);

LINATTN_FOR_ALL_SPACES(LINATTN_LINFORMER, , float, )
LINATTN_FOR_ALL_SPACES(LINATTN_LINFORMER, , double, )

}  // namespace LinAttn::baselines
