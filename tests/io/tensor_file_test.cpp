// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <hdf5.h>

#include <cmath>
#include <functional>
#include <limits>
#include <linattn/io/tensor_file.hpp>
#include <linattn/io/writer.hpp>
#include <map>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using namespace LinAttn::test_support;
using LinAttn::InvalidArgument;
using LinAttn::Problem;

/// B=2 H=4 Hkv=2 Nq=3 Nk=5 D=6 Dv=7, and what a test changes of it.
struct Content {
  std::string schema = "linattn-1";
  std::string variant = "elu";
  std::map<std::string, std::vector<hsize_t>> ramps = {
      {"/inputs/q", {2, 4, 3, 6}}, {"/inputs/k", {2, 2, 5, 6}}, {"/inputs/v", {2, 2, 5, 7}}};
  std::vector<std::function<void(RawFile&)>> more;

  Content& with(std::function<void(RawFile&)> change) {
    more.push_back(std::move(change));
    return *this;
  }
  Content& ramp(const std::string& path, std::vector<hsize_t> extents) {
    ramps[path] = std::move(extents);
    return *this;
  }
  Content& config(const std::string& name, int value) {
    return with([=](RawFile& raw) { raw.integer("/config", name, value); });
  }
  Content& config(const std::string& name, const char* value) {
    return with([=, text = std::string(value)](RawFile& raw) { raw.text("/config", name, text); });
  }
  Content& offsets(const std::string& name, std::vector<std::int64_t> values) {
    return with([=](RawFile& raw) {
      raw.raw("/inputs/" + name, H5T_NATIVE_INT64, {values.size()}, values.data());
    });
  }
  /// One sequence of members: B = 1, Nq = 4, Nk = 5.
  Content& packed(std::vector<std::int64_t> q, std::vector<std::int64_t> k) {
    ramp("/inputs/q", {1, 4, 4, 6}).ramp("/inputs/k", {1, 2, 5, 6}).ramp("/inputs/v", {1, 2, 5, 7});
    return offsets("cu_seqlens_q", std::move(q)).offsets("cu_seqlens_k", std::move(k));
  }
  Content& mask(std::vector<std::uint8_t> values, std::vector<hsize_t> extents = {2, 5}) {
    return with([=](RawFile& raw) {
      raw.raw("/inputs/key_mask", H5T_NATIVE_UINT8, extents, values.data());
    });
  }
};

class TensorFileTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::filesystem::path file = folder / "in.h5";

  TensorFile read(const Content& content, const ReadOptions& options = {}) {
    {
      RawFile raw(file);
      if (!content.schema.empty()) raw.text("/", "schema", content.schema);
      if (!content.variant.empty()) raw.text("/", "variant", content.variant);
      raw.group("/config");
      for (const auto& [path, extents] : content.ramps) raw.ramp(path, extents);
      for (const auto& change : content.more) change(raw);
    }
    return TensorFile::read(file, options);
  }

  /// The message without the name of the file, which it has to begin with.
  std::string refusal(const Content& content, const ReadOptions& options = {}) {
    const std::string text = message_of<InvalidArgument>([&] { read(content, options); });
    const std::string prefix = file.string() + ": ";
    EXPECT_EQ(text.find(prefix), 0u) << text;
    return text.size() < prefix.size() ? text : text.substr(prefix.size());
  }
};

TEST_F(TensorFileTest, ReadsInputsAndFillsDefaults) {
  const TensorFile content =
      read(Content().with([](RawFile& raw) { raw.text("/", "producer", "a test"); }));
  EXPECT_EQ(content.variant(), "elu");
  EXPECT_EQ(content.producer(), "a test");
  EXPECT_EQ(content.attributes().at("schema"), Value("linattn-1"));
  EXPECT_EQ(content.problem(), (Problem{2, 4, 2, 3, 5, 6, 7}));
  EXPECT_FALSE(content.causal());
  EXPECT_TRUE(content.config().flag("normalise"));
  EXPECT_EQ(content.config().real("scale"), 1.0);
  EXPECT_FALSE(content.packed());
  EXPECT_EQ(content.members(), 2);
  EXPECT_EQ(content.q().extents(), (std::vector<std::int64_t>{2, 4, 3, 6}));
  EXPECT_EQ(content.q().as<double>()[143], 143.5);
  EXPECT_EQ(content.v().extents(), (std::vector<std::int64_t>{2, 2, 5, 7}));
  EXPECT_EQ(content.names("/inputs"), (std::vector<std::string>{"k", "q", "v"}));
  EXPECT_TRUE(content.names("/expected").empty());
  EXPECT_TRUE(content.ignored().empty());
  EXPECT_EQ(message_of<InvalidArgument>([&] { content.at("/cotangent/o"); }),
            file.string() + ": /cotangent/o: expected a dataset, found nothing");
}

TEST_F(TensorFileTest, DefaultsDependOnTheVariantAndOnD) {
  Content content;
  content.variant = "identity";
  EXPECT_FALSE(read(content).config().flag("normalise"));
  content.variant = "softmax";
  EXPECT_DOUBLE_EQ(read(content).config().real("scale"), 1 / std::sqrt(6.0));
  content.variant = "affine";
  EXPECT_EQ(read(content).config().real("scale"), 1.0);
  EXPECT_EQ(read(content).config().text("qk_norm"), "l2");
  EXPECT_DOUBLE_EQ(read(Content(content).config("qk_norm", "none")).config().real("scale"),
                   1 / std::sqrt(6.0));
  EXPECT_EQ(read(Content(content).config("qk_norm", "max")).config().real("scale"), 1.0);
  content.variant = "lln-diag";
  content.ramp("/inputs/q", {2, 4, 5, 6});
  EXPECT_EQ(read(content).config().integer("block"), 6);
  EXPECT_EQ(read(content).config().text("combine"), "average");
}

TEST_F(TensorFileTest, ReadsEveryPartOfAFixture) {
  Content content;
  content.variant = "lln";
  content.ramp("/config/beta", {2})
      .ramp("/inputs/state/S", {2, 2, 6, 7})
      .ramp("/inputs/state/z", {2, 2, 6})
      .ramp("/expected/o", {2, 4, 3, 7})
      .ramp("/expected/state/S", {2, 2, 6, 7})
      .ramp("/expected/moments/sigma_q", {4})
      .ramp("/expected/moments/sigma_k", {})
      .ramp("/expected/diagnostics/entropy", {2, 4})
      .ramp("/cotangent/o", {2, 4, 3, 7})
      .ramp("/cotangent/state/z", {2, 2, 6})
      .ramp("/expected_grad/q", {2, 4, 3, 6})
      .ramp("/expected_grad/alpha", {})
      .ramp("/expected_grad/beta", {2})
      .ramp("/expected_grad/state/S", {2, 2, 6, 7})
      .with([](RawFile& raw) {
        raw.real("/config", "alpha", 1.25);
        const std::int32_t shift[24] = {-3, 4};
        raw.dataset("/inputs/state/shift", H5T_STD_I32BE, {2, 2, 6}, H5T_NATIVE_INT32, shift);
        raw.real("/expected", "rtol_f64", 1e-9);
        raw.real("/expected", "rtol_f32", 0);
        raw.real("/expected_grad", "rtol_bf16", 0.5);
        raw.real("/expected/moments", "alpha", 2.5);
      });
  const TensorFile got = read(content);
  EXPECT_EQ(got.config().real("alpha"), 1.25);
  EXPECT_EQ(got.config().per_head("alpha", 4), (std::vector<double>{1.25, 1.25, 1.25, 1.25}));
  EXPECT_EQ(got.config().per_head("beta", 2), (std::vector<double>{0.5, 1.5}));
  EXPECT_EQ(message_of<InvalidArgument>([&] { got.config().real("beta"); }),
            file.string() + ": /config: expected one value for 'beta', found one for each head");
  EXPECT_EQ(message_of<InvalidArgument>([&] { got.config().per_head("beta", 3); }),
            file.string() + ": /config/beta: expected 3 values, found 2");
  EXPECT_EQ(got.at("/inputs/state/shift").as<std::int64_t>()[1], 4);
  EXPECT_EQ(got.names("/inputs/state"), (std::vector<std::string>{"S", "shift", "z"}));
  EXPECT_EQ(got.names("/expected"), std::vector<std::string>{"o"});
  EXPECT_EQ(got.names("/expected/moments"),
            (std::vector<std::string>{"alpha", "sigma_k", "sigma_q"}));
  EXPECT_EQ(got.at("/expected/moments/alpha").as<double>(), std::vector<double>{2.5});
  EXPECT_TRUE(got.has("/expected/diagnostics/entropy"));
  EXPECT_EQ(got.names("/expected_grad"), (std::vector<std::string>{"alpha", "beta", "q"}));
  EXPECT_EQ(got.names("/expected_grad/state"), std::vector<std::string>{"S"});
  EXPECT_EQ(got.names("/cotangent/state"), std::vector<std::string>{"z"});
  EXPECT_EQ(got.expected_tolerances().f64, 1e-9);
  EXPECT_EQ(got.expected_tolerances().f32, 0.0);
  EXPECT_EQ(got.expected_tolerances().f16, 4e-3);
  EXPECT_EQ(got.gradient_tolerances().f64, 1e-11);
  EXPECT_EQ(got.gradient_tolerances().bf16, 0.5);
  EXPECT_TRUE(got.ignored().empty());
}

TEST_F(TensorFileTest, AFileOfTheWriterIsReadBack) {
  {
    Writer writer(file);
    writer.attribute("/", "variant", "elu");
    writer.attribute("/config", "causal", true);
    for (const auto& [path, extents] : Content().ramps)
      writer.write(path, Array(ElementType::f32, {extents.begin(), extents.end()}));
    writer.commit();
  }
  const TensorFile got = TensorFile::read(file);
  EXPECT_TRUE(got.causal());
  EXPECT_EQ(got.problem(), (Problem{2, 4, 2, 3, 5, 6, 7}));
}

TEST_F(TensorFileTest, EmptyExtentsAreLegal) {
  for (std::size_t axis : {0u, 2u}) {
    Content content;
    for (auto& [path, extents] : content.ramps) extents[axis] = 0;
    EXPECT_EQ(read(content).q().size(), 0);
  }
  EXPECT_EQ(read(Content()
                     .ramp("/inputs/k", {2, 2, 0, 6})
                     .ramp("/inputs/v", {2, 2, 0, 7})
                     .mask({}, {2, 0}))
                .problem()
                .nk,
            0);
}

// ---- root ----

TEST_F(TensorFileTest, TheSchemaIsRequired) {
  Content content;
  content.schema = "";
  EXPECT_EQ(refusal(content), "attribute 'schema' of /: expected 'linattn-1', found nothing");
  content.schema = "linattn-2";
  EXPECT_EQ(refusal(content), "attribute 'schema' of /: expected 'linattn-1', found 'linattn-2'");
  content.schema = "";
  content.with([](RawFile& raw) { raw.integer("/", "schema", 1); });
  EXPECT_EQ(refusal(content), "attribute 'schema' of /: expected a string, found 1");
}

TEST_F(TensorFileTest, TheVariantIsKnownAndPresentWhereSomethingIsExpected) {
  const std::string names =
      "identity, elu, relu, quadratic, lln, lln-diag, affine, lavo, softmax, taylor, cosine, "
      "performer";
  Content content;
  content.variant = "sigmoid";
  EXPECT_EQ(refusal(content),
            "attribute 'variant' of /: expected one of " + names + ", found 'sigmoid'");
  EXPECT_EQ(refusal(content, {.variant = "elu"}),
            "attribute 'variant' of /: expected one of " + names + ", found 'sigmoid'");
  content.variant = "";
  EXPECT_EQ(read(content).variant(), "");
  EXPECT_EQ(read(content, {.variant = "relu"}).variant(), "relu");
  for (const std::string group : {"/expected", "/expected_grad"})
    EXPECT_EQ(refusal(Content(content).with([&](RawFile& raw) { raw.group(group); })),
              "attribute 'variant' of /: expected one of " + names + " because " + group +
                  " is present, found nothing");
  EXPECT_EQ(message_of<InvalidArgument>([&] { read(content, {.variant = "sigmoid"}); }),
            "variant: expected one of " + names + ", found 'sigmoid'");
}

TEST_F(TensorFileTest, WhatTheLayoutDoesNotKnowIsIgnoredAndSaid) {
  const TensorFile got = read(Content()
                                  .ramp("/notes/text", {3})
                                  .ramp("/inputs/tokens", {3})
                                  .ramp("/inputs/bases", {3})
                                  .ramp("/expected/o", {2, 4, 3, 7})
                                  .ramp("/expected/other", {1})
                                  .with([](RawFile& raw) {
                                    const double pair[] = {1, 2};
                                    raw.attribute("/", "pair", H5T_NATIVE_DOUBLE, pair, {2});
                                    raw.real("/expected", "rtol_f46", 1);
                                    raw.group("/config/remarks");
                                  }));
  EXPECT_EQ(got.ignored(),
            (std::vector<std::string>{"attribute 'pair' of /", "/config/remarks", "/inputs/bases",
                                      "/inputs/tokens", "attribute 'rtol_f46' of /expected",
                                      "/expected/other", "/notes"}));
}

// ---- /config ----

TEST_F(TensorFileTest, UnknownSettingsAreErrors) {
  EXPECT_EQ(
      refusal(Content().config("casual", 1)),
      "attribute 'casual' of /config: expected one of causal, normalise, scale for variant elu, "
      "found an unknown attribute");
  EXPECT_EQ(
      refusal(Content().config("alpha", 1)),
      "attribute 'alpha' of /config: expected one of causal, normalise, scale for variant elu, "
      "found an unknown attribute");
  EXPECT_EQ(refusal(Content().ramp("/config/alpha", {4})),
            "/config/alpha: expected one of none for variant elu, found an unknown dataset");
  Content plain;
  plain.variant = "";
  EXPECT_EQ(refusal(Content(plain).config("casual", 1)).find("attribute 'casual' of /config: "),
            0u);
  EXPECT_TRUE(read(Content(plain).config("causal", 1)).causal());
  EXPECT_EQ(refusal(Content(plain).config("alpha", 1), {.variant = "elu"})
                .find("attribute 'alpha' of /config: expected one of causal, normalise, scale"),
            0u);
}

TEST_F(TensorFileTest, SettingsAreOfTheirKind) {
  EXPECT_EQ(refusal(Content().config("causal", 2)),
            "attribute 'causal' of /config: expected 0 or 1, found 2");
  EXPECT_EQ(refusal(Content().config("scale", "1.0")),
            "attribute 'scale' of /config: expected a finite number, found '1.0'");
  EXPECT_EQ(refusal(Content().with([](RawFile& raw) {
              raw.real("/config", "scale", std::numeric_limits<double>::infinity());
            })),
            "attribute 'scale' of /config: expected a finite number, found inf");
  EXPECT_EQ(refusal(Content().with([](RawFile& raw) {
              const double pair[] = {1, 2};
              raw.attribute("/config", "scale", H5T_NATIVE_DOUBLE, pair, {2});
            })),
            "attribute 'scale' of /config: expected one value, found an array of values");
  const TensorFile got = read(
      Content().config("scale", -2).with([](RawFile& raw) { raw.real("/config", "causal", 1.0); }));
  EXPECT_EQ(got.config().real("scale"), -2.0);
  EXPECT_TRUE(got.causal());
}

TEST_F(TensorFileTest, PerHeadSettings) {
  Content content;
  content.variant = "lln";
  EXPECT_EQ(refusal(Content(content).ramp("/config/alpha", {2})),
            "/config/alpha: expected extents (H) with H = 4 as in /inputs/q, found extents (2)");
  EXPECT_EQ(refusal(Content(content).ramp("/config/beta", {4})),
            "/config/beta: expected extents (Hkv) with Hkv = 2 as in /inputs/k, found extents (4)");
  EXPECT_EQ(refusal(Content(content).ramp("/config/alpha", {4}).config("alpha", 1)),
            "/config/alpha: expected either an attribute or a dataset of this name, found both");
  EXPECT_EQ(refusal(Content(content).config("moments", "fit").config("alpha", 1)),
            "/config: expected either moments or alpha and beta, found both");
  EXPECT_EQ(refusal(Content(content).config("moments", "guess")),
            "attribute 'moments' of /config: expected one of authors, table, fit, entropy, found "
            "'guess'");
  EXPECT_EQ(read(Content(content).config("moments", "fit")).config().text("moments_scope"),
            "tensor");
  EXPECT_FALSE(read(content).config().has("alpha"));
}

TEST_F(TensorFileTest, OptionsOverrideTheFile) {
  Content content;
  content.variant = "lln";
  content.config("causal", 1).config("alpha", 1).ramp("/config/beta", {2});
  const TensorFile got = read(content, {.config = {{"causal", 0}, {"beta", 3}}});
  EXPECT_FALSE(got.causal());
  EXPECT_EQ(got.config().per_head("beta", 2), (std::vector<double>{3, 3}));
  const TensorFile moments = read(content, {.config = {{"moments", "table"}}});
  EXPECT_FALSE(moments.config().has("alpha"));
  EXPECT_FALSE(moments.config().has("beta"));
  Content with_moments;
  with_moments.variant = "lln";
  with_moments.config("moments", "fit");
  EXPECT_FALSE(read(with_moments, {.config = {{"alpha", 1}, {"beta", 1}}}).config().has("moments"));

  const auto option_refusal = [&](const std::map<std::string, Value>& config) {
    return message_of<InvalidArgument>([&] { read(content, {.config = config}); });
  };
  EXPECT_EQ(option_refusal({{"causal", 3}}), "option 'causal': expected 0 or 1, found 3");
  EXPECT_EQ(option_refusal({{"window", 3}}),
            "option 'window': variant lln has no window; it has causal, normalise, scale, alpha, "
            "beta, moments, moments_scope");
  EXPECT_EQ(option_refusal({{"alpha", 3}, {"moments", "fit"}}),
            "option 'moments': expected either moments or alpha and beta, found both");
}

TEST_F(TensorFileTest, AnotherVariantKeepsOnlyWhatAllVariantsShare) {
  Content content;
  content.variant = "identity";
  content.config("causal", 1)
      .config("scale", 3)
      .ramp("/expected/o", {2, 4, 3, 7})
      .ramp("/cotangent/o", {2, 4, 3, 7});
  const TensorFile got = read(content, {.variant = "elu"});
  EXPECT_EQ(got.variant(), "elu");
  EXPECT_EQ(got.file_variant(), "identity");
  EXPECT_TRUE(got.causal());
  EXPECT_EQ(got.config().real("scale"), 3.0);
  EXPECT_TRUE(got.config().flag("normalise"));
  EXPECT_TRUE(got.has("/cotangent/o"));
  EXPECT_FALSE(got.has("/expected/o"));
  EXPECT_EQ(got.ignored(), std::vector<std::string>{"/expected"});

  Content lln;
  lln.variant = "lln";
  lln.config("alpha", 1);
  EXPECT_FALSE(read(lln, {.variant = "elu"}).config().has("alpha"));

  // A scale of the scores is none of the output.
  content.variant = "elu";
  const TensorFile affine = read(content, {.variant = "affine"});
  EXPECT_EQ(affine.config().real("scale"), 1.0);
  EXPECT_EQ(affine.ignored(),
            (std::vector<std::string>{"attribute 'scale' of /config", "/expected"}));
  content.variant = "affine";
  EXPECT_EQ(read(content, {.variant = "elu"}).config().real("scale"), 1.0);
}

// ---- tensors ----

TEST_F(TensorFileTest, MissingTensorsAndGroups) {
  Content content;
  content.ramps.erase("/inputs/k");
  EXPECT_EQ(refusal(content),
            "/inputs/k: expected a dataset with extents (B, Hkv, Nk, D), found nothing");
  content.ramps.clear();
  EXPECT_EQ(refusal(content), "/inputs: expected a group with q, k and v, found nothing");
  content.ramp("/inputs", {3});
  EXPECT_EQ(refusal(content), "/inputs: expected a group, found a dataset");
  Content group;
  group.ramps.erase("/inputs/v");
  group.with([](RawFile& raw) { raw.group("/inputs/v"); });
  EXPECT_EQ(refusal(group), "/inputs/v: expected a dataset, found a group");
}

TEST_F(TensorFileTest, TypesOfTensors) {
  const auto of_type = [](hid_t type) {
    Content content;
    content.ramps.erase("/inputs/q");
    return content.with([=](RawFile& raw) { raw.ramp("/inputs/q", {2, 4, 3, 6}, type); });
  };
  const std::string expected = "/inputs/q: expected float16, float32 or float64, found ";
  EXPECT_EQ(refusal(of_type(H5T_STD_I32LE)), expected + "int32");
  EXPECT_EQ(refusal(of_type(H5T_STD_U8LE)), expected + "uint8");
  EXPECT_EQ(refusal(of_type(H5T_STD_I64BE)), expected + "int64");
  EXPECT_EQ(read(of_type(H5T_IEEE_F32BE)).q().type(), ElementType::f32);
}

TEST_F(TensorFileTest, ExtentsOfTensors) {
  EXPECT_EQ(refusal(Content().ramp("/inputs/q", {4, 3, 6})),
            "/inputs/q: expected rank 4 (B, H, Nq, D), found rank 3 with extents (4, 3, 6)");
  EXPECT_EQ(
      refusal(Content().ramp("/inputs/k", {3, 2, 5, 6})),
      "/inputs/k: expected extents (B, Hkv, Nk, D) with B = 2 as in /inputs/q, found extents (3, "
      "2, 5, 6)");
  EXPECT_EQ(
      refusal(Content().ramp("/inputs/k", {2, 2, 5, 7})),
      "/inputs/k: expected extents (B, Hkv, Nk, D) with D = 6 as in /inputs/q, found extents (2, "
      "2, 5, 7)");
  EXPECT_EQ(
      refusal(Content().ramp("/inputs/v", {2, 1, 5, 7})),
      "/inputs/v: expected extents (B, Hkv, Nk, Dv) with Hkv = 2 as in /inputs/k, found extents "
      "(2, 1, 5, 7)");
  EXPECT_EQ(
      refusal(Content().ramp("/inputs/v", {2, 2, 4, 7})),
      "/inputs/v: expected extents (B, Hkv, Nk, Dv) with Nk = 5 as in /inputs/k, found extents "
      "(2, 2, 4, 7)");
  EXPECT_EQ(refusal(Content().ramp("/inputs/k", {2, 3, 5, 6}).ramp("/inputs/v", {2, 3, 5, 7})),
            "/inputs/q: expected H to be a multiple of Hkv = 3 as in /inputs/k, found H = 4");
  EXPECT_EQ(refusal(Content().ramp("/inputs/k", {2, 0, 5, 6}).ramp("/inputs/v", {2, 0, 5, 7})),
            "/inputs/q: expected H to be a multiple of Hkv = 0 as in /inputs/k, found H = 4");
  EXPECT_EQ(
      refusal(Content().ramp("/expected/o", {2, 4, 3, 6})),
      "/expected/o: expected extents (B, H, Nq, Dv) with Dv = 7 as in /inputs/v, found extents (2, "
      "4, 3, 6)");
  EXPECT_EQ(
      refusal(Content().ramp("/expected_grad/v", {2, 4, 5, 7})),
      "/expected_grad/v: expected extents (B, Hkv, Nk, Dv) with Hkv = 2 as in /inputs/k, found "
      "extents (2, 4, 5, 7)");
}

TEST_F(TensorFileTest, CausalNeedsAKeyForEveryQuery) {
  Content content;
  content.ramp("/inputs/q", {2, 4, 8, 6});
  EXPECT_EQ(read(content).problem().nq, 8);
  const std::string expected =
      "/inputs/q: expected Nq <= Nk because causal = 1, found Nq = 8 and Nk = 5";
  EXPECT_EQ(refusal(Content(content).config("causal", 1)), expected);
  EXPECT_EQ(refusal(content, {.config = {{"causal", 1}}}), expected);
  EXPECT_EQ(read(Content(content).config("causal", 1), {.config = {{"causal", 0}}}).problem().nq,
            8);
}

// ---- masks and offsets ----

TEST_F(TensorFileTest, KeyMasks) {
  EXPECT_TRUE(read(Content().mask({1, 0, 1, 0, 1, 1, 1, 1, 1, 1})).has("/inputs/key_mask"));
  EXPECT_EQ(refusal(Content().mask({1, 0, 1, 0, 1, 1, 1, 2, 1, 1})),
            "/inputs/key_mask: expected 0 or 1, found 2 at (1, 2)");
  EXPECT_EQ(
      refusal(Content().mask({1, 0, 1, 0, 1, 1}, {2, 3})),
      "/inputs/key_mask: expected extents (B, Nk) with Nk = 5 as in /inputs/k, found extents (2, "
      "3)");
  EXPECT_EQ(refusal(Content().with([](RawFile& raw) {
              raw.ramp("/inputs/key_mask", {2, 5}, H5T_STD_I64LE);
            })),
            "/inputs/key_mask: expected uint8, found int64");
}

TEST_F(TensorFileTest, PackedOffsets) {
  const TensorFile got = read(Content().packed({0, 1, 1, 4}, {0, 2, 3, 5}).config("causal", 0));
  EXPECT_TRUE(got.packed());
  EXPECT_EQ(got.members(), 3);
  EXPECT_EQ(got.problem(), (Problem{1, 4, 2, 4, 5, 6, 7, 3, 3, 2}));
  EXPECT_EQ(refusal(Content().packed({0, 1, 1, 4}, {0, 2, 5})),
            "/inputs/cu_seqlens_k: expected extents (S+1) with S+1 = 4 as in /inputs/cu_seqlens_q, "
            "found extents (3)");
  EXPECT_EQ(refusal(Content().packed({1, 4}, {0, 5})),
            "/inputs/cu_seqlens_q: expected the first offset to be 0, found 1");
  EXPECT_EQ(refusal(Content().packed({0, 3, 2, 4}, {0, 2, 3, 5})),
            "/inputs/cu_seqlens_q: expected non-decreasing offsets, found 3 followed by 2 at (2)");
  EXPECT_EQ(refusal(Content().packed({0, 3}, {0, 5})),
            "/inputs/cu_seqlens_q: expected the last offset to be Nq = 4, found 3");
  EXPECT_EQ(refusal(Content().packed({0, 4}, {0, 6})),
            "/inputs/cu_seqlens_k: expected the last offset to be Nk = 5, found 6");
  EXPECT_EQ(refusal(Content().packed({}, {})),
            "/inputs/cu_seqlens_q: expected at least one offset, found extents (0)");
  EXPECT_EQ(
      refusal(Content().offsets("cu_seqlens_q", {0, 3})),
      "/inputs/cu_seqlens_k: expected a dataset because cu_seqlens_q is given, found nothing");
  EXPECT_EQ(
      refusal(Content().offsets("cu_seqlens_k", {0, 5})),
      "/inputs/cu_seqlens_q: expected a dataset because cu_seqlens_k is given, found nothing");
  EXPECT_EQ(refusal(Content().offsets("cu_seqlens_q", {0, 3}).offsets("cu_seqlens_k", {0, 5})),
            "/inputs/cu_seqlens_q: expected B = 1 for packed sequences, found B = 2 in /inputs/q");
  EXPECT_EQ(
      refusal(Content().packed({0, 4}, {0, 5}).mask({1, 1, 1, 1, 1}, {1, 5})),
      "/inputs/key_mask: expected nothing because cu_seqlens_q and cu_seqlens_k are given, found a "
      "dataset");
  Content narrow;
  narrow.packed({0, 4}, {0, 5});
  narrow.more.pop_back();
  const std::int32_t offsets[] = {0, 5};
  narrow.with(
      [&](RawFile& raw) { raw.raw("/inputs/cu_seqlens_k", H5T_NATIVE_INT32, {2}, offsets); });
  EXPECT_EQ(refusal(narrow), "/inputs/cu_seqlens_k: expected int64, found int32");
}

TEST_F(TensorFileTest, CausalHoldsInEveryPackedSequence) {
  EXPECT_EQ(
      refusal(Content().packed({0, 1, 4}, {0, 3, 5}).config("causal", 1)),
      "/inputs/cu_seqlens_q: expected Nq <= Nk because causal = 1, found Nq = 3 and Nk = 2 in "
      "packed sequence 1");
  EXPECT_EQ(read(Content().packed({0, 2, 4}, {0, 3, 5}).config("causal", 1)).members(), 2);
}

// ---- states ----

TEST_F(TensorFileTest, InitialStates) {
  Content content;
  content.ramp("/inputs/state/S", {2, 2, 6, 7});
  EXPECT_EQ(refusal(content),
            "/inputs/state/z: expected a dataset with extents (M, Hkv, R), found nothing");
  EXPECT_TRUE(read(Content(content).config("normalise", 0)).has("/inputs/state/S"));
  EXPECT_EQ(
      refusal(Content(content).ramp("/inputs/state/z", {2, 2, 5})),
      "/inputs/state/z: expected extents (M, Hkv, R) with R = 6 as in /inputs/q (R = D), found "
      "extents (2, 2, 5)");
  EXPECT_EQ(
      refusal(Content()
                  .packed({0, 2, 2, 4}, {0, 2, 4, 5})
                  .ramp("/inputs/state/S", {2, 2, 6, 7})
                  .ramp("/inputs/state/z", {2, 2, 6})),
      "/inputs/state/S: expected extents (M, Hkv, R, Dv) with M = 3 as in /inputs/cu_seqlens_q, "
      "found extents (2, 2, 6, 7)");
}

TEST_F(TensorFileTest, StatesOfOtherVariants) {
  Content affine;
  affine.variant = "affine";
  affine.ramp("/inputs/state/S", {2, 2, 6, 7})
      .ramp("/inputs/state/z", {2, 2, 6})
      .ramp("/inputs/state/t", {2, 2, 7});
  EXPECT_EQ(refusal(affine), "/inputs/state/m: expected a dataset with extents (M), found nothing");
  EXPECT_EQ(refusal(Content(affine).ramp("/inputs/state/m", {2})),
            "/inputs/state/m: expected int64, found float64");
  const std::int64_t counts[] = {3, 4};
  affine.with([&](RawFile& raw) { raw.raw("/inputs/state/m", H5T_STD_I64LE, {2}, counts); });
  EXPECT_EQ(read(affine).at("/inputs/state/m").as<std::int64_t>()[1], 4);
}

// ---- results ----

TEST_F(TensorFileTest, GradientsOfParametersAndTolerances) {
  Content content;
  content.variant = "lln";
  content.ramp("/config/alpha", {4}).config("beta", 1);
  EXPECT_EQ(refusal(Content(content).ramp("/expected_grad/alpha", {})),
            "/expected_grad/alpha: expected extents (H) = (4), found extents ()");
  EXPECT_EQ(refusal(Content(content).ramp("/expected_grad/beta", {4})),
            "/expected_grad/beta: expected one number or extents (Hkv) = (2), found extents (4)");
  EXPECT_EQ(refusal(Content(content).ramp("/expected_grad/q", {2, 4, 3, 6}).with([](RawFile& raw) {
              raw.real("/expected_grad", "rtol_f64", -1);
            })),
            "attribute 'rtol_f64' of /expected_grad: expected a finite number >= 0, found -1");
  EXPECT_EQ(refusal(Content(content).ramp("/expected_grad/q", {2, 4, 3, 6}).with([](RawFile& raw) {
              raw.text("/expected_grad", "rtol_f64", "small");
            })),
            "attribute 'rtol_f64' of /expected_grad: expected a finite number >= 0, found 'small'");
  EXPECT_EQ(
      read(Content(content).ramp("/expected_grad/alpha", {4}).ramp("/expected_grad/beta", {1}))
          .names("/expected_grad"),
      (std::vector<std::string>{"alpha", "beta"}));
}

// ---- rules of single variants ----

TEST_F(TensorFileTest, LlnDiag) {
  Content content;
  content.variant = "lln-diag";
  EXPECT_EQ(
      refusal(content),
      "/inputs/q: expected Nq = Nk because lln-diag with causal = 0 needs it, found Nq = 3 and Nk "
      "= 5");
  content.config("causal", 1);
  EXPECT_EQ(read(Content(content).ramp("/inputs/diag_r", {4, 7})).names("/inputs"),
            (std::vector<std::string>{"diag_r", "k", "q", "v"}));
  EXPECT_EQ(
      refusal(Content(content).ramp("/inputs/diag_p", {2, 7})),
      "/inputs/diag_p: expected extents (H, Dv) with H = 4 as in /inputs/q, found extents (2, 7)");
  EXPECT_EQ(refusal(Content(content).config("block", 0)),
            "attribute 'block' of /config: expected an integer >= 1, found 0");
}

TEST_F(TensorFileTest, Performer) {
  Content content;
  content.variant = "performer";
  // Without a projection the number of features is a setting; states have that many rows.
  EXPECT_EQ(read(content).config().integer("features"), 12);
  EXPECT_EQ(read(Content(content).config("features", 5)).config().integer("features"), 5);
  const auto with_state = [&](hsize_t features) {
    return Content(content)
        .ramp("/inputs/state/S", {2, 2, features, 7})
        .ramp("/inputs/state/z", {2, 2, features});
  };
  EXPECT_TRUE(read(with_state(12)).has("/inputs/state/S"));
  EXPECT_EQ(refusal(with_state(6)),
            "/inputs/state/S: expected extents (M, Hkv, R, Dv) with R = 12 as in the setting "
            "features, or /inputs/projection, found extents (2, 2, 6, 7)");
  // With one it is that of its rows, and another is refused.
  content.ramp("/inputs/projection", {9, 6});
  EXPECT_EQ(read(content).config().integer("features"), 9);
  EXPECT_EQ(read(content).at("/inputs/projection").extent(0), 9);
  EXPECT_TRUE(read(with_state(9)).has("/inputs/state/z"));
  EXPECT_EQ(read(Content(content).config("features", 9)).config().integer("features"), 9);
  EXPECT_EQ(refusal(Content(content).config("features", 8)),
            "/inputs/projection: expected extents (features, D) with features = 8 as in the "
            "setting features, found extents (9, 6)");
  EXPECT_EQ(refusal(Content(content).ramp("/inputs/projection", {9, 5})),
            "/inputs/projection: expected extents (features, D) with D = 6 as in /inputs/q, found "
            "extents (9, 5)");
  EXPECT_EQ(refusal(Content(content).ramp("/inputs/projection", {0, 6})),
            "/inputs/projection: expected at least one row, found none");
  // It has no gradient.
  EXPECT_EQ(read(Content(content).ramp("/expected_grad/projection", {9, 6})).ignored(),
            (std::vector<std::string>{"/expected_grad/projection"}));
}

TEST_F(TensorFileTest, TaylorAndSoftmax) {
  Content content;
  content.variant = "taylor";
  content.ramp("/inputs/state/S", {2, 2, 28, 7}).ramp("/inputs/state/z", {2, 2, 28});
  EXPECT_TRUE(read(content).has("/inputs/state/S"));
  EXPECT_DOUBLE_EQ(read(content).config().real("scale"), 1 / std::sqrt(6.0));
  EXPECT_EQ(refusal(Content(content).ramp("/inputs/state/S", {2, 2, 6, 7})),
            "/inputs/state/S: expected extents (M, Hkv, R, Dv) with R = 28 as in /inputs/q (R = 1 "
            "+ D + D (D + 1) / 2), found extents (2, 2, 6, 7)");
  for (const char* variant : {"taylor", "softmax"}) {
    content = Content();
    content.variant = variant;
    content.with([](RawFile& raw) { raw.real("/config", "scale", -0.5); });
    EXPECT_EQ(refusal(content),
              "attribute 'scale' of /config: expected a finite number > 0, found -0.5");
  }
}

class LavoFileTest : public TensorFileTest {
 protected:
  Content content;
  LavoFileTest() {
    content.variant = "lavo";
    content.ramp("/inputs/v", {2, 2, 5, 6}).with([](RawFile& raw) {
      double bases[2][3][6] = {};
      for (int head = 0; head < 2; ++head)
        for (int i = 0; i < 3; ++i) bases[head][i][2 * i + head] = i == 1 ? -1 : 1;
      raw.raw("/inputs/bases", H5T_NATIVE_DOUBLE, {2, 3, 6}, bases);
    });
  }
};

TEST_F(LavoFileTest, Bases) {
  EXPECT_EQ(read(content).at("/inputs/bases").extent(1), 3);
  Content missing = content;
  missing.more.clear();
  EXPECT_EQ(refusal(missing),
            "/inputs/bases: expected a dataset with extents (Hkv, r, D), found nothing");
  Content slanted = missing;
  slanted.ramp("/inputs/bases", {2, 3, 6});
  EXPECT_EQ(
      refusal(slanted).find("/inputs/bases: expected orthonormal rows (check_bases = 0 allows "
                            "others), found "),
      0u);
  EXPECT_TRUE(read(Content(slanted).config("check_bases", 0)).has("/inputs/bases"));
  EXPECT_EQ(refusal(Content(missing).ramp("/inputs/bases", {2, 7, 6}).config("check_bases", 0)),
            "/inputs/bases: expected at most D = 6 rows, found 7");
}

TEST_F(LavoFileTest, ValuesTiedToKeys) {
  EXPECT_EQ(
      refusal(Content(content).ramp("/inputs/v", {2, 2, 5, 7})),
      "/inputs/v: expected extents (B, Hkv, Nk, Dv) with Dv = 6 as in /inputs/q (lavo needs Dv = "
      "D), found extents (2, 2, 5, 7)");
  EXPECT_EQ(refusal(Content(content).config("tied", 1)),
            "/inputs/v: expected nothing because tied = 1 makes v equal k, found a dataset");
  content.ramps.erase("/inputs/v");
  const TensorFile got = read(content.config("tied", 1));
  EXPECT_EQ(&got.v(), &got.k());
  EXPECT_EQ(got.problem().dv, 6);
}

TEST_F(LavoFileTest, TableOfBiases) {
  content.config("bias", "table").config("window", 4);
  EXPECT_EQ(refusal(content),
            "/inputs/bias: expected a dataset with extents (H, nb) because bias = 'table', found "
            "nothing");
  const auto fits = [&](const char* kind, int causal, hsize_t slots) {
    Content with_bias = content;
    with_bias.config("window_kind", kind).config("causal", causal).ramp("/inputs/bias", {4, slots});
    return read(with_bias).has("/inputs/bias");
  };
  EXPECT_TRUE(fits("slide", 0, 4));
  EXPECT_TRUE(fits("slide", 1, 4));
  EXPECT_TRUE(fits("block", 1, 4));
  EXPECT_TRUE(fits("block", 0, 7));
  EXPECT_TRUE(fits("block+1", 1, 8));
  EXPECT_TRUE(fits("block+1", 0, 11));
  EXPECT_EQ(
      refusal(Content(content).ramp("/inputs/bias", {4, 5})),
      "/inputs/bias: expected extents (H, nb) with nb = 4 as in window and window_kind, found "
      "extents (4, 5)");
}

TEST_F(LavoFileTest, States) {
  content.config("window", 4);
  content.ramp("/inputs/state/ring_k", {2, 2, 4, 6})
      .ramp("/inputs/state/ring_v", {2, 2, 4, 6})
      .ramp("/inputs/state/mK", {2, 2, 3})
      .ramp("/inputs/state/W", {2});
  EXPECT_EQ(refusal(content),
            "/inputs/state/mV: expected a dataset with extents (M, Hkv, r), found nothing");
  content.with([](RawFile& raw) {
    const std::int64_t position[] = {3, 3};
    raw.raw("/inputs/state/position", H5T_STD_I64LE, {2}, position);
  });
  EXPECT_TRUE(read(Content(content).ramp("/inputs/state/mV", {2, 2, 3})).has("/inputs/state/mV"));
  EXPECT_EQ(refusal(Content(content).with([](RawFile& raw) {
              raw.ramp("/inputs/state/mV", {2, 2, 3}, H5T_IEEE_F32LE);
            })),
            "/inputs/state/mV: expected float64, found float32");
  content.ramps.erase("/inputs/v");
  content.ramps.erase("/inputs/state/ring_v");
  EXPECT_FALSE(read(content.config("tied", 1)).has("/inputs/state/mV"));
}

}  // namespace
