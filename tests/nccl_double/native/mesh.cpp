#include "mesh.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

namespace nccl_double {
namespace {

constexpr int kPollMilliseconds = 5;  // how soon a wait notices that it is to stop

// An address in the abstract namespace, which leaves nothing in the file system.
socklen_t address_of(const std::string& name, int rank, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string full = "nccl-double/" + name + "/" + std::to_string(rank);
  if (full.size() + 1 > sizeof(address.sun_path)) throw Failure{kInternalError, "the name is too long"};
  std::memcpy(address.sun_path + 1, full.data(), full.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + full.size());
}

int new_socket() {
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made < 0) throw Failure{kSystemError, std::string("socket: ") + std::strerror(errno)};
  return made;
}

}  // namespace

Mesh::Mesh(const std::string& name, int rank, int size)
    : rank_(rank), peers_(static_cast<std::size_t>(size)) {
  sockaddr_un address;
  const int listener = new_socket();
  const socklen_t own = address_of(name, rank, address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), own) != 0 || listen(listener, size) != 0) {
    const std::string reason = std::strerror(errno);
    close(listener);
    throw Failure{kSystemError, "rank " + std::to_string(rank) + " of this unique id exists: " + reason};
  }
  for (int peer = 0; peer < rank; ++peer) {
    const socklen_t length = address_of(name, peer, address);
    const int made = new_socket();
    while (connect(made, reinterpret_cast<sockaddr*>(&address), length) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    send(made, &rank, sizeof(rank), MSG_NOSIGNAL);
    peers_[static_cast<std::size_t>(peer)].socket = made;
  }
  for (int missing = size - 1 - rank; missing > 0; --missing) {
    const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    int peer = -1;
    if (recv(made, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer)) {
      peers_[static_cast<std::size_t>(peer)].socket = made;
    } else {  // it ended while it connected, and comes no more
      close(made);
    }
  }
  close(listener);
}

void Mesh::leave() {
  for (Peer& peer : peers_) {
    if (peer.socket >= 0) close(std::exchange(peer.socket, -1));
    peer.gone = true;
  }
}

void Mesh::part(int kind, const std::atomic<bool>& stop) {
  // One after the other in order of rank, which makes no circle; who is gone waits for nobody.
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_) continue;
    try {
      exchange(Lane::ending, kind, {{peer, nullptr, 0}}, {{peer, nullptr, 0}}, stop);
    } catch (const Failure&) {  // it has left
    }
  }
}

bool Mesh::exchange(Lane lane, int kind, const std::vector<Outgoing>& sends,
                    const std::vector<Incoming>& receives, const std::atomic<bool>& stop) {
  const auto lane_index = static_cast<std::size_t>(lane);
  std::vector<std::uint64_t> numbers;
  for (const Outgoing& one : sends) {
    const Header header{static_cast<std::uint32_t>(lane), kind, one.bytes};
    post(one.peer, header, one.data);
    numbers.push_back(++peers_[static_cast<std::size_t>(one.peer)].lanes[lane_index].sent);
  }
  std::vector<bool> received(receives.size());
  while (!stop) {
    bool done = true;
    std::vector<bool> needed(peers_.size());
    for (std::size_t i = 0; i < receives.size(); ++i) {
      const auto peer = static_cast<std::size_t>(receives[i].peer);
      // Those of one peer in order: one that has nothing yet holds up the later ones.
      if (!received[i] && !needed[peer]) received[i] = take(lane, kind, receives[i]);
      if (!received[i]) needed[peer] = true, done = false;
    }
    for (std::size_t i = 0; i < sends.size(); ++i) {
      const auto peer = static_cast<std::size_t>(sends[i].peer);
      if (peers_[peer].lanes[lane_index].taken < numbers[i]) needed[peer] = true, done = false;
    }
    for (const Peer& peer : peers_) done = done && (peer.gone || peer.outbox.empty());
    if (done) return true;
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (needed[peer] && peers_[peer].gone) {
        throw Failure{kRemoteError, "rank " + std::to_string(peer) + " has closed its connection"};
      }
    }
    pump();
  }
  return false;
}

void Mesh::post(int peer, const Header& header, const std::byte* data) {
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
  if (peer == rank_) {
    if (header.kind) to.lanes[header.lane].inbox.push_back({header, {data, data + header.bytes}});
    return;
  }
  Piece& head = to.outbox.emplace_back(Piece{{bytes, bytes + sizeof(header)}, nullptr, sizeof(header)});
  head.data = head.owned.data();
  if (header.kind && header.bytes) to.outbox.push_back({{}, data, header.bytes});
}

bool Mesh::take(Lane lane, int kind, const Incoming& receive) {
  Counts& from = peers_[static_cast<std::size_t>(receive.peer)].lanes[static_cast<std::size_t>(lane)];
  if (from.inbox.empty()) return false;
  const Message message = std::move(from.inbox.front());
  from.inbox.pop_front();
  if (message.header.kind != kind || message.header.bytes != receive.bytes) {
    throw Failure{kInternalError, "rank " + std::to_string(receive.peer) + " sent " +
                                      std::to_string(message.header.bytes) + " bytes of operation " +
                                      std::to_string(message.header.kind) + ", but rank " +
                                      std::to_string(rank_) + " expects " + std::to_string(receive.bytes) +
                                      " of operation " + std::to_string(kind)};
  }
  if (receive.bytes) std::memcpy(receive.data, message.data.data(), receive.bytes);
  if (receive.peer == rank_) {
    ++from.taken;
  } else {
    post(receive.peer, {static_cast<std::uint32_t>(lane), 0, 0}, nullptr);
  }
  return true;
}

void Mesh::pump() {
  std::vector<pollfd> waiting;
  std::vector<Peer*> owners;
  for (Peer& peer : peers_) {
    if (peer.socket < 0 || peer.gone) continue;
    waiting.push_back({peer.socket, static_cast<short>(POLLIN | (peer.outbox.empty() ? 0 : POLLOUT)), 0});
    owners.push_back(&peer);
  }
  poll(waiting.data(), waiting.size(), kPollMilliseconds);
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    if (waiting[i].revents & POLLOUT) write_to(*owners[i]);
    if (waiting[i].revents & (POLLIN | POLLHUP | POLLERR)) read_from(*owners[i]);
  }
}

void Mesh::write_to(Peer& peer) {
  while (!peer.outbox.empty()) {
    Piece& piece = peer.outbox.front();
    const ssize_t sent = send(peer.socket, piece.data, piece.bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) peer.gone = true;
      return;
    }
    piece.data += sent;
    piece.bytes -= static_cast<std::size_t>(sent);
    if (piece.bytes == 0) peer.outbox.pop_front();
  }
}

void Mesh::read_from(Peer& peer) {
  std::byte buffer[1 << 16];
  const ssize_t got = recv(peer.socket, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    peer.gone = true;
    return;
  }
  peer.arrived.insert(peer.arrived.end(), buffer, buffer + got);
  std::size_t begin = 0;
  while (peer.arrived.size() - begin >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, peer.arrived.data() + begin, sizeof(header));
    if (peer.arrived.size() - begin < sizeof(header) + header.bytes) break;
    begin += sizeof(header);
    Counts& lane = peer.lanes[header.lane];
    if (header.kind == 0) {
      ++lane.taken;
    } else {
      const auto data = peer.arrived.begin() + static_cast<std::ptrdiff_t>(begin);
      lane.inbox.push_back({header, {data, data + static_cast<std::ptrdiff_t>(header.bytes)}});
      begin += header.bytes;
    }
  }
  peer.arrived.erase(peer.arrived.begin(), peer.arrived.begin() + static_cast<std::ptrdiff_t>(begin));
}

}  // namespace nccl_double
