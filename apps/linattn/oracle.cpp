// SPDX-License-Identifier: BSD-3-Clause
#include "oracle.hpp"

#include <linattn/reference/dense.hpp>

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

Results compute_reference(const Job& job) {
  if (const std::string obstacle = reference_obstacle(job); !obstacle.empty())
    throw InvalidArgument(obstacle);
  const Problem& p = job.problem;
  reference::Settings settings{.kernel = reference::kernel_from_name(job.variant),
                               .causal = job.causal,
                               .normalise = job.normalise,
                               .scale = job.scale,
                               .alpha = job.query_parameter,
                               .beta = job.key_parameter};
  if (job.key_mask != nullptr) settings.key_mask = job.key_mask->as<std::uint8_t>();
  if (job.cu_seqlens_q != nullptr) {
    settings.cu_seqlens_q = job.cu_seqlens_q->as<std::int64_t>();
    settings.cu_seqlens_k = job.cu_seqlens_k->as<std::int64_t>();
  }
  const reference::Tensors<double> tensors{job.q->as<double>(), job.k->as<double>(),
                                           job.v->as<double>()};
  Results results{
      io::Array(reference::forward(p, settings, tensors), {p.batch, p.heads, p.nq, p.dv}), {}, {}};
  if (job.d_o == nullptr) return results;

  const auto d = reference::backward(p, settings, tensors, job.d_o->as<double>());
  results.gradients = {{"q", io::Array(d.q, job.q->extents())},
                       {"k", io::Array(d.k, job.k->extents())},
                       {"v", io::Array(d.v, job.v->extents())}};
  const VariantInfo& info = variant_info(job.variant);
  if (!info.query_parameter.empty())
    results.gradients.push_back({info.query_parameter, io::Array(d.alpha, {p.heads})});
  if (!info.key_parameter.empty())
    results.gradients.push_back({info.key_parameter, io::Array(d.beta, {p.kv_heads})});
  return results;
}

}  // namespace LinAttn::app
