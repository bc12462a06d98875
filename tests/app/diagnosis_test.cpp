// SPDX-License-Identifier: BSD-3-Clause

// Diagnostics that files expect.

#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

const std::vector<std::string> names{"entropy", "entropy_biased", "entropy_unbiased",
                                     "logvar",  "logvar_within",  "spectral_gap",
                                     "variance"};

std::string fixture(const std::string& name) {
  return data("fixtures/diagnostics/" + name + ".h5");
}

class Diagnosed : public ProgramTest {};

/// Every instrument in every space and precision, with the rest of the file.
TEST_F(Diagnosed, Fixtures) {
  for (const char* name : {"elu_causal", "elu_full_gqa", "elu_full_identity", "lln_causal",
                           "lln_full_gqa", "lln_full_identity", "lln_full_uniform"}) {
    ASSERT_TRUE(succeeded(run({"verify", fixture(name), "--json", file("v.json")}))) << name;
    const auto json = this->json("v.json");
    std::set<std::pair<std::string, std::string>> seen;
    for (const auto& c : json["files"][0]["comparisons"])
      seen.emplace(c["dtype"].get<std::string>(), c["dataset"].get<std::string>());
    for (const auto& [path, array] : Contents::read(fixture(name)).datasets) {
      if (!path.starts_with("/expected")) continue;
      for (const char* dtype : {"f64", "f32", "f16", "bf16"})
        EXPECT_TRUE(seen.contains({dtype, path})) << name << " " << dtype << " " << path;
    }
    EXPECT_EQ(json["skipped"], 0) << name;
  }
}

/// In 16 bits the dense reference is expected, and not what the file says.
TEST_F(Diagnosed, OneChangedNumber) {
  const Contents original = Contents::read(fixture("lln_full_gqa"));
  for (const std::string& name : names) {
    const std::string dataset = "/expected/diagnostics/" + name;
    Contents contents = original;
    const auto elements = contents[dataset].values<double>();
    elements[1] += 1e-3 * std::abs(elements[0]);
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--json", file("v.json")}), 1,
                           {file("changed.h5"), dataset}))
        << name;
    const auto json = this->json("v.json");
    for (const auto& c : json["files"][0]["comparisons"])
      EXPECT_EQ(c["ok"], c["dataset"] != dataset || c["dtype"] == "f16" || c["dtype"] == "bf16")
          << c;
  }
  // Another matrix has other numbers.
  Contents contents = original;
  contents["/inputs/q"].values<double>()[3] += 0.25;
  for (const char* name : {"/expected/o", "/expected_grad/q", "/expected_grad/k",
                           "/expected_grad/v", "/expected_grad/alpha", "/expected_grad/beta"})
    contents.datasets.erase(name);
  contents.write(file("changed.h5"));
  EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--dtype", "f64", "--json", file("v.json")}), 1,
                         {file("changed.h5")}));
  const auto comparisons = json("v.json")["files"][0]["comparisons"];
  EXPECT_EQ(comparisons.size() % names.size(), 0u);
  for (const auto& c : comparisons) EXPECT_FALSE(c["ok"]) << c;
}

/// Rates that are matched are those of the matrix.
TEST_F(Diagnosed, MatchedRates) {
  Contents contents = Contents::read(fixture("lln_full_gqa"));
  for (const char* name :
       {"/config/alpha", "/config/beta", "/expected/o", "/expected_grad/q", "/expected_grad/k",
        "/expected_grad/v", "/expected_grad/alpha", "/expected_grad/beta"})
    contents.datasets.erase(name);
  contents.attributes["/config"] = {{"moments", "authors"}, {"moments_scope", "head"}};
  contents.write(file("m.h5"));
  run({"verify", file("m.h5"), "--dtype", "f64", "--json", file("v.json")});
  ASSERT_TRUE(succeeded(run({"run", file("m.h5"), file("out.h5"), "--json", file("run.json")})));
  const auto moments = json("run.json")["moments"];
  Contents given = contents;
  given.attributes.erase("/config");
  for (const char* name : {"alpha", "beta"}) {
    const auto rates = moments[name].get<std::vector<double>>();
    given.datasets.emplace(std::string("/config/") + name,
                           io::Array(rates, {static_cast<std::int64_t>(rates.size())}));
  }
  given.write(file("g.h5"));
  const auto by_moments = json("v.json");
  run({"verify", file("g.h5"), "--dtype", "f64", "--json", file("v.json")});
  ASSERT_EQ(by_moments["files"][0]["comparisons"].size(),
            json("v.json")["files"][0]["comparisons"].size());
  for (std::size_t i = 0; i < by_moments["files"][0]["comparisons"].size(); ++i)
    EXPECT_EQ(by_moments["files"][0]["comparisons"][i],
              json("v.json")["files"][0]["comparisons"][i]);
}

TEST_F(Diagnosed, ExactAttention) {
  for (const char* name : {"softmax_causal", "softmax_causal_uniform", "softmax_full_cycle",
                           "softmax_full_gqa", "softmax_full_identity", "softmax_full_one_token"}) {
    ASSERT_TRUE(succeeded(run({"verify", fixture(name), "--json", file("v.json")}))) << name;
    EXPECT_EQ(json("v.json")["skipped"], 0) << name;
  }
  Contents contents = Contents::read(fixture("softmax_full_gqa"));
  contents["/expected/diagnostics/spectral_gap"].values<double>()[1] += 1e-3;
  contents.write(file("changed.h5"));
  EXPECT_TRUE(complained(run({"verify", file("changed.h5")}), 1,
                         {file("changed.h5"), "/expected/diagnostics/spectral_gap"}));
}

TEST_F(Diagnosed, Refusals) {
  const auto with_entropy = [](Contents contents) {
    const auto& extents = contents["/inputs/q"].extents();
    contents.datasets.emplace("/expected/diagnostics/entropy", ramp({extents[0], extents[1]}));
    return contents;
  };
  Contents blocks = with_entropy(small_input());
  blocks.attributes["/"]["variant"] = "lln-diag";
  blocks.attributes["/config"] = {{"alpha", 1.0}, {"beta", 1.0}, {"causal", 1}};
  blocks.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2,
                         {file("in.h5"), "/expected/diagnostics", "joined by blocks"}));

  Contents negative = with_entropy(small_input());
  negative.attributes["/"]["variant"] = "identity";
  negative.write(file("in.h5"));
  EXPECT_TRUE(
      complained(run({"verify", file("in.h5")}), 2, {file("in.h5"), "identity", "negative"}));

  Contents packed = with_entropy(small_input());
  for (const char* name :
       {"/inputs/q", "/inputs/k", "/inputs/v", "/cotangent/o", "/expected/diagnostics/entropy"}) {
    auto extents = packed[name].extents();
    extents[0] = 1;
    packed[name] = ramp(extents);
  }
  for (const auto& [name, last] : {std::pair{"q", 3}, {"k", 5}}) {
    io::Array offsets(io::ElementType::i64, {2});
    offsets.values<std::int64_t>()[1] = last;
    packed.datasets.emplace(std::string("/inputs/cu_seqlens_") + name, offsets);
  }
  packed.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2, {file("in.h5"), "packed"}));

  ASSERT_TRUE(
      succeeded(run({"generate", file("in.h5"), "--nq", "600", "--d", "2", "--variant", "elu"})));
  with_entropy(Contents::read(file("in.h5"))).write(file("long.h5"));
  EXPECT_TRUE(complained(run({"verify", file("long.h5"), "--dtype", "f16"}), 2,
                         {file("long.h5"), "up to 512", "Nq=600"}));
}

}  // namespace
}  // namespace LinAttn::test_app
