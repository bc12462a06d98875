// SPDX-License-Identifier: BSD-3-Clause
#include "attention_file.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace LinAttn::app {
namespace {

[[noreturn]] void refuse(const io::TensorFile& file, const std::string& where,
                         const std::string& expected, const std::string& found) {
  throw InvalidArgument(detail::message(file.file().string(), ": ", where, ": expected ", expected,
                                        ", found ", found));
}

/// Whether the dataset is there, or the group has anything in it.
bool is_present(const io::TensorFile& file, const std::string& path) {
  const auto& ignored = file.ignored();
  return file.has(path) || !file.names(path).empty() ||
         std::find(ignored.begin(), ignored.end(), path) != ignored.end();
}

void require_absent(const io::TensorFile& file, const std::string& path, const char* what) {
  if (is_present(file, path))
    refuse(file, path, detail::message("nothing, because this version does not support ", what),
           file.names(path).empty() ? "a dataset" : "a group");
}

std::vector<double> parameter_of(const io::TensorFile& file, const std::string& name,
                                 std::int64_t heads) {
  if (name.empty()) return {};
  if (!file.config().has(name))
    refuse(file, "/config",
           detail::message("an attribute or dataset '", name, "' (or the option --", name,
                           ") for variant ", file.variant()),
           "nothing");
  const std::vector<double> values = file.config().per_head(name, heads);
  for (std::size_t head = 0; head < values.size(); ++head)
    if (!std::isfinite(values[head]))
      refuse(file, "/config/" + name, "finite numbers",
             detail::message(values[head], " at [", head, "]"));
  return values;
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
  if (file.config().has("moments"))
    refuse(file, "attribute 'moments' of /config",
           "alpha and beta, because this version does not match moments",
           file.config().values().at("moments").to_string());
  require_absent(file, "/inputs/key_mask", "key masks");
  require_absent(file, "/inputs/cu_seqlens_q", "packed sequences");
  require_absent(file, "/inputs/state", "an initial state");
  if (use != Use::forward) require_absent(file, "/cotangent/state", "cotangents of a state");
  if (use != Use::verify) return;
  require_absent(file, "/expected/state", "states");
  require_absent(file, "/expected_grad/state", "gradients of a state");
  require_absent(file, "/expected/moments", "moments");
  require_absent(file, "/expected/diagnostics", "diagnostics");
}

Job make_job(const io::TensorFile& file, bool with_gradients) {
  const io::Config& config = file.config();
  const VariantInfo& info = variant_info(file.variant());
  Job job;
  job.variant = info.name;
  job.problem = file.problem();
  job.causal = file.causal();
  job.normalise = config.flag("normalise");
  job.scale = config.real("scale");
  job.query_parameter = parameter_of(file, info.query_parameter, job.problem.heads);
  job.key_parameter = parameter_of(file, info.key_parameter, job.problem.kv_heads);
  job.q = &file.q();
  job.k = &file.k();
  job.v = &file.v();
  if (with_gradients) {
    job.d_o = file.find("/cotangent/o");
    if (job.d_o == nullptr)
      refuse(file, "/cotangent/o", "a dataset with extents (B, H, Nq, Dv), which gradients need",
             "nothing");
  }
  return job;
}

bool is_given_once(const io::TensorFile& file, const std::string& parameter) {
  return !file.config().arrays().contains(parameter);
}

io::Array sum_over_heads(const io::Array& gradient) {
  const std::vector<double> values = gradient.as<double>();
  return io::Array(std::vector<double>{std::accumulate(values.begin(), values.end(), 0.0)}, {});
}

}  // namespace LinAttn::app
