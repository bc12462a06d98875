// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/call.hpp>
#include <linattn/engine/arguments.hpp>
#include <linattn/engine/scan.hpp>
#include <linattn/engine/walker.hpp>
#include <linattn/inputs.hpp>
#include <linattn/launch.hpp>
#include <linattn/variant.hpp>
#include <linattn/workspace.hpp>
#include <limits>
#include <utility>

/// \file engine.hpp
/// From the arguments of a public call to kernels: checks, plan, workspace, launches.

namespace LinAttn::detail {

/// Workers walking all tasks of one kind. On the host a worker is an index, on a device a team.
template <class ExecSpace, Walk Kind, class A, class QueryMap, class KeyMap>
struct WalkKernel {
  using Args = Arguments<A, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;
  static constexpr bool divides_by_norm = RowNormFeatureMap<KeyMap>;

  Args args;
  bool transposed;
  int workers;

  KOKKOS_FUNCTION void operator()(int worker) const { work(worker, HostTeam{}, nullptr); }

  template <class Member>
    requires requires(const Member& member) { member.league_rank(); }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    std::byte* scratch = args.plan.tiles_in_scratch
                             ? static_cast<std::byte*>(member.team_shmem().get_shmem(args.plan.tile_bytes))
                             : nullptr;
    work(member.league_rank(), DeviceTeam<Member>{member, args.allow_tf32}, scratch);
  }

  template <class Team>
  KOKKOS_FUNCTION void work(int worker, const Team& team, std::byte* scratch) const {
    std::byte* memory = scratch ? scratch : args.worker_memory + worker * static_cast<std::int64_t>(args.plan.tile_bytes);
    // padding takes part in vector arithmetic and must hold numbers
    for_each(team, static_cast<int>(args.plan.tile_bytes / sizeof(int)),
             [&](int i) { reinterpret_cast<int*>(memory)[i] = 0; });
    team.barrier();
    ArenaCursor arena(memory);
    const Tiles<A> tiles(arena, args, Kind, transposed, scaled, divides_by_norm);
    if (tiles.one && team.rank() == 0) *tiles.one = A(1);
    team.barrier();
    Walker<Team, A, QueryMap, KeyMap> walker(team, args, tiles, transposed);
    for (std::int64_t task = worker; task < args.tasks; task += workers) walker.run(Kind, task);
  }
};

// ---- checks of what the caller gave -----------------------------------------------------------

/// Which parts the states of a variant have beside S and z.
struct StateParts {
  bool shift = false;
  bool value_sum = false;
  bool count = false;  // not of cotangents and gradients
};

/// A state of the caller, checked, for kernels; nothing where none was given.
template <class StateRef, class Caller>
void bind_state(const char* name, const StateRef& state, std::int64_t sequences, std::int64_t kv_heads,
                std::int64_t features, std::int64_t dv, StateParts parts, Caller& caller) {
  if (!state.S.present() && !state.z.present() && !state.shift.present() && !state.t.present() && !state.m.present())
    return;
  const auto require = [&](const char* part, const auto& tensor, const auto& shape) {
    if constexpr (std::is_const_v<typename std::remove_cvref_t<decltype(tensor)>::value_type>)
      require_shape(message(part, " of the ", name).c_str(), tensor, shape);
    else
      require_output(message(part, " of the ", name).c_str(), tensor, shape);
  };
  const std::array<std::int64_t, 3> per_feature{sequences, kv_heads, features};
  require("S", state.S, std::array<std::int64_t, 4>{sequences, kv_heads, features, dv});
  require("z", state.z, per_feature);
  caller.values = decltype(caller.values)(state.S);
  caller.sums = decltype(caller.sums)(state.z);
  if (parts.shift) {
    require("shift", state.shift, per_feature);
    caller.shifts = decltype(caller.shifts)(state.shift);
  }
  if (parts.value_sum) {
    require("t", state.t, std::array<std::int64_t, 3>{sequences, kv_heads, dv});
    caller.value_sums = decltype(caller.value_sums)(state.t);
  }
  if (parts.count) {
    require("m", state.m, std::array<std::int64_t, 1>{sequences});
    caller.counts = state.m.data();
    caller.count_stride = state.m.stride(0);
  }
  caller.present = true;
}

inline void require_rows(const Problem& problem, std::int64_t features) {
  constexpr std::int64_t largest = 1 << 16;
  if (features > largest || problem.d > largest || problem.dv > largest)
    throw InvalidArgument(message("LinAttn: rows of at most ", largest, " entries are supported, found D=", problem.d,
                                  " features=", features, " Dv=", problem.dv));
}

template <class A>
A finite(const char* name, double x) {
  const A rounded = static_cast<A>(x);
  if (!(rounded - rounded == A(0)))
    throw InvalidArgument(message("LinAttn: ", name, " must be finite in the precision of the sums, found ", x));
  return rounded;
}

/// The rate and eps of a row-norm map that has one for all heads.
template <class A, class Map>
void require_finite_rate(const Map& map) {
  if constexpr (RowNormFeatureMap<Map>) {
    finite<A>("norm_eps", map.eps);
    finite<A>("the score scale", map.factor);
    if (!map.rate.per_head()) finite<A>("a times the score scale", map.rate.value() * map.factor);
  }
}

template <class A, LinearVariant V>
Parameter finite_constant(const Parameter& constant) {
  if (!constant.per_head()) finite<A>(V::constant_parameter, constant.value());
  return constant;
}

/// Whether small row sums are replaced, the request checked.
template <class A, LinearVariant V>
bool is_clamp(SmallNormaliser policy, double least, bool normalise) {
  if (!(least >= 0) || !(static_cast<A>(least) - static_cast<A>(least) == A(0)))
    throw InvalidArgument(message("LinAttn: least_normaliser must be finite in the precision of the sums and not "
                                  "negative, found ", least));
  if (!normalise || policy != SmallNormaliser::clamp) return false;
  if (ScaledFeatureMap<key_map_t<V>>)
    throw InvalidArgument(message("LinAttn: row sums of ", V::name, " are relative to their largest exponent and "
                                  "cannot vanish: small_normaliser clamp is not for it"));
  return true;
}

/// One call of one pass: everything between the public function and the kernels, for sums of type A and
/// any storage that is summed in it.
template <class A, class ExecSpace, LinearVariant V>
class Call {
 public:
  using QueryMap = query_map_t<V>;
  using KeyMap = key_map_t<V>;
  using Args = Arguments<A, QueryMap, KeyMap>;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;
  static constexpr bool divides_by_norm = RowNormFeatureMap<KeyMap>;
  static constexpr bool has_constant = has_constant_v<V>;
  static_assert(RowNormFeatureMap<QueryMap> == divides_by_norm,
                "LinAttn: query and key map must both divide rows by a norm or both not");

  /// Checks extents, parameters and options, and makes the plan.
  Call(const ExecSpace& exec, const V& variant, const Problem& problem, Pass pass, Storage storage,
       const Options& options)
      : m_exec(exec),
        m_problem(problem),
        m_pass(pass),
        m_args{.query_map = resolved(variant, problem).query_map(), .key_map = resolved(variant, problem).key_map()} {
    problem.validate(options.causal);
    const std::int64_t features = validate_variant<ExecSpace>(variant, problem, pass, options.causal);
    require_rows(problem, features);
    m_args.sequences = problem.sequences();
    m_args.heads = problem.heads;
    m_args.kv_heads = problem.kv_heads;
    m_args.group = problem.group();
    m_args.nq = problem.nq;
    m_args.nk = problem.nk;
    m_args.d = static_cast<int>(problem.d);
    m_args.dv = static_cast<int>(problem.dv);
    m_args.features = static_cast<int>(features);
    m_args.causal = options.causal;
    m_args.normalise = options.normalise.value_or(V::normalise_by_default);
    m_args.scale = finite<A>("scale", options.scale);
    m_args.allow_tf32 = options.allow_tf32;
    m_args.host = is_host_space_v<ExecSpace>;
    m_args.q.storage = m_args.v.storage = storage;
    enter_constant(variant);
    if constexpr (has_local_term_v<V>) require_joinable(options);
    enter_dropout(options.dropout);
    enter_normaliser(options);
    PlanRequest request;
    request.pass = pass;
    request.causal = options.causal;
    request.features = features;
    request.chunk = options.chunk;
    request.segments = options.segments;
    request.tiles = options.tiles;
    request.granule = tile_columns<A>;
    request.windows = pass == Pass::forward || !(mixes_entries_v<QueryMap> || mixes_entries_v<KeyMap>);
    request.exact = sizeof(A) >= 8;
    request.tile_bytes = [&](const Plan& plan) {
      Args trial = m_args;
      trial.plan = plan;
      return worker_bytes(trial);
    };
    m_args.plan = make_plan(problem, machine_of(exec), request);
    constexpr std::int64_t largest = std::numeric_limits<int>::max();
    const std::int64_t state = std::max(std::int64_t(padded_rows(features)) * padded_columns<A>(problem.dv),
                                        std::int64_t(padded_rows(problem.dv)) * padded_columns<A>(features));
    if (state > largest || m_args.plan.tile_bytes / sizeof(int) > static_cast<std::size_t>(largest))
      throw InvalidArgument(message("LinAttn: a state of ", features, " features by Dv = ", problem.dv,
                                    " with chunks of ", m_args.plan.chunk, " is too large for one worker"));
    if constexpr (scaled) {
      // a causal walk starts in each interval with the shift at the end of the one before; without a
      // mask the total is wanted, which a single worker finds by itself
      const std::int64_t interval = m_args.shift_interval();
      const std::int64_t intervals = std::max<std::int64_t>(1, (problem.longest_keys() + interval - 1) / interval);
      m_args.shift_entries = m_args.causal ? intervals - 1 : (m_args.plan.segments > 1 ? intervals : 0);
    }
  }

  const Plan& plan() const { return m_args.plan; }
  const Problem& problem() const { return m_problem; }
  Args& arguments() { return m_args; }

  std::size_t workspace_bytes() {
    return workspace_bytes([](ArenaCursor&) {});
  }
  void use_workspace(const Workspace<ExecSpace>& workspace) {
    use_workspace(workspace, [](ArenaCursor&) {});
  }
  /// The same with what more(arena) takes.
  template <class More>
  std::size_t workspace_bytes(const More& more) {
    ArenaCursor counter;
    place(counter);
    more(counter);
    return counter.required();
  }
  template <class More>
  void use_workspace(const Workspace<ExecSpace>& workspace, const More& more) {
    const std::size_t needed = workspace_bytes(more);
    require_size(workspace, needed, m_problem.to_string());
    if (needed == 0) return;
    require_memory(workspace);
    ArenaCursor arena(workspace.data());
    place(arena);
    more(arena);
  }

  /// Enters what the caller gave, checked, into the arguments.
  template <class T>
  void bind(const Inputs<ExecSpace, T>& inputs, const Saved<ExecSpace, T>& saved);
  template <class StateRef, class Caller>
  void enter_state(const char* name, const StateRef& state, Caller& caller, bool with_count) {
    bind_state(name, state, m_args.sequences, m_args.kv_heads, m_args.features, m_args.dv,
               {scaled, has_constant, has_constant && with_count}, caller);
    if (caller.present && has_local_term_v<V>)
      throw InvalidArgument(message("LinAttn: states of ", V::name, " would need the keys of the open block and are not "
                                    "supported, found: ", name));
    if (caller.present && m_args.center_v)
      throw InvalidArgument(message("LinAttn: center_v is not for calls with states, found: ", name));
    if (caller.present && m_args.clamp) require_counts(name);
  }
  static void require_counts(const char* name) {
    if (!has_constant)
      throw InvalidArgument(message("LinAttn: row sums are judged by the number of keys that they are over, which states "
                                    "of ", V::name, " do not have, found: ", name));
  }
  void enter_record(const TensorRef<NormaliserRecord, 2, ExecSpace>& smallest) {
    if (!smallest.present()) return;
    if (m_args.initial.present) require_counts("initial state");
    require_output("smallest", smallest, {m_args.sequences, m_args.heads});
    if (!m_args.may_record)
      throw InvalidArgument("LinAttn: the smallest row sum is recorded where rows are normalised, small_normaliser is "
                            "check and weights can cancel (not for lln)");
    m_smallest = smallest;
  }
  template <class T>
  void enter_centred(const TensorRef<T, 4, ExecSpace>& centred) {
    if (!centred.present()) return;
    if (!m_args.center_v) throw InvalidArgument("LinAttn: centred rows of o need center_v");
    require_output("centred", centred, {m_problem.batch, m_problem.heads, m_problem.nq, m_problem.dv});
    m_args.centred = StoredTensor<A>(centred);
  }

  /// The windows of the plan, over the columns or the features of the state.
  static void use_window(Args& args, bool of_values) {
    Window& w = args.window;
    const int columns = of_values ? args.dv : args.features;
    const int width = static_cast<int>(window_width(columns, args.plan.tiles, tile_columns<A>));
    w.of_values = of_values;
    w.tiles = width == 0 ? 1 : (columns + width - 1) / width;
    w.features = of_values ? args.features : width;
    w.values = of_values ? width : args.dv;
    args.tasks = args.sequences * args.kv_heads * w.tiles * args.plan.segments;
  }

  void launch_forward() {
    if (units() > 0 && (m_args.nq > 0 || m_args.last.present)) launch_output();
    if constexpr (has_constant) {
      if (m_args.last.present)
        launch_indices("LinAttn::forward::key_count", m_args.sequences,
                       CountKeys<Args>{m_args, m_args.last.counts, m_args.last.count_stride});
    }
    if (m_smallest.present()) {
      const bool nothing = units() == 0 || m_args.nq == 0;
      launch_range("LinAttn::forward::smallest", m_args.sequences * m_args.heads,
                   SmallestRecords<ExecSpace>{nothing ? nullptr : m_args.records, m_smallest, m_args.kv_heads,
                                              m_args.window.tiles * m_args.plan.segments, m_args.group});
    }
  }

  void launch_backward(const Gradients<ExecSpace, A>& parameters) {
    const auto wanted = [](const TensorRef<double, 1, ExecSpace>& gradient) { return gradient.present(); };
    const bool wants_rate = wanted(parameters.query_parameter) || wanted(parameters.scale);
    if (units() > 0) {
      find_largest_rows("LinAttn::backward::row_norms", "LinAttn::backward::largest_norm");
      if (!wants_rate && !m_args.largest_queries.rows) m_args.query_parameter_parts = nullptr;
      if (!wanted(parameters.key_parameter) && !m_args.largest_keys.rows) m_args.key_parameter_parts = nullptr;
      if (!wanted(parameters.constant)) m_args.constant_parts = nullptr;
      if (m_args.nq > 0 && (m_args.d_q || wants_rate || wanted(parameters.constant))) {
        launch_query_gradients();
        if (m_args.d_q) add_largest_row_gradients("LinAttn::backward::query_norm", m_args.largest_queries, m_args.query_map,
                                                  m_args.q, m_args.d_q, m_args.query_parameter_parts, m_args.group);
      }
      const bool wants_state = m_args.initial_gradient.present;
      const bool wants_keys = (m_args.nk > 0 && (m_args.d_k || wanted(parameters.key_parameter))) || wants_state;
      const bool wants_values = m_args.nk > 0 && m_args.d_v;
      if constexpr (scaled) {
        if (wants_keys || wants_values) find_shifts();
      }
      if (m_args.plan.tiles == 1 && (wants_keys || wants_values)) {
        launch_key_gradients(false, wants_keys, wants_values);
      } else {
        if (wants_keys) launch_key_gradients(false, true, false);
        if (wants_values) launch_key_gradients(true, false, true);
      }
      if (m_args.d_k && m_args.nk > 0)
        add_largest_row_gradients("LinAttn::backward::key_norm", m_args.largest_keys, m_args.key_map, m_args.k, m_args.d_k,
                                  m_args.key_parameter_parts, 1);
    }
    if constexpr (ParameterizedFeatureMap<QueryMap>)
      sum_parts("LinAttn::backward::query_parameter", parameters.query_parameter, m_args.query_parameter_parts, 1.0,
                m_args.nq, m_args.group);
    if constexpr (divides_by_norm) {
      sum_parts("LinAttn::backward::query_parameter", parameters.query_parameter, m_args.query_parameter_parts,
                m_args.query_map.factor, m_args.nq, m_args.group);
      sum_parts("LinAttn::backward::scale", parameters.scale, m_args.query_parameter_parts, m_args.query_map.rate,
                m_args.nq, m_args.group);
    }
    if constexpr (ParameterizedFeatureMap<KeyMap>)
      sum_parts("LinAttn::backward::key_parameter", parameters.key_parameter, m_args.key_parameter_parts, 1.0,
                m_args.nk, 1);
    sum_parts("LinAttn::backward::constant", parameters.constant, m_args.constant_parts, 1.0, m_args.nq, m_args.group);
  }

 private:
  void enter_constant(const V& variant) {
    require_finite_rate<A>(m_args.query_map);
    if constexpr (has_constant) {
      m_args.has_constant = true;
      m_args.constant = finite_constant<A, V>(resolved(variant, m_problem).constant());
    }
  }

  void enter_dropout(const Dropout& dropout) {
    dropout.validate(m_problem);
    finite<A>("dropout p", dropout.p);
    m_args.dropout = dropout;
    if (dropout.heads == 0) m_args.dropout.heads = m_problem.heads;
    if (dropout.queries == 0) m_args.dropout.queries = m_problem.nq;
  }

  void enter_normaliser(const Options& options) {
    m_args.clamp = is_clamp<A, V>(options.small_normaliser, options.least_normaliser, m_args.normalise);
    m_args.least_normaliser = static_cast<A>(options.least_normaliser);
    m_args.may_record = m_pass == Pass::forward && m_args.normalise && !scaled &&
                        options.small_normaliser == SmallNormaliser::check;
    m_args.center_v = options.center_v;
    if (options.center_v && !m_args.normalise)
      throw InvalidArgument("LinAttn: center_v needs normalised rows: only weighted means move with their values");
  }

  /// What a linear attention is asked for where another branch joins it.
  void require_joinable(const Options& options) const {
    static_assert(!mixes_entries_v<QueryMap> && !mixes_entries_v<KeyMap> && !has_constant,
                  "LinAttn: a local term joins elementwise or scaled maps without a constant");
    const auto refuse = [](const char* what) {
      throw InvalidArgument(message("LinAttn: ", V::name, " is normalised and has no ", what));
    };
    if (!m_args.normalise) refuse("form without normalisation");
    if (options.dropout.p > 0) refuse("dropout");
    if (options.center_v) refuse("center_v");
    if (options.small_normaliser == SmallNormaliser::clamp) refuse("small_normaliser clamp");
  }

  /// All of a forward pass but what follows from it.
  void launch_output() {
    find_largest_rows("LinAttn::forward::row_norms", "LinAttn::forward::largest_norm");
    if (!m_smallest.present()) m_args.records = nullptr;
    use_window(m_args, true);
    const CallerState<A, int> last = m_args.last;
    const bool in_place = last.present && m_args.initial.present && m_args.window.tiles > 1 &&
                          (last.sums.data == m_args.initial.sums.data || last.shifts.data == m_args.initial.shifts.data);
    if (in_place) {  // a window must not write what another has yet to read
      m_args.last.sums = {m_final_sums, m_args.kv_heads * m_args.features, m_args.features, 1};
      if constexpr (scaled) m_args.last.shifts = {m_final_shifts, m_args.kv_heads * m_args.features, m_args.features, 1};
    }
    if (m_args.plan.segments > 1) {
      walk<Walk::key_state>("LinAttn::forward::key_state", false);
      scan("LinAttn::forward::scan", m_args.causal ? ScanKind::prefix : ScanKind::total, m_args.initial, 1,
           false);
    }
    walk<Walk::output>("LinAttn::forward::output", false);
    if (in_place) {
      launch_range("LinAttn::forward::final_state", units() * m_args.features,
                   CopyFinalSums<A, scaled>{m_args.last, last, m_args.kv_heads, m_args.features});
      m_args.last = last;
    }
  }

  /// The largest norms of queries and keys, for maps that divide by them.
  void find_largest_rows(const char* norms, const char* largest) {
    if constexpr (divides_by_norm) {
      const auto find = [&](const StoredTensor<A>& x, LargestRows<A>& found) {
        const std::int64_t rows = m_args.sequences * found.heads;
        launch_range(norms, rows * found.blocks, FindLargestRows<A, Args>{m_args, x, found});
        launch_range(largest, rows, PickLargestRow<A>{found});
      };
      if (m_args.largest_queries.rows) find(m_args.q, m_args.largest_queries);
      if (m_args.largest_keys.rows) find(m_args.k, m_args.largest_keys);
    } else {
      (void)norms, (void)largest;
    }
  }

  template <class Map>
  void add_largest_row_gradients(const char* label, const LargestRows<A>& largest, const Map& map,
                                 const StoredTensor<A>& x, const StoredTensor<A>& d_x, const double* parts,
                                 std::int64_t group) {
    if constexpr (divides_by_norm) {
      if (largest.rows)
        launch_range(label, m_args.sequences * largest.heads,
                     AddLargestRowGradient<A, Map, Args>{m_args, map, x, d_x, largest, parts,
                                                         m_args.window.tiles * m_args.plan.segments, group});
    } else {
      (void)label, (void)largest, (void)map, (void)x, (void)d_x, (void)parts, (void)group;
    }
  }

  void place_largest_rows(ArenaCursor& arena, LargestRows<A>& largest, std::int64_t heads, std::int64_t longest,
                          bool of_keys) {
    largest.heads = heads;
    largest.blocks = std::max<std::int64_t>(1, (longest + norm_block - 1) / norm_block);
    largest.of_keys = of_keys;
    const std::int64_t rows = m_args.sequences * heads;
    largest.block_norms = arena.take<A>(rows * largest.blocks);
    largest.block_rows = arena.take<std::int64_t>(rows * largest.blocks);
    largest.factors = arena.take<A>(rows);
    largest.rows = arena.take<std::int64_t>(rows);
    if (m_pass == Pass::backward) largest.gradients = arena.take<A>(rows * m_args.d);
  }

  /// body() with each window that the pass uses.
  template <class Body>
  void for_each_window(Args& args, const Body& body) const {
    if (m_pass == Pass::backward) {
      use_window(args, false);
      body();
      if (args.plan.tiles == 1) return;
    }
    use_window(args, true);
    body();
  }

  std::size_t worker_bytes(Args& args) const {
    std::size_t most = 0;
    const auto count = [&](Walk walk, bool transposed) {
      ArenaCursor counter;
      Tiles<A>(counter, args, walk, transposed, scaled, divides_by_norm);
      most = std::max(most, counter.required());
    };
    for_each_window(args, [&] {
      if (m_pass == Pass::forward) return count(Walk::output, false);  // key_state needs a part of it
      count(Walk::query_gradient, true);
      count(Walk::key_gradient, true);
    });
    return most;
  }

  void place(ArenaCursor& arena) {
    const Plan& plan = m_args.plan;
    if (!plan.tiles_in_scratch)
      m_args.worker_memory =
          arena.take<std::byte>(static_cast<std::int64_t>(plan.tile_bytes) * plan.workers);
    std::int64_t tasks = 0, values = 0, sums = 0, value_sums = 0;  // the most of any launch
    for_each_window(m_args, [&] {
      tasks = std::max(tasks, m_args.tasks);
      values = std::max(values, m_args.tasks * m_args.state_size());
      sums = std::max(sums, m_args.tasks * m_args.window.features);
      value_sums = std::max(value_sums, m_args.tasks * m_args.window.values);
    });
    if (plan.segments > 1) {
      m_args.states.values = arena.take<A>(values);
      m_args.states.sums = arena.take<A>(sums);
      if constexpr (has_constant) m_args.states.value_sums = arena.take<A>(value_sums);
      if constexpr (scaled) {
        m_args.states.shifts = arena.take<int>(tasks * m_args.features);
        m_args.states.carried_shifts = arena.take<int>(tasks * m_args.features);
      }
    }
    if (m_pass == Pass::forward && plan.tiles > 1) {
      m_final_sums = arena.take<A>(units() * m_args.features);
      if constexpr (scaled) m_final_shifts = arena.take<int>(units() * m_args.features);
    }
    m_device_offsets = place_offsets<ExecSpace>(arena, m_problem);
    if (m_pass == Pass::backward) {
      if constexpr (scaled)
        m_args.shift_table = arena.take<int>(units() * m_args.shift_entries * m_args.features);
      if constexpr (ParameterizedFeatureMap<QueryMap> || divides_by_norm)
        m_args.query_parameter_parts = arena.take<double>(tasks * m_args.group);
      if constexpr (ParameterizedFeatureMap<KeyMap> || divides_by_norm)
        m_args.key_parameter_parts = arena.take<double>(tasks);
      if constexpr (has_constant) m_args.constant_parts = arena.take<double>(tasks * m_args.group);
    }
    if (m_args.may_record) m_args.records = arena.take<NormaliserRecord>(tasks * m_args.group);
    if constexpr (divides_by_norm) {
      if (m_args.query_map.of_sequence())
        place_largest_rows(arena, m_args.largest_queries, m_args.heads, m_problem.longest_queries(), false);
      if (m_args.key_map.of_sequence())
        place_largest_rows(arena, m_args.largest_keys, m_args.kv_heads, m_problem.longest_keys(), true);
    }
  }

  void launch_query_gradients() {
    use_window(m_args, false);
    if (m_args.plan.segments > 1) {
      walk<Walk::key_state>("LinAttn::backward::key_state", true);
      scan("LinAttn::backward::prefix_scan", m_args.causal ? ScanKind::prefix : ScanKind::total,
           m_args.initial, 1, true);
    }
    walk<Walk::query_gradient>("LinAttn::backward::query_gradient", true);
  }

  void launch_key_gradients(bool of_values, bool wants_keys, bool wants_values) {
    use_window(m_args, of_values);
    m_args.wants_keys = wants_keys;
    m_args.wants_values = wants_values;
    if (m_args.plan.segments > 1) {
      walk<Walk::query_state>("LinAttn::backward::query_state", true);
      scan("LinAttn::backward::suffix_scan", m_args.causal ? ScanKind::suffix : ScanKind::total,
           m_args.last_cotangent, -1, true);
    }
    walk<Walk::key_gradient>("LinAttn::backward::key_gradient", true);
  }

  template <Walk Kind>
  void walk(const char* label, bool transposed) {
    const int workers = static_cast<int>(std::min<std::int64_t>(m_args.tasks, m_args.plan.workers));
    launch_workers(m_exec, label, workers, m_args.plan,
                   WalkKernel<ExecSpace, Kind, A, QueryMap, KeyMap>{m_args, transposed, workers});
  }

  void scan(const char* label, ScanKind kind, const CallerState<const A, const int>& edge, int edge_sign,
            bool transposed) {
    const ScanStates<ExecSpace, A, scaled> kernel{m_args.states,
                                                  edge,
                                                  edge_sign,
                                                  kind,
                                                  transposed,
                                                  m_args.plan.segments,
                                                  m_args.features,
                                                  m_args.dv,
                                                  m_args.window,
                                                  m_args.kv_heads};
    launch_teams(label, units() * m_args.window.tiles * kernel.blocks(), kernel);
  }

  void find_shifts() {
    if (m_args.shift_entries == 0) return;
    launch_indices("LinAttn::backward::find_shifts", units() * m_args.shift_entries,
                   FindShifts<A, QueryMap, KeyMap>{m_args});
    launch_range("LinAttn::backward::scan_shifts", units() * m_args.features,
                 ScanShifts{m_args.shift_table, m_args.initial.shifts, m_args.shift_entries, m_args.kv_heads,
                            m_args.features});
  }

  /// Windows of features, over which the parts of a parameter's gradient are summed.
  int parameter_tiles() const {
    Args args = m_args;
    use_window(args, false);
    return args.window.tiles;
  }

  std::int64_t units() const { return m_args.sequences * m_args.kv_heads; }

  template <class Kernel>
  void launch_teams(const char* label, std::int64_t teams, const Kernel& kernel) {
    if (teams > std::numeric_limits<int>::max())
      throw InvalidArgument(message("LinAttn: ", teams, " teams for ", m_problem.to_string(),
                                    " are more than one kernel can have; use longer chunks"));
    launch(label, Kokkos::TeamPolicy<ExecSpace>(m_exec, static_cast<int>(teams), m_args.plan.team_size, 1),
           kernel);
  }

  template <class Kernel>
  void launch_range(const char* label, std::int64_t count, const Kernel& kernel) {
    if (count == 0) return;
    launch(label, Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, count), kernel);
  }

  /// kernel(i) for each index on the host, one team for each on a device.
  template <class Kernel>
  void launch_indices(const char* label, std::int64_t count, const Kernel& kernel) {
    if (count == 0) return;
    if constexpr (is_host_space_v<ExecSpace>)
      launch_range(label, count, kernel);
    else
      launch_teams(label, count, kernel);
  }

  void sum_parts(const char* label, const TensorRef<double, 1, ExecSpace>& gradient, const double* parts,
                 const Parameter& factor, std::int64_t tokens, std::int64_t group) {
    if (!gradient.present() || gradient.extent(0) == 0) return;
    const bool nothing = units() == 0 || tokens == 0;  // an empty sum
    launch_range(
        label, gradient.extent(0),
        SumParameterParts<ExecSpace>{parts, factor, gradient.data(), gradient.stride(0),
                                     nothing ? 0 : m_args.sequences, m_args.kv_heads,
                                     m_args.plan.segments * parameter_tiles(), group});
  }

  ExecSpace m_exec;
  Problem m_problem;
  std::int64_t* m_device_offsets = nullptr;
  A* m_final_sums = nullptr;  // of a final state in the memory of the initial one
  int* m_final_shifts = nullptr;
  TensorRef<NormaliserRecord, 2, ExecSpace> m_smallest{};
  Pass m_pass;
  Args m_args;
};

template <class A, class ExecSpace, LinearVariant V>
template <class T>
void Call<A, ExecSpace, V>::bind(const Inputs<ExecSpace, T>& in, const Saved<ExecSpace, T>& saved) {
  m_args.q = decltype(m_args.q)(in.q);
  m_args.k = decltype(m_args.k)(in.k);
  m_args.v = decltype(m_args.v)(in.v);
  m_args.o = decltype(m_args.o)(saved.o);
  m_args.denominator = decltype(m_args.denominator)(saved.denominator);
  bind_visibility(m_exec, in, m_problem, m_args.causal, m_device_offsets, m_args);
  enter_state("initial state", in.state, m_args.initial, true);
  if constexpr (divides_by_norm) {
    if (m_args.initial.present && m_args.query_map.of_sequence())
      throw InvalidArgument("LinAttn: keys of an initial state were divided by another largest norm than those of the "
                            "call; use qk_norm l2 or none, found qk_norm max");
  }
}

}  // namespace LinAttn::detail
