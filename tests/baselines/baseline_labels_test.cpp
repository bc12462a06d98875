// SPDX-License-Identifier: BSD-3-Clause

// What profiling tools see of the baselines. Callbacks are global: an executable of its own.

#include "../tools/events.hpp"

#include <linattn/baselines/linformer.hpp>
#include <linattn/baselines/nystrom.hpp>

#include "baseline_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class BaselineTools : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;

  /// body(call) with memory that exists before the call; call() runs both passes of both baselines.
  template <class Body>
  static void with_call(const ExecSpace& exec, const Body& body) {
    const Problem p{2, 4, 2, 70, 90, 5, 3};
    const Placed<double, ExecSpace> x(Numbers::of<double>(p));
    const baselines::Nystrom nystrom{.landmarks = 9};
    const baselines::Linformer linformer{};
    const PlacedTensor<double, 1, ExecSpace> kept{{nystrom.kept<double>(p)}, Layout::right};
    PlacedTensor<double, 2, ExecSpace> e{{7, p.nk}, Layout::right}, f{{7, p.nk}, Layout::right};
    const PlacedTensor<double, 2, ExecSpace> d_e{{7, p.nk}, Layout::right}, d_f{{7, p.nk}, Layout::right};
    e.set(Random(seed()).normals(e.count()));
    f.set(Random(seed() + 1).normals(f.count()));
    std::size_t bytes = 0;
    for (const Pass pass : {Pass::forward, Pass::backward})
      bytes = std::max({bytes, baselines::workspace_size<double>(exec, nystrom, p, pass),
                        baselines::workspace_size<double>(exec, linformer, p, 7, pass)});
    const auto memory = bytes_of_nan<ExecSpace>(bytes);
    const Workspace<ExecSpace> workspace = memory;
    const auto in = x.inputs();
    const auto gradients = x.gradients();
    const baselines::NystromSaved<ExecSpace, double> of_nystrom{x.o.ref(), x.denominator.ref(), kept.ref()};
    const baselines::LinformerSaved<ExecSpace, double> of_linformer{x.o.ref(), x.denominator.ref()};
    const baselines::Projections<ExecSpace, const double> given{e.input(), f.input()};
    const baselines::Projections<ExecSpace, double> wanted{d_e.ref(), d_f.ref()};
    const auto d_o = x.d_o.input();
    exec.fence();
    body([&] {
      baselines::forward<double>(exec, nystrom, in, of_nystrom, workspace);
      baselines::backward<double>(exec, nystrom, in, of_nystrom, d_o, gradients, workspace);
      baselines::forward<double>(exec, linformer, in, given, of_linformer, workspace);
      baselines::backward<double>(exec, linformer, in, given, of_linformer, d_o, gradients, wanted, workspace);
    });
  }
};
TYPED_TEST_SUITE(BaselineTools, OverSpaces, ConfigName);

TYPED_TEST(BaselineTools, LabelsInstancesAndNoAllocations) {
  const typename TypeParam::ExecSpace exec = another_instance<typename TypeParam::ExecSpace>();
  this->with_call(exec, [&](const auto& call) {
    call();
    exec.fence();
    const Recording recording(Watch::kernels_and_memory);
    call();
    int own = 0;
    std::vector<std::string> regions;
    for (const Event& event : recording.of(Event::Kind::region))
      if (event.label.rfind("LinAttn::baselines::", 0) == 0) regions.push_back(event.label);
    EXPECT_EQ(regions, (std::vector<std::string>{
                           "LinAttn::baselines::nystrom_forward", "LinAttn::baselines::nystrom_backward",
                           "LinAttn::baselines::linformer_forward", "LinAttn::baselines::linformer_backward"}));
    for (const Event& event : recording.events()) {
      if (event.kind == Event::Kind::end_of_region) continue;
      EXPECT_EQ(event.label.rfind("LinAttn::", 0), 0u) << event.label;
      EXPECT_NE(event.kind, Event::Kind::allocation) << event.label;
      EXPECT_NE(event.kind, Event::Kind::copy) << event.label;
      if (event.kind != Event::Kind::kernel) continue;
      own += event.label.rfind("LinAttn::baselines::", 0) == 0;
      EXPECT_EQ(event.device, device_id(exec)) << event.label;
    }
    EXPECT_EQ(own, 2 + 3 + 2 + 6);
  });
}

TYPED_TEST(BaselineTools, NoFences) {
  if (!reports_fences) GTEST_SKIP() << "this Kokkos reports none";
  const typename TypeParam::ExecSpace exec;
  this->with_call(exec, [&](const auto& call) {
    call();
    exec.fence();
    const Recording recording(Watch::fences_and_memory);
    call();
    for (const Event& event : recording.of(Event::Kind::fence)) ADD_FAILURE() << event.label;
  });
}

}  // namespace
