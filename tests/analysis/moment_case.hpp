// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <linattn/analysis/moments.hpp>
#include <string>
#include <vector>

#include "placed_tensor.hpp"
#include "random.hpp"
#include "seed.hpp"
#include "spaces.hpp"

/// \file moment_case.hpp
/// Problems for moment matching, their answers by plain two-pass code, and calls of the library on them.

namespace LinAttn::test_support {

struct MomentCase {
  Problem p;
  std::vector<double> q, k;                        // row-major
  std::vector<std::uint8_t> key_mask, query_mask;  // empty: absent

  std::size_t q_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) const {
    return static_cast<std::size_t>(((b * p.heads + h) * p.nq + i) * p.d + c);
  }
  std::size_t k_at(std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t c) const {
    return static_cast<std::size_t>(((b * p.kv_heads + h) * p.nk + j) * p.d + c);
  }
  bool sees_query(std::int64_t b, std::int64_t i) const {
    return query_mask.empty() || query_mask[static_cast<std::size_t>(b * p.nq + i)] != 0;
  }
  bool sees_key(std::int64_t b, std::int64_t j) const {
    return key_mask.empty() || key_mask[static_cast<std::size_t>(b * p.nk + j)] != 0;
  }
};

/// q and k share a part, so that C_cross is not 0; every head has a deviation of its own. Rounded to T.
template <class T>
MomentCase random_moments(const Problem& p, bool masked, std::uint64_t salt = 0, double offset = 0) {
  Random random(seed() + 1000 * salt);
  MomentCase c{p, {}, {}, {}, {}};
  const auto rounded = [](double x) { return LinAttn::detail::widened(static_cast<T>(x)); };
  c.q.resize(static_cast<std::size_t>(p.batch * p.heads * p.nq * p.d));
  c.k.resize(static_cast<std::size_t>(p.batch * p.kv_heads * p.nk * p.d));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.kv_heads; ++h)
      for (std::int64_t j = 0; j < p.nk; ++j)
        for (std::int64_t f = 0; f < p.d; ++f)
          c.k[c.k_at(b, h, j, f)] = rounded(offset + (1 + 0.1 * static_cast<double>(f % 3)) *
                                                         random.normal(0.2, 0.8 + 0.3 * static_cast<double>(h)));
    for (std::int64_t h = 0; h < p.heads; ++h)
      for (std::int64_t i = 0; i < p.nq; ++i)
        for (std::int64_t f = 0; f < p.d; ++f) {
          const double shared = i < p.nk ? 0.4 * (c.k[c.k_at(b, h / p.group(), i, f)] - offset) : 0.0;
          c.q[c.q_at(b, h, i, f)] =
              rounded(offset + shared +
                      (1 + 0.1 * static_cast<double>(f % 3)) * random.normal(-0.1, 0.9 + 0.1 * static_cast<double>(h)));
        }
  }
  if (masked) {
    for (std::int64_t n = 0; n < p.batch * p.nk; ++n)
      c.key_mask.push_back(static_cast<std::uint8_t>(n % 5 != 1 && n % 7 != 0));
    for (std::int64_t n = 0; n < p.batch * p.nq; ++n) c.query_mask.push_back(static_cast<std::uint8_t>(n % 4 != 0));
  }
  return c;
}

/// NaN in every row that is hidden.
inline void poison_hidden(MomentCase& c) {
  for (std::int64_t b = 0; b < c.p.batch; ++b) {
    for (std::int64_t i = 0; i < c.p.nq; ++i)
      if (!c.sees_query(b, i))
        for (std::int64_t h = 0; h < c.p.heads; ++h)
          for (std::int64_t f = 0; f < c.p.d; ++f) c.q[c.q_at(b, h, i, f)] = std::nan("");
    for (std::int64_t j = 0; j < c.p.nk; ++j)
      if (!c.sees_key(b, j))
        for (std::int64_t h = 0; h < c.p.kv_heads; ++h)
          for (std::int64_t f = 0; f < c.p.d; ++f) c.k[c.k_at(b, h, j, f)] = std::nan("");
  }
}

/// Moments of one value: of all heads (g < 0) or of one key/value head.
struct PlainMoments {
  long double sigma_q = 1e-4L, sigma_k = 1e-4L, mean_q = 0, mean_k = 0, count_q = 0, count_k = 0, cross = 0;
};

inline PlainMoments plain_moments(const MomentCase& c, std::int64_t g, CrossTerm cross) {
  using Real = long double;
  const Problem& p = c.p;
  const std::int64_t group = p.group();
  const auto each_q = [&](const auto& use) {
    for (std::int64_t b = 0; b < p.batch; ++b)
      for (std::int64_t h = 0; h < p.heads; ++h)
        for (std::int64_t i = 0; i < p.nq; ++i)
          for (std::int64_t f = 0; f < p.d; ++f)
            if ((g < 0 || h / group == g) && c.sees_query(b, i)) use(Real(c.q[c.q_at(b, h, i, f)]));
  };
  const auto each_k = [&](const auto& use) {
    for (std::int64_t b = 0; b < p.batch; ++b)
      for (std::int64_t h = 0; h < p.kv_heads; ++h)
        for (std::int64_t j = 0; j < p.nk; ++j)
          for (std::int64_t f = 0; f < p.d; ++f)
            if ((g < 0 || h == g) && c.sees_key(b, j)) use(Real(c.k[c.k_at(b, h, j, f)]));
  };
  const auto moments = [](const auto& each, Real& sigma, Real& mean, Real& count) {
    each([&](Real x) {
      mean += x;
      count += 1;
    });
    if (count > 0) mean /= count;
    Real squares = 0;
    each([&](Real x) { squares += (x - mean) * (x - mean); });
    if (count > 1) sigma = std::max(sigma, std::sqrt(squares / (count - 1)));  // at least the limit
  };
  PlainMoments m;
  moments(each_q, m.sigma_q, m.mean_q, m.count_q);
  moments(each_k, m.sigma_k, m.mean_k, m.count_k);
  if (cross == CrossTerm::none) return m;
  const auto each_pair = [&](const auto& use) {
    for (std::int64_t b = 0; b < p.batch; ++b)
      for (std::int64_t h = 0; h < p.heads; ++h) {
        if (g >= 0 && h / group != g) continue;
        for (std::int64_t i = 0; i < p.nq; ++i) {
          if (!c.sees_query(b, i)) continue;
          const bool same = cross == CrossTerm::same_position;
          for (std::int64_t j = same ? i : 0; j < (same ? i + 1 : p.nk); ++j) {
            if (!c.sees_key(b, j)) continue;
            for (std::int64_t f = 0; f < p.d; ++f)
              use(Real(c.q[c.q_at(b, h, i, f)]), Real(c.k[c.k_at(b, h / group, j, f)]));
          }
        }
      }
  };
  Real n = 0, x = 0, y = 0, x2 = 0, y2 = 0, xy = 0, x2y2 = 0;
  each_pair([&](Real a, Real b) {
    n += 1;
    x += a;
    y += b;
    x2 += a * a;
    y2 += b * b;
  });
  if (n == 0) return m;
  x /= n, y /= n, x2 /= n, y2 /= n;
  each_pair([&](Real a, Real b) {
    xy += (a - x) * (b - y);
    x2y2 += (a * a - x2) * (b * b - y2);
  });
  m.cross = x2y2 / n - (xy / n) * (xy / n);
  return m;
}

/// Tensors of a case on the device, in any layout, and results.
template <class T, class ExecSpace>
class MomentRun {
 public:
  MomentRun(const MomentCase& c, const MomentOptions& options, Layout layout = Layout::right,
            const ExecSpace& exec = ExecSpace())
      : m_case(c),
        m_options(options),
        m_exec(exec),
        m_q({c.p.batch, c.p.heads, c.p.nq, c.p.d}, layout),
        m_k({c.p.batch, c.p.kv_heads, c.p.nk, c.p.d}, layout),
        m_d_q({c.p.batch, c.p.heads, c.p.nq, c.p.d}, layout),
        m_d_k({c.p.batch, c.p.kv_heads, c.p.nk, c.p.d}, layout),
        m_key_mask({c.p.batch, c.p.nk}, layout == Layout::left ? Layout::left : Layout::right),
        m_query_mask({c.p.batch, c.p.nq}, layout == Layout::left ? Layout::left : Layout::right),
        m_alpha({c.p.heads}, Layout::gaps),
        m_beta({c.p.kv_heads}, Layout::gaps),
        m_d_alpha({c.p.heads}, Layout::gaps),
        m_d_beta({c.p.kv_heads}, Layout::right) {
    m_q.set(c.q);
    m_k.set(c.k);
    if (!c.key_mask.empty()) m_key_mask.set(c.key_mask);
    if (!c.query_mask.empty()) m_query_mask.set(c.query_mask);
    for (auto& moment : m_moments) moment = Values({c.p.kv_heads}, Layout::gaps);
  }

  MomentInputs<ExecSpace, T> inputs() const {
    MomentInputs<ExecSpace, T> in{m_q.input(), m_k.input(), {}, {}};
    if (!m_case.key_mask.empty()) in.key_mask = m_key_mask.input();
    if (!m_case.query_mask.empty()) in.query_mask = m_query_mask.input();
    return in;
  }
  Moments<ExecSpace> moments() const {
    Moments<ExecSpace> m{m_moments[0].ref(),
                         m_moments[1].ref(),
                         m_moments[2].ref(),
                         m_moments[3].ref(),
                         m_moments[4].ref(),
                         m_moments[5].ref(),
                         {}};
    if (m_options.cross != CrossTerm::none) m.cross = m_moments[6].ref();
    return m;
  }
  Rates<ExecSpace> rates() const { return {m_alpha.ref(), m_beta.ref()}; }
  ConstRates<ExecSpace> d_rates() const { return {m_d_alpha.input(), m_d_beta.input()}; }
  MomentGradients<ExecSpace, T> gradients() const { return {m_d_q.ref(), m_d_k.ref()}; }

  /// A workspace of exactly the size that is asked for, between guards.
  struct Arena {
    static constexpr std::size_t margin = 256;
    Kokkos::View<std::byte*, typename ExecSpace::memory_space> bytes;
    std::size_t size;
    explicit Arena(std::size_t n) : bytes("test::workspace", n + 2 * margin), size(n) {
      Kokkos::deep_copy(bytes, std::byte(0xfb));
    }
    Workspace<ExecSpace> workspace() const {
      return Workspace<ExecSpace>(Kokkos::subview(bytes, std::pair(margin, margin + size)));
    }
    bool guards_intact() const {
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bytes);
      for (std::size_t i = 0; i < margin; ++i)
        if (host(i) != std::byte(0xfb) || host(margin + size + i) != std::byte(0xfb)) return false;
      return true;
    }
  };
  Arena arena(Pass pass) const { return Arena(moments_workspace_size<T>(m_exec, m_case.p, pass, m_options)); }

  void match() {
    const Arena memory = arena(Pass::forward);
    match_moments<T>(m_exec, inputs(), moments(), rates(), memory.workspace(), m_options);
    m_exec.fence();
    EXPECT_TRUE(memory.guards_intact());
    EXPECT_TRUE(m_q.guards_intact() && m_alpha.guards_intact() && m_moments[0].guards_intact());
  }
  /// After match(); adds to `start_q`, `start_k`.
  void pull(const std::vector<double>& d_alpha, const std::vector<double>& d_beta, const std::vector<double>& start_q,
            const std::vector<double>& start_k) {
    m_d_alpha.set(d_alpha);
    m_d_beta.set(d_beta);
    m_d_q.set(start_q);
    m_d_k.set(start_k);
    const Arena memory = arena(Pass::backward);
    match_moments_backward<T>(m_exec, inputs(), moments().as_const(), d_rates(), gradients(), memory.workspace(),
                              m_options);
    m_exec.fence();
    EXPECT_TRUE(memory.guards_intact());
    EXPECT_TRUE(m_d_q.guards_intact() && m_d_k.guards_intact());
  }

  /// In the order of Moments.
  std::vector<double> moment(int which) { return m_moments[which].get(); }
  std::vector<double> alpha() { return m_alpha.get(); }
  std::vector<double> beta() { return m_beta.get(); }
  std::vector<T> d_q() { return m_d_q.get(); }
  std::vector<T> d_k() { return m_d_k.get(); }

 private:
  using Values = PlacedTensor<double, 1, ExecSpace>;
  const MomentCase& m_case;
  MomentOptions m_options;
  ExecSpace m_exec;
  PlacedTensor<T, 4, ExecSpace> m_q, m_k, m_d_q, m_d_k;
  PlacedTensor<std::uint8_t, 2, ExecSpace> m_key_mask, m_query_mask;
  Values m_alpha, m_beta, m_d_alpha, m_d_beta;
  Values m_moments[7];
};

}  // namespace LinAttn::test_support
