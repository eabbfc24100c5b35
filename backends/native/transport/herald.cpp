#include "transport/herald.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/courier.hpp"
#include "transport/forked.hpp"
#include "transport/station.hpp"
#include "transport/tcp.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kTick = 100 * kMillisecond;
// After so much silence a ping goes out.
constexpr std::uint32_t kPingAfterMs = 400;
// A machine whose kernel has not acknowledged anything for so long, though there is something to acknowledge,
// has vanished. The kernel repeats what it sends four times meanwhile.
constexpr std::uint32_t kVanishedAfterMs = 2000;
// Looks that must agree, in case it was this machine that stood still.
constexpr int kLooksToVanish = 3;
// A stopped process reads nothing: it gets no more pings than fit into the kernel's buffer. Then only the
// kernel's own probes find out whether its machine has vanished, in a few seconds more.
constexpr int kMostPings = 200;
// Nor statuses.
constexpr std::size_t kMostBehind = 64 << 10;
constexpr std::size_t kMostPayload = 4096;

template <class Object>
std::string_view bytes_of(const Object& object) {
  return {reinterpret_cast<const char*>(&object), sizeof(object)};
}

struct PoisonNews {
  std::uint32_t kind = 0;
  std::int32_t rank = 0;
  std::int32_t writer = 0;
  std::uint32_t reserved = 0;
};

bool says_vanished(int error) noexcept {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN ||
         error == ENETDOWN;
}

}  // namespace

Herald::Herald(Station& station, const Courier& courier) : station_(station), courier_(courier) {
  for (const int rank : station_.placement().local()) {
    locals_.push_back({.rank = rank, .last = {}, .told = {}, .gone = {}});
    const Descriptor& process = station_.process(rank);
    if (process) courier_.add(Courier::Source::herald, process.get(), EPOLLIN | EPOLLONESHOT);
  }
}

Herald::~Herald() {
  for (const auto& [fd, link] : links_) keep_in_children(fd);
}

void Herald::adopt(int leader, Descriptor socket) {
  const int fd = socket.get();
  keep_alive(socket);
  courier_.add(Courier::Source::herald, fd, EPOLLIN);
  close_in_children(fd);
  met_.insert(leader);
  Link& link = links_[fd];
  link.leader = leader;
  link.socket = std::move(socket);
  link.behind = true;
  tell_past(link);
  look_soon();
}

bool Herald::linked() const { return static_cast<int>(met_.size()) + 1 == station_.placement().count(); }

void Herald::handle(int fd, std::uint32_t events) {
  const auto found = links_.find(fd);
  if (found == links_.end()) return look_soon();  // a process has ended
  if ((events & EPOLLOUT) != 0) flush(found->second);
  if (!found->second.closing && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) read(found->second);
  forget_closed();
}

void Herald::forget_closed() {
  for (auto each = links_.begin(); each != links_.end();) {
    if (!each->second.closing) {
      ++each;
      continue;
    }
    courier_.remove(each->first);
    keep_in_children(each->first);
    each = links_.erase(each);
  }
}

// ---- telling

void Herald::tell(Link& link, Kind kind, int rank, std::string_view payload) {
  if (link.closing) return;
  const Frame frame{.kind = kind, .bytes = static_cast<std::uint32_t>(payload.size()), .rank = rank};
  const bool idle = link.out.empty();
  link.out.append(bytes_of(frame));
  link.out.append(payload);
  if (idle) flush(link);
}

void Herald::tell_poison(Link& link, const Poisoned& news) {
  const PoisonNews head{static_cast<std::uint32_t>(news.kind), news.rank, news.writer, 0};
  tell(link, Kind::poison, news.writer, std::string(bytes_of(head)) + news.text);
}

void Herald::tell_gone(Link& link, const Local& local, Nanoseconds now) {
  Snapshot last = station_.snapshot(local.rank);
  last.presence = static_cast<std::uint32_t>(*local.gone);
  last.to_ages(now);
  tell(link, Kind::gone, local.rank, bytes_of(last));
}

void Herald::tell_past(Link& link) {
  if (poison_known_) {
    if (const std::optional<Poisoned> news = station_.poisoned()) tell_poison(link, *news);
  }
  for (const Local& local : locals_) {
    if (local.gone) tell_gone(link, local, now_ns());
  }
}

void Herald::flush(Link& link) {
  while (!link.out.empty()) {
    const ssize_t sent =
        ::send(link.socket.get(), link.out.data(), link.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) return read(link);  // what the other one said last, then its end
    link.out.erase(0, static_cast<std::size_t>(sent));
  }
  if (said_goodbye_ && link.out.empty()) ::shutdown(link.socket.get(), SHUT_WR);
  const bool more = !link.out.empty();
  courier_.add(Courier::Source::herald, link.socket.get(), more ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Herald::tell_poison() {
  if (poison_told_) return;
  const std::optional<Poisoned> news = station_.poisoned();
  if (!news) return;
  poison_told_ = poison_known_ = true;
  for (auto& [fd, link] : links_) tell_poison(link, *news);
}

void Herald::note_gone(Local& local, Presence how, Nanoseconds now) {
  // Who left a broken group is not its failure. Others may not have heard yet from where this one heard it.
  tell_poison();
  local.gone = how;
  for (auto& [fd, link] : links_) tell_gone(link, local, now);
}

void Herald::say_goodbye() {
  look(now_ns());
  if (said_goodbye_) return;
  said_goodbye_ = true;
  for (Local& local : locals_) {
    if (local.rank == station_.rank() && !local.gone) note_gone(local, Presence::departed, now_ns());
  }
  for (auto& [fd, link] : links_) {
    if (!link.closing) flush(link);
  }
  forget_closed();
}

// ---- looking

void Herald::look(Nanoseconds now) {
  next_look_ = now + kTick;
  if (!poison_known_) tell_poison();
  const bool tick = now >= next_tick_;
  if (tick) next_tick_ = now + kTick;
  look_at_ranks(now, tick);
  if (tick) {
    for (auto& [fd, link] : links_) look_after(link);
  }
  forget_closed();
}

void Herald::look_at_ranks(Nanoseconds now, bool tick) {
  for (Local& local : locals_) {
    if (local.gone) continue;
    const bool self = local.rank == station_.rank();
    if (station_.departed(local.rank)) {
      note_gone(local, Presence::departed, now);
      continue;
    }
    if (!self && station_.dead(local.rank)) {
      note_gone(local, Presence::dead, now);
      station_.ring_everyone();  // those who wait for it need not wait for their next look
      continue;
    }
    if (!tick) continue;
    // What goes on is not worth telling; only what stood still since the last look.
    const Snapshot found = station_.snapshot(local.rank);
    const bool stands = found == std::exchange(local.last, found);
    const bool news = stands && !(found == local.told);
    Snapshot ages = found;
    ages.to_ages(now);
    for (auto& [fd, link] : links_) {
      if (link.closing || !(news || (link.behind && stands))) continue;
      if (link.out.size() > kMostBehind || link.unanswered > 1) {
        link.behind = true;
      } else {
        tell(link, Kind::status, local.rank, bytes_of(ages));
      }
    }
    if (news) local.told = found;
  }
  if (!tick) return;
  for (auto& [fd, link] : links_) {
    if (link.out.size() <= kMostBehind && link.unanswered <= 1) link.behind = false;
  }
}

void Herald::look_after(Link& link) {
  if (link.closing) return;
  const Vitals vitals = vitals_of(link.socket);
  if (vitals.unanswered && vitals.silent_ms >= kVanishedAfterMs) {
    if (++link.silent >= kLooksToVanish) lose(link, ETIMEDOUT);
    return;
  }
  link.silent = 0;
  if (vitals.silent_ms < kPingAfterMs || vitals.unanswered || !link.out.empty()) return;
  if (link.unanswered < kMostPings) {
    ++link.unanswered;
    tell(link, Kind::ping, station_.rank(), {});
  }
}

void Herald::lose(Link& link, int error) {
  if (link.closing) return;
  link.closing = true;
  if (said_goodbye_) return;
  const Placement& placement = station_.placement();
  if (!says_vanished(error)) {
    // Only this process is known to have ended; the others of its machine are not heard of any more.
    station_.hear_gone(link.leader, Presence::dead);
  } else {
    for (const int rank : placement.machines[static_cast<std::size_t>(placement.of(link.leader))]) {
      station_.hear_gone(rank, Presence::unreachable);
    }
  }
  station_.ring_everyone();
}

// ---- hearing

void Herald::read(Link& link) {
  char bytes[16 << 10];
  int error = 0;
  bool ended = false;
  for (;;) {
    const ssize_t got = ::recv(link.socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got <= 0) {
      ended = true;
      error = got < 0 ? errno : 0;
      break;
    }
    link.in.append(bytes, static_cast<std::size_t>(got));
    link.unanswered = 0;
  }
  std::size_t position = 0;
  while (link.in.size() - position >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, link.in.data() + position, sizeof(frame));
    if (frame.bytes > kMostPayload || frame.rank < 0 || frame.rank >= station_.size())
      return lose(link, EPROTO);
    if (link.in.size() - position < sizeof(Frame) + frame.bytes) break;
    const std::string_view payload(link.in.data() + position + sizeof(Frame), frame.bytes);
    position += sizeof(Frame) + frame.bytes;
    if (understand(link, frame, payload)) {
      link.closing = true;
      return;
    }
    if (link.closing) return;
  }
  link.in.erase(0, position);
  if (ended) lose(link, error);
}

bool Herald::understand(Link& link, const Frame& frame, std::string_view payload) {
  switch (frame.kind) {
    case Kind::status:
    case Kind::gone: {
      Snapshot heard;
      if (payload.size() != sizeof(heard) || station_.placement().is_local(frame.rank)) return false;
      std::memcpy(&heard, payload.data(), sizeof(heard));
      heard.from_ages(now_ns());
      heard.site[kSiteBytes - 1] = '\0';
      store_snapshot(heard, station_.page(frame.rank));
      if (frame.kind == Kind::status) return false;
      station_.ring_everyone();
      return frame.rank == link.leader;
    }
    case Kind::poison: {
      PoisonNews head;
      if (payload.size() < sizeof(head)) return false;
      std::memcpy(&head, payload.data(), sizeof(head));
      poison_known_ = true;
      station_.hear_poison({static_cast<ErrorKind>(head.kind), head.rank, head.writer,
                            std::string(payload.substr(sizeof(head)))});
      return false;
    }
    case Kind::ping:
      tell(link, Kind::pong, station_.rank(), {});
      return false;
    case Kind::pong:
      return false;
  }
  return false;
}

}  // namespace collectives
