#include "algorithms/team.hpp"

#include "common/codes.hpp"

namespace collectives {
namespace {

// With more sources one thread reduces them: so many ranks on a machine leave none of them several cores.
constexpr int kMostSources = 128;

// Sources from some bytes on.
struct Moved {
  Moved(const void* const* sources, int n, std::size_t bytes) {
    for (int i = 0; i < n; ++i) pointers[i] = static_cast<const std::byte*>(sources[i]) + bytes;
  }
  const void* pointers[kMostSources];
};

}  // namespace

void Team::reduce(std::byte* dst, const void* const* sources, int n, std::size_t count,
                  const Reduction& reduction, const ReduceOptions& options) const {
  const auto& [dtype, op, factor] = reduction;
  if (size_ == 1 || n > kMostSources)
    return collectives::reduce(dst, sources, n, count, dtype, op, factor, options);
  collectives::reduce(dst, sources, n, 0, dtype, op, factor);  // throws here what it has to
  const std::size_t element = size_of(dtype);
  auto* const second = static_cast<std::byte*>(options.second);
  const auto* const next = static_cast<const std::byte*>(options.next);
  split(count, kSliceAlignment, count * element * (as_index(n) + 1), [&](std::size_t begin, std::size_t end) {
    const std::size_t offset = begin * element;
    collectives::reduce(dst + offset, Moved(sources, n, offset).pointers, n, end - begin, dtype, op, factor,
                        {.second = second == nullptr ? nullptr : second + offset,
                         .next = next == nullptr ? nullptr : next + offset});
  });
}

void Team::accumulate(std::byte* partial, const void* const* sources, int n, std::size_t count,
                      const Reduction& reduction) const {
  const auto& [dtype, op, factor] = reduction;
  if (size_ == 1 || n > kMostSources)
    return collectives::accumulate(partial, sources, n, count, dtype, op, factor);
  collectives::accumulate(partial, sources, n, 0, dtype, op, factor);
  const std::size_t element = size_of(dtype);
  const std::size_t wide = accumulator_bytes(dtype, op);
  split(count, kSliceAlignment, count * (element * as_index(n) + wide),
        [&](std::size_t begin, std::size_t end) {
          collectives::accumulate(partial + begin * wide, Moved(sources, n, begin * element).pointers, n,
                                  end - begin, dtype, op, factor);
        });
}

void Team::combine(std::byte* dst, const void* const* partials, int n, std::size_t count,
                   const Reduction& reduction) const {
  const auto& [dtype, op, factor] = reduction;
  if (size_ == 1 || n > kMostSources) return collectives::combine(dst, partials, n, count, dtype, op, factor);
  collectives::combine(dst, partials, n, 0, dtype, op, factor);
  const std::size_t element = size_of(dtype);
  const std::size_t wide = accumulator_bytes(dtype, op);
  split(count, kSliceAlignment, count * (wide * as_index(n) + element),
        [&](std::size_t begin, std::size_t end) {
          collectives::combine(dst + begin * element, Moved(partials, n, begin * wide).pointers, n,
                               end - begin, dtype, op, factor);
        });
}

}  // namespace collectives
