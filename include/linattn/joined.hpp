// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/engine/engine.hpp>
#include <linattn/local_softmax.hpp>
#include <linattn/variant.hpp>

/// \file joined.hpp
/// A linear attention joined by exact attention inside blocks: two branches, one call.
///
/// Forward, the linear branch fills o, then the other joins it. Backward, the other goes first: it writes its gradients,
/// and finds the dots dO . (r o_linear) that the linear branch needs of its rows, which then adds its own. Between the
/// passes nothing is kept but what the linear branch keeps.

namespace LinAttn::detail {

template <class A, class ExecSpace, LinearVariant V>
class JoinedCall : public Call<A, ExecSpace, V> {
  using Base = Call<A, ExecSpace, V>;

 public:
  JoinedCall(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass, Storage storage,
             const Options& options)
      : Base(exec, variant, problem, pass, storage, options),
        m_term(variant.local_term()),
        m_pass(pass),
        m_local(exec, m_term, problem, pass, storage, options.causal, options.chunk, m_term.combine != Combine::average) {}

  std::size_t workspace_bytes() {
    return Base::workspace_bytes([this](ArenaCursor& arena) { place_local(arena); });
  }
  void use_workspace(const Workspace<ExecSpace>& workspace) {
    Base::use_workspace(workspace, [this](ArenaCursor& arena) { place_local(arena); });
  }

  /// Enters what the caller gave beside what the linear branch takes.
  template <class T>
  void enter_local(const Inputs<ExecSpace, T>& in, const Saved<ExecSpace, T>& saved) {
    const Problem& p = this->problem();
    if (p.packed() && !this->arguments().causal)
      for (std::int64_t m = 0; m < p.members; ++m) {
        const std::int64_t nq = in.cu_seqlens_q(m + 1) - in.cu_seqlens_q(m);
        const std::int64_t nk = in.cu_seqlens_k(m + 1) - in.cu_seqlens_k(m);
        if (nq != nk)
          throw InvalidArgument(message("LinAttn: blocks of keys need Nq = Nk without a causal mask, found Nq = ", nq,
                                        " and Nk = ", nk, " in member ", m));
      }
    if (!saved.linear.present()) return;
    const std::array<std::int64_t, 4> shape{p.batch, p.heads, p.nq, p.dv};
    if (m_pass == Pass::forward)
      require_output("linear", saved.linear, shape);
    else
      require_shape("linear", saved.linear, shape);
    m_local.keep_linear(StoredTensor<A>(saved.linear));
  }

  void enter_factor_gradients(const TensorRef<double, 2, ExecSpace>& d_r, const TensorRef<double, 2, ExecSpace>& d_p,
                              bool linear_is_kept) {
    const Problem& p = this->problem();
    const auto require = [&](const char* name, const auto& gradient, bool has) {
      if (!gradient.present()) return;
      if (!has) throw InvalidArgument(message("LinAttn: ", V::name, " has no ", name, " to differentiate as it is combined"));
      require_output(message("gradient of ", name).c_str(), gradient, {p.heads, p.dv});
      if (!linear_is_kept)
        throw InvalidArgument(message("LinAttn: the gradient of ", name, " needs Saved::linear, which forward() fills"));
    };
    require("diag_r", d_r, m_term.combine != Combine::average);
    require("diag_p", d_p, m_term.combine == Combine::scale);
  }

  void launch_forward() {
    Base::launch_forward();
    local().launch_forward();
  }

  void launch_backward(const Gradients<ExecSpace, A>& parameters) {
    local().launch_backward(parameters.diag_r, parameters.diag_p);
    join_gradients();
    Base::launch_backward(parameters);
  }

  /// The other branch, with all that was bound.
  LocalSoftmax<A, ExecSpace>& local() {
    m_local.bind(this->arguments(), m_dots);
    return m_local;
  }
  /// Has the linear branch add its gradients to those of the other, which has found the dots.
  void join_gradients() {
    auto& args = this->arguments();
    args.joined = true;
    args.output_factors = m_term.combine == Combine::average ? ColumnFactors(0.5) : m_term.r;
    args.row_dots = {m_dots, args.heads * args.nq, args.nq, 1};
  }

 private:
  void place_local(ArenaCursor& arena) {
    const Problem& p = this->problem();
    if (m_pass == Pass::backward) m_dots = arena.take<A>(p.batch * p.heads * p.nq);
    m_local.place(arena);
  }

  BlockDiagonal m_term;
  Pass m_pass;
  LocalSoftmax<A, ExecSpace> m_local;
  A* m_dots = nullptr;
};

}  // namespace LinAttn::detail
