// SPDX-License-Identifier: BSD-3-Clause

#include <algorithm>
#include <linattn/io/variant_table.hpp>
#include <linattn/variants.hpp>
#include <string>
#include <vector>

#include "support/program.hpp"

namespace LinAttn::test_app {
namespace {

TEST(Usage, HelpAndVersion) {
  for (const Arguments& arguments : {Arguments{"--help"},
                                     {"--version"},
                                     {"run", "--help"},
                                     {"verify", "--help"},
                                     {"generate", "-h"},
                                     {"info", "--help"}}) {
    const Result result = run(arguments);
    EXPECT_TRUE(succeeded(result)) << arguments.back();
    EXPECT_FALSE(result.out.empty());
  }
  EXPECT_EQ(run({"--version"}).out.rfind("linattn ", 0), 0u);
  const std::string help = run({"run", "--help"}).out;
  for (const char* option :
       {"--variant", "--causal", "--full", "--backward", "--dtype", "--space", "--alpha", "--beta",
        "--normalise", "--no-normalise", "--scale", "--chunk", "--segments", "--tiles", "--check",
        "--repeat", "--json", "--max-norm-sees-future", "--moments-see-future"})
    EXPECT_NE(help.find(option), std::string::npos) << option;
}

/// The layout's table is where options come from.
TEST(Usage, EverySettingIsAnOption) {
  const std::string run_help = run({"run", "--help"}).out,
                    generate_help = run({"generate", "--help"}).out;
  int count = 0;
  for_each_variant([&]<class V>(std::type_identity<V>) {
    for (const io::AttributeSpec& spec : io::attributes_of(io::variant_spec(V::name))) {
      std::string option = "\n  --" + std::string(spec.name);
      std::replace(option.begin(), option.end(), '_', '-');
      EXPECT_NE(run_help.find(option + " "), std::string::npos) << option;
      EXPECT_NE(generate_help.find(option + " "), std::string::npos) << option;
      ++count;
    }
  });
  EXPECT_GT(count, 25);
  for (const std::string& help : {run_help, generate_help})
    for (const char* text : {"one of l2, none, max (affine, default l2)", "--no-center-v", "--full",
                             "--no-normalise", "(affine, default 1e-06)", "(lln, lln-diag)",
                             "(lln-diag, default average)", "by default D (lln-diag)"})
      EXPECT_NE(help.find(text), std::string::npos) << text;
  EXPECT_NE(generate_help.find("--dropout-seed "), std::string::npos);
}

struct Misuse {
  std::string name;
  Arguments arguments;
  std::vector<std::string> words;
};

class Misuses : public ::testing::TestWithParam<Misuse> {};

TEST_P(Misuses, IsOneLineAndStatus2) {
  EXPECT_TRUE(complained(run(GetParam().arguments), 2, GetParam().words));
}

INSTANTIATE_TEST_SUITE_P(
    Usage, Misuses,
    ::testing::Values(
        Misuse{"no_subcommand", {}, {"subcommand"}},
        Misuse{"unknown_subcommand", {"fly"}, {"subcommand"}},
        Misuse{"unknown_option", {"info", "--kokkos-threads=2"}, {"--kokkos-threads=2"}},
        Misuse{"threads_of_kokkos", {"run", "a.h5", "b.h5", "--threads", "0"}, {"--threads"}},
        Misuse{"no_output", {"run", "a.h5"}, {"OUT.h5"}},
        Misuse{"no_file", {"verify"}, {"FILE.h5"}},
        Misuse{"no_extents", {"generate", "a.h5", "--d", "3"}, {"--nq"}},
        Misuse{"causal_and_full",
               {"run", "a.h5", "b.h5", "--causal", "--full"},
               {"--causal", "--full"}},
        Misuse{"normalise_and_not",
               {"run", "a.h5", "b.h5", "--normalise", "--no-normalise"},
               {"--normalise", "--no-normalise"}},
        Misuse{"variant_unknown",
               {"run", "a.h5", "b.h5", "--variant", "sigmoid"},
               {"--variant", "identity, elu, relu, quadratic, lln", "'sigmoid'"}},
        Misuse{"variant_of_the_layout_only",
               {"run", "a.h5", "b.h5", "--variant", "lavo"},
               {"--variant", "identity, elu", "'lavo'"}},
        Misuse{"generated_variant_unknown",
               {"generate", "a.h5", "--nq", "3", "--d", "3", "--variant", "lavo"},
               {"--variant", "identity, elu", "'lavo'"}},
        Misuse{"dtype_unknown",
               {"verify", "a.h5", "--dtype", "int"},
               {"--dtype", "f64, f32, f16 or bf16", "'int'"}},
        Misuse{"dtype_that_files_lack",
               {"generate", "a.h5", "--nq", "3", "--d", "3", "--dtype", "bf16"},
               {"--dtype", "f64, f32 or f16", "'bf16'", "which files do not have"}},
        Misuse{"space_unknown", {"verify", "a.h5", "--space", "moon"}, {"--space", "'moon'"}},
        Misuse{"chunk_text",
               {"run", "a.h5", "b.h5", "--chunk", "two"},
               {"--chunk", "integer", "'two'"}},
        Misuse{"chunk_trailing",
               {"run", "a.h5", "b.h5", "--chunk", "2x"},
               {"--chunk", "integer", "'2x'"}},
        Misuse{"segments_negative",
               {"run", "a.h5", "b.h5", "--segments", "-1"},
               {"--segments", "integer", "'-1'"}},
        Misuse{
            "repeat_zero", {"run", "a.h5", "b.h5", "--repeat", "0"}, {"--repeat", "from 1", "'0'"}},
        Misuse{
            "scale_nan", {"run", "a.h5", "b.h5", "--scale", "nan"}, {"--scale", "finite", "'nan'"}},
        Misuse{"alpha_infinite",
               {"run", "a.h5", "b.h5", "--alpha", "inf"},
               {"--alpha", "finite", "'inf'"}},
        Misuse{"qk_norm_unknown",
               {"run", "a.h5", "b.h5", "--qk-norm", "l3"},
               {"--qk-norm", "one of l2, none, max", "'l3'"}},
        Misuse{"small_g_unknown",
               {"run", "a.h5", "b.h5", "--small-g", "warn"},
               {"--small-g", "one of check, clamp, ignore", "'warn'"}},
        Misuse{"norm_eps_negative",
               {"run", "a.h5", "b.h5", "--norm-eps", "-1"},
               {"--norm-eps", "a finite number >= 0", "-1"}},
        Misuse{"g_min_negative",
               {"run", "a.h5", "b.h5", "--g-min", "-1e-9"},
               {"--g-min", "a finite number >= 0", "-1e-09"}},
        Misuse{"dropout_negative",
               {"run", "a.h5", "b.h5", "--dropout-p", "-0.1"},
               {"--dropout-p", "a finite number >= 0", "-0.1"}},
        Misuse{"dropout_nan",
               {"generate", "a.h5", "--nq", "3", "--d", "3", "--dropout-p", "nan"},
               {"--dropout-p", "a finite number >= 0", "'nan'"}},
        Misuse{"seed_negative",
               {"run", "a.h5", "b.h5", "--seed", "-1"},
               {"--seed", "from 0 to 2^64 - 1", "'-1'"}},
        Misuse{"seed_too_large",
               {"run", "a.h5", "b.h5", "--seed", "18446744073709551616"},
               {"--seed", "from 0 to 2^64 - 1", "'18446744073709551616'"}},
        Misuse{"offset_fraction",
               {"run", "a.h5", "b.h5", "--offset", "1.5"},
               {"--offset", "from 0 to 2^64 - 1", "'1.5'"}},
        Misuse{"a_infinite", {"run", "a.h5", "b.h5", "--a", "inf"}, {"--a", "finite", "'inf'"}},
        Misuse{"center_and_not",
               {"run", "a.h5", "b.h5", "--center-v", "--no-center-v"},
               {"--center-v", "--no-center-v"}},
        Misuse{"center_with_a_value",
               {"run", "a.h5", "b.h5", "--center-v=2"},
               {"center-v", "override"}},
        Misuse{"moments_unknown",
               {"run", "a.h5", "b.h5", "--moments", "fixed"},
               {"--moments", "one of authors, table, fit, entropy", "'fixed'"}},
        Misuse{"moments_scope_unknown",
               {"run", "a.h5", "b.h5", "--moments-scope", "batch"},
               {"--moments-scope", "one of tensor, head", "'batch'"}},
        Misuse{"combine_unknown",
               {"run", "a.h5", "b.h5", "--combine", "sum"},
               {"--combine", "one of average, scale, ratio", "'sum'"}},
        Misuse{
            "block_zero", {"run", "a.h5", "b.h5", "--block", "0"}, {"--block", "an integer >= 1"}},
        Misuse{"generated_setting_of_another_variant",
               {"generate", "a.h5", "--nq", "3", "--d", "3", "--variant", "lln", "--dropout-seed",
                "1"},
               {"--dropout-seed: variant lln has no seed"}},
        Misuse{"extent_negative",
               {"generate", "a.h5", "--nq", "-3", "--d", "3"},
               {"--nq", "integer", "'-3'"}},
        Misuse{"distribution_unknown",
               {"generate", "a.h5", "--nq", "3", "--d", "3", "--dist", "cauchy"},
               {"--dist", "normal, uniform or constant", "'cauchy'"}}),
    [](const auto& info) { return info.param.name; });

#if !defined(KOKKOS_ENABLE_CUDA)
TEST(Usage, SpaceOfAnotherBuild) {
  EXPECT_TRUE(complained(run({"verify", "a.h5", "--space", "cuda"}), 2,
                         {"--space", "'cuda'", "the Kokkos of this build lacks"}));
}
#endif

}  // namespace
TEST(Usage, NamesAnUnknownSubcommand) {
  EXPECT_TRUE(
      complained(run({"frob"}), 2, {"unknown subcommand 'frob'", "run, verify, generate", "info"}));
  EXPECT_TRUE(complained(run({}), 2, {"subcommand is required"}));
}

}  // namespace LinAttn::test_app
