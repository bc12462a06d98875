// SPDX-License-Identifier: BSD-3-Clause
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <linattn/half.hpp>
#include <linattn/io/writer.hpp>
#include <linattn/version.hpp>
#include <memory>
#include <optional>

#include "attention_file.hpp"
#include "commands.hpp"
#include "compute.hpp"
#include "json_output.hpp"
#include "options.hpp"
#include "oracle.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

constexpr std::int64_t largest_extent = std::int64_t{1} << 40;

struct GenerateOptions {
  std::string output;
  Problem problem{.batch = 1, .heads = 1, .kv_heads = -1, .nq = -1, .nk = -1, .d = -1, .dv = -1};
  std::uint64_t seed = 0;
  std::string variant;
  ConfigOptions config{.renamed = {{"seed", "--dropout-seed"}}};
  Foresight foresight;
  std::string distribution = "normal";
  double sigma = 1;
  std::string dtype = "f64";
  bool no_expected = false;
  std::string json;
};

enum class Distribution { normal, uniform, constant };

/// \throws InvalidArgument for a name that there is not
Distribution distribution_from_name(const std::string& name) {
  if (name == "normal") return Distribution::normal;
  if (name == "uniform") return Distribution::uniform;
  if (name == "constant") return Distribution::constant;
  throw InvalidArgument("expected normal, uniform or constant, found '" + name + "'");
}

/// The tensors of a file, each a stream of random numbers of its own.
struct Tensors {
  io::Array q, k, v, d_o;
  std::optional<io::Array> diag_r, diag_p;  ///< where the variant combines by them
};

/// Which types inputs can have. \throws InvalidArgument for one that files do not have
io::ElementType element_type_from_name(std::string_view name) {
  switch (scalar_from_name(name)) {
    case Scalar::f64:
      return io::ElementType::f64;
    case Scalar::f32:
      return io::ElementType::f32;
    case Scalar::f16:
      return io::ElementType::f16;
    case Scalar::bf16:
      break;
  }
  throw InvalidArgument(
      detail::message("expected f64, f32 or f16, found '", name, "', which files do not have"));
}

void require_finite(const io::Array& array, const GenerateOptions& options) {
  for (const float x : array.as<float>())
    if (std::isinf(x))
      throw InvalidArgument(
          detail::message("--sigma: expected numbers of at most 65504 in size for ", options.dtype,
                          ", found larger ones with ", number(options.sigma)));
}

io::Array draw(const GenerateOptions& options, Distribution distribution, double sigma,
               std::uint64_t stream, std::vector<std::int64_t> extents) {
  const CounterRandom random(options.seed, stream);
  const auto element = [&](std::uint64_t index) {
    if (distribution == Distribution::normal) return sigma * random.normal(index);
    if (distribution == Distribution::uniform)
      return sigma * (std::sqrt(3.0) * (2 * random.uniform(index) - 1));
    return sigma;
  };
  const auto fill = [&](auto values) {
    using Value = typename decltype(values)::value_type;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<Value>(element(i));
  };
  io::Array array(element_type_from_name(options.dtype), std::move(extents));
  switch (array.type()) {
    case io::ElementType::f64:
      fill(array.values<double>());
      break;
    case io::ElementType::f32:
      fill(array.values<float>());
      break;
    default:
      fill(array.values<float16>());
      require_finite(array, options);
  }
  return array;
}

/// Factors near 1/2, from which they usually start.
io::Array draw_factors(const GenerateOptions& options, std::uint64_t stream) {
  const CounterRandom random(options.seed, stream);
  const std::vector<std::int64_t> extents{options.problem.heads, options.problem.dv};
  io::Array array(io::ElementType::f64, extents);
  const auto values = array.values<double>();
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.5 + 0.25 * random.normal(i);
  return array;
}

Tensors draw_tensors(const GenerateOptions& options, const Settings& settings) {
  const Problem& p = options.problem;
  const Distribution inputs = distribution_from_name(options.distribution);
  const double sigma = options.sigma;
  Tensors tensors{draw(options, inputs, sigma, 0, {p.batch, p.heads, p.nq, p.d}),
                  draw(options, inputs, sigma, 1, {p.batch, p.kv_heads, p.nk, p.d}),
                  draw(options, inputs, sigma, 2, {p.batch, p.kv_heads, p.nk, p.dv}),
                  draw(options, Distribution::normal, 1, 3, {p.batch, p.heads, p.nq, p.dv}),
                  {},
                  {}};
  if (uses_diag_r(settings)) tensors.diag_r = draw_factors(options, 4);
  if (uses_diag_p(settings)) tensors.diag_p = draw_factors(options, 5);
  return tensors;
}

void require_memory(const Problem& p) {
  const auto extent = [](std::int64_t n) { return static_cast<double>(n); };
  const double elements =
      extent(p.batch) * (extent(p.heads) * extent(p.nq) * extent(p.d + p.dv) +
                         extent(p.kv_heads) * extent(p.nk) * extent(p.d + p.dv));
  const double needed = 8 * elements;
  const double available =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (needed > available)
    throw InvalidArgument(detail::message("expected extents that need at most the ",
                                          number(available, 4), " bytes of memory here, found ",
                                          p.to_string(), ", which need ", number(needed, 4)));
}

/// Refuses an option that the variant does not have, or without one, that not all have, and values that are not for it.
void require_setting(const GenerateOptions& options, const std::string& name, const io::Value& value) {
  const std::string option = options.config.option_of(name) + ": ";
  try {
    const io::AttributeSpec spec = io::attribute_of(
        io::variant_spec(options.variant.empty() ? variants().front().name : options.variant),
        name);
    io::coerce(spec, value);
  } catch (const InvalidArgument& error) {
    if (options.variant.empty())
      throw InvalidArgument(option + "expected a variant that has " + name + ", found none");
    throw InvalidArgument(option + error.what());
  }
}

/// Attributes of /config: what was given, and 1 for a parameter of the variant that has no default
/// and is not matched.
std::map<std::string, io::Value> config_values(const GenerateOptions& options) {
  std::map<std::string, io::Value> values = options.config.values();
  for (const auto& [name, value] : values) require_setting(options, name, value);
  if (options.variant.empty()) return values;
  // Every number depends on the seed of the command, also those of a projection.
  if (variant_info(options.variant).has_projection) values.try_emplace("seed", options.seed);
  const io::VariantSpec& variant = io::variant_spec(options.variant);
  for (const ParameterInfo& parameter : variant_info(options.variant).parameters)
    if (is_matched(Settings(values), parameter.name)) {
      if (values.contains(parameter.name))
        throw InvalidArgument("--moments: expected either moments or alpha and beta, found both");
    } else if (!io::default_of(io::attribute_of(variant, parameter.name), values,
                               options.problem.d)) {
      values.try_emplace(parameter.name, 1.0);
    }
  return values;
}

/// The given values and the defaults of all others.
Settings with_defaults(const std::string& variant, const std::map<std::string, io::Value>& given,
                       std::int64_t d) {
  std::map<std::string, io::Value> values = given;
  for (const io::AttributeSpec& spec : io::attributes_of(io::variant_spec(variant)))
    if (const auto value = io::default_of(spec, given, d))
      values.try_emplace(std::string(spec.name), *value);
  return Settings(std::move(values));
}

/// The job of the variant, without tensors but a projection that it may need.
Job job_of(const GenerateOptions& options, const std::map<std::string, io::Value>& config) {
  Job job;
  job.variant = options.variant;
  job.problem = options.problem;
  job.settings = with_defaults(options.variant, config, options.problem.d);
  job.parameters =
      parameters_of(variant_info(options.variant), [&](const ParameterInfo& parameter) {
        return is_matched(job.settings, parameter.name)
                   ? std::vector<double>()
                   : std::vector<double>{job.settings.real(parameter.name, 1)};
      });
  job.foresight = options.foresight;
  draw_projection(job);
  return job;
}

Job job_of(const GenerateOptions& options, const std::map<std::string, io::Value>& config,
           const Tensors& tensors) {
  Job job = job_of(options, config);
  job.q = &tensors.q;
  job.k = &tensors.k;
  job.v = &tensors.v;
  job.d_o = &tensors.d_o;
  if (tensors.diag_r) job.diag_r = &*tensors.diag_r;
  if (tensors.diag_p) job.diag_p = &*tensors.diag_p;
  return job;
}

/// Extents, settings of the variant and a bearable reference, before anything is drawn.
void check_request(const GenerateOptions& options, const std::map<std::string, io::Value>& config) {
  options.problem.validate(Settings(config).flag("causal", false));
  require_memory(options.problem);
  require_use_of(options.foresight, options.variant);
  if (options.variant.empty()) return;
  const Job job = job_of(options, config);
  require_foresight(job, "--moments");
  require_valid_settings(job);
  if (options.no_expected) return;
  const std::string obstacle = reference_obstacle(options.variant, options.problem);
  if (!obstacle.empty())
    throw InvalidArgument("--variant: " + obstacle + "; --no-expected writes inputs only");
}

/// Whether the layout lets a parameter differ from head to head.
bool may_differ(const std::string& variant, const std::string& parameter) {
  const auto datasets = io::variant_spec(variant).config;
  return std::any_of(datasets.begin(), datasets.end(),
                     [&](const io::DatasetSpec& spec) { return spec.name == parameter; });
}

/// Gradients of parameters head by head where the layout has room: their sum may cancel.
void write_expected(const Job& job, const Results& expected, io::Writer& writer) {
  writer.write("/expected/o", expected.o);
  const VariantInfo& info = variant_info(job.variant);
  for (const NamedArray& gradient : expected.gradients)
    writer.write("/expected_grad/" + gradient.name,
                 info.parameter(gradient.name) != nullptr && !may_differ(info.name, gradient.name)
                     ? sum_over_heads(gradient.array)
                     : gradient.array);
  if (!expected.moments) return;
  for (const auto& [name, values] : *expected.moments) {
    const bool each_head = matches_each_head(job.settings);
    const auto heads = static_cast<std::int64_t>(values.size());
    writer.write("/expected/moments/" + name, each_head || heads == 0
                                                  ? io::Array(values, {heads})
                                                  : io::Array(std::vector<double>{values[0]}, {}));
  }
}

ExitStatus generate(const GenerateOptions& given) {
  GenerateOptions options = given;
  Problem& p = options.problem;
  if (p.kv_heads < 0) p.kv_heads = p.heads;
  if (p.nk < 0) p.nk = p.nq;
  if (p.dv < 0) p.dv = p.d;
  const std::map<std::string, io::Value> config = config_values(options);
  check_request(options, config);
  const JsonOutput json(options.json, {options.output});

  io::Writer writer(options.output);
  writer.attribute("/", "producer", "linattn generate " LINATTN_VERSION);
  writer.attribute("/", "seed", options.seed);
  writer.attribute("/", "sigma", options.sigma);
  writer.attribute("/", "dist", options.distribution);
  if (!options.variant.empty()) writer.attribute("/", "variant", options.variant);
  writer.group("/config");
  for (const auto& [name, value] : config) writer.attribute("/config", name, value);

  const Progress progress;
  progress.show("drawing");
  const Tensors tensors = draw_tensors(options, Settings(config));
  writer.write("/inputs/q", tensors.q);
  writer.write("/inputs/k", tensors.k);
  writer.write("/inputs/v", tensors.v);
  if (tensors.diag_r) writer.write("/inputs/diag_r", *tensors.diag_r);
  if (tensors.diag_p) writer.write("/inputs/diag_p", *tensors.diag_p);
  if (!options.variant.empty())
    if (const Job job = job_of(options, config); job.projection != nullptr)
      writer.write("/inputs/projection", *job.projection);
  writer.write("/cotangent/o", tensors.d_o);
  const bool with_expected = !options.variant.empty() && !options.no_expected;
  if (with_expected) {
    progress.show("computing the dense reference");
    const Job job = job_of(options, config, tensors);
    write_expected(job, compute_reference(job), writer);
  }
  writer.commit();
  progress.show("");

  if (!json.is_stdout())
    std::cout << options.output << ": " << p.to_string()
              << (options.variant.empty() ? "" : ", " + options.variant)
              << (with_expected ? ", with expected output and gradients" : ", inputs only") << '\n';
  Json document = json_document("generate");
  document["output"] = options.output;
  document["problem"] = to_json(p);
  document["seed"] = options.seed;
  document["variant"] = options.variant.empty() ? Json() : Json(options.variant);
  document["settings"] = options.variant.empty() ? to_json(Settings(config))
                                                 : to_json(job_of(options, config).settings);
  document["expected"] = with_expected;
  json.write(document);
  return ExitStatus::done;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* const command = app.add_subcommand(
      "generate",
      "Writes random inputs and, for a variant, what the dense float64 reference expects.");
  command->add_option("OUT.h5", options->output, "The file, in place of one of that name")
      ->required();
  Problem& p = options->problem;
  const auto extent = [&](const char* name, std::int64_t& value, const char* text) {
    return command->add_option(name, value, text)
        ->type_name("COUNT")
        ->check(integer_between(0, largest_extent));
  };
  extent("--batch", p.batch, "Sequences (default 1)");
  extent("--heads", p.heads, "Query heads (default 1)");
  extent("--kv-heads", p.kv_heads, "Key/value heads (default: as --heads)");
  extent("--nq", p.nq, "Queries")->required();
  extent("--nk", p.nk, "Keys (default: as --nq)");
  extent("--d", p.d, "Features of a query or key")->required();
  extent("--dv", p.dv, "Features of a value (default: as --d)");
  command
      ->add_option("--seed", options->seed,
                   "Every number depends on it, its tensor and its index only")
      ->capture_default_str()
      ->type_name("COUNT")
      ->check(integer_between(0, std::numeric_limits<std::int64_t>::max()));
  command->add_option("--variant", options->variant, "One of " + variant_names())
      ->type_name("NAME")
      ->check(accepted_by([](const std::string& name) { variant_info(name); }));
  options->config.add_to(*command);
  add_foresight_options(*command, options->foresight);
  command
      ->add_option("--dist", options->distribution,
                   "Distribution of q, k, v: normal, uniform (both with mean 0), constant")
      ->capture_default_str()
      ->type_name("NAME")
      ->check(accepted_by([](const std::string& name) { distribution_from_name(name); }));
  command
      ->add_option("--sigma", options->sigma,
                   "Standard deviation of q, k, v; the value of each element if constant")
      ->capture_default_str()
      ->type_name("NUMBER")
      ->check(finite_number());
  command->add_option("--dtype", options->dtype, "Type of the inputs: f64, f32, f16")
      ->capture_default_str()
      ->type_name("TYPE")
      ->check(accepted_by([](const std::string& name) { element_type_from_name(name); }));
  command->add_flag("--no-expected", options->no_expected,
                    "Leave out /expected and /expected_grad (always float64 otherwise)");
  add_json_option(*command, options->json);
  command->callback([options, &action] { action = [options] { return generate(*options); }; });
}

}  // namespace LinAttn::app
