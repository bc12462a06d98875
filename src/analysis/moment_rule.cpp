// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/analysis/moment_rule.hpp>
#include <linattn/analysis/moment_table.hpp>
#include <linattn/error.hpp>

namespace LinAttn {

std::string_view to_string(MomentRule rule) noexcept {
  switch (rule) {
    case MomentRule::authors:
      return "authors";
    case MomentRule::table:
      return "table";
    case MomentRule::fit:
      return "fit";
    case MomentRule::entropy:
      return "entropy";
    case MomentRule::fixed:
      break;
  }
  return "fixed";
}

MomentRule moment_rule_from_name(std::string_view name) {
  for (const MomentRule rule :
       {MomentRule::authors, MomentRule::table, MomentRule::fit, MomentRule::entropy, MomentRule::fixed})
    if (name == to_string(rule)) return rule;
  throw InvalidArgument(
      detail::message("LinAttn: expected a rule authors, table, fit, entropy or fixed, found '", name, "'"));
}

namespace detail {
namespace {

static_assert(LogTable::points == moment_table::points);

/// The rows of the two neighbours of D, and the share of the second: linear in log2 D, also beyond the last.
struct Neighbours {
  int row[2];
  double share;
};

Neighbours neighbours_of(double d) {
  int first = 0;
  while (first + 2 < moment_table::dimensions && d >= moment_table::d[first + 1]) ++first;
  return {{first, first + 1},
          std::log2(d / moment_table::d[first]) / std::log2(moment_table::d[first + 1] / moment_table::d[first])};
}

using Columns = double[moment_table::points];

/// log(to) over log(from); either is a table with rows for D or the columns that all rows share.
LogTable log_table(double d, const Columns* from_rows, const Columns* to_rows, const Columns& shared) {
  const Neighbours near = neighbours_of(d);
  LogTable table;
  table.share = near.share;
  for (int r = 0; r < 2; ++r) {
    for (int p = 0; p < LogTable::points; ++p) {
      table.x[r][p] = std::log(from_rows ? from_rows[near.row[r]][p] : shared[p]);
      table.y[r][p] = std::log(to_rows ? to_rows[near.row[r]][p] : shared[p]);
    }
  }
  return table;
}

bool is_finite(double x) { return x - x == 0; }

}  // namespace

RateRule bind_rule(MomentRule rule, std::int64_t d, const std::optional<MomentLine>& line, double rate) {
  RateRule bound;
  bound.rule = rule;
  bound.d = d > 1 ? static_cast<double>(d) : 1.0;
  switch (rule) {
    case MomentRule::authors:
      break;
    case MomentRule::fit:
      if (!line) throw InvalidArgument("LinAttn: rule fit needs a line, for one that of fit_line(), found none");
      if (!(line->slope > 0) || !is_finite(line->slope) || !is_finite(line->intercept))
        throw InvalidArgument(message("LinAttn: the line of rule fit must be finite and rise, found slope ",
                                      line->slope, " and intercept ", line->intercept));
      bound.line = *line;
      break;
    case MomentRule::table:
      bound.inverse = log_table(bound.d, moment_table::log_variance, nullptr, moment_table::st2);
      break;
    case MomentRule::entropy:
      bound.deficit = log_table(bound.d, nullptr, moment_table::softmax_deficit, moment_table::sm2);
      bound.inverse = log_table(bound.d, moment_table::lln_deficit, nullptr, moment_table::st2);
      break;
    case MomentRule::fixed:
      if (!is_finite(rate))
        throw InvalidArgument(message("LinAttn: the rate of rule fixed must be finite, found ", rate));
      bound.rate = rate;
      break;
  }
  return bound;
}

}  // namespace detail
}  // namespace LinAttn
