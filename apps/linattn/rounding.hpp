// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>
#include <vector>

#include "compute.hpp"

/// \file rounding.hpp
/// What of a job changes when its tensors are stored in 16 bits.

namespace LinAttn::app {

/// Whether a quantity (o, q, alpha ...) is stored as the inputs are; sums and gradients of
/// parameters are wider.
bool is_stored(const std::string& quantity);

/// The last place of the smallest numbers of a 16-bit type, where a quantity is stored in it: it is
/// off by up to half of that however small it is. 0 for wider types.
double least_step(Scalar scalar, const std::string& quantity);

/// Refuses finite numbers that a 16-bit type turns into infinite ones. A mask (B, Nk) makes those
/// of hidden keys irrelevant. \throws InvalidArgument naming dataset and index
void require_in_range(const std::string& dataset, const io::Array& array, Scalar scalar,
                      const io::Array* key_mask = nullptr);

/// A job whose q, k, v and cotangent of o are rounded to a 16-bit type (and are of type float32,
/// which holds them); for wider types the job itself. Must not outlive the job.
class RoundedJob {
 public:
  /// \throws InvalidArgument as require_in_range()
  RoundedJob(const Job& job, Scalar scalar);
  RoundedJob(const RoundedJob&) = delete;
  RoundedJob& operator=(const RoundedJob&) = delete;

  const Job& job() const { return m_job; }

 private:
  Job m_job;
  std::vector<io::Array> m_arrays;
};

}  // namespace LinAttn::app
