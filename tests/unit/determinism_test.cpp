// SPDX-License-Identifier: BSD-3-Clause

// B50: with the number of segments fixed, the number of threads changes no bit.

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdio>
#include <string>

namespace {

/// What thread_digest prints when it is given this many threads.
std::string digest(int threads) {
  const std::string command = "OMP_NUM_THREADS=" + std::to_string(threads) +
                              " OMP_WAIT_POLICY=passive '" LINATTN_THREAD_DIGEST "' 2>&1";
  std::string text;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) text += buffer;
  EXPECT_EQ(pclose(pipe), 0) << text;
  return text;
}

TEST(Determinism, B50TheNumberOfThreadsChangesNoBit) {
#if !defined(KOKKOS_ENABLE_OPENMP)
  GTEST_SKIP() << "this Kokkos has no OpenMP";
#endif
  std::string first;
  for (const int threads : {1, 2, 3}) {
    const std::string text = digest(threads);
    const std::string header = "threads " + std::to_string(threads) + "\n";
    const std::size_t at = text.find(header);
    ASSERT_NE(at, std::string::npos) << text;
    const std::string digests = text.substr(at + header.size());
    ASSERT_GT(std::count(digests.begin(), digests.end(), '\n'), 20) << text;
    if (first.empty()) first = digests;
    EXPECT_EQ(digests, first) << threads << " threads";
  }
}

}  // namespace
