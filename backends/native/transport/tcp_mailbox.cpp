#include "transport/tcp_mailbox.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.hpp"
#include "transport/connection_manager.hpp"

namespace collectives {
namespace {

// Bytes that are handed to a connection at a time, and taken from one.
constexpr std::size_t kMailBufferBytes = 256 << 10;
// A message's frame fits into so many.
constexpr std::size_t kLeastWanted = 64;

// Which of the two connections of a pair carries the messages of `sender`.
int index_of(int sender, int receiver) noexcept { return sender < receiver ? 0 : 1; }

}  // namespace

TcpOutbox::TcpOutbox(ConnectionManager& connections, int sender, int receiver)
    : connections_(connections), receiver_(receiver), index_(index_of(sender, receiver)) {}

TcpInbox::TcpInbox(ConnectionManager& connections, int sender, int receiver)
    : connections_(connections), sender_(sender), index_(index_of(sender, receiver)) {}

// ---- sending

TcpOutbox::~TcpOutbox() {
  if (connection_ && watched_) connections_.unwatch(connection_.socket.get());
}

void TcpOutbox::end(const std::string& error_text) {
  ended_ = now_ns();
  error_text_ = error_text;
  rest_.clear();
  begin_ = 0;
}

std::string TcpOutbox::error_text() const {
  return dialled_ && !connection_ && ended_ == 0 ? connections_.connection_error() : error_text_;
}

void TcpOutbox::connect() {
  const std::uint64_t changes = connections_.changes();
  if (!dialled_) {
    connections_.dial(receiver_, Purpose::mail, index_);
    dialled_ = true;
  } else if (changes == seen_changes_) {
    return;
  }
  seen_changes_ = changes;
  try {
    connection_ = connections_.take(receiver_, Purpose::mail, index_);
  } catch (const Error& error) {
    end(error.message());
  }
}

std::size_t TcpOutbox::room() {
  if (!connection_ && ended_ == 0) connect();
  if (!connection_ || ended_ != 0) return 0;
  flush();
  return rest_.empty() && ended_ == 0 ? kMailBufferBytes : 0;
}

std::size_t TcpOutbox::push(const std::byte* bytes, std::size_t count) {
  std::size_t done = 0;
  while (done < count && ended_ == 0) {
    ssize_t size = 0;
    try {
      size = connection_.channel.send(bytes + done, count - done);
    } catch (const std::exception& error) {  // of this process, as where libcrypto refuses
      end(error.what());
      break;
    }
    if (size >= 0) {
      done += static_cast<std::size_t>(size);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      end(with_errno("the connection broke", errno));
    }
  }
  return done;
}

void TcpOutbox::write(const void* bytes, std::size_t count) {
  const auto* from = static_cast<const std::byte*>(bytes);
  const std::size_t done = rest_.empty() ? push(from, count) : 0;
  if (ended_ == 0) rest_.insert(rest_.end(), from + done, from + count);
}

void TcpOutbox::flush() {
  if (rest_.empty()) return;
  begin_ += push(rest_.data() + begin_, rest_.size() - begin_);
  if (begin_ < rest_.size()) return;
  rest_.clear();
  begin_ = 0;
}

bool TcpOutbox::flushed() {
  flush();
  return rest_.empty() && ended_ == 0;
}

void TcpOutbox::before_sleep() {
  if (!connection_ || rest_.empty() || ended_ != 0) return;
  watched_ = true;
  connections_.watch(connection_.socket.get(), true);
}

// ---- receiving

TcpInbox::~TcpInbox() {
  if (connection_ && watched_) connections_.unwatch(connection_.socket.get());
}

std::size_t TcpInbox::available() {
  if (!connection_) {
    const std::uint64_t changes = connections_.changes();
    if (changes == seen_changes_) return 0;
    seen_changes_ = changes;
    connection_ = connections_.take(sender_, Purpose::mail, index_);
    if (!connection_) return 0;
    buffer_ = std::make_unique_for_overwrite<std::byte[]>(kMailBufferBytes);
  }
  while (end_ - begin_ < kLeastWanted && ended_ == 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    ssize_t size = 0;
    try {
      size = connection_.channel.receive(buffer_.get() + end_, kMailBufferBytes - end_);
    } catch (const std::exception& error) {
      error_text_ = error.what();
      ended_ = now_ns();
      break;
    }
    if (size > 0) {
      end_ += static_cast<std::size_t>(size);
      armed_ = false;
      break;
    }
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (connection_.channel.holds_part()) armed_ = false;  // which may have used the event up
      break;
    }
    const int error = size < 0 ? errno : 0;
    if (error == kForged) {
      error_text_ = forged_text();
      connections_.fail_forged(sender_, Purpose::mail);
    } else {
      error_text_ = error == 0 ? "the connection has ended" : with_errno("the connection broke", error);
    }
    ended_ = now_ns();
  }
  return end_ - begin_;
}

void TcpInbox::peek(void* bytes, std::size_t count) const {
  std::memcpy(bytes, buffer_.get() + begin_, count);
}

void TcpInbox::read(void* bytes, std::size_t count) {
  peek(bytes, count);
  begin_ += count;
}

void TcpInbox::before_sleep() {
  if (!connection_ || armed_ || ended_ != 0) return;
  watched_ = true;
  armed_ = true;
  // What was read and not given yet is looked for at once.
  connections_.watch(connection_.socket.get(), connection_.channel.holds());
}

}  // namespace collectives
