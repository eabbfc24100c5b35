// Reductions of a group that spans machines: machine by machine, in two steps (kernels/kernels.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"
#include "kernels/kernels.hpp"
#include "state/topology.hpp"

namespace collectives {

// Bytes that an element of a contribution has at most on its way, between machines where there are several.
inline std::size_t widest_between(const Topology& topology, const Reduction& reduction) {
  const std::size_t element = size_of(reduction.dtype);
  return !topology.spans_machines() || one_rank_per_machine(topology)
             ? element
             : std::max(element, accumulator_bytes(reduction.dtype, reduction.op));
}

// How machines represent contributions on their way: as elements where a machine has one rank, else as
// accumulators.
class MachinePartials {
 public:
  MachinePartials(const Topology& topology, const Reduction& reduction)
      : topology_(topology),
        reduction_(reduction),
        element_(size_of(reduction.dtype)),
        accumulator_(accumulator_bytes(reduction.dtype, reduction.op)),
        raw_(one_rank_per_machine(topology)),
        pointers_(topology.machines.size()) {}

  std::size_t element() const { return element_; }
  std::size_t accumulator() const { return accumulator_; }
  std::size_t widest() const { return widest_between(topology_, reduction_); }
  std::size_t bytes_of(std::size_t machine) const {
    return has_one_rank(topology_, machine) ? element_ : accumulator_;
  }
  // Bytes of scratch space that `combine` needs for so many elements.
  std::size_t scratch_bytes(std::size_t count) const {
    return raw_ ? 0 : topology_.machines.size() * round_up(count * accumulator_, kSliceAlignment);
  }

  // dst = the partials of all machines; `partial(machine)` says where each is.
  template <class Where>
  void combine(const Team& team, std::byte* dst, std::size_t count, std::byte* scratch, Where&& partial) {
    if (count == 0) return;
    const int machines = topology_.count();
    for (std::size_t m = 0; m < pointers_.size(); ++m) {
      const std::byte* from = partial(m);
      if (!raw_ && has_one_rank(topology_, m)) {
        std::byte* wide = scratch + m * round_up(count * accumulator_, kSliceAlignment);
        const void* source = from;
        team.accumulate(wide, &source, 1, count, reduction_);
        from = wide;
      }
      pointers_[m] = from;
    }
    if (raw_) {
      team.reduce(dst, pointers_.data(), machines, count, reduction_);
    } else {
      team.combine(dst, pointers_.data(), machines, count, reduction_);
    }
  }

 private:
  const Topology& topology_;
  const Reduction& reduction_;
  std::size_t element_;
  std::size_t accumulator_;
  bool raw_;
  std::vector<const void*> pointers_;
};

// dst = the contributions of all ranks, in rank order, or machine by machine where machines have more than
// one; sources by rank.
void reduce_by_machine(const Topology& topology, void* dst, const void* const* sources, std::size_t count,
                       const Reduction& reduction);

// Of one contribution, which `data` holds.
void reduce_local(const CollectiveContext& collective, std::byte* data, std::size_t count,
                  const Reduction& reduction);

// data = the own contribution, which it holds, and those that the other ranks have staged, `bytes` each.
void reduce_staged(CollectiveContext& collective, void* data, std::size_t count, std::size_t bytes,
                   const Reduction& reduction);

}  // namespace collectives
