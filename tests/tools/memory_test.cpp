// SPDX-License-Identifier: BSD-3-Clause

// B48: memory beyond inputs and outputs, measured by the allocation hooks of Kokkos.
//
// The bound: one accumulator number per query row and normaliser is kept; a call needs no more than
// that again, the states of segments, and the tiles of the workers, which do not depend on N.

#include "attention_case.hpp"
#include "events.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class Memory : public ::testing::Test {
 public:
  using T = typename C::T;
  using V = typename C::V;
  using ExecSpace = typename C::ExecSpace;
  using A = accumulator_t<T>;

  static V variant(const Problem& p) { return variant_for_plans<V, ExecSpace>(p.d); }

  static std::size_t workspace(const Problem& p, Pass pass, const Options& options) {
    return workspace_size<T>(ExecSpace(), variant(p), p, pass, options);
  }

  /// Logits of queries and keys, and in the backward pass their gradients, where features are of logits.
  static std::int64_t logits(const Problem& p, Pass pass) {
    if (!ProjectedVariant<V>) return 0;
    return (pass == Pass::backward ? 2 : 1) * p.batch * (p.heads * p.nq + p.kv_heads * p.nk) *
           features_of_row<V>(p.d) * static_cast<std::int64_t>(sizeof(A));
  }
  /// The projection, padded, and a tile of 64 rows, their logits and two sums for each worker.
  static std::int64_t projection(const Problem& p) {
    if (!ProjectedVariant<V>) return 0;
    const std::int64_t M = features_of_row<V>(p.d), number = sizeof(A), line = 64 / number;
    const std::int64_t workers = LinAttn::detail::concurrency(ExecSpace());
    return (M * (p.d + line) + p.d * (M + line)) * number +
           workers * (64 * (p.d + M + 2 * line + 2) * number + 8 * 128);
  }
  static std::int64_t workers_bytes(const Problem& p, Pass pass, const Options& options) {
    const Plan found = plan<T>(ExecSpace(), variant(p), p, pass, options);
    return found.tiles_in_scratch ? 0 : static_cast<std::int64_t>(found.tile_bytes) * found.workers;
  }

  /// One number per row, and a state for every segment: its windows padded to 64 bytes, z once for each.
  static std::int64_t allowed(const Problem& p, Pass pass, const Options& options) {
    const Plan found = plan<T>(ExecSpace(), variant(p), p, pass, options);
    const auto number = static_cast<std::int64_t>(sizeof(A));
    const std::int64_t tiles = found.tiles, granule = tiles > 1 ? tiles * (64 / number) : 1;
    const std::int64_t features = features_of_row<V>(p.d);
    const std::int64_t narrow = pass == Pass::forward ? p.dv : std::max(features, p.dv);
    const std::int64_t wide = features * p.dv / std::max<std::int64_t>(narrow, 1);
    std::int64_t state = ((narrow + granule - 1) / granule * granule * wide + tiles * features) * number;
    if (is_scaled<V>) state += 2 * tiles * features * static_cast<std::int64_t>(sizeof(int));
    if (has_constant<V>) state += tiles * (p.dv + granule) * number;
    const std::int64_t parts =
        tiles * (static_cast<std::int64_t>(sizeof(double)) * (2 * p.group() + 1) +
                 static_cast<std::int64_t>(sizeof(NormaliserRecord)) * p.group());
    // sums of features beside the windows of the forward pass, see docs/engine.md
    const std::int64_t sums = pass == Pass::forward && tiles > 1 ? p.batch * p.kv_heads * features * number : 0;
    return p.batch * p.heads * p.nq * number + sums +
           found.segments * p.batch * p.kv_heads * (state + parts) +
           workers_bytes(p, pass, options) + logits(p, pass) + projection(p) +
           16 * static_cast<std::int64_t>(Workspace<ExecSpace>::alignment);
  }
};

TYPED_TEST_SUITE(Memory, OverVariants, ConfigName);

TYPED_TEST(Memory, WithinTheBound) {
  const Problem shapes[] = {{1, 1, 1, 65536, 65536, 64, 64}, {2, 8, 8, 4096, 4096, 64, 64},
                            {1, 8, 2, 2000, 30000, 128, 32}, {4, 1, 1, 100000, 100000, 16, 200},
                            {1, 8, 8, 65536, 65536, 64, 64}, {1, 1, 1, 1, 100000, 64, 64}};
  for (const Problem& p : shapes)
    for (const bool causal : {false, true})
      for (const int segments : {0, 1, 7})
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          const Options options{.causal = causal, .segments = segments};
          // decoding has fewer rows than keys; the table of shifts then is what little there is
          const std::int64_t shifts = is_scaled<typename TypeParam::V>
                                          ? p.batch * p.kv_heads * (p.nk / 1024 + 2) * features_of_row<typename TypeParam::V>(p.d) *
                                                static_cast<std::int64_t>(sizeof(int))
                                          : 0;
          const std::int64_t bytes = static_cast<std::int64_t>(this->workspace(p, pass, options));
          EXPECT_LE(bytes, this->allowed(p, pass, options) + (p.nq < p.nk ? shifts : 0))
              << describe(p, options) << (pass == Pass::forward ? " forward" : " backward");
          // the states of all tokens, as a careless implementation keeps them
          if (p.nq > 1000) {
            EXPECT_LT(bytes - this->logits(p, pass),
                      p.nq * p.heads * features_of_row<typename TypeParam::V>(p.d) * p.dv);
          }
        }
}

// Twice the tokens cost less than one number per row more, whatever the head dimensions, and
// nothing at all where no exponents have to be found again.
TYPED_TEST(Memory, SlopeInTheNumberOfTokens) {
  using V = typename TypeParam::V;
  using A = typename TestFixture::A;
  for (const std::int64_t width : {16, 64, 128})
    for (const bool causal : {false, true})
      for (const int segments : {1, 4})
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          const Options options{.causal = causal, .segments = segments};
          const std::int64_t n = 32768;
          const Problem once{2, 4, 4, n, n, width, width},
              twice{2, 4, 4, 2 * n, 2 * n, width, width};
          const auto more = static_cast<std::int64_t>(this->workspace(twice, pass, options)) -
                            static_cast<std::int64_t>(this->workspace(once, pass, options));
          const std::int64_t rows = once.batch * once.heads * n, logits = this->logits(once, pass);
          EXPECT_LE(more, rows * static_cast<std::int64_t>(sizeof(A)) + logits) << describe(once, options);
          if (!is_scaled<V> || pass == Pass::forward) {
            EXPECT_EQ(more, logits) << describe(once, options);
          }
        }
}

TYPED_TEST(Memory, TilesDoNotDependOnTheNumberOfTokens) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto tiles = [&](std::int64_t n) {
      return plan<typename TypeParam::T>(typename TypeParam::ExecSpace(), this->variant({1, 4, 4, n, n, 64, 64}),
                                         {1, 4, 4, n, n, 64, 64}, pass, {.causal = true})
          .tile_bytes;
    };
    EXPECT_EQ(tiles(1 << 12), tiles(1 << 15));
    EXPECT_EQ(tiles(1 << 17), tiles(1 << 20));  // here sums are compensated, which costs a second state
  }
}

// Kept for the backward pass: one number per row.
TYPED_TEST(Memory, KeptBytes) {
  using Kept = Saved<typename TypeParam::ExecSpace, typename TypeParam::T>;
  const auto number = sizeof(typename TestFixture::A);
  EXPECT_EQ(Kept::bytes({2, 6, 3, 1000, 2000, 64, 32}), 2u * 6 * 1000 * number);
  EXPECT_EQ(Kept::bytes({2, 6, 3, 1000, 2000, 128, 256}), 2u * 6 * 1000 * number);
  EXPECT_EQ(Kept::bytes({70000, 6, 3, 70000, 70000, 8, 8}),
            std::size_t(70000) * 6 * 70000 * number);
}

// And so it is when a call runs: what Kokkos sees allocated, at its peak, is the workspace.
TYPED_TEST(Memory, MeasuredByAllocationHooks) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const int segments : {1, 4}) {
      const Options options{.causal = causal, .segments = segments};
      std::int64_t peaks[2];
      for (const int times : {1, 2}) {
        const Problem p{1, 2, 2, 3000 * times, 3000 * times, 32, 24};
        const Case c = random_case<T, V>(p, options);
        Attention<T, ExecSpace, V> call(c, options);
        const ExecSpace exec;
        forward<T>(exec, call.variant(), call.inputs(), call.saved(), options);
        const auto gradients = call.gradients({});
        const Recording recording(Watch::kernels_and_memory);
        forward<T>(exec, call.variant(), call.inputs(), call.saved(), options);
        backward<T>(exec, call.variant(), call.inputs(), call.saved(), call.d_o.input(), gradients,
                    options);
        const auto peak = static_cast<std::int64_t>(recording.peak_bytes());
        ASSERT_GT(peak, 0);
        EXPECT_LE(peak, std::max(this->allowed(p, Pass::forward, options),
                                 this->allowed(p, Pass::backward, options)));
        peaks[times - 1] = peak;
      }
      EXPECT_LE(peaks[1] - peaks[0],
                2 * 3000 * static_cast<std::int64_t>(sizeof(accumulator_t<T>)) +
                    this->logits({1, 2, 2, 3000, 3000, 32, 24}, Pass::backward));
    }
}

}  // namespace
