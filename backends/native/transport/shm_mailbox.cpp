#include "transport/shm_mailbox.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "common/cache_line.hpp"

namespace collectives {
namespace {

// Copies what lies in a ring from `position` on, in one or two parts, by `copy(to, from, bytes)`.
template <class Copy>
void copy_from(std::byte* base, std::size_t ring, std::uint64_t position, void* bytes, std::size_t count,
               Copy&& copy) {
  auto* to = static_cast<std::byte*>(bytes);
  const std::size_t at = position % ring;
  const std::size_t first = std::min(count, ring - at);
  copy(to, base + at, first);
  if (count > first) copy(to + first, base, count - first);
  // For the compiler alone: what was copied is checked next, and must not be read from the ring again.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

std::string from_to(std::uint64_t least, std::uint64_t most) {
  return "from " + std::to_string(least) + " to " + std::to_string(most);
}

void copy_plainly(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace

std::size_t ShmOutbox::room() {
  if (!committed_) {
    context_.commit_mailbox(receiver_);
    committed_ = true;
  }
  // Sequentially consistent: acquire, so that the receiver's reads of what is overwritten next came before;
  // and a sleeper's half of the doorbell's handshake.
  const std::uint64_t read = context_.read(receiver_, context_.rank()).load(std::memory_order_seq_cst);
  const std::size_t ring = context_.shape().mail_bytes;
  if (written_ - read > ring) [[unlikely]] {
    const std::uint64_t least = written_ - std::min<std::uint64_t>(written_, ring);
    context_.fail_on_word(receiver_, "the number of bytes read from rank " + std::to_string(context_.rank()),
                          read, from_to(least, written_));
    return 0;
  }
  read_ = read;
  return unused();
}

bool ShmOutbox::has_room(std::size_t count) { return (committed_ && unused() >= count) || room() >= count; }

void ShmOutbox::write(const void* bytes, std::size_t count) {
  if (count == 0) return;  // an empty tensor may have no address
  const std::size_t ring = context_.shape().mail_bytes;
  std::byte* base = context_.mailbox(context_.rank(), receiver_);
  const std::size_t at = written_ % ring;
  const std::size_t first = std::min(count, ring - at);
  std::memcpy(base + at, bytes, first);
  if (count > first) std::memcpy(base, static_cast<const std::byte*>(bytes) + first, count - first);
  written_ += count;
}

void ShmOutbox::publish() {
  // Sequentially consistent: release for the reader, and one half of the doorbell's handshake.
  context_.written(context_.rank(), receiver_).store(written_, std::memory_order_seq_cst);
  context_.ring_mail(receiver_);
}

std::size_t ShmInbox::available() {
  // Sequentially consistent: acquire of the bytes, and a sleeper's half of the doorbell's handshake.
  const std::uint64_t written = context_.written(sender_, context_.rank()).load(std::memory_order_seq_cst);
  const std::size_t ring = context_.shape().mail_bytes;
  if (written - read_ > ring) [[unlikely]] {
    context_.fail_on_word(sender_, "the number of bytes written to rank " + std::to_string(context_.rank()),
                          written, from_to(read_, read_ + ring));
    return 0;
  }
  return static_cast<std::size_t>(written - read_);
}

void ShmInbox::peek(void* bytes, std::size_t count) const {
  copy_from(context_.mailbox(sender_, context_.rank()), context_.shape().mail_bytes, read_, bytes, count,
            copy_plainly);
}

void ShmInbox::read(void* bytes, std::size_t count) {
  copy_from(context_.mailbox(sender_, context_.rank()), context_.shape().mail_bytes, read_, bytes, count,
            [](std::byte* to, std::byte* from, std::size_t length) {
              copy_and_take(to, from, length, copy_plainly);
            });
  read_ += count;
}

void ShmInbox::publish() {
  context_.read(context_.rank(), sender_)
      .store(read_, std::memory_order_seq_cst);  // as in ShmOutbox::publish
  context_.ring_mail(sender_);
}

}  // namespace collectives
