// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>

#include "exit_status.hpp"

/// \file moments_study.hpp
/// linattn moments --study: what the theory of moment matching says, against simulated matrices.

namespace LinAttn::app {

struct MomentsStudyOptions {
  std::string output;  ///< HDF5
  std::string json;    ///< target of --json, or empty
  std::uint64_t seed = 0;
  bool quick = false;  ///< short sequences and few draws, to try it out
};

/// Writes datasets below /study (docs/lln.md) and the same numbers as JSON.
ExitStatus write_moments_study(const MomentsStudyOptions& options);

}  // namespace LinAttn::app
