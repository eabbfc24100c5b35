#include "transport/control_page.hpp"

#include <algorithm>
#include <bit>

namespace collectives {
namespace {

constexpr std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr std::size_t kNearBytes = 4 << 10;
// Several times the cache of a core: see Round.
constexpr std::size_t kArenaBytes = 4 << 20;
// As long as a ring, or a chunk alone, can be.
constexpr std::size_t kStandingBytes = 1 << 20;

// Mailboxes are allocated when first used; this bounds what a rank that talks to all others holds for
// sending.
constexpr std::size_t kMailBytesPerRank = 4 << 20;
constexpr std::size_t kMostMailBytes = 1 << 20;
constexpr std::size_t kLeastMailBytes = 16 << 10;

// Between machines every rank has near slots for all, so that their size goes down as the ranks go up.
constexpr std::size_t kNearBytesInAll = 512 << 10;
constexpr std::size_t kMostNearBytes = 32 << 10;

}  // namespace

Shape shape_for(int size, bool several) {
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t between = std::clamp(std::bit_floor(kNearBytesInAll / ranks), kNearBytes, kMostNearBytes);
  const std::size_t share = std::bit_floor(kMailBytesPerRank / std::max<std::size_t>(ranks - 1, 1));
  const std::size_t standing = size == 2 && !several ? kStandingBytes : 0;
  return Shape{.size = ranks,
               .near_bytes = several ? between : kNearBytes,
               .arena_bytes = kArenaBytes + standing,
               .standing_bytes = standing,
               .mail_bytes = std::clamp(share, kLeastMailBytes, kMostMailBytes)};
}

Layout::Layout(const Shape& shape) : shape_(shape) {
  const std::size_t ranks = shape.size;
  counters_ = kPage + pages(2 * 2 * ranks * sizeof(std::uint64_t));
  near_ = counters_ + pages(2 * ranks * sizeof(MailCounter));
  arena_ = near_ + pages(2 * shape.near_bytes);
  rank_bytes_ = arena_ + pages(shape.arena_bytes);
  mailboxes_ = kPage + ranks * rank_bytes_;
  mailbox_bytes_ = pages(shape.mail_bytes);
  total_ = mailboxes_ + ranks * ranks * mailbox_bytes_;
}

}  // namespace collectives
