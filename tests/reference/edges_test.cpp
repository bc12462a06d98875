// SPDX-License-Identifier: BSD-3-Clause
// Empty extents, rows without weight, and arguments that do not fit together.

#include <gtest/gtest.h>

#include <functional>

#include "cases.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using reference::Kernel;
using Real = double;

constexpr Problem base{.batch = 2, .heads = 4, .kv_heads = 2, .nq = 3, .nk = 5, .d = 6, .dv = 7};

void expect_zero(const Case<Real>& c) {
  SCOPED_TRACE(describe(c.problem, c.settings));
  const auto o = c.forward();
  EXPECT_EQ(o.size(), c.d_o.size());
  EXPECT_TRUE(all_zero(o));
  const auto gradient = c.backward();
  EXPECT_EQ(gradient.q.size(), c.tensors.q.size());
  EXPECT_EQ(gradient.k.size(), c.tensors.k.size());
  EXPECT_EQ(gradient.v.size(), c.tensors.v.size());
  EXPECT_EQ(gradient.alpha.size(), c.settings.alpha.size());
  EXPECT_EQ(gradient.beta.size(), c.settings.beta.size());
  for (const auto* x : {&gradient.q, &gradient.k, &gradient.v, &gradient.alpha, &gradient.beta,
                        &gradient.constant, &gradient.score_scale})
    EXPECT_TRUE(all_zero(*x));
  const auto magnitude = c.magnitudes();
  for (const auto* x : {&magnitude.o, &magnitude.q, &magnitude.k, &magnitude.v})
    EXPECT_TRUE(all_zero(*x));
}

TEST(ReferenceEdges, EveryExtentMayBeZero) {
  for (const auto kernel : all_kernels)
    for (const bool normalise : {false, true})
      for (const auto member : {&Problem::batch, &Problem::heads, &Problem::nq, &Problem::nk,
                                &Problem::d, &Problem::dv}) {
        Problem problem = base;
        problem.*member = 0;
        if (member == &Problem::heads) problem.kv_heads = 0;
        // Weights without features are b, or 1.
        if (member == &Problem::d && (kernel == Kernel::affine || kernel == Kernel::performer ||
                                      reference::detail::is_of_scores(kernel)))
          continue;
        expect_zero(random_case<Real>(problem, {.kernel = kernel, .normalise = normalise}, 1));
        if (member != &Problem::nk)
          expect_zero(random_case<Real>(
              problem, {.kernel = kernel, .causal = true, .normalise = normalise}, 1));
      }
}

TEST(ReferenceEdges, NoVisibleKeyGivesZero) {
  for (const auto kernel : all_kernels)
    for (const bool normalise : {false, true})
      for (const bool causal : {false, true}) {
        reference::Settings settings{.kernel = kernel, .causal = causal, .normalise = normalise};
        settings.key_mask.assign(10, 0);
        expect_zero(random_case<Real>(base, settings, 2));

        // One entry hidden entirely, in the other only key 4: of its queries only the last sees it.
        settings.key_mask[9] = 1;
        auto c = random_case<Real>(base, settings, 3);
        keep_alive(c);
        const auto o = c.forward();
        EXPECT_TRUE(all_zero(row_range(o, 0, 12, 7)));
        EXPECT_EQ(all_zero(row_range(o, 12, 2, 7)), causal);
        EXPECT_FALSE(all_zero(row_range(o, 14, 1, 7)));
        const auto gradient = c.backward();
        EXPECT_TRUE(all_zero(row_range(gradient.q, 0, 12, 6)));
        // Key 4 of the second entry stands in row 14 for the first head, in row 19 for the other.
        for (std::int64_t row = 0; row < 20; ++row) {
          EXPECT_EQ(all_zero(row_range(gradient.v, row, 1, 7)), row != 14 && row != 19) << row;
        }
      }
}

/// The first query has weight on no key; its cotangent must not reach anything.
void expect_first_row_vanishes(const Case<Real>& c) {
  SCOPED_TRACE(describe(c.problem, c.settings));
  const auto o = c.forward();
  EXPECT_TRUE(all_zero(row_range(o, 0, 1, c.problem.dv)));
  EXPECT_FALSE(all_zero(row_range(o, 1, 1, c.problem.dv)));
  const auto gradient = c.backward();
  EXPECT_TRUE(all_zero(row_range(gradient.q, 0, 1, c.problem.d)));
  EXPECT_FALSE(all_zero(gradient.k));
  EXPECT_FALSE(all_zero(gradient.v));
  auto without = c;
  without.problem.nq -= 1;
  without.tensors.q = row_range(c.tensors.q, 1, without.problem.nq, c.problem.d);
  without.d_o = row_range(c.d_o, 1, without.problem.nq, c.problem.dv);
  const auto expected = without.backward();
  EXPECT_TRUE(same(gradient.k, expected.k));
  EXPECT_TRUE(same(gradient.v, expected.v));
}

TEST(ReferenceEdges, ZeroDenominatorGivesZero) {
  const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 3, .nk = 4, .d = 2, .dv = 5};
  auto c = random_case<Real>(problem, {.kernel = Kernel::relu}, 4);
  c.tensors.q = {-1, -0.5, 1, -2, 0.5, 3};
  c.tensors.k = {1, 2, -1, 0.5, 2, 0.25, 3, 1};
  expect_first_row_vanishes(c);
  c.settings.causal = true;
  expect_first_row_vanishes(c);
  // Its features never meet those of a key.
  c.settings.causal = false;
  c.tensors.q = {1, -1, 1, 1, 2, 1};
  c.tensors.k = {-1, 2, 0, 0.5, -2, 0.25, -3, 1};
  expect_first_row_vanishes(c);

  // Signed weights that cancel: (1, -1) . sum of keys = 0.
  c.settings.kernel = Kernel::identity;
  c.tensors.q = {1, -1, 1, 1, 2, 1};
  c.tensors.k = {1, 2, 3, 1, 2, 1, 1, 3};
  expect_first_row_vanishes(c);
}

TEST(ReferenceEdges, ZeroDenominatorIsNoMatterWithoutNormaliser) {
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 2, .dv = 1},
               {.normalise = false},
               {{1, -1}, {2, 1, 1, 2}, {3, 5}},
               {1}};
  EXPECT_TRUE(same(c.forward(), {-2}));
  EXPECT_TRUE(same(c.backward().q, {11, 13}));
}

TEST(ReferenceEdges, VisibleNaNIsNotSwallowed) {
  for (const auto kernel : all_kernels) {
    auto c = random_case<Real>(
        {.batch = 1, .heads = 1, .kv_heads = 1, .nq = 2, .nk = 3, .d = 4, .dv = 1},
        {.kernel = kernel}, 5);
    c.tensors.k[5] = std::numeric_limits<Real>::quiet_NaN();
    SCOPED_TRACE(describe(c.problem, c.settings));
    for (const Real x : c.forward()) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(ReferenceEdges, OverflowIsInfiniteAndNotNaN) {
  Case<Real> c{{.batch = 1, .heads = 1, .kv_heads = 1, .nq = 1, .nk = 2, .d = 1, .dv = 1},
               {.normalise = false},
               {{1e200}, {1e200, 1}, {1, 1}},
               {1}};
  EXPECT_EQ(c.forward()[0], std::numeric_limits<Real>::infinity());
}

TEST(ReferenceEdges, KernelNames) {
  for (const auto kernel : all_kernels)
    EXPECT_EQ(reference::kernel_from_name(reference::kernel_name(kernel)), kernel);
  EXPECT_EQ(reference::kernel_from_name("elu"), Kernel::elu);
  EXPECT_EQ(reference::kernel_from_name("lln"), Kernel::lln);
  EXPECT_EQ(reference::kernel_from_name("affine"), Kernel::affine);
  EXPECT_EQ(reference::kernel_from_name("softmax"), Kernel::softmax);
  EXPECT_EQ(reference::kernel_from_name("taylor"), Kernel::taylor);
  EXPECT_EQ(reference::kernel_from_name("cosine"), Kernel::cosine);
  EXPECT_EQ(reference::kernel_from_name("performer"), Kernel::performer);
  for (const char* name : {"", "Elu", "elu ", "soft-max"}) {
    try {
      (void)reference::kernel_from_name(name);
      FAIL() << "accepted '" << name << "'";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("'" + std::string(name) + "'"), std::string::npos) << text;
      EXPECT_NE(text.find("quadratic"), std::string::npos) << text;
    }
  }
}

/// Every entry point refuses the case, and the message holds all of the words.
void expect_refused(const Case<Real>& c, std::initializer_list<const char*> words) {
  for (const std::function<void()>& call : {std::function<void()>([&] { (void)c.forward(); }),
                                            std::function<void()>([&] { (void)c.backward(); }),
                                            std::function<void()>([&] { (void)c.magnitudes(); })}) {
    try {
      call();
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      for (const char* word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
            << "'" << word << "' is missing in: " << error.what();
    }
  }
}

TEST(ReferenceEdges, ArgumentsThatDoNotFit) {
  const auto plain = random_case<Real>(base, {}, 6);
  auto c = plain;
  c.tensors.q.pop_back();
  expect_refused(c, {"q", "143", "144"});
  c = plain;
  c.tensors.k.push_back(0);
  expect_refused(c, {"k", "121", "120"});
  c = plain;
  c.tensors.v.clear();
  expect_refused(c, {"v", " 0 ", "140"});
  c = plain;
  c.problem.kv_heads = 3;
  expect_refused(c, {"3", "4"});
  c = plain;
  c.settings.alpha = {1, 1, 1, 1};
  expect_refused(c, {"alpha", "identity"});
  c = plain;
  c.settings.key_mask.assign(9, 1);
  expect_refused(c, {"key_mask", "9", "10"});

  c = random_case<Real>(base, {.kernel = Kernel::lln}, 7);
  c.settings.alpha.pop_back();
  expect_refused(c, {"alpha", "3", "4"});
  c.settings.alpha.push_back(1);
  c.settings.beta.push_back(1);
  expect_refused(c, {"beta", "3", "2"});

  Problem causal = base;
  causal.nq = 6;
  expect_refused(random_case<Real>(causal, {.causal = true}, 8), {"6", "5"});

  c = plain;
  c.d_o.pop_back();
  EXPECT_NO_THROW((void)c.forward());
  EXPECT_THROW((void)c.backward(), InvalidArgument);
  EXPECT_THROW((void)c.magnitudes(), InvalidArgument);
}

TEST(ReferenceEdges, PackedBordersThatDoNotFit) {
  const Problem problem{.batch = 1, .heads = 2, .kv_heads = 1, .nq = 6, .nk = 9, .d = 3, .dv = 4};
  auto good = random_case<Real>(problem, {}, 9);
  good.settings.cu_seqlens_q = {0, 2, 6};
  good.settings.cu_seqlens_k = {0, 4, 9};
  EXPECT_NO_THROW((void)good.forward());

  auto c = good;
  c.settings.cu_seqlens_k.clear();
  expect_refused(c, {"3", "0"});
  c = good;
  c.settings.cu_seqlens_k = {0, 9};
  expect_refused(c, {"cu_seqlens_q", "3", "2"});
  c = good;
  c.settings.cu_seqlens_q = {1, 2, 6};
  expect_refused(c, {"cu_seqlens_q", "from 1"});
  c = good;
  c.settings.cu_seqlens_k = {0, 4, 10};
  expect_refused(c, {"cu_seqlens_k", "10", "9"});
  c = good;
  c.settings.cu_seqlens_q = {0, 7, 6};
  expect_refused(c, {"cu_seqlens_q", "7", "6"});
  c = good;
  c.settings.key_mask.assign(9, 1);
  expect_refused(c, {"key_mask", "cu_seqlens"});
  c = good;
  c.settings.causal = true;
  c.settings.cu_seqlens_q = {0, 1, 6};
  c.settings.cu_seqlens_k = {0, 5, 9};
  expect_refused(c, {"member 1", "5", "4"});

  c = random_case<Real>({.batch = 2, .heads = 2, .kv_heads = 1, .nq = 6, .nk = 9, .d = 3, .dv = 4},
                        {}, 9);
  c.settings.cu_seqlens_q = {0, 2, 6};
  c.settings.cu_seqlens_k = {0, 4, 9};
  expect_refused(c, {"B = 1", "2"});
}

}  // namespace
