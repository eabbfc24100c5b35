#include "selection/tuning.hpp"

namespace collectives {
namespace {

// Within these bounds the regions of two successive operations fit into a staging buffer, as they must
// (algorithms/collective_context.hpp).
constexpr TuningField kFields[] = {
    {"one_shot_bytes", &Tuning::one_shot_bytes, 128, 128 * kKiB, 1,
     "all_reduce and reduce: up to this length every rank reduces everything, after one synchronisation"},
    {"staged_bytes", &Tuning::staged_bytes, 128, 128 * kKiB, 1,
     "all other collectives: what a rank contributes goes without chunks up to this length"},
    {"chunk_bytes", &Tuning::chunk_bytes, 16 * kKiB, 256 * kKiB, 4 * kKiB,
     "length of the chunks in which long contributions pass"},
    {"unsplit_bytes", &Tuning::unsplit_bytes, 0, 1 * kMiB, 1,
     "all_reduce and reduce by slices: up to this length a message is one chunk"},
    {"shortest_chunk_bytes", &Tuning::shortest_chunk_bytes, 4 * kKiB, 256 * kKiB, 4 * kKiB,
     "all_reduce and reduce by slices: chunks become no shorter than this to make them more"},
    {"chunks_wanted", &Tuning::chunks_wanted, 1, 64, 1,
     "all_reduce and reduce by slices: chunks that a message is cut into if they may be so short"},
    {"ring_bytes", &Tuning::ring_bytes, 64 * kKiB, 2 * kMiB, 4 * kKiB,
     "how far a rank may be ahead of those who read what it contributes; at least 4 chunks"},
    {"past_cache_bytes", &Tuning::past_cache_bytes, 0, std::uint64_t{1} << 62, 1,
     "outputs of at least this length are written past the processor's caches, unless they are the inputs"},
    {"spin_us", &Tuning::spin_us, 0, 10'000, 1,
     "longest wait, in microseconds, before a caller that has nothing else to do sleeps"},
    {"background_spin_us", &Tuning::background_spin_us, 0, 10'000, 1,
     "the same for a group's own thread, which competes with its process for the core"},
    {"yields", &Tuning::yields, 0, 10'000, 1,
     "where ranks outnumber cores: how often who waits yields its core before it sleeps, at least"},
};

}  // namespace

std::span<const TuningField> tuning_fields() noexcept { return kFields; }

std::string complaint_about(const Tuning& tuning) {
  for (const TuningField& field : kFields) {
    const std::uint64_t value = tuning.*field.value;
    if (value >= field.least && value <= field.most && value % field.unit == 0) continue;
    return std::string(field.name) + " must be from " + std::to_string(field.least) + " to " +
           std::to_string(field.most) +
           (field.unit == 1 ? std::string() : " and a multiple of " + std::to_string(field.unit)) + ", not " +
           std::to_string(value);
  }
  // A pipeline drains a chunk two steps after it filled it.
  if (tuning.ring_bytes < 4 * tuning.chunk_bytes) {
    return "ring_bytes must be at least 4 times chunk_bytes (" + std::to_string(tuning.chunk_bytes) +
           "), not " + std::to_string(tuning.ring_bytes);
  }
  if (tuning.ring_bytes < tuning.unsplit_bytes) {
    return "ring_bytes must be at least unsplit_bytes (" + std::to_string(tuning.unsplit_bytes) + "), not " +
           std::to_string(tuning.ring_bytes);
  }
  return {};
}

}  // namespace collectives
