// SPDX-License-Identifier: BSD-3-Clause
#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <linattn/analysis/moments.hpp>
#include <linattn/reference/analysis.hpp>
#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>

#include "diagnosis.hpp"
#include "rounding.hpp"
#include "text.hpp"
#include "variant_settings.hpp"

namespace LinAttn::app {
namespace {

bool is_known_to_reference(const std::string& variant) {
  try {
    reference::kernel_from_name(variant);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

void set_parameter(ParameterInfo::Role role, const std::vector<double>& per_head,
                   reference::Settings& settings) {
  switch (role) {
    case ParameterInfo::Role::query:
      settings.alpha = per_head;
      break;
    case ParameterInfo::Role::key:
      settings.beta = per_head;
      break;
    case ParameterInfo::Role::constant:
      settings.constant = per_head;
      break;
    case ParameterInfo::Role::scale:
      if (!per_head.empty()) settings.score_scale = per_head[0];  // one for all
  }
}

reference::Combine combine_of(const std::string& name) {
  if (name == "scale") return reference::Combine::scale;
  return name == "ratio" ? reference::Combine::ratio : reference::Combine::average;
}

reference::Norm norm_of(const std::string& name) {
  if (name == "l2") return reference::Norm::l2;
  return name == "max" ? reference::Norm::max : reference::Norm::none;
}

/// Deviations of a job by the plain sums of the reference, and the rates that its rule makes of them.
HostMoments moments_of(const Job& job) {
  const Problem& p = job.problem;
  const bool each = matches_each_head(job.settings);
  const auto mask = job.key_mask != nullptr ? job.key_mask->as<std::uint8_t>() : std::vector<std::uint8_t>();
  const reference::Tensors<double> tensors{job.q->as<double>(), job.k->as<double>(), {}};
  const auto found =
      reference::moments(p, tensors, each ? reference::MomentScope::head : reference::MomentScope::tensor, mask,
                         p.nq == p.nk ? mask : std::vector<std::uint8_t>());
  HostMoments moments{{"sigma_q", {}}, {"sigma_k", {}}};
  for (std::int64_t g = 0; g < p.kv_heads; ++g) {
    const auto at = static_cast<std::size_t>(each ? g : 0);
    moments["sigma_q"].push_back(found.sigma_q[at]);
    moments["sigma_k"].push_back(found.sigma_k[at]);
  }
  if (!matches_moments(job.settings)) {
    for (const ParameterInfo& parameter : variant_info(job.variant).parameters)
      if (parameter.name == "alpha" || parameter.name == "beta")
        moments[parameter.name] = job.per_head(parameter);
    return moments;
  }
  const MomentOptions options = moment_options_of(job);
  if (options.rule == MomentRule::authors) {
    moments["alpha"] = found.alpha;
    moments["beta"] = found.beta;
    return moments;
  }
  // Of the other rules the tables and the fitted line are the library's own: what is independent of it here are the
  // deviations. The tables are checked by the tests of the rules.
  const detail::RateRule rule = detail::bind_rule(options.rule, p.d, options.line, options.rate);
  moments["alpha"] = moments["beta"] = {};
  for (std::int64_t h = 0; h < p.heads; ++h) {
    const auto g = static_cast<std::size_t>(h / p.group());
    const detail::MatchedRates rates(rule, moments["sigma_q"][g], moments["sigma_k"][g], 0);
    moments["alpha"].push_back(rates.t / rates.sigma_q);
    if (h % p.group() == 0) moments["beta"].push_back(rates.t / rates.sigma_k);
  }
  return moments;
}

/// A job's settings in the reference's terms. Centred values are a matter of rounding, which it
/// does not have, and what is merely checked it leaves as it is.
reference::Settings settings_of(const Job& job) {
  const Settings& given = job.settings;
  reference::Settings settings{.kernel = reference::kernel_from_name(job.variant),
                               .causal = job.causal(),
                               .normalise = job.normalise(),
                               .scale = job.output_scale()};
  for (const ParameterInfo& parameter : variant_info(job.variant).parameters)
    set_parameter(parameter.role, job.per_head(parameter), settings);
  if (matches_moments(given)) {
    const HostMoments moments = moments_of(job);
    settings.alpha = moments.at("alpha");
    settings.beta = moments.at("beta");
  }
  if (reference::detail::is_of_scores(settings.kernel)) settings.score_scale = given.real("scale", 1);
  settings.norm = norm_of(given.text("qk_norm", "l2"));
  settings.norm_eps = given.real("norm_eps", settings.norm_eps);
  if (given.text("small_g", "check") == "clamp") settings.least_normaliser = given.real("g_min", 0);
  settings.dropout_p = given.real("dropout_p", 0);
  settings.seed = given.counter("seed", 0);
  settings.offset = given.counter("offset", 0);
  settings.block = given.integer("block", 0);
  settings.combine = combine_of(given.text("combine", "average"));
  if (job.diag_r != nullptr) settings.diag_r = job.diag_r->as<double>();
  if (job.diag_p != nullptr) settings.diag_p = job.diag_p->as<double>();
  if (job.projection != nullptr) settings.projection = job.projection->as<double>();
  if (job.key_mask != nullptr) settings.key_mask = job.key_mask->as<std::uint8_t>();
  if (job.cu_seqlens_q != nullptr) {
    settings.cu_seqlens_q = job.cu_seqlens_q->as<std::int64_t>();
    settings.cu_seqlens_k = job.cu_seqlens_k->as<std::int64_t>();
  }
  return settings;
}

/// A job in the reference's terms. \throws InvalidArgument if there is an obstacle
struct DenseJob {
  reference::Settings settings;
  reference::Tensors<double> tensors;
  std::vector<double> cotangent;

  explicit DenseJob(const Job& job) {
    if (const std::string obstacle = reference_obstacle(job); !obstacle.empty())
      throw InvalidArgument(obstacle);
    settings = settings_of(job);
    tensors = {job.q->as<double>(), job.k->as<double>(), job.v->as<double>()};
    if (job.d_o != nullptr) cotangent = job.d_o->as<double>();
  }
};

io::Array o_of(const Job& job, const std::vector<double>& o) {
  const Problem& p = job.problem;
  return io::Array(o, {p.batch, p.heads, p.nq, p.dv});
}

/// Values less the first that is visible in their sequence, as center_v takes them.
std::vector<double> centred_values(const Job& job, const DenseJob& dense) {
  const Problem& p = job.problem;
  const auto& mask = dense.settings.key_mask;
  const auto& borders = dense.settings.cu_seqlens_k;
  std::vector<double> values = dense.tensors.v;
  for (std::int64_t b = 0; b < p.batch; ++b)
    for (std::int64_t h = 0; h < p.kv_heads; ++h)
      for (std::int64_t s = 0; s < (p.packed() ? p.members : 1); ++s) {
        const std::int64_t begin = p.packed() ? borders[static_cast<std::size_t>(s)] : 0;
        const std::int64_t end = p.packed() ? borders[static_cast<std::size_t>(s + 1)] : p.nk;
        std::int64_t first = begin;
        while (first < end && !mask.empty() &&
               mask[static_cast<std::size_t>(b * p.nk + first)] == 0)
          ++first;
        const auto row = [&](std::int64_t j) {
          return static_cast<std::size_t>(((b * p.kv_heads + h) * p.nk + j) * p.dv);
        };
        for (std::int64_t j = begin; first < end && j < end; ++j)
          for (std::size_t c = 0; c < static_cast<std::size_t>(p.dv); ++c)
            values[row(j) + c] -= dense.tensors.v[row(first) + c];
      }
  return values;
}

/// What has members q, k, v and those of parameters in the order of compute().
template <class Set>
std::vector<NamedArray> gradients_of(const Job& job, const Set& d) {
  std::vector<NamedArray> gradients{{"q", io::Array(d.q, job.q->extents())},
                                    {"k", io::Array(d.k, job.k->extents())},
                                    {"v", io::Array(d.v, job.v->extents())}};
  for (const ParameterInfo& parameter : variant_info(job.variant).parameters)
    gradients.push_back(
        {parameter.name, io::Array(parameter.pick(d.alpha, d.beta, d.constant, d.score_scale),
                                   {parameter.heads(job.problem)})});
  const std::vector<std::int64_t> factors{job.problem.heads, job.problem.dv};
  if (job.uses_diag_r()) gradients.push_back({"diag_r", io::Array(d.diag_r, factors)});
  if (job.uses_diag_p()) gradients.push_back({"diag_p", io::Array(d.diag_p, factors)});
  return gradients;
}

/// What also has a member o: o alone where there is no cotangent.
template <class Set>
Results results_of(const Job& job, const Set& set) {
  Results results{o_of(job, set.o)};
  if (job.d_o != nullptr) results.gradients = gradients_of(job, set);
  return results;
}

std::vector<NamedArray> diagnostics_of(const Job& job, const DenseJob& dense) {
  std::map<std::string, std::vector<double>> values;
  for (const auto& matrix :
       reference::attention_matrices(job.problem, dense.settings, dense.tensors)) {
    const auto found = reference::diagnostics(matrix, job.causal());
    values["entropy"].push_back(found.entropy);
    values["entropy_biased"].push_back(found.entropy_biased);
    values["entropy_unbiased"].push_back(found.entropy_unbiased);
    values["spectral_gap"].push_back(found.spectral_gap);
    values["variance"].push_back(found.variance);
    values["logvar"].push_back(found.logvar);
    values["logvar_within"].push_back(found.logvar_within);
  }
  std::vector<NamedArray> result;
  for (const char* name : diagnostic_names)
    result.push_back({name, io::Array(values[name], {job.problem.batch, job.problem.heads})});
  return result;
}

Results reference_of(const Job& job, const DenseJob& dense) {
  Results results{o_of(job, reference::forward(job.problem, dense.settings, dense.tensors))};
  if (matches_moments(job.settings) || job.wants_moments) results.moments = moments_of(job);
  if (job.wants_diagnostics) results.diagnostics = diagnostics_of(job, dense);
  if (job.d_o != nullptr)
    results.gradients = gradients_of(
        job, reference::backward(job.problem, dense.settings, dense.tensors, dense.cotangent));
  return results;
}

/// The reference, and what effects_of(dense job) says of each element; a missing cotangent is 0.
template <class EffectsOf>
RoundedReference with_effects(const Job& job, const EffectsOf& effects_of) {
  DenseJob dense(job);
  const Results values = reference_of(job, dense);
  if (job.d_o == nullptr) dense.cotangent.assign(static_cast<std::size_t>(values.o.size()), 0);
  Results effects = results_of(job, effects_of(dense));
  effects.moments = values.moments;
  if (effects.moments)
    for (auto& [name, numbers] : *effects.moments) std::fill(numbers.begin(), numbers.end(), 0.0);
  return {values, effects};
}

}  // namespace

double reference_work(const Problem& p) noexcept {
  return static_cast<double>(p.batch) * static_cast<double>(p.heads) * static_cast<double>(p.nq) *
         static_cast<double>(p.nk) * static_cast<double>(p.d + p.dv);
}

std::string reference_obstacle(const std::string& variant, const Problem& problem) {
  if (!is_known_to_reference(variant))
    return "the dense reference does not know variant " + variant;
  const double work = reference_work(problem);
  if (work > largest_reference_work)
    return detail::message("the dense reference takes B H Nq Nk (D + Dv) up to ",
                           number(largest_reference_work), ", found ", number(work, 3), " for ",
                           problem.to_string());
  return {};
}

std::string reference_obstacle(const Job& job) {
  if (job.state || job.d_state) return "the dense reference does not know states";
  if (job.wants_diagnostics && std::max(job.problem.nq, job.problem.nk) > largest_reference_matrix)
    return detail::message("the dense reference of diagnostics takes up to ",
                           largest_reference_matrix, " queries and keys, found ",
                           job.problem.to_string());
  return reference_obstacle(job.variant, job.problem);
}

Results compute_reference(const Job& job) { return reference_of(job, DenseJob(job)); }

RoundedReference compute_rounded_reference(const Job& job, Scalar scalar) {
  return with_effects(job, [&](const DenseJob& dense) {
    const double unit = scalar == Scalar::f16 ? 0x1p-11 : 0x1p-8;
    const auto effects_on = [&](const reference::Tensors<double>& tensors) {
      return reference::rounded_output_effects(job.problem, dense.settings, tensors,
                                               dense.cotangent, unit, least_step(scalar, "o") / 2);
    };
    auto effects = effects_on(dense.tensors);
    if (job.settings.flag("center_v", false)) {
      // gradients are computed from the o of centred values, which is stored beside the whole
      reference::Tensors<double> centred = dense.tensors;
      centred.v = centred_values(job, dense);
      auto kept = effects_on(centred);
      kept.o = std::move(effects.o);
      return kept;
    }
    return effects;
  });
}

RoundedReference compute_conditioned_reference(const Job& job, Scalar scalar) {
  return with_effects(job, [&](const DenseJob& dense) {
    auto magnitudes =
        reference::magnitudes(job.problem, dense.settings, dense.tensors, dense.cotangent);
    const double unit = conditioned_roundings * (scalar == Scalar::f64 ? 0x1p-53 : 0x1p-24);
    for (auto* values : {&magnitudes.o, &magnitudes.q, &magnitudes.k, &magnitudes.v,
                         &magnitudes.alpha, &magnitudes.beta, &magnitudes.constant,
                         &magnitudes.score_scale, &magnitudes.diag_r, &magnitudes.diag_p})
      for (double& value : *values) value *= unit;
    return magnitudes;
  });
}

}  // namespace LinAttn::app
