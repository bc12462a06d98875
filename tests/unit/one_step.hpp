// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "attention_case.hpp"

/// \file one_step.hpp
/// One token with all its memory, from a state to another or in place.

namespace LinAttn::test_support {

template <class T, class ExecSpace, Variant V>
class OneStep {
 public:
  explicit OneStep(const Problem& p, const ExecSpace& exec = ExecSpace())
      : m_problem(p),
        m_case(random_case<T, V>(p, {})),
        m_exec(exec),
        m_alpha{{static_cast<std::int64_t>(m_case.alpha.size())}, Layout::right},
        m_beta{{static_cast<std::int64_t>(m_case.beta.size())}, Layout::right},
        m_constant{{static_cast<std::int64_t>(m_case.constant.size())}, Layout::right},
        m_projection{{ProjectedVariant<V> ? features_of_row<V>(p.d) : 0, p.d}, Layout::right},
        m_q{{p.batch, p.heads, p.d}, Layout::right},
        m_k{{p.batch, p.kv_heads, p.d}, Layout::right},
        m_v{{p.batch, p.kv_heads, p.dv}, Layout::right},
        m_o{{p.batch, p.heads, p.dv}, Layout::right},
        m_before(p, features_of_row<V>(p.d), Layout::right),
        m_after(p, features_of_row<V>(p.d), Layout::right) {
    m_alpha.set(m_case.alpha);
    m_beta.set(m_case.beta);
    m_constant.set(m_case.constant);
    m_projection.set(m_case.projection);
    m_q.set(m_case.q);
    m_k.set(m_case.k);
    m_v.set(m_case.v);
    Random random(seed());
    const std::int64_t sums = p.batch * p.kv_heads * features_of_row<V>(p.d);
    m_before.set({random.normals(sums * p.dv), random.uniforms(sums, 1, 2),
                  std::vector<int>(static_cast<std::size_t>(sums), 1)});
  }

  V variant() const {
    return make_variant<V>(m_alpha.view(), m_beta.view(), m_constant.view(), {}, m_projection.view());
  }
  std::size_t workspace_bytes() const {
    return workspace_size<T>(m_exec, variant(), m_problem, Pass::step);
  }

  void step(const Workspace<ExecSpace>& workspace) const {
    LinAttn::step<T>(m_exec, variant(), token(), m_before.ref().as_const(), m_after.ref(),
                     m_o.ref(), workspace);
  }
  void step_in_place(const Workspace<ExecSpace>& workspace) const {
    LinAttn::step_in_place<T>(m_exec, variant(), token(), m_before.ref(), m_o.ref(), workspace);
  }

  /// What step() leaves.
  Outcome<T> outcome(const Workspace<ExecSpace>& workspace) {
    step(workspace);
    m_exec.fence();
    Outcome<T> result;
    result.o = m_o.get();
    result.S = m_after.S.get();
    result.z = m_after.z.get();
    if (is_scaled<V>) result.shift = m_after.shift.get();
    if (has_constant<V>) {
      result.t = m_after.t.get();
      result.m = m_after.m.get();
    }
    return result;
  }

 private:
  Token<ExecSpace, T> token() const {
    return {.q = m_q.input(), .k = m_k.input(), .v = m_v.input()};
  }

  Problem m_problem;
  Case m_case;
  ExecSpace m_exec;
  PlacedTensor<double, 1, ExecSpace> m_alpha, m_beta, m_constant;
  PlacedTensor<double, 2, ExecSpace> m_projection;
  PlacedTensor<T, 3, ExecSpace> m_q, m_k, m_v, m_o;
  PlacedState<T, ExecSpace, V> m_before, m_after;
};

}  // namespace LinAttn::test_support
