#include "engine/operation_record.hpp"

#include <algorithm>
#include <cstring>
#include <exception>

namespace collectives {
namespace {

// By the one writer of the moment.
template <class Number>
void add(std::atomic<Number>& counter, Number value) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

constexpr std::uint64_t entering(std::uint64_t index) noexcept { return 2 * index + 1; }
constexpr std::uint64_t version_of(std::uint64_t index) noexcept { return 2 * index + 2; }

}  // namespace

BegunOperation single_form(BegunOperation operation) noexcept {
  const auto all_parts = [&](std::uint8_t kind) {
    operation.kind = kind;
    operation.count *= operation.tensors;
    operation.tensors = 1;
  };
  switch (static_cast<Opcode>(operation.kind)) {
    case Opcode::all_gather:
      all_parts(kAllGatherSingle);
      break;
    case Opcode::all_to_all:
      all_parts(kAllToAllSingle);
      break;
    case Opcode::reduce_scatter:
      operation.kind = kReduceScatterSingle;
      break;
    default:
      break;
  }
  return operation;
}

const char* name_of_kind(std::uint8_t kind) noexcept {
  switch (kind) {
    case kSend:
      return "send";
    case kReceive:
      return "recv";
    case kAllGatherSingle:
      return "all_gather_into_tensor";
    case kReduceScatterSingle:
      return "reduce_scatter_tensor";
    case kAllToAllSingle:
      return "all_to_all_single";
    default:
      return name_of(static_cast<Opcode>(kind));
  }
}

std::string detail_of(const BegunOperation& operation) {
  const std::string peer = "rank " + std::to_string(operation.peer);
  const std::string tag = ", tag " + std::to_string(operation.tag);
  if (operation.kind == kSend) return "to " + peer + tag;
  if (operation.kind == kReceive) return "from " + (operation.peer < 0 ? "any rank" : peer) + tag;
  const auto opcode = static_cast<Opcode>(operation.kind);
  const bool reduced = reduces(opcode) || operation.kind == kReduceScatterSingle;
  std::string detail = reduced ? name_of(operation.reduction) : "";
  if (rooted(opcode)) {
    if (!detail.empty()) detail += ", ";
    detail += "root " + std::to_string(operation.peer);
  }
  return detail;
}

OperationRing::OperationRing(std::size_t capacity)
    : capacity_(capacity), entries_(std::make_unique<Entry[]>(capacity)) {}

RecordTicket OperationRing::begin(const BegunOperation& operation) noexcept {
  Counters& counters = counters_[operation.kind];
  add(counters.count, std::uint64_t{1});
  add(counters.bytes, operation.bytes);
  const std::uint64_t index = begun_.load(std::memory_order_relaxed);
  const RecordTicket ticket{index, next_slot_, operation.kind, operation.began};
  if (capacity_ != 0) {
    Entry& entry = entries_[next_slot_];
    if (++next_slot_ == capacity_) next_slot_ = 0;
    // Relaxed: the release of every word below orders it.
    entry.version.store(entering(index), std::memory_order_relaxed);
    constexpr auto kRelease = std::memory_order_release;
    entry.about.store(operation.kind | static_cast<std::uint64_t>(operation.dtype) << 8 |
                          static_cast<std::uint64_t>(operation.reduction) << 16 |
                          static_cast<std::uint64_t>(operation.tensors) << 32,
                      kRelease);
    entry.where.store(static_cast<std::uint32_t>(operation.peer) | static_cast<std::uint64_t>(operation.tag)
                                                                       << 32,
                      kRelease);
    entry.number.store(operation.number, kRelease);
    entry.count.store(operation.count, kRelease);
    entry.bytes.store(operation.bytes, kRelease);
    entry.timeout.store(operation.timeout, kRelease);
    entry.began.store(operation.began, kRelease);
    entry.ended.store(0, kRelease);
    entry.site[0].store(0, kRelease);
    entry.version.store(version_of(index), kRelease);
  }
  begun_.store(index + 1, std::memory_order_release);
  return ticket;
}

bool OperationRing::holds(const RecordTicket& ticket) const noexcept {
  // Relaxed: writers come one after the other.
  return capacity_ != 0 &&
         entries_[ticket.slot].version.load(std::memory_order_relaxed) == version_of(ticket.index);
}

void OperationRing::note_site(const RecordTicket& ticket, const std::string& site) noexcept {
  if (!holds(ticket) || site.empty()) return;
  std::uint64_t words[kSiteWords] = {};
  std::memcpy(words, site.data(), std::min(site.size(), sizeof(words)));
  Entry& entry = entries_[ticket.slot];
  for (std::size_t i = kSiteWords; i-- > 0;) entry.site[i].store(words[i], std::memory_order_release);
}

void OperationRing::finish(const RecordTicket& ticket, Nanoseconds now, bool failed) noexcept {
  add(counters_[ticket.kind].time, now - ticket.began);
  // Release of the error's text, for readers that find it failed.
  if (holds(ticket)) entries_[ticket.slot].ended.store(failed ? -now : now, std::memory_order_release);
}

void OperationRing::end(const RecordTicket& ticket, Nanoseconds now) noexcept { finish(ticket, now, false); }

void OperationRing::fail(const RecordTicket& ticket, Nanoseconds now, const std::string& error) noexcept {
  add(counters_[ticket.kind].errors, std::uint64_t{1});
  note_error(ticket, error, true);
  finish(ticket, now, true);
}

void OperationRing::give_up(const RecordTicket& ticket, Nanoseconds now, const std::string& why) noexcept {
  note_error(ticket, why, false);
  finish(ticket, now, true);
}

void OperationRing::note_error(const RecordTicket& ticket, const std::string& error, bool fails) noexcept {
  try {
    const std::lock_guard lock(errors_mutex_);
    if (fails && first_error_.empty()) first_error_ = error;
    const std::uint64_t begun = begun_.load(std::memory_order_relaxed);
    errors_.erase(errors_.begin(), errors_.lower_bound(begun - std::min<std::uint64_t>(begun, capacity_)));
    if (holds(ticket)) errors_.insert_or_assign(ticket.index, error);
  } catch (const std::exception&) {  // no memory: it failed all the same
  }
}

bool OperationRing::read(const Entry& entry, std::uint64_t index, RecordedOperation& operation) const {
  constexpr auto kAcquire = std::memory_order_acquire;
  if (entry.version.load(kAcquire) != version_of(index)) return false;
  const std::uint64_t about = entry.about.load(kAcquire);
  const std::uint64_t where = entry.where.load(kAcquire);
  operation.kind = static_cast<std::uint8_t>(about);
  operation.dtype = static_cast<DType>(about >> 8 & 0xff);
  operation.reduction = static_cast<ReduceOp>(about >> 16 & 0xff);
  operation.tensors = static_cast<std::uint32_t>(about >> 32);
  operation.peer = static_cast<std::int32_t>(static_cast<std::uint32_t>(where));
  operation.tag = static_cast<std::uint32_t>(where >> 32);
  operation.number = entry.number.load(kAcquire);
  operation.count = entry.count.load(kAcquire);
  operation.bytes = entry.bytes.load(kAcquire);
  operation.timeout = entry.timeout.load(kAcquire);
  operation.began = entry.began.load(kAcquire);
  const Nanoseconds ended = entry.ended.load(kAcquire);
  std::uint64_t words[kSiteWords] = {};
  // Acquire: the others, which are stored before the first.
  if (entry.site[0].load(kAcquire) != 0) {
    for (std::size_t i = 0; i < kSiteWords; ++i) words[i] = entry.site[i].load(kAcquire);
  }
  // Relaxed: every word above was loaded with acquire.
  if (entry.version.load(std::memory_order_relaxed) != version_of(index)) return false;
  operation.ended = ended < 0 ? -ended : ended;
  const char* const text = reinterpret_cast<const char*>(words);
  operation.site.assign(text, ::strnlen(text, sizeof(words)));
  if (ended < 0) operation.error = error_of(index);
  return true;
}

std::string OperationRing::error_of(std::uint64_t index) const {
  const std::lock_guard lock(errors_mutex_);
  const auto found = errors_.find(index);
  return found == errors_.end() ? "what failed is not known any more" : found->second;
}

std::vector<RecordedOperation> OperationRing::operations() const {
  const std::uint64_t begun = begun_.load(std::memory_order_acquire);
  std::vector<RecordedOperation> found;
  for (std::uint64_t index = begun - std::min<std::uint64_t>(begun, capacity_); index < begun; ++index) {
    RecordedOperation operation;
    if (read(entries_[index % capacity_], index, operation)) found.push_back(std::move(operation));
  }
  return found;
}

std::array<OperationRing::Totals, kOperationKinds> OperationRing::totals() const noexcept {
  std::array<Totals, kOperationKinds> totals;
  for (std::size_t kind = 0; kind < kOperationKinds; ++kind) {
    const Counters& counters = counters_[kind];
    totals[kind] = {
        counters.count.load(std::memory_order_relaxed), counters.bytes.load(std::memory_order_relaxed),
        counters.errors.load(std::memory_order_relaxed), counters.time.load(std::memory_order_relaxed)};
  }
  return totals;
}

std::string OperationRing::first_error() const {
  const std::lock_guard lock(errors_mutex_);
  return first_error_;
}

}  // namespace collectives
