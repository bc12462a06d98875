// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/error.hpp>

/// \file problem.hpp
/// The extents of one attention call and the rules among them.

namespace LinAttn {

/// Extents of one attention call.
///
///     q (batch, heads, nq, d)   k (batch, kv_heads, nk, d)   v (batch, kv_heads, nk, dv)
///     o (batch, heads, nq, dv)  denominator (batch, heads, nq)
///
/// Query head h reads key/value head floor(h / group()), so kv_heads must divide heads: equal is
/// multi-head attention, kv_heads = 1 multi-query attention, anything between grouped-query attention.
/// Any extent may be 0 except that heads and kv_heads are 0 together.
///
/// Under a causal mask query i stands at position i + nk - nq (bottom-right alignment) and sees the
/// keys up to that position, so nq <= nk is required.
struct Problem {
  std::int64_t batch = 0;     ///< B, number of sequences
  std::int64_t heads = 0;     ///< H, query heads
  std::int64_t kv_heads = 0;  ///< Hkv, key/value heads; divides heads
  std::int64_t nq = 0;        ///< Nq, queries of a sequence
  std::int64_t nk = 0;        ///< Nk, keys of a sequence
  std::int64_t d = 0;         ///< D, features of a query or key row
  std::int64_t dv = 0;        ///< Dv, features of a value row

  /// Packed sequences: their number, with batch = 1 and nq, nk the totals; -1 where nothing is packed.
  std::int64_t members = -1;
  std::int64_t longest_q = 0;  ///< queries of the longest member
  std::int64_t longest_k = 0;  ///< keys of the longest member

  bool packed() const { return members >= 0; }
  /// Sequences that attend inside themselves.
  std::int64_t sequences() const { return packed() ? members : batch; }
  std::int64_t longest_queries() const { return packed() ? longest_q : nq; }
  std::int64_t longest_keys() const { return packed() ? longest_k : nk; }

  /// Query heads that share one key/value head.
  std::int64_t group() const { return kv_heads == 0 ? 0 : heads / kv_heads; }

  /// \throws InvalidArgument naming the extents if a rule above is broken.
  void validate(bool causal) const {
    if (batch < 0 || heads < 0 || kv_heads < 0 || nq < 0 || nk < 0 || d < 0 || dv < 0)
      throw InvalidArgument(detail::message("LinAttn: negative extent in ", to_string()));
    if ((kv_heads == 0) != (heads == 0) || (kv_heads > 0 && heads % kv_heads != 0))
      throw InvalidArgument(detail::message("LinAttn: ", kv_heads, " key/value heads do not divide ",
                                            heads, " query heads"));
    if (members < -1)
      throw InvalidArgument(detail::message("LinAttn: packed sequences need 0 or more members (-1: none are packed), ",
                                            "found ", members));
    if (packed() && batch != 1)
      throw InvalidArgument(detail::message("LinAttn: packed sequences need B = 1, found B = ", batch,
                                            " with ", members, " members"));
    if (packed() && (longest_q < 0 || longest_q > nq || longest_k < 0 || longest_k > nk))
      throw InvalidArgument(detail::message("LinAttn: the longest of ", members, " packed members has ", longest_q,
                                            " queries and ", longest_k, " keys of ", to_string()));
    constexpr double largest = 4.6e18;  // half of what offsets of 64 bits reach
    const auto elements = [&](std::int64_t h, std::int64_t n, std::int64_t columns) {
      return static_cast<double>(batch) * static_cast<double>(h) * static_cast<double>(n) *
             static_cast<double>(columns) * 8;
    };
    if (elements(heads, nq, d) > largest || elements(heads, nq, dv) > largest || elements(kv_heads, nk, d) > largest ||
        elements(kv_heads, nk, dv) > largest ||
        static_cast<double>(sequences()) * static_cast<double>(heads) * (1 << 20) > largest)
      throw InvalidArgument(detail::message("LinAttn: no memory can hold the tensors of ", to_string()));
    if (causal && !packed() && nq > nk)
      throw InvalidArgument(detail::message("LinAttn: causal attention needs Nq <= Nk, found Nq = ", nq,
                                            " and Nk = ", nk));
  }

  std::string to_string() const {
    return detail::message("B=", batch, " H=", heads, " Hkv=", kv_heads, " Nq=", nq, " Nk=", nk,
                           " D=", d, " Dv=", dv);
  }

  friend bool operator==(const Problem&, const Problem&) = default;
};

}  // namespace LinAttn
