// all_reduce and reduce of long messages within a machine: a reduce-scatter and an all-gather in one
// pipeline.
//
// A pipeline of three stages over the chunks; a slice is one rank's share of a chunk:
//   fill c      copy what the others reduce, everything but the own slice, into the own ring
//   reduce c-1  reduce the own slice over all ranks, the own contribution straight from the tensor, into the
//               tensor and into the next rank's ring
//   drain c-2   copy the other slices from where their owners put them into the tensor
// So each contribution is copied at most once, each result at most twice.
//
// A result goes where the next rank's contribution to it was. Those cache lines have just come to the owner's
// core, and are cheap to write there; lines in a ring of its own would have to be taken back from the cores
// that read them last. Between two ranks every line then carries data both ways, and the rings need not
// rotate.
//
// A tensor's memory is read once and written once while its chunk is still in the cache, and is fetched into
// it while the stage before waits for lines of other cores. The stages of neighbouring chunks overlap between
// ranks, so that nobody waits for one chunk at a time.
#pragma once

#include <cstddef>

#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"

namespace collectives {

// Result in `output`; `input` may be that.
void sliced_all_reduce(CollectiveContext& collective, std::byte* output, const std::byte* input,
                       std::size_t count, const Reduction& reduction);
// Result in `data` on the root; elsewhere `data` is only read.
void sliced_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                   const Reduction& reduction, int root);

}  // namespace collectives
