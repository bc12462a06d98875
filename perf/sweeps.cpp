// SPDX-License-Identifier: BSD-3-Clause
//
// Shapes that others publish, and the lengths of sequences, with elu in fp32. support/rows.hpp says
// what is counted.
//
//   OMP_NUM_THREADS=2 OMP_PROC_BIND=close OMP_PLACES=cores build/release/perf/sweeps
//     [--seconds=0.25] [--benchmark_filter=REGEX] [--benchmark_out=FILE.json]
//
// Groups of rows:
//   published   (B, N, H, D) of published benchmarks; so that they fit a machine with few cores, B
//               is 1 and H at most 8 or the number of threads: the name says what was run, the
//               label what it stands for
//   heads       (H, D) of known models, causal at N = 2,048, and full at N = 197 and 1,024
//   ten_n       N = 10^(3 + 2k/9) for k = 0 ... 9, D = 128
//   n_sweep     N = 1, 2, 4, ..., 131,072, D = 64
//   small       smoke test

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "support/rows.hpp"

namespace LinAttn::perf {
namespace {

struct Published {
  std::int64_t batch, n, heads, d;
};

/// B and H as they are if all_heads, else B H reduced to what keeps the threads busy.
void add(const char* group, const Published& p, bool all_heads, bool causal = true,
         bool backward = true) {
  const Problem whole = shape(p.batch, p.heads, p.n, p.d);
  const Problem run =
      all_heads ? whole : shape(1, std::min(p.batch * p.heads, many_heads()), p.n, p.d);
  const Job<float, Elu> job{.problem = run, .options = {.causal = causal}};
  const std::string label = run == whole ? "" : "for " + whole.to_string();
  add_pass(group, Pass::forward, job, label);
  if (backward) add_pass(group, Pass::backward, job, label);
}

}  // namespace

void register_rows() {
  for (const bool causal : {true, false}) add("small", {1, 200, 2, 24}, true, causal);
  for (const Published& p :
       {Published{1, 8192, 96, 128}, Published{2, 16384, 16, 128}, Published{4, 2048, 16, 128},
        Published{4, 4096, 64, 128}, Published{8, 2048, 32, 256}, Published{8, 1024, 8, 64}})
    add("published", p, false);
  for (const auto& [heads, d] :
       {std::pair{12, 64}, {6, 64}, {16, 32}, {16, 128}, {32, 64}, {4, 32}}) {
    add("heads", {1, 2048, heads, d}, true);
    for (const std::int64_t n : {197, 1024}) add("heads", {1, n, heads, d}, true, false, false);
  }
  for (int k = 0; k < 10; ++k) {
    const auto n = static_cast<std::int64_t>(std::pow(10.0, 3 + 2.0 * k / 9) + 1e-6);
    add("ten_n", {1, n, std::max(2, machine().threads()), 128}, true);
  }
  for (std::int64_t n = 1; n <= std::int64_t(1) << 17; n *= 2)
    add("n_sweep", {1, n, std::max(2, machine().threads()), 64}, true);
}

}  // namespace LinAttn::perf
