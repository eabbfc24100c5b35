// Long reductions between machines, and the order in which contributions of several machines are reduced.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "algorithms/between_machines.hpp"
#include "algorithms/machine_parts.hpp"
#include "algorithms/pipeline.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// How machines represent contributions on their way: as elements where a machine has one rank, else as
// accumulators.
class Partials {
 public:
  Partials(const Placement& placement, const Reduction& reduction)
      : placement_(placement),
        reduction_(reduction),
        element_(size_of(reduction.dtype)),
        accumulator_(accumulator_bytes(reduction.dtype, reduction.op)),
        raw_(all_alone(placement)),
        pointers_(placement.machines.size()) {}

  std::size_t element() const { return element_; }
  std::size_t accumulator() const { return accumulator_; }
  std::size_t widest() const { return raw_ ? element_ : std::max(element_, accumulator_); }
  std::size_t bytes_of(std::size_t machine) const {
    return alone(placement_, machine) ? element_ : accumulator_;
  }
  // Bytes of scratch space that `combine` needs for so many elements.
  std::size_t scratch_bytes(std::size_t count) const {
    return raw_ ? 0 : placement_.machines.size() * round_up(count * accumulator_, kSliceAlignment);
  }

  // dst = the partials of all machines; `partial(machine)` says where each is.
  template <class Where>
  void combine(std::byte* dst, std::size_t count, std::byte* scratch, Where&& partial) {
    if (count == 0) return;
    const int machines = placement_.count();
    for (std::size_t m = 0; m < pointers_.size(); ++m) {
      const std::byte* from = partial(m);
      if (!raw_ && alone(placement_, m)) {
        std::byte* wide = scratch + m * round_up(count * accumulator_, kSliceAlignment);
        const void* source = from;
        accumulate(wide, &source, 1, count, reduction_.dtype, reduction_.op, reduction_.factor);
        from = wide;
      }
      pointers_[m] = from;
    }
    if (raw_) {
      collectives::reduce(dst, pointers_.data(), machines, count, reduction_.dtype, reduction_.op,
                          reduction_.factor);
    } else {
      collectives::combine(dst, pointers_.data(), machines, count, reduction_.dtype, reduction_.op,
                           reduction_.factor);
    }
  }

 private:
  const Placement& placement_;
  const Reduction& reduction_;
  std::size_t element_;
  std::size_t accumulator_;
  bool raw_;
  std::vector<const void*> pointers_;
};

// Elements of a chunk of a message that is reduced.
std::size_t reduced_chunk(std::size_t count, const Partials& partials, bool raw) {
  const std::size_t element = partials.element();
  const std::size_t wanted = std::max(count * element / kChunksWanted, kLeastChunk) / element;
  // Windows: contributions and results in elements, slices of partials in accumulators, at least two ranks.
  const std::size_t most =
      raw ? kMostChunk / element
          : Pipeline::kWindowBytes / Pipeline::kSlots / (2 * element + (partials.accumulator() + 1) / 2);
  return std::max(round_down(std::min(wanted, most), kSliceAlignment), kSliceAlignment);
}

// all_reduce and reduce: phase 1 brings each machine the others' partials of its share, phase 2 the shares of
// results to whoever wants them.
class MachineReduction final : public Pipeline {
 public:
  MachineReduction(Round& round, std::byte* data, std::size_t count, const Reduction& reduction, int root)
      : MachineReduction(round, data, count, reduction, root, Partials(round.placement(), reduction)) {}

 private:
  MachineReduction(Round& round, std::byte* data, std::size_t count, const Reduction& reduction, int root,
                   Partials partials)
      : MachineReduction(
            round, data, reduction, root, partials,
            Pieces{.total = count, .step = reduced_chunk(count, partials, all_alone(round.placement()))}) {}

  MachineReduction(Round& round, std::byte* data, const Reduction& reduction, int root,
                   const Partials& partials, const Pieces& chunks)
      : Pipeline(round, leaders_of(round.placement()), chunks.count(),
                 {.fills = true, .reduces = true, .two_phases = true, .lag = kDepth}),
        data_(data),
        reduction_(reduction),
        root_(root),
        partials_(partials),
        element_(partials.element()),
        chunks_(chunks),
        me_(static_cast<std::size_t>(std::find(local_.begin(), local_.end(), round.rank()) -
                                     local_.begin())) {
    share_ = parted(chunks_.step, machines()).step;
    slice_ = parted(chunks_.step, local_.size()).step;
    if (!alone()) {
      contributions_ = round.open_window(kSlots * chunks_.step * element_);
      slices_ = round.open_window(kSlots * slice_ * partials_.accumulator());
      results_ = round.open_window(kSlots * chunks_.step * element_);
    }
    if (!is_agent()) return;
    // Of `kDepth` chunks: the others' partials of the own share and the own one, and results nobody here
    // wants.
    place_ = share_ * partials_.widest();
    const std::size_t places = kDepth * machines() * place_;
    const std::size_t kept = kDepth * share_ * element_;
    memory_ = round.streams().scratch(places + kept + partials_.scratch_bytes(share_));
    kept_results_ = memory_ + places;
    widened_ = kept_results_ + kept;
  }

  Pieces shares(std::uint64_t c) const { return parted(chunks_.length(c), machines()); }
  Pieces slices(std::uint64_t c) const { return parted(chunks_.length(c), local_.size()); }
  std::byte* tensor(std::uint64_t c, std::size_t at) const {
    return data_ + (chunks_.begin(c) + at) * element_;
  }
  std::byte* contribution(int rank, std::uint64_t c, std::size_t at) const {
    return round_.window(rank, contributions_) + ((c % kSlots) * chunks_.step + at) * element_;
  }
  std::byte* slice(int rank, std::uint64_t c) const {
    return round_.window(rank, slices_) + (c % kSlots) * slice_ * partials_.accumulator();
  }
  std::byte* place(std::uint64_t c, std::size_t machine) const {
    return memory_ + ((c % kDepth) * machines() + machine) * place_;
  }
  bool machine_wants(std::size_t machine) const {
    return root_ < 0 || round_.placement().of(root_) == static_cast<int>(machine);
  }
  std::size_t own() const { return as_index(machine_); }
  std::byte* result(std::uint64_t c, std::size_t at) const {
    if (!alone()) {
      return round_.window(agent_, results_) + ((c % kSlots) * chunks_.step + at) * element_;
    }
    return machine_wants(own()) ? tensor(c, at) : kept_results_ + (c % kDepth) * share_ * element_;
  }

  void fill(std::uint64_t c) override {
    const Pieces parts = slices(c);
    const std::size_t begin = parts.begin(me_);
    const std::size_t end = parts.begin(me_ + 1);
    collectives::copy(contribution(round_.rank(), c, 0), tensor(c, 0), begin * element_);
    collectives::copy(contribution(round_.rank(), c, end), tensor(c, end), (parts.total - end) * element_);
  }

  void reduce(std::uint64_t c) override {
    const Pieces parts = slices(c);
    const void** sources = round_.sources();
    for (std::size_t i = 0; i < local_.size(); ++i) {
      sources[i] = i == me_ ? tensor(c, parts.begin(me_)) : contribution(local_[i], c, parts.begin(me_));
    }
    accumulate(slice(round_.rank(), c), sources, static_cast<int>(local_.size()), parts.length(me_),
               reduction_.dtype, reduction_.op, reduction_.factor);
  }

  // Calls `take(address, bytes)` for the parts of this machine's partial of a range.
  template <class Take>
  void each_partial(std::uint64_t c, std::size_t begin, std::size_t end, Take&& take) const {
    if (begin >= end) return;
    if (alone()) return take(tensor(c, begin), (end - begin) * element_);
    const Pieces parts = slices(c);
    for (std::size_t i = 0; i < local_.size(); ++i) {
      const std::size_t from = std::max(begin, parts.begin(i));
      const std::size_t to = std::min(end, parts.begin(i + 1));
      if (from >= to) continue;
      take(slice(local_[i], c) + (from - parts.begin(i)) * partials_.accumulator(),
           (to - from) * partials_.accumulator());
    }
  }

  void keep(std::uint64_t c) override {
    if (alone()) return;
    const Pieces parts = shares(c);
    std::byte* to = place(c, own());
    each_partial(c, parts.begin(own()), parts.begin(own() + 1),
                 [&](const std::byte* from, std::size_t bytes) {
                   collectives::copy(to, from, bytes);
                   to += bytes;
                 });
  }

  void send_first(std::uint64_t c, int machine) override {
    const Pieces parts = shares(c);
    const std::size_t theirs = as_index(machine);
    each_partial(c, parts.begin(theirs), parts.begin(theirs + 1),
                 [&](const std::byte* from, std::size_t bytes) { stream(machine).send(from, bytes); });
  }

  bool first_has_room(std::uint64_t c) const override { return c < combined() + kDepth; }

  void receive_first(std::uint64_t c, int machine) override {
    const std::size_t theirs = as_index(machine);
    stream(machine).receive(place(c, theirs), shares(c).length(own()) * partials_.bytes_of(theirs));
  }

  bool results_have_room(std::uint64_t c) const override {
    if (!alone()) return c < kSlots || (all_drained(c - kSlots) && second_has_left(c - kSlots));
    return c < kDepth || machine_wants(own()) || second_has_left(c - kDepth);
  }

  void combine(std::uint64_t c) override {
    const Pieces parts = shares(c);
    const std::size_t begin = parts.begin(own());
    partials_.combine(result(c, begin), parts.length(own()), widened_, [&](std::size_t machine) {
      return machine == own() && alone() ? tensor(c, begin) : place(c, machine);
    });
  }

  void send_second(std::uint64_t c, int machine) override {
    if (!machine_wants(as_index(machine))) return;
    const Pieces parts = shares(c);
    stream(machine).send(result(c, parts.begin(own())), parts.length(own()) * element_);
  }

  void receive_second(std::uint64_t c, int machine) override {
    if (!machine_wants(own())) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = as_index(machine);
    stream(machine).receive(result(c, parts.begin(theirs)), parts.length(theirs) * element_);
  }

  void finish(std::uint64_t c) override {
    if (alone() || !(root_ < 0 || root_ == round_.rank())) return;
    collectives::copy(tensor(c, 0), result(c, 0), chunks_.length(c) * element_);
  }

  std::byte* data_;
  const Reduction& reduction_;
  const int root_;
  Partials partials_;
  const std::size_t element_;
  const Pieces chunks_;
  const std::size_t me_;  // among the local ranks
  std::size_t share_ = 0;
  std::size_t slice_ = 0;
  std::size_t contributions_ = 0;
  std::size_t slices_ = 0;
  std::size_t results_ = 0;
  std::size_t place_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* kept_results_ = nullptr;
  std::byte* widened_ = nullptr;
};

// Elements of a piece for one rank, such that every machine's windows have room: contributions for all ranks,
// partials for the remote ranks that one local rank takes care of and for itself, and the others' partials.
std::size_t scattered_piece(const Placement& placement, const Partials& partials, std::size_t longest) {
  const std::size_t ranks = placement.machine_of.size();
  const std::size_t machines = placement.machines.size();
  const std::size_t wanted = moved_chunk(longest * partials.element()) / partials.element();
  // Nothing but memory of its own limits a rank that is alone; shorter pieces would be more messages.
  std::size_t room =
      all_alone(placement) ? std::max(kMostChunk / machines / partials.element(), kSliceAlignment) : wanted;
  for (const auto& machine : placement.machines) {
    const std::size_t local = machine.size();
    if (local == 1) continue;
    const std::size_t bytes = ranks * partials.element() +
                              ((ranks - local) / local + 2) * partials.accumulator() +
                              local * (machines - 1) * partials.accumulator();
    room = std::min(room, Pipeline::kWindowBytes / Pipeline::kSlots / bytes);
  }
  return fitted_piece(wanted, room);
}

class MachineScatter final : public Pipeline {
 public:
  MachineScatter(Round& round, std::byte* output, const std::vector<Part>& parts, const Reduction& reduction)
      : MachineScatter(round, output, parts, reduction, Partials(round.placement(), reduction)) {}

 private:
  MachineScatter(Round& round, std::byte* output, const std::vector<Part>& parts, const Reduction& reduction,
                 const Partials& partials)
      : MachineScatter(round, output, parts, reduction, partials,
                       longest_bytes(parts) / size_of(reduction.dtype)) {}
  MachineScatter(Round& round, std::byte* output, const std::vector<Part>& parts, const Reduction& reduction,
                 const Partials& partials, std::size_t longest)
      : MachineScatter(
            round, output, parts, reduction, partials,
            Pieces{.total = longest, .step = scattered_piece(round.placement(), partials, longest)}) {}

  MachineScatter(Round& round, std::byte* output, const std::vector<Part>& parts, const Reduction& reduction,
                 const Partials& partials, const Pieces& pieces)
      : Pipeline(round, leaders_of(round.placement()), pieces.count(),
                 {.fills = true, .reduces = true, .lag = kSlots - 1}),
        output_(output),
        parts_(parts),
        reduction_(reduction),
        partials_(partials),
        element_(partials.element()),
        step_(pieces.step) {
    const Placement& placement = round.placement();
    index_.resize(parts.size());
    std::size_t remote = 0;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      if (!placement.is_local(static_cast<int>(r))) index_[r] = remote++;
    }
    for (std::size_t i = 0; i < local_.size(); ++i) index_[as_index(local_[i])] = i;
    own_place_ = (remote + local_.size() - 1) / local_.size();
    come_bytes_ = step_ * partials_.widest();
    const std::size_t come = local_.size() * (machines() - 1) * come_bytes_;
    const std::size_t widened = partials_.scratch_bytes(step_);
    if (alone()) {
      memory_ = round.streams().scratch(kDepth * come + widened);
      widened_ = memory_ + kDepth * come;
    } else {
      contributions_ = round.open_window(kSlots * parts.size() * step_ * element_);
      partial_window_ = round.open_window(kSlots * (own_place_ + 1) * step_ * partials_.accumulator());
      come_ = round.open_window(kSlots * come);
      widened_ = round.streams().scratch(widened);
    }
  }

  Pieces pieces(int rank) const { return {.total = parts_[as_index(rank)].bytes / element_, .step = step_}; }
  std::byte* part(int rank, std::uint64_t c) const {
    return parts_[as_index(rank)].data + pieces(rank).begin(c) * element_;
  }
  std::byte* contribution(int rank, std::uint64_t c, int to) const {
    return round_.window(rank, contributions_) +
           ((c % kSlots) * parts_.size() + as_index(to)) * step_ * element_;
  }
  // This machine's partial for a remote rank, or for `rank` itself.
  std::byte* partial(int rank, std::uint64_t c, std::size_t at) const {
    return round_.window(rank, partial_window_) +
           ((c % kSlots) * (own_place_ + 1) + at) * step_ * partials_.accumulator();
  }
  // The partial of another machine for a local rank.
  std::byte* come(std::uint64_t c, int to, std::size_t machine) const {
    const std::size_t other = machine < as_index(machine_) ? machine : machine - 1;
    const std::size_t place = index_[as_index(to)] * (machines() - 1) + other;
    const std::size_t slot = local_.size() * (machines() - 1) * come_bytes_;
    return (alone() ? memory_ + (c % kDepth) * slot : round_.window(agent_, come_) + (c % kSlots) * slot) +
           place * come_bytes_;
  }
  std::size_t me() const { return index_[as_index(round_.rank())]; }

  void fill(std::uint64_t c) override {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const int to = static_cast<int>(r);
      if (to == round_.rank()) continue;
      collectives::copy(contribution(round_.rank(), c, to), part(to, c), pieces(to).length(c) * element_);
    }
  }
  void accumulate_for(int to, std::uint64_t c, std::byte* dst) {
    const void** sources = round_.sources();
    for (std::size_t i = 0; i < local_.size(); ++i) {
      sources[i] = local_[i] == round_.rank() ? part(to, c) : contribution(local_[i], c, to);
    }
    accumulate(dst, sources, static_cast<int>(local_.size()), pieces(to).length(c), reduction_.dtype,
               reduction_.op, reduction_.factor);
  }
  void reduce(std::uint64_t c) override {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const int to = static_cast<int>(r);
      if (round_.placement().is_local(to) || index_[r] % local_.size() != me()) continue;
      accumulate_for(to, c, partial(round_.rank(), c, index_[r] / local_.size()));
    }
    accumulate_for(round_.rank(), c, partial(round_.rank(), c, own_place_));
  }
  void send_first(std::uint64_t c, int machine) override {
    for (const int to : round_.placement().machines[as_index(machine)]) {
      const std::size_t index = index_[as_index(to)];
      const std::byte* from =
          alone() ? part(to, c) : partial(local_[index % local_.size()], c, index / local_.size());
      stream(machine).send(from, pieces(to).length(c) * partials_.bytes_of(as_index(machine_)));
    }
  }
  void receive_first(std::uint64_t c, int machine) override {
    const std::size_t theirs = as_index(machine);
    for (const int to : local_) {
      stream(machine).receive(come(c, to, theirs), pieces(to).length(c) * partials_.bytes_of(theirs));
    }
  }
  bool first_has_room(std::uint64_t c) const override {
    return alone() ? c < finished() + kDepth : c < kSlots || all_drained(c - kSlots);
  }
  bool results_have_room(std::uint64_t) const override { return true; }

  void finish(std::uint64_t c) override {
    const int me = round_.rank();
    const Pieces mine = pieces(me);
    partials_.combine(output_ + mine.begin(c) * element_, mine.length(c), widened_, [&](std::size_t machine) {
      if (machine != as_index(machine_)) return static_cast<const std::byte*>(come(c, me, machine));
      return static_cast<const std::byte*>(alone() ? part(me, c) : partial(me, c, own_place_));
    });
  }

  std::byte* output_;
  const std::vector<Part>& parts_;
  const Reduction& reduction_;
  Partials partials_;
  const std::size_t element_;
  const std::size_t step_;
  std::vector<std::size_t> index_;  // of local ranks among them, of remote ranks among those
  std::size_t own_place_ = 0;
  std::size_t come_bytes_ = 0;
  std::size_t contributions_ = 0;
  std::size_t partial_window_ = 0;
  std::size_t come_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* widened_ = nullptr;
};

}  // namespace

void reduce_placed(const Placement& placement, void* dst, const void* const* sources, std::size_t count,
                   const Reduction& reduction) {
  if (!placement.several() || all_alone(placement)) {
    return reduce(dst, sources, static_cast<int>(placement.machine_of.size()), count, reduction.dtype,
                  reduction.op, reduction.factor);
  }
  constexpr std::size_t kScratch = 64 << 10;
  alignas(kLine) std::byte scratch[kScratch];
  const std::size_t element = size_of(reduction.dtype);
  const std::size_t wide = accumulator_bytes(reduction.dtype, reduction.op);
  const std::size_t machines = placement.machines.size();
  std::vector<std::byte> more;
  std::byte* memory = scratch;
  std::size_t block = round_down(kScratch / machines / wide, kSliceAlignment);
  if (block == 0) {
    block = kSliceAlignment;
    more.resize(machines * block * wide);
    memory = more.data();
  }
  std::vector<const void*> partials(machines);
  std::vector<const void*> local(placement.machine_of.size());
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t length = std::min(block, count - begin);
    for (std::size_t m = 0; m < machines; ++m) {
      const auto& ranks = placement.machines[m];
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

void reduce_between_machines(Round& round, std::byte* data, std::size_t count, const Reduction& reduction,
                             int root) {
  MachineReduction(round, data, count, reduction, root).run();
}

void reduce_scatter_between_machines(Round& round, std::byte* output, const std::vector<Part>& parts,
                                     const Reduction& reduction) {
  MachineScatter(round, output, parts, reduction).run();
}

}  // namespace collectives
