// Which algorithm a collective takes, by size. This is the one place that decides it.
//
//   operation          size that decides            staged up to     beyond
//   -----------------  ---------------------------  ---------------  ------------------------------------
//   barrier            -                            always           -
//   all_reduce         the tensor                   one_shot_bytes   sliced
//   reduce             the tensor                   one_shot_bytes   sliced; of two ranks: root_reduces
//   broadcast, gather  the tensor                   staged_bytes     chunked
//   all_gather         the longest contribution     staged_bytes     chunked
//   scatter            all that the root sends      staged_bytes     chunked
//   reduce_scatter     all that a rank contributes  staged_bytes     chunked
//   all_to_all         all that a rank sends        staged_bytes     chunked; each sender by itself
//
// In a group that spans machines every collective beyond its threshold is hierarchical, but for all_reduce
// and reduce_scatter as long as what a machine sends another for its ranks fits beside the arrival: these are
// staged in parts, a reduce_scatter below the threshold, too, for that is never more. Reductions count a
// contribution as it travels, as accumulators where a machine has several ranks. Of one rank every one is
// local. The thresholds are in selection/thresholds.cpp, what each may be in selection/tuning.cpp; ranks
// share them, so that all take the same algorithm. `sliced_chunk_bytes` says how a sliced message is cut.
//
// No choice changes a bit of the result (kernels/kernels.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/codes.hpp"
#include "selection/tuning.hpp"

namespace collectives {

enum class Algorithm : std::uint8_t {
  // One rank: a copy, or nothing.
  local,
  // Contributions lie in shared memory before the ranks arrive, and are read right after: one synchronisation
  // in all. Whoever needs a reduction reduces everything.
  staged,
  // all_reduce, reduce: chunks are cut into a slice for each rank, which reduces it; results go through the
  // same rings (a reduce-scatter and an all-gather, pipelined).
  sliced,
  // reduce of two ranks: the root reduces from its own tensor and the other's ring.
  root_reduces,
  // Chunks go from the sender's ring to the receivers.
  chunked,
  // Between machines: what machines contribute travels with the arrival, to each the parts that its ranks
  // reduce. all_reduce: a second exchange gives everybody the results.
  staged_in_parts,
  // Each machine combines what its ranks contribute, exchanges it with the others, and hands out results.
  hierarchical,
};

// The largest size, in the table's sense, that is staged.
constexpr std::uint64_t most_staged_bytes(Opcode opcode, const Tuning& tuning) noexcept {
  const bool whole = opcode == Opcode::all_reduce || opcode == Opcode::reduce;
  return whole ? tuning.one_shot_bytes : tuning.staged_bytes;
}

// `bytes`: the size that decides, by the table. `parts_fit`: the operation has parts, which fit.
constexpr Algorithm select_algorithm(Opcode opcode, const Tuning& tuning, int ranks, bool spans_machines,
                                     std::uint64_t bytes, bool parts_fit = false) noexcept {
  if (ranks == 1) return Algorithm::local;
  if (opcode == Opcode::reduce_scatter && parts_fit) return Algorithm::staged_in_parts;
  if (bytes <= most_staged_bytes(opcode, tuning)) return Algorithm::staged;
  if (spans_machines) return parts_fit ? Algorithm::staged_in_parts : Algorithm::hierarchical;
  if (opcode == Opcode::all_reduce) return Algorithm::sliced;
  if (opcode == Opcode::reduce) return ranks == 2 ? Algorithm::root_reduces : Algorithm::sliced;
  return Algorithm::chunked;
}

// A long message has so many bytes for each thread that works on it: with less, waking a thread would cost
// what it spares.
inline constexpr std::uint64_t kBytesPerThread = 256 * kKiB;

constexpr std::uint64_t threads_for(std::uint64_t threads, std::uint64_t bytes) noexcept {
  if (threads <= 1 || bytes < 2 * kBytesPerThread) return 1;
  return std::min(threads, bytes / kBytesPerThread);
}

// Bytes of a chunk of a message of `bytes` in all. Several threads share one, so that it is longer: each part
// of it is to be worth handing out.
constexpr std::size_t chunk_bytes_for(const Tuning& tuning, std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kMostBytes = 256 * kKiB;  // as tuning.cpp
  const std::uint64_t threads = threads_for(tuning.threads, bytes);
  if (threads == 1) return tuning.chunk_bytes;
  const std::uint64_t most = std::min(kMostBytes, tuning.ring_bytes / 4 / 4096 * 4096);
  const std::uint64_t wanted = threads < most / tuning.chunk_bytes ? threads * tuning.chunk_bytes : most;
  return std::max(tuning.chunk_bytes, wanted);
}

// Bytes of a chunk that is cut into slices: enough chunks to overlap, none too short to be worth its
// synchronisation.
constexpr std::size_t sliced_chunk_bytes(const Tuning& tuning, std::size_t bytes) noexcept {
  constexpr std::size_t kUnit = 4096;
  const auto round_up = [](std::size_t value) { return (value + kUnit - 1) / kUnit * kUnit; };
  if (bytes <= tuning.unsplit_bytes) return round_up(bytes);
  const std::size_t most = chunk_bytes_for(tuning, bytes);
  return std::clamp<std::size_t>(round_up(bytes / tuning.chunks_wanted),
                                 std::min<std::size_t>(tuning.shortest_chunk_bytes, most), most);
}

}  // namespace collectives
