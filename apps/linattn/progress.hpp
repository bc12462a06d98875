// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <unistd.h>

#include <iostream>
#include <string>

/// \file progress.hpp

namespace LinAttn::app {

/// One line about what is going on, on a terminal only, gone when it ends.
class Progress {
 public:
  Progress() : m_terminal(::isatty(STDERR_FILENO) != 0) {}
  ~Progress() { show(""); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text) const {
    if (m_terminal) std::cerr << "\r\033[K" << text << std::flush;
  }

 private:
  bool m_terminal;
};

}  // namespace LinAttn::app
