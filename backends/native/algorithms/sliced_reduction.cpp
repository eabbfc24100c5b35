#include "algorithms/sliced_reduction.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"
#include "selection/selection.hpp"

namespace collectives {
namespace {

// The chunks of a message and their slices.
class Slices {
 public:
  Slices(const CollectiveContext& collective, std::size_t count, std::size_t element)
      : chunks_{.total = count, .step = sliced_chunk_bytes(collective.tuning(), count * element) / element},
        ranks_(static_cast<std::size_t>(collective.size())),
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
  SlicedReduction(CollectiveContext& collective, std::byte* output, const std::byte* input, std::size_t count,
                  const Reduction& reduction)
      : collective_(collective),
        output_(output),
        input_(input),
        reduction_(reduction),
        element_(size_of(reduction.dtype)),
        slices_(collective, count, element_),
        copy_out_(collective, count * element_, output == input),
        me_(static_cast<std::uint64_t>(collective.rank())) {
    collective_.engage_team(count * element_);
    collective_.open_rings(slices_.count(), sliced_chunk_bytes(collective.tuning(), count * element_),
                           CollectiveContext::kFewChunks);
  }

  void run_all() {
    run([this](std::uint64_t c) { reduce_own(c, true); }, [this](std::uint64_t c) { drain(c); });
  }

  void run_to(int root) {
    const bool receive = collective_.rank() == root;
    run([this, receive](std::uint64_t c) { reduce_own(c, receive); },
        [this, receive](std::uint64_t c) {
          if (receive) {
            drain(c);
          } else {
            collective_.drained(
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

  std::size_t place(std::uint64_t c, std::size_t element) const {
    return (slices_.chunk_begin(c) + element) * element_;
  }
  std::byte* output(std::uint64_t c, std::size_t element) const { return output_ + place(c, element); }
  const std::byte* input(std::uint64_t c, std::size_t element) const { return input_ + place(c, element); }
  std::byte* ring(int rank, std::uint64_t c, std::size_t element) const {
    return collective_.chunk(rank, c) + element * element_;
  }

  // Where the owner of a slice puts what it makes of it.
  std::byte* results(int owner, std::uint64_t c, std::size_t element) const {
    return ring((owner + 1) % collective_.size(), c, element);
  }
  // A part of a chunk to be fetched, or null behind the last.
  const std::byte* later(std::uint64_t c, std::size_t element) const {
    return c < slices_.count() ? input(c, element) : nullptr;
  }

  void fill(std::uint64_t c) {
    // Of two ranks the one reads last in its ring what the other put there.
    if (collective_.size() > 2) collective_.await_room(c);
    const Pieces slices = slices_.of(c);
    const std::size_t begin = slices.begin(me_);
    const std::size_t end = slices.begin(me_ + 1);
    const std::size_t others = slices.total - (end - begin);
    collective_.team().split(
        others, kSliceAlignment, 2 * others * element_, [&](std::size_t first, std::size_t last) {
          const auto put = [&](std::size_t from, std::size_t to) {
            if (from < to)
              collectives::copy(ring(collective_.rank(), c, from), input(c, from), (to - from) * element_);
          };
          put(first, std::min(last, begin));
          put(std::max(first, begin) + (end - begin), last + (end - begin));
        });
    collective_.filled(c);
  }

  void reduce_own(std::uint64_t c, bool keep) {
    const Pieces slices = slices_.of(c);
    const std::size_t begin = slices.begin(me_);
    const std::size_t length = slices.length(me_);
    const void** sources = collective_.sources();
    for (int r = 0; r < collective_.size(); ++r) {
      if (r != collective_.rank()) collective_.await_filled(r, c);
      sources[r] = r == collective_.rank() ? input(c, begin) : ring(r, c, begin);
    }
    collective_.team().reduce(results(collective_.rank(), c, begin), sources, collective_.size(), length,
                              reduction_,
                              {.second = keep ? output(c, begin) : nullptr, .next = later(c + 1, begin)});
    collective_.reduced(c);
  }

  void drain(std::uint64_t c) {
    if (collective_.team().size() > 1) return drain_together(c);
    const Pieces slices = slices_.of(c);
    for (int i = 1; i < collective_.size(); ++i) {
      const int r = (collective_.rank() + i) % collective_.size();
      collective_.await_reduced(r, c);
      const auto owner = static_cast<std::uint64_t>(r);
      copy_out_(output(c, slices.begin(owner)), results(r, c, slices.begin(owner)),
                slices.length(owner) * element_, later(c + 3, slices.begin(owner)));
    }
    collective_.drained(c);
  }

  // The same, by threads to which a slice alone would be too little.
  void drain_together(std::uint64_t c) {
    const Pieces slices = slices_.of(c);
    for (int i = 1; i < collective_.size(); ++i)
      collective_.await_reduced((collective_.rank() + i) % collective_.size(), c);
    const auto copy = [&](std::size_t owner, std::size_t begin, std::size_t end) {
      end = std::min(end, slices.length(owner) * element_);
      if (owner == me_ || begin >= end) return;
      const std::size_t first = slices.begin(owner);
      const std::byte* next = later(c + 3, first);
      copy_out_.whole(output(c, first) + begin, results(static_cast<int>(owner), c, first) + begin,
                      end - begin, next == nullptr ? nullptr : next + begin);
    };
    collective_.team().split_items(slices.count(), slices.step * element_, copy);
    collective_.drained(c);
  }

  CollectiveContext& collective_;
  std::byte* output_;
  const std::byte* input_;
  const Reduction& reduction_;
  std::size_t element_;
  Slices slices_;
  CopyOut copy_out_;
  std::uint64_t me_;
};

}  // namespace

void sliced_all_reduce(CollectiveContext& collective, std::byte* output, const std::byte* input,
                       std::size_t count, const Reduction& reduction) {
  SlicedReduction(collective, output, input, count, reduction).run_all();
}

void sliced_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                   const Reduction& reduction, int root) {
  SlicedReduction(collective, data, data, count, reduction).run_to(root);
}

}  // namespace collectives
