// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string>
#include <string_view>

/// \file exit_status.hpp
/// How a command ends, and what it says when it does not end well.

namespace LinAttn::app {

enum class ExitStatus {
  done = 0,
  verification_failed = 1,
  refused = 2,  ///< something the user can put right
  defect = 3    ///< ours
};

using Action = std::function<ExitStatus()>;

/// Prints "<program>: <text>" as one line on standard error, after what is on its way to standard
/// output.
void complain(std::string_view program, std::string_view text);

/// Status of the action, or of the exception that it ends with, about which it complains. A
/// standard output that takes no more is refused like any other output.
ExitStatus guarded(const std::string& program, const Action& action);

}  // namespace LinAttn::app
