// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/tensor.hpp>

/// \file block_diagonal.hpp
/// Softmax attention inside blocks of keys, beside a linear attention: the "Diag" of LLN+Diag (Nahshan, Kampeas, Haleva
/// 2024, section 3).

namespace LinAttn {

/// How the two branches make one output, elementwise with r and p of the head and column.
enum class Combine {
  average,  ///< o = (o_linear + o_block) / 2
  scale,    ///< o = r o_linear + p o_block
  ratio     ///< o = r o_linear + (1 - r) o_block
};

/// Exact attention inside consecutive blocks of keys:
///
///     o_block,i = sum_j exp(q_i . k_j / sqrt(D)) v_j / sum_j exp(q_i . k_j / sqrt(D))
///
/// Query i stands at position p = i + Nk - Nq and sees the keys j with floor(j / block) = floor(p / block), and j <= p
/// under a causal mask. The last block may be shorter, blocks begin anew in each packed member, hidden keys keep their
/// positions. A row that sees no key of its block has o_block = 0. Without a causal mask Nq = Nk is required.
struct BlockDiagonal {
  std::int64_t block = 0;  ///< keys of a block; 0: D
  Combine combine = Combine::average;
  ColumnFactors r = 0.5;  ///< (H,Dv), of the linear branch; not read by average
  ColumnFactors p = 0.5;  ///< (H,Dv), of the block branch; read by scale
};

}  // namespace LinAttn
