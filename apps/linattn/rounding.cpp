// SPDX-License-Identifier: BSD-3-Clause
#include "rounding.hpp"

#include <algorithm>
#include <cmath>
#include <linattn/half.hpp>

#include "comparison.hpp"
#include "text.hpp"

namespace LinAttn::app {
namespace {

template <class T>
std::vector<float> rounded_as(const io::Array& array) {
  const std::vector<T> narrow = array.as<T>();
  std::vector<float> values(narrow.size());
  std::transform(narrow.begin(), narrow.end(), values.begin(),
                 [](T x) { return static_cast<float>(x); });
  return values;
}

std::vector<float> rounded(const io::Array& array, Scalar scalar) {
  return scalar == Scalar::f16 ? rounded_as<float16>(array) : rounded_as<bfloat16>(array);
}

double largest(Scalar scalar) { return scalar == Scalar::f16 ? 65504 : 0x1.fep127; }

/// As require_in_range(), given what the rounding made of the numbers.
void require_finite(const std::string& dataset, const io::Array& array,
                    const std::vector<float>& narrow, Scalar scalar, const io::Array* key_mask) {
  std::vector<double> wide;  // only needed to tell what overflowed from what was infinite
  for (std::size_t n = 0; n < narrow.size(); ++n) {
    if (!std::isinf(narrow[n])) continue;
    const std::vector<std::int64_t> index = index_of(static_cast<std::int64_t>(n), array.extents());
    if (key_mask != nullptr && key_mask->values<std::uint8_t>()[static_cast<std::size_t>(
                                   index[0] * key_mask->extent(1) + index[2])] == 0)
      continue;
    if (wide.empty()) wide = array.as<double>();
    if (std::isinf(wide[n])) continue;
    throw InvalidArgument(detail::message(
        dataset, ": expected numbers of at most ", exact(largest(scalar)), " in size for ",
        to_string(scalar), ", found ", exact(wide[n]), " at ", index_text(index)));
  }
}

}  // namespace

bool is_stored(const std::string& quantity) {
  return quantity == "o" || quantity == "q" || quantity == "k" || quantity == "v";
}

double least_step(Scalar scalar, const std::string& quantity) {
  if (!is_stored(quantity)) return 0;
  switch (scalar) {
    case Scalar::f16:
      return 0x1p-24;
    case Scalar::bf16:
      return 0x1p-133;
    default:
      return 0;
  }
}

void require_in_range(const std::string& dataset, const io::Array& array, Scalar scalar,
                      const io::Array* key_mask) {
  if (is_16_bit(scalar)) require_finite(dataset, array, rounded(array, scalar), scalar, key_mask);
}

RoundedJob::RoundedJob(const Job& job, Scalar scalar) : m_job(job) {
  if (!is_16_bit(scalar)) return;
  m_arrays.reserve(4);  // the job points into it
  const auto round = [&](const char* dataset, const io::Array*& array, const io::Array* key_mask) {
    if (array == nullptr) return;
    const std::vector<float> values = rounded(*array, scalar);
    require_finite(dataset, *array, values, scalar, key_mask);
    m_arrays.emplace_back(values, array->extents());
    array = &m_arrays.back();
  };
  round("/inputs/q", m_job.q, nullptr);
  round("/inputs/k", m_job.k, m_job.key_mask);
  round("/inputs/v", m_job.v, m_job.key_mask);
  round("/cotangent/o", m_job.d_o, nullptr);
}

}  // namespace LinAttn::app
