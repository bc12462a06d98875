// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <linattn/error.hpp>
#include <linattn/problem.hpp>
#include <linattn/reference/noise.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// \file dense.hpp
/// The oracle: attention and its gradients from the full matrix of weights, in O(B H Nq Nk (D +
/// Dv)) operations and without any prefix sum, state, chunk or factored feature product, so that it
/// shares no step with the engine it judges. Needs neither Kokkos nor the engine.
///
/// ### Forward
///
/// For query head h, key/value head g = floor(h / (H/Hkv)), query i and the set V(i) of keys it
/// sees,
///
///     w_ij = sum_d t(q_id, k_jd)
///            t(x, y) = phi(x) phi(y)                 identity, elu, relu, quadratic
///            t(x, y) = exp(alpha_h x + beta_g y)     lln
///     w_ij = sum_d a_h s qhat_id khat_jd + b_h       affine
///     w_ij = sum_d qhat_id khat_jd                   cosine
///     w_ij = f(x_ij), x_ij = s q_i . k_j
///            f(x) = exp(x)                           softmax
///            f(x) = 1 + x + x^2/2                    taylor
///     w_ij = (1/M) sum_m exp(l_m(q_i) + l_m(k_j))    performer
///     A_ij = w_ij / s_i,  s_i = sum_{j in V(i)} w_ij                    normalised
///     A_ij = scale w_ij                                                 not normalised
///     o_i  = sum_{j in V(i)} A_ij v_j
///
/// For lln with normaliser the exponents are taken relative to the largest of the row,
///
///     c_i = max_{j in V(i), d} (alpha q_id + beta k_jd),   t = exp(alpha q_id + beta k_jd - c_i),
///
/// that is log w_ij = c_i + log sum_d exp(alpha q_id + beta k_jd - c_i), and exp(c_i) cancels
/// exactly in A. Every t lies in [0, 1] and one of them is 1, so nothing overflows and s_i >= 1.
/// Likewise for softmax, with c_i the largest x_ij of the row, and for performer.
///
/// ### Positive random features (performer)
///
/// With the M rows w_m of the projection, which all heads share, and y = x / D^(1/4),
///
///     l_m(x) = w_m . y - |y|^2 / 2
///
/// so that w_ij = (1/M) sum_m exp(w_m . (y_q + y_k) - (|y_q|^2 + |y_k|^2) / 2): an estimate of
/// exp(q_i . k_j / sqrt(D)) if the w_m are normal. It is lln with alpha = beta = 1 on rows of M
/// logits, whose terms t are numbered m in place of d, and with dl_m = dL/dl_m
///
///     dx_d = (sum_m dl_m w_md - y_d sum_m dl_m) / D^(1/4).
///
/// Where the weights are divided by their sum, 1/M is left out.
///
/// ### Rows by their norm (affine and cosine)
///
/// qhat_i = q_i / rho_i, and khat_j likewise from the rows of its key/value head, with
///
///     l2    rho = sqrt(|x|^2 + eps)
///     none  rho = 1
///     max   rho = |x_*|, the largest norm among the rows of the sequence (batch entry or packed
///           member) and head; x_* is the first row that has it. Hidden keys do not count.
///
/// Cosine has l2. A rho of 0 is replaced by 1. Chain rule, for the gradient with respect to xhat:
///
///     l2    dx = (dxhat - xhat (xhat . dxhat)) / rho
///     max   dx = dxhat / rho, and dx_* -= xhat_* sum_{rows} (xhat . dxhat) / rho
///
/// ### Small sums
///
/// With a least normaliser g (not for lln, softmax and performer, whose s_i >= 1), s_i is replaced
/// by
///
///     sign(s_i) max(|s_i|, g m_i)        sign(0) = +1, m_i the number of keys in V(i),
///
/// and no gradient passes through a replaced sum: dw_ij = dA_ij / s_i there.
///
/// ### Noise
///
/// With p > 0 the output is y_e = o_e (1 + p n_e), n of noise.hpp, e the element's place in o. The
/// cotangent is then dL/dy, and g_i below is dL/do = dL/dy (1 + p n).
///
/// ### LLN+Diag
///
/// Beside lln, with normaliser, stands softmax inside blocks of keys. Query i has the position p =
/// i + Nk - Nq of its sequence and sees there
///
///     U(i) = {j in V(i): floor(j / block) = floor(p / block)}
///
/// where V(i) is that of lln: j <= p under a causal mask, visible keys only; without a causal mask
/// Nq = Nk, for every packed member by itself. With x_ij = q_i . k_j / sqrt(D),
///
///     A_ij = exp(x_ij - max_l x_il) / sum_{l in U(i)} exp(x_il - max_l x_il)
///     o_i  = r o_lln,i + p sum_{j in U(i)} A_ij v_j     elementwise; the sum is o_diag,i
///     r, p = 1/2, 1/2                                   average
///            r_hc, p_hc                                 scale
///            r_hc, 1 - r_hc                             ratio
///
/// A row with U(i) empty has o_diag,i = 0; r and p stay what they are. With g = dL/do, the
/// cotangent of o_lln is r g, that of o_diag is h = p g, and both parts of dq, dk and dv add up.
/// Through A:
///
///     dx_ij = A_ij (h_i . v_j - sum_l A_il h_i . v_l)      from dA_il/dx_ij = A_il (delta_jl -
///     A_ij) dq_i  = sum_j dx_ij k_j / sqrt(D)       dk_j = sum_i dx_ij q_i / sqrt(D) dv_j  = sum_i
///     A_ij h_i dr_hc = sum_{b,i} g_ic o_lln,ic         less sum g_ic o_diag,ic for ratio dp_hc =
///     sum_{b,i} g_ic o_diag,ic        scale only
///
/// ### Backward
///
/// With g_i = dL/do_i the chain rule runs through the matrices, not through sums of features:
///
///     dA_ij    = g_i . v_j
///     dw_ij    = (dA_ij - sum_l A_il dA_il) / s_i    normalised, from
///                                                    dA_il/dw_ij = (delta_jl - A_il) / s_i
///     dw_ij    = scale dA_ij                         not normalised
///     dv_j     = sum_{h in group(g), i sees j} A_ij g_i
///     dq_id    = sum_{j in V(i)} dw_ij dt/dx(q_id, k_jd)
///     dk_jd    = sum_{h in group(g), i sees j} dw_ij dt/dy(q_id, k_jd)
///     dalpha_h = sum_{b,i,j,d} dw_ij q_id t(q_id, k_jd)
///     dbeta_g  = sum_{b,h,i,j,d} dw_ij k_jd t(q_id, k_jd)
///     da_h     = s sum_{b,i,j,d} dw_ij qhat_id khat_jd       db_h = sum_{b,i,j} dw_ij
///     ds       = sum_h a_h sum_{b,i,j,d} dw_ij qhat_id khat_jd
///     dq_id    = sum_{j in V(i)} dw_ij f'(x_ij) s k_jd      softmax and taylor, dk likewise
///
/// with dt/dx = phi'(x) phi(y), alpha t or a s khat (then pulled back to q), and likewise in y. In
/// terms of responsibilities r_ijd = t / w_ij = softmax over d this is dlog w_ij / dq_id = alpha
/// r_ijd. Both s_i and t carry the factor exp(-c_i), which cancels; c_i itself carries no gradient.
///
/// ### Rows that see nothing
///
/// V(i) is what the mask leaves: j <= i + Nk - Nq under a causal mask, only keys with key_mask = 1,
/// only keys of the own member of a packed batch. Keys outside V(i) are not read in row i (but for
/// the largest norm, which is one of the sequence). A normalised row with s_i = 0 after replacement
/// (no key, or all features zero) has o_i = 0 and contributes to no gradient.
///
/// ### Accuracy
///
/// All sums are compensated (Neumaier), the exponents of lln, of the softmax and of performer are
/// formed without rounding error, so each sum is good to a few units roundoff of the sum of its
/// absolute terms, independent of the extents. `long double` is the arbiter where the terms cancel.

namespace LinAttn::reference {

/// Kernels the reference knows; the names are those of the HDF5 layout.
enum class Kernel {
  identity,   ///< phi(x) = x
  elu,        ///< phi(x) = x + 1 for x > 0, else exp(x)
  relu,       ///< phi(x) = max(x, 0), phi'(0) = 0
  quadratic,  ///< phi(x) = x^2
  lln,        ///< phi_q(x) = exp(alpha x), phi_k(x) = exp(beta x)
  affine,     ///< w = a s qhat . khat + b
  lln_diag,   ///< lln and softmax inside blocks
  softmax,    ///< w = exp(s q . k)
  taylor,     ///< w = 1 + x + x^2/2, x = s q . k
  cosine,     ///< w = qhat . khat
  performer   ///< positive random features
};

/// What qhat and khat of affine are.
enum class Norm {
  l2,    ///< x / sqrt(|x|^2 + eps)
  none,  ///< x
  max    ///< x / largest |x| of the sequence and head
};

/// How lln-diag joins its two outputs.
enum class Combine {
  average,  ///< (o_lln + o_diag) / 2
  scale,    ///< r o_lln + p o_diag
  ratio     ///< r o_lln + (1 - r) o_diag
};

namespace detail {

inline constexpr std::array<std::pair<std::string_view, Kernel>, 11> kernel_names{
    {{"identity", Kernel::identity},
     {"elu", Kernel::elu},
     {"relu", Kernel::relu},
     {"quadratic", Kernel::quadratic},
     {"lln", Kernel::lln},
     {"affine", Kernel::affine},
     {"lln-diag", Kernel::lln_diag},
     {"softmax", Kernel::softmax},
     {"taylor", Kernel::taylor},
     {"cosine", Kernel::cosine},
     {"performer", Kernel::performer}}};

}  // namespace detail

/// Kernel of a variant's name.
/// \throws InvalidArgument if there is none, listing the names.
inline Kernel kernel_from_name(std::string_view name) {
  std::string known;
  for (const auto& [text, kernel] : detail::kernel_names) {
    if (text == name) return kernel;
    known += known.empty() ? "" : ", ";
    known += text;
  }
  throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: unknown kernel '", name,
                                                 "', expected one of ", known));
}

/// Name of a kernel, the inverse of kernel_from_name().
inline std::string_view kernel_name(Kernel kernel) {
  for (const auto& [text, known] : detail::kernel_names)
    if (known == kernel) return text;
  return "unknown";
}

/// Everything but the extents and the numbers. An empty vector means that the thing is absent.
struct Settings {
  Kernel kernel = Kernel::identity;
  bool causal = false;
  bool normalise =
      true;          ///< divide by the sum of weights; a caller of identity usually wants false
  double scale = 1;  ///< factor of the output when not normalised, else without effect
  std::vector<double> alpha{};               ///< (H): alpha of lln, a of affine
  std::vector<double> beta{};                ///< (Hkv), lln only
  std::vector<std::uint8_t> key_mask{};      ///< (B, Nk), 1 = visible
  std::vector<std::int64_t> cu_seqlens_q{};  ///< (S+1) borders of packed members; then B = 1
  std::vector<std::int64_t> cu_seqlens_k{};  ///< (S+1)

  using Norm = reference::Norm;
  std::vector<double> constant{};  ///< (H): b, affine only
  double score_scale = 1;          ///< s of affine, of softmax and of taylor
  Norm norm = Norm::l2;            ///< affine only
  double norm_eps = 1e-6;          ///< eps of l2, affine and cosine

  std::optional<double> least_normaliser{};  ///< least |s_i| / m_i; absent: sums stay as they are
  double dropout_p = 0;                      ///< p of the noise; 0: none
  std::uint64_t seed = 0;                    ///< of the noise
  std::uint64_t offset = 0;                  ///< of the noise, the number of the call

  using Combine = reference::Combine;
  std::int64_t block = 0;  ///< keys of a block of lln-diag; 0: D
  Combine combine = Combine::average;
  std::vector<double> diag_r{};  ///< (H, Dv): r of scale and ratio; absent: 1/2
  std::vector<double> diag_p{};  ///< (H, Dv): p of scale; absent: 1/2

  std::vector<double> projection{};  ///< (M, D): rows w_m of performer
};

/// Types the reference is computed in.
template <class Real>
concept ReferenceReal = std::same_as<Real, double> || std::same_as<Real, long double>;

/// Row-major tensors q (B,H,Nq,D), k (B,Hkv,Nk,D), v (B,Hkv,Nk,Dv).
template <class Real>
struct Tensors {
  std::vector<Real> q, k, v;
};

/// Gradients with the shapes of the tensors; alpha (H) and beta (Hkv) for lln and lln-diag; alpha =
/// da, constant = db and score_scale, what each head adds to ds, all (H), for affine; diag_r (H,
/// Dv) for scale and ratio and diag_p (H, Dv) for scale, given or not; else empty.
template <class Real>
struct GradientSet {
  std::vector<Real> q, k, v, alpha, beta, constant{}, score_scale{}, diag_r{}, diag_p{};
};

namespace detail {

/// An unevaluated sum high + low with |low| at most a few roundings of high.
template <class Real>
struct Pair {
  Real high = 0;
  Real low = 0;
};

/// Compensated sum (Neumaier): |error| <= (u + O(n u^2)) |sum| + O(n u^2) sum of |terms|.
template <class Real>
class Sum {
 public:
  void add(Real term) {
    const Real total = m_total + term;
    m_lost +=
        std::abs(m_total) >= std::abs(term) ? (m_total - total) + term : (term - total) + m_total;
    m_total = total;
  }
  // An infinite total makes m_lost a NaN that would hide it.
  Real value() const { return std::isfinite(m_total) ? m_total + m_lost : m_total; }
  Pair<Real> pair() const;  ///< value() with what it rounds off

 private:
  Real m_total = 0;
  Real m_lost = 0;
};

template <class Real>
std::vector<Real> values(const std::vector<Sum<Real>>& sums) {
  std::vector<Real> result;
  result.reserve(sums.size());
  for (const auto& sum : sums) result.push_back(sum.value());
  return result;
}

template <class Real>
Pair<Real> exact_sum(Real a, Real b) {
  const Real sum = a + b;
  if (!std::isfinite(sum)) return {sum, 0};
  const Real part = sum - a;
  return {sum, (a - (sum - part)) + (b - part)};
}

/// x in two parts of half as many digits each (Veltkamp).
template <class Real>
Pair<Real> halves(Real x) {
  constexpr Real factor =
      1 + static_cast<Real>(1ull << (std::numeric_limits<Real>::digits + 1) / 2);
  const Real scaled = factor * x, high = scaled - (scaled - x);
  return {high, x - high};
}

template <class Real>
Pair<Real> exact_product(Real a, Real b) {
  const Real product = a * b;
  if (!std::isfinite(product)) return {product, 0};
  if constexpr (std::same_as<Real, double>) return {product, std::fma(a, b, -product)};
  // No machine has an fma of long double. Its exponents leave room for the factor.
  const Pair<Real> x = halves(a), y = halves(b);
  return {product, ((x.high * y.high - product) + x.high * y.low + x.low * y.high) + x.low * y.low};
}

template <class Real>
Pair<Real> Sum<Real>::pair() const {
  return std::isfinite(m_total) ? exact_sum(m_total, m_lost) : Pair<Real>{m_total, 0};
}

/// 1 / sqrt(n), n > 0, by one step of Newton's method on the rounded value.
template <class Real>
Pair<Real> inverse_root(Real n) {
  const Real root = 1 / std::sqrt(n);
  const Pair<Real> by_n = exact_product(n, root), product = exact_product(by_n.high, root);
  const Real rest = ((1 - product.high) - product.low) - by_n.low * root;  // 1 - n root^2
  return {root, root * rest / 2};
}

/// sqrt(x), x > 0, by one step of Newton's method on the rounded value.
template <class Real>
Pair<Real> root(const Pair<Real>& x) {
  const Real value = std::sqrt(x.high);
  const Pair<Real> square = exact_product(value, value);
  return {value, ((x.high - square.high) - square.low + x.low) / (2 * value)};
}

template <class Real>
Pair<Real> product(const Pair<Real>& a, const Pair<Real>& b) {
  Pair<Real> result = exact_product(a.high, b.high);
  result.low += a.high * b.low + a.low * b.high;
  return std::isfinite(result.high) ? result : Pair<Real>{result.high, 0};
}

/// x . y of two rows of d elements.
template <class Real>
Pair<Real> dot(const Real* x, const Real* y, std::size_t d) {
  Sum<Real> sum;
  for (std::size_t c = 0; c < d; ++c) {
    const Pair<Real> term = exact_product(x[c], y[c]);
    sum.add(term.high);
    sum.add(term.low);
  }
  return sum.pair();
}

/// Whether the weight is a function of the score s q . k.
constexpr bool is_of_scores(Kernel kernel) {
  return kernel == Kernel::softmax || kernel == Kernel::taylor;
}

/// Queries and keys among which a query attends, as rows of its batch entry and head.
struct Sequence {
  std::int64_t q_begin, q_end, k_begin, k_end;
};

/// The whole batch entry, or the packed member that has query i.
inline Sequence sequence_of(const Problem& problem, const Settings& settings, std::int64_t i) {
  const auto& cu_q = settings.cu_seqlens_q;
  const auto& cu_k = settings.cu_seqlens_k;
  if (cu_q.empty()) return {0, problem.nq, 0, problem.nk};
  std::size_t member = 0;
  while (cu_q[member + 1] <= i) ++member;
  return {cu_q[member], cu_q[member + 1], cu_k[member], cu_k[member + 1]};
}

/// Row numbers in k and v of the keys begin, ..., end - 1 that the mask leaves.
inline void visible_keys(const Problem& problem, const Settings& settings, std::int64_t b,
                         std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                         std::vector<std::size_t>& keys) {
  keys.clear();
  for (std::int64_t j = begin; j < end; ++j)
    if (settings.key_mask.empty() ||
        settings.key_mask[static_cast<std::size_t>(b * problem.nk + j)] != 0)
      keys.push_back(static_cast<std::size_t>((b * problem.kv_heads + kv_head) * problem.nk + j));
}

/// What a query or key element contributes to t(x, y).
template <class Real>
struct Feature {
  Real value = 0;         ///< phi(x)
  Real slope = 0;         ///< phi'(x)
  Pair<Real> exponent{};  ///< alpha x or beta x of lln, l_m(x) of performer
};

template <class Real>
Feature<Real> feature(Kernel kernel, double parameter, Real x) {
  switch (kernel) {
    case Kernel::identity:
    case Kernel::affine:  // of xhat
    case Kernel::cosine:  // likewise
    case Kernel::softmax:
    case Kernel::taylor:
      return {x, 1};
    case Kernel::elu:
      return x > 0 ? Feature<Real>{x + 1, 1} : Feature<Real>{std::exp(x), std::exp(x)};
    case Kernel::relu:
      if (x <= 0) return {0, 0};
      return {x, 1};  // a NaN too: it must not turn into a zero
    case Kernel::quadratic:
      return {x * x, 2 * x};
    case Kernel::lln:
    case Kernel::lln_diag:
    case Kernel::performer:  // of l_m
      break;
  }
  return {0, 0, exact_product(static_cast<Real>(parameter), x)};
}

/// xhat of all rows of q or k, and what the chain rule needs.
template <class Real>
struct NormedRows {
  Norm norm = Norm::none;
  std::size_t width = 0;             ///< D
  std::vector<Real> hat;             ///< rows x D
  std::vector<Real> divisor;         ///< rho, rows
  std::vector<std::size_t> largest;  ///< x_* of the row's sequence, rows, for max

  /// Gradient with respect to x, given that with respect to xhat. Rows without gradient, and so
  /// those that nothing reads, keep none.
  std::vector<Real> pull_back(const std::vector<Real>& d_hat) const {
    if (norm == Norm::none) return d_hat;
    std::vector<Real> dx(d_hat.size());
    std::vector<Sum<Real>> along(divisor.size());  // xhat . dxhat, of the row or of its sequence
    const auto used = [&](std::size_t row) {
      for (std::size_t c = 0; c < width; ++c)
        if (!(d_hat[row * width + c] == 0)) return true;
      return false;
    };
    for (std::size_t row = 0; row < divisor.size(); ++row) {
      if (!used(row)) continue;
      Sum<Real>& sum = along[norm == Norm::max ? largest[row] : row];
      for (std::size_t c = 0; c < width; ++c)
        sum.add(hat[row * width + c] * d_hat[row * width + c]);
    }
    for (std::size_t row = 0; row < divisor.size(); ++row) {
      const Real lost = along[row].value();
      if (lost == 0 && !used(row)) continue;
      for (std::size_t c = 0; c < width; ++c) {
        const std::size_t n = row * width + c;
        dx[n] = (lost == 0 ? d_hat[n] : d_hat[n] - hat[n] * lost) / divisor[row];
      }
    }
    return dx;
  }
};

/// Logits of rows of q or k, and what the chain rule needs.
template <class Real>
struct ProjectedRows {
  std::size_t width = 0;             ///< D
  std::size_t features = 0;          ///< M
  std::vector<Real> projection;      ///< M x D
  Pair<Real> factor{1, 0};           ///< D^(-1/4)
  std::vector<Pair<Real>> logits{};  ///< rows x M
  std::vector<Real> sizes{};         ///< rows: largest sum of the absolute terms of a logit
  std::vector<Real> scaled{};        ///< y = x / D^(1/4), rows x D

  void project(const std::vector<Real>& x, std::size_t rows, const Pair<Real>& inverse_root_d) {
    logits.resize(rows * features);
    sizes.resize(rows);
    scaled.resize(x.size());
    for (std::size_t n = 0; n < x.size(); ++n) scaled[n] = x[n] * factor.high;
    for (std::size_t row = 0; row < rows; ++row) {
      const Real* at = x.data() + row * width;
      const Pair<Real> half = product(dot(at, at, width), inverse_root_d);  // |y|^2, halved below
      for (std::size_t m = 0; m < features; ++m) {
        const Real* w = projection.data() + m * width;
        const Pair<Real> along = product(dot(w, at, width), factor);
        Pair<Real>& logit = logits[row * features + m];
        logit = exact_sum(along.high, -half.high / 2);
        logit.low += along.low - half.low / 2;
        Real size = std::abs(half.high) / 2;
        for (std::size_t c = 0; c < width; ++c) size += std::abs(w[c] * at[c]) * factor.high;
        sizes[row] = std::max(sizes[row], size);
      }
    }
  }

  /// dx of one row from its dl, added up with absolute values if `absolute`.
  void pull_back_row(std::size_t row, const Real* d_logits, Real* dx, bool absolute) const {
    Sum<Real> all;
    for (std::size_t m = 0; m < features; ++m) all.add(d_logits[m]);
    for (std::size_t c = 0; c < width; ++c) {
      const Real y = scaled[row * width + c];
      Sum<Real> sum;
      for (std::size_t m = 0; m < features; ++m) {
        const Real w = projection[m * width + c];
        sum.add(d_logits[m] * (absolute ? std::abs(w) : w));
      }
      sum.add(all.value() * (absolute ? std::abs(y) : -y));
      dx[c] = sum.value() * factor.high;
    }
  }

  /// Gradient with respect to x, given that with respect to the logits, or bounds of it. Rows
  /// without gradient, and so those that nothing reads, keep none.
  std::vector<Real> pull_back(const std::vector<Real>& d_logits, bool absolute = false) const {
    std::vector<Real> dx(scaled.size());
    for (std::size_t row = 0; row < sizes.size(); ++row) {
      const Real* dl = d_logits.data() + row * features;
      if (!std::all_of(dl, dl + features, [](Real x) { return x == 0; }))
        pull_back_row(row, dl, dx.data() + row * width, absolute);
    }
    return dx;
  }
};

/// One query row with the keys it sees.
template <class Real>
struct Row {
  std::size_t head = 0;           ///< query head h
  std::size_t kv_head = 0;        ///< key/value head g
  std::size_t query = 0;          ///< row number in q and o
  std::vector<std::size_t> keys;  ///< row numbers in k and v of the visible keys
  std::vector<Real> terms;        ///< t(q_id, k_jd) or a s qhat khat, keys x width
  std::vector<Real> weights;      ///< w_ij, keys
  std::vector<Real> slopes;       ///< f'(x_ij), keys; softmax and taylor, which have no terms
  Real shift = 0;                 ///< c_i, the logarithm of the unit of weights
  Real denominator = 0;           ///< s_i, or what replaces it
  bool replaced = false;          ///< whether something does

  /// A normalised row without weight gives zeros and no gradient.
  bool vanishes(bool normalise) const { return normalise && denominator == 0; }
};

/// Checked arguments, element features and the walk over the rows; of lln-diag the part of lln.
template <ReferenceReal Real>
class Rows {
 public:
  Rows(const Problem& problem, const Settings& settings, const Tensors<Real>& tensors)
      : m_problem(problem), m_settings(settings), m_tensors(tensors) {
    check();
    if (has_norm()) {
      m_normed_queries =
          normed(m_tensors.q, m_problem.heads, m_problem.nq, m_settings.cu_seqlens_q, {});
      m_normed_keys = normed(m_tensors.k, m_problem.kv_heads, m_problem.nk, m_settings.cu_seqlens_k,
                             m_settings.key_mask);
      m_queries = features(m_normed_queries.hat, m_problem.heads, m_problem.nq, {});
      m_keys = features(m_normed_keys.hat, m_problem.kv_heads, m_problem.nk, {});
    } else if (performer()) {
      m_projected_queries = projected(m_tensors.q, m_problem.heads * m_problem.nq);
      m_projected_keys = projected(m_tensors.k, m_problem.kv_heads * m_problem.nk);
      for (const auto& logit : m_projected_queries.logits) m_queries.push_back({0, 0, logit});
      for (const auto& logit : m_projected_keys.logits) m_keys.push_back({0, 0, logit});
    } else {
      m_queries = features(m_tensors.q, m_problem.heads, m_problem.nq, m_settings.alpha);
      m_keys = features(m_tensors.k, m_problem.kv_heads, m_problem.nk, m_settings.beta);
    }
  }

  std::size_t d() const { return static_cast<std::size_t>(m_problem.d); }
  std::size_t dv() const { return static_cast<std::size_t>(m_problem.dv); }
  /// Elements of a row that features are of: D, or M logits.
  std::size_t width() const { return performer() ? m_projected_keys.features : d(); }
  std::size_t query_elements() const {
    return width() * static_cast<std::size_t>(m_problem.batch * m_problem.heads * m_problem.nq);
  }
  std::size_t key_elements() const {
    return width() * static_cast<std::size_t>(m_problem.batch * m_problem.kv_heads * m_problem.nk);
  }
  /// Whether terms are exponentials, and with rates alpha and beta.
  bool exponential() const { return has_rates() || performer(); }
  bool has_rates() const {
    return m_settings.kernel == Kernel::lln || m_settings.kernel == Kernel::lln_diag;
  }
  bool affine() const { return m_settings.kernel == Kernel::affine; }
  bool has_norm() const { return affine() || m_settings.kernel == Kernel::cosine; }
  bool performer() const { return m_settings.kernel == Kernel::performer; }
  bool softmax() const { return m_settings.kernel == Kernel::softmax; }
  bool of_scores() const { return is_of_scores(m_settings.kernel); }
  const NormedRows<Real>& normed_queries() const { return m_normed_queries; }
  const NormedRows<Real>& normed_keys() const { return m_normed_keys; }
  const ProjectedRows<Real>& projected_queries() const { return m_projected_queries; }
  const ProjectedRows<Real>& projected_keys() const { return m_projected_keys; }

  /// Gradients with respect to q and k, given those with respect to what features are of.
  std::vector<Real> pull_back_queries(const std::vector<Real>& d_x) const {
    return performer() ? m_projected_queries.pull_back(d_x) : m_normed_queries.pull_back(d_x);
  }
  std::vector<Real> pull_back_keys(const std::vector<Real>& d_x) const {
    return performer() ? m_projected_keys.pull_back(d_x) : m_normed_keys.pull_back(d_x);
  }

  Real a(const Row<Real>& row) const { return static_cast<Real>(m_settings.alpha[row.head]); }
  Real b(const Row<Real>& row) const { return static_cast<Real>(m_settings.constant[row.head]); }
  Real query_rate(const Row<Real>& row) const { return has_rates() ? a(row) : Real(1); }
  Real key_rate(const Row<Real>& row) const {
    return has_rates() ? static_cast<Real>(m_settings.beta[row.kv_head]) : Real(1);
  }
  Real score_scale() const { return static_cast<Real>(m_settings.score_scale); }
  /// Factor of qhat . khat in the weight, 1 for other kernels.
  Real rate(const Row<Real>& row) const { return affine() ? a(row) * score_scale() : Real(1); }
  /// qhat_i . khat_j for the j-th visible key.
  Real score(const Row<Real>& row, std::size_t j) const {
    Sum<Real> sum;
    for (std::size_t c = 0; c < d(); ++c)
      sum.add(query_feature(row, c).value * key_feature(row, j, c).value);
    return sum.value();
  }

  const Feature<Real>& query_feature(const Row<Real>& row, std::size_t c) const {
    return m_queries[row.query * width() + c];
  }
  const Feature<Real>& key_feature(const Row<Real>& row, std::size_t j, std::size_t c) const {
    return m_keys[row.keys[j] * width() + c];
  }

  /// dw/dx of element c for the j-th visible key, x what features are of: q, qhat or logits.
  Real by_query(const Row<Real>& row, std::size_t j, std::size_t c) const {
    if (of_scores()) return row.slopes[j] * (score_scale() * m_tensors.k[row.keys[j] * d() + c]);
    if (exponential()) return query_rate(row) * row.terms[j * width() + c];
    return rate(row) * (query_feature(row, c).slope * key_feature(row, j, c).value);
  }
  /// The same for the key's row.
  Real by_key(const Row<Real>& row, std::size_t j, std::size_t c) const {
    if (of_scores()) return row.slopes[j] * (score_scale() * m_tensors.q[row.query * d() + c]);
    if (exponential()) return key_rate(row) * row.terms[j * width() + c];
    return rate(row) * (query_feature(row, c).value * key_feature(row, j, c).slope);
  }

  /// Calls visit(row) for every query row of every head and batch entry, weights included.
  template <class Visit>
  void for_each(Visit&& visit) const {
    const std::int64_t group = m_problem.group();
    Row<Real> row;
    for (std::int64_t b = 0; b < m_problem.batch; ++b)
      for (std::int64_t h = 0; h < m_problem.heads; ++h)
        for (std::int64_t i = 0; i < m_problem.nq; ++i) {
          row.head = static_cast<std::size_t>(h);
          row.kv_head = static_cast<std::size_t>(h / group);
          row.query = static_cast<std::size_t>((b * m_problem.heads + h) * m_problem.nq + i);
          see(b, h / group, i, row.keys);
          weigh(row);
          visit(std::as_const(row));
        }
  }

 private:
  void see(std::int64_t b, std::int64_t kv_head, std::int64_t i,
           std::vector<std::size_t>& keys) const {
    const Sequence at = sequence_of(m_problem, m_settings, i);
    std::int64_t end = at.k_end;
    if (m_settings.causal)
      end = at.k_begin + (i - at.q_begin) + (at.k_end - at.k_begin) - (at.q_end - at.q_begin) + 1;
    visible_keys(m_problem, m_settings, b, kv_head, at.k_begin, end, keys);
  }

  void weigh(Row<Real>& row) const {
    row.terms.resize(of_scores() ? 0 : row.keys.size() * width());
    row.weights.resize(row.keys.size());
    row.shift = 0;
    if (of_scores())
      score_weights(row);
    else if (exponential())
      exponential_terms(row);
    else
      for (std::size_t j = 0; j < row.keys.size(); ++j)
        for (std::size_t c = 0; c < d(); ++c)
          row.terms[j * d() + c] =
              rate(row) * (query_feature(row, c).value * key_feature(row, j, c).value);
    // s_i is summed from the elementary terms, not from the rounded w_ij.
    Sum<Real> denominator;
    for (std::size_t j = 0; j < row.keys.size(); ++j) {
      if (of_scores()) {
        denominator.add(row.weights[j]);
        continue;
      }
      Sum<Real> weight;
      for (std::size_t c = 0; c < width(); ++c) {
        weight.add(row.terms[j * width() + c]);
        denominator.add(row.terms[j * width() + c]);
      }
      if (affine()) {
        weight.add(b(row));
        denominator.add(b(row));
      }
      row.weights[j] = weight.value();
    }
    row.denominator = denominator.value();
    if (!m_settings.least_normaliser) return;
    const Real least =
        static_cast<Real>(*m_settings.least_normaliser) * static_cast<Real>(row.keys.size());
    row.replaced = std::abs(row.denominator) < least;
    if (row.replaced) row.denominator = row.denominator < 0 ? -least : least;
  }

  /// Largest of the exponents, what they are taken relative to.
  Real shift_of(const std::vector<Pair<Real>>& exponents) const {
    if (!m_settings.normalise || exponents.empty()) return 0;
    Real shift = exponents.front().high;
    for (const auto& exponent : exponents) shift = std::max(shift, exponent.high);
    return shift == -std::numeric_limits<Real>::infinity() ? Real(0) : shift;
  }

  static Real exponential_of(const Pair<Real>& exponent, Real shift) {
    const Pair<Real> relative = exact_sum(exponent.high, -shift);
    const Real value = std::exp(relative.high);
    return value + value * (relative.low + exponent.low);
  }

  void score_weights(Row<Real>& row) const {
    const Pair<Real> scale{score_scale(), 0};
    std::vector<Pair<Real>> scores(row.keys.size());
    for (std::size_t j = 0; j < row.keys.size(); ++j)
      scores[j] = product(
          dot(m_tensors.q.data() + row.query * d(), m_tensors.k.data() + row.keys[j] * d(), d()),
          scale);
    row.slopes.resize(row.keys.size());
    if (softmax()) row.shift = shift_of(scores);
    for (std::size_t j = 0; j < row.keys.size(); ++j) {
      const Real x = scores[j].high;
      row.weights[j] = softmax() ? exponential_of(scores[j], row.shift) : 1 + x + x * x / 2;
      row.slopes[j] = softmax() ? row.weights[j] : 1 + x;
    }
  }

  void exponential_terms(Row<Real>& row) const {
    std::vector<Pair<Real>> exponents(row.terms.size());
    for (std::size_t j = 0; j < row.keys.size(); ++j)
      for (std::size_t c = 0; c < width(); ++c) {
        const Pair<Real>& x = query_feature(row, c).exponent;
        const Pair<Real>& y = key_feature(row, j, c).exponent;
        Pair<Real>& exponent = exponents[j * width() + c];
        exponent = exact_sum(x.high, y.high);
        exponent.low += x.low + y.low;
      }
    row.shift = shift_of(exponents);
    const bool mean = performer() && !m_settings.normalise;  // else 1/M cancels
    for (std::size_t n = 0; n < exponents.size(); ++n) {
      row.terms[n] = exponential_of(exponents[n], row.shift);
      if (mean) row.terms[n] /= static_cast<Real>(width());
    }
  }

  ProjectedRows<Real> projected(const std::vector<Real>& x, std::int64_t rows) const {
    const auto count = static_cast<std::size_t>(m_problem.batch * rows);
    // Rows without elements have the weight 1 for any M.
    ProjectedRows<Real> result{d(),
                               d() == 0 ? 1 : m_settings.projection.size() / d(),
                               {m_settings.projection.begin(), m_settings.projection.end()}};
    const auto inverse = inverse_root(static_cast<Real>(std::max<std::int64_t>(m_problem.d, 1)));
    result.factor = root(inverse);
    result.project(x, count, inverse);
    return result;
  }

  std::vector<Feature<Real>> features(const std::vector<Real>& x, std::int64_t heads,
                                      std::int64_t rows,
                                      const std::vector<double>& parameter) const {
    const auto per_head = static_cast<std::size_t>(rows * m_problem.d);
    std::vector<Feature<Real>> result(x.size());
    for (std::size_t n = 0; n < x.size(); ++n)
      result[n] = feature(
          m_settings.kernel,
          parameter.empty() ? 0 : parameter[n / per_head % static_cast<std::size_t>(heads)], x[n]);
    return result;
  }

  /// xhat of q or k; `mask` (B, rows) holds 0 for rows without a say in the largest norm.
  NormedRows<Real> normed(const std::vector<Real>& x, std::int64_t heads, std::int64_t rows,
                          const std::vector<std::int64_t>& cu,
                          const std::vector<std::uint8_t>& mask) const {
    const auto of = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const std::size_t count = of(m_problem.batch * heads * rows);
    const Norm norm = affine() ? m_settings.norm : Norm::l2;
    NormedRows<Real> result{norm, d(), x, std::vector<Real>(count, 1), {}};
    if (norm == Norm::none) return result;
    for (std::size_t row = 0; row < count; ++row) {
      Sum<Real> squares;
      for (std::size_t c = 0; c < d(); ++c) squares.add(x[row * d() + c] * x[row * d() + c]);
      if (norm == Norm::l2) squares.add(static_cast<Real>(m_settings.norm_eps));
      result.divisor[row] = std::sqrt(squares.value());
    }
    if (norm == Norm::max) {
      result.largest.resize(count);
      const std::vector<std::int64_t> borders =
          cu.empty() ? std::vector<std::int64_t>{0, rows} : cu;
      for (std::int64_t n = 0; n < m_problem.batch * heads; ++n)
        for (std::size_t s = 0; s + 1 < borders.size(); ++s)
          share_largest(result, of(n * rows + borders[s]), of(n * rows + borders[s + 1]),
                        mask.empty() ? nullptr : mask.data() + n / heads * rows + borders[s]);
    }
    for (std::size_t row = 0; row < count; ++row) {
      if (result.divisor[row] == 0) result.divisor[row] = 1;
      for (std::size_t c = 0; c < d(); ++c) result.hat[row * d() + c] /= result.divisor[row];
    }
    return result;
  }

  /// Rows begin, ..., end - 1 get the largest norm among those whose mask is not 0.
  static void share_largest(NormedRows<Real>& x, std::size_t begin, std::size_t end,
                            const std::uint8_t* mask) {
    std::size_t largest = end;
    for (std::size_t row = begin; row < end; ++row) {
      if (mask != nullptr && mask[row - begin] == 0) continue;
      // A NaN is not swallowed: it counts as largest.
      if (largest == end || x.divisor[row] > x.divisor[largest] ||
          (std::isnan(x.divisor[row]) && !std::isnan(x.divisor[largest])))
        largest = row;
    }
    const Real norm = largest == end ? Real(1) : x.divisor[largest];
    for (std::size_t row = begin; row < end; ++row) {
      x.divisor[row] = norm;
      x.largest[row] = largest == end ? row : largest;
    }
  }

  void check() const {
    m_problem.validate(m_settings.causal);
    const auto& p = m_problem;
    check_size("q", m_tensors.q.size(), p.batch * p.heads * p.nq * p.d);
    check_size("k", m_tensors.k.size(), p.batch * p.kv_heads * p.nk * p.d);
    check_size("v", m_tensors.v.size(), p.batch * p.kv_heads * p.nk * p.dv);
    check_size("alpha", m_settings.alpha.size(), has_rates() || affine() ? p.heads : 0);
    check_size("beta", m_settings.beta.size(), has_rates() ? p.kv_heads : 0);
    check_size("constant", m_settings.constant.size(), affine() ? p.heads : 0);
    check_projection();
    check_not_negative("norm_eps", m_settings.norm_eps);
    check_not_negative("dropout_p", m_settings.dropout_p);
    check_not_negative("least_normaliser", m_settings.least_normaliser.value_or(0));
    if (m_settings.least_normaliser && (exponential() || softmax()))
      throw InvalidArgument(
          LinAttn::detail::message("LinAttn::reference: ", kernel_name(m_settings.kernel),
                                   " has no small sums: no least_normaliser"));
    if (!m_settings.key_mask.empty())
      check_size("key_mask", m_settings.key_mask.size(), p.batch * p.nk);
    check_packed();
    check_blocks();
  }

  /// As many rows of D elements as there are features, and at least one.
  void check_projection() const {
    const auto found = static_cast<std::int64_t>(m_settings.projection.size());
    if (!performer() || m_problem.d == 0) {
      check_size("projection", m_settings.projection.size(), 0);
      return;
    }
    if (found == 0 || found % m_problem.d != 0)
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: projection has ", found, " elements, expected a multiple of D = ",
          m_problem.d, " for kernel performer and ", m_problem.to_string()));
  }

  /// What lln-diag has of its own.
  void check_blocks() const {
    const auto& s = m_settings;
    const auto factors = [&](const std::vector<double>& x, bool used) {
      return used && !x.empty() ? m_problem.heads * m_problem.dv : 0;
    };
    const bool diag = s.kernel == Kernel::lln_diag;
    check_size("diag_r", s.diag_r.size(), factors(s.diag_r, diag && s.combine != Combine::average));
    check_size("diag_p", s.diag_p.size(), factors(s.diag_p, diag && s.combine == Combine::scale));
    if (!diag) return;
    if (s.block < 0)
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: block must be at least 1, or 0 for D, found ", s.block));
    if (!s.normalise || s.dropout_p != 0)
      throw InvalidArgument("LinAttn::reference: lln-diag is normalised and has no noise");
    if (s.causal) return;
    const auto& cu_q = s.cu_seqlens_q;
    const auto& cu_k = s.cu_seqlens_k;
    if (cu_q.empty()) check_square("", m_problem.nq, m_problem.nk);
    for (std::size_t m = 0; m + 1 < cu_q.size(); ++m)
      check_square(LinAttn::detail::message(" in packed member ", m), cu_q[m + 1] - cu_q[m],
                   cu_k[m + 1] - cu_k[m]);
  }

  static void check_square(const std::string& where, std::int64_t nq, std::int64_t nk) {
    if (nq != nk)
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: blocks without a causal mask need as many queries as keys, found ",
          nq, " and ", nk, where));
  }

  void check_size(const char* name, std::size_t found, std::int64_t expected) const {
    if (found != static_cast<std::size_t>(expected))
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: ", name, " has ", found, " elements, expected ", expected,
          " for kernel ", kernel_name(m_settings.kernel), " and ", m_problem.to_string()));
  }

  static void check_not_negative(const char* name, double found) {
    if (!(found >= 0) || !std::isfinite(found))
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: ", name, " must be finite and not negative, found ", found));
  }

  void check_packed() const {
    const auto& cu_q = m_settings.cu_seqlens_q;
    const auto& cu_k = m_settings.cu_seqlens_k;
    if (cu_q.empty() && cu_k.empty()) return;
    if (cu_q.size() != cu_k.size())
      throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: cu_seqlens_q has ",
                                                     cu_q.size(), " entries, cu_seqlens_k ",
                                                     cu_k.size()));
    if (!m_settings.key_mask.empty())
      throw InvalidArgument("LinAttn::reference: key_mask and cu_seqlens exclude each other");
    if (m_problem.batch != 1)
      throw InvalidArgument(LinAttn::detail::message(
          "LinAttn::reference: cu_seqlens needs B = 1, found ", m_problem.batch));
    check_borders("cu_seqlens_q", cu_q, m_problem.nq);
    check_borders("cu_seqlens_k", cu_k, m_problem.nk);
    for (std::size_t s = 0; m_settings.causal && s + 1 < cu_q.size(); ++s)
      if (cu_q[s + 1] - cu_q[s] > cu_k[s + 1] - cu_k[s])
        throw InvalidArgument(LinAttn::detail::message(
            "LinAttn::reference: causal packed member ", s, " has ", cu_q[s + 1] - cu_q[s],
            " queries but only ", cu_k[s + 1] - cu_k[s], " keys"));
  }

  static void check_borders(const char* name, const std::vector<std::int64_t>& cu,
                            std::int64_t rows) {
    if (cu.front() != 0 || cu.back() != rows)
      throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: ", name, " runs from ",
                                                     cu.front(), " to ", cu.back(),
                                                     ", expected from 0 to ", rows));
    for (std::size_t s = 0; s + 1 < cu.size(); ++s)
      if (cu[s] > cu[s + 1])
        throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: ", name, " falls from ",
                                                       cu[s], " to ", cu[s + 1], " at member ", s));
  }

  const Problem& m_problem;
  const Settings& m_settings;
  const Tensors<Real>& m_tensors;
  NormedRows<Real> m_normed_queries;  // affine and cosine only
  NormedRows<Real> m_normed_keys;
  ProjectedRows<Real> m_projected_queries;  // performer only
  ProjectedRows<Real> m_projected_keys;
  std::vector<Feature<Real>> m_queries;
  std::vector<Feature<Real>> m_keys;
};

/// One query row and the keys of its block.
template <class Real>
struct BlockRow {
  std::size_t head = 0;           ///< query head h
  std::size_t query = 0;          ///< row number in q and o
  std::vector<std::size_t> keys;  ///< U(i), row numbers in k and v
  std::vector<Real> weights;      ///< exp(x_ij - max), keys
  Real sum = 0;                   ///< of the weights

  Real attention(std::size_t j) const { return weights[j] / sum; }
};

/// The softmax inside blocks. \pre the arguments have passed Rows
template <ReferenceReal Real>
class Blocks {
 public:
  Blocks(const Problem& problem, const Settings& settings, const Tensors<Real>& tensors)
      : m_problem(problem),
        m_settings(settings),
        m_tensors(tensors),
        m_scale(problem.d > 0 ? inverse_root(static_cast<Real>(problem.d)) : Pair<Real>{1, 0}),
        m_block(settings.block > 0 ? settings.block : std::max<std::int64_t>(problem.d, 1)) {}

  Real scale() const { return m_scale.high; }

  /// Calls visit(row) for every query row that has a key in its block.
  template <class Visit>
  void for_each(Visit&& visit) const {
    BlockRow<Real> row;
    for (std::int64_t b = 0; b < m_problem.batch; ++b)
      for (std::int64_t h = 0; h < m_problem.heads; ++h)
        for (std::int64_t i = 0; i < m_problem.nq; ++i) {
          row.head = static_cast<std::size_t>(h);
          row.query = static_cast<std::size_t>((b * m_problem.heads + h) * m_problem.nq + i);
          see(b, h / m_problem.group(), i, row.keys);
          if (row.keys.empty()) continue;
          weigh(row);
          visit(std::as_const(row));
        }
  }

  /// o_diag, (B,H,Nq,Dv).
  std::vector<Real> forward() const {
    const auto dv = static_cast<std::size_t>(m_problem.dv);
    std::vector<Real> o(static_cast<std::size_t>(m_problem.batch * m_problem.heads * m_problem.nq) *
                        dv);
    for_each([&](const BlockRow<Real>& row) {
      for (std::size_t c = 0; c < dv; ++c) {
        Sum<Real> sum;
        for (std::size_t j = 0; j < row.keys.size(); ++j)
          sum.add(row.weights[j] * m_tensors.v[row.keys[j] * dv + c]);
        o[row.query * dv + c] = sum.value() / row.sum;
      }
    });
    return o;
  }

  /// Gradients with respect to q, k and v, given those with respect to o_diag.
  GradientSet<Real> backward(const std::vector<Real>& d_o) const {
    const auto d = static_cast<std::size_t>(m_problem.d),
               dv = static_cast<std::size_t>(m_problem.dv);
    std::vector<Sum<Real>> dq(m_tensors.q.size()), dk(m_tensors.k.size()),
        dv_sums(m_tensors.v.size());
    std::vector<Real> dx;
    for_each([&](const BlockRow<Real>& row) {
      const std::size_t keys = row.keys.size();
      const Real* h = d_o.data() + row.query * dv;
      dx.resize(keys);
      Sum<Real> mean;
      for (std::size_t j = 0; j < keys; ++j) {
        Sum<Real> sum;
        for (std::size_t c = 0; c < dv; ++c) sum.add(h[c] * m_tensors.v[row.keys[j] * dv + c]);
        dx[j] = sum.value();
        mean.add(row.weights[j] * dx[j]);
      }
      for (std::size_t j = 0; j < keys; ++j) {
        const Real a = row.attention(j), by_score = a * (dx[j] - mean.value() / row.sum);
        for (std::size_t c = 0; c < dv; ++c) dv_sums[row.keys[j] * dv + c].add(a * h[c]);
        for (std::size_t c = 0; c < d; ++c) {
          dq[row.query * d + c].add(by_score * m_tensors.k[row.keys[j] * d + c]);
          dk[row.keys[j] * d + c].add(by_score * m_tensors.q[row.query * d + c]);
        }
      }
    });
    GradientSet<Real> gradient{values(dq), values(dk), values(dv_sums), {}, {}};
    for (auto* x : {&gradient.q, &gradient.k})
      for (Real& element : *x) element *= scale();
    return gradient;
  }

 private:
  void see(std::int64_t b, std::int64_t kv_head, std::int64_t i,
           std::vector<std::size_t>& keys) const {
    const Sequence at = sequence_of(m_problem, m_settings, i);
    const std::int64_t nk = at.k_end - at.k_begin;
    const std::int64_t position = i - at.q_begin + nk - (at.q_end - at.q_begin);
    const std::int64_t begin = position / m_block * m_block;
    const std::int64_t end = m_settings.causal ? position + 1 : std::min(begin + m_block, nk);
    visible_keys(m_problem, m_settings, b, kv_head, at.k_begin + begin, at.k_begin + end, keys);
  }

  /// x_ij of the j-th key of the block.
  Pair<Real> score(const BlockRow<Real>& row, std::size_t j) const {
    const auto d = static_cast<std::size_t>(m_problem.d);
    return product(dot(m_tensors.q.data() + row.query * d, m_tensors.k.data() + row.keys[j] * d, d),
                   m_scale);
  }

  void weigh(BlockRow<Real>& row) const {
    std::vector<Pair<Real>> scores(row.keys.size());
    for (std::size_t j = 0; j < scores.size(); ++j) scores[j] = score(row, j);
    Real shift = scores.front().high;
    for (const auto& x : scores) shift = std::max(shift, x.high);
    if (shift == -std::numeric_limits<Real>::infinity()) shift = 0;
    row.weights.resize(scores.size());
    Sum<Real> sum;
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const Pair<Real> exponent = exact_sum(scores[j].high, -shift);
      const Real value = std::exp(exponent.high);
      row.weights[j] = value + value * (exponent.low + scores[j].low);
      sum.add(row.weights[j]);
    }
    row.sum = sum.value();
  }

  const Problem& m_problem;
  const Settings& m_settings;
  const Tensors<Real>& m_tensors;
  Pair<Real> m_scale;  // 1 / sqrt(D)
  std::int64_t m_block;
};

/// The settings of lln-diag without its blocks.
inline Settings linear_part(Settings settings) {
  settings.kernel = Kernel::lln;
  settings.diag_r.clear();
  settings.diag_p.clear();
  return settings;
}

/// r and p of lln-diag for element e of (B,H,Nq,Dv).
template <class Real>
struct Factors {
  Real r, p;

  Factors(const Problem& problem, const Settings& settings, std::size_t e) : r(0.5), p(0.5) {
    const std::size_t n = place(problem, e);
    if (!settings.diag_r.empty()) r = static_cast<Real>(settings.diag_r[n]);
    if (!settings.diag_p.empty()) p = static_cast<Real>(settings.diag_p[n]);
    if (settings.combine == Combine::ratio) p = 1 - r;
  }

  /// Element of (H, Dv).
  static std::size_t place(const Problem& problem, std::size_t e) {
    const auto dv = static_cast<std::size_t>(problem.dv);
    const auto head = e / dv / static_cast<std::size_t>(problem.nq);
    return head % static_cast<std::size_t>(problem.heads) * dv + e % dv;
  }
};

/// Numbers of factors that have a gradient: those of r and those of p.
inline std::array<std::size_t, 2> factor_counts(const Problem& problem, const Settings& settings) {
  const auto all = static_cast<std::size_t>(problem.heads * problem.dv);
  const bool diag = settings.kernel == Kernel::lln_diag;
  return {diag && settings.combine != Combine::average ? all : 0,
          diag && settings.combine == Combine::scale ? all : 0};
}

/// sum_j weights_j v_jc over the visible keys.
template <class Real>
Real weighted_value(const Row<Real>& row, const std::vector<Real>& v, std::size_t dv,
                    std::size_t c) {
  Sum<Real> sum;
  for (std::size_t j = 0; j < row.keys.size(); ++j)
    sum.add(row.weights[j] * v[row.keys[j] * dv + c]);
  return sum.value();
}

/// 1 + p n of element e of the output.
template <class Real>
Real noise_factor(const Settings& settings, std::size_t e) {
  if (settings.dropout_p == 0) return 1;
  return 1 + static_cast<Real>(settings.dropout_p) *
                 standard_normal<Real>(settings.seed, settings.offset, e);
}

template <class Real>
void check_cotangent(const Problem& problem, const std::vector<Real>& d_o) {
  const auto expected =
      static_cast<std::size_t>(problem.batch * problem.heads * problem.nq * problem.dv);
  if (d_o.size() != expected)
    throw InvalidArgument(LinAttn::detail::message("LinAttn::reference: d_o has ", d_o.size(),
                                                   " elements, expected ", expected, " for ",
                                                   problem.to_string()));
}

}  // namespace detail

/// Output o (B,H,Nq,Dv), or y with noise, of the equations at the top of this file.
/// \throws InvalidArgument if extents, sizes, masks or borders do not fit together.
template <ReferenceReal Real>
std::vector<Real> forward(const Problem& problem, const Settings& settings,
                          const Tensors<Real>& tensors) {
  const detail::Rows<Real> rows(problem, settings, tensors);
  if (settings.kernel == Kernel::lln_diag) {
    auto o = forward(problem, detail::linear_part(settings), tensors);
    const auto o_diag = detail::Blocks<Real>(problem, settings, tensors).forward();
    for (std::size_t e = 0; e < o.size(); ++e) {
      const detail::Factors<Real> factors(problem, settings, e);
      o[e] = factors.r * o[e] + factors.p * o_diag[e];
    }
    return o;
  }
  const std::size_t dv = rows.dv();
  std::vector<Real> o(static_cast<std::size_t>(problem.batch * problem.heads * problem.nq) * dv);
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    for (std::size_t c = 0; c < dv; ++c) {
      const Real sum = detail::weighted_value(row, tensors.v, dv, c);
      o[row.query * dv + c] =
          (settings.normalise ? sum / row.denominator : static_cast<Real>(settings.scale) * sum) *
          detail::noise_factor<Real>(settings, row.query * dv + c);
    }
  });
  return o;
}

template <ReferenceReal Real>
GradientSet<Real> backward(const Problem& problem, const Settings& settings,
                           const Tensors<Real>& tensors, const std::vector<Real>& d_o);

namespace detail {

/// backward() of lln-diag.
template <ReferenceReal Real>
GradientSet<Real> combined_backward(const Problem& problem, const Settings& settings,
                                    const Tensors<Real>& tensors, const std::vector<Real>& d_o) {
  const Settings linear = linear_part(settings);
  const Blocks<Real> blocks(problem, settings, tensors);
  const auto o_lln = forward(problem, linear, tensors), o_diag = blocks.forward();
  const auto [r_count, p_count] = factor_counts(problem, settings);
  std::vector<Sum<Real>> dr(r_count), dp(p_count);
  std::vector<Real> to_lln(d_o.size()), to_diag(d_o.size());
  for (std::size_t e = 0; e < d_o.size(); ++e) {
    const Factors<Real> factors(problem, settings, e);
    to_lln[e] = factors.r * d_o[e];
    to_diag[e] = factors.p * d_o[e];
    const std::size_t n = Factors<Real>::place(problem, e);
    if (r_count > 0) dr[n].add(d_o[e] * o_lln[e]);
    if (settings.combine == Combine::ratio) dr[n].add(-d_o[e] * o_diag[e]);
    if (p_count > 0) dp[n].add(d_o[e] * o_diag[e]);
  }
  auto gradient = reference::backward(problem, linear, tensors, to_lln);
  const auto more = blocks.backward(to_diag);
  const auto add = [](std::vector<Real>& to, const std::vector<Real>& x) {
    for (std::size_t n = 0; n < to.size(); ++n) to[n] += x[n];
  };
  add(gradient.q, more.q);
  add(gradient.k, more.k);
  add(gradient.v, more.v);
  gradient.diag_r = values(dr);
  gradient.diag_p = values(dp);
  return gradient;
}

}  // namespace detail

/// Gradients of L with respect to q, k, v and the parameters of the kernel, given d_o = dL/do
/// (B,H,Nq,Dv), or dL/dy with noise. \throws InvalidArgument if extents, sizes, masks or borders do
/// not fit together.
template <ReferenceReal Real>
GradientSet<Real> backward(const Problem& problem, const Settings& settings,
                           const Tensors<Real>& tensors, const std::vector<Real>& d_o) {
  using detail::Sum;
  const detail::Rows<Real> rows(problem, settings, tensors);
  detail::check_cotangent(problem, d_o);
  if (settings.kernel == Kernel::lln_diag)
    return detail::combined_backward(problem, settings, tensors, d_o);
  const std::size_t d = rows.width(), dv = rows.dv();
  const auto scale = static_cast<Real>(settings.scale);

  std::vector<Sum<Real>> dq(rows.query_elements()), dk(rows.key_elements()),
      dv_sums(tensors.v.size());
  std::vector<Sum<Real>> dalpha(settings.alpha.size()), dbeta(settings.beta.size());
  std::vector<Sum<Real>> dconstant(settings.constant.size()), dscale(settings.constant.size());
  std::vector<Real> dw, g(dv);
  rows.for_each([&](const detail::Row<Real>& row) {
    if (row.vanishes(settings.normalise)) return;
    const std::size_t keys = row.keys.size();
    for (std::size_t c = 0; c < dv; ++c)
      g[c] = d_o[row.query * dv + c] * detail::noise_factor<Real>(settings, row.query * dv + c);

    dw.resize(keys);
    Sum<Real> mean;
    for (std::size_t j = 0; j < keys; ++j) {
      Sum<Real> sum;
      for (std::size_t c = 0; c < dv; ++c) sum.add(g[c] * tensors.v[row.keys[j] * dv + c]);
      dw[j] = sum.value();
      mean.add(row.weights[j] * dw[j]);
    }
    for (std::size_t j = 0; j < keys; ++j)
      dw[j] = !settings.normalise ? scale * dw[j]
              : row.replaced      ? dw[j] / row.denominator
                                  : (dw[j] - mean.value() / row.denominator) / row.denominator;

    for (std::size_t j = 0; j < keys; ++j) {
      const Real a = settings.normalise ? row.weights[j] / row.denominator : scale * row.weights[j];
      for (std::size_t c = 0; c < dv; ++c) dv_sums[row.keys[j] * dv + c].add(a * g[c]);
      for (std::size_t c = 0; c < d; ++c) {
        dq[row.query * d + c].add(dw[j] * rows.by_query(row, j, c));
        dk[row.keys[j] * d + c].add(dw[j] * rows.by_key(row, j, c));
        if (!rows.has_rates()) continue;
        const Real dt = dw[j] * row.terms[j * d + c];
        dalpha[row.head].add(dt * tensors.q[row.query * d + c]);
        dbeta[row.kv_head].add(dt * tensors.k[row.keys[j] * d + c]);
      }
      if (!rows.affine()) continue;
      const Real score = rows.score(row, j);
      dalpha[row.head].add(dw[j] * (rows.score_scale() * score));
      dscale[row.head].add(dw[j] * (rows.a(row) * score));
      dconstant[row.head].add(dw[j]);
    }
  });
  return {rows.pull_back_queries(detail::values(dq)),
          rows.pull_back_keys(detail::values(dk)),
          detail::values(dv_sums),
          detail::values(dalpha),
          detail::values(dbeta),
          detail::values(dconstant),
          detail::values(dscale)};
}

/// log s_i of softmax, (B,H,Nq): the logarithm of the sum of exp(s q_i . k_j) over the keys a row
/// sees, and -infinity where it sees none. \throws InvalidArgument as forward(), and for other
/// kernels
template <ReferenceReal Real>
std::vector<Real> log_sums(const Problem& problem, const Settings& settings,
                           const Tensors<Real>& tensors) {
  if (settings.kernel != Kernel::softmax)
    throw InvalidArgument(LinAttn::detail::message(
        "LinAttn::reference: log_sums() is of softmax, found ", kernel_name(settings.kernel)));
  Settings shifted = settings;
  shifted.normalise = true;
  const detail::Rows<Real> rows(problem, shifted, tensors);
  std::vector<Real> logs(static_cast<std::size_t>(problem.batch * problem.heads * problem.nq),
                         -std::numeric_limits<Real>::infinity());
  rows.for_each([&](const detail::Row<Real>& row) {
    if (!row.keys.empty()) logs[row.query] = row.shift + std::log(row.denominator);
  });
  return logs;
}

}  // namespace LinAttn::reference
