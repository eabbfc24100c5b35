// Which algorithm each collective takes below, at and above its threshold.
#include "selection/selection.hpp"

#include <cstdint>
#include <initializer_list>

#include "tests/testing.hpp"

namespace collectives {
namespace {

constexpr std::initializer_list<Opcode> kStagedByBytes = {
    Opcode::broadcast, Opcode::all_gather, Opcode::reduce_scatter,
    Opcode::gather,    Opcode::scatter,    Opcode::all_to_all,
};

void test_thresholds() {
  Tuning tuning = default_tuning(4);
  for (const std::uint64_t limit : {std::uint64_t{128}, tuning.one_shot_bytes, std::uint64_t{100'000}}) {
    // Each threshold decides its operations alone.
    tuning.one_shot_bytes = limit;
    tuning.staged_bytes = limit / 2;
    for (const Opcode opcode : {Opcode::all_reduce, Opcode::reduce}) {
      CHECK(select_algorithm(opcode, tuning, 4, false, limit) == Algorithm::staged);
      CHECK(select_algorithm(opcode, tuning, 4, false, limit + 1) == Algorithm::sliced);
      CHECK(select_algorithm(opcode, tuning, 4, true, limit + 1) == Algorithm::hierarchical);
      CHECK(select_algorithm(opcode, tuning, 4, true, limit + 1, true) == Algorithm::staged_in_parts);
      CHECK(select_algorithm(opcode, tuning, 4, true, limit, true) == Algorithm::staged);
    }
    for (const Opcode opcode : kStagedByBytes) {
      CHECK(select_algorithm(opcode, tuning, 4, false, limit / 2) == Algorithm::staged);
      CHECK(select_algorithm(opcode, tuning, 4, false, limit / 2 + 1) == Algorithm::chunked);
      CHECK(select_algorithm(opcode, tuning, 4, true, limit / 2 + 1) == Algorithm::hierarchical);
    }
  }
  for (const std::uint64_t bytes : {1U, 1U << 20}) {
    CHECK(select_algorithm(Opcode::reduce_scatter, tuning, 4, true, bytes, true) ==
          Algorithm::staged_in_parts);
  }
  CHECK(select_algorithm(Opcode::all_reduce, tuning, 2, false, 1 << 20) == Algorithm::sliced);
  CHECK(select_algorithm(Opcode::reduce, tuning, 2, false, 1 << 20) == Algorithm::root_reduces);
  CHECK(select_algorithm(Opcode::all_reduce, tuning, 1, false, 1 << 20) == Algorithm::local);
}

void test_defaults() {
  for (const int size : {1, 2, 3, 8, 64, 1000}) {
    const Tuning tuning = default_tuning(size);
    CHECK(complaint_about(tuning).empty());
    CHECK(tuning.one_shot_bytes >= 4096 && tuning.one_shot_bytes <= (64 << 10));
    const Tuning between = tuning_between_machines(tuning, 8192);
    CHECK(most_staged_bytes(Opcode::all_reduce, between) == 8192);
    CHECK(most_staged_bytes(Opcode::all_gather, between) == 8192);
    CHECK(between.chunk_bytes == tuning.chunk_bytes);
  }
}

// Short messages are one chunk; longer ones get as many as wanted, within the bounds of a chunk's length.
void test_sliced_chunks() {
  const Tuning tuning = default_tuning(4);
  CHECK(sliced_chunk_bytes(tuning, 5000) == 8192);
  CHECK(sliced_chunk_bytes(tuning, tuning.unsplit_bytes) == tuning.unsplit_bytes);
  CHECK(sliced_chunk_bytes(tuning, tuning.unsplit_bytes + tuning.chunks_wanted) == (68 << 10));
  CHECK(sliced_chunk_bytes(tuning, std::size_t{1} << 30) == tuning.chunk_bytes);
}

}  // namespace

Tests selection_tests() {
  return {
      {"algorithm by size", test_thresholds},
      {"default thresholds", test_defaults},
      {"chunks of sliced messages", test_sliced_chunks},
  };
}

}  // namespace collectives
