#include "transport/arrival_exchange.hpp"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/codes.hpp"
#include "memory/copy_once.hpp"
#include "state/machine_contribution.hpp"
#include "state/rank_context.hpp"
#include "transport/connection_manager.hpp"

namespace collectives {
namespace {

// Checking a socket is a system call, so that a background thread spins only where that has paid. A caller
// looks again and again for longer, and yields its core between looks: to be woken between machines takes
// longer than most answers (measured on a virtual machine with 4 machines of one rank on 2 cores: 8 bytes
// take 45 to 60 us instead of 89, 16 KiB 72 to 104 instead of 148).
constexpr Nanoseconds kSpin = 50'000;
constexpr Nanoseconds kCallerSpin = 200'000;
constexpr std::size_t kReadAtLeast = 16 << 10;

void append(std::vector<std::byte>& frame, const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const std::byte*>(bytes);
  frame.insert(frame.end(), begin, begin + count);
}

// Whether only the root reads what the others stage.
bool gathers(const Fingerprint& what) {
  const auto opcode = static_cast<Opcode>(what.opcode);
  return opcode == Opcode::reduce || opcode == Opcode::gather;
}

}  // namespace

ArrivalExchange::ArrivalExchange(RankContext& context, ConnectionManager& connections)
    : context_(context),
      connections_(connections),
      machines_(context.topology().count()),
      spin_policy_(context.topology().local().size() == 1 ? SpinPolicy::Likelihood::high
                                                          : SpinPolicy::Likelihood::low) {
  if (!context_.topology().leads(context_.rank())) return;
  if (machines_ <= kMostDirect) {
    plan_direct();
  } else {
    plan_forwarding();
  }
}

void ArrivalExchange::plan_direct() {
  for (int machine = 0; machine < machines_; ++machine) {
    if (machine == context_.topology().machine) continue;
    Peer& peer = peer_of(machine);
    peer.frames_to_send = peer.frames_to_receive = 1;
    peer.mask = ~0U;
  }
}

void ArrivalExchange::plan_forwarding() {
  const int own = context_.topology().machine;
  for (int d = 1; d < machines_; d *= 2) {
    const int frames = std::min(d, machines_ - d);
    peer_of(behind(own, d)).frames_to_receive = frames;
    Peer& before = peer_of(behind(own, machines_ - d));
    before.frames_to_send = frames;
    before.mask = 2U * static_cast<unsigned>(d) - 1;
  }
  forwarded_.resize(static_cast<std::size_t>(machines_));
}

ArrivalExchange::Peer& ArrivalExchange::peer_of(int machine) {
  for (Peer& peer : peers_) {
    if (peer.machine == machine) return peer;
  }
  Peer& peer = peers_.emplace_back();
  peer.machine = machine;
  peer.leader = context_.topology().leader_of(machine);
  peer.in.resize(kReadAtLeast);
  return peer;
}

void ArrivalExchange::connect_leaders(const Call& call) {
  for (const Peer& peer : peers_) {
    if (context_.rank() > peer.leader) connections_.dial(peer.leader, Purpose::arrival, 0);
  }
  for (Peer& peer : peers_) peer.connection = connections_.connect(call, peer.leader, Purpose::arrival, 0);
  connected_ = true;
}

void ArrivalExchange::write_frame(const Call& call, Staged with, Frame& frame) const {
  frame.resize(sizeof(Head));
  for (const int rank : context_.topology().local()) {
    const Arrival& arrival = context_.arrival(rank, call.sequence);
    const std::uint64_t staged = copy_once(context_.page(rank).machine_arrival.staged[call.sequence & 1]);
    if (staged > context_.shape().slot_bytes) [[unlikely]] {
      context_.throw_on_word(rank, "the number of bytes that it staged", staged,
                             "at most " + std::to_string(context_.shape().slot_bytes));
    }
    ArrivalRecord record{};
    record.what = copy_once(arrival.what);
    const bool splits = static_cast<Opcode>(record.what.opcode) == Opcode::all_to_all;
    record.own_count = arrival.own_count;
    record.splits = splits ? 2 * static_cast<std::uint32_t>(context_.size()) : 0;
    if (with == Staged::all) record.staged = static_cast<std::uint32_t>(staged);
    append(frame, &record, sizeof(record));
    append(frame, context_.splits(rank, call.sequence), record.splits * sizeof(std::uint64_t));
    append(frame, staged <= kInlineBytes ? arrival.payload : context_.staging_slot(rank, call.sequence),
           record.staged);
  }
  complete_frame(call, frame);
}

void ArrivalExchange::complete_frame(const Call& call, Frame& frame) {
  const Head head{.sequence = call.sequence, .bytes = frame.size()};
  std::memcpy(frame.data(), &head, sizeof(head));
}

// The frames of an operation to which machines contribute as one. A rank that does something else has staged
// something else.
void ArrivalExchange::write_contributions(const Call& call) {
  const auto& local = context_.topology().local();
  const bool alike = std::all_of(local.begin(), local.end(), [&](int rank) {
    return copy_once(context_.arrival(rank, call.sequence).what) == call.what;
  });
  if (alike) contribution_->reduce_local();
  write_frame(call, Staged::none, without_staged_);
  for (Peer& peer : peers_) {
    peer.own_out = without_staged_;
    if (alike) {
      contribution_->append_to(peer.own_out, static_cast<std::size_t>(peer.machine));
      complete_frame(call, peer.own_out);
    }
    peer.out = &peer.own_out;
  }
}

// Whether a machine that reads what the frame's ranks staged gets the frame through this peer.
bool ArrivalExchange::needs_staged(const Peer& peer, int origin, const Fingerprint& what) const {
  if (!gathers(what) || what.root >= static_cast<std::uint32_t>(context_.size())) return true;
  const int reader = context_.topology().of(static_cast<int>(what.root));
  const auto difference =
      static_cast<unsigned>(distance(origin, reader)) ^ static_cast<unsigned>(distance(origin, peer.machine));
  return (difference & peer.mask) == 0;
}

void ArrivalExchange::append_without_staged(Frame& message, const Frame& frame, std::size_t ranks) {
  const std::size_t begin = message.size();
  Head head{};
  std::memcpy(&head, frame.data(), sizeof(head));
  message.resize(begin + sizeof(head));
  std::size_t position = sizeof(head);
  for (std::size_t i = 0; i < ranks; ++i) {
    ArrivalRecord record{};
    std::memcpy(&record, frame.data() + position, sizeof(record));
    position += sizeof(record);
    const std::size_t splits = record.splits * sizeof(std::uint64_t);
    const std::size_t staged = std::exchange(record.staged, 0);
    append(message, &record, sizeof(record));
    append(message, frame.data() + position, splits);
    position += splits + staged;
  }
  head.bytes = message.size() - begin;
  std::memcpy(message.data() + begin, &head, sizeof(head));
}

// What is sent to a peer, once enough frames are here.
const ArrivalExchange::Frame& ArrivalExchange::outgoing(Peer& peer, const Call& call) {
  const Topology& topology = context_.topology();
  const Frame& own = needs_staged(peer, topology.machine, call.what) ? with_staged_ : without_staged_;
  if (peer.frames_to_send == 1) return own;
  peer.own_out = own;
  for (int d = 1; d < peer.frames_to_send; ++d) {
    const int origin = behind(topology.machine, d);
    const Frame& frame = forwarded_[static_cast<std::size_t>(d)];
    ArrivalRecord first{};
    std::memcpy(&first, frame.data() + sizeof(Head), sizeof(first));
    if (needs_staged(peer, origin, first.what)) {
      append(peer.own_out, frame.data(), frame.size());
    } else {
      append_without_staged(peer.own_out, frame, topology.machines[static_cast<std::size_t>(origin)].size());
    }
  }
  return peer.own_out;
}

// Whether something is still to be sent there, now or later.
bool ArrivalExchange::has_to_send(const Peer& peer) const noexcept {
  return peer.frames_to_send > 0 && (peer.out == nullptr || peer.sent < peer.out->size());
}

bool ArrivalExchange::send(Peer& peer, const Call& call) {
  if (!has_to_send(peer) || peer.frames_to_send > forwarded_count_) return false;
  if (peer.out == nullptr) peer.out = &outgoing(peer, call);
  const Frame& out = *peer.out;
  const ssize_t sent = peer.connection.channel.send(out.data() + peer.sent, out.size() - peer.sent);
  if (sent > 0) {
    peer.sent += static_cast<std::size_t>(sent);
    return true;
  }
  if (sent < 0 && errno != EAGAIN && errno != EINTR) context_.throw_connection_lost(call, peer.leader);
  return false;
}

bool ArrivalExchange::receive(Peer& peer, const Call& call) {
  if (peer.received == peer.frames_to_receive) return false;
  if (take_frame(peer, call)) return true;  // it was received with the one before
  const ssize_t got =
      peer.connection.channel.receive(peer.in.data() + peer.filled, peer.in.size() - peer.filled);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got < 0 && errno == kForged) context_.throw_forged(peer.leader, Purpose::arrival);
  if (got <= 0) context_.throw_connection_lost(call, peer.leader);
  peer.filled += static_cast<std::size_t>(got);
  while (peer.received < peer.frames_to_receive && take_frame(peer, call)) {
  }
  return true;
}

bool ArrivalExchange::take_frame(Peer& peer, const Call& call) {
  const std::size_t here = peer.filled - peer.used;
  Head head{};
  if (here >= sizeof(Head)) std::memcpy(&head, peer.in.data() + peer.used, sizeof(head));
  const int origin = behind(peer.machine, peer.received);
  const auto& origin_ranks = context_.topology().machines[static_cast<std::size_t>(origin)];
  const auto ranks = static_cast<std::size_t>(context_.size());
  const std::size_t most_bytes =
      sizeof(Head) + origin_ranks.size() * (sizeof(ArrivalRecord) + 2 * ranks * sizeof(std::uint64_t) +
                                            context_.shape().slot_bytes);
  const bool plausible = head.bytes >= sizeof(Head) && head.bytes <= most_bytes;
  if (here < sizeof(Head) || (plausible && here < head.bytes)) {
    std::memmove(peer.in.data(), peer.in.data() + peer.used, here);
    peer.filled = here;
    peer.used = 0;
    if (peer.in.size() < head.bytes) peer.in.resize(head.bytes);
    return false;
  }
  if (head.sequence != call.sequence || !plausible) not_understood(peer);
  const std::byte* frame = peer.in.data() + peer.used;
  if (results_ != nullptr) {
    take_results(peer, call, head, frame);
  } else {
    take_arrivals(peer, call, head, frame);
  }
  peer.used += head.bytes;
  if (peer.used == peer.filled) peer.used = peer.filled = 0;
  ++peer.received;
  return true;
}

void ArrivalExchange::not_understood(const Peer& peer) const {
  context_.fail_group(ErrorKind::aborted,
                      context_.name_of_rank(peer.leader) + " sent a frame that rank " +
                          std::to_string(context_.rank()) +
                          " does not understand; install one version for all",
                      {.rank = peer.leader});
  context_.check_unbroken();
}

void ArrivalExchange::take_arrivals(Peer& peer, const Call& call, const Head& head, const std::byte* frame) {
  const int origin = behind(peer.machine, peer.received);
  const auto ranks = static_cast<std::size_t>(context_.size());
  bool alike = true;
  std::size_t position = sizeof(Head);
  const auto next = [&](void* target, std::size_t bytes) {
    if (head.bytes - position < bytes) not_understood(peer);
    std::memcpy(target, frame + position, bytes);
    position += bytes;
  };
  for (const int rank : context_.topology().machines[static_cast<std::size_t>(origin)]) {
    ArrivalRecord record{};
    next(&record, sizeof(record));
    if ((record.splits != 0 && record.splits != 2 * ranks) || record.staged > context_.shape().slot_bytes)
      not_understood(peer);
    alike = alike && record.what == call.what;
    Arrival& mirror = context_.arrival(rank, call.sequence);
    mirror.what = record.what;
    mirror.own_count = record.own_count;
    next(context_.splits(rank, call.sequence), record.splits * sizeof(std::uint64_t));
    next(record.staged <= kInlineBytes ? mirror.payload : context_.staging_slot(rank, call.sequence),
         record.staged);
    // Whoever has arrived at this operation needs nothing of the one before.
    raise_to(context_.page(rank).status.finished, call.sequence - 1);
    context_.page(rank).status.entered.store(coarse_now_ns(), std::memory_order_relaxed);
    // Release: for reports of this machine's ranks; `MachineArrival::complete` tells those who wait.
    mirror.sequence.store(call.sequence, std::memory_order_release);
  }
  if (alike && contribution_ != nullptr) {
    next(context_.staging_slot(peer.leader, call.sequence),
         contribution_->bytes(static_cast<std::size_t>(origin),
                              static_cast<std::size_t>(context_.topology().machine)));
  }
  // What a machine contributes to another operation than this one's is of no use to anybody.
  if (alike && position != head.bytes) not_understood(peer);
  if (!forwarded_.empty()) {
    const auto at = static_cast<std::size_t>(distance(context_.topology().machine, origin));
    forwarded_[at].assign(frame, frame + head.bytes);
    while (forwarded_count_ < machines_ && !forwarded_[static_cast<std::size_t>(forwarded_count_)].empty())
      ++forwarded_count_;
  }
}

void ArrivalExchange::take_results(const Peer& peer, const Call& call, const Head& head,
                                   const std::byte* frame) {
  std::size_t position = sizeof(Head);
  for (const int rank : context_.topology().machines[static_cast<std::size_t>(peer.machine)]) {
    const std::size_t bytes = (*results_)[static_cast<std::size_t>(rank)];
    if (head.bytes - position < bytes) not_understood(peer);
    std::memcpy(context_.staging_slot(rank, call.sequence), frame + position, bytes);
    position += bytes;
  }
  if (position != head.bytes) not_understood(peer);
}

bool ArrivalExchange::done() const {
  return std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) { return is_done(peer); });
}

bool ArrivalExchange::is_done(const Peer& peer) const noexcept {
  return peer.received == peer.frames_to_receive && !has_to_send(peer);
}

// A peer that this exchange waits for.
int ArrivalExchange::awaited_leader() const {
  const auto found =
      std::find_if(peers_.begin(), peers_.end(), [this](const Peer& peer) { return !is_done(peer); });
  return found == peers_.end() ? peers_.front().leader : found->leader;
}

void ArrivalExchange::wait(const Call& call) {
  std::vector<pollfd> waiting;
  bool receives = false;
  for (const Peer& peer : peers_) {
    const bool sends = has_to_send(peer) && peer.frames_to_send <= forwarded_count_;
    // Of the peers that nothing has come from, one is waited for: most others' frames come meanwhile, and
    // wake nobody. Where one of these has gone, the control channel tells.
    const bool begun = peer.filled > peer.used;
    const bool receives_here = peer.received < peer.frames_to_receive && (begun || !receives);
    if (!sends && !receives_here) continue;
    receives = receives || receives_here;
    const int events = (receives_here ? POLLIN : 0) | (sends ? POLLOUT : 0);
    waiting.push_back(
        {.fd = peer.connection.socket.get(), .events = static_cast<short>(events), .revents = 0});
  }
  const int missing = awaited_leader();
  waiting.push_back({.fd = context_.poll_event(), .events = POLLIN, .revents = 0});
  const Nanoseconds slice = std::clamp<Nanoseconds>(call.deadline - now_ns(), 0, kLongestSleep);
  const auto limit = static_cast<int>((slice + kMillisecond - 1) / kMillisecond);
  const Nanoseconds begin = now_ns();
  context_.waits_for(missing);
  const int ready = ::poll(waiting.data(), waiting.size(), limit);
  const bool signalled = ready > 0 && waiting.back().revents != 0;
  if (signalled) context_.clear_poll_event();
  if (ready <= 0 || signalled || now_ns() - begin >= kCheckEvery) context_.check_liveness(call, missing);
}

void ArrivalExchange::arrive(const Call& call, MachineContribution* contribution) {
  const Topology& topology = context_.topology();
  for (const int r : topology.local()) {
    if (r == context_.rank()) continue;
    context_.await(call, RankContext::Wait::arrival, r, context_.arrival(r, call.sequence).sequence,
                   call.sequence);
  }
  std::atomic<std::uint64_t>& complete = context_.page(topology.leader()).machine_arrival.complete;
  if (!topology.leads(context_.rank())) {
    return context_.await(call, RankContext::Wait::arrival, topology.leader(), complete, call.sequence);
  }
  contribution_ = contribution;
  exchange(call);
  context_.publish(complete, call.sequence);
}

void ArrivalExchange::exchange(const Call& call) {
  if (!connected_) connect_leaders(call);
  begin_exchange();
  if (contribution_ != nullptr) {
    write_contributions(call);
  } else {
    write_frame(call, Staged::all, with_staged_);
    if (gathers(call.what)) write_frame(call, Staged::none, without_staged_);
  }
  run_exchange(call);
}

void ArrivalExchange::exchange_results(const Call& call, const std::vector<std::size_t>& lengths) {
  begin_exchange();
  Frame& frame = with_staged_;
  frame.resize(sizeof(Head));
  for (const int rank : context_.topology().local())
    append(frame, context_.staging_slot(rank, call.sequence), lengths[static_cast<std::size_t>(rank)]);
  complete_frame(call, frame);
  for (Peer& peer : peers_) peer.out = &frame;
  results_ = &lengths;
  run_exchange(call);
  results_ = nullptr;
}

void ArrivalExchange::begin_exchange() {
  results_ = nullptr;
  for (Peer& peer : peers_) {
    peer.sent = 0;
    peer.out = nullptr;
    peer.received = 0;
  }
  for (Frame& frame : forwarded_) frame.clear();
  forwarded_count_ = 1;
}

void ArrivalExchange::run_exchange(const Call& call) {
  const auto step = [&] {
    bool moved = false;
    for (Peer& peer : peers_) moved = send(peer, call) || moved;
    for (Peer& peer : peers_) moved = receive(peer, call) || moved;
    return moved;
  };
  step();
  if (done()) return;
  const bool waited_for = call.interrupt != nullptr;
  const bool spins = spin_policy_.should_spin_long(waited_for);
  const Nanoseconds begin = now_ns();
  const Nanoseconds end = spins ? begin + (waited_for ? kCallerSpin : kSpin) : 0;
  for (Nanoseconds now = begin; now < end; now = now_ns()) {
    if (waited_for && now >= begin + kSpin) call.interrupt->blocks();  // other threads of Python go on
    if (!step()) sched_yield();
    if (done()) return spin_policy_.succeeded();
  }
  if (spins) spin_policy_.failed();
  if (call.interrupt != nullptr) call.interrupt->blocks();
  Status& status = context_.status();
  status.entered.store(now_ns(), std::memory_order_relaxed);
  if (status.site[0].load(std::memory_order_relaxed) != '\0') context_.note_site("");
  Nanoseconds next_check = now_ns() + kCheckEvery;
  while (!done()) {
    if (!step()) wait(call);
    const Nanoseconds now = now_ns();
    if (now < next_check && now < call.deadline) continue;
    if (done()) break;
    context_.check_liveness(call, awaited_leader());
    next_check = now + kCheckEvery;
  }
  context_.waits_for(-1);  // not where the exchange fails, see `RankContext::sleep`
}

}  // namespace collectives
