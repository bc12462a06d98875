// SPDX-License-Identifier: BSD-3-Clause

// Affine attention, of whose settings the program has the most.

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <linattn/io/reader.hpp>
#include <linattn/io/views.hpp>
#include <linattn/linattn.hpp>
#include <linattn/variants.hpp>
#include <numeric>
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
using Config = std::map<std::string, io::Value>;

const std::string with_states = "fixtures/extended/affine_causal_state_gqa.h5";

/// q (2,4,6,3), k (2,2,6,3), v (2,2,6,5), far from 0, and a cotangent.
Contents affine_input() {
  Contents contents;
  contents.attributes["/"] = {{"variant", "affine"}};
  contents.datasets = {{"/inputs/q", waves({2, 4, 6, 3}, 1)},
                       {"/inputs/k", waves({2, 2, 6, 3}, 2)},
                       {"/inputs/v", waves({2, 2, 6, 5}, 3)},
                       {"/cotangent/o", waves({2, 4, 6, 5}, 4)}};
  for (double& x : contents["/inputs/v"].values<double>()) x += 20;
  return contents;
}

Arguments joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class AffineProgram : public ProgramTest {
 protected:
  Result run_with(const Arguments& options) {
    return run(joined({"run", file("in.h5"), file("out.h5")}, options));
  }
  void expect_refused(const Contents& contents, const Strings& words,
                      const Arguments& options = {}) {
    contents.write(file("in.h5"));
    EXPECT_TRUE(complained(run_with(options), 2, joined(words, {file("in.h5") + ": "})));
    EXPECT_EQ(files(), Strings{"in.h5"});
  }
};

#if defined(KOKKOS_ENABLE_SERIAL)

/// What the program is asked for, and the same in the library's words.
struct Request {
  Arguments options;
  Config config;  ///< what the options are in a file
  Affine variant;
  Options call;
  bool changes_o = true;  ///< beyond rounding
};

std::vector<Request> requests() {
  const auto affine = [](const std::function<void(Affine&)>& change) {
    Affine variant;
    change(variant);
    return variant;
  };
  std::vector<Request> all{
      {{}, {}, {}, {}, false},
      {{"--a", "0.75", "--b", "1.25", "--scale", "-0.5"},
       {{"a", 0.75}, {"b", 1.25}, {"scale", -0.5}},
       affine([](Affine& v) { v.a = 0.75, v.b = 1.25, v.scale = -0.5; }),
       {}},
      {{"--qk-norm", "none", "--b", "3"},
       {{"qk_norm", "none"}, {"b", 3.0}},
       affine([](Affine& v) { v.qk_norm = QkNorm::none, v.b = 3.0; }),
       {}},
      {{"--qk-norm", "max"},
       {{"qk_norm", "max"}},
       affine([](Affine& v) { v.qk_norm = QkNorm::max; }),
       {}},
      {{"--qk-norm", "max", "--causal", "--max-norm-sees-future"},
       {{"qk_norm", "max"}, {"causal", 1}},
       affine([](Affine& v) { v.qk_norm = QkNorm::max, v.max_norm_sees_future = true; }),
       {.causal = true}},
      {{"--norm-eps", "0.25"},
       {{"norm_eps", 0.25}},
       affine([](Affine& v) { v.norm_eps = 0.25; }),
       {}},
      {{"--small-g", "clamp", "--g-min", "1.125"},
       {{"small_g", "clamp"}, {"g_min", 1.125}},
       {},
       {.small_normaliser = SmallNormaliser::clamp, .least_normaliser = 1.125}},
      {{"--small-g", "ignore", "--g-min", "100"},
       {{"small_g", "ignore"}, {"g_min", 100.0}},
       {},
       {.small_normaliser = SmallNormaliser::ignore, .least_normaliser = 100},
       false},
      {{"--center-v"}, {{"center_v", 1}}, {}, {.center_v = true}, false},
      {{"--dropout-p", "0.5", "--seed", "18446744073709551615", "--offset", "4294967297"},
       {{"dropout_p", 0.5}, {"seed", ~std::uint64_t{0}}, {"offset", std::uint64_t{4294967297}}},
       {},
       {.dropout = {.p = 0.5, .seed = ~std::uint64_t{0}, .offset = 4294967297}}},
      {{"--no-normalise", "--scale", "0.5"},
       {{"normalise", 0}, {"scale", 0.5}},
       affine([](Affine& v) { v.scale = 0.5; }),
       {.normalise = false}},
  };
  return all;
}

/// Output and gradients of a direct call, as the program stores them.
std::map<std::string, std::vector<double>> library_results(const Contents& input,
                                                           const Request& request) {
  using Exec = Kokkos::Serial;
  using Tensor = Kokkos::View<double****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using PerHead = Kokkos::View<double*, Kokkos::HostSpace>;
  const Exec exec;
  const auto read = [&](const std::string& path) {
    const io::Array& array = input.datasets.at(path);
    const auto n = [&](int r) { return static_cast<std::size_t>(array.extent(r)); };
    const Tensor view("input", n(0), n(1), n(2), n(3));
    io::copy_into(exec, array, view);
    return view;
  };
  const Tensor q = read("/inputs/q"), k = read("/inputs/k"), v = read("/inputs/v"),
               d_o = read("/cotangent/o");
  const Tensor o("o", 2, 4, 6, 5), centred("centred", 2, 4, 6, 5), d_q("d_q", 2, 4, 6, 3),
      d_k("d_k", 2, 2, 6, 3), d_v("d_v", 2, 2, 6, 5);
  const Kokkos::View<double***, Kokkos::HostSpace> sums("sums", 2, 4, 6);
  const PerHead d_a("d_a", 4), d_b("d_b", 4), d_scale("d_scale", 4);
  Saved<Exec, double> saved{.o = o, .denominator = sums};
  if (request.call.center_v) saved.centred = centred;
  const Inputs<Exec, double> inputs{.q = q, .k = k, .v = v};
  forward<double>(exec, request.variant, inputs, saved, request.call);
  backward<double>(
      exec, request.variant, inputs, saved, d_o,
      {.q = d_q, .k = d_k, .v = d_v, .query_parameter = d_a, .constant = d_b, .scale = d_scale},
      request.call);
  const auto all = [](const auto& view) {
    return std::vector<double>(view.data(), view.data() + view.size());
  };
  const auto sum = [&](const PerHead& view) {
    const auto values = all(view);
    return std::vector<double>{std::accumulate(values.begin(), values.end(), 0.0)};
  };
  return {{"/output/o", all(o)},
          {"/output_grad/q", all(d_q)},
          {"/output_grad/k", all(d_k)},
          {"/output_grad/v", all(d_v)},
          {"/output_grad/a", sum(d_a)},
          {"/output_grad/b", sum(d_b)},
          {"/output_grad/scale", sum(d_scale)}};
}

TEST_F(AffineProgram, EveryOptionIsThatOfTheLibrary) {
  Contents input = affine_input();
  input.write(file("in.h5"));
  std::vector<double> standard;
  std::set<std::vector<double>> outputs;
  for (const Request& request : requests()) {
    const std::string text = ::testing::PrintToString(request.options);
    ASSERT_TRUE(succeeded(run_with(
        joined({"--backward", "--space", "serial", "--json", file("run.json")}, request.options))))
        << text;
    const Contents output = Contents::read(file("out.h5"));
    const auto expected = library_results(input, request);
    EXPECT_EQ(output.datasets.size(), expected.size()) << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(output.datasets.at(path).as<double>(), values) << text << " " << path;
    for (const char* name : {"a", "b", "scale"})
      EXPECT_EQ(output.datasets.at(std::string("/output_grad/") + name).extents(), Extents{})
          << name;
    const auto& o = expected.at("/output/o");
    if (standard.empty()) standard = o;
    EXPECT_EQ(relative_distance(standard, o) > 1e-6, request.changes_o) << text;
    if (request.changes_o || outputs.empty()) {
      EXPECT_TRUE(outputs.insert(o).second) << text;
    }

    const Config written =
        output.attributes.contains("/config") ? output.attributes.at("/config") : Config{};
    EXPECT_EQ(written, request.config) << text;
    const auto json = this->json("run.json");
    for (const auto& [name, value] : request.config) {
      const auto& shown = json["settings"][name];
      if (value.is_string())
        EXPECT_EQ(shown, value.as_string()) << name;
      else if (value.is_real())
        EXPECT_EQ(shown, value.as_double()) << name;
      else
        EXPECT_EQ(shown.get<std::uint64_t>(), value.as_uint64()) << name;
    }
    EXPECT_EQ(json["settings"].size(), 13u);
    EXPECT_EQ(json["max_norm_sees_future"], request.variant.max_norm_sees_future);
    const std::size_t sums = 2 * 4 * 6 * 8, rows = 2 * 4 * 6 * 5 * 8;
    EXPECT_EQ(json["saved_bytes"], sums + (request.call.center_v ? rows : 0)) << text;

    // The same said by the file gives the same.
    Contents said = input;
    said.attributes["/config"] = request.config;
    said.write(file("said.h5"));
    Arguments again{"run", file("said.h5"), file("said_out.h5"), "--backward", "--space", "serial"};
    if (request.variant.max_norm_sees_future) again.push_back("--max-norm-sees-future");
    ASSERT_TRUE(succeeded(run(again))) << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(test_app::values(file("said_out.h5"), path), values) << text << " " << path;
  }
}

#endif

TEST_F(AffineProgram, OptionsOverrideTheFileAndAreShown) {
  Contents input = affine_input();
  input.attributes["/config"] = {{"dropout_p", 0.5}, {"seed", 3}, {"qk_norm", "none"},
                                 {"center_v", 1},    {"a", 2.0},  {"b", 7.0}};
  input.write(file("in.h5"));
  Result result = run_with({"--json", file("run.json")});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("affine, full, normalised, a 2, b 7, scale 0.57735, qk_norm none, "
                            "center_v 1, dropout_p 0.5, seed 3\n"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(json("run.json")["scale"].get<double>(), 1 / std::sqrt(3.0));
  EXPECT_EQ(json("run.json")["parameters"]["a"], std::vector<double>(4, 2));
  EXPECT_EQ(json("run.json")["parameters"]["scale"], std::vector<double>(4, 1 / std::sqrt(3.0)));
  result = run_with({"--dropout-p", "0", "--no-center-v", "--qk-norm", "l2", "--seed", "0",
                     "--small-g", "ignore", "--causal"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("affine, causal, normalised, a 2, b 7, scale 1, small_g ignore\n"),
            std::string::npos)
      << result.out;
  const Config config{{"dropout_p", 0.0}, {"seed", 0}, {"qk_norm", "l2"},     {"center_v", 0},
                      {"a", 2.0},         {"b", 7.0},  {"small_g", "ignore"}, {"causal", 1}};
  EXPECT_EQ(Contents::read(file("out.h5")).attributes.at("/config"), config);
}

/// A row whose sum of weights is next to nothing stops run and verify, unless asked otherwise.
TEST_F(AffineProgram, SmallRowSums) {
  const std::string bad = data("bad/affine_small_g_found.h5");
  const Strings where{bad + ": ", "sequence 1, head 2, row 1 is ", "at least 1e-06",
                      "small_g='clamp'", "--small-g clamp"};
  for (const char* dtype : {"f64", "f32"})
    EXPECT_TRUE(complained(run({"run", bad, file("out.h5"), "--backward", "--dtype", dtype,
                                "--json", file("run.json")}),
                           2, where))
        << dtype;
  EXPECT_TRUE(complained(run({"run", bad, file("out.h5"), "--g-min", "1e-9"}), 2,
                         {"9.31323e-10", "at least 1e-09"}));
  EXPECT_EQ(files(), Strings{});
  for (const Arguments& options : {Arguments{"--small-g", "clamp"},
                                   {"--small-g", "ignore"},
                                   {"--g-min", "1e-10"},
                                   {"--b", "1.5"},
                                   {"--no-normalise"}})
    EXPECT_TRUE(succeeded(run(joined({"run", bad, file("out.h5"), "--backward"}, options))))
        << options[0] << " " << options.back();
  // A clamped row is not what it was.
  ASSERT_TRUE(succeeded(run({"run", bad, file("clamp.h5"), "--small-g", "clamp"})));
  ASSERT_TRUE(succeeded(run({"run", bad, file("ignore.h5"), "--small-g", "ignore"})));
  EXPECT_GT(relative_distance(values(file("ignore.h5"), "/output/o"),
                              values(file("clamp.h5"), "/output/o")),
            0.5);

  Contents contents = Contents::read(bad);
  contents.datasets.emplace("/expected/o", io::Array(values(file("ignore.h5"), "/output/o"),
                                                     contents["/cotangent/o"].extents()));
  contents.write(file("v.h5"));
  const std::string good = data("fixtures/affine_full_defaults.h5");
  const Result result = run({"verify", file("v.h5"), good, "--json", file("v.json")});
  EXPECT_TRUE(
      complained(result, 2, joined({"linattn verify: " + file("v.h5")}, {where[1], where[3]})));
  EXPECT_EQ(json("v.json")["unusable_files"], 1);
  EXPECT_GT(json("v.json")["files"][1]["comparisons"].size(), 0u);
  contents.attributes["/config"]["small_g"] = "ignore";
  contents.write(file("v.h5"));
  EXPECT_TRUE(succeeded(run({"verify", file("v.h5"), "--dtype", "f64"})));
}

TEST_F(AffineProgram, RefusesWhatDoesNotGoTogether) {
  const auto with = [](Config config) {
    Contents contents = affine_input();
    contents.attributes["/config"] = std::move(config);
    return contents;
  };
  expect_refused(affine_input(), {"a = b = 0"}, {"--a", "0", "--b", "0"});
  expect_refused(with({{"a", 0.0}, {"b", 0.0}}), {"a = b = 0"});
  expect_refused(affine_input(), {"qk_norm max", "causal"}, {"--qk-norm", "max", "--causal"});
  expect_refused(affine_input(), {"center_v", "normalised"}, {"--center-v", "--no-normalise"});
  expect_refused(affine_input(), {"center_v", "state"}, {"--center-v", "--state"});
  expect_refused(with({{"dropout_p", -0.1}}),
                 {"'dropout_p'", "a finite number >= 0", "found -0.1"});
  expect_refused(with({{"dropout_p", "much"}}), {"'dropout_p'", "a finite number >= 0", "'much'"});
  expect_refused(with({{"norm_eps", -1.0}}), {"'norm_eps'", "a finite number >= 0", "found -1"});
  expect_refused(with({{"g_min", INFINITY}}), {"'g_min'", "a finite number >= 0", "found inf"});
  expect_refused(with({{"scale", NAN}}), {"'scale'", "a finite number", "found nan"});
  expect_refused(with({{"small_g", "warn"}}),
                 {"'small_g'", "one of check, clamp, ignore", "'warn'"});
  expect_refused(with({{"qk_norm", 2}}), {"'qk_norm'", "one of l2, none, max", "found 2"});
  expect_refused(with({{"center_v", 2}}), {"'center_v'", "0 or 1", "found 2"});
  expect_refused(with({{"seed", -1}}), {"'seed'", "from 0 to 2^64 - 1", "found -1"});
  expect_refused(with({{"offset", 0.5}}), {"'offset'", "0.5"});
  expect_refused(with({{"alpha", 1.0}}), {"'alpha'", "qk_norm", "variant affine"});
  Contents per_head = affine_input();
  per_head.datasets.emplace("/config/a", io::Array(std::vector<double>{1, 2, 3, 4}, {4}));
  expect_refused(per_head, {"/config/a", "none for variant affine"});
}

/// An option that the variant in effect does not have is refused by its name.
TEST_F(AffineProgram, OptionsOfOtherVariants) {
  small_input().write(file("in.h5"));
  const Arguments options[] = {{"--a", "1"},        {"--b", "1"},           {"--qk-norm", "l2"},
                               {"--norm-eps", "1"}, {"--small-g", "clamp"}, {"--g-min", "1"},
                               {"--center-v"},      {"--no-center-v"},      {"--dropout-p", "1"},
                               {"--seed", "1"},     {"--offset", "1"}};
  for (const Arguments& option : options) {
    std::string name = option[0].substr(option[0].starts_with("--no-c") ? 5 : 2);
    std::replace(name.begin(), name.end(), '-', '_');
    const std::string text = "variant elu has no " + name + "; it has causal, normalise, scale";
    EXPECT_TRUE(complained(run_with(option), 2, {text})) << option[0];
    Arguments generate =
        joined({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--variant", "elu"}, option);
    if (name == "seed") generate[8] = "--dropout-seed";
    EXPECT_TRUE(complained(run(generate), 2, {text})) << option[0];
  }
  EXPECT_TRUE(complained(run_with({"--max-norm-sees-future"}), 2,
                         {"--max-norm-sees-future: variant elu has no qk_norm"}));
  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--variant",
                              "elu", "--max-norm-sees-future"}),
                         2, {"--max-norm-sees-future: variant elu has no qk_norm"}));
  EXPECT_EQ(files(), Strings{"in.h5"});
}

TEST_F(AffineProgram, StateGoesOutAndIn) {
  const std::string whole = data(with_states);
  ASSERT_TRUE(succeeded(run({"run", whole, file("whole.h5"), "--state", "--backward"})));
  const Contents result = Contents::read(file("whole.h5"));
  EXPECT_EQ(result.datasets.at("/output/state/m").type(), io::ElementType::i64);
  for (const char* name : {"S", "z", "t", "m"}) {
    const std::string dataset = std::string("state/") + name;
    EXPECT_LT(relative_distance(values(whole, "/expected/" + dataset),
                                result.datasets.at("/output/" + dataset).as<double>()),
              1e-11)
        << name;
    EXPECT_EQ(result.datasets.contains("/output_grad/" + dataset), std::string(name) != "m");
  }
  EXPECT_LT(relative_distance(values(whole, "/expected_grad/state/t"),
                              result.datasets.at("/output_grad/state/t").as<double>()),
            1e-11);

  // The first 7 tokens, their state, and the others from there: the same as all at once.
  const Contents original = Contents::read(whole);
  const std::int64_t n = original.datasets.at("/inputs/q").extent(2), cut = 7;
  const auto part = [&](std::int64_t begin, std::int64_t end, const Contents& before,
                        const std::string& group, const std::string& name) {
    Contents contents;
    contents.attributes["/"]["variant"] = "affine";
    contents.attributes["/config"] = original.attributes.at("/config");
    for (const char* path : {"/inputs/q", "/inputs/k", "/inputs/v"})
      contents.datasets.emplace(path, tokens(original.datasets.at(path), begin, end));
    for (const char* sum : {"S", "z", "t", "m"})
      contents.datasets["/inputs/state/" + std::string(sum)] = before.datasets.at(group + sum);
    contents.write(file(name));
    EXPECT_TRUE(succeeded(run({"run", file(name), file("out_" + name), "--state"})));
    return Contents::read(file("out_" + name));
  };
  const Contents first = part(0, cut, original, "/inputs/state/", "first.h5");
  const Contents second = part(cut, n, first, "/output/state/", "second.h5");
  EXPECT_LT(relative_distance(tokens(result.datasets.at("/output/o"), cut, n).as<double>(),
                              second.datasets.at("/output/o").as<double>()),
            1e-11);
  for (const char* sum : {"S", "z", "t", "m"}) {
    const std::string dataset = std::string("/output/state/") + sum;
    EXPECT_LT(relative_distance(result.datasets.at(dataset).as<double>(),
                                second.datasets.at(dataset).as<double>()),
              1e-11)
        << sum;
  }
}

TEST_F(AffineProgram, StatesThatAreNone) {
  const Contents original = Contents::read(data(with_states));
  Contents contents = original;
  contents["/inputs/state/m"].values<std::int64_t>()[0] = -3;
  expect_refused(contents, {"/inputs/state/m", "numbers of keys >= 0", "-3 at [0]"});
  for (const char* name : {"S", "z", "t", "m"}) {
    contents = original;
    contents.datasets.erase(std::string("/inputs/state/") + name);
    expect_refused(contents, {std::string("/inputs/state/") + name, "found nothing"});
  }
  contents = original;
  contents["/inputs/state/m"] = waves({1}, 1);
  expect_refused(contents, {"/inputs/state/m", "int64", "float64"});
  contents = original;
  contents["/inputs/state/t"] = waves({1, 2, 3}, 1);
  expect_refused(contents, {"/inputs/state/t", "Dv = 5"});
  contents = original;
  contents["/cotangent/state/t"] = waves({1, 2, 3}, 1);
  expect_refused(contents, {"/cotangent/state/t", "Dv = 5"}, {"--backward"});
}

/// The cotangent of each part of the final state reaches the gradients; a missing one is 0.
TEST_F(AffineProgram, CotangentsOfStates) {
  const Contents original = Contents::read(data(with_states));
  const auto gradient_of_t = [&](const Contents& contents) {
    contents.write(file("in.h5"));
    EXPECT_TRUE(succeeded(run_with({"--backward"})));
    return values(file("out.h5"), "/output_grad/state/t");
  };
  const auto with = gradient_of_t(original);
  Contents changed = original;
  changed.datasets.erase("/cotangent/state/t");
  const auto without = gradient_of_t(changed);
  changed.datasets["/cotangent/state/t"] =
      io::Array(std::vector<double>(
                    static_cast<std::size_t>(original.datasets.at("/cotangent/state/t").size())),
                original.datasets.at("/cotangent/state/t").extents());
  EXPECT_EQ(gradient_of_t(changed), without);
  const auto cotangent = original.datasets.at("/cotangent/state/t").as<double>();
  ASSERT_EQ(with.size(), cotangent.size());
  for (std::size_t i = 0; i < with.size(); ++i)  // the final t is the initial one and more
    EXPECT_NEAR(with[i] - without[i], cotangent[i], 1e-13);
}

struct Change {
  const char* dataset;
  std::size_t element;
  const char* index;
};

TEST_F(AffineProgram, VerifyFindsOneChangedNumber) {
  const Contents original = Contents::read(data(with_states));
  original.write(file("same.h5"));
  const Result same = run({"verify", file("same.h5"), "--json", file("v.json")});
  ASSERT_TRUE(succeeded(same));
  std::set<std::string> datasets;
  const auto whole = json("v.json");
  for (const auto& c : whole["files"][0]["comparisons"]) datasets.insert(c["dataset"]);
  EXPECT_EQ(datasets.size(), 1u + 4 + 6 + 3);
  EXPECT_EQ(whole["skipped"], 2);
  EXPECT_EQ(whole["files"][0]["settings"]["b"], 1.75);
  // S (1,2,3,5), z (1,2,3), t (1,2,5), m (1)
  const Change changes[] = {{"/expected/state/t", 7, "[0, 1, 2]"},
                            {"/expected/state/S", 16, "[0, 1, 0, 1]"},
                            {"/expected/state/z", 5, "[0, 1, 2]"},
                            {"/expected_grad/state/t", 9, "[0, 1, 4]"},
                            {"/expected_grad/a", 0, "/expected_grad/a expected"},
                            {"/expected_grad/b", 0, "/expected_grad/b expected"},
                            {"/expected_grad/scale", 0, "/expected_grad/scale expected"}};
  for (const Change& change : changes) {
    Contents contents = original;
    double largest = 0;
    const auto elements = contents[change.dataset].values<double>();
    for (const double x : elements) largest = std::max(largest, std::abs(x));
    elements[change.element] += 1e-3 * largest;
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5")}), 1,
                           {file("changed.h5"), change.dataset, change.index}));
  }
  // A number of keys has no tolerance, whatever the file says.
  Contents contents = original;
  contents["/expected/state/m"].values<std::int64_t>()[0] += 1;
  contents.attributes["/expected"]["rtol_f64"] = contents.attributes["/expected"]["rtol_f32"] = 0.5;
  contents.write(file("changed.h5"));
  for (const char* dtype : {"f64", "f32"})
    EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--dtype", dtype, "--brief"}), 1,
                           {"/expected/state/m[0] expected", "tolerance 0"}));
}

TEST_F(AffineProgram, VerifyMayBeToldOfTheFuture) {
  Contents contents = affine_input();
  contents.attributes["/config"] = {{"qk_norm", "max"}, {"causal", 1}};
  contents.write(file("in.h5"));
  ASSERT_TRUE(succeeded(run_with({"--max-norm-sees-future"})));
  contents.datasets.emplace("/expected/o", Contents::read(file("out.h5")).datasets.at("/output/o"));
  contents.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2, {file("in.h5"), "qk_norm max"}));
  EXPECT_TRUE(
      succeeded(run({"verify", file("in.h5"), "--max-norm-sees-future", "--dtype", "f64"})));
}

/// Settings whose expectations the dense reference makes, each with what has to be in the file.
TEST_F(AffineProgram, GeneratedFilesVerify) {
  const std::pair<Arguments, Config> cases[] = {
      {{}, {}},
      {{"--a", "0.5", "--b", "2", "--scale", "1.5", "--causal"},
       {{"a", 0.5}, {"b", 2.0}, {"scale", 1.5}, {"causal", 1}}},
      {{"--qk-norm", "none", "--b", "9"}, {{"qk_norm", "none"}, {"b", 9.0}}},
      {{"--qk-norm", "max", "--norm-eps", "0"}, {{"qk_norm", "max"}, {"norm_eps", 0.0}}},
      {{"--small-g", "clamp", "--g-min", "1.125"}, {{"small_g", "clamp"}, {"g_min", 1.125}}},
      {{"--small-g", "ignore", "--center-v"}, {{"small_g", "ignore"}, {"center_v", 1}}},
      {{"--dropout-p", "0.25", "--dropout-seed", "9223372036854775808", "--offset", "5"},
       {{"dropout_p", 0.25}, {"seed", std::uint64_t{1} << 63}, {"offset", 5}}},
      {{"--no-normalise", "--scale", "0.5"}, {{"normalise", 0}, {"scale", 0.5}}},
  };
  std::set<std::vector<double>> outputs;
  for (const auto& [options, config] : cases) {
    const std::string text = ::testing::PrintToString(options);
    ASSERT_TRUE(
        succeeded(run(joined({"generate",   file("g.h5"), "--batch", "2",           "--heads", "4",
                              "--kv-heads", "2",          "--nq",    "20",          "--nk",    "29",
                              "--d",        "5",          "--dv",    "3",           "--seed",  "3",
                              "--variant",  "affine",     "--json",  file("g.json")},
                             options))))
        << text;
    const Contents contents = Contents::read(file("g.h5"));
    EXPECT_EQ(
        contents.attributes.contains("/config") ? contents.attributes.at("/config") : Config{},
        config)
        << text;
    EXPECT_EQ(contents.attributes.at("/").at("seed"), io::Value(3));
    for (const char* name : {"a", "b", "scale"})
      EXPECT_EQ(contents.datasets.at(std::string("/expected_grad/") + name).extents(), Extents{});
    EXPECT_EQ(json("g.json")["settings"].size(), 13u);
    outputs.insert(contents.datasets.at("/expected/o").as<double>());
    const Result result = run({"verify", file("g.h5"), "--json", file("v.json")});
    EXPECT_TRUE(succeeded(result)) << text;
    EXPECT_EQ(json("v.json")["skipped"], 0) << text;
    // and with the settings of the file unsaid: the same by a command line
    for (const char* dtype : {"f64", "f32", "bf16"}) {
      Arguments arguments{"run",     file("g.h5"), file("out.h5"), "--backward",    "--check",
                          "--dtype", dtype,        "--json",       file("run.json")};
      EXPECT_TRUE(succeeded(run(arguments))) << text << " " << dtype;
      EXPECT_EQ(json("run.json")["check"].size(), 7u);
    }
  }
  EXPECT_EQ(outputs.size(), std::size(cases) - 1) << "centred values are the same numbers";
}

TEST_F(AffineProgram, GenerateRefusesWhatRunWould) {
  const Arguments generate{"generate", file("g.h5"), "--nq",      "4",
                           "--d",      "2",          "--variant", "affine"};
  EXPECT_TRUE(complained(run(joined(generate, {"--a", "0", "--b", "0"})), 2, {"a = b = 0"}));
  EXPECT_TRUE(
      complained(run(joined(generate, {"--qk-norm", "max", "--causal"})), 2, {"qk_norm max"}));
  EXPECT_TRUE(complained(run(joined(generate, {"--center-v", "--no-normalise"})), 2, {"center_v"}));
  EXPECT_EQ(files(), Strings{});
  EXPECT_TRUE(
      succeeded(run(joined(generate, {"--qk-norm", "max", "--causal", "--max-norm-sees-future"}))));
  EXPECT_TRUE(succeeded(run({"verify", file("g.h5"), "--max-norm-sees-future"})));
  // the noise has a seed of its own
  ASSERT_TRUE(succeeded(run(joined(generate, {"--dropout-p", "1", "--seed", "8"}))));
  EXPECT_FALSE(Contents::read(file("g.h5")).attributes.at("/config").contains("seed"));
}

/// With centred values, gradients come from the o without its centre, as it is stored: here that is
/// larger than o, and so are its roundings.
TEST_F(AffineProgram, CheckKnowsWhatIsStoredOfCentredValues) {
  for (const char* nk : {"300", "301"}) {
    ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--heads",     "4",    "--kv-heads",
                               "2",        "--nq",        "1",           "--nk", nk,
                               "--d",      "16",          "--seed",      "24",   "--variant",
                               "affine",   "--causal",    "--dropout-p", "0.7",  "--dropout-seed",
                               "5",        "--center-v"})));
    for (const char* dtype : {"f16", "bf16"})
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", dtype})));
    Contents contents = Contents::read(file("in.h5"));
    io::Array mask(io::ElementType::u8, {1, std::stoi(nk)});
    for (std::uint8_t& visible : mask.values<std::uint8_t>()) visible = 1;
    for (int j = 0; j < 4; ++j) mask.values<std::uint8_t>()[j] = 0;
    for (int i = 0; i < 4 * 16; ++i) contents["/inputs/v"].values<double>()[i] = NAN;
    contents.datasets["/inputs/key_mask"] = mask;
    contents.write(file("masked.h5"));
    for (const char* dtype : {"f16", "bf16"})
      EXPECT_TRUE(succeeded(run(
          {"run", file("masked.h5"), file("out.h5"), "--backward", "--check", "--dtype", dtype})));
  }
}

/// A check of the program finds what the settings change, so it knows them.
TEST_F(AffineProgram, CheckKnowsMasksAndPackedSequences) {
  for (const char* name : {"affine_full_max_mask", "affine_causal_left_padding"}) {
    const std::string input = data(std::string("fixtures/extended/") + name + ".h5");
    for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
      EXPECT_TRUE(succeeded(run({"run", input, file("out.h5"), "--backward", "--check", "--dtype",
                                 dtype, "--json", file("run.json")})))
          << name << " " << dtype;
      EXPECT_EQ(json("run.json")["check"].size(), 7u) << name;
    }
  }
}

TEST_F(AffineProgram, EmptyProblems) {
  const Extents shapes[] = {{0, 2, 3, 3, 2, 2}, {1, 0, 3, 3, 2, 2}, {1, 2, 0, 0, 2, 2},
                            {1, 2, 3, 0, 2, 2}, {1, 2, 3, 3, 0, 2}, {1, 2, 3, 3, 2, 0},
                            {1, 2, 1, 1, 2, 2}};
  for (const Extents& n : shapes)
    for (const char* norm : {"l2", "none", "max"}) {
      const auto text = [&](std::size_t i) { return std::to_string(n[i]); };
      const std::string what = ::testing::PrintToString(n) + " " + norm;
      ASSERT_TRUE(
          succeeded(run({"generate", file("in.h5"), "--batch",     text(0),  "--heads",   text(1),
                         "--nq",     text(2),       "--nk",        text(3),  "--d",       text(4),
                         "--dv",     text(5),       "--variant",   "affine", "--qk-norm", norm,
                         "--b",      "9",           "--dropout-p", "0.5"})))
          << what;
      EXPECT_TRUE(succeeded(run({"run", file("in.h5"), file("out.h5"), "--backward", "--state"})))
          << what;
      EXPECT_TRUE(
          succeeded(run({"run", file("in.h5"), file("out.h5"), "--backward", "--center-v"})))
          << what;
      // Gradients that vanish but for roundings are held against their terms.
      const bool vanish = n[3] == 1 || n[4] == 0;
      EXPECT_TRUE(
          succeeded(vanish ? run({"run", file("in.h5"), file("out.h5"), "--backward", "--check"})
                           : run({"verify", file("in.h5")})))
          << what;
    }
}

TEST_F(AffineProgram, SameBitsWhateverTheThreads) {
  affine_input().write(file("in.h5"));
  for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
    std::string first;
    for (const char* threads : {"1", "3"}) {
      ASSERT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--causal", "--dropout-p", "0.5",
               "--center-v", "--chunk", "16", "--segments", "2", "--dtype", dtype},
              {{"OMP_NUM_THREADS", threads}})));
      const std::string output = read_file(file("out.h5"));
      if (first.empty()) first = output;
      EXPECT_TRUE(output == first) << dtype << " " << threads;
    }
  }
}

}  // namespace
}  // namespace LinAttn::test_app
