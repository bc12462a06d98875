// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <linattn/linattn.hpp>
#include <random>

/// Gradients of L = sum(o * g), g random, against central differences (remainder O(h^4)): the
/// largest error of any entry, relative to the largest entry of its tensor. Parameters are the
/// Views that the variant reads.
template <class Variant>
double gradient_error(const Variant& variant, const LinAttn::Options& options,
                      const Kokkos::View<double*, Kokkos::HostSpace>& query_parameter = {},
                      const Kokkos::View<double*, Kokkos::HostSpace>& key_parameter = {}) {
  using Tensor = Kokkos::View<double****, Kokkos::HostSpace>;
  using Vector = Kokkos::View<double*, Kokkos::HostSpace>;
  const Kokkos::DefaultHostExecutionSpace exec;

  // batch 2, four query heads on two key/value heads, 5 queries, 9 keys, D = 3, Dv = 6
  const Tensor q("q", 2, 4, 5, 3), k("k", 2, 2, 9, 3), v("v", 2, 2, 9, 6), g("g", 2, 4, 5, 6);
  const Tensor o("o", 2, 4, 5, 6), d_q("d_q", 2, 4, 5, 3), d_k("d_k", 2, 2, 9, 3),
      d_v("d_v", 2, 2, 9, 6);
  const Kokkos::View<double***, Kokkos::HostSpace> s("s", 2, 4, 5);
  const Vector d_query_parameter("d_query_parameter", query_parameter.size());
  const Vector d_key_parameter("d_key_parameter", key_parameter.size());
  std::mt19937_64 random(20250131);
  std::normal_distribution<double> normal;
  for (const Tensor& x : {q, k, v, g})
    std::generate_n(x.data(), x.size(), [&] { return normal(random); });

  const auto loss = [&] {
    LinAttn::forward<double>(exec, variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = s},
                             options);
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) sum += o.data()[i] * g.data()[i];
    return sum;
  };
  loss();
  LinAttn::Gradients<Kokkos::DefaultHostExecutionSpace, double> gradients{
      .q = d_q, .k = d_k, .v = d_v};
  if (query_parameter.size() > 0) gradients.query_parameter = d_query_parameter;
  if (key_parameter.size() > 0) gradients.key_parameter = d_key_parameter;
  LinAttn::backward<double>(exec, variant, {.q = q, .k = k, .v = v}, {.o = o, .denominator = s}, g,
                            gradients, options);

  constexpr double infinity = std::numeric_limits<double>::infinity();
  double worst = 0;
  const auto compare = [&](const auto& x, const auto& gradient) {
    double difference = 0, largest = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double h = 1e-3, centre = x.data()[i];
      const auto at = [&](double step) {
        x.data()[i] = centre + step;
        return loss();
      };
      const double slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      x.data()[i] = centre;
      const double error = std::abs(gradient.data()[i] - slope);
      difference = std::max(difference, std::isnan(error) ? infinity : error);
      largest = std::max(largest, std::abs(slope));
    }
    if (difference > 0) worst = std::max(worst, difference / largest);
  };
  compare(q, d_q);
  compare(k, d_k);
  compare(v, d_v);
  compare(query_parameter, d_query_parameter);
  compare(key_parameter, d_key_parameter);
  return worst;
}
