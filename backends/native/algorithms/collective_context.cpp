#include "algorithms/collective_context.hpp"

#include <string>

#include "common/error.hpp"
#include "common/opcode.hpp"
#include "transport/machine_transport.hpp"

namespace collectives {

void CollectiveContext::arrive_and_wait() {
  Arrival& mine = ranks_.arrival(rank(), call_.sequence);
  mine.what = call_.what;
  mine.own_count = call_.own_count;
  const bool spans_machines = machines_ != nullptr;
  if (spans_machines) ranks_.own().machine_arrival.staged[call_.sequence & 1] = staged_;
  ranks_.publish(mine.sequence, call_.sequence);
  if (spans_machines) machines_->arrivals.arrive(call_);
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

StreamPool& CollectiveContext::streams() const noexcept { return machines_->streams; }

void CollectiveContext::mismatch(const std::string& difference) const {
  std::string text =
      ranks_.prefix() + ", collective number " + std::to_string(call_.sequence) + ": " + difference;
  const Arrival& first = ranks_.arrival(0, call_.sequence);
  for (int r = 0; r < size(); ++r) {
    const Arrival& theirs = ranks_.arrival(r, call_.sequence);
    text += "\n  " + ranks_.name_of_rank(r) + ": " + describe(theirs.what, theirs.own_count);
    if (theirs.what.check != first.what.check && theirs.what.opcode == first.what.opcode) {
      text += reduces(static_cast<Opcode>(theirs.what.opcode)) && theirs.what.count == first.what.count
                  ? " with another factor or other part sizes than rank 0"
                  : " with other part sizes than rank 0";
    }
  }
  text +=
      "\nNothing was written and the group stays usable. Every rank must issue the same collectives in the "
      "same order";
  throw Error(ErrorKind::mismatch, text);
}

void CollectiveContext::too_long_for_buffer() const {
  throw Error(ErrorKind::backend,
              ranks_.prefix() + ", collective number " + std::to_string(call_.sequence) + ": " +
                  std::to_string(size()) + " ranks on " + std::to_string(topology().count()) +
                  " machines are too many for this operation, for which the memory that a rank shares has "
                  "no room; issue it in groups of fewer ranks");
}

}  // namespace collectives
