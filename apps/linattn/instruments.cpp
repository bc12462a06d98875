// SPDX-License-Identifier: BSD-3-Clause
#include "instruments.hpp"

#include <algorithm>
#include <cmath>
#include <linattn/analysis/diagnose.hpp>
#include <linattn/variants.hpp>

#include "text.hpp"

namespace LinAttn::app {
namespace {

using ExecSpace = Kokkos::DefaultHostExecutionSpace;
using Values = Kokkos::View<double*, Kokkos::HostSpace>;

TensorRef<const double, 4, ExecSpace> tensor(const std::vector<double>& x, std::int64_t b, std::int64_t h,
                                             std::int64_t n, std::int64_t d) {
  return {x.data(), {b, h, n, d}, {h * n * d, n * d, d, 1}};
}

Values view_of(const std::vector<double>& values) {
  Values view("LinAttn::app::rates", values.size());
  std::copy(values.begin(), values.end(), view.data());
  return view;
}

}  // namespace

DiagnosedTensors read_tensors(const io::TensorFile& file) {
  DiagnosedTensors t{file.problem(), file.q().as<double>(), file.k().as<double>(), {}};
  if (const io::Array* mask = file.find("/inputs/key_mask")) t.key_mask = mask->as<std::uint8_t>();
  return t;
}

void require_not_packed(const io::TensorFile& file) {
  if (file.packed())
    throw InvalidArgument(detail::message(file.file().string(),
                                          ": /inputs/cu_seqlens_q: expected no packed sequences, found ",
                                          file.members()));
}

const std::vector<std::string>& diagnosed_kernels() {
  static const std::vector<std::string> names{SoftmaxKernel::name, Lln::name, Quadratic::name, Relu::name, Elu::name};
  return names;
}

void require_diagnosed_kernel(const std::string& name) {
  const auto& names = diagnosed_kernels();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw InvalidArgument("expected one of " + join(names) + ", found '" + name + "'");
}

HostDeviations measured_deviations(const DiagnosedTensors& t, const MomentOptions& options) {
  const Problem& p = t.p;
  MomentInputs<ExecSpace, double> in{.q = tensor(t.q, p.batch, p.heads, p.nq, p.d),
                                     .k = tensor(t.k, p.batch, p.kv_heads, p.nk, p.d)};
  if (!t.key_mask.empty()) in.key_mask = {t.key_mask.data(), {p.batch, p.nk}, {p.nk, 1}};
  if (!t.query_mask().empty()) in.query_mask = {t.query_mask().data(), {p.batch, p.nq}, {p.nq, 1}};
  const std::vector<double> values(static_cast<std::size_t>(p.kv_heads));
  HostDeviations m{values, values};
  const auto place = [&](std::vector<double>& x) {
    return TensorRef<double, 1, ExecSpace>(x.data(), {p.kv_heads}, {1});
  };
  Moments<ExecSpace> to{.sigma_q = place(m.sigma_q), .sigma_k = place(m.sigma_k)};
  if (options.cross != CrossTerm::none) {
    m.cross = values;
    to.cross = place(m.cross);
  }
  measure_moments<double>(ExecSpace(), in, to, options);
  return m;
}

LlnRates rates_of_deviations(const HostDeviations& from, std::int64_t group, std::int64_t d,
                             const MomentOptions& options) {
  const auto heads = static_cast<std::int64_t>(from.sigma_q.size());
  const auto read = [heads](const std::vector<double>& x) {
    return TensorRef<const double, 1, ExecSpace>(x.data(), {heads}, {1});
  };
  LlnRates rates{std::vector<double>(static_cast<std::size_t>(heads * group)),
                 std::vector<double>(static_cast<std::size_t>(heads))};
  ConstMoments<ExecSpace> moments{.sigma_q = read(from.sigma_q), .sigma_k = read(from.sigma_k)};
  if (!from.cross.empty()) moments.cross = read(from.cross);
  const ExecSpace exec;
  match_rates(exec, moments, {{rates.alpha.data(), {heads * group}, {1}}, {rates.beta.data(), {heads}, {1}}}, d,
              options);
  detail::fence(exec, "LinAttn::app::rates");
  return rates;
}

LlnRates matched_rates(const DiagnosedTensors& t, MomentRule rule, bool per_head) {
  MomentOptions options{.scope = per_head ? MomentScope::head : MomentScope::tensor, .rule = rule};
  if (rule == MomentRule::fit) options.line = fit_line(std::max<std::int64_t>(1, t.p.d));
  return rates_of_deviations(measured_deviations(t, options), t.p.group(), t.p.d, options);
}

Diagnostics run_instruments(const std::string& kernel, const LlnRates& rates, const DiagnosedTensors& t,
                            const DiagnoseOptions& options) {
  const Problem& p = t.p;
  DiagnoseInputs<ExecSpace, double> in{.q = tensor(t.q, p.batch, p.heads, p.nq, p.d),
                                       .k = tensor(t.k, p.batch, p.kv_heads, p.nk, p.d)};
  if (!t.key_mask.empty()) in.key_mask = {t.key_mask.data(), {p.batch, p.nk}, {p.nk, 1}};
  const ExecSpace exec;
  if (kernel == SoftmaxKernel::name) return diagnose<double>(exec, SoftmaxKernel{}, in, options);
  if (kernel == Quadratic::name) return diagnose<double>(exec, Quadratic{}, in, options);
  if (kernel == Relu::name) return diagnose<double>(exec, Relu{}, in, options);
  if (kernel == Elu::name) return diagnose<double>(exec, Elu{}, in, options);
  const Values alpha = view_of(rates.alpha), beta = view_of(rates.beta);
  return diagnose<double>(exec, Lln{alpha, beta}, in, options);
}

const std::vector<NamedInstrument>& instruments() {
  using H = HeadDiagnostics;
  static const std::vector<NamedInstrument> list{
      {"entropy", &H::entropy, &H::entropy_error},
      {"entropy_biased", &H::entropy_biased, nullptr},
      {"entropy_unbiased", &H::entropy_unbiased, &H::entropy_unbiased_error},
      {"spectral_gap", &H::spectral_gap, nullptr},
      {"variance", &H::variance, &H::variance_error},
      {"relative_variance", &H::relative_variance, &H::relative_variance_error},
      {"log_mean", &H::log_mean, &H::log_mean_error},
      {"logvar", &H::logvar, &H::logvar_error},
      {"logvar_within", &H::logvar_within, &H::logvar_within_error},
      {"log_skewness", &H::log_skewness, nullptr},
      {"log_kurtosis", &H::log_kurtosis, nullptr},
      {"temperature", &H::temperature, nullptr}};
  return list;
}

HeadDiagnostics mean_of(const Diagnostics& d) {
  HeadDiagnostics mean;
  const auto count = static_cast<double>(d.values.size());
  if (d.values.empty()) return mean;
  for (const NamedInstrument& i : instruments()) {
    mean.*i.value = 0;
    double squares = 0;
    for (const HeadDiagnostics& head : d.values) {
      mean.*i.value += head.*i.value / count;
      if (i.error) squares += head.*i.error * (head.*i.error);
    }
    if (i.error) mean.*i.error = std::sqrt(squares) / count;
  }
  for (const HeadDiagnostics& head : d.values) {
    mean.rows += head.rows;
    mean.empty_rows += head.empty_rows;
    mean.zero_entries += head.zero_entries;
    mean.sampled = mean.sampled || head.sampled;
    if (mean.absent.empty()) mean.absent = head.absent;
  }
  return mean;
}

Json to_json(const HeadDiagnostics& head) {
  Json json = Json::object();
  const auto finite = [](double x) { return std::isfinite(x) ? Json(x) : Json(); };
  for (const NamedInstrument& i : instruments()) {
    json[i.name] = finite(head.*i.value);
    if (i.error && head.sampled) json[std::string(i.name) + "_error"] = finite(head.*i.error);
  }
  json["rows"] = head.rows;
  json["empty_rows"] = head.empty_rows;
  json["zero_entries"] = head.zero_entries;
  json["sampled"] = head.sampled;
  if (!head.absent.empty()) json["absent"] = head.absent;
  return json;
}

}  // namespace LinAttn::app
