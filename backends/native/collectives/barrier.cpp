// barrier: the arrival of all ranks, and nothing after it.
#include "collectives/collectives.hpp"

namespace collectives {

void barrier(CollectiveContext& collective) {
  if (collective.size() > 1) collective.arrive_and_wait();
}

}  // namespace collectives
