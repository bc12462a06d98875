// SPDX-License-Identifier: BSD-3-Clause
// The error bounds: true for a plain recurrence in float, close enough to see its mistakes, and
// small for the reference itself.

#include <gtest/gtest.h>

#include <numbers>
#include <stdexcept>
#include <tuple>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;

/// Mistakes that users of such libraries have reported.
enum class Mistake {
  none,
  no_denominator_gradient,
  last_key_dropped,
  neighbour_value_column,
  stale_output,
  no_count,                  ///< b m is missing from the sum of weights
  no_gradient_of_norm,       ///< x / rho with a constant rho
  norm_of_last_row,          ///< the last row carries the gradient of the largest norm
  gradient_of_replaced_sum,  ///< as if a replaced sum were its own
  cotangent_without_noise,
  no_gradient_of_block_sum,  ///< dx = A h . v
  no_scale_of_block_scores,  ///< in the backward pass
  block_of_query_number,     ///< Nk - Nq forgotten
  block_sees_its_future,
  short_block_left_out,
  factors_swapped,       ///< r where p belongs
  uncombined_cotangent,  ///< the blocks' part of a gradient without p
  ratio_without_block,   ///< dr of ratio without o_diag
  squares_without_half,  ///< taylor as 1 + x + x^2
  no_gradient_of_square  ///< of |y|^2 / 2 in the logits of performer
};

template <class T>
struct Recurrence {
  std::vector<T> o;
  reference::GradientSet<T> gradient;
};

template <class T>
T phi(Kernel kernel, T parameter, T x) {
  switch (kernel) {
    case Kernel::identity:
    case Kernel::affine:
    case Kernel::cosine:
      return x;
    case Kernel::elu:
      return x > 0 ? x + 1 : std::exp(x);
    case Kernel::relu:
      return std::max(x, T(0));
    case Kernel::quadratic:
      return x * x;
    default:
      break;
  }
  return std::exp(parameter * x);
}

/// dphi/dx; for lln with respect to parameter * x.
template <class T>
T slope(Kernel kernel, T parameter, T x) {
  switch (kernel) {
    case Kernel::identity:
    case Kernel::affine:
    case Kernel::cosine:
      return 1;
    case Kernel::elu:
      return x > 0 ? 1 : std::exp(x);
    case Kernel::relu:
      return x > 0 ? T(1) : T(0);
    case Kernel::quadratic:
      return 2 * x;
    default:
      break;
  }
  return std::exp(parameter * x);
}

/// Rows x of one head divided by their norms, in T.
template <class T>
struct Normed {
  const reference::Settings& settings;
  std::size_t d, largest = 0;
  reference::Norm norm;
  std::vector<T> hat, factor;

  Normed(const reference::Settings& s, const T* x, std::size_t rows, std::size_t width)
      : settings(s),
        d(width),
        norm(s.kernel == Kernel::affine   ? s.norm
             : s.kernel == Kernel::cosine ? reference::Norm::l2
                                          : reference::Norm::none),
        hat(x, x + rows * width),
        factor(rows, T(1)) {
    if (norm == reference::Norm::none) return;
    const bool l2 = norm == reference::Norm::l2;
    std::vector<T> squares(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t m = 0; m < d; ++m) squares[row] += x[row * d + m] * x[row * d + m];
      if (squares[row] > squares[largest]) largest = row;
    }
    for (std::size_t row = 0; row < rows; ++row) {
      factor[row] = T(1) / std::sqrt(l2 ? squares[row] + static_cast<T>(settings.norm_eps)
                                        : squares[largest]);
      for (std::size_t m = 0; m < d; ++m) hat[row * d + m] *= factor[row];
    }
  }

  /// Adds the gradient with respect to x.
  void pull_back(const std::vector<T>& d_hat, Mistake mistake, T* dx) const {
    const auto dot = [&](std::size_t row) {
      T sum = 0;
      for (std::size_t m = 0; m < d; ++m) sum += hat[row * d + m] * d_hat[row * d + m];
      return sum;
    };
    T all = 0;
    for (std::size_t row = 0; row < factor.size(); ++row) all += dot(row);
    const bool constant = norm == reference::Norm::none || mistake == Mistake::no_gradient_of_norm;
    const std::size_t carrier = mistake == Mistake::norm_of_last_row ? factor.size() - 1 : largest;
    for (std::size_t row = 0; row < factor.size(); ++row) {
      const T along = constant                      ? T(0)
                      : norm == reference::Norm::l2 ? dot(row)
                      : row == carrier              ? all
                                                    : T(0);
      for (std::size_t m = 0; m < d; ++m)
        dx[row * d + m] += factor[row] * (d_hat[row * d + m] - hat[row * d + m] * along);
    }
  }
};

/// 1 + p n in T, but for the exact u under the logarithm.
template <class T>
T noise_factor(const reference::Settings& settings, std::uint64_t e) {
  if (settings.dropout_p == 0) return 1;
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto words = reference::philox_words({low(e >> 2), low(e >> 34), low(settings.offset), 0},
                                             {low(settings.seed), 0});
  const auto u = [&](std::size_t n) { return (words[n] + 0.5) * 0x1p-32; };
  const std::size_t pair = e & 2;
  const T radius = std::sqrt(T(-2) * static_cast<T>(std::log(u(pair))));
  const T angle = static_cast<T>(2 * std::numbers::pi) * static_cast<T>(u(pair + 1));
  return T(1) + static_cast<T>(settings.dropout_p) *
                    (radius * (e & 1 ? std::sin(angle) : std::cos(angle)));
}

/// Softmax inside blocks, or of all keys, with a running maximum, and its gradients, in T.
template <class T>
struct Blocks {
  const Case<T>& c;
  Mistake mistake;

  template <class Visit>
  void for_each(Visit&& visit) const {
    const auto& p = c.problem;
    const std::int64_t block = exact()                ? p.nq + p.nk
                               : c.settings.block > 0 ? c.settings.block
                                                      : p.d;
    for (std::int64_t head = 0; head < p.batch * p.heads; ++head)
      for (std::int64_t i = 0; i < p.nq; ++i) {
        const std::int64_t position =
            i + (mistake == Mistake::block_of_query_number ? 0 : p.nk - p.nq);
        const std::int64_t begin = position / block * block;
        std::int64_t end = std::min(begin + block, p.nk);
        if (mistake == Mistake::short_block_left_out && end < begin + block) continue;
        if (c.settings.causal && mistake != Mistake::block_sees_its_future) end = position + 1;
        const std::int64_t keys = head / p.group() * p.nk;
        visit(static_cast<std::size_t>(head * p.nq + i), static_cast<std::size_t>(keys + begin),
              static_cast<std::size_t>(keys + end));
      }
  }

  bool exact() const { return c.settings.kernel == Kernel::softmax; }
  T scale() const {
    return exact() ? static_cast<T>(c.settings.score_scale)
                   : T(1) / std::sqrt(static_cast<T>(c.problem.d));
  }
  T score(std::size_t i, std::size_t j) const {
    const auto d = static_cast<std::size_t>(c.problem.d);
    T dot = 0;
    for (std::size_t m = 0; m < d; ++m) dot += c.tensors.q[i * d + m] * c.tensors.k[j * d + m];
    return dot * scale();
  }

  /// o, and the logarithm of each row's sum.
  std::pair<std::vector<T>, std::vector<T>> forward() const {
    const auto dv = static_cast<std::size_t>(c.problem.dv);
    std::vector<T> o(c.d_o.size()), logs(c.d_o.size() / dv);
    for_each([&](std::size_t i, std::size_t begin, std::size_t end) {
      T top = -std::numeric_limits<T>::infinity(), sum = 0;
      for (std::size_t j = begin; j < end; ++j) {
        const T x = score(i, j), next = std::max(top, x);
        const T kept = std::exp(top - next), weight = std::exp(x - next);
        top = next;
        sum = sum * kept + weight;
        for (std::size_t n = 0; n < dv; ++n)
          o[i * dv + n] = o[i * dv + n] * kept + weight * c.tensors.v[j * dv + n];
      }
      for (std::size_t n = 0; n < dv; ++n) o[i * dv + n] /= sum;
      logs[i] = top + std::log(sum);
    });
    return {o, logs};
  }

  /// Adds the gradients for the cotangent h of o, with each o off by max(unit |o|, least).
  void backward(const std::vector<T>& o, const std::vector<T>& logs, const std::vector<T>& h,
                T unit, T least, reference::GradientSet<T>& to) const {
    const auto d = static_cast<std::size_t>(c.problem.d),
               dv = static_cast<std::size_t>(c.problem.dv);
    const T factor = mistake == Mistake::no_scale_of_block_scores ? T(1) : scale();
    for_each([&](std::size_t i, std::size_t begin, std::size_t end) {
      T delta = 0;
      for (std::size_t n = i * dv; n < (i + 1) * dv; ++n)
        delta += h[n] * (o[n] + std::copysign(std::max(unit * std::abs(o[n]), least), h[n]));
      if (mistake == Mistake::no_gradient_of_block_sum) delta = 0;
      for (std::size_t j = begin; j < end; ++j) {
        const T a = std::exp(score(i, j) - logs[i]);
        T y = 0;
        for (std::size_t n = 0; n < dv; ++n) {
          y += h[i * dv + n] * c.tensors.v[j * dv + n];
          to.v[j * dv + n] += a * h[i * dv + n];
        }
        const T dx = a * (y - delta) * factor;
        for (std::size_t m = 0; m < d; ++m) {
          to.q[i * d + m] += dx * c.tensors.k[j * d + m];
          to.k[j * d + m] += dx * c.tensors.q[i * d + m];
        }
      }
    });
  }
};

/// Linear attention in linear time: running sums S = sum phi(k) v^T, z = sum phi(k), for affine
/// also t = sum v and m, forward, and R = sum phi(q) [G, e]^T, for affine also sum [G, e],
/// backward, in T throughout. Backward sees each element of o off by max(unit |o|, least), to the
/// side that changes the gradients most.
template <class T>
Recurrence<T> recurrence(const Case<T>& c, Mistake mistake, T unit = 0, T least = 0);

/// Both parts of lln-diag and what combines them.
template <class T>
Recurrence<T> combined(const Case<T>& c, Mistake mistake, T unit, T least) {
  using reference::Combine;
  const auto& settings = c.settings;
  const bool ratio = settings.combine == Combine::ratio;
  auto linear = c;
  linear.settings.kernel = Kernel::lln;
  linear.settings.diag_r.clear();
  linear.settings.diag_p.clear();
  const auto dv = static_cast<std::size_t>(c.problem.dv),
             rows = static_cast<std::size_t>(c.problem.nq),
             heads = static_cast<std::size_t>(c.problem.heads);
  const auto place = [&](std::size_t e) { return e / dv / rows % heads * dv + e % dv; };
  const auto factor = [&](const std::vector<double>& x, std::size_t e) {
    return x.empty() ? T(0.5) : static_cast<T>(x[place(e)]);
  };
  const Blocks<T> blocks{c, mistake};
  const auto [o_diag, logs] = blocks.forward();
  std::vector<T> r(c.d_o.size()), p(c.d_o.size()), h(c.d_o.size());
  for (std::size_t e = 0; e < r.size(); ++e) {
    r[e] = factor(settings.diag_r, e);
    p[e] = ratio ? T(1) - r[e] : factor(settings.diag_p, e);
    if (mistake == Mistake::factors_swapped) std::swap(r[e], p[e]);
    linear.d_o[e] = r[e] * c.d_o[e];
    h[e] = mistake == Mistake::uncombined_cotangent ? c.d_o[e] : p[e] * c.d_o[e];
  }
  auto out = recurrence(linear, mistake, unit, least);
  blocks.backward(o_diag, logs, h, unit, least, out.gradient);
  const auto all = heads * dv;
  if (settings.combine != Combine::average) out.gradient.diag_r.resize(all);
  if (settings.combine == Combine::scale) out.gradient.diag_p.resize(all);
  for (std::size_t e = 0; e < r.size(); ++e) {
    const T g = c.d_o[e],
            less = ratio && mistake != Mistake::ratio_without_block ? o_diag[e] : T(0);
    if (settings.combine != Combine::average)
      out.gradient.diag_r[place(e)] += g * (out.o[e] - less);
    if (settings.combine == Combine::scale) out.gradient.diag_p[place(e)] += g * o_diag[e];
    out.o[e] = r[e] * out.o[e] + p[e] * o_diag[e];
  }
  return out;
}

/// Softmax attention over all keys.
template <class T>
Recurrence<T> exact_attention(const Case<T>& c, Mistake mistake, T unit, T least) {
  const Blocks<T> blocks{c, mistake};
  const auto [o, logs] = blocks.forward();
  Recurrence<T> out{o, {}};
  out.gradient.q.resize(c.tensors.q.size());
  out.gradient.k.resize(c.tensors.k.size());
  out.gradient.v.resize(c.tensors.v.size());
  blocks.backward(o, logs, c.d_o, unit, least, out.gradient);
  return out;
}

/// Features of the rows of q and k, `width` for each, and a linear kernel of them. pull_back(x, df,
/// dx) adds the gradient with respect to one row.
template <class T, class Map, class PullBack>
Recurrence<T> mapped(const Case<T>& c, Kernel kernel, std::int64_t width, Map map,
                     PullBack pull_back, Mistake mistake, T unit, T least) {
  const auto d = static_cast<std::size_t>(c.problem.d), r = static_cast<std::size_t>(width);
  const auto features = [&](const std::vector<T>& x) {
    std::vector<T> f(x.size() / d * r);
    for (std::size_t row = 0; row * d < x.size(); ++row)
      map(x.data() + row * d, f.data() + row * r);
    return f;
  };
  auto inner = c;
  inner.problem.d = width;
  inner.settings.kernel = kernel;
  inner.settings.projection.clear();
  if (kernel == Kernel::lln) {
    inner.settings.alpha.assign(static_cast<std::size_t>(c.problem.heads), 1);
    inner.settings.beta.assign(static_cast<std::size_t>(c.problem.kv_heads), 1);
  }
  inner.tensors.q = features(c.tensors.q);
  inner.tensors.k = features(c.tensors.k);
  auto out = recurrence(inner, mistake, unit, least);
  const auto pulled = [&](const std::vector<T>& x, const std::vector<T>& df) {
    std::vector<T> dx(x.size());
    for (std::size_t row = 0; row * d < x.size(); ++row)
      pull_back(x.data() + row * d, df.data() + row * r, dx.data() + row * d);
    return dx;
  };
  out.gradient.q = pulled(c.tensors.q, out.gradient.q);
  out.gradient.k = pulled(c.tensors.k, out.gradient.k);
  out.gradient.alpha.clear();
  out.gradient.beta.clear();
  return out;
}

/// The monomials of 1 + x + x^2/2, each pair of elements once.
template <class T>
Recurrence<T> taylor(const Case<T>& c, Mistake mistake, T unit, T least) {
  const auto d = static_cast<std::size_t>(c.problem.d);
  const T s = static_cast<T>(c.settings.score_scale);
  const T first = std::sqrt(s);
  const T square = mistake == Mistake::squares_without_half ? s : s * std::sqrt(T(0.5));
  const auto map = [=](const T* x, T* f) {
    *f++ = 1;
    for (std::size_t a = 0; a < d; ++a) *f++ = first * x[a];
    for (std::size_t a = 0; a < d; ++a) {
      *f++ = square * x[a] * x[a];
      for (std::size_t b = a + 1; b < d; ++b) *f++ = s * x[a] * x[b];
    }
  };
  const auto pull_back = [=](const T* x, const T* df, T* dx) {
    ++df;
    for (std::size_t a = 0; a < d; ++a) dx[a] += first * *df++;
    for (std::size_t a = 0; a < d; ++a) {
      dx[a] += 2 * square * x[a] * *df++;
      for (std::size_t b = a + 1; b < d; ++b, ++df) {
        dx[a] += s * x[b] * *df;
        dx[b] += s * x[a] * *df;
      }
    }
  };
  const auto width = static_cast<std::int64_t>(1 + d + d * (d + 1) / 2);
  return mapped(c, Kernel::identity, width, map, pull_back, mistake, unit, least);
}

/// lln of the logits.
template <class T>
Recurrence<T> performer(const Case<T>& c, Mistake mistake, T unit, T least) {
  const auto d = static_cast<std::size_t>(c.problem.d);
  const std::vector<T> w(c.settings.projection.begin(), c.settings.projection.end());
  const std::size_t features = w.size() / d;
  const T factor = T(1) / std::sqrt(std::sqrt(static_cast<T>(d)));
  const auto map = [&](const T* x, T* f) {
    T squares = 0;
    for (std::size_t a = 0; a < d; ++a) squares += (factor * x[a]) * (factor * x[a]);
    for (std::size_t m = 0; m < features; ++m) {
      T along = 0;
      for (std::size_t a = 0; a < d; ++a) along += w[m * d + a] * (factor * x[a]);
      f[m] = along - squares / 2;
    }
  };
  const auto pull_back = [&](const T* x, const T* df, T* dx) {
    T all = 0;
    for (std::size_t m = 0; m < features; ++m) all += df[m];
    if (mistake == Mistake::no_gradient_of_square) all = 0;
    for (std::size_t a = 0; a < d; ++a) {
      T sum = 0;
      for (std::size_t m = 0; m < features; ++m) sum += df[m] * w[m * d + a];
      dx[a] += factor * (sum - factor * x[a] * all);
    }
  };
  auto scaled = c;
  if (!c.settings.normalise) scaled.settings.scale /= static_cast<double>(features);
  return mapped(scaled, Kernel::lln, static_cast<std::int64_t>(features), map, pull_back, mistake,
                unit, least);
}

template <class T>
Recurrence<T> recurrence(const Case<T>& c, Mistake mistake, T unit, T least) {
  if (c.settings.kernel == Kernel::lln_diag) return combined(c, mistake, unit, least);
  if (c.settings.kernel == Kernel::softmax) return exact_attention(c, mistake, unit, least);
  if (c.settings.kernel == Kernel::taylor) return taylor(c, mistake, unit, least);
  if (c.settings.kernel == Kernel::performer) return performer(c, mistake, unit, least);
  const auto& p = c.problem;
  const auto& settings = c.settings;
  const auto kernel = settings.kernel;
  const bool lln = kernel == Kernel::lln, affine = kernel == Kernel::affine,
             causal = settings.causal, normalise = settings.normalise;
  const T scale = static_cast<T>(settings.scale);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t d = size(p.d), dv = size(p.dv), nq = size(p.nq), nk = size(p.nk);
  Recurrence<T> out;
  out.o.resize(c.d_o.size());
  out.gradient = {std::vector<T>(c.tensors.q.size()),      std::vector<T>(c.tensors.k.size()),
                  std::vector<T>(c.tensors.v.size()),      std::vector<T>(settings.alpha.size()),
                  std::vector<T>(settings.beta.size()),    std::vector<T>(settings.constant.size()),
                  std::vector<T>(settings.constant.size())};
  for (std::size_t batch = 0; batch < size(p.batch); ++batch)
    for (std::size_t h = 0; h < size(p.heads); ++h) {
      const std::size_t g = h / size(p.group());
      const std::size_t q_head = batch * size(p.heads) + h, k_head = batch * size(p.kv_heads) + g;
      const T alpha = lln || affine ? static_cast<T>(settings.alpha[h]) : T(1);
      const T beta = lln ? static_cast<T>(settings.beta[g]) : T(1);
      const T s = static_cast<T>(settings.score_scale);
      const T rate = affine ? alpha * s : T(1);
      const T b = affine ? static_cast<T>(settings.constant[h]) : T(0);
      const Normed<T> normed_q(settings, c.tensors.q.data() + q_head * nq * d, nq, d);
      const Normed<T> normed_k(settings, c.tensors.k.data() + k_head * nk * d, nk, d);
      const T *q = normed_q.hat.data(), *k = normed_k.hat.data();
      const T* v = c.tensors.v.data() + k_head * nk * dv;
      const T* d_o = c.d_o.data() + q_head * nq * dv;
      T* o = out.o.data() + q_head * nq * dv;
      T* dv_out = out.gradient.v.data() + k_head * nk * dv;
      std::vector<T> dq(nq * d), dk(nk * d);  // with respect to qhat and khat

      std::vector<T> S(d * dv), z(d), t(dv), G(nq * dv), e(nq);
      std::size_t absorbed = 0;
      for (std::size_t i = 0; i < nq; ++i) {
        const std::size_t end = causal ? i + nk - nq + 1 : nk;
        for (; absorbed < (mistake == Mistake::last_key_dropped ? end - 1 : end); ++absorbed) {
          for (std::size_t n = 0; n < dv; ++n) t[n] += v[absorbed * dv + n];
          for (std::size_t m = 0; m < d; ++m) {
            const T feature = phi(kernel, beta, k[absorbed * d + m]);
            z[m] += feature;
            for (std::size_t n = 0; n < dv; ++n) S[m * dv + n] += feature * v[absorbed * dv + n];
          }
        }
        T denominator = 0;
        for (std::size_t m = 0; m < d; ++m) denominator += phi(kernel, alpha, q[i * d + m]) * z[m];
        const T count = static_cast<T>(absorbed);
        if (affine)
          denominator = rate * denominator + (mistake == Mistake::no_count ? b : b * count);
        const T limit = static_cast<T>(settings.least_normaliser.value_or(0)) * count;
        const bool replaced = normalise && std::abs(denominator) < limit;
        if (replaced) denominator = std::copysign(limit, denominator);
        if (normalise && denominator == 0) continue;
        T dot = 0;
        for (std::size_t n = 0; n < dv; ++n) {
          T sum = 0;
          const std::size_t column = mistake == Mistake::neighbour_value_column ? (n + 1) % dv : n;
          for (std::size_t m = 0; m < d; ++m)
            sum += phi(kernel, alpha, q[i * d + m]) * S[m * dv + column];
          if (affine) sum = rate * sum + b * t[column];
          const T factor = noise_factor<T>(settings, (q_head * nq + i) * dv + n);
          const T d_y = d_o[i * dv + n];
          o[i * dv + n] = (normalise ? sum / denominator : scale * sum) * factor;
          const T cotangent = mistake == Mistake::cotangent_without_noise ? d_y : d_y * factor;
          G[i * dv + n] = normalise ? cotangent / denominator : scale * cotangent;
          const std::size_t row = mistake == Mistake::stale_output && i > 0 ? i - 1 : i;
          const T seen = o[row * dv + n], off = std::max(unit * std::abs(seen), least);
          dot += d_y * (seen + std::copysign(off, d_y));
        }
        const bool keeps_sum = replaced && mistake != Mistake::gradient_of_replaced_sum;
        e[i] = normalise && !keeps_sum && mistake != Mistake::no_denominator_gradient
                   ? -dot / denominator
                   : T(0);
        T along = 0;  // qhat . dqhat / (a s)
        for (std::size_t m = 0; m < d; ++m) {
          T sum = z[m] * e[i];
          for (std::size_t n = 0; n < dv; ++n) sum += S[m * dv + n] * G[i * dv + n];
          const T by_feature = slope(kernel, alpha, q[i * d + m]) * sum;
          dq[i * d + m] = lln ? alpha * by_feature : rate * by_feature;
          if (lln) out.gradient.alpha[h] += q[i * d + m] * by_feature;
          along += q[i * d + m] * by_feature;
        }
        if (!affine) continue;
        T by_constant = count * e[i];
        for (std::size_t n = 0; n < dv; ++n) by_constant += t[n] * G[i * dv + n];
        out.gradient.alpha[h] += s * along;
        out.gradient.score_scale[h] += alpha * along;
        out.gradient.constant[h] += by_constant;
      }

      std::vector<T> R(d * dv), r(d), sum_G(dv);
      std::size_t left = nq;
      for (std::size_t j = nk; j-- > 0;) {
        while (left > 0 && (!causal || left - 1 + nk - nq >= j)) {
          --left;
          for (std::size_t n = 0; n < dv; ++n) sum_G[n] += G[left * dv + n];
          for (std::size_t m = 0; m < d; ++m) {
            const T feature = phi(kernel, alpha, q[left * d + m]);
            r[m] += feature * e[left];
            for (std::size_t n = 0; n < dv; ++n) R[m * dv + n] += feature * G[left * dv + n];
          }
        }
        for (std::size_t n = 0; affine && n < dv; ++n) dv_out[j * dv + n] += b * sum_G[n];
        for (std::size_t m = 0; m < d; ++m) {
          T sum = r[m];
          for (std::size_t n = 0; n < dv; ++n) {
            sum += R[m * dv + n] * v[j * dv + n];
            dv_out[j * dv + n] += rate * (phi(kernel, beta, k[j * d + m]) * R[m * dv + n]);
          }
          const T by_feature = slope(kernel, beta, k[j * d + m]) * sum;
          dk[j * d + m] = lln ? beta * by_feature : rate * by_feature;
          if (lln) out.gradient.beta[g] += k[j * d + m] * by_feature;
        }
      }
      if (affine || kernel == Kernel::cosine) {
        normed_q.pull_back(dq, mistake, out.gradient.q.data() + q_head * nq * d);
        normed_k.pull_back(dk, mistake, out.gradient.k.data() + k_head * nk * d);
      } else {
        for (std::size_t n = 0; n < nq * d; ++n) out.gradient.q[q_head * nq * d + n] = dq[n];
        for (std::size_t n = 0; n < nk * d; ++n) out.gradient.k[k_head * nk * d + n] += dk[n];
      }
    }
  return out;
}

/// What a case's results may differ from.
template <class T>
class Judge {
 public:
  explicit Judge(const Case<T>& c)
      : m_oracle{c.problem,
                 c.settings,
                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                 exact(c.d_o)},
        m_o(m_oracle.forward()),
        m_gradient(m_oracle.backward()),
        m_magnitude(m_oracle.magnitudes()),
        m_counts(reference::rounding_counts(c.problem, c.settings)) {}

  /// Largest error of any output in units of its bound.
  long double worst_of_bound(const Recurrence<T>& found) const {
    const auto ratio = [](const std::vector<T>& x, const std::vector<long double>& expected,
                          const std::vector<long double>& size, double count) {
      return worst_ratio(x, expected, size, static_cast<long double>(count) * roundoff<T>);
    };
    const auto& g = m_gradient;
    const auto& m = m_magnitude;
    const auto& x = found.gradient;
    return std::max({ratio(found.o, m_o, m.o, m_counts.o), ratio(x.q, g.q, m.q, m_counts.q),
                     ratio(x.k, g.k, m.k, m_counts.k), ratio(x.v, g.v, m.v, m_counts.v),
                     ratio(x.alpha, g.alpha, m.alpha, m_counts.alpha),
                     ratio(x.beta, g.beta, m.beta, m_counts.beta),
                     ratio(x.constant, g.constant, m.constant, m_counts.constant),
                     ratio(x.score_scale, g.score_scale, m.score_scale, m_counts.score_scale),
                     ratio(x.diag_r, g.diag_r, m.diag_r, m_counts.diag_r),
                     ratio(x.diag_p, g.diag_p, m.diag_p, m_counts.diag_p)});
  }

 private:
  static std::vector<long double> exact(const std::vector<T>& x) { return {x.begin(), x.end()}; }

  Case<long double> m_oracle;
  std::vector<long double> m_o;
  reference::GradientSet<long double> m_gradient;
  reference::Magnitudes<long double> m_magnitude;
  reference::RoundingCounts m_counts;
};

/// A kernel and what else changes its path of roundings.
struct Form {
  const char* name;
  Kernel kernel;
  reference::Norm norm = reference::Norm::l2;
  bool noise = false;
  bool clamped = false;
  reference::Combine combine = reference::Combine::average;
  std::int64_t block = 0;
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

constexpr Form forms[] = {
    {"identity", Kernel::identity},
    {"elu", Kernel::elu},
    {"relu", Kernel::relu},
    {"quadratic", Kernel::quadratic},
    {"lln", Kernel::lln},
    {"affine_l2", Kernel::affine},
    {"affine_none", Kernel::affine, reference::Norm::none},
    {"affine_max", Kernel::affine, reference::Norm::max},
    {"affine_l2_noise", Kernel::affine, reference::Norm::l2, true},
    {"affine_l2_clamped", Kernel::affine, reference::Norm::l2, false, true},
    {"affine_none_noise_clamped", Kernel::affine, reference::Norm::none, true, true},
    {"affine_max_noise_clamped", Kernel::affine, reference::Norm::max, true, true},
    {"identity_noise_clamped", Kernel::identity, reference::Norm::l2, true, true},
    {"elu_noise", Kernel::elu, reference::Norm::l2, true},
    {"lln_noise", Kernel::lln, reference::Norm::l2, true},
    {"taylor", Kernel::taylor},
    {"taylor_noise_clamped", Kernel::taylor, reference::Norm::l2, true, true},
    {"cosine", Kernel::cosine},
    {"cosine_noise_clamped", Kernel::cosine, reference::Norm::l2, true, true},
    {"performer", Kernel::performer},
    {"performer_noise", Kernel::performer, reference::Norm::l2, true}};

/// Normalised always.
constexpr Form block_forms[] = {{"softmax", Kernel::softmax},
                                {"lln_diag", Kernel::lln_diag},
                                {"lln_diag_scale", Kernel::lln_diag, reference::Norm::l2, false,
                                 false, reference::Combine::scale, 16},
                                {"lln_diag_ratio", Kernel::lln_diag, reference::Norm::l2, false,
                                 false, reference::Combine::ratio, 7},
                                {"lln_diag_one_block", Kernel::lln_diag, reference::Norm::l2, false,
                                 false, reference::Combine::average, 100}};

class ReferenceBounds : public ::testing::TestWithParam<std::tuple<Form, bool, bool>> {
 protected:
  template <class T>
  Case<T> make(std::uint64_t seed) const {
    const auto [form, causal, normalise] = GetParam();
    Problem problem{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 37, .nk = 61, .d = 8, .dv = 5};
    if (form.kernel == Kernel::lln_diag && !causal) problem.nq = problem.nk;
    reference::Settings settings{.kernel = form.kernel,
                                 .causal = causal,
                                 .normalise = normalise,
                                 .scale = 0.3,
                                 .score_scale = 2.5,  // weights of both signs
                                 .norm = form.norm,
                                 .block = form.block,
                                 .combine = form.combine};
    if (form.noise) settings.dropout_p = 0.3, settings.seed = seed, settings.offset = 2;
    for (std::uint64_t attempt = 0; attempt < 100; ++attempt) {
      auto c = random_case<T>(problem, settings, seed + 1000 * attempt);
      if (!form.clamped || !normalise) return c;
      Case<double> wide{c.problem, c.settings, {}, {}};
      wide.tensors = {{c.tensors.q.begin(), c.tensors.q.end()},
                      {c.tensors.k.begin(), c.tensors.k.end()},
                      {c.tensors.v.begin(), c.tensors.v.end()}};
      // No rounding may bring a sum to the limit or to the other sign.
      if (clamp_some_rows(wide) < 2e-4 || sum_ratios(wide)[0] < 1e-3) continue;
      c.settings.least_normaliser = wide.settings.least_normaliser;
      return c;
    }
    throw std::runtime_error("no case has sums at a distance from the limit");
  }
};

std::string form_name(const ::testing::TestParamInfo<std::tuple<Form, bool, bool>>& suite) {
  return std::string(std::get<0>(suite.param).name) +
         (std::get<1>(suite.param) ? "_causal" : "_full") +
         (std::get<2>(suite.param) ? "_normalised" : "_plain");
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceBounds,
                         ::testing::Combine(::testing::ValuesIn(forms), ::testing::Bool(),
                                            ::testing::Bool()),
                         form_name);
INSTANTIATE_TEST_SUITE_P(Blocks, ReferenceBounds,
                         ::testing::Combine(::testing::ValuesIn(block_forms), ::testing::Bool(),
                                            ::testing::Values(true)),
                         form_name);

TEST_P(ReferenceBounds, HoldForARecurrence) {
  for (const std::uint64_t seed : {151u, 152u, 153u}) {
    const auto narrow = make<float>(seed);
    const auto worst = Judge(narrow).worst_of_bound(recurrence(narrow, Mistake::none));
    EXPECT_LE(worst, 1);
    // A bound that no error comes near would say nothing.
    EXPECT_GE(worst, 2e-4L);
    const auto wide = make<double>(seed);
    EXPECT_LE(Judge(wide).worst_of_bound(recurrence(wide, Mistake::none)), 1);
  }
}

TEST_P(ReferenceBounds, SeeMistakes) {
  const auto c = make<float>(161);
  std::vector<Mistake> mistakes{Mistake::last_key_dropped, Mistake::neighbour_value_column};
  if (c.settings.normalise)
    append(mistakes, {Mistake::no_denominator_gradient, Mistake::stale_output});
  switch (c.settings.kernel) {
    case Kernel::softmax:
      mistakes = {Mistake::no_gradient_of_block_sum, Mistake::no_scale_of_block_scores};
      if (c.settings.causal)
        append(mistakes, {Mistake::block_sees_its_future, Mistake::block_of_query_number});
      break;
    case Kernel::taylor:
      mistakes.push_back(Mistake::squares_without_half);
      break;
    case Kernel::cosine:
      mistakes.push_back(Mistake::no_gradient_of_norm);
      break;
    case Kernel::performer:
      mistakes.push_back(Mistake::no_gradient_of_square);
      break;
    default:
      break;
  }
  if (c.settings.kernel == Kernel::affine) {
    if (c.settings.normalise) mistakes.push_back(Mistake::no_count);
    if (c.settings.norm != reference::Norm::none) mistakes.push_back(Mistake::no_gradient_of_norm);
    if (c.settings.norm == reference::Norm::max) mistakes.push_back(Mistake::norm_of_last_row);
  }
  if (c.settings.least_normaliser) mistakes.push_back(Mistake::gradient_of_replaced_sum);
  if (c.settings.dropout_p != 0) mistakes.push_back(Mistake::cotangent_without_noise);
  if (c.settings.kernel == Kernel::lln_diag) {
    append(mistakes, {Mistake::no_gradient_of_block_sum, Mistake::no_scale_of_block_scores,
                      Mistake::uncombined_cotangent});
    if (c.problem.nk % (c.settings.block > 0 ? c.settings.block : c.problem.d) != 0)
      mistakes.push_back(Mistake::short_block_left_out);
    if (c.settings.causal) mistakes.push_back(Mistake::block_sees_its_future);
    if (c.settings.causal && c.settings.block < c.problem.nk)
      mistakes.push_back(Mistake::block_of_query_number);
    if (c.settings.combine != reference::Combine::average)
      mistakes.push_back(Mistake::factors_swapped);
    if (c.settings.combine == reference::Combine::ratio)
      mistakes.push_back(Mistake::ratio_without_block);
  }
  const Judge judge(c);
  for (const auto mistake : mistakes)
    EXPECT_GT(judge.worst_of_bound(recurrence(c, mistake)), 10)
        << "mistake " << static_cast<int>(mistake);
}

TEST_P(ReferenceBounds, EffectsOfARoundedOutputAreReached) {
  constexpr double unit = 0x1p-8, least = 0x1p-12;
  auto c = make<double>(191);
  keep_alive(c);
  const auto exact = recurrence(c, Mistake::none), off = recurrence(c, Mistake::none, unit, least);
  const auto effects =
      reference::rounded_output_effects(c.problem, c.settings, c.tensors, c.d_o, unit, least);
  const bool diag = c.settings.kernel == Kernel::lln_diag;
  for (std::size_t n = 0; !diag && n < exact.o.size(); ++n)
    EXPECT_TRUE(near(effects.o[n], std::max(unit * std::abs(exact.o[n]), least), 1e-10));
  EXPECT_EQ(*std::max_element(effects.v.begin(), effects.v.end()), 0);
  double largest = 0;
  const auto compare = [&](const std::vector<double>& a, const std::vector<double>& b,
                           const std::vector<double>& effect, bool reached) {
    for (std::size_t n = 0; n < a.size(); ++n) {
      const double change = std::abs(a[n] - b[n]), slack = 1e-10 * (std::abs(a[n]) + effect[n]);
      ASSERT_LE(change, effect[n] + slack) << n;
      if (reached) {
        ASSERT_GE(change, effect[n] - slack) << n;
      }
      largest = std::max(largest, effect[n]);
    }
  };
  const auto &x = exact.gradient, &y = off.gradient;
  // With features and slopes of one sign, rows do not cancel in a key, and with one row in nothing.
  const bool positive = c.settings.kernel == Kernel::elu || c.settings.kernel == Kernel::lln ||
                        c.settings.kernel == Kernel::relu;
  // But for the row that carries the gradient of the largest norm, a query's row is changed by its
  // own output alone.
  compare(
      x.q, y.q, effects.q,
      !diag && (c.settings.kernel != Kernel::affine || c.settings.norm != reference::Norm::max));
  compare(x.k, y.k, effects.k, positive);
  compare(x.alpha, y.alpha, effects.alpha, false);
  compare(x.beta, y.beta, effects.beta, false);
  compare(x.constant, y.constant, effects.constant, false);
  compare(x.score_scale, y.score_scale, effects.score_scale, false);
  EXPECT_EQ(largest > 0, c.settings.normalise);
}

TEST_P(ReferenceBounds, ReferenceInDoubleIsGoodToAFewRoundings) {
  const auto c = make<double>(171);
  const auto exact = [](const std::vector<double>& x) {
    return std::vector<long double>(x.begin(), x.end());
  };
  const Case<long double> oracle{c.problem,
                                 c.settings,
                                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                                 exact(c.d_o)};
  const auto gradient = c.backward();
  const auto expected = oracle.backward();
  const auto magnitude = oracle.magnitudes();
  const long double unit = roundoff<double>;
  // Independent of the extents: the sums are compensated.
  EXPECT_TRUE(within(c.forward(), oracle.forward(), magnitude.o, unit, 4));
  EXPECT_TRUE(within(gradient.q, expected.q, magnitude.q, unit, 4));
  EXPECT_TRUE(within(gradient.k, expected.k, magnitude.k, unit, 4));
  EXPECT_TRUE(within(gradient.v, expected.v, magnitude.v, unit, 4));
  EXPECT_TRUE(within(gradient.alpha, expected.alpha, magnitude.alpha, unit, 4));
  EXPECT_TRUE(within(gradient.beta, expected.beta, magnitude.beta, unit, 4));
  EXPECT_TRUE(within(gradient.constant, expected.constant, magnitude.constant, unit, 4));
  EXPECT_TRUE(within(gradient.score_scale, expected.score_scale, magnitude.score_scale, unit, 4));
  EXPECT_TRUE(within(gradient.diag_r, expected.diag_r, magnitude.diag_r, unit, 4));
  EXPECT_TRUE(within(gradient.diag_p, expected.diag_p, magnitude.diag_p, unit, 4));
}

TEST(ReferenceBoundsOfLargeExponents, DoubleLosesNothingToTheSizeOfTheExponents) {
  // Exponents up to 1000: a product rounded to double would cost exp 1000 roundings.
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 9, .nk = 11, .d = 3, .dv = 2};
  auto c = random_case<double>(problem, {.kernel = Kernel::lln}, 181);
  for (auto& x : c.tensors.q) x = 400 + x / 8;
  for (auto& x : c.tensors.k) x = 500 + x / 8;
  const auto exact = [](const std::vector<double>& x) {
    return std::vector<long double>(x.begin(), x.end());
  };
  const Case<long double> oracle{c.problem,
                                 c.settings,
                                 {exact(c.tensors.q), exact(c.tensors.k), exact(c.tensors.v)},
                                 exact(c.d_o)};
  const auto o = c.forward();
  const auto expected = oracle.forward();
  for (std::size_t n = 0; n < o.size(); ++n)
    EXPECT_TRUE(near(o[n], expected[n], 8 * roundoff<double>));
}

TEST(ReferenceBoundsByHand, Magnitudes) {
  // w = (4, -10): s = -6, sum |t| of each key: |2| + |2| and |4| + |6|, kappa = 14/6, o = (12 -
  // 50)/-6.
  const Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 2, .dv = 1},
                       {},
                       {{1, 2}, {2, 1, -4, -3}, {3, 5}},
                       {-1}};
  const double s = 6, kappa = 14 / s, o = 38 / s, of_o = (4 * 3 + 10 * 5) / s + kappa * o;
  const auto magnitude = c.magnitudes();
  EXPECT_TRUE(near(magnitude.o[0], of_o, 1e-14));
  EXPECT_TRUE(near(magnitude.v[0], (4 + 4 * kappa) / s, 1e-14));
  EXPECT_TRUE(near(magnitude.v[1], (10 + 10 * kappa) / s, 1e-14));
  const double e = o / s, e_error = (of_o + kappa * o) / s;
  const double first = (1 + kappa) * 3 / s + e + e_error,
               second = (1 + kappa) * 5 / s + e + e_error;
  EXPECT_TRUE(near(magnitude.q[0], 2 * first + 4 * second, 1e-12));
  EXPECT_TRUE(near(magnitude.q[1], 1 * first + 3 * second, 1e-12));
  EXPECT_TRUE(near(magnitude.k[0], first, 1e-12));
  EXPECT_TRUE(near(magnitude.k[3], 2 * second, 1e-12));
}

TEST(ReferenceBoundsByHand, ExponentsCountTheRoundingsOfTheirArgument) {
  const Problem one{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 1, .d = 1, .dv = 1};
  // chi = 1 + |2 * 3| + |0.5 * -8|, for the numerator and for the denominator.
  const Case<double> lln{
      one, {.kernel = Kernel::lln, .alpha = {2}, .beta = {0.5}}, {{3}, {-8}, {-7}}, {1}};
  EXPECT_TRUE(near(lln.magnitudes().o[0], 2 * 11 * 7, 1e-12));
  // chi = 1 + 3, the exponent of the smaller feature; above 0 there is none.
  Case<double> elu{one, {.kernel = Kernel::elu, .normalise = false}, {{-3}, {1}, {-7}}, {1}};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 4 * 2 * std::exp(-3.0) * 7, 1e-14));
  elu.tensors.k = {-5};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 6 * std::exp(-8.0) * 7, 1e-14));
  elu.tensors.q = elu.tensors.k = {1};
  EXPECT_TRUE(near(elu.magnitudes().o[0], 4 * 7, 1e-14));
}

TEST(ReferenceBoundsByHand, FloorBringsUnderflowIn) {
  // The second key has the relative weight e^-200, nothing in float, and 1e-30 with the floor.
  Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 1, .dv = 1},
                 {.kernel = Kernel::lln, .alpha = {1}, .beta = {1}},
                 {{0}, {0, -200}, {1, 2}},
                 {1}};
  const auto with = reference::magnitudes(c.problem, c.settings, c.tensors, c.d_o, 1e-30);
  EXPECT_LT(c.magnitudes().v[1], 1e-80);
  EXPECT_GE(with.v[1], 1e-30);
  EXPECT_LE(with.v[1], 1e-26);
  // elu: features e^-200 and 1.
  c.settings = {.kernel = Kernel::elu, .normalise = false};
  EXPECT_LT(c.magnitudes().v[1], 1e-80);
  const auto of_elu = reference::magnitudes(c.problem, c.settings, c.tensors, c.d_o, 1e-30);
  EXPECT_GE(of_elu.v[1], 1e-30);
  EXPECT_LE(of_elu.v[1], 1e-26);
}

/// Two queries and two keys of norms 1 and 2, a s = 2, w = (2, -4) - 1 and (-4, 8) - 1.
Case<double> affine_by_hand(reference::Norm norm) {
  Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 2, .nk = 2, .d = 1, .dv = 1},
                 {.kernel = Kernel::affine, .alpha = {4}},
                 {{1, -2}, {1, -2}, {3, 5}},
                 {1, 0}};
  c.settings.constant = {-1};
  c.settings.score_scale = 0.5;
  c.settings.norm = norm;
  c.settings.norm_eps = 0;
  return c;
}

TEST(ReferenceBoundsByHand, MagnitudesOfAffine) {
  // Row 0: s = 1 - 5 = -4, E(w) = (3, 5), kappa = 2, o = (3 - 25)/-4 = 5.5.
  auto c = affine_by_hand(reference::Norm::none);
  auto magnitude = c.magnitudes();
  const double of_o = (3 * 3 + 5 * 5) / 4.0 + 2 * 5.5;
  EXPECT_TRUE(near(magnitude.o[0], of_o, 1e-14));
  EXPECT_TRUE(near(magnitude.v[0], 3 * 3 / 4.0, 1e-14));
  const double e = 5.5 / 4, e_error = (of_o + 2 * 5.5) / 4;
  const double first = 3 / 4.0 + e, first_error = 2 * 3 / 4.0 + e_error;
  const double second = 5 / 4.0 + e, second_error = 2 * 5 / 4.0 + e_error;
  const double k0 = 2 * (first + first_error), k1 = 2 * (second + second_error);
  EXPECT_TRUE(near(magnitude.k[0], k0, 1e-13));
  EXPECT_TRUE(near(magnitude.k[1], k1, 1e-13));
  EXPECT_TRUE(near(magnitude.q[0], k0 + 2 * k1, 1e-13));
  EXPECT_TRUE(near(magnitude.alpha[0], (k0 / 2 + k1) / 2, 1e-13));
  EXPECT_TRUE(near(magnitude.score_scale[0], 4 * (k0 / 2 + k1), 1e-13));
  EXPECT_TRUE(near(magnitude.constant[0], first_error + second_error, 1e-13));
  // The second row has no cotangent; its output has kappa 14/2.
  EXPECT_EQ(magnitude.q[1], 0);

  // The sum -4 of two keys replaced by -16: kappa = 1, e = 0.
  c.settings.least_normaliser = 8;
  magnitude = c.magnitudes();
  EXPECT_TRUE(near(magnitude.o[0], (9 + 25) / 16.0 + 22 / 16.0, 1e-14));
  EXPECT_TRUE(near(magnitude.k[0], 2 * (3 + 3) / 16.0, 1e-14));
  EXPECT_TRUE(near(magnitude.constant[0], (3 + 5) / 16.0, 1e-14));
  // A sum above the limit by less than its error: kappa holds on both sides of it.
  c.settings.least_normaliser = 2.25;
  EXPECT_TRUE(near(c.magnitudes().o[0], (34 + 8 * 22 / 4.5) / 4.5, 1e-13));
}

TEST(ReferenceBoundsByHand, MagnitudesPulledBack) {
  // l2: xhat = +-1 and rho = 1, 2: E = (F + 1 * 1 * F)/rho.
  auto c = affine_by_hand(reference::Norm::l2);
  auto plain = c;
  plain.settings.norm = reference::Norm::none;
  plain.tensors.q = plain.tensors.k = {1, -1};
  auto magnitude = c.magnitudes();
  auto of_plain = plain.magnitudes();
  EXPECT_TRUE(near(magnitude.q[0], 2 * of_plain.q[0], 1e-13));
  EXPECT_TRUE(near(magnitude.k[0], 2 * of_plain.k[0], 1e-13));
  EXPECT_TRUE(near(magnitude.k[1], of_plain.k[1], 1e-13));
  EXPECT_TRUE(near(magnitude.alpha[0], of_plain.alpha[0], 1e-13));
  // max: rho = 2, row 1 has x_* and xhat = (1/2, -1).
  c.settings.norm = reference::Norm::max;
  plain.tensors.q = plain.tensors.k = {0.5, -1};
  magnitude = c.magnitudes();
  of_plain = plain.magnitudes();
  EXPECT_TRUE(near(magnitude.k[0], of_plain.k[0] / 2, 1e-13));
  EXPECT_TRUE(
      near(magnitude.k[1], (of_plain.k[1] + (0.5 * of_plain.k[0] + of_plain.k[1])) / 2, 1e-13));
  // Here the row without cotangent of its own carries that of the norm.
  EXPECT_TRUE(near(magnitude.q[1], 0.5 * of_plain.q[0] / 2, 1e-13));
}

TEST(ReferenceBoundsByHand, MagnitudesOfNoise) {
  Case<double> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 1, .d = 1, .dv = 1},
                 {.normalise = false},
                 {{2}, {3}, {5}},
                 {7}};
  c.settings.dropout_p = 0.5;
  c.settings.seed = 3;
  const auto normal = reference::normal_of<double>(3, 0, 0);
  const double f = std::abs(1 + 0.5 * normal.value), error = f + 0.5 * std::max(1.0, normal.radius);
  EXPECT_LE(std::abs(normal.value), normal.radius);
  const auto magnitude = c.magnitudes();
  EXPECT_TRUE(near(magnitude.o[0], 30 * f + 30 * error, 1e-12));
  EXPECT_TRUE(near(magnitude.v[0], 6 * 7 * (f + f + error), 1e-12));
  EXPECT_TRUE(near(magnitude.q[0], 3 * 5 * 7 * (f + f + error), 1e-12));
  // One weight of 6: kappa = 1, o = 5, E(o) = 10.
  c.settings.normalise = true;
  const double G = 7 * f / 6, G_error = 7 * (f + error) / 6, e = G * 5,
               e_error = (7 * f * (10 + 5) + 7 * error * 5) / 6;
  EXPECT_TRUE(near(c.magnitudes().o[0], 10 * f + 5 * error, 1e-12));
  EXPECT_TRUE(near(c.magnitudes().q[0], 3 * (G * 5 + e + G_error * 5 + e_error), 1e-12));
}

TEST(ReferenceBoundsByHand, RoundingCountsOfAffineAndNoise) {
  const Problem problem{
      .batch = 2, .heads = 6, .kv_heads = 3, .nq = 100, .nk = 200, .d = 8, .dv = 5};
  reference::Settings settings{.kernel = Kernel::quadratic};
  const auto plain = reference::rounding_counts(problem, 1);
  EXPECT_EQ(reference::rounding_counts(problem, settings).k, plain.k);
  settings.dropout_p = 0.1;
  EXPECT_EQ(reference::rounding_counts(problem, settings).k,
            plain.k + reference::noise_roundings + 3);
  // Features 8/2 + 4, pair = 2 * 8 + 5 + 2 = 23, p = 23 + 1 + 208 = 232, e = 3 * 232 + 3 + 5 = 704.
  settings = {.kernel = Kernel::affine};
  EXPECT_EQ(reference::feature_roundings(problem, settings), 8);
  const auto l2 = reference::rounding_counts(problem, settings);
  EXPECT_EQ(l2.o, 2 * 232 + 1);
  EXPECT_EQ(l2.v, 233 + 23 + 8 + 200);
  EXPECT_EQ(l2.q, 710 + 23 + 200 + (8 + 8 + 4));
  EXPECT_EQ(l2.alpha, 710 + 23 + 200 + 2 + 1600);
  EXPECT_EQ(l2.constant, 710 + 23 + 200 + 200);
  settings.norm = reference::Norm::max;
  EXPECT_EQ(reference::rounding_counts(problem, settings).q, l2.q + 100);
  EXPECT_EQ(reference::rounding_counts(problem, settings).k, l2.k + 200);
  settings.norm = reference::Norm::none;
  EXPECT_EQ(reference::rounding_counts(problem, settings).o, 2 * (7 + 1 + 208) + 1);
  EXPECT_THROW((void)reference::feature_roundings(Kernel::affine), InvalidArgument);
}

TEST(ReferenceBoundsByHand, RoundingCounts) {
  const Problem problem{
      .batch = 2, .heads = 6, .kv_heads = 3, .nq = 100, .nk = 200, .d = 8, .dv = 5};
  // p = 2 * 1 + 2 + 200 + 8 = 212, e = 3 * 212 + 3 + 5 = 644, dw = 650.
  const auto loop = reference::rounding_counts(problem, 1);
  EXPECT_EQ(loop.o, 425);
  EXPECT_EQ(loop.q, 650 + 4 + 200);
  EXPECT_EQ(loop.k, 650 + 4 + 200);
  EXPECT_EQ(loop.v, 213 + 4 + 8 + 200);
  EXPECT_EQ(loop.alpha, loop.q + 1 + 1600);
  EXPECT_EQ(loop.beta, loop.k + 1 + 3200);
  // Runs of 16: 200 terms have depth 16 + 13.
  EXPECT_EQ(reference::rounding_counts(problem, 1, 16).o, 2 * (4 + 29 + 8) + 1);
}

}  // namespace
