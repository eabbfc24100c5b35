// all_reduce, reduce, reduce_scatter.
//
// Short: every rank stages its contribution, and whoever needs the result reduces all staged contributions in
// rank order.
//
// Long: a pipeline of three stages over the chunks; a *slice* is one rank's share of a chunk:
//   fill c      copy what the others reduce, everything but the own slice, into the own ring
//   reduce c-1  reduce the own slice over all ranks, the own contribution straight from the tensor, into the
//               tensor and into the next rank's ring
//   drain c-2   copy the other slices from where their owners put them into the tensor
// So each contribution is copied at most once, each result at most twice.
//
// A result goes where the next rank's contribution to it was. Those lines have just come to the owner's core,
// and are written there at little cost; lines in a ring of its own would be taken back from those that read
// them last. Between two ranks every line then carries news both ways, and the rings need not move.
//
// A tensor's memory is read once and written once while its chunk is still in the cache, and is fetched into
// it while the stage before waits for lines of other cores. The stages of neighbouring chunks overlap between
// ranks, so that nobody waits for one chunk at a time.
//
// reduce between two ranks: the root reduces straight from its tensor and the other's ring.
//
// Which path a message takes, and where its chunks and slices end, changes no bit of the result: elements are
// reduced one by one in rank order (kernels/kernels.hpp), between machines machine by machine. Long messages
// between machines take other ways: between_machines.hpp.
#include <algorithm>

#include "algorithms/between_machines.hpp"
#include "algorithms/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Bytes of a chunk that is cut into slices: enough chunks to overlap, none too short to be worth its flags.
std::size_t sliced_chunk(const Round& round, std::size_t bytes) {
  const Tuning& tuning = round.tuning();
  if (bytes <= tuning.unsplit_bytes) return round_up(bytes, kPage);
  const std::size_t wanted = round_up(bytes / tuning.chunks_wanted, kPage);
  return std::clamp(wanted, std::min(tuning.shortest_chunk_bytes, tuning.chunk_bytes), tuning.chunk_bytes);
}

void reduce_staged(Round& round, void* data, std::size_t count, std::size_t bytes,
                   const Reduction& reduction) {
  const void** sources = round.sources();
  for (int r = 0; r < round.size(); ++r) sources[r] = r == round.rank() ? data : round.staged(r, bytes);
  reduce_placed(round.placement(), data, sources, count, reduction);
}

void reduce_alone(void* data, std::size_t count, const Reduction& reduction) {
  if (reduction.op != ReduceOp::premul_sum)
    return;  // of one contribution any other reduction is that contribution
  const void* source = data;
  reduce(data, &source, 1, count, reduction.dtype, reduction.op, reduction.factor);
}

// The chunks of a message and their slices.
class Slices {
 public:
  Slices(const Round& round, std::size_t count, std::size_t element)
      : chunks_{.total = count, .step = sliced_chunk(round, count * element) / element},
        ranks_(static_cast<std::size_t>(round.size())),
        element_(element) {}

  std::uint64_t count() const { return chunks_.count(); }
  std::size_t chunk_begin(std::uint64_t chunk) const { return chunks_.begin(chunk); }
  std::size_t chunk_length(std::uint64_t chunk) const { return chunks_.length(chunk); }

  // The slice of a rank, in elements from the beginning of the chunk.
  Pieces of(std::uint64_t chunk) const {
    const std::size_t length = chunks_.length(chunk);
    return {.total = length, .step = round_up((length + ranks_ - 1) / ranks_, kSliceAlignment / element_)};
  }

 private:
  Pieces chunks_;
  std::size_t ranks_;
  std::size_t element_;
};

class SlicedReduction {
 public:
  SlicedReduction(Round& round, std::byte* data, std::size_t count, const Reduction& reduction)
      : round_(round),
        data_(data),
        reduction_(reduction),
        element_(size_of(reduction.dtype)),
        slices_(round, count, element_),
        copy_out_(round, count * element_),
        me_(static_cast<std::uint64_t>(round.rank())) {
    round_.open_rings(slices_.count(), sliced_chunk(round, count * element_), Round::kFewChunks);
  }

  void run_all() {
    run([this](std::uint64_t c) { reduce_own(c, true); }, [this](std::uint64_t c) { drain(c); });
  }

  void run_to(int root) {
    const bool receive = round_.rank() == root;
    run([this, receive](std::uint64_t c) { reduce_own(c, receive); },
        [this, receive](std::uint64_t c) {
          if (receive) {
            drain(c);
          } else {
            round_.drained(
                c);  // it read the others' rings when it reduced; only the root reads slices of results
          }
        });
  }

 private:
  template <class Reduce, class Drain>
  void run(Reduce&& reduce_stage, Drain&& drain_stage) {
    const std::uint64_t chunks = slices_.count();
    for (std::uint64_t i = 0; i < chunks + 2; ++i) {
      if (i < chunks) fill(i);
      if (i >= 1 && i - 1 < chunks) reduce_stage(i - 1);
      if (i >= 2) drain_stage(i - 2);
    }
  }

  std::byte* tensor(std::uint64_t c, std::size_t element) const {
    return data_ + (slices_.chunk_begin(c) + element) * element_;
  }
  std::byte* ring(int rank, std::uint64_t c, std::size_t element) const {
    return round_.chunk(rank, c) + element * element_;
  }

  // Where the owner of a slice puts what it makes of it.
  std::byte* results(int owner, std::uint64_t c, std::size_t element) const {
    return ring((owner + 1) % round_.size(), c, element);
  }
  // A part of a chunk to be fetched, or null behind the last.
  const std::byte* later(std::uint64_t c, std::size_t element) const {
    return c < slices_.count() ? tensor(c, element) : nullptr;
  }

  void fill(std::uint64_t c) {
    // Of two ranks the one reads last in its ring what the other put there.
    if (round_.size() > 2) round_.await_room(c);
    const Pieces slices = slices_.of(c);
    const std::size_t begin = slices.begin(me_);
    const std::size_t end = slices.begin(me_ + 1);
    collectives::copy(ring(round_.rank(), c, 0), tensor(c, 0), begin * element_);
    collectives::copy(ring(round_.rank(), c, end), tensor(c, end), (slices.total - end) * element_);
    round_.filled(c);
  }

  void reduce_own(std::uint64_t c, bool keep) {
    const Pieces slices = slices_.of(c);
    const std::size_t begin = slices.begin(me_);
    const std::size_t length = slices.length(me_);
    const void** sources = round_.sources();
    for (int r = 0; r < round_.size(); ++r) {
      if (r != round_.rank()) round_.await_filled(r, c);
      sources[r] = r == round_.rank() ? tensor(c, begin) : ring(r, c, begin);
    }
    reduce(results(round_.rank(), c, begin), sources, round_.size(), length, reduction_.dtype, reduction_.op,
           reduction_.factor, {.second = keep ? tensor(c, begin) : nullptr, .next = later(c + 1, begin)});
    round_.reduced(c);
  }

  void drain(std::uint64_t c) {
    const Pieces slices = slices_.of(c);
    for (int i = 1; i < round_.size(); ++i) {
      const int r = (round_.rank() + i) % round_.size();
      round_.await_reduced(r, c);
      const auto owner = static_cast<std::uint64_t>(r);
      copy_out_(tensor(c, slices.begin(owner)), results(r, c, slices.begin(owner)),
                slices.length(owner) * element_, later(c + 3, slices.begin(owner)));
    }
    round_.drained(c);
  }

  Round& round_;
  std::byte* data_;
  const Reduction& reduction_;
  std::size_t element_;
  Slices slices_;
  CopyOut copy_out_;
  std::uint64_t me_;
};

// Between two ranks, with the result on the root alone: the other rank only fills, the root only reduces.
void reduce_between_two_to(int root, Round& round, std::byte* data, std::size_t bytes,
                           const Reduction& reduction) {
  const int other = 1 - root;
  const std::size_t element = size_of(reduction.dtype);
  const Pieces pieces{.total = bytes, .step = round.tuning().chunk_bytes};
  round.open_rings(pieces.count(), round.tuning().chunk_bytes);
  const void** sources = round.sources();
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (round.rank() == other) {
      round.await_room(root, c);
      collectives::copy(round.chunk(other, c), data + pieces.begin(c), pieces.length(c));
      round.filled(c);
      continue;
    }
    round.await_filled(other, c);
    sources[root] = data + pieces.begin(c);
    sources[other] = round.chunk(other, c);
    // The result is of no use in the ring, but storing it takes the lines over: see common/lines.hpp.
    reduce(data + pieces.begin(c), sources, 2, pieces.length(c) / element, reduction.dtype, reduction.op,
           reduction.factor, {.second = round.chunk(other, c)});
    round.drained(c);
  }
}

}  // namespace

void all_reduce(Round& round, void* data, std::size_t count, const Reduction& reduction) {
  if (round.size() == 1) return reduce_alone(data, count, reduction);
  const std::size_t bytes = count * size_of(reduction.dtype);
  if (bytes <= round.tuning().one_shot_bytes) {
    round.reserve(bytes);
    collectives::copy(round.stage(bytes), data, bytes);
    round.meet();
    reduce_staged(round, data, count, bytes, reduction);
    return;
  }
  round.meet();
  if (round.placement().several()) {
    return reduce_between_machines(round, static_cast<std::byte*>(data), count, reduction, -1);
  }
  SlicedReduction(round, static_cast<std::byte*>(data), count, reduction).run_all();
}

void reduce_to_root(Round& round, void* data, std::size_t count, const Reduction& reduction, int root) {
  if (round.size() == 1) return reduce_alone(data, count, reduction);
  const std::size_t bytes = count * size_of(reduction.dtype);
  if (bytes <= round.tuning().one_shot_bytes) {
    round.reserve(bytes);
    if (round.rank() != root) collectives::copy(round.stage(bytes), data, bytes);
    round.meet();
    if (round.rank() == root) reduce_staged(round, data, count, bytes, reduction);
    return;
  }
  round.meet();
  if (round.placement().several()) {
    return reduce_between_machines(round, static_cast<std::byte*>(data), count, reduction, root);
  }
  if (round.size() == 2) {
    return reduce_between_two_to(root, round, static_cast<std::byte*>(data), bytes, reduction);
  }
  SlicedReduction(round, static_cast<std::byte*>(data), count, reduction).run_to(root);
}

void reduce_scatter(Round& round, std::byte* output, const std::vector<Part>& parts,
                    const Reduction& reduction) {
  const int me = round.rank();
  const int ranks = round.size();
  const std::size_t element = size_of(reduction.dtype);
  const Part& mine = parts[static_cast<std::size_t>(me)];
  if (ranks == 1) {
    if (output != mine.data) collectives::copy(output, mine.data, mine.bytes);
    return reduce_alone(output, mine.bytes / element, reduction);
  }
  std::size_t total = 0;
  std::size_t longest = 0;
  for (const Part& part : parts) {
    total += part.bytes;
    longest = std::max(longest, part.bytes);
  }
  const void** sources = round.sources();

  if (total <= round.tuning().staged_bytes) {
    round.reserve(total);
    std::byte* stage = round.stage(total);
    std::size_t offset = 0;
    std::size_t my_offset = 0;
    for (int r = 0; r < ranks; ++r) {
      const Part& part = parts[static_cast<std::size_t>(r)];
      if (r == me) {
        my_offset = offset;
      } else {
        collectives::copy(stage + offset, part.data, part.bytes);
      }
      offset += part.bytes;
    }
    round.meet();
    for (int r = 0; r < ranks; ++r) sources[r] = r == me ? mine.data : round.staged(r, total) + my_offset;
    reduce_placed(round.placement(), output, sources, mine.bytes / element, reduction);
    return;
  }

  // Long: a chunk holds a piece for each rank, at equal distances.
  round.meet();
  if (round.placement().several()) return reduce_scatter_between_machines(round, output, parts, reduction);
  const std::size_t step = round.piece_bytes();
  const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
  round.open_rings(chunks, static_cast<std::size_t>(ranks) * step);
  for (std::uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) {
      round.await_room(i);
      for (int k = 1; k < ranks; ++k) {
        const auto r = static_cast<std::size_t>((me + k) % ranks);
        const Pieces pieces{.total = parts[r].bytes, .step = step};
        collectives::copy(round.chunk(me, i) + r * step, parts[r].data + pieces.begin(i), pieces.length(i));
      }
      round.filled(i);
    }
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    const Pieces pieces{.total = mine.bytes, .step = step};
    for (int r = 0; r < ranks; ++r) {
      if (r != me) round.await_filled(r, c);
      sources[r] =
          r == me ? mine.data + pieces.begin(c) : round.chunk(r, c) + static_cast<std::size_t>(me) * step;
    }
    std::byte* taken = round.chunk((me + 1) % ranks, c) + static_cast<std::size_t>(me) * step;
    reduce(output + pieces.begin(c), sources, ranks, pieces.length(c) / element, reduction.dtype,
           reduction.op, reduction.factor, {.second = taken});  // as in reduce_between_two_to
    round.drained(c);
  }
}

}  // namespace collectives
