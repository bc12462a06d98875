// SPDX-License-Identifier: BSD-3-Clause

// Exact attention, a variant like the others but for states and rows that are not normalised.

#include <Kokkos_Core.hpp>
#include <cmath>
#include <linattn/io/views.hpp>
#include <linattn/linattn.hpp>
#include <linattn/variants.hpp>
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

/// q (2,4,5,3), k (2,2,7,3), v (2,2,7,6) and a cotangent.
Contents softmax_input() {
  Contents contents;
  contents.attributes["/"] = {{"variant", "softmax"}};
  contents.datasets = {{"/inputs/q", waves({2, 4, 5, 3}, 1)},
                       {"/inputs/k", waves({2, 2, 7, 3}, 2)},
                       {"/inputs/v", waves({2, 2, 7, 6}, 3)},
                       {"/cotangent/o", waves({2, 4, 5, 6}, 4)}};
  return contents;
}

Arguments joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class SoftmaxProgram : public ProgramTest {
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

/// Output and gradients of a direct call.
std::map<std::string, std::vector<double>> library_results(const Contents& input, double scale,
                                                           bool causal) {
  using Exec = Kokkos::Serial;
  using Tensor = Kokkos::View<double****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  const Exec exec;
  const auto read = [&](const std::string& path, const Tensor& view) {
    io::copy_into(exec, input.datasets.at(path), view);
    return view;
  };
  const Tensor q = read("/inputs/q", Tensor("q", 2, 4, 5, 3)),
               k = read("/inputs/k", Tensor("k", 2, 2, 7, 3)),
               v = read("/inputs/v", Tensor("v", 2, 2, 7, 6)),
               d_o = read("/cotangent/o", Tensor("d_o", 2, 4, 5, 6));
  const Tensor o("o", 2, 4, 5, 6), d_q("d_q", 2, 4, 5, 3), d_k("d_k", 2, 2, 7, 3),
      d_v("d_v", 2, 2, 7, 6);
  const Kokkos::View<double***, Kokkos::HostSpace> sums("sums", 2, 4, 5);
  const Saved<Exec, double> saved{.o = o, .denominator = sums};
  const Inputs<Exec, double> inputs{.q = q, .k = k, .v = v};
  forward<double>(exec, Softmax{scale}, inputs, saved, {.causal = causal});
  backward<double>(exec, Softmax{scale}, inputs, saved, d_o, {.q = d_q, .k = d_k, .v = d_v},
                   {.causal = causal});
  const auto all = [](const Tensor& view) {
    return std::vector<double>(view.data(), view.data() + view.size());
  };
  return {{"/output/o", all(o)},
          {"/output_grad/q", all(d_q)},
          {"/output_grad/k", all(d_k)},
          {"/output_grad/v", all(d_v)}};
}

TEST_F(SoftmaxProgram, EveryOptionIsThatOfTheLibrary) {
  struct Request {
    Arguments options;
    std::map<std::string, io::Value> config;
    double scale = 0;
    bool causal = false;
  };
  const Request requests[] = {{{}, {}},
                              {{"--causal"}, {{"causal", 1}}, 0, true},
                              {{"--scale", "2.5"}, {{"scale", 2.5}}, 2.5},
                              {{"--scale", "0.125", "--causal", "--normalise"},
                               {{"scale", 0.125}, {"causal", 1}, {"normalise", 1}},
                               0.125,
                               true}};
  const Contents input = softmax_input();
  std::set<std::vector<double>> outputs;
  for (const Request& request : requests) {
    const std::string text = ::testing::PrintToString(request.options);
    input.write(file("in.h5"));
    ASSERT_TRUE(succeeded(run_with(
        joined({"--backward", "--space", "serial", "--json", file("run.json")}, request.options))))
        << text;
    const Contents output = Contents::read(file("out.h5"));
    const auto expected = library_results(input, request.scale, request.causal);
    EXPECT_EQ(output.datasets.size(), expected.size()) << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(output.datasets.at(path).as<double>(), values) << text << " " << path;
    EXPECT_TRUE(outputs.insert(expected.at("/output/o")).second) << text;
    const auto json = this->json("run.json");
    EXPECT_EQ(json["settings"]["scale"], request.scale != 0 ? request.scale : 1 / std::sqrt(3.0));
    EXPECT_EQ(json["saved_bytes"], 2 * 4 * 5 * 8);

    // The same said by the file gives the same.
    Contents said = input;
    said.attributes["/config"] = request.config;
    said.write(file("said.h5"));
    ASSERT_TRUE(succeeded(
        run({"run", file("said.h5"), file("said_out.h5"), "--backward", "--space", "serial"})))
        << text;
    for (const auto& [path, values] : expected)
      EXPECT_EQ(test_app::values(file("said_out.h5"), path), values) << text << " " << path;
  }
}

#endif

TEST_F(SoftmaxProgram, AgreesWithTheReference) {
  const Arguments requests[] = {
      {},
      {"--causal"},
      {"--scale", "1.5", "--nk", "50"},
      {"--causal", "--nk", "77", "--kv-heads", "1"},
      {"--kv-heads", "2", "--dtype", "f16", "--nq", "40"},
  };
  for (const Arguments& request : requests) {
    const std::string text = ::testing::PrintToString(request);
    Arguments arguments{"generate", file("in.h5"), "--heads", "4", "--d", "6", "--dv", "5",
                        "--variant", "softmax"};
    if (text.find("--nq") == std::string::npos) arguments = joined(arguments, {"--nq", "33"});
    ASSERT_TRUE(succeeded(run(joined(arguments, request)))) << text;
    ASSERT_TRUE(succeeded(run({"verify", file("in.h5"), "--json", file("v.json")}))) << text;
    EXPECT_EQ(json("v.json")["skipped"], 0) << text;
    for (const char* dtype : {"f64", "f32", "f16", "bf16"})
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", dtype})))
          << text << " " << dtype;
  }
  Contents hidden = softmax_input();
  io::Array mask(io::ElementType::u8, {2, 7});
  const auto visible = mask.values<std::uint8_t>();
  for (std::size_t i = 0; i < visible.size(); ++i) visible[i] = i % 3 == 2 || i == 4;
  hidden.datasets.emplace("/inputs/key_mask", mask);
  hidden.write(file("in.h5"));
  for (const char* mask_of : {"--causal", "--full"})
    for (const char* dtype : {"f64", "f32", "bf16"})
      EXPECT_TRUE(succeeded(run_with({"--backward", "--check", "--dtype", dtype, mask_of})))
          << dtype;
}

/// One wrong number in any dataset is found, and named.
TEST_F(SoftmaxProgram, OneChangedNumber) {
  const Contents original = Contents::read(data("fixtures/softmax_full_gqa_cross_n7_n12.h5"));
  for (const char* dataset :
       {"/expected/o", "/expected_grad/q", "/expected_grad/k", "/expected_grad/v"}) {
    Contents contents = original;
    const auto elements = contents[dataset].values<double>();
    double largest = 0;
    for (const double x : elements) largest = std::max(largest, std::abs(x));
    elements[elements.size() - 1] += 1e-2 * largest;
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5"), "--dtype", "f32"}), 1,
                           {file("changed.h5"), dataset}))
        << dataset;
  }
  for (const auto& [name, value] :
       {std::pair<std::string, io::Value>{"scale", 0.5}, {"causal", 1}}) {
    Contents contents = original;
    contents.attributes["/config"][name] = value;
    contents.write(file("changed.h5"));
    EXPECT_TRUE(complained(run({"verify", file("changed.h5")}), 1, {file("changed.h5")})) << name;
  }
}

TEST_F(SoftmaxProgram, RefusesWhatDoesNotGoTogether) {
  Contents negative = softmax_input();
  negative.attributes["/config"] = {{"scale", -0.5}};
  expect_refused(negative, {file("in.h5"), "scale", "a finite number > 0", "-0.5"});
  expect_refused(softmax_input(), {"scale", "a finite number > 0", "found 0"}, {"--scale", "0"});
  Contents plain = softmax_input();
  plain.attributes["/config"] = {{"normalise", 0}};
  expect_refused(plain, {"softmax", "normalis"});
  expect_refused(softmax_input(), {"softmax", "normalis"}, {"--no-normalise"});
  const auto refused_by_generate = [&](const Arguments& options, const Strings& words) {
    EXPECT_TRUE(complained(
        run(joined({"generate", file("g.h5"), "--nq", "3", "--d", "2", "--variant", "softmax"},
                   options)),
        2, words));
  };
  refused_by_generate({"--no-normalise"}, {"normalise", "softmax"});
  refused_by_generate({"--scale", "0"}, {"--scale", "a finite number > 0"});
  refused_by_generate({"--scale", "-1"}, {"--scale", "a finite number > 0"});
  refused_by_generate({"--alpha", "2"}, {"--alpha: variant softmax has no alpha"});
}

TEST_F(SoftmaxProgram, StatesAreRefused) {
  expect_refused(softmax_input(), {"--state", "softmax"}, {"--state"});
  Contents state = softmax_input();
  state.datasets.emplace("/inputs/state/S", waves({2, 2, 3, 6}, 1));
  state.write(file("in.h5"));
  EXPECT_TRUE(succeeded(run_with({"--json", file("run.json")})));
  EXPECT_EQ(json("run.json")["ignored"], Strings{"/inputs/state/S"});
}

TEST_F(SoftmaxProgram, EmptyProblems) {
  const Extents shapes[] = {{0, 2, 3, 4, 2, 2}, {1, 0, 3, 4, 2, 2}, {1, 2, 0, 4, 2, 2},
                            {1, 2, 3, 4, 0, 2}, {1, 2, 3, 4, 2, 0}, {1, 2, 1, 1, 2, 2}};
  for (const Extents& n : shapes)
    for (const char* mask : {"--causal", "--full"}) {
      const auto text = [&](std::size_t i) { return std::to_string(n[i]); };
      const std::string what = ::testing::PrintToString(n) + " " + mask;
      ASSERT_TRUE(succeeded(run({"generate", file("in.h5"), "--batch", text(0), "--heads", text(1),
                                 "--nq", text(2), "--nk", text(3), "--d", text(4), "--dv", text(5),
                                 "--variant", "softmax", mask})))
          << what;
      EXPECT_TRUE(succeeded(
          run({"run", file("in.h5"), file("out.h5"), "--backward", "--check", "--dtype", "f64"})))
          << what;
    }
}

TEST_F(SoftmaxProgram, SameBitsWhateverTheThreads) {
  softmax_input().write(file("in.h5"));
  for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
    std::string first;
    for (const char* threads : {"1", "3"}) {
      ASSERT_TRUE(succeeded(run(
          {"run", file("in.h5"), file("out.h5"), "--backward", "--causal", "--dtype", dtype},
          {{"OMP_NUM_THREADS", threads}})));
      const std::string output = read_file(file("out.h5"));
      if (first.empty()) first = output;
      EXPECT_TRUE(output == first) << dtype << " " << threads;
    }
  }
}

}  // namespace
}  // namespace LinAttn::test_app
