// SPDX-License-Identifier: BSD-3-Clause

// linattn study: rows, what is left out, going on after a stop, JSON, quality, refusals.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <linattn/io/reader.hpp>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

using Numbers = std::vector<double>;

class Study : public ProgramTest {
 protected:
  /// Two shapes of 2 of 4 heads, one of them causal.
  Arguments arguments(const Arguments& more = {}) const {
    Arguments all{"study", file("s.h5"), "--quick", "--methods", "softmax,elu", "--shape", "1,4,2,70,8,6,0",
                  "--shape", "1,4,2,90,8,6,1"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Numbers column(const std::string& method, const std::string& name) const {
    return values(file("s.h5"), "/study/user/" + method + "/" + name);
  }
};

/// NaN and null.
bool same(const nlohmann::json& found, double expected) {
  return found.is_null() ? std::isnan(expected) : found.get<double>() == expected;
}

TEST_F(Study, RowsOfShapes) {
  const Result result = run(arguments({"--json", file("s.json")}));
  ASSERT_TRUE(succeeded(result));
  const io::Reader reader(file("s.h5"));
  EXPECT_EQ(values(file("s.h5"), "/study/user/n"), (Numbers{70, 90}));
  EXPECT_EQ(values(file("s.h5"), "/study/user/causal"), (Numbers{0, 1}));
  for (const char* method : {"softmax", "elu"}) {
    EXPECT_EQ(column(method, "status"), Numbers(6, 1.0)) << method;
    EXPECT_EQ(column(method, "error_of"), Numbers(6, 1.0)) << method;
    const Numbers seconds = column(method, "seconds"), least = column(method, "seconds_least"),
                  most = column(method, "seconds_most"), rate = column(method, "tokens_per_second"),
                  peak = column(method, "peak_bytes"), kept = column(method, "kept_bytes"),
                  error = column(method, "error");
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_GT(least[i], 0);
      EXPECT_LE(least[i], seconds[i]);
      EXPECT_LE(seconds[i], most[i]);
      EXPECT_DOUBLE_EQ(rate[i] * seconds[i], i < 3 ? 4 * 70 : 4 * 90);
      // rounding of fp32, some 1e-6; other heads or rows would be apart by 1
      EXPECT_GT(error[i], 0) << method << i;
      EXPECT_LT(error[i], 1e-3) << method << i;
    }
    for (std::size_t s = 0; s < 2; ++s) {
      const double n = s == 0 ? 70 : 90, o = 4 * n * 6 * 4, gradients = (4 * n * 8 + 2 * n * (8 + 6)) * 4;
      EXPECT_EQ(kept[s], 4 * n * 4) << method;  // a float for each row
      EXPECT_GE(peak[3 * s], o + kept[s]) << method;
      EXPECT_GE(peak[3 * s + 1], o + kept[s] + gradients) << method;
      EXPECT_GE(peak[3 * s + 2], std::max(peak[3 * s], peak[3 * s + 1])) << method;
    }
  }
  EXPECT_NE(result.out.find("1,4,2,90,8,6,1"), std::string::npos);

  // the same numbers in JSON
  const auto document = json("s.json");
  EXPECT_EQ(document["command"], "study");
  const auto& study = document["study"];
  EXPECT_EQ(study["methods"], "softmax, elu");
  for (const char* method : {"softmax", "elu"})
    for (const char* name : {"status", "seconds", "samples", "peak_bytes", "error", "tokens_per_second"}) {
      const Numbers expected = column(method, name);
      for (std::size_t i = 0; i < 6; ++i)
        EXPECT_TRUE(same(study["user"][method][name][i / 3][i % 3], expected[i])) << method << name << i;
    }
  const Numbers entropy = values(file("s.h5"), "/study/quality/gaussian/elu/entropy");
  for (std::size_t i = 0; i < entropy.size(); ++i)
    EXPECT_TRUE(same(study["quality"]["gaussian"]["elu"]["entropy"][i / 2][i % 2], entropy[i])) << i;
}

/// Double against double: the same calls give the same bits.
TEST_F(Study, ErrorsAreAgainstDouble) {
  ASSERT_TRUE(succeeded(run(arguments({"--dtype", "f64"}))));
  for (const char* method : {"softmax", "elu"}) EXPECT_EQ(column(method, "error"), Numbers(6, 0.0)) << method;
  EXPECT_EQ(column("elu", "kept_bytes"), (Numbers{4 * 70 * 8, 4 * 90 * 8}));
}

/// One of two heads, with both of its query heads; the last rows of one head.
TEST_F(Study, ErrorsOfPartsOfLargeShapes) {
  ASSERT_TRUE(succeeded(run({"study", file("s.h5"), "--quick", "--methods", "softmax,elu", "--shape",
                             "1,4,2,2000,16,16,0", "--shape", "1,4,2,2600,16,16,1", "--shape", "1,1,1,5500,16,16,0",
                             "--shape", "1,1,1,7500,16,16,1"})));
  EXPECT_EQ(column("softmax", "error_of"), (Numbers{2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3}));
  EXPECT_EQ(column("elu", "error_of"), Numbers(12, 1.0));
  for (const double error : column("softmax", "error")) {
    EXPECT_GT(error, 0);
    EXPECT_LT(error, 1e-3);
  }
}

TEST_F(Study, FinishedRowsAreKept) {
  ASSERT_TRUE(succeeded(run(arguments({"--json", file("first.json")}))));
  Contents contents = Contents::read(file("s.h5"));
  const auto edit = [&](const std::string& path, std::size_t at, double value) {
    contents["/study/" + path].values<double>()[at] = value;
  };
  edit("user/softmax/seconds", 0, 123);
  edit("user/elu/seconds", 3, 456);
  edit("user/elu/status", 3, 0);  // open
  edit("quality/gaussian/softmax/entropy", 0, 789);
  edit("quality/gaussian/elu/entropy", 1, 789);
  edit("quality/gaussian/elu/done", 0, 0);
  contents.write(file("s.h5"));
  ASSERT_TRUE(succeeded(run(arguments({"--json", file("second.json")}))));
  EXPECT_EQ(column("softmax", "seconds")[0], 123);
  EXPECT_NE(column("elu", "seconds")[3], 456);
  EXPECT_EQ(column("elu", "status"), Numbers(6, 1.0));
  EXPECT_EQ(values(file("s.h5"), "/study/quality/gaussian/softmax/entropy")[0], 789);
  EXPECT_EQ(values(file("s.h5"), "/study/quality/gaussian/elu/entropy")[1],
            json("first.json")["study"]["quality"]["gaussian"]["elu"]["entropy"][0][1].get<double>());
}

/// Starts the program, waits until the file is there, and sends a signal.
int status_after(const Arguments& arguments, const std::string& file, int signal) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<char*> words{const_cast<char*>(LINATTN_PROGRAM)};
    for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    if (std::freopen("/dev/null", "w", stdout) == nullptr) ::_exit(127);
    ::execv(LINATTN_PROGRAM, words.data());
    ::_exit(127);
  }
  int status = 0;
  while (!std::filesystem::exists(file))
    if (::waitpid(child, &status, WNOHANG) == child) return -1;
  ::kill(child, signal);
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : -1;
}

TEST_F(Study, GoesOnAfterASignal) {
  // without --quick a row takes a second
  const Arguments long_ones{"study", file("k.h5"), "--methods", "elu,relu", "--shape", "1,2,2,40,4,4,0"};
  for (const int signal : {SIGINT, SIGKILL}) {
    std::filesystem::remove(file("k.h5"));
    ASSERT_EQ(status_after(long_ones, file("k.h5"), signal), signal);
    EXPECT_EQ(io::Reader(file("k.h5")).attribute("/study", "methods").as_string(), "elu, relu");
  }
}

TEST_F(Study, OtherOptionsAreRefused) {
  ASSERT_TRUE(succeeded(run(arguments())));
  const std::string before = read_file(file("s.h5"));
  const auto refused = [&](const Arguments& changed, const std::vector<std::string>& words) {
    std::vector<std::string> all{file("s.h5")};
    all.insert(all.end(), words.begin(), words.end());
    EXPECT_TRUE(complained(run(changed), 2, all));
  };
  refused(arguments({"--seed", "1"}), {"seed is 0 there, 1 now"});
  refused(arguments({"--dtype", "f64"}), {"dtype is 'f32' there, 'f64' now"});
  refused(arguments({"--time-cap", "7"}), {"time-cap is 30 there, 7 now"});
  refused(arguments({"--memory-limit", "1e9"}), {"memory-limit", "1e+09 now"});
  refused(arguments({"--shape", "1,1,1,3,2,2,0"}), {"shapes", "1,1,1,3,2,2,0"});
  refused(arguments({"--space", "serial"}), {"space"});
  refused({"study", file("s.h5"), "--quick", "--methods", "elu"}, {"shapes"});
  EXPECT_EQ(read_file(file("s.h5")), before);

  ASSERT_TRUE(succeeded(run({"generate", file("g.h5"), "--nq", "5", "--d", "4", "--dv", "2"})));
  EXPECT_TRUE(complained(run({"study", file("g.h5"), "--quick"}), 2, {file("g.h5"), "linattn study"}));
  std::ofstream(file("t.h5")) << "text";
  EXPECT_TRUE(complained(run({"study", file("t.h5"), "--quick"}), 2, {file("t.h5")}));
}

TEST_F(Study, RowsBeyondTheMemoryLimit) {
  // inputs of the larger one: (4 (8 + 6) + 2 (8 + 6)) 90 floats; the limit leaves no room for anything else
  ASSERT_TRUE(succeeded(run(arguments({"--memory-limit", std::to_string(84 * 90 * 4)}))));
  for (const char* method : {"softmax", "elu"}) {
    const Numbers status = column(method, "status"), seconds = column(method, "seconds");
    for (std::size_t i = 3; i < 6; ++i) {
      EXPECT_EQ(status[i], 2) << method;
      EXPECT_TRUE(std::isnan(seconds[i])) << method;
    }
  }
  ASSERT_TRUE(succeeded(run({"study", file("o.h5"), "--quick", "--methods", "elu", "--memory-limit", "1000", "--shape",
                             "1,4,4,1000000,512,512,0"})));  // 8 GB that nothing allocates
  EXPECT_EQ(values(file("o.h5"), "/study/user/elu/status"), Numbers(3, 2.0));
}

TEST_F(Study, RowsBeyondTheTimeCap) {
  const Result result = run({"study", file("s.h5"), "--quick", "--methods", "softmax", "--time-cap", "1e-9", "--shape",
                             "1,1,1,900,8,8,0"});
  ASSERT_TRUE(succeeded(result));
  EXPECT_EQ(column("softmax", "status"), Numbers(3, 3.0));
  EXPECT_NE(result.out.find("time"), std::string::npos);
  EXPECT_TRUE(std::isnan(column("softmax", "seconds")[0]));
}

// What takes microseconds says nothing of what takes a second.
TEST_F(Study, RowsFarFromAMeasuredOneAreProbed) {
  ASSERT_TRUE(succeeded(run({"study", file("s.h5"), "--quick", "--methods", "softmax", "--shape", "1,1,1,4,4,4,0", "--shape",
                             "1,1,1,1500,32,32,0", "--json", file("s.json")})));
  for (const auto& status : json("s.json")["study"]["user"]["softmax"]["status"][1]) EXPECT_EQ(status, 1);
}

TEST_F(Study, BaselinesHaveNoCausalForm) {
  const Result result = run({"study", file("s.h5"), "--quick", "--methods", "nystrom,linformer", "--shape",
                             "1,4,2,90,8,6,1", "--shape", "1,4,2,90,8,6,0", "--json", file("s.json")});
  ASSERT_TRUE(succeeded(result));
  for (const char* method : {"nystrom", "linformer"}) {
    EXPECT_EQ(column(method, "status"), (Numbers{4, 4, 4, 1, 1, 1}));
    const std::string reason = json("s.json")["study"]["user"][method]["reason_0"];
    EXPECT_NE(reason.find(std::string(method) + " has no causal form"), std::string::npos) << reason;
    for (std::size_t i = 3; i < 6; ++i) EXPECT_LT(column(method, "error")[i], 1e-2);
  }
}

TEST_F(Study, WhatAMethodCannotDo) {
  // rows have at most 65,536 entries
  const Result result = run({"study", file("s.h5"), "--quick", "--methods", "elu", "--shape", "1,1,1,2,65537,1,0",
                             "--json", file("s.json")});
  ASSERT_TRUE(succeeded(result));
  EXPECT_EQ(column("elu", "status"), Numbers(3, 4.0));
  const std::string reason = json("s.json")["study"]["user"]["elu"]["reason_0"];
  EXPECT_NE(reason.find("65537"), std::string::npos) << reason;
  EXPECT_NE(result.out.find(reason), std::string::npos);
}

TEST_F(Study, ShapesFromAFile) {
  std::ofstream(file("shapes.txt")) << "# two\n1,2,1,20,4,4,0\n\n 1, 2, 2, 30, 4, 4, 1  # causal\n";
  ASSERT_TRUE(succeeded(run({"study", file("s.h5"), "--quick", "--methods", "relu", "--shapes", file("shapes.txt")})));
  EXPECT_EQ(values(file("s.h5"), "/study/user/n"), (Numbers{20, 30}));
  EXPECT_EQ(values(file("s.h5"), "/study/user/kv_heads"), (Numbers{1, 2}));
  EXPECT_EQ(column("relu", "status"), Numbers(6, 1.0));
  std::ofstream(file("bad.txt")) << "1,2,1,20,4,4,0\n1,2,1,20,4,4\n";
  EXPECT_TRUE(complained(run({"study", file("b.h5"), "--shapes", file("bad.txt")}), 2, {"bad.txt", "line 2"}));
  EXPECT_FALSE(std::filesystem::exists(file("b.h5")));
}

/// Exact attention has the matrix of exact attention, and the others do not.
TEST_F(Study, QualityOfRealHeads) {
  ASSERT_TRUE(succeeded(run({"study", file("s.h5"), "--quick", "--methods", "softmax,lln,relu,identity", "--shape",
                             "1,1,1,8,4,4,0", "--real", data("real/minilm.h5")})));
  const auto real = [&](const std::string& name) { return values(file("s.h5"), "/study/quality/real/" + name); };
  const Numbers exact = real("softmax/output_error"), entropy = real("softmax/entropy");
  ASSERT_EQ(exact.size(), 24u);
  for (const double error : exact) EXPECT_LT(error, 1e-12);
  // the instruments of linattn diagnose
  ASSERT_TRUE(succeeded(run({"diagnose", data("real/minilm.h5"), "--full", "--variant", "softmax", "--variant", "lln",
                             "--moments", "table", "--moments-scope", "head", "--json", file("d.json")})));
  const auto kernels = json("d.json")["kernels"];
  for (const auto& [kernel, name] : {std::pair{"softmax", "softmax"}, {"lln", "lln_table"}})
    for (const char* instrument : {"entropy", "spectral_gap", "logvar"}) {
      const Numbers found = real(std::string(name) + "/" + instrument);
      for (std::size_t i = 0; i < 24; ++i) {
        const double expected = kernels[kernel]["heads"][i / 12][i % 12][instrument];
        EXPECT_NEAR(found[i], expected, 1e-9 * std::max(1.0, std::abs(expected))) << name << instrument << i;
      }
    }
  for (const double x : real("identity/entropy")) EXPECT_TRUE(std::isnan(x));
  EXPECT_NE(io::Reader(file("s.h5")).attribute("/study/quality/real/identity", "absent").as_string().find("below 0"),
            std::string::npos);
  for (const char* name : {"lln_authors", "lln_table", "relu", "identity"})
    for (const double error : real(std::string(name) + "/output_error")) EXPECT_GT(error, 0.01) << name;
  // with a hotter softmax rows are flatter
  const Numbers gaussian = values(file("s.h5"), "/study/quality/gaussian/softmax/entropy");
  EXPECT_GT(gaussian.front(), gaussian.back() + 1);
}

TEST_F(Study, Refusals) {
  EXPECT_TRUE(complained(run({"study"}), 2, {"OUT.h5"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--methods", "best"}), 2, {"softmax", "'best'"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shapes", "table3"}), 2, {"table3", "table2, lra, affine"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shapes", "lra,lra"}), 2, {"lra twice"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shape", "1,2,3"}), 2, {"B,H,Hkv,N,D,Dv,causal", "1,2,3"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shape", "1,3,2,4,4,4,0"}), 2, {"key/value heads"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shape", "1,0,0,4,4,4,0"}), 2, {"at least 1"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--shape", "1,2,2,4,4,4,2"}), 2, {"causal is 0 or 1"}));
  for (const char* value : {"0", "-1", "nan", "inf", "long"})
    for (const char* option : {"--time-cap", "--memory-limit"})
      EXPECT_TRUE(complained(run({"study", file("s.h5"), option, value}), 2, {option, "a positive number", value}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--methods", ""}), 2, {"--methods", "found none"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--quick", "--real", file("no.h5")}), 2, {file("no.h5")}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--quick", "--real", file("s.h5")}), 2, {"--real", "of its own"}));
  EXPECT_TRUE(complained(run({"study", file("no/s.h5"), "--quick"}), 2, {"no"}));
  EXPECT_TRUE(complained(run({"study", file("s.h5"), "--json", file("s.h5")}), 2, {"--json"}));
  EXPECT_EQ(files(), std::vector<std::string>{});
}

}  // namespace
}  // namespace LinAttn::test_app
