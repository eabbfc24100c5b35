#include "security/channel.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "security/libcrypto.hpp"

namespace collectives {
namespace {

// What an encrypted connection reads into at first; it grows with the first long record.
constexpr std::size_t kFirstRoom = 2 << 10;

msghdr message_of(iovec* parts, std::size_t count) noexcept {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return message;
}

ssize_t would_block() noexcept {
  errno = EAGAIN;
  return -1;
}

// A place in a list of parts, which it uses up.
class Cursor {
 public:
  Cursor(iovec* parts, std::size_t count) noexcept : parts_(parts) {
    for (std::size_t i = 0; i < count; ++i) left_ += parts[i].iov_len;
    all_ = left_;
  }

  std::size_t left() const noexcept { return left_; }
  std::size_t used() const noexcept { return all_ - left_; }
  const iovec* parts() const noexcept { return parts_; }

  void skip(std::size_t bytes) noexcept {
    left_ -= bytes;
    while (bytes > 0) {
      const std::size_t here = std::min(bytes, parts_->iov_len);
      parts_->iov_base = static_cast<char*>(parts_->iov_base) + here;
      parts_->iov_len -= here;
      bytes -= here;
      if (bytes > 0) ++parts_;
    }
  }

  // Takes as many of these bytes as there is room for; returns how many.
  std::size_t copy(const std::byte* from, std::size_t bytes) noexcept {
    const std::size_t most = std::min(bytes, left_);
    for (std::size_t done = 0; done < most;) {
      const std::size_t here = std::min(most - done, parts_->iov_len);
      std::memcpy(parts_->iov_base, from + done, here);
      done += here;
      skip(here);
      if (done < most) ++parts_;
    }
    return most;
  }

 private:
  iovec* parts_;
  std::size_t left_ = 0;
  std::size_t all_ = 0;
};

}  // namespace

class Channel::Protection {
 public:
  Protection(SessionSecrets secrets, std::size_t batch);

  ssize_t send(int socket, iovec* parts, std::size_t count, std::uint64_t& handed_over);
  ssize_t receive(int socket, iovec* parts, std::size_t count, int flags);
  bool holds() const noexcept { return rest_.size() > 0 || whole_ || incoming_; }
  bool holds_part() const noexcept { return in_.size() > 0; }

 private:
  // Bytes from `begin` to `end` of some memory, which grows, and is not cleared.
  struct Buffer {
    // Has room for so many from the beginning; what was there is lost.
    void renew(std::size_t bytes);
    // Moves what is there to the beginning of so much room, or more.
    void compact(std::size_t bytes);

    std::size_t size() const noexcept { return end - begin; }
    std::byte* data() const noexcept { return memory.get() + begin; }

    std::unique_ptr<std::byte[]> memory;
    std::size_t room = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // Why a direction of a connection moves nothing any more: an error of the kernel, kForged, or what was
  // thrown in its midst, after which nobody knows which bytes have moved.
  class Failure {
   public:
    explicit operator bool() const noexcept { return error_ != 0 || thrown_; }

    // Moves bytes as `move` does, as long as that has not failed; then fails again as it did.
    template <class Move>
    ssize_t unless_failed(Move&& move) {
      if (thrown_) std::rethrow_exception(thrown_);
      if (error_ != 0) {
        errno = error_;
        return -1;
      }
      try {
        const ssize_t size = move();
        if (size < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) error_ = errno;
        return size;
      } catch (...) {
        thrown_ = std::current_exception();
        throw;
      }
    }

   private:
    int error_ = 0;
    std::exception_ptr thrown_;
  };

  bool flush(int socket, std::uint64_t& handed_over);
  bool seal(Cursor& from);
  bool look();
  int open(Cursor& target);
  ssize_t fill(int socket, Cursor& target, int flags);
  ssize_t read(int socket, int flags);

  const std::size_t batch_;
  RecordCipher seals_;
  RecordCipher opens_;
  Buffer out_;              // records that have not gone
  std::size_t sealed_ = 0;  // bytes of the caller that they carry, not counted as sent yet
  Buffer in_;               // records that have come
  std::size_t length_ = 0;  // of what the first of them carries; 0 while its header is not here
  bool whole_ = false;      // whether that one is here
  Buffer rest_;             // of a record for which there was not enough room
  // One direction may go on when the other has failed.
  Failure outgoing_;
  Failure incoming_;
};

void Channel::Protection::Buffer::renew(std::size_t bytes) {
  begin = end = 0;
  if (bytes <= room) return;
  memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
  room = bytes;
}

void Channel::Protection::Buffer::compact(std::size_t bytes) {
  const std::size_t here = size();
  if (bytes <= room) {
    if (begin > 0 && here > 0) std::memmove(memory.get(), data(), here);
  } else {
    auto larger = std::make_unique_for_overwrite<std::byte[]>(bytes);
    if (here > 0) std::memcpy(larger.get(), data(), here);
    memory = std::move(larger);
    room = bytes;
  }
  begin = 0;
  end = here;
}

const char* forged_text() noexcept {
  return "bytes came on it that the other end did not send in this place: they were changed, repeated, left "
         "out, or put in on their way, by somebody on the network or a fault of it";
}

Channel::Channel() noexcept = default;
Channel::Channel(int socket) noexcept : socket_(socket) {}
Channel::Channel(Channel&& other) noexcept = default;
Channel& Channel::operator=(Channel&& other) noexcept = default;
Channel::~Channel() = default;

Channel::Channel(int socket, SessionSecrets secrets, std::size_t batch)
    : socket_(socket),
      protection_(secrets.suite == CipherSuite::none
                      ? nullptr
                      : std::make_unique<Protection>(std::move(secrets), batch)) {}

ssize_t Channel::send(iovec* parts, std::size_t count) {
  if (protection_) return protection_->send(socket_, parts, count, handed_over_);
  const msghdr message = message_of(parts, count);
  const ssize_t size = ::sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (size > 0) handed_over_ += static_cast<std::uint64_t>(size);
  return size;
}

ssize_t Channel::receive(iovec* parts, std::size_t count, int flags) {
  if (protection_) return protection_->receive(socket_, parts, count, flags);
  msghdr message = message_of(parts, count);
  return ::recvmsg(socket_, &message, flags);
}

Channel::Protection::Protection(SessionSecrets secrets, std::size_t batch)
    : batch_(batch),
      seals_(RecordCipher::Role::seals, secrets.suite, std::move(secrets.outgoing)),
      opens_(RecordCipher::Role::opens, secrets.suite, std::move(secrets.incoming)) {}

bool Channel::holds() const noexcept { return protection_ != nullptr && protection_->holds(); }

bool Channel::holds_part() const noexcept { return protection_ != nullptr && protection_->holds_part(); }

// ---- sending

// Whether all of `out_` has gone; else errno says why not.
bool Channel::Protection::flush(int socket, std::uint64_t& handed_over) {
  while (out_.size() > 0) {
    const ssize_t size = ::send(socket, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return false;
    out_.begin += static_cast<std::size_t>(size);
    handed_over += static_cast<std::uint64_t>(size);
  }
  return true;
}

// Makes records of the next bytes; false at the process's exit.
bool Channel::Protection::seal(Cursor& from) {
  const LibcryptoUse use;
  if (!use) return false;
  const std::size_t all = std::min(from.left(), batch_ * kMostRecordBytes);
  const std::size_t rest = all % kMostRecordBytes;
  out_.renew(all / kMostRecordBytes * record_bytes(kMostRecordBytes) + (rest > 0 ? record_bytes(rest) : 0));
  for (std::size_t left = all; left > 0;) {
    const std::size_t bytes = std::min(left, kMostRecordBytes);
    seals_.seal(from.parts(), bytes, out_.memory.get() + out_.end);
    from.skip(bytes);
    out_.end += record_bytes(bytes);
    left -= bytes;
  }
  sealed_ = all;
  return true;
}

ssize_t Channel::Protection::send(int socket, iovec* parts, std::size_t count, std::uint64_t& handed_over) {
  return outgoing_.unless_failed([&] {
    Cursor from(parts, count);
    const std::size_t asked = from.left();
    if (sealed_ == 0 && !seal(from)) return would_block();
    if (!flush(socket, handed_over)) return ssize_t{-1};
    const std::size_t counted = std::min(asked, sealed_);
    sealed_ -= counted;
    return static_cast<ssize_t>(counted);
  });
}

// ---- receiving

// Finds out whether the next record is here; false where its header is forged.
bool Channel::Protection::look() {
  whole_ = false;
  if (length_ == 0 && in_.size() >= kRecordHeaderBytes) {
    length_ = opens_.length(in_.data());
    if (length_ == 0) return false;
  }
  whole_ = length_ != 0 && in_.size() >= record_bytes(length_);
  return true;
}

// Opens the records that are here, as far as there is room. Returns 0, kForged, or EAGAIN at the process's
// exit.
int Channel::Protection::open(Cursor& target) {
  const LibcryptoUse use;
  if (!use) return EAGAIN;
  for (;;) {
    if (!look()) return kForged;
    if (!whole_ || target.left() == 0) return 0;
    const bool fits = target.left() >= length_;
    iovec own{};
    if (!fits) {
      rest_.renew(kMostRecordBytes);
      own = {.iov_base = rest_.memory.get(), .iov_len = length_};
    }
    whole_ = false;
    if (!opens_.open(in_.data(), length_, fits ? target.parts() : &own)) return kForged;
    if (fits) {
      target.skip(length_);
    } else {
      rest_.end = length_;
      rest_.begin = target.copy(rest_.memory.get(), length_);
    }
    in_.begin += record_bytes(length_);
    length_ = 0;
  }
}

// As recv(2), behind what is here.
ssize_t Channel::Protection::read(int socket, int flags) {
  // For a long record there is room for a batch.
  const bool is_long = length_ != 0 && record_bytes(length_) > in_.room;
  in_.compact(is_long ? batch_ * record_bytes(kMostRecordBytes) : kFirstRoom);
  const ssize_t size = ::recv(socket, in_.memory.get() + in_.end, in_.room - in_.end, flags);
  if (size > 0) in_.end += static_cast<std::size_t>(size);
  return size;
}

// Goes on until there is no room, or nothing is here. Waits at most once, and only where nothing has been
// given. Returns as `receive` where that has given nothing.
ssize_t Channel::Protection::fill(int socket, Cursor& target, int flags) {
  for (bool filled = true;;) {
    if (const int error = open(target); error != 0) {
      errno = error;
      return -1;
    }
    if (target.left() == 0) return 1;
    if (!filled) return would_block();
    const ssize_t size = read(socket, target.used() > 0 ? flags | MSG_DONTWAIT : flags);
    if (size <= 0) return size;
    flags |= MSG_DONTWAIT;
    filled = in_.end == in_.room;
  }
}

ssize_t Channel::Protection::receive(int socket, iovec* parts, std::size_t count, int flags) {
  Cursor target(parts, count);
  rest_.begin += target.copy(rest_.data(), rest_.size());
  ssize_t how = 0;
  if (target.left() > 0) how = incoming_.unless_failed([&] { return fill(socket, target, flags); });
  return target.used() > 0 ? static_cast<ssize_t>(target.used()) : how;
}

}  // namespace collectives
