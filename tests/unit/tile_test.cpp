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
  static constexpr bool allow_tf32 = false;
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

  struct Wish {
    Store store = Store::overwrite;
    bool lower_only = false;
    bool transposed = false;
    bool divided = false;
  };

  static void check(int m, int n, const std::vector<const Operands*>& operands, const Wish& wish) {
    const int rows = padded_rows(std::max(m, n)),
              ldc = padded_columns<T>(std::max(m, n)) + tile_columns<T>;
    Random random(LinAttn::test_support::seed() + 1);
    Aligned<T> c(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ldc));
    Aligned<T> low(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ldc));
    Aligned<T> divisor(static_cast<std::size_t>(rows));
    const auto at = [&](int i, int j) { return wish.transposed ? j * ldc + i : i * ldc + j; };
    std::vector<T> expected(static_cast<std::size_t>(m * n));
    for (int i = 0; i < m; ++i) {
      divisor.data[i] = static_cast<T>(random.integer(1, 4));
      for (int j = 0; j < n; ++j) {
        c.data[at(i, j)] = static_cast<T>(random.integer(-9, 9));
        T& sum = expected[static_cast<std::size_t>(i * n + j)];
        if (wish.store != Store::overwrite) sum = c.data[at(i, j)];
        for (const Operands* o : operands) sum += o->element(i, j);
        if (wish.divided) sum /= divisor.data[i];
      }
    }
    const typename C::Team team{};
    const Target<T> target{.c = c.data,
                           .ldc = ldc,
                           .store = wish.store,
                           .low = low.data,
                           .lower_only = wish.lower_only,
                           .transposed = wish.transposed,
                           .divisor = wish.divided ? divisor.data : nullptr};
    ProductSum<T> sum;
    for (const Operands* o : operands) sum.add(o->product());
    multiply(team, m, n, sum, target);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < (wish.lower_only ? std::min(i + 1, n) : n); ++j)
        ASSERT_EQ(c.data[at(i, j)] - low.data[at(i, j)],
                  expected[static_cast<std::size_t>(i * n + j)])
            << i << " " << j << " of " << m << "x" << n << "x" << operands[0]->inner << " band "
            << static_cast<int>(operands[0]->band) << " store " << static_cast<int>(wish.store);
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
          for (const Store store : all_stores) this->check(m, n, {&operands}, {.store = store});
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
          for (const Store store : all_stores) this->check(size, n, {&operands}, {.store = store});
        }
}

// Sums of two and three products; the third has a single term, the same row for all or one row
// each.
TYPED_TEST(TileProducts, SumsOfSeveral) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int size : {1, 8, 13, 30})
    for (const int inner : {1, 20})
      for (const Band band : {Band::lower, Band::upper}) {
        const Operands first(random, size, 19, inner, Band::all, false);
        const Operands second(random, size, 19, size, band, band == Band::upper);
        const Operands third(random, size, 19, 1, Band::all, true);
        for (const Store store : all_stores) {
          this->check(size, 19, {&first, &second}, {.store = store});
          this->check(size, 19, {&first, &second, &third}, {.store = store});
        }
      }
}

TYPED_TEST(TileProducts, TransposedTargets) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int m : {1, 16, 37})
    for (const int n : {1, 8, 16, 21})
      for (const int inner : {0, 3, 40}) {
        const Operands operands(random, m, n, inner, Band::all, false);
        for (const Store store : {Store::overwrite, Store::add})
          this->check(m, n, {&operands}, {.store = store, .transposed = true});
      }
}

TYPED_TEST(TileProducts, DividedRows) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int m : {1, 9, 16})
    for (const int n : {5, 32, 50}) {
      const Operands operands(random, m, n, 12, Band::all, false);
      this->check(m, n, {&operands}, {.divided = true});
    }
}

TYPED_TEST(TileProducts, LowerTriangleOnly) {
  using Operands = typename TestFixture::Operands;
  Random random(LinAttn::test_support::seed());
  for (const int size : {1, 3, 8, 9, 31, 64})
    for (const int inner : {1, 9, 40}) {
      const Operands operands(random, size, size, inner, Band::all, false);
      this->check(size, size, {&operands}, {.lower_only = true});
    }
}

// A compensated sum of many small parts keeps what a plain one loses.
TYPED_TEST(TileProducts, CompensatedSums) {
  using T = typename TypeParam::T;
  const typename TypeParam::Team team{};
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
  const typename TypeParam::Team team{};
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
  const typename TypeParam::Team team{};
  Random random(LinAttn::test_support::seed());
  for (const int rows : {1, 7, 16, 19})
    for (const int blocks : {1, 2, 5})
      for (const bool one_row : {false, true})
        for (const bool with_more : {false, true}) {
          const int n = blocks * tile_columns<T>, ld = n + tile_columns<T>,
                    more_n = tile_columns<T>;
          const auto size = static_cast<std::size_t>(padded_rows(rows) * ld);
          Aligned<T> a(size), b(size), more(size), out(static_cast<std::size_t>(padded_rows(rows)));
          for (std::size_t i = 0; i < size; ++i) {
            a.data[i] = static_cast<T>(random.integer(-9, 9));
            b.data[i] = static_cast<T>(random.integer(-9, 9));
            more.data[i] = static_cast<T>(random.integer(-9, 9));
          }
          RowSums<T> sums{a.data, ld, b.data, one_row ? 0 : ld, n};
          if (with_more) {
            sums.more = more.data;
            sums.ld_more = ld;
            sums.more_n = more_n;
          }
          sum_rows(team, rows, sums, out.data);
          for (int r = 0; r < rows; ++r) {
            T expected = 0;
            for (int j = 0; j < n; ++j)
              expected += a.data[r * ld + j] * b.data[(one_row ? 0 : r) * ld + j];
            for (int j = 0; with_more && j < more_n; ++j) expected += more.data[r * ld + j];
            ASSERT_EQ(out.data[r], expected) << r << " of " << rows;
          }
        }
}

// Terms on and below the diagonal, and nothing of what lies above it, whatever that is.
TYPED_TEST(TileProducts, LowerTriangle) {
  using T = typename TypeParam::T;
  const typename TypeParam::Team team{};
  for (const int rows : {1, 8, 17, 40})
    for (const int first : {0, 3})
      for (const bool with_terms : {false, true}) {
        const int padded = padded_columns<T>(rows), ld = padded + tile_columns<T>;
        Aligned<T> tile(static_cast<std::size_t>(padded_rows(rows) * ld));
        Aligned<T> terms(static_cast<std::size_t>(padded_rows(rows)));
        for (int i = 0; i < rows; ++i) {
          terms.data[i] = static_cast<T>(i + 1);
          for (int j = 0; j < padded; ++j)
            tile.data[i * ld + j] =
                j <= i ? static_cast<T>(10 * i + j) : std::numeric_limits<T>::quiet_NaN();
        }
        keep_lower_triangle<typename TypeParam::Team, T>(team, rows, first, padded, tile.data, ld,
                                                         with_terms ? terms.data : nullptr);
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < padded; ++j)
            ASSERT_EQ(
                tile.data[i * ld + j],
                j <= i && i >= first ? static_cast<T>(10 * i + j + (with_terms ? i + 1 : 0)) : T(0))
                << i << " " << j;
      }
}

// Rows that lie ahead are asked for each once, in any portions.
TEST(RowsAhead, AsksForEveryLineOnce) {
  std::vector<char> memory(64 * 100);
  // lines after each call: three rows of two lines and five of one, in whole rows
  const std::vector<std::pair<int, std::vector<int>>> table = {
      {1, {2, 4, 6, 7, 8, 9, 10, 11, 11, 11}}, {3, {4, 7, 10, 11, 11}}, {1000, {11, 11}}};
  for (const auto& [portion, asked] : table) {
    RowsAhead ahead;
    ahead.add(memory.data(), 640, 3, 100, false);
    ahead.add(memory.data(), 64, 5, 64, true);
    ahead.add(memory.data(), 64, 0, 64, true);
    EXPECT_EQ(ahead.lines(), 3 * 2 + 5);
    EXPECT_EQ(ahead.asked(), 0);
    for (const int lines : asked) {
      ahead.advance(portion);
      EXPECT_EQ(ahead.asked(), lines) << "of " << portion << " at a time";
    }
    ahead.clear();
    EXPECT_EQ(ahead.lines(), 0);
    EXPECT_EQ(ahead.asked(), 0);
    ahead.advance(portion);
    EXPECT_EQ(ahead.asked(), 0);
  }
}

}  // namespace
