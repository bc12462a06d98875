// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstdlib>

namespace LinAttn::test_support {

/// Seed of all random numbers of the tests: fixed, or the environment's LINATTN_TEST_SEED; printed
/// by every run.
inline std::uint64_t seed() {
  const char* text = std::getenv("LINATTN_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20250131;
}

}  // namespace LinAttn::test_support
