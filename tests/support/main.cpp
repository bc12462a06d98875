// SPDX-License-Identifier: BSD-3-Clause

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <iostream>

#include "seed.hpp"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) {
    return RUN_ALL_TESTS();
  }
  const Kokkos::ScopeGuard guard(argc, argv);
  std::cout << "LINATTN_TEST_SEED=" << LinAttn::test_support::seed() << std::endl;
  const int status = RUN_ALL_TESTS();
  if (::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::cerr << "no test was selected" << std::endl;
    return 1;
  }
  return status;
}
