// SPDX-License-Identifier: BSD-3-Clause

// The 16-bit types against a list of all their values: the nearest one, of two equally near the one
// with an even last bit.

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <linattn/half.hpp>
#include <linattn/tensor.hpp>
#include <type_traits>
#include <vector>

#include "random.hpp"
#include "seed.hpp"

namespace {

using LinAttn::bfloat16;
using LinAttn::float16;
using LinAttn::test_support::Random;

template <class T>
struct Format;
template <>
struct Format<float16> {
  static constexpr int fraction_bits = 10, least_exponent = -14;
  static constexpr std::uint16_t infinity = 0x7c00, quiet = 0x0200;
};
template <>
struct Format<bfloat16> {
  static constexpr int fraction_bits = 7, least_exponent = -126;
  static constexpr std::uint16_t infinity = 0x7f80, quiet = 0x0040;
};

/// Sizes in the order of their bits. The last entry, of the bits of infinity, is the power of two
/// that would follow.
template <class T>
std::vector<double> sizes() {
  std::vector<double> list;
  for (int bits = 0; bits <= Format<T>::infinity; ++bits) {
    const int one = 1 << Format<T>::fraction_bits, exponent = bits / one, fraction = bits % one;
    const int power = Format<T>::least_exponent - Format<T>::fraction_bits;
    list.push_back(exponent == 0 ? std::ldexp(fraction, power)
                                 : std::ldexp(one + fraction, power + exponent - 1));
  }
  return list;
}

/// Bits of the value nearest to a number that is not NaN.
template <class T>
std::uint16_t nearest_bits(const std::vector<double>& list, double x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::abs(x);
  const auto above = std::upper_bound(list.begin(), list.end(), size);
  if (above == list.end()) return sign | Format<T>::infinity;
  const auto high = static_cast<std::uint16_t>(above - list.begin());
  const std::uint16_t low = high - 1;
  const long double down = static_cast<long double>(size) - list[low];
  const long double up = static_cast<long double>(list[high]) - size;
  if (down == up) return sign | (low % 2 == 0 ? low : high);
  return sign | (down < up ? low : high);
}

template <class T>
class Half : public ::testing::Test {};
using Types = ::testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(Half, Types);

TYPED_TEST(Half, IsStorage) {
  using T = TypeParam;
  EXPECT_EQ(sizeof(T), 2u);
  EXPECT_TRUE(std::is_trivially_copyable_v<T>);
  EXPECT_TRUE(std::is_trivially_default_constructible_v<T>);
  EXPECT_TRUE((std::is_constructible_v<T, float> && !std::is_convertible_v<float, T>));
  EXPECT_TRUE((std::is_constructible_v<T, double> && !std::is_convertible_v<double, T>));
  EXPECT_TRUE((std::is_constructible_v<float, T> && !std::is_convertible_v<T, float>));
  EXPECT_TRUE((std::is_same_v<LinAttn::accumulator_t<const T>, float>));
}

TYPED_TEST(Half, EveryValueIsWidenedExactlyAndComesBack) {
  using T = TypeParam;
  const std::vector<double> list = sizes<T>();
  for (int all = 0; all < 0x10000; ++all) {
    const auto bits = static_cast<std::uint16_t>(all);
    const std::uint16_t size = bits & 0x7fff;
    const auto x = static_cast<float>(T::from_bits(bits));
    ASSERT_EQ(std::signbit(x), all >= 0x8000) << all;
    if (size > Format<T>::infinity) {
      ASSERT_TRUE(std::isnan(x)) << all;
      const std::uint16_t quiet = bits | Format<T>::quiet;
      ASSERT_EQ(T(x).bits, quiet) << all;
      ASSERT_EQ(T(static_cast<double>(x)).bits, quiet) << all;
      continue;
    }
    const double expected =
        size == Format<T>::infinity ? std::numeric_limits<double>::infinity() : list[size];
    ASSERT_EQ(std::abs(x), expected) << all;
    ASSERT_EQ(T(x).bits, bits) << all;
    ASSERT_EQ(T(static_cast<double>(x)).bits, bits) << all;
  }
}

/// Next to every value and every midpoint, from both sides.
TYPED_TEST(Half, FloatsRoundToTheNearest) {
  using T = TypeParam;
  const std::vector<double> list = sizes<T>();
  const auto check = [&](float x) {
    ASSERT_EQ(T(x).bits, nearest_bits<T>(list, x)) << std::hexfloat << x;
    ASSERT_EQ(T(-x).bits, nearest_bits<T>(list, -x)) << std::hexfloat << -x;
  };
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i + 1 < list.size(); ++i)
    for (const double centre : {list[i], (list[i] + list[i + 1]) / 2}) {
      const auto x = static_cast<float>(centre);
      ASSERT_EQ(x, centre);
      float below = x, above = x;
      check(x);
      for (int step = 0; step < 4; ++step) {
        check(below = std::nextafter(below, 0.0f));
        check(above = std::nextafter(above, infinity));
      }
    }
  Random random(LinAttn::test_support::seed());
  for (int n = 0; n < 1000000; ++n) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    if (!std::isnan(x)) check(x);
  }
  for (const float x : {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
                        std::numeric_limits<float>::denorm_min(), infinity})
    check(x);
}

/// A double just beside a midpoint is the midpoint as a float: to round twice would be wrong.
TYPED_TEST(Half, DoublesRoundOnce) {
  using T = TypeParam;
  const std::vector<double> list = sizes<T>();
  std::size_t rounded_twice = 0;
  const auto check = [&](double size) {
    for (const double x : {size, -size}) {
      const std::uint16_t expected = nearest_bits<T>(list, x);
      ASSERT_EQ(T(x).bits, expected) << std::hexfloat << x;
      rounded_twice += T(static_cast<float>(x)).bits != expected;
    }
  };
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i + 1 < list.size(); ++i)
    for (const double centre : {list[i], (list[i] + list[i + 1]) / 2}) {
      check(centre);
      check(std::nextafter(centre, 0.0));
      check(std::nextafter(centre, infinity));
      const auto x = static_cast<float>(centre);  // midpoints of floats, and what is beside those
      for (const float other :
           {std::nextafter(x, 0.0f), std::nextafter(x, std::numeric_limits<float>::infinity())}) {
        const double between = (static_cast<double>(x) + static_cast<double>(other)) / 2;
        check(between);
        check(std::nextafter(between, 0.0));
        check(std::nextafter(between, infinity));
      }
    }
  EXPECT_GE(rounded_twice, 2 * (list.size() - 2)) << "these numbers do not show the difference";
  Random random(LinAttn::test_support::seed());
  for (int n = 0; n < 300000; ++n) {
    const auto x = std::bit_cast<double>(random.bits());
    if (!std::isnan(x)) check(x);
    check(std::ldexp(random.uniform(1, 2), static_cast<int>(random.integer(-160, 130))));
  }
  for (const double x :
       {std::numeric_limits<double>::max(), std::numeric_limits<double>::min(),
        std::numeric_limits<double>::denorm_min(), 0x1.fffffffffffffp127, infinity})
    check(x);
}

TYPED_TEST(Half, NanStaysQuietNan) {
  using T = TypeParam;
  const auto is_quiet_nan = [](T x) {
    return (x.bits & 0x7fff) > Format<T>::infinity && (x.bits & Format<T>::quiet) != 0;
  };
  for (const std::uint32_t payload : {0x1u, 0x1000u, 0x10000u, 0x3fffffu, 0x400000u, 0x7fffffu})
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const T x(std::bit_cast<float>(sign | 0x7f800000u | payload));
      EXPECT_TRUE(is_quiet_nan(x)) << payload;
      EXPECT_EQ(x.bits >> 15, sign >> 31);
    }
  for (const std::uint64_t payload : {1ull, 1ull << 51, 0xfffffffffffffull})
    for (const std::uint64_t sign : {0ull, 1ull << 63}) {
      const T x(std::bit_cast<double>(sign | 0x7ff0000000000000ull | payload));
      EXPECT_TRUE(is_quiet_nan(x)) << payload;
      EXPECT_EQ(x.bits >> 15, sign >> 63);
    }
}

TEST(HalfLimits, ThresholdsInNumbers) {
  EXPECT_EQ(float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(float16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16(std::nextafter(65520.0, 0.0)).bits, 0x7bff);
  EXPECT_EQ(float16(-65520.0).bits, 0xfc00);
  EXPECT_EQ(float16(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(float16(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(float16(std::nextafter(0x1p-25, 1.0)).bits, 0x0001);
  EXPECT_EQ(float16(-0x1p-26f).bits, 0x8000);
  EXPECT_EQ(bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bfloat16(0x1.fep127f).bits, 0x7f7f);
  EXPECT_EQ(bfloat16(0x1p-133f).bits, 0x0001);
  EXPECT_EQ(bfloat16(0x1p-134f).bits, 0x0000);
}

/// A row of a kernel: the vector instructions of a host, or a device.
template <class T>
struct RoundTrip {
  Kokkos::View<T*> narrow;
  Kokkos::View<float*> wide;
  Kokkos::View<T*> again;
  Kokkos::View<T*> from_double;
  KOKKOS_FUNCTION void operator()(int i) const {
    wide(i) = static_cast<float>(narrow(i));
    again(i) = T(wide(i));
    from_double(i) = T(static_cast<double>(wide(i)) * 1.0009765625);  // between two values
  }
};

TYPED_TEST(Half, AKernelGivesTheSameBits) {
  using T = TypeParam;
  constexpr int count = 0x10000;
  const RoundTrip<T> kernel{Kokkos::View<T*>("narrow", count), Kokkos::View<float*>("wide", count),
                            Kokkos::View<T*>("again", count),
                            Kokkos::View<T*>("from_double", count)};
  const auto narrow = Kokkos::create_mirror_view(kernel.narrow);
  for (int i = 0; i < count; ++i) narrow(i) = T::from_bits(static_cast<std::uint16_t>(i));
  Kokkos::deep_copy(kernel.narrow, narrow);
  Kokkos::parallel_for("LinAttn::test::half",
                       Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace>(0, count), kernel);
  const auto wide = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), kernel.wide);
  const auto again = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), kernel.again);
  const auto rounded = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), kernel.from_double);
  for (int i = 0; i < count; ++i) {
    const T x = T::from_bits(static_cast<std::uint16_t>(i));
    const auto y = static_cast<float>(x);
    if (std::isnan(y)) {
      ASSERT_TRUE(std::isnan(wide(i)) && std::isnan(static_cast<float>(again(i)))) << i;
      continue;
    }
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide(i)), std::bit_cast<std::uint32_t>(y)) << i;
    ASSERT_EQ(again(i).bits, x.bits) << i;
    ASSERT_EQ(rounded(i).bits, T(static_cast<double>(y) * 1.0009765625).bits) << i;
  }
}

}  // namespace
