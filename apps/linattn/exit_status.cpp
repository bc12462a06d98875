// SPDX-License-Identifier: BSD-3-Clause
#include "exit_status.hpp"

#include <exception>
#include <iostream>
#include <linattn/error.hpp>
#include <new>

#include "text.hpp"

namespace LinAttn::app {

void complain(std::string_view program, std::string_view text) {
  std::cout.flush();
  std::cerr << program << ": " << one_line(text) << std::endl;
}

ExitStatus guarded(const std::string& program, const Action& action) {
  const auto defect = [&](const std::string& text) {
    complain(program, "a defect of LinAttn: " + text +
                          "; please report it with the output of 'linattn info'");
    return ExitStatus::defect;
  };
  try {
    const ExitStatus status = action();
    if (std::cout.flush()) return status;
    complain(program, "standard output: cannot be written");
  } catch (const InvalidArgument& error) {
    complain(program, error.what());
  } catch (const EnvironmentFailure& error) {
    complain(program, error.what());
  } catch (const std::bad_alloc&) {
    complain(program, "not enough memory for this problem on this machine");
  } catch (const std::exception& error) {
    return defect(error.what());
  } catch (...) {
    return defect("an exception of unknown type");
  }
  return ExitStatus::refused;
}

}  // namespace LinAttn::app
