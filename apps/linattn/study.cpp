// SPDX-License-Identifier: BSD-3-Clause
#include "study.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <linattn/version.hpp>
#include <memory>
#include <sstream>

#include "commands.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "study_bench.hpp"
#include "study_data.hpp"
#include "study_methods.hpp"
#include "study_quality.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

constexpr double none = PassMeasure::none;
constexpr const char* pass_names[] = {"forward", "backward", "both"};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// "key : value" of a file of Linux; "" where there is none.
std::string system_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string today() {
  const std::time_t time = std::time(nullptr);
  char text[16] = "";
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&time));
  return text;
}

/// What must be the same for a study to be gone on with, by the names of the options.
std::vector<std::pair<std::string, io::Value>> identity(const StudyOptions& options) {
  return {{"version", LINATTN_VERSION},
          {"quick", options.quick},
          {"shapes", to_string(options.lists)},
          {"methods", join(options.methods)},
          {"dtype", to_string(options.scalar)},
          {"space", to_string(options.space)},
          {"threads", concurrency(options.space)},
          {"memory-limit", options.memory_limit},
          {"time-cap", options.time_cap},
          {"real", options.real},
          {"seed", options.seed}};
}

/// The rows of the lists.
class Study {
 public:
  Study(const StudyOptions& options, StudyData& data) : m_options(options), m_data(data), m_begin(now()), m_saved(m_begin) {
    for (const ShapeList& list : m_options.lists)
      for (const StudyShape& shape : list.shapes)
        for (const std::string& method : m_options.methods) m_total += weight(method, shape);
    m_quality_weight = m_options.quick ? 5 : 60;
    m_total += m_quality_weight;
  }

  void run() {
    for (const ShapeList& list : m_options.lists) {
      describe(list);
      for (std::size_t s = 0; s < list.shapes.size(); ++s) {
        std::unique_ptr<Bench> bench;
        for (const std::string& method : m_options.methods) {
          const StudyShape& shape = list.shapes[s];
          const double row_weight = weight(method, shape);
          if (status(list, method, s) == RowStatus::open) {
            m_progress.show(detail::message(list.name, " ", to_string(shape), ", ", method, left()));
            if (!bench) bench = make_bench(shape, bench_options());
            const auto predicted = prediction(method, shape);
            enter(list, s, method, bench->measure(method, predicted[0], predicted[1]));
            m_worked += row_weight;
            save_now_and_then();
          } else {
            m_total -= row_weight;
          }
        }
      }
    }
    const double before = m_worked;
    measure_quality({m_options.methods, m_options.real, m_options.seed, m_options.quick}, m_data,
                    [&](const std::string& what, double share) {
                      m_worked = before + share * m_quality_weight;
                      m_progress.show(what + left());
                      save_now_and_then();
                    });
  }

  void save() {
    m_data.write(m_options.output);
    m_saved = now();
  }
  void clear_line() const { m_progress.show(""); }

  void print() const {
    for (const ShapeList& list : m_options.lists) {
      std::cout << list.name << ": " << list.about << '\n';
      for (std::size_t s = 0; s < list.shapes.size(); ++s) {
        std::cout << "  B,H,Hkv,N,D,Dv,causal = " << to_string(list.shapes[s]) << "\n  " << padded("", 12);
        for (const char* head : {"forward", "backward", "both", "peak", "kept", "error"})
          std::cout << padded(head, 13);
        std::cout << '\n';
        for (const std::string& method : m_options.methods) print_row(list, s, method);
      }
    }
  }

 private:
  BenchOptions bench_options() const {
    return {.space = m_options.space,
            .scalar = m_options.scalar,
            .memory_limit = m_options.memory_limit,
            .time_cap = m_options.time_cap,
            .seconds = m_options.quick ? 0.05 : 1,
            .least_samples = m_options.quick ? 3 : 5,
            .whole_work = m_options.quick ? 1e9 : 1e10,
            .head_work = m_options.quick ? 4e9 : 4e11,
            .seed = m_options.seed};
  }

  /// Seconds that a row takes, roughly.
  double weight(const std::string& method, const StudyShape& shape) const {
    const double run = (study_work(method, shape.problem, shape.causal, Pass::forward) +
                        study_work(method, shape.problem, shape.causal, Pass::backward)) *
                       1e-11;
    return 2 * std::min(run, m_options.time_cap) + bench_options().seconds + 0.05;
  }

  std::string left() const {
    const double passed = now() - m_begin;
    if (m_worked <= 0) return "";
    const double seconds = passed * (m_total - m_worked) / m_worked;
    return detail::message("; ", static_cast<int>(100 * m_worked / m_total), " %, about ",
                           seconds < 90 ? detail::message(std::ceil(seconds), " s")
                                        : detail::message(std::ceil(seconds / 60), " min"),
                           " left");
  }

  void describe(const ShapeList& list) {
    const auto count = static_cast<std::int64_t>(list.shapes.size());
    m_data.attribute(list.name, "about", list.about);
    const auto column = [&](const char* name, const auto& value) {
      std::vector<double> values;
      for (const StudyShape& shape : list.shapes) values.push_back(static_cast<double>(value(shape)));
      m_data.set(list.name + "/" + name, {count}, values);
    };
    column("batch", [](const StudyShape& s) { return s.problem.batch; });
    column("heads", [](const StudyShape& s) { return s.problem.heads; });
    column("kv_heads", [](const StudyShape& s) { return s.problem.kv_heads; });
    column("n", [](const StudyShape& s) { return s.problem.nq; });
    column("d", [](const StudyShape& s) { return s.problem.d; });
    column("dv", [](const StudyShape& s) { return s.problem.dv; });
    column("causal", [](const StudyShape& s) { return s.causal ? 1 : 0; });
  }

  std::vector<double>& column(const ShapeList& list, const std::string& method, const char* name) const {
    const auto count = static_cast<std::int64_t>(list.shapes.size());
    return m_data.dataset(list.name + "/" + method + "/" + name, {count, static_cast<std::int64_t>(study_passes)}).values;
  }
  double value(const ShapeList& list, const std::string& method, const char* name, std::size_t s, std::size_t pass) const {
    return column(list, method, name)[s * study_passes + pass];
  }
  RowStatus status(const ShapeList& list, const std::string& method, std::size_t s, std::size_t pass = 0) const {
    const double found = value(list, method, "status", s, pass);
    return std::isfinite(found) ? static_cast<RowStatus>(static_cast<int>(found)) : RowStatus::open;
  }

  void enter(const ShapeList& list, std::size_t s, const std::string& method, const RowMeasure& row) {
    const Problem& p = list.shapes[s].problem;
    const auto tokens = static_cast<double>(p.batch * p.heads * p.nq);
    for (std::size_t pass = 0; pass < study_passes; ++pass) {
      const PassMeasure& m = row.passes[pass];
      const auto set = [&](const char* name, double number) {
        column(list, method, name)[s * study_passes + pass] = number;
      };
      set("status", static_cast<double>(m.status));
      set("seconds", m.seconds);
      set("seconds_least", m.least);
      set("seconds_most", m.most);
      set("samples", m.samples);
      set("tokens_per_second", tokens / m.seconds);
      set("peak_bytes", m.peak_bytes);
      set("error", m.error);
      set("error_of", static_cast<double>(m.error_of));
    }
    const auto count = static_cast<std::int64_t>(list.shapes.size());
    m_data.dataset(list.name + "/" + method + "/kept_bytes", {count}).values[s] = row.kept_bytes;
    if (!row.reason.empty())
      m_data.attribute(list.name + "/" + method, detail::message("reason_", s), row.reason);
  }

  /// Seconds of forward and backward, from the measured row of the method whose work is nearest, if it is not far, else
  /// from a short probe.
  std::array<double, 2> prediction(const std::string& method, const StudyShape& shape) {
    constexpr double far = 64;        // times as much work, or as little
    constexpr double reliable = 1e-4;  // seconds; what takes less is mostly launches
    std::array<double, 2> found{none, none};
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const std::size_t at = pass == Pass::forward ? 0 : 1;
      const double work = study_work(method, shape.problem, shape.causal, pass);
      double nearest = std::log(far);
      for (const ShapeList& list : m_options.lists)
        for (std::size_t s = 0; s < list.shapes.size(); ++s) {
          if (status(list, method, s, at) != RowStatus::measured) continue;
          if (value(list, method, "seconds", s, at) < reliable) continue;
          const StudyShape& other = list.shapes[s];
          const double ratio = work / study_work(method, other.problem, other.causal, pass);
          if (!(std::abs(std::log(ratio)) < nearest)) continue;
          nearest = std::abs(std::log(ratio));
          found[at] = value(list, method, "seconds", s, at) * ratio;
        }
    }
    constexpr std::int64_t brief = 512;
    if ((!std::isnan(found[0]) && !std::isnan(found[1])) || shape.problem.nq <= brief) return found;
    StudyShape part = shape;
    part.problem.nq = part.problem.nk = brief;
    BenchOptions options = bench_options();
    options.seconds = 0;
    options.least_samples = 1;
    found = make_bench(part, options)->probe(method);
    for (const Pass pass : {Pass::forward, Pass::backward})
      found[pass == Pass::forward ? 0 : 1] *= study_work(method, shape.problem, shape.causal, pass) /
                                             study_work(method, part.problem, part.causal, pass);
    return found;
  }

  void save_now_and_then() {
    if (now() - m_saved > 2) save();
  }

  void print_row(const ShapeList& list, std::size_t s, const std::string& method) const {
    std::cout << "  " << padded(method, 12);
    for (std::size_t pass = 0; pass < study_passes; ++pass) {
      const RowStatus found = status(list, method, s, pass);
      const double seconds = value(list, method, "seconds", s, pass);
      std::cout << padded(found == RowStatus::measured ? duration(seconds) : row_status_names[static_cast<int>(found)], 13);
    }
    const std::size_t last = status(list, method, s, 2) == RowStatus::measured ? 2 : 0;
    if (status(list, method, s, last) == RowStatus::measured) {
      const auto kept = m_data.find(list.name + "/" + method + "/kept_bytes")->values[s];
      const auto of = static_cast<std::size_t>(value(list, method, "error_of", s, last));
      std::cout << padded(bytes(static_cast<std::size_t>(value(list, method, "peak_bytes", s, last))), 13)
                << padded(bytes(static_cast<std::size_t>(kept)), 13) << number(value(list, method, "error", s, last), 2);
      if (of > 1) std::cout << " (" << error_of_names[of] << ')';
    } else if (const auto* reason = m_data.find_attribute(list.name + "/" + method, detail::message("reason_", s))) {
      std::cout << reason->as_string();
    }
    std::cout << '\n';
  }

  const StudyOptions& m_options;
  StudyData& m_data;
  Progress m_progress;
  double m_begin, m_saved, m_total = 0, m_worked = 0, m_quality_weight = 0;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

double machine_memory() {
  std::istringstream text(system_field("/proc/meminfo", "MemTotal"));
  double kibibytes = 0;
  text >> kibibytes;
  return kibibytes > 0 ? 1024 * kibibytes : 8e9;
}

ExitStatus run_study(const StudyOptions& options) {
  std::vector<std::string> others{options.output};
  if (!options.real.empty()) others.push_back(options.real);
  const JsonOutput json(options.json, others);
  if (!options.real.empty()) {
    std::error_code error;
    if (options.real == options.output || std::filesystem::equivalent(options.real, options.output, error))
      throw InvalidArgument("--real: expected a file of its own, found " + options.real + ", which the command writes");
    require_real(options.real);  // before hours of measuring
  }
  StudyData data;
  const bool resumed = std::filesystem::exists(options.output);
  if (resumed) data = StudyData::read(options.output);
  const Runtime runtime;
  for (const auto& [name, value] : identity(options)) {
    if (!resumed) {
      data.attribute("", name, value);
      continue;
    }
    const io::Value* const found = data.find_attribute("", name);
    if (found == nullptr || found->to_string() != value.to_string())
      throw InvalidArgument(detail::message(options.output, ": a study of other options: ", name, " is ",
                                            found == nullptr ? "absent" : found->to_string(), " there, ",
                                            value.to_string(), " now; give another file, or the same options"));
  }
  if (!resumed) {
    data.attribute("", "options", "version, quick, shapes, methods, dtype, space, threads, memory-limit, time-cap, "
                                  "real, seed");
    data.attribute("", "lists", join([&] {
                     std::vector<std::string> names;
                     for (const ShapeList& list : options.lists) names.push_back(list.name);
                     return names;
                   }()));
    data.attribute("", "passes", "forward, backward, both");
    data.attribute("", "status", "0 open, 1 measured, 2 OOM, 3 time, 4 mode");
    data.attribute("", "error_of", "0 none, 1 all, 2 one head, 3 256 rows of one head");
    data.attribute("", "cpu", system_field("/proc/cpuinfo", "model name"));
    data.attribute("", "kokkos", detail::message(KOKKOS_VERSION / 10000, ".", KOKKOS_VERSION / 100 % 100, ".",
                                                 KOKKOS_VERSION % 100));
    data.attribute("", "date", today());
    data.attribute("quality", "curves", join(quality_names(options.methods)));
  }
  catch_interrupts();
  Study study(options, data);
  try {
    study.save();  // a disk that takes nothing is found out now
    study.run();
    study.save();
  } catch (const Interrupted&) {
    study.save();
    study.clear_line();
    end_by_signal();
  }
  study.clear_line();
  if (!json.is_stdout()) study.print();
  Json document = json_document("study");
  data.add_to(document);
  json.write(document);
  return ExitStatus::done;
}

void add_study(CLI::App& app, Action& action) {
  struct Given {
    StudyOptions options;
    std::string shapes = "table2,lra,affine", methods, dtype = "f32", space;
    std::vector<std::string> single;
  };
  auto given = std::make_shared<Given>();
  CLI::App* const command = app.add_subcommand(
      "study",
      "All methods over lists of shapes: time, memory, error against double, and how near each is to exact attention. A "
      "study that was stopped goes on where it was.");
  command->add_option("OUT.h5", given->options.output, "Where the numbers go, or those of a study to go on with")
      ->required();
  command->add_flag("--quick", given->options.quick, "Fewer and smaller shapes")->disable_flag_override();
  CLI::Option* const shapes = command->add_option(
      "--shapes", given->shapes,
      "Lists of " + join(shape_list_names()) + ", separated by commas, or a file with B,H,Hkv,N,D,Dv,causal in each line");
  shapes->type_name("LIST|FILE")->capture_default_str();
  command->add_option("--shape", given->single, "A shape of your own instead, as in a file; may be repeated")
      ->type_name("B,H,Hkv,N,D,Dv,causal")
      ->allow_extra_args(false)
      ->excludes(shapes)
      ->check(accepted_by([](const std::string& text) { parse_shape(text); }));
  command
      ->add_option("--methods", given->methods, "Some of " + join(study_methods()) + ", separated by commas (default all)")
      ->type_name("NAMES");
  command->add_option("--dtype", given->dtype, "Storage: f64, f32, f16, bf16")
      ->type_name("NAME")
      ->capture_default_str()
      ->check(accepted_by([](const std::string& name) { scalar_from_name(name); }));
  command->add_option("--space", given->space, "Execution space (default: the fastest of this build)")
      ->type_name("NAME")
      ->check(accepted_by([](const std::string& name) { space_from_name(name); }));
  command
      ->add_option("--memory-limit", given->options.memory_limit,
                   "Bytes that a row may take, inputs included; others are OOM (default: half of the machine's)")
      ->type_name("BYTES")
      ->check(positive_number());
  command
      ->add_option("--time-cap", given->options.time_cap,
                   "Seconds that one run of both passes may take; rows that would need more are left out")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--real", given->options.real, "File with q, k, v for the distance to exact attention, too")
      ->type_name("FILE.h5");
  command->add_option("--seed", given->options.seed, "Of all inputs")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(integer_between(0, std::numeric_limits<std::int64_t>::max()));
  add_json_option(*command, given->options.json);
  command->callback([given, command, &action] {
    action = [given, command] {
      StudyOptions options = given->options;
      if (options.memory_limit == 0) options.memory_limit = std::floor(machine_memory() / 2);
      options.scalar = scalar_from_name(given->dtype);
      if (!given->space.empty()) options.space = space_from_name(given->space);
      const std::vector<std::string> wanted = command->count("--methods") == 0 ? study_methods() : split(given->methods);
      if (wanted.empty()) throw InvalidArgument("--methods: expected some of " + join(study_methods()) + ", found none");
      for (const std::string& name : wanted) require_study_method(name);
      for (const std::string& name : study_methods())
        if (std::find(wanted.begin(), wanted.end(), name) != wanted.end()) options.methods.push_back(name);
      const std::vector<std::string> lists = split(given->shapes);
      const auto& known = shape_list_names();
      if (!given->single.empty()) {
        ShapeList list{"user", "Shapes of the command line", {}};
        for (const std::string& text : given->single) list.shapes.push_back(parse_shape(text));
        options.lists.push_back(list);
      } else if (std::filesystem::exists(given->shapes) ||
                 std::find(known.begin(), known.end(), lists.empty() ? "" : lists[0]) == known.end()) {
        options.lists.push_back(read_shapes(given->shapes));
      } else {
        for (const std::string& name : lists) {
          options.lists.push_back(shape_list(name, options.quick));
          if (std::count(lists.begin(), lists.end(), name) > 1)
            throw InvalidArgument("--shapes: expected each list once, found " + name + " twice");
        }
      }
      return run_study(options);
    };
  });
}

}  // namespace LinAttn::app
