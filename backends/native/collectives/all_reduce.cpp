// all_reduce. Staged: every rank stages its contribution and reduces all of them, or those of its machine.
// Staged in parts: it reduces its part of them. Sliced and hierarchical: see the headers of these names in
// algorithms/.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/hierarchical_reduction.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/sliced_reduction.hpp"
#include "algorithms/staged_partials.hpp"
#include "collectives/collectives.hpp"
#include "common/codes.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

void all_reduce_partials(CollectiveContext& collective, std::byte* output, const std::byte* input,
                         std::size_t count, const Reduction& reduction) {
  StagedPartials partials(collective, reduction, count,
                          {collective.topology().machines.size(), {{.begin = 0, .length = count}}});
  partials.contribute(input);
  collective.arrive_with(partials);
  partials.combine(output, 0);
}

// `parts`: in bytes, by rank.
void all_reduce_in_parts(CollectiveContext& collective, std::byte* output, const std::byte* input,
                         const Pieces& parts, const Reduction& reduction) {
  const std::size_t element = size_of(reduction.dtype);
  const auto ranks = static_cast<std::uint64_t>(collective.size());
  std::vector<std::size_t> lengths;
  std::vector<StagedPartials::Range> ranges;
  for (std::uint64_t r = 0; r < ranks; ++r) {
    lengths.push_back(parts.length(r));
    ranges.push_back({.begin = parts.begin(r) / element, .length = parts.length(r) / element});
  }
  StagedPartials partials(collective, reduction, parts.total / element,
                          StagedPartials::by_machine(collective.topology(), ranges));
  partials.contribute(input);
  collective.arrive_with(partials);
  partials.combine(collective.result(collective.rank()),
                   local_index(collective.topology(), collective.rank()));
  collective.exchange_results(lengths);
  for (std::uint64_t r = 0; r < ranks; ++r)
    collectives::copy(output + parts.begin(r), collective.result(static_cast<int>(r)), parts.length(r));
}

}  // namespace

void all_reduce(CollectiveContext& collective, std::byte* output, const std::byte* input, std::size_t count,
                const Reduction& reduction) {
  const Topology& topology = collective.topology();
  const std::size_t element = size_of(reduction.dtype);
  const std::size_t bytes = count * element;
  const std::size_t width = widest_between(topology, reduction);
  const Pieces parts = split_evenly(bytes, as_index(collective.size()));
  const std::size_t for_machine = parts.step / element * width * largest_machine(topology);
  const Algorithm algorithm = collective.algorithm(Opcode::all_reduce, count * width, for_machine);
  // Not before the ranks have compared what they call: of a mismatch no output is written.
  const auto fill_output = [&] {
    if (input != output) collective.team().copy(output, input, bytes);
  };
  if (algorithm == Algorithm::local) {
    collective.engage_team(bytes);
    fill_output();
    return reduce_local(collective, output, count, reduction);
  }
  if (algorithm == Algorithm::staged) {
    if (collective.sends_partials()) return all_reduce_partials(collective, output, input, count, reduction);
    collective.reserve(bytes);
    collectives::copy(collective.stage(bytes), input, bytes);
    collective.arrive_and_wait();
    fill_output();
    return reduce_staged(collective, output, count, bytes, reduction);
  }
  if (algorithm == Algorithm::staged_in_parts)
    return all_reduce_in_parts(collective, output, input, parts, reduction);
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) {
    collective.engage_team(bytes);
    fill_output();
    return hierarchical_all_reduce(collective, output, count, reduction);
  }
  sliced_all_reduce(collective, output, input, count, reduction);
}

}  // namespace collectives
