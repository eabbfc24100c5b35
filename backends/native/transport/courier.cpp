#include "transport/courier.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <exception>
#include <utility>

#include "transport/forked.hpp"
#include "transport/herald.hpp"
#include "transport/station.hpp"

namespace collectives {
namespace {

// A connection that says nothing for so long is not one of ours.
constexpr Nanoseconds kHelloLimit = 2 * kSecond;
// So many may wait to say hello; whoever waited longest is dropped for the next.
constexpr std::size_t kMostStrangers = 256;
// A rank's listener lives as long as its group, so where nobody listens the rank has gone. It may just have
// been unlucky for so long.
constexpr Nanoseconds kRefusalLimit = 700 * kMillisecond;
constexpr Nanoseconds kDialAgain = 100 * kMillisecond;
constexpr Nanoseconds kDialLimit = 60 * kSecond;
// How long a leader waits for the others to take note of its goodbye.
constexpr Nanoseconds kGoodbyeLimit = 500 * kMillisecond;
constexpr Nanoseconds kSlice = 50 * kMillisecond;
constexpr int kMostIndex = 64;

Descriptor make_event() {
  Descriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw Error(ErrorKind::backend, with_errno("eventfd failed", errno));
  return event;
}

void ring(const Descriptor& event) noexcept {
  const std::uint64_t one = 1;
  // It fails only where it is readable anyway.
  if (event) static_cast<void>(!::write(event.get(), &one, sizeof(one)));
}

void drain(const Descriptor& event) noexcept {
  std::uint64_t count = 0;
  if (event) static_cast<void>(!::read(event.get(), &count, sizeof(count)));
}

// In a time that says nothing about where they differ.
bool same_secret(const char* given, const std::string& secret, std::size_t size) noexcept {
  unsigned difference = secret.size() == size ? 0 : 1;
  for (std::size_t i = 0; i < std::min(size, secret.size()); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(secret[i]);
  }
  return difference == 0;
}

}  // namespace

Courier::Courier(Station& station, Network network)
    : station_(station),
      network_(std::move(network)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(make_event()),
      stir_(make_event()) {
  if (!epoll_) throw Error(ErrorKind::backend, with_errno("epoll_create1 failed", errno));
  add(Source::wake, wake_.get(), EPOLLIN);
  for (const Listener& listener : network_.listeners) {
    add(Source::listener, listener.socket.get(), EPOLLIN);
    close_in_children(listener.socket.get());
  }
  const Placement& placement = station_.placement();
  if (placement.leads(station_.rank())) {
    add(Source::wake, network_.bell.get(), EPOLLIN);
    herald_ = std::make_unique<Herald>(station_, *this);
    for (int machine = 0; machine < placement.machine; ++machine) {
      dial(placement.leader_of(machine), Purpose::control, 0);
    }
  }
  thread_.start("collectives-net", [this] { serve(); });
}

Courier::~Courier() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ring(wake_);
  thread_.join();
  for (const Listener& listener : network_.listeners) keep_in_children(listener.socket.get());
}

void Courier::add(Source source, int fd, std::uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return;
  if (errno == EEXIST && ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0) return;
  throw Error(ErrorKind::backend, with_errno("epoll_ctl failed", errno));
}

void Courier::remove(int fd) const noexcept {
  epoll_event event{};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &event);
}

// ---- for other threads

void Courier::dial(int rank, Purpose purpose, int index) {
  {
    const std::lock_guard lock(mutex_);
    const Key key{rank, purpose, index};
    if (!asked_.insert(key).second) return;
    wanted_.push_back(key);
  }
  ring(wake_);
}

Descriptor Courier::take(int rank, Purpose purpose, int index) {
  const std::lock_guard lock(mutex_);
  const Key key{rank, purpose, index};
  if (const auto failed = failed_.find(key); failed != failed_.end()) throw failed->second;
  const auto found = ready_.find(key);
  if (found == ready_.end()) return {};
  Descriptor socket = std::move(found->second);
  ready_.erase(found);
  return socket;
}

Descriptor Courier::link(const Call& call, int rank, Purpose purpose, int index) {
  if (station_.rank() > rank) dial(rank, purpose, index);
  for (;;) {
    Descriptor socket;
    try {
      socket = take(rank, purpose, index);
    } catch (const Error& error) {
      station_.look_around(call, rank);
      if (error.kind() == ErrorKind::peer_lost) station_.lose_connection(call, rank);
      throw;
    }
    if (socket) return socket;
    station_.look_around(call, rank);
    if (call.interrupt != nullptr) call.interrupt->blocks();
    pollfd waiting{.fd = stir_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&waiting, 1, static_cast<int>(kSlice / kMillisecond)) > 0) unstir();
  }
}

void Courier::watch(int socket, bool write) {
  const auto writable = write ? static_cast<std::uint32_t>(EPOLLOUT) : 0U;
  add(Source::watch, socket, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | writable);
}

void Courier::unwatch(int socket) { remove(socket); }

void Courier::stir() const noexcept { ring(stir_); }
void Courier::unstir() const noexcept { drain(stir_); }

void Courier::wake() const noexcept {
  ring(network_.bell);
  stir();
}

std::vector<int> Courier::unlinked() {
  const Placement& placement = station_.placement();
  std::vector<int> missing;
  if (!placement.leads(station_.rank())) {
    // Acquire: nothing but the word itself.
    const auto& linked = station_.page(placement.leader()).relay.linked;
    if (linked.load(std::memory_order_acquire) == 0) missing.push_back(placement.leader());
    return missing;
  }
  for (int machine = 0; machine < placement.count(); ++machine) {
    if (machine == placement.machine) continue;
    const int leader = placement.leader_of(machine);
    const std::lock_guard lock(mutex_);
    const Key key{leader, Purpose::control, 0};
    if (const auto failed = failed_.find(key); failed != failed_.end()) throw failed->second;
    if (ready_.find(key) == ready_.end()) missing.push_back(leader);
  }
  return missing;
}

std::string Courier::trouble() {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

// ---- the thread

void Courier::serve() noexcept {
  Nanoseconds give_up_at = 0;  // when the thread ends, whoever has not taken note of its goodbye
  for (;;) {
    try {
      bool ending = false;
      {
        const std::lock_guard lock(mutex_);
        ending = ending_;
      }
      if (ending) {
        if (!herald_) return;
        if (give_up_at == 0) {
          herald_->say_goodbye();
          give_up_at = now_ns() + kGoodbyeLimit;
        }
        if (herald_->alone() || now_ns() >= give_up_at) return;
      }
      turn();
    } catch (const std::exception& error) {
      if (give_up_at != 0) return;
      station_.abort("rank " + std::to_string(station_.rank()) +
                     " cannot serve its connections any more: " + error.what());
      const timespec pause{0, kMillisecond};
      ::nanosleep(&pause, nullptr);
    }
  }
}

int Courier::patience(Nanoseconds now) const {
  Nanoseconds next = kNever;
  for (const auto& [fd, stranger] : strangers_) next = std::min(next, stranger.deadline);
  for (const Dial& each : dials_) next = std::min(next, each.socket ? each.give_up_at : each.again_at);
  if (herald_) next = std::min(next, herald_->next_look());
  if (accept_again_at_ != 0) next = std::min(next, accept_again_at_);
  if (next == kNever) return -1;
  return static_cast<int>(
      std::clamp<Nanoseconds>((next - now + kMillisecond - 1) / kMillisecond, 0, INT_MAX));
}

void Courier::turn() {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, patience(now_ns()));
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
    dials_.push_back(
        Dial{.key = key, .asked = now, .give_up_at = now + kDialLimit, .socket = {}, .trouble = {}});
    begin(dials_.back());
  }
  look_at_time(now_ns());
}

void Courier::handle(Source source, int fd, std::uint32_t events) {
  switch (source) {
    case Source::wake:
      drain(wake_);
      if (herald_) {
        drain(network_.bell);
        herald_->look_soon();
      }
      return;
    case Source::listener:
      return meet_strangers(fd);
    case Source::stranger:
      if (const auto found = strangers_.find(fd); found != strangers_.end()) listen_to(found->second);
      return;
    case Source::dial:
      for (Dial& each : dials_) {
        if (each.socket.get() == fd) return advance(each);
      }
      return;
    case Source::watch:
      return station_.ring_own_mail();
    case Source::herald:
      if (herald_) herald_->handle(fd, events);
      return;
  }
}

void Courier::look_at_time(Nanoseconds now) {
  std::erase_if(strangers_, [now](const auto& entry) { return entry.second.deadline <= now; });
  for (Dial& each : dials_) {
    if (each.socket && now >= each.give_up_at) {
      each.socket.reset();
      retry(each, ETIMEDOUT);
    } else if (!each.socket && std::get<0>(each.key) >= 0 && now >= each.again_at) {
      begin(each);
    }
  }
  dials_.remove_if([](const Dial& each) { return std::get<0>(each.key) < 0; });  // done
  if (accept_again_at_ != 0 && now >= accept_again_at_) {
    accept_again_at_ = 0;
    for (const Listener& listener : network_.listeners) add(Source::listener, listener.socket.get(), EPOLLIN);
  }
  if (herald_ && now >= herald_->next_look()) herald_->look(now);
}

void Courier::deliver(const Key& key, Descriptor socket) {
  const auto [rank, purpose, index] = key;
  send_at_once(socket);
  const bool is_control = purpose == Purpose::control;
  if (is_control) herald_->adopt(rank, std::move(socket));
  {
    const std::lock_guard lock(mutex_);
    // Of a control connection, which the herald keeps, only the mark that it is there.
    ready_.emplace(key, std::move(socket));
  }
  if (is_control && herald_->linked()) station_.own().relay.linked.store(1, std::memory_order_release);
  arrivals_.fetch_add(1, std::memory_order_release);
  station_.ring_own_mail();
  stir();
}

// ---- accepting

void Courier::meet_strangers(int listener) {
  for (const Listener& each : network_.listeners) {
    if (each.socket.get() != listener) continue;
    for (;;) {
      Descriptor socket = accept_tcp(each.socket);
      if (!socket) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) return;
        {
          const std::lock_guard lock(mutex_);
          trouble_ =
              with_errno("rank " + std::to_string(station_.rank()) + " cannot take connections", errno);
        }
        // They stay in the kernel's queue meanwhile.
        for (const Listener& all : network_.listeners) remove(all.socket.get());
        accept_again_at_ = now_ns() + kDialAgain;
        return;
      }
      if (strangers_.size() >= kMostStrangers) {
        const auto oldest = std::min_element(strangers_.begin(), strangers_.end(), [](auto& a, auto& b) {
          return a.second.deadline < b.second.deadline;
        });
        strangers_.erase(oldest);
      }
      const int fd = socket.get();
      add(Source::stranger, fd, EPOLLIN);
      strangers_[fd] = Stranger{.socket = std::move(socket), .deadline = now_ns() + kHelloLimit};
    }
  }
}

void Courier::listen_to(Stranger& stranger) {
  const int fd = stranger.socket.get();
  const ssize_t got =
      ::recv(fd, stranger.bytes.data() + stranger.come, stranger.bytes.size() - stranger.come, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) stranger.come += static_cast<std::size_t>(got);
  if (got > 0 && stranger.come < stranger.bytes.size()) return;
  Hello hello;
  std::memcpy(&hello, stranger.bytes.data(), sizeof(hello));
  Descriptor socket = std::move(stranger.socket);
  remove(fd);
  strangers_.erase(fd);
  // Whoever it was: without a word to them.
  if (got <= 0 || hello.magic != kMagic || !same_secret(hello.secret, network_.secret, sizeof(hello.secret)))
    return;
  const Placement& placement = station_.placement();
  const bool known = hello.version == kLayoutVersion && hello.size == station_.size() && hello.rank >= 0 &&
                     hello.rank < hello.size && !placement.is_local(hello.rank) && hello.index >= 0 &&
                     hello.index < kMostIndex && hello.purpose <= Purpose::mail;
  if (!known) return;
  const bool leaders = placement.leads(hello.rank) && placement.leads(station_.rank());
  const bool of_leaders = hello.purpose == Purpose::control || hello.purpose == Purpose::meeting;
  if (of_leaders && !leaders) return;
  deliver({hello.rank, hello.purpose, hello.index}, std::move(socket));
}

// ---- dialling

void Courier::begin(Dial& dial) {
  const auto [rank, purpose, index] = dial.key;
  const std::size_t lane = static_cast<std::size_t>(index % lanes());
  try {
    dial.socket = begin_connect(network_.endpoints[static_cast<std::size_t>(rank)][lane],
                                network_.from_lanes ? network_.listeners[lane].endpoint.address : "");
    add(Source::dial, dial.socket.get(), EPOLLOUT);
  } catch (const Error& error) {
    dial.socket.reset();
    dial.trouble = error.message();
    retry(dial, 0);
  }
}

void Courier::advance(Dial& dial) {
  remove(dial.socket.get());
  int error = connect_error(dial.socket);
  if (error == 0) {
    const auto [rank, purpose, index] = dial.key;
    Hello hello;
    std::memcpy(hello.secret, network_.secret.data(), std::min(sizeof(hello.secret), network_.secret.size()));
    hello.rank = station_.rank();
    hello.size = station_.size();
    hello.purpose = purpose;
    hello.index = index;
    // A new connection has room for it.
    if (::send(dial.socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello)) {
      const Key key = std::exchange(dial.key, Key{-1, Purpose::control, 0});
      return deliver(key, std::move(dial.socket));
    }
    error = errno;
  }
  dial.socket.reset();
  retry(dial, error);
}

void Courier::retry(Dial& dial, int error) {
  const Nanoseconds now = now_ns();
  const auto [rank, purpose, index] = dial.key;
  const std::size_t lane = static_cast<std::size_t>(index % lanes());
  const Placement& placement = station_.placement();
  const std::string where = network_.endpoints[static_cast<std::size_t>(rank)][lane].text();
  if (error != 0) {
    dial.trouble = with_errno("rank " + std::to_string(station_.rank()) + " on '" +
                                  placement.host_of(station_.rank()) + "' cannot connect to rank " +
                                  std::to_string(rank) + " on '" + placement.host_of(rank) + "' at " + where,
                              error);
  }
  {
    const std::lock_guard lock(mutex_);
    trouble_ = dial.trouble;
  }
  const bool refused = error == ECONNREFUSED || error == ECONNRESET;
  if (!refused) dial.refused = 0;
  if (refused && dial.refused == 0) dial.refused = now;
  if (refused && now - dial.refused >= kRefusalLimit) return fail(dial, ErrorKind::peer_lost);
  if (now >= dial.give_up_at) return fail(dial, ErrorKind::network);
  dial.again_at = now + kDialAgain;
}

void Courier::fail(Dial& dial, ErrorKind kind) {
  std::string text = dial.trouble;
  text +=
      kind == ErrorKind::peer_lost
          ? "; it has ended, or a firewall rejects connections to it"
          : "; let firewalls pass TCP between the machines, or name the network interface that reaches the "
            "others in COLLECTIVES_SOCKET_IFNAME on each";
  {
    const std::lock_guard lock(mutex_);
    failed_.emplace(dial.key, Error(kind, text, std::get<0>(dial.key)));
  }
  dial.key = Key{-1, Purpose::control, 0};
  arrivals_.fetch_add(1, std::memory_order_release);
  station_.ring_own_mail();
  stir();
}

}  // namespace collectives
