#include "state/membership.hpp"

#include <utility>

#include "sockets/unix_socket.hpp"

namespace collectives {

Membership single_rank_membership() {
  Membership membership;
  membership.layout = SegmentLayout(shape_for(1));
  membership.segment = std::make_shared<Segment>(Segment::create_private(membership.layout.total_bytes()));
  membership.processes.resize(1);
  return membership;
}

std::vector<int> Membership::ended() const {
  std::vector<int> ranks;
  for (int r = 0; r < static_cast<int>(processes.size()); ++r) {
    const ProcessDescriptor& process = processes[static_cast<std::size_t>(r)];
    if (process && readable_until(*process, 0)) ranks.push_back(r);
  }
  return ranks;
}

void Membership::span(Topology where, Network how, int on_host) {
  topology = std::move(where);
  ranks_on_host = on_host;
  network = std::move(how);
}

}  // namespace collectives
