// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/io/tensor_file.hpp>
#include <string>

#include "compute.hpp"

/// \file attention_file.hpp
/// From a file in the layout to a job of the library.

namespace LinAttn::app {

/// Which parts of a file a command is about to use.
enum class Use { forward, forward_and_backward, verify };

/// Refuses what the layout allows and this version cannot compute: nothing in a file is ignored
/// that would change the numbers. The only place that knows. \throws InvalidArgument naming file
/// and dataset or attribute
void require_supported(const io::TensorFile& file, Use use);

/// The job that a supported file describes. Its arrays are the file's. `foresight` is what only a
/// command line can allow. \throws InvalidArgument if a cotangent or a parameter is missing, a
/// parameter, an exponent or a number of keys is not one, or moments would see the future
Job make_job(const io::TensorFile& file, bool with_gradients, const Foresight& foresight);

/// A state of the file ("/inputs/state", "/expected/state"); none if the group is absent. What a
/// variant's state lacks is 0.
std::optional<HostState> read_state(const io::TensorFile& file, const std::string& group);

/// Refuses moments under a causal mask unless they were asked for. `where` is where they are.
/// \throws InvalidArgument
void require_foresight(const Job& job, const std::string& where);

/// What /config has of a parameter of the variant: one value for all heads, or one for each; none if it is matched.
/// \throws InvalidArgument if it has none, or one that is not finite
std::vector<double> parameter_values(const io::TensorFile& file, const ParameterInfo& parameter);

/// Whether the parameter of that name was given, or is matched, once for all heads.
bool is_given_once(const io::TensorFile& file, const std::string& parameter);

/// Values of the parameters of a variant from what gives one value for all heads, or one for each.
template <class ValuesOf>
std::vector<std::vector<double>> parameters_of(const VariantInfo& info, const ValuesOf& values_of) {
  std::vector<std::vector<double>> parameters;
  for (const ParameterInfo& parameter : info.parameters) parameters.push_back(values_of(parameter));
  return parameters;
}

/// Gradient of a parameter that was given once: the sum over the heads, a scalar.
io::Array sum_over_heads(const io::Array& gradient);

}  // namespace LinAttn::app
