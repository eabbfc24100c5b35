#include "transport/exchange.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/operation.hpp"
#include "transport/courier.hpp"
#include "transport/station.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kSlice = 100 * kMillisecond;
constexpr Nanoseconds kLookEvery = 50 * kMillisecond;
// Between machines an answer takes so long that spinning pays only where it is on its way. A look at a socket
// is a system call.
constexpr Nanoseconds kSpin = 50'000;
constexpr std::size_t kReadAtLeast = 16 << 10;

void append(std::vector<std::byte>& frame, const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const std::byte*>(bytes);
  frame.insert(frame.end(), begin, begin + count);
}

// Whether only the root reads what the others stage.
bool gathers(const Fingerprint& what) {
  const auto kind = static_cast<Kind>(what.kind);
  return kind == Kind::reduce || kind == Kind::gather;
}

// As long as it lives, reports say whom the rank waits for, also the one of a time that is up.
class Awaiting {
 public:
  explicit Awaiting(const Station& station) : station_(station) {}
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;
  ~Awaiting() { station_.waits_for(-1); }

 private:
  const Station& station_;
};

}  // namespace

Exchange::Exchange(Station& station)
    : station_(station),
      machines_(station.placement().count()),
      spinning_(station.placement().local().size() == 1 ? Spinning::Hope::good : Spinning::Hope::little) {
  if (machines_ <= kMostDirect) {
    plan_direct_ways();
  } else {
    plan_passing_on();
  }
}

void Exchange::plan_direct_ways() {
  for (int machine = 0; machine < machines_; ++machine) {
    if (machine == station_.placement().machine) continue;
    Peer& peer = peer_of(machine);
    peer.gives = peer.takes = 1;
    peer.mask = ~0U;
  }
}

void Exchange::plan_passing_on() {
  const int own = station_.placement().machine;
  for (int d = 1; d < machines_; d *= 2) {
    const int frames = std::min(d, machines_ - d);
    peer_of(behind(own, d)).takes = frames;
    Peer& before = peer_of(behind(own, machines_ - d));
    before.gives = frames;
    before.mask = 2U * static_cast<unsigned>(d) - 1;
  }
  held_.resize(static_cast<std::size_t>(machines_));
}

Exchange::Peer& Exchange::peer_of(int machine) {
  for (Peer& peer : peers_) {
    if (peer.machine == machine) return peer;
  }
  Peer& peer = peers_.emplace_back();
  peer.machine = machine;
  peer.leader = station_.placement().leader_of(machine);
  peer.in.resize(kReadAtLeast);
  return peer;
}

void Exchange::connect(const Call& call) {
  Courier& courier = *station_.courier();
  for (const Peer& peer : peers_) {
    if (station_.rank() > peer.leader) courier.dial(peer.leader, Purpose::meeting, 0);
  }
  for (Peer& peer : peers_) peer.socket = courier.link(call, peer.leader, Purpose::meeting, 0);
  connected_ = true;
}

void Exchange::compose(const Call& call, bool with_staged, std::vector<std::byte>& frame) const {
  frame.resize(sizeof(Head));
  for (const int rank : station_.placement().local()) {
    const Arrival& arrival = station_.arrival(rank, call.sequence);
    const std::uint64_t staged = station_.page(rank).relay.staged[call.sequence & 1];
    const bool splits = static_cast<Kind>(arrival.what.kind) == Kind::all_to_all;
    Line line{};
    line.what = arrival.what;
    line.own_count = arrival.own_count;
    line.staged = with_staged ? static_cast<std::uint32_t>(staged) : 0;
    line.splits = splits ? 2 * static_cast<std::uint32_t>(station_.size()) : 0;
    append(frame, &line, sizeof(line));
    append(frame, station_.splits(rank, call.sequence), line.splits * sizeof(std::uint64_t));
    const std::byte* bytes =
        staged <= kInlineBytes ? arrival.payload : station_.near_slot(rank, call.sequence);
    append(frame, bytes, line.staged);
  }
  const Head head{.sequence = call.sequence, .bytes = frame.size()};
  std::memcpy(frame.data(), &head, sizeof(head));
}

// Whether a machine that reads what the frame's ranks staged gets the frame by way of this peer.
bool Exchange::needs_staged(const Peer& peer, int origin, const Fingerprint& what) const {
  if (!gathers(what) || what.root >= static_cast<std::uint32_t>(station_.size())) return true;
  const int reader = station_.placement().of(static_cast<int>(what.root));
  const auto difference =
      static_cast<unsigned>(distance(origin, reader)) ^ static_cast<unsigned>(distance(origin, peer.machine));
  return (difference & peer.mask) == 0;
}

void Exchange::append_lines(Frame& message, const Frame& frame, std::size_t ranks) {
  const std::size_t begin = message.size();
  Head head{};
  std::memcpy(&head, frame.data(), sizeof(head));
  message.resize(begin + sizeof(head));
  std::size_t position = sizeof(head);
  for (std::size_t i = 0; i < ranks; ++i) {
    Line line{};
    std::memcpy(&line, frame.data() + position, sizeof(line));
    position += sizeof(line);
    const std::size_t splits = line.splits * sizeof(std::uint64_t);
    const std::size_t staged = std::exchange(line.staged, 0);
    append(message, &line, sizeof(line));
    append(message, frame.data() + position, splits);
    position += splits + staged;
  }
  head.bytes = message.size() - begin;
  std::memcpy(message.data() + begin, &head, sizeof(head));
}

// What goes to a peer for which enough frames are here.
const Exchange::Frame& Exchange::outgoing(Peer& peer, const Call& call) {
  const Placement& placement = station_.placement();
  const Frame& own = needs_staged(peer, placement.machine, call.what) ? whole_ : lines_;
  if (peer.gives == 1) return own;
  peer.passed_on = own;
  for (int d = 1; d < peer.gives; ++d) {
    const int origin = behind(placement.machine, d);
    const Frame& frame = held_[static_cast<std::size_t>(d)];
    Line first{};
    std::memcpy(&first, frame.data() + sizeof(Head), sizeof(first));
    if (needs_staged(peer, origin, first.what)) {
      append(peer.passed_on, frame.data(), frame.size());
    } else {
      append_lines(peer.passed_on, frame, placement.machines[static_cast<std::size_t>(origin)].size());
    }
  }
  return peer.passed_on;
}

// Whether something is still to be sent there, now or later.
bool Exchange::owes(const Peer& peer) const noexcept {
  return peer.gives > 0 && (peer.out == nullptr || peer.sent < peer.out->size());
}

bool Exchange::send(Peer& peer, const Call& call) {
  if (!owes(peer) || peer.gives > holds_) return false;
  if (peer.out == nullptr) peer.out = &outgoing(peer, call);
  const Frame& out = *peer.out;
  const ssize_t sent =
      ::send(peer.socket.get(), out.data() + peer.sent, out.size() - peer.sent, MSG_NOSIGNAL);
  if (sent > 0) {
    peer.sent += static_cast<std::size_t>(sent);
    return true;
  }
  if (sent < 0 && errno != EAGAIN && errno != EINTR) station_.lose_connection(call, peer.leader);
  return false;
}

bool Exchange::receive(Peer& peer, const Call& call) {
  if (peer.heard == peer.takes) return false;
  if (use(peer, call)) return true;  // it came with the one before
  const ssize_t got = ::recv(peer.socket.get(), peer.in.data() + peer.come, peer.in.size() - peer.come, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) station_.lose_connection(call, peer.leader);
  peer.come += static_cast<std::size_t>(got);
  while (peer.heard < peer.takes && use(peer, call)) {
  }
  return true;
}

bool Exchange::use(Peer& peer, const Call& call) {
  const std::size_t here = peer.come - peer.used;
  Head head{};
  if (here >= sizeof(Head)) std::memcpy(&head, peer.in.data() + peer.used, sizeof(head));
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32;
  const bool plausible = head.bytes >= sizeof(Head) && head.bytes < kMostBytes;
  if (here < sizeof(Head) || (plausible && here < head.bytes)) {
    std::memmove(peer.in.data(), peer.in.data() + peer.used, here);
    peer.come = here;
    peer.used = 0;
    if (peer.in.size() < head.bytes) peer.in.resize(head.bytes);
    return false;
  }
  const auto broken = [&] {
    const std::string text = station_.name_of_rank(peer.leader) + " sent an arrival that rank " +
                             std::to_string(station_.rank()) +
                             " does not understand; install one version for all";
    station_.abort(text);
    station_.check_unbroken();
  };
  if (head.sequence != call.sequence || !plausible) broken();
  const std::byte* frame = peer.in.data() + peer.used;
  const int origin = behind(peer.machine, peer.heard);
  std::size_t position = sizeof(Head);
  const auto next = [&](void* target, std::size_t bytes) {
    if (head.bytes - position < bytes) broken();
    std::memcpy(target, frame + position, bytes);
    position += bytes;
  };
  const auto ranks = static_cast<std::size_t>(station_.size());
  for (const int rank : station_.placement().machines[static_cast<std::size_t>(origin)]) {
    Line line{};
    next(&line, sizeof(line));
    if ((line.splits != 0 && line.splits != 2 * ranks) || line.staged > station_.shape().near_bytes) broken();
    Arrival& mirror = station_.arrival(rank, call.sequence);
    mirror.what = line.what;
    mirror.own_count = line.own_count;
    next(station_.splits(rank, call.sequence), line.splits * sizeof(std::uint64_t));
    next(line.staged <= kInlineBytes ? mirror.payload : station_.near_slot(rank, call.sequence), line.staged);
    // Whoever has come to this operation needs nothing of the one before.
    raise_to(station_.page(rank).status.finished, call.sequence - 1);
    station_.page(rank).status.entered.store(coarse_now_ns(), std::memory_order_relaxed);
    // Release: for reports of this machine's ranks; those who meet are told by `Relay::meetings`.
    mirror.sequence.store(call.sequence, std::memory_order_release);
  }
  if (position != head.bytes) broken();
  if (!held_.empty()) {
    const auto at = static_cast<std::size_t>(distance(station_.placement().machine, origin));
    held_[at].assign(frame, frame + head.bytes);
    while (holds_ < machines_ && !held_[static_cast<std::size_t>(holds_)].empty()) ++holds_;
  }
  peer.used += head.bytes;
  if (peer.used == peer.come) peer.used = peer.come = 0;
  ++peer.heard;
  return true;
}

bool Exchange::done() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [this](const Peer& peer) { return peer.heard == peer.takes && !owes(peer); });
}

void Exchange::wait(const Call& call) {
  std::vector<pollfd> waiting;
  int missing = -1;
  for (const Peer& peer : peers_) {
    const bool sends = owes(peer) && peer.gives <= holds_;
    const bool hears = peer.heard < peer.takes;
    if (!sends && !hears) continue;
    const int events = (hears ? POLLIN : 0) | (sends ? POLLOUT : 0);
    waiting.push_back({.fd = peer.socket.get(), .events = static_cast<short>(events), .revents = 0});
    if (missing < 0) missing = peer.leader;
  }
  waiting.push_back({.fd = station_.courier()->stirred(), .events = POLLIN, .revents = 0});
  const Nanoseconds slice = std::clamp<Nanoseconds>(call.deadline - now_ns(), 0, kSlice);
  const auto limit = static_cast<int>((slice + kMillisecond - 1) / kMillisecond);
  const Nanoseconds begin = now_ns();
  station_.waits_for(missing);
  const int ready = ::poll(waiting.data(), waiting.size(), limit);
  const bool stirred = ready > 0 && waiting.back().revents != 0;
  if (stirred) station_.courier()->unstir();
  if (ready <= 0 || stirred || now_ns() - begin >= kLookEvery) station_.look_around(call, missing);
}

void Exchange::run(const Call& call) {
  if (!connected_) connect(call);
  compose(call, true, whole_);
  if (gathers(call.what)) compose(call, false, lines_);
  for (Peer& peer : peers_) {
    peer.sent = 0;
    peer.out = nullptr;
    peer.heard = 0;
  }
  for (Frame& frame : held_) frame.clear();
  holds_ = 1;
  const auto step = [&] {
    bool moved = false;
    for (Peer& peer : peers_) moved = send(peer, call) || moved;
    for (Peer& peer : peers_) moved = receive(peer, call) || moved;
    return moved;
  };
  step();
  if (done()) return;
  const bool spins = spinning_.worth_long(false);
  const Nanoseconds end = spins ? now_ns() + kSpin : 0;
  while (spins && now_ns() < end) {
    step();
    if (done()) return spinning_.succeeded();
  }
  if (spins) spinning_.failed();
  if (call.interrupt != nullptr) call.interrupt->blocks();
  Status& status = station_.status();
  status.entered.store(now_ns(), std::memory_order_relaxed);
  if (status.site[0].load(std::memory_order_relaxed) != '\0') station_.note_site("");
  const Awaiting awaiting(station_);
  Nanoseconds next_look = now_ns() + kLookEvery;
  while (!done()) {
    if (!step()) wait(call);
    const Nanoseconds now = now_ns();
    if (now < next_look && now < call.deadline) continue;
    if (done()) break;
    station_.look_around(call, peers_.front().leader);
    next_look = now + kLookEvery;
  }
  station_.waits_for(-1);
}

}  // namespace collectives
