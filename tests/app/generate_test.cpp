// SPDX-License-Identifier: BSD-3-Clause

#include <algorithm>
#include <cmath>
#include <linattn/io/tensor_file.hpp>
#include <linattn/variants.hpp>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

class Generate : public ProgramTest {
 protected:
  io::TensorFile generated(const Arguments& options) {
    Arguments arguments{"generate", file("g.h5")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    EXPECT_TRUE(succeeded(run(arguments)));
    return io::TensorFile::read(file("g.h5"));
  }
};

TEST_F(Generate, EveryVariantVerifies) {
  for_each_variant([&]<class V>(std::type_identity<V>) {
    for (const std::string mask : {"--causal", "--full"})
      for (const char* dtype : {"f64", "f32", "f16"}) {
        const std::int64_t nq = has_local_term_v<V> && mask == "--full" ? 70 : 35;
        const io::TensorFile g = generated(
            {"--batch",          "2",    "--heads",   "4",     "--kv-heads", "2",       "--nq",
             std::to_string(nq), "--nk", "70",        "--d",   "5",          "--dv",    "3",
             "--seed",           "7",    "--variant", V::name, mask,         "--dtype", dtype});
        EXPECT_EQ(g.variant(), V::name);
        EXPECT_EQ(g.causal(), mask == "--causal");
        EXPECT_EQ(g.problem(), (Problem{2, 4, 2, nq, 70, 5, 3}));
        for (const char* path :
             {"/expected/o", "/expected_grad/q", "/expected_grad/k", "/expected_grad/v"})
          EXPECT_TRUE(g.has(path)) << path;
        EXPECT_TRUE(succeeded(run({"verify", file("g.h5")})))
            << V::name << " " << mask << " " << dtype;
      }
  });
}

TEST_F(Generate, HalfPrecisionInputs) {
  const io::TensorFile g =
      generated({"--nq", "6", "--d", "2", "--variant", "elu", "--dtype", "f16"});
  EXPECT_EQ(g.q().type(), io::ElementType::f16);
  EXPECT_EQ(g.at("/cotangent/o").type(), io::ElementType::f16);
  EXPECT_EQ(g.at("/expected/o").type(), io::ElementType::f64);
  EXPECT_TRUE(complained(
      run({"generate", file("h.h5"), "--nq", "6", "--d", "2", "--dtype", "f16", "--sigma", "1e5"}),
      2, {"--sigma", "65504", "100000"}));
  EXPECT_EQ(files(), std::vector<std::string>{"g.h5"});
}

TEST_F(Generate, OptionsAreKept) {
  const io::TensorFile g =
      generated({"--nq", "6", "--d", "2", "--variant", "lln", "--alpha", "0.5", "--beta", "-1.5",
                 "--no-normalise", "--scale", "-2", "--json", file("g.json")});
  EXPECT_EQ(g.config().real("alpha"), 0.5);
  EXPECT_EQ(g.config().real("beta"), -1.5);
  EXPECT_EQ(g.config().real("scale"), -2.0);
  EXPECT_FALSE(g.config().flag("normalise"));
  EXPECT_EQ(g.at("/expected_grad/alpha").extents(), std::vector<std::int64_t>{1});
  EXPECT_TRUE(succeeded(run({"verify", file("g.h5")})));
  const auto json = this->json("g.json");
  EXPECT_EQ(json["command"], "generate");
  EXPECT_EQ(json["expected"], true);
  EXPECT_EQ(json["problem"]["nk"], 6);
}

TEST_F(Generate, PlainInput) {
  const io::TensorFile g =
      generated({"--heads", "6", "--kv-heads", "3", "--nq", "4", "--d", "2", "--dtype", "f32"});
  EXPECT_EQ(g.variant(), "");
  EXPECT_EQ(g.problem(), (Problem{1, 6, 3, 4, 4, 2, 2}));
  EXPECT_EQ(g.q().type(), io::ElementType::f32);
  EXPECT_TRUE(g.has("/cotangent/o"));
  EXPECT_FALSE(g.has("/expected/o"));
  const io::TensorFile with_variant =
      generated({"--nq", "4", "--d", "2", "--variant", "elu", "--no-expected"});
  EXPECT_EQ(with_variant.variant(), "elu");
  EXPECT_FALSE(with_variant.has("/expected/o"));
}

TEST_F(Generate, SeedDecidesEverything) {
  const auto bytes = [&](const char* seed) {
    generated({"--nq", "9", "--d", "3", "--seed", seed, "--variant", "lln"});
    return read_file(file("g.h5"));
  };
  const std::string first = bytes("5");
  EXPECT_TRUE(bytes("5") == first);
  EXPECT_FALSE(bytes("6") == first);
  // Tensors of one shape are different draws.
  const io::TensorFile g = generated({"--nq", "9", "--d", "3", "--seed", "0"});
  const auto q = g.q().as<double>(), k = g.k().as<double>(), v = g.v().as<double>();
  EXPECT_NE(q, k);
  EXPECT_NE(k, v);
  // Fixed for good, up to the last bits of log and cos.
  const io::TensorFile fixed =
      generated({"--nq", "2", "--d", "1", "--seed", "1", "--dist", "uniform"});
  const io::TensorFile longer =
      generated({"--nq", "5", "--d", "1", "--seed", "1", "--dist", "uniform"});
  EXPECT_EQ(fixed.q().as<double>()[1], longer.q().as<double>()[1]);
}

struct Moments {
  double mean = 0, deviation = 0, low = 0, high = 0;
};

Moments moments(const std::vector<double>& x) {
  Moments m{.low = x[0], .high = x[0]};
  const double n = static_cast<double>(x.size());
  for (const double value : x) {
    m.mean += value / n;
    m.low = std::min(m.low, value);
    m.high = std::max(m.high, value);
  }
  for (const double value : x) m.deviation += (value - m.mean) * (value - m.mean) / n;
  m.deviation = std::sqrt(m.deviation);
  return m;
}

/// n = 30,000 numbers: the mean is within 5 sigma / sqrt(n), the deviation within
/// 5 sigma sqrt((kurtosis - 1) / 4n), but for one seed in a million.
TEST_F(Generate, Distributions) {
  const double n = 30000, sigma = 2.5;
  const auto draw = [&](const char* distribution) {
    return moments(generated({"--nq", "3000", "--d", "10", "--sigma", "2.5", "--dist", distribution,
                              "--seed", "2"})
                       .k()
                       .as<double>());
  };
  const Moments normal = draw("normal");
  EXPECT_NEAR(normal.mean, 0, 5 * sigma / std::sqrt(n));
  EXPECT_NEAR(normal.deviation, sigma, 5 * sigma * std::sqrt(2 / (4 * n)));
  EXPECT_GT(normal.high, 3 * sigma);
  EXPECT_LT(normal.low, -3 * sigma);
  const Moments uniform = draw("uniform");
  EXPECT_NEAR(uniform.mean, 0, 5 * sigma / std::sqrt(n));
  EXPECT_NEAR(uniform.deviation, sigma, 5 * sigma * std::sqrt(0.8 / (4 * n)));
  EXPECT_LT(uniform.high, std::sqrt(3.0) * sigma);
  EXPECT_GT(uniform.high, 0.99 * std::sqrt(3.0) * sigma);
  const Moments constant = draw("constant");
  EXPECT_EQ(constant.low, sigma);
  EXPECT_EQ(constant.high, sigma);
}

}  // namespace
}  // namespace LinAttn::test_app
