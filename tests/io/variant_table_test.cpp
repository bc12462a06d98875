// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <linattn/io/variant_table.hpp>
#include <set>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using LinAttn::InvalidArgument;
using LinAttn::test_support::message_of;

AttributeSpec attribute(const char* variant, std::string_view name) {
  for (const AttributeSpec& spec : attributes_of(variant_spec(variant)))
    if (spec.name == name) return spec;
  throw std::runtime_error("no such attribute");
}

TEST(VariantTable, KnowsTheVariantsOfTheLayout) {
  EXPECT_EQ(variant_names(),
            "identity, elu, relu, quadratic, lln, lln-diag, affine, lavo, softmax, taylor, cosine, "
            "performer");
  EXPECT_EQ(message_of<InvalidArgument>([] { variant_spec("sigmoid"); }),
            "variant: expected one of identity, elu, relu, quadratic, lln, lln-diag, affine, lavo, "
            "softmax, taylor, cosine, performer, found 'sigmoid'");
}

TEST(VariantTable, NamesAreUniqueAndCausalNormaliseAndScaleAreEverywhere) {
  for (const VariantSpec& variant : variant_table()) {
    std::set<std::string_view> names;
    for (const AttributeSpec& spec : attributes_of(variant))
      EXPECT_TRUE(names.insert(spec.name).second) << variant.name << " " << spec.name;
    for (const char* name : {"causal", "normalise", "scale"}) EXPECT_TRUE(names.contains(name));
    for (const DatasetSpec& spec : variant.config)
      EXPECT_TRUE(names.contains(spec.name) || spec.name == "alibi_slopes") << spec.name;
  }
}

TEST(VariantTable, DefaultsOfTheLayout) {
  EXPECT_EQ(attribute("elu", "normalise").default_value, 1);
  EXPECT_EQ(attribute("identity", "normalise").default_value, 0);
  EXPECT_EQ(attribute("elu", "scale").default_value, 1);
  EXPECT_EQ(attribute("softmax", "scale").default_rule, DefaultRule::inverse_sqrt_d);
  EXPECT_EQ(attribute("affine", "scale").default_rule, DefaultRule::affine_scale);
  EXPECT_EQ(attribute("lln-diag", "block").default_rule, DefaultRule::feature_extent);
  EXPECT_EQ(attribute("lln", "alpha").default_rule, DefaultRule::none);
  EXPECT_EQ(attribute("lavo", "window").default_value, 128);
  EXPECT_EQ(attribute("taylor", "scale").default_rule, DefaultRule::inverse_sqrt_d);
  EXPECT_EQ(attribute("taylor", "normalise").default_value, 1);
  EXPECT_EQ(attribute("cosine", "normalise").default_value, 0);
  EXPECT_EQ(attribute("cosine", "scale").default_value, 1);
  EXPECT_EQ(attribute("performer", "features").default_rule, DefaultRule::twice_feature_extent);
  EXPECT_EQ(attribute("performer", "seed").default_value, 0);
}

TEST(VariantTable, DefaultsBesideWhatIsGiven) {
  const auto of = [](const char* variant, const char* name,
                     const std::map<std::string, Value>& given, std::int64_t d) {
    return default_of(attribute(variant, name), given, d).value_or("nothing");
  };
  EXPECT_EQ(of("affine", "scale", {}, 16), Value(1.0));
  EXPECT_EQ(of("affine", "scale", {{"qk_norm", "max"}}, 16), Value(1.0));
  EXPECT_EQ(of("affine", "scale", {{"qk_norm", "none"}}, 16), Value(0.25));
  EXPECT_EQ(of("affine", "scale", {{"qk_norm", "none"}}, 0), Value(1.0));
  EXPECT_EQ(of("softmax", "scale", {}, 4), Value(0.5));
  EXPECT_EQ(of("taylor", "scale", {}, 16), Value(0.25));
  EXPECT_EQ(of("performer", "features", {}, 12), Value(24));
  EXPECT_EQ(of("performer", "features", {}, 0), Value(1));
  EXPECT_EQ(of("lln-diag", "block", {}, 12), Value(12));
  EXPECT_EQ(of("affine", "small_g", {}, 1), Value("check"));
  EXPECT_EQ(of("affine", "seed", {}, 1), Value(0));
  EXPECT_EQ(of("identity", "normalise", {}, 1), Value(0));
  EXPECT_EQ(of("lln", "alpha", {}, 1), Value("nothing"));
}

TEST(VariantTable, AttributesByName) {
  EXPECT_EQ(attribute_of(variant_spec("affine"), "scale").default_rule, DefaultRule::affine_scale);
  EXPECT_EQ(attribute_of(variant_spec("elu"), "scale").default_rule, DefaultRule::value);
  EXPECT_EQ(message_of<InvalidArgument>([] { attribute_of(variant_spec("elu"), "qk_norm"); }),
            "variant elu has no qk_norm; it has causal, normalise, scale");
}

TEST(VariantTable, CoercesWhatMeansTheSame) {
  EXPECT_EQ(coerce(attribute("elu", "causal"), true), Value(1));
  EXPECT_EQ(coerce(attribute("elu", "causal"), 0.0), Value(0));
  EXPECT_EQ(coerce(attribute("lavo", "window"), 64.0), Value(64));
  EXPECT_EQ(coerce(attribute("elu", "scale"), 2), Value(2.0));
  EXPECT_EQ(coerce(attribute("affine", "seed"), std::uint64_t{1} << 63).as_uint64(),
            std::uint64_t{1} << 63);
  EXPECT_EQ(coerce(attribute("lavo", "window_kind"), "block+1"), Value("block+1"));
}

TEST(VariantTable, RefusesWhatDoesNot) {
  const auto refusal = [](const char* variant, const char* name, const Value& value) {
    return message_of<InvalidArgument>([&] { coerce(attribute(variant, name), value); });
  };
  EXPECT_EQ(refusal("elu", "causal", 2), "expected 0 or 1, found 2");
  EXPECT_EQ(refusal("elu", "causal", "1"), "expected 0 or 1, found '1'");
  EXPECT_EQ(refusal("elu", "scale", std::numeric_limits<double>::quiet_NaN()),
            "expected a finite number, found nan");
  EXPECT_EQ(refusal("lavo", "window", 0), "expected an integer >= 1, found 0");
  EXPECT_EQ(refusal("lavo", "window", 2.5), "expected an integer >= 1, found 2.5");
  for (const char* name : {"norm_eps", "g_min", "dropout_p"}) {
    EXPECT_EQ(refusal("affine", name, -0.1), "expected a finite number >= 0, found -0.1");
    EXPECT_EQ(coerce(attribute("affine", name), 0), Value(0.0));
  }
  for (const char* variant : {"softmax", "taylor"}) {
    for (const double scale : {0.0, -0.5})
      EXPECT_EQ(refusal(variant, "scale", scale),
                "expected a finite number > 0, found " + Value(scale).to_string());
    EXPECT_EQ(coerce(attribute(variant, "scale"), 1e-300), Value(1e-300));
  }
  EXPECT_EQ(refusal("performer", "features", 0), "expected an integer >= 1, found 0");
  EXPECT_EQ(coerce(attribute("cosine", "scale"), -2), Value(-2.0));
  EXPECT_EQ(coerce(attribute("affine", "a"), -1e300), Value(-1e300));
  EXPECT_EQ(refusal("affine", "seed", -1), "expected an integer from 0 to 2^64 - 1, found -1");
  EXPECT_EQ(refusal("affine", "qk_norm", "l3"), "expected one of l2, none, max, found 'l3'");
  EXPECT_EQ(refusal("affine", "qk_norm", ""), "expected one of l2, none, max, found ''");
  EXPECT_EQ(refusal("affine", "qk_norm", 2), "expected one of l2, none, max, found 2");
}

TEST(VariantTable, ParsesText) {
  EXPECT_EQ(parse(attribute("elu", "causal"), "1"), Value(1));
  EXPECT_EQ(parse(attribute("elu", "scale"), "-2.5e-1"), Value(-0.25));
  EXPECT_EQ(parse(attribute("lavo", "window"), "64"), Value(64));
  EXPECT_EQ(parse(attribute("affine", "seed"), "18446744073709551615").as_uint64(),
            std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(parse(attribute("lln", "moments"), "fit"), Value("fit"));
  const auto refusal = [](const char* variant, const char* name, const char* text) {
    return message_of<InvalidArgument>([&] { parse(attribute(variant, name), text); });
  };
  EXPECT_EQ(refusal("elu", "causal", "yes"), "expected 0 or 1, found 'yes'");
  EXPECT_EQ(refusal("elu", "scale", "1.0x"), "expected a finite number, found '1.0x'");
  EXPECT_EQ(refusal("elu", "scale", ""), "expected a finite number, found ''");
  EXPECT_EQ(refusal("elu", "scale", "inf"), "expected a finite number, found 'inf'");
  EXPECT_EQ(refusal("affine", "seed", "-1"), "expected an integer from 0 to 2^64 - 1, found '-1'");
  EXPECT_EQ(refusal("lln", "moments", "guess"),
            "expected one of authors, table, fit, entropy, found 'guess'");
}

TEST(Value, NumbersAndStringsDoNotMix) {
  EXPECT_EQ(Value(3.0).as_int64(), 3);
  EXPECT_EQ(Value(7).as_double(), 7.0);
  EXPECT_EQ(Value("x").as_string(), "x");
  EXPECT_EQ(message_of<InvalidArgument>([] { Value(3.5).as_int64(); }),
            "expected a 64-bit integer, found 3.5");
  EXPECT_EQ(message_of<InvalidArgument>([] { Value(1e19).as_int64(); }),
            "expected a 64-bit integer, found 1e+19");
  EXPECT_EQ(message_of<InvalidArgument>([] { Value("3").as_double(); }),
            "expected a number, found '3'");
  EXPECT_EQ(message_of<InvalidArgument>([] { Value(3).as_string(); }),
            "expected a string, found 3");
  EXPECT_EQ(message_of<InvalidArgument>(
                [] { Value(std::numeric_limits<std::uint64_t>::max()).as_int64(); }),
            "expected a 64-bit integer, found 18446744073709551615");
}

}  // namespace
