// SPDX-License-Identifier: BSD-3-Clause
#include "program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace LinAttn::test_app {
namespace {

namespace fs = std::filesystem;

class TemporaryFile {
 public:
  TemporaryFile() : m_name((fs::temp_directory_path() / "linattn-app-XXXXXX").string()) {
    const int descriptor = ::mkstemp(m_name.data());
    if (descriptor < 0) throw std::runtime_error("cannot make a temporary file");
    ::close(descriptor);
  }
  ~TemporaryFile() { ::unlink(m_name.c_str()); }
  const std::string& name() const { return m_name; }

 private:
  std::string m_name;
};

std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> variables;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!changes.contains(text.substr(0, text.find('=')))) variables.push_back(text);
  }
  for (const auto& [name, value] : changes) variables.push_back(name + "=" + value);
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::string shown(const Result& result) {
  return "status " + std::to_string(result.status) + "\nstandard error: " + result.err +
         "\nstandard output: " + result.out;
}

Result run_command(std::vector<std::string> words,
                   const std::map<std::string, std::string>& environment,
                   const std::string& out_file) {
  const TemporaryFile out, err;
  std::vector<std::string> variables = environment_with(environment);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO,
                                   (out_file.empty() ? out.name() : out_file).c_str(), O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.name().c_str(), O_WRONLY, 0);
  pid_t child = 0;
  const int error = ::posix_spawn(&child, words[0].c_str(), &actions, nullptr,
                                  pointers_to(words).data(), pointers_to(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + words[0]);
  int status = 0;
  if (::waitpid(child, &status, 0) != child) throw std::runtime_error("lost " + words[0]);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out.name()),
          read_file(err.name())};
}

}  // namespace

Result run(const Arguments& arguments, const std::map<std::string, std::string>& environment,
           const std::string& out_file) {
  std::vector<std::string> words{LINATTN_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_command(words, environment, out_file);
}

Result run_on_full_disk(const Arguments& arguments, int kibibytes) {
  const std::string script =
      "trap '' XFSZ; ulimit -f " + std::to_string(2 * kibibytes) + "; exec \"$0\" \"$@\"";
  std::vector<std::string> words{"/bin/sh", "-c", script, LINATTN_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_command(words, {}, "");
}

::testing::AssertionResult succeeded(const Result& result) {
  if (result.status == 0 && result.err.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << shown(result);
}

::testing::AssertionResult complained(const Result& result, int status,
                                      const std::vector<std::string>& words) {
  const auto failure = [&](const std::string& text) {
    return ::testing::AssertionFailure() << text << "\n" << shown(result);
  };
  if (result.status != status) return failure("expected status " + std::to_string(status));
  const bool one_line = std::count(result.err.begin(), result.err.end(), '\n') == 1 &&
                        result.err.back() == '\n' && result.err.starts_with("linattn");
  if (!one_line) return failure("expected one line on standard error");
  for (const std::string& word : words)
    if (result.err.find(word) == std::string::npos) return failure("expected the word " + word);
  return ::testing::AssertionSuccess();
}

std::string data(const std::string& name) { return std::string(LINATTN_DATA_DIR) + "/" + name; }

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) throw std::runtime_error("cannot read " + path.string());
  return text.str();
}

void ProgramTest::SetUp() {
  std::string pattern = (fs::temp_directory_path() / "linattn-app-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
  m_folder = pattern;
}

void ProgramTest::TearDown() { fs::remove_all(m_folder); }

std::vector<std::string> ProgramTest::files() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(m_folder))
    names.push_back(fs::relative(entry.path(), m_folder).string());
  std::sort(names.begin(), names.end());
  return names;
}

nlohmann::json ProgramTest::json(const std::string& name) const {
  return nlohmann::json::parse(read_file(m_folder / name));
}

}  // namespace LinAttn::test_app
