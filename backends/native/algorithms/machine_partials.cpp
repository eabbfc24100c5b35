#include "algorithms/machine_partials.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/kernels.hpp"
#include "state/control_page.hpp"

namespace collectives {

void reduce_by_machine(const Topology& topology, void* dst, const void* const* sources, std::size_t count,
                       const Reduction& reduction) {
  if (!topology.spans_machines() || one_rank_per_machine(topology)) {
    return reduce(dst, sources, static_cast<int>(topology.machine_of.size()), count, reduction.dtype,
                  reduction.op, reduction.factor);
  }
  constexpr std::size_t kScratch = 64 << 10;
  alignas(kLine) std::byte scratch[kScratch];
  const std::size_t element = size_of(reduction.dtype);
  const std::size_t wide = accumulator_bytes(reduction.dtype, reduction.op);
  const std::size_t machines = topology.machines.size();
  std::vector<std::byte> more;
  std::byte* memory = scratch;
  std::size_t block = round_down(kScratch / machines / wide, kSliceAlignment);
  if (block == 0) {
    block = kSliceAlignment;
    more.resize(machines * block * wide);
    memory = more.data();
  }
  std::vector<const void*> partials(machines);
  std::vector<const void*> local(topology.machine_of.size());
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t length = std::min(block, count - begin);
    for (std::size_t m = 0; m < machines; ++m) {
      const auto& ranks = topology.machines[m];
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        local[i] = static_cast<const std::byte*>(sources[as_index(ranks[i])]) + begin * element;
      }
      std::byte* partial = memory + m * block * wide;
      accumulate(partial, local.data(), static_cast<int>(ranks.size()), length, reduction.dtype, reduction.op,
                 reduction.factor);
      partials[m] = partial;
    }
    combine(static_cast<std::byte*>(dst) + begin * element, partials.data(), static_cast<int>(machines),
            length, reduction.dtype, reduction.op, reduction.factor);
  }
}

void reduce_local(const CollectiveContext& collective, std::byte* data, std::size_t count,
                  const Reduction& reduction) {
  if (reduction.op != ReduceOp::premul_sum)
    return;  // every other reduction of one contribution is that contribution
  const void* source = data;
  collective.team().reduce(data, &source, 1, count, reduction);
}

void reduce_staged(CollectiveContext& collective, void* data, std::size_t count, std::size_t bytes,
                   const Reduction& reduction) {
  const void** sources = collective.sources();
  for (int r = 0; r < collective.size(); ++r)
    sources[r] = r == collective.rank() ? data : collective.staged(r, bytes);
  reduce_by_machine(collective.topology(), data, sources, count, reduction);
}

}  // namespace collectives
