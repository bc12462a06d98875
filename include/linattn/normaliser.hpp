// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

/// \file normaliser.hpp
/// Row sums that nearly vanish, where weights can have both signs (affine, identity).
///
/// Output and gradients grow like 1/s and 1/s^2, so a row whose sum s is small beside m, the number of keys that it
/// sees, carries no information. Three ways to deal with it:

namespace LinAttn {

enum class SmallNormaliser {
  /// Rows are what IEEE arithmetic gives. Kernels record the smallest |s|/m of each head in Saved::smallest, where
  /// that is given, and check() refuses what lies below the limit. Nothing waits for the kernels before that.
  check,
  /// s is replaced by sign(s) max(|s|, least m), sign(0) = +1, and no gradient flows through a replaced sum.
  clamp,
  /// As check, with nothing recorded.
  ignore
};

/// Smallest |s| / m among the rows of one head that see a key, and the row (of q) where it stands, the first of
/// equals; a sum that is not a number counts as smallest. Infinite, and row -1, if no row sees a key.
struct NormaliserRecord {
  double ratio;
  std::int64_t row;
};

}  // namespace LinAttn
