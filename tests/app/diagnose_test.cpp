// SPDX-License-Identifier: BSD-3-Clause

// linattn diagnose: numbers of the report and of JSON, where rates come from, the study, refusals.

#include <algorithm>
#include <cmath>
#include <linattn/io/reader.hpp>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

/// Deviation of all entries of a dataset, by the textbook.
double deviation(const std::vector<double>& x) {
  double mean = 0, squares = 0;
  for (const double value : x) mean += value / static_cast<double>(x.size());
  for (const double value : x) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(x.size() - 1));
}

class Diagnose : public ProgramTest {
 protected:
  /// Gaussian q and k of deviation 1, 300 tokens of 64 features, 2 query heads and 1 of keys.
  void generate(const Arguments& more = {}) {
    Arguments arguments{"generate", file("g.h5"), "--heads", "2",    "--kv-heads", "1",      "--nq",
                        "300",      "--d",        "64",      "--dv", "2",          "--seed", "3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    ASSERT_TRUE(succeeded(run(arguments)));
  }
  nlohmann::json diagnosed(const Arguments& more = {}, const std::string& input = "") {
    Arguments arguments{"diagnose", input.empty() ? file("g.h5") : input, "--json", file("d.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = run(arguments);
    EXPECT_TRUE(succeeded(result));
    m_report = result.out;
    return json("d.json");
  }
  /// The published rule, for the tensors of g.h5.
  double authors_alpha() const {
    const double sq = deviation(values(file("g.h5"), "/inputs/q")), sk = deviation(values(file("g.h5"), "/inputs/k"));
    return std::sqrt((sq * sq * sk * sk + 0.35487039130661086) / (2 * 0.14855178144710912)) / sq;
  }
  std::string m_report;
};

TEST_F(Diagnose, KernelsOfGeneratedInput) {
  generate();
  const auto document = diagnosed();
  EXPECT_EQ(document["command"], "diagnose");
  EXPECT_EQ(document["problem"]["nq"], 300);
  EXPECT_EQ(document["causal"], false);
  for (const char* kernel : {"softmax", "lln", "quadratic", "relu", "elu"}) {
    const auto& entry = document["kernels"][kernel];
    ASSERT_EQ(entry["heads"].size(), 1u) << kernel;
    ASSERT_EQ(entry["heads"][0].size(), 2u) << kernel;
    for (const auto& head : entry["heads"][0]) {
      const double entropy = head["entropy"], biased = head["entropy_biased"], unbiased = head["entropy_unbiased"];
      EXPECT_NEAR(biased + unbiased, std::log2(300.0) - entropy, 1e-9) << kernel;
      EXPECT_GT(head["spectral_gap"], 0.3);
      EXPECT_LT(head["spectral_gap"], 1);
      EXPECT_EQ(head["rows"], 300);
      EXPECT_EQ(head["sampled"], false);
      EXPECT_NEAR(head["temperature"].get<double>() * std::sqrt(head["logvar"].get<double>()), 1, 1e-12);
    }
    EXPECT_NE(m_report.find(kernel), std::string::npos);
  }
  // Prop 3.1 with its correction, sigma_sm = 1, D = 64; the spread of a matrix of 300 tokens is about 3 %
  EXPECT_NEAR(document["kernels"]["softmax"]["mean"]["logvar"], 1 + 1.0 / 128, 0.1);
  EXPECT_NEAR(document["kernels"]["lln"]["alpha"][0], authors_alpha(), 1e-12);
  EXPECT_EQ(document["kernels"]["lln"]["alpha"].size(), 2u);
  EXPECT_EQ(document["kernels"]["lln"]["beta"].size(), 1u);
}

TEST_F(Diagnose, RatesOfTheFileOfTheCommandLineAndOfRules) {
  generate({"--variant", "lln", "--alpha", "0.5", "--beta", "1.5", "--no-expected"});
  const auto rate = [&](const Arguments& more, const char* which) {
    Arguments arguments{"--variant", "lln"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto document = diagnosed(arguments);
    EXPECT_EQ(document["kernels"].size(), 1u);
    return document["kernels"]["lln"][which][0].get<double>();
  };
  EXPECT_EQ(rate({}, "alpha"), 0.5);
  EXPECT_EQ(rate({}, "beta"), 1.5);
  EXPECT_EQ(rate({"--alpha", "2", "--beta", "3"}, "alpha"), 2);
  EXPECT_EQ(rate({"--alpha", "2", "--beta", "3"}, "beta"), 3);
  const double authors = rate({"--moments", "authors"}, "alpha"), table = rate({"--moments", "table"}, "alpha");
  EXPECT_NEAR(authors, authors_alpha(), 1e-12);
  EXPECT_GT(std::abs(table - authors), 0.01);
  EXPECT_NE(rate({"--moments", "authors", "--moments-scope", "head"}, "alpha"), 0);
}

/// The linear branch of lln-diag has the rates of the file, given or by its rule.
TEST_F(Diagnose, RatesOfAFileOfTwoBranches) {
  generate({"--variant", "lln-diag", "--alpha", "0.7", "--beta", "0.6", "--no-expected"});
  auto lln = diagnosed({"--variant", "lln"})["kernels"]["lln"];
  EXPECT_EQ(lln["alpha"], (std::vector<double>{0.7, 0.7}));
  EXPECT_EQ(lln["beta"], std::vector<double>{0.6});
  EXPECT_EQ(lln["rates"], "of the file");
  const Result refused = run({"diagnose", file("g.h5"), "--moments-scope", "head"});
  EXPECT_TRUE(complained(refused, 2, {file("g.h5"), "--moments-scope", "--moments"}));
  EXPECT_EQ(refused.out, "");

  generate({"--variant", "lln-diag", "--moments", "table", "--moments-scope", "head", "--no-expected"});
  lln = diagnosed({"--variant", "lln"})["kernels"]["lln"];
  EXPECT_EQ(lln["rates"], "moments of the head by rule table");
  EXPECT_EQ(lln["alpha"], diagnosed({"--moments", "table", "--moments-scope", "head"})["kernels"]["lln"]["alpha"]);

  Contents half = Contents::read(file("g.h5"));
  half.attributes["/config"].erase("moments");
  half.attributes["/config"].erase("moments_scope");
  half.attributes["/config"]["alpha"] = 0.7;
  half.write(file("half.h5"));
  EXPECT_TRUE(complained(run({"diagnose", file("half.h5")}), 2, {file("half.h5"), "'beta'"}));
}

TEST_F(Diagnose, SampledRowsNameTheirErrors) {
  ASSERT_TRUE(succeeded(run({"generate", file("g.h5"), "--nq", "4500", "--d", "8", "--dv", "1"})));
  const auto some = diagnosed({"--variant", "elu", "--rows", "100", "--seed", "5"})["kernels"]["elu"]["heads"][0][0];
  EXPECT_NE(m_report.find("standard errors"), std::string::npos);
  EXPECT_EQ(some["rows"], 100);
  EXPECT_EQ(some["sampled"], true);
  const auto all = diagnosed({"--variant", "elu", "--exact"})["kernels"]["elu"]["heads"][0][0];
  EXPECT_EQ(all["rows"], 4500);
  EXPECT_EQ(diagnosed({"--variant", "elu", "--exact-up-to", "4500"})["kernels"]["elu"]["heads"][0][0], all);
  const auto number = [](const nlohmann::json& head, const char* name) { return head[name].get<double>(); };
  for (const std::string name : {"entropy", "logvar", "logvar_within"}) {
    const double error = number(some, (name + "_error").c_str());
    EXPECT_GT(error, 0);
    EXPECT_NEAR(number(some, name.c_str()), number(all, name.c_str()), 4 * error) << name;
  }
  EXPECT_NEAR(number(some, "spectral_gap"), number(all, "spectral_gap"), 1e-12);
}

TEST_F(Diagnose, CausalAndRealFiles) {
  const std::string real = data("real/minilm.h5");
  const auto full = diagnosed({"--mean"}, real);
  EXPECT_EQ(m_report.find("b1 h11"), std::string::npos);
  const auto causal = diagnosed({"--causal"}, real);
  EXPECT_NE(m_report.find("b1 h11"), std::string::npos);
  EXPECT_EQ(causal["causal"], true);
  for (const char* kernel : {"softmax", "lln"}) {
    EXPECT_EQ(full["kernels"][kernel]["heads"][1].size(), 12u);
    EXPECT_LT(causal["kernels"][kernel]["mean"]["entropy"], full["kernels"][kernel]["mean"]["entropy"]);
  }
}

/// Eigenvalues of a triangular matrix are its diagonal.
TEST_F(Diagnose, CausalGap) {
  generate();
  const auto softmax = diagnosed({"--variant", "softmax", "--causal"})["kernels"]["softmax"];
  const auto q = values(file("g.h5"), "/inputs/q"), k = values(file("g.h5"), "/inputs/k");
  for (std::size_t h = 0; h < 2; ++h) {
    std::vector<double> diagonal;
    for (std::size_t i = 0; i < 300; ++i) {
      double sum = 0, last = 0;
      for (std::size_t j = 0; j <= i; ++j) {
        double dot = 0;
        for (std::size_t c = 0; c < 64; ++c) dot += q[(h * 300 + i) * 64 + c] * k[j * 64 + c];
        sum += last = std::exp(dot / 8);
      }
      diagonal.push_back(last / sum);
    }
    std::sort(diagonal.begin(), diagonal.end());
    EXPECT_NEAR(softmax["heads"][0][h]["spectral_gap"].get<double>(), 1 - diagonal[298], 1e-12);
  }
}

TEST_F(Diagnose, Study) {
  const Result result =
      run({"diagnose", "--study", file("s.h5"), "--quick", "--real", data("real/minilm.h5"), "--json", file("s.json")});
  ASSERT_TRUE(succeeded(result));
  const io::Reader reader(file("s.h5"));
  const auto sigma = reader.read("/study/sigma_sm").as<double>();
  const auto study = json("s.json")["study"];
  EXPECT_EQ(study["draws"], 2);
  for (const char* kernel : {"softmax", "lln_authors", "lln_table", "lln_entropy", "quadratic", "relu", "elu"})
    for (const char* name : {"entropy", "spectral_gap", "relative_variance", "logvar", "temperature"}) {
      const std::string path = std::string("/study/") + kernel + "/" + name;
      const auto values = reader.read(path);
      EXPECT_EQ(values.extents(), (std::vector<std::int64_t>{static_cast<std::int64_t>(sigma.size()), 2})) << path;
      EXPECT_EQ(study[kernel][name][1][1], values.as<double>()[3]) << path;
      EXPECT_EQ(reader.read(std::string("/study/real/") + kernel + "/" + name).extents(),
                (std::vector<std::int64_t>{2, 12}));
    }
  // entropy falls and log-variance rises with sigma for softmax; quadratic attention does not react
  const auto entropy = reader.read("/study/softmax/entropy").as<double>();
  EXPECT_GT(entropy.front(), entropy.back() + 1);
  const auto flat = reader.read("/study/quadratic/entropy").as<double>();
  EXPECT_NEAR(flat.front(), flat.back(), 0.02);
  EXPECT_EQ(study["lognormal"]["entropy"].size(), sigma.size());
}

TEST_F(Diagnose, Refusals) {
  generate();
  EXPECT_TRUE(complained(run({"diagnose"}), 2, {"IN.h5 or --study"}));
  EXPECT_TRUE(complained(run({"diagnose", file("none.h5")}), 2, {"none.h5"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--variant", "identity"}), 2, {"softmax", "'identity'"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--alpha", "1"}), 2, {"--beta"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--moments", "best"}), 2, {"authors", "'best'"}));
  EXPECT_TRUE(
      complained(run({"diagnose", file("g.h5"), "--moments-scope", "layer"}), 2, {"tensor or head", "'layer'"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--causal", "--full"}), 2, {"--full"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--rows", "1"}), 2, {"2"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--exact", "--exact-up-to", "9"}), 2, {"--exact-up-to"}));
  for (const Arguments& ignored : {Arguments{"--alpha", "1", "--beta", "1"}, Arguments{"--moments", "table"},
                                   Arguments{"--moments-scope", "head"}}) {
    Arguments arguments{"diagnose", file("g.h5"), "--variant", "softmax", "--variant", "elu"};
    arguments.insert(arguments.end(), ignored.begin(), ignored.end());
    EXPECT_TRUE(complained(run(arguments), 2, {ignored[0], "expected lln", "softmax, elu"}));
  }
  EXPECT_TRUE(complained(run({"diagnose", "--study", file("s.h5"), "--quick", "--mean"}), 2, {"--mean", "--study"}));
  EXPECT_TRUE(complained(run({"diagnose", file("g.h5"), "--study", file("s.h5")}), 2, {"--study"}));
  EXPECT_TRUE(complained(run({"diagnose", "--study", file("no/s.h5")}), 2, {"no"}));
  EXPECT_TRUE(complained(run({"diagnose", "--study", file("s.h5"), "--real", file("none.h5")}), 2, {"none.h5"}));
  EXPECT_TRUE(complained(run({"diagnose", data("bad/packed_decreasing.h5")}), 2, {"cu_seqlens"}));
  ASSERT_TRUE(succeeded(run({"generate", file("r.h5"), "--nq", "9", "--nk", "4", "--d", "2"})));
  EXPECT_TRUE(complained(run({"diagnose", file("r.h5"), "--causal"}), 2, {"--causal", "9", "4"}));
}

}  // namespace
}  // namespace LinAttn::test_app
