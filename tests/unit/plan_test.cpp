// SPDX-License-Identifier: BSD-3-Clause

// The plan: a pure function of extents, machine and wishes.

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <linattn/linattn.hpp>
#include <linattn/plan.hpp>
#include <linattn/variants.hpp>

#include "spaces.hpp"

namespace {

using namespace LinAttn;

Problem extents(std::int64_t batch, std::int64_t kv_heads, std::int64_t tokens) {
  return {batch, kv_heads, kv_heads, tokens, tokens, 64, 64};
}

std::size_t kibibyte_a_token(int chunk) { return 1024 * static_cast<std::size_t>(chunk); }

MachineTraits host(int threads) {
  return {.host = true, .concurrency = threads, .scratch_bytes = 0};
}
MachineTraits device(int concurrency, std::size_t scratch) {
  return {.host = false, .concurrency = concurrency, .scratch_bytes = scratch};
}

TEST(Plan, OnTheHost) {
  struct Row {
    std::int64_t batch, kv_heads, tokens;
    int threads, chunk, segments;  // asked for
    int expected_chunk, expected_segments, expected_workers;
  };
  const Row table[] = {
      // enough heads for all threads: whole sequences
      {2, 8, 4096, 2, 0, 0, 64, 1, 2},
      {1, 4, 4096, 4, 0, 0, 64, 1, 4},
      {1, 3, 4096, 2, 0, 0, 64, 1, 2},
      // fewer: long segments until all threads have one
      {1, 1, 65536, 2, 0, 0, 64, 2, 2},
      {1, 1, 65536, 16, 0, 0, 64, 16, 16},
      {1, 3, 65536, 16, 0, 0, 64, 6, 16},
      // but not shorter than four chunks
      {1, 1, 512, 16, 0, 0, 64, 2, 2},
      {1, 1, 511, 16, 0, 0, 64, 2, 2},
      {1, 1, 448, 16, 0, 0, 64, 1, 1},
      {1, 1, 1, 16, 0, 0, 64, 1, 1},
      // never more workers than tasks or threads
      {1, 1, 64, 8, 0, 0, 64, 1, 1},
      {70000, 1, 3, 8, 0, 0, 64, 1, 8},
      // wishes are granted as far as there are chunks
      {1, 1, 100, 2, 16, 3, 16, 3, 2},
      {1, 1, 100, 2, 16, 50, 16, 7, 2},
      {4, 4, 100, 2, 1, 5, 1, 5, 2},
      {1, 1, 0, 2, 0, 5, 64, 1, 1},
      // nothing to do
      {0, 0, 100, 2, 0, 0, 64, 1, 1},
  };
  for (const Row& row : table) {
    const Plan plan = make_plan(extents(row.batch, row.kv_heads, row.tokens), host(row.threads),
                                row.chunk, row.segments, kibibyte_a_token);
    SCOPED_TRACE(extents(row.batch, row.kv_heads, row.tokens).to_string() + " " +
                 std::to_string(row.threads) + " threads: " + plan.to_string());
    EXPECT_EQ(plan.chunk, row.expected_chunk);
    EXPECT_EQ(plan.segments, row.expected_segments);
    EXPECT_EQ(plan.workers, row.expected_workers);
    EXPECT_EQ(plan.team_size, 1);
    EXPECT_FALSE(plan.tiles_in_scratch);
    EXPECT_EQ(plan.tile_bytes, kibibyte_a_token(plan.chunk));
  }
}

// The largest chunk whose tiles fit the scratch memory of a team. Where none fits, tiles live in
// the workspace, in chunks of the full length.
TEST(Plan, OnADevice) {
  struct Row {
    std::size_t scratch;
    int chunk;  // asked for
    int expected_chunk;
    bool expected_scratch;
  };
  const Row table[] = {{1 << 20, 0, 64, true}, {65536, 0, 64, true}, {65535, 0, 32, true},
                       {40936, 0, 32, true},   {20000, 0, 16, true}, {16383, 0, 64, false},
                       {0, 0, 64, false},      {65536, 8, 8, true},  {65536, 128, 128, false},
                       {0, 16, 16, false}};
  for (const Row& row : table) {
    const Plan plan = make_plan(extents(4, 8, 4096), device(2048 * 100, row.scratch), row.chunk, 0,
                                kibibyte_a_token);
    SCOPED_TRACE(std::to_string(row.scratch) + ": " + plan.to_string());
    EXPECT_EQ(plan.chunk, row.expected_chunk);
    EXPECT_EQ(plan.tiles_in_scratch, row.expected_scratch);
    EXPECT_EQ(plan.tile_bytes, kibibyte_a_token(row.expected_chunk));
    EXPECT_GT(plan.team_size, 1);
    EXPECT_LE(plan.workers, 2048 * 100 / plan.team_size);
    EXPECT_LE(plan.workers, 4 * 8 * plan.segments);
  }
}

TEST(Plan, IsPure) {
  const auto make = [] {
    return make_plan(extents(1, 2, 5000), host(8), 0, 0, kibibyte_a_token).to_string();
  };
  const std::string first = make();
  for (int n = 0; n < 5; ++n) EXPECT_EQ(make(), first);
}

template <class C>
class PlanOfCall : public ::testing::Test {};
TYPED_TEST_SUITE(PlanOfCall, test_support::OverSpaces, test_support::ConfigName);

TYPED_TEST(PlanOfCall, KnowsTheMachine) {
  const typename TypeParam::ExecSpace exec;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Plan found = plan<float>(exec, Elu{}, extents(1, 1, 1 << 20), pass);
    EXPECT_GE(found.workers, 1);
    EXPECT_LE(found.workers, std::max(1, LinAttn::detail::concurrency(exec)));
    EXPECT_GT(found.tile_bytes, 0u);
    EXPECT_EQ(plan<float>(exec, Elu{}, extents(1, 1, 1 << 20), pass, {.chunk = 33}).chunk, 33);
    EXPECT_EQ(plan<float>(exec, Elu{}, extents(1, 1, 1 << 20), pass, {.segments = 9}).segments, 9);
  }
}

}  // namespace
