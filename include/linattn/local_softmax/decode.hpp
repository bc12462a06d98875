// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/local_softmax/walker.hpp>
#include <linattn/plan.hpp>
#include <linattn/rows.hpp>
#include <linattn/team.hpp>
#include <linattn/tile.hpp>
#include <linattn/workspace.hpp>

/// \file decode.hpp
/// One new token of exact attention over a cache of keys and values.
///
/// The keys of a sequence are cut into splits of a fixed length, each with its own largest score m_s, sum l_s and
/// numerators n_s, which are then brought together in the order of the splits:
///
///     m = max_s m_s     o = sum_s e_s n_s / sum_s e_s l_s     e_s = exp(scale (m_s - m))
///
/// so that one long sequence keeps all workers busy and the bits do not depend on their number.

namespace LinAttn::detail {

template <class A>
struct DecodeArguments {
  StoredTensor<A> q{}, k{}, v{}, o{};          // of the token: (batch, head)
  StoredTensor<A> cache_k{}, cache_v{};        // (batch, kv_head, position)
  std::int64_t* length = nullptr;              // (batch): positions in use
  std::int64_t length_stride = 0, capacity = 0;
  const std::uint8_t* key_mask = nullptr;      // (batch): whether the token's key is visible
  std::int64_t mask_stride = 0;

  std::int64_t sequences = 0, heads = 0, kv_heads = 0, group = 0;
  int d = 0, dv = 0;
  A scale = A(1);
  Plan plan{};                                 // chunk: keys at once; segments: splits of the cache
  std::int64_t split = 1;                      // keys of a split
  std::byte* memory = nullptr;                 // rows of all workers
  std::int64_t worker_bytes = 0;
  A *maxima = nullptr, *sums = nullptr;        // (sequence, split, head)
  A* numerators = nullptr;                     // (sequence, split, head, Dv)

  KOKKOS_FUNCTION bool appends(std::int64_t b) const { return !key_mask || key_mask[b * mask_stride] != 0; }
  KOKKOS_FUNCTION std::int64_t keys_before(std::int64_t b) const { return length[b * length_stride]; }
  /// Whether a token can be answered: a full cache has no place for its key.
  KOKKOS_FUNCTION bool fits(std::int64_t b) const {
    const std::int64_t before = keys_before(b);
    return before >= 0 && before + (appends(b) ? 1 : 0) <= capacity;
  }
  KOKKOS_FUNCTION std::int64_t keys(std::int64_t b) const {
    return fits(b) ? keys_before(b) + (appends(b) ? 1 : 0) : 0;
  }
  KOKKOS_FUNCTION std::int64_t part(std::int64_t b, std::int64_t s, std::int64_t head) const {
    return (b * plan.segments + s) * heads + head;
  }
};

/// Rows of one worker.
template <class A>
struct DecodeRows {
  int ldd = 0, ldv = 0, ldc = 0;
  A *queries = nullptr, *keys = nullptr, *values = nullptr;  // (group, D), (C, D), (C, Dv)
  A *weights = nullptr, *out = nullptr, *hidden = nullptr;   // (group, C), (group, Dv), (C): zero

  template <class Args>
  KOKKOS_FUNCTION DecodeRows(ArenaCursor& arena, const Args& args) {
    ldd = padded_columns<A>(args.d);
    ldv = padded_columns<A>(args.dv);
    ldc = padded_columns<A>(args.plan.chunk);
    queries = arena.take<A>(args.group * ldd);
    keys = arena.take<A>(std::int64_t(args.plan.chunk) * ldd);
    values = arena.take<A>(std::int64_t(args.plan.chunk) * ldv);
    weights = arena.take<A>(args.group * ldc);
    out = arena.take<A>(args.group * ldv);
    hidden = arena.take<A>(ldc);
  }
};

/// The token into the cache, and what each split contributes.
template <class A>
struct DecodeSplits {
  DecodeArguments<A> args;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    work(member.league_rank(), DeviceTeam<Member>{member, false});
  }

 private:
  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team) const {
    std::byte* memory = args.memory + worker * args.worker_bytes;
    for_each(team, static_cast<int>(args.worker_bytes / static_cast<std::int64_t>(sizeof(int))),
             [&](int i) { reinterpret_cast<int*>(memory)[i] = 0; });
    team.barrier();
    ArenaCursor arena(memory);
    const DecodeRows<A> rows(arena, args);
    const std::int64_t units = args.sequences * args.kv_heads, tasks = units * args.plan.segments;
    for (std::int64_t task = worker; task < tasks; task += workers) {
      const std::int64_t s = task / units, unit = task % units;  // late splits are often empty
      attend(team, rows, unit / args.kv_heads, unit % args.kv_heads, s);
    }
  }

  template <class Team>
  KOKKOS_FUNCTION void attend(const Team& team, const DecodeRows<A>& rows, std::int64_t b, std::int64_t kv_head,
                              std::int64_t s) const {
    const std::int64_t before = args.keys_before(b), begin = s * args.split;
    std::int64_t end = args.keys(b);
    end = end < begin + args.split ? end : begin + args.split;
    if (begin >= end) return;
    if (args.appends(b) && begin <= before && before < end) append(team, b, kv_head, before);
    const int group = static_cast<int>(args.group);
    for (int g = 0; g < group; ++g)
      load(team, args.q, b, kv_head * args.group + g, 0, 1, args.d, rows.queries + g * rows.ldd, rows.ldd);
    for_each_in_rows(team, group, rows.ldv, [&](int g) { return [=](int j) { rows.out[g * rows.ldv + j] = A(0); }; });
    for_each(team, group, [&](int g) {
      const std::int64_t at = args.part(b, s, kv_head * args.group + g);
      args.maxima[at] = minus_infinity<A>();
      args.sums[at] = A(0);
    });
    team.barrier();
    for (std::int64_t key = begin; key < end; key += args.plan.chunk) {
      const int count = static_cast<int>(end - key < args.plan.chunk ? end - key : args.plan.chunk);
      load(team, args.cache_k, b, kv_head, key, count, args.d, rows.keys, rows.ldd);
      load(team, args.cache_v, b, kv_head, key, count, args.dv, rows.values, rows.ldv);
      absorb(team, rows, b, kv_head, s, count);
    }
    for_each_in_rows(team, group, args.dv, [&](int g) {
      A* to = args.numerators + args.part(b, s, kv_head * args.group + g) * args.dv;
      const A* from = rows.out + g * rows.ldv;
      return [=](int j) { to[j] = from[j]; };
    });
    team.barrier();
  }

  /// Scores of `count` keys, their weights relative to the largest so far, and what they add.
  template <class Team>
  KOKKOS_FUNCTION void absorb(const Team& team, const DecodeRows<A>& rows, std::int64_t b, std::int64_t kv_head,
                              std::int64_t s, int count) const {
    const int group = static_cast<int>(args.group), d = args.d;
    for_each(team, group * count, [&](int i) {
      const int g = i / count, j = i % count;
      rows.weights[g * rows.ldc + j] = dot_of_row<Team>(rows.queries + g * rows.ldd, rows.keys + j * rows.ldd, d);
    });
    team.barrier();
    for_each(team, group, [&](int g) {
      const std::int64_t at = args.part(b, s, kv_head * args.group + g);
      const SoftmaxRow<A> row = exponentials_of_row<Team>(rows.weights + g * rows.ldc, count, rows.hidden, args.scale,
                                                          args.maxima[at]);
      args.maxima[at] = row.maximum;
      args.sums[at] = args.sums[at] * row.correction + row.sum;
      A* out = rows.out + g * rows.ldv;
      if (row.correction != A(1))
        for (int j = 0; j < args.dv; ++j) out[j] *= row.correction;
    });
    team.barrier();
    const auto all = [](int) { return true; };
    for (int g = 0; g < group; ++g) {
      A* out = rows.out + g * rows.ldv;
      for_each_down(
          team, count, args.dv, all,
          [&](int r) {
            const A weight = rows.weights[g * rows.ldc + r];
            const A* value = rows.values + r * rows.ldv;
            return [=](int j) { out[j] += weight * value[j]; };
          },
          [](int) { return [](int) {}; });
    }
    team.barrier();
  }

  template <class Team>
  KOKKOS_FUNCTION void load(const Team& team, const StoredTensor<A>& t, std::int64_t b, std::int64_t head,
                            std::int64_t begin, int count, int columns, A* to, int ld) const {
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      with_stride<Team>(t.element_stride, [&](auto element) {
        for_each_in_rows(team, count, columns, [&](int r) {
          const S* from = t.template row<S>(b, head, begin + r);
          A* row = to + r * ld;
          return [=](int j) { row[j] = static_cast<A>(from[j * element]); };
        });
      });
    });
    team.barrier();
  }

  template <class Team>
  KOKKOS_FUNCTION void append(const Team& team, std::int64_t b, std::int64_t kv_head, std::int64_t position) const {
    const auto copy = [&](const StoredTensor<A>& from, const StoredTensor<A>& to, int columns) {
      with_storage<A>(from.storage, [&]<class S>(std::type_identity<S>) {
        const S* x = from.template row<S>(b, kv_head, 0);
        S* y = to.template row<S>(b, kv_head, position);
        for_each(team, columns, [&](int j) { y[j * to.element_stride] = x[j * from.element_stride]; });
      });
    };
    copy(args.k, args.cache_k, args.d);
    copy(args.v, args.cache_v, args.dv);
    team.barrier();
  }
};

/// One row of o from its splits; NaN where the cache had no place for the token.
template <class A>
struct DecodeOutput {
  DecodeArguments<A> args;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t b = i / args.heads, head = i % args.heads;
    const std::int64_t splits = (args.keys(b) + args.split - 1) / args.split;
    const bool fits = args.fits(b);
    A m = minus_infinity<A>();
    for (std::int64_t s = 0; s < splits; ++s) {
      const A here = args.maxima[args.part(b, s, head)];
      m = here > m || here != here ? here : m;
    }
    const A reference = m == minus_infinity<A>() ? A(0) : m;
    A sum = A(0);
    for (std::int64_t s = 0; s < splits; ++s) {
      A& factor = args.maxima[args.part(b, s, head)];  // nobody else reads it any more
      factor = exp_nonpositive((factor - reference) * args.scale);
      sum += factor * args.sums[args.part(b, s, head)];
    }
    const A share = sum == A(0) ? A(0) : A(1) / sum;
    with_storage<A>(args.o.storage, [&]<class S>(std::type_identity<S>) {
      S* o = args.o.template row<S>(b, head, 0);
      for (int j = 0; j < args.dv; ++j) {
        A n = A(0);
        for (std::int64_t s = 0; s < splits; ++s) {
          const std::int64_t part = args.part(b, s, head);
          n += args.maxima[part] * args.numerators[part * args.dv + j];
        }
        o[j * args.o.element_stride] = static_cast<S>(fits ? n * share : minus_infinity<A>() - minus_infinity<A>());
      }
    });
  }
};

/// One more position in use, after all have read the number before.
template <class A>
struct DecodeLength {
  DecodeArguments<A> args;
  KOKKOS_FUNCTION void operator()(std::int64_t b) const { args.length[b * args.length_stride] = next(b); }
  KOKKOS_FUNCTION std::int64_t next(std::int64_t b) const { return args.fits(b) ? args.keys(b) : args.keys_before(b); }
};

}  // namespace LinAttn::detail
