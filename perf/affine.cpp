// SPDX-License-Identifier: BSD-3-Clause
//
// Affine attention in time: against elu, with dropout, and over the shapes that reviewers of the
// paper asked for. support/rows.hpp says what is counted.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/affine
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   main            elu and affine (l2; none; max without a mask) in fp32 and fp64, D = 64 and 128
//   affine_over_elu, affine_none_over_elu   ratio of times
//   dropout         affine without dropout and with p = 0.1
//   dropout_ratio   ratio of times, with dropout over without
//   n_sweep         H = 16, D = 32, N = 1,024 ... 32,768, B = 1 and 4
//   d_sweep         N = 8,192, D = 16 ... 256
//   heads           (H, D) of known models, B = 1, 4 and 16, N = 2,048
//   vision          without a mask, N = 197, 256, 1,024 and 4,096, (H, D) = (12, 64) and (6, 64)
//   offsets         errors of dq and dk in fp32 where all values share an offset (V in the name):
//                   plain, with center_v, and with Saved::centred, too; against fp64, over the
//                   largest element. Their time means nothing
//   small           smoke test
//
// In the sweeps B, and then H, are halved until a tensor has at most 2^24 elements: the name says
// what was run, the label what it stands for.

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

template <class T>
Job<T, Elu> elu(const Problem& p) {
  return {.problem = p};
}
template <class T>
Job<T, Affine> affine(const Problem& p, bool causal = true) {
  return {.problem = p, .options = {.causal = causal}};
}
template <class T>
Job<T, Affine> with_norm(const Problem& p, QkNorm norm, const char* name, bool causal = true) {
  return {.variant = {.qk_norm = norm},
          .variant_name = name,
          .problem = p,
          .options = {.causal = causal}};
}
template <class T>
Job<T, Affine> with_dropout(const Problem& p) {
  return {.variant_name = "affine_dropout",
          .problem = p,
          .options = {.causal = true, .dropout = {.p = 0.1, .seed = 1}}};
}

/// About as many tokens, whatever D.
Problem main_shape(std::int64_t d) { return shape(1, many_heads(), d > 64 ? 2048 : 4096, d); }

template <class T>
void add_main() {
  for (const std::int64_t d : {64, 128}) {
    const Problem p = main_shape(d);
    add_passes("main", elu<T>(p));
    add_passes("main", affine<T>(p));
    add_passes("main", with_norm<T>(p, QkNorm::none, "affine_none"));
    add_passes("main", with_norm<T>(p, QkNorm::l2, "affine", false));
    add_passes("main", with_norm<T>(p, QkNorm::max, "affine_max", false));
    add_passes("dropout", affine<T>(p));
    add_passes("dropout", with_dropout<T>(p));
  }
}

template <class T>
void add_ratios() {
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const std::int64_t d : {32, 64, 128, 256}) {
      const Problem p = main_shape(d);
      if (d == 64 || d == 128) {
        add_ratio("affine_over_elu", pass, elu<T>(p), affine<T>(p), PerToken{});
        add_ratio("affine_none_over_elu", pass, elu<T>(p),
                  with_norm<T>(p, QkNorm::none, "affine_none"), PerToken{});
      }
      if (d == 64 || d == 128 || std::is_same_v<T, float>)
        add_ratio("dropout_ratio", pass, affine<T>(p), with_dropout<T>(p), PerToken{});
    }
}

/// A row of a sweep, unless it was reduced to one that is there already.
void add_reduced(const char* group, const Problem& whole, bool causal = true) {
  constexpr std::int64_t most_elements = std::int64_t(1) << 24;
  static std::set<std::string> there;
  Problem run = whole;
  const auto elements = [&] { return run.batch * run.heads * run.nq * run.d; };
  while (run.batch > 1 && elements() > most_elements) run.batch /= 2;
  while (run.heads > many_heads() && elements() > most_elements) run.heads /= 2;
  run.kv_heads = run.heads;
  const auto job = affine<float>(run, causal);
  if (!there.insert(job.name(group, Pass::forward)).second) return;
  for (const Pass pass : {Pass::forward, Pass::backward})
    add_pass(group, pass, job, run == whole ? "" : "for " + whole.to_string());
}

void add_sweeps() {
  for (const std::int64_t batch : {1, 4})
    for (std::int64_t n = 1024; n <= 32768; n *= 2) add_reduced("n_sweep", shape(batch, 16, n, 32));
  for (const std::int64_t batch : {1, 4})
    for (const std::int64_t d : {16, 32, 64, 128, 256})
      add_reduced("d_sweep", shape(batch, 16, 8192, d));
  for (const auto& [heads, d] : {std::pair{12, 64}, {6, 64}, {32, 64}, {16, 128}, {4, 32}})
    for (const std::int64_t batch : {1, 4, 16}) add_reduced("heads", shape(batch, heads, 2048, d));
  for (const std::int64_t heads : {12, 6})
    for (const std::int64_t n : {197, 256, 1024, 4096})
      add_reduced("vision", shape(1, heads, n, 64), false);
}

/// dq and dk, one after the other, for values in offset + (-1, 1). Inputs are those of fp32.
template <class T>
std::vector<double> gradients(const Problem& p, double offset, bool center_v, bool keep_centred) {
  using Tensor = Kokkos::View<T****, Kokkos::LayoutRight, Exec::memory_space>;
  const Exec exec;
  const auto made = [&](std::int64_t columns, std::uint64_t seed, double shift) {
    const Tensor x("x", p.batch, p.heads, p.nq, columns);
    const Fill numbers{seed, false};
    for (std::size_t i = 0; i < x.size(); ++i)
      x.data()[i] = static_cast<T>(static_cast<float>(shift + numbers(i)));
    return x;
  };
  const Tensor q = made(p.d, 1, 0), k = made(p.d, 2, 0), v = made(p.dv, 3, offset);
  const Tensor d_o = made(p.dv, 4, 0), o("o", p.batch, p.heads, p.nq, p.dv);
  const Tensor d_q("d_q", p.batch, p.heads, p.nq, p.d), d_k("d_k", p.batch, p.heads, p.nk, p.d);
  const Tensor centred("centred", p.batch, p.heads, p.nq, p.dv);
  const Kokkos::View<T***, Kokkos::LayoutRight, Exec::memory_space> sums("sums", p.batch, p.heads,
                                                                         p.nq);
  Saved<Exec, T> saved{.o = o, .denominator = sums};
  if (keep_centred) saved.centred = centred;
  const Options options{.causal = true, .center_v = center_v};
  LinAttn::forward<T>(exec, Affine{}, {.q = q, .k = k, .v = v}, saved, options);
  LinAttn::backward<T>(exec, Affine{}, {.q = q, .k = k, .v = v}, saved, d_o, {.q = d_q, .k = d_k},
                       options);
  std::vector<double> result;
  for (const Tensor& x : {d_q, d_k})
    for (std::size_t i = 0; i < x.size(); ++i) result.push_back(static_cast<double>(x.data()[i]));
  return result;
}

void add_offset(const char* group, const Problem& p, std::int64_t offset) {
  add_row(row_name(group, "backward", "affine", "f32", true, p) + "/V" + std::to_string(offset),
          [=](benchmark::State& state) {
            for (auto _ : state) {
              const double begin = seconds();
              const auto at = static_cast<double>(offset);
              const std::vector<double> exact = gradients<double>(p, at, true, true);
              const auto error = [&](const std::vector<double>& found) {
                double largest = 0, apart = 0;
                for (std::size_t i = 0; i < exact.size(); ++i) {
                  largest = std::max(largest, std::abs(exact[i]));
                  apart = std::max(apart, std::abs(found[i] - exact[i]));
                }
                return apart / largest;
              };
              auto& c = state.counters;
              c["error_plain"] = error(gradients<float>(p, at, false, false));
              c["error_center_v"] = error(gradients<float>(p, at, true, false));
              c["error_centred"] = error(gradients<float>(p, at, true, true));
              state.SetIterationTime(seconds() - begin);
            }
          });
}

template <class T>
void add_small() {
  const Problem p{1, 2, 1, 200, 200, 24, 40};
  add_passes("small", elu<T>(p));
  add_passes("small", affine<T>(p));
  add_passes("small", with_norm<T>(p, QkNorm::none, "affine_none"));
  add_passes("small", with_norm<T>(p, QkNorm::max, "affine_max", false));
  add_passes("small", with_dropout<T>(p));
  add_ratio("small_ratio", Pass::backward, affine<T>(p), with_dropout<T>(p), PerToken{});
}

}  // namespace

void register_rows() {
  add_small<float>();
  add_small<double>();
  add_main<float>();
  add_main<double>();
  add_ratios<float>();
  add_ratios<double>();
  add_sweeps();
  add_offset("small", shape(1, 2, 200, 24), 100);
  for (const std::int64_t offset : {0, 10, 100, 1000})
    add_offset("offsets", shape(1, many_heads(), 4096, 64), offset);
}

}  // namespace LinAttn::perf
