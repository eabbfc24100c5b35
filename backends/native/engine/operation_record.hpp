// The last operations of a group, and totals of all of them: what the flight record shows of the operations
// that the core carries out by itself.
//
// A record costs its writers some stores to one or two cache lines, without locks, system calls or memory.
// Whoever reads, on any thread and also while an operation hangs, gets whole entries, and leaves out those
// that are overwritten meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.hpp"
#include "common/codes.hpp"

namespace collectives {

// Beside the opcodes of collectives: messages, and the forms of collectives with one tensor for all ranks,
// which some backends carry out in other ways than those with lists.
inline constexpr std::uint8_t kSend = 10;
inline constexpr std::uint8_t kReceive = 11;
inline constexpr std::uint8_t kAllGatherSingle = 12;
inline constexpr std::uint8_t kReduceScatterSingle = 13;
inline constexpr std::uint8_t kAllToAllSingle = 14;
inline constexpr std::size_t kOperationKinds = 15;
static_assert(static_cast<std::uint8_t>(Opcode::all_to_all) < kSend);

// An operation as it begins.
struct BegunOperation {
  std::uint8_t kind = 0;  // an Opcode, or one of the above
  DType dtype = DType::uint8;
  ReduceOp reduction = ReduceOp::sum;
  std::uint32_t tensors = 0;
  std::int32_t peer = -1;  // the root of a collective; the peer of a message, -1 for any
  std::uint32_t tag = 0;
  std::uint64_t number = 0;  // as error messages have it
  std::uint64_t count = 0;   // elements of the first tensor
  std::uint64_t bytes = 0;   // of all its tensors
  Nanoseconds timeout = 0;
  Nanoseconds began = 0;
};

struct RecordedOperation : BegunOperation {
  Nanoseconds ended = 0;  // 0 while it is pending
  std::string error;      // of one that failed, else empty
  std::string site;       // the source line, where it is known
};

// The same collective in the form with one tensor for all ranks, where it has one.
BegunOperation single_form(BegunOperation operation) noexcept;
// "all_reduce", "send".
const char* name_of_kind(std::uint8_t kind) noexcept;
// What else tells an operation apart: "SUM, root 2", "to rank 1, tag 0".
std::string detail_of(const BegunOperation& operation);

// What the writer keeps of an operation until its end.
struct RecordTicket {
  std::uint64_t index = 0;
  std::size_t slot = 0;
  std::uint8_t kind = 0;
  Nanoseconds began = 0;
};

// Writers come one after the other, with whatever orders them; readers at any time.
class OperationRing {
 public:
  struct Totals {
    std::uint64_t count = 0;  // begun
    std::uint64_t bytes = 0;  // of those
    std::uint64_t errors = 0;
    Nanoseconds time = 0;  // between begins and ends
  };

  explicit OperationRing(std::size_t capacity);
  OperationRing(const OperationRing&) = delete;
  OperationRing& operator=(const OperationRing&) = delete;

  // ---- for writers
  RecordTicket begin(const BegunOperation& operation) noexcept;
  // The source line of an operation that has begun; once.
  void note_site(const RecordTicket& ticket, const std::string& site) noexcept;
  void end(const RecordTicket& ticket, Nanoseconds now) noexcept;
  void fail(const RecordTicket& ticket, Nanoseconds now, const std::string& error) noexcept;
  // One that its issuer has given up, which is no failure of the group.
  void give_up(const RecordTicket& ticket, Nanoseconds now, const std::string& why) noexcept;

  // ---- for readers
  // The last ones, in the order in which they began.
  std::vector<RecordedOperation> operations() const;
  std::array<Totals, kOperationKinds> totals() const noexcept;
  // The number of operations so far. Relaxed: a count of the moment, or the writer's own.
  std::uint64_t begun() const noexcept { return begun_.load(std::memory_order_relaxed); }
  // Why the first operation failed that did; empty before.
  std::string first_error() const;

 private:
  static constexpr std::size_t kSiteWords = 7;

  // The version is odd while an operation is entered, and then tells which one the entry is of. Whoever reads
  // a word of a newer one finds the version changed afterwards: words are stored with release and loaded with
  // acquire. `ended` is stored last, once: 0, the time, or minus the time of a failure.
  struct alignas(64) Entry {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> about{0};  // kind, data type, reduction; tensors
    std::atomic<std::uint64_t> where{0};  // peer; tag
    std::atomic<std::uint64_t> number{0};
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<Nanoseconds> timeout{0};
    std::atomic<Nanoseconds> began{0};
    std::atomic<Nanoseconds> ended{0};
    std::atomic<std::uint64_t> site[kSiteWords] = {};  // text; the first word is stored last
  };

  // Relaxed, and not changed in one step: there is one writer at a time, and readers take each as it is.
  struct Counters {
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::uint64_t> errors{0};
    std::atomic<Nanoseconds> time{0};
  };

  bool read(const Entry& entry, std::uint64_t index, RecordedOperation& operation) const;
  void finish(const RecordTicket& ticket, Nanoseconds now, bool failed) noexcept;
  bool holds(const RecordTicket& ticket) const noexcept;
  std::string error_of(std::uint64_t index) const;
  void note_error(const RecordTicket& ticket, const std::string& error, bool fails) noexcept;

  const std::size_t capacity_;
  const std::unique_ptr<Entry[]> entries_;
  std::array<Counters, kOperationKinds> counters_;
  std::atomic<std::uint64_t> begun_{0};  // release: the entry; acquire by readers
  std::size_t next_slot_ = 0;            // the writers' own

  mutable std::mutex errors_mutex_;              // of those who fail and those who read about it
  std::map<std::uint64_t, std::string> errors_;  // by index, of entries in the ring
  std::string first_error_;
};

// Collectives and messages have rings of their own, as each kind is issued by one thread at a time, but both
// at once.
struct OperationRecord {
  explicit OperationRecord(std::size_t capacity) : collectives(capacity), messages(capacity) {}

  OperationRing collectives;
  OperationRing messages;
};

}  // namespace collectives
