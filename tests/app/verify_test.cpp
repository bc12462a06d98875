// SPDX-License-Identifier: BSD-3-Clause

#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Strings = std::vector<std::string>;

class Verify : public ProgramTest {};

const char* const fixture = "fixtures/lln_causal_gqa_per_head_n130.h5";

TEST_F(Verify, EverySpacePrecisionAndQuantity) {
  const Result result =
      run({"verify", data(fixture), data("fixtures/elu_causal_n64.h5"), "--json", file("v.json")});
  ASSERT_TRUE(succeeded(result));
  const auto json = this->json("v.json");
  ASSERT_EQ(json["files"].size(), 2u);
  std::set<Strings> seen;
  std::set<std::string> spaces;
  for (const auto& c : json["files"][0]["comparisons"]) {
    const Strings key{c["space"].get<std::string>(), c["dtype"].get<std::string>(),
                      c["dataset"].get<std::string>()};
    EXPECT_TRUE(seen.insert(key).second);
    spaces.insert(c["space"]);
    EXPECT_EQ(c["ok"], true);
    EXPECT_LE(c["error"], c["tolerance"]);
  }
  std::set<std::string> enabled;
  const auto info = nlohmann::json::parse(run({"info", "--json", "-"}).out);
  for (const auto& space : info["spaces"]) enabled.insert(space["name"]);
  EXPECT_EQ(spaces, enabled);
  EXPECT_EQ(seen.size(), enabled.size() * 4 * 6);
  EXPECT_EQ(json["files"][1]["comparisons"].size(), enabled.size() * 4 * 4);
  EXPECT_EQ(json["comparisons"], enabled.size() * 4 * 10);
  EXPECT_EQ(json["failed"], 0);
  EXPECT_EQ(json["skipped"], 0);

  const Result narrow =
      run({"verify", data(fixture), "--space", "serial", "--dtype", "f32", "--json", "-"});
  ASSERT_TRUE(succeeded(narrow));
  EXPECT_EQ(nlohmann::json::parse(narrow.out)["comparisons"], 6);
}

TEST_F(Verify, ChunksAndSegments) {
  EXPECT_TRUE(succeeded(run({"verify", data(fixture), "--chunk", "16", "--segments", "3", "--tiles", "2"})));
}

struct Change {
  const char* dataset;
  std::size_t element;
  const char* index;
};

/// One wrong number in one dataset is found, and named.
TEST_F(Verify, OneChangedNumber) {
  const Contents original = Contents::read(data(fixture));
  original.write(file("same.h5"));
  ASSERT_TRUE(succeeded(run({"verify", file("same.h5")})));
  // o (1,6,130,3), q (1,6,130,2), k (1,2,130,2), v (1,2,130,3)
  const Change changes[] = {{"/expected/o", 130 * 3 + 4, "[0, 1, 1, 1]"},
                            {"/expected_grad/q", 5 * 260 + 259, "[0, 5, 129, 1]"},
                            {"/expected_grad/k", 0, "[0, 0, 0, 0]"},
                            {"/expected_grad/v", 390 + 6, "[0, 1, 2, 0]"},
                            {"/expected_grad/alpha", 4, "[4]"},
                            {"/expected_grad/beta", 1, "[1]"}};
  for (const Change& change : changes) {
    Contents contents = original;
    const auto elements = contents[change.dataset].values<double>();
    double largest = 0;
    for (const double x : elements) largest = std::max(largest, std::abs(x));
    elements[change.element] += 1e-3 * largest;
    contents.write(file("changed.h5"));
    const Result result = run({"verify", file("changed.h5"), "--json", file("v.json")});
    EXPECT_TRUE(complained(result, 1, {file("changed.h5"), change.dataset, change.index}));
    EXPECT_NE(result.out.find("FAIL"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find(std::string(change.dataset) + change.index), std::string::npos)
        << result.out;
    // In 16 bits the dense reference is expected, and not what the file says.
    const auto json = this->json("v.json");
    EXPECT_EQ(json["failed"], json["comparisons"].get<int>() / 6 / 2);
    for (const auto& c : json["files"][0]["comparisons"]) {
      const bool is_wide = c["dtype"] == "f64" || c["dtype"] == "f32";
      EXPECT_EQ(c["ok"], !is_wide || c["dataset"] != change.dataset) << c;
      if (c["ok"]) continue;
      EXPECT_NEAR(c["error"].get<double>(), 1e-3, 1e-4);
      EXPECT_EQ(c["worst"]["expected"].get<double>(), elements[change.element]);
    }
  }
}

/// In 16 bits: errors of the size of the roundings, and not of float.
TEST_F(Verify, SixteenBits) {
  for (const auto& [dtype, unit] : {std::pair{"f16", 0x1p-11}, std::pair{"bf16", 0x1p-8}}) {
    ASSERT_TRUE(
        succeeded(run({"verify", data(fixture), "--dtype", dtype, "--json", file("v.json")})));
    const auto json = this->json("v.json");
    EXPECT_GT(json["comparisons"], 0);
    for (const auto& c : json["files"][0]["comparisons"]) {
      EXPECT_EQ(c["dtype"], dtype);
      EXPECT_LE(c["error"], c["tolerance"]);
      if (c["quantity"] == "o") {
        EXPECT_LE(c["error"], 1.01 * unit);
        EXPECT_GE(c["error"], 0.1 * unit);
        EXPECT_EQ(c["tolerance"], c["dtype"] == "f16" ? 4e-3 : 3e-2);
      }
    }
  }
}

/// The tolerance of the file for the type counts, and storage itself is excused.
TEST_F(Verify, ToleranceOfSixteenBits) {
  Contents contents = Contents::read(data(fixture));
  for (const char* group : {"/expected", "/expected_grad"})
    for (const char* name : {"rtol_f16", "rtol_bf16"}) contents.attributes[group][name] = 0.25;
  contents.write(file("loose.h5"));
  ASSERT_TRUE(succeeded(run({"verify", file("loose.h5"), "--json", file("v.json")})));
  const auto json = this->json("v.json");
  for (const auto& c : json["files"][0]["comparisons"])
    EXPECT_EQ(c["tolerance"] >= 0.25, c["dtype"] == "f16" || c["dtype"] == "bf16") << c;
  // Gradients that are 0 but for the rounding of o.
  EXPECT_TRUE(succeeded(run({"verify", data("fixtures/elu_full_constant_values.h5"),
                             data("fixtures/elu_causal_d1_dv1.h5")})));
}

TEST_F(Verify, SixteenBitsThatAreNotPossibleAreSkippedOrRefused) {
  Contents contents = Contents::read(data(fixture));
  contents["/inputs/k"].values<double>()[2 * 130 + 5] = 7e4;
  contents.write(file("large.h5"));
  const std::string state = data("fixtures/extended/elu_causal_state_gqa.h5");
  const Result result = run({"verify", state, "--json", file("v.json")});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("skipped: the dense reference does not know states"), std::string::npos)
      << result.out;
  auto json = this->json("v.json");
  EXPECT_EQ(json["skipped"], 2);
  EXPECT_EQ(json["files"][0]["skipped"][0]["dtype"], "f16");
  EXPECT_EQ(json["files"][0]["skipped"][1]["dtype"], "bf16");
  EXPECT_TRUE(
      complained(run({"verify", state, "--dtype", "bf16"}), 2, {state, "does not know states"}));
  EXPECT_TRUE(complained(run({"verify", file("large.h5"), "--dtype", "f16"}), 2,
                         {file("large.h5"), "/inputs/k", "65504", "f16", "70000", "[0, 1, 2, 1]"}));
  EXPECT_TRUE(succeeded(run({"verify", file("large.h5"), "--dtype", "bf16"})));
  run({"verify", file("large.h5"), "--json", file("v.json")});
  json = this->json("v.json");
  EXPECT_EQ(json["skipped"], 1);
  EXPECT_EQ(json["files"][0]["skipped"][0]["dtype"], "f16");

  // A result too large for the type, of inputs that are not.
  Contents product = small_input();
  product.attributes["/"]["variant"] = "identity";
  for (const char* name : {"/inputs/q", "/inputs/k"})
    for (double& x : product[name].values<double>()) x = 300;
  product.datasets.emplace("/expected/o", ramp({2, 4, 3, 1}));
  product.write(file("product.h5"));
  EXPECT_TRUE(complained(run({"verify", file("product.h5"), "--dtype", "f16"}), 2,
                         {file("product.h5"), "/expected/o", "65504"}));
}

/// States are compared as numbers: with other exponents and significands to match they are the
/// same.
TEST_F(Verify, States) {
  const Contents original = Contents::read(data("fixtures/extended/lln_causal_state_per_head.h5"));
  Contents contents = original;
  contents.write(file("state.h5"));
  const Result same = run({"verify", file("state.h5"), "--json", file("v.json")});
  ASSERT_TRUE(succeeded(same));
  std::set<std::string> datasets;
  const auto json = this->json("v.json");
  for (const auto& c : json["files"][0]["comparisons"]) datasets.insert(c["dataset"]);
  for (const char* dataset : {"/expected/state/S", "/expected/state/z", "/expected_grad/state/S",
                              "/expected_grad/state/z"})
    EXPECT_TRUE(datasets.contains(dataset)) << dataset;

  // S, z (members, heads, features, ...): the cotangent of what is stored changes with the
  // exponent.
  const std::size_t dv = static_cast<std::size_t>(contents["/expected/state/S"].extent(3));
  const double factor = 8;
  contents["/expected/state/shift"].values<double>()[1] -= 3;
  for (std::size_t j = 0; j < dv; ++j) {
    contents["/expected/state/S"].values<double>()[dv + j] *= factor;
    contents["/cotangent/state/S"].values<double>()[dv + j] /= factor;
  }
  contents["/expected/state/z"].values<double>()[1] *= factor;
  contents["/cotangent/state/z"].values<double>()[1] /= factor;
  contents.write(file("other.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("other.h5")})));

  contents = original;
  contents["/expected/state/shift"].values<double>()[1] -= 3;
  contents.write(file("wrong.h5"));
  const Result wrong = run({"verify", file("wrong.h5")});
  EXPECT_TRUE(complained(wrong, 1, {}));
  for (const char* dataset : {"/expected/state/S[0, 0, 1, ", "/expected/state/z[0, 0, 1]"})
    EXPECT_NE(wrong.out.find(dataset), std::string::npos) << wrong.out;
  contents = original;
  contents["/expected_grad/state/z"].values<double>()[4] += 1e-3;
  contents.write(file("wrong.h5"));
  EXPECT_TRUE(
      complained(run({"verify", file("wrong.h5")}), 1, {"/expected_grad/state/z[0, 1, 1]"}));
}

TEST_F(Verify, NotANumberIsAFailure) {
  Contents contents = Contents::read(data(fixture));
  contents["/expected_grad/v"].values<double>()[7] = NAN;
  contents.write(file("nan.h5"));
  const Result result = run({"verify", file("nan.h5"), "--json", file("v.json")});
  EXPECT_TRUE(complained(result, 1, {"/expected_grad/v[0, 0, 2, 1]", "nan"}));
  const auto json = this->json("v.json");
  for (const auto& c : json["files"][0]["comparisons"])
    EXPECT_EQ(c["ok"], !c["error"].is_null()) << c;
}

TEST_F(Verify, ToleranceOfTheFileCounts) {
  Contents contents = Contents::read(data(fixture));
  contents["/expected_grad/k"].values<double>()[3] += 1e-9;
  contents.write(file("loose.h5"));
  EXPECT_TRUE(complained(run({"verify", file("loose.h5"), "--dtype", "f64"}), 1,
                         {"/expected_grad/k[0, 0, 1, 1]"}));
  contents.attributes["/expected_grad"]["rtol_f64"] = 1e-6;
  contents.write(file("loose.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("loose.h5"), "--dtype", "f64"})));
  // Never below 16 epsilon of the stored type, of which the roundings of one product need less.
  contents = Contents::read(data("fixtures/elu_causal_n1.h5"));
  for (const char* group : {"/expected", "/expected_grad"})
    for (const char* name : {"rtol_f64", "rtol_f32"}) contents.attributes[group][name] = 0.0;
  contents.write(file("strict.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("strict.h5")})));
}

TEST_F(Verify, NothingToVerify) {
  small_input().write(file("plain.h5"));
  EXPECT_TRUE(complained(run({"verify", file("plain.h5")}), 2, {file("plain.h5"), "/expected"}));
}

TEST_F(Verify, GradientsNeedACotangent) {
  Contents contents = Contents::read(data(fixture));
  contents.datasets.erase("/cotangent/o");
  contents.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2, {file("in.h5"), "/cotangent/o"}));
}

TEST_F(Verify, OutputOnlyOrGradientsOnly) {
  Contents output = Contents::read(data(fixture));
  std::erase_if(output.datasets,
                [](const auto& item) { return item.first.starts_with("/expected_grad/"); });
  output.datasets.erase("/cotangent/o");
  output.write(file("o.h5"));
  Contents gradient = Contents::read(data(fixture));
  std::erase_if(gradient.datasets, [](const auto& item) {
    return item.first.starts_with("/expected/") || item.first == "/expected_grad/q";
  });
  gradient.write(file("g.h5"));
  ASSERT_TRUE(succeeded(
      run({"verify", file("o.h5"), file("g.h5"), "--space", "serial", "--json", file("v.json")})));
  EXPECT_EQ(json("v.json")["files"][0]["comparisons"].size(), 4u);
  EXPECT_EQ(json("v.json")["files"][1]["comparisons"].size(), 16u);
}

/// A file that cannot be used does not hide what is wrong with the others.
TEST_F(Verify, EveryFileIsReported) {
  const Result result = run({"verify", data("bad/text.h5"), data("bad/changed_gradient.h5"),
                             data(fixture), "--json", file("v.json")});
  EXPECT_EQ(result.status, 1) << "a failed comparison outweighs a file that cannot be used";
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 2) << result.err;
  EXPECT_NE(result.err.find("text.h5"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("/expected_grad/k[0, 1, 3, 1]"), std::string::npos) << result.err;
  const auto json = this->json("v.json");
  EXPECT_EQ(json["unusable_files"], 1);
  EXPECT_TRUE(json["files"][0].contains("error"));
  EXPECT_GT(json["failed"], 0);
  EXPECT_GT(json["files"][2]["comparisons"].size(), 0u);
}

TEST_F(Verify, BriefKeepsFailures) {
  const Result good = run({"verify", data(fixture), "--brief"});
  ASSERT_TRUE(succeeded(good));
  EXPECT_EQ(std::count(good.out.begin(), good.out.end(), '\n'), 3) << good.out;
  const Result bad = run({"verify", data("bad/changed_gradient.h5"), "--brief"});
  EXPECT_EQ(bad.status, 1);
  EXPECT_NE(bad.out.find("/expected_grad/k[0, 1, 3, 1]"), std::string::npos) << bad.out;
}

}  // namespace
}  // namespace LinAttn::test_app
