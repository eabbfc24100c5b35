#include "transport/exchange.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

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
      spinning_(station.placement().local().size() == 1 ? Spinning::Hope::good : Spinning::Hope::little) {
  const Placement& placement = station.placement();
  for (int machine = 0; machine < placement.count(); ++machine) {
    if (machine == placement.machine) continue;
    Peer peer;
    peer.machine = machine;
    peer.leader = placement.leader_of(machine);
    peer.in.resize(kReadAtLeast);
    peers_.push_back(std::move(peer));
  }
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

const std::vector<std::byte>& Exchange::frame_for(const Peer& peer, const Call& call) const {
  const bool needless =
      gathers(call.what) && station_.placement().of(static_cast<int>(call.what.root)) != peer.machine;
  return needless ? lines_ : whole_;
}

bool Exchange::send(Peer& peer, const Call& call) {
  const std::vector<std::byte>& frame = frame_for(peer, call);
  if (peer.sent == frame.size()) return false;
  const ssize_t sent =
      ::send(peer.socket.get(), frame.data() + peer.sent, frame.size() - peer.sent, MSG_NOSIGNAL);
  if (sent > 0) {
    peer.sent += static_cast<std::size_t>(sent);
    return true;
  }
  if (sent < 0 && errno != EAGAIN && errno != EINTR) station_.lose_connection(call, peer.leader);
  return false;
}

bool Exchange::receive(Peer& peer, const Call& call) {
  if (peer.heard) return false;
  if (use(peer, call)) return true;  // it came with the one before
  const ssize_t got = ::recv(peer.socket.get(), peer.in.data() + peer.come, peer.in.size() - peer.come, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) station_.lose_connection(call, peer.leader);
  peer.come += static_cast<std::size_t>(got);
  use(peer, call);
  return true;
}

bool Exchange::use(Peer& peer, const Call& call) {
  if (peer.come < sizeof(Head)) return false;
  Head head{};
  std::memcpy(&head, peer.in.data(), sizeof(head));
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32;
  if (head.bytes >= sizeof(Head) && head.bytes < kMostBytes && peer.come < head.bytes) {
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
  if (head.sequence != call.sequence || head.bytes > peer.come || head.bytes < sizeof(Head)) broken();
  std::size_t position = sizeof(Head);
  const auto next = [&](void* target, std::size_t bytes) {
    if (head.bytes - position < bytes) broken();
    std::memcpy(target, peer.in.data() + position, bytes);
    position += bytes;
  };
  const auto ranks = static_cast<std::size_t>(station_.size());
  for (const int rank : station_.placement().machines[static_cast<std::size_t>(peer.machine)]) {
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
  std::memmove(peer.in.data(), peer.in.data() + head.bytes, peer.come - head.bytes);
  peer.come -= head.bytes;
  peer.heard = true;
  return true;
}

bool Exchange::done() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.heard; });
}

void Exchange::wait(const Call& call) {
  std::vector<pollfd> waiting;
  int missing = -1;
  for (const Peer& peer : peers_) {
    const bool sends = peer.sent < frame_for(peer, call).size();
    if (!sends && peer.heard) continue;
    const int events = (peer.heard ? 0 : POLLIN) | (sends ? POLLOUT : 0);
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
    peer.heard = false;
  }
  const auto step = [&] {
    bool moved = false;
    for (Peer& peer : peers_) moved = send(peer, call) || moved;
    for (Peer& peer : peers_) moved = receive(peer, call) || moved;
    return moved;
  };
  const auto finished = [&] {
    return done() && std::all_of(peers_.begin(), peers_.end(),
                                 [&](const Peer& peer) { return peer.sent == frame_for(peer, call).size(); });
  };
  step();
  if (finished()) return;
  const bool spins = spinning_.worth_long(false);
  const Nanoseconds end = spins ? now_ns() + kSpin : 0;
  while (spins && now_ns() < end) {
    step();
    if (finished()) return spinning_.succeeded();
  }
  if (spins) spinning_.failed();
  if (call.interrupt != nullptr) call.interrupt->blocks();
  Status& status = station_.status();
  status.entered.store(now_ns(), std::memory_order_relaxed);
  if (status.site[0].load(std::memory_order_relaxed) != '\0') station_.note_site("");
  const Awaiting awaiting(station_);
  Nanoseconds next_look = now_ns() + kLookEvery;
  while (!finished()) {
    if (!step()) wait(call);
    const Nanoseconds now = now_ns();
    if (now < next_look && now < call.deadline) continue;
    if (finished()) break;
    station_.look_around(call, peers_.front().leader);
    next_look = now + kLookEvery;
  }
  station_.waits_for(-1);
}

}  // namespace collectives
