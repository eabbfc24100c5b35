#include "transport/mailbox.hpp"

#include <algorithm>
#include <cstring>

#include "common/lines.hpp"
#include "transport/courier.hpp"

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
}

void copy_plainly(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace

std::unique_ptr<Outbox> outbox_to(Station& station, int receiver) {
  if (station.placement().is_local(receiver)) return std::make_unique<RingOutbox>(station, receiver);
  return std::make_unique<RemoteOutbox>(*station.courier(), station.rank(), receiver);
}

std::unique_ptr<Inbox> inbox_from(Station& station, int sender) {
  if (station.placement().is_local(sender)) return std::make_unique<RingInbox>(station, sender);
  return std::make_unique<RemoteInbox>(*station.courier(), sender, station.rank());
}

std::size_t RingOutbox::room() {
  if (!committed_) {
    station_.commit_mailbox(receiver_);
    committed_ = true;
  }
  // Sequentially consistent: acquire, so that the receiver's reads of what is overwritten next came before;
  // and a sleeper's half of the bell's handshake.
  read_ = station_.read(receiver_, station_.rank()).load(std::memory_order_seq_cst);
  return station_.shape().mail_bytes - static_cast<std::size_t>(written_ - read_);
}

bool RingOutbox::has_room(std::size_t count) {
  const bool had =
      committed_ && station_.shape().mail_bytes - static_cast<std::size_t>(written_ - read_) >= count;
  return had || room() >= count;
}

void RingOutbox::write(const void* bytes, std::size_t count) {
  const std::size_t ring = station_.shape().mail_bytes;
  std::byte* base = station_.mailbox(station_.rank(), receiver_);
  const std::size_t at = written_ % ring;
  const std::size_t first = std::min(count, ring - at);
  std::memcpy(base + at, bytes, first);
  if (count > first) std::memcpy(base, static_cast<const std::byte*>(bytes) + first, count - first);
  written_ += count;
}

void RingOutbox::publish() {
  // Sequentially consistent: release for the reader, and one half of the bell's handshake.
  station_.written(station_.rank(), receiver_).store(written_, std::memory_order_seq_cst);
  station_.ring_mail(receiver_);
}

std::size_t RingInbox::available() {
  // Sequentially consistent: acquire of the bytes, and a sleeper's half of the bell's handshake.
  return static_cast<std::size_t>(station_.written(sender_, station_.rank()).load(std::memory_order_seq_cst) -
                                  read_);
}

void RingInbox::peek(void* bytes, std::size_t count) const {
  copy_from(station_.mailbox(sender_, station_.rank()), station_.shape().mail_bytes, read_, bytes, count,
            copy_plainly);
}

void RingInbox::read(void* bytes, std::size_t count) {
  copy_from(station_.mailbox(sender_, station_.rank()), station_.shape().mail_bytes, read_, bytes, count,
            [](std::byte* to, std::byte* from, std::size_t length) {
              copy_and_take(to, from, length, copy_plainly);
            });
  read_ += count;
}

void RingInbox::publish() {
  station_.read(station_.rank(), sender_)
      .store(read_, std::memory_order_seq_cst);  // as in RingOutbox::publish
  station_.ring_mail(sender_);
}

}  // namespace collectives
