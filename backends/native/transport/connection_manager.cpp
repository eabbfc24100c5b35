#include "transport/connection_manager.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <exception>
#include <utility>

#include "common/descriptor_limit.hpp"
#include "memory/descriptor.hpp"
#include "sockets/congestion_control.hpp"
#include "state/rank_context.hpp"
#include "transport/control_channel.hpp"

namespace collectives {
namespace {

// A connection without a proof for this long comes from no rank of the group.
constexpr Nanoseconds kProofLimit = 2 * kSecond;
// Connections that may wait for their proof, where descriptors allow; the one that waited longest is dropped
// for the next.
constexpr std::size_t kMostPending = 256;
constexpr int kAcceptsPerTurn = 64;  // whatever crowd comes, ranks are served in between
// A rank's listener lives as long as its group, so where nobody listens the rank has gone. A connection may
// be refused by chance for this long.
constexpr Nanoseconds kRefusalLimit = 700 * kMillisecond;
constexpr Nanoseconds kDialAgain = 100 * kMillisecond;
constexpr Nanoseconds kDialLimit = 60 * kSecond;
// The same for a control connection that has ended: its machine may have vanished with it.
constexpr Nanoseconds kDialAgainLimit = 3 * kSecond;
// How long a leader waits for the others to acknowledge its departure.
constexpr Nanoseconds kDepartureLimit = 500 * kMillisecond;
constexpr int kMostIndex = 64;
constexpr std::size_t kRecordsAtOnce = 2;  // 128 KiB, which stay in the second cache

}  // namespace

ConnectionManager::ConnectionManager(RankContext& context, Network network)
    : context_(context),
      network_(std::move(network)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(make_event()) {
  if (!epoll_) throw Error(ErrorKind::backend, with_errno("epoll_create1 failed", errno));
  try {
    begin();
  } catch (...) {  // no destructor runs; the numbers may be somebody else's when this process forks
    for (const Listener& listener : network_.listeners) cancel_close_on_fork(listener.socket.get());
    throw;
  }
}

void ConnectionManager::begin() {
  add(Source::wake, wake_.get(), EPOLLIN);
  for (const Listener& listener : network_.listeners) {
    add(Source::listener, listener.socket.get(), EPOLLIN);
    close_on_fork(listener.socket.get());
  }
  const Topology& topology = context_.topology();
  if (topology.leads(context_.rank())) {
    add(Source::wake, context_.leader_event().get(), EPOLLIN);
    control_ = std::make_unique<ControlChannel>(context_, *this);
    for (int machine = 0; machine < topology.machine; ++machine) {
      dial(topology.leader_of(machine), Purpose::control, 0);
    }
  }
  thread_.start("collectives-net", [this] { serve(); });
}

ConnectionManager::~ConnectionManager() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  signal_event(wake_);
  thread_.join();
  for (const Listener& listener : network_.listeners) cancel_close_on_fork(listener.socket.get());
}

void ConnectionManager::add(Source source, int fd, std::uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return;
  if (errno == EEXIST && ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0) return;
  throw Error(ErrorKind::backend, with_errno("epoll_ctl failed", errno));
}

// To be called before the descriptor is closed: while a forked child holds the connection, epoll would go on
// to report it.
void ConnectionManager::remove(int fd) const noexcept {
  epoll_event event{};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &event);
}

// ---- for other threads

void ConnectionManager::dial(int rank, Purpose purpose, int index) {
  {
    const std::lock_guard lock(mutex_);
    const Key key{rank, purpose, index};
    if (!asked_.insert(key).second) return;
    wanted_.push_back(key);
  }
  signal_event(wake_);
}

void ConnectionManager::dial_again(int leader) {
  const Key key{leader, Purpose::control, 0};
  const bool under_way =
      std::any_of(dials_.begin(), dials_.end(), [&](const Dial& each) { return each.key == key; });
  if (under_way) return;
  {
    const std::lock_guard lock(mutex_);
    wanted_.push_back(key);
  }
  signal_event(wake_);
}

Connection ConnectionManager::take(int rank, Purpose purpose, int index) {
  const std::lock_guard lock(mutex_);
  const Key key{rank, purpose, index};
  if (const auto failed = failed_.find(key); failed != failed_.end()) throw failed->second;
  const auto found = ready_.find(key);
  if (found == ready_.end()) return {};
  Connection connection = std::move(found->second);
  ready_.erase(found);
  return connection;
}

Connection ConnectionManager::connect(const Call& call, int rank, Purpose purpose, int index) {
  if (context_.rank() > rank) dial(rank, purpose, index);
  for (;;) {
    Connection connection;
    try {
      connection = take(rank, purpose, index);
    } catch (const Error& error) {
      context_.check_liveness(call, rank);
      if (error.kind() == ErrorKind::peer_lost) context_.throw_connection_lost(call, rank);
      context_.fail_group(error.kind(), error.message(), error.details());
      throw;
    }
    if (connection) return connection;
    const std::string error_text = connection_error();
    context_.check_liveness(call, rank, error_text.empty() ? "" : " (" + error_text + ")");
    if (call.interrupt != nullptr) call.interrupt->blocks();
    pollfd waiting{.fd = context_.poll_event(), .events = POLLIN, .revents = 0};
    if (::poll(&waiting, 1, static_cast<int>(kCheckEvery / kMillisecond)) > 0) context_.clear_poll_event();
  }
}

void ConnectionManager::watch(int socket, bool write) {
  const auto writable = write ? static_cast<std::uint32_t>(EPOLLOUT) : 0U;
  add(Source::watch, socket, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | writable);
}

void ConnectionManager::fail_forged(int rank, Purpose purpose) const { context_.fail_forged(rank, purpose); }

void ConnectionManager::unwatch(int socket) { remove(socket); }

std::vector<int> ConnectionManager::unconnected() {
  const Topology& topology = context_.topology();
  std::vector<int> missing;
  if (!topology.leads(context_.rank())) {
    // Acquire, though nothing depends on it: the pair of the release in `deliver`.
    const auto& connected = context_.page(topology.leader()).machine_arrival.connected;
    if (connected.load(std::memory_order_acquire) == 0) missing.push_back(topology.leader());
    return missing;
  }
  for (int machine = 0; machine < topology.count(); ++machine) {
    if (machine == topology.machine) continue;
    const int leader = topology.leader_of(machine);
    const std::lock_guard lock(mutex_);
    const Key key{leader, Purpose::control, 0};
    if (const auto failed = failed_.find(key); failed != failed_.end()) throw failed->second;
    if (ready_.find(key) == ready_.end()) missing.push_back(leader);
  }
  return missing;
}

std::string ConnectionManager::connection_error() {
  const std::lock_guard lock(mutex_);
  return error_text_;
}

// ---- the thread

void ConnectionManager::serve() noexcept {
  Nanoseconds give_up_at = 0;  // when the thread ends, whoever has not acknowledged its departure
  for (;;) {
    try {
      bool ending = false;
      {
        const std::lock_guard lock(mutex_);
        ending = ending_;
      }
      if (ending) {
        if (!control_) return;
        if (give_up_at == 0) {
          control_->announce_departure();
          give_up_at = now_ns() + kDepartureLimit;
        }
        // Leaders that have not linked up yet are to hear of it, too.
        if ((control_->complete() && control_->no_links()) || now_ns() >= give_up_at) return;
      }
      poll_once();
    } catch (const std::exception& error) {
      if (give_up_at != 0) return;
      context_.abort("rank " + std::to_string(context_.rank()) +
                     " cannot serve its connections any more: " + error.what());
      const timespec pause{0, kMillisecond};
      ::nanosleep(&pause, nullptr);
    }
  }
}

int ConnectionManager::poll_timeout_ms(Nanoseconds now) const {
  Nanoseconds next = kNever;
  for (const auto& [fd, pending] : pending_connections_) next = std::min(next, pending.deadline);
  for (const Dial& each : dials_) next = std::min(next, each.socket ? each.give_up_at : each.again_at);
  if (control_) next = std::min(next, control_->next_check());
  if (accept_again_at_ != 0) next = std::min(next, accept_again_at_);
  if (next == kNever) return -1;
  return static_cast<int>(
      std::clamp<Nanoseconds>((next - now + kMillisecond - 1) / kMillisecond, 0, INT_MAX));
}

void ConnectionManager::poll_once() {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, poll_timeout_ms(now_ns()));
  if (count < 0 && errno != EINTR) throw Error(ErrorKind::backend, with_errno("epoll_wait failed", errno));
  for (int i = 0; i < count; ++i) {
    const std::uint64_t data = events[i].data.u64;
    handle(static_cast<Source>(data >> 32), static_cast<int>(data & 0xffffffff), events[i].events);
  }
  std::vector<Key> wanted;
  {
    const std::lock_guard lock(mutex_);
    wanted.swap(wanted_);
  }
  const Nanoseconds now = now_ns();
  for (const Key& key : wanted) {
    const bool again = std::get<1>(key) == Purpose::control && control_->was_linked(std::get<0>(key));
    const Nanoseconds limit = again ? kDialAgainLimit : kDialLimit;
    dials_.push_back(Dial{.key = key,
                          .asked = now,
                          .limit = limit,
                          .give_up_at = now + limit,
                          .socket = {},
                          .handshake = {},
                          .looked_at = false,
                          .error_text = {}});
    start_connect(dials_.back());
  }
  handle_timers(now_ns());
}

void ConnectionManager::handle(Source source, int fd, std::uint32_t events) {
  switch (source) {
    case Source::wake:
      clear_event(wake_);
      if (control_) {
        clear_event(context_.leader_event());
        control_->check_soon();
      }
      return;
    case Source::listener:
      return accept_connections(fd);
    case Source::pending:
      if (const auto found = pending_connections_.find(fd); found != pending_connections_.end())
        go_on(found->second);
      return;
    case Source::dial:
      for (Dial& each : dials_) {
        if (each.socket.get() == fd)
          return each.handshake ? go_on(each, *each.handshake) : finish_connect(each);
      }
      return;
    case Source::watch:
      return context_.ring_own_mail();
    case Source::control:
      if (control_) control_->handle(fd, events);
      return;
  }
}

void ConnectionManager::handle_timers(Nanoseconds now) {
  std::erase_if(pending_connections_, [&](const auto& entry) {
    if (entry.second.deadline > now) return false;
    remove(entry.first);
    return true;
  });
  for (Dial& each : dials_) {
    if (each.socket && now >= each.give_up_at) {
      remove(each.socket.get());
      each.socket.reset();
      retry(each, ETIMEDOUT);
    } else if (!each.socket && std::get<0>(each.key) >= 0 && now >= each.again_at) {
      start_connect(each);
    }
  }
  dials_.remove_if([](const Dial& each) { return std::get<0>(each.key) < 0; });  // done
  if (accept_again_at_ != 0 && now >= accept_again_at_) {
    accept_again_at_ = 0;
    for (const Listener& listener : network_.listeners) add(Source::listener, listener.socket.get(), EPOLLIN);
  }
  if (control_ && now >= control_->next_check()) control_->check(now);
}

void ConnectionManager::deliver(const Key& key, Descriptor socket, const Handshake& handshake) {
  const auto [rank, purpose, index] = key;
  send_at_once(socket);
  return_to_bbr_where_far(socket);
  Channel channel = handshake.channel(socket.get(), purpose == Purpose::control ? 1 : kRecordsAtOnce);
  Connection connection(std::move(socket), std::move(channel));
  const bool is_control = purpose == Purpose::control;
  // The control channel keeps its connection; an empty descriptor is the mark that it is there.
  if (is_control) control_->add_link(rank, std::exchange(connection, Connection()));
  {
    const std::lock_guard lock(mutex_);
    ready_.emplace(key, std::move(connection));
    error_text_.clear();
  }
  if (is_control && control_->complete())
    context_.own().machine_arrival.connected.store(1, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  context_.ring_own_mail();
  context_.signal_poll_event();
}

// ---- accepting

void ConnectionManager::accept_connections(int listener) {
  for (const Listener& each : network_.listeners) {
    if (each.socket.get() != listener) continue;
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      Descriptor socket = accept_tcp(each.socket);
      if (!socket) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) return;
        set_error_text(cannot_take());
        // New connections stay in the kernel's queue meanwhile.
        for (const Listener& all : network_.listeners) remove(all.socket.get());
        accept_again_at_ = now_ns() + kDialAgain;
        return;
      }
      if (const PeerProcess found = peer(socket); found != PeerProcess::of_this_user) {
        if (found == PeerProcess::unknown) set_error_text(cannot_take());
        continue;
      }
      const bool crowded =
          pending_connections_.size() >= kMostPending || !descriptor_limit().leaves_room(socket.get());
      if (crowded && !pending_connections_.empty()) {
        const auto oldest =
            std::min_element(pending_connections_.begin(), pending_connections_.end(),
                             [](auto& a, auto& b) { return a.second.deadline < b.second.deadline; });
        remove(oldest->first);
        pending_connections_.erase(oldest);
        // The number that is free now.
        if (Descriptor lower(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0)); lower) socket = std::move(lower);
      }
      const int fd = socket.get();
      add(Source::pending, fd, EPOLLIN);
      pending_connections_.insert_or_assign(
          fd, PendingConnection{.socket = std::move(socket),
                                .deadline = now_ns() + kProofLimit,
                                .handshake = accepting(network_.key, network_.encrypts)});
    }
  }
}

PeerProcess ConnectionManager::peer(const Descriptor& socket) const {
  return network_.own_user_only ? peer_process(socket.get()) : PeerProcess::of_this_user;
}

std::string ConnectionManager::cannot_take() const {
  return with_errno("rank " + std::to_string(context_.rank()) + " cannot take connections", errno);
}

void ConnectionManager::set_error_text(std::string text) {
  const std::lock_guard lock(mutex_);
  error_text_ = std::move(text);
}

void ConnectionManager::go_on(PendingConnection& pending) {
  const int fd = pending.socket.get();
  const Handshake::Status status = pending.handshake.step(fd);
  if (status == Handshake::Status::goes_on) return;
  const auto node = pending_connections_.extract(fd);
  Descriptor socket = std::move(node.mapped().socket);
  remove(fd);
  if (status != Handshake::Status::asks) {  // dropped without an answer
    const Handshake& handshake = node.mapped().handshake;
    if (!handshake.trouble().empty()) {
      set_error_text("rank " + std::to_string(context_.rank()) +
                     " cannot take connections: " + handshake.trouble());
    } else if (!handshake.ended() && !handshake.hello().empty()) {
      set_error_text(
          "rank " + std::to_string(context_.rank()) +
          " has refused a connection whose proof was not one of this group; give all ranks the same "
          "job secret (COLLECTIVES_SECRET) and the same COLLECTIVES_ENCRYPTION; where they have, "
          "somebody on the network changes what they send");
    }
    return;
  }
  const Hello hello = hello_of(node.mapped().handshake);
  const Key key{hello.from, hello.purpose, hello.index};
  if (!may_take(hello)) return;
  const bool again = hello.purpose == Purpose::control && control_->takes_another(hello.from);
  if (!accepted_.insert(key).second && !again) return;
  if (node.mapped().handshake.confirm(fd)) deliver(key, std::move(socket), node.mapped().handshake);
}

bool ConnectionManager::may_take(const Hello& hello) const {
  const Topology& topology = context_.topology();
  if (hello.to != context_.rank() || hello.size != context_.size() || hello.from < 0 ||
      hello.from >= hello.size || topology.is_local(hello.from) || hello.index < 0 ||
      hello.index >= kMostIndex || hello.purpose > Purpose::mail)
    return false;
  const bool leaders = topology.leads(hello.from) && topology.leads(context_.rank());
  const bool of_leaders = hello.purpose == Purpose::control || hello.purpose == Purpose::arrival;
  return leaders || !of_leaders;
}

// ---- dialling

void ConnectionManager::start_connect(Dial& dial) {
  const auto [rank, purpose, index] = dial.key;
  const std::size_t lane = static_cast<std::size_t>(index % lanes());
  dial.handshake.reset();
  try {
    dial.socket = begin_connect(endpoint_of(dial),
                                network_.from_lanes ? network_.listeners[lane].endpoint.address : "");
    add(Source::dial, dial.socket.get(), EPOLLOUT);
  } catch (const Error& error) {
    dial.socket.reset();
    dial.error_text = error.message();
    retry(dial, 0);
  }
}

void ConnectionManager::finish_connect(Dial& dial) {
  const int error = connect_error(dial.socket);
  if (error != 0) {
    remove(dial.socket.get());
    dial.socket.reset();
    return retry(dial, error);
  }
  dial.refused = 0;  // somebody listens
  const auto [rank, purpose, index] = dial.key;
  Hello hello;
  hello.from = context_.rank();
  hello.to = rank;
  hello.size = context_.size();
  hello.purpose = purpose;
  hello.index = index;
  dial.handshake = dialling(network_.key, hello, network_.encrypts ? preferred_suite() : CipherSuite::none);
  // The other rank may be stopped; that its machine goes is noticed.
  dial.give_up_at = kNever;
  keep_alive(dial.socket);
  dial.looked_at = false;
  add(Source::dial, dial.socket.get(), EPOLLIN);
  static_cast<void>(
      dial.handshake->step(dial.socket.get()));  // the hello; a failure shows with the next event
}

void ConnectionManager::go_on(Dial& dial, Handshake& handshake) {
  // With its first bytes, because the other end may go once it has taken the connection.
  const PeerProcess found = dial.looked_at ? PeerProcess::of_this_user : peer(dial.socket);
  const int shortage = found == PeerProcess::unknown ? errno : 0;
  dial.looked_at = true;
  const Handshake::Status status =
      found == PeerProcess::of_this_user ? handshake.step(dial.socket.get()) : Handshake::Status::refused;
  if (status == Handshake::Status::goes_on) return;
  remove(dial.socket.get());
  if (status == Handshake::Status::proved) {
    const Key key = std::exchange(dial.key, Key{-1, Purpose::control, 0});
    return deliver(key, std::move(dial.socket), handshake);
  }
  const int error = shortage != 0 ? shortage : handshake.error();
  if (error == 0) {
    dial.error_text = "what listens at " + endpoint_of(dial).text() + ", where rank " +
                      std::to_string(std::get<0>(dial.key)) +
                      (status == Handshake::Status::differs
                           ? " is, and this rank do not agree whether connections are encrypted; give all "
                             "ranks the same COLLECTIVES_ENCRYPTION"
                           : " should be, and this rank have not proved to each other that they are of this "
                             "group; give all ranks the same job secret (COLLECTIVES_SECRET) and the same "
                             "COLLECTIVES_ENCRYPTION");
  }
  dial.socket.reset();
  dial.give_up_at = dial.asked + dial.limit;
  retry(dial, error);
}

const Endpoint& ConnectionManager::endpoint_of(const Dial& dial) const {
  const auto [rank, purpose, index] = dial.key;
  return network_.endpoints[static_cast<std::size_t>(rank)][static_cast<std::size_t>(index % lanes())];
}

void ConnectionManager::retry(Dial& dial, int error) {
  const Nanoseconds now = now_ns();
  const auto [rank, purpose, index] = dial.key;
  const Topology& topology = context_.topology();
  if (error != 0) {
    dial.error_text =
        with_errno("rank " + std::to_string(context_.rank()) + " on '" + topology.host_of(context_.rank()) +
                       "' cannot connect to rank " + std::to_string(rank) + " on '" + topology.host_of(rank) +
                       "' at " + endpoint_of(dial).text(),
                   error);
  }
  set_error_text(dial.error_text);
  const bool refused = error == ECONNREFUSED || error == ECONNRESET;
  if (!refused) dial.refused = 0;
  if (refused && dial.refused == 0) dial.refused = now;
  if (refused && now - dial.refused >= kRefusalLimit) return fail(dial, ErrorKind::peer_lost);
  if (now >= dial.give_up_at) return fail(dial, ErrorKind::network);
  dial.again_at = now + kDialAgain;
}

void ConnectionManager::fail(Dial& dial, ErrorKind kind) {
  const auto [rank, purpose, index] = dial.key;
  if (purpose == Purpose::control && control_->was_linked(rank)) {
    dial.key = Key{-1, Purpose::control, 0};
    return control_->is_not_there(rank, kind == ErrorKind::peer_lost);
  }
  std::string text = dial.error_text;
  text +=
      kind == ErrorKind::peer_lost
          ? "; it has ended, or a firewall rejects connections to it"
          : "; let firewalls pass TCP between the machines, or name the network interface that reaches the "
            "others in COLLECTIVES_SOCKET_IFNAME on each";
  {
    const std::lock_guard lock(mutex_);
    failed_.emplace(dial.key, Error(kind, text, {.rank = rank}));
  }
  dial.key = Key{-1, Purpose::control, 0};
  changes_.fetch_add(1, std::memory_order_release);
  context_.ring_own_mail();
  context_.signal_poll_event();
}

}  // namespace collectives
