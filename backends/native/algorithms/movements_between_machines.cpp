// Long collectives between machines that reduce nothing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/between_machines.hpp"
#include "algorithms/machine_parts.hpp"
#include "algorithms/pipeline.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// The leaders, but the root for its machine.
std::vector<int> agents_for(const Placement& placement, int root) {
  std::vector<int> agents = leaders_of(placement);
  agents[as_index(placement.of(root))] = root;
  return agents;
}

// The root deals shares to the other machines, which pass them on to each other.
class MachineBroadcast final : public Pipeline {
 public:
  MachineBroadcast(Round& round, std::byte* data, std::size_t bytes, int root)
      : Pipeline(round, agents_for(round.placement(), root),
                 Pieces{.total = bytes, .step = moved_chunk(bytes)}.count(),
                 {.two_phases = true, .depth = all_alone(round.placement()) ? kDepth : kSlots / 2}),
        data_(data),
        chunks_{.total = bytes, .step = moved_chunk(bytes)},
        source_(as_index(round.placement().of(root))),
        root_(root) {
    if (!alone()) window_ = round.open_window(kSlots * chunks_.step);
  }

 private:
  bool deals() const { return as_index(machine_) == source_; }
  Pieces shares(std::uint64_t c) const { return parted(chunks_.length(c), machines() - 1); }
  // Which share a machine other than the root's passes on.
  std::size_t share_of(std::size_t machine) const { return machine < source_ ? machine : machine - 1; }
  std::byte* place(std::uint64_t c, std::size_t at) const {
    return alone() ? data_ + chunks_.begin(c) + at
                   : round_.window(agent_, window_) + (c % kSlots) * chunks_.step + at;
  }

  bool results_have_room(std::uint64_t c) const override {
    return alone() || c < kSlots || (all_drained(c - kSlots) && second_has_left(c - kSlots));
  }
  bool first_has_room(std::uint64_t c) const override { return results_have_room(c); }

  void send_first(std::uint64_t c, int machine) override {
    if (!deals()) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = share_of(as_index(machine));
    stream(machine).send(data_ + chunks_.begin(c) + parts.begin(theirs), parts.length(theirs));
  }
  void receive_first(std::uint64_t c, int machine) override {
    if (as_index(machine) != source_) return;
    const Pieces parts = shares(c);
    const std::size_t mine = share_of(as_index(machine_));
    stream(machine).receive(place(c, parts.begin(mine)), parts.length(mine));
  }
  void combine(std::uint64_t c) override {
    if (deals() && !alone()) collectives::copy(place(c, 0), data_ + chunks_.begin(c), chunks_.length(c));
  }
  void send_second(std::uint64_t c, int machine) override {
    if (deals() || as_index(machine) == source_) return;
    const Pieces parts = shares(c);
    const std::size_t mine = share_of(as_index(machine_));
    stream(machine).send(place(c, parts.begin(mine)), parts.length(mine));
  }
  void receive_second(std::uint64_t c, int machine) override {
    if (deals() || as_index(machine) == source_) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = share_of(as_index(machine));
    stream(machine).receive(place(c, parts.begin(theirs)), parts.length(theirs));
  }
  void finish(std::uint64_t c) override {
    if (alone() || round_.rank() == root_) return;
    collectives::copy(data_ + chunks_.begin(c), place(c, 0), chunks_.length(c));
  }

  std::byte* data_;
  const Pieces chunks_;
  const std::size_t source_;  // the root's machine
  const int root_;
  std::size_t window_ = 0;
};

// Bytes of a piece of one rank's contribution.
std::size_t gathered_piece(const Placement& placement, std::size_t longest) {
  if (all_alone(placement)) return moved_chunk(longest);
  const std::size_t most = Pipeline::kWindowBytes / Pipeline::kSlots / placement.machine_of.size();
  return fitted_piece(moved_chunk(longest), most);
}

class MachineGather final : public Pipeline {
 public:
  MachineGather(Round& round, const std::vector<Part>& outputs, const std::byte* input)
      : MachineGather(round, outputs, input, gathered_piece(round.placement(), longest_bytes(outputs))) {}

 private:
  MachineGather(Round& round, const std::vector<Part>& outputs, const std::byte* input, std::size_t step)
      : Pipeline(round, leaders_of(round.placement()),
                 Pieces{.total = longest_bytes(outputs), .step = step}.count(),
                 {.fills = true, .lag = kSlots - 1}),
        outputs_(outputs),
        input_(input),
        step_(step) {
    if (alone()) return;
    contributions_ = round.open_window(kSlots * step_);
    remote_ = outputs_.size() - local_.size();
    come_ = round.open_window(kSlots * remote_ * step_);
    index_.resize(outputs_.size());
    std::size_t next = 0;
    for (std::size_t r = 0; r < outputs_.size(); ++r) {
      if (!round.placement().is_local(static_cast<int>(r))) index_[r] = next++;
    }
  }

  Pieces pieces(int rank) const { return {.total = outputs_[as_index(rank)].bytes, .step = step_}; }
  std::byte* output(int rank, std::uint64_t c) const {
    return outputs_[as_index(rank)].data + pieces(rank).begin(c);
  }
  std::byte* contribution(int rank, std::uint64_t c) const {
    return round_.window(rank, contributions_) + (c % kSlots) * step_;
  }
  std::byte* come(int rank, std::uint64_t c) const {
    return round_.window(agent_, come_) + ((c % kSlots) * remote_ + index_[as_index(rank)]) * step_;
  }

  void fill(std::uint64_t c) override {
    const Pieces mine = pieces(round_.rank());
    collectives::copy(contribution(round_.rank(), c), input_ + mine.begin(c), mine.length(c));
  }
  void send_first(std::uint64_t c, int machine) override {
    for (const int r : local_) {
      const Pieces theirs = pieces(r);
      stream(machine).send(alone() ? input_ + theirs.begin(c) : contribution(r, c), theirs.length(c));
    }
  }
  void receive_first(std::uint64_t c, int machine) override {
    for (const int r : round_.placement().machines[as_index(machine)]) {
      stream(machine).receive(alone() ? output(r, c) : come(r, c), pieces(r).length(c));
    }
  }
  bool first_has_room(std::uint64_t c) const override {
    return alone() || c < kSlots || all_drained(c - kSlots);
  }
  bool results_have_room(std::uint64_t) const override { return true; }

  void finish(std::uint64_t c) override {
    const int me = round_.rank();
    const Pieces mine = pieces(me);
    if (output(me, c) != input_ + mine.begin(c)) {
      collectives::copy(output(me, c), input_ + mine.begin(c), mine.length(c));
    }
    if (alone()) return;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      const int r = static_cast<int>(i);
      if (r == me) continue;
      const bool local = round_.placement().is_local(r);
      collectives::copy(output(r, c), local ? contribution(r, c) : come(r, c), pieces(r).length(c));
    }
  }

  const std::vector<Part>& outputs_;
  const std::byte* input_;
  const std::size_t step_;
  std::size_t contributions_ = 0;
  std::size_t come_ = 0;
  std::size_t remote_ = 0;
  std::vector<std::size_t> index_;  // of remote ranks, among them
};

}  // namespace

void broadcast_between_machines(Round& round, std::byte* data, std::size_t bytes, int root) {
  MachineBroadcast(round, data, bytes, root).run();
}

void all_gather_between_machines(Round& round, const std::vector<Part>& outputs, const std::byte* input) {
  MachineGather(round, outputs, input).run();
}

void exchange_between_machines(Round& round, const std::vector<Part>& outputs,
                               const std::vector<Part>& inputs, std::size_t longest) {
  const int me = round.rank();
  const Placement& placement = round.placement();
  const auto& local = placement.local();
  Traffic traffic(round.station(), round.call(), round.streams());
  for (int k = 1; k < round.size(); ++k) {
    const int r = (me + k) % round.size();
    const Part& in = outputs[as_index(r)];
    const Part& out = inputs[as_index(r)];
    if (placement.is_local(r) || (in.bytes == 0 && out.bytes == 0)) continue;
    Stream& stream = traffic.with(r);
    stream.send(out.data, out.bytes);
    stream.receive(in.data, in.bytes);
  }
  traffic.pump();

  // Among the local ranks: a chunk holds a piece for each, as in movements.cpp.
  if (local.size() > 1 && longest > 0) {
    const std::size_t step =
        std::max(round_down(Pipeline::kWindowBytes / Pipeline::kSlots / local.size(), kSliceAlignment),
                 kSliceAlignment);
    const std::size_t window = round.open_window(Pipeline::kSlots * local.size() * step);
    const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
    const auto place = [&](int from, std::uint64_t c, std::size_t to) {
      return round.window(from, window) + ((c % Pipeline::kSlots) * local.size() + to) * step;
    };
    const auto mine = static_cast<std::size_t>(std::find(local.begin(), local.end(), me) - local.begin());
    for (std::uint64_t i = 0; i <= chunks; ++i) {
      if (i < chunks) {
        for (std::size_t k = 1; k < local.size(); ++k) {
          const std::size_t to = (mine + k) % local.size();
          if (i >= Pipeline::kSlots) round.await(local[to], &Progress::drained, i - Pipeline::kSlots);
          const Part& part = inputs[as_index(local[to])];
          const Pieces pieces{.total = part.bytes, .step = step};
          collectives::copy(place(me, i, to), part.data + pieces.begin(i), pieces.length(i));
        }
        round.publish(&Progress::filled, i);
      }
      if (i == 0) continue;
      for (std::size_t k = 1; k < local.size(); ++k) {
        const int from = local[(mine + k) % local.size()];
        const Part& part = outputs[as_index(from)];
        const Pieces pieces{.total = part.bytes, .step = step};
        if (pieces.length(i - 1) == 0) continue;
        round.await(from, &Progress::filled, i - 1);
        collectives::copy(part.data + pieces.begin(i - 1), place(from, i - 1, mine), pieces.length(i - 1));
      }
      round.publish(&Progress::drained, i - 1);
      traffic.pump();
    }
  }
  traffic.finish();
}

}  // namespace collectives
