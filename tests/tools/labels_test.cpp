// SPDX-License-Identifier: BSD-3-Clause

// What profiling tools see of a call: labels, regions, instances, copies, allocations and fences.

#include <set>
#include <string>
#include <vector>

#include "events.hpp"
#include "one_step.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// A call whose memory exists before it is watched.
template <class T, class ExecSpace, Variant V>
class Prepared {
 public:
  Prepared(const Case& c, const Options& options, const ExecSpace& exec)
      : m_call(c, options, {}, exec),
        m_options(options),
        m_exec(exec),
        m_arena(std::max(m_call.workspace_bytes(Pass::forward),
                         m_call.workspace_bytes(Pass::backward))),
        m_variant(m_call.variant()),
        m_inputs(m_call.inputs()),
        m_saved(m_call.saved()),
        m_cotangents(m_call.cotangents()),
        m_gradients(m_call.gradients({})) {}

  void forward() const {
    LinAttn::forward<T>(m_exec, m_variant, m_inputs, m_saved, m_arena.workspace(), m_options);
  }
  void backward() const {
    LinAttn::backward<T>(m_exec, m_variant, m_inputs, m_saved, m_cotangents, m_gradients,
                         m_arena.workspace(), m_options);
  }
  void allocating_forward() const {
    LinAttn::forward<T>(m_exec, m_variant, m_inputs, m_saved, m_options);
  }
  void allocating_backward() const {
    LinAttn::backward<T>(m_exec, m_variant, m_inputs, m_saved, m_cotangents, m_gradients,
                         m_options);
  }
  std::size_t workspace_bytes(Pass pass) const { return m_call.workspace_bytes(pass); }

 private:
  Attention<T, ExecSpace, V> m_call;
  Options m_options;
  ExecSpace m_exec;
  Arena<ExecSpace> m_arena;
  V m_variant;
  Inputs<ExecSpace, T> m_inputs;
  Saved<ExecSpace, T> m_saved;
  Cotangents<ExecSpace, T> m_cotangents;
  Gradients<ExecSpace, T> m_gradients;
};

/// One token whose memory exists before it is watched.
template <class T, class ExecSpace, Variant V>
class PreparedStep {
 public:
  PreparedStep(const Problem& p, const ExecSpace& exec)
      : m_step(p, exec), m_arena(m_step.workspace_bytes()) {}

  void step() const { m_step.step(m_arena.workspace()); }
  void step_in_place() const { m_step.step_in_place(m_arena.workspace()); }

 private:
  OneStep<T, ExecSpace, V> m_step;
  Arena<ExecSpace> m_arena;
};

template <class C>
class Tools : public ::testing::Test {
 public:
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;
  using Call = Prepared<double, ExecSpace, V>;

  /// Whole problems, and those of early returns: no batch, no query, no key.
  template <class Body>
  static void for_each_call(const ExecSpace& exec, const Body& body) {
    const Problem shapes[] = {{2, 4, 2, 90, 100, 5, 3},
                              {0, 2, 2, 9, 9, 3, 4},
                              {2, 2, 1, 0, 9, 3, 4},
                              {2, 2, 1, 9, 0, 3, 4}};
    for (const Problem& p : shapes)
      for (const bool causal : {false, true}) {
        if (causal && p.nq > p.nk) continue;
        for (const int segments : {1, 3}) {
          const Options options{.causal = causal, .chunk = 16, .segments = segments};
          SCOPED_TRACE(describe(p, options));
          const Case c = random_case<double, V>(p, options);
          body(Call(c, options, exec));
        }
      }
  }

  /// Steps with a worker for each head, with windows of a large state, and with nothing to do.
  template <class Body>
  static void for_each_step(const ExecSpace& exec, const Body& body) {
    const Problem shapes[] = {
        {2, 4, 2, 1, 1, 5, 3}, {1, 2, 1, 1, 1, 250, 300}, {0, 2, 2, 1, 1, 3, 4}};
    if constexpr (LinearVariant<V>)  // steps of exact attention have a test of their own
      for (const Problem& p : shapes) {
        if (!has_small_state<V>(p.d)) continue;
        SCOPED_TRACE(p.to_string());
        body(PreparedStep<double, ExecSpace, V>(p, exec), p.batch > 0);
      }
  }
};

TYPED_TEST_SUITE(Tools, OverAllVariantsInDouble, ConfigName);

bool has_prefix(const std::string& label) { return label.rfind("LinAttn::", 0) == 0; }

TYPED_TEST(Tools, EveryLabelNamesTheLibrary) {
  const typename TypeParam::ExecSpace exec;
  this->for_each_call(exec, [&](const auto& call) {
    call.forward();  // Kokkos may set up memory of its own at the first kernel
    call.backward();
    exec.fence();
    const Recording recording(Watch::kernels_and_memory);
    call.forward();
    call.backward();
    call.allocating_forward();
    call.allocating_backward();
    for (const Event& event : recording.events()) {
      if (event.kind == Event::Kind::end_of_region) continue;
      EXPECT_TRUE(has_prefix(event.label))
          << "kind " << static_cast<int>(event.kind) << " label '" << event.label << "'";
    }
  });
}

// One region for each public call that has work, around all its kernels, closed again.
TYPED_TEST(Tools, OneRegionForEachCall) {
  const typename TypeParam::ExecSpace exec;
  const Problem p{2, 4, 2, 90, 100, 5, 3};
  for (const int segments : {1, 3}) {
    const Options options{.causal = true, .chunk = 16, .segments = segments};
    const Case c = random_case<double, typename TypeParam::V>(p, options);
    const typename TestFixture::Call call(c, options, exec);
    const auto check = [&](const char* region, const auto& run) {
      const Recording recording(Watch::kernels_and_memory);
      run();
      int depth = 0, regions = 0, kernels = 0;
      for (const Event& event : recording.events()) {
        if (event.kind == Event::Kind::region) {
          EXPECT_EQ(event.label, region);
          ++regions, ++depth;
        }
        if (event.kind == Event::Kind::end_of_region) --depth;
        if (event.kind != Event::Kind::kernel) continue;
        ++kernels;
        EXPECT_EQ(depth, 1) << event.label;
        EXPECT_EQ(event.label.rfind(std::string(region) + "::", 0), 0u) << event.label;
      }
      EXPECT_EQ(regions, 1);
      EXPECT_EQ(depth, 0);
      EXPECT_GE(kernels, segments == 1 || ExactVariant<typename TypeParam::V> ? 1 : 3);
    };
    check("LinAttn::forward", [&] { call.forward(); });
    check("LinAttn::backward", [&] { call.backward(); });
  }
}

// With several segments states are formed, scanned, used; with one nothing is spilled.
TYPED_TEST(Tools, SegmentsAreScanned) {
  const typename TypeParam::ExecSpace exec;
  if (ExactVariant<typename TypeParam::V>) GTEST_SKIP() << "there is no state";
  std::vector<std::string> before;
  if (ProjectedVariant<typename TypeParam::V>)
    before = {"LinAttn::forward::projection", "LinAttn::forward::project_queries",
              "LinAttn::forward::project_keys"};
  for (const int segments : {1, 2}) {
    const Options options{.causal = true, .chunk = 16, .segments = segments};
    const Case c = random_case<double, typename TypeParam::V>({1, 2, 2, 90, 90, 5, 3}, options);
    const typename TestFixture::Call call(c, options, exec);
    const Recording recording(Watch::kernels_and_memory);
    call.forward();
    std::vector<std::string> labels, expected = before;
    for (const Event& event : recording.of(Event::Kind::kernel)) labels.push_back(event.label);
    if (segments > 1) {
      expected.push_back("LinAttn::forward::key_state");
      expected.push_back("LinAttn::forward::scan");
    }
    expected.push_back("LinAttn::forward::output");
    EXPECT_EQ(labels, expected);
  }
}

// Kernels run where the caller said, on every path.
TYPED_TEST(Tools, KernelsRunOnTheCallersInstance) {
  const auto exec = another_instance<typename TypeParam::ExecSpace>();
  this->for_each_call(exec, [&](const auto& call) {
    const Recording recording(Watch::kernels_and_memory);
    call.forward();
    call.backward();
    for (const Event& event : recording.of(Event::Kind::kernel))
      EXPECT_EQ(event.device, device_id(exec)) << event.label;
  });
}

// With the caller's workspace nothing is allocated or copied.
TYPED_TEST(Tools, NothingIsAllocatedOrCopied) {
  const typename TypeParam::ExecSpace exec;
  this->for_each_call(exec, [&](const auto& call) {
    call.forward();
    call.backward();
    exec.fence();
    const Recording recording(Watch::kernels_and_memory);
    call.forward();
    call.backward();
    for (const Event& event : recording.events())
      EXPECT_TRUE(event.kind == Event::Kind::kernel || event.kind == Event::Kind::region ||
                  event.kind == Event::Kind::end_of_region)
          << static_cast<int>(event.kind) << " " << event.label;
  });
}

TYPED_TEST(Tools, NothingFences) {
  if (!reports_fences) GTEST_SKIP() << "this Kokkos does not report fences";
  const typename TypeParam::ExecSpace exec;
  this->for_each_call(exec, [&](const auto& call) {
    call.forward();
    call.backward();
    exec.fence();
    const Recording recording(Watch::fences_and_memory);
    call.forward();
    call.backward();
    for (const Event& event : recording.events())
      ADD_FAILURE() << static_cast<int>(event.kind) << " " << event.label;
  });
}

TYPED_TEST(Tools, StepsNameTheLibraryInOneRegionOnTheCallersInstance) {
  const auto exec = another_instance<typename TypeParam::ExecSpace>();
  this->for_each_step(exec, [&](const auto& call, bool has_work) {
    call.step();
    exec.fence();
    for (const bool in_place : {false, true}) {
      const Recording recording(Watch::kernels_and_memory);
      in_place ? call.step_in_place() : call.step();
      int depth = 0, regions = 0, kernels = 0;
      for (const Event& event : recording.events()) {
        switch (event.kind) {
          case Event::Kind::region:
            EXPECT_EQ(event.label, "LinAttn::step");
            ++regions, ++depth;
            break;
          case Event::Kind::end_of_region:
            --depth;
            break;
          case Event::Kind::kernel:
            ++kernels;
            EXPECT_EQ(depth, 1) << event.label;
            EXPECT_EQ(event.label.rfind("LinAttn::step::", 0), 0u) << event.label;
            EXPECT_EQ(event.device, device_id(exec)) << event.label;
            break;
          default:
            ADD_FAILURE() << static_cast<int>(event.kind) << " " << event.label;
        }
      }
      EXPECT_EQ(depth, 0);
      if (has_work) {
        EXPECT_EQ(regions, 1);
        EXPECT_GE(kernels, 1);
      } else {
        EXPECT_EQ(kernels, 0);
      }
    }
  });
}

TYPED_TEST(Tools, StepsNeitherFenceNorAllocate) {
  if (!reports_fences) GTEST_SKIP() << "this Kokkos does not report fences";
  const typename TypeParam::ExecSpace exec;
  this->for_each_step(exec, [&](const auto& call, bool) {
    call.step();
    exec.fence();
    const Recording recording(Watch::fences_and_memory);
    call.step();
    call.step_in_place();
    for (const Event& event : recording.events())
      ADD_FAILURE() << static_cast<int>(event.kind) << " " << event.label;
  });
}

/// Noise, a centre, replaced row sums, records and, for affine attention, states with t and m or the
/// largest norm: each call as it is made and the kernels it must have beside the walks.
template <class T, class ExecSpace, Variant V, class Body>
void for_each_option(const ExecSpace& exec, const Body& body) {
  using Records =
      Kokkos::View<NormaliserRecord**, Kokkos::LayoutRight, typename ExecSpace::memory_space>;
  const Problem p{2, 4, 2, 90, 100, 5, 3};
  const Records records("test::records", 2, 4);
  const auto run = [&](const Case& c, const Options& options, bool recorded,
                       const std::vector<std::string>& kernels) {
    SCOPED_TRACE(describe(p, options));
    Attention<T, ExecSpace, V> call(c, options, {}, exec);
    const Arena<ExecSpace> arena(
        std::max(call.workspace_bytes(Pass::forward), call.workspace_bytes(Pass::backward)));
    const V variant = call.variant();
    const auto inputs = call.inputs();
    auto saved = call.saved();
    if (recorded) saved.smallest = records;
    const auto cotangents = call.cotangents();
    const auto gradients = call.gradients({});
    body(
        [&] {
          forward<T>(exec, variant, inputs, saved, arena.workspace(), options);
          backward<T>(exec, variant, inputs, saved, cotangents, gradients, arena.workspace(),
                      options);
        },
        kernels);
    if (recorded) {
      EXPECT_NO_THROW(LinAttn::check(exec, saved, options));
    }
  };
  for (const bool causal : {false, true})
    for (const int segments : {1, 3}) {
      const Options plain{.causal = causal,
                          .normalise = true,
                          .chunk = 16,
                          .segments = segments,
                          .least_normaliser = 0};  // relu has rows without weight
      const Case c = random_case<T, V>(p, plain);
      if (ExactVariant<V>) {  // which takes none of these options
        run(c, plain, false, {});
        continue;
      }
      Options noisy = plain;
      noisy.dropout = {.p = 0.1};
      noisy.center_v = true;
      run(c, noisy, false, {});
      if (is_scaled<V>) continue;
      run(c, plain, true, {"LinAttn::forward::smallest"});
      Options clamped = plain;
      clamped.small_normaliser = SmallNormaliser::clamp;
      run(c, clamped, false, {});
      if (!has_constant<V>) continue;
      Case stateful = c;
      stateful.wants_last = true;
      stateful.initial =
          StateValues{std::vector<double>(60, 0.5), std::vector<double>(20, 0.25), {}};
      run(stateful, plain, false,
          {"LinAttn::forward::key_count", "LinAttn::backward::constant", "LinAttn::backward::scale"});
      Case largest = c;
      largest.affine.qk_norm = QkNorm::max;
      run(largest, plain, false,
          {"LinAttn::forward::row_norms", "LinAttn::forward::largest_norm",
           "LinAttn::backward::row_norms", "LinAttn::backward::largest_norm",
           "LinAttn::backward::query_norm", "LinAttn::backward::key_norm"});
    }
}

// Whatever the options, labels name the library, kernels run on the caller's instance, nothing is
// allocated.
TYPED_TEST(Tools, OptionsKeepTheRules) {
  const auto exec = another_instance<typename TypeParam::ExecSpace>();
  for_each_option<double, typename TypeParam::ExecSpace, typename TypeParam::V>(
      exec, [&](const auto& call, const std::vector<std::string>& kernels) {
        call();
        exec.fence();
        const Recording recording(Watch::kernels_and_memory);
        call();
        std::set<std::string> seen;
        for (const Event& event : recording.events()) {
          if (event.kind == Event::Kind::end_of_region) continue;
          EXPECT_TRUE(has_prefix(event.label)) << event.label;
          EXPECT_TRUE(event.kind == Event::Kind::kernel || event.kind == Event::Kind::region)
              << event.label;
          if (event.kind != Event::Kind::kernel) continue;
          EXPECT_EQ(event.device, device_id(exec)) << event.label;
          seen.insert(event.label);
        }
        for (const std::string& kernel : kernels) EXPECT_TRUE(seen.contains(kernel)) << kernel;
      });
}

// Nor does anything wait, where this Kokkos tells; check() does.
TYPED_TEST(Tools, OptionsDoNotFence) {
  if (!reports_fences) GTEST_SKIP() << "this Kokkos does not report fences";
  const typename TypeParam::ExecSpace exec;
  for_each_option<double, typename TypeParam::ExecSpace, typename TypeParam::V>(
      exec, [&](const auto& call, const std::vector<std::string>&) {
        call();
        exec.fence();
        const Recording recording(Watch::fences_and_memory);
        call();
        for (const Event& event : recording.events())
          ADD_FAILURE() << static_cast<int>(event.kind) << " " << event.label;
      });
}

// The overloads without a workspace allocate exactly it, and release it.
TYPED_TEST(Tools, AllocatingOverloadsAllocateTheWorkspace) {
  const typename TypeParam::ExecSpace exec;
  const Options options{.causal = true, .chunk = 16, .segments = 2};
  const Case c = random_case<double, typename TypeParam::V>({2, 2, 2, 90, 90, 5, 3}, options);
  const typename TestFixture::Call call(c, options, exec);
  call.forward();
  exec.fence();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Recording recording(Watch::fences_and_memory);
    if (pass == Pass::forward)
      call.allocating_forward();
    else
      call.allocating_backward();
    if (reports_fences) {
      EXPECT_FALSE(recording.of(Event::Kind::fence).empty()) << "these calls say that they fence";
    }
    const auto allocations = recording.of(Event::Kind::allocation);
    ASSERT_EQ(allocations.size(), 1u);
    EXPECT_EQ(allocations[0].label, "LinAttn::workspace");
    EXPECT_EQ(recording.of(Event::Kind::release).size(), 1u);
    EXPECT_EQ(allocations[0].bytes, call.workspace_bytes(pass));
  }
}

}  // namespace
