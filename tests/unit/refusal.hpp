// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <linattn/error.hpp>
#include <string>
#include <vector>

/// \file refusal.hpp
/// What a call refuses, and what it says.

namespace LinAttn::test_support {

/// Runs the body and checks that it throws InvalidArgument whose message has all the given pieces.
template <class Body>
void expect_refusal(const Body& body, const std::vector<std::string>& pieces) {
  try {
    body();
    ADD_FAILURE() << "accepted, but expected a message with '" << pieces.front() << "'";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind("LinAttn: ", 0), 0u) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    for (const std::string& piece : pieces)
      EXPECT_NE(text.find(piece), std::string::npos) << "no '" << piece << "' in: " << text;
  }
}

}  // namespace LinAttn::test_support
