// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/analysis/diagnostics.hpp>
#include <linattn/analysis/moments.hpp>
#include <linattn/io/tensor_file.hpp>
#include <linattn/problem.hpp>
#include <string>
#include <vector>

#include "json_output.hpp"

/// \file instruments.hpp
/// diagnose() of the library on host arrays, by the name of a kernel.

namespace LinAttn::app {

/// Kernels that have instruments, in the order of the report: softmax and the variants whose weights are never
/// negative.
const std::vector<std::string>& diagnosed_kernels();
/// \throws InvalidArgument for any other name
void require_diagnosed_kernel(const std::string& name);

/// Row-major q (B,H,Nq,D), k (B,Hkv,Nk,D), key_mask (B,Nk) or empty.
struct DiagnosedTensors {
  Problem p;
  std::vector<double> q, k;
  std::vector<std::uint8_t> key_mask{};

  /// Of moments: what pads keys pads queries, where they have the same number.
  const std::vector<std::uint8_t>& query_mask() const {
    static const std::vector<std::uint8_t> none;
    return p.nq == p.nk ? key_mask : none;
  }
};
DiagnosedTensors read_tensors(const io::TensorFile& file);
/// \throws InvalidArgument naming the file
void require_not_packed(const io::TensorFile& file);

/// alpha (H) and beta (Hkv) of lln.
struct LlnRates {
  std::vector<double> alpha, beta;
};

/// Moments of q and k, one value for each key/value head; `cross`, C_cross, may be empty.
struct HostDeviations {
  std::vector<double> sigma_q, sigma_k, cross{};
};
/// measure_moments() of the library, C_cross if it is asked for. Needs the runtime of Kokkos.
HostDeviations measured_deviations(const DiagnosedTensors& tensors, const MomentOptions& options);
/// match_rates() of the library, `group` query heads for each key/value head, D features. Needs the runtime of Kokkos.
LlnRates rates_of_deviations(const HostDeviations& from, std::int64_t group, std::int64_t d,
                             const MomentOptions& options);

/// Both, from the moments of the tensor or of each key/value head. Needs the runtime of Kokkos.
LlnRates matched_rates(const DiagnosedTensors& tensors, MomentRule rule, bool per_head);

/// The instruments of one kernel, in double. Needs the runtime of Kokkos.
Diagnostics run_instruments(const std::string& kernel, const LlnRates& rates, const DiagnosedTensors& tensors,
                            const DiagnoseOptions& options);

/// The numbers of the instruments, by the names of the HDF5 layout where it has them.
struct NamedInstrument {
  const char* name;
  double HeadDiagnostics::*value;
  double HeadDiagnostics::*error;  // nullptr: none
};
const std::vector<NamedInstrument>& instruments();

/// Means over all heads, standard errors of these means included.
HeadDiagnostics mean_of(const Diagnostics& d);

/// Infinities and NaNs become null.
Json to_json(const HeadDiagnostics& head);

}  // namespace LinAttn::app
