// SPDX-License-Identifier: BSD-3-Clause

// linattn moments: its numbers against plain code on a small file, and what it refuses.

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

class MomentsCommand : public ProgramTest {
 protected:
  /// q (2,4,6,3), k (2,2,6,3); `hidden` of the keys of the first sequence are.
  Contents input(int hidden) const {
    Contents contents = small_input();
    contents.datasets["/inputs/q"] = waves({2, 4, 6, 3}, 0.3);
    contents.datasets["/inputs/k"] = waves({2, 2, 6, 3}, 1.1);
    contents.datasets["/inputs/v"] = waves({2, 2, 6, 1}, 0.7);
    contents.datasets["/cotangent/o"] = waves({2, 4, 6, 1}, 0.2);
    if (hidden > 0) {
      std::vector<std::uint8_t> mask(12, 1);
      for (int n = 0; n < hidden; ++n) mask[static_cast<std::size_t>(n)] = 0;
      contents.datasets["/inputs/key_mask"] = io::Array(mask, {2, 6});
    }
    return contents;
  }
};

double sample_deviation(const std::vector<double>& x) {
  double mean = 0, squares = 0;
  for (const double value : x) mean += value / static_cast<double>(x.size());
  for (const double value : x) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(x.size() - 1));
}

/// Visible rows of the heads first to last - 1 of an array (2, heads, 6, 3).
std::vector<double> visible(const io::Array& array, int hidden, std::int64_t first, std::int64_t last) {
  const std::vector<double> x = array.as<double>();
  const std::int64_t heads = array.extent(1);
  std::vector<double> result;
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = first; h < last; ++h)
      for (std::int64_t n = b == 0 ? hidden : 0; n < 6; ++n)
        for (std::int64_t d = 0; d < 3; ++d)
          result.push_back(x[static_cast<std::size_t>(((b * heads + h) * 6 + n) * 3 + d)]);
  return result;
}

TEST_F(MomentsCommand, AgreesWithPlainCode) {
  for (const int hidden : {0, 2}) {
    Contents contents = input(hidden);
    contents.write(file("in.h5"));
    const Result result = run({"moments", file("in.h5"), "--json", file("out.json")});
    ASSERT_TRUE(succeeded(result));
    const auto document = json("out.json");
    ASSERT_EQ(document["groups"].size(), 3u);  // the tensor and two key/value heads
    for (int g = -1; g < 2; ++g) {
      const auto& group = document["groups"][static_cast<std::size_t>(g + 1)];
      EXPECT_TRUE(g < 0 ? group["head"].is_null() : group["head"] == g);
      const double sq =
          sample_deviation(visible(contents["/inputs/q"], hidden, g < 0 ? 0 : 2 * g, g < 0 ? 4 : 2 * g + 2));
      const double sk = sample_deviation(visible(contents["/inputs/k"], hidden, g < 0 ? 0 : g, g < 0 ? 2 : g + 1));
      EXPECT_NEAR(group["sigma_q"].get<double>(), sq, 1e-13);
      EXPECT_NEAR(group["sigma_k"].get<double>(), sk, 1e-13);
      EXPECT_NEAR(group["sigma_sm2"].get<double>(), sq * sq * sk * sk, 1e-12);
      ASSERT_EQ(group["rules"].size(), 5u);
      const auto& authors = group["rules"][0];
      const double st2 = (sq * sq * sk * sk + 0.35487039130661086) / 0.14855178144710912;
      EXPECT_EQ(authors["rule"], "authors");
      EXPECT_NEAR(authors["alpha"].get<double>(), std::sqrt(st2 / 2) / sq, 1e-12);
      EXPECT_NEAR(authors["beta"].get<double>(), std::sqrt(st2 / 2) / sk, 1e-12);
      EXPECT_NEAR(authors["fenton"].get<double>(), std::log(1 + (std::exp(st2) - 1) / 3), 1e-10);
      EXPECT_NEAR(authors["romeo"].get<double>(), sq * sq * sk * sk, 1e-12);
      EXPECT_EQ(group["rules"][4]["alpha"], 1.9);
      // the mean over the matrices of Var(log P), entry by entry
      double expected = 0, matrices = 0;
      const auto q = contents["/inputs/q"].as<double>(), k = contents["/inputs/k"].as<double>();
      for (int b = 0; b < 2; ++b)
        for (int h = 0; h < 4; ++h) {
          if (g >= 0 && h / 2 != g) continue;
          std::vector<double> log_p;
          for (int i = b == 0 ? hidden : 0; i < 6; ++i) {
            std::vector<double> logits;
            double sum = 0;
            for (int j = b == 0 ? hidden : 0; j < 6; ++j) {
              double dot = 0;
              for (int d = 0; d < 3; ++d)
                dot += q[static_cast<std::size_t>(((b * 4 + h) * 6 + i) * 3 + d)] *
                       k[static_cast<std::size_t>(((b * 2 + h / 2) * 6 + j) * 3 + d)];
              logits.push_back(dot / std::sqrt(3.0));
              sum += std::exp(logits.back());
            }
            for (const double x : logits) log_p.push_back(x - std::log(sum));
          }
          const double s = sample_deviation(log_p), n = static_cast<double>(log_p.size());
          expected += s * s * (n - 1) / n;
          matrices += 1;
        }
      EXPECT_NEAR(group["softmax"]["measured"]["log_variance"].get<double>(), expected / matrices, 1e-12);
      EXPECT_EQ(group["softmax"]["measured"]["matrices"], matrices);
    }
    EXPECT_NE(result.out.find("Prop 3.1"), std::string::npos);
  }
}

TEST_F(MomentsCommand, ChoosesRulesScopesAndRows) {
  input(0).write(file("in.h5"));
  ASSERT_TRUE(
      succeeded(run({"moments", file("in.h5"), "--moments", "table", "--moments-scope", "head", "--exact-up-to", "3",
                     "--rows", "2", "--cross", "same_position", "--json", file("out.json")})));
  const auto document = json("out.json");
  EXPECT_EQ(document["groups"].size(), 2u);
  EXPECT_EQ(document["groups"][0]["rules"].size(), 1u);
  EXPECT_EQ(document["sampled_rows"], 2);
  const auto& group = document["groups"][1];
  const double sq = group["sigma_q"], sk = group["sigma_k"], cross = group["cross"];
  EXPECT_NEAR(group["sigma_sm2"].get<double>(), sq * sq * sk * sk + cross, 1e-12);
  EXPECT_TRUE(
      succeeded(run({"moments", file("in.h5"), "--moments", "fixed", "--rate", "0.7", "--json", file("out.json")})));
  EXPECT_EQ(json("out.json")["groups"][0]["rules"][0]["beta"], 0.7);
  ASSERT_TRUE(succeeded(run({"moments", file("in.h5"), "--json", "-"})));

  // 2049 tokens are more than are measured in all rows unasked
  ASSERT_TRUE(succeeded(run({"generate", file("long.h5"), "--nq", "2049", "--d", "1"})));
  for (const bool exact : {false, true}) {
    Arguments arguments{"moments", file("long.h5"), "--moments", "fixed", "--moments-scope", "tensor"};
    arguments.insert(arguments.end(), {"--json", file("out.json")});
    if (exact) arguments.push_back("--exact");
    ASSERT_TRUE(succeeded(run(arguments)));
    EXPECT_EQ(json("out.json")["sampled_rows"], exact ? nlohmann::json() : nlohmann::json(256));
  }
}

// Real data, where both are known to be of order one, and files with little in them.
TEST_F(MomentsCommand, RealDataAndLittleData) {
  ASSERT_TRUE(succeeded(run({"moments", data("real/minilm.h5"), "--moments", "authors", "--json", file("out.json")})));
  EXPECT_EQ(json("out.json")["groups"].size(), 13u);
  for (const auto& group : json("out.json")["groups"]) EXPECT_GT(group["softmax"]["measured"]["log_variance"], 0.1);
  input(6).write(file("hidden.h5"));  // no row of the first sequence counts
  ASSERT_TRUE(succeeded(run({"moments", file("hidden.h5"), "--json", file("out.json")})));
  EXPECT_EQ(json("out.json")["groups"][0]["softmax"]["measured"]["matrices"], 4);
  EXPECT_TRUE(succeeded(run({"moments", data("fixtures/elu_full_nk0.h5")})));
  EXPECT_TRUE(succeeded(run({"moments", data("fixtures/relu_full_b0.h5")})));
  EXPECT_TRUE(succeeded(run({"moments", data("fixtures/extended/elu_causal_packed.h5")})));
}

TEST_F(MomentsCommand, Study) {
  ASSERT_TRUE(succeeded(run({"moments", "--study", file("study.h5"), "--quick", "--json", file("study.json")})));
  EXPECT_EQ(files(), (std::vector<std::string>{"study.h5", "study.json"}));
  const auto study = json("study.json")["study"];
  const std::vector<double> st2 = study["lln"]["st2"], d = study["lln"]["d"];
  EXPECT_EQ(values(file("study.h5"), "/study/lln/st2"), st2);
  std::vector<double> fenton;
  for (std::size_t i = 0; i < d.size(); ++i)
    for (std::size_t j = 0; j < st2.size(); ++j) {
      fenton.push_back(std::log(1 + (std::exp(st2[j]) - 1) / d[i]));
      EXPECT_NEAR(study["lln"]["fenton"][i][j].get<double>(), fenton.back(), 1e-12 * fenton.back());
      EXPECT_GT(study["lln"]["log_variance"][i][j], 0);
    }
  EXPECT_LT(relative_distance(fenton, values(file("study.h5"), "/study/lln/fenton")), 1e-12);
  // a sample variance of n normal numbers is off by sqrt(2 / n) of itself, these have tails a little heavier
  for (std::size_t i = 0; i < study["cross"]["rho"].size(); ++i) {
    const double rho = study["cross"]["rho"][i], predicted = 1 + rho * rho;
    EXPECT_NEAR(study["cross"]["predicted"][i].get<double>(), predicted, 1e-14);
    EXPECT_NEAR(study["cross"]["logit_variance"][i].get<double>(), predicted, 5 * std::sqrt(2.0 / 16384) * predicted);
    EXPECT_NEAR(study["cross"]["c_cross"][i].get<double>(), rho * rho, 0.05);
  }
  EXPECT_EQ(study["matching"]["log_variance_error"].size(), 2u);
  EXPECT_EQ(study["matching"]["log_variance_error"][0].size(), 6u);
  EXPECT_EQ(study["matching"]["log_variance_error"][0][0].size(), 4u);
  for (const auto& curve : study["histograms"]["density"]) {
    double sum = 0;
    for (const double density : curve) sum += density * 18 / 120;
    EXPECT_NEAR(sum, 1, 0.02);
  }
  const auto again = values(file("study.h5"), "/study/matching/entropy");
  ASSERT_TRUE(succeeded(run({"moments", "--study", file("study.h5"), "--quick"}, {{"OMP_NUM_THREADS", "1"}})));
  EXPECT_EQ(values(file("study.h5"), "/study/matching/entropy"), again);
}

TEST_F(MomentsCommand, Refusals) {
  Contents contents = input(0);
  contents.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"moments"}), 2, {"IN.h5 or --study"}));
  EXPECT_TRUE(complained(run({"moments", file("none.h5")}), 2, {"none.h5"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--moments", "best"}), 2, {"--moments", "authors", "best"}));
  EXPECT_TRUE(
      complained(run({"moments", file("in.h5"), "--moments-scope", "row"}), 2, {"--moments-scope", "tensor", "row"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--cross", "some"}), 2, {"--cross", "all_pairs", "some"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--rows", "0"}), 2, {"--rows", "found '0'"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--study", file("out.h5")}), 2, {"--study", "excludes"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--json", file("in.h5")}), 2, {"in.h5"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--quick"}), 2, {"--quick", "--study"}));
  for (const Arguments& ignored :
       {Arguments{"--moments", "table"}, Arguments{"--moments-scope", "head"}, Arguments{"--cross", "all_pairs"},
        Arguments{"--rate", "2"}, Arguments{"--exact"}, Arguments{"--exact-up-to", "9"}, Arguments{"--rows", "9"}}) {
    Arguments arguments{"moments", "--study", file("out.h5"), "--quick"};
    arguments.insert(arguments.end(), ignored.begin(), ignored.end());
    EXPECT_TRUE(complained(run(arguments), 2, {ignored[0], "excludes", "--study"}));
  }
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--moments", "table", "--rate", "2"}), 2,
                         {"--rate", "fixed", "table"}));
  EXPECT_TRUE(complained(run({"moments", file("in.h5"), "--exact", "--rows", "9"}), 2, {"--exact", "--rows"}));
  EXPECT_TRUE(complained(run({"moments", "--study", file("no/out.h5")}), 2, {"out.h5"}));
  contents.datasets["/inputs/q"] = waves({2, 4, 5, 3}, 0.3);
  contents.datasets["/cotangent/o"] = waves({2, 4, 5, 1}, 0.2);
  contents.write(file("other.h5"));
  EXPECT_TRUE(
      complained(run({"moments", file("other.h5"), "--cross", "same_position"}), 2, {"other.h5", "Nq = 5", "Nk = 6"}));
  EXPECT_EQ(files(), (std::vector<std::string>{"in.h5", "other.h5"}));
}

}  // namespace
}  // namespace LinAttn::test_app
