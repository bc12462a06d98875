// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <CLI/CLI.hpp>

#include "exit_status.hpp"

/// \file commands.hpp
/// The subcommands. Each adds itself to the parser and, if chosen, sets what is to be done.

namespace LinAttn::app {

void add_run(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_moments(CLI::App& app, Action& action);
void add_diagnose(CLI::App& app, Action& action);
void add_study(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

}  // namespace LinAttn::app
