// SPDX-License-Identifier: BSD-3-Clause

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Strings = std::vector<std::string>;

class Refusals : public ProgramTest {
 protected:
  /// Neither run nor verify nor anything half-written comes of it.
  void expect_refused(const Contents& contents, const Strings& words, const Strings& options = {}) {
    contents.write(file("in.h5"));
    Arguments arguments{"run", file("in.h5"), file("out.h5")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    Strings all = words;
    all.push_back(file("in.h5"));
    EXPECT_TRUE(complained(run(arguments), 2, all));
    EXPECT_EQ(files(), Strings{"in.h5"});
  }
};

/// data/bad has a file for each defect and says which message it deserves.
TEST_F(Refusals, DamagedFiles) {
  std::istringstream manifest(read_file(data("bad/manifest.tsv")));
  std::string line;
  std::getline(manifest, line);
  int count = 0;
  while (std::getline(manifest, line)) {
    std::istringstream fields(line);
    std::string name, command, status, word;
    std::getline(fields, name, '\t');
    std::getline(fields, command, '\t');
    std::getline(fields, status, '\t');
    std::getline(fields, word, '\t');
    const std::string input = data("bad/" + name);
    const Arguments arguments = command == "run"
                                    ? Arguments{"run", input, file("out.h5"), "--backward"}
                                    : Arguments{"verify", input};
    EXPECT_TRUE(complained(run(arguments), std::stoi(status), {name, word})) << line;
    EXPECT_EQ(files(), Strings{}) << line;
    ++count;
  }
  EXPECT_GT(count, 30);
}

TEST_F(Refusals, NoFileOrNotAFile) {
  for (const std::string& input : {file("absent.h5"), file(""), std::string("/dev/null")})
    for (const char* command : {"run", "verify"}) {
      Arguments arguments{command, input};
      if (arguments[0] == "run") arguments.push_back(file("out.h5"));
      EXPECT_TRUE(complained(run(arguments), 2, {input})) << input;
    }
  EXPECT_EQ(files(), Strings{});
}

TEST_F(Refusals, UnwritableOutput) {
  small_input().write(file("in.h5"));
  std::ofstream(file("plain")) << "text";
  std::filesystem::create_directory(file("folder"));
  const Strings before = files();
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("in.h5")}), 2, {file("in.h5")}));
  for (const std::string& output :
       {file("plain/out.h5"), file("folder"), file("absent/out.h5"), std::string("/dev/full")}) {
    EXPECT_TRUE(complained(run({"run", file("in.h5"), output}), 2, {output})) << output;
    EXPECT_TRUE(complained(run({"generate", output, "--nq", "3", "--d", "2"}), 2, {output}))
        << output;
    EXPECT_TRUE(complained(run({"info", "--json", output}), 2, {"--json", "cannot be written"}))
        << output;
    EXPECT_EQ(files(), before) << output;
  }
  EXPECT_EQ(read_file(file("plain")), "text");
}

TEST_F(Refusals, JsonIsAFileOfItsOwn) {
  small_input().write(file("in.h5"));
  const std::string before = read_file(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5"), "--json", file("in.h5")}), 2, {"--json"}));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5"), "--json", file("out.h5")}), 2,
                         {"--json"}));
  EXPECT_EQ(read_file(file("in.h5")), before);
  EXPECT_EQ(files(), Strings{"in.h5"});
}

TEST_F(Refusals, FullStandardOutput) {
  EXPECT_TRUE(complained(run({"info"}, {}, "/dev/full"), 2, {"standard output"}));
  EXPECT_TRUE(complained(run({"--help"}, {}, "/dev/full"), 2, {"standard output"}));
}

TEST_F(Refusals, FullDisk) {
  ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--nq", "300", "--d", "8"})));
  const Arguments attention{"run", file("in.h5"), file("out.h5"), "--variant", "elu"};
  EXPECT_TRUE(complained(run_on_full_disk(attention, 8), 2, {file("out.h5"), "cannot be written"}));
  EXPECT_TRUE(
      complained(run_on_full_disk({"generate", file("out.h5"), "--nq", "300", "--d", "8"}, 8), 2,
                 {file("out.h5"), "cannot be written"}));
  EXPECT_TRUE(complained(run_on_full_disk({"info", "--json", file("info.json")}, 1), 2,
                         {file("info.json"), "cannot be written"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
  EXPECT_TRUE(succeeded(run_on_full_disk(attention, 1000)));
}

TEST_F(Refusals, OldOutputSurvivesAFailure) {
  Contents contents = small_input();
  contents.write(file("in.h5"));
  ASSERT_TRUE(succeeded(run({"run", file("in.h5"), file("out.h5")})));
  const std::string before = read_file(file("out.h5"));
  contents.datasets.erase("/inputs/v");
  contents.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5")}), 2, {"/inputs/v"}));
  EXPECT_TRUE(complained(
      run({"generate", file("out.h5"), "--nq", "3", "--nk", "2", "--d", "2", "--causal"}), 2,
      {"Nq = 3", "Nk = 2"}));
  EXPECT_EQ(read_file(file("out.h5")), before);
  EXPECT_EQ(files(), (Strings{"in.h5", "out.h5"}));
}

TEST_F(Refusals, MissingCotangent) {
  Contents contents = small_input();
  contents.datasets.erase("/cotangent/o");
  expect_refused(contents, {"/cotangent/o"}, {"--backward"});
}

TEST_F(Refusals, MissingVariant) {
  Contents contents = small_input();
  contents.attributes["/"].erase("variant");
  expect_refused(contents, {"variant", "--variant"});
}

TEST_F(Refusals, OptionOfAnotherVariant) {
  small_input().write(file("in.h5"));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5"), "--alpha", "0.5"}), 2,
                         {"option 'alpha': variant elu has no alpha"}));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5"), "--variant", "lln"}), 2,
                         {"alpha", "--alpha", "lln"}));
  EXPECT_TRUE(complained(
      run({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--variant", "elu", "--beta", "1"}),
      2, {"--beta: variant elu has no beta"}));
  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--alpha", "1"}),
                         2, {"--alpha: expected a variant that has alpha, found none"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
}

TEST_F(Refusals, CausalWithMoreQueries) {
  Contents contents = small_input();
  contents.datasets.at("/inputs/q") = ramp({2, 4, 6, 2});
  contents.datasets.at("/cotangent/o") = ramp({2, 4, 6, 1});
  expect_refused(contents, {"Nq = 6", "Nk = 5"}, {"--causal"});
}

TEST_F(Refusals, ChunkBeyondTheLibrary) {
  expect_refused(small_input(), {"chunk", "1000000"}, {"--chunk", "1000000"});
}

TEST_F(Refusals, ParameterThatIsNotFinite) {
  Contents contents = small_input();
  contents.attributes["/"]["variant"] = "lln";
  contents.attributes["/config"]["beta"] = 1.0;
  contents.datasets.emplace("/config/alpha", io::Array(std::vector<double>{1, 2, NAN, 4}, {4}));
  expect_refused(contents, {"/config/alpha", "[2]"});
}

/// What the layout allows and this version cannot compute is refused, never left out.
TEST_F(Refusals, Unsupported) {
  Contents contents = small_input();
  contents.attributes["/"]["variant"] = "lavo";
  contents.datasets.erase("/inputs/v");
  contents.datasets.erase("/cotangent/o");
  contents.datasets.emplace("/inputs/v", ramp({2, 2, 5, 2}));
  contents.datasets.emplace("/inputs/bases", io::Array(std::vector<double>{1, 0, 1, 0}, {2, 1, 2}));
  expect_refused(contents, {"variant", "lavo", "identity, elu"});
}

/// A state belongs to the variant that made it.
TEST_F(Refusals, StateOfAnotherVariant) {
  Contents state = small_input();
  state.datasets.emplace("/inputs/state/S", ramp({2, 2, 2, 1}));
  state.datasets.emplace("/inputs/state/z", ramp({2, 2, 2}));
  expect_refused(state, {"/inputs/state", "variant"}, {"--variant", "relu"});
  Contents cotangent = small_input();
  cotangent.datasets.emplace("/cotangent/state/S", ramp({2, 2, 2, 1}));
  expect_refused(cotangent, {"/cotangent/state", "variant"}, {"--variant", "relu", "--backward"});
}

TEST_F(Refusals, ExponentsOfStates) {
  Contents state = small_input();
  state.attributes["/"]["variant"] = "lln";
  state.attributes["/config"] = {{"alpha", 1.0}, {"beta", 1.0}};
  state.datasets.emplace("/cotangent/state/S", ramp({2, 2, 2, 1}));
  expect_refused(state, {"/cotangent/state/shift"}, {"--backward"});
  state.datasets.erase("/cotangent/state/S");
  state.datasets.emplace("/inputs/state/S", ramp({2, 2, 2, 1}));
  state.datasets.emplace("/inputs/state/z", ramp({2, 2, 2}));
  state.datasets.emplace("/inputs/state/shift", ramp({2, 2, 2}));
  expect_refused(state, {"/inputs/state/shift", "integers", "-0.375"});
}

/// What run does not use it need not understand; verify must.
TEST_F(Refusals, UnsupportedExpectations) {
  Contents contents = small_input();
  contents.datasets.emplace("/expected/o", ramp({2, 4, 3, 1}));
  contents.datasets.emplace("/expected_grad/state/z", ramp({2, 2, 2}));  // of what initial state?
  contents.write(file("in.h5"));
  EXPECT_TRUE(
      complained(run({"verify", file("in.h5")}), 2, {file("in.h5"), "/expected_grad/state/z"}));
}

TEST_F(Refusals, MoreThanTheReferenceCanDo) {
  ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--nq", "40000", "--d", "2"})));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5"), "--variant", "elu", "--check"}),
                         2, {"--check", "Nq=40000"}));
  EXPECT_TRUE(
      complained(run({"generate", file("out.h5"), "--nq", "40000", "--d", "2", "--variant", "elu"}),
                 2, {"--no-expected", "Nq=40000"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
}

TEST_F(Refusals, MoreThanTheMemory) {
  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "1000000000000", "--d", "1000"}),
                         2, {"bytes", "Nq=1000000000000"}));
  EXPECT_TRUE(
      complained(run({"generate", file("out.h5"), "--nq", "1000000000000", "--d", "1000000"}), 2,
                 {"no memory", "Nq=1000000000000"}));
  EXPECT_TRUE(complained(
      run({"generate", file("out.h5"), "--heads", "4", "--kv-heads", "3", "--nq", "2", "--d", "2"}),
      2, {"3 key/value heads", "4 query heads"}));
  EXPECT_EQ(files(), Strings{});
}

TEST_F(Refusals, BadEnvironment) {
  EXPECT_TRUE(complained(
      run({"verify", data("fixtures/elu_causal_n1.h5")}, {{"KOKKOS_NUM_THREADS", "none"}}), 2,
      {"Kokkos"}));
}

}  // namespace
}  // namespace LinAttn::test_app
