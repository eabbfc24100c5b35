// The threads that move and reduce a rank's part of a message: the thread that executes the operation, and
// for long messages workers of the process's pool. They do pure work on memory; what ranks tell each other
// and wait for stays with the one thread, before and after. No split changes a bit of a result
// (kernels/kernels.hpp).
#pragma once

#include <algorithm>
#include <cstddef>

#include "algorithms/chunks.hpp"
#include "algorithms/part.hpp"
#include "kernels/kernels.hpp"
#include "selection/selection.hpp"
#include "state/rank_context.hpp"

namespace collectives {

class Team {
 public:
  // One thread.
  explicit Team(const RankContext& ranks) : ranks_(ranks) {}

  // From now on as many as work on a message of so many bytes.
  void engage(std::size_t bytes) noexcept {
    size_ = static_cast<std::size_t>(threads_for(ranks_.threads(), bytes));
  }
  std::size_t size() const noexcept { return size_; }

  // Calls `body(begin, end)` for ranges that together are [0, count), whose borders are multiples of
  // `alignment`. `bytes`: what they read and write in all; below a limit one call does all. `body` must not
  // throw.
  template <class Body>
  void split(std::size_t count, std::size_t alignment, std::size_t bytes, Body&& body) const {
    if (size_ == 1 || bytes < 2 * kLeastPart) return body(std::size_t{0}, count);
    const std::size_t parts = std::min(size_, bytes / kLeastPart);
    const std::size_t step = round_up((count + parts - 1) / parts, alignment);
    auto part = [&](unsigned number) { body(number * step, std::min(count, (number + 1) * step)); };
    ranks_.workers()->run(static_cast<unsigned>((count + step - 1) / step), ranks_.workers_linger(), part);
  }

  // Calls `body(item, begin, end)` for ranges of bytes that together are [0, bytes) of each of so many items,
  // where a single one would be too little for all threads. `bytes` is a multiple of a cache line, and not 0.
  template <class Body>
  void split_items(std::size_t items, std::size_t bytes, Body&& body) const {
    split(items * bytes, kSliceAlignment, 2 * items * bytes, [&](std::size_t first, std::size_t last) {
      for (std::size_t item = first / bytes; first < last; ++item) {
        const std::size_t end = std::min(last, (item + 1) * bytes);
        body(item, first - item * bytes, end - item * bytes);
        first = end;
      }
    });
  }

  // As the kernels of these names.
  void copy(std::byte* dst, const std::byte* src, std::size_t bytes) const {
    split(bytes, kSliceAlignment, 2 * bytes, [=](std::size_t begin, std::size_t end) {
      collectives::copy(dst + begin, src + begin, end - begin);
    });
  }
  void reduce(std::byte* dst, const void* const* sources, int n, std::size_t count,
              const Reduction& reduction, const ReduceOptions& options = {}) const;
  void accumulate(std::byte* partial, const void* const* sources, int n, std::size_t count,
                  const Reduction& reduction) const;
  void combine(std::byte* dst, const void* const* partials, int n, std::size_t count,
               const Reduction& reduction) const;

 private:
  // Bytes read and written below which a part is not worth handing out: a few microseconds' work.
  static constexpr std::size_t kLeastPart = 32 << 10;

  const RankContext& ranks_;
  std::size_t size_ = 1;
};

}  // namespace collectives
