// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <linattn/io/array.hpp>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using LinAttn::InvalidArgument;
using LinAttn::test_support::message_of;

Array half_array(const std::vector<std::uint16_t>& bits) {
  Array array(ElementType::f16, {static_cast<std::int64_t>(bits.size())});
  std::memcpy(array.data(), bits.data(), array.size_bytes());
  return array;
}

TEST(Half, EveryFiniteValueIsExact) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) continue;
    const double magnitude = exponent == 0 ? fraction * std::pow(2.0, -24)
                                           : (1024 + fraction) * std::pow(2.0, exponent - 25);
    const double expected = bits & 0x8000 ? -magnitude : magnitude;
    const auto half = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(std::bit_cast<std::uint64_t>(half_to_double(half)),
              std::bit_cast<std::uint64_t>(expected))
        << bits;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(half_to_float(half)),
              std::bit_cast<std::uint32_t>(static_cast<float>(expected)))
        << bits;
  }
}

TEST(Half, InfinitiesAndPayloadsOfNanAreKept) {
  EXPECT_EQ(half_to_double(0x7c00), std::numeric_limits<double>::infinity());
  EXPECT_EQ(half_to_float(0xfc00), -std::numeric_limits<float>::infinity());
  for (std::uint32_t fraction = 1; fraction < 1024; ++fraction) {
    const auto half = static_cast<std::uint16_t>(0xfc00u | fraction);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(half_to_float(half)), 0xff800000u | fraction << 13);
    ASSERT_EQ(std::bit_cast<std::uint64_t>(half_to_double(half)),
              0xfff0000000000000u | std::uint64_t{fraction} << 42);
  }
}

TEST(Array, ConvertsWithoutLosingAnything) {
  EXPECT_EQ(Array(std::vector<float>{0.1f, -2.0f}, {2}).as<double>(),
            (std::vector<double>{static_cast<double>(0.1f), -2.0}));
  EXPECT_EQ(Array(std::vector<double>{0.1, 1e300}, {1, 2}).as<float>(),
            (std::vector<float>{0.1f, std::numeric_limits<float>::infinity()}));
  EXPECT_EQ(Array(std::vector<std::uint8_t>{0, 255}, {2}).as<std::int64_t>(),
            (std::vector<std::int64_t>{0, 255}));
  EXPECT_EQ(Array(std::vector<std::int64_t>{-3, 1}, {2}).as<double>(),
            (std::vector<double>{-3, 1}));
  EXPECT_EQ(half_array({0x3c00, 0x0001, 0xc500}).as<double>(),
            (std::vector<double>{1.0, std::ldexp(1.0, -24), -5.0}));
  EXPECT_EQ(half_array({0x3c00, 0x8001}).as<long double>(),
            (std::vector<long double>{1.0L, -std::ldexp(1.0L, -24)}));
}

TEST(Array, RefusesConversionsThatLose) {
  const Array real(std::vector<double>{1.0}, {1});
  EXPECT_EQ(message_of<InvalidArgument>([&] { real.as<std::int64_t>(); }),
            "LinAttn::io: no conversion from float64 to int64");
  EXPECT_EQ(message_of<InvalidArgument>([&] { half_array({0}).as<std::int64_t>(); }),
            "LinAttn::io: no conversion from float16 to int64");
  const Array integer(std::vector<std::int64_t>{1}, {1});
  EXPECT_EQ(message_of<InvalidArgument>([&] { integer.as<std::uint8_t>(); }),
            "LinAttn::io: no conversion from int64 to uint8");
  EXPECT_EQ(message_of<InvalidArgument>([&] { real.values<float>(); }),
            "LinAttn::io: the array holds float64, not float32");
}

TEST(Array, ChecksItsExtents) {
  EXPECT_EQ(message_of<InvalidArgument>([] {
              Array(std::vector<double>(5), {2, 3});
            }),
            "LinAttn::io: extents (2, 3) need 6 values, found 5");
  EXPECT_EQ(message_of<InvalidArgument>([] {
              Array(ElementType::f64, {2, -3});
            }),
            "LinAttn::io: negative extent in (2, -3)");
  const std::int64_t big = std::int64_t{1} << 32;
  EXPECT_NE(message_of<InvalidArgument>([&] {
              Array(ElementType::f64, {big, big});
            }).find("63 bits"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] {
              Array(ElementType::f64, {big, big / 4});
            }).find("more bytes than 63 bits"),
            std::string::npos);
}

TEST(Array, EmptyAndScalarExtents) {
  const std::int64_t big = std::int64_t{1} << 40;
  EXPECT_EQ(Array(ElementType::f32, {big, 0, big}).size(), 0);
  EXPECT_EQ(Array().size(), 0);
  const Array scalar(std::vector<double>{2.5}, {});
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.size(), 1);
  EXPECT_EQ(to_string(scalar.extents()), "()");
  EXPECT_EQ(to_string(Array(ElementType::u8, {2, 3, 5}).extents()), "(2, 3, 5)");
}

}  // namespace
