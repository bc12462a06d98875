// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <linattn/call.hpp>
#include <linattn/engine/engine.hpp>

/// \file step.hpp
/// One new token: the recurrence itself.
///
///     S' = S + phi(k) v^T     z' = z + phi(k)     o = S'^T phi(q) / (z' . phi(q))
///
/// Scaled maps: shift' = max(shift, exponent of k) for each feature, old sums are brought to it by a power
/// of two, and the query compensates as in walker.hpp. A step reads and writes the state once and touches
/// nothing else of size R Dv. Heads and windows of the columns of S are shared out among the workers; the
/// features of a token are formed once for each head, by a kernel of its own where there are windows, since
/// with a state in place z' must not appear while another window still reads z.

namespace LinAttn::detail {

template <class A, class QueryMap, class KeyMap>
struct StepArguments {
  QueryMap query_map{};
  KeyMap key_map{};
  StoredTensor<A> q{}, k{}, v{}, o{};
  const std::uint8_t* key_mask = nullptr;
  std::int64_t mask_stride = 0;
  CallerState<const A, const int> before{};
  CallerState<A, int> after{};
  std::int64_t sequences = 0, heads = 0, kv_heads = 0;
  int d = 0, dv = 0, features = 0, group = 0;
  bool normalise = true;
  A scale = A(1);
  bool has_constant = false;  // weights have a constant, states t and m
  Parameter constant = 0.0;
  bool clamp = false;  // small row sums are replaced
  A least_normaliser = A(0);
  int tiles = 1, width = 0;  // windows of the columns of S
  std::int64_t unit_bytes = 0;
  std::byte* memory = nullptr;
};

/// What is known of a head before its state is read.
template <class A>
struct StepRows {
  A *key = nullptr, *value = nullptr, *query = nullptr;  // the token as numbers, one query at a time
  A *key_features = nullptr;     // (R)
  A *carry = nullptr;            // (R): factor that brings the old sums to the new shifts
  A *query_features = nullptr;   // (group, R)
  A *row_scale = nullptr;        // (group): denominator or factor
  A *numerators = nullptr;       // (group, Dv)
  int *shift = nullptr;          // (R)

  template <class Args>
  KOKKOS_FUNCTION StepRows(ArenaCursor& arena, const Args& args, bool scaled) {
    const int r = args.features, v = args.dv;
    key = arena.take<A>(args.d);
    value = arena.take<A>(v);
    query = arena.take<A>(args.d);
    key_features = arena.take<A>(r);
    carry = arena.take<A>(r);
    query_features = arena.take<A>(std::int64_t(args.group) * r);
    row_scale = arena.take<A>(args.group);
    numerators = arena.take<A>(std::int64_t(args.group) * v);
    if (scaled) shift = arena.take<int>(r);
  }
};

template <class A, class QueryMap, class KeyMap>
struct StepKernel {
  using Args = StepArguments<A, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;

  Args args;
  bool prepares, updates;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    work(member.league_rank(), DeviceTeam<Member>{member});
  }

  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team) const {
    const int tiles = updates ? args.tiles : 1;
    const std::int64_t tasks = args.sequences * args.kv_heads * tiles;
    for (std::int64_t task = worker; task < tasks; task += workers) {
      const std::int64_t unit = task / tiles;
      // a head that one worker does from beginning to end needs no place of its own
      ArenaCursor arena(args.memory + (prepares && updates ? worker : unit) * args.unit_bytes);
      const StepRows<A> rows(arena, args, scaled);
      if (prepares) prepare(team, unit / args.kv_heads, unit % args.kv_heads, rows);
      team.barrier();
      if (updates) update(team, unit / args.kv_heads, unit % args.kv_heads, static_cast<int>(task % tiles), rows);
      team.barrier();
    }
  }

 private:
  template <class Team>
  KOKKOS_FUNCTION void load(const Team& team, const StoredTensor<A>& t, std::int64_t b, std::int64_t head, int n,
                            A* to) const {
    with_storage<A>(t.storage, [&]<class S>(std::type_identity<S>) {
      const S* from = t.template row<S>(b, head, 0);
      const std::int64_t element = t.element_stride;
      for_each(team, n, [=](int j) { to[j] = static_cast<A>(from[j * element]); });
    });
    team.barrier();
  }

  /// f = phi(x); shift_of(d) matters to scaled maps only.
  template <class Map, class Team, class Bound, class Shift>
  KOKKOS_FUNCTION void features(const Team& team, const Bound& map, const A* x, A* f, const Shift& shift_of) const {
    if constexpr (RowNormFeatureMap<Map>) {
      const A factor = map.rate * (map.per_row ? inverse_norm(row_norm<Team>(x, args.d, map.eps)) : A(1));
      for_each(team, args.features, [=](int d) { f[d] = x[d] * factor; });
    } else if constexpr (RowFeatureMap<Map>) {
      if (team.rank() == 0) map.row_value(ConstRow<A>{x, args.d, 1}, Row<A>{f, args.features, 1});
    } else {
      for_each_in_rows(team, 1, args.features, [=](int) {
        return [=](int d) {
          if constexpr (scaled)
            f[d] = map.value(x[d], shift_of(d));
          else
            f[d] = map.value(x[d]);
        };
      });
    }
    team.barrier();
  }

  /// Features of the token, z' and the shifts to the caller, and the denominators.
  template <class Team>
  KOKKOS_FUNCTION void prepare(const Team& team, std::int64_t b, std::int64_t kv_head, const StepRows<A>& rows) const {
    const bool visible = !args.key_mask || args.key_mask[b * args.mask_stride] != 0;
    const int count = args.features;
    if (visible) {
      const auto map = bind_map<A>(args.key_map, kv_head);
      load(team, args.k, b, kv_head, args.d, rows.key);
      if constexpr (scaled) {
        for_each(team, count, [&](int d) {
          const int old = args.before.present ? *args.before.shifts.row(b, kv_head, d) : no_shift;
          const int e = map.exponent(rows.key[d]);
          rows.shift[d] = e > old ? e : old;
          rows.carry[d] = power_of_two<A>(old - rows.shift[d]);
        });
        team.barrier();
      }
      const int* shift = rows.shift;
      features<KeyMap>(team, map, rows.key, rows.key_features, [=](int d) { return shift[d]; });
    } else {
      for_each(team, count, [&](int d) {
        rows.key_features[d] = A(0);
        if constexpr (scaled) {
          rows.shift[d] = args.before.present ? *args.before.shifts.row(b, kv_head, d) : no_shift;
          rows.carry[d] = A(1);
        }
      });
    }
    team.barrier();
    for_each(team, count, [&](int d) {
      const A old = args.before.present ? *args.before.sums.row(b, kv_head, d) : A(0);
      const A sum = (scaled ? old * rows.carry[d] : old) + rows.key_features[d];
      *args.after.sums.row(b, kv_head, d) = sum;
      if constexpr (scaled) *args.after.shifts.row(b, kv_head, d) = rows.shift[d];
    });
    team.barrier();
    for (int g = 0; g < args.group; ++g) {
      const std::int64_t head = kv_head * args.group + g;
      const auto map = bind_map<A>(args.query_map, head);
      load(team, args.q, b, head, args.d, rows.query);
      A* f = rows.query_features + std::int64_t(g) * count;
      int row_shift = 0;
      if constexpr (scaled) {
        row_shift = 2 * no_shift;
        for (int d = 0; d < count; ++d) {
          const int e = map.exponent(rows.query[d]) + rows.shift[d];
          row_shift = e > row_shift ? e : row_shift;
        }
      }
      if (scaled && row_shift <= no_shift / 2) {  // no key seen yet
        for_each(team, count, [=](int d) { f[d] = A(0); });
        team.barrier();
      } else {
        const int* shift = rows.shift;
        features<QueryMap>(team, map, rows.query, f, [=](int d) { return row_shift - shift[d]; });
      }
      if (team.rank() == 0) {
        if (args.normalise) {
          A s = A(0);
          for (int d = 0; d < count; ++d) s += f[d] * *args.after.sums.row(b, kv_head, d);
          const A keys = static_cast<A>(args.before.count(b) + (visible ? 1 : 0));
          if (args.has_constant) s += static_cast<A>(args.constant(head)) * keys;
          rows.row_scale[g] = clamped_row_sum(s, args.clamp ? args.least_normaliser * keys : A(0)).value;
        } else if (scaled && row_shift > no_shift / 2) {
          const int half = row_shift / 2;
          rows.row_scale[g] = args.scale * power_of_two<A>(half) * power_of_two<A>(row_shift - half);
        } else {
          rows.row_scale[g] = args.scale;
        }
      }
      team.barrier();
    }
  }

  /// A window of S' to the caller, and of the outputs.
  template <class Team>
  KOKKOS_FUNCTION void update(const Team& team, std::int64_t b, std::int64_t kv_head, int tile,
                              const StepRows<A>& rows) const {
    const int first = tile * args.width;
    const int width = args.dv - first < args.width ? args.dv - first : args.width;
    const bool visible = !args.key_mask || args.key_mask[b * args.mask_stride] != 0;
    A* value = rows.value + first;
    with_storage<A>(args.v.storage, [&]<class S>(std::type_identity<S>) {
      const std::int64_t element = args.v.element_stride;
      const S* from = args.v.template row<S>(b, kv_head, 0) + first * element;
      for_each(team, width, [=](int j) { value[j] = visible ? static_cast<A>(from[j * element]) : A(0); });
    });
    const int dv = args.dv, count = args.features, group = args.group;
    A* numerators = rows.numerators + first;
    if (args.has_constant) {
      team.barrier();
      for_each(team, width, [&](int j) {
        const A old = args.before.present ? *args.before.value_sums.row(b, kv_head, first + j) : A(0);
        const A sum = old + value[j];
        *args.after.value_sums.row(b, kv_head, first + j) = sum;
        for (int g = 0; g < group; ++g)
          numerators[std::int64_t(g) * dv + j] = static_cast<A>(args.constant(kv_head * group + g)) * sum;
      });
    } else {
      for_each_in_rows(team, group, width,
                       [=](int g) { return [=](int j) { numerators[std::int64_t(g) * dv + j] = A(0); }; });
    }
    team.barrier();
    const std::int64_t to_element = args.after.values.element_stride;
    const std::int64_t from_element = args.before.values.element_stride;
    const auto all = [](int) { return true; };
    const auto nothing = [](int) { return [](int) {}; };
    const auto walk = [&](auto element, auto old_element) {
      for_each_down(team, count, width, all, [=, this](int d) {
        const bool has_old = args.before.present;
        A* to = args.after.values.row(b, kv_head, d) + first * element;
        const A* old = has_old ? args.before.values.row(b, kv_head, d) + first * old_element : value;
        const A carry = !has_old ? A(0) : scaled ? rows.carry[d] : A(1);
        const A key = rows.key_features[d], query = rows.query_features[d];
        return [=](int j) {
          const A before = has_old ? old[j * old_element] * carry : A(0);
          const A s = before + key * value[j];
          to[j * element] = s;
          numerators[j] += query * s;
        };
      }, nothing);
      for (int g = 1; g < group; ++g) {  // the other queries of the head read what has just been written
        for_each_down(team, count, width, all, [=, this](int d) {
          const A* s = args.after.values.row(b, kv_head, d) + first * element;
          const A query = rows.query_features[std::int64_t(g) * count + d];
          A* n = numerators + std::int64_t(g) * dv;
          return [=](int j) { n[j] += query * s[j * element]; };
        }, nothing);
      }
    };
    if (Team::on_host && to_element == 1 && from_element == 1)
      walk(Constant<1>{}, Constant<1>{});
    else
      walk(to_element, from_element);
    team.barrier();
    with_storage<A>(args.o.storage, [&]<class S>(std::type_identity<S>) {
      const std::int64_t element = args.o.element_stride;
      for_each_in_rows(team, group, width, [=, this](int g) {
        S* o = args.o.template row<S>(b, kv_head * group + g, 0) + first * element;
        const A scale = rows.row_scale[g];
        const A* n = numerators + std::int64_t(g) * dv;
        const bool normalise = args.normalise, empty = normalise && scale == A(0);
        return [=](int j) {
          o[j * element] = static_cast<S>(empty ? A(0) : normalise ? n[j] / scale : n[j] * scale);
        };
      });
    });
  }
};

/// One more key of every sequence where its key is visible: after all heads have read the number before.
template <class Args>
struct CountStep {
  Args args;
  KOKKOS_FUNCTION void operator()(std::int64_t b) const {
    const bool visible = !args.key_mask || args.key_mask[b * args.mask_stride] != 0;
    args.after.counts[b * args.after.count_stride] = args.before.count(b) + (visible ? 1 : 0);
  }
};

/// Everything between the public function and the kernels of a step.
template <class A, class ExecSpace, LinearVariant V>
class StepCall {
 public:
  using QueryMap = query_map_t<V>;
  using KeyMap = key_map_t<V>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;

  StepCall(const ExecSpace& exec, const V& variant, const Problem& problem, const StepOptions& options)
      : m_exec(exec),
        m_problem(problem),
        m_args{.query_map = resolved(variant, problem).query_map(), .key_map = resolved(variant, problem).key_map()} {
    if constexpr (has_local_term_v<V>)
      throw InvalidArgument(message("LinAttn: a step of ", V::name, " would need the keys of the open block and is not "
                                    "supported"));
    if (problem.packed() || problem.nq != 1 || problem.nk != 1)
      throw InvalidArgument(message("LinAttn: a step takes one query and one key of every sequence, found ",
                                    problem.to_string()));
    problem.validate(false);
    const std::int64_t features = validate_variant<ExecSpace>(variant, problem, Pass::step, true);
    require_rows(problem, features);
    m_args.scale = finite<A>("scale", options.scale);
    m_args.normalise = options.normalise.value_or(V::normalise_by_default);
    if constexpr (has_constant_v<V>) {
      m_args.has_constant = true;
      m_args.constant = finite_constant<A, V>(resolved(variant, problem).constant());
    }
    require_finite_rate<A>(m_args.query_map);
    m_args.clamp = is_clamp<A, V>(options.small_normaliser, options.least_normaliser, m_args.normalise);
    m_args.least_normaliser = static_cast<A>(options.least_normaliser);
    m_args.sequences = problem.batch;
    m_args.heads = problem.heads;
    m_args.kv_heads = problem.kv_heads;
    m_args.group = static_cast<int>(problem.group());
    m_args.d = static_cast<int>(problem.d);
    m_args.dv = static_cast<int>(problem.dv);
    m_args.features = static_cast<int>(features);
    m_plan = make_step_plan(problem, features, machine_of(exec), tile_columns<A>);
    m_args.width = static_cast<int>(window_width(problem.dv, m_plan.tiles, tile_columns<A>));
    m_args.tiles = m_args.width == 0 ? 1 : (m_args.dv + m_args.width - 1) / m_args.width;
    ArenaCursor counter;
    StepRows<A>(counter, m_args, scaled);
    m_args.unit_bytes = static_cast<std::int64_t>(counter.required());
  }

  const Plan& plan() const { return m_plan; }

  std::size_t workspace_bytes() {
    return workspace_bytes([](ArenaCursor&) {});
  }
  /// The same with what more(arena) takes.
  template <class More>
  std::size_t workspace_bytes(const More& more) {
    ArenaCursor counter;
    place(counter);
    more(counter);
    return counter.required();
  }

  template <class T>
  void run(const Token<ExecSpace, T>& token, const ConstState<ExecSpace, T>& before, const State<ExecSpace, T>& after,
           const TensorRef<T, 3, ExecSpace>& o, const Workspace<ExecSpace>& workspace) {
    run(token, before, after, o, workspace, [](ArenaCursor&, auto&) {});
  }
  /// The same where prepare(arena, arguments) comes before the kernels.
  template <class T, class Prepare>
  void run(const Token<ExecSpace, T>& token, const ConstState<ExecSpace, T>& before, const State<ExecSpace, T>& after,
           const TensorRef<T, 3, ExecSpace>& o, const Workspace<ExecSpace>& workspace, const Prepare& prepare) {
    const Problem& p = m_problem;
    require_output("o", o, {p.batch, p.heads, p.dv});
    if (token.key_mask.present()) {
      require_shape("key_mask", token.key_mask, {p.batch});
      m_args.key_mask = token.key_mask.data();
      m_args.mask_stride = token.key_mask.stride(0);
    }
    if (!after.S.present()) throw InvalidArgument("LinAttn: a step needs a state to write to, found nothing");
    const StateParts parts{scaled, has_constant_v<V>, has_constant_v<V>};
    bind_state("state before the token", before, p.batch, p.kv_heads, m_args.features, p.dv, parts, m_args.before);
    bind_state("state after the token", after, p.batch, p.kv_heads, m_args.features, p.dv, parts, m_args.after);
    if (m_args.clamp && m_args.before.present && !has_constant_v<V>)
      throw InvalidArgument(message("LinAttn: row sums are judged by the number of keys that they are over, which states "
                                    "of ", V::name, " do not have; a step of it cannot clamp"));
    require_size(workspace, workspace_bytes(), "a step of " + p.to_string());
    if (units() == 0) return count_key();
    require_memory(workspace);
    ArenaCursor arena(workspace.data());
    place(arena);
    m_args.q = StoredTensor<A>(token.q);
    m_args.k = StoredTensor<A>(token.k);
    m_args.v = StoredTensor<A>(token.v);
    m_args.o = StoredTensor<A>(o);
    prepare(arena, m_args);
    if (m_args.tiles == 1) {
      launch("LinAttn::step::token", true, true, units());
    } else {
      launch("LinAttn::step::features", true, false, units());
      launch("LinAttn::step::state", false, true, units() * m_args.tiles);
    }
    count_key();
  }

 private:
  void place(ArenaCursor& arena) {
    const std::int64_t places = m_args.tiles == 1 ? m_plan.workers : units();
    m_args.memory = arena.take<std::byte>(places * m_args.unit_bytes);
  }

  void count_key() {
    if constexpr (has_constant_v<V>) {
      if (m_args.sequences == 0) return;
      detail::launch("LinAttn::step::key_count",
                     Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, m_args.sequences),
                     CountStep<StepArguments<A, QueryMap, KeyMap>>{m_args});
    }
  }

  std::int64_t units() const { return m_args.sequences * m_args.kv_heads; }

  void launch(const char* label, bool prepares, bool updates, std::int64_t tasks) {
    const int workers = static_cast<int>(std::min<std::int64_t>(tasks, m_plan.workers));
    launch_workers(m_exec, label, workers, m_plan,
                   StepKernel<A, QueryMap, KeyMap>{m_args, prepares, updates, workers});
  }

  ExecSpace m_exec;
  Problem m_problem;
  StepArguments<A, QueryMap, KeyMap> m_args;
  Plan m_plan;
};

/// The extents of a step, checked.
template <class ExecSpace, class T>
Problem problem_of(const Token<ExecSpace, T>& token) {
  require_present(token);
  Problem p;
  p.batch = token.q.extent(0);
  p.heads = token.q.extent(1);
  p.kv_heads = token.k.extent(1);
  p.nq = p.nk = 1;
  p.d = token.q.extent(2);
  p.dv = token.v.extent(2);
  require_memory("q", token.q);
  require_shape("k", token.k, {p.batch, p.kv_heads, p.d});
  require_shape("v", token.v, {p.batch, p.kv_heads, p.dv});
  return p;
}

}  // namespace LinAttn::detail
