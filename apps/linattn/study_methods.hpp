// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <linattn/linattn.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "instruments.hpp"

/// \file study_methods.hpp
/// What linattn study compares, as calls with one face.

namespace LinAttn::app {

/// The variants of the library, exact attention first, and the baselines. In the order of the reports.
const std::vector<std::string>& study_methods();
/// \throws InvalidArgument listing them
void require_study_method(const std::string& name);

/// About the FLOPs of a pass, to tell how much longer one shape takes than another.
double study_work(const std::string& method, const Problem& problem, bool causal, Pass pass);
/// Whether its time grows with the square of the tokens.
bool is_quadratic(const std::string& method);

/// What a method may be given; the defaults are those of the study of times.
struct MethodSettings {
  std::optional<LlnRates> rates{};  ///< of lln and lln-diag; default: the authors' rule for q, k of deviation 1
  double scale = 1;                 ///< of the output where rows are not normalised
};

/// The calls of one method for one problem.
template <class ExecSpace, class T>
class StudyRun {
 public:
  using Memory = typename ExecSpace::memory_space;
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Memory>;
  using Arena = Kokkos::View<unsigned char*, Memory>;
  struct Tensors {
    Tensor q, k, v;
  };

  StudyRun() = default;
  virtual ~StudyRun() = default;
  StudyRun(const StudyRun&) = delete;
  StudyRun& operator=(const StudyRun&) = delete;

  virtual std::size_t workspace_bytes(Pass pass) const = 0;
  /// What forward keeps for backward beside inputs and output.
  virtual std::size_t kept_bytes() const = 0;
  /// Allocates that.
  virtual void keep() = 0;
  /// Allocates gradients of what is no input.
  virtual void allocate_gradients() {}
  virtual void forward(const Tensors& inputs, const Tensor& o, const Arena& workspace) = 0;
  virtual void backward(const Tensors& inputs, const Tensor& o, const Tensor& d_o, const Tensors& gradients,
                        const Arena& workspace) = 0;
};

/// \throws InvalidArgument, by name, if the method cannot do this problem, type or mask
template <class ExecSpace, class T>
std::unique_ptr<StudyRun<ExecSpace, T>> make_run(const std::string& method, const ExecSpace& exec,
                                                 const Problem& problem, bool causal,
                                                 const MethodSettings& settings = {});

}  // namespace LinAttn::app
