// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <linattn/error.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/kokkos_compat.hpp>
#include <linattn/noise.hpp>
#include <linattn/tensor.hpp>
#include <string>
#include <vector>

/// \file performer.hpp
/// Positive random features for softmax attention, FAVOR+ (Choromanski et al. 2021).
///
///     phi_m(x) = exp(u_m) / sqrt(M)     u_m = w_m . y - |y|^2 / 2     y = x / D^(1/4)     m < M
///
/// For rows w_m of independent normal entries phi(q) . phi(k) is exp(q . k / sqrt(D)) on average. Its error falls as
/// 1 / sqrt(M), and grows with |q| and |k|.

namespace LinAttn {

/// FAVOR+ attention. One kernel each forms the logits u of queries and keys; from there on it is LLN attention of M
/// features with rates 1: nothing overflows, and no later key changes a bit of an earlier causal row. Logits saturate
/// at 7.2e5, |x|^2 near 1.4e6 sqrt(D). The factor 1 / M cancels where rows are normalised. States are those of Lln with
/// R = M, without the factor. The projection is shared by all heads, and has no gradient.
struct Performer {
  static constexpr const char* name = "performer";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = nullptr;

  Projection projection{};  ///< (M, D): rows w_m, see orthogonal_features()

  ExponentialMap query_map() const { return {}; }
  ExponentialMap key_map() const { return {}; }
};

namespace detail {

/// Rows of orthogonal_features(), one after the other.
inline std::vector<double> orthogonal_rows(std::int64_t features, std::int64_t d, std::uint64_t seed) {
  constexpr std::uint64_t directions = 0x6469726563746e73, lengths = 0x6c656e6774687300;  // counters that nobody shares
  if (features < 0 || d < 0)
    throw InvalidArgument(message("LinAttn: features and their entries cannot be negative, found ", features, " of ", d));
  const std::int64_t counters = (d + 3) / 4;  // of a row
  std::vector<double> rows(static_cast<std::size_t>(features * d));
  std::vector<double> normals(static_cast<std::size_t>((d + noise_block - 1) / noise_block * noise_block + noise_block));
  const auto fill = [&](std::uint64_t stream, std::int64_t row) {
    fill_normals(HostTeam{}, seed, stream, static_cast<std::uint64_t>(row * counters), counters, normals.data());
  };
  const auto dot = [d](const double* a, const double* b) {
    double sum = 0;
    for (std::int64_t j = 0; j < d; ++j) sum += a[j] * b[j];
    return sum;
  };
  for (std::int64_t m = 0; m < features; ++m) {
    double* const row = rows.data() + m * d;
    fill(directions, m);
    for (std::int64_t j = 0; j < d; ++j) row[j] = normals[static_cast<std::size_t>(j)];
    // the factor Q of the rows of a block, R with a positive diagonal: Gram and Schmidt, twice
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t before = m - m % (d > 0 ? d : 1); before < m; ++before) {
        const double* const other = rows.data() + before * d;
        const double along = dot(row, other);
        for (std::int64_t j = 0; j < d; ++j) row[j] -= along * other[j];
      }
      const double norm = std::sqrt(dot(row, row));
      for (std::int64_t j = 0; j < d; ++j) row[j] /= norm;
    }
  }
  for (std::int64_t m = 0; m < features; ++m) {
    fill(lengths, m);
    const double length = std::sqrt(dot(normals.data(), normals.data()));
    for (std::int64_t j = 0; j < d; ++j) rows[static_cast<std::size_t>(m * d + j)] *= length;
  }
  return rows;
}

}  // namespace detail

/// Rows (features, d) for Performer in blocks of d: orthogonal to each other inside a block, of directions that are
/// uniform, and as long as independent rows of d normals. Their errors cancel better than those of independent rows.
///
/// A function of seed, d and the index of a row: fewer features are the first rows of more. Computed on the host in
/// O(features d^2). Allocates the View, and fences `exec`.
///
/// \throws InvalidArgument for a negative extent or one above 2^16 \throws EnvironmentFailure if there is no memory
template <class ExecSpace>
Kokkos::View<double**, typename ExecSpace::memory_space> orthogonal_features(const ExecSpace& exec, std::int64_t features,
                                                                             std::int64_t d, std::uint64_t seed) {
  using View = Kokkos::View<double**, typename ExecSpace::memory_space>;
  constexpr std::int64_t largest = 1 << 16;
  if (features > largest || d > largest)
    throw InvalidArgument(detail::message("LinAttn: at most ", largest, " features of as many entries are supported, found ",
                                          features, " of ", d));
  View result;
  std::vector<double> rows;
  try {
    rows = detail::orthogonal_rows(features, d, seed);
    result = View(Kokkos::view_alloc(exec, std::string("LinAttn::orthogonal_features"), Kokkos::WithoutInitializing),
                  static_cast<std::size_t>(features), static_cast<std::size_t>(d));
  } catch (const InvalidArgument&) {
    throw;
  } catch (const std::exception&) {
    throw EnvironmentFailure(detail::message("LinAttn: cannot allocate ", features, " features of ", d, " entries"));
  }
  const auto host = Kokkos::create_mirror_view(result);
  for (std::size_t m = 0; m < result.extent(0); ++m)
    for (std::size_t j = 0; j < result.extent(1); ++j) host(m, j) = rows[m * result.extent(1) + j];
  Kokkos::deep_copy(exec, result, host);
  detail::fence(exec, "LinAttn::orthogonal_features");
  return result;
}

}  // namespace LinAttn
