// SPDX-License-Identifier: BSD-3-Clause

// What the documents say about files, code, names and commands, held against the tree.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <linattn/variants.hpp>
#include <linattn/version.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

const fs::path source_dir = LINATTN_SOURCE_DIR;

std::string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) throw std::runtime_error("cannot read " + path.string());
  return text.str();
}

std::vector<std::string> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match)
    found.push_back(match->size() > 1 ? (*match)[1] : (*match)[0]);
  return found;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A fenced block. `quoted` is what the comment on the line before it says: "all of: FILE", "part
/// of: FILE".
struct Block {
  std::string language;
  std::string quoted;
  std::string text;
};

struct Document {
  std::string name;   ///< path below the root
  std::string prose;  ///< without fenced blocks
  std::vector<Block> blocks;

  /// `these` in the prose.
  std::vector<std::string> inline_code() const { return matches(prose, "`([^`\n]+)`"); }
  /// Lines of its shell blocks.
  std::vector<std::string> commands() const {
    std::vector<std::string> lines;
    for (const Block& block : blocks) {
      if (block.language != "sh") continue;
      std::istringstream stream(block.text);
      for (std::string line; std::getline(stream, line);) lines.push_back(line);
    }
    return lines;
  }
};

Document parse(const fs::path& root, const std::string& name) {
  Document document{name, "", {}};
  std::istringstream stream(read(root / name));
  std::string before;
  bool inside = false;
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind("```", 0) == 0) {
      inside = !inside;
      if (inside) {
        const auto quoted = matches(before, "^<!-- ((?:all|part) of: \\S+) -->$");
        document.blocks.push_back({line.substr(3), quoted.empty() ? "" : quoted[0], ""});
      }
    } else if (inside) {
      document.blocks.back().text += line + "\n";
    } else {
      document.prose += line + "\n";
    }
    before = line;
  }
  if (inside) throw std::runtime_error(name + ": a fenced block has no end");
  return document;
}

std::vector<Document> documents(const fs::path& root) {
  std::vector<std::string> names;
  for (const char* folder : {"", "docs", "data"}) {
    if (!fs::is_directory(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::directory_iterator(root / folder))
      if (entry.path().extension() == ".md")
        names.push_back(fs::relative(entry.path(), root).generic_string());
  }
  std::sort(names.begin(), names.end());
  std::vector<Document> result;
  for (const std::string& name : names) result.push_back(parse(root, name));
  return result;
}

/// Contents of all files below some folders and of some files, in one text.
std::string contents(const fs::path& root, const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) {
    if (fs::is_regular_file(root / path)) text += read(root / path);
    if (!fs::is_directory(root / path)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / path))
      if (entry.is_regular_file()) text += read(entry.path());
  }
  return text;
}

/// The anchor of a heading, as code hosts make it.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '-' || c == '_') anchor += static_cast<char>(std::tolower(byte));
    if (c == ' ') anchor += '-';
  }
  return anchor;
}

using Complaints = std::vector<std::string>;

Complaints broken_links(const fs::path& root) {
  Complaints found;
  for (const Document& document : documents(root)) {
    for (const std::string& link : matches(document.prose, "\\]\\(([^)\\s]+)\\)")) {
      if (link.rfind("https://", 0) == 0) continue;
      const std::string path = link.substr(0, link.find('#'));
      const fs::path target =
          path.empty() ? fs::path(document.name)
                       : (fs::path(document.name).parent_path() / path).lexically_normal();
      if (!fs::exists(root / target)) {
        found.push_back(document.name + ": no file for the link " + link);
        continue;
      }
      if (!contains(link, "#")) continue;
      const std::string anchor = link.substr(link.find('#') + 1);
      bool has = false;
      for (const std::string& heading :
           matches(parse(root, target.generic_string()).prose, "(?:^|\n)#+ ([^\n]+)"))
        has = has || anchor_of(heading) == anchor;
      if (!has) found.push_back(document.name + ": no heading for the link " + link);
    }
  }
  return found;
}

Complaints drifted_code(const fs::path& root) {
  Complaints found;
  for (const Document& document : documents(root)) {
    for (const Block& block : document.blocks) {
      if (block.quoted.empty()) {
        const bool is_code = block.language == "cpp" || block.language == "python";
        if (is_code && !contains(contents(root, {"examples"}), block.text))
          found.push_back(document.name + ": code that is in no example: " +
                          block.text.substr(0, block.text.find('\n')));
        continue;
      }
      const std::string file = block.quoted.substr(block.quoted.rfind(' ') + 1);
      if (!fs::exists(root / file)) {
        found.push_back(document.name + ": quotes " + file + ", which does not exist");
        continue;
      }
      const std::string text = std::regex_replace(
          read(root / file), std::regex("^(//|#) SPDX-License-Identifier: [^\n]*\n"), "",
          std::regex_constants::format_first_only);
      const bool same = block.quoted.rfind("all of", 0) == 0
                            ? text == block.text
                            : !block.text.empty() && contains(text, block.text);
      if (!same) found.push_back(document.name + ": not " + block.quoted);
    }
  }
  return found;
}

/// Files named in inline code and in shell commands.
Complaints missing_files(const fs::path& root, const std::set<std::string>& to_be_made) {
  static const std::regex ours(
      "(?:include|src|apps|tests|perf|data|docs|examples|scripts|cmake)/[A-Za-z0-9_./*-]*");
  Complaints found;
  for (const Document& document : documents(root)) {
    std::vector<std::string> words;
    for (const std::string& code : document.inline_code())
      if (std::regex_match(code, ours)) words.push_back(code);
    for (const std::string& command : document.commands()) {
      std::istringstream stream(command);
      for (std::string word; stream >> word;)
        if (std::regex_match(word, ours)) words.push_back(word);
    }
    for (const std::string& word : words) {
      if (to_be_made.count(word) != 0) continue;
      bool exists = fs::exists(root / word);
      if (contains(word, "*")) {
        const fs::path folder = root / fs::path(word).parent_path();
        const std::string extension = fs::path(word).extension().string();
        if (fs::is_directory(folder))
          for (const fs::directory_entry& entry : fs::directory_iterator(folder))
            exists = exists || entry.path().extension() == extension;
      }
      if (!exists) found.push_back(document.name + ": no file " + word);
    }
  }
  return found;
}

Complaints unknown_names(const fs::path& root, const std::set<std::string>& to_be_made) {
  const std::string code = contents(root, {"include", "src", "cmake", "CMakeLists.txt"});
  const std::string all = code + contents(root, {"scripts", "tests/support"});
  Complaints found;
  for (const Document& document : documents(root)) {
    std::string text = document.prose;
    for (const Block& block : document.blocks) text += block.text;
    const auto variables = matches(text, "\\bLINATTN_[A-Z_]*[A-Z]\\b");
    for (const std::string& name : std::set<std::string>(variables.begin(), variables.end()))
      if (!contains(all, name)) found.push_back(document.name + ": nothing reads " + name);
    const auto entities = matches(text, "\\bLinAttn::[A-Za-z_:]*[A-Za-z_]");
    for (const std::string& name : std::set<std::string>(entities.begin(), entities.end())) {
      if (to_be_made.count(name) != 0) continue;
      const std::string last = name.substr(name.rfind(':') + 1);
      if (!contains(code, name) && !std::regex_search(code, std::regex("\\b" + last + "\\b")))
        found.push_back(document.name + ": no entity " + name);
    }
  }
  return found;
}

std::string joined(const Complaints& complaints) {
  std::string text;
  for (const std::string& complaint : complaints) text += complaint + "\n";
  return text;
}

// ---- the documents of this tree
// ------------------------------------------------------------------

TEST(Documents, LinksLeadSomewhere) { EXPECT_EQ(joined(broken_links(source_dir)), ""); }

TEST(Documents, CodeIsThatOfTheFiles) {
  EXPECT_EQ(joined(drifted_code(source_dir)), "");
  std::set<std::string> quoted;
  for (const Document& document : documents(source_dir))
    for (const Block& block : document.blocks) quoted.insert(block.quoted);
  for (const char* needed :
       {"all of: examples/ten_lines.cpp", "all of: examples/ten_lines.py",
        "all of: tests/docs/ten_lines.txt", "all of: tests/consumers/installed/softplus.hpp",
        "all of: tests/consumers/installed/cosine.hpp",
        "all of: tests/consumers/installed/sharp_softplus.hpp",
        "all of: tests/consumers/installed/gradient_check.hpp",
        "part of: tests/consumers/installed/main.cpp"})
    EXPECT_EQ(quoted.count(needed), 1u) << needed;
}

/// What a reader of docs/adding-a-variant.md is told to make.
const std::set<std::string> to_be_made{"include/linattn/variants/softplus.hpp",
                                       "src/engine/softplus.cpp", "LinAttn::Softplus"};

TEST(Documents, FilesExist) { EXPECT_EQ(joined(missing_files(source_dir, to_be_made)), ""); }

TEST(Documents, NamesExist) { EXPECT_EQ(joined(unknown_names(source_dir, to_be_made)), ""); }

TEST(Documents, EveryOptionAndPresetIsDocumented) {
  const std::string building = read(source_dir / "docs/building.md");
  const auto options =
      matches(read(source_dir / "CMakeLists.txt"), "\n *option\\((LINATTN_[A-Z_]+)");
  ASSERT_FALSE(options.empty());
  for (const std::string& option : options)
    EXPECT_TRUE(contains(building, "| `" + option + "` |")) << option;
  const std::string presets = read(source_dir / "CMakePresets.json");
  const auto names = matches(presets, "\"name\": \"([^\"]+)\"");
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) EXPECT_TRUE(contains(building, "`" + name + "`")) << name;
  for (const Document& document : documents(source_dir))
    for (const std::string& command : document.commands())
      for (const std::string& name : matches(command, "--preset ([^\\s]+)"))
        EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << command;
}

TEST(Documents, EveryKernelIsDocumented) {
  const auto labels = matches(contents(source_dir, {"include/linattn/engine", "include/linattn/local_softmax.hpp", "include/linattn/projected.hpp"}),
                              "\"(LinAttn::(?:forward|backward)::[a-z_]+)\"");
  const std::string page = read(source_dir / "docs/engine.md");
  ASSERT_FALSE(labels.empty());
  for (const std::string& label : labels) {
    const bool is_fence = contains(label, "workspace_release");
    EXPECT_TRUE(is_fence || contains(page, "`" + label + "`")) << label;
  }
  for (const std::string& label : matches(page, "`(LinAttn::(?:forward|backward)::[a-z_]+)`"))
    EXPECT_NE(std::find(labels.begin(), labels.end(), label), labels.end()) << label;

  const auto launches = matches(contents(source_dir, {"src/baselines"}), "launch\\(\"(LinAttn::baselines::[a-z_]+)\"");
  const std::string baselines = read(source_dir / "docs/baselines.md");
  ASSERT_FALSE(launches.empty());
  for (const std::string& label : launches) EXPECT_TRUE(contains(baselines, "`" + label + "`")) << label;
  for (const std::string& label : matches(baselines, "`(LinAttn::baselines::[a-z]+_[a-z_]+)`"))
    EXPECT_NE(std::find(launches.begin(), launches.end(), label), launches.end()) << label;
}

TEST(Documents, EveryFolderOfTestsIsDocumented) {
  const std::string page = read(source_dir / "docs/testing.md");
  for (const fs::directory_entry& entry : fs::directory_iterator(source_dir / "tests")) {
    if (!fs::exists(entry.path() / "CMakeLists.txt")) continue;
    const std::string folder = fs::relative(entry.path(), source_dir).generic_string();
    EXPECT_TRUE(contains(page, "| `" + folder + "` |")) << folder;
  }
}

TEST(Documents, StatusListsTheVariants) {
  std::vector<std::string> variants;
  LinAttn::for_each_variant(
      [&]<class V>(std::type_identity<V>) { variants.emplace_back(V::name); });
  EXPECT_EQ(matches(read(source_dir / "README.md"), "\n\\| `([a-z-]+)`, (?:phi|w)[^|]*\\| yes"),
            variants);
}

TEST(Documents, ChangelogBeginsWithThisVersion) {
  const auto versions = matches(read(source_dir / "CHANGELOG.md"), "\n## \\[([^\\]]+)\\]");
  ASSERT_FALSE(versions.empty());
  EXPECT_EQ(versions.front(), LINATTN_VERSION);
}

TEST(Documents, ScriptsHaveTheOptionsThatAreShown) {
  int seen = 0;
  for (const Document& document : documents(source_dir)) {
    for (std::string command : document.commands()) {
      command = command.substr(0, command.find('#'));
      std::smatch match;
      if (!std::regex_search(command, match, std::regex("(?:^|\\s)(scripts/[a-z-]+)(.*)"))) continue;
      ++seen;
      const fs::path script = source_dir / match[1].str();
      ASSERT_TRUE(fs::exists(script)) << command;
      EXPECT_EQ(access(script.c_str(), X_OK), 0) << command;
      for (const std::string& option : matches(match[2].str(), "--[a-z-]+"))
        EXPECT_TRUE(contains(read(script), option)) << command;
    }
  }
  EXPECT_GE(seen, 3);
}

// ---- the program
// ---------------------------------------------------------------------------------

#if defined(LINATTN_PROGRAM)

struct Result {
  int status;
  std::string output;
};

Result run(const std::string& command) {
  FILE* pipe = popen(("(" + command + ") 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  Result result{0, ""};
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    result.output.append(buffer.data(), n);
  result.status = pclose(pipe);
  return result;
}

std::vector<std::string> subcommands() {
  const Result help = run(LINATTN_PROGRAM " --help");
  EXPECT_EQ(help.status, 0) << help.output;
  const std::size_t begin = help.output.find("Subcommands:\n");
  if (begin == std::string::npos) return {};
  return matches(help.output.substr(begin), "\n  ([a-z]+) ");
}

TEST(Program, ReadmeNamesItsSubcommands) {
  const std::string readme = read(source_dir / "README.md");
  const auto shown = matches(readme, "\n\\| `([a-z]+)` \\|");
  const auto has = subcommands();
  ASSERT_FALSE(has.empty());
  EXPECT_EQ(std::set<std::string>(shown.begin(), shown.end()),
            std::set<std::string>(has.begin(), has.end()));
}

TEST(Program, OptionsInTheDocumentsExist) {
  std::string help = run(LINATTN_PROGRAM " --help").output;
  for (const std::string& name : subcommands())
    help += run(LINATTN_PROGRAM " " + name + " --help").output;
  const Document readme = parse(source_dir, "README.md");
  for (const std::string& code : readme.inline_code())
    for (const std::string& option : matches(code, "(?:^| )(--[a-z-]+)"))
      EXPECT_TRUE(contains(help, option)) << code;
}

/// The commands of the README, one after the other, in a folder that has data/ of this tree.
TEST(Program, CommandsOfTheReadmeRun) {
  const fs::path folder = fs::temp_directory_path() / ("linattn-docs-" + std::to_string(getpid()));
  fs::create_directories(folder);
  fs::create_directory_symlink(source_dir / "data", folder / "data");
  const fs::path program = LINATTN_PROGRAM;
  int seen = 0;
  for (const std::string& command : parse(source_dir, "README.md").commands()) {
    if (command.rfind("linattn ", 0) != 0) continue;
    ++seen;
    const Result result = run("cd '" + folder.string() + "' && PATH='" +
                              program.parent_path().string() + "':\"$PATH\" && " + command);
    EXPECT_EQ(result.status, 0) << command << "\n" << result.output;
  }
  EXPECT_GE(seen, 4);
  fs::remove_all(folder);
}

#endif

// ---- the checks themselves
// -----------------------------------------------------------------------

/// A small tree with one planted mistake, which the check has to name.
class PlantedMistake : public ::testing::Test {
 protected:
  void SetUp() override {
    m_root = fs::temp_directory_path() /
             (std::string("linattn-docs-") +
              ::testing::UnitTest::GetInstance()->current_test_info()->name() + "-" +
              std::to_string(getpid()));
    write("include/linattn/a.hpp", "// SPDX-License-Identifier: BSD-3-Clause\nint a;\nint b;\n");
    write("docs/page.md", "# Page one\n\n## A `part`\n");
    write("README.md", "[page](docs/page.md#a-part) `include/linattn/a.hpp`\n");
    EXPECT_EQ(joined(all()), "");
  }
  void TearDown() override { fs::remove_all(m_root); }

  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((m_root / file).parent_path());
    std::ofstream(m_root / file) << text;
  }

  Complaints all() const {
    Complaints found = broken_links(m_root);
    for (const Complaints& more :
         {drifted_code(m_root), missing_files(m_root, {}), unknown_names(m_root, {})})
      found.insert(found.end(), more.begin(), more.end());
    return found;
  }

  void expect(const std::string& text, const Complaints& complaints) const {
    write("README.md", text);
    EXPECT_EQ(all(), complaints);
  }

  fs::path m_root;
};

TEST_F(PlantedMistake, Link) {
  expect("[page](docs/pages.md)\n", {"README.md: no file for the link docs/pages.md"});
  expect("[page](docs/page.md#b)\n", {"README.md: no heading for the link docs/page.md#b"});
}

TEST_F(PlantedMistake, Code) {
  const std::string whole = "<!-- all of: include/linattn/a.hpp -->\n```cpp\n";
  const std::string part = "<!-- part of: include/linattn/a.hpp -->\n```cpp\n";
  expect(whole + "int a;\nint b;\n```\n", {});
  expect(part + "int b;\n```\n", {});
  expect(whole + "int b;\n```\n", {"README.md: not all of: include/linattn/a.hpp"});
  expect(part + "int c;\n```\n", {"README.md: not part of: include/linattn/a.hpp"});
  expect("```cpp\nint c;\n```\n", {"README.md: code that is in no example: int c;"});
}

TEST_F(PlantedMistake, CodeOfAnExample) {
  write("examples/a.cpp", "int c;\n");
  expect("```cpp\nint c;\n```\n", {});
  expect("```cpp\nint d;\n```\n", {"README.md: code that is in no example: int d;"});
}

TEST_F(PlantedMistake, File) {
  expect("`include/linattn/b.hpp`\n", {"README.md: no file include/linattn/b.hpp"});
  expect("```sh\ncat docs/*.txt\n```\n", {"README.md: no file docs/*.txt"});
}

TEST_F(PlantedMistake, Name) {
  expect("LINATTN_ENABLE_TELEPORT\n", {"README.md: nothing reads LINATTN_ENABLE_TELEPORT"});
  expect("LinAttn::teleport\n", {"README.md: no entity LinAttn::teleport"});
}

}  // namespace
