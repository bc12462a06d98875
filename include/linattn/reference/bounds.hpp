// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <linattn/reference/dense.hpp>
#include <vector>

/// \file bounds.hpp
/// A-priori elementwise error bounds for tests: what an implementation in a given precision may
/// differ from the oracle, element by element, whatever the order in which it adds.
///
///     |x - x_reference| <= rounding_counts(...).x * u * magnitudes(...).x
///
/// with u the unit roundoff (epsilon / 2) of the type the sums are carried in, plus
/// u_storage |x_reference| where the result is stored in a narrower type.
///
/// ### Derivation (first order in u)
///
/// Write every quantity X as a value bounded by B(X) and an error bounded by (count) u E(X), E >=
/// B. E follows the product and sum rules E(XY) = B(X) E(Y) + E(X) B(Y) and E(sum X) = sum E(X),
/// and each rounding on the way adds B <= E. So E(result) is a sum over absolute values of all the
/// terms whose signed sum is the result, through every stage that can cancel, and the number of
/// roundings a term meets on the longest path multiplies it. The order of summation and the
/// association of factors (recurrence, chunks, matrix form) change the count, not E. With the terms
/// t of dense.hpp:
///
///     chi_ijd  relative error of t in roundings (below)
///     w_ij:                      B = sum_d |t_ijd|,    E = sum_d |t_ijd| chi_ijd
///     kappa_i = sum_j E(w_ij) / |s_i|                  condition of the denominator, >= 1
///     o_i:                       E = sum_j E(w_ij) |v_j| / |s_i| + kappa_i |o_i|
///     G_i = g_i / s_i:           B = |g_i| / |s_i|,    E = kappa_i |g_i| / |s_i|
///     e_i = -G_i . o_i:          B = |g_i| . |o_i| / |s_i|
///                                E = |g_i| . (E(o_i) + kappa_i |o_i|) / |s_i|
///     dw_ij = G_i . v_j + e_i:   B and E are the sums over both parts of B and E, with |v_j|
///     E(dv_j)    = sum_i (E(w_ij) B(G_i) + B(w_ij) E(G_i))
///     E(dq_id)   = sum_j |dt/dx| (chi_ijd B(dw_ij) + E(dw_ij)), dk likewise with |dt/dy|, all i
///     E(dalpha)  = sum |q_id| |t| (chi B(dw) + E(dw)), dbeta likewise with |k_jd|
///
/// Without normaliser s_i is replaced by 1/|scale|, kappa_i by 1 and e_i by 0.
///
/// The condition of a term: an elementwise feature has a fixed number of roundings, chi = 1, but
/// exp(x) computed through a scaled argument has the absolute error of that argument as relative
/// error, so elu has chi = 1 + max(0, -x) (the larger of both factors), and lln
///
///     chi_i = 1 + max_d |alpha q_id| + max_{j in V(i), d} |beta k_jd|,
///
/// which bounds the argument and every shift a stable evaluation adds to or takes from it.
///
/// The bound means something only while count * u * kappa_i << 1; tests keep their denominators
/// there. Underflow is outside this model; `floor` brings it in: an exponential feature (elu) or
/// term relative to the largest of its row (lln) counts as at least so much. Pass smallest normal
/// number / u of the tested type where a test drives features that far down.

namespace LinAttn::reference {

/// E of every output: o (B,H,Nq,Dv), q, k, v as the tensors, alpha (H) and beta (Hkv) for lln.
template <class Real>
struct Magnitudes {
  std::vector<Real> o, q, k, v, alpha, beta;
};

/// Sums of absolute terms as derived at the top of this file, for the cotangent d_o (B,H,Nq,Dv).
/// A row that vanishes has magnitude 0: its output and its contributions are exactly 0.
/// \throws InvalidArgument if extents, sizes, masks or borders do not fit together.
template <ReferenceReal Real>
Magnitudes<Real> magnitudes(const Problem& problem, const Settings& settings,
                            const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                            Real floor = 0) {
  const detail::Rows<Real> rows(problem, settings, tensors);
  detail::check_cotangent(problem, d_o);
  const std::size_t d = rows.d(), dv = rows.dv();
  const bool elu = settings.kernel == Kernel::elu;

  Magnitudes<Real> sums;
  sums.o.resize(d_o.size());
  sums.q.resize(tensors.q.size());
  sums.k.resize(tensors.k.size());
  sums.v.resize(tensors.v.size());
  sums.alpha.resize(settings.alpha.size());
  sums.beta.resize(settings.beta.size());

  struct Bounds {
    Real value = 0, error = 0;
  };
  struct Term {
    Real value, by_query, by_key, chi;
  };
  std::vector<Term> terms;
  std::vector<Bounds> weights;
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    const std::size_t keys = row.keys.size();
    const Real* q = tensors.q.data() + row.query * d;
    const Real* g = d_o.data() + row.query * dv;
    const auto k = [&](std::size_t j, std::size_t c) { return tensors.k[row.keys[j] * d + c]; };
    const auto abs_v = [&](std::size_t j, std::size_t c) {
      return std::abs(tensors.v[row.keys[j] * dv + c]);
    };

    Real row_chi = 1;
    if (rows.exponential() && keys > 0) {
      Real query = 0, key = 0;
      for (std::size_t c = 0; c < d; ++c) {
        query = std::max(query, std::abs(rows.query_feature(row, c).exponent.high));
        for (std::size_t j = 0; j < keys; ++j)
          key = std::max(key, std::abs(rows.key_feature(row, j, c).exponent.high));
      }
      row_chi += query + key;
    }

    terms.resize(keys * d);
    weights.assign(keys, {});
    Real denominator_error = 0;
    for (std::size_t j = 0; j < keys; ++j)
      for (std::size_t c = 0; c < d; ++c) {
        Term& term = terms[j * d + c];
        if (rows.exponential()) {
          const Real t = row.terms[j * d + c] + floor;
          term = {t, std::abs(static_cast<Real>(settings.alpha[row.head])) * t,
                  std::abs(static_cast<Real>(settings.beta[row.kv_head])) * t, row_chi};
        } else {
          const auto& x = rows.query_feature(row, c);
          const auto& y = rows.key_feature(row, j, c);
          const Real x_floor = elu && q[c] <= 0 ? floor : 0,
                     y_floor = elu && k(j, c) <= 0 ? floor : 0;
          const Real x_value = std::abs(x.value) + x_floor, y_value = std::abs(y.value) + y_floor;
          term = {x_value * y_value, (std::abs(x.slope) + x_floor) * y_value,
                  x_value * (std::abs(y.slope) + y_floor),
                  elu ? 1 + std::max({Real(0), -q[c], -k(j, c)}) : Real(1)};
        }
        weights[j].value += term.value;
        weights[j].error += term.value * term.chi;
        denominator_error += term.value * term.chi;
      }

    // Without normaliser the factor scale stands where 1/s_i does, exactly known.
    const Real inverse = settings.normalise ? 1 / std::abs(row.denominator)
                                            : std::abs(static_cast<Real>(settings.scale));
    const Real kappa = settings.normalise ? denominator_error * inverse : 1;

    Bounds e;
    for (std::size_t c = 0; c < dv; ++c) {
      Real error = 0;
      for (std::size_t j = 0; j < keys; ++j) error += weights[j].error * abs_v(j, c);
      error *= inverse;
      if (settings.normalise) {
        const Real o = std::abs(detail::weighted_value(row, tensors.v, dv, c)) * inverse;
        error += kappa * o;
        e.value += std::abs(g[c]) * o * inverse;
        e.error += std::abs(g[c]) * (error + kappa * o) * inverse;
      }
      sums.o[row.query * dv + c] = error;
    }

    for (std::size_t j = 0; j < keys; ++j) {
      Bounds dw = e;
      for (std::size_t c = 0; c < dv; ++c) {
        const Real scaled = std::abs(g[c]) * inverse;
        dw.value += scaled * abs_v(j, c);
        dw.error += kappa * scaled * abs_v(j, c);
        sums.v[row.keys[j] * dv + c] += scaled * (weights[j].error + kappa * weights[j].value);
      }
      for (std::size_t c = 0; c < d; ++c) {
        const Term& term = terms[j * d + c];
        const Real error = term.chi * dw.value + dw.error;
        sums.q[row.query * d + c] += term.by_query * error;
        sums.k[row.keys[j] * d + c] += term.by_key * error;
        if (!rows.exponential()) continue;
        sums.alpha[row.head] += std::abs(q[c]) * term.value * error;
        sums.beta[row.kv_head] += std::abs(k(j, c)) * term.value * error;
      }
    }
  });
  return sums;
}

/// What it does to the gradients, at most and to first order, that o is kept in a narrow type
/// between forward and backward: every element of o is off by up to max(unit |o|, least). Only e_i
/// depends on o, so with
///
///     eps_i = sum_c |g_ic| max(unit |o_ic|, least) / |s_i|
///
/// dq_id changes by up to eps_i |sum_j dt/dx|, dk_jd by sum_i eps_i |dt/dy|, dalpha by sum_i eps_i
/// |sum_jd q_id t|, dbeta by sum_i eps_i |sum_jd k_jd t|; o itself by max(unit |o|, least), dv not
/// at all, and without normaliser no gradient does. \throws InvalidArgument if extents, sizes,
/// masks or borders do not fit together.
template <ReferenceReal Real>
Magnitudes<Real> rounded_output_effects(const Problem& problem, const Settings& settings,
                                        const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                                        Real unit, Real least) {
  const detail::Rows<Real> rows(problem, settings, tensors);
  detail::check_cotangent(problem, d_o);
  const std::size_t d = rows.d(), dv = rows.dv();
  Magnitudes<Real> effects;
  effects.o.resize(d_o.size());
  effects.q.resize(tensors.q.size());
  effects.k.resize(tensors.k.size());
  effects.v.resize(tensors.v.size());
  effects.alpha.resize(settings.alpha.size());
  effects.beta.resize(settings.beta.size());
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    const std::size_t keys = row.keys.size();
    const Real factor =
        settings.normalise ? 1 / row.denominator : static_cast<Real>(settings.scale);
    Real change = 0;  // eps_i
    for (std::size_t c = 0; c < dv; ++c) {
      const Real o = std::abs(detail::weighted_value(row, tensors.v, dv, c) * factor);
      effects.o[row.query * dv + c] = std::max(unit * o, least);
      change += std::abs(d_o[row.query * dv + c] * factor) * effects.o[row.query * dv + c];
    }
    if (!settings.normalise) return;
    Real by_alpha = 0, by_beta = 0;
    for (std::size_t c = 0; c < d; ++c) {
      Real by_query = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        by_query += rows.by_query(row, j, c);
        effects.k[row.keys[j] * d + c] += change * std::abs(rows.by_key(row, j, c));
        by_alpha += tensors.q[row.query * d + c] * row.terms[j * d + c];
        by_beta += tensors.k[row.keys[j] * d + c] * row.terms[j * d + c];
      }
      effects.q[row.query * d + c] = change * std::abs(by_query);
    }
    if (!rows.exponential()) return;
    effects.alpha[row.head] += change * std::abs(by_alpha);
    effects.beta[row.kv_head] += change * std::abs(by_beta);
  });
  return effects;
}

/// Roundings of one feature in units of u chi: relu and identity none, quadratic its product; elu
/// the scaling of the argument to base 2 (constant and product, 2 |x|) and an exponential good to 2
/// u; lln three for the argument, one for each of two shifts of at most twice chi, and the
/// exponential.
constexpr double feature_roundings(Kernel kernel) {
  switch (kernel) {
    case Kernel::identity:
    case Kernel::relu:
      return 0;
    case Kernel::quadratic:
      return 1;
    case Kernel::elu:
      return 4;
    case Kernel::lln:
      return 9;
  }
  return 9;
}

/// Longest path of roundings from the inputs to each output, the factor of u * magnitude.
struct RoundingCounts {
  double o, q, k, v, alpha, beta;
};

/// Counts the roundings for sums of at most `run` consecutive terms whose results are added one
/// after the other (run = 0: one plain loop over all terms). A sum of n terms then has the depth
///
///     depth(n) = min(n, run + ceil(n / run)),
///
/// counting the addition to what was there. With f roundings a feature:
///
///     w v, s : 2 f + 2 + depth(Nk) + depth(D) = p         o = their quotient:  2 p + 1
///     e      : 2 p + 1 + p + depth(Dv) + 2                dw : one addition more, and depth(Dv)
///     dq     : dw + 2 f + 2 + depth(Nk)                   dk : dw + 2 f + 2 + depth(Nq H/Hkv)
///     dv     : p + 1 + 2 f + 2 + depth(D) + depth(Nq H/Hkv)
///     dalpha : dq + 1 + depth(B Nq D)                     dbeta : dk + 1 + depth(B Nk D)
///
/// An implementation that adds in another pattern of no greater depth, a tree for one, is covered
/// too. \param features roundings of one feature, feature_roundings(kernel) if that fits the
/// implementation.
inline RoundingCounts rounding_counts(const Problem& problem, double features,
                                      std::int64_t run = 0) {
  const auto depth = [run](std::int64_t n) {
    return static_cast<double>(run > 0 ? std::min(n, run + (n + run - 1) / run) : n);
  };
  const std::int64_t queries = problem.nq * std::max<std::int64_t>(problem.group(), 1);
  const double pair = 2 * features + 2;
  const double p = pair + depth(problem.nk) + depth(problem.d);
  const double e = 3 * p + 3 + depth(problem.dv);
  const double dw = e + 1 + depth(problem.dv);
  RoundingCounts counts{};
  counts.o = 2 * p + 1;
  counts.q = dw + pair + depth(problem.nk);
  counts.k = dw + pair + depth(queries);
  counts.v = p + 1 + pair + depth(problem.d) + depth(queries);
  counts.alpha = counts.q + 1 + depth(problem.batch * problem.nq * problem.d);
  counts.beta = counts.k + 1 + depth(problem.batch * problem.nk * problem.d);
  return counts;
}

}  // namespace LinAttn::reference
