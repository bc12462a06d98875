// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/tile_product.hpp>

/// \file tile_tensor_core.hpp
/// Products of float tiles on tensor cores: factors rounded to TF32, sums in float.
///
/// A warp forms one 16 x 16 block of the result at a time. What a band leaves out is left out here as
/// well: blocks on the diagonal, and what does not fill a step of 8 terms, are added without tensor cores.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#include <mma.h>
#define LINATTN_HAS_TENSOR_CORES 1
#endif

namespace LinAttn::detail {

#if defined(LINATTN_HAS_TENSOR_CORES)

namespace tensor_core {

inline constexpr int side = 16, depth = 8, warp = 32;
namespace wmma = nvcuda::wmma;
using Sum = wmma::fragment<wmma::accumulator, side, side, depth, float>;

/// sum += A(i0.., l) B(l, j0..) for begin <= l < end, end - begin a multiple of depth.
template <class Layout>
__device__ inline void accumulate(Sum& sum, const float* a, unsigned lda, std::int64_t a_step, const float* b,
                                  unsigned ldb, int begin, int end) {
  for (int l = begin; l < end; l += depth) {
    wmma::fragment<wmma::matrix_a, side, side, depth, wmma::precision::tf32, Layout> left;
    wmma::fragment<wmma::matrix_b, side, side, depth, wmma::precision::tf32, wmma::row_major> right;
    wmma::load_matrix_sync(left, a + l * a_step, lda);
    wmma::load_matrix_sync(right, b + l * std::int64_t(ldb), ldb);
    for (int e = 0; e < left.num_elements; ++e) left.x[e] = wmma::__float_to_tf32(left.x[e]);
    for (int e = 0; e < right.num_elements; ++e) right.x[e] = wmma::__float_to_tf32(right.x[e]);
    wmma::mma_sync(sum, left, right, sum);
  }
}

}  // namespace tensor_core

/// As multiply_on_device(); the team is whole warps.
template <class Team>
__device__ void multiply_on_tensor_cores(const Team& team, int m, int n, const Product<float>* products, int count,
                                         const Target<float>& target) {
  using namespace tensor_core;
  const int across = (n + side - 1) / side, blocks = (m + side - 1) / side * across;
  const int lane = team.rank() % warp;
  for (int block = team.rank() / warp; block < blocks; block += team.size() / warp) {
    const int i0 = block / across * side, j0 = block % across * side;
    if (target.lower_only && j0 > i0 + side - 1) continue;
    float* c = target.transposed ? target.c + j0 * target.ldc + i0 : target.c + i0 * target.ldc + j0;
    const auto layout = target.transposed ? wmma::mem_col_major : wmma::mem_row_major;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    // terms begin..end of each product go through the tensor cores
    const auto whole = [&](const Product<float>& p, int& begin, int& end) {
      const int inner = p.inner / depth * depth;
      begin = p.band == Band::upper ? i0 + side : 0;
      end = p.band == Band::lower ? (i0 < inner ? i0 : inner) : inner;
      if (begin > end || (p.a.row != 1 && p.a.column != 1)) begin = end = 0;
      if (p.a.column != 1 && p.a.column % 4 != 0) begin = end = 0;
    };
    for (int which = 0; which < count; ++which) {
      const Product<float>& p = products[which];
      int begin, end;
      whole(p, begin, end);
      if (begin == end) continue;
      const unsigned ldb = static_cast<unsigned>(p.ldb);
      if (p.a.column == 1)
        accumulate<wmma::row_major>(sum, p.a.data + i0 * p.a.row, static_cast<unsigned>(p.a.row), 1, p.b + j0, ldb,
                                    begin, end);
      else
        accumulate<wmma::col_major>(sum, p.a.data + i0, static_cast<unsigned>(p.a.column), p.a.column, p.b + j0, ldb,
                                    begin, end);
    }
    if (target.store == Store::add) {  // once, so that long sums are two-level
      Sum old;
      wmma::load_matrix_sync(old, c, static_cast<unsigned>(target.ldc), layout);
      for (int e = 0; e < sum.num_elements; ++e) sum.x[e] += old.x[e];
    }
    wmma::store_matrix_sync(c, sum, static_cast<unsigned>(target.ldc), layout);
    __syncwarp();
    for (int e = lane; e < side * side; e += warp) {
      const int i = i0 + e / side, j = j0 + e % side;
      float rest = 0;
      for (int which = 0; which < count; ++which) {
        const Product<float>& p = products[which];
        int begin, end;
        whole(p, begin, end);
        const int first = p.band == Band::upper ? i : 0;
        const int last = p.band == Band::lower && i + 1 < p.inner ? i + 1 : p.inner;
        for (int l = first; l < last; ++l) {
          if (l >= begin && l < end) {
            l = end - 1;
            continue;
          }
          rest += p.a.data[i * p.a.row + l * p.a.column] * p.b[l * p.ldb + j];
        }
      }
      float& to = target.transposed ? target.c[j * target.ldc + i] : target.c[i * target.ldc + j];
      const float total = to + rest;
      to = target.divisor ? total / target.divisor[i] : total;
    }
    __syncwarp();
  }
}

#endif

}  // namespace LinAttn::detail
