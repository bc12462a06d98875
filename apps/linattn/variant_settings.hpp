// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/analysis/moments.hpp>
#include <linattn/call.hpp>
#include <linattn/error.hpp>
#include <linattn/variants.hpp>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "compute.hpp"

/// \file variant_settings.hpp
/// From the settings of a job, in the layout's words, to the library's types. What a single variant
/// needs beyond its differentiable parameters is here and nowhere else.

namespace LinAttn::app {

/// Parameters where kernels can read them.
struct Parameters {
  std::map<std::string, Parameter> by_name;
  ColumnFactors diag_r = 0.5;
  ColumnFactors diag_p = 0.5;
  Projection projection{};

  const Parameter& at(const char* name) const { return by_name.at(name); }
};

/// The value that goes with a name. Names come from the layout's table, which has checked them.
template <class Value>
Value chosen(const std::string& name,
             std::initializer_list<std::pair<const char*, Value>> choices) {
  for (const auto& [text, value] : choices)
    if (name == text) return value;
  throw std::logic_error("a choice that there is not: " + name);
}

inline SmallNormaliser small_normaliser_of(const Settings& settings) {
  return chosen<SmallNormaliser>(settings.text("small_g", "check"),
                                 {{"check", SmallNormaliser::check},
                                  {"clamp", SmallNormaliser::clamp},
                                  {"ignore", SmallNormaliser::ignore}});
}

inline Dropout dropout_of(const Settings& settings) {
  return {.p = settings.real("dropout_p", 0),
          .seed = settings.counter("seed", 0),
          .offset = settings.counter("offset", 0)};
}

/// What of a job is the same for calls of all variants.
inline Options options_of(const Job& job, const Execution& execution) {
  const Settings& settings = job.settings;
  const Options standard;
  return {.causal = job.causal(),
          .normalise = job.normalise(),
          .scale = job.output_scale(),
          .chunk = execution.chunk,
          .segments = execution.segments,
          .tiles = execution.tiles,
          .dropout = dropout_of(settings),
          .small_normaliser = small_normaliser_of(settings),
          .least_normaliser = settings.real("g_min", standard.least_normaliser),
          .center_v = settings.flag("center_v", false)};
}

inline MomentOptions moment_options_of(const Job& job) {
  const Settings& settings = job.settings;
  MomentOptions options{.scope = moment_scope_from_name(settings.text("moments_scope", "tensor")),
                        .causal = job.causal(),
                        .sees_future = job.foresight.moments};
  if (!matches_moments(settings)) return options;
  options.rule = moment_rule_from_name(settings.text("moments", ""));
  if (options.rule == MomentRule::fit) options.line = fit_line(job.problem.d);
  return options;
}

/// A variant that has nothing but a parameter of its query map and one of its key map, which its
/// aggregate lists in this order, or a scale of scores, or a projection.
template <class V>
V make_variant(std::type_identity<V>, [[maybe_unused]] const Job& job, [[maybe_unused]] const Parameters& parameters) {
  if constexpr (V::query_parameter != nullptr && V::key_parameter != nullptr)
    return V{parameters.at(V::query_parameter), parameters.at(V::key_parameter)};
  else if constexpr (V::query_parameter != nullptr)
    return V{parameters.at(V::query_parameter)};
  else if constexpr (V::key_parameter != nullptr)
    return V{parameters.at(V::key_parameter)};
  else if constexpr (requires(const V& variant) { variant.scale; })
    return V{.scale = job.settings.real("scale", 0)};
  else if constexpr (ProjectedVariant<V>)
    return V{.projection = parameters.projection};
  else
    return V{};
}

inline Affine make_variant(std::type_identity<Affine>, const Job& job,
                           const Parameters& parameters) {
  const Settings& settings = job.settings;
  Affine variant{.a = parameters.at("a"), .b = parameters.at("b")};
  variant.scale = settings.real("scale", 1);
  variant.qk_norm =
      chosen<QkNorm>(settings.text("qk_norm", "l2"),
                     {{"l2", QkNorm::l2}, {"none", QkNorm::none}, {"max", QkNorm::max}});
  variant.norm_eps = settings.real("norm_eps", variant.norm_eps);
  variant.max_norm_sees_future = job.foresight.max_norm;
  return variant;
}

inline LlnDiag make_variant(std::type_identity<LlnDiag>, const Job& job,
                            const Parameters& parameters) {
  const Settings& settings = job.settings;
  return {
      .alpha = parameters.at("alpha"),
      .beta = parameters.at("beta"),
      .block = settings.integer("block", 0),
      .combine = chosen<Combine>(
          settings.text("combine", "average"),
          {{"average", Combine::average}, {"scale", Combine::scale}, {"ratio", Combine::ratio}}),
      .diag_r = parameters.diag_r,
      .diag_p = parameters.diag_p};
}

}  // namespace LinAttn::app
