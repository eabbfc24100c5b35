#include "transport/control_channel.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/descriptor.hpp"
#include "sockets/tcp_socket.hpp"
#include "state/rank_context.hpp"
#include "transport/connection_manager.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kTick = 100 * kMillisecond;
// A ping is sent once nothing was for so many checks. Hearing the other machine spares it none: it is what
// this one sends whose acknowledgement shows that the way there is open.
constexpr int kChecksToPing = 4;
// A machine whose kernel has acknowledged nothing new at so many checks in a row, though there is something
// to acknowledge, has vanished. This kernel sends it several times meanwhile. Checks and not time are
// counted, in case it was this machine that was suspended, or this thread that did not run. Networks that
// change over to another path, and virtual machines whose cores are taken or that move, are silent for some
// seconds.
constexpr int kChecksToVanish = 45;
// Where a connection ends after so many of them, the other side has given up on this one.
constexpr int kChecksToDoubt = 5;
// A stopped process reads nothing, so it gets no more pings than fit into the kernel's buffer. After them
// only the kernel's keep-alive probes find out whether its machine has vanished, in a few seconds more.
constexpr int kMostPings = 200;
// Nor does it get statuses while so many bytes wait to be sent, or were since it last sent any: what is left
// is less than the window, so that the kernel acknowledges it.
constexpr std::size_t kMostUnsent = 64 << 10;
constexpr std::uint64_t kMostUnheard = 16 << 10;
constexpr std::size_t kMostPayload = 4096;

template <class Object>
std::string_view bytes_of(const Object& object) {
  return {reinterpret_cast<const char*>(&object), sizeof(object)};
}

bool says_vanished(int error) noexcept {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN ||
         error == ENETDOWN;
}

}  // namespace

ControlChannel::ControlChannel(RankContext& context, ConnectionManager& connections)
    : context_(context), connections_(connections) {
  for (const int rank : context_.topology().local()) {
    locals_.push_back({.rank = rank, .last = {}, .sent = {}, .gone = {}});
    const ProcessDescriptor& process = context_.process(rank);
    if (process) connections_.add(ConnectionManager::Source::control, process->get(), EPOLLIN | EPOLLONESHOT);
  }
}

ControlChannel::~ControlChannel() {
  for (const auto& [fd, link] : links_) cancel_close_on_fork(fd);
}

void ControlChannel::add_link(int leader, Connection connection) {
  const int fd = connection.socket.get();
  keep_alive(connection.socket);
  repeat_steadily(connection.socket);
  connections_.add(ConnectionManager::Source::control, fd, EPOLLIN);
  close_on_fork(fd);
  connected_.insert(leader);
  Link& link = links_[fd];
  link.leader = leader;
  link.connection = std::move(connection);
  link.missed_status = true;
  send_history(link);
  check_soon();
}

bool ControlChannel::complete() const {
  return static_cast<int>(connected_.size()) + 1 == context_.topology().count();
}

void ControlChannel::handle(int fd, std::uint32_t events) {
  const auto found = links_.find(fd);
  if (found == links_.end()) return check_soon();  // a process has ended
  if ((events & EPOLLOUT) != 0) flush(found->second);
  if (!found->second.closing && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) read(found->second);
  if (std::exchange(exits_received_, false)) context_.ring_everyone();
  remove_closed();
}

void ControlChannel::remove_closed() {
  for (auto each = links_.begin(); each != links_.end();) {
    if (!each->second.closing) {
      ++each;
      continue;
    }
    connections_.remove(each->first);
    cancel_close_on_fork(each->first);
    each = links_.erase(each);
  }
}

// ---- sending

void ControlChannel::send(Link& link, FrameType type, int rank, std::string_view payload) {
  if (link.closing || link.send_error != 0) return;
  const Frame frame{.type = type, .bytes = static_cast<std::uint32_t>(payload.size()), .rank = rank};
  const bool idle = link.out.empty();
  link.out.append(bytes_of(frame));
  link.out.append(payload);
  if (idle) flush(link);
}

void ControlChannel::send_failure(Link& link, const Failure& failure) {
  const FailureDetails details = packed(failure);
  send(link, FrameType::failure, failure.writer, std::string(bytes_of(details)) + failure.text);
}

void ControlChannel::send_exit(Link& link, int rank, Presence how, Nanoseconds now) {
  RankSnapshot last = context_.snapshot(rank);
  last.presence = static_cast<std::uint32_t>(how);
  last.to_ages(now);
  send(link, FrameType::exit, rank, bytes_of(last));
}

void ControlChannel::send_history(Link& link) {
  if (failure_known_) {
    if (const std::optional<Failure> failure = context_.failure()) send_failure(link, *failure);
  }
  for (const Local& local : locals_) {
    if (local.gone) send_exit(link, local.rank, *local.gone, now_ns());
  }
}

void ControlChannel::flush(Link& link) {
  while (!link.out.empty()) {
    const ssize_t sent = link.connection.channel.send(link.out.data(), link.out.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      // Not read from here, since a handler of received frames may be the caller: the end of the connection
      // makes the socket readable, and `handle` reads what the other leader sent last.
      link.send_error = errno;
      link.out.clear();
      break;
    }
    link.out.erase(0, static_cast<std::size_t>(sent));
    link.quiet = 0;
  }
  link.sent = link.connection.channel.handed_over();
  if (departure_announced_ && link.out.empty()) ::shutdown(link.connection.socket.get(), SHUT_WR);
  const bool more = !link.out.empty();
  connections_.add(ConnectionManager::Source::control, link.connection.socket.get(),
                   more ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void ControlChannel::send_failure() {
  if (failure_sent_) return;
  const std::optional<Failure> failure = context_.failure();
  if (!failure) return;
  failure_sent_ = failure_known_ = true;
  for (auto& [fd, link] : links_) send_failure(link, *failure);
}

void ControlChannel::report_exit(Local& local, Presence how, Nanoseconds now) {
  // Before the exit: a rank that leaves a broken group did not break it. The others may not know of the
  // failure yet.
  send_failure();
  local.gone = how;
  for (auto& [fd, link] : links_) send_exit(link, local.rank, how, now);
}

void ControlChannel::announce_departure() {
  check(now_ns());
  if (departure_announced_) return;
  departure_announced_ = true;
  for (Local& local : locals_) {
    if (local.rank == context_.rank() && !local.gone) report_exit(local, Presence::departed, now_ns());
  }
  for (auto& [fd, link] : links_) {
    if (!link.closing) flush(link);
  }
  remove_closed();
}

// ---- checking

void ControlChannel::check(Nanoseconds now) {
  next_check_ = now + kTick;
  if (!failure_known_) send_failure();
  const bool tick = now >= next_tick_;
  if (tick) next_tick_ = now + kTick;
  check_ranks(now, tick);
  if (tick) {
    for (auto& [fd, link] : links_) check_link(link);
  }
  remove_closed();
}

void ControlChannel::check_ranks(Nanoseconds now, bool tick) {
  if (tick) context_.look_for_replaced();
  for (Local& local : locals_) {
    if (local.gone) continue;
    const bool self = local.rank == context_.rank();
    if (context_.departed(local.rank)) {
      report_exit(local, Presence::departed, now);
      continue;
    }
    if (!self && context_.dead(local.rank)) {
      report_exit(local, Presence::dead, now);
      context_.ring_everyone();  // those who wait for it need not wait for their next check
      continue;
    }
    if (!tick) continue;
    // Only what has not changed since the last check is worth sending.
    const RankSnapshot found = context_.snapshot(local.rank);
    const bool stuck = found == std::exchange(local.last, found);
    const bool changed = stuck && !(found == local.sent);
    RankSnapshot ages = found;
    ages.to_ages(now);
    for (auto& [fd, link] : links_) {
      if (link.closing || !(changed || (link.missed_status && stuck))) continue;
      if (!takes_statuses(link)) {
        link.missed_status = true;
      } else {
        send(link, FrameType::status, local.rank, bytes_of(ages));
      }
    }
    if (changed) local.sent = found;
  }
  if (!tick) return;
  for (auto& [fd, link] : links_) {
    if (takes_statuses(link)) link.missed_status = false;
  }
}

bool ControlChannel::takes_statuses(const Link& link) noexcept {
  return link.out.size() <= kMostUnsent && link.unanswered <= 1 &&
         link.sent - link.sent_when_heard <= kMostUnheard;
}

void ControlChannel::check_link(Link& link) {
  if (link.closing) return;
  const std::uint64_t waiting = unacknowledged_bytes(link.connection.socket);
  const std::uint64_t acknowledged = link.sent - waiting;
  if (waiting == 0 || acknowledged != link.acknowledged) {
    link.acknowledged = acknowledged;
    link.silent = 0;
  } else if (++link.silent >= kChecksToVanish) {
    return link_ended(link, ETIMEDOUT);
  }
  if (++link.quiet < kChecksToPing || waiting != 0 || !link.out.empty()) return;
  if (link.unanswered < kMostPings) {
    ++link.unanswered;
    send(link, FrameType::ping, context_.rank(), {});
  }
}

void ControlChannel::link_ended(Link& link, int error) {
  if (link.closing) return;
  link.closing = true;
  const bool told_own_exit = std::any_of(locals_.begin(), locals_.end(), [this](const Local& local) {
    return local.rank == context_.rank() && local.gone;
  });
  // At a told exit the other leader closes its end. There may be a newer connection with it.
  if (told_own_exit || links_with(link.leader) > 0) return;
  if (says_vanished(error)) return is_not_there(link.leader, false);
  connections_.dial_again(link.leader);
}

std::ptrdiff_t ControlChannel::links_with(int leader) const {
  return std::count_if(links_.begin(), links_.end(), [leader](const auto& entry) {
    return entry.second.leader == leader && !entry.second.closing;
  });
}

void ControlChannel::is_not_there(int leader, bool ended) {
  if (links_with(leader) > 0) return;  // it has come by itself meanwhile
  const Topology& topology = context_.topology();
  if (ended) {
    // Only this process is known to have ended; of the others of its machine nothing is known any more.
    context_.record_remote_exit(leader, Presence::dead);
  } else {
    for (const int rank : topology.machines[static_cast<std::size_t>(topology.of(leader))]) {
      context_.record_remote_exit(rank, Presence::unreachable);
    }
  }
  context_.ring_everyone();
}

// ---- receiving

void ControlChannel::read(Link& link) {
  char bytes[16 << 10];
  int error = 0;
  bool ended = false;
  for (;;) {
    ssize_t got = 0;
    try {
      got = link.connection.channel.receive(bytes, sizeof(bytes));
    } catch (const std::exception& failure) {  // of this process, and ever after the same
      context_.abort("rank " + std::to_string(context_.rank()) + " failed: " + failure.what());
      send_failure();
      link.closing = true;
      return;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got < 0 && errno == kForged) {
      connections_.fail_forged(link.leader, Purpose::control);
      send_failure();  // on this link, too: the other direction may be whole
      link.closing = true;
      return;
    }
    if (got <= 0) {
      ended = true;
      error = got < 0 ? errno : link.send_error;
      break;
    }
    link.in.append(bytes, static_cast<std::size_t>(got));
    link.unanswered = 0;
    link.sent_when_heard = link.sent;
  }
  std::size_t position = 0;
  while (link.in.size() - position >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, link.in.data() + position, sizeof(frame));
    if (frame.bytes > kMostPayload || frame.rank < 0 || frame.rank >= context_.size()) {
      link.closing = true;
      return context_.fail_group(ErrorKind::aborted,
                                 context_.name_of_rank(link.leader) + " sent a control frame of " +
                                     std::to_string(frame.bytes) + " bytes about rank " +
                                     std::to_string(frame.rank) + "; install one version for all ranks",
                                 {.rank = link.leader});
    }
    if (link.in.size() - position < sizeof(Frame) + frame.bytes) break;
    const std::string_view payload(link.in.data() + position + sizeof(Frame), frame.bytes);
    position += sizeof(Frame) + frame.bytes;
    if (handle_frame(link, frame, payload)) {
      link.closing = true;
      return;
    }
    if (link.closing) return;
  }
  link.in.erase(0, position);
  if (ended) link_ended(link, link.silent < kChecksToDoubt ? error : ETIMEDOUT);
}

bool ControlChannel::handle_frame(Link& link, const Frame& frame, std::string_view payload) {
  switch (frame.type) {
    case FrameType::status:
    case FrameType::exit: {
      RankSnapshot received;
      if (payload.size() != sizeof(received) || context_.topology().is_local(frame.rank)) return false;
      std::memcpy(&received, payload.data(), sizeof(received));
      received.from_ages(now_ns());
      received.site[kSiteBytes - 1] = '\0';
      store_snapshot(received, context_.page(frame.rank));
      if (frame.type == FrameType::status) return false;
      exits_received_ = true;
      return frame.rank == link.leader;
    }
    case FrameType::failure: {
      FailureDetails details;
      if (payload.size() < sizeof(details)) return false;
      std::memcpy(&details, payload.data(), sizeof(details));
      failure_known_ = true;
      context_.fail_group(unpacked(details, std::string(payload.substr(sizeof(details))), context_.size()));
      return false;
    }
    case FrameType::ping:
      send(link, FrameType::pong, context_.rank(), {});
      return false;
    case FrameType::pong:
      return false;
  }
  return false;
}

}  // namespace collectives
