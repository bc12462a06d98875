// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

/// \file program.hpp
/// Runs the built program as a user would.

namespace LinAttn::test_app {

using Arguments = std::vector<std::string>;

struct Result {
  int status = -1;  ///< exit status; 128 + signal if it was killed
  std::string out;
  std::string err;
};

/// `environment` adds to and overrides this process's. `out_file` receives standard output in place
/// of Result::out.
Result run(const Arguments& arguments, const std::map<std::string, std::string>& environment = {},
           const std::string& out_file = "");

/// The same where no file can grow beyond some KiB: what a full disk does to a program.
Result run_on_full_disk(const Arguments& arguments, int kibibytes);

/// Exit status 0 and not a word on standard error.
::testing::AssertionResult succeeded(const Result& result);

/// The exit status, one line on standard error, and every word in that line.
::testing::AssertionResult complained(const Result& result, int status,
                                      const std::vector<std::string>& words);

std::string data(const std::string& name);
std::string read_file(const std::filesystem::path& path);

/// A folder of its own for each test.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  std::string file(const std::string& name) const { return (m_folder / name).string(); }
  /// Names of everything in the folder, sorted.
  std::vector<std::string> files() const;
  nlohmann::json json(const std::string& name) const;

 private:
  std::filesystem::path m_folder;
};

}  // namespace LinAttn::test_app
