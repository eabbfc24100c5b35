// gather. Staged: the others stage, the root copies. Chunked: the others fill chunks of their rings, the root
// drains them. Between machines every rank sends to the root directly.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/pairwise_exchange.hpp"
#include "collectives/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {

void gather(CollectiveContext& collective, const std::vector<Part>& outputs, const std::byte* input,
            std::size_t bytes, int root) {
  const int me = collective.rank();
  const int ranks = collective.size();
  const bool receives = me == root;
  const CopyOut copy_out(collective, bytes * static_cast<std::size_t>(ranks));
  const Algorithm algorithm = collective.algorithm(Opcode::gather, bytes);
  if (algorithm == Algorithm::local) {
    collective.engage_team(bytes);
    return copy_out(outputs[0].data, input, bytes);
  }
  if (algorithm == Algorithm::staged) {
    collective.reserve(bytes);
    if (!receives) collectives::copy(collective.stage(bytes), input, bytes);
    collective.arrive_and_wait();
    if (!receives) return;
    for (int r = 0; r < ranks; ++r) {
      const Part& part = outputs[static_cast<std::size_t>(r)];
      if (r != me) collectives::copy(part.data, collective.staged(r, bytes), bytes);
    }
    return copy_out(outputs[static_cast<std::size_t>(me)].data, input, bytes);
  }
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) {
    std::vector<Part> received(outputs);
    std::vector<Part> sent(static_cast<std::size_t>(ranks));
    received.resize(sent.size());
    if (receives) {
      Part& own = received[static_cast<std::size_t>(me)];
      copy_out(own.data, input, bytes);
      own.bytes = 0;
    } else {
      sent[static_cast<std::size_t>(root)] = {const_cast<std::byte*>(input), bytes};  // only read
    }
    return pairwise_exchange(collective, received, sent, bytes);
  }
  const Pieces pieces{.total = bytes, .step = collective.begin_chunks(bytes)};
  collective.open_rings(pieces.count(), pieces.step);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (!receives) {
      collective.await_room(root, c);
      collective.team().copy(collective.chunk(me, c), input + pieces.begin(c), pieces.length(c));
      collective.filled(c);
      continue;
    }
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      collective.await_filled(r, c);
      copy_out.take(outputs[static_cast<std::size_t>(r)].data + pieces.begin(c), collective.chunk(r, c),
                    pieces.length(c));
    }
    collective.drained(c);
    // While the others fill.
    copy_out(outputs[static_cast<std::size_t>(me)].data + pieces.begin(c), input + pieces.begin(c),
             pieces.length(c));
  }
}

}  // namespace collectives
