// The state of a group as a process that is no rank of it reads it from the group's segment.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memory/descriptor.hpp"
#include "state/rank_context.hpp"
#include "state/rank_snapshot.hpp"

namespace collectives {

struct ObservedRank {
  RankSnapshot known;
  bool local = false;               // on this machine; of others, what their machines have told last
  bool inside = false;              // of the collective that it arrived at
  std::uint64_t process_space = 0;  // the name space in which its process id counts
};

struct ObservedGroup {
  std::string label;
  std::optional<Failure> failure;
  std::vector<ObservedRank> ranks;
};

// Reads the segment once, and writes nothing. Throws where the descriptor is none of a segment, or of one
// that another version has laid out.
ObservedGroup observe(Descriptor file);

}  // namespace collectives
