#include "sockets/stream.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <utility>

#include "common/error.hpp"

namespace collectives {
namespace {

constexpr std::size_t kStripe = 64 << 10;
constexpr std::size_t kMostVectors = 32;
// Bytes that one call moves in one direction through one socket, so that both directions go on together.
constexpr std::size_t kBytesPerCall = 1 << 20;

}  // namespace

Stream::Stream(int peer, std::vector<Connection> sockets) : peer_(peer), sockets_(std::move(sockets)) {
  for (std::size_t k = 0; k < sockets_.size(); ++k) {
    outgoing_.next.push_back(k * kStripe);
    incoming_.next.push_back(k * kStripe);
  }
}

std::uint64_t Stream::queue(Flow& flow, std::byte* data, std::size_t bytes) {
  if (bytes > 0) flow.pieces.push_back({flow.queued, data, bytes});
  flow.queued += bytes;
  return flow.queued;
}

std::uint64_t Stream::send(const std::byte* data, std::size_t bytes) {
  return queue(outgoing_, const_cast<std::byte*>(data), bytes);  // only read
}

std::uint64_t Stream::receive(std::byte* data, std::size_t bytes) { return queue(incoming_, data, bytes); }

std::uint64_t Stream::stripe_end(std::uint64_t position) const noexcept {
  return sockets_.size() == 1 ? std::numeric_limits<std::uint64_t>::max()
                              : (position / kStripe + 1) * kStripe;
}

template <class Move>
bool Stream::pump(Flow& flow, Move&& move) {
  if (flow.done == flow.queued) return false;
  bool moved = false;
  for (std::size_t k = 0; k < sockets_.size(); ++k) {
    std::uint64_t& next = flow.next[k];
    std::size_t left = kBytesPerCall;
    while (next < flow.queued && left > 0) {
      iovec vectors[kMostVectors];
      std::size_t count = 0;
      std::size_t asked = 0;
      const std::uint64_t end = std::min(stripe_end(next), flow.queued);
      auto piece = std::upper_bound(flow.pieces.begin(), flow.pieces.end(), next,
                                    [](std::uint64_t at, const Piece& other) { return at < other.begin; });
      --piece;
      for (; piece != flow.pieces.end() && count < kMostVectors && asked < left && next + asked < end;
           ++piece) {
        const auto skipped = static_cast<std::size_t>(next + asked - piece->begin);
        const auto length = static_cast<std::size_t>(
            std::min<std::uint64_t>({piece->bytes - skipped, end - next - asked, left - asked}));
        vectors[count++] = {.iov_base = piece->data + skipped, .iov_len = length};
        asked += length;
      }
      const ssize_t size = move(sockets_[k].channel, vectors, count);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (size < 0 && errno == kForged) throw ForgedError({.rank = peer_});
      if (size <= 0) {
        throw Error(ErrorKind::network,
                    size == 0 ? "the connection has ended" : with_errno("the connection broke", errno),
                    {.rank = peer_});
      }
      const auto bytes = static_cast<std::size_t>(size);
      moved = true;
      left -= bytes;
      next += bytes;
      if (sockets_.size() > 1 && next % kStripe == 0) next += (sockets_.size() - 1) * kStripe;
      if (bytes < asked) break;
    }
  }
  if (moved) {
    flow.done = std::min(flow.queued, *std::min_element(flow.next.begin(), flow.next.end()));
    while (!flow.pieces.empty() && flow.pieces.front().begin + flow.pieces.front().bytes <= flow.done) {
      flow.pieces.pop_front();
    }
  }
  return moved;
}

bool Stream::pump() {
  const bool sent = pump(outgoing_, [](Channel& channel, iovec* parts, std::size_t count) {
    return channel.send(parts, count);
  });
  const bool received = pump(incoming_, [](Channel& channel, iovec* parts, std::size_t count) {
    return channel.receive(parts, count);
  });
  return sent || received;
}

bool Stream::holds() const noexcept {
  for (std::size_t k = 0; k < sockets_.size(); ++k) {
    if (incoming_.next[k] < incoming_.queued && sockets_[k].channel.holds()) return true;
  }
  return false;
}

void Stream::add_to(std::vector<pollfd>& waiting) const {
  for (std::size_t k = 0; k < sockets_.size(); ++k) {
    const bool sends = outgoing_.next[k] < outgoing_.queued;
    const bool receives = incoming_.next[k] < incoming_.queued;
    if (!sends && !receives) continue;
    waiting.push_back({.fd = sockets_[k].socket.get(),
                       .events = static_cast<short>((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)),
                       .revents = 0});
  }
}

}  // namespace collectives
