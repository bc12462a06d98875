// SPDX-License-Identifier: BSD-3-Clause

// The kernels that exact attention is compared with, which are sums over keys like the others.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Strings = std::vector<std::string>;
using Extents = std::vector<std::int64_t>;

Arguments joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class ComparedProgram : public ProgramTest {};

TEST_F(ComparedProgram, AgreeWithTheReference) {
  const Arguments requests[] = {
      {"--variant", "taylor"},
      {"--variant", "taylor", "--causal", "--nk", "50", "--scale", "0.75"},
      {"--variant", "taylor", "--no-normalise", "--kv-heads", "1"},
      {"--variant", "cosine"},
      {"--variant", "cosine", "--causal", "--nk", "50", "--scale", "-1.5"},
      {"--variant", "cosine", "--kv-heads", "2", "--dtype", "f16"},
      {"--variant", "performer"},
      {"--variant", "performer", "--causal", "--nk", "50", "--features", "9"},
      {"--variant", "performer", "--no-normalise", "--scale", "0.5", "--seed", "7"},
  };
  for (const Arguments& request : requests) {
    const std::string text = ::testing::PrintToString(request);
    ASSERT_TRUE(succeeded(run(
        joined({"generate", file("in.h5"), "--heads", "4", "--nq", "33", "--d", "6", "--dv", "5"},
               request))))
        << text;
    ASSERT_TRUE(succeeded(run({"verify", file("in.h5"), "--json", file("v.json")}))) << text;
    EXPECT_EQ(json("v.json")["skipped"], 0) << text;
    for (const char* dtype : {"f64", "f32", "f16", "bf16"})
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", dtype})))
          << text << " " << dtype;
  }
}

TEST_F(ComparedProgram, StatesHaveTheirFeatures) {
  for (const auto& [variant, features] : {std::pair<std::string, std::int64_t>{"taylor", 1 + 3 + 6},
                                          {"cosine", 3},
                                          {"performer", 6}}) {
    Contents whole;
    whole.attributes["/"] = {{"variant", variant}};
    whole.attributes["/config"] = {{"causal", 1}};
    whole.datasets = {{"/inputs/q", waves({2, 4, 11, 3}, 1)},
                      {"/inputs/k", waves({2, 2, 11, 3}, 2)},
                      {"/inputs/v", waves({2, 2, 11, 5}, 3)}};
    whole.write(file("whole.h5"));
    Contents first = whole, second = whole;
    for (const char* name : {"/inputs/q", "/inputs/k", "/inputs/v"}) {
      first[name] = tokens(whole[name], 0, 7);
      second[name] = tokens(whole[name], 7, 11);
    }
    first.write(file("first.h5"));
    for (const char* name : {"whole", "first"})
      ASSERT_TRUE(succeeded(run({"run", file(std::string(name) + ".h5"),
                                 file(std::string(name) + "_out.h5"), "--state"})));
    const Contents between = Contents::read(file("first_out.h5"));
    EXPECT_EQ(between.datasets.at("/output/state/S").extents(), (Extents{2, 2, features, 5}));
    for (const auto& [path, array] : between.datasets)
      if (path.starts_with("/output/state/"))
        second.datasets.emplace("/inputs/state/" + path.substr(14), array);
    second.write(file("second.h5"));
    ASSERT_TRUE(succeeded(run({"run", file("second.h5"), file("second_out.h5"), "--state"})));
    for (const char* name : {"/output/state/S", "/output/state/z"}) {
      if (variant == "performer") continue;  // at exponents that differ
      EXPECT_LT(relative_distance(values(file("whole_out.h5"), name),
                                  values(file("second_out.h5"), name)),
                1e-14)
          << variant << " " << name;
    }
    EXPECT_LT(relative_distance(
                  tokens(io::Array(Contents::read(file("whole_out.h5"))["/output/o"]), 7, 11)
                      .as<double>(),
                  values(file("second_out.h5"), "/output/o")),
              1e-13)
        << variant;
  }
}

/// What a file does not have is drawn, from `seed` and for `features`; what it has is used.
TEST_F(ComparedProgram, ProjectionsAreDrawnOrRead) {
  ASSERT_TRUE(succeeded(run({"generate", file("with.h5"), "--nq", "7", "--d", "5", "--variant",
                             "performer", "--seed", "3", "--features", "8"})));
  Contents contents = Contents::read(file("with.h5"));
  EXPECT_EQ(contents["/inputs/projection"].extents(), (Extents{8, 5}));
  EXPECT_EQ(contents.attributes["/config"].at("seed"), io::Value(3));
  const auto output = [&](const std::string& name, const Arguments& options) {
    EXPECT_TRUE(succeeded(run(joined({"run", file(name), file("out.h5")}, options))));
    return values(file("out.h5"), "/output/o");
  };
  const auto expected = output("with.h5", {});
  EXPECT_EQ(output("with.h5", {"--seed", "4"}), expected);
  contents.datasets.erase("/inputs/projection");
  contents.write(file("without.h5"));
  EXPECT_EQ(output("without.h5", {}), expected);
  EXPECT_NE(output("without.h5", {"--seed", "4"}), expected);
  EXPECT_NE(output("without.h5", {"--features", "9"}), expected);
  EXPECT_TRUE(complained(run({"run", file("with.h5"), file("out.h5"), "--features", "9"}), 2,
                         {"/inputs/projection", "features = 9"}));
  // By default 2 D features.
  ASSERT_TRUE(succeeded(
      run({"generate", file("with.h5"), "--nq", "3", "--d", "5", "--variant", "performer"})));
  EXPECT_EQ(Contents::read(file("with.h5"))["/inputs/projection"].extents(), (Extents{10, 5}));
}

TEST_F(ComparedProgram, Refusals) {
  const auto refused = [&](const Arguments& options, const Strings& words) {
    EXPECT_TRUE(complained(
        run(joined({"generate", file("g.h5"), "--nq", "3", "--d", "2", "--variant"}, options)), 2,
        words));
  };
  refused({"taylor", "--scale", "-0.5"}, {"--scale", "a finite number > 0", "-0.5"});
  refused({"performer", "--features", "0"}, {"--features", "an integer >= 1", "found 0"});
  refused({"taylor", "--features", "4"}, {"--features: variant taylor has no features"});
  refused({"cosine", "--qk-norm", "l2"}, {"--qk-norm: variant cosine has no qk_norm"});
  Contents negative;
  negative.attributes["/"] = {{"variant", "taylor"}};
  negative.attributes["/config"] = {{"scale", 0.0}};
  negative.datasets = {{"/inputs/q", waves({1, 1, 2, 3}, 1)},
                       {"/inputs/k", waves({1, 1, 2, 3}, 2)},
                       {"/inputs/v", waves({1, 1, 2, 3}, 3)}};
  negative.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"run", file("in.h5"), file("out.h5")}), 2,
                         {file("in.h5"), "scale", "a finite number > 0"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
}

}  // namespace
}  // namespace LinAttn::test_app
