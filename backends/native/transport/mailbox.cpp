#include "transport/mailbox.hpp"

#include <algorithm>
#include <cstring>

namespace collectives {

std::size_t Outbox::room() {
  if (!committed_) {
    station_.commit_mailbox(receiver_);
    committed_ = true;
  }
  // Sequentially consistent: acquire, so that the receiver's reads of what is overwritten next came before;
  // and a sleeper's half of the bell's handshake.
  const std::uint64_t read = station_.read(receiver_, station_.rank()).load(std::memory_order_seq_cst);
  return station_.shape().mail_bytes - static_cast<std::size_t>(written_ - read);
}

void Outbox::write(const void* bytes, std::size_t count) {
  const std::size_t ring = station_.shape().mail_bytes;
  std::byte* base = station_.mailbox(station_.rank(), receiver_);
  const std::size_t at = written_ % ring;
  const std::size_t first = std::min(count, ring - at);
  std::memcpy(base + at, bytes, first);
  if (count > first) std::memcpy(base, static_cast<const std::byte*>(bytes) + first, count - first);
  written_ += count;
}

void Outbox::publish() {
  // Sequentially consistent: release for the reader, and one half of the bell's handshake.
  station_.written(station_.rank(), receiver_).store(written_, std::memory_order_seq_cst);
  station_.ring_mail(receiver_);
}

std::size_t Inbox::available() const noexcept {
  // Sequentially consistent: acquire of the bytes, and a sleeper's half of the bell's handshake.
  return static_cast<std::size_t>(station_.written(sender_, station_.rank()).load(std::memory_order_seq_cst) -
                                  read_);
}

void Inbox::read(void* bytes, std::size_t count) {
  const std::size_t ring = station_.shape().mail_bytes;
  const std::byte* base = station_.mailbox(sender_, station_.rank());
  const std::size_t at = read_ % ring;
  const std::size_t first = std::min(count, ring - at);
  std::memcpy(bytes, base + at, first);
  if (count > first) std::memcpy(static_cast<std::byte*>(bytes) + first, base, count - first);
  read_ += count;
}

void Inbox::publish() {
  station_.read(station_.rank(), sender_).store(read_, std::memory_order_seq_cst);  // as in Outbox::publish
  station_.ring_mail(sender_);
}

}  // namespace collectives
