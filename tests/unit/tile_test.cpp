// SPDX-License-Identifier: BSD-3-Clause

// Products of tiles, on the host and as a device would form them, against plain loops.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <linattn/tile.hpp>
#include <vector>

#include "random.hpp"
#include "seed.hpp"

namespace {

using namespace LinAttn::detail;
using LinAttn::test_support::Random;

/// One thread that takes the paths of a device.
struct LoneDeviceTeam {
  static constexpr bool on_host = false;
  int rank() const { return 0; }
  int size() const { return 1; }
  void barrier() const {}
};

template <class T>
struct Aligned {
  explicit Aligned(std::size_t n) : storage(n + 64) {
    data = storage.data();
    while (reinterpret_cast<std::uintptr_t>(data) % 64 != 0) ++data;
  }
  std::vector<T> storage;
  T* data;
};

template <class Team_, class T_>
struct TileConfig {
  using Team = Team_;
  using T = T_;
};

template <class C>
class TileProducts : public ::testing::Test {
 public:
  using T = typename C::T;

  static bool counts(Band band, int i, int l) {
    return band == Band::all || (band == Band::lower ? l <= i : l >= i);
  }

  /// Small integers: every sum is exact, whatever its order. Terms outside the band are NaN.
  static void check(int m, int n, int inner, Band band, bool transposed, bool accumulate,
                    bool lower_only) {
    SCOPED_TRACE(::testing::Message()
                 << m << "x" << n << "x" << inner << " band " << static_cast<int>(band)
                 << " transposed " << transposed << " accumulate " << accumulate << " lower only "
                 << lower_only);
    const int rows = padded_rows(m), ldb = padded_columns<T>(n), ldc = ldb + tile_columns<T>;
    const int lda = transposed ? padded_columns<T>(m) : padded_columns<T>(inner);
    Random random(LinAttn::test_support::seed());
    const auto integer = [&] { return static_cast<T>(random.integer(-9, 9)); };
    Aligned<T> a(static_cast<std::size_t>(transposed ? padded_rows(inner) : rows) *
                 static_cast<std::size_t>(lda));
    Aligned<T> b(static_cast<std::size_t>(padded_rows(inner)) * static_cast<std::size_t>(ldb));
    Aligned<T> c(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ldc));
    const auto at_a = [&](int i, int l) -> T& {
      return a.data[transposed ? l * lda + i : i * lda + l];
    };
    for (int i = 0; i < m; ++i)
      for (int l = 0; l < inner; ++l)
        at_a(i, l) = counts(band, i, l) ? integer() : std::numeric_limits<T>::quiet_NaN();
    for (int l = 0; l < inner; ++l)
      for (int j = 0; j < n; ++j) b.data[l * ldb + j] = integer();
    std::vector<T> expected(static_cast<std::size_t>(m * n));
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) {
        c.data[i * ldc + j] = integer();
        T& sum = expected[static_cast<std::size_t>(i * n + j)];
        if (accumulate) sum = c.data[i * ldc + j];
        for (int l = 0; l < inner; ++l)
          if (counts(band, i, l)) sum += at_a(i, l) * b.data[l * ldb + j];
      }
    const typename C::Team team;
    multiply(team, m, n, inner, Factor<T>{a.data, transposed ? 1 : lda, transposed ? lda : 1},
             b.data, ldb, c.data, ldc, band, accumulate, lower_only);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < (lower_only ? std::min(i + 1, n) : n); ++j)
        ASSERT_EQ(c.data[i * ldc + j], expected[static_cast<std::size_t>(i * n + j)])
            << i << " " << j;
  }
};

using TileConfigs =
    ::testing::Types<TileConfig<HostTeam, float>, TileConfig<HostTeam, double>,
                     TileConfig<LoneDeviceTeam, float>, TileConfig<LoneDeviceTeam, double>>;
TYPED_TEST_SUITE(TileProducts, TileConfigs);

TYPED_TEST(TileProducts, AllTerms) {
  for (const int m : {1, 7, 8, 17})
    for (const int n : {1, 15, 16, 33, 70})
      for (const int inner : {0, 1, 5, 64})
        for (const bool transposed : {false, true})
          for (const bool accumulate : {false, true})
            this->check(m, n, inner, Band::all, transposed, accumulate, false);
}

TYPED_TEST(TileProducts, Bands) {
  for (const int size : {1, 2, 7, 8, 9, 16, 23, 64})
    for (const int n : {1, 16, 37})
      for (const Band band : {Band::lower, Band::upper})
        for (const bool transposed : {false, true})
          for (const bool accumulate : {false, true})
            this->check(size, n, size, band, transposed, accumulate, false);
}

TYPED_TEST(TileProducts, LowerTriangleOnly) {
  for (const int size : {1, 3, 8, 9, 31, 64})
    for (const int inner : {1, 9, 40})
      this->check(size, size, inner, Band::all, false, false, true);
}

TYPED_TEST(TileProducts, RowSums) {
  using T = typename TypeParam::T;
  const typename TypeParam::Team team;
  for (int blocks = 1; blocks < 6; ++blocks) {
    const int n = blocks * tile_columns<T>;
    Aligned<T> a(static_cast<std::size_t>(n)), b(static_cast<std::size_t>(n));
    T product = 0, sum = 0;
    for (int i = 0; i < n; ++i) {
      a.data[i] = static_cast<T>(i % 7 - 3);
      b.data[i] = static_cast<T>(i % 5 - 1);
      product += a.data[i] * b.data[i];
      sum += a.data[i];
    }
    EXPECT_EQ(row_dot(team, a.data, b.data, n), product);
    EXPECT_EQ(row_sum(team, a.data, n), sum);
  }
}

}  // namespace
