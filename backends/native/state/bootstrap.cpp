#include "state/bootstrap.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/error.hpp"
#include "memory/copy_once.hpp"
#include "memory/descriptor.hpp"
#include "sockets/unix_socket.hpp"
#include "state/hello.hpp"
#include "state/process_state.hpp"

namespace collectives {
namespace {

// Connections that may wait for their proof; the one that came first gives way to the next.
constexpr std::size_t kMostNewcomers = 256;
constexpr int kNewcomer = -1;  // instead of a rank

enum class Step : std::uint32_t { process = 1, welcome = 2, processes = 3, attached = 4, go = 5 };

struct Message {
  std::uint64_t magic = kMagic;
  std::uint64_t version = kLayoutVersion;
  Step step = Step::process;
  std::uint32_t count = 0;           // processes: how many follow; welcome: how many will follow in all
  std::uint32_t spans_machines = 0;  // welcome: whether there are other machines
  std::int32_t ranks[kMostDescriptors] = {};  // processes: whose descriptors these are
};

Descriptor own_process() {
#ifdef SYS_pidfd_open
  // An empty descriptor, on kernels before 5.3, leaves liveness to process ids.
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
#else
  return {};
#endif
}

// Why memory is not shared with the process at the other end. Where a number stands for several users, ranks
// have a job secret (store/process.py), and the handshake proves the rest.
std::optional<std::string> complaint_about_user(const Descriptor& socket) {
  const uid_t peer = peer_user(socket);
  if (peer == ::geteuid()) return std::nullopt;
  return "the process at the other end runs as user " + std::to_string(peer) + ", this one as " +
         std::to_string(::geteuid()) + "; only processes of one user share memory";
}

[[noreturn]] void throw_closed() {
  throw Error(ErrorKind::peer_lost, "the peer closed the connection while the group was formed");
}

Received expect(const Descriptor& socket, Step step, Message& message, Nanoseconds deadline) {
  Received received = receive_message(socket, &message, sizeof(message), deadline);
  if (received.bytes == 0) throw_closed();
  if (received.bytes != sizeof(message) || message.magic != kMagic || message.step != step) {
    throw Error(ErrorKind::network, "unexpected message while the group was formed");
  }
  return received;
}

void say(const Descriptor& socket, Message message, Step step, const std::vector<int>& descriptors,
         Nanoseconds deadline) {
  message.step = step;
  send_message(socket, &message, sizeof(message), descriptors, deadline);
}

// A rank allocates what it writes, so that the pages lie on its own memory node.
void commit_own(const Segment& segment, const SegmentLayout& layout, int rank) {
  segment.commit(layout.rank_offset(rank), layout.control_bytes());
}

}  // namespace

BootstrapLeader::BootstrapLeader(const std::string& name, std::vector<int> members, int size, std::string key)
    : members_(std::move(members)),
      size_(size),
      tuning_(default_tuning(size)),
      key_(std::move(key)),
      followers_(static_cast<std::size_t>(size)),
      layout_(shape_for(size)) {
  listener_ = listen_abstract(name, std::max(static_cast<int>(members_.size()), 16));
  follower(members_.front()).attached = true;
  follower(members_.front()).process = own_process();
}

void BootstrapLeader::exclude(int rank) {
  std::erase(members_, rank);
  follower(rank) = Follower();
}

std::vector<int> BootstrapLeader::accept(Nanoseconds deadline) {
  for (;;) {
    std::vector<int> missing;
    for (const int rank : members_) {
      if (rank != members_.front() && !follower(rank).socket) missing.push_back(rank);
    }
    if (missing.empty()) return missing;
    const Events events = await_events(true, deadline);
    // Followers send nothing before the leader does.
    if (!events.readable.empty()) throw_peer_lost(events.readable.front(), "left");
    const auto speaks = [](const Newcomer& each) { return each.readable; };
    if (!events.connection && std::none_of(newcomers_.begin(), newcomers_.end(), speaks)) return missing;
    // A connection that is dropped leaves its rank missing, which will be named.
    std::erase_if(newcomers_, [this](Newcomer& each) { return each.readable && !go_on(each); });
    if (events.connection) take_newcomer();
  }
}

void BootstrapLeader::take_newcomer() {
  Newcomer newcomer{.socket = accept_until(listener_, 0), .process = {}, .handshake = {}};
  if (!newcomer.socket || complaint_about_user(newcomer.socket)) return;
  if (newcomers_.size() >= kMostNewcomers) newcomers_.pop_front();
  newcomers_.push_back(std::move(newcomer));
}

bool BootstrapLeader::go_on(Newcomer& newcomer) {
  try {
    if (!newcomer.handshake) {
      Message message;
      Received received = expect(newcomer.socket, Step::process, message, now_ns());
      if (!received.descriptors.empty()) newcomer.process = std::move(received.descriptors.front());
      newcomer.handshake = accepting(key_);
    }
    switch (newcomer.handshake->step(newcomer.socket.get())) {
      case Handshake::Status::goes_on:
        return true;
      case Handshake::Status::asks:
        admit(newcomer, *newcomer.handshake);
        return false;
      default:
        return false;
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::resources) throw;
    return false;
  }
}

void BootstrapLeader::admit(Newcomer& newcomer, Handshake& handshake) {
  const Hello hello = hello_of(handshake);
  const bool fits = hello.purpose == Purpose::memory && hello.to == members_.front() && hello.size == size_ &&
                    std::find(members_.begin() + 1, members_.end(), hello.from) != members_.end();
  if (!fits || follower(hello.from).socket || !handshake.confirm(newcomer.socket.get())) return;
  follower(hello.from).process = std::move(newcomer.process);
  follower(hello.from).socket = std::move(newcomer.socket);
}

void BootstrapLeader::throw_peer_lost(int rank, const std::string& how) const {
  throw Error(ErrorKind::peer_lost,
              "rank " + std::to_string(rank) + " " + how + " while the group was formed", {.rank = rank});
}

BootstrapLeader::Events BootstrapLeader::await_events(bool connections, Nanoseconds deadline) {
  std::vector<pollfd> watched;
  std::vector<int> owners;
  const auto watch = [&](const Descriptor& what, int rank) {
    if (!what) return;
    watched.push_back({.fd = what.get(), .events = POLLIN, .revents = 0});
    owners.push_back(rank);
  };
  if (connections) watch(listener_, members_.front());
  for (Newcomer& each : newcomers_) {
    each.readable = false;
    if (connections) watch(each.socket, kNewcomer);
  }
  for (const int rank : members_) {
    if (rank != members_.front()) watch(follower(rank).socket, rank);
  }
  const std::size_t sockets = watched.size();
  for (const int rank : members_) {
    if (rank != members_.front()) watch(follower(rank).process, rank);
  }
  Events events;
  if (!poll_until(watched, deadline)) return events;
  // A connection may outlive its process, in a child that inherited it.
  for (std::size_t i = sockets; i < watched.size(); ++i) {
    if (watched[i].revents != 0) throw_peer_lost(owners[i], "has died");
  }
  for (std::size_t i = 0; i < sockets; ++i) {
    if (watched[i].revents == 0) continue;
    if (owners[i] == kNewcomer) {
      // In the order in which they are watched, after the listener.
      newcomers_[i - 1].readable = true;
    } else if (owners[i] == members_.front()) {
      events.connection = true;
    } else {
      events.readable.push_back(owners[i]);
    }
  }
  return events;
}

void BootstrapLeader::set_tuning(const Tuning& tuning) {
  const std::string complaint = complaint_about(tuning);
  if (!complaint.empty()) throw std::invalid_argument(complaint);
  tuning_ = tuning;
}

void BootstrapLeader::share(bool spans_machines, Nanoseconds deadline) {
  const int own = members_.front();
  const SegmentLayout layout(shape_for(size_, spans_machines));
  layout_ = layout;
  if (spans_machines) {
    tuning_ = tuning_between_machines(tuning_, layout.shape().slot_bytes);
  }
  segment_ = std::make_shared<Segment>(Segment::create(layout.total_bytes()));
  segment_->commit(0, kPage);
  auto* header = reinterpret_cast<SegmentHeader*>(segment_->data());
  header->parameters = {
      .magic = kMagic, .version = kLayoutVersion, .shape = layout.shape(), .tuning = tuning_};
  commit_own(*segment_, layout, own);
  std::vector<int> handed{segment_->file().get()};
  if (spans_machines) {
    for (int rank = 0; rank < size_; ++rank) {
      if (std::find(members_.begin(), members_.end(), rank) != members_.end()) continue;
      segment_->commit(layout.rank_offset(rank), layout.mirror_bytes());
    }
    leader_event_ = make_event();
    handed.push_back(leader_event_.get());
  }

  for (const int rank : members_) {
    if (rank == own) continue;
    try {
      welcome(rank, handed, spans_machines, deadline);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::peer_lost) throw_peer_lost(rank, "left");
      throw;
    }
  }
}

void BootstrapLeader::welcome(int rank, const std::vector<int>& handed, bool spans_machines,
                              Nanoseconds deadline) {
  const Descriptor& socket = follower(rank).socket;
  std::vector<int> others;
  for (const int other : members_) {
    if (other != rank && follower(other).process) others.push_back(other);
  }
  Message message;
  message.count = static_cast<std::uint32_t>(others.size());
  message.spans_machines = spans_machines ? 1 : 0;
  say(socket, message, Step::welcome, handed, deadline);
  for (std::size_t first = 0; first < others.size(); first += kMostDescriptors) {
    const std::size_t count = std::min(kMostDescriptors, others.size() - first);
    Message batch;
    batch.count = static_cast<std::uint32_t>(count);
    std::vector<int> descriptors;
    for (std::size_t i = 0; i < count; ++i) {
      batch.ranks[i] = others[first + i];
      descriptors.push_back(follower(others[first + i]).process.get());
    }
    say(socket, batch, Step::processes, descriptors, deadline);
  }
}

std::vector<int> BootstrapLeader::await_attached(Nanoseconds deadline) {
  for (;;) {
    std::vector<int> missing;
    for (const int rank : members_) {
      if (!follower(rank).attached) missing.push_back(rank);
    }
    if (missing.empty()) return missing;
    const Events events = await_events(false, deadline);
    if (events.readable.empty()) return missing;
    for (const int rank : events.readable) {
      Follower& theirs = follower(rank);
      if (theirs.attached) throw_peer_lost(rank, "left");  // an attached follower sends nothing more
      try {
        Message message;
        expect(theirs.socket, Step::attached, message, deadline);
      } catch (const Error& error) {
        throw_peer_lost(rank, "left (" + error.message() + ")");
      }
      theirs.attached = true;
    }
  }
}

Membership BootstrapLeader::release(Nanoseconds deadline) {
  Membership membership;
  membership.rank = members_.front();
  membership.size = size_;
  membership.tuning = tuning_;
  membership.topology = single_machine(size_, membership.rank);
  membership.leader_event = std::move(leader_event_);
  membership.layout = layout_;
  membership.segment = std::move(segment_);
  for (Follower& each : followers_) {
    try {
      if (each.socket) say(each.socket, Message{}, Step::go, {}, deadline);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::peer_lost || !each.process) throw;
    }
    membership.processes.push_back(share_process(std::move(each.process)));
  }
  membership.processes[static_cast<std::size_t>(membership.rank)].reset();
  close();
  return membership;
}

void BootstrapLeader::close() noexcept {
  followers_.clear();
  newcomers_.clear();
  listener_.reset();
}

BootstrapFollower::BootstrapFollower(const std::string& name, int leader, int rank, int size, std::string key,
                                     Nanoseconds deadline)
    : rank_(rank),
      size_(size),
      socket_(connect_abstract(name, deadline)),
      handshake_(
          dialling(std::move(key), {.from = rank, .to = leader, .size = size, .purpose = Purpose::memory})) {
  if (const auto complaint = complaint_about_user(socket_)) throw Error(ErrorKind::backend, *complaint);
  leader_process_ = peer_process(socket_);
  const Descriptor process = own_process();
  say(socket_, {}, Step::process, process ? std::vector<int>{process.get()} : std::vector<int>{}, deadline);
  static_cast<void>(handshake_.step(socket_.get()));  // the hello; a failure shows with the answer
}

bool BootstrapFollower::leader_ended() const noexcept {
  return leader_process_ > 0 && state_of_process(leader_process_).ended;
}

bool BootstrapFollower::proved(Nanoseconds deadline) {
  while (readable_until(socket_, deadline)) {
    const Handshake::Status status = handshake_.step(socket_.get());
    if (status == Handshake::Status::proved) return true;
    if (status == Handshake::Status::goes_on) continue;
    if (handshake_.ended()) throw_closed();
    throw Error(ErrorKind::network, "the leader of this machine does not know the group's key");
  }
  return false;
}

bool BootstrapFollower::answered(Nanoseconds deadline) { return readable_until(socket_, deadline); }

bool BootstrapFollower::attach(Nanoseconds deadline) {
  Message welcome;
  Received received = expect(socket_, Step::welcome, welcome, deadline);
  const bool spans_machines = welcome.spans_machines != 0;
  if (received.descriptors.size() != (spans_machines ? 2U : 1U)) {
    throw Error(ErrorKind::network, "the leader of this machine sent no segment");
  }
  membership_.rank = rank_;
  membership_.size = size_;
  membership_.topology = single_machine(size_, rank_);
  if (spans_machines) membership_.leader_event = std::move(received.descriptors.back());
  membership_.segment = std::make_shared<Segment>(Segment::attach(std::move(received.descriptors.front())));
  membership_.layout = SegmentLayout(shape_for(size_, spans_machines));
  // Its size first: a shorter segment may not even hold the header.
  const bool whole = membership_.segment->bytes() == membership_.layout.total_bytes();
  const auto* header = reinterpret_cast<const SegmentHeader*>(membership_.segment->data());
  const SegmentParameters found = whole ? copy_once(header->parameters) : SegmentParameters{};
  if (found.magic != kMagic || found.version != kLayoutVersion || found.shape != membership_.layout.shape() ||
      !complaint_about(found.tuning).empty()) {
    throw Error(
        ErrorKind::network,
        "the leader of this machine lays its segment out differently; install one version for all ranks");
  }
  membership_.tuning = found.tuning;
  membership_.processes.resize(static_cast<std::size_t>(size_));
  if (welcome.count >= membership_.processes.size()) {
    throw Error(ErrorKind::network, "the leader of this machine announced " + std::to_string(welcome.count) +
                                        " process descriptors for a group of " + std::to_string(size_));
  }
  for (std::uint32_t seen = 0; seen < welcome.count;) {
    Message batch;
    Received processes = expect(socket_, Step::processes, batch, deadline);
    if (batch.count == 0 || processes.descriptors.size() != batch.count || batch.count > kMostDescriptors) {
      throw Error(ErrorKind::network, "the leader of this machine sent no process descriptors");
    }
    for (std::uint32_t i = 0; i < batch.count; ++i) {
      const auto owner = static_cast<std::size_t>(batch.ranks[i]);
      if (owner < membership_.processes.size())
        membership_.processes[owner] = share_process(std::move(processes.descriptors[i]));
    }
    seen += batch.count;
  }
  commit_own(*membership_.segment, membership_.layout, rank_);
  say(socket_, Message{}, Step::attached, {}, deadline);
  return spans_machines;
}

Membership BootstrapFollower::await_release(Nanoseconds deadline) {
  Message go;
  expect(socket_, Step::go, go, deadline);
  socket_.reset();
  return std::move(membership_);
}

}  // namespace collectives
