// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

/// \file error.hpp
/// The two families of errors: what the caller can put right, and what the environment refused.

namespace LinAttn {

/// Thrown for a mistake of the caller: mismatched extents, an unsupported combination, a wrong file
/// content. The message carries what was expected and what was found.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Thrown when the environment refuses: a file that cannot be opened, a full disk, no memory.
class EnvironmentFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

/// Concatenates its arguments as an output stream would print them.
template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace detail
}  // namespace LinAttn
