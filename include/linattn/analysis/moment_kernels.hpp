// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/analysis/moment_sums.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/rows.hpp>
#include <linattn/tensor.hpp>

/// \file moment_kernels.hpp
/// Kernels of moment matching: sums over blocks of rows, their merging, and what gradients add to q and k.

namespace LinAttn::detail {

/// An element as a number, exactly.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION double widened(T x) {
  return static_cast<double>(static_cast<accumulator_t<T>>(x));
}

/// The rows of q or of k that count, and how they are cut into blocks of one (batch entry, head).
template <class T>
struct MomentRows {
  RowTensor<const T> data{};
  const std::uint8_t* mask = nullptr;  // (batch, rows); nullptr: every row counts
  std::int64_t mask_batch_stride = 0, mask_stride = 0;
  std::int64_t batch = 0, heads = 0, rows = 0;
  int d = 0;
  std::int64_t block_rows = 1, blocks = 0;  // blocks of one (batch entry, head)

  /// Rows without elements, behind which there is no memory, are in no block.
  void cut(std::int64_t rows_of_a_block) {
    block_rows = rows_of_a_block < 1 ? 1 : rows_of_a_block;
    blocks = d == 0 ? 0 : (rows + block_rows - 1) / block_rows;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t lists() const { return batch * heads; }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t tasks() const { return lists() * blocks; }

  KOKKOS_FORCEINLINE_FUNCTION bool counts(std::int64_t b, std::int64_t n) const {
    return !mask || mask[b * mask_batch_stride + n * mask_stride] != 0;
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t last(std::int64_t first) const {
    return first + block_rows < rows ? first + block_rows : rows;
  }
};

/// Which rows a task is about.
struct MomentBlock {
  std::int64_t b = 0, h = 0, first = 0, last = 0;

  template <class T>
  KOKKOS_FUNCTION MomentBlock(const MomentRows<T>& rows, std::int64_t task) {
    const std::int64_t list = task / rows.blocks;
    b = list / rows.heads;
    h = list % rows.heads;
    first = task % rows.blocks * rows.block_rows;
    last = rows.last(first);
  }
};

/// Sums relative to the first of the numbers, on the host: 16 at once, lane by column.
template <class T>
LINATTN_OUTLINE KOKKOS_FUNCTION MomentSum host_moment_sum(const MomentRows<T>& rows, const MomentBlock& block) {
  constexpr int lanes = 16;
  std::int64_t n = block.first;
  while (n < block.last && !rows.counts(block.b, n)) ++n;
  MomentSum result;
  if (n == block.last) return result;
  const double shift = widened(*rows.data.row(block.b, block.h, n));
  double sum[lanes] = {}, squares[lanes] = {};
  std::int64_t count = 0;
  const auto add = [&](auto stride) {
    for (; n < block.last; ++n) {
      if (!rows.counts(block.b, n)) continue;
      const T* const row = rows.data.row(block.b, block.h, n);
      ++count;
      int c = 0;
      for (; c + lanes <= rows.d; c += lanes) {
        LINATTN_INDEPENDENT
        for (int j = 0; j < lanes; ++j) {
          const double x = widened(row[(c + j) * stride]) - shift;
          sum[j] += x;
          squares[j] = fused_multiply_add(x, x, squares[j]);
        }
      }
      for (int j = 0; c + j < rows.d; ++j) {
        const double x = widened(row[(c + j) * stride]) - shift;
        sum[j] += x;
        squares[j] = fused_multiply_add(x, x, squares[j]);
      }
    }
  };
  with_stride<HostTeam>(rows.data.element_stride, add);
  for (int width = lanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      sum[j] += sum[j + width];
      squares[j] += squares[j + width];
    }
  }
  result.n = static_cast<double>(count) * rows.d;
  const double mean = sum[0] / result.n;
  result.mean = shift + mean;
  result.squares = squares[0] - mean * sum[0];
  if (result.squares < 0) result.squares = 0;
  return result;
}

/// The same of every `step`-th element, by one thread of a device.
template <class T>
KOKKOS_FUNCTION MomentSum strided_moment_sum(const MomentRows<T>& rows, const MomentBlock& block, std::int64_t start,
                                             std::int64_t step) {
  double shift = 0, sum = 0, squares = 0;
  std::int64_t count = 0;
  for (std::int64_t e = start; e < (block.last - block.first) * rows.d; e += step) {
    const std::int64_t n = block.first + e / rows.d;
    if (!rows.counts(block.b, n)) continue;
    const double value = widened(rows.data.row(block.b, block.h, n)[e % rows.d * rows.data.element_stride]);
    if (count++ == 0) shift = value;
    const double x = value - shift;
    sum += x;
    squares = fused_multiply_add(x, x, squares);
  }
  MomentSum result;
  if (count == 0) return result;
  result.n = static_cast<double>(count);
  const double mean = sum / result.n;
  result.mean = shift + mean;
  result.squares = squares - mean * sum;
  if (result.squares < 0) result.squares = 0;
  return result;
}

/// The sums of every block: those of q, then those of k.
template <class T>
struct SumBlocks {
  MomentRows<T> q, k;
  MomentSum* sums;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, MomentSum* lanes, std::int64_t task) const {
    const std::int64_t of_q = q.tasks();
    const MomentSum sum = task < of_q ? of(team, lanes, q, task) : of(team, lanes, k, task - of_q);
    if (team.rank() == 0) sums[task] = sum;
  }

  template <class Team>
  KOKKOS_FUNCTION MomentSum of(const Team& team, MomentSum* lanes, const MomentRows<T>& rows, std::int64_t task) const {
    const MomentBlock block(rows, task);
    if constexpr (Team::on_host) {
      return host_moment_sum(rows, block);
    } else {
      return merged<MomentSum>(team, lanes, MomentPlan::lanes, [&](std::int64_t lane) {
        return strided_moment_sum(rows, block, lane, MomentPlan::lanes);
      });
    }
  }
};

/// The sum of each list of `length` entries that follow each other.
template <class Sum>
struct MergeBlocks {
  struct Lists {
    const Sum* entries = nullptr;
    std::int64_t lists = 0, length = 0;
  };
  Lists q, k;  // k follows q
  Sum* sums;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, Sum* lanes, std::int64_t task) const {
    const bool of_q = task < q.lists;
    const std::int64_t length = of_q ? q.length : k.length;
    const Sum* const first = of_q ? q.entries + task * length : k.entries + (task - q.lists) * length;
    const Sum sum = merged<Sum>(team, lanes, length, [&](std::int64_t i) { return first[i]; });
    if (team.rank() == 0) sums[task] = sum;
  }
};

/// Which (batch entry, head) belong to one value: all of them, or those of the heads of one group.
struct MomentGroups {
  std::int64_t batch = 0, heads = 0, group = 1;  // query heads of a key/value head; 1 for k
  bool per_head = false;

  /// Entries of value g.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t length() const { return batch * (per_head ? group : heads); }
  /// The i-th of them, as b * heads + h.
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t entry(std::int64_t g, std::int64_t i) const {
    return per_head ? i / group * heads + g * group + i % group : i;
  }
};

/// One value for each key/value head, where there is one: read as 0 and not written otherwise.
template <class Number>
struct BasicMomentValues {
  Number* data = nullptr;
  std::int64_t stride = 0;

  BasicMomentValues() = default;
  template <class Tensor>
  explicit BasicMomentValues(const Tensor& tensor) : data(tensor.data()), stride(tensor.stride(0)) {}
  KOKKOS_FORCEINLINE_FUNCTION double operator()(std::int64_t g) const { return data ? data[g * stride] : 0; }
  KOKKOS_FORCEINLINE_FUNCTION void set(std::int64_t g, double value) const {
    if (data) data[g * stride] = value;
  }
};
using MomentInput = BasicMomentValues<const double>;
using MomentOutput = BasicMomentValues<double>;

/// From the sums of (batch entry, head) to sigma, mean and number: of q, then of k.
struct FinishMoments {
  MomentGroups q_groups, k_groups;
  const MomentSum *q_sums, *k_sums;
  MomentOutput sigma_q, sigma_k, mean_q, mean_k, count_q, count_k;
  std::int64_t values = 0, kv_heads = 0;  // values: 1 or kv_heads

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, MomentSum* lanes, std::int64_t task) const {
    if (task < values)
      finish(team, lanes, task, q_groups, q_sums, sigma_q, mean_q, count_q);
    else
      finish(team, lanes, task - values, k_groups, k_sums, sigma_k, mean_k, count_k);
  }

  template <class Team>
  KOKKOS_FUNCTION void finish(const Team& team, MomentSum* lanes, std::int64_t value, const MomentGroups& groups,
                              const MomentSum* sums, const MomentOutput& sigma, const MomentOutput& mean,
                              const MomentOutput& count) const {
    const MomentSum sum =
        merged<MomentSum>(team, lanes, groups.length(), [&](std::int64_t i) { return sums[groups.entry(value, i)]; });
    const std::int64_t first = values == 1 ? 0 : value, last = values == 1 ? kv_heads : value + 1;
    for (std::int64_t g = first + team.rank(); g < last; g += team.size()) {
      sigma.set(g, sum.sigma());
      mean.set(g, sum.mean);
      count.set(g, sum.n);
    }
  }
};

// ---- C_cross ----

/// Pairs of the same position and feature: every `step`-th of a block, relative to the first.
template <class T>
KOKKOS_FUNCTION CrossSum pair_sum(const MomentRows<T>& q, const MomentRows<T>& k, std::int64_t group,
                                  const MomentBlock& block, std::int64_t start, std::int64_t step) {
  double q0 = 0, k0 = 0, sq = 0, sk = 0, sqk = 0, sq2 = 0, sk2 = 0, sq2k2 = 0;
  std::int64_t count = 0;
  const int d = q.d;
  for (std::int64_t e = start; e < (block.last - block.first) * d; e += step) {
    const std::int64_t n = block.first + e / d, c = e % d;
    if (!q.counts(block.b, n) || !k.counts(block.b, n)) continue;
    const double x = widened(q.data.row(block.b, block.h, n)[c * q.data.element_stride]);
    const double y = widened(k.data.row(block.b, block.h / group, n)[c * k.data.element_stride]);
    if (count++ == 0) {
      q0 = x;
      k0 = y;
    }
    const double dx = x - q0, dy = y - k0, dx2 = dx * (x + q0), dy2 = dy * (y + k0);
    sq += dx;
    sk += dy;
    sqk += dx * dy;
    sq2 += dx2;
    sk2 += dy2;
    sq2k2 += dx2 * dy2;
  }
  CrossSum result;
  if (count == 0) return result;
  const double n = static_cast<double>(count);
  result.n = n;
  result.x = q0 + sq / n;
  result.y = k0 + sk / n;
  result.xy = sqk - sq * sk / n;
  result.x2 = q0 * q0 + sq2 / n;
  result.y2 = k0 * k0 + sk2 / n;
  result.x2y2 = sq2k2 - sq2 * sk2 / n;
  return result;
}

template <class T>
struct SumPairs {
  MomentRows<T> q, k;  // of one cut
  std::int64_t group = 1;
  CrossSum* sums;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, CrossSum* lanes, std::int64_t task) const {
    const MomentBlock block(q, task);
    const int parts = Team::on_host ? 1 : MomentPlan::lanes;
    const CrossSum sum = merged<CrossSum>(team, lanes, parts,
                                          [&](std::int64_t lane) { return pair_sum(q, k, group, block, lane, parts); });
    if (team.rank() == 0) sums[task] = sum;
  }
};

/// First and second moments about 0 of the features of each (batch entry, head), and its number of rows.
struct FeatureMoments {
  double* sums = nullptr;    // (list, block, 2, D): of a block
  double* counts = nullptr;  // (list, block): rows of a block
  double* first = nullptr;   // (list, D): mean of x
  double* second = nullptr;  // (list, D): mean of x^2
  double* rows = nullptr;    // (list)
};

template <class T>
struct SumFeatures {
  MomentRows<T> q, k;
  FeatureMoments of_q, of_k;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    const std::int64_t q_tasks = q.tasks();
    if (task < q_tasks)
      sum(team, q, of_q, task);
    else
      sum(team, k, of_k, task - q_tasks);
  }

  template <class Team>
  KOKKOS_FUNCTION void sum(const Team& team, const MomentRows<T>& rows, const FeatureMoments& to,
                           std::int64_t task) const {
    const MomentBlock block(rows, task);
    double* const first = to.sums + task * 2 * rows.d;
    double* const second = first + rows.d;
    for_each(team, 2 * rows.d, [&](int c) { first[c] = 0; });
    team.barrier();
    std::int64_t count = 0;
    for (std::int64_t n = block.first; n < block.last; ++n) {
      if (!rows.counts(block.b, n)) continue;
      ++count;
      const T* const row = rows.data.row(block.b, block.h, n);
      const auto add = [&](auto stride) {
        const auto at = [&](int c) {
          const double x = widened(row[c * stride]);
          first[c] += x;
          second[c] = fused_multiply_add(x, x, second[c]);
        };
        if constexpr (Team::on_host) {
          for_each_along(rows.d, at);
        } else {
          for_each(team, rows.d, at);
        }
      };
      with_stride<Team>(rows.data.element_stride, add);
    }
    if (team.rank() == 0) to.counts[task] = static_cast<double>(count);
  }
};

/// The blocks of SumFeatures added up, in order.
struct FinishFeatures {
  FeatureMoments of_q, of_k;
  std::int64_t q_lists, q_blocks, k_blocks;
  int d;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    if (task < q_lists)
      finish(team, of_q, task, q_blocks);
    else
      finish(team, of_k, task - q_lists, k_blocks);
  }

  template <class Team>
  KOKKOS_FUNCTION void finish(const Team& team, const FeatureMoments& m, std::int64_t list, std::int64_t blocks) const {
    double rows = 0;
    for (std::int64_t i = 0; i < blocks; ++i) rows += m.counts[list * blocks + i];
    for_each(team, 2 * d, [&](int c) {
      double total = 0;
      for (std::int64_t i = 0; i < blocks; ++i) total += m.sums[(list * blocks + i) * 2 * d + c];
      double* const mean = c < d ? m.first : m.second;
      mean[list * d + c % d] = rows > 0 ? total / rows : 0;
    });
    if (team.rank() == 0) m.rows[list] = rows;
  }
};

/// All pairs of one (batch entry, query head): within a feature q and k are independent, so their means are what is
/// left.
struct SumFeaturePairs {
  FeatureMoments q, k;
  std::int64_t heads = 0, group = 1;
  int d = 0;
  CrossSum* sums;  // (batch entry, query head)

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, CrossSum* lanes, std::int64_t task) const {
    const std::int64_t b = task / heads, h = task % heads, of_k = b * (heads / group) + h / group;
    const double pairs = q.rows[task] * k.rows[of_k];
    const CrossSum sum = merged<CrossSum>(team, lanes, d, [&](std::int64_t c) {
      return CrossSum{
          pairs, q.first[task * d + c], k.first[of_k * d + c], 0, q.second[task * d + c], k.second[of_k * d + c], 0};
    });
    if (team.rank() == 0) sums[task] = sum;
  }
};

/// From the sums of (batch entry, query head) to C_cross; the sums are kept for the gradient.
struct FinishCross {
  MomentGroups groups;
  const CrossSum* sums;
  CrossSum* totals;  // (value)
  MomentOutput cross;
  std::int64_t values = 0, kv_heads = 0;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, CrossSum* lanes, std::int64_t value) const {
    const CrossSum sum =
        merged<CrossSum>(team, lanes, groups.length(), [&](std::int64_t i) { return sums[groups.entry(value, i)]; });
    const std::int64_t first = values == 1 ? 0 : value, last = values == 1 ? kv_heads : value + 1;
    for (std::int64_t g = first + team.rank(); g < last; g += team.size()) cross.set(g, sum.cross());
    if (team.rank() == 0) totals[value] = sum;
  }
};

// ---- rates and their gradient ----

/// What a rule makes of the moments of one head. `free`: not clamped, so that a gradient passes.
struct MatchedRates {
  double sigma_q, sigma_k;
  bool free_q, free_k, free_target;
  ValueAndSlope st2;
  double t;  // sqrt(st2 / 2)

  KOKKOS_FUNCTION MatchedRates(const RateRule& rule, double q, double k, double cross) {
    using std::sqrt;
    free_q = !(q <= least_sigma);
    free_k = !(k <= least_sigma);
    sigma_q = free_q ? q : least_sigma;
    sigma_k = free_k ? k : least_sigma;
    double sm2 = sigma_q * sigma_q * sigma_k * sigma_k + cross;
    free_target = !(sm2 <= least_sm2 * (1 + 1e-9));  // two deviations at their limit are at this one
    if (!free_target) sm2 = least_sm2;
    st2 = rule(sm2);
    t = sqrt(st2.value / 2);
  }
};

/// alpha and beta of each query head.
struct FindRates {
  RateRule rule;
  MomentInput sigma_q, sigma_k, cross;
  MomentOutput alpha, beta;
  std::int64_t group = 1;

  KOKKOS_FUNCTION void operator()(std::int64_t h) const {
    const std::int64_t g = h / group;
    double a = rule.rate, b = rule.rate;
    if (rule.rule != MomentRule::fixed) {
      const MatchedRates rates(rule, sigma_q(g), sigma_k(g), cross(g));
      a = rates.t / rates.sigma_q;
      b = rates.t / rates.sigma_k;
    }
    alpha.set(h, a);
    if (h % group == 0) beta.set(g, b);
  }
};

/// What the gradient of a value adds to its entries: dL/dq += q_slope (q - mean_q) + cross dC_cross/dq, likewise k.
struct MomentPull {
  double q_slope = 0, mean_q = 0, k_slope = 0, mean_k = 0, cross = 0;
};

/// One MomentPull for each value.
struct FindPulls {
  RateRule rule;
  MomentInput sigma_q, sigma_k, mean_q, mean_k, count_q, count_k, cross;
  MomentInput d_alpha, d_beta;
  std::int64_t values = 0, kv_heads = 0, group = 1;
  MomentPull* pulls;

  KOKKOS_FUNCTION void operator()(std::int64_t value) const {
    MomentPull pull;
    if (rule.rule != MomentRule::fixed) {
      const std::int64_t first = values == 1 ? 0 : value, last = values == 1 ? kv_heads : value + 1;
      double da = 0, db = 0;
      for (std::int64_t g = first; g < last; ++g) {
        for (std::int64_t h = g * group; h < (g + 1) * group; ++h) da += d_alpha(h);
        db += d_beta(g);
      }
      const MatchedRates r(rule, sigma_q(first), sigma_k(first), cross(first));
      const double d_t = da / r.sigma_q + db / r.sigma_k;
      const double d_target = r.free_target && r.t > 0 ? d_t * r.st2.slope / (4 * r.t) : 0;
      const double d_sq = -da * r.t / (r.sigma_q * r.sigma_q) + d_target * 2 * r.sigma_q * r.sigma_k * r.sigma_k;
      const double d_sk = -db * r.t / (r.sigma_k * r.sigma_k) + d_target * 2 * r.sigma_k * r.sigma_q * r.sigma_q;
      if (r.free_q && count_q(first) > 1) pull.q_slope = d_sq / ((count_q(first) - 1) * r.sigma_q);
      if (r.free_k && count_k(first) > 1) pull.k_slope = d_sk / ((count_k(first) - 1) * r.sigma_k);
      pull.mean_q = mean_q(first);
      pull.mean_k = mean_k(first);
      pull.cross = d_target;
    }
    pulls[value] = pull;
  }
};

/// Entry x of a feature gets slope x + constant.
struct FeaturePull {
  double slope = 0, constant = 0;
};

/// The gradient of C_cross over all pairs, for each feature of each (batch entry, head): of q, then of k.
struct FindFeaturePulls {
  FeatureMoments q, k;
  const CrossSum* totals;
  const MomentPull* pulls;
  FeaturePull *of_q, *of_k;  // (batch entry, head, D)
  std::int64_t heads = 0, group = 1, q_lists = 0, values = 0;
  int d = 0;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    const std::int64_t kv_heads = heads / group;
    const bool is_q = task < q_lists;
    const std::int64_t list = is_q ? task : task - q_lists;
    const std::int64_t own_heads = is_q ? heads : kv_heads;
    const std::int64_t b = list / own_heads, g = is_q ? list % own_heads / group : list % own_heads;
    const std::int64_t value = values == 1 ? 0 : g;
    const CrossSum& total = totals[value];
    const double weight = total.n > 0 ? 2 * pulls[value].cross / total.n : 0;
    for_each(team, d, [&](int c) {
      FeaturePull pull;
      const auto add = [&](const FeatureMoments& other, std::int64_t other_list, double mean, double mean2) {
        const double part = weight * other.rows[other_list];
        pull.slope += part * (other.second[other_list * d + c] - mean2);
        pull.constant -= part * total.covariance() * (other.first[other_list * d + c] - mean);
      };
      if (is_q) {
        add(k, b * kv_heads + g, total.y, total.y2);
        of_q[list * d + c] = pull;
      } else {
        for (std::int64_t h = g * group; h < (g + 1) * group; ++h) add(q, b * heads + h, total.x, total.x2);
        of_k[list * d + c] = pull;
      }
    });
  }
};

/// Adds what MomentPull and FeaturePull say to the rows that count: of q, then of k.
template <class T>
struct AddPulls {
  MomentRows<T> q, k;
  RowTensor<T> d_q, d_k;  // a gradient without data is not wanted, and its tasks are none
  const MomentPull* pulls;
  const FeaturePull *of_q = nullptr, *of_k = nullptr;  // all pairs
  const CrossSum* same_position = nullptr;             // pairs of one position: totals
  std::int64_t group = 1, values = 1, q_tasks = 0;

  template <class Team>
  KOKKOS_FUNCTION void work(const Team& team, double*, std::int64_t task) const {
    const bool is_q = task < q_tasks;
    const MomentRows<T>& rows = is_q ? q : k;
    const MomentBlock block(rows, is_q ? task : task - q_tasks);
    const std::int64_t g = is_q ? block.h / group : block.h;
    const MomentPull& pull = pulls[values == 1 ? 0 : g];
    const double slope = is_q ? pull.q_slope : pull.k_slope, mean = is_q ? pull.mean_q : pull.mean_k;
    const FeaturePull* const features = is_q ? (of_q ? of_q + (block.b * q.heads + block.h) * q.d : nullptr)
                                             : (of_k ? of_k + (block.b * k.heads + block.h) * k.d : nullptr);
    const RowTensor<T>& to = is_q ? d_q : d_k;
    for (std::int64_t n = block.first; n < block.last; ++n) {
      if (!rows.counts(block.b, n)) continue;
      const T* const row = rows.data.row(block.b, block.h, n);
      T* const gradient = to.row(block.b, block.h, n);
      const std::int64_t in = rows.data.element_stride, out = to.element_stride;
      const bool paired = same_position && q.counts(block.b, n) && k.counts(block.b, n);
      const auto at = [&](int c) {
        const double x = widened(row[c * in]);
        double sum = widened(gradient[c * out]) + slope * (x - mean);
        if (features) sum += features[c].slope * x + features[c].constant;
        if (paired) sum += of_pairs(is_q, block, n, g, c, x, pull.cross);
        gradient[c * out] = static_cast<T>(sum);
      };
      if constexpr (Team::on_host) {
        if (!features && !paired && in == 1 && out == 1)
          add_along(row, gradient, rows.d, slope, mean);
        else
          for_each_along(rows.d, at);
      } else {
        for_each(team, rows.d, at);
      }
    }
  }

  LINATTN_OUTLINE KOKKOS_FUNCTION static void add_along(const T* row, T* gradient, int d, double slope, double mean) {
    for_each_along(
        d, [=](int c) { gradient[c] = static_cast<T>(widened(gradient[c]) + slope * (widened(row[c]) - mean)); });
  }

  /// The gradient of C_cross over pairs of one position in entry x of row n.
  KOKKOS_FUNCTION double of_pairs(bool is_q, const MomentBlock& block, std::int64_t n, std::int64_t g, int c, double x,
                                  double d_cross) const {
    const CrossSum& total = same_position[values == 1 ? 0 : g];
    double sum = 0;
    const auto add = [&](double other, double mean, double mean2) {
      sum += x * (other * other - mean2) - total.covariance() * (other - mean);
    };
    if (is_q) {
      add(widened(k.data.row(block.b, g, n)[c * k.data.element_stride]), total.y, total.y2);
    } else {
      for (std::int64_t h = g * group; h < (g + 1) * group; ++h)
        add(widened(q.data.row(block.b, h, n)[c * q.data.element_stride]), total.x, total.x2);
    }
    return 2 * d_cross / total.n * sum;
  }
};

}  // namespace LinAttn::detail
