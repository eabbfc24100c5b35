#include "algorithms/staged_partials.hpp"

#include <utility>

#include "kernels/kernels.hpp"
#include "transport/stream_pool.hpp"

namespace collectives {

StagedPartials::StagedPartials(CollectiveContext& collective, const Reduction& reduction, std::size_t count,
                               std::vector<std::vector<Range>> needed)
    : collective_(collective),
      reduction_(reduction),
      count_(count),
      needed_(std::move(needed)),
      partials_(collective.topology(), reduction),
      staged_bytes_(count * partials_.widest()) {
  if (!single_rank()) collective_.reserve(staged_bytes_);
}

std::vector<std::vector<StagedPartials::Range>> StagedPartials::by_machine(const Topology& topology,
                                                                           const std::vector<Range>& ranges) {
  std::vector<std::vector<Range>> needed(topology.machines.size());
  for (std::size_t m = 0; m < needed.size(); ++m) {
    for (const int rank : topology.machines[m]) needed[m].push_back(ranges[as_index(rank)]);
  }
  return needed;
}

std::byte* StagedPartials::stage() {
  if (leads()) memory_.resize(count_ * partials_.element());
  std::byte* stage = leads() ? memory_.data() : collective_.stage(staged_bytes_);
  own_ = stage;
  return stage;
}

void StagedPartials::contribute(const std::byte* data) {
  if (leads()) {
    own_ = data;
  } else {
    collectives::copy(stage(), data, count_ * partials_.element());
  }
}

const std::byte* StagedPartials::own_partial(std::size_t element) const {
  if (single_rank()) return own_ + element * partials_.element();
  return collective_.staged(collective_.topology().leader(), staged_bytes_) +
         element * partials_.accumulator();
}

std::size_t StagedPartials::bytes(std::size_t from, std::size_t to) const {
  std::size_t elements = 0;
  for (const Range& range : needed_[to]) elements += range.length;
  return elements * partials_.bytes_of(from);
}

void StagedPartials::reduce_local() {
  if (single_rank()) return;
  const std::vector<int>& local = collective_.topology().local();
  const void** sources = collective_.sources();
  for (std::size_t i = 0; i < local.size(); ++i)
    sources[i] = local[i] == collective_.rank() ? own_ : collective_.staged(local[i], staged_bytes_);
  accumulate(collective_.stage(staged_bytes_), sources, static_cast<int>(local.size()), count_,
             reduction_.dtype, reduction_.op, reduction_.factor);
}

void StagedPartials::append_to(std::vector<std::byte>& frame, std::size_t machine) const {
  const std::size_t width = partials_.bytes_of(own_machine());
  for (const Range& range : needed_[machine]) {
    const std::byte* from = own_partial(range.begin);
    frame.insert(frame.end(), from, from + range.length * width);
  }
}

void StagedPartials::combine(std::byte* dst, std::size_t range) {
  const std::vector<Range>& ranges = needed_[own_machine()];
  std::size_t before = 0;
  for (std::size_t i = 0; i < range; ++i) before += ranges[i].length;
  const auto [begin, length] = ranges[range];
  std::byte* scratch = collective_.streams().scratch(partials_.scratch_bytes(length));
  partials_.combine(collective_.team(), dst, length, scratch, [&, first = begin](std::size_t machine) {
    return machine == own_machine()
               ? own_partial(first)
               : collective_.remote_partial(machine) + before * partials_.bytes_of(machine);
  });
}

}  // namespace collectives
