// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <linattn/analysis/log_variance.hpp>
#include <linattn/analysis/moments.hpp>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "execution.hpp"
#include "instruments.hpp"
#include "json_output.hpp"
#include "moments_study.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

constexpr MomentRule all_rules[] = {MomentRule::authors, MomentRule::table, MomentRule::fit, MomentRule::entropy,
                                    MomentRule::fixed};

struct MomentsOptions {
  std::string input;
  std::string study;
  std::string rule = "all";
  std::string scope = "all";
  std::string cross = "none";
  double rate = 1.9;
  bool exact = false;
  std::int64_t exact_up_to = 2048;
  std::int64_t rows = 256;
  std::uint64_t seed = 0;
  bool quick = false;
  std::string json;
};

std::vector<MomentRule> rules_from_name(const std::string& name) {
  std::vector<MomentRule> rules;
  for (const MomentRule rule : all_rules)
    if (name == "all" || name == to_string(rule)) rules.push_back(rule);
  if (rules.empty()) throw InvalidArgument("expected all, authors, table, fit, entropy or fixed, found '" + name + "'");
  return rules;
}

std::vector<MomentScope> scopes_from_name(const std::string& name) {
  std::vector<MomentScope> scopes;
  for (const MomentScope scope : {MomentScope::tensor, MomentScope::head})
    if (name == "all" || name == to_string(scope)) scopes.push_back(scope);
  if (scopes.empty()) throw InvalidArgument("expected all, tensor or head, found '" + name + "'");
  return scopes;
}

/// Rows that count of one head of q or k, `most` of them at most, chosen at random and in order.
std::vector<double> rows_of(const DiagnosedTensors& t, bool of_q, std::int64_t b, std::int64_t h, std::int64_t most,
                            const CounterRandom& random) {
  const std::int64_t heads = of_q ? t.p.heads : t.p.kv_heads, n = of_q ? t.p.nq : t.p.nk;
  const std::vector<double>& x = of_q ? t.q : t.k;
  const std::vector<std::uint8_t>& mask = of_q ? t.query_mask() : t.key_mask;
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < n; ++i)
    if (mask.empty() || mask[static_cast<std::size_t>(b * n + i)] != 0) numbers.push_back(i);
  const auto count = static_cast<std::int64_t>(numbers.size());
  if (count > most) {
    for (std::int64_t i = 0; i < most; ++i) {  // the first `most` places of a shuffle
      const double u = random.uniform(static_cast<std::uint64_t>((b * heads + h) * most + i));
      std::swap(numbers[static_cast<std::size_t>(i)],
                numbers[static_cast<std::size_t>(i + static_cast<std::int64_t>(u * static_cast<double>(count - i)))]);
    }
    numbers.resize(static_cast<std::size_t>(most));
    std::sort(numbers.begin(), numbers.end());
  }
  std::vector<double> result;
  for (const std::int64_t i : numbers) {
    const auto first = x.begin() + ((b * heads + h) * n + i) * t.p.d;
    result.insert(result.end(), first, first + t.p.d);
  }
  return result;
}

/// Of one head, or the mean over heads and sequences.
struct MatrixMean {
  double variance = 0, within = 0, numerator = 0, entropy = 0;
  double count = 0;

  void add(const MatrixMoments& m) {
    variance += m.variance;
    within += m.within;
    numerator += m.numerator;
    entropy += m.entropy;
    count += 1;
  }
  MatrixMean mean() const {
    if (count == 0) {
      const double none = std::numeric_limits<double>::quiet_NaN();
      return {none, none, none, none, 0};
    }
    return {variance / count, within / count, numerator / count, entropy / count, count};
  }
};

struct RuleResult {
  MomentRule rule;
  double alpha, beta, st2;
  std::optional<double> fenton, romeo;
  MatrixMean measured;
};

/// One scope: the tensor (head -1) or one key/value head.
struct GroupResult {
  std::int64_t head = -1;
  double sigma_q, sigma_k, cross, sm2;
  MatrixMean softmax;
  std::vector<RuleResult> rules;
};

/// Everything about a file.
class Analysis {
 public:
  Analysis(const DiagnosedTensors& tensors, const MomentsOptions& options, bool packed)
      : m_t(tensors),
        m_options(options),
        m_cross(cross_term_from_name(options.cross)),
        m_measures(!packed && tensors.p.d > 0 && tensors.p.nk > 0) {}

  std::vector<GroupResult> of(MomentScope scope, const Progress& progress) {
    const Problem& p = m_t.p;
    std::vector<GroupResult> groups;
    const std::int64_t count = scope == MomentScope::tensor ? std::min<std::int64_t>(1, p.kv_heads) : p.kv_heads;
    const HostDeviations measured = measure(scope);
    HostDeviations matched = measured;
    if (m_cross == CrossTerm::none) matched.cross.clear();
    for (std::int64_t g = 0; g < count; ++g) {
      GroupResult group;
      const auto at = static_cast<std::size_t>(g);
      group.head = scope == MomentScope::tensor ? -1 : g;
      group.sigma_q = measured.sigma_q[at];
      group.sigma_k = measured.sigma_k[at];
      group.cross = measured.cross[at];
      group.sm2 = group.sigma_q * group.sigma_q * group.sigma_k * group.sigma_k +
                  (m_cross == CrossTerm::none ? 0 : group.cross);
      groups.push_back(group);
    }
    for (const MomentRule rule : rules_from_name(m_options.rule)) {
      const LlnRates rates = rates_of_deviations(matched, p.group(), p.d, moment_options(scope, rule));
      const MomentLine line = rule == MomentRule::fit ? *line_of_fit() : published_line;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        GroupResult& group = groups[g];
        RuleResult result{rule, rates.alpha[g * static_cast<std::size_t>(p.group())], rates.beta[g], 0, {}, {}, {}};
        result.st2 = std::pow(result.alpha * group.sigma_q, 2) + std::pow(result.beta * group.sigma_k, 2);
        result.fenton = fenton_log_variance(result.st2, static_cast<double>(p.d));
        result.romeo = line.slope * result.st2 + line.intercept;
        group.rules.push_back(result);
      }
    }
    for (GroupResult& group : groups) measure_matrices(group, progress);
    return groups;
  }

  bool measures() const { return m_measures; }
  bool samples() const { return !m_options.exact && std::max(m_t.p.nq, m_t.p.nk) > m_options.exact_up_to; }

 private:
  MomentOptions moment_options(MomentScope scope, MomentRule rule) {
    MomentOptions options{.scope = scope, .rule = rule, .cross = m_cross, .rate = m_options.rate};
    if (rule == MomentRule::fit) options.line = line_of_fit();
    return options;
  }

  const std::optional<MomentLine>& line_of_fit() {
    if (!m_line) m_line = fit_line(std::max<std::int64_t>(1, m_t.p.d));
    return m_line;
  }

  /// C_cross is measured, to be shown, where nothing was asked for too.
  HostDeviations measure(MomentScope scope) const {
    MomentOptions options{.scope = scope, .cross = m_cross};
    if (m_cross == CrossTerm::none)
      options.cross = m_t.p.nq == m_t.p.nk ? CrossTerm::same_position : CrossTerm::all_pairs;
    return measured_deviations(m_t, options);
  }

  /// Means over the heads of the group and over the sequences.
  void measure_matrices(GroupResult& group, const Progress& progress) const {
    const Problem& p = m_t.p;
    const std::int64_t most = samples() ? m_options.rows : std::numeric_limits<std::int64_t>::max();
    const CounterRandom random(m_options.seed, 7);
    for (std::int64_t b = 0; b < p.batch && m_measures; ++b)
      for (std::int64_t h = 0; h < p.heads; ++h) {
        const std::int64_t g = h / p.group();
        if (group.head >= 0 && group.head != g) continue;
        progress.show(detail::message("sequence ", b, ", head ", h));
        const std::vector<double> q = rows_of(m_t, true, b, h, most, random);
        const std::vector<double> k = rows_of(m_t, false, b, g, std::numeric_limits<std::int64_t>::max(), random);
        if (q.empty() || k.empty()) continue;
        group.softmax.add(measure_softmax_matrix(q, k, p.d, 1 / std::sqrt(static_cast<double>(p.d))));
        for (RuleResult& rule : group.rules) rule.measured.add(measure_lln_matrix(q, k, p.d, rule.alpha, rule.beta));
      }
    group.softmax = group.softmax.mean();
    for (RuleResult& rule : group.rules) rule.measured = rule.measured.mean();
  }

  const DiagnosedTensors& m_t;
  const MomentsOptions& m_options;
  CrossTerm m_cross;
  bool m_measures;
  std::optional<MomentLine> m_line;
};

void print(const GroupResult& g, double d) {
  std::cout << (g.head < 0 ? std::string("tensor") : "head " + std::to_string(g.head)) << '\n'
            << "  sigma_q " << number(g.sigma_q) << ", sigma_k " << number(g.sigma_k) << ", C_cross " << number(g.cross)
            << ", sigma_sm^2 " << number(g.sm2) << '\n'
            << "  softmax: Var(log P) predicted " << number(g.sm2, 4) << " (Prop 3.1), "
            << number(softmax_log_variance(g.sm2, d), 4) << " (finite D); measured " << number(g.softmax.variance, 4)
            << ", within rows " << number(g.softmax.within, 4) << "; entropy " << number(g.softmax.entropy, 4)
            << " bits\n";
  const auto line = [](const std::vector<std::string>& cells) {
    std::cout << "  ";
    for (std::size_t i = 0; i < cells.size(); ++i) std::cout << padded(cells[i], i == 0 ? 9 : 10);
    std::cout << '\n';
  };
  line({"LLN", "alpha", "beta", "st2", "Fenton", "Romeo", "log w", "log P", "rows", "entropy"});
  for (const RuleResult& r : g.rules)
    line({std::string(to_string(r.rule)), number(r.alpha, 5), number(r.beta, 5), number(r.st2, 5), number(*r.fenton, 4),
          number(*r.romeo, 4), number(r.measured.numerator, 4), number(r.measured.variance, 4),
          number(r.measured.within, 4), number(r.measured.entropy, 4)});
}

Json json_of(const MatrixMean& m, bool with_numerator) {
  Json json{
      {"log_variance", m.variance}, {"log_variance_within", m.within}, {"entropy", m.entropy}, {"matrices", m.count}};
  if (with_numerator) json["log_variance_numerator"] = m.numerator;
  return json;
}

Json json_of(const GroupResult& g, double d) {
  Json json{{"head", g.head < 0 ? Json() : Json(g.head)},
            {"sigma_q", g.sigma_q},
            {"sigma_k", g.sigma_k},
            {"cross", g.cross},
            {"sigma_sm2", g.sm2},
            {"softmax",
             {{"predicted", g.sm2},
              {"predicted_finite_d", softmax_log_variance(g.sm2, d)},
              {"measured", json_of(g.softmax, false)}}},
            {"rules", Json::array()}};
  for (const RuleResult& r : g.rules)
    json["rules"].push_back({{"rule", to_string(r.rule)},
                             {"alpha", r.alpha},
                             {"beta", r.beta},
                             {"st2", r.st2},
                             {"fenton", *r.fenton},
                             {"romeo", *r.romeo},
                             {"measured", json_of(r.measured, true)}});
  return json;
}

ExitStatus moments(const MomentsOptions& options) {
  const JsonOutput json(options.json, {options.input});
  const io::TensorFile file = io::TensorFile::read(options.input);
  const DiagnosedTensors tensors = read_tensors(file);
  const Problem& p = tensors.p;
  if (cross_term_from_name(options.cross) == CrossTerm::same_position && p.nq != p.nk)
    throw InvalidArgument(detail::message(
        options.input, ": /inputs: expected Nq = Nk for --cross same_position, found Nq = ", p.nq, " and Nk = ", p.nk));
  const Runtime runtime;
  const Progress progress;
  Analysis analysis(tensors, options, file.packed());
  Json document = json_document("moments");
  document["file"] = options.input;
  document["problem"] = to_json(p);
  document["cross"] = options.cross;
  document["sampled_rows"] = analysis.samples() ? Json(options.rows) : Json();
  document["groups"] = Json::array();
  if (!json.is_stdout()) {
    std::cout << options.input << ": " << p.to_string() << '\n';
    if (!analysis.measures())
      std::cout << "matrices of packed sequences and of no keys are not measured\n";
    else if (analysis.samples())
      std::cout << "matrices measured in " << options.rows << " rows of each head\n";
  }
  for (const MomentScope scope : scopes_from_name(options.scope))
    for (const GroupResult& group : analysis.of(scope, progress)) {
      progress.show("");
      if (!json.is_stdout()) print(group, static_cast<double>(p.d));
      document["groups"].push_back(json_of(group, static_cast<double>(p.d)));
    }
  json.write(document);
  return ExitStatus::done;
}

}  // namespace

void add_moments(CLI::App& app, Action& action) {
  auto options = std::make_shared<MomentsOptions>();
  CLI::App* const command = app.add_subcommand(
      "moments",
      "Moments of q and k, the rates of LLN attention that every rule makes of them, and predicted and measured "
      "log-variances of the matrices without a causal mask.");
  CLI::Option* const input = command->add_option("IN.h5", options->input,
                                                 "Tensors; hidden keys are left out, and where "
                                                 "Nq = Nk the queries of hidden keys too");
  CLI::Option* const study =
      command->add_option("--study", options->study,
                          "Simulate instead: the propositions, the rules and the fits on Gaussian tensors, written to "
                          "this file");
  input->excludes(study);
  study->type_name("OUT.h5");
  const auto choice = [&](const char* name, std::string& target, const char* text, auto take) {
    return command->add_option(name, target, text)
        ->capture_default_str()
        ->type_name("NAME")
        ->excludes(study)
        ->check(accepted_by([take](const std::string& value) { take(value); }));
  };
  choice("--moments", options->rule, "Rules: all, authors, table, fit, entropy or fixed", rules_from_name);
  choice("--moments-scope", options->scope, "Moments of all, the tensor or each head: all, tensor or head",
         scopes_from_name);
  choice("--cross", options->cross, "What of C_cross goes into the target: none, all_pairs or same_position",
         cross_term_from_name);
  CLI::Option* const rate = command->add_option("--rate", options->rate, "alpha = beta of rule fixed")
                                ->capture_default_str()
                                ->type_name("NUMBER")
                                ->excludes(study)
                                ->check(finite_number());
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
  count("--rows", options->rows, "Rows measured otherwise", 1)->excludes(exact)->excludes(study);
  count("--seed", options->seed, "Of the choice of rows, or of the study", 0);
  command->add_flag("--quick", options->quick, "With --study: short sequences and few draws, to try it out")
      ->needs(study)
      ->disable_flag_override();
  add_json_option(*command, options->json);
  command->callback([options, rate, &action] {
    if (options->input.empty() && options->study.empty()) throw CLI::RequiredError("IN.h5 or --study");
    if (rate->count() > 0 && options->rule != "all" && options->rule != to_string(MomentRule::fixed))
      throw CLI::ValidationError("--rate", "expected --moments fixed or all, found --moments " + options->rule);
    action = [options] {
      if (!options->study.empty())
        return write_moments_study(
            {.output = options->study, .json = options->json, .seed = options->seed, .quick = options->quick});
      return moments(*options);
    };
  });
}

}  // namespace LinAttn::app
