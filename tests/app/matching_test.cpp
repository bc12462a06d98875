// SPDX-License-Identifier: BSD-3-Clause

// alpha and beta matched to the moments of q and k.

#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Strings = std::vector<std::string>;
using Extents = std::vector<std::int64_t>;
using Numbers = std::vector<double>;

/// q (2,4,6,3), k (2,2,6,3), v (2,2,6,5), of different size from head to head, and a cotangent.
Contents matched_input(const std::string& variant = "lln") {
  Contents contents;
  contents.attributes["/"] = {{"variant", variant}};
  contents.attributes["/config"] = {{"moments", "authors"}};
  contents.datasets = {{"/inputs/q", waves({2, 4, 6, 3}, 1)},
                       {"/inputs/k", waves({2, 2, 6, 3}, 2)},
                       {"/inputs/v", waves({2, 2, 6, 5}, 3)},
                       {"/cotangent/o", waves({2, 4, 6, 5}, 4)}};
  const auto q = contents["/inputs/q"].values<double>(), k = contents["/inputs/k"].values<double>();
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = (0.5 + 0.125 * (i / 18 % 4)) * q[i] + 0.25;
  for (std::size_t i = 0; i < k.size(); ++i) k[i] *= i / 18 % 2 == 0 ? 0.75 : 1.25;
  return contents;
}

/// Deviation of some rows of 3 entries, by the textbook.
double deviation(const io::Array& array, const std::set<std::int64_t>& heads,
                 const std::set<std::int64_t>& hidden = {}) {
  Numbers taken;
  const Numbers all = array.as<double>();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / 3, n = row % 6, h = row / 6 % array.extent(1),
               b = row / 6 / array.extent(1);
    if (heads.contains(h) && !hidden.contains(6 * b + n)) taken.push_back(all[i]);
  }
  double mean = 0, squares = 0;
  for (const double x : taken) mean += x / static_cast<double>(taken.size());
  for (const double x : taken) squares += (x - mean) * (x - mean);
  return std::sqrt(squares / static_cast<double>(taken.size() - 1));
}

/// The published rule.
std::pair<double, double> authors_rates(double sigma_q, double sigma_k) {
  const double a = 0.14855178144710912, b = -0.35487039130661086;
  const double t = std::sqrt((sigma_q * sigma_q * sigma_k * sigma_k - b) / (2 * a));
  return {t / sigma_q, t / sigma_k};
}

Arguments joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class Matching : public ProgramTest {
 protected:
  Result run_with(const Arguments& options) {
    return run(joined({"run", file("in.h5"), file("out.h5"), "--json", file("run.json")}, options));
  }
};

void expect_near(const nlohmann::json& found, const Numbers& expected, double tolerance = 1e-14) {
  ASSERT_EQ(found.size(), expected.size()) << found;
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(found[i].get<double>(), expected[i], tolerance * std::abs(expected[i])) << i;
}

/// Moments of whole tensors and of groups of heads, with hidden rows left out, and what is made of
/// them.
TEST_F(Matching, AuthorsRule) {
  for (const bool masked : {false, true})
    for (const std::string scope : {"tensor", "head"}) {
      Contents input = matched_input();
      std::set<std::int64_t> hidden;
      if (masked) {
        io::Array mask(io::ElementType::u8, {2, 6});
        const auto visible = mask.values<std::uint8_t>();
        for (std::size_t i = 0; i < visible.size(); ++i) {
          visible[i] = i % 5 != 2;
          if (visible[i] == 0) hidden.insert(static_cast<std::int64_t>(i));
        }
        input.datasets.emplace("/inputs/key_mask", mask);
      }
      const io::Array &q = input["/inputs/q"], &k = input["/inputs/k"];
      const bool each = scope == "head";
      using Heads = std::set<std::int64_t>;
      Numbers sigma_q, sigma_k;
      for (const std::int64_t g : {0, 1}) {
        sigma_q.push_back(deviation(q, each ? Heads{2 * g, 2 * g + 1} : Heads{0, 1, 2, 3}, hidden));
        sigma_k.push_back(deviation(k, each ? Heads{g} : Heads{0, 1}, hidden));
      }
      Numbers alpha, beta;
      for (const std::size_t g : {0, 1}) {
        const auto [of_q, of_k] = authors_rates(sigma_q[g], sigma_k[g]);
        alpha.insert(alpha.end(), 2, of_q);
        beta.push_back(of_k);
      }
      input.write(file("in.h5"));
      const Result result =
          run_with({"--moments-scope", scope, "--backward", "--check", "--dtype", "f64"});
      ASSERT_TRUE(succeeded(result)) << scope;
      const auto json = this->json("run.json");
      expect_near(json["moments"]["sigma_q"], sigma_q);
      expect_near(json["moments"]["sigma_k"], sigma_k);
      expect_near(json["moments"]["alpha"], alpha);
      expect_near(json["moments"]["beta"], beta);
      EXPECT_EQ(json["parameters"]["alpha"], json["moments"]["alpha"]);
      EXPECT_EQ(json["parameters"]["beta"], json["moments"]["beta"]);
      EXPECT_NE(result.out.find("\nmoments    sigma_q "), std::string::npos) << result.out;
      EXPECT_NE(result.out.find("moments authors"), std::string::npos) << result.out;
      const std::string line =
          result.out.substr(result.out.find("\nmoments "),
                            result.out.find("\nexecution") - result.out.find("\nmoments "));
      EXPECT_EQ(line.find(" to ") != std::string::npos, each) << line;

      // The same rates given by hand give the same, gradients of the rates included.
      Contents given = input;
      given.attributes["/config"] = {};
      given.datasets.emplace("/config/alpha",
                             io::Array(json["moments"]["alpha"].get<Numbers>(), {4}));
      given.datasets.emplace("/config/beta",
                             io::Array(json["moments"]["beta"].get<Numbers>(), {2}));
      given.write(file("given.h5"));
      ASSERT_TRUE(succeeded(
          run({"run", file("given.h5"), file("given_out.h5"), "--backward", "--dtype", "f64"})));
      const Contents found = Contents::read(file("out.h5")),
                     expected = Contents::read(file("given_out.h5"));
      for (const char* path : {"/output/o", "/output_grad/q", "/output_grad/k", "/output_grad/v"})
        EXPECT_EQ(found.datasets.at(path).as<double>(), expected.datasets.at(path).as<double>())
            << path;
      for (const char* path : {"/output_grad/alpha", "/output_grad/beta"}) {
        const Numbers parts = expected.datasets.at(path).as<double>(),
                      stored = found.datasets.at(path).as<double>();
        double sum = 0;
        for (const double x : parts) sum += x;
        EXPECT_EQ(stored, each ? parts : Numbers{sum}) << path;
      }
      EXPECT_EQ(found.attributes.at("/config").at("moments"), io::Value("authors"));
    }
}

/// Every rule, scope, variant, space and precision, by files of our own.
TEST_F(Matching, EveryRuleVerifies) {
  std::set<Numbers> rates;
  for (const char* variant : {"lln", "lln-diag"})
    for (const char* rule : {"authors", "table", "fit", "entropy"})
      for (const char* scope : {"tensor", "head"}) {
        const std::string what = std::string(variant) + " " + rule + " " + scope;
        ASSERT_TRUE(succeeded(run({"generate", file("g.h5"), "--heads", "4", "--kv-heads", "2",
                                   "--nq", "17", "--d", "4", "--dv", "3", "--variant", variant,
                                   "--moments", rule, "--moments-scope", scope})))
            << what;
        const Contents g = Contents::read(file("g.h5"));
        EXPECT_EQ(g.attributes.at("/config").at("moments"), io::Value(rule));
        EXPECT_FALSE(g.attributes.at("/config").contains("alpha"));
        const bool each = std::string(scope) == "head";
        EXPECT_EQ(g.datasets.at("/expected/moments/sigma_q").extents(),
                  each ? Extents{2} : Extents{});
        EXPECT_EQ(g.datasets.at("/expected/moments/alpha").extents(),
                  each ? Extents{4} : Extents{});
        EXPECT_EQ(g.datasets.at("/expected_grad/beta").extents(), Extents{2});
        if (std::string(variant) == "lln") {
          EXPECT_TRUE(rates.insert(g.datasets.at("/expected/moments/alpha").as<double>()).second)
              << what;
        }
        ASSERT_TRUE(succeeded(run({"verify", file("g.h5"), "--json", file("v.json")}))) << what;
        const auto json = this->json("v.json");
        std::set<std::pair<std::string, std::string>> seen;
        for (const auto& c : json["files"][0]["comparisons"])
          seen.emplace(c["dtype"].get<std::string>(), c["dataset"].get<std::string>());
        for (const char* dtype : {"f64", "f32", "f16", "bf16"})
          for (const char* name : {"sigma_q", "sigma_k", "alpha", "beta"})
            EXPECT_TRUE(seen.contains({dtype, std::string("/expected/moments/") + name}))
                << what << " " << dtype << " " << name;
        EXPECT_EQ(json["skipped"], 0) << what;
      }
}

/// Numbers of whole tensors may be given for each head, and the same in attributes.
TEST_F(Matching, FormsOfExpectedMoments) {
  matched_input().write(file("in.h5"));
  ASSERT_TRUE(succeeded(run_with({"--dtype", "f64"})));
  auto moments = json("run.json")["moments"];
  const auto number = [&](const char* name) { return moments[name][0].get<double>(); };
  Contents contents = matched_input();
  contents.datasets.emplace("/expected/moments/alpha", io::Array(Numbers(4, number("alpha")), {4}));
  contents.datasets.emplace("/expected/moments/sigma_q",
                            io::Array(Numbers(2, number("sigma_q")), {2}));
  contents.attributes["/expected/moments"]["sigma_k"] = number("sigma_k");
  contents.datasets.emplace("/expected/moments/beta", io::Array(Numbers{number("beta")}, {1}));
  contents.write(file("v.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("v.h5"), "--json", file("v.json")})));
  EXPECT_EQ(json("v.json")["comparisons"].get<int>() % 4, 0);

  // Deviations alone, of any variant and under any mask.
  Contents plain = matched_input("elu");
  plain.attributes["/config"] = {{"causal", 1}};
  plain.datasets.emplace("/expected/moments/sigma_q", io::Array(Numbers{number("sigma_q")}, {}));
  plain.write(file("v.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("v.h5")})));
  plain.datasets.emplace("/expected/moments/alpha", io::Array(Numbers{1}, {}));
  plain.write(file("v.h5"));
  EXPECT_TRUE(complained(run({"verify", file("v.h5")}), 2,
                         {file("v.h5"), "/expected/moments/alpha", "elu has no alpha"}));

  // One number where those of the heads differ.
  contents.attributes["/config"]["moments_scope"] = "head";
  contents.write(file("v.h5"));
  EXPECT_TRUE(complained(run({"verify", file("v.h5")}), 2, {file("v.h5"), "the heads differ"}));
}

TEST_F(Matching, OneChangedNumber) {
  ASSERT_TRUE(succeeded(
      run({"generate", file("in.h5"), "--heads", "4", "--kv-heads", "2", "--nq", "17", "--d", "4",
           "--variant", "lln", "--moments", "table", "--moments-scope", "head"})));
  const Contents original = Contents::read(file("in.h5"));
  for (const char* name : {"sigma_q", "sigma_k", "alpha", "beta"}) {
    Contents contents = original;
    const std::string dataset = std::string("/expected/moments/") + name;
    contents[dataset].values<double>()[1] *= 1.001;
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--dtype", "f32"}), 1,
                           {file("changed.h5"), dataset + "[1]"}))
        << name;
  }
  for (const auto& [name, value] :
       {std::pair<std::string, io::Value>{"moments", "authors"}, {"moments_scope", "tensor"}}) {
    Contents contents = original;
    contents.attributes["/config"][name] = value;
    for (const char* rate : {"alpha", "beta"}) {
      contents.datasets.erase(std::string("/expected/moments/") + rate);
      contents.datasets.erase(std::string("/expected_grad/") + rate);
    }
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5")}), 1, {file("changed.h5")})) << name;
  }
}

/// Under a causal mask only the command line can allow them.
TEST_F(Matching, MomentsThatSeeTheFuture) {
  Contents causal = matched_input();
  causal.attributes["/config"]["causal"] = 1;
  causal.datasets.emplace("/expected/moments/sigma_q",
                          io::Array(Numbers{deviation(causal["/inputs/q"], {0, 1, 2, 3})}, {}));
  causal.write(file("in.h5"));
  const Strings words{file("in.h5"), "--moments-see-future", "causal", "'authors'"};
  EXPECT_TRUE(complained(run_with({}), 2, words));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2, words));
  EXPECT_FALSE(std::filesystem::exists(file("out.h5")));
  const Result result = run_with({"--moments-see-future"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("moments that see the future"), std::string::npos) << result.out;
  EXPECT_EQ(json("run.json")["moments_see_future"], true);
  EXPECT_TRUE(succeeded(run({"verify", file("in.h5"), "--moments-see-future"})));
  EXPECT_TRUE(succeeded(run_with({"--alpha", "1", "--beta", "1"})));
  EXPECT_TRUE(succeeded(run_with({"--full"})));

  const Arguments generate{"generate",  file("g.h5"), "--nq",     "6",         "--d", "3",
                           "--variant", "lln",        "--causal", "--moments", "fit"};
  EXPECT_TRUE(complained(run(generate), 2, {"--moments: ", "--moments-see-future", "'fit'"}));
  ASSERT_TRUE(succeeded(run(joined(generate, {"--moments-see-future"}))));
  EXPECT_TRUE(succeeded(run({"verify", file("g.h5"), "--moments-see-future"})));
}

TEST_F(Matching, EitherMomentsOrRates) {
  Contents input = matched_input();
  input.write(file("in.h5"));
  const Strings both{"expected either moments or alpha and beta, found both"};
  EXPECT_TRUE(complained(run_with({"--moments", "fit", "--alpha", "1"}), 2, both));
  EXPECT_TRUE(complained(run({"generate", file("g.h5"), "--nq", "3", "--d", "2", "--variant", "lln",
                              "--moments", "fit", "--beta", "1"}),
                         2, both));
  EXPECT_TRUE(complained(run_with({"--alpha", "1"}), 2, {file("in.h5"), "'beta'", "--beta"}));
  EXPECT_TRUE(succeeded(run_with({"--alpha", "1", "--beta", "1"})));
  EXPECT_FALSE(json("run.json").contains("moments"));
  EXPECT_TRUE(complained(run_with({"--variant", "elu", "--moments", "fit"}), 2,
                         {"variant elu has no moments"}));
  EXPECT_TRUE(complained(run_with({"--variant", "elu", "--moments-see-future"}), 2,
                         {"--moments-see-future: variant elu has no moments"}));
  input.attributes["/config"]["alpha"] = 1.0;
  input.write(file("in.h5"));
  EXPECT_TRUE(complained(run_with({}), 2, joined(both, {file("in.h5")})));
}

/// Constant inputs, one token, all keys hidden: finite rates.
TEST_F(Matching, InputsWithoutDeviation) {
  for (const char* rule : {"authors", "table", "fit", "entropy"}) {
    ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--nq", "5", "--d", "3", "--dist",
                               "constant", "--variant", "lln", "--moments", rule})))
        << rule;
    EXPECT_TRUE(succeeded(run_with({"--backward", "--check"}))) << rule;
    for (const char* name : {"alpha", "beta"})
      EXPECT_TRUE(std::isfinite(json("run.json")["moments"][name][0].get<double>())) << rule;
    for (const char* name : {"sigma_q", "sigma_k"}) {
      EXPECT_EQ(json("run.json")["moments"][name], Numbers{1e-4}) << rule;
      EXPECT_EQ(values(file("in.h5"), std::string("/expected/moments/") + name), Numbers{1e-4}) << rule;
    }
    ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--nq", "1", "--d", "1", "--variant",
                               "lln", "--moments", rule})))
        << rule;
    EXPECT_TRUE(succeeded(run({"verify", file("in.h5"), "--dtype", "f64"}))) << rule;
  }
  Contents hidden = matched_input("lln-diag");
  hidden.datasets.emplace("/inputs/key_mask", io::Array(io::ElementType::u8, {2, 6}));
  hidden.write(file("in.h5"));
  ASSERT_TRUE(succeeded(run_with({"--backward"})));
  EXPECT_EQ(json("run.json")["moments"]["sigma_q"], Numbers(2, 1e-4));
  for (const double x : values(file("out.h5"), "/output/o")) EXPECT_EQ(x, 0);
}

}  // namespace
}  // namespace LinAttn::test_app
