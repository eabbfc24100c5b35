#include "algorithms/round.hpp"

#include <string>

#include "common/error.hpp"
#include "common/operation.hpp"

namespace collectives {

void Round::meet() {
  Arrival& mine = station_.arrival(rank(), call_.sequence);
  mine.what = call_.what;
  mine.own_count = call_.own_count;
  const bool several = station_.several();
  if (several) station_.own().relay.staged[call_.sequence & 1] = staged_;
  station_.publish(mine.sequence, call_.sequence);
  if (several) station_.meet_machines(call_);
  bool alike = true;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const Arrival& theirs = station_.arrival(r, call_.sequence);
    if (!several) station_.await(call_, Station::Wait::meeting, r, theirs.sequence, call_.sequence);
    alike = alike && theirs.what == call_.what;
  }
  // Where all equal this rank's they all are equal, so every rank decides alike.
  if (!alike) [[unlikely]]
    mismatch("ranks issued different operations");
}

void Round::mismatch(const std::string& difference) const {
  std::string text = "[rank " + std::to_string(rank()) + "] " + station_.label() + ", collective number " +
                     std::to_string(call_.sequence) + ": " + difference;
  const Arrival& first = station_.arrival(0, call_.sequence);
  for (int r = 0; r < size(); ++r) {
    const Arrival& theirs = station_.arrival(r, call_.sequence);
    text += "\n  " + station_.name_of_rank(r) + ": " + describe(theirs.what, theirs.own_count);
    if (theirs.what.check != first.what.check && theirs.what.kind == first.what.kind) {
      text += reduces(static_cast<Kind>(theirs.what.kind)) && theirs.what.count == first.what.count
                  ? " with another factor or other part sizes than rank 0"
                  : " with other part sizes than rank 0";
    }
  }
  text +=
      "\nNothing was written and the group stays usable. Every rank must issue the same collectives in the "
      "same order";
  throw Error(ErrorKind::mismatch, text);
}

void Round::too_long_for_arena() const {
  throw Error(ErrorKind::backend,
              "[rank " + std::to_string(rank()) + "] " + station_.label() + ", collective number " +
                  std::to_string(call_.sequence) + ": " + std::to_string(size()) + " ranks on " +
                  std::to_string(placement().count()) +
                  " machines are too many for this operation, for which the memory that a rank shares has "
                  "no room; issue it in groups of fewer ranks");
}

}  // namespace collectives
