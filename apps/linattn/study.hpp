// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "execution.hpp"
#include "exit_status.hpp"
#include "study_shapes.hpp"

/// \file study.hpp
/// linattn study: every method over lists of shapes, and its quality against exact attention.

namespace LinAttn::app {

struct StudyOptions {
  std::string output;                ///< HDF5; a study that is there already is gone on with
  std::string json;                  ///< target of --json, or empty
  std::string real;                  ///< file with q, k, v for the quality, or empty
  std::vector<ShapeList> lists;
  std::vector<std::string> methods;  ///< in the order of study_methods()
  Space space = default_space();
  Scalar scalar = Scalar::f32;
  double memory_limit = 0;  ///< bytes
  double time_cap = 30;     ///< seconds of one run of both passes
  std::uint64_t seed = 0;
  bool quick = false;
};

/// Measures what the file lacks and writes it (docs/comparison.md), after every few seconds and at the end.
/// \throws InvalidArgument if the file is that of other options, naming the first that differs
ExitStatus run_study(const StudyOptions& options);

/// Bytes of memory that the machine has.
double machine_memory();

}  // namespace LinAttn::app
