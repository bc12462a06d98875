// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>

#include "attention_file.hpp"
#include "commands.hpp"
#include "comparison.hpp"
#include "compute.hpp"
#include "diagnosis.hpp"
#include "json_output.hpp"
#include "options.hpp"
#include "oracle.hpp"
#include "progress.hpp"
#include "rounding.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

constexpr const char* program = "linattn verify";

struct VerifyOptions {
  std::vector<std::string> files;
  ExecutionOptions execution;
  Foresight foresight;
  bool brief = false;
  std::string json;
};

/// One comparison of a file, and where it was computed.
struct Row {
  Space space;
  Scalar scalar;
  std::string dataset;
  Comparison comparison;

  /// How much of the tolerance was used; above 1 (or not a number) is a failure.
  double share() const {
    return comparison.error == 0 ? 0 : comparison.error / comparison.tolerance;
  }
};

/// A precision in which a file cannot be verified, and why.
struct Skipped {
  Scalar scalar;
  std::string reason;
};

/// What came of one file.
struct Verification {
  std::vector<Row> rows;
  std::vector<Skipped> skipped;
};

std::vector<Execution> executions(const ExecutionOptions& given, Scalar scalar) {
  std::vector<Space> spaces = enabled_spaces();
  if (!given.space.empty()) spaces = {space_from_name(given.space)};
  std::vector<Execution> all;
  for (const Space space : spaces)
    all.push_back({.space = space,
                   .scalar = scalar,
                   .chunk = given.chunk,
                   .segments = given.segments,
                   .tiles = given.tiles});
  return all;
}

/// A gradient of one value per head in the form of the expected one, which may be the sum.
io::Array in_form_of(const io::Array& expected, const io::Array& found) {
  if (expected.extents() == found.extents()) return found;
  return io::Array(sum_over_heads(found).as<double>(), expected.extents());
}

/// The gradient of that name. \throws InvalidArgument if there is none, for `dataset`
const io::Array& gradient_of(const Results& results, const std::string& name, const std::string& dataset) {
  for (const NamedArray& gradient : results.gradients)
    if (gradient.name == name) return gradient.array;
  throw InvalidArgument(dataset + ": expected the gradient of something that the variant has with this /config, "
                                  "found a dataset");
}

/// A moment in the form of the expected one: a number, or one for each key/value or query head.
io::Array moment_of(const HostMoments& moments, const std::string& name, const io::Array& expected,
                    const io::TensorFile& file, const std::string& dataset) {
  const auto found = moments.find(name);
  if (found == moments.end())
    throw InvalidArgument(detail::message(dataset, ": expected nothing, because variant ", file.variant(),
                                          " has no ", name, ", found a dataset"));
  const std::vector<double>& values = found->second;
  const auto wanted = static_cast<std::size_t>(expected.size()), had = values.size();
  std::vector<double> result(wanted);
  for (std::size_t i = 0; i < wanted && had > 0; ++i) result[i] = values[i * had / wanted];
  for (std::size_t head = 0; head < had && wanted < had; ++head)
    if (wanted == 0 || values[head] != result[head * wanted / had])
      throw InvalidArgument(detail::message(file.file().string(), ": ", dataset, ": expected ", had,
                                            " numbers, because those of the heads differ, found ",
                                            wanted));
  return io::Array(result, expected.extents());
}

/// Compares with what the file expects, or with `reference` where that is not null.
class Comparer {
 public:
  Comparer(const io::TensorFile& file, const RoundedReference* reference,
           const Execution& execution, std::vector<Row>& rows)
      : m_file(file), m_reference(reference), m_execution(execution), m_rows(rows) {}

  void compare_all(const Results& results) {
    const io::Tolerances& tolerances = m_file.expected_tolerances();
    if (m_file.has("/expected/o"))
      add("/expected/o", "o", tolerances, results, [](const Results& r) { return r.o; });
    for (const std::string& name : m_file.names("/expected/moments")) {
      const std::string dataset = "/expected/moments/" + name;
      add(dataset, "moments/" + name, tolerances, results, [&](const Results& r) {
        return moment_of(*r.moments, name, m_file.at(dataset), m_file, dataset);
      });
    }
    for (const std::string& name : m_file.names("/expected/diagnostics"))
      add_diagnostic(name, results);
    if (const std::optional<HostState> expected = read_state(m_file, "/expected/state"))
      add_state(*expected, *results.state, tolerances);
    for (const std::string& name : m_file.names("/expected_grad")) add_gradient(name, results);
    for (const std::string& name : m_file.names("/expected_grad/state"))
      add_gradient("state/" + name, results);
  }

 private:
  /// `part` picks from results what the dataset is about.
  template <class Part>
  void add(const std::string& dataset, const std::string& quantity,
           const io::Tolerances& tolerances, const Results& results, const Part& part) {
    const io::Array& stored = m_file.at(dataset);
    const io::Array found = in_form_of(stored, part(results));
    if (m_reference == nullptr) return add(dataset, quantity, stored, found, tolerances);
    const std::vector<double> excused = excused_errors(
        m_execution.scalar, quantity, in_form_of(stored, part(m_reference->effects)));
    const double tolerance = tolerance_for(tolerances, m_execution.scalar, io::ElementType::f64);
    add(dataset, compare(quantity, in_form_of(stored, part(m_reference->values)), found, tolerance,
                         excused));
  }

  void add(const std::string& dataset, const std::string& quantity, const io::Array& expected,
           const io::Array& found, const io::Tolerances& tolerances) {
    const double tolerance =
        tolerance_for(tolerances, m_execution.scalar, m_file.at(dataset).type());
    add(dataset, compare(quantity, expected, found, tolerance));
  }

  void add(const std::string& dataset, const Comparison& comparison) {
    m_rows.push_back({m_execution.space, m_execution.scalar, dataset, comparison});
  }

  /// Entropies are differences of numbers of up to log2 Nk, whose roundings are excused.
  void add_diagnostic(const std::string& name, const Results& results) {
    const std::string dataset = "/expected/diagnostics/" + name;
    const auto of = [&](const std::vector<NamedArray>& diagnostics) -> const io::Array& {
      for (const NamedArray& entry : diagnostics)
        if (entry.name == name) return entry.array;
      throw std::logic_error("no diagnostics of the name " + name);
    };
    const io::Array& stored = m_file.at(dataset);
    const io::Array& expected =
        m_reference == nullptr ? stored : of(m_reference->values.diagnostics);
    if (m_reference != nullptr)
      for (const double value : expected.as<double>())
        if (std::isnan(value))
          throw InvalidArgument("the dense reference has no " + name + " of such matrices");
    std::vector<double> excused;
    if (name.starts_with("entropy")) {
      const double unit = m_execution.scalar == Scalar::f64 ? 0x1p-53 : 0x1p-24;
      const auto keys = static_cast<double>(std::max<std::int64_t>(2, m_file.problem().nk));
      excused.assign(static_cast<std::size_t>(expected.size()),
                     conditioned_roundings * unit * std::log2(keys));
    }
    const double tolerance =
        tolerance_for(m_file.expected_tolerances(), m_execution.scalar,
                      m_reference == nullptr ? stored.type() : io::ElementType::f64);
    add(dataset,
        compare("diagnostics/" + name, expected, of(results.diagnostics), tolerance, excused));
  }

  /// States of one value can have different exponents: both go to the larger one.
  void add_state(const HostState& expected, const HostState& found,
                 const io::Tolerances& tolerances) {
    const auto add_part = [&](const std::string& name, io::Array x, io::Array y) {
      const std::string dataset = "/expected/state/" + name;
      if (!m_file.has(dataset)) return;
      if (expected.shift) {
        const io::Array common = larger_shift(*expected.shift, *found.shift);
        x = rescaled(x, *expected.shift, common);
        y = rescaled(y, *found.shift, common);
      }
      add(dataset, name, x, y, tolerances);
    };
    const std::vector<NamedArray> sums = expected.sums(), found_sums = found.sums();
    for (std::size_t i = 0; i < sums.size(); ++i)
      add_part(sums[i].name, sums[i].array, found_sums[i].array);
    if (const char* counts = "/expected/state/m"; m_file.has(counts))
      add(counts, compare("m", *expected.m, *found.m, 0));  // numbers of keys are exact
  }

  void add_gradient(const std::string& name, const Results& results) {
    const std::string dataset = "/expected_grad/" + name;
    add(dataset, name, m_file.gradient_tolerances(), results,
        [&](const Results& r) { return gradient_of(r, name, dataset); });
  }

  const io::TensorFile& m_file;
  const RoundedReference* m_reference;
  const Execution& m_execution;
  std::vector<Row>& m_rows;
};

/// Why a file cannot be verified in 16 bits, for which the expectation is computed; empty if it
/// can.
std::string obstacle_of_rounding(const Job& job) {
  if (job.wants_state) return "the dense reference does not know states";
  return reference_obstacle(job);
}

/// The reference for rounded inputs. \throws InvalidArgument if the type cannot hold what it gives
RoundedReference reference_for(const io::TensorFile& file, const Job& rounded, Scalar scalar) {
  RoundedReference reference = compute_rounded_reference(rounded, scalar);
  if (file.has("/expected/o")) require_in_range("/expected/o", reference.values.o, scalar);
  for (const NamedArray& gradient : reference.values.gradients)
    if (is_stored(gradient.name) && file.has("/expected_grad/" + gradient.name))
      require_in_range("/expected_grad/" + gradient.name, gradient.array, scalar);
  return reference;
}

/// Rows of one precision.
void verify_in(Scalar scalar, const io::TensorFile& file, const Job& job,
               const ExecutionOptions& options, std::vector<Row>& rows) {
  const RoundedJob rounded(job, scalar);
  std::optional<RoundedReference> reference;
  if (is_16_bit(scalar)) {
    if (const std::string obstacle = obstacle_of_rounding(job); !obstacle.empty())
      throw InvalidArgument(obstacle);
    reference = reference_for(file, rounded.job(), scalar);
  }
  for (const Execution& execution : executions(options, scalar)) {
    Results results = compute(rounded.job(), execution).results;
    if (job.wants_diagnostics)
      results.diagnostics = diagnosis(rounded.job(), execution, results.moments);
    Comparer(file, reference ? &*reference : nullptr, execution, rows).compare_all(results);
  }
}

/// \throws InvalidArgument if the file holds nothing that could be verified, or more than can be
Verification verify_file(const io::TensorFile& file, const VerifyOptions& options) {
  const bool gradients =
      !file.names("/expected_grad").empty() || !file.names("/expected_grad/state").empty();
  const bool states = !file.names("/expected/state").empty();
  const bool moments = !file.names("/expected/moments").empty();
  const bool diagnostics = !file.names("/expected/diagnostics").empty();
  if (!gradients && !states && !moments && !diagnostics && !file.has("/expected/o"))
    throw InvalidArgument(file.file().string() +
                          ": /expected/o: expected a dataset to verify against, found nothing");
  require_supported(file, Use::verify);
  Job job = make_job(file, gradients, options.foresight);
  job.wants_state = states;
  job.wants_moments = moments;
  job.wants_diagnostics = diagnostics;
  Verification result;
  const std::string& dtype = options.execution.dtype;
  for (const Scalar scalar :
       dtype.empty() ? scalars() : std::vector<Scalar>{scalar_from_name(dtype)}) {
    std::vector<Row> rows;
    try {
      verify_in(scalar, file, job, options.execution, rows);
    } catch (const InvalidArgument& error) {
      if (!is_16_bit(scalar) || !dtype.empty())
        throw InvalidArgument(file.file().string() + ": " + error.what());
      result.skipped.push_back({scalar, error.what()});
    }
    result.rows.insert(result.rows.end(), rows.begin(), rows.end());
  }
  std::stable_sort(result.rows.begin(), result.rows.end(),
                   [](const Row& a, const Row& b) { return a.space < b.space; });
  return result;
}

class Table {
 public:
  Table(const VerifyOptions& options) : m_brief(options.brief) {
    for (const std::string& file : options.files)
      m_file_width = std::max(m_file_width, file.size() + 2);
    for (const VariantInfo& info : variants())
      m_variant_width = std::max(m_variant_width, info.name.size() + 2);
  }

  void head() const {
    line("file", "variant", "space", "dtype", "quantity", "error", "tolerance", "");
  }

  /// In brief, of the rows of a file only those that failed and the one nearest to its tolerance.
  void add(const std::string& file, const std::string& variant, const Verification& result) const {
    const std::vector<Row>& rows = result.rows;
    const auto nearest = std::max_element(
        rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.share() < b.share(); });
    for (auto row = rows.begin(); row != rows.end(); ++row) {
      const Comparison& c = row->comparison;
      if (m_brief && c.ok && row != nearest) continue;
      line(file, variant, to_string(row->space), to_string(row->scalar), symbol(c.quantity),
           number(c.error, 3), number(c.tolerance, 3), c.ok ? "ok" : "FAIL");
      if (!c.ok) std::cout << "    worst element: " << row->dataset << worst_of(c) << '\n';
    }
    if (!m_brief)
      for (const Skipped& skipped : result.skipped)
        std::cout << padded(file, m_file_width) << padded(variant, m_variant_width)
                  << padded("-", 8) << padded(to_string(skipped.scalar), 7)
                  << "skipped: " << skipped.reason << '\n';
    std::cout.flush();
  }

  static std::string worst_of(const Comparison& c) {
    return (c.worst.empty() ? " " : "") + worst_element(c);
  }

 private:
  void line(const std::string& file, const std::string& variant, std::string_view space,
            std::string_view scalar, const std::string& quantity, const std::string& error,
            const std::string& tolerance, const char* verdict) const {
    std::cout << padded(file, m_file_width) << padded(variant, m_variant_width) << padded(space, 8)
              << padded(scalar, 7) << padded(quantity, 17) << padded(error, 11)
              << padded(tolerance, 11) << verdict << '\n';
  }

  bool m_brief;
  std::size_t m_file_width = 6;
  std::size_t m_variant_width = 9;
};

/// What became of all files.
struct Tally {
  std::size_t comparisons = 0;
  std::size_t failed = 0;
  std::size_t unusable = 0;
  std::size_t skipped = 0;
  std::string worst_file;
  Row worst{};

  void add(const std::string& file, const Verification& result) {
    skipped += result.skipped.size();
    for (const Row& row : result.rows) {
      ++comparisons;
      if (row.comparison.ok) continue;
      if (failed++ == 0 || row.share() > worst.share()) {
        worst_file = file;
        worst = row;
      }
    }
  }

  ExitStatus status() const {
    if (failed > 0)
      return ExitStatus::verification_failed;  // a wrong number outweighs an unread file
    return unusable > 0 ? ExitStatus::refused : ExitStatus::done;
  }
};

Json row_json(const Row& row) {
  Json json{
      {"space", to_string(row.space)}, {"dtype", to_string(row.scalar)}, {"dataset", row.dataset}};
  json.update(to_json(row.comparison));
  return json;
}

ExitStatus verify(const VerifyOptions& options) {
  const JsonOutput json(options.json, options.files);
  const bool printing = !json.is_stdout();
  Json document = json_document("verify");
  document["files"] = Json::array();
  Tally tally;

  const Runtime runtime;
  const Progress progress;
  const Table table(options);
  const auto set_aside = [&](Json& entry, const std::string& reason) {
    progress.show("");
    complain(program, reason);
    entry["error"] = reason;
    ++tally.unusable;
  };
  if (printing) table.head();
  for (const std::string& name : options.files) {
    Json entry{{"file", name}};
    progress.show(name);
    try {
      const io::TensorFile file = io::TensorFile::read(name);
      const Verification result = verify_file(file, options);
      progress.show("");
      if (printing) table.add(name, file.variant(), result);
      tally.add(name, result);
      entry["variant"] = file.variant();
      entry["problem"] = to_json(file.problem());
      entry["causal"] = file.causal();
      entry["settings"] = to_json(Settings(file.config().values()));
      entry["comparisons"] = Json::array();
      for (const Row& row : result.rows) entry["comparisons"].push_back(row_json(row));
      entry["skipped"] = Json::array();
      for (const Skipped& skipped : result.skipped)
        entry["skipped"].push_back(
            {{"dtype", to_string(skipped.scalar)}, {"reason", skipped.reason}});
    } catch (const InvalidArgument& error) {
      set_aside(entry, error.what());
    } catch (const EnvironmentFailure& error) {
      set_aside(entry, error.what());
    }
    document["files"].push_back(entry);
  }

  document["comparisons"] = tally.comparisons;
  document["failed"] = tally.failed;
  document["unusable_files"] = tally.unusable;
  document["skipped"] = tally.skipped;
  if (printing)
    std::cout << options.files.size() << " files, " << tally.comparisons << " comparisons, "
              << tally.failed << " failed, " << tally.unusable << " files could not be used"
              << (tally.skipped == 0
                      ? ""
                      : detail::message("; 16-bit types skipped ", tally.skipped, " times"))
              << '\n';
  json.write(document);
  if (tally.failed > 0) {
    const Row& worst = tally.worst;
    complain(program,
             detail::message(tally.failed, " of ", tally.comparisons,
                             " comparisons failed; worst: ", tally.worst_file, ": ", worst.dataset,
                             Table::worst_of(worst.comparison), " (", to_string(worst.space), ", ",
                             to_string(worst.scalar), ", error ", number(worst.comparison.error, 3),
                             ", tolerance ", number(worst.comparison.tolerance, 3), ")"));
  }
  return tally.status();
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* const command = app.add_subcommand(
      "verify",
      "Compares output and gradients with those that files expect, on every execution space and in "
      "every precision; in 16 bits with the dense reference for the rounded inputs.");
  command->add_option("FILE.h5", options->files, "Files with /expected or /expected_grad")
      ->required();
  options->execution.add_to(*command, "all", "all");
  add_foresight_options(*command, options->foresight);
  command->add_flag(
      "--brief", options->brief,
      "Show of each file only what failed and the comparison nearest to its tolerance");
  add_json_option(*command, options->json);
  command->callback([options, &action] { action = [options] { return verify(*options); }; });
}

}  // namespace LinAttn::app
