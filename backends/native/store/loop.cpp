#include "store/loop.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

namespace collectives::store {
namespace {

constexpr std::size_t kInputBytes = 64 * 1024;     // read from one client per turn
constexpr std::size_t kOutputBytes = 1024 * 1024;  // unread replies above which a client's requests wait
constexpr int kAcceptsPerTurn = 64;
constexpr int kRetryAcceptMs = 100;
constexpr std::size_t kEvents = 64;

// epoll's data: the wake descriptor, then the listeners, then clients.
constexpr std::uint64_t kWakeTag = 0;
constexpr std::uint64_t kFirstListenerTag = 1;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

template <typename T>
void put(std::string& output, T value) {
  output.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_text(std::string& output, const std::string& text) {
  put(output, static_cast<std::uint64_t>(text.size()));
  output += text;
}

void put_count(std::string& output, std::size_t count) { put(output, static_cast<std::int64_t>(count)); }

}  // namespace

Loop::Loop(const std::vector<int>& listeners, Admission admission)
    : listeners_(listeners), door_(std::move(admission)), input_(kInputBytes) {
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

void Loop::run() {
  std::array<epoll_event, kEvents> events{};
  for (;;) {
    const int timeout = accepting_ ? door_.wait_ms() : kRetryAcceptMs;
    const int count = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout);
    if (count < 0 && errno != EINTR) return;
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
    drop_unproved();
    publish();
  }
}

void Loop::drop_unproved() {
  for (const ClientId client : door_.overdue()) {
    const auto found = clients_.find(client);
    if (found != clients_.end() && found->second.handshake) drop(client);
  }
}

void Loop::publish() {
  connection_count_.store(clients_.size(), std::memory_order_relaxed);
  waiting_count_.store(table_.waiting(), std::memory_order_relaxed);
}

void Loop::accept_from(std::size_t listener) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    const int fd = descriptors_.open(
        [&] { return ::accept4(listeners_[listener], nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd < 0) {
      // Out of descriptors or memory: the connection stays in the backlog and would wake the loop at once
      // again.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) pause_accepting(true);
      return;
    }
    const int on = 1;
    static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
    // Finds clients whose machine is gone without a word, so that their waits do not stay for ever.
    static_cast<void>(::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on)));
    const ClientId client = next_client_++;
    Connection& connection = clients_[client];
    connection.fd = fd;
    connection.events = EPOLLIN;
    epoll_event event{};
    event.events = connection.events;
    event.data.u64 = client;
    if (!door_.admits(fd, client, connection.handshake) ||
        ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
      drop(client);
    }
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
  Connection& connection = found->second;
  bool alive = false;
  try {
    alive = true;
    if (connection.handshake) {
      alive = Door::go_on(connection.fd, connection.handshake);
    } else {
      if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) alive = receive(connection);
      if (alive) alive = execute_pending(client, connection);
    }
  } catch (const std::exception&) {
    alive = false;  // no memory for what this client wants
  }
  if (alive) {
    watch(client, connection);
  } else {
    drop(client);
  }
  tell_woken();
}

bool Loop::receive(Connection& connection) {
  const ssize_t size = ::recv(connection.fd, input_.data(), input_.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (size == 0) return false;
  connection.decoder.feed({input_.data(), static_cast<std::size_t>(size)});
  return true;
}

bool Loop::execute_pending(ClientId client, Connection& connection) {
  Request request;
  for (;;) {
    while (connection.output.size() - connection.sent < kOutputBytes) {
      const Decoder::Status status = connection.decoder.next(request);
      if (status == Decoder::Status::kNeedMore) return flush(connection);
      if (status == Decoder::Status::kInvalid || !execute(client, connection, request)) {
        static_cast<void>(flush(connection));  // replies to what came before are still due
        return false;
      }
    }
    if (!flush(connection)) return false;
    if (connection.output.size() - connection.sent >= kOutputBytes) return true;
  }
}

bool Loop::execute(ClientId client, Connection& connection, Request& request) {
  std::string& output = connection.output;
  if (!connection.validated) {
    connection.validated = request.command == Command::kValidate && request.word == kMagic;
    return connection.validated;
  }
  switch (request.command) {
    case Command::kValidate:
      return false;
    case Command::kSet:
      table_.set(request.keys[0], std::move(request.values[0]), woken_);
      return true;
    case Command::kCompareSet:
      put_text(output, table_.compare_set(request.keys[0], request.values[0], request.values[1], woken_));
      return true;
    case Command::kGet:
      put_text(output, request.keys[0] == kServerKey ? kServerVersion : table_.get(request.keys[0]));
      return true;
    case Command::kAdd: {
      std::int64_t sum = 0;
      if (!table_.add(request.keys[0], request.number, sum, woken_)) return false;
      put(output, sum);
      return true;
    }
    case Command::kCheck:
      put(output, table_.check(request.keys) ? kAllThere : kNotAllThere);
      return true;
    case Command::kWait:
      if (table_.wait(client, request.keys)) put(output, kStopWaiting);
      return true;
    case Command::kGetNumKeys:
      put_count(output, table_.size());
      return true;
    case Command::kDeleteKey:
      put_count(output, table_.erase(request.keys[0]) ? 1 : 0);
      return true;
    case Command::kAppend:
      table_.append(request.keys[0], request.values[0], woken_);
      return true;
    case Command::kMultiGet:
      for (const std::string& key : request.keys) put_text(output, table_.get(key));
      return true;
    case Command::kMultiSet:
      for (std::size_t i = 0; i < request.keys.size(); ++i) {
        table_.set(request.keys[i], std::move(request.values[i]), woken_);
      }
      return true;
    case Command::kCancelWait:
      table_.cancel(client);
      put(output, kWaitCanceled);
      return true;
    case Command::kPing:
      put(output, request.word);
      return true;
    case Command::kQueuePush:
      table_.push(request.keys[0], std::move(request.values[0]), woken_);
      return true;
    case Command::kQueuePop: {
      std::string value;
      const std::size_t length = table_.pop(client, request.keys[0], value);
      put_count(output, length);
      if (length != 0) put_text(output, value);
      return true;
    }
    case Command::kQueueLen:
      put_count(output, table_.length(request.keys[0]));
      return true;
    case Command::kListKeys:
      put_count(output, table_.size());
      for (const auto& [key, value] : table_.values()) put_text(output, key);
      return true;
    case Command::kBarrier:
      switch (table_.barrier(client, request.keys[0], request.number, woken_)) {
        case Table::Arrival::kComplete:
          put(output, kStopWaiting);
          return true;
        case Table::Arrival::kWaits:
          return true;
        case Table::Arrival::kInvalid:
          return false;
      }
  }
  return false;
}

bool Loop::flush(Connection& connection) {
  while (connection.sent < connection.output.size()) {
    const ssize_t size = ::send(connection.fd, connection.output.data() + connection.sent,
                                connection.output.size() - connection.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    connection.sent += static_cast<std::size_t>(size);
  }
  connection.output.clear();
  connection.sent = 0;
  if (connection.output.capacity() > kOutputBytes) connection.output.shrink_to_fit();
  return true;
}

void Loop::watch(ClientId client, Connection& connection) {
  const std::size_t unsent = connection.output.size() - connection.sent;
  const std::uint32_t events =
      (unsent < kOutputBytes ? static_cast<std::uint32_t>(EPOLLIN) : 0U) | (unsent > 0 ? EPOLLOUT : 0U);
  if (events == connection.events) return;
  connection.events = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = client;
  static_cast<void>(::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd, &event));
}

void Loop::drop(ClientId client) {
  const auto node = clients_.extract(client);
  if (node.empty()) return;
  descriptors_.close(node.mapped().fd);
  try {
    table_.drop(client, woken_);
  } catch (const std::bad_alloc&) {
    // Only the list of clients to wake can grow here; they run into their own time limits.
  }
}

void Loop::tell_woken() {
  while (!woken_.empty()) {
    const Woken woken = std::exchange(woken_, {});
    for (const ClientId client : woken) {
      const auto found = clients_.find(client);
      if (found == clients_.end()) continue;
      bool alive = false;
      try {
        put(found->second.output, kStopWaiting);
        alive = flush(found->second);
      } catch (const std::exception&) {
        alive = false;
      }
      if (alive) {
        watch(client, found->second);
      } else {
        drop(client);
      }
    }
  }
}

}  // namespace collectives::store
