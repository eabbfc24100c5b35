// The sizes at which collectives change their algorithm, where nobody has tuned them.
#include <algorithm>

#include "selection/tuning.hpp"

namespace collectives {

Tuning default_tuning(int size) {
  const auto ranks = static_cast<std::uint64_t>(std::max(size, 1));
  const bool pair = size <= 2;
  return Tuning{
      // Two ranks synchronise twice in less time than it takes to read what slices spare them. With more
      // ranks a second synchronisation costs more, and so does reducing everything on each.
      .one_shot_bytes = pair ? 4 * kKiB : std::clamp(256 * kKiB / ranks, 8 * kKiB, 64 * kKiB),
      .staged_bytes = 64 * kKiB,
      // A chunk stays in a core's cache together with its neighbours. Longer ones would keep the number of
      // synchronisations low, but go through slower memory (measured, 4 ranks on 2 cores, 4 MiB: 1.6 ms with
      // 64 and 96 KiB, 1.9 with 256; from 25 MiB on the longer of the two are a little faster).
      .chunk_bytes = pair ? 64 * kKiB : 96 * kKiB,
      .unsplit_bytes = 256 * kKiB,
      .shortest_chunk_bytes = 32 * kKiB,
      .chunks_wanted = 4,
      // Longer than a core's own cache, so that its readers' copies are evicted when it is written again.
      .ring_bytes = 2 * kMiB,
      .past_cache_bytes = 8 * kMiB,
      .spin_us = 100,
      .background_spin_us = 20,
      // Where ranks outnumber cores, those who come next are often ready to run.
      .yields = pair ? 2U : 8U,
  };
}

Tuning tuning_between_machines(Tuning tuning, std::uint64_t slot_bytes) {
  tuning.staged_bytes = tuning.one_shot_bytes = slot_bytes;
  return tuning;
}

}  // namespace collectives
