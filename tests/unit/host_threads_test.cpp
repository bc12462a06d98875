// SPDX-License-Identifier: BSD-3-Clause

// Calls from several threads of the caller at once, each with its own instance and workspace: the
// library has nothing that they share. What Kokkos itself shares decides which execution spaces
// allow it.

#include <thread>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

#if defined(KOKKOS_ENABLE_SERIAL)

using Exec = Kokkos::Serial;

struct Call {
  explicit Call(std::uint64_t which)
      : problem{1, 2, 1, length(which), length(which), 33, 20},
        c(random_case<float, Lln>(problem, {}, which)),
        attention(c, options),
        forward_bytes("arena", attention.workspace_bytes(Pass::forward)),
        backward_bytes("arena", attention.workspace_bytes(Pass::backward)) {}

  /// Every other call is long enough to need a table of shifts.
  static std::int64_t length(std::uint64_t which) {
    return (which % 2 == 0 ? 90 : 1100) + static_cast<std::int64_t>(which);
  }

  void run() {
    LinAttn::forward<float>(Exec(), attention.variant(), attention.inputs(), attention.saved(),
                            forward_bytes, options);
    LinAttn::backward<float>(Exec(), attention.variant(), attention.inputs(), attention.saved(),
                             attention.cotangents(), attention.gradients({}), backward_bytes,
                             options);
  }

  Problem problem;
  Options options{.causal = true};
  Case c;
  Attention<float, Exec, Lln> attention;
  Kokkos::View<std::byte*, Exec::memory_space> forward_bytes, backward_bytes;
};

TEST(HostThreads, IndependentCallsAtOnce) {
  constexpr std::uint64_t threads = 6;
  std::vector<Outcome<float>> expected;
  std::vector<std::unique_ptr<Call>> calls;
  for (std::uint64_t t = 0; t < threads; ++t) {
    Call alone(t);
    alone.run();
    expected.push_back(alone.attention.outcome());
    calls.push_back(std::make_unique<Call>(t));
  }
  std::vector<std::thread> running;
  for (auto& call : calls)
    running.emplace_back([&call] {
      for (int repeat = 0; repeat < 20; ++repeat) call->run();
    });
  for (std::thread& thread : running) thread.join();
  for (std::uint64_t t = 0; t < threads; ++t)
    EXPECT_TRUE(same_bits(calls[t]->attention.outcome(), expected[t])) << "thread " << t;
}

#endif

}  // namespace
