#include "store/loop.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/descriptor_limit.hpp"
#include "store/protocol.hpp"

namespace collectives::store {
namespace {

constexpr int kRoundsPerTurn = 4;
// How often one client can end waits of its own in a turn.
constexpr std::size_t kWokenSpare = static_cast<std::size_t>(kRoundsPerTurn) * Session::kRequestsPerTurn;
constexpr int kAcceptsPerTurn = 64;
constexpr int kRetryAcceptMs = 100;
constexpr std::size_t kEvents = 64;
constexpr std::chrono::seconds kGreetWithin{2};  // the proof included

// epoll's data: the wake descriptor, then the listeners, then clients.
constexpr std::uint64_t kWakeTag = 0;
constexpr std::uint64_t kFirstListenerTag = 1;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Loop::Loop(const std::vector<int>& listeners, std::size_t max_bytes, Admission admission)
    : listeners_(listeners),
      admission_(std::move(admission)),
      budget_(max_bytes),
      table_(budget_),
      input_(Session::kInputBytes) {
  for (const int fd : listeners_) descriptors_.open([fd] { return fd; });
  epoll_ = descriptors_.open([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  if (epoll_ < 0) fail("epoll_create1");
  wake_ = descriptors_.open([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (wake_ < 0) fail("eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeTag;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) fail("epoll_ctl");
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    event.data.u64 = kFirstListenerTag + i;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, listeners_[i], &event) != 0) fail("epoll_ctl");
  }
  next_client_ = kFirstListenerTag + listeners_.size();
}

void Loop::request_stop() {
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from its limit, and the descriptor lives as long as the loop.
  static_cast<void>(::write(wake_, &one, sizeof(one)));
}

void Loop::run() noexcept {
  std::array<epoll_event, kEvents> events{};
  int patience = -1;
  for (;;) {
    const int count = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), patience);
    if (count < 0 && errno != EINTR) return;
    const std::lock_guard lock(turn_);
    if (!accepting_) pause_accepting(false);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kWakeTag) return;
      if (event.data.u64 < kFirstListenerTag + listeners_.size()) {
        accept_from(static_cast<std::size_t>(event.data.u64 - kFirstListenerTag));
      } else {
        on_event(event.data.u64, event.events);
      }
    }
    drop_silent();
    publish();
    patience = patience_ms();
  }
}

ClientId Loop::open_local() {
  if (abandoned_) return 0;
  const std::lock_guard lock(turn_);
  const ClientId client = next_client_++;
  locals_.try_emplace(client, client, budget_, table_, refusals_);
  return client;
}

bool Loop::serve_local(ClientId client, std::string_view requests, std::string& replies,
                       const std::function<void()>& blocks) {
  if (abandoned_) return false;
  std::unique_lock lock(turn_, std::try_to_lock);
  if (!lock.owns_lock()) {
    blocks();
    lock.lock();
  }
  const auto found = locals_.find(client);
  if (found == locals_.end()) return false;
  Session& session = found->second;
  const auto take = [&] {
    replies += session.output();
    session.sent(session.output().size());
  };
  bool served = true;
  try {
    session.feed(requests);
    do {
      session.work(woken_);
      take();
      tell_woken();
    } while (session.busy());
  } catch (const std::exception& error) {
    take();
    note(session, error);
    locals_.erase(found);
    forget(client);
    served = false;
  }
  tell_woken();
  publish();
  return served;
}

void Loop::close_local(ClientId client) noexcept {
  if (abandoned_) return;
  const std::lock_guard lock(turn_);
  if (locals_.erase(client) == 0) return;
  forget(client);
  tell_woken();
}

void Loop::abandon() {
  abandoned_ = true;
  descriptors_.close_all();
}

int Loop::patience_ms() const {
  if (!accepting_) return kRetryAcceptMs;
  if (newcomers_.empty()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(newcomers_.front().first - Clock::now());
  return static_cast<int>(std::max<std::int64_t>(0, left.count()));
}

void Loop::publish() {
  connection_count_.store(clients_.size(), std::memory_order_relaxed);
  waiting_count_.store(table_.waiting(), std::memory_order_relaxed);
}

void Loop::accept_from(std::size_t listener) noexcept {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    const int fd = descriptors_.open(
        [&] { return ::accept4(listeners_[listener], nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd < 0) {
      // Out of descriptors or memory: the connection stays in the backlog and would wake the loop at once
      // again.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) pause_accepting(true);
      return;
    }
    const PeerProcess peer = admission_.peer(fd);
    if (peer == PeerProcess::unknown) {
      turn_away(fd, false);
      continue;
    }
    if (peer != PeerProcess::of_this_user) {
      refused_.add(fd);
      descriptors_.close(fd);
      continue;
    }
    const int kept = below_reserve(fd);
    if (kept < 0) continue;
    try {
      admit(kept);
    } catch (const std::exception&) {
      descriptors_.close(kept);  // no memory for another client
    }
  }
}

// Returns the descriptor of a new connection, by a number below those that are left to the application; -1 if
// there is none, and the client has been turned away. The system gives the lowest number that is free.
int Loop::below_reserve(int fd) {
  const DescriptorLimit limit = descriptor_limit();
  if (!limit.leaves_room(fd) && make_room()) {
    const int high = std::exchange(fd, descriptors_.open([fd] { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); }));
    descriptors_.close(high);
  }
  if (fd < 0 || limit.leaves_room(fd)) return fd;
  turn_away(fd, !admission_.asks_proof());  // who has proved nothing learns no numbers
  return -1;
}

void Loop::turn_away(int fd, bool in_numbers) {
  const DescriptorLimit limit = descriptor_limit();
  std::array<char, 512> text{};
  const int size =
      in_numbers
          ? std::snprintf(
                text.data(), text.size(),
                "%s%zu clients are connected to the store's server, and its process may open %llu "
                "descriptors, of which %llu are kept for other uses; raise `ulimit -n` where the server runs",
                kTurnedAway, clients_.size(), static_cast<unsigned long long>(limit.all),
                static_cast<unsigned long long>(limit.reserved))
          : std::snprintf(text.data(), text.size(), "%s%s", kTurnedAway, kNoRoom);
  static_cast<void>(::send(fd, text.data(), static_cast<std::size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT));
  descriptors_.close(fd);
}

void Loop::admit(int fd) {
  const int on = 1;
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
  // Finds clients whose machine is gone without a word, so that their waits do not stay for ever.
  static_cast<void>(::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on)));
  std::optional<Handshake> handshake = admission_.handshake(fd);
  woken_.reserve(clients_.size() + 1 + kWokenSpare);
  const ClientId client = next_client_++;
  newcomers_.emplace_back(Clock::now() + kGreetWithin, client);
  Connection& connection =
      clients_.try_emplace(client, fd, std::move(handshake), client, budget_, table_, refusals_)
          .first->second;
  connection.events = EPOLLIN;
  epoll_event event{};
  event.events = connection.events;
  event.data.u64 = client;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) drop(client);
}

// Drops the client that has been silent for longest; false if all have said something.
bool Loop::make_room() {
  for (const auto& [until, client] : newcomers_) {
    const auto found = clients_.find(client);
    if (found == clients_.end() || found->second.session.validated()) continue;
    // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): MSG_DONTWAIT
    if (::recv(found->second.fd, input_.data(), 1, MSG_PEEK | MSG_DONTWAIT) > 0) continue;
    drop(client);
    return true;
  }
  return false;
}

void Loop::drop_silent() {
  while (!newcomers_.empty() && newcomers_.front().first <= Clock::now()) {
    const auto found = clients_.find(newcomers_.front().second);
    newcomers_.pop_front();
    if (found != clients_.end() && !found->second.session.validated()) drop(found->first);
  }
}

void Loop::pause_accepting(bool pause) {
  if (accepting_ != pause) return;
  accepting_ = !pause;
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{};
    event.events = pause ? 0U : static_cast<std::uint32_t>(EPOLLIN);
    event.data.u64 = kFirstListenerTag + i;
    static_cast<void>(::epoll_ctl(epoll_, EPOLL_CTL_MOD, listeners_[i], &event));
  }
}

void Loop::on_event(ClientId client, std::uint32_t events) {
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;  // dropped earlier in this turn
  try {
    if (serve(found->second, events)) {
      watch(client, found->second);
    } else {
      drop(client);
    }
  } catch (const std::exception& error) {
    end(found, error);
  }
  tell_woken();
}

bool Loop::serve(Connection& connection, std::uint32_t events) {
  if (connection.handshake) {
    if (go_on(connection.fd, connection.handshake, connection.channel)) return true;
    const std::optional<Handshake>& handshake = connection.handshake;
    if (handshake && !handshake->ended() && handshake->trouble().empty()) refused_.add(connection.fd);
    return false;
  }
  Session& session = connection.session;
  const bool arrives = (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 || connection.channel.holds();
  if (arrives && session.room() > 0 && !receive(connection)) return false;
  for (int i = 0; i < kRoundsPerTurn; ++i) {
    session.work(woken_);
    if (!flush(connection)) return false;
    if (!session.busy() || !session.output().empty()) break;
  }
  return true;
}

bool Loop::receive(Connection& connection) {
  const std::size_t room = std::min(input_.size(), connection.session.room());
  const ssize_t size = connection.channel.receive(input_.data(), room);
  if (size < 0 && errno == kForged) throw ForgedError();
  if (size < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (size == 0) return false;
  connection.session.feed({input_.data(), static_cast<std::size_t>(size)});
  return true;
}

bool Loop::flush(Connection& connection) {
  Session& session = connection.session;
  while (!session.output().empty()) {
    const std::string_view output = session.output();
    const ssize_t size = connection.channel.send(output.data(), output.size());
    if (size < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    session.sent(static_cast<std::size_t>(size));
  }
  return true;
}

void Loop::watch(ClientId client, Connection& connection) {
  const Session& session = connection.session;
  const bool takes = session.room() > 0;
  // That it can be written brings the next turn, where the kernel has nothing more to tell.
  const bool goes_on = session.busy() || !session.output().empty() || (takes && connection.channel.holds());
  const std::uint32_t events = (takes ? static_cast<std::uint32_t>(EPOLLIN) : 0U) | (goes_on ? EPOLLOUT : 0U);
  if (events == connection.events) return;
  connection.events = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = client;
  static_cast<void>(::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd, &event));
}

// Closes the connection of a client that wants what it cannot have, or has not said what has come.
void Loop::end(Connections::iterator found, const std::exception& error) noexcept {
  Connection& connection = found->second;
  if (dynamic_cast<const ForgedError*>(&error) != nullptr) {
    forged_.add(connection.fd);
  } else if (!connection.session.validated()) {
    refused_.add(connection.fd);
  }
  try {
    static_cast<void>(flush(connection));  // replies to what came before are still due
  } catch (const std::exception&) {
    // It ends without them.
  }
  note(connection.session, error);
  drop(found->first);
}

// Keeps why a connection is ended, for when its client asks.
void Loop::note(const Session& session, const std::exception& error) noexcept {
  try {
    const bool told = dynamic_cast<const Refusal*>(&error) != nullptr ||
                      dynamic_cast<const collectives::Error*>(&error) != nullptr;
    if (session.name() == 0) return;
    refusals_.add(session.name(), told ? error.what() : "the server's process is out of memory");
  } catch (const std::bad_alloc&) {
    // It ends without a reason.
  }
}

void Loop::drop(ClientId client) noexcept {
  const auto node = clients_.extract(client);
  if (node.empty()) return;
  descriptors_.close(node.mapped().fd);
  forget(client);
}

void Loop::forget(ClientId client) noexcept {
  try {
    table_.drop(client, woken_);
  } catch (const std::exception&) {
    // Clients that wait for a queue may not hear of it; they run into their own time limits.
  }
}

void Loop::tell_woken() noexcept {
  for (std::size_t i = 0; i < woken_.size(); ++i) {  // a client that is dropped here may wake others
    const auto found = clients_.find(woken_[i]);
    if (found == clients_.end()) continue;
    try {
      found->second.session.wake();
      if (flush(found->second)) {
        watch(found->first, found->second);
      } else {
        drop(found->first);
      }
    } catch (const std::exception& error) {
      end(found, error);
    }
  }
  woken_.clear();
}

}  // namespace collectives::store
