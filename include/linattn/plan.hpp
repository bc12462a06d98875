// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <linattn/error.hpp>
#include <linattn/problem.hpp>
#include <string>
#include <utility>

/// \file plan.hpp
/// How a call is cut into work. Every tuning number of the library lives here.

namespace LinAttn {

/// What a call computes: all outputs, all gradients, or the output of one new token.
enum class Pass { forward, backward, step };

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
/// scan. The state can also be shared out in `tiles` windows of its columns or features, which are
/// independent: where it does not fit into fast memory, or with fewer heads than workers, whichever of windows
/// and segments costs less. Results do not depend on `workers`, `team_size` or (but for gradients of
/// parameters) `tiles`; they depend on `chunk` and `segments` in the last bits.
struct Plan {
  int chunk = 0;                  ///< tokens whose products are formed together
  int segments = 1;               ///< pieces of every sequence that are worked on at once
  int tiles = 1;                  ///< windows of a state that are worked on at once, at most
  int workers = 1;                ///< teams launched at most
  int team_size = 1;              ///< threads of a team
  int shift_interval = 1;         ///< chunks between stored shifts (scaled feature maps)
  bool compensated = false;       ///< sums over chunks keep what rounding loses (long sequences in fp32)
  bool pairs = false;             ///< exact attention, backward: a pair of tiles is met once, by one worker a head
  bool tiles_in_scratch = false;  ///< tiles live in the team's scratch memory, else in the workspace
  std::size_t tile_bytes = 0;     ///< fast memory of one worker

  std::string to_string() const {
    return detail::message("chunk=", chunk, " segments=", segments, " tiles=", tiles, " workers=", workers,
                           " team_size=", team_size, " shift_interval=", shift_interval,
                           compensated ? " compensated" : "", pairs ? " pairs" : "", " tile_bytes=", tile_bytes,
                           tiles_in_scratch ? " (scratch)" : " (workspace)");
  }
};

namespace detail {

/// Width of the windows that cut `columns` into at most `tiles` parts of whole `granule`s.
inline std::int64_t window_width(std::int64_t columns, std::int64_t tiles, std::int64_t granule) {
  if (columns <= 0) return 0;
  const std::int64_t width = (columns + tiles - 1) / tiles;
  return std::min(columns, (width + granule - 1) / granule * granule);
}

/// Time of a pass for one token of the longest sequence, in FMAs of one worker: what a task costs times the
/// rounds in which the workers get through all of them.
inline double pass_cost(Pass pass, std::int64_t units, std::int64_t workers, double features, double values,
                        double chunk, double tiles, double segments) {
  const double rounds = std::ceil(static_cast<double>(units) * tiles * segments / static_cast<double>(workers));
  const auto walk = [&](double state, double whole, double part) {  // products with the state; inside the chunk
    const double again = segments > 1 ? state / 2 : 0;                // states of segments come first
    return rounds / segments * ((state + again) / tiles + chunk * (whole + part / tiles));
  };
  const double state = 2 * features * values;
  if (pass == Pass::forward) return walk(state, features, values / 2);
  const double of_queries = walk(state, values, features / 2);
  if (tiles == 1) return of_queries + walk(1.5 * state, features + values, (features + values) / 2);
  return of_queries + walk(state, values, features / 2) + walk(state, features, values / 2);
}

}  // namespace detail

/// What a variant asks of the plan.
struct PlanRequest {
  Pass pass = Pass::forward;
  bool causal = false;
  std::int64_t features = 0;    ///< R
  int chunk = 0, segments = 0, tiles = 0;  ///< 0 lets the plan decide
  int granule = 16;             ///< columns of a window come in multiples of this
  bool windows = true;          ///< whether the state may be shared out
  bool exact = false;           ///< sums are so precise that they are never compensated (fp64)
  /// Fast memory of one worker under a plan of which chunk, tiles and compensated are decided.
  std::function<std::size_t(const Plan&)> tile_bytes;
};

/// Cuts the work of one pass.
///
/// \throws InvalidArgument for a negative or too large request
inline Plan make_plan(const Problem& problem, const MachineTraits& machine, const PlanRequest& request) {
  // with a causal mask longer chunks cost more in the chunk than they save in the state
  const int host_chunk = request.causal ? 16 : 64;
  constexpr int device_chunks[] = {64, 32, 16};
  constexpr int device_team_size = 128;
  constexpr int chunks_worth_a_segment = 16;  // shorter segments cost more in states than they gain
  constexpr int largest_chunk = 1 << 14;
  constexpr int most_segments = 1024;
  constexpr int most_tiles = 16;
  constexpr int shift_interval = 1024;        // tokens
  constexpr double worth_it = 0.97;           // a finer cut must gain this much
  // additions to a state whose rounding, about sqrt(n / 3) ulp / 4 of its size, is let pass: 1.3e-6 in fp32
  constexpr std::int64_t additions = 4096;

  if (request.chunk < 0 || request.chunk > largest_chunk)
    throw InvalidArgument(detail::message("LinAttn: chunk must be between 1 and ", largest_chunk,
                                          " (0 lets the plan decide), found ", request.chunk));
  for (const auto& [name, wish] : {std::pair{"segments", request.segments}, {"tiles", request.tiles}})
    if (wish < 0)
      throw InvalidArgument(detail::message("LinAttn: ", name, " must be positive (0 lets the plan decide), found ",
                                            wish));
  const std::int64_t units = problem.sequences() * problem.kv_heads;
  const std::int64_t tokens = std::max(problem.longest_queries(), problem.longest_keys());
  const std::int64_t narrow = request.pass == Pass::forward ? problem.dv : std::min(request.features, problem.dv);
  const int widest_cut =
      request.windows ? static_cast<int>(std::clamp<std::int64_t>(narrow / request.granule, 1, most_tiles)) : 1;

  const auto no_longer_than_a_sequence = [&](int chunk) {
    return static_cast<int>(std::clamp<std::int64_t>(tokens, 1, chunk));
  };
  Plan plan;
  plan.chunk = no_longer_than_a_sequence(request.chunk ? request.chunk : machine.host ? host_chunk : device_chunks[0]);
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  const auto chunks = [&] { return std::max<std::int64_t>(1, (tokens + plan.chunk - 1) / plan.chunk); };

  if (units > 0) {
    double least = -1;
    const int most = request.tiles ? std::min(request.tiles, widest_cut) : widest_cut;
    for (int tiles = request.tiles ? most : 1; tiles <= most; ++tiles) {
      const std::int64_t wanted = (most_workers + units * tiles - 1) / (units * tiles);
      std::int64_t segments = std::clamp<std::int64_t>(std::min(wanted, chunks() / chunks_worth_a_segment), 1,
                                                       most_segments);
      if (request.segments) segments = std::min<std::int64_t>(request.segments, chunks());
      for (std::int64_t s : {std::int64_t(1), segments}) {
        if (request.segments && s != segments) continue;
        const double cost = detail::pass_cost(request.pass, units, most_workers, static_cast<double>(request.features),
                                              static_cast<double>(problem.dv), plan.chunk, tiles,
                                              static_cast<double>(s));
        if (least < 0 || cost < least * worth_it) {
          least = cost;
          plan.tiles = tiles;
          plan.segments = static_cast<int>(s);
        }
      }
    }
  }
  // what follows from the chunk
  const auto complete = [&](Plan& p) {
    const std::int64_t all = std::max<std::int64_t>(1, (tokens + p.chunk - 1) / p.chunk);
    p.segments = static_cast<int>(std::min<std::int64_t>(p.segments, all));
    p.shift_interval = std::max(1, shift_interval / p.chunk);
    p.compensated = !request.exact && all > additions * p.segments;
    p.tile_bytes = request.tile_bytes(p);
  };
  complete(plan);
  if (!machine.host) {
    // the longest chunk that fits into scratch memory, with as few windows as that takes
    const auto fits = [&] {
      const int most = request.tiles ? plan.tiles : widest_cut;
      for (int tiles = plan.tiles; tiles <= most; ++tiles) {
        for (int chunk : device_chunks) {
          Plan trial = plan;
          trial.chunk = no_longer_than_a_sequence(request.chunk ? request.chunk : chunk);
          trial.tiles = tiles;
          complete(trial);
          if (trial.tile_bytes > machine.scratch_bytes) continue;
          plan = trial;
          return true;
        }
      }
      return false;
    };
    plan.tiles_in_scratch = fits();
  }
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(units * plan.segments * plan.tiles, 1, most_workers));
  return plan;
}

/// What exact attention asks of the plan.
struct SoftmaxPlanRequest {
  Pass pass = Pass::forward;
  std::int64_t block = 1;  ///< keys of a block, not more than a sequence has
  int chunk = 0;           ///< rows of a tile; 0 lets the plan decide
  bool stores_native = true;  ///< gradients can be summed where the caller keeps them
  bool exact = false;         ///< sums are so precise that they are never compensated (fp64)
  /// Fast memory of one worker under a plan of which chunk is decided.
  std::function<std::size_t(const Plan&)> tile_bytes;
};

/// Cuts exact attention into tiles of `chunk` rows and runs of tiles (`segments`), which are shared out among the
/// workers. The number of runs does not depend on the machine, since parts of gradients are summed over them.
inline Plan make_softmax_plan(const Problem& problem, const MachineTraits& machine, const SoftmaxPlanRequest& request) {
  constexpr int widest_block_tile = 128;  // a block of one tile saves products; longer ones do not fit fast memory
  const int host_tile = request.pass == Pass::forward ? 128 : 64;  // keys are transposed for each tile of queries
  constexpr int largest_tile = 1 << 14;
  constexpr int device_tiles[] = {64, 32, 16};
  constexpr int device_team_size = 128;
  constexpr std::int64_t most_runs = 64;
  constexpr std::int64_t additions = 512;  // of tiles to a row whose rounding is let pass
  constexpr std::int64_t products_of_pairs = 5, products_of_rows_and_keys = 7;
  if (request.chunk < 0 || request.chunk > largest_tile)
    throw InvalidArgument(detail::message("LinAttn: chunk must be between 1 and ", largest_tile,
                                          " (0 lets the plan decide), found ", request.chunk));
  Plan plan;
  const auto no_longer_than_a_block = [&](std::int64_t tile) {
    return static_cast<int>(std::clamp<std::int64_t>(request.block, 1, tile));
  };
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  plan.chunk = no_longer_than_a_block(request.chunk                        ? request.chunk
                                      : !machine.host                      ? device_tiles[0]
                                      : request.block <= widest_block_tile ? widest_block_tile
                                                                           : host_tile);
  const auto tiles_in_a_block = [&](const Plan& p) { return (request.block + p.chunk - 1) / p.chunk; };
  const auto complete = [&](Plan& p) {
    p.compensated = request.pass == Pass::forward && !request.exact && tiles_in_a_block(p) > additions;
    p.tile_bytes = request.tile_bytes(p);
  };
  complete(plan);
  for (int tile : device_tiles) {
    if (machine.host || plan.tiles_in_scratch) break;
    Plan trial = plan;
    trial.chunk = no_longer_than_a_block(request.chunk ? request.chunk : tile);
    complete(trial);
    if (trial.tile_bytes > machine.scratch_bytes) continue;
    plan = trial;
    plan.tiles_in_scratch = true;
  }
  const std::int64_t longest = std::max<std::int64_t>({1, problem.longest_queries(), problem.longest_keys()});
  const std::int64_t tiles_of_block = tiles_in_a_block(plan);
  const std::int64_t tiles = (longest + request.block - 1) / request.block * tiles_of_block;
  plan.segments = static_cast<int>(std::min(tiles, most_runs));
  const std::int64_t tasks = problem.sequences() * problem.kv_heads * plan.segments;
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(tasks, 1, most_workers));
  if (machine.host && request.pass == Pass::backward && request.stores_native && tiles_of_block > 1) {
    const std::int64_t heads = problem.sequences() * problem.kv_heads;
    const std::int64_t rounds = (heads + most_workers - 1) / most_workers;
    plan.pairs = products_of_pairs * rounds * most_workers <= products_of_rows_and_keys * heads;
  }
  return plan;
}

/// Keys that one worker attends to in a step of exact attention; parts are summed over them.
inline constexpr std::int64_t decode_split = 1024;

/// Cuts a step of exact attention over a cache of problem.nk positions: `segments` splits, `chunk` keys at once.
inline Plan make_decode_plan(const Problem& problem, const MachineTraits& machine) {
  constexpr int device_team_size = 128;
  Plan plan;
  plan.chunk = 64;
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  plan.segments = static_cast<int>(std::max<std::int64_t>(1, (problem.nk + decode_split - 1) / decode_split));
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  plan.workers =
      static_cast<int>(std::clamp<std::int64_t>(problem.batch * problem.kv_heads * plan.segments, 1, most_workers));
  return plan;
}

/// Cuts the work of one new token: heads, and windows of their states where heads are too few.
inline Plan make_step_plan(const Problem& problem, std::int64_t features, const MachineTraits& machine, int granule) {
  constexpr int device_team_size = 64;
  constexpr std::int64_t worth_a_worker = 1 << 14;  // elements of a state
  Plan plan;
  plan.chunk = 1;
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  const std::int64_t units = problem.sequences() * problem.kv_heads;
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  const std::int64_t columns = std::max<std::int64_t>(1, problem.dv / granule);
  const std::int64_t parts = std::max<std::int64_t>(1, features * problem.dv / worth_a_worker);
  if (units > 0) {
    const std::int64_t wanted = (most_workers + units - 1) / units;
    plan.tiles = static_cast<int>(std::min({wanted, columns, machine.host ? parts : columns}));
  }
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(units * plan.tiles, 1, most_workers));
  return plan;
}

/// Cuts the projection of rows, at most `rows` of each of `heads`, into tiles of `chunk`. Rows are independent of each
/// other.
inline Plan make_projection_plan(std::int64_t heads, std::int64_t rows, const MachineTraits& machine,
                                 const std::function<std::size_t(int)>& tile_bytes) {
  constexpr int host_tile = 64, device_tiles[] = {64, 32, 16};
  constexpr int device_team_size = 128;
  Plan plan;
  const auto no_longer_than_a_head = [&](int tile) { return static_cast<int>(std::clamp<std::int64_t>(rows, 1, tile)); };
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  plan.chunk = no_longer_than_a_head(machine.host ? host_tile : device_tiles[2]);
  for (int tile : device_tiles) {
    if (machine.host || plan.tiles_in_scratch) break;
    if (tile_bytes(no_longer_than_a_head(tile)) > machine.scratch_bytes) continue;
    plan.chunk = no_longer_than_a_head(tile);
    plan.tiles_in_scratch = true;
  }
  plan.tile_bytes = tile_bytes(plan.chunk);
  const std::int64_t tasks = heads * ((rows + plan.chunk - 1) / plan.chunk);
  plan.workers =
      static_cast<int>(std::clamp<std::int64_t>(tasks, 1, std::max(1, machine.concurrency / plan.team_size)));
  return plan;
}

/// How the instruments of analysis cut their work. Nothing but `workers` and `team_size` depends on the machine.
struct DiagnosePlan {
  int chunk = 64;              ///< tokens whose products are formed together
  int chunks_at_once = 4;      ///< chunks that are added up in the type of the tiles
  std::int64_t segment = 0;    ///< tokens of one task, with a matrix of its own
  int query_tile = 128;        ///< rows and columns of a tile of scores; the columns are a multiple of 16
  int key_tile = 64;
  std::int64_t splits = 1;     ///< parts of the keys, where rows are few
  int workers = 1;
  int team_size = 1;
};

/// For `rows` measured rows of each head.
inline DiagnosePlan make_diagnose_plan(std::int64_t nq, std::int64_t nk, std::int64_t features, std::int64_t rows,
                                       const MachineTraits& machine) {
  constexpr int device_team_size = 128, most_device_workers = 512;
  constexpr std::int64_t shortest_segment = 1024;  // a matrix of 64 features costs then 32 bytes a token
  constexpr std::int64_t wanted_tasks = 32, worth_a_split = 1024;
  DiagnosePlan plan;
  plan.segment = std::max(shortest_segment, (4 * features + plan.chunk - 1) / plan.chunk * plan.chunk);
  const std::int64_t tiles = std::max<std::int64_t>(1, (std::min(rows, nq) + plan.query_tile - 1) / plan.query_tile);
  plan.splits = std::clamp<std::int64_t>(std::min(wanted_tasks / tiles, nk / worth_a_split), 1, wanted_tasks);
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  plan.workers = std::max(1, machine.concurrency / plan.team_size);
  if (!machine.host) plan.workers = std::min(plan.workers, most_device_workers);
  return plan;
}

/// How moment matching cuts its work. Nothing but `workers` and `team_size` depends on the machine.
struct MomentPlan {
  static constexpr std::int64_t block_elements = 8192;  ///< of a tensor that one task sums
  static constexpr std::int64_t feature_rows = 256;     ///< rows whose features one task sums
  static constexpr int lanes = 128;                     ///< partial sums of a device's team; a power of two
  int workers = 1;
  int team_size = 1;
};

/// For any number of tasks of about the same size.
inline MomentPlan make_moment_plan(std::int64_t tasks, const MachineTraits& machine) {
  constexpr int device_team_size = 128;
  constexpr std::int64_t most_workers = 1 << 16;  // the others take turns
  MomentPlan plan;
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(tasks, 1, most_workers));
  return plan;
}

/// Workers for tasks that each need memory of their own.
inline Plan make_worker_plan(std::int64_t tasks, const MachineTraits& machine) {
  constexpr int device_team_size = 128;
  Plan plan;
  if (!machine.host) plan.team_size = std::max(1, std::min(device_team_size, machine.concurrency));
  const std::int64_t most_workers = std::max(1, machine.concurrency / plan.team_size);
  plan.workers = static_cast<int>(std::clamp<std::int64_t>(tasks, 1, most_workers));
  return plan;
}

/// How eigenvalues of matrices on the host are found.
struct EigenvaluePlan {
  static constexpr int squarings = 50;                   ///< of spectral_radius(): 1e-15 of the modulus is left
  static constexpr int squarings_of_second = 32;         ///< of second_eigenvalue(): 1e-9
  static constexpr std::int64_t largest_squared = 512;   ///< order up to which the second eigenvalue is found so
  static constexpr int steps_before = 100, steps = 300;  ///< of the power iteration above that
  static constexpr int block = 64;                       ///< rows of a product that one thread forms
  static constexpr int blocks_worth_a_launch = 3;
};

}  // namespace LinAttn
