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

std::size_t kibibyte_a_token(const Plan& plan) {
  return 1024 * static_cast<std::size_t>(plan.chunk) / static_cast<std::size_t>(plan.tiles);
}

PlanRequest request(Pass pass, int chunk = 0, int segments = 0) {
  PlanRequest wanted;
  wanted.pass = pass;
  wanted.causal = true;
  wanted.features = 64;
  wanted.chunk = chunk;
  wanted.segments = segments;
  wanted.tile_bytes = kibibyte_a_token;
  return wanted;
}

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
    int expected_chunk, expected_tiles, expected_segments, expected_workers;
  };
  const Row table[] = {
      // enough heads for all threads: whole states
      {2, 8, 4096, 2, 0, 0, 16, 1, 1, 2},
      {1, 4, 4096, 4, 0, 0, 16, 1, 1, 4},
      // heads that do not go evenly into the threads: windows that do
      {1, 3, 4096, 2, 0, 0, 16, 2, 1, 2},
      // fewer heads than threads: windows while they are cheaper, else long segments
      {1, 1, 65536, 2, 0, 0, 16, 2, 1, 2},
      {1, 1, 65536, 4, 0, 0, 16, 4, 1, 4},
      {1, 1, 65536, 16, 0, 0, 16, 1, 16, 16},
      // segments are not shorter than sixteen chunks
      {1, 1, 512, 16, 0, 0, 16, 4, 2, 8},
      {1, 1, 511, 16, 0, 0, 16, 4, 2, 8},
      {1, 1, 448, 16, 0, 0, 16, 4, 1, 4},
      {1, 1, 1, 16, 0, 0, 1, 4, 1, 4},
      {70000, 1, 3, 8, 0, 0, 3, 1, 1, 8},
      // wishes are granted as far as there are tokens and chunks
      {4, 4, 100, 2, 16, 3, 16, 1, 3, 2},
      {4, 4, 100, 2, 16, 50, 16, 1, 7, 2},
      {4, 4, 100, 2, 1, 5, 1, 1, 5, 2},
      {4, 4, 100, 2, 16384, 0, 100, 1, 1, 2},
      {4, 4, 0, 2, 0, 5, 1, 1, 1, 2},
      // nothing to do
      {0, 0, 100, 2, 0, 0, 16, 1, 1, 1},
  };
  for (const Row& row : table) {
    const Plan plan = make_plan(extents(row.batch, row.kv_heads, row.tokens), host(row.threads),
                                request(Pass::forward, row.chunk, row.segments));
    SCOPED_TRACE(extents(row.batch, row.kv_heads, row.tokens).to_string() + " " +
                 std::to_string(row.threads) + " threads: " + plan.to_string());
    EXPECT_EQ(plan.chunk, row.expected_chunk);
    EXPECT_EQ(plan.tiles, row.expected_tiles);
    EXPECT_EQ(plan.segments, row.expected_segments);
    EXPECT_EQ(plan.workers, row.expected_workers);
    EXPECT_EQ(plan.team_size, 1);
    EXPECT_FALSE(plan.tiles_in_scratch);
    EXPECT_EQ(plan.tile_bytes, kibibyte_a_token(plan));
  }
}

// Without a mask a chunk costs nothing extra, and a longer one saves passes over the state.
TEST(Plan, LongerChunksWithoutAMask) {
  PlanRequest full = request(Pass::forward);
  full.causal = false;
  EXPECT_EQ(make_plan(extents(2, 8, 4096), host(2), full).chunk, 64);
}

// A map that mixes the entries of a row keeps its features together.
TEST(Plan, NoWindowsWhereTheyCannotBe) {
  PlanRequest whole = request(Pass::backward);
  EXPECT_GT(make_plan(extents(1, 1, 65536), host(2), whole).tiles, 1);
  whole.windows = false;
  const Plan plan = make_plan(extents(1, 1, 65536), host(2), whole);
  EXPECT_EQ(plan.tiles, 1);
  EXPECT_EQ(plan.segments, 2);
}

// Sums are compensated from 4096 additions a segment on, and never in fp64.
TEST(Plan, CompensatesLongSums) {
  PlanRequest wanted = request(Pass::forward);
  const std::int64_t last = 4096 * 16;
  EXPECT_FALSE(make_plan(extents(2, 8, last), host(2), wanted).compensated);
  EXPECT_TRUE(make_plan(extents(2, 8, last + 1), host(2), wanted).compensated);
  wanted.segments = 2;
  EXPECT_FALSE(make_plan(extents(2, 8, last + 1), host(2), wanted).compensated);
  wanted.segments = 0;
  wanted.exact = true;
  EXPECT_FALSE(make_plan(extents(2, 8, 4 * last), host(2), wanted).compensated);
}

// The fewest windows, and then the longest chunk, with which tiles fit the scratch memory of a
// team. Where none fits, tiles live in the workspace, in chunks of the full length.
TEST(Plan, OnADevice) {
  struct Row {
    std::size_t scratch;
    int chunk;  // asked for
    int expected_chunk, expected_tiles;
    bool expected_scratch;
  };
  const Row table[] = {
      {1 << 20, 0, 64, 1, true}, {65536, 0, 64, 1, true}, {65535, 0, 32, 1, true},
      {40936, 0, 32, 1, true},   {20000, 0, 16, 1, true}, {16383, 0, 16, 2, true},
      {8191, 0, 16, 3, true},    {5460, 0, 16, 4, true},  {4095, 0, 64, 1, false},
      {0, 0, 64, 1, false},      {65536, 8, 8, 1, true},  {65536, 128, 128, 2, true},
      {0, 16, 16, 1, false}};
  for (const Row& row : table) {
    const Plan plan = make_plan(extents(40, 80, 4096), device(2048 * 100, row.scratch),
                                request(Pass::forward, row.chunk));
    SCOPED_TRACE(std::to_string(row.scratch) + ": " + plan.to_string());
    EXPECT_EQ(plan.chunk, row.expected_chunk);
    EXPECT_EQ(plan.tiles, row.expected_tiles);
    EXPECT_EQ(plan.tiles_in_scratch, row.expected_scratch);
    EXPECT_EQ(plan.tile_bytes, kibibyte_a_token(plan));
    EXPECT_GT(plan.team_size, 1);
    EXPECT_LE(plan.workers, 2048 * 100 / plan.team_size);
    EXPECT_LE(plan.workers, 40 * 80 * plan.segments * plan.tiles);
  }
}

// Windows are tried one more at a time, up to those that the state has.
TEST(Plan, NoMoreWindowsOnADeviceThanItTakes) {
  const auto tiles = [](std::size_t scratch) {
    PlanRequest wanted = request(Pass::forward, 16);
    wanted.granule = 8;  // 64 columns: up to 8 windows
    return make_plan(extents(40, 80, 4096), device(2048 * 100, scratch), wanted).tiles;
  };
  // a worker needs 16 KiB over the number of windows
  for (const int windows : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const std::size_t least = 16384 / static_cast<std::size_t>(windows);
    EXPECT_EQ(tiles(least), windows);
    EXPECT_EQ(tiles(least - 1), windows < 8 ? windows + 1 : 1);
  }
}

// Windows that were asked for are not changed: then tiles live in the workspace if they must.
TEST(Plan, AWishForWindowsIsKeptOnADevice) {
  for (const int wish : {1, 2}) {
    PlanRequest wanted = request(Pass::forward, 16);
    wanted.tiles = wish;
    const Plan plan = make_plan(extents(40, 80, 4096), device(2048 * 100, 5000), wanted);
    EXPECT_EQ(plan.tiles, wish);
    EXPECT_FALSE(plan.tiles_in_scratch);
  }
}

// What counts is the chunk that is taken in the end: 200000 tokens are 3125 chunks of 64, but
// 12500 of 16.
TEST(Plan, CompensatesByTheChunkTaken) {
  const Problem p = extents(40, 80, 200000);
  const PlanRequest wanted = request(Pass::forward, 0, 1);
  const Plan longer = make_plan(p, device(2048 * 100, 65536), wanted);
  EXPECT_EQ(longer.chunk, 64);
  EXPECT_FALSE(longer.compensated);
  const Plan shorter = make_plan(p, device(2048 * 100, 20000), wanted);
  EXPECT_EQ(shorter.chunk, 16);
  EXPECT_EQ(shorter.segments, 1);
  EXPECT_TRUE(shorter.compensated);
}

// A token: heads, and windows of large states where heads are too few.
TEST(Plan, OfAStep) {
  const auto tiles = [](std::int64_t kv_heads, std::int64_t d, int threads) {
    const Problem p{1, kv_heads, kv_heads, 1, 1, d, d};
    return make_step_plan(p, d, host(threads), 16).tiles;
  };
  EXPECT_EQ(tiles(8, 64, 4), 1);
  EXPECT_EQ(tiles(1, 64, 4), 1);  // not worth it
  EXPECT_EQ(tiles(1, 512, 4), 4);
  EXPECT_EQ(tiles(1, 512, 64), 16);
  EXPECT_EQ(tiles(2, 512, 4), 2);
  EXPECT_EQ(make_step_plan({0, 8, 8, 1, 1, 64, 64}, 64, host(4), 16).workers, 1);
}

TEST(Plan, IsPure) {
  const auto make = [] {
    return make_plan(extents(1, 2, 5000), host(8), request(Pass::backward)).to_string();
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

// Without a token there is nothing to do, but states are as many as ever: none overflows unseen.
TYPED_TEST(PlanOfCall, RefusesMoreStatesThanMemoryHas) {
  const typename TypeParam::ExecSpace exec;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    try {
      plan<float>(exec, Elu{}, {std::int64_t(1) << 61, 2, 2, 0, 0, 3, 4}, pass);
      FAIL() << "accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("no memory"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
