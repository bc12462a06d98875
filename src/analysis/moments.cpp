// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/analysis/moments.hpp>

namespace LinAttn {

std::string_view to_string(MomentScope scope) noexcept { return scope == MomentScope::tensor ? "tensor" : "head"; }

std::string_view to_string(CrossTerm cross) noexcept {
  switch (cross) {
    case CrossTerm::none:
      return "none";
    case CrossTerm::all_pairs:
      return "all_pairs";
    case CrossTerm::same_position:
      break;
  }
  return "same_position";
}

MomentScope moment_scope_from_name(std::string_view name) {
  for (const MomentScope scope : {MomentScope::tensor, MomentScope::head})
    if (name == to_string(scope)) return scope;
  throw InvalidArgument(detail::message("LinAttn: expected a scope tensor or head, found '", name, "'"));
}

CrossTerm cross_term_from_name(std::string_view name) {
  for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position})
    if (name == to_string(cross)) return cross;
  throw InvalidArgument(
      detail::message("LinAttn: expected a cross term none, all_pairs or same_position, found '", name, "'"));
}

}  // namespace LinAttn
