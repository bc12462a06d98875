// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <linattn/analysis/diagnose_kernels.hpp>
#include <linattn/analysis/diagnostics.hpp>
#include <linattn/analysis/eigenvalue.hpp>
#include <linattn/call.hpp>
#include <linattn/engine/engine.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// \file diagnose.hpp
/// Concentration instruments of attention matrices: entropy and its split, spectral gap, variance, log-variance,
/// temperature (see HeadDiagnostics).
///
/// For kernel attention, P_ij = phi_q(q_i) . phi_k(k_j) / s_i, the gap (Nq = Nk), the variance and the column means of
/// full attention follow exactly from R x R matrices in time O(N R^2), without the N^2 scores; the gap and the column
/// means of causal attention from walks in O(N R). Row entropies and log-variances need all scores of their row: of all
/// rows up to DiagnoseOptions::exact_up_to tokens or when asked for, else of seeded sampled rows with standard errors.
/// Memory is O(N R), but for the gap of full softmax attention, which needs the matrix.

namespace LinAttn {

/// Exact softmax attention, w_ij = exp(scale q_i . k_j), as what is to be diagnosed.
struct SoftmaxKernel {
  static constexpr const char* name = "softmax";
  std::optional<double> scale{};  ///< default 1 / sqrt(D)
};

/// What diagnose() reads: q (B,H,Nq,D), k (B,Hkv,Nk,D) and, optional, key_mask (B,Nk), 1 where a key is visible.
/// Hidden keys are never read and take part in nothing. Packed sequences are refused.
template <class ExecSpace, class T>
struct DiagnoseInputs {
  TensorRef<const T, 4, ExecSpace> q{};
  TensorRef<const T, 4, ExecSpace> k{};
  TensorRef<const std::uint8_t, 2, ExecSpace> key_mask{};
  SequenceOffsets cu_seqlens_q{};
  SequenceOffsets cu_seqlens_k{};
};

/// The instruments of every batch entry and head, for a variant of the engine or SoftmaxKernel; not for one with a
/// local term (lln-diag), which has two matrices: diagnose Lln for the linear one.
///
///     const LinAttn::Diagnostics d =
///         LinAttn::diagnose<float>(exec, LinAttn::Lln{2.1, 2.1}, {.q = q, .k = k}, {.seed = 1});
///     d(0, 3).entropy;  // bits
///
/// Weights must not be negative. Those of maps that never are (`static constexpr bool is_nonnegative = true` of a map
/// of one's own says so) are taken at their word; all others are measured, which needs all rows.
///
/// Allocates O(N R) memory, fences `exec`, and computes the last steps on the host: matrices of the gap are multiplied
/// on the default host execution space, which is fenced, under the labels LinAttn::spectral_radius::square and, above
/// order 512 (softmax), those of KokkosBlas::gemv. The same inputs and options give the same bits, whatever the number
/// of threads. Sums are in double over tiles in double (rows) or in the accumulator type (R x R matrices).
///
/// \throws InvalidArgument if extents or parameters do not fit, for packed sequences, for features of logits (performer),
/// and for negative weights, naming batch entry, head, row and key
/// \throws EnvironmentFailure if there is not enough memory
template <class T, class ExecSpace, class Kernel>
Diagnostics diagnose(const ExecSpace& exec, const Kernel& kernel,
                     const std::type_identity_t<DiagnoseInputs<ExecSpace, T>>& inputs,
                     const DiagnoseOptions& options = {});

}  // namespace LinAttn

// ---- definitions ----

namespace LinAttn {
namespace detail {

/// Whether the features of a map are never negative.
template <class Map>
constexpr bool is_nonnegative_map() {
  if constexpr (requires { Map::is_nonnegative; })
    return Map::is_nonnegative;
  else
    return ScaledFeatureMap<Map>;  // of exponential growth
}

/// One call of diagnose().
template <class T, class ExecSpace, class QueryMap, class KeyMap, bool Softmax>
class Diagnosis {
 public:
  using Source = FeatureSource<T, QueryMap, KeyMap>;
  using C = accumulator_t<T>;
  using Memory = typename ExecSpace::memory_space;
  template <class E>
  using Array = Kokkos::View<E*, Memory>;
  template <class E>
  using HostArray = decltype(Kokkos::create_mirror_view(std::declval<const Array<E>&>()));

  Diagnosis(const ExecSpace& exec, const char* name, const Source& source, const DiagnoseOptions& options)
      : m_exec(exec),
        m_name(name),
        m_s(source),
        m_options(options),
        m_plan(make_diagnose_plan(source.nq, source.nk, source.features, rows_of(source, options), machine_of(exec))) {
    m_rows = rows_of(source, options);
    m_sampled = m_rows < source.nq;
    m_units = source.batch * source.heads;
  }

  Diagnostics run(bool nonnegative) {
    Diagnostics result;
    result.batch = m_s.batch;
    result.heads = m_s.heads;
    result.values.resize(static_cast<std::size_t>(m_units));
    if (m_units == 0) return result;
    if (!nonnegative && m_sampled)
      throw InvalidArgument(message("LinAttn: weights of ", m_name,
                                    " can be negative, and then have no entropy; only "
                                    "all of them can tell: ask for exact"));
    if (m_s.nq == 0 || m_s.nk == 0) {
      for (HeadDiagnostics& head : result.values) head.temperature = std::numeric_limits<double>::infinity();
      return result;
    }
    prepare();
    measure_rows(nonnegative);
    const bool by_features = !Softmax && !m_s.causal;
    if (by_features) measure_features();
    if (!by_features && !m_sampled) measure_columns();
    if constexpr (!Softmax) {
      if (m_s.causal && m_sampled) walk_causal();
    }
    summarise_all(result, by_features);
    return result;
  }

  /// Norms and exponents that features are relative to.
  void prepare() {
    find_norms();
    find_shifts();
  }
  /// What kernel attention gives away in O(N R^2); after prepare().
  void measure_features();

 private:
  static std::int64_t rows_of(const Source& s, const DiagnoseOptions& options) {
    if (options.rows < 2)
      throw InvalidArgument(message("LinAttn: a standard error needs at least 2 sampled rows, found ", options.rows));
    const bool all = options.exact || std::max(s.nq, s.nk) <= options.exact_up_to || options.rows >= s.nq;
    return all ? s.nq : options.rows;
  }

  template <class View>
  static View allocated(const std::string& label, std::size_t size) {
    try {
      return View(Kokkos::view_alloc(label, Kokkos::WithoutInitializing), size);
    } catch (const std::exception&) {
      throw EnvironmentFailure(message("LinAttn: cannot allocate ", size, " elements of ",
                                       sizeof(typename View::value_type), " bytes for ", label));
    }
  }
  template <class E>
  static Array<E> array(const char* label, std::int64_t size) {
    return allocated<Array<E>>(std::string("LinAttn::diagnose::") + label, static_cast<std::size_t>(size));
  }
  /// Memory for structs: Views of types with default values would run kernels of their own.
  template <class E>
  struct Block {
    Array<std::byte> bytes;
    E* data() const { return reinterpret_cast<E*>(bytes.data()); }
  };
  template <class E>
  static Block<E> block(const char* label, std::int64_t size) {
    return {array<std::byte>(label, size * static_cast<std::int64_t>(sizeof(E)))};
  }
  /// Padding of tiles takes part in vector arithmetic, though nothing of it reaches a result: zeros rather than what
  /// memory was left with.
  template <class E>
  Array<E> cleared(const char* label, std::int64_t size) const {
    const Array<E> result = array<E>(label, size);
    range("LinAttn::diagnose::clear", size, Clear<E>{result.data()});
    return result;
  }
  template <class E>
  static HostArray<E> host_array(const Array<E>& from) {
    if constexpr (std::is_same_v<typename HostArray<E>::memory_space, Memory>)
      return from;
    else
      return allocated<HostArray<E>>(from.label(), from.extent(0));
  }
  template <class E>
  HostArray<E> host_copy(const Array<E>& from) const {
    const HostArray<E> to = host_array(from);
    Kokkos::deep_copy(m_exec, to, from);
    fence(m_exec, "LinAttn::diagnose::copy");
    return to;
  }

  template <class Kernel>
  void range(const char* label, std::int64_t count, const Kernel& kernel) const {
    if (count > 0)
      launch(label, Kokkos::RangePolicy<ExecSpace, Kokkos::IndexType<std::int64_t>>(m_exec, 0, count), kernel);
  }

  /// The tasks of a body on workers with memory of their own.
  template <class Body>
  void workers(const char* label, Body body, std::int64_t tasks) {
    if (tasks == 0) return;
    body.tasks = tasks;
    body.workers = static_cast<int>(std::min<std::int64_t>(tasks, m_plan.workers));
    body.worker_bytes = body.bytes();
    const std::size_t needed = body.worker_bytes * static_cast<std::size_t>(body.workers);
    if (m_memory.extent(0) < needed) {
      fence(m_exec, "LinAttn::diagnose::memory");
      m_memory = {};
      m_memory = array<std::byte>("workers", static_cast<std::int64_t>(needed));
    }
    body.worker_memory = m_memory.data();
    Plan plan;
    plan.team_size = m_plan.team_size;
    launch_workers(m_exec, label, body.workers, plan, OnWorkers<Body>{body});
  }

  void find_norms() {
    if constexpr (RowNormFeatureMap<KeyMap>) {
      if (!m_s.key_map.of_sequence()) return;
      const auto find = [&](const RowTensor<const T>& x, std::int64_t heads, std::int64_t n, bool keys,
                            Array<double>& largest) {
        const std::int64_t units = m_s.batch * heads, blocks = (n + norm_block - 1) / norm_block;
        const auto norms = array<double>("norms", units * blocks);
        largest = array<double>("largest_norms", units);
        BlockNorms<T> kernel;
        kernel.x = x;
        if (keys) {
          kernel.mask = m_s.key_mask;
          kernel.mask_batch_stride = m_s.mask_batch_stride;
          kernel.mask_stride = m_s.mask_stride;
        }
        kernel.heads = heads;
        kernel.n = n;
        kernel.blocks = blocks;
        kernel.d = m_s.d;
        kernel.norms = norms.data();
        range("LinAttn::diagnose::row_norms", units * blocks, kernel);
        range("LinAttn::diagnose::largest_norm", units, LargestNorm{norms.data(), blocks, largest.data()});
        fence(m_exec, "LinAttn::diagnose::norms");  // the norms of blocks go
      };
      find(m_s.q, m_s.heads, m_s.nq, false, m_largest_query);
      find(m_s.k, m_s.kv_heads, m_s.nk, true, m_largest_key);
      m_s.largest_query = m_largest_query.data();
      m_s.largest_key = m_largest_key.data();
    }
  }

  void find_shifts() {
    const std::int64_t units = m_s.batch * m_s.kv_heads;
    m_shift = cleared<int>("shift", units * m_s.features);
    if constexpr (Source::scaled) {
      const std::int64_t segments = (m_s.nk + m_plan.segment - 1) / m_plan.segment;
      const auto parts = array<int>("segment_shifts", units * segments * m_s.features);
      SegmentShifts<Source> body;
      body.s = m_s;
      body.chunk = m_plan.chunk;
      body.segment = m_plan.segment;
      body.segments = segments;
      body.shifts = parts.data();
      workers("LinAttn::diagnose::segment_shifts", body, units * segments);
      range("LinAttn::diagnose::shift", units * m_s.features,
            LargestShift{parts.data(), segments, m_s.features, m_shift.data()});
      fence(m_exec, "LinAttn::diagnose::shifts");
    }
    m_s.shift = m_shift.data();
  }

  void measure_rows(bool nonnegative) {
    Array<std::int64_t> positions;
    if (m_sampled) {
      positions = array<std::int64_t>("positions", m_units * m_rows);
      const auto host = host_array(positions);
      for (std::int64_t unit = 0; unit < m_units; ++unit) {
        const auto sample = sampled_rows(m_options.seed, unit, m_s.nq, m_rows);
        std::copy(sample.begin(), sample.end(), host.data() + unit * m_rows);
        m_positions.insert(m_positions.end(), sample.begin(), sample.end());
      }
      Kokkos::deep_copy(m_exec, positions, host);
      fence(m_exec, "LinAttn::diagnose::positions");
    }
    const std::int64_t tiles = (m_rows + m_plan.query_tile - 1) / m_plan.query_tile, splits = m_plan.splits;
    const auto parts = block<RowRecord>("row_parts", m_units * m_rows * splits);
    const auto records = block<RowRecord>("rows", m_units * m_rows);
    m_normaliser = array<double>("normaliser", m_units * m_rows);
    RowRecords<Source, Softmax> body;
    body.s = m_s;
    body.query_tile = m_plan.query_tile;
    body.key_tile = m_plan.key_tile;
    body.rows = m_rows;
    body.tiles = tiles;
    body.splits = splits;
    body.positions = m_sampled ? positions.data() : nullptr;
    body.records = parts.data();
    workers("LinAttn::diagnose::rows", body, m_units * tiles * splits);
    range("LinAttn::diagnose::complete_rows", m_units * m_rows,
          CompleteRecords{parts.data(), splits, Softmax, records.data(), m_normaliser.data()});
    m_record_bytes = host_copy(records.bytes);
    m_records = reinterpret_cast<const RowRecord*>(m_record_bytes.data());
    if (nonnegative) return;
    for (std::int64_t at = 0; at < m_units * m_rows; ++at)
      if (m_records[at].negative >= 0)
        throw InvalidArgument(message("LinAttn: weights of ", m_name,
                                      " are negative here, and then have no entropy: "
                                      "batch entry ",
                                      at / m_rows / m_s.heads, ", head ", at / m_rows % m_s.heads, ", row ",
                                      at % m_rows, ", key ", m_records[at].negative));
  }

  ScoreColumns<Source, Softmax> score_columns() const {
    ScoreColumns<Source, Softmax> body;
    body.s = m_s;
    body.query_tile = m_plan.query_tile;
    body.key_tile = m_plan.key_tile;
    body.blocks = (m_s.nk + m_plan.key_tile - 1) / m_plan.key_tile;
    body.normaliser = m_normaliser.data();
    return body;
  }

  void measure_columns() {
    const auto columns = array<double>("columns", m_units * m_s.nk);
    auto body = score_columns();
    body.columns = columns.data();
    workers("LinAttn::diagnose::score_columns", body, m_units * body.blocks);
    m_columns = host_copy(columns);
  }

  template <CausalPart Part>
  CausalWalk<Source, Part> causal_walk(const Block<ScaledSum<double>>& states) const {
    CausalWalk<Source, Part> body;
    body.s = m_s;
    body.chunk = m_plan.chunk;
    body.segment = m_plan.segment;
    body.segments = (m_s.nk + m_plan.segment - 1) / m_plan.segment;
    body.states = states.data();
    return body;
  }

  /// Row sums, P_ii and column sums of kernel attention under a causal mask, in O(N R).
  void walk_causal() {
    const std::int64_t kv_units = m_s.batch * m_s.kv_heads, r = m_s.features;
    const std::int64_t segments = (m_s.nk + m_plan.segment - 1) / m_plan.segment;
    const auto keys = block<ScaledSum<double>>("causal_keys", kv_units * segments * r);
    const auto queries = block<ScaledSum<double>>("causal_queries", m_units * segments * r);
    const auto row_sums = array<double>("row_sums", m_units * m_s.nq);
    const auto row_shifts = array<int>("row_shifts", m_units * m_s.nq);
    const auto diagonal = array<double>("diagonal", m_units * m_s.nq);
    const auto columns = array<double>("columns", m_units * m_s.nk);
    const auto scan = [&](const Block<ScaledSum<double>>& states, std::int64_t units, bool back) {
      range("LinAttn::diagnose::scan", units * r, ScanSegments{states.data(), segments, m_s.features, back});
    };
    workers("LinAttn::diagnose::causal_keys", causal_walk<CausalPart::key_totals>(keys), kv_units * segments);
    scan(keys, kv_units, false);
    auto rows = causal_walk<CausalPart::rows>(keys);
    rows.row_sums = row_sums.data();
    rows.row_shifts = row_shifts.data();
    rows.diagonal = diagonal.data();
    workers("LinAttn::diagnose::causal_rows", rows, m_units * segments);
    auto totals = causal_walk<CausalPart::query_totals>(queries);
    totals.row_sums = row_sums.data();
    totals.row_shifts = row_shifts.data();
    workers("LinAttn::diagnose::causal_queries", totals, m_units * segments);
    scan(queries, m_units, true);
    auto sums = causal_walk<CausalPart::columns>(queries);
    sums.row_sums = row_sums.data();
    sums.row_shifts = row_shifts.data();
    sums.columns = columns.data();
    workers("LinAttn::diagnose::causal_columns", sums, m_units * segments);
    m_row_sums = host_copy(row_sums);
    m_diagonal = host_copy(diagonal);
    m_columns = host_copy(columns);
  }

  /// |lambda_2| from the matrices of features. A row without weight counts as uniform over the visible keys: one more
  /// feature, 1 for such a row and 1 / visible for a visible key.
  double second_of_features(std::int64_t unit, std::int64_t visible) const {
    const double* const totals = m_totals.data() + unit * m_layout.size();
    const double* const z =
        m_z.data() + (unit / m_s.heads * m_s.kv_heads + unit % m_s.heads / m_s.group) * m_s.features;
    const int r = m_s.features;
    std::vector<double> m(totals, totals + std::int64_t(r) * r), of_keys(z, z + r);
    if (totals[m_layout.empty()] > 0 && visible > 0) {
      const auto n = static_cast<double>(visible);
      std::vector<double> larger;
      for (int i = 0; i < r; ++i) {
        double image = 0;
        for (int j = 0; j < r; ++j) {
          larger.push_back(m[i * r + j]);
          image += m[i * r + j] * z[j];
        }
        larger.push_back(z[i] - image);  // sum of the keys at such rows
      }
      const double* const u = totals + (m_s.key_mask ? m_layout.visible_u() : m_layout.u());
      for (int j = 0; j < r; ++j) larger.push_back(u[j] / n);
      larger.push_back(totals[m_layout.visible_empty()] / n);
      m = larger;
      of_keys.push_back(1);
    }
    return second_eigenvalue_of_features(m, of_keys);
  }

  /// The gap of a full matrix by the matrix itself.
  void gap_of_matrix(std::int64_t unit, std::int64_t visible, const std::uint8_t* mask, HeadDiagnostics& head) {
    const auto matrix = array<double>("matrix", m_s.nq * m_s.nk);
    auto body = score_columns();
    body.first_unit = unit;
    body.matrix = matrix.data();
    workers("LinAttn::diagnose::matrix", body, body.blocks);
    const auto host = host_copy(matrix);
    for (std::int64_t i = 0; i < m_s.nq; ++i)
      if (m_records[unit * m_rows + i].sum == 0)
        for (std::int64_t j = 0; j < m_s.nk; ++j)
          host(i * m_s.nk + j) = !mask || mask[j] ? 1 / static_cast<double>(visible) : 0;
    const SecondEigenvalue second = second_eigenvalue(HostMatrix(host.data(), {m_s.nq, m_s.nk}, {m_s.nk, 1}));
    head.spectral_gap = 1 - second.modulus;
    if (!second.absent.empty()) append(head.absent, "spectral gap: " + second.absent);
  }

  void find_gap(std::int64_t unit, const HeadSums& sums, std::int64_t visible, HeadDiagnostics& head) {
    const auto absent = [&](const std::string& why) {
      head.spectral_gap = HeadDiagnostics::none;
      append(head.absent, "spectral gap: " + why);
    };
    if (m_s.nq != m_s.nk) return absent(message("needs a square matrix, found Nq = ", m_s.nq, " and Nk = ", m_s.nk));
    if (visible == 0) return;
    if (m_s.causal) {
      if (m_diagonal.extent(0) > 0)
        head.spectral_gap = causal_gap(m_diagonal.data() + unit * m_s.nq, m_s.nq);
      else if (m_sampled)
        absent("of causal softmax attention needs all rows (exact)");
      else
        head.spectral_gap = causal_gap(sums);
    } else if constexpr (!Softmax) {
      head.spectral_gap = 1 - second_of_features(unit, visible);
    } else {
      if (m_sampled || m_s.nq > m_options.largest_matrix)
        return absent(message("of softmax attention needs all rows and the matrix, which is not formed above ",
                              m_sampled ? m_options.exact_up_to : m_options.largest_matrix, " tokens, found ", m_s.nq));
      gap_of_matrix(unit, visible, sums.visible, head);
    }
  }

  void summarise_all(Diagnostics& result, bool by_features) {
    std::vector<std::uint8_t> mask;
    if (m_s.key_mask) mask = host_mask();
    for (std::int64_t unit = 0; unit < m_units; ++unit) {
      HeadSums sums;
      sums.nq = m_s.nq;
      sums.nk = m_s.nk;
      sums.causal = m_s.causal;
      sums.sampled = m_sampled;
      sums.records = m_records + unit * m_rows;
      sums.positions = m_sampled ? m_positions.data() + unit * m_rows : nullptr;
      sums.rows = m_rows;
      sums.visible = m_s.key_mask ? mask.data() + unit / m_s.heads * m_s.nk : nullptr;
      if (m_columns.extent(0) > 0) sums.columns = m_columns.data() + unit * m_s.nk;
      if (m_row_sums.extent(0) > 0) sums.row_sums = m_row_sums.data() + unit * m_s.nq;
      sums.no_columns = "the split of the entropy needs the column means, and these all rows (exact)";
      if (by_features && m_sampled) sums.squares = m_totals.data() + unit * m_layout.size() + m_layout.squares();
      HeadDiagnostics& head = result.values[static_cast<std::size_t>(unit)];
      head = summarise(sums);
      std::int64_t visible = m_s.nk;
      if (sums.visible) visible = std::count_if(sums.visible, sums.visible + m_s.nk, [](auto m) { return m != 0; });
      if (!m_options.gap)
        head.spectral_gap = HeadDiagnostics::none;
      else if (head.spectral_gap == head.spectral_gap)
        find_gap(unit, sums, visible, head);
    }
  }

  std::vector<std::uint8_t> host_mask() const {
    const auto packed = array<std::uint8_t>("mask", m_s.batch * m_s.nk);
    range("LinAttn::diagnose::mask", m_s.batch * m_s.nk,
          PackMask{m_s.key_mask, m_s.mask_batch_stride, m_s.mask_stride, m_s.nk, packed.data()});
    const auto host = host_copy(packed);
    return {host.data(), host.data() + host.extent(0)};
  }

  ExecSpace m_exec;
  std::string m_name;
  Source m_s;
  DiagnoseOptions m_options;
  DiagnosePlan m_plan;
  std::int64_t m_rows = 0, m_units = 0;
  bool m_sampled = false;
  QuerySumLayout m_layout;
  Array<std::byte> m_memory;
  Array<double> m_largest_query, m_largest_key, m_normaliser;
  Array<int> m_shift;
  HostArray<std::byte> m_record_bytes;
  const RowRecord* m_records = nullptr;
  HostArray<double> m_z, m_totals, m_columns, m_row_sums, m_diagonal;
  std::vector<std::int64_t> m_positions;
};

template <class T, class ExecSpace, class QueryMap, class KeyMap, bool Softmax>
void Diagnosis<T, ExecSpace, QueryMap, KeyMap, Softmax>::measure_features() {
  const std::int64_t kv_units = m_s.batch * m_s.kv_heads, segment = m_plan.segment;
  const int r = m_s.features, ld = padded_columns<C>(r);
  const std::int64_t key_segments = (m_s.nk + segment - 1) / segment, key_size = std::int64_t(r) * r + r;
  m_layout = {r, m_options.gap && m_s.nq == m_s.nk};
  const std::int64_t segments = (m_s.nq + segment - 1) / segment;
  const auto parts =
      array<double>("parts", std::max(kv_units * key_segments * key_size, m_units * segments * m_layout.size()));
  const auto z = array<double>("z", kv_units * r);
  const auto z_tile = cleared<C>("z_tile", kv_units * ld);
  const auto gram_tile = cleared<C>("gram", kv_units * padded_rows(r) * ld);
  {
    KeySums<Source> body;
    body.s = m_s;
    body.chunk = m_plan.chunk;
    body.chunks_at_once = m_plan.chunks_at_once;
    body.segment = segment;
    body.segments = key_segments;
    body.parts = parts.data();
    workers("LinAttn::diagnose::key_sums", body, kv_units * key_segments);
    range("LinAttn::diagnose::total_key_sums", kv_units * key_size,
          TotalKeySums<C>{parts.data(), key_segments, r, ld, z.data(), z_tile.data(), gram_tile.data()});
    fence(m_exec, "LinAttn::diagnose::keys");
  }
  const std::int64_t size = m_layout.size();
  const auto totals = array<double>("totals", m_units * size);
  {
    QuerySums<Source> body;
    body.s = m_s;
    body.layout = m_layout;
    body.chunk = m_plan.chunk;
    body.chunks_at_once = m_plan.chunks_at_once;
    body.segment = segment;
    body.segments = segments;
    body.z_tile = z_tile.data();
    body.gram_tile = gram_tile.data();
    body.parts = parts.data();
    workers("LinAttn::diagnose::query_sums", body, m_units * segments);
    range("LinAttn::diagnose::total_query_sums", m_units * size,
          TotalParts{parts.data(), segments, size, totals.data()});
    fence(m_exec, "LinAttn::diagnose::queries");
  }
  const auto columns = array<double>("columns", m_units * m_s.nk);
  FeatureColumns<Source> body;
  body.s = m_s;
  body.layout = m_layout;
  body.chunk = m_plan.chunk;
  body.segment = segment;
  body.segments = key_segments;
  body.totals = totals.data();
  body.columns = columns.data();
  workers("LinAttn::diagnose::columns", body, m_units * key_segments);
  m_z = host_copy(z);
  m_totals = host_copy(totals);
  m_columns = host_copy(columns);
}

template <class ExecSpace, class T, class Source>
void bind_inputs(const DiagnoseInputs<ExecSpace, T>& in, const DiagnoseOptions& options, Source& s, Problem& p) {
  if (!in.q.present() || !in.k.present())
    throw InvalidArgument(message("LinAttn: input ", in.q.present() ? "k" : "q", " is missing"));
  if (in.cu_seqlens_q.present() || in.cu_seqlens_k.present())
    throw InvalidArgument(
        "LinAttn: packed sequences (cu_seqlens_q, cu_seqlens_k) cannot be diagnosed together; "
        "call once for each member");
  p.batch = in.q.extent(0);
  p.heads = in.q.extent(1);
  p.kv_heads = in.k.extent(1);
  p.nq = in.q.extent(2);
  p.nk = in.k.extent(2);
  p.d = p.dv = in.q.extent(3);
  require_memory("q", in.q);
  require_shape("k", in.k, {p.batch, p.kv_heads, p.nk, p.d});
  if (in.key_mask.present()) {
    require_shape("key_mask", in.key_mask, {p.batch, p.nk});
    s.key_mask = in.key_mask.data();
    s.mask_batch_stride = in.key_mask.stride(0);
    s.mask_stride = in.key_mask.stride(1);
  }
  p.validate(options.causal);
  s.q = RowTensor<const T>(in.q);
  s.k = RowTensor<const T>(in.k);
  s.batch = p.batch;
  s.heads = p.heads;
  s.kv_heads = p.kv_heads;
  s.group = p.group();
  s.nq = p.nq;
  s.nk = p.nk;
  s.d = static_cast<int>(p.d);
  s.causal = options.causal;
}

}  // namespace detail

template <class T, class ExecSpace, class Kernel>
Diagnostics diagnose(const ExecSpace& exec, const Kernel& kernel,
                     const std::type_identity_t<DiagnoseInputs<ExecSpace, T>>& inputs, const DiagnoseOptions& options) {
  const detail::Region region("LinAttn::diagnose");
  Problem p;
  if constexpr (std::is_same_v<Kernel, SoftmaxKernel>) {
    using Source = detail::FeatureSource<T, IdentityMap, IdentityMap>;
    Source s;
    detail::bind_inputs(inputs, options, s, p);
    detail::require_rows(p, p.d);
    s.mapped = s.features = s.d;
    s.query_scale = kernel.scale.value_or(p.d > 0 ? 1 / std::sqrt(static_cast<double>(p.d)) : 1.0);
    if (!(s.query_scale - s.query_scale == 0))
      throw InvalidArgument(detail::message("LinAttn: the scale of softmax must be finite, found ", s.query_scale));
    return detail::Diagnosis<T, ExecSpace, IdentityMap, IdentityMap, true>(exec, Kernel::name, s, options).run(true);
  } else if constexpr (ProjectedVariant<Kernel>) {
    throw InvalidArgument(detail::message("LinAttn: features of ", Kernel::name, " are of logits, not of the entries of q "
                                          "and k, and are not diagnosed"));
  } else {
    static_assert(LinearVariant<Kernel>, "LinAttn: what is diagnosed is a variant of the engine or SoftmaxKernel");
    static_assert(!has_local_term_v<Kernel>, "LinAttn: a variant with a local term has no single matrix to diagnose");
    using QueryMap = query_map_t<Kernel>;
    using KeyMap = key_map_t<Kernel>;
    using Source = detail::FeatureSource<T, QueryMap, KeyMap>;
    Source s;
    detail::bind_inputs(inputs, options, s, p);
    const Kernel variant = detail::resolved(kernel, p);
    const std::int64_t features = detail::validate_variant<ExecSpace>(variant, p, Pass::forward, options.causal);
    detail::require_rows(p, features);
    s.query_map = variant.query_map();
    s.key_map = variant.key_map();
    s.mapped = s.features = static_cast<int>(features);
    if constexpr (has_constant_v<Kernel>) {
      s.constant = variant.constant();
      ++s.features;
    }
    const bool nonnegative =
        detail::is_nonnegative_map<QueryMap>() && detail::is_nonnegative_map<KeyMap>() && !has_constant_v<Kernel>;
    return detail::Diagnosis<T, ExecSpace, QueryMap, KeyMap, false>(exec, Kernel::name, s, options).run(nonnegative);
  }
}

}  // namespace LinAttn
