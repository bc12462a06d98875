// SPDX-License-Identifier: BSD-3-Clause

#include <Kokkos_Core.hpp>
#include <linattn/variants.hpp>
#include <linattn/version.hpp>
#include <string>
#include <vector>

#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

class Info : public ProgramTest {};

TEST_F(Info, TellsTheConfiguration) {
  const Result result = run({"info", "--json", file("info.json")}, {{"OMP_NUM_THREADS", "2"}});
  ASSERT_TRUE(succeeded(result));
  const auto json = this->json("info.json");
  EXPECT_EQ(json["linattn"], LINATTN_VERSION);
  EXPECT_EQ(json["kokkos"], std::to_string(KOKKOS_VERSION / 10000) + "." +
                                std::to_string(KOKKOS_VERSION / 100 % 100) + "." +
                                std::to_string(KOKKOS_VERSION % 100));
  EXPECT_EQ(json["environment"]["OMP_NUM_THREADS"], "2");
  std::vector<std::string> names;
  for_each_variant([&]<class V>(std::type_identity<V>) { names.emplace_back(V::name); });
  EXPECT_EQ(json["variants"], names);
  std::vector<std::string> spaces;
  for (const auto& space : json["spaces"]) {
    spaces.push_back(space["name"]);
    if (space["name"] == "openmp") {
      EXPECT_EQ(space["concurrency"], 2);
    } else if (space["name"] == "serial") {
      EXPECT_EQ(space["concurrency"], 1);
    }
  }
  std::vector<std::string> expected;
#if defined(KOKKOS_ENABLE_SERIAL)
  expected.push_back("serial");
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
  expected.push_back("openmp");
#endif
#if defined(KOKKOS_ENABLE_CUDA)
  expected.push_back("cuda");
#endif
  EXPECT_EQ(spaces, expected);
  for (const char* key : {"hdf5", "compiler", "build_type", "machine"}) {
    EXPECT_FALSE(json[key].get<std::string>().empty()) << key;
    EXPECT_NE(result.out.find(json[key].get<std::string>()), std::string::npos) << key;
  }
  EXPECT_GT(json["simd_bytes"], 0);
}

TEST_F(Info, SaysWhatTheUserSetNotWhatTheProgramAdds) {
  const Result result = run({"info", "--json", "-"}, {{"OMP_PLACES", "cores"}});
  ASSERT_TRUE(succeeded(result));
  EXPECT_EQ(nlohmann::json::parse(result.out)["environment"]["OMP_PLACES"], "cores");
}

}  // namespace
}  // namespace LinAttn::test_app
