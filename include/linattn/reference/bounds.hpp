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
/// **Affine**, with t = a s qhat khat and chi = 1 (what xhat costs is a number of roundings):
///
///     w_ij:                      B = E = |a s| sum_d |qhat_id khat_jd| + |b|
///     E(da)  = sum |s qhat khat| (B(dw) + E(dw)), ds likewise with |a|       E(db) = sum E(dw)
///
/// and s_i, whose terms can have both signs, makes kappa_i what it is. dq and dk as above are those
/// of xhat, F say, and go through the norm. The cotangent of xhat has B <= F, and xhat itself an
/// error of |xhat|, so
///
///     l2     E(dx_d)  = (F_d + |xhat_d| sum_c |xhat_c| F_c) / rho
///     max    E(dx_d)  = F_d / rho, and E(dx_*d) += |xhat_*d| sum_{rows, c} |xhat_c| F_c / rho
///
/// The largest norm must exceed the next by more than its rounding, unless the two rows are equal:
/// else an implementation may find another row x_*.
///
/// **A replaced sum** is known but for the roundings of least m, and e_i = 0: o, dw and dv need no
/// more than kappa_i = 1. With
///
///     kappa_i = max(1, sum_j E(w_ij) / |s_i|),   s_i what replaces it
///
/// the bound of o also covers an implementation that finds a sum at the limit on its other side.
/// For gradients, which jump there, and for sums that could have the other sign, there is no bound.
///
/// **Noise.** y = o f with f = 1 + p n, and n = r cos t is as good as its argument allows:
///
///     f:    B = |f|,             E = |f| + p max(1, r)
///     y:    E = E(o) |f| + |o| E(f)
///     g:    B = |d_o| |f|,       E = |d_o| E(f)        instead of an exact g
///
/// so G_i has E = (kappa_i B(g) + E(g)) / |s_i|, and e_i has E(g) . |o_i| / |s_i| more. The count
/// of n, noise_roundings, holds for normals from the u of noise.hpp; one that rounds u to fewer
/// bits makes other numbers.
///
/// **LLN+Diag.** With x_ij = q_i . k_j / sqrt(D), A_ij the softmax of a block and m_i its keys,
///
///     X_ij  = sum_d |q_id k_jd| / sqrt(D)
///     chi_i = 1 + ln m_i + max_j X_ij
///
/// chi_i bounds the score, its difference from any maximum that an online softmax meets, all its
/// changes of maximum together, and the logarithm of the sum: what is the absolute error of an
/// exponent is the relative error of its weight. So A_ij has E = 2 chi_i A_ij, and with h = p g
///
///     o_diag:  E = chi_i (sum_j A_ij |v_j| + |o_diag|)
///     h:       B = |p g|,                        E = |p g|, for ratio (|p| + |r|) |g|
///     delta_i = h_i . o_diag,i, y_ij = h_i . v_j:  B and E are the sums of both factors'
///     dx_ij:   E = A_ij (2 chi_i (B(y_ij) + B(delta_i)) + E(y_ij) + E(delta_i))
///     dq_i:    E = sum_j E(dx_ij) |k_j| / sqrt(D)              dk likewise with |q_i|
///     dv_j:    E = sum_i A_ij (2 chi_i B(h_i) + E(h_i))
///     o:       E = |r| E(o_lln) + |p| E(o_diag), for ratio |r| |o_diag| more
///     dr:      E = sum |g| (E(o_lln) + |o_lln|), for ratio those of o_diag more; dp likewise
///
/// beside what lln has for the cotangent r g. The part |r| of E(p) is the rounding of a given r,
/// which 1 - r can magnify.
///
/// **Weights of scores.** With x_ij = s q_i . k_j and X_ij = sum_d |s q_id k_jd|,
///
///     softmax  chi_i = 1 + ln m_i + max_j X_ij     as inside blocks, m_i the keys of the row
///              B(w_ij) = w_ij,                     |dw/dq_id| = w_ij |s k_jd|
///     taylor   chi = 1, B(w_ij) = 1 + X_ij + X_ij^2 / 2, as the sum over monomials has it
///              |dw/dq_id| = (1 + X_ij) |s k_jd|    dk likewise with |q_id|
///
/// **Cosine** has the E of affine with a s = 1 and b = 0.
///
/// **Performer** has the E of lln on the logits, with chi from what the logits themselves cost: y =
/// x / D^(1/4) and
///
///     L(x)   = max_m sum_d |w_md y_d| + |y|^2 / 2
///     chi_i  = 1 + L(q_i) + max_{j in V(i)} L(k_j)
///     E(dx_d) = (sum_m F_m |w_md| + |y_d| sum_m F_m) / D^(1/4),   F the E of the logits
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
/// term relative to the largest of its row (lln, softmax, performer) counts as at least so much.
/// Pass smallest normal number / u of the tested type where a test drives features that far down.

namespace LinAttn::reference {

/// E of every output: o (B,H,Nq,Dv), the others as in GradientSet.
template <class Real>
struct Magnitudes {
  std::vector<Real> o, q, k, v, alpha, beta, constant{}, score_scale{}, diag_r{}, diag_p{};
};

namespace detail {

/// All zero, with the right sizes.
template <class Real>
Magnitudes<Real> no_magnitudes(const Problem& problem, const Settings& settings,
                               const Tensors<Real>& tensors, const std::vector<Real>& d_o) {
  const auto zeros = [](const auto& x) { return std::vector<Real>(x.size()); };
  const auto [r_count, p_count] = factor_counts(problem, settings);
  return {zeros(d_o),
          zeros(tensors.q),
          zeros(tensors.k),
          zeros(tensors.v),
          zeros(settings.alpha),
          zeros(settings.beta),
          zeros(settings.constant),
          zeros(settings.constant),
          std::vector<Real>(r_count),
          std::vector<Real>(p_count)};
}

/// E of dx from F, that of dxhat.
template <class Real>
std::vector<Real> pulled_back_bounds(const NormedRows<Real>& x, const std::vector<Real>& F) {
  if (x.norm == Norm::none) return F;
  std::vector<Real> E(F.size()), along(x.divisor.size());
  for (std::size_t n = 0; n < F.size(); ++n) {
    const std::size_t row = n / x.width;
    // Rows that nothing reads may hold NaN.
    if (F[n] != 0) along[x.norm == Norm::max ? x.largest[row] : row] += std::abs(x.hat[n]) * F[n];
  }
  for (std::size_t n = 0; n < F.size(); ++n) {
    const std::size_t row = n / x.width;
    const Real more = along[row] == 0 ? 0 : std::abs(x.hat[n]) * along[row];
    if (F[n] != 0 || more != 0) E[n] = (F[n] + more) / x.divisor[row];
  }
  return E;
}

/// Adds factor |dx| for one cotangent of xhat that is 0 but for the given rows of one sequence.
template <class Real>
void add_pulled_back(const NormedRows<Real>& x, const std::vector<std::size_t>& rows,
                     const std::vector<Real>& d_hat, Real factor, std::vector<Real>& to) {
  const std::size_t d = rows.empty() ? 0 : d_hat.size() / rows.size();
  const auto along = [&](std::size_t n) {
    Real sum = 0;
    for (std::size_t c = 0; c < d; ++c) sum += x.hat[rows[n] * d + c] * d_hat[n * d + c];
    return sum;
  };
  Real all = 0;
  bool met = false;
  if (x.norm == Norm::max)
    for (std::size_t n = 0; n < rows.size(); ++n) all += along(n);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const bool largest = x.norm == Norm::max && x.largest[rows[n]] == rows[n];
    met = met || largest;
    const Real lost = x.norm == Norm::l2 ? along(n) : largest ? all : 0;
    for (std::size_t c = 0; c < d; ++c) {
      const std::size_t to_n = rows[n] * d + c;
      const Real dx = d_hat[n * d + c] - (lost == 0 ? 0 : x.hat[to_n] * lost);
      to[to_n] += factor * std::abs(x.norm == Norm::none ? dx : dx / x.divisor[rows[n]]);
    }
  }
  if (x.norm != Norm::max || met || rows.empty()) return;
  const std::size_t row = x.largest[rows.front()];
  for (std::size_t c = 0; c < d; ++c)
    to[row * d + c] += factor * std::abs(x.hat[row * d + c] * all / x.divisor[row]);
}

/// The same for one cotangent of logits.
template <class Real>
void add_pulled_back(const ProjectedRows<Real>& x, const std::vector<std::size_t>& rows,
                     const std::vector<Real>& d_logits, Real factor, std::vector<Real>& to) {
  std::vector<Real> dx(x.width);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    x.pull_back_row(rows[n], d_logits.data() + n * x.features, dx.data(), false);
    for (std::size_t c = 0; c < x.width; ++c) to[rows[n] * x.width + c] += factor * std::abs(dx[c]);
  }
}

/// X_ij of the keys that a row sees.
template <class Real>
std::vector<Real> score_sizes(const Row<Real>& row, const Tensors<Real>& tensors, std::size_t d,
                              Real scale) {
  std::vector<Real> sizes(row.keys.size());
  for (std::size_t j = 0; j < sizes.size(); ++j)
    for (std::size_t c = 0; c < d; ++c)
      sizes[j] += std::abs(scale * tensors.q[row.query * d + c] * tensors.k[row.keys[j] * d + c]);
  return sizes;
}

/// chi_i of softmax.
template <class Real>
Real softmax_condition(const std::vector<Real>& sizes) {
  if (sizes.empty()) return 1;
  return 1 + std::log(static_cast<Real>(sizes.size())) +
         *std::max_element(sizes.begin(), sizes.end());
}

}  // namespace detail

template <ReferenceReal Real>
Magnitudes<Real> magnitudes(const Problem& problem, const Settings& settings,
                            const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                            Real floor = 0);

namespace detail {

/// magnitudes() of lln-diag.
template <ReferenceReal Real>
Magnitudes<Real> combined_magnitudes(const Problem& problem, const Settings& settings,
                                     const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                                     Real floor) {
  const Settings linear = linear_part(settings);
  const Blocks<Real> blocks(problem, settings, tensors);
  const auto d = static_cast<std::size_t>(problem.d), dv = static_cast<std::size_t>(problem.dv);
  const bool ratio = settings.combine == Combine::ratio;
  const auto o_lln = forward(problem, linear, tensors), o_diag = blocks.forward();
  std::vector<Real> to_lln(d_o.size()), h(d_o.size()), h_error(d_o.size());
  for (std::size_t e = 0; e < d_o.size(); ++e) {
    const Factors<Real> factors(problem, settings, e);
    to_lln[e] = factors.r * d_o[e];
    h[e] = std::abs(factors.p * d_o[e]);
    h_error[e] = h[e] + (ratio ? std::abs(factors.r * d_o[e]) : 0);
  }
  auto sums = magnitudes(problem, linear, tensors, to_lln, floor);

  std::vector<Real> diag_error(d_o.size()), attention, scores;
  blocks.for_each([&](const BlockRow<Real>& row) {
    const std::size_t keys = row.keys.size(), first = row.query * dv;
    const auto k = [&](std::size_t j, std::size_t c) { return tensors.k[row.keys[j] * d + c]; };
    const auto abs_v = [&](std::size_t j, std::size_t c) {
      return std::abs(tensors.v[row.keys[j] * dv + c]);
    };
    attention.resize(keys);
    Real largest = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      Real size = 0;
      for (std::size_t c = 0; c < d; ++c) size += std::abs(tensors.q[row.query * d + c] * k(j, c));
      largest = std::max(largest, size * blocks.scale());
      attention[j] = row.attention(j) + floor;
    }
    const Real chi = 1 + std::log(static_cast<Real>(keys)) + largest;

    Real delta = 0, delta_error = 0;
    for (std::size_t c = 0; c < dv; ++c) {
      const Real o = std::abs(o_diag[first + c]);
      Real size = o;
      for (std::size_t j = 0; j < keys; ++j) size += attention[j] * abs_v(j, c);
      diag_error[first + c] = chi * size;
      delta += h[first + c] * o;
      delta_error += h[first + c] * chi * size + h_error[first + c] * o;
    }
    for (std::size_t j = 0; j < keys; ++j) {
      Real y = 0, y_error = 0;
      for (std::size_t c = 0; c < dv; ++c) {
        y += h[first + c] * abs_v(j, c);
        y_error += h_error[first + c] * abs_v(j, c);
        sums.v[row.keys[j] * dv + c] +=
            attention[j] * (2 * chi * h[first + c] + h_error[first + c]);
      }
      const Real error =
          blocks.scale() * attention[j] * (2 * chi * (y + delta) + y_error + delta_error);
      for (std::size_t c = 0; c < d; ++c) {
        sums.q[row.query * d + c] += error * std::abs(k(j, c));
        sums.k[row.keys[j] * d + c] += error * std::abs(tensors.q[row.query * d + c]);
      }
    }
  });

  const auto [r_count, p_count] = factor_counts(problem, settings);
  sums.diag_r.resize(r_count);
  sums.diag_p.resize(p_count);
  for (std::size_t e = 0; e < d_o.size(); ++e) {
    const Factors<Real> factors(problem, settings, e);
    const std::size_t n = Factors<Real>::place(problem, e);
    const Real of_lln = std::abs(d_o[e]) * (sums.o[e] + std::abs(o_lln[e])),
               of_diag = std::abs(d_o[e]) * (diag_error[e] + std::abs(o_diag[e]));
    if (r_count > 0) sums.diag_r[n] += of_lln + (ratio ? of_diag : 0);
    if (p_count > 0) sums.diag_p[n] += of_diag;
    sums.o[e] = std::abs(factors.r) * sums.o[e] + std::abs(factors.p) * diag_error[e];
    if (ratio) sums.o[e] += std::abs(factors.r * o_diag[e]);
  }
  return sums;
}

}  // namespace detail

/// Sums of absolute terms as derived at the top of this file, for the cotangent d_o (B,H,Nq,Dv).
/// A row that vanishes has magnitude 0: its output and its contributions are exactly 0.
/// \throws InvalidArgument if extents, sizes, masks or borders do not fit together.
template <ReferenceReal Real>
Magnitudes<Real> magnitudes(const Problem& problem, const Settings& settings,
                            const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                            Real floor) {
  const detail::Rows<Real> rows(problem, settings, tensors);
  detail::check_cotangent(problem, d_o);
  if (settings.kernel == Kernel::lln_diag)
    return detail::combined_magnitudes(problem, settings, tensors, d_o, floor);
  const std::size_t d = rows.width(), dv = rows.dv();
  const bool elu = settings.kernel == Kernel::elu;

  auto sums = detail::no_magnitudes(problem, settings, tensors, d_o);
  sums.q.resize(rows.query_elements());  // pulled back at the end
  sums.k.resize(rows.key_elements());

  struct Bounds {
    Real value = 0, error = 0;
  };
  struct Term {
    Real value, by_query, by_key, chi;
  };
  std::vector<Term> terms;
  std::vector<Real> sizes;
  std::vector<Bounds> weights, noise(dv), g(dv);
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    const std::size_t keys = row.keys.size();
    for (std::size_t c = 0; c < dv; ++c) {
      const std::size_t e = row.query * dv + c;
      noise[c] = {std::abs(detail::noise_factor<Real>(settings, e)), 0};
      if (settings.dropout_p != 0)
        noise[c].error =
            noise[c].value +
            static_cast<Real>(settings.dropout_p) *
                std::max(Real(1), normal_of<Real>(settings.seed, settings.offset, e).radius);
      g[c] = {std::abs(d_o[e]) * noise[c].value, std::abs(d_o[e]) * noise[c].error};
    }
    // Of no use for performer, whose features are of logits.
    const auto q = [&](std::size_t c) { return tensors.q[row.query * d + c]; };
    const auto k = [&](std::size_t j, std::size_t c) { return tensors.k[row.keys[j] * d + c]; };
    const auto abs_v = [&](std::size_t j, std::size_t c) {
      return std::abs(tensors.v[row.keys[j] * dv + c]);
    };

    Real row_chi = 1;
    if (rows.of_scores()) sizes = detail::score_sizes(row, tensors, d, rows.score_scale());
    if (rows.softmax()) row_chi = detail::softmax_condition(sizes);
    if (rows.performer() && keys > 0) {
      Real key = 0;
      for (const std::size_t j : row.keys) key = std::max(key, rows.projected_keys().sizes[j]);
      row_chi += rows.projected_queries().sizes[row.query] + key;
    }
    if (rows.has_rates() && keys > 0) {
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
    for (std::size_t j = 0; j < keys; ++j) {
      if (rows.affine()) {
        weights[j] = {std::abs(rows.b(row)), std::abs(rows.b(row))};
        denominator_error += std::abs(rows.b(row));
      }
      if (rows.of_scores()) {
        const Real x = sizes[j];
        const Real w = rows.softmax() ? row.weights[j] + floor : 1 + x + x * x / 2;
        const Real gain = std::abs(rows.score_scale()) * (rows.softmax() ? w : 1 + x);
        weights[j] = {w, w * row_chi};
        denominator_error += w * row_chi;
        for (std::size_t c = 0; c < d; ++c)
          terms[j * d + c] = {0, gain * std::abs(k(j, c)), gain * std::abs(q(c)), row_chi};
        continue;
      }
      for (std::size_t c = 0; c < d; ++c) {
        Term& term = terms[j * d + c];
        if (rows.exponential()) {
          const Real t = row.terms[j * d + c] + floor;
          term = {t, std::abs(rows.query_rate(row)) * t, std::abs(rows.key_rate(row)) * t, row_chi};
        } else {
          const auto& x = rows.query_feature(row, c);
          const auto& y = rows.key_feature(row, j, c);
          const Real x_floor = elu && q(c) <= 0 ? floor : 0,
                     y_floor = elu && k(j, c) <= 0 ? floor : 0;
          const Real x_value = std::abs(x.value) + x_floor, y_value = std::abs(y.value) + y_floor;
          const Real rate = std::abs(rows.rate(row));
          term = {rate * (x_value * y_value), rate * ((std::abs(x.slope) + x_floor) * y_value),
                  rate * (x_value * (std::abs(y.slope) + y_floor)),
                  elu ? 1 + std::max({Real(0), -q(c), -k(j, c)}) : Real(1)};
        }
        weights[j].value += term.value;
        weights[j].error += term.value * term.chi;
        denominator_error += term.value * term.chi;
      }
    }

    // Without normaliser the factor scale stands where 1/s_i does, exactly known.
    const Real inverse = settings.normalise ? 1 / std::abs(row.denominator)
                                            : std::abs(static_cast<Real>(settings.scale));
    const Real kappa =
        settings.normalise ? std::max(Real(1), denominator_error * inverse) : Real(1);

    Bounds e;
    for (std::size_t c = 0; c < dv; ++c) {
      Real error = 0;
      for (std::size_t j = 0; j < keys; ++j) error += weights[j].error * abs_v(j, c);
      error *= inverse;
      const Real o = std::abs(detail::weighted_value(row, tensors.v, dv, c)) * inverse;
      if (settings.normalise) error += kappa * o;
      if (settings.normalise && !row.replaced) {
        e.value += g[c].value * o * inverse;
        e.error += (g[c].value * (error + kappa * o) + g[c].error * o) * inverse;
      }
      sums.o[row.query * dv + c] = error * noise[c].value + o * noise[c].error;
    }

    for (std::size_t j = 0; j < keys; ++j) {
      Bounds dw = e;
      for (std::size_t c = 0; c < dv; ++c) {
        const Bounds G{g[c].value * inverse, (kappa * g[c].value + g[c].error) * inverse};
        dw.value += G.value * abs_v(j, c);
        dw.error += G.error * abs_v(j, c);
        sums.v[row.keys[j] * dv + c] += weights[j].error * G.value + weights[j].value * G.error;
      }
      for (std::size_t c = 0; c < d; ++c) {
        const Term& term = terms[j * d + c];
        const Real error = term.chi * dw.value + dw.error;
        sums.q[row.query * d + c] += term.by_query * error;
        sums.k[row.keys[j] * d + c] += term.by_key * error;
        if (!rows.has_rates()) continue;
        sums.alpha[row.head] += std::abs(q(c)) * term.value * error;
        sums.beta[row.kv_head] += std::abs(k(j, c)) * term.value * error;
      }
      if (!rows.affine()) continue;
      Real score = 0;
      for (std::size_t c = 0; c < d; ++c)
        score += std::abs(rows.query_feature(row, c).value * rows.key_feature(row, j, c).value);
      sums.alpha[row.head] += std::abs(rows.score_scale()) * score * (dw.value + dw.error);
      sums.score_scale[row.head] += std::abs(rows.a(row)) * score * (dw.value + dw.error);
      sums.constant[row.head] += dw.error;
    }
  });
  if (rows.performer()) {
    sums.q = rows.projected_queries().pull_back(sums.q, true);
    sums.k = rows.projected_keys().pull_back(sums.k, true);
  } else {
    sums.q = detail::pulled_back_bounds(rows.normed_queries(), sums.q);
    sums.k = detail::pulled_back_bounds(rows.normed_keys(), sums.k);
  }
  return sums;
}

template <ReferenceReal Real>
Magnitudes<Real> rounded_output_effects(const Problem& problem, const Settings& settings,
                                        const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                                        Real unit, Real least);

namespace detail {

/// rounded_output_effects() of lln-diag.
template <ReferenceReal Real>
Magnitudes<Real> combined_output_effects(const Problem& problem, const Settings& settings,
                                         const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                                         Real unit, Real least) {
  const Settings linear = linear_part(settings);
  const Blocks<Real> blocks(problem, settings, tensors);
  const auto d = static_cast<std::size_t>(problem.d), dv = static_cast<std::size_t>(problem.dv);
  std::vector<Real> to_lln(d_o.size());
  for (std::size_t e = 0; e < d_o.size(); ++e)
    to_lln[e] = Factors<Real>(problem, settings, e).r * d_o[e];
  auto effects = rounded_output_effects(problem, linear, tensors, to_lln, unit, least);

  const auto o_lln = forward(problem, linear, tensors), o_diag = blocks.forward();
  const auto [r_count, p_count] = factor_counts(problem, settings);
  effects.diag_r.resize(r_count);
  effects.diag_p.resize(p_count);
  std::vector<Real> change(d_o.size() / std::max<std::size_t>(dv, 1));  // eps_i of the blocks
  for (std::size_t e = 0; e < d_o.size(); ++e) {
    const Factors<Real> factors(problem, settings, e);
    const std::size_t n = Factors<Real>::place(problem, e);
    const auto off = [&](Real o) { return std::max(unit * std::abs(o), least); };
    const Real g = std::abs(d_o[e]), lln = off(o_lln[e]), diag = off(o_diag[e]);
    change[e / dv] += std::abs(factors.p) * g * diag;
    if (r_count > 0)
      effects.diag_r[n] += g * (lln + (settings.combine == Combine::ratio ? diag : 0));
    if (p_count > 0) effects.diag_p[n] += g * diag;
    effects.o[e] = off(factors.r * o_lln[e] + factors.p * o_diag[e]) + std::abs(factors.r) * lln +
                   std::abs(factors.p) * diag;
  }
  blocks.for_each([&](const BlockRow<Real>& row) {
    for (std::size_t c = 0; c < d; ++c) {
      Real mean = 0;  // of the keys
      for (std::size_t j = 0; j < row.keys.size(); ++j) {
        const Real by_delta = row.attention(j) * blocks.scale();
        mean += by_delta * tensors.k[row.keys[j] * d + c];
        effects.k[row.keys[j] * d + c] +=
            change[row.query] * std::abs(by_delta * tensors.q[row.query * d + c]);
      }
      effects.q[row.query * d + c] += change[row.query] * std::abs(mean);
    }
  });
  return effects;
}

}  // namespace detail

/// What it does to the gradients, at most and to first order, that o is kept in a narrow type
/// between forward and backward: every element of o is off by up to max(unit |o|, least). Only e_i
/// depends on o, so with
///
///     eps_i = sum_c |g_ic| max(unit |o_ic|, least) / |s_i|
///
/// dq_id changes by up to eps_i |sum_j dt/dx|, dk_jd by sum_i eps_i |dt/dy|, dalpha by sum_i eps_i
/// |sum_jd q_id t|, dbeta by sum_i eps_i |sum_jd k_jd t|, da by sum_i eps_i |s sum_j qhat . khat|,
/// ds likewise with a, db by sum_i eps_i m_i; o itself by max(unit |o|, least), dv not at all, and
/// without normaliser or where its sum is replaced no gradient does. For affine and cosine what a
/// row i changes in dqhat and dkhat is pulled back before absolute values are taken, and so is what
/// it changes in the logits of performer. With noise it is y
/// that is kept, and -e_i = d_o . y / s_i: o means y above, and g means d_o.
///
/// Of lln-diag it is both branches' outputs that are kept, or combined after they were stored, each
/// off by as much as o above: o then changes by |r| and |p| times that of theirs beside its own
/// rounding, lln's gradients as above with r g, and through delta_i = h_i . o_diag,i
///
///     dq_i by eps_i |sum_j A_ij k_j| / sqrt(D),   dk_j by sum_i eps_i A_ij |q_i| / sqrt(D)
///
/// with eps_i = sum_c |h_ic| max(unit |o_diag,ic|, least); dr and dp by sum |g| max(...) of their
/// branch.
///
/// \throws InvalidArgument if extents, sizes, masks or borders do not fit together.
template <ReferenceReal Real>
Magnitudes<Real> rounded_output_effects(const Problem& problem, const Settings& settings,
                                        const Tensors<Real>& tensors, const std::vector<Real>& d_o,
                                        Real unit, Real least) {
  const detail::Rows<Real> rows(problem, settings, tensors);
  detail::check_cotangent(problem, d_o);
  if (settings.kernel == Kernel::lln_diag)
    return detail::combined_output_effects(problem, settings, tensors, d_o, unit, least);
  const std::size_t d = rows.width(), dv = rows.dv();
  auto effects = detail::no_magnitudes(problem, settings, tensors, d_o);
  std::vector<Real> by_query(d), by_key;
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    const std::size_t keys = row.keys.size();
    const Real factor =
        settings.normalise ? 1 / row.denominator : static_cast<Real>(settings.scale);
    Real change = 0;  // eps_i
    for (std::size_t c = 0; c < dv; ++c) {
      const std::size_t e = row.query * dv + c;
      const Real o = std::abs(detail::weighted_value(row, tensors.v, dv, c) * factor *
                              detail::noise_factor<Real>(settings, e));
      effects.o[e] = std::max(unit * o, least);
      change += std::abs(d_o[e] * factor) * effects.o[e];
    }
    if (!settings.normalise || row.replaced) return;
    Real by_alpha = 0, by_beta = 0, score = 0;
    by_query.assign(d, 0);
    by_key.resize(keys * d);
    for (std::size_t j = 0; j < keys; ++j) {
      for (std::size_t c = 0; c < d; ++c) {
        by_query[c] += rows.by_query(row, j, c);
        by_key[j * d + c] = rows.by_key(row, j, c);
        if (!rows.has_rates()) continue;
        by_alpha += tensors.q[row.query * d + c] * row.terms[j * d + c];
        by_beta += tensors.k[row.keys[j] * d + c] * row.terms[j * d + c];
      }
      if (rows.affine()) score += rows.score(row, j);
    }
    if (rows.performer()) {
      detail::add_pulled_back(rows.projected_queries(), {row.query}, by_query, change, effects.q);
      detail::add_pulled_back(rows.projected_keys(), row.keys, by_key, change, effects.k);
    } else {
      detail::add_pulled_back(rows.normed_queries(), {row.query}, by_query, change, effects.q);
      detail::add_pulled_back(rows.normed_keys(), row.keys, by_key, change, effects.k);
    }
    if (rows.has_rates()) {
      effects.alpha[row.head] += change * std::abs(by_alpha);
      effects.beta[row.kv_head] += change * std::abs(by_beta);
    }
    if (rows.affine()) {
      effects.alpha[row.head] += change * std::abs(rows.score_scale() * score);
      effects.score_scale[row.head] += change * std::abs(rows.a(row) * score);
      effects.constant[row.head] += change * static_cast<Real>(keys);
    }
  });
  return effects;
}

/// E of log_sums(), (B,H,Nq): chi_i of softmax. Its factor is that of o.
/// \throws InvalidArgument as log_sums()
template <ReferenceReal Real>
std::vector<Real> log_sum_magnitudes(const Problem& problem, const Settings& settings,
                                     const Tensors<Real>& tensors) {
  std::vector<Real> sizes = log_sums(problem, settings, tensors);
  const detail::Rows<Real> rows(problem, settings, tensors);
  rows.for_each([&](const detail::Row<Real>& row) {
    sizes[row.query] = row.keys.empty() ? Real(0)
                                        : detail::softmax_condition(detail::score_sizes(
                                              row, tensors, rows.d(), rows.score_scale()));
  });
  return sizes;
}

/// Additions that a sum of n terms meets when runs of at most `run` consecutive terms are added up
/// and their results are added one after the other (run = 0: one plain loop over all terms).
constexpr double summation_depth(std::int64_t n, std::int64_t run) {
  return static_cast<double>(run > 0 ? std::min(n, run + (n + run - 1) / run) : n);
}

/// Roundings of one feature in units of u chi: relu and identity none, quadratic its product; elu
/// the scaling of the argument to base 2 (constant and product, 2 |x|) and an exponential good to 2
/// u; lln three for the argument, one for each of two shifts of at most twice chi, and the
/// exponential. Affine by its norm: none for none, else the root takes half of those of the sum of
/// squares, depth(D) + 1 and one for eps, and there are three for the root, its inverse and the
/// product: depth(D) / 2 + 4; cosine likewise. Taylor: a constant with a root, and two products.
/// Softmax has depth(D) + 13 in a weight, see rounding_counts(), and half of that counts as a
/// feature's. Performer has those of lln and in a logit, of y twice two, a product and depth(D),
/// and one for the difference: depth(D) + 6; and one of 1/M. \throws InvalidArgument for the
/// kernels whose roundings depend on D
constexpr double feature_roundings(Kernel kernel) {
  switch (kernel) {
    case Kernel::identity:
    case Kernel::relu:
      return 0;
    case Kernel::quadratic:
      return 1;
    case Kernel::elu:
    case Kernel::taylor:
      return 4;
    case Kernel::lln:
    case Kernel::lln_diag:
      return 9;
    case Kernel::affine:
      throw InvalidArgument(
          "LinAttn::reference: the roundings of an affine feature depend on its norm and on D");
    case Kernel::softmax:
    case Kernel::cosine:
    case Kernel::performer:
      throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: the roundings of a ",
                                                     kernel_name(kernel), " feature depend on D"));
  }
  return 9;
}

/// The same for any kernel; `run` as in rounding_counts().
inline double feature_roundings(const Problem& problem, const Settings& settings,
                                std::int64_t run = 0) {
  const double depth = summation_depth(problem.d, run);
  switch (settings.kernel) {
    case Kernel::affine:
      return settings.norm == Norm::none ? 0 : depth / 2 + 4;
    case Kernel::cosine:
      return depth / 2 + 4;
    case Kernel::softmax:
      return (depth + 13) / 2;
    case Kernel::performer:
      return 9 + depth + 6 + 1;
    default:
      return feature_roundings(settings.kernel);
  }
}

/// Roundings of n from the u of noise.hpp and of p n, in units of u max(1, r): u, the constant 2 pi
/// and their product move the angle by up to 3 * 2 pi; logarithm and root give r one more, and
/// cosine, product with r, p and product with p one each. The logarithm is that of an exact u: near
/// 1 a rounded one is no good.
inline constexpr double noise_roundings = 24;

/// Longest path of roundings from the inputs to each output, the factor of u * magnitude.
struct RoundingCounts {
  double o, q, k, v, alpha, beta, constant, score_scale, diag_r, diag_p;
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
/// implementation. Kernels with one feature for every element, and no noise: see the overload.
inline RoundingCounts rounding_counts(const Problem& problem, double features,
                                      std::int64_t run = 0) {
  const auto depth = [run](std::int64_t n) { return summation_depth(n, run); };
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

/// The same for a call of these settings. Affine has in every weight, beside its features, five
/// roundings of a, s, b and their products (each counts as 5/2 a feature) and the addition of b's
/// part: one more in p. Then, with e, dw and so on from that p,
///
///     dqhat  : dw + 2 f + 7 + depth(Nk)              dkhat : dw + 2 f + 7 + depth(Nq H/Hkv)
///     dq     : dqhat + f + depth(D) + 4              dk : likewise, from dkhat
///              and depth(Nq), depth(Nk) for max      but for none, where dq = dqhat
///     da, ds : dqhat + 2 + depth(B Nq D)             db : dqhat + depth(B Nq)
///
/// Cosine has the same without the five roundings and the addition. Performer has M for D, and in
/// dq and dk depth(M) + 6 for what is pulled back. Taylor has 1 + D + D (D + 1) / 2 features for D,
/// and in dq and dk depth(D + 1) + 3 for those that an element is in.
///
/// Noise adds its factor's roundings, and those of its products, to everything.
///
/// LLN+Diag has the larger count of its parts, and its own on top. A weight of a block has, in
/// units of chi, depth(D) + 1 for the product of rows, 2 each for 1/sqrt(D) and for base 2, the
/// difference from a maximum, all changes of maximum, the logarithm of the sum and the exponential:
/// f = depth(D)
/// + 13. Each addition in a block of n = min(block, Nk) keys may come with a change of maximum, an
/// exponential and a product, so that sums have the depth 4 depth(n):
///
///     o_diag, dv : p = f + 4 depth(n) + 2, and depth(block H/Hkv) for dv
///     dx         : p + depth(Dv) + 6
///     dq         : dx + depth(n) + 3             dk : dx + depth(block H/Hkv) + 3
///     o          : 4 for r or p, its product, the sum and the rounding of a stored branch
///     dq, dk, dv : 4 for the cotangents' products, likewise, and the sum; also dalpha, dbeta
///     dr, dp     : that of o, 2 + depth(B Nq)
///
/// Softmax has o, dv, dq and dk as o_diag, dv, dq and dk of one block of all keys.
inline RoundingCounts rounding_counts(const Problem& problem, const Settings& settings,
                                      std::int64_t run = 0) {
  const auto depth = [run](std::int64_t n) { return summation_depth(n, run); };
  const double features = feature_roundings(problem, settings, run);
  const bool affine = settings.kernel == Kernel::affine;
  Problem of_features = problem;
  if (settings.kernel == Kernel::taylor)
    of_features.d = 1 + problem.d + problem.d * (problem.d + 1) / 2;
  if (settings.kernel == Kernel::performer)
    of_features.d = static_cast<std::int64_t>(settings.projection.size()) /
                    std::max<std::int64_t>(problem.d, 1);
  RoundingCounts counts = rounding_counts(of_features, features + (affine ? 2.5 : 0), run);
  if (affine) {
    // One more in p, which o has twice and dw three times.
    counts.o += 2;
    counts.v += 1;
    counts.q += 3;
    counts.k += 3;
    counts.alpha = counts.score_scale =
        counts.q + 2 + depth(problem.batch * problem.nq * problem.d);
    counts.constant = counts.q + depth(problem.batch * problem.nq);
    counts.beta = 0;
  }
  if (settings.kernel == Kernel::cosine || (affine && settings.norm != Norm::none)) {
    const bool max = affine && settings.norm == Norm::max;
    const double pull = features + depth(problem.d) + 4;
    counts.q += pull + (max ? depth(problem.longest_queries()) : 0);
    counts.k += pull + (max ? depth(problem.longest_keys()) : 0);
  }
  if (settings.kernel == Kernel::performer || settings.kernel == Kernel::taylor) {
    const double pull =
        settings.kernel == Kernel::taylor ? depth(problem.d + 1) + 3 : depth(of_features.d) + 6;
    counts.q += pull;
    counts.k += pull;
  }
  if (settings.kernel == Kernel::softmax || settings.kernel == Kernel::lln_diag) {
    const bool diag = settings.kernel == Kernel::lln_diag;
    const std::int64_t block = !diag                ? std::max(problem.nk, problem.nq)
                               : settings.block > 0 ? settings.block
                                                    : problem.d;
    const double keys = depth(std::min(block, problem.nk));
    const double queries =
        depth(std::min(block, problem.nq) * std::max<std::int64_t>(problem.group(), 1));
    const double p = depth(problem.d) + 13 + 4 * keys + 2;
    const double dx = p + depth(problem.dv) + 6;
    if (diag) {
      counts.o = std::max(counts.o, p) + 4;
      counts.q = std::max(counts.q, dx + keys + 3) + 4;
      counts.k = std::max(counts.k, dx + queries + 3) + 4;
      counts.v = std::max(counts.v, p + queries) + 4;
      counts.alpha += 4;
      counts.beta += 4;
      counts.diag_r = counts.diag_p = counts.o + 2 + depth(problem.batch * problem.nq);
    } else {
      counts = {};
      counts.o = p;
      counts.q = dx + keys + 3;
      counts.k = dx + queries + 3;
      counts.v = p + queries;
    }
  }
  if (settings.dropout_p != 0)
    for (double* count : {&counts.o, &counts.q, &counts.k, &counts.v, &counts.alpha, &counts.beta,
                          &counts.constant, &counts.score_scale})
      *count += noise_roundings + 3;
  return counts;
}

}  // namespace LinAttn::reference
