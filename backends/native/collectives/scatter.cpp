// scatter. Staged: the root stages everything, each other rank copies its part. Chunked: the root fills
// chunks of its ring that hold a piece for each rank, the others drain theirs. Between machines the root
// sends to every rank directly.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/pairwise_exchange.hpp"
#include "collectives/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {

void scatter(CollectiveContext& collective, std::byte* output, std::size_t bytes,
             const std::vector<Part>& inputs, int root) {
  const int me = collective.rank();
  const bool sends = me == root;
  const auto all = static_cast<std::size_t>(collective.size());
  const std::size_t total = bytes * all;
  const CopyOut copy_out(collective, bytes);
  const Algorithm algorithm = collective.algorithm(Opcode::scatter, total);
  if (algorithm == Algorithm::local) {
    collective.engage_team(bytes);
    return copy_out(output, inputs[0].data, bytes);
  }
  if (algorithm == Algorithm::staged) {
    collective.reserve(total);
    if (sends) {
      std::byte* stage = collective.stage(total);
      for (std::size_t r = 0; r < all; ++r) collectives::copy(stage + r * bytes, inputs[r].data, bytes);
    }
    collective.arrive_and_wait();
    if (sends) return copy_out(output, inputs[static_cast<std::size_t>(me)].data, bytes);
    return collectives::copy(output, collective.staged(root, total) + static_cast<std::size_t>(me) * bytes,
                             bytes);
  }
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) {
    std::vector<Part> received(all);
    std::vector<Part> sent(inputs);
    sent.resize(all);
    if (sends) {
      copy_out(output, inputs[static_cast<std::size_t>(me)].data, bytes);
      sent[static_cast<std::size_t>(me)].bytes = 0;
    } else {
      received[static_cast<std::size_t>(root)] = {output, bytes};
    }
    return pairwise_exchange(collective, received, sent, bytes);
  }
  const Pieces pieces{.total = bytes, .step = collective.begin_pieces(total)};
  collective.open_rings(pieces.count(), all * pieces.step);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (sends) {
      collective.await_room(c);
      collective.team().split_items(all, pieces.step, [&](std::size_t r, std::size_t begin, std::size_t end) {
        end = std::min(end, pieces.length(c));
        if (r == static_cast<std::size_t>(me) || begin >= end) return;
        collectives::copy(collective.chunk(me, c) + r * pieces.step + begin,
                          inputs[r].data + pieces.begin(c) + begin, end - begin);
      });
      collective.filled(c);
      // While the others drain.
      copy_out(output + pieces.begin(c), inputs[static_cast<std::size_t>(me)].data + pieces.begin(c),
               pieces.length(c));
    } else {
      collective.await_filled(root, c);
      copy_out.take(output + pieces.begin(c),
                    collective.chunk(root, c) + static_cast<std::size_t>(me) * pieces.step, pieces.length(c));
      collective.drained(c);
    }
  }
}

}  // namespace collectives
