// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/arguments.hpp>
#include <linattn/engine/row_norm.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/state.hpp>

/// \file scan.hpp
/// Scans over the segments of a sequence: states, shifts, and sums of parameter gradients.
///
/// Every element of a state is scanned by itself with the monoid of state.hpp, in order of the segments
/// and with the carry in fp64, so the result does not depend on the number of threads.

namespace LinAttn::detail {

/// What a segment receives: the states before it, those after it, or all of them.
enum class ScanKind { prefix, suffix, total };

/// The states of the segments of each unit, scanned in place; see the top of this file.
///
/// `edge` is the caller's state that stands before the first segment (behind the last one for suffixes,
/// with the sign of its shifts turned), if there is one.
template <class ExecSpace, class A, bool Scaled>
struct ScanStates {
  using Member = typename Kokkos::TeamPolicy<ExecSpace>::member_type;
  using Sum = std::conditional_t<Scaled, ScaledSum<double>, double>;
  static constexpr int block = 256;

  SegmentStates<A> states;
  CallerState<const A, const int> edge;
  int edge_sign;
  ScanKind kind;
  bool transposed;
  int segments, features, dv;
  Window window;
  std::int64_t kv_heads;

  std::int64_t blocks() const { return (elements() + block - 1) / block; }

  /// `unit` counts (sequence, key/value head, window).
  KOKKOS_FUNCTION void operator()(const Member& team) const {
    const std::int64_t state = std::int64_t(window.features) * window.values;
    const std::int64_t count = elements();
    const std::int64_t blocks = (count + block - 1) / block;
    const std::int64_t unit = team.league_rank() / blocks;
    const std::int64_t begin = team.league_rank() % blocks * block;
    const int here = static_cast<int>(count - begin < block ? count - begin : block);
    const std::int64_t member = unit / window.tiles / kv_heads, head = unit / window.tiles % kv_heads;
    const int tile = static_cast<int>(unit % window.tiles);
    const int first_feature = window.first_feature(tile), first_value = window.first_value(tile);
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, here), [&](int e) {
      const std::int64_t element = begin + e;
      if (element < state) {
        const int feature =
            first_feature + static_cast<int>(transposed ? element % window.features : element / window.values);
        const int value =
            first_value + static_cast<int>(transposed ? element / window.features : element % window.values);
        if (feature >= features || value >= dv) return;  // the last window is narrower
        const A first = edge.present ? edge.values.row(member, head, feature)[value * edge.values.element_stride]
                                     : A(0);
        scan_values(team, states.values + unit * segments * state + element, state, unit, feature, first);
      } else if (element < state + window.features) {
        const int at = static_cast<int>(element - state);
        const int feature = first_feature + at;
        if (feature >= features) return;
        const A first = edge.present ? *edge.sums.row(member, head, feature) : A(0);
        scan_values(team, states.sums + unit * segments * window.features + at, window.features, unit, feature,
                    first);
      } else if constexpr (Scaled) {
        scan_shifts(team, unit, static_cast<int>(element - state - window.features));
      } else {
        const int at = static_cast<int>(element - state - window.features);
        const int value = first_value + at;
        if (value >= dv) return;
        const A first = edge.present ? *edge.value_sums.row(member, head, value) : A(0);
        scan_values(team, states.value_sums + unit * segments * window.values + at, window.values, unit, 0, first);
      }
    });
  }

 private:
  KOKKOS_FUNCTION std::int64_t elements() const {
    return std::int64_t(window.features) * window.values + window.features +
           (Scaled ? features : states.value_sums ? window.values : 0);
  }
  KOKKOS_FUNCTION int place(int i) const { return kind == ScanKind::suffix ? segments - 1 - i : i; }

  KOKKOS_FUNCTION int edge_shift(std::int64_t unit, int feature) const {
    return edge.present ? edge_sign * *edge.shifts.row(unit / window.tiles / kv_heads,
                                                       unit / window.tiles % kv_heads, feature)
                        : no_shift;
  }

  KOKKOS_FUNCTION void scan_values(const Member& team, A* values, std::int64_t stride,
                                   std::int64_t unit, int feature, A edge_value) const {
    Sum first;
    if constexpr (Scaled)
      first = {static_cast<double>(edge_value), edge_shift(unit, feature)};
    else
      first = edge_value;
    Kokkos::parallel_scan(Kokkos::ThreadVectorRange(team, segments),
                          [&](int i, Sum& before, bool final) {
                            A& value = values[place(i) * stride];
                            Sum mine;
                            if constexpr (Scaled) {
                              mine.value = value;
                              mine.shift = states.shifts[(unit * segments + place(i)) * features + feature];
                            } else {
                              mine = value;
                            }
                            if (final && kind != ScanKind::total) value = number(first, before);
                            before += mine;
                            if (final && kind == ScanKind::total && i == segments - 1)
                              values[0] = number(first, before);
                          });
  }

  KOKKOS_FUNCTION void scan_shifts(const Member& team, std::int64_t unit, int feature) const {
    const ShiftMaximum first{edge_shift(unit, feature)};
    Kokkos::parallel_scan(
        Kokkos::ThreadVectorRange(team, segments), [&](int i, ShiftMaximum& before, bool final) {
          const std::int64_t at = (unit * segments + place(i)) * features + feature;
          if (final && kind != ScanKind::total) states.carried_shifts[at] = (first + before).value;
          before += ShiftMaximum{states.shifts[at]};
          if (final && kind == ScanKind::total && i == segments - 1)
            states.carried_shifts[unit * segments * features + feature] = (first + before).value;
        });
  }

  KOKKOS_FUNCTION static A number(const Sum& first, const Sum& sum) {
    if constexpr (Scaled)
      return static_cast<A>((first + sum).value);
    else
      return static_cast<A>(first + sum);
  }
};

/// Number of keys after the last one: those before the first and the visible ones; one index or team for each sequence.
template <class Args>
struct CountKeys {
  Args args;
  std::int64_t* counts;
  std::int64_t stride;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const Sequence sequence = Sequence::at(args, index);
    const Visibility visible = Visibility::of(args, sequence);
    std::int64_t count = sequence.nk;
    if (!visible.everything()) {
      count = 0;
      for (std::int64_t j = 0; j < sequence.nk; ++j) count += visible(j) ? 1 : 0;
    }
    counts[index * stride] = args.initial.count(index) + count;
  }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    const std::int64_t index = member.league_rank();
    const Sequence sequence = Sequence::at(args, index);
    const Visibility visible = Visibility::of(args, sequence);
    std::int64_t count = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(member, sequence.nk),
        [&](std::int64_t j, std::int64_t& sum) { sum += visible(j) ? 1 : 0; }, count);
    Kokkos::single(Kokkos::PerTeam(member), [&] { counts[index * stride] = args.initial.count(index) + count; });
  }
};

/// The smaller of the records of the windows and segments of each sequence and head, in their order.
template <class ExecSpace>
struct SmallestRecords {
  const NormaliserRecord* parts;  // (sequence, kv_heads, windows and segments, group)
  TensorRef<NormaliserRecord, 2, ExecSpace> smallest;
  std::int64_t kv_heads, parts_of_unit, group;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t heads = kv_heads * group, sequence = index / heads, head = index % heads;
    NormaliserRecord least{power_of_two<double>(1024), -1};
    for (std::int64_t s = 0; parts && s < parts_of_unit; ++s) {
      const NormaliserRecord& part = parts[((sequence * kv_heads + head / group) * parts_of_unit + s) * group + head % group];
      if (part.row >= 0 && is_smaller(part, least)) least = part;
    }
    smallest(sequence, head) = least;
  }
};

/// One index for each sequence, head and block; `x` is q or k.
template <class A, class Args>
struct FindLargestRows {
  Args args;
  StoredTensor<A> x;
  LargestRows<A> largest;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t block = index % largest.blocks, head = index / largest.blocks % largest.heads;
    const Sequence sequence = Sequence::at(args, index / largest.blocks / largest.heads);
    const Visibility visible = largest.of_keys ? Visibility::of(args, sequence) : Visibility{};
    const std::int64_t begin = largest.of_keys ? sequence.k_begin : sequence.q_begin;
    const std::int64_t rows = largest.of_keys ? sequence.nk : sequence.nq;
    A most = A(0);
    std::int64_t where = -1;
    for (std::int64_t r = block * norm_block; r < rows && r < (block + 1) * norm_block; ++r) {
      if (!visible(r)) continue;
      const A norm = norm_of(sequence.batch, head, begin + r);
      if (!(norm <= most) && most == most) {  // the first of the largest; a NaN stays
        most = norm;
        where = begin + r;
      }
    }
    largest.block_norms[index] = most;
    largest.block_rows[index] = where;
  }

 private:
  KOKKOS_FUNCTION A norm_of(std::int64_t b, std::int64_t head, std::int64_t row) const {
    A norm = A(0);
    with_storage<A>(x.storage, [&]<class S>(std::type_identity<S>) {
      norm = strided_norm<A>(x.template row<S>(b, head, row), x.element_stride, args.d);
    });
    return norm;
  }
};

/// One index for each sequence and head.
template <class A>
struct PickLargestRow {
  LargestRows<A> largest;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    A most = A(0);
    std::int64_t where = -1;
    for (std::int64_t b = 0; b < largest.blocks; ++b) {
      const A norm = largest.block_norms[index * largest.blocks + b];
      if (!(norm <= most) && most == most) {
        most = norm;
        where = largest.block_rows[index * largest.blocks + b];
      }
    }
    largest.factors[index] = inverse_norm(most);
    largest.rows[index] = can_divide(most) ? where : -1;
  }
};

/// What the norm that all rows are divided by adds to the gradient of the row where it is taken: -xhat (sum over all
/// rows of xhat . d xhat) / rho. One index for each sequence and head.
template <class A, class Map, class Args>
struct AddLargestRowGradient {
  Args args;
  Map map;
  StoredTensor<A> x, d_x;
  LargestRows<A> largest;
  const double* parts;  // (sequence, kv_heads, windows and segments, group of the tensor's heads)
  std::int64_t parts_of_unit, group;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t sequence = index / largest.heads, head = index % largest.heads;
    const std::int64_t row = largest.rows[index];
    if (row < 0) return;
    const std::int64_t units = largest.heads / group;
    double total = 0;
    for (std::int64_t s = 0; s < parts_of_unit; ++s)
      total += parts[((sequence * units + head / group) * parts_of_unit + s) * group + head % group];
    const A factor = largest.factors[index];
    const A along = static_cast<A>(total) * bind_map<A>(map, head).rate * factor;
    const std::int64_t batch = Sequence::at(args, sequence).batch;
    with_storage<A>(x.storage, [&]<class S>(std::type_identity<S>) {
      const S* from = x.template row<S>(batch, head, row);
      S* to = d_x.template row<S>(batch, head, row);
      for (int d = 0; d < args.d; ++d)
        to[d * d_x.element_stride] = static_cast<S>(
            largest.gradients[index * args.d + d] - static_cast<A>(from[d * x.element_stride]) * factor * along);
    });
  }
};

/// Largest exponent of the visible keys of each interval of chunks, for each feature (scaled maps).
template <class A, class QueryMap, class KeyMap>
struct FindShifts {
  Arguments<A, QueryMap, KeyMap> args;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const { work(index, HostTeam{}); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    work(member.league_rank(), DeviceTeam<Member>{member});
  }

  template <class Team>
  KOKKOS_FUNCTION void work(std::int64_t index, const Team& team) const {
    const std::int64_t unit = index / args.shift_entries;
    const std::int64_t entry = index % args.shift_entries;
    const std::int64_t head = unit % args.kv_heads;
    const Sequence sequence = Sequence::at(args, unit / args.kv_heads);
    const Visibility visible = Visibility::of(args, sequence);
    const std::int64_t begin = entry * args.shift_interval();
    const std::int64_t end = begin + args.shift_interval() < sequence.nk ? begin + args.shift_interval()
                                                                        : sequence.nk;
    int* table = args.shift_table + index * args.features;
    for_each(team, args.features, [=](int d) { table[d] = no_shift; });
    team.barrier();
    const auto map = bind_map<A>(args.key_map, head);
    with_storage<A>(args.k.storage, [&]<class S>(std::type_identity<S>) {
      const S* k = args.k.template row<S>(sequence.batch, head, sequence.k_begin);
      const std::int64_t row = args.k.row_stride;
      with_stride<Team>(args.k.element_stride, [&](auto element) {
        for_each_down(team, static_cast<int>(end - begin), args.features, [=](int r) { return visible(begin + r); },
                      [=](int r) {
                        const S* x = k + (begin + r) * row;
                        return [=](int d) {
                          const int e = map.exponent(static_cast<A>(x[d * element]));
                          table[d] = e > table[d] ? e : table[d];
                        };
                      },
                      [](int) { return [](int) {}; });
      });
    });
  }
};

/// Turns maxima of intervals into the maximum up to the end of each interval, the caller's initial shifts
/// included; one index for each (unit, feature).
struct ScanShifts {
  int* table;
  RowTensor<const int> initial;
  std::int64_t entries, kv_heads;
  int features;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t unit = index / features;
    const int d = static_cast<int>(index % features);
    int* mine = table + unit * entries * features + d;
    ShiftMaximum before{initial ? *initial.row(unit / kv_heads, unit % kv_heads, d) : no_shift};
    for (std::int64_t i = 0; i < entries; ++i) {
      before += ShiftMaximum{mine[i * features]};
      mine[i * features] = before.value;
    }
  }
};

/// z and shifts of final states from one place to another; one index for each (unit, feature).
template <class A, bool Scaled>
struct CopyFinalSums {
  CallerState<A, int> from, to;
  std::int64_t kv_heads;
  int features;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t unit = index / features, b = unit / kv_heads, h = unit % kv_heads;
    const std::int64_t d = index % features;
    *to.sums.row(b, h, d) = *from.sums.row(b, h, d);
    if constexpr (Scaled) *to.shifts.row(b, h, d) = *from.shifts.row(b, h, d);
  }
};

/// gradient(h) = factor(h) times the sum over sequences, windows and segments of the parts of head h, in that order.
template <class ExecSpace>
struct SumParameterParts {
  const double* parts;  // (sequence, kv_heads, windows and segments, group)
  Parameter factor;
  double* gradient;
  std::int64_t gradient_stride;
  std::int64_t sequences, kv_heads, segments, group;

  KOKKOS_FUNCTION void operator()(std::int64_t head) const {
    double total = 0;
    for (std::int64_t b = 0; b < sequences; ++b)
      for (std::int64_t s = 0; s < segments; ++s)
        total += parts[((b * kv_heads + head / group) * segments + s) * group + head % group];
    gradient[head * gradient_stride] = total * factor(head);
  }
};

}  // namespace LinAttn::detail
