// SPDX-License-Identifier: BSD-3-Clause

#include <algorithm>
#include <cmath>
#include <linattn/io/reader.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Strings = std::vector<std::string>;
using Extents = std::vector<std::int64_t>;

class Run : public ProgramTest {
 protected:
  static nlohmann::json json_of(const Result& result) { return nlohmann::json::parse(result.out); }
};

TEST_F(Run, OutputFollowsTheLayout) {
  Contents input = small_input();
  input.attributes["/config"] = {{"causal", 1}};
  input.datasets.emplace("/extra/ignored", ramp({3}));
  input.write(file("in.h5"));
  const Result result = run({"run", file("in.h5"), file("out.h5"), "--backward"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("ignored    /extra"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("output     " + file("out.h5")), std::string::npos) << result.out;
  EXPECT_EQ(files(), (Strings{"in.h5", "out.h5"}));

  const Contents output = Contents::read(file("out.h5"));
  Strings paths;
  for (const auto& [path, array] : output.datasets) {
    paths.push_back(path);
    EXPECT_EQ(array.type(), io::ElementType::f64) << path;
  }
  EXPECT_EQ(paths, (Strings{"/output/o", "/output_grad/k", "/output_grad/q", "/output_grad/v"}));
  EXPECT_EQ(output.datasets.at("/output/o").extents(), (Extents{2, 4, 3, 1}));
  EXPECT_EQ(output.datasets.at("/output_grad/q").extents(), (Extents{2, 4, 3, 2}));
  EXPECT_EQ(output.datasets.at("/output_grad/k").extents(), (Extents{2, 2, 5, 2}));
  EXPECT_EQ(output.datasets.at("/output_grad/v").extents(), (Extents{2, 2, 5, 1}));

  EXPECT_EQ(output.attributes.at("/config"), input.attributes.at("/config"));
  auto root = input.attributes.at("/");
  root["schema"] = "linattn-1";
  EXPECT_EQ(output.attributes.at("/"), root);
}

TEST_F(Run, ForwardOnly) {
  small_input().write(file("in.h5"));
  ASSERT_TRUE(succeeded(run({"run", file("in.h5"), file("out.h5")})));
  const Contents output = Contents::read(file("out.h5"));
  EXPECT_EQ(output.datasets.size(), 1u);
  EXPECT_TRUE(output.datasets.contains("/output/o"));
}

TEST_F(Run, PrecisionFollowsFileAndOption) {
  Contents input = small_input();
  const auto type_of_output = [&](const Strings& options) {
    input.write(file("in.h5"));
    Arguments arguments{"run", file("in.h5"), file("out.h5"), "--backward"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    EXPECT_TRUE(succeeded(run(arguments)));
    const Contents output = Contents::read(file("out.h5"));
    const io::ElementType type = output.datasets.at("/output/o").type();
    for (const auto& [path, array] : output.datasets) EXPECT_EQ(array.type(), type) << path;
    return type;
  };
  input.attributes["/"]["variant"] = "lln";
  input.attributes["/config"] = {{"alpha", 1.5}, {"beta", 0.5}};
  EXPECT_EQ(type_of_output({}), io::ElementType::f64);
  EXPECT_EQ(type_of_output({"--dtype", "f32"}), io::ElementType::f32);
  for (const char* name : {"/inputs/q", "/inputs/k", "/inputs/v"}) {
    const io::Array wide = input[name];
    input[name] = io::Array(wide.as<float>(), wide.extents());
  }
  EXPECT_EQ(type_of_output({}), io::ElementType::f32);
  EXPECT_EQ(type_of_output({"--dtype", "f64"}), io::ElementType::f64);
}

struct Expectation {
  const char* fixture;
  Strings gradients;
};

/// The numbers themselves, against files of another program.
TEST_F(Run, NumbersOfFixtures) {
  const Expectation expectations[] = {
      {"elu_full_gqa_cross_n37_n53", {"q", "k", "v"}},
      {"identity_causal_gqa_scale_n65", {"q", "k", "v"}},
      {"relu_causal_gqa_n67", {"q", "k", "v"}},
      {"quadratic_full_gqa_cross_n31_n47", {"q", "k", "v"}},
      {"lln_causal_gqa_per_head_n130", {"q", "k", "v", "alpha", "beta"}},
      {"lln_causal_n16", {"q", "k", "v", "alpha", "beta"}},
  };
  for (const Expectation& expectation : expectations) {
    const std::string input = data(std::string("fixtures/") + expectation.fixture + ".h5");
    const Result result =
        run({"run", input, file("out.h5"), "--backward", "--json", file("run.json")});
    ASSERT_TRUE(succeeded(result)) << expectation.fixture;
    EXPECT_NE(result.out.find("against the dense float64 reference"), std::string::npos)
        << result.out;
    EXPECT_LT(relative_distance(values(input, "/expected/o"), values(file("out.h5"), "/output/o")),
              1e-11);
    const auto json = this->json("run.json");
    EXPECT_EQ(json["check"].size(), expectation.gradients.size() + 1);
    for (const std::string& name : expectation.gradients) {
      EXPECT_EQ(io::Reader(input).read("/expected_grad/" + name).extents(),
                io::Reader(file("out.h5")).read("/output_grad/" + name).extents())
          << expectation.fixture << " " << name;
      EXPECT_LT(relative_distance(values(input, "/expected_grad/" + name),
                                  values(file("out.h5"), "/output_grad/" + name)),
                1e-11)
          << expectation.fixture << " " << name;
    }
  }
}

TEST_F(Run, CommandLineOverridesTheFile) {
  Contents input = small_input();
  input.attributes["/config"] = {{"causal", 1}};
  input.datasets.emplace("/expected/o", ramp({2, 4, 3, 1}));  // of elu, so of no use to lln
  input.write(file("in.h5"));
  const Result result = run({"run", file("in.h5"), file("over.h5"), "--variant", "lln", "--full",
                             "--alpha", "-0.5", "--beta", "2", "--no-normalise", "--scale", "0.25",
                             "--backward", "--json", file("run.json")});
  ASSERT_TRUE(succeeded(result));
  EXPECT_EQ(json("run.json")["check"].size(), 0u);
  const Contents output = Contents::read(file("over.h5"));
  EXPECT_EQ(output.attributes.at("/").at("variant"), io::Value("lln"));
  const std::map<std::string, io::Value> config{
      {"alpha", -0.5}, {"beta", 2.0}, {"causal", 0}, {"normalise", 0}, {"scale", 0.25}};
  EXPECT_EQ(output.attributes.at("/config"), config);

  // The same said by the file gives the same.
  input.attributes["/"]["variant"] = "lln";
  input.attributes["/config"] = config;
  input.datasets.erase("/expected/o");
  input.write(file("in.h5"));
  ASSERT_TRUE(succeeded(run({"run", file("in.h5"), file("said.h5"), "--backward"})));
  EXPECT_EQ(output.datasets.size(), 6u);
  for (const auto& [path, array] : output.datasets)
    EXPECT_EQ(array.as<double>(), values(file("said.h5"), path)) << path;
  // And not what the file alone would give.
  EXPECT_NE(values(file("over.h5"), "/output/o"), ramp({2, 4, 3, 1}).as<double>());
}

TEST_F(Run, OptionReplacesValuesPerHead) {
  const std::string input = data("fixtures/lln_causal_gqa_per_head_n130.h5");
  ASSERT_TRUE(succeeded(run({"run", input, file("out.h5"), "--alpha", "1", "--backward"})));
  const Contents output = Contents::read(file("out.h5"));
  EXPECT_FALSE(output.datasets.contains("/config/alpha"));
  EXPECT_EQ(output.attributes.at("/config").at("alpha"), io::Value(1.0));
  EXPECT_EQ(output.datasets.at("/output_grad/alpha").extents(), Extents{});
  EXPECT_EQ(output.datasets.at("/config/beta").as<double>(), values(input, "/config/beta"));
  EXPECT_EQ(output.datasets.at("/output_grad/beta").extents(), Extents{2});
}

TEST_F(Run, StateGoesOutAndIn) {
  // The first 16 of 29 tokens, their state, and the other 13 from there: the same as all at once.
  const std::string whole = data("fixtures/extended/lln_causal_state_per_head.h5");
  ASSERT_TRUE(succeeded(
      run({"run", whole, file("whole.h5"), "--state", "--backward", "--json", file("run.json")})));
  const Contents result = Contents::read(file("whole.h5"));
  EXPECT_EQ(result.datasets.at("/output/state/shift").type(), io::ElementType::i64);
  EXPECT_LT(relative_distance(values(whole, "/expected_grad/state/S"),
                              result.datasets.at("/output_grad/state/S").as<double>()),
            1e-11);
  EXPECT_LT(relative_distance(values(whole, "/expected_grad/state/z"),
                              result.datasets.at("/output_grad/state/z").as<double>()),
            1e-11);
  EXPECT_EQ(json("run.json")["initial_state"], true);
  EXPECT_NE(json("run.json")["unchecked"].get<std::string>().find("states"), std::string::npos);

  const Contents original = Contents::read(whole);
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    Contents contents;
    contents.attributes["/"]["variant"] = "lln";
    contents.attributes["/config"] = original.attributes.at("/config");
    for (const auto& [path, array] : original.datasets) {
      if (path.starts_with("/config/")) contents.datasets.emplace(path, array);
      if (path != "/inputs/q" && path != "/inputs/k" && path != "/inputs/v") continue;
      contents.datasets.emplace(path, tokens(array, begin, end));
    }
    return contents;
  };
  const auto give_state = [](Contents& contents, const Contents& source, const std::string& group) {
    for (const char* name : {"S", "z", "shift"})
      contents.datasets["/inputs/state/" + std::string(name)] = source.datasets.at(group + name);
  };
  Contents first = part(0, 16);
  give_state(first, original, "/inputs/state/");
  first.write(file("first.h5"));
  ASSERT_TRUE(succeeded(run({"run", file("first.h5"), file("first_out.h5"), "--state"})));
  Contents second = part(16, 29);
  give_state(second, Contents::read(file("first_out.h5")), "/output/state/");
  second.write(file("second.h5"));
  ASSERT_TRUE(succeeded(run({"run", file("second.h5"), file("second_out.h5"), "--state"})));

  const std::vector<double> all = values(whole, "/expected/o"),
                            last = values(file("second_out.h5"), "/output/o");
  std::vector<double> tail;
  const std::size_t dv = original.datasets.at("/inputs/v").extents()[3];
  for (std::size_t head = 0; head < all.size() / (29 * dv); ++head)
    tail.insert(tail.end(), all.begin() + (head * 29 + 16) * dv,
                all.begin() + (head + 1) * 29 * dv);
  EXPECT_LT(relative_distance(tail, last), 1e-11);
  const Contents end = Contents::read(file("second_out.h5"));
  const auto true_sums = [](const Contents& contents) {
    std::vector<double> sums = contents.datasets.at("/output/state/z").as<double>();
    const auto shift = contents.datasets.at("/output/state/shift").as<std::int64_t>();
    for (std::size_t i = 0; i < sums.size(); ++i)
      sums[i] = std::ldexp(sums[i], static_cast<int>(shift[i]));
    return sums;
  };
  EXPECT_LT(relative_distance(true_sums(result), true_sums(end)), 1e-11);
}

/// Masks and packing are checked against the reference, which knows them too.
TEST_F(Run, MasksAndPackedSequences) {
  for (const char* name : {"elu_full_key_mask", "lln_causal_key_mask_huge", "elu_causal_packed"}) {
    const std::string input = data(std::string("fixtures/extended/") + name + ".h5");
    const Result result =
        run({"run", input, file("out.h5"), "--backward", "--json", file("run.json")});
    ASSERT_TRUE(succeeded(result)) << name;
    const auto json = this->json("run.json");
    EXPECT_GE(json["check"].size(), 4u) << name;
    const bool packed = std::string(name).find("packed") != std::string::npos;
    EXPECT_EQ(json["key_mask"], !packed);
    EXPECT_EQ(json["packed_sequences"].get<int>() > 0, packed);
    EXPECT_LT(relative_distance(values(input, "/expected/o"), values(file("out.h5"), "/output/o")),
              1e-11)
        << name;
  }
}

TEST_F(Run, RealData) {
  const std::string input = data("real/minilm.h5");
  const Result result =
      run({"run", input, file("out.h5"), "--variant", "lln", "--alpha", "1.5", "--beta", "1.25",
           "--causal", "--backward", "--check", "--repeat", "3", "--json", file("run.json")});
  ASSERT_TRUE(succeeded(result));
  const auto json = this->json("run.json");
  EXPECT_EQ(json["command"], "run");
  EXPECT_EQ(json["input"], input);
  EXPECT_EQ(json["output"], file("out.h5"));
  EXPECT_EQ(json["variant"], "lln");
  EXPECT_EQ(json["causal"], true);
  EXPECT_EQ(json["parameters"]["alpha"], std::vector<double>(12, 1.5));
  EXPECT_EQ(json["dtype"], "f32");
  EXPECT_EQ(json["problem"]["heads"], 12);
  for (const char* pass : {"forward", "backward"}) {
    EXPECT_GT(json[pass]["seconds"], 0) << pass;
    EXPECT_EQ(json[pass]["runs"].size(), 3u) << pass;
    EXPECT_GT(json[pass]["workspace_bytes"], 0) << pass;
    EXPECT_GT(json[pass]["plan"]["chunk"], 0) << pass;
  }
  Strings quantities;
  for (const auto& check : json["check"]) {
    quantities.push_back(check["quantity"]);
    EXPECT_EQ(check["ok"], true) << check;
    EXPECT_LT(check["error"], 2e-5) << check;
    EXPECT_GT(check["error"], 0) << check;
  }
  EXPECT_EQ(quantities, (Strings{"o", "q", "k", "v", "alpha", "beta"}));
  for (const char* text :
       {"problem    B=2 H=12 Hkv=12 Nq=125 Nk=125 D=32 Dv=32", "lln, causal, normalised",
        "forward ", "backward ", "workspace", "dalpha", "dbeta", "output "})
    EXPECT_NE(result.out.find(text), std::string::npos) << text << "\n" << result.out;
}

/// Stored in 16 bits, written as float32, states in the type of the sums.
TEST_F(Run, SixteenBits) {
  const std::string input = data("fixtures/lln_causal_gqa_per_head_n130.h5");
  for (const auto& [dtype, unit] : {std::pair{"f16", 0x1p-11}, std::pair{"bf16", 0x1p-8}}) {
    const Result result = run({"run", input, file("out.h5"), "--dtype", dtype, "--backward",
                               "--state", "--json", file("run.json")});
    ASSERT_TRUE(succeeded(result));
    EXPECT_NE(result.out.find(std::string(", ") + dtype + "\n"), std::string::npos) << result.out;
    const auto json = this->json("run.json");
    EXPECT_EQ(json["dtype"], dtype);
    EXPECT_EQ(json["check"].size(), 6u);
    const Contents output = Contents::read(file("out.h5"));
    for (const auto& [path, array] : output.datasets)
      if (!path.starts_with("/config/") && path != "/output/state/shift") {
        EXPECT_EQ(array.type(), io::ElementType::f32) << path;
      }
    const std::vector<double> o = values(file("out.h5"), "/output/o");
    EXPECT_LT(relative_distance(values(input, "/expected/o"), o), 8 * unit);
    // Every number of o is one of the type, and not every number of the state.
    const auto is_of_type = [unit](double x) {
      int exponent = 0;
      const double scaled = std::frexp(x, &exponent) / unit;
      return scaled == std::rint(scaled);
    };
    EXPECT_TRUE(std::all_of(o.begin(), o.end(), is_of_type));
    const auto z = values(file("out.h5"), "/output/state/z");
    EXPECT_FALSE(std::all_of(z.begin(), z.end(), is_of_type));
  }
}

/// Inputs that are numbers of the type already are taken as they are.
TEST_F(Run, HalfPrecisionFile) {
  ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--nq", "40", "--d", "3", "--variant",
                             "elu", "--causal", "--dtype", "f16", "--seed", "3"})));
  ASSERT_TRUE(succeeded(run({"run", file("in.h5"), file("wide.h5"), "--backward"})));
  ASSERT_TRUE(succeeded(
      run({"run", file("in.h5"), file("half.h5"), "--backward", "--check", "--dtype", "f16"})));
  EXPECT_EQ(json_of(run({"run", file("in.h5"), file("other.h5"), "--json", "-"}))["dtype"], "f32");
  for (const char* path : {"/output/o", "/output_grad/v"}) {
    const auto wide = values(file("wide.h5"), path), half = values(file("half.h5"), path);
    for (std::size_t i = 0; i < wide.size(); ++i)
      EXPECT_NEAR(half[i], wide[i], 0x1.01p-11 * std::abs(wide[i]) + 0x1p-24) << path << " " << i;
  }
}

TEST_F(Run, NumbersTooLargeForTheType) {
  Contents input = small_input();
  input["/inputs/v"].values<double>()[13] = -65520;
  input.write(file("in.h5"));
  const Arguments arguments{"run", file("in.h5"), file("out.h5"), "--dtype"};
  const auto with = [&](const char* dtype) {
    Arguments all = arguments;
    all.push_back(dtype);
    return run(all);
  };
  EXPECT_TRUE(
      complained(with("f16"), 2,
                 {file("in.h5"), "/inputs/v", "at most 65504", "f16", "-65520", "[1, 0, 3, 0]"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
  EXPECT_TRUE(succeeded(with("bf16")));
  // 65519 rounds to 65504; a hidden key may hold anything.
  input["/inputs/v"].values<double>()[13] = -65519;
  input.write(file("in.h5"));
  EXPECT_TRUE(succeeded(with("f16")));
  input["/inputs/v"].values<double>()[13] = 1e300;
  io::Array mask(io::ElementType::u8, {2, 5});
  for (std::uint8_t& visible : mask.values<std::uint8_t>()) visible = 1;
  mask.values<std::uint8_t>()[5 + 3] = 0;
  input.datasets.emplace("/inputs/key_mask", mask);
  input.write(file("in.h5"));
  EXPECT_TRUE(succeeded(with("f16")));
  const auto o = values(file("out.h5"), "/output/o");
  EXPECT_TRUE(std::all_of(o.begin(), o.end(), [](double x) { return std::isfinite(x); }));
}

/// Gradients that are exactly 0 (one feature cancels in the ratio), and denominators that cancel: the error is
/// held against the terms, not against what is left of them.
TEST_F(Run, ChecksWhatCancels) {
  for (const Arguments& shape : {Arguments{"--d", "1", "--variant", "elu"}, Arguments{"--d", "3", "--variant", "identity"}}) {
    Arguments generate{"generate", file("in.h5"), "--nq", "200", "--seed", "1"};
    generate.insert(generate.end(), shape.begin(), shape.begin() + 2);
    ASSERT_TRUE(succeeded(run(generate)));
    for (const char* dtype : {"f32", "f64"}) {
      Arguments arguments{"run", file("in.h5"), file("out.h5"), "--normalise", "--backward", "--check", "--dtype", dtype};
      arguments.insert(arguments.end(), shape.begin() + 2, shape.end());
      EXPECT_TRUE(succeeded(run(arguments)));
    }
  }
}

TEST_F(Run, CheckCanFail) {
  // Sums of exponentials that float64 holds and float32 does not.
  ASSERT_TRUE(
      succeeded(run({"generate", file("in.h5"), "--nq", "20", "--d", "3", "--seed", "1"})));
  const Arguments arguments{"run",     file("in.h5"), file("out.h5"), "--variant",      "lln", "--alpha",
                            "60",      "--beta",      "60",           "--no-normalise", "--dtype", "f32",
                            "--check"};
  const Result result = run(arguments);
  EXPECT_TRUE(complained(result, 1, {file("out.h5"), "expected", "found", "tolerance"}));
  EXPECT_NE(result.out.find("FAIL"), std::string::npos) << result.out;
}

TEST_F(Run, JsonOnStandardOutputIsAlone) {
  small_input().write(file("in.h5"));
  const Result result = run({"run", file("in.h5"), file("out.h5"), "--json", "-"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_EQ(nlohmann::json::parse(result.out)["command"], "run");
}

TEST_F(Run, SameBitsWhateverTheThreads) {
  ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--batch", "2", "--heads", "3", "--nq",
                             "150", "--d", "5", "--dv", "7", "--seed", "11"})));
  for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
    std::string first;
    for (const char* threads : {"1", "2", "3"})
      for (const char* space : {"", "serial"}) {
        Arguments arguments{"run",        file("in.h5"), file("out.h5"), "--variant", "lln",
                            "--alpha",    "1",           "--beta",       "1",         "--causal",
                            "--backward", "--dtype",     dtype,          "--chunk",   "16",
                            "--segments", "3",           "--repeat",     "2"};
        if (*space != '\0') arguments.insert(arguments.end(), {"--space", space});
        ASSERT_TRUE(succeeded(run(arguments, {{"OMP_NUM_THREADS", threads}})));
        const std::string output = read_file(file("out.h5"));
        if (first.empty()) first = output;
        EXPECT_TRUE(output == first) << dtype << " " << threads << " threads, space " << space;
      }
  }
}

TEST_F(Run, EmptyProblems) {
  const Extents shapes[] = {{0, 2, 3, 3, 2, 2}, {1, 2, 0, 0, 2, 2}, {1, 2, 3, 0, 2, 2},
                            {1, 2, 3, 3, 0, 2}, {1, 2, 3, 3, 2, 0}, {1, 2, 1, 1, 2, 2}};
  for (const Extents& n : shapes) {
    const auto text = [&](std::size_t i) { return std::to_string(n[i]); };
    ASSERT_TRUE(succeeded(
        run({"generate", file("in.h5"), "--batch", text(0), "--heads", text(1), "--nq", text(2),
             "--nk", text(3), "--d", text(4), "--dv", text(5), "--variant", "lln"})));
    EXPECT_TRUE(succeeded(run({"run", file("in.h5"), file("out.h5"), "--backward"})))
        << ::testing::PrintToString(n);
    EXPECT_TRUE(succeeded(run({"verify", file("in.h5")}))) << ::testing::PrintToString(n);
  }
}

}  // namespace
}  // namespace LinAttn::test_app
