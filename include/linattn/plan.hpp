// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <linattn/error.hpp>
#include <linattn/problem.hpp>
#include <string>

/// \file plan.hpp
/// How a call is cut into work. Every tuning number of the library lives here.

namespace LinAttn {

/// The two passes of an attention call.
enum class Pass { forward, backward };

/// What the plan knows about the machine.
struct MachineTraits {
  bool host = true;                ///< one thread a team, tiles in the workspace
  int concurrency = 1;             ///< threads that run at once
  std::size_t scratch_bytes = 0;   ///< fast scratch memory one team may use (devices)
};

/// How a call is cut into work; pure data, made by make_plan().
///
/// A sequence is cut into chunks of `chunk` tokens, and its chunks into `segments` contiguous runs. One
/// worker (a team) walks the chunks of a segment with the state in fast memory. With one segment nothing
/// but the result leaves the worker; with more, states of segments are formed first and combined by a
/// scan. Results do not depend on `workers` or `team_size`; they depend on `chunk` and `segments` in
/// the last bits.
struct Plan {
  int chunk = 0;                  ///< tokens whose products are formed together
  int segments = 1;               ///< pieces of every sequence that are worked on at once
  int workers = 1;                ///< teams launched
  int team_size = 1;              ///< threads of a team
  int shift_interval = 16;        ///< chunks between stored shifts (scaled feature maps)
  bool tiles_in_scratch = false;  ///< tiles live in the team's scratch memory, else in the workspace
  std::size_t tile_bytes = 0;     ///< fast memory of one worker

  std::string to_string() const {
    return detail::message("chunk=", chunk, " segments=", segments, " workers=", workers,
                           " team_size=", team_size, " tile_bytes=", tile_bytes,
                           tiles_in_scratch ? " (scratch)" : " (workspace)");
  }
};

/// Cuts the work of one pass.
///
/// \param requested_chunk, requested_segments  0 lets the plan decide
/// \param tile_bytes  fast memory of one worker for a given chunk length
/// \throws InvalidArgument for a negative request
inline Plan make_plan(const Problem& problem, const MachineTraits& machine, int requested_chunk,
                      int requested_segments, const std::function<std::size_t(int)>& tile_bytes) {
  constexpr int host_chunk = 64;              // 16 to 64 measured within 10 % of each other
  constexpr int device_chunks[] = {64, 32, 16};
  constexpr int device_team_size = 128;
  constexpr int chunks_worth_a_segment = 4;   // shorter segments cost more in states than they gain
  constexpr int largest_chunk = 1 << 14;

  if (requested_chunk < 0 || requested_chunk > largest_chunk)
    throw InvalidArgument(detail::message("LinAttn: chunk must be between 1 and ", largest_chunk,
                                          " (0 lets the plan decide), found ", requested_chunk));
  if (requested_segments < 0)
    throw InvalidArgument(detail::message("LinAttn: segments must be positive (0 lets the plan decide), ",
                                          "found ", requested_segments));
  Plan plan;
  if (machine.host) {
    plan.chunk = requested_chunk ? requested_chunk : host_chunk;
    plan.tile_bytes = tile_bytes(plan.chunk);
  } else {
    plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
    for (int chunk : device_chunks) {
      plan.chunk = requested_chunk ? requested_chunk : chunk;
      plan.tile_bytes = tile_bytes(plan.chunk);
      plan.tiles_in_scratch = plan.tile_bytes <= machine.scratch_bytes;
      if (plan.tiles_in_scratch || requested_chunk) break;
    }
    if (!plan.tiles_in_scratch && !requested_chunk) {  // then at least with few passes over the state
      plan.chunk = device_chunks[0];
      plan.tile_bytes = tile_bytes(plan.chunk);
    }
  }
  const std::int64_t units = problem.sequences() * problem.kv_heads;
  const std::int64_t tokens = std::max(problem.longest_queries(), problem.longest_keys());
  const std::int64_t chunks = std::max<std::int64_t>(1, (tokens + plan.chunk - 1) / plan.chunk);
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  std::int64_t segments = 1;
  if (requested_segments)
    segments = std::min<std::int64_t>(requested_segments, chunks);
  else if (units > 0 && units < most_workers)
    segments = std::clamp<std::int64_t>(std::min((most_workers + units - 1) / units,
                                                 chunks / chunks_worth_a_segment),
                                        1, 1024);
  plan.segments = static_cast<int>(segments);
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(units * segments, 1, most_workers));
  return plan;
}

}  // namespace LinAttn
