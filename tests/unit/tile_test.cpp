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

  /// A left and a right factor of small integers, so that every sum is exact whatever its order.
  /// Left elements outside the band are NaN.
  struct Operands {
    Operands(Random& random, int m, int n, int inner_, Band band_, bool transposed)
        : inner(inner_),
          band(band_),
          lda(transposed ? padded_columns<T>(m) : padded_columns<T>(inner_)),
          ldb(padded_columns<T>(n)),
          row(transposed ? 1 : lda),
          column(transposed ? lda : 1),
          a(static_cast<std::size_t>(transposed ? padded_rows(inner_) : padded_rows(m)) *
            static_cast<std::size_t>(lda)),
          b(static_cast<std::size_t>(padded_rows(inner_)) * static_cast<std::size_t>(ldb)) {
      for (int i = 0; i < m; ++i)
        for (int l = 0; l < inner; ++l)
          a.data[i * row + l * column] = counts(band, i, l) ? static_cast<T>(random.integer(-9, 9))
                                                            : std::numeric_limits<T>::quiet_NaN();
      for (int l = 0; l < inner; ++l)
        for (int j = 0; j < n; ++j) b.data[l * ldb + j] = static_cast<T>(random.integer(-9, 9));
    }
    Product<T> product() const { return {{a.data, row, column}, b.data, ldb, inner, band}; }
    T element(int i, int j) const {
      T sum = 0;
      for (int l = 0; l < inner; ++l)
        if (counts(band, i, l)) sum += a.data[i * row + l * column] * b.data[l * ldb + j];
      return sum;
    }
    int inner;
    Band band;
    int lda, ldb, row, column;
    Aligned<T> a, b;
  };

  static void check(int m, int n, const std::vector<const Operands*>& operands, Store store,
                    bool lower_only) {
    const int rows = padded_rows(m), ldc = padded_columns<T>(n) + tile_columns<T>;
    Random random(LinAttn::test_support::seed() + 1);
    Aligned<T> c(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ldc));
    Aligned<T> low(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ldc));
    std::vector<T> expected(static_cast<std::size_t>(m * n));
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) {
        c.data[i * ldc + j] = static_cast<T>(random.integer(-9, 9));
        T& sum = expected[static_cast<std::size_t>(i * n + j)];
        if (store != Store::overwrite) sum = c.data[i * ldc + j];
        for (const Operands* o : operands) sum += o->element(i, j);
      }
    const typename C::Team team;
    const Target<T> target{c.data, ldc, store, low.data, lower_only};
    if (operands.size() == 1)
      multiply(team, m, n, operands[0]->product(), target);
    else
      multiply(team, m, n, operands[0]->product(), operands[1]->product(), target);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < (lower_only ? std::min(i + 1, n) : n); ++j)
        ASSERT_EQ(c.data[i * ldc + j] - low.data[i * ldc + j],
                  expected[static_cast<std::size_t>(i * n + j)])
            << i << " " << j << " of " << m << "x" << n << "x" << operands[0]->inner << " band "
            << static_cast<int>(operands[0]->band) << " store " << static_cast<int>(store);
  }
};

using TileConfigs =
    ::testing::Types<TileConfig<HostTeam, float>, TileConfig<HostTeam, double>,
                     TileConfig<LoneDeviceTeam, float>, TileConfig<LoneDeviceTeam, double>>;
TYPED_TEST_SUITE(TileProducts, TileConfigs);

constexpr Store all_stores[] = {Store::overwrite, Store::add, Store::compensated};

TYPED_TEST(TileProducts, AllTerms) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int m : {1, 7, 8, 17})
    for (const int n : {1, 15, 16, 33, 70})
      for (const int inner : {0, 1, 5, 64})
        for (const bool transposed : {false, true}) {
          const Operands operands(random, m, n, inner, Band::all, transposed);
          for (const Store store : all_stores) this->check(m, n, {&operands}, store, false);
        }
}

TYPED_TEST(TileProducts, Bands) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int size : {1, 2, 7, 8, 9, 16, 23, 64})
    for (const int n : {1, 16, 37})
      for (const Band band : {Band::lower, Band::upper})
        for (const bool transposed : {false, true}) {
          const Operands operands(random, size, n, size, band, transposed);
          for (const Store store : all_stores) this->check(size, n, {&operands}, store, false);
        }
}

TYPED_TEST(TileProducts, SumsOfTwo) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int size : {1, 8, 13, 30})
    for (const int inner : {1, 20})
      for (const Band band : {Band::lower, Band::upper}) {
        const Operands first(random, size, 19, inner, Band::all, false);
        const Operands second(random, size, 19, size, band, band == Band::upper);
        for (const Store store : all_stores) this->check(size, 19, {&first, &second}, store, false);
      }
}

TYPED_TEST(TileProducts, LowerTriangleOnly) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int size : {1, 3, 8, 9, 31, 64})
    for (const int inner : {1, 9, 40}) {
      const Operands operands(random, size, size, inner, Band::all, false);
      this->check(size, size, {&operands}, Store::overwrite, true);
    }
}

// A compensated sum of many small parts keeps what a plain one loses.
TYPED_TEST(TileProducts, CompensatedSums) {
  using T = typename TypeParam::T;
  const typename TypeParam::Team team;
  const int ld = tile_columns<T>;
  Aligned<T> a(static_cast<std::size_t>(tile_rows * ld)),
      b(static_cast<std::size_t>(tile_rows * ld));
  Aligned<T> c(static_cast<std::size_t>(tile_rows * ld)),
      low(static_cast<std::size_t>(tile_rows * ld));
  a.data[0] = 1;
  b.data[0] = T(1) / 3;
  const int count = 100000;
  for (int n = 0; n < count; ++n)
    multiply(team, 1, 1, Product<T>{{a.data, ld, 1}, b.data, ld, 1},
             Target<T>{c.data, ld, Store::compensated, low.data});
  const long double exact = static_cast<long double>(b.data[0]) * count;
  const long double found = static_cast<long double>(c.data[0]) - low.data[0];
  EXPECT_LE(std::abs(found / exact - 1), 2 * std::numeric_limits<T>::epsilon());
}

TYPED_TEST(TileProducts, Transposes) {
  using T = typename TypeParam::T;
  const typename TypeParam::Team team;
  for (const int rows : {1, 5, 16, 40})
    for (const int columns : {1, 8, 17, 33}) {
      const int ld_from = padded_columns<T>(columns),
                ld_to = padded_columns<T>(rows) + tile_columns<T>;
      Aligned<T> from(static_cast<std::size_t>(padded_rows(rows) * ld_from));
      Aligned<T> to(static_cast<std::size_t>(padded_rows(ld_from) * ld_to));
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) from.data[r * ld_from + c] = static_cast<T>(100 * r + c);
      transpose(team, rows, columns, from.data, ld_from, to.data, ld_to);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c)
          ASSERT_EQ(to.data[c * ld_to + r], static_cast<T>(100 * r + c)) << rows << "x" << columns;
    }
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
