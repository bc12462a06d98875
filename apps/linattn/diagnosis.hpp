// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>
#include <vector>

#include "compute.hpp"

/// \file diagnosis.hpp
/// The instruments that files have expectations for, measured on a job.

namespace LinAttn::app {

/// Their names in the layout.
inline constexpr const char* diagnostic_names[] = {
    "entropy",  "entropy_biased", "entropy_unbiased", "spectral_gap",
    "variance", "logvar",         "logvar_within"};

/// Each of them (B, H), of all rows, in the space and precision of the execution; for 16 bits,
/// whose job is rounded, in float. `moments` has the rates where they are matched. \throws
/// InvalidArgument for what the library refuses: packed sequences, negative weights
std::vector<NamedArray> diagnosis(const Job& job, const Execution& execution,
                                  const std::optional<HostMoments>& moments);

}  // namespace LinAttn::app
