// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>

#include "attention_file.hpp"
#include "commands.hpp"
#include "diagnose_study.hpp"
#include "execution.hpp"
#include "instruments.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

struct CommandOptions {
  std::string input;
  std::vector<std::string> kernels;
  std::optional<double> alpha, beta;
  std::string moments, scope;
  bool causal = false, full = false;
  bool exact = false;
  std::int64_t exact_up_to = DiagnoseOptions().exact_up_to;
  std::int64_t rows = 256;
  std::uint64_t seed = 0;
  bool mean_only = false;
  std::string json;
  DiagnoseStudyOptions study;
};

/// Rates of lln and where they come from.
struct Rates {
  LlnRates values;
  std::string origin;
};

/// What a call of the library refuses, with the name of the file.
template <class Call>
auto naming(const std::string& file, const Call& call) {
  try {
    return call();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(file + ": " + error.what());
  }
}

/// Whether the variant of a file has a rate of queries and one of keys.
bool has_rates(const std::string& variant) {
  return std::any_of(variants().begin(), variants().end(), [&](const VariantInfo& info) {
    return info.name == variant && info.parameter("alpha") != nullptr && info.parameter("beta") != nullptr;
  });
}

/// \throws InvalidArgument if the file has one rate without the other
Rates rates_of(const CommandOptions& options, const io::TensorFile& file, const DiagnosedTensors& t) {
  const auto repeated = [](double x, std::int64_t n) { return std::vector<double>(static_cast<std::size_t>(n), x); };
  if (options.alpha) return {{repeated(*options.alpha, t.p.heads), repeated(*options.beta, t.p.kv_heads)}, "given"};
  std::string rule = options.moments, scope = options.scope;
  const io::Config& config = file.config();
  if (rule.empty() && has_rates(file.variant())) {
    if (config.has("moments")) {
      rule = config.text("moments");
      if (scope.empty() && config.has("moments_scope")) scope = config.text("moments_scope");
    } else if (config.has("alpha") || config.has("beta")) {
      if (!scope.empty())
        throw InvalidArgument(options.input +
                              ": --moments-scope: expected --moments beside it, because the file has alpha and beta");
      const auto of_file = [&](const char* name) {
        const ParameterInfo& parameter = *variant_info(file.variant()).parameter(name);
        const std::vector<double> values = parameter_values(file, parameter);
        return values.size() == 1 ? repeated(values[0], parameter.heads(t.p)) : values;
      };
      return {{of_file("alpha"), of_file("beta")}, "of the file"};
    }
  }
  if (rule.empty()) rule = "authors";
  if (scope.empty()) scope = "tensor";
  const bool per_head = moment_scope_from_name(scope) == MomentScope::head;
  return {naming(options.input, [&] { return matched_rates(t, moment_rule_from_name(rule), per_head); }),
          "moments of the " + scope + " by rule " + rule};
}

void print_line(const std::string& name, const HeadDiagnostics& d) {
  std::cout << "  " << padded(name, 10);
  for (const double x : {d.entropy, d.entropy_biased, d.entropy_unbiased, d.spectral_gap, d.relative_variance, d.logvar,
                         d.logvar_within, d.temperature})
    std::cout << padded(std::isnan(x) ? "-" : number(x, 4), 11);
  std::cout << '\n';
}

void print_kernel(const std::string& name, const Diagnostics& d, bool heads) {
  std::cout << name << "\n  " << padded("", 10);
  for (const char* column : {"entropy", "biased", "unbiased", "gap", "N2 Var P", "Var ln P", "within", "tau"})
    std::cout << padded(column, 11);
  std::cout << '\n';
  for (std::int64_t b = 0; heads && b < d.batch; ++b)
    for (std::int64_t h = 0; h < d.heads; ++h) print_line(detail::message("b", b, " h", h), d(b, h));
  const HeadDiagnostics mean = mean_of(d);
  print_line("mean", mean);
  if (mean.sampled) {
    std::cout << "  standard errors of the means: entropy " << number(mean.entropy_error, 2) << ", Var ln P "
              << number(mean.logvar_error, 2) << ", within " << number(mean.logvar_within_error, 2) << '\n';
  }
  if (mean.empty_rows > 0) std::cout << "  rows without weight: " << mean.empty_rows << '\n';
  if (mean.zero_entries > 0) std::cout << "  entries that are 0, left out of ln P: " << mean.zero_entries << '\n';
  if (!mean.absent.empty()) std::cout << "  not measured: " << mean.absent << '\n';
}

ExitStatus diagnose_file(const CommandOptions& options) {
  const JsonOutput json(options.json, {options.input});
  const io::TensorFile file = io::TensorFile::read(options.input);
  require_not_packed(file);
  const DiagnosedTensors t = read_tensors(file);
  DiagnoseOptions how{.causal = options.causal || (file.causal() && !options.full),
                      .exact = options.exact,
                      .exact_up_to = options.exact_up_to,
                      .rows = options.rows,
                      .seed = options.seed};
  if (how.causal && t.p.nq > t.p.nk)
    throw InvalidArgument(
        detail::message(options.input, ": --causal: expected Nq <= Nk, found Nq = ", t.p.nq, " and Nk = ", t.p.nk));
  const std::vector<std::string>& kernels = options.kernels.empty() ? diagnosed_kernels() : options.kernels;

  const Runtime runtime;
  const Progress progress;
  const bool has_lln = std::find(kernels.begin(), kernels.end(), "lln") != kernels.end();
  const Rates rates = has_lln ? rates_of(options, file, t) : Rates{};
  Json document = json_document("diagnose");
  document["file"] = options.input;
  document["problem"] = to_json(t.p);
  document["causal"] = how.causal;
  document["seed"] = options.seed;
  document["kernels"] = Json::object();
  if (!json.is_stdout())
    std::cout << options.input << ": " << t.p.to_string() << (how.causal ? ", causal" : ", full") << '\n';
  for (const std::string& kernel : kernels) {
    progress.show(kernel);
    const Diagnostics d = naming(options.input, [&] { return run_instruments(kernel, rates.values, t, how); });
    progress.show("");
    Json entry = Json::object();
    std::string title = kernel;
    if (kernel == "lln") {
      entry["alpha"] = rates.values.alpha;
      entry["beta"] = rates.values.beta;
      entry["rates"] = rates.origin;
      if (!rates.values.alpha.empty()) {
        const auto [least, most] = std::minmax_element(rates.values.alpha.begin(), rates.values.alpha.end());
        title += ", alpha " + number(*least, 4) + (*least != *most ? " to " + number(*most, 4) : "");
        const auto [low, high] = std::minmax_element(rates.values.beta.begin(), rates.values.beta.end());
        title += ", beta " + number(*low, 4) + (*low != *high ? " to " + number(*high, 4) : "");
      }
      title += " (" + rates.origin + ")";
    }
    if (!json.is_stdout()) print_kernel(title, d, !options.mean_only);
    entry["mean"] = to_json(mean_of(d));
    entry["heads"] = Json::array();
    for (std::int64_t b = 0; b < d.batch; ++b) {
      Json row = Json::array();
      for (std::int64_t h = 0; h < d.heads; ++h) row.push_back(to_json(d(b, h)));
      entry["heads"].push_back(row);
    }
    document["kernels"][kernel] = entry;
  }
  json.write(document);
  return ExitStatus::done;
}

}  // namespace

void add_diagnose(CLI::App& app, Action& action) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* const command = app.add_subcommand(
      "diagnose",
      "Concentration of attention matrices: row entropy in bits, what of log2 N - entropy is common to all rows "
      "(biased) "
      "and what is not (unbiased), spectral gap, N^2 Var P, variance of ln P over the matrix and within rows, and the "
      "temperature 1 / sqrt(Var ln P).");
  CLI::Option* const input =
      command->add_option("IN.h5", options->input, "File with /inputs/q, k; hidden keys are left out");
  CLI::Option* const study =
      command->add_option("--study", options->study.output,
                          "Simulate instead: the instruments against temperature, written to this "
                          "file");
  study->type_name("OUT.h5");
  input->excludes(study);
  CLI::Option* const real = command->add_option("--real", options->study.real,
                                                "With --study: the same instruments of the heads of this file");
  real->type_name("FILE.h5");
  real->needs(study);
  command->add_flag("--quick", options->study.quick, "With --study: fewer and smaller matrices")
      ->needs(study)
      ->disable_flag_override();
  command
      ->add_option("--variant", options->kernels, "Which of " + join(diagnosed_kernels()) + " (default: all of them)")
      ->type_name("NAME")
      ->excludes(study)
      ->check(accepted_by(require_diagnosed_kernel));
  CLI::Option* const alpha = command->add_option("--alpha", options->alpha, "Rate of the queries of lln, with --beta");
  CLI::Option* const beta = command->add_option("--beta", options->beta, "Rate of the keys of lln");
  CLI::Option* const moments =
      command->add_option("--moments", options->moments,
                          "Rates of lln by moment matching: authors, table, fit, entropy, fixed (default: the file's "
                          "rates, or authors)");
  CLI::Option* const scope =
      command->add_option("--moments-scope", options->scope, "Moments of the tensor or of each head (default tensor)");
  for (CLI::Option* option : {alpha, beta}) option->type_name("NUMBER")->check(finite_number())->excludes(study);
  for (CLI::Option* option : {moments, scope}) option->type_name("NAME")->excludes(study)->excludes(alpha);
  alpha->needs(beta);
  beta->needs(alpha);
  moments->check(accepted_by([](const std::string& name) { moment_rule_from_name(name); }));
  scope->check(accepted_by([](const std::string& name) { moment_scope_from_name(name); }));
  CLI::Option* const causal =
      command->add_flag("--causal", options->causal, "Keys up to the query only (default: as the file says)");
  CLI::Option* const full = command->add_flag("--full", options->full, "All keys");
  causal->disable_flag_override()->excludes(full)->excludes(study);
  full->disable_flag_override()->excludes(study);
  const auto count = [&](const char* name, auto& target, const char* text, std::int64_t least) {
    return command->add_option(name, target, text)
        ->capture_default_str()
        ->type_name("COUNT")
        ->check(integer_between(least, std::numeric_limits<std::int64_t>::max()));
  };
  CLI::Option* const exact = command->add_flag("--exact", options->exact, "Measure all rows")
                                 ->disable_flag_override()
                                 ->excludes(study);
  count("--exact-up-to", options->exact_up_to, "Measure all rows of at most so many tokens", 0)
      ->excludes(exact)
      ->excludes(study);
  count("--rows", options->rows, "Rows measured otherwise, with standard errors", 2)->excludes(exact)->excludes(study);
  count("--seed", options->seed, "Of the choice of rows, or of the study", 0);
  command->add_flag("--mean", options->mean_only, "Print means over the heads only")
      ->disable_flag_override()
      ->excludes(study);
  add_json_option(*command, options->json);
  command->callback([options, rates_options = std::vector<CLI::Option*>{alpha, beta, moments, scope}, &action] {
    if (options->input.empty() && options->study.output.empty()) throw CLI::RequiredError("IN.h5 or --study");
    const std::vector<std::string>& kernels = options->kernels;
    if (!kernels.empty() && std::find(kernels.begin(), kernels.end(), "lln") == kernels.end())
      for (const CLI::Option* option : rates_options)
        if (option->count() > 0)
          throw CLI::ValidationError(option->get_name(), "expected lln among --variant, found " + join(kernels));
    action = [options] {
      if (options->study.output.empty()) return diagnose_file(*options);
      DiagnoseStudyOptions study = options->study;
      study.json = options->json;
      study.seed = options->seed;
      return write_diagnose_study(study);
    };
  });
}

}  // namespace LinAttn::app
