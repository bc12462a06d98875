// SPDX-License-Identifier: BSD-3-Clause
#pragma once
#include <cmath>
#include <cstdint>
#include <linattn/team.hpp>
#include <Random123/philox.h>
namespace LinAttn::detail {
inline constexpr int noise_block = 64;
template <class Team, class A>
KOKKOS_FUNCTION void fill_normals(const Team& team, std::uint64_t seed, std::uint64_t offset, std::uint64_t first, std::int64_t counters, A* out) {
  for_each(team, static_cast<int>(counters), [=](int c) {
    const std::uint64_t e = first + c;
    r123::Philox4x32 g;
    r123::Philox4x32::ctr_type ctr{{(uint32_t)e,(uint32_t)(e>>32),(uint32_t)offset,(uint32_t)(offset>>32)}};
    r123::Philox4x32::key_type key{{(uint32_t)seed,(uint32_t)(seed>>32)}};
    auto w = g(ctr,key);
    for (int k=0;k<4;k+=2){ double u=(w[k]+0.5)*0x1p-32,v=(w[k+1]+0.5)*0x1p-32*6.283185307179586; double r=sqrt(-2*log(u)); out[4*c+k]=A(r*cos(v)); out[4*c+k+1]=A(r*sin(v)); }
  });
}
}
