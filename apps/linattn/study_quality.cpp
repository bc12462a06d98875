// SPDX-License-Identifier: BSD-3-Clause
#include "study_quality.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <linattn/analysis/eigenvalue.hpp>
#include <linattn/io/tensor_file.hpp>
#include <optional>

#include "random.hpp"
#include "study_bench.hpp"
#include "study_methods.hpp"

namespace LinAttn::app {
namespace {

using ExecSpace = Kokkos::DefaultHostExecutionSpace;
using Numbers = std::vector<double>;
constexpr double none = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t most_tokens = 512;

const Numbers& sigmas() {
  static const Numbers list{0.45, 0.8, 1.0, 1.4, 1.8, 2.6};  // sigma_sm = sigma_q sigma_k
  return list;
}

struct Curve {
  std::string name, method;
  std::optional<MomentRule> rule{};
};

std::vector<Curve> curves_of(const std::vector<std::string>& methods) {
  std::vector<Curve> curves;
  for (const std::string& method : methods) {
    if (method != Lln::name && method != LlnDiag::name) {
      curves.push_back({method, method});
      continue;
    }
    curves.push_back({method + "_authors", method, MomentRule::authors});
    curves.push_back({method + "_table", method, MomentRule::table});
  }
  return curves;
}

/// q, k and values v (B,Hkv,N,Dv), with the matrices of exact attention (B H), row-major.
struct Input {
  DiagnosedTensors t;
  Numbers v;
  std::vector<Numbers> exact{};
};

std::vector<Numbers> exact_matrices(const DiagnosedTensors& t) {
  const Problem& p = t.p;
  const auto n = static_cast<std::size_t>(p.nq), d = static_cast<std::size_t>(p.d);
  std::vector<Numbers> matrices;
  for (std::int64_t b = 0; b < p.batch; ++b)
    for (std::int64_t h = 0; h < p.heads; ++h) {
      const double* const q = t.q.data() + static_cast<std::size_t>(b * p.heads + h) * n * d;
      const double* const k = t.k.data() + static_cast<std::size_t>(b * p.kv_heads + h / p.group()) * n * d;
      Numbers matrix(n * n);
      for (std::size_t i = 0; i < n; ++i) {
        double* const row = matrix.data() + i * n;
        for (std::size_t j = 0; j < n; ++j) {
          for (std::size_t c = 0; c < d; ++c) row[j] += q[i * d + c] * k[j * d + c];
          row[j] /= std::sqrt(static_cast<double>(d));
        }
        const double largest = *std::max_element(row, row + n);
        double sum = 0;
        for (std::size_t j = 0; j < n; ++j) sum += row[j] = std::exp(row[j] - largest);
        for (std::size_t j = 0; j < n; ++j) row[j] /= sum;
      }
      matrices.push_back(std::move(matrix));
    }
  return matrices;
}

Input gaussian(std::uint64_t seed, std::uint64_t stream, std::int64_t draws, std::int64_t n, std::int64_t d,
               double sigma_sm) {
  Input in{{{1, draws, draws, n, n, d, d}, {}, {}}, {}};
  const double sigma = std::sqrt(sigma_sm);
  const CounterRandom of_q(seed, 3 * stream), of_k(seed, 3 * stream + 1), of_v(seed, 3 * stream + 2);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(draws * n * d); ++i) {
    in.t.q.push_back(sigma * of_q.normal(i));
    in.t.k.push_back(sigma * of_k.normal(i));
    in.v.push_back(of_v.normal(i));
  }
  return in;
}

/// The first tokens of (B,H,N,D).
Numbers first_tokens(const Numbers& x, std::int64_t n, std::int64_t d, std::int64_t tokens) {
  Numbers first;
  for (std::size_t begin = 0; begin < x.size(); begin += static_cast<std::size_t>(n * d))
    first.insert(first.end(), x.begin() + static_cast<std::ptrdiff_t>(begin),
                 x.begin() + static_cast<std::ptrdiff_t>(begin) + tokens * d);
  return first;
}

Input read_real(const std::string& name) {
  const io::TensorFile file = io::TensorFile::read(name);
  require_not_packed(file);
  const Problem p = file.problem();
  if (p.nq != p.nk || file.has("/inputs/key_mask"))
    throw InvalidArgument(detail::message(name, ": expected as many queries as keys and no key_mask, found Nq = ", p.nq,
                                          ", Nk = ", p.nk, file.has("/inputs/key_mask") ? " and a mask" : ""));
  const std::int64_t tokens = std::min(p.nq, most_tokens);
  Input in{read_tensors(file), first_tokens(file.v().as<double>(), p.nk, p.dv, tokens)};
  in.t.q = first_tokens(in.t.q, p.nq, p.d, tokens);
  in.t.k = first_tokens(in.t.k, p.nk, p.d, tokens);
  in.t.p.nq = in.t.p.nk = tokens;
  return in;
}

/// The matrices of a method: its output for v = 1. \throws InvalidArgument if it refuses
std::vector<Numbers> matrices_of(const Curve& curve, const DiagnosedTensors& t) {
  using Run = StudyRun<ExecSpace, double>;
  const ExecSpace exec;
  Problem p = t.p;
  p.dv = p.nk;
  MethodSettings settings{.rates = {}, .scale = 1 / static_cast<double>(p.nk)};
  if (curve.rule) settings.rates = matched_rates(t, *curve.rule, true);
  const auto run = make_run<ExecSpace, double>(curve.method, exec, p, false, settings);
  const auto tensor = [](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
    return Run::Tensor("LinAttn::app::quality", static_cast<std::size_t>(b), static_cast<std::size_t>(h),
                       static_cast<std::size_t>(n), static_cast<std::size_t>(d));
  };
  const Run::Tensors in{tensor(p.batch, p.heads, p.nq, p.d), tensor(p.batch, p.kv_heads, p.nk, p.d),
                        tensor(p.batch, p.kv_heads, p.nk, p.nk)};
  std::copy(t.q.begin(), t.q.end(), in.q.data());
  std::copy(t.k.begin(), t.k.end(), in.k.data());
  const auto n = static_cast<std::size_t>(p.nk);
  for (std::size_t row = 0; row < static_cast<std::size_t>(p.batch * p.kv_heads) * n; ++row)
    in.v.data()[row * n + row % n] = 1;
  const auto o = tensor(p.batch, p.heads, p.nq, p.nk);
  run->keep();
  const Run::Arena workspace("LinAttn::app::workspace", run->workspace_bytes(Pass::forward));
  run->forward(in, o, workspace);
  detail::fence(exec, "LinAttn::app::quality");
  std::vector<Numbers> matrices;
  for (std::size_t m = 0; m < static_cast<std::size_t>(p.batch * p.heads); ++m)
    matrices.emplace_back(o.data() + m * n * n, o.data() + (m + 1) * n * n);
  return matrices;
}

struct Quality {
  double output_error = none, entropy = none, spectral_gap = none, logvar = none;
  bool negative = false, stochastic = true;
};

/// |(A - P) v| / |P v| in the Frobenius norm.
double output_error(const Numbers& a, const Numbers& exact, const double* v, std::size_t n, std::size_t dv) {
  double apart = 0, size = 0;
  Numbers difference(dv), output(dv);
  for (std::size_t i = 0; i < n; ++i) {
    std::fill(difference.begin(), difference.end(), 0.0);
    std::fill(output.begin(), output.end(), 0.0);
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t c = 0; c < dv; ++c) {
        difference[c] += (a[i * n + j] - exact[i * n + j]) * v[j * dv + c];
        output[c] += exact[i * n + j] * v[j * dv + c];
      }
    for (std::size_t c = 0; c < dv; ++c) {
      apart += difference[c] * difference[c];
      size += output[c] * output[c];
    }
  }
  return std::sqrt(apart / size);
}

Quality quality_of(const Numbers& a, std::size_t n) {
  Quality q;
  double entropy = 0, sum_of_logs = 0, entries = 0;
  for (std::size_t i = 0; i < n; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const double x = a[i * n + j];
      sum += x;
      if (!(x >= 0)) q.negative = true;
      if (!(x > 0)) continue;
      entropy -= x * std::log2(x);
      sum_of_logs += std::log(x);
      ++entries;
    }
    if (!(std::abs(sum - 1) <= 1e-6)) q.stochastic = false;
  }
  if (!q.negative && entries > 0) {
    if (q.stochastic) q.entropy = entropy / static_cast<double>(n);
    const double mean = sum_of_logs / entries;
    double squares = 0;
    for (const double x : a)
      if (x > 0) squares += (std::log(x) - mean) * (std::log(x) - mean);
    q.logvar = squares / entries;
  }
  if (q.stochastic) {
    const auto order = static_cast<std::int64_t>(n);
    const SecondEigenvalue second = second_eigenvalue(HostMatrix(a.data(), {order, order}, {order, 1}));
    q.spectral_gap = 1 - second.modulus;
  }
  return q;
}

/// Enters the instruments of all heads from `first` on.
void measure(const Curve& curve, Input& in, const std::string& group, const std::vector<std::int64_t>& extents,
             std::size_t first, StudyData& data) {
  const Problem& p = in.t.p;
  const std::string path = group + "/" + curve.name + "/";
  std::string absent;
  std::vector<Numbers> matrices;
  try {
    matrices = matrices_of(curve, in.t);
  } catch (const InvalidArgument& error) {
    absent = error.what();
  }
  if (in.exact.empty()) in.exact = exact_matrices(in.t);
  bool negative = false, stochastic = true;
  for (std::size_t m = 0; m < matrices.size(); ++m) {
    throw_if_interrupted();
    const auto n = static_cast<std::size_t>(p.nk), dv = static_cast<std::size_t>(p.dv);
    const std::size_t heads = static_cast<std::size_t>(p.heads);
    const std::size_t kv_head = m / heads * static_cast<std::size_t>(p.kv_heads) +
                                m % heads / static_cast<std::size_t>(p.group());
    Quality q = quality_of(matrices[m], n);
    q.output_error = output_error(matrices[m], in.exact[m], in.v.data() + kv_head * n * dv, n, dv);
    negative = negative || q.negative;
    stochastic = stochastic && q.stochastic;
    data.dataset(path + "output_error", extents).values[first + m] = q.output_error;
    data.dataset(path + "entropy", extents).values[first + m] = q.entropy;
    data.dataset(path + "spectral_gap", extents).values[first + m] = q.spectral_gap;
    data.dataset(path + "logvar", extents).values[first + m] = q.logvar;
  }
  if (matrices.empty())
    for (const std::string& name : quality_instruments()) data.dataset(path + name, extents);
  if (negative) absent = "entropy and logvar: the matrix has entries below 0";
  if (!stochastic)
    absent += (absent.empty() ? "entropy" : "; entropy") + std::string(" and spectral_gap: rows do not sum to 1");
  if (!absent.empty()) data.attribute(group + "/" + curve.name, "absent", absent);
}

}  // namespace

const std::vector<std::string>& quality_instruments() {
  static const std::vector<std::string> names{"output_error", "entropy", "spectral_gap", "logvar"};
  return names;
}

void require_real(const std::string& name) { read_real(name); }

std::vector<std::string> quality_names(const std::vector<std::string>& methods) {
  std::vector<std::string> names;
  for (const Curve& curve : curves_of(methods)) names.push_back(curve.name);
  return names;
}

void measure_quality(const QualityOptions& options, StudyData& data,
                     const std::function<void(const std::string&, double)>& done) {
  const std::vector<Curve> curves = curves_of(options.methods);
  const std::int64_t n = options.quick ? 96 : most_tokens, d = options.quick ? 32 : 64, draws = 2;
  const auto points = static_cast<std::int64_t>(sigmas().size());
  const double parts = static_cast<double>(curves.size()) * static_cast<double>(sigmas().size() + 1);
  double part = 0;
  const auto is_done = [&](const std::string& path, std::int64_t count, std::size_t at) {
    return data.dataset(path, {count}).values[at] == 1;
  };
  data.set("quality/gaussian/sigma_sm", {points}, sigmas());
  data.attribute("quality/gaussian", "tokens", n);
  data.attribute("quality/gaussian", "head_dimension", d);
  for (std::size_t s = 0; s < sigmas().size(); ++s) {
    std::optional<Input> in;
    for (const Curve& curve : curves) {
      ++part;
      const std::string path = "quality/gaussian/" + curve.name + "/done";
      if (is_done(path, points, s)) continue;
      if (!in) in = gaussian(options.seed, s, draws, n, d, sigmas()[s]);
      measure(curve, *in, "quality/gaussian", {points, draws}, s * static_cast<std::size_t>(draws), data);
      data.dataset(path, {points}).values[s] = 1;
      done(detail::message("quality, sigma_sm ", sigmas()[s], ", ", curve.name), part / parts);
    }
  }
  if (options.real.empty()) return;
  Input in = read_real(options.real);
  data.attribute("quality/real", "file", options.real);
  data.attribute("quality/real", "tokens", in.t.p.nk);
  data.attribute("quality/real", "head_dimension", in.t.p.d);
  for (const Curve& curve : curves) {
    ++part;
    const std::string path = "quality/real/" + curve.name + "/done";
    if (is_done(path, 1, 0)) continue;
    measure(curve, in, "quality/real", {in.t.p.batch, in.t.p.heads}, 0, data);
    data.dataset(path, {1}).values[0] = 1;
    done("quality, " + options.real + ", " + curve.name, part / parts);
  }
}

}  // namespace LinAttn::app
