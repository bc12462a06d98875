// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>
#include <linattn/analysis/log_variance.hpp>
#include <linattn/analysis/moment_rule.hpp>
#include <linattn/error.hpp>
#include <vector>

#include "gaussian.hpp"

namespace LinAttn {

LineFit fit_line_with_quality(std::int64_t d, const FitOptions& options) {
  if (d < 1 || options.rows < 2 || options.points < 2)
    throw InvalidArgument(detail::message("LinAttn: a line needs D >= 1, at least 2 rows and 2 points, found D = ", d,
                                          ", ", options.rows, " rows and ", options.points, " points"));
  if (!(options.first > 0 && options.last > options.first && options.last - options.last == 0))
    throw InvalidArgument(detail::message("LinAttn: a line needs a range 0 < first < last of st2, found ",
                                          options.first, " to ", options.last));
  detail::Gaussian gaussian(options.seed);
  const auto count = static_cast<std::size_t>(options.rows) * static_cast<std::size_t>(d);
  const double n = options.points;
  std::vector<double> x, y;
  double mean_x = 0, mean_y = 0;
  for (int point = 0; point < options.points; ++point) {
    const double st2 = options.first + (options.last - options.first) * point / (options.points - 1);
    const std::vector<double> q = gaussian.standardised(count), k = gaussian.standardised(count);
    const double rate = std::sqrt(st2 / 2);
    const MatrixMoments matrix = measure_lln_matrix(q, k, d, rate, rate);
    x.push_back(st2);
    y.push_back(options.numerator ? matrix.numerator : matrix.variance);
    mean_x += x.back() / n;
    mean_y += y.back() / n;
  }
  double xx = 0, xy = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
  }
  const double slope = xy / xx;
  return {{slope, mean_y - slope * mean_x}, xy * xy / (xx * yy)};
}

}  // namespace LinAttn
