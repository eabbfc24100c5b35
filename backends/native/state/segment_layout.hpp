// What lies where in the shared segment of a group:
//
//   header             magic, version, shape, tuning, the group's first failure, its label
//   per rank           control page
//                      split table: 2 parities x 2n numbers
//                      staging slots: 2 parities x slot_bytes, for short contributions
//                      mail counters: n bytes-written, n bytes-read
//                      staging buffer: all other contributions and the rings of long messages
//   per ordered pair   mailbox: mail_bytes of framed point-to-point bytes
//
// Everything is zero at the start. A rank allocates its own part; staging buffers and mailboxes have no
// memory before their first use, and mirrors of remote ranks have none for mail counters and a staging
// buffer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "selection/tuning.hpp"
#include "state/control_page.hpp"

namespace collectives {

// Numbers that all ranks of a group derive from its size alone.
struct SegmentShape {
  std::uint64_t size;
  std::uint64_t slot_bytes;
  std::uint64_t buffer_bytes;
  std::uint64_t fixed_bytes;  // of them, at their end: the fixed region (algorithms/collective_context.hpp)
  std::uint64_t mail_bytes;   // a power of two

  bool operator==(const SegmentShape&) const = default;
};

// `spans_machines`: what a rank stages is sent to the other machines, and must fit its staging slot.
SegmentShape shape_for(int size, bool spans_machines = false);

inline constexpr std::size_t kFailureText = 2048;
inline constexpr std::size_t kMostMissing = 64;

// The details of a failure, in a form that one machine can send to another.
struct FailureDetails {
  std::uint32_t kind = 0;    // ErrorKind
  std::int32_t rank = -1;    // at fault, or -1
  std::int32_t writer = -1;  // the rank that found out
  std::uint32_t behind = 0;  // bytes at the end of the text: the exception of the rank's program
  std::int64_t sequence = -1;
  char operation[24] = {};
  std::uint32_t missing_count = 0;
  std::int32_t missing[kMostMissing] = {};
};

// The first failure that broke the group. One writer wins the change from kNoFailure to its own rank +
// kFirstWriter, writes the fields, and stores kFailureComplete with release.
struct alignas(kLine) FailureRecord {
  static constexpr std::uint32_t kNoFailure = 0;
  static constexpr std::uint32_t kFailureComplete = 1;
  static constexpr std::uint32_t kFirstWriter = 2;

  std::atomic<std::uint32_t> state;
  FailureDetails details;
  char text[kFailureText];
};

// What a follower checks before it uses the segment.
struct SegmentParameters {
  std::uint64_t magic;
  std::uint64_t version;
  SegmentShape shape;
  Tuning tuning;
};

inline constexpr std::size_t kLabelBytes = 192;

struct SegmentHeader {
  SegmentParameters parameters;
  FailureRecord failure;
  std::atomic<char> label[kLabelBytes];  // names the group to observers; zero-terminated, relaxed
};
static_assert(sizeof(SegmentHeader) <= kPage);

inline constexpr std::uint64_t kMagic = 0x636f6c6c65637431;
inline constexpr std::uint64_t kLayoutVersion = 11;

// Offsets in the segment.
class SegmentLayout {
 public:
  explicit SegmentLayout(const SegmentShape& shape);

  const SegmentShape& shape() const noexcept { return shape_; }
  std::size_t total_bytes() const noexcept { return total_; }

  // What rank r writes for collectives, but for the staging buffer, committed by rank r itself, on its own
  // memory node.
  std::size_t control_bytes() const noexcept { return buffer_; }
  // The part of it that a mirror needs, committed by the leader.
  std::size_t mirror_bytes() const noexcept { return counters_; }
  std::size_t rank_offset(int rank) const noexcept {
    return kPage + static_cast<std::size_t>(rank) * rank_bytes_;
  }
  std::size_t splits_offset(int rank) const noexcept { return rank_offset(rank) + kPage; }
  std::size_t written_offset(int sender, int receiver) const noexcept {
    return rank_offset(sender) + counters_ + static_cast<std::size_t>(receiver) * sizeof(MailCounter);
  }
  std::size_t read_offset(int receiver, int sender) const noexcept {
    return rank_offset(receiver) + counters_ +
           (shape_.size + static_cast<std::size_t>(sender)) * sizeof(MailCounter);
  }
  std::size_t slot_offset(int rank) const noexcept { return rank_offset(rank) + slots_; }
  std::size_t buffer_offset(int rank) const noexcept { return rank_offset(rank) + buffer_; }

  std::size_t mailbox_bytes() const noexcept { return mailbox_bytes_; }
  std::size_t mailbox_offset(int sender, int receiver) const noexcept {
    return mailboxes_ +
           (static_cast<std::size_t>(sender) * shape_.size + static_cast<std::size_t>(receiver)) *
               mailbox_bytes_;
  }

 private:
  SegmentShape shape_;
  std::size_t slots_ = 0;
  std::size_t counters_ = 0;
  std::size_t buffer_ = 0;
  std::size_t rank_bytes_ = 0;
  std::size_t mailboxes_ = 0;
  std::size_t mailbox_bytes_ = 0;
  std::size_t total_ = 0;
};

}  // namespace collectives
