// SPDX-License-Identifier: BSD-3-Clause

// 16-bit storage: the engine on float16 and bfloat16 tensors is the engine on the same numbers in
// float, rounded once at the end. So what holds for float holds for them; the rest of this file is
// about ranges.

#include <cmath>
#include <limits>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class Exec>
using Floats = Kokkos::View<float****, Kokkos::LayoutRight, typename Exec::memory_space>;

template <class C>
class HalfEngine : public ::testing::Test {
 public:
  using T = typename C::T;
  using Exec = typename C::ExecSpace;
  using Memory = typename Exec::memory_space;
  using Narrow = Kokkos::View<T****, Kokkos::LayoutStride, Memory>;
  using Sums = Kokkos::View<float***, Kokkos::LayoutRight, Memory>;

  /// Memory of elements `step` apart in which every second row is left out if step > 1.
  static Narrow narrow(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d, int step) {
    const Kokkos::View<T*, Memory> memory(
        "test::narrow", static_cast<std::size_t>(b * h * n * d * step * step + 1));
    const auto row = static_cast<std::size_t>(d * step * step);
    const Kokkos::LayoutStride layout(b, h * n * row, h, n * row, n, row, d, step);
    s_memory.push_back(memory);
    return Narrow(memory.data(), layout);
  }
  static Floats<Exec> wide(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
    return Floats<Exec>("test::wide", b, h, n, d);
  }

  /// Random numbers that both types hold.
  static void fill(const Narrow& x, const Floats<Exec>& same, Random& random, double scale) {
    each(x, [&](auto... i) {
      x(i...) = T(static_cast<float>(scale * random.normal()));
      same(i...) = static_cast<float>(x(i...));
    });
  }
  template <class Body>
  static void each(const Narrow& x, const Body& body) {
    for (std::size_t b = 0; b < x.extent(0); ++b)
      for (std::size_t h = 0; h < x.extent(1); ++h)
        for (std::size_t n = 0; n < x.extent(2); ++n)
          for (std::size_t d = 0; d < x.extent(3); ++d) body(b, h, n, d);
  }
  static void expect_rounded(const char* name, const Narrow& found, const Floats<Exec>& expected) {
    each(found, [&](auto... i) {
      ASSERT_EQ(found(i...).bits, T(expected(i...)).bits)
          << name << ": " << static_cast<float>(found(i...)) << " for " << expected(i...);
    });
  }

  static inline std::vector<Kokkos::View<T*, Memory>> s_memory;
  void TearDown() override { s_memory.clear(); }

  template <class V>
  void check(V variant, const Problem& p, const Options& options, int step, bool masked,
             bool with_states) {
    SCOPED_TRACE(std::string(V::name) + " " + describe(p, options) + " step " +
                 std::to_string(step));
    Random random(seed());
    const Exec exec;
    const std::int64_t B = p.batch, H = p.heads, K = p.kv_heads;
    Kokkos::View<double**, Memory> projection;
    if constexpr (ProjectedVariant<V>) {
      projection = orthogonal_features(exec, features_of_row<V>(p.d), p.d, seed());
      variant.projection = projection;
    }
    const auto q = narrow(B, H, p.nq, p.d, step), k = narrow(B, K, p.nk, p.d, step),
               v = narrow(B, K, p.nk, p.dv, step), o = narrow(B, H, p.nq, p.dv, step),
               d_o = narrow(B, H, p.nq, p.dv, step), d_q = narrow(B, H, p.nq, p.d, step),
               d_k = narrow(B, K, p.nk, p.d, step), d_v = narrow(B, K, p.nk, p.dv, step);
    const auto q32 = wide(B, H, p.nq, p.d), k32 = wide(B, K, p.nk, p.d),
               v32 = wide(B, K, p.nk, p.dv), o32 = wide(B, H, p.nq, p.dv),
               d_o32 = wide(B, H, p.nq, p.dv), d_q32 = wide(B, H, p.nq, p.d),
               d_k32 = wide(B, K, p.nk, p.d), d_v32 = wide(B, K, p.nk, p.dv);
    fill(q, q32, random, 0.7);
    fill(k, k32, random, 0.7);
    fill(v, v32, random, 1);
    fill(d_o, d_o32, random, 1);
    const Kokkos::View<std::uint8_t**, Memory> mask("test::mask", B, p.nk);
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t n = 0; n < p.nk; ++n) mask(b, n) = n % 5 != 2;
    const Sums s16("test::s16", B, H, p.nq), s32("test::s32", B, H, p.nq);
    const auto R = features_of_row<V>(p.d);
    const Floats<Exec> S0("S0", B, K, R, p.dv), ST("ST", B, K, R, p.dv),
        ST32("ST32", B, K, R, p.dv), dST("dST", B, K, R, p.dv), dS0("dS0", B, K, R, p.dv),
        dS032("dS032", B, K, R, p.dv);
    const Sums z0("z0", B, K, R), zT("zT", B, K, R), zT32("zT32", B, K, R), dzT("dzT", B, K, R),
        dz0("dz0", B, K, R), dz032("dz032", B, K, R);
    const Kokkos::View<int***, Memory> shift("shift", B, K, R), shift_T("shift_T", B, K, R);
    const Sums t0("t0", B, K, p.dv), tT("tT", B, K, p.dv), dtT("dtT", B, K, p.dv),
        dt0("dt0", B, K, p.dv);
    const Kokkos::View<std::int64_t*, Memory> m0("m0", B), mT("mT", B);
    Kokkos::deep_copy(m0, 50);
    for (std::size_t i = 0; i < S0.span(); ++i) {
      S0.data()[i] = static_cast<float>(random.normal());
      dST.data()[i] = static_cast<float>(random.normal());
    }
    for (std::size_t i = 0; i < t0.span(); ++i) {
      t0.data()[i] = static_cast<float>(random.normal());
      dtT.data()[i] = static_cast<float>(random.normal());
    }
    for (std::size_t i = 0; i < z0.span(); ++i) {
      z0.data()[i] = static_cast<float>(random.uniform(1, 2));
      dzT.data()[i] = static_cast<float>(random.normal());
    }
    const auto run = [&]<class U>(std::type_identity<U>, const auto& qs, const auto& ks,
                                  const auto& vs, const auto& os, const auto& gs, const auto& dqs,
                                  const auto& dks, const auto& dvs, const Sums& s, const auto& ST_,
                                  const auto& zT_, const auto& dS0_, const auto& dz0_,
                                  bool forward_too) {
      Inputs<Exec, U> in{.q = qs, .k = ks, .v = vs};
      if (masked) in.key_mask = mask;
      Saved<Exec, U> saved{.o = os, .denominator = s};
      Cotangents<Exec, U> cotangents{.o = gs};
      Gradients<Exec, U> gradients{.q = dqs, .k = dks, .v = dvs};
      if (with_states) {
        in.state = {.S = S0, .z = z0};
        saved.state = {.S = ST_, .z = zT_};
        cotangents.state = {.S = dST, .z = dzT};
        gradients.state = {.S = dS0_, .z = dz0_};
        if (is_scaled<V>) {
          in.state.shift = shift;
          saved.state.shift = shift_T;
          cotangents.state.shift = shift_T;
        }
        if (has_constant<V>) {
          in.state.t = t0;
          in.state.m = m0;
          saved.state.t = tT;
          saved.state.m = mT;
          cotangents.state.t = dtT;
          gradients.state.t = dt0;
        }
      }
      if (forward_too) LinAttn::forward<U>(exec, variant, in, saved, options);
      if (!forward_too)
        LinAttn::backward<U>(exec, variant, in, saved, cotangents, gradients, options);
    };
    const std::type_identity<T> t16;
    const std::type_identity<float> t32;
    for (const bool forward : {true, false}) {
      run(t16, q, k, v, o, d_o, d_q, d_k, d_v, s16, ST, zT, dS0, dz0, forward);
      run(t32, q32, k32, v32, o32, d_o32, d_q32, d_k32, d_v32, s32, ST32, zT32, dS032, dz032,
          forward);
      if (!forward) break;
      expect_rounded("o", o, o32);
      // the backward pass reads the rounded o
      each(o, [&](auto... i) { o32(i...) = static_cast<float>(o(i...)); });
    }
    expect_rounded("dq", d_q, d_q32);
    expect_rounded("dk", d_k, d_k32);
    expect_rounded("dv", d_v, d_v32);
    for (std::size_t i = 0; i < s16.span(); ++i) ASSERT_EQ(s16.data()[i], s32.data()[i]);
    for (std::size_t i = 0; with_states && i < ST.span(); ++i) {
      ASSERT_EQ(ST.data()[i], ST32.data()[i]);
      ASSERT_EQ(dS0.data()[i], dS032.data()[i]);
    }
    for (std::size_t i = 0; with_states && i < zT.span(); ++i) {
      ASSERT_EQ(zT.data()[i], zT32.data()[i]);
      ASSERT_EQ(dz0.data()[i], dz032.data()[i]);
    }
  }

  template <class V>
  void check_all(const V& variant, bool with_states = true) {
    for (const bool causal : {true, false})
      for (const int step : {1, 2}) {
        check(variant, {2, 4, 2, 37, 37, 5, 7}, {.causal = causal}, step, false, false);
        check(variant, {1, 2, 2, 48, 48, 64, 32}, {.causal = causal}, step, false, false);
        check(variant, {1, 2, 1, 30, 40, 16, 24}, {.causal = causal, .segments = 2, .tiles = 2},
              step, true, with_states);
        check(variant, {1, 2, 1, 30, 40, 3, 4},
              {.causal = causal, .normalise = false, .scale = 0.5}, step, true, false);
      }
  }
};

#if defined(KOKKOS_ENABLE_OPENMP)
using HostExec = Kokkos::OpenMP;
#else
using HostExec = Kokkos::Serial;
#endif
struct HalfName {
  template <class C>
  static std::string GetName(int) {
    return std::is_same_v<typename C::T, float16> ? "float16" : "bfloat16";
  }
};
using Halves = ::testing::Types<Config<HostExec, float16>, Config<HostExec, bfloat16>>;
TYPED_TEST_SUITE(HalfEngine, Halves, HalfName);

TYPED_TEST(HalfEngine, IsFloatRoundedOnceIdentity) { this->check_all(Identity{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceElu) { this->check_all(Elu{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceRelu) { this->check_all(Relu{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceQuadratic) { this->check_all(Quadratic{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceLln) { this->check_all(Lln{1.5, 0.8}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceAffine) { this->check_all(Affine{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceTaylor) { this->check_all(Taylor{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceCosine) { this->check_all(Cosine{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOncePerformer) { this->check_all(Performer{}); }
TYPED_TEST(HalfEngine, IsFloatRoundedOnceAffineLargestNorm) {
  this->check_all(Affine{.b = 1.5, .qk_norm = QkNorm::max, .max_norm_sees_future = true}, false);
}

// B01, X3: sums that leave the range of float16, or in which it would stall, are sums in float.
TYPED_TEST(HalfEngine, B01SumsBeyondTheStoredRange) {
  using T = typename TypeParam::T;
  using Exec = typename TypeParam::ExecSpace;
  const Exec exec;
  for (const bool causal : {false, true})
    for (const auto& [n, key] : {std::pair{20000, 4.0f}, {100000, 0.8f}}) {
      const auto q = this->narrow(1, 1, n, 1, 1), k = this->narrow(1, 1, n, 1, 1),
                 v = this->narrow(1, 1, n, 1, 1), o = this->narrow(1, 1, n, 1, 1);
      this->each(q, [&](auto... i) { q(i...) = T(0.0f), k(i...) = T(key), v(i...) = T(1.0f); });
      LinAttn::forward<T>(exec, Elu{}, {.q = q, .k = k, .v = v}, {.o = o}, {.causal = causal});
      for (int i = 0; i < n; ++i) ASSERT_EQ(static_cast<float>(o(0, 0, i, 0)), 1.0f) << i;
    }
}

// A count of 20,000 keys, which float16 reaches in steps of 16 and bfloat16 in steps of 128.
TYPED_TEST(HalfEngine, AffineCountsBeyondTheStoredRange) {
  using T = typename TypeParam::T;
  using Exec = typename TypeParam::ExecSpace;
  const Exec exec;
  const int n = 20000;
  const auto q = this->narrow(1, 1, n, 2, 1), k = this->narrow(1, 1, n, 2, 1),
             v = this->narrow(1, 1, n, 1, 1), o = this->narrow(1, 1, n, 1, 1);
  this->each(q, [&](auto... i) { q(i...) = T(0.0f), k(i...) = T(1.0f); });
  for (int i = 0; i < n; ++i) v(0, 0, i, 0) = T(i % 2 == 0 ? 3.0f : 1.0f);
  const typename TestFixture::Sums s("test::s", 1, 1, n);
  LinAttn::forward<T>(exec, Affine{}, {.q = q, .k = k, .v = v}, {.o = o, .denominator = s},
                      {.causal = true});
  for (int i = 0; i < n; ++i) {
    const auto keys = static_cast<float>(i + 1);
    ASSERT_EQ(s(0, 0, i), keys);
    const float sum = i % 2 == 1 ? 2 * keys : 2 * keys + 1;
    ASSERT_EQ(o(0, 0, i, 0).bits, T(sum / keys).bits) << i;
  }
}

// B03: an exponential beyond the range of float16 (11.09) and of float (88.7).
TYPED_TEST(HalfEngine, B03ExponentialsBeyondTheStoredRange) {
  using T = typename TypeParam::T;
  using Exec = typename TypeParam::ExecSpace;
  const Exec exec;
  for (const float peak : {12.0f, 89.0f, 300.0f}) {
    const auto q = this->narrow(1, 1, 16, 4, 1), k = this->narrow(1, 1, 16, 4, 1),
               v = this->narrow(1, 1, 16, 1, 1), o = this->narrow(1, 1, 16, 1, 1);
    this->each(q, [&](auto... i) { q(i...) = T(0.0f), k(i...) = T(0.0f); });
    k(0, 0, 5, 2) = T(peak);
    for (int n = 0; n < 16; ++n) v(0, 0, n, 0) = T(static_cast<float>(n));
    LinAttn::forward<T>(exec, Lln{1.0, 1.0}, {.q = q, .k = k, .v = v}, {.o = o}, {.causal = true});
    for (int i = 0; i < 16; ++i) {
      double numerator = 0, denominator = 0;
      for (int j = 0; j <= i; ++j) {
        const double w =
            j == 5 ? 3 * std::exp(-double(peak)) + 1 : 4 * std::exp(i >= 5 ? -double(peak) : 0.0);
        numerator += w * j;
        denominator += w;
      }
      EXPECT_EQ(o(0, 0, i, 0).bits, T(numerator / denominator).bits)
          << "row " << i << " peak " << peak;
    }
  }
}

// B06, B11: long, random, gradient of the state included, against its closed form in fp64.
TYPED_TEST(HalfEngine, B11GradientOfTheState) {
  using T = typename TypeParam::T;
  using Exec = typename TypeParam::ExecSpace;
  const Exec exec;
  const std::int64_t n = 4096, d = 64;
  Random random(seed());
  const auto q = this->narrow(1, 1, n, d, 1), k = this->narrow(1, 1, n, d, 1),
             v = this->narrow(1, 1, n, d, 1), o = this->narrow(1, 1, n, d, 1),
             d_o = this->narrow(1, 1, n, d, 1), d_q = this->narrow(1, 1, n, d, 1);
  for (const auto& x : {q, k, v, d_o})
    this->each(x, [&](auto... i) { x(i...) = T(static_cast<float>(random.normal())); });
  const Floats<Exec> S0("S0", 1, 1, d, d), G("G", 1, 1, d, d), dS0("dS0", 1, 1, d, d);
  const Kokkos::View<float***, Kokkos::LayoutRight, typename Exec::memory_space> z0("z0", 1, 1, d),
      dzT("dzT", 1, 1, d), dz0("dz0", 1, 1, d);
  for (std::size_t i = 0; i < G.span(); ++i) G.data()[i] = static_cast<float>(random.normal());
  const Options options{.causal = true, .normalise = false, .scale = 0.125};
  const Inputs<Exec, T> in{.q = q, .k = k, .v = v, .state = {.S = S0, .z = z0}};
  LinAttn::forward<T>(exec, Identity{}, in, {.o = o}, options);
  LinAttn::backward<T>(exec, Identity{}, in, {.o = o},
                       Cotangents<Exec, T>{.o = d_o, .state = {.S = G, .z = dzT}},
                       {.q = d_q, .state = {.S = dS0, .z = dz0}}, options);
  double error = 0, size = 0;
  for (std::int64_t r = 0; r < d; ++r)
    for (std::int64_t c = 0; c < d; ++c) {
      double expected = static_cast<double>(G(0, 0, r, c));
      for (std::int64_t i = 0; i < n; ++i)
        expected += 0.125 * static_cast<double>(static_cast<float>(q(0, 0, i, r))) *
                    static_cast<double>(static_cast<float>(d_o(0, 0, i, c)));
      error += std::pow(static_cast<double>(dS0(0, 0, r, c)) - expected, 2);
      size += expected * expected;
    }
  EXPECT_LE(std::sqrt(error / size), 1e-6);  // sums and state in float: no trace of the 16 bits
  this->each(d_q, [&](auto... i) { ASSERT_TRUE(std::isfinite(static_cast<float>(d_q(i...)))); });
}

}  // namespace
