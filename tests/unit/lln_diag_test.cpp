// SPDX-License-Identifier: BSD-3-Clause

// LLN+Diag: exact attention inside blocks beside LLN attention, against the dense reference.

#include "attention_case.hpp"
#include "finite_difference.hpp"
#include "refusal.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

constexpr Combine combinations[] = {Combine::average, Combine::scale, Combine::ratio};

/// A random case with factors of both signs, some of them 0.
template <class T>
Case diag_case(const Problem& p, const Options& options, std::int64_t block, Combine combine) {
  Case c = random_case<T, LlnDiag>(p, options, static_cast<std::uint64_t>(block));
  c.diag.block = block;
  c.diag.combine = combine;
  Random random(seed() + 77);
  const auto factors = [&] {
    auto x = random.normals(p.heads * p.dv, 0.5, 0.5);
    for (std::size_t n = 2; n < x.size(); n += 7) x[n] = 0;
    round_to<T>(x);
    return x;
  };
  if (combine != Combine::average) c.diag.diag_r = factors();
  if (combine == Combine::scale) c.diag.diag_p = factors();
  return c;
}

template <class C>
class LlnDiagAttention : public BoundedTest {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;

  /// The case cut into tiles of several lengths, against one answer of the reference.
  static void check(const Case& c, Options options) {
    const auto expected = expected_of<T, LlnDiag>(c, options);
    for (const int chunk : {0, 1, 7, 16}) {
      options.chunk = chunk;
      SCOPED_TRACE(describe(c.problem, options) + " block=" + std::to_string(c.diag.block) +
                   " combine=" + std::to_string(static_cast<int>(c.diag.combine)));
      Attention<T, ExecSpace, LlnDiag> attention(c, options);
      attention.forward();
      attention.backward();
      EXPECT_TRUE((agrees<T, LlnDiag>(c, attention.outcome(), expected,
                                      attention.plan(Pass::backward).chunk)));
    }
  }

  template <class Change>
  static void check_shapes(const std::vector<Problem>& shapes, const std::vector<bool>& masks,
                           const Change& change) {
    for (const Problem& p : shapes)
      for (const bool causal : masks)
        for (const Combine combine : combinations)
          for (const std::int64_t block : {0, 1, 16, 50}) {
            const Options options{.causal = causal};
            Case c = diag_case<T>(p, options, block, combine);
            change(c);
            check(c, options);
          }
  }
};

TYPED_TEST_SUITE(LlnDiagAttention, OverScalars, ConfigName);

TYPED_TEST(LlnDiagAttention, AgreesWithTheReference) {
  //                   B  H  Hkv Nq Nk D   Dv
  this->check_shapes({{2, 3, 3, 37, 37, 5, 7}, {1, 4, 2, 70, 70, 16, 9}, {2, 2, 1, 1, 1, 3, 2}},
                     {false, true}, [](Case&) {});
}

TYPED_TEST(LlnDiagAttention, FewerQueriesThanKeys) {
  this->check_shapes({{1, 4, 2, 23, 87, 8, 3}, {2, 1, 1, 1, 50, 7, 2}}, {true}, [](Case&) {});
}

TYPED_TEST(LlnDiagAttention, WholeTiles) {  // rows that take part in products where they lie
  const Problem p{1, 2, 2, 128, 128, 64, 32};
  for (const bool causal : {false, true})
    for (const std::int64_t block : {0, 32, 128, 200}) {
      const Options options{.causal = causal};
      this->check(diag_case<typename TypeParam::T>(p, options, block, Combine::scale), options);
    }
}

// Hidden keys, a block of them included, hold NaN and are never read.
TYPED_TEST(LlnDiagAttention, HiddenKeys) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const Problem& p : {Problem{2, 2, 1, 40, 40, 6, 5}, Problem{1, 2, 2, 64, 64, 16, 16}})
    for (const bool causal : {false, true})
      for (const std::int64_t block : {6, 16, 64})
        for (const int chunk : {0, 4}) {
          const Options options{.causal = causal, .chunk = chunk};
          SCOPED_TRACE(describe(p, options) + " block=" + std::to_string(block));
          Case c = diag_case<T>(p, options, block, Combine::ratio);
          c.key_mask.assign(static_cast<std::size_t>(p.batch * p.nk), 1);
          for (std::int64_t n = 0; n < p.batch * p.nk; ++n)
            if (n % 7 == 3 || (n % p.nk) / 16 == 1 || (n >= p.nk && n % p.nk < 5))
              c.key_mask[static_cast<std::size_t>(n)] = 0;
          const auto expected = expected_of<T, LlnDiag>(c, options);
          for (std::int64_t b = 0; b < p.batch; ++b)
            for (std::int64_t h = 0; h < p.kv_heads; ++h)
              for (std::int64_t j = 0; j < p.nk; ++j) {
                if (c.key_mask[static_cast<std::size_t>(b * p.nk + j)]) continue;
                const std::int64_t row = (b * p.kv_heads + h) * p.nk + j;
                for (std::int64_t d = 0; d < p.d; ++d)
                  c.k[static_cast<std::size_t>(row * p.d + d)] =
                      std::numeric_limits<double>::quiet_NaN();
                for (std::int64_t d = 0; d < p.dv; ++d)
                  c.v[static_cast<std::size_t>(row * p.dv + d)] =
                      std::numeric_limits<double>::quiet_NaN();
              }
          Attention<T, ExecSpace, LlnDiag> attention(c, options);
          attention.forward();
          attention.backward();
          EXPECT_TRUE((agrees<T, LlnDiag>(c, attention.outcome(), expected,
                                          attention.plan(Pass::backward).chunk)));
        }
}

// Blocks begin anew in each packed member; one of them is empty.
TYPED_TEST(LlnDiagAttention, PackedMembers) {
  for (const bool causal : {false, true})
    for (const std::int64_t block : {1, 5, 16, 100}) {
      const Options options{.causal = causal};
      Case c = diag_case<typename TypeParam::T>({1, 4, 2, 75, 75, 6, 5}, options, block,
                                                Combine::scale);
      pack(c, {17, 0, 1, 40, 17}, {17, 0, 1, 40, 17});
      this->check(c, options);
    }
}

// Of fewer queries than keys, causal, in each member.
TYPED_TEST(LlnDiagAttention, PackedMembersWithEarlierKeys) {
  const Options options{.causal = true};
  Case c = diag_case<typename TypeParam::T>({1, 2, 2, 30, 61, 6, 5}, options, 8, Combine::average);
  pack(c, {10, 1, 19}, {23, 8, 30});
  this->check(c, options);
}

TYPED_TEST(LlnDiagAttention, EmptyExtents) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const Problem& p : {Problem{0, 2, 1, 4, 4, 3, 2}, Problem{1, 0, 0, 4, 4, 3, 2},
                           Problem{1, 2, 1, 0, 0, 3, 2}, Problem{1, 2, 1, 0, 9, 3, 2},
                           Problem{1, 2, 1, 4, 4, 0, 2}, Problem{1, 2, 1, 4, 4, 3, 0}}) {
    const Options options{.causal = true};
    SCOPED_TRACE(describe(p, options));
    for (const Combine combine : {Combine::scale, Combine::ratio})
      for (const int chunk : {0, 2})  // blocks of one tile, and of several
        EXPECT_TRUE((engine_agrees<T, ExecSpace, LlnDiag>(
            diag_case<T>(p, options, 3, combine), {.causal = true, .chunk = chunk})));
  }
}

// The linear branch is kept only for the factors: without it the other gradients are the same to
// rounding, and those of tensors do not ask for those of factors.
TYPED_TEST(LlnDiagAttention, NothingNeedsToBeKept) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const int chunk : {0, 5}) {
    const Options options{.causal = true, .chunk = chunk};
    Case c = diag_case<T>({1, 4, 2, 45, 45, 8, 6}, options, 15, Combine::scale);
    const auto with = attend<T, ExecSpace, LlnDiag>(c, options);
    ASSERT_EQ(with.linear.size(), with.o.size());
    Case lln = c;  // the linear branch is LLN attention
    EXPECT_TRUE(same_bits(with.linear, attend<T, ExecSpace, Lln>(lln, options).o));
    c.diag.keeps_linear = false;
    EXPECT_TRUE((engine_agrees<T, ExecSpace, LlnDiag>(c, options)));
    Wanted wanted;
    wanted.q = wanted.k = wanted.factors = false;
    Attention<T, ExecSpace, LlnDiag> attention(c, options);
    attention.forward();
    attention.backward(wanted);
    EXPECT_TRUE(same_bits(attention.d_v.get(), attend<T, ExecSpace, LlnDiag>(c, options).v));
  }
}

// Future tokens, of the same block included, change no bit, whatever they are.
TYPED_TEST(LlnDiagAttention, NoFutureTokenTouchesARow) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t d : {8, 16})
    for (const std::int64_t block : {16, 48, 96})
      for (const int chunk : {0, 16}) {
        const Problem p{1, 2, 1, 96, 96, d, 16};
        const Options options{.causal = true, .chunk = chunk};
        SCOPED_TRACE(describe(p, options) + " block=" + std::to_string(block));
        const Case clean = diag_case<T>(p, options, block, Combine::average);
        const auto expected = attend<T, ExecSpace, LlnDiag>(clean, options);
        for (const std::int64_t seen : {1, 33, 63, 80}) {
          Case c = clean;
          for (std::int64_t j = seen; j < p.nk; ++j) {
            for (std::int64_t e = 0; e < d; ++e)
              c.k[static_cast<std::size_t>(j * d + e)] = std::numeric_limits<double>::quiet_NaN();
            for (std::int64_t e = 0; e < p.dv; ++e)
              c.v[static_cast<std::size_t>(j * p.dv + e)] = std::numeric_limits<double>::infinity();
          }
          const auto found = attend<T, ExecSpace, LlnDiag>(c, options);
          const auto rows = [&](const std::vector<T>& x, std::int64_t width) {
            std::vector<T> result;
            for (std::int64_t h = 0; h < p.heads; ++h)
              result.insert(result.end(), x.begin() + h * p.nq * width,
                            x.begin() + (h * p.nq + seen) * width);
            return result;
          };
          EXPECT_TRUE(same_bits(rows(found.o, p.dv), rows(expected.o, p.dv)));
          EXPECT_TRUE(same_bits(rows(found.q, d), rows(expected.q, d)));
        }
      }
}

// Same numbers in any layout: same bits. Outputs in memory that held anything.
TYPED_TEST(LlnDiagAttention, LayoutsChangeNoBit) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const std::int64_t block : {16, 40}) {
    const Options options{.causal = true, .chunk = 16};
    const Case c = diag_case<T>({2, 2, 1, 48, 48, 16, 32}, options, block, Combine::scale);
    const auto expected = attend<T, ExecSpace, LlnDiag>(c, options);
    for (const Layout layout : {Layout::left, Layout::gaps}) {
      Arrangement at;
      for (Layout Arrangement::*member :
           {&Arrangement::q, &Arrangement::k, &Arrangement::v, &Arrangement::o,
            &Arrangement::denominator, &Arrangement::d_o, &Arrangement::d_q, &Arrangement::d_k,
            &Arrangement::d_v, &Arrangement::parameter, &Arrangement::d_parameter,
            &Arrangement::linear, &Arrangement::factors, &Arrangement::d_factors}) {
        Arrangement alone;
        alone.*member = layout;
        at.*member = layout;
        EXPECT_TRUE(same_bits(attend<T, ExecSpace, LlnDiag>(c, options, alone), expected));
      }
      EXPECT_TRUE(same_bits(attend<T, ExecSpace, LlnDiag>(c, options, at), expected));
    }
  }
}

// Scores far beyond what exp can take, ties of the largest, and rows that see one key.
TYPED_TEST(LlnDiagAttention, LargeScores) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const double size : {30.0, 1e4, 1e-30})
    for (const bool causal : {false, true})
      for (const int chunk : {0, 8}) {
        const Problem p{1, 1, 1, 40, 40, 4, 3};
        const Options options{.causal = causal, .chunk = chunk};
        Case c = diag_case<T>(p, options, 20, Combine::average);
        c.alpha = {1 / size};
        c.beta = {1 / size};
        for (auto* x : {&c.q, &c.k})
          for (double& element : *x) element = std::rint(2 * element) * size;
        round_to<T>(c.q);
        round_to<T>(c.k);
        SCOPED_TRACE(describe(p, options) + " size=" + std::to_string(size));
        const auto found = attend<T, ExecSpace, LlnDiag>(c, options);
        for (const T o : found.o) ASSERT_TRUE(std::isfinite(o));
        EXPECT_TRUE((engine_agrees<T, ExecSpace, LlnDiag>(c, options)));
      }
}

template <class C>
class LlnDiagOnce : public ::testing::Test {};
TYPED_TEST_SUITE(LlnDiagOnce, OverSpaces, ConfigName);

TYPED_TEST(LlnDiagOnce, FiniteDifferences) {
  using ExecSpace = typename TypeParam::ExecSpace;
  for (const bool causal : {false, true})
    for (const Combine combine : combinations)
      for (const int chunk : {0, 3}) {
        const Options options{.causal = causal, .chunk = chunk};
        const Case c = diag_case<double>({2, 2, 1, 11, 11, 3, 2}, options, 4, combine);
        const auto outcome = attend<double, ExecSpace, LlnDiag>(c, options);
        const auto loss = [&](const Case& moved) {
          const auto o = attend_forward<double, ExecSpace, LlnDiag>(moved, options);
          long double sum = 0;
          for (std::size_t n = 0; n < o.size(); ++n) sum += static_cast<long double>(o[n]) * c.d_o[n];
          return sum;
        };
        const auto compare = [&](const char* name, const auto& part, const std::vector<double>& gradient) {
          double largest = 0;
          for (const double x : gradient) largest = std::max(largest, std::abs(x));
          for (std::size_t n = 0; n < gradient.size(); ++n) {
            const double h = 1.0 / 1024;
            const auto at = [&](double shift) {
              Case moved = c;
              part(moved)[n] += shift;
              return loss(moved);
            };
            // eighth order
            const long double difference = (4 * (at(h) - at(-h)) / 5 - (at(2 * h) - at(-2 * h)) / 5 +
                                            4 * (at(3 * h) - at(-3 * h)) / 105 -
                                            (at(4 * h) - at(-4 * h)) / 280) / h;
            EXPECT_NEAR(gradient[n], static_cast<double>(difference), 1e-8 * largest) << name << " " << n;
          }
        };
        compare("q", [](Case& x) -> auto& { return x.q; }, outcome.q);
        compare("k", [](Case& x) -> auto& { return x.k; }, outcome.k);
        compare("v", [](Case& x) -> auto& { return x.v; }, outcome.v);
        compare("alpha", [](Case& x) -> auto& { return x.alpha; }, outcome.alpha);
        compare("beta", [](Case& x) -> auto& { return x.beta; }, outcome.beta);
        if (combine != Combine::average)
          compare("diag_r", [](Case& x) -> auto& { return x.diag.diag_r; }, outcome.diag_r);
        if (combine == Combine::scale)
          compare("diag_p", [](Case& x) -> auto& { return x.diag.diag_p; }, outcome.diag_p);
      }
}

// A realistic size: float against double of the same engine on the same numbers.
TYPED_TEST(LlnDiagOnce, FloatAgreesWithDoubleAt4096) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const auto error = [](const auto& a, const auto& b) {
    double worst = 0, largest = 0;
    for (std::size_t n = 0; n < b.size(); ++n) {
      const double off = std::abs(static_cast<double>(a[n]) - static_cast<double>(b[n]));
      worst = off <= worst ? worst : off;
      largest = std::max(largest, std::abs(static_cast<double>(b[n])));
    }
    return worst / largest;
  };
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    Case c = diag_case<float>({1, 1, 1, 4096, 4096, 64, 64}, options, 0, Combine::average);
    c.alpha = {2.135};
    c.beta = {2.135};
    const auto narrow = attend<float, ExecSpace, LlnDiag>(c, options);
    const auto wide = attend<double, ExecSpace, LlnDiag>(c, options);
    EXPECT_LE(error(narrow.o, wide.o), 1e-6);
    EXPECT_LE(error(narrow.q, wide.q), 3e-6);
    EXPECT_LE(error(narrow.k, wide.k), 3e-6);
    EXPECT_LE(error(narrow.v, wide.v), 3e-6);
    std::cout << "[  float/double  ]  o " << error(narrow.o, wide.o) << "  dq "
              << error(narrow.q, wide.q) << "  dk " << error(narrow.k, wide.k) << "  dv "
              << error(narrow.v, wide.v) << std::endl;
  }
}

#if !defined(LINATTN_TEST_FEW)

// 16-bit tensors: the float engine on the same numbers, o_lln and each gradient of a branch rounded
// to storage once more than the result.
template <class T>
void check_half(const Problem& p, bool causal, std::int64_t block) {
  using Exec = Kokkos::DefaultHostExecutionSpace;
  using Narrow = Kokkos::View<T****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  using Wide = Kokkos::View<float****, Kokkos::LayoutRight, Kokkos::HostSpace>;
  const Exec exec;
  Random random(seed());
  const auto make = [&](std::int64_t h, std::int64_t n, std::int64_t d) {
    std::pair pair{Narrow("test::narrow", p.batch, h, n, d), Wide("test::wide", p.batch, h, n, d)};
    for (std::size_t i = 0; i < pair.second.size(); ++i) {
      pair.first.data()[i] = T(static_cast<float>(random.normal()));
      pair.second.data()[i] = static_cast<float>(pair.first.data()[i]);
    }
    return pair;
  };
  const auto q = make(p.heads, p.nq, p.d), k = make(p.kv_heads, p.nk, p.d), v = make(p.kv_heads, p.nk, p.dv),
             d_o = make(p.heads, p.nq, p.dv), o = make(p.heads, p.nq, p.dv), d_q = make(p.heads, p.nq, p.d),
             d_k = make(p.kv_heads, p.nk, p.d), d_v = make(p.kv_heads, p.nk, p.dv);
  const Kokkos::View<float***, Kokkos::HostSpace> s16("test::s", p.batch, p.heads, p.nq), s32("test::s", p.batch, p.heads, p.nq);
  const LlnDiag variant{.alpha = 0.8, .beta = 0.7, .block = block};
  const Options options{.causal = causal};
  forward<T>(exec, variant, {.q = q.first, .k = k.first, .v = v.first}, {.o = o.first, .denominator = s16}, options);
  forward<float>(exec, variant, {.q = q.second, .k = k.second, .v = v.second}, {.o = o.second, .denominator = s32}, options);
  // the backward passes start from the same rounded o
  for (std::size_t i = 0; i < o.second.size(); ++i) {
    const float narrow = static_cast<float>(o.first.data()[i]), wide = o.second.data()[i];
    const float unit = std::is_same_v<T, float16> ? 0x1p-11f : 0x1p-8f;
    // |o_lln| <= max |v| <= 6: half of it is rounded, then the sum
    EXPECT_LE(std::abs(narrow - wide), unit * (3 + std::abs(wide)) + 1e-6f) << i;
    o.second.data()[i] = narrow;
  }
  backward<T>(exec, variant, {.q = q.first, .k = k.first, .v = v.first}, {.o = o.first, .denominator = s16}, d_o.first,
              {.q = d_q.first, .k = d_k.first, .v = d_v.first}, options);
  backward<float>(exec, variant, {.q = q.second, .k = k.second, .v = v.second}, {.o = o.second, .denominator = s16},
                  d_o.second, {.q = d_q.second, .k = d_k.second, .v = d_v.second}, options);
  for (const auto& [name, pair] : {std::pair{"q", d_q}, {"k", d_k}, {"v", d_v}}) {
    float largest = 0;
    for (std::size_t i = 0; i < pair.second.size(); ++i) largest = std::max(largest, std::abs(pair.second.data()[i]));
    const float unit = std::is_same_v<T, float16> ? 0x1p-11f : 0x1p-8f;
    for (std::size_t i = 0; i < pair.second.size(); ++i)
      ASSERT_LE(std::abs(static_cast<float>(pair.first.data()[i]) - pair.second.data()[i]), 2 * unit * largest)
          << name << " " << i;
  }
}

TEST(LlnDiagHalf, IsTheFloatEngineRounded) {
  for (const bool causal : {false, true})
    for (const std::int64_t block : {16, 40, 200}) {
      check_half<float16>({1, 2, 1, 96, 96, 16, 24}, causal, block);
      check_half<bfloat16>({1, 2, 1, 96, 96, 16, 24}, causal, block);
    }
}

// Serial and OpenMP, one thread and many: the same bits (thread counts: thread_digest.cpp).
TEST(LlnDiagOnHost, SpacesAgree) {
#if defined(KOKKOS_ENABLE_SERIAL) && defined(KOKKOS_ENABLE_OPENMP)
  for (const std::int64_t block : {16, 100}) {
    const Options options{.causal = true};
    const Case c = diag_case<float>({2, 4, 2, 150, 150, 16, 16}, options, block, Combine::ratio);
    EXPECT_TRUE(same_bits(attend<float, Kokkos::OpenMP, LlnDiag>(c, options),
                          attend<float, Kokkos::Serial, LlnDiag>(c, options)));
  }
#endif
}

#endif

TYPED_TEST(LlnDiagOnce, RefusesWhatItCannotDo) {
  using Exec = typename TypeParam::ExecSpace;
  const Exec exec;
  const auto attend_with = [&](const LlnDiag& variant, const Problem& p, const Options& options) {
    workspace_size<float>(exec, variant, p, Pass::backward, options);
  };
  const Problem square{1, 2, 2, 8, 8, 4, 4};
  expect_refusal([&] { attend_with({.block = -2}, square, {}); }, {"block", "-2"});
  expect_refusal([&] { attend_with({}, {1, 1, 1, 5, 8, 4, 4}, {}); }, {"Nq = Nk", "5", "8"});
  expect_refusal([&] { attend_with({}, square, {.normalise = false}); }, {"lln-diag", "normalis"});
  expect_refusal([&] { attend_with({}, square, {.dropout = {.p = 0.1}}); }, {"lln-diag", "dropout"});
  expect_refusal([&] { attend_with({}, square, {.center_v = true}); }, {"lln-diag", "center_v"});
  const Kokkos::View<double**, Kokkos::HostSpace> wrong("test::r", 2, 3);
  expect_refusal([&] { attend_with({.combine = Combine::ratio, .diag_r = wrong}, square, {}); },
                 {"diag_r", "(2, 4)", "(2, 3)"});
  expect_refusal([&] { attend_with({.combine = Combine::scale, .diag_p = wrong}, square, {}); },
                 {"diag_p", "(2, 4)", "(2, 3)"});
  expect_refusal([&] { attend_with({.combine = Combine::scale, .diag_p = NAN}, square, {}); }, {"diag_p", "finite"});

  const Options options{.causal = true};
  Case c = diag_case<float>({1, 2, 1, 8, 8, 4, 4}, options, 4, Combine::ratio);
  Attention<float, Exec, LlnDiag> attention(c, options);
  attention.forward();
  auto saved = attention.saved();
  auto gradients = attention.gradients({});
  const auto back = [&](const LlnDiag& variant) {
    backward<float>(exec, variant, attention.inputs(), saved, attention.cotangents(), gradients, options);
  };
  saved.linear = {};
  expect_refusal([&] { back(attention.variant()); }, {"diag_r", "Saved::linear"});
  saved = attention.saved();
  gradients.diag_p = attention.d_diag_r.ref();
  expect_refusal([&] { back(attention.variant()); }, {"diag_p", "lln-diag"});
  gradients = attention.gradients({});
  gradients.diag_r = wrong;
  expect_refusal([&] { back(attention.variant()); }, {"diag_r", "(2, 4)", "(2, 3)"});
  c.wants_last = true;
  Attention<float, Exec, LlnDiag> with_state(c, options);
  expect_refusal([&] { with_state.forward(); }, {"states of lln-diag", "final state"});
  expect_refusal([&] { workspace_size<float>(exec, LlnDiag{}, {1, 1, 1, 1, 1, 4, 4}, Pass::step, {}); },
                 {"step of lln-diag"});
  pack(c, {5, 3}, {3, 5});
  c.wants_last = false;
  Attention<float, Exec, LlnDiag> packed(c, Options{});
  expect_refusal([&] { packed.forward(); }, {"Nq = Nk", "member 0"});

  const Case lln = random_case<float, Lln>({1, 2, 1, 8, 8, 4, 4}, options);
  Attention<float, Exec, Lln> plain(lln, options);
  auto kept = plain.saved();
  kept.linear = plain.d_o.ref();
  expect_refusal([&] { forward<float>(exec, plain.variant(), plain.inputs(), kept, options); }, {"Saved::linear"});
}

}  // namespace
