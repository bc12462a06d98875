// SPDX-License-Identifier: BSD-3-Clause

// The paths of a device without one: the walks of the engine by teams of threads that meet at
// barriers, as a GPU would run them, held to the reference. What threads of a team give does not
// depend on their number.

#include <barrier>
#include <thread>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using ExecSpace = Kokkos::DefaultHostExecutionSpace;

/// What DeviceTeam asks of a Kokkos team member.
struct Member {
  int rank = 0, size = 1;
  std::barrier<>* meeting = nullptr;
  int team_rank() const { return rank; }
  int team_size() const { return size; }
  void team_barrier() const { meeting->arrive_and_wait(); }
};

/// One pass whose kernels are run by emulated teams instead of Kokkos.
template <class T, Variant V>
class EmulatedPass {
 public:
  using A = accumulator_t<T>;
  using QueryMap = query_map_t<V>;
  using KeyMap = key_map_t<V>;
  using Args = LinAttn::detail::Arguments<A, QueryMap, KeyMap>;
  using Call = LinAttn::detail::CallOf<A, ExecSpace, V>;
  using Walk = LinAttn::detail::Walk;
  using ScanKind = LinAttn::detail::ScanKind;
  static constexpr bool scaled = ScaledFeatureMap<KeyMap>;

  EmulatedPass(const Attention<T, ExecSpace, V>& call, const Problem& problem, Pass pass,
               const Options& options, int team_size)
      : m_call(ExecSpace(), call.variant(), problem, pass, LinAttn::detail::storage_of<T>, options),
        m_arena(m_call.workspace_bytes()),
        m_team_size(team_size) {
    m_call.use_workspace(m_arena.workspace());
    m_call.bind(call.inputs(), call.saved());
    Args& args = m_call.arguments();
    if constexpr (has_local_term<V>) m_call.enter_local(call.inputs(), call.saved());
    m_call.enter_state("final state", call.saved().state, args.last, true);
    if (pass == Pass::forward) {
      m_call.enter_centred(call.saved().centred);
      return;
    }
    m_call.enter_state("cotangent", call.cotangents().state, args.last_cotangent, false);
    m_call.enter_centred(call.saved().centred);
    const auto gradients = call.gradients({});
    args.d_o = decltype(args.d_o)(call.d_o.input());
    args.d_q = decltype(args.d_q)(gradients.q);
    args.d_k = decltype(args.d_k)(gradients.k);
    args.d_v = decltype(args.d_v)(gradients.v);
    if (gradients.state.S.present()) {
      args.initial_gradient.values = decltype(args.initial_gradient.values)(gradients.state.S);
      args.initial_gradient.sums = decltype(args.initial_gradient.sums)(gradients.state.z);
      if (has_constant<V>)
        args.initial_gradient.value_sums =
            decltype(args.initial_gradient.value_sums)(gradients.state.t);
      args.initial_gradient.present = true;
    }
  }

  void forward() {
    find_largest_rows();
    Call::use_window(args(), true);
    if (args().plan.segments > 1) {
      walk(Walk::key_state, false);
      scan(args().causal ? ScanKind::prefix : ScanKind::total, args().initial, 1, false);
    }
    walk(Walk::output, false);
    if constexpr (has_local_term<V>) walk(LinAttn::detail::SoftmaxWalk::output);
    if (has_constant<V> && args().last.present)
      for (std::int64_t s = 0; s < args().sequences; ++s)
        LinAttn::detail::CountKeys<Args>{args(), args().last.counts, args().last.count_stride}(s);
  }

  void backward(const Attention<T, ExecSpace, V>& call) {
    const ScanKind total = ScanKind::total;
    const auto gradients = call.gradients({});
    if constexpr (has_local_term<V>) {
      using LinAttn::detail::SoftmaxWalk;
      if (m_call.local().arguments().tiles_of_block == 1) {
        walk(SoftmaxWalk::block_gradient);
      } else {
        walk(SoftmaxWalk::row_sum);
        walk(SoftmaxWalk::row_gradient);
        walk(SoftmaxWalk::key_gradient);
      }
      sum(gradients.diag_r, true);
      sum(gradients.diag_p, false);
      m_call.join_gradients();
    }
    find_largest_rows();
    Call::use_window(args(), false);
    if (args().plan.segments > 1) {
      walk(Walk::key_state, true);
      scan(args().causal ? ScanKind::prefix : total, args().initial, 1, true);
    }
    walk(Walk::query_gradient, true);
    add_largest_row_gradients(args().largest_queries, args().query_map, args().q, args().d_q,
                              args().query_parameter_parts, args().group);
    const auto of_keys = [&](bool of_values, bool wants_keys, bool wants_values) {
      Call::use_window(args(), of_values);
      args().wants_keys = wants_keys;
      args().wants_values = wants_values;
      if constexpr (scaled) find_shifts();
      if (args().plan.segments > 1) {
        walk(Walk::query_state, true);
        scan(args().causal ? ScanKind::suffix : total, args().last_cotangent, -1, true);
      }
      walk(Walk::key_gradient, true);
    };
    if (args().plan.tiles == 1) {
      of_keys(false, true, true);
    } else {
      of_keys(false, true, false);
      of_keys(true, false, true);
    }
    add_largest_row_gradients(args().largest_keys, args().key_map, args().k, args().d_k,
                              args().key_parameter_parts, 1);
    if (gradients.query_parameter.present()) {
      Parameter factor = 1.0;
      if constexpr (RowNormFeatureMap<QueryMap>) factor = args().query_map.factor;
      sum(gradients.query_parameter, args().query_parameter_parts, factor, args().group);
    }
    if constexpr (RowNormFeatureMap<QueryMap>)
      sum(gradients.scale, args().query_parameter_parts, args().query_map.rate, args().group);
    if (gradients.key_parameter.present())
      sum(gradients.key_parameter, args().key_parameter_parts, 1.0, 1);
    if (gradients.constant.present())
      sum(gradients.constant, args().constant_parts, 1.0, args().group);
  }

  /// What the output walk recorded for each head.
  std::vector<NormaliserRecord> records() {
    std::vector<NormaliserRecord> result(static_cast<std::size_t>(args().sequences * args().heads));
    const TensorRef<NormaliserRecord, 2, ExecSpace> ref(
        result.data(), {args().sequences, args().heads}, {args().heads, 1});
    const LinAttn::detail::SmallestRecords<ExecSpace> kernel{
        args().records, ref, args().kv_heads, args().window.tiles * args().plan.segments,
        args().group};
    for (std::int64_t head = 0; head < args().sequences * args().heads; ++head) kernel(head);
    return result;
  }

 private:
  Args& args() { return m_call.arguments(); }

  void find_largest_rows() {
    if constexpr (RowNormFeatureMap<KeyMap>) {
      const auto find = [&](const auto& x, const auto& largest) {
        if (!largest.rows) return;
        const std::int64_t rows = args().sequences * largest.heads;
        const LinAttn::detail::FindLargestRows<A, Args> blocks{args(), x, largest};
        for (std::int64_t i = 0; i < rows * largest.blocks; ++i) blocks(i);
        const LinAttn::detail::PickLargestRow<A> pick{largest};
        for (std::int64_t i = 0; i < rows; ++i) pick(i);
      };
      find(args().q, args().largest_queries);
      find(args().k, args().largest_keys);
    }
  }
  template <class Largest, class Map, class Tensor>
  void add_largest_row_gradients(const Largest& largest, const Map& map, const Tensor& x,
                                 const Tensor& d_x, const double* parts, std::int64_t group) {
    if constexpr (RowNormFeatureMap<KeyMap>) {
      const LinAttn::detail::AddLargestRowGradient<A, Map, Args> kernel{
          args(), map, x, d_x, largest, parts, args().window.tiles * args().plan.segments, group};
      for (std::int64_t i = 0; largest.rows && i < args().sequences * largest.heads; ++i) kernel(i);
    }
  }

  using Team = LinAttn::detail::DeviceTeam<Member>;

  /// body(team, worker, arena over memory that is all zero) for the threads of each worker.
  template <class Body>
  void on_teams(const Plan& plan, std::byte* worker_memory, const Body& body) {
    for (int worker = 0; worker < plan.workers; ++worker) {
      std::byte* const memory = worker_memory + static_cast<std::size_t>(worker) * plan.tile_bytes;
      std::barrier<> meeting(m_team_size);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < m_team_size; ++rank)
        threads.emplace_back([&, rank] {
          const Member member{rank, m_team_size, &meeting};
          const Team team{member};
          LinAttn::detail::for_each(team, static_cast<int>(plan.tile_bytes / sizeof(int)),
                                    [&](int i) { reinterpret_cast<int*>(memory)[i] = 0; });
          team.barrier();
          body(team, worker, LinAttn::detail::ArenaCursor(memory));
        });
      for (std::thread& thread : threads) thread.join();
    }
  }

  void walk(Walk kind, bool transposed) {
    on_teams(args().plan, args().worker_memory, [&](const Team& team, int worker, auto arena) {
      const LinAttn::detail::Tiles<A> tiles(arena, args(), kind, transposed, scaled,
                                             RowNormFeatureMap<KeyMap>);
      if (tiles.one && team.rank() == 0) *tiles.one = A(1);
      team.barrier();
      LinAttn::detail::Walker<Team, A, QueryMap, KeyMap> walker(team, args(), tiles, transposed);
      for (std::int64_t task = worker; task < args().tasks; task += args().plan.workers)
        walker.run(kind, task);
    });
  }

  /// The walks of exact attention inside blocks.
  void walk(LinAttn::detail::SoftmaxWalk kind) {
    const auto& local = m_call.local().arguments();
    on_teams(local.plan, local.worker_memory, [&](const Team& team, int worker, auto arena) {
      const LinAttn::detail::SoftmaxTiles<A> tiles(arena, local, kind);
      LinAttn::detail::SoftmaxWalker<Team, A> walker(team, local, tiles);
      for (std::int64_t task = worker; task < local.tasks; task += local.plan.workers)
        walker.run(kind, task);
    });
  }
  void sum(const TensorRef<double, 2, ExecSpace>& gradient, bool of_r) {
    const auto& local = m_call.local().arguments();
    if (!gradient.present()) return;
    const LinAttn::detail::SumColumnParts<ExecSpace> kernel{
        of_r ? local.r_parts : local.p_parts,
        of_r && local.combine == Combine::ratio ? local.p_parts : nullptr,
        gradient.data(),
        gradient.stride(0),
        gradient.stride(1),
        local.sequences,
        local.kv_heads,
        local.plan.segments,
        local.group,
        local.dv};
    for (std::int64_t i = 0; i < gradient.extent(0) * gradient.extent(1); ++i) kernel(i);
  }

  std::int64_t units() { return args().sequences * args().kv_heads; }

  template <class Kernel>
  void launch(std::int64_t teams, const Kernel& kernel) {
    Kokkos::parallel_for("test::kernel",
                         Kokkos::TeamPolicy<ExecSpace>(static_cast<int>(teams), 1, 1), kernel);
    Kokkos::fence();
  }
  template <class Edge>
  void scan(ScanKind kind, const Edge& edge, int sign, bool transposed) {
    const LinAttn::detail::ScanStates<ExecSpace, A, scaled> kernel{
        args().states,   edge,      sign,          kind,           transposed, args().plan.segments,
        args().features, args().dv, args().window, args().kv_heads};
    launch(units() * args().window.tiles * kernel.blocks(), kernel);
  }
  void find_shifts() {
    if (args().shift_entries == 0) return;
    const LinAttn::detail::FindShifts<A, QueryMap, KeyMap> find{args()};
    for (std::int64_t index = 0; index < units() * args().shift_entries; ++index) find(index);
    const LinAttn::detail::ScanShifts scan{args().shift_table, args().initial.shifts,
                                           args().shift_entries, args().kv_heads, args().features};
    for (std::int64_t index = 0; index < units() * args().features; ++index) scan(index);
  }
  void sum(const TensorRef<double, 1, ExecSpace>& gradient, const double* parts,
           const Parameter& factor, std::int64_t group) {
    const LinAttn::detail::SumParameterParts<ExecSpace> kernel{
        parts,
        factor,
        gradient.data(),
        gradient.stride(0),
        args().sequences,
        args().kv_heads,
        args().plan.segments * args().window.tiles,
        group};
    for (std::int64_t head = 0; head < gradient.extent(0); ++head) kernel(head);
  }

  Call m_call;
  Arena<ExecSpace> m_arena;
  int m_team_size;
};

template <class T, Variant V>
Outcome<T> by_emulated_teams(const Case& c, const Options& options, int team_size) {
  Attention<T, ExecSpace, V> call(c, options);
  EmulatedPass<T, V>(call, c.problem, Pass::forward, options, team_size).forward();
  EmulatedPass<T, V>(call, c.problem, Pass::backward, options, team_size).backward(call);
  return call.outcome();
}

template <class C>
class DeviceTeams : public BoundedTest {
 public:
  using T = typename C::T;
  using V = typename C::V;

  static void check(const Case& c, const Case& for_reference, const Options& options) {
    SCOPED_TRACE(describe(c.problem, options));
    const auto alone = by_emulated_teams<T, V>(c, options, 1);
    if (!c.initial) {
      EXPECT_TRUE(
          (agrees<T, V>(c, alone, expected_of<T, V>(for_reference, options), options.chunk)));
    }
    EXPECT_TRUE(same_bits(by_emulated_teams<T, V>(c, options, 3), alone));
  }
};

// The walks are the same for float and double; one of them is enough for each kind of map.
using OnTeams = ::testing::Types<Config<ExecSpace, double, Elu>, Config<ExecSpace, float, Lln>,
                                 Config<ExecSpace, float, Affine>>;
TYPED_TEST_SUITE(DeviceTeams, OnTeams, ConfigName);

TYPED_TEST(DeviceTeams, AgreeWithTheReference) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool causal : {false, true})
    for (const bool normalise : {true, false})
      for (const int segments : {1, 2}) {
        const Options options{
            .causal = causal, .normalise = normalise, .chunk = 12, .segments = segments};
        const Case c = random_case<T, V>({2, 4, 2, 31, 40, 5, 7}, options);
        this->check(c, c, options);
      }
}

// Windows of columns and of features, the last of them narrower.
TYPED_TEST(DeviceTeams, Windows) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{
          .causal = causal, .normalise = true, .chunk = 12, .segments = segments, .tiles = 2};
      const Case c = random_case<T, V>({1, 2, 1, 31, 40, 40, 40}, options);
      const Attention<T, ExecSpace, V> call(c, options);
      ASSERT_EQ(call.plan(Pass::forward).tiles, 2);
      ASSERT_EQ(call.plan(Pass::backward).tiles, mixes_entries_v<key_map_t<V>> ? 1 : 2);
      this->check(c, c, options);
    }
}

TYPED_TEST(DeviceTeams, MasksMembersAndStates) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .normalise = true, .chunk = 8, .segments = segments};
      Case masked = random_case<T, V>({1, 2, 1, 20, 30, 5, 3}, options);
      for (int n = 0; n < 30; ++n) masked.key_mask.push_back(static_cast<std::uint8_t>(n % 4 != 1));
      Case poisoned = masked;
      for (std::size_t n = 0; n < 30; ++n) {
        if (masked.key_mask[n] != 0) continue;
        std::fill_n(poisoned.k.begin() + static_cast<std::ptrdiff_t>(5 * n), 5,
                    std::numeric_limits<double>::quiet_NaN());
        std::fill_n(poisoned.v.begin() + static_cast<std::ptrdiff_t>(3 * n), 3,
                    std::numeric_limits<double>::quiet_NaN());
      }
      this->check(poisoned, masked, options);

      Case packed = random_case<T, V>({1, 2, 1, 30, 30, 5, 3}, options);
      pack(packed, {9, 0, 21}, {9, 0, 21});
      this->check(packed, packed, options);

      // with states: what one thread gives on these paths is what the host gives on its own
      Case stateful = random_case<T, V>({1, 2, 1, 20, 30, 5, 3}, options);
      Random random(seed());
      stateful.initial = StateValues{random.normals(15), random.uniforms(5, 1, 2), {}};
      if (is_scaled<V>) stateful.initial->shift = {0, -3, 2, 1, 0};
      stateful.last_cotangent = StateValues{random.normals(15), random.normals(5), {}};
      stateful.wants_last = true;
      this->check(stateful, stateful, options);
      const auto device = by_emulated_teams<T, V>(stateful, options, 2);
      const auto host = attend<T, ExecSpace, V>(stateful, options);
      const auto near = [](const auto& a, const auto& b) {
        double worst = 0, largest = 1;
        for (std::size_t n = 0; n < a.size(); ++n) {
          worst = std::max(worst, std::abs(static_cast<double>(a[n]) - static_cast<double>(b[n])));
          largest = std::max(largest, std::abs(static_cast<double>(b[n])));
        }
        return a.size() == b.size() && worst <= 200 * std::numeric_limits<T>::epsilon() * largest;
      };
      EXPECT_TRUE(near(device.o, host.o));
      EXPECT_TRUE(near(device.q, host.q));
      EXPECT_TRUE(near(device.k, host.k));
      EXPECT_TRUE(near(device.v, host.v));
      EXPECT_TRUE(near(device.S, host.S) && near(device.z, host.z));
      EXPECT_EQ(device.shift, host.shift);
      EXPECT_TRUE(near(device.d_S, host.d_S) && near(device.d_z, host.d_z));
      EXPECT_TRUE(near(device.t, host.t) && near(device.d_t, host.d_t));
      EXPECT_EQ(device.m, host.m);
    }
}

// Noise, values relative to a centre, and row sums that are replaced.
TYPED_TEST(DeviceTeams, NoiseCentreAndClamp) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  for (const bool causal : {false, true})
    for (const int tiles : {1, 2}) {
      Options options{.causal = causal,
                      .normalise = true,
                      .chunk = 12,
                      .segments = 2,
                      .tiles = tiles,
                      .dropout = {.p = 0.3, .seed = 5, .offset = 9}};
      const Case c = random_case<T, V>({2, 2, 1, 31, 40, 5, 39}, options);
      this->check(c, c, options);
      options.center_v = true;
      this->check(c, c, options);
      if (is_scaled<V>) continue;
      options.small_normaliser = SmallNormaliser::clamp;
      options.least_normaliser = 1.5;  // some of them
      this->check(c, c, options);
    }
}

// The largest norms of the rows, Nq != Nk, and the smallest row sums, with their places.
TEST(DeviceTeamsOfAffine, LargestNormsAndRecords) {
  using T = float;
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .chunk = 12, .segments = segments};
      SCOPED_TRACE(describe({2, 4, 2, 31, 40, 5, 7}, options));
      Case c = random_case<T, Affine>({2, 4, 2, 31, 40, 5, 7}, options);
      for (const QkNorm norm : {QkNorm::max, QkNorm::none}) {
        c.affine = {.scale = 0.3, .qk_norm = norm};
        for (double& b : c.constant) b += norm == QkNorm::none ? 3 : 0;
        const auto alone = by_emulated_teams<T, Affine>(c, options, 1);
        EXPECT_TRUE((agrees<T, Affine>(c, alone, expected_of<T, Affine>(c, options), 12)));
        EXPECT_TRUE(same_bits(by_emulated_teams<T, Affine>(c, options, 3), alone));
      }
      Attention<T, ExecSpace, Affine> call(c, options);
      const auto recorded = [&](int team_size) {
        EmulatedPass<T, Affine> pass(call, c.problem, Pass::forward, options, team_size);
        pass.forward();
        return pass.records();
      };
      const auto records = recorded(3);
      const auto sums = call.denominator.get();
      for (std::size_t head = 0; head < 8; ++head) {
        double least = std::numeric_limits<double>::infinity();
        std::int64_t where = -1;
        for (std::size_t i = 0; i < 31; ++i) {
          const double ratio = std::abs(static_cast<double>(sums[head * 31 + i])) /
                               (causal ? static_cast<double>(i + 10) : 40.0);
          if (ratio < least) {
            least = ratio;
            where = static_cast<std::int64_t>(i);
          }
        }
        EXPECT_EQ(records[head].row, where);
        EXPECT_EQ(records[head].ratio, least);
      }
    }
}

// Blocks of one tile and of several, ragged, with masks and members, joined to the linear branch.
TEST(DeviceTeamsOfLlnDiag, AgreeWithTheReference) {
  for (const bool causal : {false, true})
    for (const Combine combine : {Combine::average, Combine::scale, Combine::ratio})
      for (const std::int64_t block : {7, 12, 25}) {
        const Options options{.causal = causal, .chunk = 12};
        const auto check = [&](const Case& c, const Case& for_reference) {
          SCOPED_TRACE(describe(c.problem, options) + " block=" + std::to_string(block));
          const auto alone = by_emulated_teams<float, LlnDiag>(c, options, 1);
          EXPECT_TRUE((agrees<float, LlnDiag>(
              c, alone, expected_of<float, LlnDiag>(for_reference, options), options.chunk)));
          EXPECT_TRUE(same_bits(by_emulated_teams<float, LlnDiag>(c, options, 3), alone));
        };
        const std::int64_t nq = causal ? 31 : 40;
        Case c = random_case<float, LlnDiag>({2, 4, 2, nq, 40, 5, 7}, options);
        Random random(seed() + 5);
        c.diag = {.block = block, .combine = combine};
        if (combine != Combine::average) c.diag.diag_r = random.uniforms(28, -1, 1);
        if (combine == Combine::scale) c.diag.diag_p = random.uniforms(28, -1, 1);
        round_to<float>(c.diag.diag_r);
        round_to<float>(c.diag.diag_p);
        check(c, c);
        Case masked = c;
        for (int n = 0; n < 80; ++n)
          masked.key_mask.push_back(static_cast<std::uint8_t>(n % 4 != 1 && n / 12 != 1));
        Case poisoned = masked;
        for (std::size_t n = 0; n < 160; ++n) {
          if (masked.key_mask[n / 80 * 40 + n % 40] != 0) continue;
          std::fill_n(poisoned.k.begin() + static_cast<std::ptrdiff_t>(5 * n), 5,
                      std::numeric_limits<double>::quiet_NaN());
          std::fill_n(poisoned.v.begin() + static_cast<std::ptrdiff_t>(7 * n), 7,
                      std::numeric_limits<double>::quiet_NaN());
        }
        check(poisoned, masked);
        Case packed = random_case<float, LlnDiag>({1, 4, 2, 40, 40, 5, 7}, options);
        packed.diag = c.diag;
        pack(packed, {9, 0, 31}, {9, 0, 31});
        check(packed, packed);
      }
}

// More threads than rows, columns or features.
TYPED_TEST(DeviceTeams, MoreThreadsThanWork) {
  using T = typename TypeParam::T;
  using V = typename TypeParam::V;
  const Options options{.causal = true, .chunk = 4};
  const Case c = random_case<T, V>({1, 1, 1, 5, 5, 2, 1}, options);
  EXPECT_TRUE(
      same_bits(by_emulated_teams<T, V>(c, options, 20), by_emulated_teams<T, V>(c, options, 1)));
}

}  // namespace
