// Short reductions between machines, some of which have several ranks or whose ranks reduce a part each:
// local ranks stage what they contribute, the leader stages the machine's partial of it, which travels with
// the arrival, and every rank combines the machines' partials of what it needs. So a machine sends no more
// than if it had one rank.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/collective_context.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/part.hpp"
#include "state/machine_contribution.hpp"

namespace collectives {

class StagedPartials final : public MachineContribution {
 public:
  // Elements of a contribution.
  struct Range {
    std::size_t begin;
    std::size_t length;
  };

  // Ranges of one rank each, by rank, as those of each machine's ranks.
  static std::vector<std::vector<Range>> by_machine(const Topology& topology,
                                                    const std::vector<Range>& ranges);

  // `needed`: the ranges that the ranks of each machine combine. Reserves room for contributions of `count`
  // elements; all ranks name the same.
  StagedPartials(CollectiveContext& collective, const Reduction& reduction, std::size_t count,
                 std::vector<std::vector<Range>> needed);

  // Before the arrival, one of these: where this rank puts its contribution, or where it has it.
  std::byte* stage();
  void contribute(const std::byte* data);

  // After the arrival: dst = the partials of all machines of this machine's range of that number.
  void combine(std::byte* dst, std::size_t range);

  std::size_t bytes(std::size_t from, std::size_t to) const override;
  void reduce_local() override;
  void append_to(std::vector<std::byte>& frame, std::size_t machine) const override;

 private:
  std::size_t own_machine() const { return as_index(collective_.topology().machine); }
  bool single_rank() const { return collective_.topology().local().size() == 1; }
  bool leads() const { return collective_.topology().leads(collective_.rank()); }
  // This machine's partial, from an element on.
  const std::byte* own_partial(std::size_t element) const;

  CollectiveContext& collective_;
  const Reduction& reduction_;
  const std::size_t count_;
  const std::vector<std::vector<Range>> needed_;
  MachinePartials partials_;
  const std::size_t staged_bytes_;  // of a contribution or a partial, whichever is longer
  const std::byte* own_ = nullptr;  // what this rank contributes
  std::vector<std::byte> memory_;   // of the leader, for that
};

}  // namespace collectives
