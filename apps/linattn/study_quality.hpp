// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "study_data.hpp"

/// \file study_quality.hpp
/// How near the methods of linattn study are to exact attention, without training.

namespace LinAttn::app {

struct QualityOptions {
  std::vector<std::string> methods;
  std::string real;  ///< file with q, k, v, or empty
  std::uint64_t seed = 0;
  bool quick = false;
};

/// Enters below quality/ what `data` lacks; calls done() after each part. Needs the runtime of Kokkos.
///
/// gaussian: q and k of deviation sqrt(sigma_sm), v of deviation 1; (sigma_sm, draw). real: the heads of a file; (B,H).
/// The matrix A of a method, o = A v, is what it makes of v = 1.
/// \throws InvalidArgument if the file is no plain full attention of as many queries as keys
void measure_quality(const QualityOptions& options, StudyData& data,
                     const std::function<void(const std::string& what, double share)>& done);

/// \throws InvalidArgument or EnvironmentFailure for a file that measure_quality() would refuse
void require_real(const std::string& name);

/// Names of the curves for these methods: lln and lln-diag by two rules of moment matching.
std::vector<std::string> quality_names(const std::vector<std::string>& methods);

/// output_error, entropy, spectral_gap, logvar.
const std::vector<std::string>& quality_instruments();

}  // namespace LinAttn::app
