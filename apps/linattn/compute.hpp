// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <linattn/io/array.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "execution.hpp"
#include "settings.hpp"

/// \file compute.hpp
/// Runs the library on host arrays, whatever variant, execution space and precision are asked for.

namespace LinAttn::app {

/// A number of a variant that can be differentiated: an attribute of /config, and the name of a
/// gradient.
struct ParameterInfo {
  /// Which of the library's gradients it has.
  enum class Role { query, key, constant, scale };

  std::string name;
  Role role;
  bool one_for_all = false;  ///< never one for each head; its gradient is still one for each

  /// Heads of a problem that have one each.
  std::int64_t heads(const Problem& problem) const {
    return role == Role::key ? problem.kv_heads : problem.heads;
  }

  /// The one of these that belongs to its role.
  template <class T>
  T& pick(T& query, T& key, T& constant, T& scale) const {
    switch (role) {
      case Role::query:
        return query;
      case Role::key:
        return key;
      case Role::constant:
        return constant;
      case Role::scale:
        break;
    }
    return scale;
  }
};

/// What the list of variants says about one of them.
struct VariantInfo {
  std::string name;
  bool normalise_by_default = true;
  std::vector<ParameterInfo> parameters;
  bool has_shift = false;       ///< its states have base-2 exponents
  bool has_counts = false;      ///< its states have sums of values, and numbers of keys
  bool has_blocks = false;      ///< exact attention inside blocks is joined to it
  bool has_states = true;       ///< sums over keys that a sequence can be continued from
  bool may_be_plain = true;     ///< whether `normalise` can be 0
  bool has_own_scale = false;   ///< `scale` is that of the scores
  bool has_projection = false;  ///< features are of logits

  /// nullptr if it has none of that name.
  const ParameterInfo* parameter(std::string_view name) const;
};

/// The variants of this build, in the order of the library's list.
const std::vector<VariantInfo>& variants();
/// "identity, elu, ...".
std::string variant_names();
/// \throws InvalidArgument listing the variants of this build if it has none of that name.
const VariantInfo& variant_info(std::string_view name);

struct NamedArray {
  std::string name;
  io::Array array;
};

/// Standard deviations sigma_q, sigma_k (Hkv) of q and k, all equal where the scope is the tensor,
/// and what goes with them, given or matched: alpha (H), beta (Hkv), for variants that have them.
/// By name.
using HostMoments = std::map<std::string, std::vector<double>>;
inline constexpr const char* moment_names[] = {"sigma_q", "sigma_k", "alpha", "beta"};

/// What of a whole sequence may be used under a causal mask, where later tokens then change earlier
/// rows. Only a command line can allow it.
struct Foresight {
  bool max_norm = false;  ///< the largest norm
  bool moments = false;   ///< the moments to which rates are matched
};

/// Sums over keys, S (M,Hkv,R,Dv) and z (M,Hkv,R), or their cotangents; with int64 exponents shift
/// (M,Hkv,R), or with t (M,Hkv,Dv) and int64 numbers of keys m (M), for variants that have them.
struct HostState {
  io::Array S;
  io::Array z;
  std::optional<io::Array> shift;
  std::optional<io::Array> t;
  std::optional<io::Array> m;  ///< not of cotangents and gradients

  /// Those of S, z and t that there are, by name.
  std::vector<NamedArray> sums() const;
};

/// One problem of attention. Arrays behind pointers belong to the caller; those that are null are
/// absent.
struct Job {
  std::string variant;
  Problem problem;
  Settings settings;  ///< defaults included
  /// For each parameter of the variant one value, or one for each head; none if it is matched.
  std::vector<std::vector<double>> parameters;
  Foresight foresight{};
  const io::Array* q = nullptr;
  const io::Array* k = nullptr;
  const io::Array* v = nullptr;
  const io::Array* diag_r = nullptr;                  ///< of a variant with blocks; absent: 1/2
  const io::Array* diag_p = nullptr;                  ///< likewise
  const io::Array* projection = nullptr;              ///< (features, D), of a variant that has one
  std::shared_ptr<const io::Array> drawn_projection;  ///< what it points at where no file has it
  const io::Array* key_mask = nullptr;
  const io::Array* cu_seqlens_q = nullptr;
  const io::Array* cu_seqlens_k = nullptr;
  std::optional<HostState> state;  ///< before the first key
  bool wants_state = false;        ///< after the last key
  const io::Array* d_o = nullptr;  ///< cotangent of o; without it there are no gradients
  std::optional<HostState> d_state;
  bool wants_moments = false;      ///< also where nothing is matched to them
  bool wants_diagnostics = false;  ///< of the dense reference; diagnosis() measures them

  bool causal() const { return settings.flag("causal", false); }
  bool normalise() const { return settings.flag("normalise", true); }
  bool uses_diag_r() const { return app::uses_diag_r(settings); }
  bool uses_diag_p() const { return app::uses_diag_p(settings); }
  /// The factor of rows that are not normalised; 1 where `scale` is the variant's own.
  double output_scale() const;
  /// The values of one parameter, given once or not, for each of its heads.
  std::vector<double> per_head(const ParameterInfo& parameter) const;
};

/// Gives a job whose variant needs a projection, and that has none, the one that its settings
/// `features` and `seed` say. \throws EnvironmentFailure if there is no memory
void draw_projection(Job& job);

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
/// parameter under the parameter's name, diag_r and diag_p where they are used, and state/S,
/// state/z and state/t where there is an initial state that has them.
struct Results {
  io::Array o;
  std::optional<HostState> state{};
  std::vector<NamedArray> gradients{};
  std::optional<HostMoments> moments{};   ///< where they are matched or wanted
  std::vector<NamedArray> diagnostics{};  ///< (B,H), where they are wanted
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

/// \throws InvalidArgument for what the library refuses, row sums that nearly vanish included, and
/// EnvironmentFailure if memory is short.
Outcome compute(const Job& job, const Execution& execution);

/// Refuses the settings that compute() would refuse, as far as they can be judged without inputs.
/// Needs no Kokkos runtime. \throws InvalidArgument
void require_valid_settings(const Job& job);

}  // namespace LinAttn::app
