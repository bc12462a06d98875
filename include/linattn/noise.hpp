// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <linattn/feature_map.hpp>
#include <linattn/half.hpp>
#include <linattn/kokkos_compat.hpp>
#include <linattn/simd.hpp>
#include <linattn/team.hpp>
#include <type_traits>
#include <utility>

// Its functions would be of the host in one pass of nvcc and of the device in the other.
#if !defined(R123_CUDA_DEVICE)
#define R123_CUDA_DEVICE KOKKOS_FUNCTION
#endif
#include <Random123/philox.h>

#if defined(LINATTN_HAS_SHUFFLE) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LINATTN_NOISE_IN_VECTORS 1
#if defined(__SSE2__) && !defined(__clang__)
#include <immintrin.h>
#endif
#endif

/// \file noise.hpp
/// The normals of dropout.hpp from their counters.
///
/// Both precisions use all 32 bits of a word, so float and double differ by rounding alone: a normal n is within 4
/// units in the last place of max(1, |n|). All are finite, and below 6.8 in size.
///
/// A device makes the four normals of a counter in one thread. The host makes those of 16 counters at once, always all
/// of them and in one copy of the code, so that an element has the same bits whatever block it falls into.
///
/// The words come from Random123 on a device and where there are no vectors. Of its rounds GCC makes vector code of
/// half the speed, and none at -O1, so for vectors of the host they are written out here.

namespace LinAttn::detail {
// As in simd.hpp: what is compiled differently for another vector width has another name.
inline namespace LINATTN_SIMD_ABI {

/// Normals that are made at once on the host.
inline constexpr int noise_block = 64;

/// An unsigned integer of the size of A.
template <class A>
using bits_t = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;

// ---- Words -> normals. V and Words are A and bits_t<A>, or vectors of these. ----------------------------------------

/// a b + c, rounded once on a device, where each kernel has a copy of its own. The host has one copy of all.
template <class V>
KOKKOS_FORCEINLINE_FUNCTION V multiply_add(V a, V b, V c) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return fused_multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

/// c[Term] + c[Term + 1] x + ... + c[Terms - 1] x^(Terms - 1 - Term)
template <class A, int Terms, int Term = 0, class V, std::size_t Size>
KOKKOS_FORCEINLINE_FUNCTION V polynomial(V x, const double (&c)[Size]) {
  static_assert(Terms <= static_cast<int>(Size));
  if constexpr (Term + 1 < Terms)
    return multiply_add(polynomial<A, Terms, Term + 1>(x, c), x, V{} + A(c[Term]));
  else
    return V{} + A(c[Term]);
}

/// The float nearest to a word of 32 bits, or the double equal to one in 64 bits.
template <class A, bool Signed, class V, class Words>
KOKKOS_FORCEINLINE_FUNCTION V real_of_words(Words w) {
  if constexpr (sizeof(A) == 8) {  // the low bits of 2^52 + w
    constexpr std::uint64_t sign = Signed ? 0x80000000u : 0u;
    return bits_as<V>((w ^ sign) | std::uint64_t(0x4330000000000000u)) - A(0x1p52 + sign);
  } else if constexpr (std::is_same_v<A, V>) {
    return static_cast<A>(static_cast<std::conditional_t<Signed, std::int32_t, std::uint32_t>>(w));
  } else {
#if defined(LINATTN_NOISE_IN_VECTORS)
    typedef std::conditional_t<Signed, std::int32_t, std::uint32_t> Integers __attribute__((vector_size(sizeof(V))));
    return __builtin_convertvector(bits_as<Integers>(w), V);
#endif
  }
}

/// The root of positive numbers far from the ends of the range. Compilers make no vector instruction of std::sqrt,
/// which sets errno.
template <class A, class Words, class V>
KOKKOS_FORCEINLINE_FUNCTION V square_root(V x) {
  if constexpr (std::is_same_v<A, V>) {
    using std::sqrt;
    return sqrt(x);
  } else {
    // 1 / sqrt(x) within 3.5 % by half the exponent, within 5e-6 or 4e-11 after Newton's steps
    constexpr bits_t<A> guess = sizeof(A) == 4 ? 0x5f375a86u : 0x5fe6eb50c7b537a9u;
    const V half = A(0.5) * x;
    V y = bits_as<V>(guess - (bits_as<Words>(x) >> 1));
    y *= A(1.5) - half * y * y;
    y *= A(1.5) - half * y * y;
    if constexpr (sizeof(A) == 8) y *= A(1.5) - half * y * y;
    const V root = x * y;
    return multiply_add(A(0.5) * y, x - root * root, root);
  }
}

/// -2 log u, u = (w + 1/2) 2^-32.
template <class A, class V, class Words>
KOKKOS_FORCEINLINE_FUNCTION V minus_two_log(Words w) {
  constexpr bool single = sizeof(A) == 4;
  constexpr int fraction = single ? 23 : 52;
  constexpr auto one = bits_t<A>(1) << fraction;  // in the exponent
  constexpr bits_t<A> root_half = single ? 0x3f3504f3u : 0x3fe6a09e667f3bcdu;
  // w + 1/2 = 2^(e - 1) (1 + f), 0 <= e <= 33, sqrt(1/2) <= 1 + f < sqrt(2)
  const Words bits = bits_as<Words>(real_of_words<A, false, V>(w) + A(0.5));
  const Words e = (bits - (root_half - one)) >> fraction;
  V f = bits_as<V>(bits - (e << fraction) + one) - A(1);
  if constexpr (single) {  // f = u - 1 for the largest u, of which a float keeps too few bits
    const V above = (real_of_words<A, false, V>(~w) + A(0.5)) * A(-0x1p-32);
    f = e == bits_t<A>(33) ? above : f;
  }
  // log(1 + f) = 2 atanh s, |s| < 0.1716: the terms left out are below 2^-28 and 2^-60
  constexpr double atanh[] = {4.,      4. / 3,  4. / 5,  4. / 7,  4. / 9, 4. / 11,
                              4. / 13, 4. / 15, 4. / 17, 4. / 19, 4. / 21};
  constexpr double ln4 = 1.3862943611198906, ln4_rest = 4.6380936287190205e-17;
  constexpr A high = A(ln4), low = single ? A(ln4 - double(A(ln4))) : A(ln4_rest);
  constexpr A integers = single ? A(0x1p23) : A(0x1p52);  // those from here to twice this
  const V shift = (integers + A(33)) - bits_as<V>(e | bits_as<bits_t<A>>(integers));  // 33 - e
  const V s = f / (f + A(2));
  const V mantissa = -s * polynomial<A, single ? 5 : 11>(s * s, atanh);
  return multiply_add(shift, V{} + high, multiply_add(shift, V{} + low, mantissa));
}

/// cos t and sin t, t = 2 pi (w + 1/2) 2^-32.
template <class A, class V, class Words>
KOKKOS_FORCEINLINE_FUNCTION void cosine_and_sine(Words w, V& cosine, V& sine) {
  constexpr bool single = sizeof(A) == 4;
  constexpr int sign = single ? 31 : 63;
  using U = bits_t<A>;
  // t = (q + v) pi / 2, q the nearest integer, |v| < 1/2
  const V v = real_of_words<A, true, V>(((w << 2) | U(2)) & U(0xffffffffu)) * A(0x1p-32);
  const V vv = v * v;
  // (pi / 2)^n / n!: the terms left out are below 2^-28 and 2^-58
  constexpr double odd[] = {1.5707963267948966,     -0.64596409750624625,   0.079692626246167046,
                            -0.0046817541353186881, 1.6044118478735982e-4,  -3.5988432352120853e-6,
                            5.6921729219679268e-8,  -6.6880351098114672e-10, 6.0669357311061957e-12};
  constexpr double even[] = {1.,
                             -1.2337005501361698,    0.25366950790104801,   -0.020863480763352961,
                             9.1926027483942658e-4,  -2.5202042373060605e-5, 4.7108747788181715e-7,
                             -6.3866030837918522e-9, 6.5659631149794724e-11};
  const V s = v * polynomial<A, single ? 5 : 9>(vv, odd);
  const V c = polynomial<A, single ? 6 : 9>(vv, even);
  const Words q = (w + U(0x20000000u)) << (sign - 31);  // in the two highest bits
  const auto swaps = (q & (U(1) << (sign - 1))) != U(0);
  cosine = bits_as<V>(bits_as<Words>(swaps ? s : c) ^ ((q ^ (q << 1)) & (U(1) << sign)));
  sine = bits_as<V>(bits_as<Words>(swaps ? c : s) ^ (q & (U(1) << sign)));
}

/// (x, y) = r (cos t, sin t) by the transform of Box and Muller, r of `radius` and t of `angle`. No branches.
template <class A, class V, class Words>
KOKKOS_FORCEINLINE_FUNCTION void box_muller(Words radius, Words angle, V& x, V& y) {
  const V r = square_root<A, Words>(minus_two_log<A, V>(radius));
  V cosine, sine;
  cosine_and_sine<A>(angle, cosine, sine);
  x = r * cosine;
  y = r * sine;
}

/// out[0 .. 4) = the normals of four words.
template <class A>
KOKKOS_FORCEINLINE_FUNCTION void four_normals_of_words(const std::uint32_t* words, A* out) {
  for (int i = 0; i < 4; i += 2)
    box_muller<A>(bits_t<A>(words[i]), bits_t<A>(words[i + 1]), out[i], out[i + 1]);
}

// ---- Counters -> words ----------------------------------------------------------------------------------------------

/// The words of one counter.
KOKKOS_FORCEINLINE_FUNCTION r123array4x32 words_of_counter(std::uint64_t seed, std::uint64_t offset,
                                                           std::uint64_t counter) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const r123array4x32 place = {{low(counter), low(counter >> 32), low(offset), low(offset >> 32)}};
  const r123array2x32 key = {{low(seed), low(seed >> 32)}};
  return r123::Philox4x32_R<10>()(place, key);
}

// ---- Blocks of the host ---------------------------------------------------------------------------------------------

#if defined(__GNUC__) || defined(__clang__)
#define LINATTN_ONE_COPY __attribute__((noinline))
#else
#define LINATTN_ONE_COPY
#endif

inline constexpr int noise_counters = noise_block / 4;  // of a block

/// Words of a block, those of the radii and those of the angles of its pairs of normals.
struct NoiseWords {
  alignas(64) std::uint32_t radius[noise_block / 2];
  alignas(64) std::uint32_t angle[noise_block / 2];
};

#if defined(LINATTN_NOISE_IN_VECTORS)

/// Words in the lower halves of 64 bits, where their products find room. The upper halves may hold anything.
typedef std::uint64_t WideWords __attribute__((vector_size(LINATTN_SIMD_BYTES)));

LINATTN_ALWAYS_INLINE WideWords product_of_words(WideWords a, std::uint32_t factor) {
  // GCC multiplies in 64 x 64 bits unless it is told
#if defined(__clang__) || !defined(__SSE2__) || (LINATTN_SIMD_BYTES == 32 && !defined(__AVX2__))
  return (a & 0xffffffffu) * factor;
#elif LINATTN_SIMD_BYTES == 64
  const WideWords b = WideWords{} + factor;
  return (WideWords)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);  // GCC 12 warns of the one without mask
#elif LINATTN_SIMD_BYTES == 32
  const WideWords b = WideWords{} + factor;
  return (WideWords)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  const WideWords b = WideWords{} + factor;
  return (WideWords)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
}

LINATTN_ALWAYS_INLINE void words_of_block(std::uint64_t seed, std::uint64_t offset, std::uint64_t first,
                                          NoiseWords& words) {
  constexpr int lanes = vector_lanes<double>, vectors = noise_counters / lanes;
  const WideWords lane = []<int... I>(std::integer_sequence<int, I...>) LINATTN_INLINE_LAMBDA {
    return WideWords{I...};
  }(std::make_integer_sequence<int, lanes>{});
  WideWords c0[vectors], c1[vectors], c2[vectors], c3[vectors];
  for (int v = 0; v < vectors; ++v) {
    c0[v] = lane + (first + static_cast<std::uint64_t>(v * lanes));
    c1[v] = c0[v] >> 32;
    c2[v] = WideWords{} + offset;
    c3[v] = c2[v] >> 32;
  }
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < vectors; ++v) {
      const WideWords p0 = product_of_words(c0[v], PHILOX_M4x32_0), p1 = product_of_words(c2[v], PHILOX_M4x32_1);
      c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
      c1[v] = p1;
      c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
      c3[v] = p0;
    }
    k0 += PHILOX_W32_0;
    k1 += PHILOX_W32_1;
  }
  for (int v = 0; v < vectors; ++v) {
    const WideWords radius = (c0[v] & 0xffffffffu) | (c2[v] << 32), angle = (c1[v] & 0xffffffffu) | (c3[v] << 32);
    std::memcpy(words.radius + 2 * lanes * v, &radius, sizeof radius);
    std::memcpy(words.angle + 2 * lanes * v, &angle, sizeof angle);
  }
}

/// One half of a0 b0 a1 b1 ...
template <int Half, class V, int... Lane>
LINATTN_ALWAYS_INLINE V interleaved(const V& a, const V& b, std::integer_sequence<int, Lane...>) {
  constexpr int lanes = sizeof...(Lane);
  return __builtin_shufflevector(a, b, ((Lane & 1) * lanes + (Half * lanes + Lane) / 2)...);
}

template <class A>
LINATTN_ONE_COPY void normals_of_words(const NoiseWords& words, A* out) {
  constexpr int lanes = vector_lanes<A>;
  typedef A V __attribute__((vector_size(LINATTN_SIMD_BYTES)));
  typedef bits_t<A> Words __attribute__((vector_size(LINATTN_SIMD_BYTES)));
  typedef std::uint32_t Stored __attribute__((vector_size(lanes * 4)));
  constexpr std::make_integer_sequence<int, lanes> all;
  for (int pair = 0; pair < noise_block / 2; pair += lanes) {
    Stored radius, angle;
    std::memcpy(&radius, words.radius + pair, sizeof radius);
    std::memcpy(&angle, words.angle + pair, sizeof angle);
    V x, y;
    box_muller<A>(__builtin_convertvector(radius, Words), __builtin_convertvector(angle, Words), x, y);
    store<A>(out + 2 * pair, interleaved<0>(x, y, all));
    store<A>(out + 2 * pair + lanes, interleaved<1>(x, y, all));
  }
}

#else

inline void words_of_block(std::uint64_t seed, std::uint64_t offset, std::uint64_t first, NoiseWords& words) {
  for (int i = 0; i < noise_counters; ++i) {
    const r123array4x32 four = words_of_counter(seed, offset, first + static_cast<std::uint64_t>(i));
    for (int pair = 0; pair < 2; ++pair) {
      words.radius[2 * i + pair] = four.v[2 * pair];
      words.angle[2 * i + pair] = four.v[2 * pair + 1];
    }
  }
}

template <class A>
LINATTN_ONE_COPY void normals_of_words(const NoiseWords& words, A* out) {
  for (int i = 0; i < noise_block / 2; ++i)
    box_muller<A>(bits_t<A>(words.radius[i]), bits_t<A>(words.angle[i]), out[2 * i], out[2 * i + 1]);
}

#endif

/// out[0 .. noise_block) = the normals of noise_counters counters.
template <class A>
LINATTN_ONE_COPY void normals_of_block(std::uint64_t seed, std::uint64_t offset, std::uint64_t first, A* out) {
  NoiseWords words;
  words_of_block(seed, offset, first, words);
  normals_of_words(words, out);
}

// ---- What kernels call ----------------------------------------------------------------------------------------------

/// out[0 .. 4) = the normals of one counter. The host makes a whole block of them.
template <class A>
KOKKOS_FUNCTION void four_normals(std::uint64_t seed, std::uint64_t offset, std::uint64_t counter, A* out) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  const r123array4x32 words = words_of_counter(seed, offset, counter);
  four_normals_of_words(words.v, out);
#else
  A block[noise_block];
  normals_of_block(seed, offset, counter, block);
  for (int i = 0; i < 4; ++i) out[i] = block[i];
#endif
}

/// out[0 .. 4 counters) = the normals of counters first, ..., first + counters - 1, four each. On the host the memory
/// reaches to a multiple of noise_block normals, and that is filled.
template <class Team, class A>
KOKKOS_FUNCTION void fill_normals(const Team& team, std::uint64_t seed, std::uint64_t offset, std::uint64_t first,
                                  std::int64_t counters, A* out) {
  if constexpr (Team::on_host) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
    for (std::int64_t i = 0; i < counters; i += noise_counters)
      normals_of_block(seed, offset, first + static_cast<std::uint64_t>(i), out + 4 * i);
#endif
  } else {
    for_each(team, static_cast<int>(counters), [&](int i) {
      four_normals(seed, offset, first + static_cast<std::uint64_t>(i), out + 4 * static_cast<std::int64_t>(i));
    });
  }
}

}  // namespace LINATTN_SIMD_ABI
}  // namespace LinAttn::detail
