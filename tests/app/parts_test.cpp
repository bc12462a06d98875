// SPDX-License-Identifier: BSD-3-Clause

#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <linattn/error.hpp>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../../apps/linattn/comparison.hpp"
#include "../../apps/linattn/exit_status.hpp"
#include "../../apps/linattn/rounding.hpp"
#include "../../apps/linattn/text.hpp"

namespace LinAttn::app {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

io::Array array(const std::vector<double>& values, std::vector<std::int64_t> extents) {
  return io::Array(values, std::move(extents));
}

TEST(Compare, RelativeToTheLargestExpected) {
  const Comparison c = compare("k", array({1, -4, 2, 0, 3, 1}, {2, 3}),
                               array({1, -4, 2, 0.5, 3, 1.25}, {2, 3}), 0.2);
  EXPECT_EQ(c.error, 0.125);
  EXPECT_TRUE(c.ok);
  EXPECT_EQ(c.worst, (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(c.expected, 0);
  EXPECT_EQ(c.found, 0.5);
  EXPECT_EQ(c.elements, 6);
  EXPECT_TRUE(compare("k", array({4, 0}, {2}), array({4, 0.5}, {2}), 0.125).ok);
  EXPECT_FALSE(compare("k", array({4, 0}, {2}), array({4, 0.5}, {2}), 0.1249).ok);
}

TEST(Compare, AbsoluteWhereAllExpectedAreZero) {
  EXPECT_EQ(compare("q", array({0, 0}, {2}), array({0, -1e-3}, {2}), 1).error, 1e-3);
  EXPECT_FALSE(compare("q", array({0, 0}, {2}), array({0, -1e-3}, {2}), 1e-4).ok);
}

TEST(Compare, ScalarsAndNothing) {
  const Comparison scalar = compare("alpha", array({2}, {}), array({3}, {}), 1e-3);
  EXPECT_EQ(scalar.error, 0.5);
  EXPECT_TRUE(scalar.worst.empty());
  EXPECT_EQ(worst_element(scalar), "expected 2, found 3");
  const Comparison nothing = compare("o", array({}, {2, 0}), array({}, {2, 0}), 0);
  EXPECT_TRUE(nothing.ok);
  EXPECT_EQ(nothing.error, 0);
  EXPECT_THROW(compare("o", array({1, 2}, {2}), array({1, 2}, {1, 2}), 1), std::logic_error);
}

TEST(Compare, NumbersThatAreNotFinite) {
  const auto ok = [](std::vector<double> expected, std::vector<double> found) {
    return compare("o", array(expected, {3}), array(found, {3}), 1e300).ok;
  };
  EXPECT_FALSE(ok({1, 2, 3}, {1, nan, 3}));
  EXPECT_FALSE(ok({1, nan, 3}, {1, 2, 3}));
  EXPECT_TRUE(ok({1, nan, 3}, {1, nan, 3}));
  EXPECT_FALSE(ok({1, 2, 3}, {1, infinity, 3}));
  EXPECT_FALSE(ok({1, infinity, 3}, {1, -infinity, 3}));
  EXPECT_FALSE(ok({1, infinity, 3}, {1, nan, 3}));
  EXPECT_TRUE(ok({1, infinity, 3}, {1, infinity, 3}));
  // An infinity does not make the scale of the others infinite.
  EXPECT_EQ(compare("o", array({1, infinity, 4}, {3}), array({1, infinity, 5}, {3}), 1).error,
            0.25);
  EXPECT_EQ(compare("o", array({nan, nan, nan}, {3}), array({1, nan, nan}, {3}), 1).worst,
            std::vector<std::int64_t>{0});
}

TEST(Compare, RowsOfOneExponent) {
  const io::Array a = io::Array(std::vector<std::int64_t>{1, -5, 3}, {3});
  const io::Array b = io::Array(std::vector<std::int64_t>{2, -7, 3}, {3});
  const io::Array common = larger_shift(a, b);
  EXPECT_EQ(common.as<std::int64_t>(), (std::vector<std::int64_t>{2, -5, 3}));
  EXPECT_EQ(rescaled(array({1, 2, 3, 4, 5, 6}, {3, 2}), a, common).as<double>(),
            (std::vector<double>{0.5, 1, 3, 4, 5, 6}));
  EXPECT_EQ(rescaled(array({1, 2, 3}, {3}), b, common).as<double>(),
            (std::vector<double>{1, 0.5, 3}));
  const io::Array far = io::Array(std::vector<std::int64_t>{-(1 << 28)}, {1});
  EXPECT_EQ(
      rescaled(array({0}, {1}), far, io::Array(std::vector<std::int64_t>{0}, {1})).as<double>()[0],
      0);
}

TEST(Symbol, OutputsAndGradients) {
  EXPECT_EQ(symbol("o"), "o");
  EXPECT_EQ(symbol("S"), "S");
  EXPECT_EQ(symbol("k"), "dk");
  EXPECT_EQ(symbol("alpha"), "dalpha");
  EXPECT_EQ(symbol("state/z"), "dz");
}

TEST(Compare, ElementsAreExcusedOneByOne) {
  const io::Array expected = array({1, -4, 2}, {3});
  const Comparison c = compare("k", expected, array({1.5, -4, 2}, {3}), 1e-3, {0.75, 0, 0});
  EXPECT_TRUE(c.ok);
  EXPECT_EQ(c.error, 0.5 / 4);
  EXPECT_EQ(c.tolerance, 0.75 / 4);
  EXPECT_EQ(c.worst, std::vector<std::int64_t>{0});

  const Comparison other = compare("k", expected, array({1.5, -4, 2.25}, {3}), 1e-3, {0.75, 0, 0});
  EXPECT_FALSE(other.ok) << "the excuse of one element is none for another";
  EXPECT_EQ(other.error, 0.25 / 4);
  EXPECT_EQ(other.tolerance, 1e-3);
  EXPECT_EQ(other.worst, std::vector<std::int64_t>{2});

  EXPECT_FALSE(compare("k", expected, array({2, -4, 2}, {3}), 1e-3, {0.75, 0, 0}).ok);
  EXPECT_TRUE(compare("k", expected, array({2, -4, 2}, {3}), 0.25, {0.75, 0, 0}).ok);
  EXPECT_FALSE(compare("k", expected, array({nan, -4, 2}, {3}), 1e-3, {infinity, 0, 0}).ok);
  EXPECT_EQ(compare("k", expected, expected, 0.5, {4, 0, 0}).tolerance, 0.5);
  EXPECT_TRUE(compare("k", array({0}, {1}), array({0.75}, {1}), 0.5, {0.75}).ok);
  EXPECT_THROW(compare("k", expected, expected, 0.5, {1}), std::logic_error);
}

TEST(Scalars, NamesAreReadBack) {
  for (const Scalar scalar : scalars()) EXPECT_EQ(scalar_from_name(to_string(scalar)), scalar);
  EXPECT_EQ(scalars().size(), 4u);
  EXPECT_TRUE(is_16_bit(Scalar::bf16) && is_16_bit(Scalar::f16));
  EXPECT_FALSE(is_16_bit(Scalar::f32) || is_16_bit(Scalar::f64));
}

/// A job on arrays of float64.
struct SmallJob {
  io::Array q = array({1.0 / 3, -2, 65519}, {1, 1, 1, 3});
  io::Array k = array({0.1, 1e-9, 5, 7e4, -1e39, nan}, {1, 1, 2, 3});
  io::Array v = array({1, infinity}, {1, 1, 2, 1});
  io::Array mask = io::Array(std::vector<std::uint8_t>{1, 0}, {1, 2});
  Job job;

  SmallJob() {
    job.q = &q;
    job.k = &k;
    job.v = &v;
    job.key_mask = &mask;
  }
};

TEST(Rounding, InputsAreThoseOfTheType) {
  const SmallJob small;
  const RoundedJob half(small.job, Scalar::f16);
  EXPECT_EQ(half.job().q->type(), io::ElementType::f32);
  EXPECT_EQ(half.job().q->as<double>(), (std::vector<double>{0x1.554p-2, -2, 65504}));
  EXPECT_EQ(half.job().k->as<double>()[0], 0x1.998p-4);
  EXPECT_EQ(half.job().k->as<double>()[1], 0) << "below half of the smallest number";
  EXPECT_EQ(half.job().v->as<double>(), (std::vector<double>{1, infinity}));
  const RoundedJob brain(small.job, Scalar::bf16);
  EXPECT_EQ(brain.job().q->as<double>(), (std::vector<double>{0x1.56p-2, -2, 65536}));
  EXPECT_EQ(brain.job().d_o, nullptr);
  const RoundedJob whole(small.job, Scalar::f32);
  EXPECT_EQ(whole.job().q, &small.q);
}

TEST(Rounding, WhatOverflowsIsNamed) {
  SmallJob small;
  const auto message = [&](Scalar scalar) -> std::string {
    try {
      const RoundedJob rounded(small.job, scalar);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(Scalar::f16), "") << "hidden keys may hold anything";
  small.job.key_mask = nullptr;
  EXPECT_EQ(message(Scalar::f16),
            "/inputs/k: expected numbers of at most 65504 in size for f16, found 70000 at [0, 0, "
            "1, 0]");
  EXPECT_EQ(
      message(Scalar::bf16)
          .find("/inputs/k: expected numbers of at most 3.3895313892515355e+38 in size for bf16"),
      0u)
      << message(Scalar::bf16);
  EXPECT_EQ(message(Scalar::f32), "");
  small.job.key_mask = &small.mask;
  small.q.values<double>()[2] = -65520;
  EXPECT_NE(message(Scalar::f16).find("found -65520 at [0, 0, 0, 2]"), std::string::npos);
}

TEST(Rounding, ErrorsThatAreExcused) {
  const io::Array effects = array({0.25, 0.5, 0}, {3});
  using Errors = std::vector<double>;
  EXPECT_EQ(excused_errors(Scalar::f16, "k", effects),
            (Errors{0.25 + 0x1p-24, 0.5 + 0x1p-24, 0x1p-24}));
  EXPECT_EQ(excused_errors(Scalar::f32, "k", effects), (Errors{0.25, 0.5, 0}));
  EXPECT_EQ(excused_errors(Scalar::f16, "alpha", effects), (Errors{0.25, 0.5, 0}))
      << "stored as double";
  EXPECT_EQ(excused_errors(Scalar::bf16, "o", array({}, {0})), Errors{});
  EXPECT_EQ(excused_errors(Scalar::bf16, "o", array({0}, {1})), Errors{0x1p-133});
}

TEST(Tolerance, NeverBelow16EpsilonOfTheStoredType) {
  const double f64 = std::numeric_limits<double>::epsilon(),
               f32 = std::numeric_limits<float>::epsilon();
  const io::Tolerances given{.f64 = 1e-11, .f32 = 2e-5}, none{.f64 = 0, .f32 = 0};
  EXPECT_EQ(tolerance_for(given, Scalar::f64, io::ElementType::f64), 1e-11);
  EXPECT_EQ(tolerance_for(given, Scalar::f32, io::ElementType::f64), 2e-5);
  EXPECT_EQ(tolerance_for(none, Scalar::f64, io::ElementType::f64), 16 * f64);
  EXPECT_EQ(tolerance_for(none, Scalar::f32, io::ElementType::f64), 16 * f32);
  EXPECT_EQ(tolerance_for(given, Scalar::f64, io::ElementType::f32), 16 * f32);
  EXPECT_EQ(tolerance_for(given, Scalar::f32, io::ElementType::f16), 0x1p-6);
  EXPECT_EQ(tolerance_for(given, Scalar::f16, io::ElementType::f64), 4e-3);
  EXPECT_EQ(tolerance_for(given, Scalar::bf16, io::ElementType::f64), 3e-2);
}

/// Standard error and the status of an action.
std::pair<int, std::string> outcome(const Action& action) {
  std::ostringstream text;
  std::streambuf* const old = std::cerr.rdbuf(text.rdbuf());
  const ExitStatus status = guarded("linattn test", action);
  std::cerr.rdbuf(old);
  return {static_cast<int>(status), text.str()};
}

TEST(Guarded, StatusByWhoIsToBlame) {
  using Outcome = std::pair<int, std::string>;
  EXPECT_EQ(outcome([] { return ExitStatus::done; }), Outcome(0, ""));
  EXPECT_EQ(outcome([] { return ExitStatus::verification_failed; }), Outcome(1, ""));
  EXPECT_EQ(outcome([]() -> ExitStatus { throw InvalidArgument("expected a,\n found b"); }),
            Outcome(2, "linattn test: expected a, found b\n"));
  EXPECT_EQ(outcome([]() -> ExitStatus { throw EnvironmentFailure("disk full"); }),
            Outcome(2, "linattn test: disk full\n"));
  EXPECT_EQ(outcome([]() -> ExitStatus { throw std::bad_alloc(); }).first, 2);
  for (const Action& action : {Action([]() -> ExitStatus { throw std::logic_error("oh"); }),
                               Action([]() -> ExitStatus { throw std::runtime_error("oh"); }),
                               Action([]() -> ExitStatus { throw 7; })}) {
    const auto [status, text] = outcome(action);
    EXPECT_EQ(status, 3);
    EXPECT_NE(text.find("a defect of LinAttn"), std::string::npos) << text;
    EXPECT_NE(text.find("linattn info"), std::string::npos) << text;
  }
}

TEST(Text, Numbers) {
  EXPECT_EQ(duration(4.2e-5), "42 us");
  EXPECT_EQ(duration(0.0123), "12.3 ms");
  EXPECT_EQ(duration(7.25), "7.25 s");
  EXPECT_EQ(bytes(1000), "1000 bytes");
  EXPECT_EQ(bytes(1536), "1.5 KiB");
  EXPECT_EQ(bytes(std::size_t{3} << 30), "3 GiB");
  EXPECT_EQ(exact(0.1), "0.1");
  EXPECT_EQ(std::stod(exact(1.0 / 3)), 1.0 / 3);
  const std::vector<std::int64_t> index{0, 3, 12};
  EXPECT_EQ(index_text(index), "[0, 3, 12]");
  EXPECT_EQ(one_line("a\nb\t\tc\n"), "a b c");
  EXPECT_EQ(padded("ab", 4), "ab  ");
  EXPECT_EQ(padded("abcd", 4), "abcd ");
}

}  // namespace
}  // namespace LinAttn::app
