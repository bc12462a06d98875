// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>

#include "exit_status.hpp"

/// \file diagnose_study.hpp
/// linattn diagnose --study: the instruments against temperature.

namespace LinAttn::app {

struct DiagnoseStudyOptions {
  std::string output;  ///< HDF5
  std::string json;    ///< target of --json, or empty
  std::string real;    ///< a file of real q and k, or empty
  std::uint64_t seed = 0;
  bool quick = false;  ///< fewer tokens and draws
};

/// Writes datasets below /study (docs/lln.md) and the same numbers as JSON: of softmax, LLN by the rules of moment
/// matching, quadratic, relu and elu attention on Gaussian q and k, over temperature, several draws each; of log-normal
/// theory; and of the heads of a real file.
ExitStatus write_diagnose_study(const DiagnoseStudyOptions& options);

}  // namespace LinAttn::app
