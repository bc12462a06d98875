// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

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

template <class T>
std::vector<std::uint16_t> bits_of(const Array& array) {
  std::vector<std::uint16_t> bits;
  for (const T x : array.as<T>()) bits.push_back(x.bits);
  return bits;
}

TEST(Array, RoundsOnceToSixteenBits) {
  using LinAttn::bfloat16, LinAttn::float16;
  using Bits = std::vector<std::uint16_t>;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  // just above the midpoint of 1 and its successor, which as a float it would be
  const Array f64(
      std::vector<double>{1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-8 + 0x1p-40, -70000, -infinity}, {4});
  EXPECT_EQ(bits_of<float16>(f64), (Bits{0x3c01, 0x3c04, 0xfc00, 0xfc00}));
  EXPECT_EQ(bits_of<bfloat16>(f64), (Bits{0x3f80, 0x3f81, 0xc789, 0xff80}));
  const Array f32(std::vector<float>{1 + 0x1p-11f, 1 + 0x1p-8f, 0x1p-24f}, {3});
  EXPECT_EQ(bits_of<float16>(f32), (Bits{0x3c00, 0x3c04, 0x0001}));
  EXPECT_EQ(bits_of<bfloat16>(f32), (Bits{0x3f80, 0x3f80, 0x3380}));
  const Array f16 = half_array({0x3c00, 0x8001, 0x7d23, 0x3c08});
  EXPECT_EQ(bits_of<float16>(f16), (Bits{0x3c00, 0x8001, 0x7d23, 0x3c08})) << "the bits themselves";
  EXPECT_EQ(bits_of<bfloat16>(half_array({0x3c00, 0x8001, 0x3c0c})),
            (Bits{0x3f80, 0xb380, 0x3f82}));
  const Array i64(std::vector<std::int64_t>{-3, 2049}, {2});
  EXPECT_EQ(bits_of<float16>(i64), (Bits{0xc200, 0x6800}));
  EXPECT_EQ(bits_of<bfloat16>(i64), (Bits{0xc040, 0x4500}));
}

TEST(Array, HoldsSixteenBits) {
  using LinAttn::float16;
  const std::vector<float16> values{float16(1.5f), float16(-2.0f)};
  const Array array(values, {2, 1});
  EXPECT_EQ(array.type(), ElementType::f16);
  EXPECT_EQ(array.values<float16>()[1].bits, 0xc000);
  EXPECT_EQ(array.as<double>(), (std::vector<double>{1.5, -2}));
  EXPECT_EQ(half_array({0x7c00, 0xfc00}).as<float>(),
            (std::vector<float>{std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()}));
  EXPECT_TRUE(std::isnan(half_array({0x7c01}).as<double>()[0]));
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
