// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/engine/arguments.hpp>
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

template <class ExecSpace, class A, bool Scaled>
struct ScanStates {
  using Member = typename Kokkos::TeamPolicy<ExecSpace>::member_type;
  using Sum = std::conditional_t<Scaled, ScaledSum<double>, double>;
  static constexpr int block = 256;

  SegmentStates<A> states;
  ScanKind kind;
  bool transposed;
  int segments, features, dv;
  std::int64_t units;

  std::int64_t elements() const { return std::int64_t(features) * dv + (Scaled ? 2 : 1) * features; }
  std::int64_t blocks() const { return (elements() + block - 1) / block; }

  KOKKOS_FUNCTION void operator()(const Member& team) const {
    const std::int64_t state = std::int64_t(features) * dv;
    const std::int64_t count = state + (Scaled ? 2 : 1) * features;
    const std::int64_t blocks = (count + block - 1) / block;
    const std::int64_t unit = team.league_rank() / blocks;
    const std::int64_t begin = team.league_rank() % blocks * block;
    const int here = static_cast<int>(count - begin < block ? count - begin : block);
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, here), [&](int e) {
      const std::int64_t element = begin + e;
      if (element < state) {
        const int feature =
            static_cast<int>(transposed ? element % features : element / dv);
        scan_values(team, states.values + unit * segments * state + element, state, unit, feature);
      } else if (element < state + features) {
        const int feature = static_cast<int>(element - state);
        scan_values(team, states.sums + unit * segments * features + feature, features, unit, feature);
      } else {
        scan_shifts(team, unit, static_cast<int>(element - state - features));
      }
    });
  }

 private:
  KOKKOS_FUNCTION int place(int i) const { return kind == ScanKind::suffix ? segments - 1 - i : i; }

  KOKKOS_FUNCTION void scan_values(const Member& team, A* values, std::int64_t stride,
                                   std::int64_t unit, int feature) const {
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
                            if (final && kind != ScanKind::total) value = number(before);
                            before += mine;
                            if (final && kind == ScanKind::total && i == segments - 1)
                              values[0] = number(before);
                          });
  }

  KOKKOS_FUNCTION void scan_shifts(const Member& team, std::int64_t unit, int feature) const {
    Kokkos::parallel_scan(
        Kokkos::ThreadVectorRange(team, segments), [&](int i, ShiftMaximum& before, bool final) {
          const std::int64_t at = (unit * segments + place(i)) * features + feature;
          if (final && kind != ScanKind::total) states.carried_shifts[at] = before.value;
          before += ShiftMaximum{states.shifts[at]};
          if (final && kind == ScanKind::total && i == segments - 1)
            states.carried_shifts[unit * segments * features + feature] = before.value;
        });
  }

  KOKKOS_FUNCTION static A number(const Sum& sum) {
    if constexpr (Scaled)
      return static_cast<A>(sum.value);
    else
      return static_cast<A>(sum);
  }
};

/// Largest exponent of the keys of each interval of chunks, for each feature (scaled maps).
template <class ExecSpace, class T, class QueryMap, class KeyMap>
struct FindShifts {
  using A = accumulator_t<T>;
  using Member = typename Kokkos::TeamPolicy<ExecSpace>::member_type;

  Arguments<T, QueryMap, KeyMap> args;

  KOKKOS_FUNCTION void operator()(const Member& team) const {
    const std::int64_t entries = args.shift_entries;
    const std::int64_t unit = team.league_rank() / entries;
    const std::int64_t entry = team.league_rank() % entries;
    const std::int64_t interval = std::int64_t(args.plan.shift_interval) * args.plan.chunk;
    const std::int64_t begin = entry * interval;
    const std::int64_t end = begin + interval < args.nk ? begin + interval : args.nk;
    int* table = args.shift_table + (unit * entries + entry) * args.features;
    const std::int64_t head = unit % args.kv_heads;
    const auto map = bind_map<A>(args.key_map, head);
    const T* k = args.k.row(unit / args.kv_heads, head, begin);
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, args.features), [&](int d) {
      int largest = no_shift;
      for (std::int64_t j = 0; j < end - begin; ++j) {
        const int e = map.exponent(
            static_cast<A>(k[j * args.k.row_stride + d * args.k.element_stride]));
        largest = e > largest ? e : largest;
      }
      table[d] = largest;
    });
  }
};

/// Turns maxima of intervals into the maximum before each interval; the last entry, whose interval is
/// empty, receives the maximum over all keys.
template <class ExecSpace>
struct ScanShifts {
  using Member = typename Kokkos::TeamPolicy<ExecSpace>::member_type;
  int* table;
  std::int64_t entries;
  int features;

  KOKKOS_FUNCTION void operator()(const Member& team) const {
    int* mine = table + team.league_rank() * entries * features;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, features), [&](int d) {
      Kokkos::parallel_scan(Kokkos::ThreadVectorRange(team, static_cast<int>(entries)),
                            [&](int i, ShiftMaximum& before, bool final) {
                              int& entry = mine[std::int64_t(i) * features + d];
                              const ShiftMaximum here{entry};
                              if (final) entry = before.value;
                              before += here;
                            });
    });
  }
};

/// gradient(h) = sum over batch and segments of the parts of head h, in that order.
template <class ExecSpace>
struct SumParameterParts {
  const double* parts;  // (batch, kv_heads, segments, group)
  double* gradient;
  std::int64_t gradient_stride;
  std::int64_t batch, kv_heads, segments, group;

  KOKKOS_FUNCTION void operator()(std::int64_t head) const {
    double total = 0;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t s = 0; s < segments; ++s)
        total += parts[((b * kv_heads + head / group) * segments + s) * group + head % group];
    gradient[head * gradient_stride] = total;
  }
};

}  // namespace LinAttn::detail
