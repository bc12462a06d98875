// SPDX-License-Identifier: BSD-3-Clause

// Memory of the instruments, measured by the allocation hooks of Kokkos, and what tools see of them.

#include <set>

#include "../tools/events.hpp"
#include "diagnose_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using Exec = Kokkos::DefaultExecutionSpace;
using Tensor = Kokkos::View<float****, Kokkos::LayoutRight, Exec::memory_space>;

Tensor tensor(std::int64_t n, std::int64_t d, std::uint64_t seed) {
  const Tensor t("test::tensor", 1, 1, n, d);
  const auto host = Kokkos::create_mirror_view(t);
  for (std::size_t e = 0; e < host.size(); ++e) host.data()[e] = static_cast<float>(normal(seed, e));
  Kokkos::deep_copy(t, host);
  return t;
}

template <class Kernel>
std::int64_t peak(const Kernel& kernel, std::int64_t n, std::int64_t d, bool causal) {
  const Tensor q = tensor(n, d, 1), k = tensor(n, d, 2);
  const Recording recording(Watch::kernels_and_memory);
  const auto found = diagnose<float>(Exec(), kernel, {.q = q, .k = k}, {.causal = causal, .rows = 128});
  EXPECT_TRUE(found(0, 0).sampled);
  EXPECT_GT(found(0, 0).entropy, 1);
  for (const Event& event : recording.of(Event::Kind::kernel))
    EXPECT_EQ(event.label.rfind("LinAttn::", 0), 0u) << event.label;
  return static_cast<std::int64_t>(recording.peak_bytes());
}

// At 65,536 tokens no more than the keys themselves, of which the matrix would take 256 times as much; twice the
// tokens cost twice as much at most.
TEST(DiagnoseMemory, IsLinearInTheTokens) {
  constexpr std::int64_t n = 65536, d = 64, keys = n * d * 4;
  for (const bool causal : {false, true}) {
    const std::int64_t lln = peak(Lln{2.1, 2.1}, n, d, causal), softmax = peak(SoftmaxKernel{}, n, d, causal);
    EXPECT_GT(lln, 0);
    EXPECT_LE(lln, keys);
    EXPECT_LE(softmax, keys);
    EXPECT_LE(lln, 2 * peak(Lln{2.1, 2.1}, n / 2, d, causal));
  }
}

TEST(DiagnoseTools, LabelsRegionsAndInstances) {
  const Exec exec = another_instance<Exec>();
  const auto check = [&](const auto& kernel, const DiagnoseOptions& options, std::int64_t n = 150, std::int64_t d = 8) {
    const PlacedCase<float, Exec> placed(DiagnoseCase::random<float>(1, 2, 1, n, n, d, 1));
    const Recording recording(Watch::kernels_and_memory);
    diagnose<float>(exec, kernel, placed.inputs(), options);
    const auto is_product = [](const Event& event) { return event.label.rfind("KokkosBlas::gemv", 0) == 0; };
    std::vector<std::string> regions;
    for (const Event& event : recording.of(Event::Kind::region))
      if (!is_product(event)) regions.push_back(event.label);
    EXPECT_EQ(regions, std::vector<std::string>{"LinAttn::diagnose"});
    for (const Event& event : recording.of(Event::Kind::allocation))
      EXPECT_EQ(event.label.rfind("LinAttn::", 0), 0u) << event.label;
    const auto kernels = recording.of(Event::Kind::kernel);
    EXPECT_FALSE(kernels.empty());
    // what is left for the host is multiplied on its default instance
    const Kokkos::DefaultHostExecutionSpace host;
    std::set<std::string> of_host;
    for (const Event& event : kernels) {
      if (event.label == "LinAttn::spectral_radius::square" || is_product(event)) {
        of_host.insert(event.label.substr(0, 16));
        EXPECT_EQ(event.device, device_id(host)) << event.label;
        continue;
      }
      EXPECT_EQ(event.label.rfind("LinAttn::diagnose::", 0), 0u) << event.label;
      EXPECT_EQ(event.device, device_id(exec)) << event.label;
    }
    return of_host;
  };
  using Labels = std::set<std::string>;
  for (const bool causal : {false, true}) {
    EXPECT_EQ(check(Lln{2.0, 2.0}, {.causal = causal}), Labels{}) << "R x R is too small for a launch";
    EXPECT_EQ(check(SoftmaxKernel{}, {.causal = causal, .gap = false}), Labels{});
    EXPECT_EQ(check(Affine{.a = 0.5, .b = 1.0, .qk_norm = QkNorm::max, .max_norm_sees_future = true},
                    {.causal = causal}),
              Labels{});
  }
  EXPECT_EQ(check(SoftmaxKernel{}, {}), Labels{"LinAttn::spectra"});
  EXPECT_EQ(check(Lln{2.0, 2.0}, {}, 150, 130), Labels{"LinAttn::spectra"});
  const Labels larger = check(SoftmaxKernel{}, {}, 520);
  EXPECT_TRUE(larger == Labels{} || larger == Labels{"KokkosBlas::gemv"});
}

// 2^52 queries, all at one address: memory for their sums is more than any machine has.
TEST(DiagnoseMemory, RefusalOfTheMachine) {
  const Tensor x = tensor(4, 4, 1);
  const TensorRef<const float, 4, Exec> many(x.data(), {1, 1, std::int64_t(1) << 52, 4}, {0, 0, 0, 1});
  try {
    diagnose<float>(Exec(), Lln{2.0, 2.0}, {.q = many, .k = x});
    ADD_FAILURE() << "that much memory was there";
  } catch (const EnvironmentFailure& error) {
    EXPECT_NE(std::string(error.what()).find("LinAttn::diagnose::parts"), std::string::npos) << error.what();
  }
}

}  // namespace
