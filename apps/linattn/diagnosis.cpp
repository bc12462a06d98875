// SPDX-License-Identifier: BSD-3-Clause
#include "diagnosis.hpp"

#include <Kokkos_Core.hpp>
#include <linattn/analysis/diagnose.hpp>
#include <linattn/io/views.hpp>
#include <linattn/variants.hpp>
#include <stdexcept>

#include "instruments.hpp"
#include "variant_settings.hpp"

namespace LinAttn::app {
namespace {

template <class View, class ExecSpace, class... Extents>
View copied(const ExecSpace& exec, const io::Array& array, Extents... extents) {
  const View view(
      Kokkos::view_alloc(std::string("LinAttn::app::diagnosis"), Kokkos::WithoutInitializing),
      static_cast<std::size_t>(extents)...);
  io::copy_into(exec, array, view);
  return view;
}

template <class T, class ExecSpace>
Diagnostics diagnose_in(const Job& job, const std::optional<HostMoments>& moments) {
  using Memory = typename ExecSpace::memory_space;
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Memory>;
  using Mask = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, Memory>;
  using PerHead = Kokkos::View<double*, Memory>;
  const ExecSpace exec{};
  const Problem& p = job.problem;
  const Tensor q = copied<Tensor>(exec, *job.q, p.batch, p.heads, p.nq, p.d);
  const Tensor k = copied<Tensor>(exec, *job.k, p.batch, p.kv_heads, p.nk, p.d);
  DiagnoseInputs<ExecSpace, T> inputs{.q = q, .k = k};
  Mask mask;
  if (job.key_mask != nullptr) {
    mask = copied<Mask>(exec, *job.key_mask, p.batch, p.nk);
    inputs.key_mask = mask;
  }
  if (job.cu_seqlens_q != nullptr) {
    const auto offsets = [](const io::Array& array) -> SequenceOffsets {
      return {array.values<std::int64_t>().data(), {array.size()}, {1}};
    };
    inputs.cu_seqlens_q = offsets(*job.cu_seqlens_q);
    inputs.cu_seqlens_k = offsets(*job.cu_seqlens_k);
  }
  const DiagnoseOptions options{.causal = job.causal(), .exact = true};
  if (job.variant == SoftmaxKernel::name)
    return diagnose<T>(exec, SoftmaxKernel{job.settings.real("scale", 1)}, inputs, options);
  std::vector<PerHead> views;  // behind the parameters
  Parameters parameters;
  for (const ParameterInfo& parameter : variant_info(job.variant).parameters) {
    const bool matched = moments && matches_moments(job.settings);
    const std::vector<double> values =
        matched ? moments->at(parameter.name) : job.per_head(parameter);
    const auto count = static_cast<std::int64_t>(values.size());
    views.push_back(copied<PerHead>(exec, io::Array(values, {count}), count));
    parameters.by_name.emplace(parameter.name, views.back());
  }
  std::optional<Diagnostics> result;
  for_each_linear_variant([&]<class V>(std::type_identity<V> type) {
    // the instruments know features of entries only
    if constexpr (!ProjectedVariant<V>)
      if (job.variant == V::name)
        result = diagnose<T>(exec, make_variant(type, job, parameters), inputs, options);
  });
  if (!result) throw std::logic_error("a variant without a matrix was to be diagnosed");
  return *result;
}

template <class ExecSpace>
Diagnostics diagnose_on(const Job& job, Scalar scalar, const std::optional<HostMoments>& moments) {
  return scalar == Scalar::f64 ? diagnose_in<double, ExecSpace>(job, moments)
                               : diagnose_in<float, ExecSpace>(job, moments);
}

Diagnostics diagnose_as(const Job& job, const Execution& execution,
                        const std::optional<HostMoments>& moments) {
  switch (execution.space) {
    case Space::serial:
#if defined(KOKKOS_ENABLE_SERIAL)
      return diagnose_on<Kokkos::Serial>(job, execution.scalar, moments);
#else
      break;
#endif
    case Space::openmp:
#if defined(KOKKOS_ENABLE_OPENMP)
      return diagnose_on<Kokkos::OpenMP>(job, execution.scalar, moments);
#else
      break;
#endif
    case Space::cuda:
#if defined(KOKKOS_ENABLE_CUDA)
      return diagnose_on<Kokkos::Cuda>(job, execution.scalar, moments);
#else
      break;
#endif
  }
  throw std::logic_error("an execution space that is not enabled was asked for");
}

}  // namespace

std::vector<NamedArray> diagnosis(const Job& job, const Execution& execution,
                                  const std::optional<HostMoments>& moments) {
  const Diagnostics found = diagnose_as(job, execution, moments);
  std::vector<NamedArray> result;
  for (const char* name : diagnostic_names)
    for (const NamedInstrument& instrument : instruments()) {
      if (std::string(name) != instrument.name) continue;
      std::vector<double> values;
      for (const HeadDiagnostics& head : found.values) values.push_back(head.*instrument.value);
      result.push_back({name, io::Array(values, {found.batch, found.heads})});
    }
  return result;
}

}  // namespace LinAttn::app
