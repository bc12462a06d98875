// SPDX-License-Identifier: BSD-3-Clause

// The workspace: enough is what the query says, its content and its address do not matter.

#include "one_step.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class WorkspaceUse : public ::testing::Test {};
TYPED_TEST_SUITE(WorkspaceUse, OverAllVariants, ConfigName);

// Attention gives exactly the bytes asked for, all ones (NaN), between guards. Here content and
// alignment vary.
TYPED_TEST(WorkspaceUse, ContentAndAddressDoNotMatter) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Problem p{2, 2, 1, 90, 90, 6, 5};
  for (const bool causal : {false, true})
    for (const int segments : {1, 3}) {
      const Options options{.causal = causal, .chunk = 16, .segments = segments};
      const Case c = random_case<T, V>(p, options);
      const auto expected = attend<T, ExecSpace, V>(c, options);
      for (const std::size_t shift : {0, 1, 4, 127})
        for (const unsigned char content : {0x00, 0x7f}) {
          Attention<T, ExecSpace, V> call(c, options);
          const ExecSpace exec;
          Arena<ExecSpace> first(call.workspace_bytes(Pass::forward), shift, content);
          forward<T>(exec, call.variant(), call.inputs(), call.saved(), first.workspace(), options);
          Arena<ExecSpace> second(call.workspace_bytes(Pass::backward), shift, content);
          backward<T>(exec, call.variant(), call.inputs(), call.saved(), call.d_o.input(),
                      call.gradients({}), second.workspace(), options);
          exec.fence();
          EXPECT_TRUE(first.guards_intact() && second.guards_intact());
          EXPECT_TRUE(same_bits(call.outcome(), expected)) << "shift " << shift;
        }
    }
}

// One workspace may serve call after call, with what the last one left in it.
TYPED_TEST(WorkspaceUse, CanBeReused) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true, .segments = 2};
  const Case small = random_case<T, V>({1, 2, 2, 150, 150, 6, 5}, options);
  const Case large = random_case<T, V>({2, 2, 1, 170, 200, 17, 9}, options);
  const auto expected = attend<T, ExecSpace, V>(small, options);
  Attention<T, ExecSpace, V> one(small, options), two(large, options);
  const Arena<ExecSpace> arena(
      std::max(two.workspace_bytes(Pass::forward), two.workspace_bytes(Pass::backward)));
  const ExecSpace exec;
  const auto run = [&](auto& call) {
    forward<T>(exec, call.variant(), call.inputs(), call.saved(), arena.workspace(), options);
    backward<T>(exec, call.variant(), call.inputs(), call.saved(), call.d_o.input(),
                call.gradients({}), arena.workspace(), options);
  };
  run(two);
  run(one);
  exec.fence();
  EXPECT_TRUE(same_bits(one.outcome(), expected));
}

// A worker for each head, and windows of a large state.
template <class T, class ExecSpace, LinearVariant V>
void check_steps() {
  using Step = OneStep<T, ExecSpace, V>;
  for (const Problem& p : {Problem{3, 4, 2, 1, 1, 6, 5}, Problem{1, 2, 1, 1, 1, 250, 300}}) {
    if (!has_small_state<V>(p.d)) continue;
    SCOPED_TRACE(p.to_string());
    Step step(p);
    Arena<ExecSpace> arena(step.workspace_bytes());
    const auto expected = step.outcome(arena.workspace());
    EXPECT_TRUE(arena.guards_intact());
    EXPECT_TRUE(same_bits(step.outcome(arena.workspace()), expected)) << "used again";
    for (const std::size_t shift : {0, 1, 4, 127})
      for (const unsigned char content : {0x00, 0x7f}) {
        Arena<ExecSpace> other(step.workspace_bytes(), shift, content);
        EXPECT_TRUE(same_bits(step.outcome(other.workspace()), expected)) << "shift " << shift;
        EXPECT_TRUE(other.guards_intact());
      }
  }
  // one workspace for steps of different extents
  Step small({1, 2, 2, 1, 1, 7, 4}), large({3, 4, 2, 1, 1, 33, 20});
  Arena<ExecSpace> own(small.workspace_bytes());
  const auto expected = small.outcome(own.workspace());
  Arena<ExecSpace> shared(std::max(small.workspace_bytes(), large.workspace_bytes()));
  large.outcome(shared.workspace());
  EXPECT_TRUE(same_bits(small.outcome(shared.workspace()), expected));
}

TYPED_TEST(WorkspaceUse, OfAStep) {
  using V = typename TypeParam::V;
  if constexpr (LinearVariant<V>)
    check_steps<typename TypeParam::T, typename TypeParam::ExecSpace, V>();
  else
    GTEST_SKIP() << "steps of exact attention have a test of their own";
}

// The overloads without a workspace give the same bits.
TYPED_TEST(WorkspaceUse, OverloadsThatAllocate) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  const Options options{.causal = true, .segments = 2};
  const Case c = random_case<T, V>({1, 2, 1, 150, 150, 6, 5}, options);
  const auto expected = attend<T, ExecSpace, V>(c, options);
  Attention<T, ExecSpace, V> call(c, options);
  const ExecSpace exec;
  forward<T>(exec, call.variant(), call.inputs(), call.saved(), options);
  backward<T>(exec, call.variant(), call.inputs(), call.saved(), call.d_o.input(),
              call.gradients({}), options);
  EXPECT_TRUE(same_bits(call.outcome(), expected));
}

// Any rank-1 View of bytes is a workspace.
TEST(WorkspaceTypes, AnyByteType) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  const Kokkos::View<std::byte*, ExecSpace> bytes("test::bytes", 300);
  const Kokkos::View<char*, ExecSpace> chars("test::chars", 200);
  const Kokkos::View<unsigned char*, ExecSpace> unsigned_chars("test::unsigned_chars", 100);
  EXPECT_EQ(Workspace<ExecSpace>(bytes).size(), 300u);
  EXPECT_EQ(Workspace<ExecSpace>(bytes).data(), bytes.data());
  EXPECT_EQ(Workspace<ExecSpace>(chars).size(), 200u);
  EXPECT_EQ(Workspace<ExecSpace>(unsigned_chars).size(), 100u);
  EXPECT_EQ(Workspace<ExecSpace>().size(), 0u);
}

// Bytes between the elements of a View are not the library's to use.
TEST(WorkspaceTypes, MustBeContiguous) {
  using ExecSpace = Kokkos::DefaultExecutionSpace;
  const Kokkos::View<char*, ExecSpace> bytes("test::bytes", 300);
  const Kokkos::View<char*, Kokkos::LayoutStride, ExecSpace,
                     Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      every_second(bytes.data(), Kokkos::LayoutStride(150, 2));
  try {
    const Workspace<ExecSpace> workspace(every_second);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("contiguous, found stride 2 of 150"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
