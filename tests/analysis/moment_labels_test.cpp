// SPDX-License-Identifier: BSD-3-Clause

// What profiling tools see of moment matching. Callbacks are global: an executable of its own.

#include "../tools/events.hpp"

#include <linattn/analysis/key_mean.hpp>

#include "moment_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class MomentTools : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;
  using Run = MomentRun<double, ExecSpace>;
  using Arena = typename Run::Arena;

  /// body(call) with memory that exists before the call is watched; call() runs all that takes a workspace.
  template <class Body>
  static void for_each_call(const ExecSpace& exec, const Body& body) {
    for (const CrossTerm cross : {CrossTerm::none, CrossTerm::all_pairs, CrossTerm::same_position})
      for (const MomentRule rule : {MomentRule::authors, MomentRule::entropy}) {
        const MomentOptions options{.scope = MomentScope::head, .rule = rule, .cross = cross};
        const MomentCase c = random_moments<double>({2, 4, 2, 90, 90, 5, 0}, true);
        Run run(c, options, Layout::right, exec);
        run.match();
        run.pull({1, 2, 3, 4}, {1, 2}, std::vector<double>(c.q.size()), std::vector<double>(c.k.size()));
        const Arena forward = run.arena(Pass::forward), backward = run.arena(Pass::backward);
        const Arena of_mean(key_mean_workspace_size<double>(exec, c.p));
        const auto in = run.inputs();
        const auto moments = run.moments();
        const auto rates = run.rates();
        const auto d_rates = run.d_rates();
        const auto gradients = run.gradients();
        const Workspace<ExecSpace> w1 = forward.workspace(), w2 = backward.workspace(), w3 = of_mean.workspace();
        exec.fence();
        body([&] {
          match_moments<double>(exec, in, moments, rates, w1, options);
          match_moments_backward<double>(exec, in, moments.as_const(), d_rates, gradients, w2, options);
          update_running_moments(exec, moments, moments.as_const(), 0.5);
          remove_key_mean<double>(exec, {in.k, in.key_mask}, {.out = gradients.k}, w3);
          remove_key_mean_backward<double>(exec, gradients.k, in.key_mask, w3);
        });
      }
  }
};
TYPED_TEST_SUITE(MomentTools, OverSpaces, ConfigName);

TYPED_TEST(MomentTools, LabelsInstancesAndNoAllocations) {
  const typename TypeParam::ExecSpace exec = another_instance<typename TypeParam::ExecSpace>();
  this->for_each_call(exec, [&](const auto& call) {
    call();
    exec.fence();
    const Recording recording(Watch::kernels_and_memory);
    call();
    int kernels = 0;
    std::vector<std::string> regions;
    for (const Event& event : recording.of(Event::Kind::region)) regions.push_back(event.label);
    EXPECT_EQ(regions, (std::vector<std::string>{"LinAttn::match_moments", "LinAttn::match_moments_backward",
                                                 "LinAttn::update_running_moments", "LinAttn::remove_key_mean",
                                                 "LinAttn::remove_key_mean_backward"}));
    for (const Event& event : recording.events()) {
      if (event.kind == Event::Kind::end_of_region) continue;
      EXPECT_EQ(event.label.rfind("LinAttn::", 0), 0u) << event.label;
      EXPECT_NE(event.kind, Event::Kind::allocation);
      EXPECT_NE(event.kind, Event::Kind::copy);
      if (event.kind != Event::Kind::kernel) continue;
      ++kernels;
      EXPECT_EQ(event.device, device_id(exec)) << event.label;
    }
    EXPECT_GE(kernels, 11);
  });
}

TYPED_TEST(MomentTools, NoFences) {
  if (!reports_fences) GTEST_SKIP() << "this Kokkos reports none";
  const typename TypeParam::ExecSpace exec;
  this->for_each_call(exec, [&](const auto& call) {
    call();
    exec.fence();
    const Recording recording(Watch::fences_and_memory);
    call();
    for (const Event& event : recording.of(Event::Kind::fence)) ADD_FAILURE() << event.label;
  });
}

}  // namespace
