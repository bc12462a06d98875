// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "execution.hpp"
#include "study_shapes.hpp"

/// \file study_bench.hpp
/// One row of linattn study: time, memory and error of a method for a shape.

namespace LinAttn::app {

enum class RowStatus {
  open,      ///< not measured yet
  measured,
  memory,    ///< it would need more than the limit
  time,      ///< a run would take longer than the cap
  mode       ///< the method cannot do it
};
inline constexpr const char* row_status_names[] = {"open", "measured", "OOM", "time", "mode"};

/// What the error is that of.
enum class ErrorOf { none, all, head, rows };
inline constexpr const char* error_of_names[] = {"none", "all", "one head", "256 rows of one head"};

/// forward, backward, both.
inline constexpr std::size_t study_passes = 3;

struct PassMeasure {
  static constexpr double none = std::numeric_limits<double>::quiet_NaN();

  RowStatus status = RowStatus::open;
  double seconds = none;  ///< median
  double least = none, most = none;
  double samples = 0;
  double peak_bytes = none;  ///< beyond the inputs q, k, v and d_o: outputs, workspace, and what is kept
  double error = none;       ///< largest over the largest element, of o; of dq, dk or dv
  ErrorOf error_of = ErrorOf::none;
};

struct RowMeasure {
  std::array<PassMeasure, study_passes> passes{};
  double kept_bytes = PassMeasure::none;  ///< from forward to backward, beside inputs and o
  std::string reason{};                   ///< of mode
};

struct BenchOptions {
  Space space;
  Scalar scalar;
  double memory_limit;  ///< bytes
  double time_cap;      ///< seconds of one run of both passes
  double seconds;       ///< of all samples of a row, about
  int least_samples;
  double whole_work;  ///< FLOPs of study_work() up to which errors are measured of everything
  double head_work;   ///< FLOPs up to which they are of one head, and not of some of its rows
  std::uint64_t seed;
};

/// Thrown where the process was asked to end.
struct Interrupted {};
/// From now on SIGINT and SIGTERM end what is measured after the present run.
void catch_interrupts();
/// \throws Interrupted if one came
void throw_if_interrupted();
/// Ends the process by the signal that came.
[[noreturn]] void end_by_signal();

/// Gaussian q, k, v, d_o of one shape, made when first needed.
class Bench {
 public:
  virtual ~Bench() = default;
  /// `forward` and `backward`: seconds that they will take, NaN where unknown.
  virtual RowMeasure measure(const std::string& method, double forward, double backward) = 0;
  /// Seconds of one forward and one backward run, without memory beyond that.
  virtual std::array<double, 2> probe(const std::string& method) = 0;
};
/// Needs the runtime of Kokkos.
std::unique_ptr<Bench> make_bench(const StudyShape& shape, const BenchOptions& options);

}  // namespace LinAttn::app
