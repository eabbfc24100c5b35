#include "algorithms/collective_context.hpp"

#include <string>

#include "algorithms/chunks.hpp"
#include "common/codes.hpp"
#include "common/error.hpp"
#include "memory/copy_once.hpp"
#include "transport/machine_transport.hpp"

namespace collectives {

void CollectiveContext::arrive(MachineContribution* contribution) {
  Arrival& mine = ranks_.arrival(rank(), call_.sequence);
  mine.what = call_.what;
  mine.own_count = call_.own_count;
  const bool spans_machines = machines_ != nullptr;
  if (spans_machines) {
    // What a machine contributes as one is no rank's.
    ranks_.own().machine_arrival.staged[call_.sequence & 1] = contribution == nullptr ? staged_ : 0;
  }
  ranks_.publish(mine.sequence, call_.sequence);
  if (spans_machines) machines_->arrivals.arrive(call_, contribution);
  bool alike = true;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const Arrival& theirs = ranks_.arrival(r, call_.sequence);
    if (!spans_machines) ranks_.await(call_, RankContext::Wait::arrival, r, theirs.sequence, call_.sequence);
    alike = alike && theirs.what == call_.what;
  }
  // Where all equal this rank's they are all equal, so every rank decides alike.
  if (!alike) [[unlikely]]
    mismatch("ranks issued different operations");
}

bool CollectiveContext::fits_arrival(std::size_t for_machine) const noexcept {
  return machines_->arrivals.takes_contributions() && for_machine <= ranks_.shape().slot_bytes;
}

bool CollectiveContext::sends_partials() const noexcept {
  return machines_ != nullptr && machines_->arrivals.takes_contributions() &&
         !one_rank_per_machine(topology());
}

void CollectiveContext::exchange_results(const std::vector<std::size_t>& lengths) {
  const int leader = topology().leader();
  reduced(0);
  if (rank() != leader) return await(leader, &Progress::arrived, 0);
  for (const int r : topology().local()) {
    if (r != leader) await_reduced(r, 0);
  }
  machines_->arrivals.exchange_results(call_, lengths);
  publish(&Progress::arrived, 0);
}

StreamPool& CollectiveContext::streams() const noexcept { return machines_->streams; }

void CollectiveContext::mismatch(const std::string& difference) const {
  std::string text =
      ranks_.prefix() + ", collective number " + std::to_string(call_.sequence) + ": " + difference;
  const Fingerprint first = copy_once(ranks_.arrival(0, call_.sequence).what);
  for (int r = 0; r < size(); ++r) {
    const Arrival& arrival = ranks_.arrival(r, call_.sequence);
    const Fingerprint theirs = copy_once(arrival.what);
    text += "\n  " + ranks_.name_of_rank(r) + ": " + describe(theirs, copy_once(arrival.own_count));
    if (theirs.check != first.check && theirs.opcode == first.opcode) {
      text += reduces(static_cast<Opcode>(theirs.opcode)) && theirs.count == first.count
                  ? " with another factor or other part sizes than rank 0"
                  : " with other part sizes than rank 0";
    }
  }
  text +=
      "\nNothing was written and the group stays usable. Every rank must issue the same collectives in the "
      "same order";
  throw Error(ErrorKind::mismatch, text, details_of(call_));
}

void CollectiveContext::too_long_for_buffer() const {
  throw Error(ErrorKind::backend,
              ranks_.prefix() + ", collective number " + std::to_string(call_.sequence) + ": " +
                  std::to_string(size()) + " ranks on " + std::to_string(topology().count()) +
                  " machines are too many for this operation, for which the memory that a rank shares has "
                  "no room; issue it in groups of fewer ranks",
              details_of(call_));
}

void CollectiveContext::too_many_chunks(std::uint64_t chunks) const {
  throw Error(ErrorKind::backend,
              ranks_.prefix() + ", collective number " + std::to_string(call_.sequence) +
                  ": the longest contribution has " + std::to_string(chunks) + " chunks, more than the " +
                  std::to_string((std::uint64_t{1} << kChunkBits) - 1) +
                  " that can be counted; issue it in parts",
              details_of(call_));
}

}  // namespace collectives
