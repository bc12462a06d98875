// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/version.hpp>
#include <string>

#include "commands.hpp"

namespace {

/// "linattn run", or "linattn" before a subcommand is known.
std::string program_of(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) return "linattn " + command->get_name();
  return "linattn";
}

}  // namespace

int main(int argc, char** argv) {
  using namespace LinAttn::app;
  CLI::App app("Linear attention, forward and backward, on tensors in HDF5 files.", "linattn");
  app.set_version_flag("--version", "linattn " LINATTN_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 done, 1 verification failed, 2 something you can put right (one line on "
      "standard error says what), 3 a defect of LinAttn.");
  Action action;
  add_run(app, action);
  add_verify(app, action);
  add_generate(app, action);
  add_moments(app, action);
  add_diagnose(app, action);
  add_study(app, action);
  add_info(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    action = [&] {
      app.exit(request);
      return ExitStatus::done;
    };
    return static_cast<int>(guarded(program_of(app), action));
  } catch (const CLI::RequiredError& error) {
    // what stands in place of a subcommand is what the user wants to be told
    const std::string word = argc > 1 ? argv[1] : "";
    if (!app.get_subcommands().empty() || word.empty() || word.starts_with("-")) {
      complain(program_of(app), std::string(error.what()) + " (see " + program_of(app) + " --help)");
    } else {
      std::string names;
      for (const CLI::App* command : app.get_subcommands({})) names += (names.empty() ? "" : ", ") + command->get_name();
      complain("linattn", "unknown subcommand '" + word + "'; there are " + names + " (see linattn --help)");
    }
    return static_cast<int>(ExitStatus::refused);
  } catch (const CLI::ParseError& error) {
    complain(program_of(app), std::string(error.what()) + " (see " + program_of(app) + " --help)");
    return static_cast<int>(ExitStatus::refused);
  }
  return static_cast<int>(guarded(program_of(app), action));
}
