// SPDX-License-Identifier: BSD-3-Clause
// The dense reference against the files of data/fixtures, whose numbers come from another program.

#include <gtest/gtest.h>

#include <filesystem>
#include <linattn/io/tensor_file.hpp>
#include <set>
#include <string>

#include "../reference/cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using Real = long double;

std::vector<Real> wide(const io::Array& array) { return converted<Real>(array.as<double>()); }

Case<Real> case_of(const io::TensorFile& file) {
  reference::Settings settings{.kernel = reference::kernel_from_name(file.variant()),
                               .causal = file.causal(),
                               .normalise = file.config().flag("normalise")};
  const double scale = file.config().real("scale");
  if (reference::detail::is_of_scores(settings.kernel))
    settings.score_scale = scale;
  else
    settings.scale = scale;
  if (const auto* x = file.find("/inputs/projection")) settings.projection = x->as<double>();
  if (const auto* x = file.find("/inputs/key_mask")) settings.key_mask = x->as<std::uint8_t>();
  if (const auto* x = file.find("/inputs/cu_seqlens_q")) {
    settings.cu_seqlens_q = x->as<std::int64_t>();
    settings.cu_seqlens_k = file.at("/inputs/cu_seqlens_k").as<std::int64_t>();
  }
  return {file.problem(),
          settings,
          {wide(file.q()), wide(file.k()), wide(file.v())},
          wide(file.at("/cotangent/o"))};
}

TEST(Fixtures, OfComparedKernelsAgreeWithTheReference) {
  const std::set<std::string> variants{"softmax", "taylor", "cosine", "performer"};
  std::map<std::string, int> met;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(LINATTN_DATA_DIR "/fixtures")) {
    const std::string name = entry.path().stem().string();
    if (!variants.contains(name.substr(0, name.find('_')))) continue;
    SCOPED_TRACE(name);
    const auto file = io::TensorFile::read(entry.path());
    ++met[file.variant()];
    const auto c = case_of(file);
    const auto size = c.magnitudes();
    const auto gradient = c.backward();
    // The expected value and the scale of scores are rounded to double.
    const auto agrees = [&](const char* path, const std::vector<Real>& found,
                            const std::vector<Real>& magnitude) {
      return within(found, wide(file.at(path)), magnitude, Real(roundoff<double>), 2);
    };
    EXPECT_TRUE(agrees("/expected/o", c.forward(), size.o));
    EXPECT_TRUE(agrees("/expected_grad/q", gradient.q, size.q));
    EXPECT_TRUE(agrees("/expected_grad/k", gradient.k, size.k));
    EXPECT_TRUE(agrees("/expected_grad/v", gradient.v, size.v));
  }
  EXPECT_GE(met["softmax"], 16);
  EXPECT_GE(met["taylor"], 2);
  EXPECT_GE(met["cosine"], 2);
  EXPECT_GE(met["performer"], 4);
}

}  // namespace
