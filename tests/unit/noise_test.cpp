// SPDX-License-Identifier: BSD-3-Clause

// The normals of the dropout substitute: words against the published ones and Random123, normals against the transform
// of Box and Muller in long double, the same bits wherever an element is made, and their statistics.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <limits>
#include <linattn/noise.hpp>
#include <numbers>
#include <string>
#include <vector>

#include "random.hpp"
#include "seed.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::detail;
using test_support::Random;
using Words = std::array<std::uint32_t, 4>;

/// Straight from Random123, words in the order of dropout.hpp.
Words oracle(std::uint64_t seed, std::uint64_t offset, std::uint64_t counter) {
  r123::Philox4x32::ctr_type place;
  r123::Philox4x32::key_type key;
  for (int half = 0; half < 2; ++half) {
    place.v[half] = static_cast<std::uint32_t>(counter >> (32 * half));
    place.v[2 + half] = static_cast<std::uint32_t>(offset >> (32 * half));
    key.v[half] = static_cast<std::uint32_t>(seed >> (32 * half));
  }
  const auto words = r123::Philox4x32()(place, key);
  return {words.v[0], words.v[1], words.v[2], words.v[3]};
}

Words scalar_words(std::uint64_t seed, std::uint64_t offset, std::uint64_t counter) {
  const r123array4x32 words = words_of_counter(seed, offset, counter);
  return {words.v[0], words.v[1], words.v[2], words.v[3]};
}

/// Those of counter first + lane.
Words block_words(std::uint64_t seed, std::uint64_t offset, std::uint64_t first, int lane) {
  NoiseWords words;
  words_of_block(seed, offset, first, words);
  return {words.radius[2 * lane], words.angle[2 * lane], words.radius[2 * lane + 1], words.angle[2 * lane + 1]};
}

struct Pair {
  long double x, y;
};

Pair exact(std::uint32_t radius, std::uint32_t angle) {
  const auto u = [](std::uint32_t w) { return (static_cast<long double>(w) + 0.5L) * 0x1p-32L; };
  const long double r = std::sqrt(-2 * std::log(u(radius)));
  const long double t = 2 * std::numbers::pi_v<long double> * u(angle);
  return {r * std::cos(t), r * std::sin(t)};
}

/// Error in units in the last place of max(1, |n|).
template <class T>
long double ulps(T found, long double expected) {
  int exponent = 0;
  std::frexp(std::max(1.0L, std::abs(expected)), &exponent);
  const long double error = std::abs(static_cast<long double>(found) - expected);
  return error / std::ldexp(1.0L, exponent - std::numeric_limits<T>::digits);
}

template <class T>
std::vector<T> filled(std::uint64_t seed, std::uint64_t offset, std::uint64_t first, std::int64_t counters) {
  std::vector<T> out(static_cast<std::size_t>((4 * counters + noise_block - 1) / noise_block * noise_block));
  fill_normals(HostTeam(), seed, offset, first, counters, out.data());
  out.resize(static_cast<std::size_t>(4 * counters));
  return out;
}

template <class T>
bool same_bits(const T* a, const T* b, std::size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(T)) == 0;
}

// Vectors of the authors of Philox.
TEST(NoiseWords, KnownAnswers) {
  struct Answer {
    std::uint64_t seed, offset, counter;
    Words words;
  };
  const std::uint64_t ones = ~std::uint64_t(0);
  const Answer answers[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {ones, ones, ones, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const Answer& a : answers) {
    EXPECT_EQ(oracle(a.seed, a.offset, a.counter), a.words);
    EXPECT_EQ(scalar_words(a.seed, a.offset, a.counter), a.words);
    for (int lane = 0; lane < noise_counters; ++lane)
      EXPECT_EQ(block_words(a.seed, a.offset, a.counter - static_cast<std::uint64_t>(lane), lane), a.words) << lane;
  }
}

// Also where counters run over 2^32 and 2^64 within a block.
TEST(NoiseWords, AreThoseOfRandom123) {
  Random random(test_support::seed());
  for (int n = 0; n < 1000; ++n) {
    const std::uint64_t seed = random.bits(), offset = random.bits();
    for (const std::uint64_t first : {random.bits(), std::uint64_t(0xfffffff9), ~std::uint64_t(0) - 7})
      for (int lane = 0; lane < noise_counters; ++lane) {
        const Words expected = oracle(seed, offset, first + static_cast<std::uint64_t>(lane));
        ASSERT_EQ(block_words(seed, offset, first, lane), expected) << n << " " << first << " + " << lane;
        ASSERT_EQ(scalar_words(seed, offset, first + static_cast<std::uint64_t>(lane)), expected) << n;
      }
  }
}

template <class T>
class Noise : public ::testing::Test {};
using Scalars = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Noise, Scalars);

TYPED_TEST(Noise, WithinFourUlp) {
  using T = TypeParam;
  Random random(test_support::seed() + 1);
  long double worst = 0;
  for (int n = 0; n < 1 << 12; ++n) {
    const std::uint64_t seed = random.bits(), offset = random.bits(), first = random.bits();
    const std::vector<T> found = filled<T>(seed, offset, first, noise_counters);
    for (int i = 0; i < noise_counters; ++i) {
      const Words w = oracle(seed, offset, first + static_cast<std::uint64_t>(i));
      const Pair pairs[] = {exact(w[0], w[1]), exact(w[2], w[3])};
      const T* const four = found.data() + 4 * i;
      for (int p = 0; p < 2; ++p) {
        const long double error = std::max(ulps(four[2 * p], pairs[p].x), ulps(four[2 * p + 1], pairs[p].y));
        ASSERT_LE(error, 4) << "words " << w[2 * p] << " " << w[2 * p + 1];
        worst = std::max(worst, error);
      }
    }
  }
  std::cout << "[  worst ulp     ]  " << worst << std::endl;
}

// Every radius with every angle of the words at which something changes, by the code of the host and by that of a
// device.
TYPED_TEST(Noise, WordsAtTheEdges) {
  using T = TypeParam;
  std::vector<std::uint32_t> edges = {0xb504f333u};  // sqrt(1/2) 2^32
  for (int bit = 0; bit < 32; ++bit) edges.push_back(std::uint32_t(1) << bit);
  for (std::uint32_t eighth = 0; eighth < 8; ++eighth) edges.push_back(eighth << 29);
  for (int bit = 0; bit < 32; ++bit) edges.push_back(~(std::uint32_t(1) << bit));
  for (std::size_t i = 0, n = edges.size(); i < n; ++i)
    for (std::uint32_t away = 1; away <= 3; ++away) {
      edges.push_back(edges[i] + away);
      edges.push_back(edges[i] - away);
    }
  long double worst = 0, worst_alone = 0, largest = 0;
  for (const std::uint32_t radius : edges)
    for (std::size_t i = 0; i < edges.size(); i += noise_block / 2) {
      NoiseWords words;
      for (std::size_t pair = 0; pair < noise_block / 2; ++pair) {
        words.radius[pair] = radius;
        words.angle[pair] = edges[std::min(i + pair, edges.size() - 1)];
      }
      std::array<T, noise_block> found;
      normals_of_words(words, found.data());
      for (std::size_t pair = 0; pair < noise_block / 2; ++pair) {
        const std::uint32_t angle = words.angle[pair], four[] = {radius, angle, angle, radius};
        std::array<T, 4> alone;
        four_normals_of_words(four, alone.data());
        const Pair expected = exact(radius, angle), turned = exact(angle, radius);
        const T x = found[2 * pair], y = found[2 * pair + 1];
        ASSERT_TRUE(std::isfinite(x) && std::isfinite(y)) << radius << " " << angle;
        largest = std::max({largest, std::abs(static_cast<long double>(x)), std::abs(static_cast<long double>(y))});
        worst = std::max({worst, ulps(x, expected.x), ulps(y, expected.y)});
        worst_alone = std::max({worst_alone, ulps(alone[0], expected.x), ulps(alone[1], expected.y),
                                ulps(alone[2], turned.x), ulps(alone[3], turned.y)});
        ASSERT_LE(worst, 4) << radius << " " << angle;
        ASSERT_LE(worst_alone, 4) << radius << " " << angle;
      }
    }
  EXPECT_LT(largest, 6.8L);
  EXPECT_GT(largest, 6.7L);  // the least u was among them
  std::cout << "[  worst ulp     ]  " << worst << ", one pair at a time " << worst_alone << std::endl;
}

// Relative to itself too, where 1 - u has few bits.
TYPED_TEST(Noise, SmallRadiiKeepTheirDigits) {
  using T = TypeParam;
  Random random(test_support::seed() + 2);
  for (int n = 0; n < 20000; ++n) {
    const auto radius = static_cast<std::uint32_t>(~(random.bits() >> random.integer(32, 63)));
    const std::uint32_t four[] = {radius, 0, radius, 0x40000000u};
    std::array<T, 4> found;
    four_normals_of_words(four, found.data());
    const long double length = exact(radius, 0).x;
    ASSERT_LE(std::abs(static_cast<long double>(found[0]) / length - 1),
              4 * static_cast<long double>(std::numeric_limits<T>::epsilon()))
        << radius;
  }
}

// An element does not depend on the block it falls into, nor on what else is made.
TYPED_TEST(Noise, SameBitsWhateverTheBlock) {
  using T = TypeParam;
  const std::uint64_t seed = 0x9e3779b97f4a7c15, offset = 0x123456789abcdef, first = 0xffffffffffffffd0;
  const std::vector<T> whole = filled<T>(seed, offset, first, 200);
  for (std::int64_t start = 0; start < 40; ++start)
    for (const std::int64_t counters : {1, 2, 7, 15, 16, 17, 31, 64, 100}) {
      const std::vector<T> part = filled<T>(seed, offset, first + static_cast<std::uint64_t>(start), counters);
      ASSERT_TRUE(same_bits(part.data(), whole.data() + 4 * start, part.size())) << start << " " << counters;
    }
  for (std::uint64_t i = 0; i < 200; ++i) {
    std::array<T, 4> four;
    four_normals(seed, offset, first + i, four.data());
    ASSERT_TRUE(same_bits(four.data(), whole.data() + 4 * i, 4)) << i;
  }
  // arguments known to the compiler
  std::array<T, 4> constant;
  four_normals(std::uint64_t(5), std::uint64_t(7), std::uint64_t(11), constant.data());
  EXPECT_TRUE(same_bits(constant.data(), filled<T>(5, 7, 0, 12).data() + 44, 4));
}

// Addresses that are multiples of no vector, and nothing behind the last block.
TYPED_TEST(Noise, WritesWholeBlocksAnywhere) {
  using T = TypeParam;
  for (const std::int64_t counters : {0, 1, 16, 17}) {
    const std::size_t end = static_cast<std::size_t>((4 * counters + noise_block - 1) / noise_block * noise_block);
    const std::vector<T> expected = filled<T>(1, 2, 3, counters);
    for (std::size_t shift = 0; shift < 16; ++shift) {
      std::vector<T> out(shift + end + 8, T(-77));
      fill_normals(HostTeam(), 1, 2, 3, counters, out.data() + shift);
      ASSERT_TRUE(same_bits(out.data() + shift, expected.data(), expected.size()));
      for (std::size_t i = 0; i < out.size(); ++i)
        ASSERT_EQ(out[i] == T(-77), i < shift || i >= shift + end) << i << " of " << counters;
    }
  }
}

/// What DeviceTeam asks of a Kokkos team member.
struct Member {
  int rank, size;
  KOKKOS_FUNCTION int team_rank() const { return rank; }
  KOKKOS_FUNCTION int team_size() const { return size; }
};

// A device writes 4 counters normals and no more.
TYPED_TEST(Noise, TeamsOfADevice) {
  using T = TypeParam;
  for (const int size : {1, 3, 32, 128}) {
    std::vector<T> out(4 * 77 + 4, T(-77));
    for (int rank = 0; rank < size; ++rank) {
      const Member member{rank, size};
      fill_normals(DeviceTeam<Member>{member}, 4, 5, 6, 77, out.data());
    }
    EXPECT_TRUE(same_bits(out.data(), filled<T>(4, 5, 6, 77).data(), 4 * 77)) << size;
    for (std::size_t i = 4 * 77; i < out.size(); ++i) EXPECT_EQ(out[i], T(-77));
  }
}

// float and double are the same numbers.
TEST(NoisePrecisions, Agree) {
  const std::vector<float> f = filled<float>(8, 9, 10, 1 << 14);
  const std::vector<double> d = filled<double>(8, 9, 10, 1 << 14);
  for (std::size_t i = 0; i < f.size(); ++i) ASSERT_LE(ulps(f[i], d[i]), 4) << i;
}

// Every half of the key and of the counter counts.
TYPED_TEST(Noise, HighHalvesCount) {
  using T = TypeParam;
  const std::uint64_t high = std::uint64_t(1) << 32;
  const std::vector<T> base = filled<T>(1, 2, 3, 64);
  for (const std::vector<T>& other :
       {filled<T>(1 + high, 2, 3, 64), filled<T>(1, 2 + high, 3, 64), filled<T>(1, 2, 3 + high, 64),
        filled<T>(1 + (high << 31), 2, 3, 64), filled<T>(1, 2 + (high << 31), 3, 64),
        filled<T>(1, 2, 3 + (high << 31), 64), filled<T>(2, 1, 3, 64), filled<T>(1, 3, 2, 64)}) {
    int same = 0;
    for (std::size_t i = 0; i < base.size(); ++i) same += base[i] == other[i];
    EXPECT_EQ(same, 0);
  }
}

// Moments and correlations of N normals within 4 standard errors. Those of the means of n, n^2, n^3, n^4 are
// sqrt(var / N) with var = 1, 2, 15, 96 (E n^2k = 1, 3, 15, 105); a product of two independent ones has variance 1.
TYPED_TEST(Noise, Statistics) {
  using T = TypeParam;
  constexpr std::int64_t counters = 1 << 18;
  constexpr std::size_t n = 4 * counters;
  const std::uint64_t seed = test_support::seed();
  const std::vector<T> x = filled<T>(seed, 0, 0, counters), next = filled<T>(seed, 1, 0, counters),
                       other = filled<T>(seed + 1, 0, 0, counters);
  const auto mean = [&](std::size_t count, const auto& term) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += term(i);
    return sum / static_cast<double>(count);
  };
  const auto within = [](const std::string& what, double found, double expected, double variance, std::size_t count) {
    const double error = std::sqrt(variance / static_cast<double>(count));
    EXPECT_LE(std::abs(found - expected), 4 * error) << what << " " << found;
  };
  const auto at = [&](std::size_t i) { return static_cast<double>(x[i]); };
  within("mean", mean(n, at), 0, 1, n);
  within("variance", mean(n, [&](std::size_t i) { return std::pow(at(i), 2); }), 1, 2, n);
  within("third moment", mean(n, [&](std::size_t i) { return std::pow(at(i), 3); }), 0, 15, n);
  within("fourth moment", mean(n, [&](std::size_t i) { return std::pow(at(i), 4); }), 3, 96, n);
  for (std::size_t lag = 1; lag <= 5; ++lag)
    within("lag " + std::to_string(lag), mean(n - lag, [&](std::size_t i) { return at(i) * at(i + lag); }), 0, 1,
           n - lag);
  within("next offset", mean(n, [&](std::size_t i) { return at(i) * static_cast<double>(next[i]); }), 0, 1, n);
  within("next seed", mean(n, [&](std::size_t i) { return at(i) * static_cast<double>(other[i]); }), 0, 1, n);
  // squares of neighbours: variance of (n^2 - 1)(m^2 - 1) is 4
  const auto square = [&](std::size_t i) { return at(i) * at(i) - 1; };
  for (std::size_t lag = 1; lag <= 4; ++lag)
    within("squares", mean(n - lag, [&](std::size_t i) { return square(i) * square(i + lag); }), 0, 4, n - lag);
  // a normal of each of the four places
  for (std::size_t place = 0; place < 4; ++place) {
    within("mean of a place", mean(n / 4, [&](std::size_t i) { return at(4 * i + place); }), 0, 1, n / 4);
    within("variance of a place", mean(n / 4, [&](std::size_t i) { return square(4 * i + place) + 1; }), 1, 2, n / 4);
  }
}

}  // namespace
