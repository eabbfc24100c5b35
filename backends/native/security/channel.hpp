// A connection's bytes, in clear or in encrypted records (records.hpp), by the rules of a non-blocking
// socket.
//
// `send` counts bytes only once their records have gone to the kernel whole. What it has encrypted and not
// sent, it keeps: whoever is told EAGAIN offers the same bytes again, as to a socket, waits until the socket
// can be written, and has nothing else to flush. `receive` gives what fits of the records that are here;
// where it gives less than was asked, the kernel tells when more comes, and `holds` is true only where an
// error is left to tell. A direction of an encrypted connection that has failed fails from then on, in the
// same way.
//
// An encrypted channel keeps memory for two batches of records and two more, however much it carries.
//
// Thread safety: one thread at a time.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "common/error.hpp"
#include "security/records.hpp"

namespace collectives {

// What both ends of a connection have after their handshake: a secret for each direction.
struct SessionSecrets {
  CipherSuite suite = CipherSuite::none;
  std::string outgoing;
  std::string incoming;
};

// errno of `receive` where what came is not what the other end sent: it was changed on its way, or others
// sent it. Nothing comes any more then.
inline constexpr int kForged = EBADMSG;

// "bytes came on it that the other end did not send ...", for messages.
const char* forged_text() noexcept;

// The same, of whatever throws instead.
class ForgedError : public Error {
 public:
  explicit ForgedError(ErrorDetails details = {})
      : Error(ErrorKind::network, forged_text(), std::move(details)) {}
};

class Channel {
 public:
  Channel() noexcept;
  // In clear. The socket stays the caller's.
  explicit Channel(int socket) noexcept;
  // Encrypted where the secrets name a suite. `batch`: records that are made, or read, at a time.
  Channel(int socket, SessionSecrets secrets, std::size_t batch);

  Channel(Channel&& other) noexcept;
  Channel& operator=(Channel&& other) noexcept;
  ~Channel();

  int socket() const noexcept { return socket_; }
  bool encrypted() const noexcept { return protection_ != nullptr; }

  // As sendmsg(2) with MSG_NOSIGNAL | MSG_DONTWAIT. Both may change the list of the parts.
  ssize_t send(iovec* parts, std::size_t count);
  ssize_t send(const void* bytes, std::size_t size) {
    iovec part{.iov_base = const_cast<void*>(bytes), .iov_len = size};  // only read
    return send(&part, 1);
  }

  // As recvmsg(2) with these flags; -1 with kForged in errno besides. Where it may wait, it waits for the
  // kernel once at most: then EAGAIN means that what has come is not a whole record.
  ssize_t receive(iovec* parts, std::size_t count, int flags = MSG_DONTWAIT);
  ssize_t receive(void* bytes, std::size_t size, int flags = MSG_DONTWAIT) {
    iovec part{.iov_base = bytes, .iov_len = size};
    return receive(&part, 1, flags);
  }

  // Whether `receive` has bytes, or an error, of which the kernel tells nothing.
  bool holds() const noexcept;

  // Whether `receive` has a part of a record, and needs the rest.
  bool holds_part() const noexcept;

  // Bytes that were handed to the kernel, what encryption adds included.
  std::uint64_t handed_over() const noexcept { return handed_over_; }

 private:
  class Protection;

  int socket_ = -1;
  std::uint64_t handed_over_ = 0;
  std::unique_ptr<Protection> protection_;
};

}  // namespace collectives
