// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <linattn/error.hpp>
#include <linattn/problem.hpp>
#include <string>

/// \file dropout.hpp
/// The dropout substitute of linear attention: multiplicative Gaussian noise on the output.
///
///     y_ij = o_ij (1 + p n_ij)        n_ij ~ N(0, 1), independent
///
/// Linear attention never forms the matrix of weights, so its entries cannot be dropped (Gerami and Duraiswami).
/// The mean is kept, the relative variance is p^2; Bernoulli dropout of rate r on the output has the variance of
/// p = sqrt(r / (1 - r)). For training only: an inference leaves p at 0.
///
/// **Nothing is stored.** n is a function of (seed, offset) and of the place of the element in the whole problem,
/// so backward() makes it again, and any cut into chunks, windows, threads, calls or ranks sees the same noise:
///
///     e       = ((b H + h) Nq + i) Dv + j                   b, h, i, H, Nq of the whole problem
///     words   = Philox4x32-10(key = seed, counter = (e >> 2, offset))        low halves first
///     n       = element e & 3 of (r0 cos t0, r0 sin t0, r1 cos t1, r1 sin t1)
///     r0, t0  = sqrt(-2 log u(w0)), 2 pi u(w1)     r1, t1 likewise from w2, w3     u(w) = (w + 1/2) 2^-32
///
/// Of packed sequences b is 0 and i counts the rows of the packed tensor. Calls that must differ (layers, steps,
/// micro-batches) differ in `offset`; one sequence in several calls says where each begins (`first_query`).

namespace LinAttn {

/// Which noise multiplies the output. backward() must be given what forward() was given.
struct Dropout {
  double p = 0.0;            ///< standard deviation of the factor; 0: no noise
  std::uint64_t seed = 0;    ///< key of the generator
  std::uint64_t offset = 0;  ///< number of the call

  /// Where the tensors of this call lie in the whole problem, when it is split into calls: the first of its
  /// sequences, query heads and queries, and the heads and queries of the whole (0: those of the call).
  std::int64_t first_batch = 0, first_head = 0, first_query = 0, heads = 0, queries = 0;

  /// \throws InvalidArgument naming the value if p is negative or not finite, or if the call lies outside the whole.
  void validate(const Problem& problem) const {
    if (!(p >= 0.0) || !(p - p == 0.0))
      throw InvalidArgument(detail::message("LinAttn: dropout p, a standard deviation, must be finite and not "
                                            "negative (0: no noise), found ", p));
    const auto inside = [](const char* name, std::int64_t first, std::int64_t mine, std::int64_t whole) {
      constexpr std::int64_t most = std::int64_t(1) << 61;
      if (first < 0 || whole < 0 || first > most || whole > most || (whole != 0 && first + mine > whole))
        throw InvalidArgument(detail::message("LinAttn: dropout is told that the ", mine, " ", name, " of the call begin at ",
                                              first, " of ", whole == 0 ? "those of the call" : std::to_string(whole)));
    };
    inside("sequences", first_batch, problem.batch, 0);
    inside("heads", first_head, problem.heads, heads);
    inside("queries", first_query, problem.nq, queries);
    const auto whole = [](std::int64_t first, std::int64_t mine, std::int64_t given) {
      return given != 0 ? static_cast<double>(given) : static_cast<double>(first) + static_cast<double>(mine);
    };
    if (whole(first_batch, problem.batch, 0) * whole(0, problem.heads, heads) * whole(0, problem.nq, queries) *
            static_cast<double>(problem.dv) > 4.6e18)
      throw InvalidArgument("LinAttn: dropout numbers the elements of the whole with 63 bits, found more elements");
    if ((first_head > 0 && heads == 0) || (first_query > 0 && queries == 0))
      throw InvalidArgument("LinAttn: dropout on a part of the heads or queries needs their number in the whole");
  }
};

}  // namespace LinAttn
