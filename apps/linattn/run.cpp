// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <linattn/io/reader.hpp>
#include <linattn/io/writer.hpp>
#include <memory>
#include <optional>
#include <set>

#include "attention_file.hpp"
#include "commands.hpp"
#include "comparison.hpp"
#include "compute.hpp"
#include "json_output.hpp"
#include "options.hpp"
#include "oracle.hpp"
#include "progress.hpp"
#include "rounding.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

struct RunOptions {
  std::string input;
  std::string output;
  std::string variant;
  ConfigOptions config;
  Foresight foresight;
  ExecutionOptions execution;
  bool backward = false;
  bool state = false;
  bool check = false;
  int repeat = 5;
  std::string json;
};

io::TensorFile read_input(const RunOptions& options) {
  if (!options.variant.empty()) {
    try {
      variant_info(options.variant);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(std::string("--variant: ") + error.what());
    }
  }
  io::ReadOptions read;
  read.variant = options.variant;
  read.config = options.config.values();
  io::TensorFile file = io::TensorFile::read(options.input, read);
  require_supported(file, options.backward ? Use::forward_and_backward : Use::forward);
  if (options.state && !variant_info(file.variant()).has_states)
    throw InvalidArgument(detail::message("--state: expected a variant with states, found ",
                                          file.variant(), ", which has none in this version"));
  require_use_of(options.foresight, file.variant());
  return file;
}

/// Finds out before the work whether its result can be kept.
void require_writable(const RunOptions& options) {
  std::error_code error;
  if (std::filesystem::equivalent(options.input, options.output, error))
    throw InvalidArgument(options.output +
                          ": expected another file than the input, found the same");
  const io::Writer probe(options.output);
}

Execution execution_of(const RunOptions& options, io::ElementType stored) {
  const ExecutionOptions& given = options.execution;
  const Scalar natural = stored == io::ElementType::f64 ? Scalar::f64 : Scalar::f32;
  return {.space = given.space.empty() ? default_space() : space_from_name(given.space),
          .scalar = given.dtype.empty() ? natural : scalar_from_name(given.dtype),
          .chunk = given.chunk,
          .segments = given.segments,
          .tiles = given.tiles,
          .repeat = options.repeat};
}

/// A gradient as it is stored: that of a parameter in the form in which the parameter was given.
io::Array stored_form(const io::TensorFile& file, const NamedArray& gradient) {
  const bool is_parameter = variant_info(file.variant()).parameter(gradient.name) != nullptr;
  return is_parameter && is_given_once(file, gradient.name) ? sum_over_heads(gradient.array)
                                                            : gradient.array;
}

io::Array converted(const io::Array& array, Scalar scalar) {
  return scalar == Scalar::f64 ? io::Array(array.as<double>(), array.extents())
                               : io::Array(array.as<float>(), array.extents());
}

/// Root attributes and /config of the input, as far as the command line left them in effect.
void write_settings(const RunOptions& options, const io::TensorFile& file, io::Writer& writer) {
  writer.copy_attributes(options.input, "/");
  writer.attribute("/", "variant", file.variant());
  const io::Reader reader(options.input);
  std::set<std::string> names;
  for (const auto& [name, value] : options.config.values()) names.insert(name);
  if (reader.kind("/config") == io::ObjectKind::group) {
    writer.group("/config");
    for (const std::string& name : reader.attribute_names("/config")) names.insert(name);
  }
  for (const std::string& name : names) {
    const auto& values = file.config().values();
    const auto value = values.find(name);
    if (value != values.end()) writer.attribute("/config", name, value->second);
  }
  for (const auto& [name, array] : file.config().arrays()) writer.write("/config/" + name, array);
}

void write_output(const RunOptions& options, const io::TensorFile& file, const Results& results,
                  Scalar scalar) {
  io::Writer writer(options.output);
  write_settings(options, file, writer);
  writer.write("/output/o", converted(results.o, scalar));
  if (results.state) {
    for (const NamedArray& sum : results.state->sums())
      writer.write("/output/state/" + sum.name, converted(sum.array, scalar));
    if (results.state->shift) writer.write("/output/state/shift", *results.state->shift);
    if (results.state->m) writer.write("/output/state/m", *results.state->m);
  }
  for (const NamedArray& gradient : results.gradients)
    writer.write("/output_grad/" + gradient.name, converted(stored_form(file, gradient), scalar));
  writer.commit();
}

/// Gradients of parameters are compared head by head: their sum may cancel.
std::vector<Comparison> check(const io::TensorFile& file, const Job& job, const Results& found,
                              Scalar scalar) {
  const RoundedReference reference = is_16_bit(scalar) ? compute_rounded_reference(job, scalar)
                                                       : compute_conditioned_reference(job, scalar);
  const Results& expected = reference.values;
  const auto tolerance = [&](const io::Tolerances& tolerances) {
    return tolerance_for(tolerances, scalar, io::ElementType::f64);
  };
  std::vector<Comparison> comparisons{compare("o", expected.o, found.o,
                                              tolerance(file.expected_tolerances()),
                                              excused_errors(scalar, "o", reference.effects.o))};
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    const auto& [name, array] = expected.gradients[i];
    comparisons.push_back(
        compare(name, array, found.gradients[i].array, tolerance(file.gradient_tolerances()),
                excused_errors(scalar, name, reference.effects.gradients[i].array)));
  }
  return comparisons;
}

/// Parameters, and what else is not as it would be if nobody had said anything.
std::string settings_text(const Job& job) {
  std::string text = job.variant + (job.causal() ? ", causal" : ", full") +
                     (job.normalise() ? ", normalised" : ", not normalised");
  const VariantInfo& info = variant_info(job.variant);
  for (std::size_t i = 0; i < info.parameters.size(); ++i) {
    const auto [low, high] =
        std::minmax_element(job.parameters[i].begin(), job.parameters[i].end());
    if (job.parameters[i].empty()) continue;
    text += ", " + info.parameters[i].name + " " + number(*low);
    if (*low != *high) text += " to " + number(*high);
  }
  for (const io::AttributeSpec& spec : settings_of_variant(job.variant)) {
    const std::string name(spec.name);
    const bool is_said = name == "causal" || name == "normalise" || info.parameter(name) != nullptr;
    // a scale of the output is in use where rows are not divided, and nowhere else
    const bool is_idle = name == "scale" && job.normalise() && !info.has_own_scale;
    if (is_said || is_idle || !job.settings.has(name)) continue;
    const io::Value& value = job.settings.values().at(name);
    const auto standard = io::default_of(spec, job.settings.values(), job.problem.d);
    if (name != "scale" && standard && value == *standard) continue;
    text += ", " + name + " ";
    text += value.is_string() ? value.as_string()
            : value.is_real() ? number(value.as_double())
                              : value.to_string();
  }
  if (job.foresight.max_norm) text += ", norms that see the future";
  if (job.foresight.moments && matches_moments(job.settings))
    text += ", moments that see the future";
  if (job.key_mask != nullptr) text += ", key mask";
  if (job.cu_seqlens_q != nullptr)
    text += ", " + std::to_string(job.problem.members) + " packed sequences";
  if (job.state) text += ", initial state";
  return text;
}

std::string moments_text(const HostMoments& moments) {
  std::vector<std::string> parts;
  for (const char* name : moment_names) {
    const auto found = moments.find(name);
    if (found == moments.end() || found->second.empty()) continue;
    const std::vector<double>& values = found->second;
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    parts.push_back(std::string(name) + " " + number(*low) +
                    (*low == *high ? "" : " to " + number(*high)));
  }
  return join(parts);
}

std::string pass_text(const PassReport& report) {
  const Plan& plan = report.plan;
  const auto [least, most] = std::minmax_element(report.seconds.begin(), report.seconds.end());
  return detail::message(duration(report.median()), " (median of ", report.seconds.size(), ", ",
                         duration(*least), " to ", duration(*most), "), chunk ", plan.chunk,
                         ", segments ", plan.segments, ", tiles ", plan.tiles, ", workers ",
                         plan.workers, ", workspace ", bytes(report.workspace_bytes));
}

class Report {
 public:
  Report(const RunOptions& options, const io::TensorFile& file, const Job& job,
         const Execution& execution, const Outcome& outcome)
      : m_options(options),
        m_file(file),
        m_job(job),
        m_execution(execution),
        m_outcome(outcome),
        m_threads(concurrency(execution.space)) {}

  /// `unchecked` says why there are no comparisons; empty: none were asked for.
  void print(const std::vector<Comparison>& comparisons, const std::string& unchecked) const {
    line("input", m_options.input);
    if (!m_file.ignored().empty()) line("ignored", join(m_file.ignored()));
    line("problem", m_job.problem.to_string());
    line("attention", settings_text(m_job));
    if (m_outcome.results.moments) line("moments", moments_text(*m_outcome.results.moments));
    line("execution", detail::message(to_string(m_execution.space), ", ", m_threads,
                                      m_execution.space == Space::cuda ? " threads in flight, "
                                      : m_threads == 1                 ? " thread, "
                                                                       : " threads, ",
                                      to_string(m_execution.scalar)));
    line("forward", pass_text(m_outcome.forward));
    if (m_outcome.backward) {
      line("backward", pass_text(*m_outcome.backward));
      line("saved", bytes(m_outcome.saved_bytes) + " from forward for backward, beside o");
    }
    if (!comparisons.empty()) line("check", "against the dense float64 reference");
    for (const Comparison& c : comparisons)
      std::cout << "  " << padded(symbol(c.quantity), 8) << "error "
                << padded(number(c.error, 3), 10) << "tolerance "
                << padded(number(c.tolerance, 3), 10) << (c.ok ? "ok    " : "FAIL  ")
                << worst_element(c) << '\n';
    if (!unchecked.empty()) line("unchecked", unchecked);
    line("output", m_options.output);
  }

  Json json(const std::vector<Comparison>& comparisons, const std::string& unchecked) const {
    Json json = json_document("run");
    json["input"] = m_options.input;
    json["output"] = m_options.output;
    json["ignored"] = m_file.ignored();
    json["variant"] = m_job.variant;
    json["problem"] = to_json(m_job.problem);
    json["causal"] = m_job.causal();
    json["normalise"] = m_job.normalise();
    json["scale"] = m_job.settings.real("scale", 1);
    json["parameters"] = Json::object();
    for (const ParameterInfo& parameter : variant_info(m_job.variant).parameters)
      json["parameters"][parameter.name] = values_of(parameter);
    json["settings"] = to_json(m_job.settings);
    json["max_norm_sees_future"] = m_job.foresight.max_norm;
    json["moments_see_future"] = m_job.foresight.moments;
    if (m_outcome.results.moments) json["moments"] = to_json(*m_outcome.results.moments);
    json["key_mask"] = m_job.key_mask != nullptr;
    json["packed_sequences"] = m_job.cu_seqlens_q != nullptr ? m_job.problem.members : 0;
    json["initial_state"] = m_job.state.has_value();
    json["space"] = to_string(m_execution.space);
    json["concurrency"] = m_threads;
    json["dtype"] = to_string(m_execution.scalar);
    json["forward"] = to_json(m_outcome.forward);
    if (m_outcome.backward) {
      json["backward"] = to_json(*m_outcome.backward);
      json["saved_bytes"] = m_outcome.saved_bytes;
    }
    json["check"] = Json::array();
    for (const Comparison& c : comparisons) json["check"].push_back(to_json(c));
    if (!unchecked.empty()) json["unchecked"] = unchecked;
    return json;
  }

 private:
  /// One for each head, matched or given.
  std::vector<double> values_of(const ParameterInfo& parameter) const {
    const std::optional<HostMoments>& moments = m_outcome.results.moments;
    if (moments && matches_moments(m_job.settings)) return moments->at(parameter.name);
    return m_job.per_head(parameter);
  }

  static void line(const char* name, const std::string& text) {
    std::cout << padded(name, 11) << text << '\n';
  }

  const RunOptions& m_options;
  const io::TensorFile& m_file;
  const Job& m_job;
  const Execution& m_execution;
  const Outcome& m_outcome;
  int m_threads;
};

ExitStatus conclude(const RunOptions& options, const std::vector<Comparison>& comparisons) {
  for (const Comparison& c : comparisons)
    if (!c.ok) {
      complain("linattn run",
               detail::message(options.output, ": ", symbol(c.quantity), " ", worst_element(c),
                               ", an error of ", number(c.error, 3), " where the tolerance is ",
                               number(c.tolerance, 3)));
      return ExitStatus::verification_failed;
    }
  return ExitStatus::done;
}

ExitStatus run(const RunOptions& options) {
  const JsonOutput json(options.json, {options.input, options.output});
  const io::TensorFile file = read_input(options);
  const Execution execution = execution_of(options, file.q().type());
  Job whole = make_job(file, options.backward, options.foresight);
  whole.wants_state = options.state;
  const auto round = [&] {
    try {
      return RoundedJob(whole, execution.scalar);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(options.input + ": " + error.what());
    }
  };
  const RoundedJob rounded = round();
  const Job& job = rounded.job();
  const std::string obstacle = reference_obstacle(job);
  if (options.check && !obstacle.empty()) throw InvalidArgument("--check: " + obstacle);
  require_writable(options);

  const Runtime runtime;
  const Progress progress;
  progress.show("running " + options.input);
  Outcome outcome;
  try {
    outcome = compute(job, execution);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(options.input + ": " + error.what());
  }
  write_output(options, file, outcome.results, execution.scalar);

  std::vector<Comparison> comparisons;
  const bool wanted = options.check || file.has("/expected/o");
  if (wanted && obstacle.empty()) {
    progress.show("checking against the dense reference");
    comparisons = check(file, job, outcome.results, execution.scalar);
  }
  progress.show("");
  const std::string unchecked = wanted ? obstacle : "";
  const Report report(options, file, job, execution, outcome);
  if (!json.is_stdout()) report.print(comparisons, unchecked);
  json.write(report.json(comparisons, unchecked));
  return conclude(options, comparisons);
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* const command = app.add_subcommand(
      "run", "Attention of the q, k, v of a file, forward and, if asked for, backward.");
  command->add_option("IN.h5", options->input, "File with /inputs/q, k, v")->required();
  command
      ->add_option("OUT.h5", options->output,
                   "Result: /output/o and /output_grad/*, in place of a file of that name")
      ->required();
  command
      ->add_option("--variant", options->variant,
                   "One of " + variant_names() + " (default: the file's)")
      ->type_name("NAME");
  options->config.add_to(*command);
  add_foresight_options(*command, options->foresight);
  command->add_flag("--backward", options->backward, "Also the gradients, given /cotangent/o")
      ->disable_flag_override();
  command->add_flag("--state", options->state, "Also the state after the last key")
      ->disable_flag_override();
  options->execution.add_to(*command, std::string(to_string(default_space())),
                            "f64 for float64 files, else f32");
  command
      ->add_flag("--check", options->check,
                 "Compare with the dense float64 reference (done anyway for a file with /expected)")
      ->disable_flag_override();
  command->add_option("--repeat", options->repeat, "Timed runs, of which the median is shown")
      ->capture_default_str()
      ->type_name("COUNT")
      ->check(integer_between(1, 1000000));
  add_json_option(*command, options->json);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace LinAttn::app
