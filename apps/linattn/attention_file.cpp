// SPDX-License-Identifier: BSD-3-Clause
#include "attention_file.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comparison.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

[[noreturn]] void refuse(const io::TensorFile& file, const std::string& where,
                         const std::string& expected, const std::string& found) {
  throw InvalidArgument(detail::message(file.file().string(), ": ", where, ": expected ", expected,
                                        ", found ", found));
}

/// Something that the file has, that the layout does not know for the variant in effect.
void require_known(const io::TensorFile& file, const std::string& path) {
  const auto& ignored = file.ignored();
  if (std::find(ignored.begin(), ignored.end(), path) != ignored.end())
    refuse(file, path, "nothing, because the variant in effect is not the file's", "a group");
}

void require_absent(const io::TensorFile& file, const std::string& path, const char* what) {
  if (!file.names(path).empty())
    refuse(file, path, detail::message("nothing, because this version does not support ", what),
           "a group");
}

void require_no_states(const io::TensorFile& file, Use use) {
  const std::string what = "states of variant " + file.variant();
  require_absent(file, "/inputs/state", what.c_str());
  if (use != Use::forward) require_absent(file, "/cotangent/state", what.c_str());
  if (use != Use::verify) return;
  require_absent(file, "/expected/state", what.c_str());
  require_absent(file, "/expected_grad/state", what.c_str());
}

void require_finite(const io::TensorFile& file, const std::string& path,
                    const std::vector<double>& values, const std::vector<std::int64_t>& extents) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i]))
      refuse(file, path, "finite numbers",
             detail::message(values[i], " at ",
                             index_text(index_of(static_cast<std::int64_t>(i), extents))));
}

/// A dataset of finite numbers; nullptr if the file has none.
const io::Array* finite(const io::TensorFile& file, const std::string& path) {
  const io::Array* array = file.find(path);
  if (array != nullptr) require_finite(file, path, array->as<double>(), array->extents());
  return array;
}

/// Exponents as int64, whatever the type that stores them.
io::Array exponents(const io::TensorFile& file, const std::string& path) {
  constexpr double largest = 1 << 24;
  const io::Array& stored = file.at(path);
  const std::vector<double> values = stored.as<double>();
  io::Array result(io::ElementType::i64, stored.extents());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!(std::abs(values[i]) <= largest) || values[i] != std::floor(values[i]))
      refuse(file, path, detail::message("integers of at most ", largest, " in size"),
             detail::message(values[i], " as element ", i));
    result.values<std::int64_t>()[i] = static_cast<std::int64_t>(values[i]);
  }
  return result;
}

const io::Array& counts(const io::TensorFile& file, const std::string& path) {
  constexpr std::int64_t most = std::int64_t{1} << 53;
  const auto values = file.at(path).values<std::int64_t>();
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < 0 || values[i] > most)
      refuse(file, path, detail::message("numbers of keys >= 0 and <= ", most),
             detail::message(values[i], " at [", i, "]"));
  return file.at(path);
}

}  // namespace

void require_supported(const io::TensorFile& file, Use use) {
  if (file.variant().empty())
    refuse(file, "attribute 'variant' of /",
           detail::message("one of ", variant_names(), " (or the option --variant)"), "nothing");
  try {
    variant_info(file.variant());
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(
        detail::message(file.file().string(), ": attribute 'variant' of /: ", error.what()));
  }
  if (!variant_info(file.variant()).has_states) require_no_states(file, use);
  require_known(file, "/inputs/state");
  if (use != Use::forward) require_known(file, "/cotangent/state");
  if (use != Use::verify) return;
  if (variant_info(file.variant()).has_blocks)
    require_absent(file, "/expected/diagnostics", "diagnostics of attention joined by blocks");
  if (variant_info(file.variant()).has_projection)
    require_absent(file, "/expected/diagnostics", "diagnostics of features of logits");
}

std::optional<HostState> read_state(const io::TensorFile& file, const std::string& group) {
  if (file.names(group).empty()) return {};
  const Problem& p = file.problem();
  const auto part = [&](const char* name, std::vector<std::int64_t> extents) {
    const io::Array* array = file.find(group + "/" + name);
    return array != nullptr ? *array : io::Array(io::ElementType::f64, std::move(extents));
  };
  const std::int64_t members = file.members();
  const VariantInfo& info = variant_info(file.variant());
  std::int64_t features = p.d;
  for (const char* name : {"S", "z"})
    if (const io::Array* array = file.find(group + "/" + name)) features = array->extent(2);
  HostState state{part("S", {members, p.kv_heads, features, p.dv}),
                  part("z", {members, p.kv_heads, features}),
                  {},
                  {},
                  {}};
  if (info.has_shift)
    state.shift = file.has(group + "/shift") ? exponents(file, group + "/shift")
                                             : io::Array(io::ElementType::i64, state.z.extents());
  if (info.has_counts) {
    state.t = part("t", {members, p.kv_heads, p.dv});
    state.m = file.has(group + "/m") ? counts(file, group + "/m")
                                     : io::Array(io::ElementType::i64, {members});
  }
  return state;
}

void require_foresight(const Job& job, const std::string& where) {
  if (!matches_moments(job.settings) || !job.causal() || job.foresight.moments) return;
  throw InvalidArgument(detail::message(
      where,
      ": expected alpha and beta under a causal mask, or the option --moments-see-future, "
      "because moments of whole sequences let later tokens change earlier rows, found moments = ",
      job.settings.values().at("moments").to_string()));
}

Job make_job(const io::TensorFile& file, bool with_gradients, const Foresight& foresight) {
  const VariantInfo& info = variant_info(file.variant());
  Job job;
  job.variant = file.variant();
  job.problem = file.problem();
  job.settings = Settings(file.config().values());
  job.q = &file.q();
  job.k = &file.k();
  job.v = &file.v();
  job.key_mask = file.find("/inputs/key_mask");
  job.cu_seqlens_q = file.find("/inputs/cu_seqlens_q");
  job.cu_seqlens_k = file.find("/inputs/cu_seqlens_k");
  job.parameters = parameters_of(
      info, [&](const ParameterInfo& parameter) { return parameter_values(file, parameter); });
  job.foresight = foresight;
  require_foresight(job, file.file().string());
  if (job.uses_diag_r()) job.diag_r = finite(file, "/inputs/diag_r");
  if (job.uses_diag_p()) job.diag_p = finite(file, "/inputs/diag_p");
  job.projection = finite(file, "/inputs/projection");
  draw_projection(job);
  job.state = read_state(file, "/inputs/state");
  if (!with_gradients) return job;

  job.d_o = file.find("/cotangent/o");
  if (job.d_o == nullptr)
    refuse(file, "/cotangent/o", "a dataset with extents (B, H, Nq, Dv), which gradients need",
           "nothing");
  job.d_state = read_state(file, "/cotangent/state");
  // The cotangent is with respect to S and z as the file expects them, so at their exponents.
  if (job.d_state && info.has_shift && !file.has("/cotangent/state/shift")) {
    if (!file.has("/expected/state/shift"))
      refuse(file, "/cotangent/state/shift",
             "the exponents of the state here or in /expected/state", "nothing");
    job.d_state->shift = exponents(file, "/expected/state/shift");
  }
  return job;
}

std::vector<double> parameter_values(const io::TensorFile& file, const ParameterInfo& parameter) {
  const std::string& name = parameter.name;
  if (is_matched(Settings(file.config().values()), name)) return {};
  if (!file.config().has(name))
    refuse(file, "/config",
           detail::message("an attribute or dataset '", name, "' (or the option --", name,
                           ") for variant ", file.variant()),
           "nothing");
  if (is_given_once(file, name)) return {file.config().real(name)};
  const std::vector<double> values = file.config().per_head(name, parameter.heads(file.problem()));
  require_finite(file, "/config/" + name, values, {static_cast<std::int64_t>(values.size())});
  return values;
}

bool is_given_once(const io::TensorFile& file, const std::string& parameter) {
  const Settings settings(file.config().values());
  if (is_matched(settings, parameter)) return !matches_each_head(settings);
  return !file.config().arrays().contains(parameter);
}

io::Array sum_over_heads(const io::Array& gradient) {
  const std::vector<double> values = gradient.as<double>();
  return io::Array(std::vector<double>{std::accumulate(values.begin(), values.end(), 0.0)}, {});
}

}  // namespace LinAttn::app
