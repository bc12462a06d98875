// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <linattn/io/array.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "execution.hpp"

/// \file compute.hpp
/// Runs the library on host arrays, whatever variant, execution space and precision are asked for.

namespace LinAttn::app {

/// What the list of variants says about one of them. Names of parameters it lacks are empty.
struct VariantInfo {
  std::string name;
  bool normalise_by_default = true;
  std::string query_parameter;
  std::string key_parameter;
  bool has_shift = false;  ///< its states have base-2 exponents
};

/// The variants of this build, in the order of the library's list.
const std::vector<VariantInfo>& variants();
/// "identity, elu, ...".
std::string variant_names();
/// \throws InvalidArgument listing the variants of this build if it has none of that name.
const VariantInfo& variant_info(std::string_view name);
/// Names of the parameters that variants have, each once.
std::vector<std::string> parameter_names();

struct NamedArray {
  std::string name;
  io::Array array;
};

/// Sums over keys, S (M,Hkv,R,Dv) and z (M,Hkv,R), or their cotangents; with int64 exponents shift
/// (M,Hkv,R) for variants that have them.
struct HostState {
  io::Array S;
  io::Array z;
  std::optional<io::Array> shift;
};

/// One problem of attention. Arrays behind pointers belong to the caller; those that are null are
/// absent.
struct Job {
  std::string variant;
  Problem problem;
  bool causal = false;
  bool normalise = true;
  double scale = 1.0;
  std::vector<double> query_parameter;  ///< (H), empty if the variant has none
  std::vector<double> key_parameter;    ///< (Hkv), likewise
  const io::Array* q = nullptr;
  const io::Array* k = nullptr;
  const io::Array* v = nullptr;
  const io::Array* key_mask = nullptr;
  const io::Array* cu_seqlens_q = nullptr;
  const io::Array* cu_seqlens_k = nullptr;
  std::optional<HostState> state;  ///< before the first key
  bool wants_state = false;        ///< after the last key
  const io::Array* d_o = nullptr;  ///< cotangent of o; without it there are no gradients
  std::optional<HostState> d_state;
};

/// How to compute it.
struct Execution {
  Space space = Space::serial;
  Scalar scalar = Scalar::f64;
  int chunk = 0;     ///< 0: the plan decides
  int segments = 0;  ///< likewise
  int tiles = 0;     ///< likewise
  int repeat = 0;    ///< timed runs after a first one; 0: the first one only
};

/// Output o and, where a cotangent was given, the gradients: q, k, v, one value per head for each
/// parameter under the parameter's name, and state/S and state/z where there is an initial state.
struct Results {
  io::Array o;
  std::optional<HostState> state;
  std::vector<NamedArray> gradients;
};

/// How one pass was run.
struct PassReport {
  Plan plan;
  std::size_t workspace_bytes = 0;
  std::vector<double> seconds;  ///< of each timed run
  double median() const;
};

struct Outcome {
  Results results;
  PassReport forward;
  std::optional<PassReport> backward;
  std::size_t saved_bytes = 0;  ///< kept by forward for backward
};

/// \throws InvalidArgument for what the library refuses, EnvironmentFailure if memory is short.
Outcome compute(const Job& job, const Execution& execution);

}  // namespace LinAttn::app
