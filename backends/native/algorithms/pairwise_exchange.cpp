#include "algorithms/pairwise_exchange.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "algorithms/chunks.hpp"
#include "algorithms/pipeline.hpp"
#include "kernels/kernels.hpp"

namespace collectives {

void pairwise_exchange(CollectiveContext& collective, const std::vector<Part>& outputs,
                       const std::vector<Part>& inputs, std::size_t longest) {
  const int me = collective.rank();
  collective.engage_team(total_bytes(outputs) + total_bytes(inputs));
  const Topology& topology = collective.topology();
  const auto& local = topology.local();
  StreamSession session(collective.rank_context(), collective.call(), collective.streams());
  for (int k = 1; k < collective.size(); ++k) {
    const int r = (me + k) % collective.size();
    const Part& in = outputs[as_index(r)];
    const Part& out = inputs[as_index(r)];
    if (topology.is_local(r) || (in.bytes == 0 && out.bytes == 0)) continue;
    Stream& stream = session.with(r);
    stream.send(out.data, out.bytes);
    stream.receive(in.data, in.bytes);
  }
  session.pump();

  // Among the local ranks: a chunk holds a piece for each.
  if (local.size() > 1 && longest > 0) {
    const std::size_t step =
        std::max(round_down(Pipeline::kRegionBytes / Pipeline::kSlots / local.size(), kSliceAlignment),
                 kSliceAlignment);
    const std::size_t window = collective.open_region(Pipeline::kSlots * local.size() * step);
    const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
    collective.check_chunks(chunks);
    std::size_t own_longest = 0;  // of what this rank exchanges with the local ranks
    for (const int r : local) {
      if (r != me)
        own_longest = std::max({own_longest, inputs[as_index(r)].bytes, outputs[as_index(r)].bytes});
    }
    const std::uint64_t own_chunks = Pieces{.total = own_longest, .step = step}.count();
    const auto place = [&](int from, std::uint64_t c, std::size_t to) {
      return collective.region(from, window) + ((c % Pipeline::kSlots) * local.size() + to) * step;
    };
    const auto mine = static_cast<std::size_t>(std::find(local.begin(), local.end(), me) - local.begin());
    for (std::uint64_t i = 0; own_chunks > 0 && i <= own_chunks; ++i) {
      if (i < own_chunks) {
        for (std::size_t k = 1; k < local.size(); ++k) {
          const std::size_t to = (mine + k) % local.size();
          if (i >= Pipeline::kSlots) collective.await(local[to], &Progress::drained, i - Pipeline::kSlots);
          const Part& part = inputs[as_index(local[to])];
          const Pieces pieces{.total = part.bytes, .step = step};
          collective.team().copy(place(me, i, to), part.data + pieces.begin(i), pieces.length(i));
        }
        collective.publish(&Progress::filled, i);
      }
      if (i == 0) continue;
      for (std::size_t k = 1; k < local.size(); ++k) {
        const int from = local[(mine + k) % local.size()];
        const Part& part = outputs[as_index(from)];
        const Pieces pieces{.total = part.bytes, .step = step};
        if (pieces.length(i - 1) == 0) continue;
        collective.await(from, &Progress::filled, i - 1);
        collective.team().copy(part.data + pieces.begin(i - 1), place(from, i - 1, mine),
                               pieces.length(i - 1));
      }
      collective.publish(&Progress::drained, i - 1);
      session.pump();
    }
    // The others need not wait for this rank in the chunks that it has no part in.
    if (own_chunks < chunks) collective.publish(&Progress::drained, chunks - 1);
  }
  session.finish();
}

}  // namespace collectives
