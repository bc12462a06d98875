// SPDX-License-Identifier: BSD-3-Clause
#include "oracle.hpp"

#include <linattn/reference/bounds.hpp>
#include <linattn/reference/dense.hpp>

#include "rounding.hpp"
#include "text.hpp"

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

/// Values of a parameter, or their gradients, in what has members alpha and beta.
template <class Set>
auto& of_role(ParameterInfo::Role role, Set& set) {
  return role == ParameterInfo::Role::query ? set.alpha : set.beta;
}

/// A job in the reference's terms. \throws InvalidArgument if there is an obstacle
struct DenseJob {
  reference::Settings settings;
  reference::Tensors<double> tensors;
  std::vector<double> cotangent;

  explicit DenseJob(const Job& job) {
    if (const std::string obstacle = reference_obstacle(job); !obstacle.empty())
      throw InvalidArgument(obstacle);
    settings = {.kernel = reference::kernel_from_name(job.variant),
                .causal = job.causal(),
                .normalise = job.normalise(),
                .scale = job.output_scale()};
    for (const ParameterInfo& parameter : variant_info(job.variant).parameters)
      of_role(parameter.role, settings) = job.per_head(parameter);
    if (job.key_mask != nullptr) settings.key_mask = job.key_mask->as<std::uint8_t>();
    if (job.cu_seqlens_q != nullptr) {
      settings.cu_seqlens_q = job.cu_seqlens_q->as<std::int64_t>();
      settings.cu_seqlens_k = job.cu_seqlens_k->as<std::int64_t>();
    }
    tensors = {job.q->as<double>(), job.k->as<double>(), job.v->as<double>()};
    if (job.d_o != nullptr) cotangent = job.d_o->as<double>();
  }
};

io::Array o_of(const Job& job, const std::vector<double>& o) {
  const Problem& p = job.problem;
  return io::Array(o, {p.batch, p.heads, p.nq, p.dv});
}

/// What has members q, k, v, alpha and beta in the order of compute().
template <class Set>
std::vector<NamedArray> gradients_of(const Job& job, const Set& d) {
  std::vector<NamedArray> gradients{{"q", io::Array(d.q, job.q->extents())},
                                    {"k", io::Array(d.k, job.k->extents())},
                                    {"v", io::Array(d.v, job.v->extents())}};
  for (const ParameterInfo& parameter : variant_info(job.variant).parameters)
    gradients.push_back({parameter.name, io::Array(of_role(parameter.role, d),
                                                   {parameter.heads(job.problem)})});
  return gradients;
}

/// What has members o, q, k, v, alpha and beta: o alone where there is no cotangent.
template <class Set>
Results results_of(const Job& job, const Set& set) {
  Results results{o_of(job, set.o), {}, {}};
  if (job.d_o != nullptr) results.gradients = gradients_of(job, set);
  return results;
}

Results reference_of(const Job& job, const DenseJob& dense) {
  Results results{o_of(job, reference::forward(job.problem, dense.settings, dense.tensors)), {}, {}};
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
  return {values, results_of(job, effects_of(dense))};
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
  return reference_obstacle(job.variant, job.problem);
}

Results compute_reference(const Job& job) { return reference_of(job, DenseJob(job)); }

RoundedReference compute_rounded_reference(const Job& job, Scalar scalar) {
  return with_effects(job, [&](const DenseJob& dense) {
    const double unit = scalar == Scalar::f16 ? 0x1p-11 : 0x1p-8;
    return reference::rounded_output_effects(job.problem, dense.settings, dense.tensors,
                                             dense.cotangent, unit, least_step(scalar, "o") / 2);
  });
}

RoundedReference compute_conditioned_reference(const Job& job, Scalar scalar) {
  return with_effects(job, [&](const DenseJob& dense) {
    auto magnitudes =
        reference::magnitudes(job.problem, dense.settings, dense.tensors, dense.cotangent);
    const double unit = conditioned_roundings * (scalar == Scalar::f64 ? 0x1p-53 : 0x1p-24);
    for (auto* values : {&magnitudes.o, &magnitudes.q, &magnitudes.k, &magnitudes.v,
                         &magnitudes.alpha, &magnitudes.beta})
      for (double& value : *values) value *= unit;
    return magnitudes;
  });
}

}  // namespace LinAttn::app
