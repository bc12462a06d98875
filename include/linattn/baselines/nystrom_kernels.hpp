// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <linattn/baselines/workers.hpp>
#include <linattn/local_softmax/walker.hpp>

/// \file nystrom_kernels.hpp
/// Landmarks, the matrix between them and its iterative pseudo-inverse, forward and backward.

namespace LinAttn::baselines::detail {

/// Rows of segment s of n rows cut into m.
struct Segment {
  std::int64_t begin, end;
  KOKKOS_FUNCTION static Segment at(std::int64_t s, std::int64_t n, std::int64_t m) {
    return {s * n / m, (s + 1) * n / m};
  }
};

/// qt and kt: means of segments, kt for every query head.
template <class A>
struct FormLandmarks {
  StoredTensor<A> q, k;
  std::int64_t batch, heads, group, nq, nk;
  int d;
  Matrices<A> queries, keys;

  struct Memory {
    A* sums;
  };
  KOKKOS_FUNCTION std::int64_t tasks() const { return batch * heads * queries.rows; }
  KOKKOS_FUNCTION void place(ArenaCursor& arena, Memory& own) const { own.sums = arena.take<A>(d); }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory& own, std::int64_t task) const {
    const std::int64_t m = queries.rows, s = task % m, unit = task / m, b = unit / heads, h = unit % heads;
    mean(team, own, q, b, h, Segment::at(s, nq, m), queries.at(b, h) + s * queries.ld);
    mean(team, own, k, b, h / group, Segment::at(s, nk, m), keys.at(b, h) + s * keys.ld);
  }

 private:
  /// In blocks of rows, so that long sums have two levels.
  template <class Team>
  KOKKOS_FUNCTION void mean(const Team& team, const Memory& own, const StoredTensor<A>& x, std::int64_t b,
                            std::int64_t h, Segment rows, A* to) const {
    constexpr std::int64_t block = 64;
    A* sums = own.sums;
    for_each(team, d, [=](int j) { to[j] = A(0); });
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += block) {
      const int count = static_cast<int>(rows.end - begin < block ? rows.end - begin : block);
      for_each(team, d, [=](int j) { sums[j] = A(0); });
      team.barrier();
      with_stride<Team>(x.element_stride, [&](auto element) {
        for_each_down(
            team, count, d, [](int) { return true; },
            [&](int r) {
              const A* row = x.template row<A>(b, h, begin + r);
              return [=](int j) { sums[j] += row[j * element]; };
            },
            [](int) { return [](int) {}; });
      });
      team.barrier();
      for_each(team, d, [=](int j) { to[j] += sums[j]; });
      team.barrier();
    }
    const A share = A(1) / static_cast<A>(rows.end - rows.begin);
    for_each(team, d, [=](int j) { to[j] *= share; });
    team.barrier();
  }
};

/// What landmarks add to the gradients of their segments: dq_i += dqt_s / n_s, and likewise of keys over the group.
template <class A>
struct SpreadLandmarkGradients {
  StoredTensor<A> d_q, d_k;
  std::int64_t batch, heads, kv_heads, nq, nk;
  int d;
  Matrices<A> queries, keys;  // gradients

  struct Memory {};
  KOKKOS_FUNCTION std::int64_t tasks() const { return batch * (heads + kv_heads) * queries.rows; }
  KOKKOS_FUNCTION void place(ArenaCursor&, Memory&) const {}

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory&, std::int64_t task) const {
    const std::int64_t m = queries.rows, s = task % m, unit = task / m, all = heads + kv_heads, b = unit / all,
                       h = unit % all;
    if (h < heads)
      add(team, d_q, b, h, Segment::at(s, nq, m), queries.at(b, h) + s * queries.ld, queries.size(), 1);
    else
      add(team, d_k, b, h - heads, Segment::at(s, nk, m), keys.at(b, (h - heads) * (heads / kv_heads)) + s * keys.ld,
          keys.size(), heads / kv_heads);
  }

 private:
  template <class Team>
  KOKKOS_FUNCTION void add(const Team& team, const StoredTensor<A>& x, std::int64_t b, std::int64_t h, Segment rows,
                           const A* from, std::int64_t next, std::int64_t count) const {
    const A share = A(1) / static_cast<A>(rows.end - rows.begin);
    constexpr std::int64_t block = 64;
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += block) {
      const int here = static_cast<int>(rows.end - begin < block ? rows.end - begin : block);
      with_stride<Team>(x.element_stride, [&](auto element) {
        for_each_in_rows(team, here, d, [&](int r) {
          A* row = x.template row<A>(b, h, begin + r);
          return [=](int j) {
            A total = A(0);
            for (std::int64_t g = 0; g < count; ++g) total += from[g * next + j];
            row[j * element] += share * total;
          };
        });
      });
    }
    team.barrier();
  }
};

/// A, the iterates Z_0 ... Z_n and X = Z_n W of one head; backward from dX.
template <class A>
struct LandmarkInverse {
  std::int64_t batch = 0, heads = 0;
  int iterations = 0;
  A scale = A(1);
  bool backward = false;
  Matrices<A> queries{}, keys{};         // qt, kt
  Matrices<A> attended{}, values{};      // W = F2 v; X: forward written
  Matrices<A> d_values{}, d_attended{};  // backward: dX read, dW written
  Matrices<A> d_queries{}, d_keys{};     // backward: what A adds to the gradients of qt, written, and of kt, added

  struct Memory {
    int ld = 0, ldd = 0;
    A *keys_t = nullptr, *transposed = nullptr, *hidden = nullptr;
    A *weights = nullptr, *iterates = nullptr;  // A; Z_0 ... Z_n, or the last one
    A *y = nullptr, *first = nullptr, *second = nullptr, *third = nullptr;
    A *d_weights = nullptr, *d_z = nullptr, *d_next = nullptr, *d_y = nullptr, *d_t = nullptr;
    A* sums = nullptr;
  };

  KOKKOS_FUNCTION int m() const { return queries.rows; }
  KOKKOS_FUNCTION std::int64_t tasks() const { return batch * heads; }
  KOKKOS_FUNCTION void place(ArenaCursor& arena, Memory& own) const {
    own.ld = padded_columns<A>(m());
    own.ldd = padded_columns<A>(queries.columns > attended.columns ? queries.columns : attended.columns);
    const std::int64_t square = static_cast<std::int64_t>(padded_rows(m())) * own.ld;
    const auto matrix = [&] { return arena.take<A>(square); };
    own.keys_t = arena.take<A>(static_cast<std::int64_t>(padded_rows(own.ldd)) * own.ld);
    own.hidden = arena.take<A>(own.ld);
    own.sums = arena.take<A>(own.ld);
    own.weights = matrix();
    own.iterates = arena.take<A>(square * (backward ? iterations + 1 : 2));
    own.y = matrix();
    own.first = matrix();
    own.second = matrix();
    own.transposed = matrix();
    if (!backward) return;
    own.third = matrix();
    own.d_weights = matrix();
    own.d_z = matrix();
    own.d_next = matrix();
    own.d_y = matrix();
    own.d_t = matrix();
  }

  template <class Team>
  KOKKOS_FUNCTION void run(const Team& team, const Memory& own, std::int64_t task) const {
    const std::int64_t b = task / heads, h = task % heads;
    form_weights(team, own, b, h);
    const Largest largest = start(team, own);
    for (int i = 0; i < iterations; ++i) {
      terms(team, own, iterate(own, i));
      scaled_product(team, own, iterate(own, i), own.second, A(0.25), iterate(own, i + 1));
    }
    const A* z = iterate(own, iterations);
    if (!backward) {
      product(team, m(), attended.columns, m(), {z, own.ld, 1}, attended.at(b, h), attended.ld, values.at(b, h),
              values.ld);
      return;
    }
    go_back(team, own, b, h, largest);
  }

 private:
  /// The largest row sum and column sum of A, and where they are.
  struct Largest {
    A row, column;
    int at_row, at_column;
  };

  KOKKOS_FUNCTION A* iterate(const Memory& own, int i) const {
    const std::int64_t square = static_cast<std::int64_t>(padded_rows(m())) * own.ld;
    return own.iterates + square * (backward ? i : i % 2);
  }

  template <class Team, class Body>
  KOKKOS_FUNCTION void for_each_entry(const Team& team, const Body& body) const {
    for_each_in_rows(team, m(), m(), body);
    team.barrier();
  }

  template <class Team>
  KOKKOS_FUNCTION void form_weights(const Team& team, const Memory& own, std::int64_t b, std::int64_t h) const {
    const int n = m(), d = queries.columns;
    transpose(team, n, d, keys.at(b, h), keys.ld, own.keys_t, own.ld);
    team.barrier();
    for_each(team, own.ld, [&](int j) { own.hidden[j] = A(0); });
    product(team, n, n, d, {queries.at(b, h), queries.ld, 1}, own.keys_t, own.ld, own.weights, own.ld);
    for_each(team, n, [&](int r) {
      A* row = own.weights + r * own.ld;
      const SoftmaxRow<A> made = exponentials_of_row<Team>(row, n, own.hidden, scale, minus_infinity<A>());
      const A share = A(1) / made.sum;
      for (int j = 0; j < n; ++j) row[j] *= share;
    });
    team.barrier();
  }

  /// Z_0.
  template <class Team>
  KOKKOS_FUNCTION Largest start(const Team& team, const Memory& own) const {
    const int n = m(), ld = own.ld;
    const A* a = own.weights;
    A* sums = own.sums;
    const auto largest = [&](int& where) {
      A value = sums[0];
      where = 0;
      for (int j = 1; j < n; ++j)
        if (sums[j] > value || sums[j] != sums[j]) {
          value = sums[j];
          where = j;
        }
      return value;
    };
    Largest found{};
    for_each(team, n, [=](int r) {
      A total = A(0);
      for (int j = 0; j < n; ++j) total += a[r * ld + j];
      sums[r] = total;
    });
    team.barrier();
    found.row = largest(found.at_row);
    team.barrier();
    for_each(team, n, [=](int j) {
      A total = A(0);
      for (int r = 0; r < n; ++r) total += a[r * ld + j];
      sums[j] = total;
    });
    team.barrier();
    found.column = largest(found.at_column);
    team.barrier();
    const A share = A(1) / (found.row * found.column);
    A* z = iterate(own, 0);
    for_each_entry(team, [=](int r) { return [=](int j) { z[r * ld + j] = a[j * ld + r] * share; }; });
    return found;
  }

  /// to = c I - from
  template <class Team>
  KOKKOS_FUNCTION void subtract_from(const Team& team, const Memory& own, A c, const A* from, A* to) const {
    const int ld = own.ld;
    for_each_entry(team,
                   [=](int r) { return [=](int j) { to[r * ld + j] = (r == j ? c : A(0)) - from[r * ld + j]; }; });
  }
  template <class Team>
  KOKKOS_FUNCTION void scaled_product(const Team& team, const Memory& own, const A* x, const A* y, A factor, A* to,
                                      Store store = Store::overwrite) const {
    const int n = m(), ld = own.ld;
    product(team, n, n, n, {x, ld, 1}, y, ld, to, ld, store);
    if (factor != A(1)) for_each_entry(team, [=](int r) { return [=](int j) { to[r * ld + j] *= factor; }; });
  }

  /// y = A Z, and the nested terms; T3 ends in `second`, where T1 and T2 are kept in `first` and `third` backward.
  template <class Team>
  KOKKOS_FUNCTION void terms(const Team& team, const Memory& own, const A* z) const {
    A* t2 = own.third ? own.third : own.second;
    scaled_product(team, own, own.weights, z, A(1), own.y);
    subtract_from(team, own, A(7), own.y, own.first);
    scaled_product(team, own, own.y, own.first, A(1), own.transposed);
    subtract_from(team, own, A(15), own.transposed, t2);
    scaled_product(team, own, own.y, t2, A(1), own.transposed);
    subtract_from(team, own, A(13), own.transposed, own.second);
  }

  /// to (= or -=) x^T y
  template <class Team>
  KOKKOS_FUNCTION void transposed_product(const Team& team, const Memory& own, const A* x, const A* y, A* to,
                                          Store store = Store::overwrite) const {
    const int n = m(), ld = own.ld;
    product(team, n, n, n, {x, 1, ld}, y, ld, to, ld, store);
  }
  /// to (= or +=) x y^T
  template <class Team>
  KOKKOS_FUNCTION void product_transposed(const Team& team, const Memory& own, const A* x, const A* y, A* to,
                                          Store store = Store::overwrite) const {
    const int n = m(), ld = own.ld;
    transpose(team, n, n, y, ld, own.transposed, ld);
    team.barrier();
    product(team, n, n, n, {x, ld, 1}, own.transposed, ld, to, ld, store);
  }
  template <class Team>
  KOKKOS_FUNCTION void multiply_entries(const Team& team, const Memory& own, A* x, A factor) const {
    const int ld = own.ld;
    for_each_entry(team, [=](int r) { return [=](int j) { x[r * ld + j] *= factor; }; });
  }

  /// Gradients of W, qt and kt from that of X.
  template <class Team>
  KOKKOS_FUNCTION void go_back(const Team& team, const Memory& own, std::int64_t b, std::int64_t h,
                               Largest largest) const {
    const int n = m(), ld = own.ld, dv = attended.columns, d = queries.columns;
    const A *w = attended.at(b, h), *d_x = d_values.at(b, h);
    A* d_z = own.d_z;
    // X = Z W
    product(team, n, dv, n, {iterate(own, iterations), 1, ld}, d_x, d_values.ld, d_attended.at(b, h), d_attended.ld);
    transpose(team, n, dv, w, attended.ld, own.keys_t, ld);
    team.barrier();
    product(team, n, n, dv, {d_x, d_values.ld, 1}, own.keys_t, ld, d_z, ld);
    A* d_a = own.d_weights;
    for_each_entry(team, [=](int r) { return [=](int j) { d_a[r * ld + j] = A(0); }; });
    for (int i = iterations - 1; i >= 0; --i) {
      const A* z = iterate(own, i);
      terms(team, own, z);  // y, T1 in first, T2 in third, T3 in second
      multiply_entries(team, own, d_z, A(0.25));
      product_transposed(team, own, d_z, own.second, own.d_next);  // dZ of Z T3
      transposed_product(team, own, z, d_z, own.d_t);              // dT3
      product_transposed(team, own, own.d_t, own.third, own.d_y);  // -dY of 13 I - Y T2
      transposed_product(team, own, own.y, own.d_t, own.second);   // -dT2
      multiply_entries(team, own, own.second, A(-1));
      product_transposed(team, own, own.second, own.first, own.d_y, Store::add);  // -dY of 15 I - Y T1
      transposed_product(team, own, own.y, own.second, own.d_t);  // -dT1 = dY of 7 I - Y, by its sign below
      const A *more = own.d_t, *sum = own.d_y;
      A* d_y = own.d_y;
      for_each_entry(team, [=](int r) { return [=](int j) { d_y[r * ld + j] = more[r * ld + j] - sum[r * ld + j]; }; });
      product_transposed(team, own, d_y, z, d_a, Store::add);  // Y = A Z
      transposed_product(team, own, own.weights, d_y, own.d_next, Store::add);
      const A* next = own.d_next;
      for_each_entry(team, [=](int r) { return [=](int j) { d_z[r * ld + j] = next[r * ld + j]; }; });
    }
    // Z_0 = A^T / (row column)
    const A* z0 = iterate(own, 0);
    A* sums = own.sums;
    for_each(team, n, [=](int r) {
      A total = A(0);
      for (int j = 0; j < n; ++j) total += d_z[r * ld + j] * z0[r * ld + j];
      sums[r] = total;
    });
    team.barrier();
    A inner = A(0);
    for (int r = 0; r < n; ++r) inner += sums[r];
    team.barrier();
    const A share = A(1) / (largest.row * largest.column), of_row = inner / largest.row,
            of_column = inner / largest.column;
    for_each_entry(team, [=](int r) {
      return [=](int j) {
        A more = d_z[j * ld + r] * share;
        if (r == largest.at_row) more -= of_row;
        if (j == largest.at_column) more -= of_column;
        d_a[r * ld + j] += more;
      };
    });
    // A = softmax(scale qt kt^T)
    const A* a = own.weights;
    for_each(team, n, [=, this](int r) {
      A total = A(0);
      for (int j = 0; j < n; ++j) total += a[r * ld + j] * d_a[r * ld + j];
      for (int j = 0; j < n; ++j) d_a[r * ld + j] = scale * a[r * ld + j] * (d_a[r * ld + j] - total);
    });
    team.barrier();
    product(team, n, d, n, {d_a, ld, 1}, keys.at(b, h), keys.ld, d_queries.at(b, h), d_queries.ld);
    product(team, n, d, n, {d_a, 1, ld}, queries.at(b, h), queries.ld, d_keys.at(b, h), d_keys.ld, Store::add);
  }
};

}  // namespace LinAttn::baselines::detail
