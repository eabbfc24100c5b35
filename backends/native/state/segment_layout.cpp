#include "state/segment_layout.hpp"

#include <algorithm>
#include <bit>

namespace collectives {
namespace {

constexpr std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr std::size_t kSlotBytes = 4 << 10;
// Several times the cache of a core: see algorithms/collective_context.hpp. An operation may have a staged
// region and a ring, and the next one stages while others still read both: two rings, since one that does not
// fit behind the region leaves the end unused, and two staged regions, at the bounds of the tuning.
constexpr std::size_t kBufferBytes = (4 << 20) + (256 << 10);
// As long as a ring, or a chunk alone, can be.
constexpr std::size_t kFixedBytes = 1 << 20;

// Mailboxes are allocated when first used; this bounds what a rank that sends to all others holds.
constexpr std::size_t kMailBytesPerRank = 4 << 20;
constexpr std::size_t kMostMailBytes = 1 << 20;
constexpr std::size_t kLeastMailBytes = 16 << 10;

// In a group that spans machines the segment holds committed slots for all ranks, so that more ranks get
// smaller ones.
constexpr std::size_t kSlotBytesInAll = 512 << 10;
constexpr std::size_t kMostSlotBytes = 32 << 10;

}  // namespace

SegmentShape shape_for(int size, bool spans_machines) {
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t between = std::clamp(std::bit_floor(kSlotBytesInAll / ranks), kSlotBytes, kMostSlotBytes);
  const std::size_t share = std::bit_floor(kMailBytesPerRank / std::max<std::size_t>(ranks - 1, 1));
  const std::size_t fixed = size == 2 && !spans_machines ? kFixedBytes : 0;
  return SegmentShape{.size = ranks,
                      .slot_bytes = spans_machines ? between : kSlotBytes,
                      .buffer_bytes = kBufferBytes + fixed,
                      .fixed_bytes = fixed,
                      .mail_bytes = std::clamp(share, kLeastMailBytes, kMostMailBytes)};
}

SegmentLayout::SegmentLayout(const SegmentShape& shape) : shape_(shape) {
  const std::size_t ranks = shape.size;
  slots_ = kPage + pages(2 * 2 * ranks * sizeof(std::uint64_t));
  counters_ = slots_ + pages(2 * shape.slot_bytes);
  buffer_ = counters_ + pages(2 * ranks * sizeof(MailCounter));
  rank_bytes_ = buffer_ + pages(shape.buffer_bytes);
  mailboxes_ = kPage + ranks * rank_bytes_;
  mailbox_bytes_ = pages(shape.mail_bytes);
  total_ = mailboxes_ + ranks * ranks * mailbox_bytes_;
}

}  // namespace collectives
