// SPDX-License-Identifier: BSD-3-Clause

// LLN attention joined by exact attention inside blocks of keys.

#include <Kokkos_Core.hpp>
#include <cmath>
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

/// q (2,4,7,3), k (2,2,7,3), v (2,2,7,5), a cotangent, and factors of all heads and columns.
Contents diag_input() {
  Contents contents;
  contents.attributes["/"] = {{"variant", "lln-diag"}};
  contents.attributes["/config"] = {{"alpha", 1.25}, {"beta", 0.75}};
  contents.datasets = {
      {"/inputs/q", waves({2, 4, 7, 3}, 1)}, {"/inputs/k", waves({2, 2, 7, 3}, 2)},
      {"/inputs/v", waves({2, 2, 7, 5}, 3)}, {"/cotangent/o", waves({2, 4, 7, 5}, 4)},
      {"/inputs/diag_r", waves({4, 5}, 5)},  {"/inputs/diag_p", waves({4, 5}, 6)}};
  return contents;
}

Arguments joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class LlnDiagProgram : public ProgramTest {
 protected:
  Result run_with(const Arguments& options) {
    return run(joined({"run", file("in.h5"), file("out.h5")}, options));
  }
  void expect_refused(const Contents& contents, const Strings& words,
                      const Arguments& options = {}) {
    contents.write(file("in.h5"));
    EXPECT_TRUE(complained(run_with(options), 2, words));
    EXPECT_EQ(files(), Strings{"in.h5"});
  }
};

#if defined(KOKKOS_ENABLE_SERIAL)

/// What the program is asked for, and the same in the library's words.
struct Request {
  Arguments options;
  Config config;  ///< what the options are in a file
  std::int64_t block = 0;
  Combine combine = Combine::average;
  bool causal = false;
  bool is_new = true;  ///< another o than those before
};

std::vector<Request> requests() {
  return {
      {{}, {}},
      {{"--causal"}, {{"causal", 1}}, 0, Combine::average, true},
      {{"--block", "2"}, {{"block", 2}}, 2},
      {{"--block", "1", "--causal"}, {{"block", 1}, {"causal", 1}}, 1, Combine::average, true},
      {{"--block", "1000"}, {{"block", 1000}}, 1000},
      {{"--combine", "average"}, {{"combine", "average"}}, 0, Combine::average, false, false},
      {{"--combine", "scale"}, {{"combine", "scale"}}, 0, Combine::scale},
      {{"--combine", "scale", "--causal", "--block", "4"},
       {{"combine", "scale"}, {"causal", 1}, {"block", 4}},
       4,
       Combine::scale,
       true},
      {{"--combine", "ratio"}, {{"combine", "ratio"}}, 0, Combine::ratio},
  };
}

/// Output and gradients of a direct call, as the program stores them.
std::map<std::string, std::vector<double>> library_results(const Contents& input,
                                                           const Request& request) {
  using Exec = Kokkos::Serial;
  using Tensor = Kokkos::View<double****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using Matrix = Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using PerHead = Kokkos::View<double*, Kokkos::HostSpace>;
  const Exec exec;
  const auto read = [&](const std::string& path, const auto& view) {
    io::copy_into(exec, input.datasets.at(path), view);
    return view;
  };
  const Tensor q = read("/inputs/q", Tensor("q", 2, 4, 7, 3)),
               k = read("/inputs/k", Tensor("k", 2, 2, 7, 3)),
               v = read("/inputs/v", Tensor("v", 2, 2, 7, 5)),
               d_o = read("/cotangent/o", Tensor("d_o", 2, 4, 7, 5));
  const Tensor o("o", 2, 4, 7, 5), linear("linear", 2, 4, 7, 5), d_q("d_q", 2, 4, 7, 3),
      d_k("d_k", 2, 2, 7, 3), d_v("d_v", 2, 2, 7, 5);
  const Kokkos::View<double***, Kokkos::HostSpace> sums("sums", 2, 4, 7);
  const PerHead d_alpha("d_alpha", 4), d_beta("d_beta", 2);
  const Matrix d_r("d_r", 4, 5), d_p("d_p", 4, 5);
  const bool has_r = request.combine != Combine::average, has_p = request.combine == Combine::scale;
  LlnDiag variant{.alpha = 1.25, .beta = 0.75, .block = request.block, .combine = request.combine};
  const Matrix diag_r("diag_r", 4, 5), diag_p("diag_p", 4, 5);
  if (input.datasets.contains("/inputs/diag_r")) variant.diag_r = read("/inputs/diag_r", diag_r);
  if (input.datasets.contains("/inputs/diag_p")) variant.diag_p = read("/inputs/diag_p", diag_p);
  Saved<Exec, double> saved{.o = o, .denominator = sums};
  if (has_r) saved.linear = linear;
  Gradients<Exec, double> gradients{
      .q = d_q, .k = d_k, .v = d_v, .query_parameter = d_alpha, .key_parameter = d_beta};
  if (has_r) gradients.diag_r = d_r;
  if (has_p) gradients.diag_p = d_p;
  const Inputs<Exec, double> inputs{.q = q, .k = k, .v = v};
  const Options call{.causal = request.causal};
  forward<double>(exec, variant, inputs, saved, call);
  backward<double>(exec, variant, inputs, saved, d_o, gradients, call);
  const auto all = [](const auto& view) {
    return std::vector<double>(view.data(), view.data() + view.size());
  };
  const auto sum = [&](const PerHead& view) {
    const auto values = all(view);
    return std::vector<double>{std::accumulate(values.begin(), values.end(), 0.0)};
  };
  std::map<std::string, std::vector<double>> results{{"/output/o", all(o)},
                                                     {"/output_grad/q", all(d_q)},
                                                     {"/output_grad/k", all(d_k)},
                                                     {"/output_grad/v", all(d_v)},
                                                     {"/output_grad/alpha", sum(d_alpha)},
                                                     {"/output_grad/beta", sum(d_beta)}};
  if (has_r) results["/output_grad/diag_r"] = all(d_r);
  if (has_p) results["/output_grad/diag_p"] = all(d_p);
  return results;
}

TEST_F(LlnDiagProgram, EveryOptionIsThatOfTheLibrary) {
  const Contents input = diag_input();
  std::set<std::vector<double>> outputs;
  for (const Request& request : requests()) {
    const std::string text = ::testing::PrintToString(request.options);
    input.write(file("in.h5"));
    ASSERT_TRUE(succeeded(run_with(
        joined({"--backward", "--space", "serial", "--json", file("run.json")}, request.options))))
        << text;
    const Contents output = Contents::read(file("out.h5"));
    const auto expected = library_results(input, request);
    EXPECT_EQ(output.datasets.size(), expected.size()) << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(output.datasets.at(path).as<double>(), values) << text << " " << path;
    EXPECT_EQ(outputs.insert(expected.at("/output/o")).second, request.is_new) << text;
    for (const char* name : {"/output_grad/diag_r", "/output_grad/diag_p"})
      if (expected.contains(name)) {
        EXPECT_EQ(output.datasets.at(name).extents(), (Extents{4, 5})) << name;
      }

    Config config = request.config;
    config.insert({{"alpha", 1.25}, {"beta", 0.75}});
    EXPECT_EQ(output.attributes.at("/config"), config) << text;
    const auto json = this->json("run.json");
    EXPECT_EQ(json["settings"]["block"], request.block > 0 ? request.block : 3) << text;
    const bool keeps_linear = request.combine != Combine::average;
    EXPECT_EQ(json["saved_bytes"], 2 * 4 * 7 * (keeps_linear ? 1 + 5 : 1) * 8) << text;

    // The same said by the file gives the same.
    Contents said = input;
    said.attributes["/config"] = config;
    said.write(file("said.h5"));
    ASSERT_TRUE(succeeded(
        run({"run", file("said.h5"), file("said_out.h5"), "--backward", "--space", "serial"})))
        << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(test_app::values(file("said_out.h5"), path), values) << text << " " << path;
  }
}

/// Factors that a file does not give are one half, and differentiable all the same.
TEST_F(LlnDiagProgram, FactorsAreOneHalfWhereAbsent) {
  Contents input = diag_input();
  input.datasets.erase("/inputs/diag_r");
  input.datasets.erase("/inputs/diag_p");
  input.write(file("in.h5"));
  ASSERT_TRUE(succeeded(run_with({"--space", "serial"})));
  const auto average = values(file("out.h5"), "/output/o");
  for (const Combine combine : {Combine::scale, Combine::ratio}) {
    const std::string name = combine == Combine::scale ? "scale" : "ratio";
    ASSERT_TRUE(succeeded(run_with({"--backward", "--space", "serial", "--combine", name})));
    EXPECT_LT(relative_distance(average, values(file("out.h5"), "/output/o")), 1e-15) << name;
    for (const auto& [path, expected] : library_results(input, {{}, {}, 0, combine}))
      EXPECT_EQ(values(file("out.h5"), path), expected) << name << " " << path;
  }
}

#endif

TEST_F(LlnDiagProgram, OptionsOverrideTheFileAndAreShown) {
  Contents input = diag_input();
  input.attributes["/config"].insert({{"block", 2}, {"combine", "scale"}});
  input.write(file("in.h5"));
  Result result = run_with({});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("lln-diag, full, normalised, alpha 1.25, beta 0.75, block 2, "
                            "combine scale\n"),
            std::string::npos)
      << result.out;
  result = run_with({"--combine", "average", "--block", "3", "--causal"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_NE(result.out.find("lln-diag, causal, normalised, alpha 1.25, beta 0.75\n"),
            std::string::npos)
      << result.out;
}

/// Expectations of the dense reference hold in every space and precision, with masks and members
/// too.
TEST_F(LlnDiagProgram, AgreesWithTheReference) {
  const Arguments requests[] = {
      {},
      {"--causal"},
      {"--block", "5", "--combine", "scale"},
      {"--block", "40", "--combine", "ratio", "--causal"},
      {"--block", "1", "--combine", "scale", "--causal"},
      {"--block", "7", "--combine", "scale", "--causal", "--nk", "50"},
      {"--block", "100", "--combine", "ratio", "--kv-heads", "1"},
      {"--combine", "scale", "--dtype", "f16", "--nk", "33", "--causal"},
  };
  for (const Arguments& request : requests) {
    const std::string text = ::testing::PrintToString(request);
    Arguments arguments{"generate", file("in.h5"), "--heads", "4",  "--nq",      "33",
                        "--d",      "6",           "--dv",    "5",  "--variant", "lln-diag",
                        "--alpha",  "1.1",         "--beta",  "0.7"};
    ASSERT_TRUE(succeeded(run(joined(arguments, request)))) << text;
    ASSERT_TRUE(succeeded(run({"verify", file("in.h5"), "--json", file("v.json")}))) << text;
    const auto json = this->json("v.json");
    std::set<std::string> datasets;
    for (const auto& c : json["files"][0]["comparisons"]) datasets.insert(c["dataset"]);
    const bool scale = text.find("scale") != std::string::npos;
    EXPECT_EQ(datasets.contains("/expected_grad/diag_p"), scale) << text;
    EXPECT_EQ(datasets.contains("/expected_grad/diag_r"),
              scale || text.find("ratio") != std::string::npos)
        << text;
    EXPECT_TRUE(succeeded(run({"verify", file("in.h5"), "--chunk", "16", "--segments", "2"})))
        << text;
    EXPECT_EQ(json["skipped"], 0);
    for (const char* dtype : {"f64", "f32", "f16", "bf16"})
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", dtype})))
          << text << " " << dtype;
  }

  Contents hidden = diag_input();
  hidden.attributes["/config"].insert({{"combine", "scale"}, {"block", 2}});
  io::Array mask(io::ElementType::u8, {2, 7});
  const auto visible = mask.values<std::uint8_t>();
  for (std::size_t i = 0; i < visible.size(); ++i) visible[i] = i % 3 == 0 || i == 4;
  hidden.datasets.emplace("/inputs/key_mask", mask);
  Contents packed = diag_input();
  packed.attributes["/config"].insert({{"combine", "ratio"}, {"block", 2}});
  for (const char* name : {"/inputs/q", "/inputs/k", "/inputs/v", "/cotangent/o"}) {
    Extents extents = packed[name].extents();
    extents[0] = 1;
    packed[name] = waves(extents, 7);
  }
  for (const char* name : {"/inputs/cu_seqlens_q", "/inputs/cu_seqlens_k"}) {
    io::Array offsets(io::ElementType::i64, {4});
    const std::int64_t borders[] = {0, 3, 3, 7};
    std::copy(std::begin(borders), std::end(borders), offsets.values<std::int64_t>().begin());
    packed.datasets.emplace(name, offsets);
  }
  for (const Contents* contents : {&hidden, &packed}) {
    contents->write(file("in.h5"));
    for (const char* mask_of : {"--causal", "--full"})
      for (const char* dtype : {"f64", "f32", "bf16"})
        EXPECT_TRUE(succeeded(run_with({"--backward", "--check", "--dtype", dtype, mask_of})))
            << dtype;
  }
}

/// One wrong number in any dataset is found, and named.
TEST_F(LlnDiagProgram, OneChangedNumber) {
  ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--heads", "4", "--kv-heads", "2", "--nq",
                             "19", "--d", "3", "--dv", "2", "--variant", "lln-diag", "--combine",
                             "scale", "--block", "4", "--causal"})));
  const Contents original = Contents::read(file("in.h5"));
  for (const char* dataset :
       {"/expected/o", "/expected_grad/q", "/expected_grad/k", "/expected_grad/v",
        "/expected_grad/alpha", "/expected_grad/beta", "/expected_grad/diag_r",
        "/expected_grad/diag_p", "/inputs/diag_r", "/inputs/diag_p"}) {
    Contents contents = original;
    const auto elements = contents[dataset].values<double>();
    double largest = 0;
    for (const double x : elements) largest = std::max(largest, std::abs(x));
    elements[elements.size() - 1] += 1e-2 * largest;
    contents.write(file("changed.h5"));
    const Strings words = std::string(dataset).starts_with("/inputs")
                              ? Strings{file("changed.h5")}
                              : Strings{file("changed.h5"), dataset};
    EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--dtype", "f32"}), 1, words))
        << dataset;
  }
  for (const auto& [name, value] :
       {std::pair<std::string, io::Value>{"block", 5}, {"combine", "ratio"}, {"causal", 0}}) {
    Contents contents = original;
    contents.attributes["/config"][name] = value;
    if (name == "combine") contents.datasets.erase("/expected_grad/diag_p");
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5")}), 1, {file("changed.h5")})) << name;
  }
}

TEST_F(LlnDiagProgram, RefusesWhatDoesNotGoTogether) {
  const auto with = [](const Config& config) {
    Contents contents = diag_input();
    for (const auto& [name, value] : config) contents.attributes["/config"][name] = value;
    return contents;
  };
  expect_refused(with({{"block", 0}}), {"'block'", "an integer >= 1", "found 0"});
  expect_refused(with({{"block", 2.5}}), {"'block'", "2.5"});
  expect_refused(with({{"combine", "sum"}}),
                 {"'combine'", "one of average, scale, ratio", "'sum'"});
  expect_refused(with({{"dropout_p", 0.5}}), {"'dropout_p'", "variant lln-diag"});
  expect_refused(with({{"normalise", 0}}), {file("in.h5"), "lln-diag is normalised"});
  expect_refused(diag_input(), {"lln-diag has no dropout_p"}, {"--dropout-p", "0.5"});
  expect_refused(diag_input(), {"lln-diag has no center_v"}, {"--center-v"});
  expect_refused(diag_input(), {"--block", "an integer >= 1", "found 0"}, {"--block", "0"});

  Contents longer = diag_input();
  longer.datasets.at("/inputs/k") = waves({2, 2, 9, 3}, 2);
  longer.datasets.at("/inputs/v") = waves({2, 2, 9, 5}, 2);
  expect_refused(longer, {"/inputs/q", "Nq = Nk", "Nq = 7", "Nk = 9"});
  longer.write(file("in.h5"));
  EXPECT_TRUE(succeeded(run_with({"--causal"})));
  std::filesystem::remove(file("out.h5"));

  Contents narrow = diag_input();
  narrow.datasets.at("/inputs/diag_r") = waves({4, 3}, 2);
  expect_refused(narrow, {"/inputs/diag_r", "(H, Dv)", "(4, 3)"});
  Contents infinite = diag_input();
  infinite["/inputs/diag_p"].values<double>()[7] = INFINITY;
  expect_refused(infinite, {"/inputs/diag_p", "finite numbers", "inf at [1, 2]"},
                 {"--combine", "scale"});

  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "3", "--nk", "4", "--d", "2",
                              "--variant", "lln-diag"}),
                         2, {"Nq = Nk", "Nq = 3", "Nk = 4"}));
  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--variant",
                              "lln-diag", "--no-normalise"}),
                         2, {"normalise", "lln-diag"}));
  EXPECT_TRUE(complained(run({"generate", file("out.h5"), "--nq", "3", "--d", "2", "--variant",
                              "lln", "--block", "2"}),
                         2, {"--block: variant lln has no block"}));
}

/// States would need the keys of the open block, which the layout knows and this version does not.
TEST_F(LlnDiagProgram, StatesAreRefused) {
  expect_refused(diag_input(), {"--state", "lln-diag"}, {"--state"});
  Contents state = diag_input();
  state.datasets.emplace("/inputs/state/S", waves({2, 2, 3, 5}, 1));
  state.datasets.emplace("/inputs/state/z", waves({2, 2, 3}, 1));
  state.datasets.emplace("/inputs/state/block_k", waves({2, 2, 3, 3}, 1));
  state.datasets.emplace("/inputs/state/block_v", waves({2, 2, 3, 5}, 1));
  state.datasets.emplace("/inputs/state/position", io::Array(io::ElementType::i64, {2}));
  expect_refused(state, {file("in.h5"), "/inputs/state", "states of variant lln-diag"});
  Contents cotangent = diag_input();
  cotangent.datasets.emplace("/cotangent/state/S", waves({2, 2, 3, 5}, 1));
  expect_refused(cotangent, {"/cotangent/state", "states of variant lln-diag"}, {"--backward"});
  Contents expected = diag_input();
  expected.datasets.emplace("/expected/state/z", waves({2, 2, 3}, 1));
  expected.write(file("in.h5"));
  EXPECT_TRUE(complained(run({"verify", file("in.h5")}), 2,
                         {file("in.h5"), "/expected/state", "states of variant lln-diag"}));
}

TEST_F(LlnDiagProgram, EmptyProblems) {
  const Extents shapes[] = {{0, 2, 3, 3, 2, 2}, {1, 0, 3, 3, 2, 2}, {1, 2, 0, 0, 2, 2},
                            {1, 2, 3, 3, 0, 2}, {1, 2, 3, 3, 2, 0}, {1, 2, 1, 1, 2, 2}};
  for (const Extents& n : shapes)
    for (const char* mask : {"--causal", "--full"}) {
      const auto text = [&](std::size_t i) { return std::to_string(n[i]); };
      const std::string what = ::testing::PrintToString(n) + " " + mask;
      ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--batch", text(0), "--heads", text(1),
                                 "--nq", text(2), "--nk", text(3), "--d", text(4), "--dv", text(5),
                                 "--variant", "lln-diag", "--combine", "scale", mask})))
          << what;
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", "f64"})))
          << what;
    }
}

TEST_F(LlnDiagProgram, SameBitsWhateverTheThreads) {
  diag_input().write(file("in.h5"));
  for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
    std::string first;
    for (const char* threads : {"1", "3"}) {
      ASSERT_TRUE(succeeded(run(
          {"run", file("in.h5"), file("out.h5"), "--backward", "--causal", "--combine", "scale",
           "--block", "2", "--chunk", "16", "--segments", "2", "--tiles", "1", "--dtype", dtype},
          {{"OMP_NUM_THREADS", threads}})));
      const std::string output = read_file(file("out.h5"));
      if (first.empty()) first = output;
      EXPECT_TRUE(output == first) << dtype << " " << threads;
    }
  }
}

}  // namespace
}  // namespace LinAttn::test_app
