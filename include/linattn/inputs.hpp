// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <linattn/call.hpp>
#include <linattn/launch.hpp>
#include <linattn/problem.hpp>
#include <linattn/workspace.hpp>
#include <utility>

/// \file inputs.hpp
/// From the inputs of a public call to a problem, and to what kernels ask about visible keys.

namespace LinAttn::detail {

/// Checks the offsets of packed sequences and enters them into the problem.
inline void read_offsets(const SequenceOffsets& q, const SequenceOffsets& k, Problem& problem) {
  if (!q.present() && !k.present()) return;
  if (!q.present() || !k.present())
    throw InvalidArgument(message("LinAttn: cu_seqlens_q and cu_seqlens_k are given together or not at all, found only ",
                                  q.present() ? "cu_seqlens_q" : "cu_seqlens_k"));
  if (problem.batch != 1)
    throw InvalidArgument(message("LinAttn: cu_seqlens needs B = 1, found B = ", problem.batch));
  if (q.extent(0) != k.extent(0) || q.extent(0) < 1)
    throw InvalidArgument(message("LinAttn: cu_seqlens_q and cu_seqlens_k need the same number of at least one ",
                                  "offset, found ", q.extent(0), " and ", k.extent(0)));
  const auto longest = [&](const char* name, const SequenceOffsets& offsets, std::int64_t total) {
    require_memory(name, offsets);
    const std::int64_t count = offsets.extent(0);
    if (count > 1 && offsets.stride(0) != 1)
      throw InvalidArgument(message("LinAttn: ", name, " must be contiguous, found stride ", offsets.stride(0)));
    if (offsets(0) != 0)
      throw InvalidArgument(message("LinAttn: ", name, " must start at 0, found ", offsets(0)));
    std::int64_t largest = 0;
    for (std::int64_t m = 1; m < count; ++m) {
      const std::int64_t extent = offsets(m) - offsets(m - 1);
      if (extent < 0)
        throw InvalidArgument(message("LinAttn: ", name, " must not decrease, found ", offsets(m - 1), " then ",
                                      offsets(m), " at entry ", m));
      largest = std::max(largest, extent);
    }
    if (offsets(count - 1) != total)
      throw InvalidArgument(message("LinAttn: ", name, " must end at ", total, ", found ", offsets(count - 1)));
    return largest;
  };
  problem.longest_q = longest("cu_seqlens_q", q, problem.nq);
  problem.longest_k = longest("cu_seqlens_k", k, problem.nk);
  problem.members = q.extent(0) - 1;
}

/// q, k and v of Inputs or of a Token are there.
template <class In>
void require_present(const In& in) {
  for (const auto& [name, tensor] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}})
    if (!tensor->present()) throw InvalidArgument(message("LinAttn: input ", name, " is missing"));
}

template <class ExecSpace, class T>
Problem problem_of(const Inputs<ExecSpace, T>& in) {
  require_present(in);
  Problem p;
  p.batch = in.q.extent(0);
  p.heads = in.q.extent(1);
  p.kv_heads = in.k.extent(1);
  p.nq = in.q.extent(2);
  p.nk = in.k.extent(2);
  p.d = in.q.extent(3);
  p.dv = in.v.extent(3);
  require_memory("q", in.q);
  require_shape("k", in.k, {p.batch, p.kv_heads, p.nk, p.d});
  require_shape("v", in.v, {p.batch, p.kv_heads, p.nk, p.dv});
  read_offsets(in.cu_seqlens_q, in.cu_seqlens_k, p);
  if (in.key_mask.present()) {
    require_shape("key_mask", in.key_mask, {p.batch, p.nk});
    if (p.packed())
      throw InvalidArgument("LinAttn: key_mask and cu_seqlens cannot be combined");
  }
  return p;
}

/// Memory for the offsets of packed sequences where kernels cannot read the caller's; nullptr if none is needed.
template <class ExecSpace>
std::int64_t* place_offsets(ArenaCursor& arena, const Problem& problem) {
  if (is_host_space_v<ExecSpace> || !problem.packed()) return nullptr;
  return arena.take<std::int64_t>(2 * (problem.members + 1));
}

template <class ExecSpace>
const std::int64_t* copy_offsets(const ExecSpace& exec, const std::int64_t* from, std::int64_t* to, std::size_t count) {
  using Host = Kokkos::View<const std::int64_t*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Device =
      Kokkos::View<std::int64_t*, typename ExecSpace::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(exec, Device(to, count), Host(from, count));
  return to;
}

/// Key mask and packed members, checked, into the arguments of kernels.
template <class ExecSpace, class T, class Args>
void bind_visibility(const ExecSpace& exec, const Inputs<ExecSpace, T>& in, const Problem& problem, bool causal,
                     std::int64_t* device_offsets, Args& args) {
  if (in.key_mask.present()) {
    args.key_mask = in.key_mask.data();
    args.mask_batch_stride = in.key_mask.stride(0);
    args.mask_stride = in.key_mask.stride(1);
  }
  if (!problem.packed()) return;
  for (std::int64_t m = 0; causal && m < problem.members; ++m) {
    const std::int64_t nq = in.cu_seqlens_q(m + 1) - in.cu_seqlens_q(m);
    const std::int64_t nk = in.cu_seqlens_k(m + 1) - in.cu_seqlens_k(m);
    if (nq > nk)
      throw InvalidArgument(message("LinAttn: causal attention needs Nq <= Nk in every member, found Nq = ", nq,
                                    " and Nk = ", nk, " in member ", m));
  }
  if constexpr (is_host_space_v<ExecSpace>) {
    args.cu_seqlens_q = in.cu_seqlens_q.data();
    args.cu_seqlens_k = in.cu_seqlens_k.data();
  } else {
    const auto count = static_cast<std::size_t>(problem.members + 1);
    args.cu_seqlens_q = copy_offsets(exec, in.cu_seqlens_q.data(), device_offsets, count);
    args.cu_seqlens_k = copy_offsets(exec, in.cu_seqlens_k.data(), device_offsets + count, count);
  }
}

}  // namespace LinAttn::detail
