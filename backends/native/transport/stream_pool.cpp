#include "transport/stream_pool.hpp"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "common/error.hpp"
#include "transport/connection_manager.hpp"

namespace collectives {
namespace {

constexpr const char* kSocketsVariable = "COLLECTIVES_HOST_STREAMS";

// What the rank that dialled sends first on a stream's first connection.
struct Preamble {
  std::uint32_t sockets = 0;
  std::uint32_t reserved = 0;
};

int sockets_from_environment() {
  const char* variable = std::getenv(kSocketsVariable);
  if (variable == nullptr || *variable == '\0') return 0;
  const std::string_view text(variable);
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < 1 ||
      number > Stream::kMostSockets) {
    throw std::invalid_argument(std::string(kSocketsVariable) + "=" + variable +
                                " is no number of sockets from 1 to " + std::to_string(Stream::kMostSockets) +
                                " (unset it to let the group choose)");
  }
  return number;
}

// Bits a second of the network interface that a socket uses; 0 where it is unknown.
double link_speed(int socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  ifaddrs* all = nullptr;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0 || ::getifaddrs(&all) != 0)
    return 0;
  ifreq request{};
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != own.ss_family) continue;
    const bool same =
        own.ss_family == AF_INET
            ? reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr ==
                  reinterpret_cast<const sockaddr_in&>(own).sin_addr.s_addr
            : std::memcmp(&reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr,
                          &reinterpret_cast<const sockaddr_in6&>(own).sin6_addr, sizeof(in6_addr)) == 0;
    if (same) std::snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", each->ifa_name);
  }
  ::freeifaddrs(all);
  ethtool_cmd settings{};
  settings.cmd = ETHTOOL_GSET;
  request.ifr_data = reinterpret_cast<char*>(&settings);
  if (::ioctl(socket, SIOCETHTOOL, &request) != 0) return 0;
  const std::uint32_t megabits = ethtool_cmd_speed(&settings);
  return megabits == static_cast<std::uint32_t>(SPEED_UNKNOWN) ? 0 : 1e6 * megabits;
}

// Most bytes that the kernel lets a connection have in flight.
double most_in_flight() {
  double least = 0;
  for (const char* name : {"tcp_wmem", "tcp_rmem"}) {
    std::ifstream file(std::string("/proc/sys/net/ipv4/") + name);
    double limits[3] = {};
    if (!(file >> limits[0] >> limits[1] >> limits[2])) return 0;
    const double usable = limits[2] / 2;  // the kernel counts its own needs in
    least = least == 0 ? usable : std::min(least, usable);
  }
  return least;
}

// A connection carries at most what it may have in flight in each round trip. So many together fill the link.
int sockets_to_fill(int socket) {
  constexpr double kMost = 8;
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 1;
  const double window = most_in_flight();
  if (window == 0) return 1;
  const double bytes = link_speed(socket) / 8 * info.tcpi_rtt / 1e6;
  return static_cast<int>(std::clamp(std::ceil(bytes / window), 1.0, kMost));
}

}  // namespace

StreamPool::StreamPool(RankContext& context, ConnectionManager& connections)
    : context_(context), connections_(connections), sockets_(sockets_from_environment()) {}

int StreamPool::sockets_for(const Connection& first) const {
  return sockets_ > 0 ? sockets_ : sockets_to_fill(first.socket.get());
}

Stream& StreamPool::with(const Call& call, int rank) {
  const auto found = streams_.find(rank);
  if (found != streams_.end()) return found->second;
  std::vector<Connection> sockets;
  sockets.push_back(connections_.connect(call, rank, Purpose::stream, 0));
  Preamble preamble;
  {
    // The preamble goes through a stream of its own, because that can wait.
    std::vector<Connection> first;
    first.push_back(std::move(sockets.front()));
    StreamSession session(context_, call, *this);
    if (context_.rank() > rank) {
      preamble.sockets = static_cast<std::uint32_t>(sockets_for(first.front()));
      if (first.front().channel.send(&preamble, sizeof(preamble)) != static_cast<ssize_t>(sizeof(preamble))) {
        throw Error(ErrorKind::network, with_errno("a new connection broke", errno), {.rank = rank});
      }
    } else {
      Stream incoming(rank, std::move(first));
      session.receive(incoming, reinterpret_cast<std::byte*>(&preamble), sizeof(preamble));
      first = incoming.release();
      if (preamble.sockets < 1 || preamble.sockets > Stream::kMostSockets) {
        throw Error(ErrorKind::network,
                    "rank " + std::to_string(rank) + " opened a stream with a malformed preamble",
                    {.rank = rank});
      }
    }
    sockets = std::move(first);
  }
  for (int k = 1; k < static_cast<int>(preamble.sockets); ++k)
    sockets.push_back(connections_.connect(call, rank, Purpose::stream, k));
  return streams_.try_emplace(rank, rank, std::move(sockets)).first->second;
}

std::byte* StreamPool::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

Stream& StreamSession::with(int rank) {
  Stream& stream = streams_.with(call_, rank);
  if (std::find(active_.begin(), active_.end(), &stream) == active_.end()) active_.push_back(&stream);
  return stream;
}

bool StreamSession::pump() {
  bool moved = false;
  for (Stream* stream : active_) {
    try {
      moved = stream->pump() || moved;
    } catch (const ForgedError&) {
      context_.throw_forged(stream->peer(), Purpose::stream);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::network) {
        // Of this process alone, as where libcrypto refuses: peers wait for what will not come.
        context_.abort("rank " + std::to_string(context_.rank()) + " failed: " + error.message());
        throw;
      }
      context_.throw_connection_lost(call_, stream->peer());
    }
  }
  return moved;
}

void StreamSession::receive(Stream& stream, std::byte* data, std::size_t bytes) {
  const std::uint64_t end = stream.receive(data, bytes);
  active_.push_back(&stream);
  while (stream.received() < end) {
    if (!pump()) wait(stream.peer(), kNever);
  }
  active_.pop_back();
}

void StreamSession::wait(int peer, Nanoseconds most) {
  if (call_.interrupt != nullptr) call_.interrupt->blocks();
  waiting_.clear();
  waiting_.push_back({.fd = context_.poll_event(), .events = POLLIN, .revents = 0});
  bool holds = false;
  for (const Stream* stream : active_) {
    stream->add_to(waiting_);
    holds = holds || stream->holds();
  }
  const Nanoseconds now = now_ns();
  if (next_check_ == 0) next_check_ = now + kCheckEvery;
  const Nanoseconds patience =
      holds ? 0 : std::max<Nanoseconds>(std::min({kLongestSleep, most, call_.deadline - now}), 0);
  const timespec limit{static_cast<time_t>(patience / kSecond), static_cast<long>(patience % kSecond)};
  const int ready = ::ppoll(waiting_.data(), waiting_.size(), &limit, nullptr);
  if (ready < 0 && errno != EINTR) throw Error(ErrorKind::network, with_errno("poll failed", errno));
  const bool signalled = ready > 0 && waiting_.front().revents != 0;
  if (signalled) context_.clear_poll_event();
  const Nanoseconds after = now_ns();
  if (!signalled && after < next_check_ && after < call_.deadline) return;
  next_check_ = after + kCheckEvery;
  context_.check_liveness(call_, peer);
}

void StreamSession::finish() {
  for (;;) {
    pump();
    const auto busy = std::find_if(active_.begin(), active_.end(), [](const Stream* s) { return s->busy(); });
    if (busy == active_.end()) return;
    wait((*busy)->peer(), kNever);
  }
}

}  // namespace collectives
