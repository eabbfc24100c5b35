// The event loop of the store server: accepts, reads, executes, writes. Clients of its own process need no
// socket: their threads carry their requests out between the loop's turns.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "security/channel.hpp"
#include "store/admission.hpp"
#include "store/budget.hpp"
#include "store/descriptors.hpp"
#include "store/outcasts.hpp"
#include "store/session.hpp"
#include "store/table.hpp"

namespace collectives::store {

class Loop {
 public:
  Loop(const std::vector<int>& listeners, std::size_t max_bytes, Admission admission);

  void run() noexcept;  // until request_stop(); called by one thread
  void request_stop();  // from any thread

  // A client of this process; from any thread, as the calls for it. In a forked child, after `abandon`, there
  // are none.
  ClientId open_local();
  // Carries requests out, but none that waits, and adds the replies; false where the client is refused, now
  // or since an earlier call, in which case `replies` has what came before. `blocks` is called before
  // the loop's turn is waited for.
  bool serve_local(ClientId client, std::string_view requests, std::string& replies,
                   const std::function<void()>& blocks);
  void close_local(ClientId client) noexcept;

  // In a forked child, where the loop's thread is not.
  void abandon();

  Descriptors& descriptors() { return descriptors_; }
  std::size_t connections() const { return connection_count_.load(std::memory_order_relaxed); }
  std::size_t waiting() const { return waiting_count_.load(std::memory_order_relaxed); }
  const Outcasts& refused() const { return refused_; }  // who was not let in
  const Outcasts& forged() const { return forged_; }    // clients' connections that others tampered with

 private:
  using Clock = std::chrono::steady_clock;

  struct Connection {
    Connection(int descriptor, std::optional<Handshake> proof, ClientId client, Budget& budget, Table& table,
               const Refusals& refusals)
        : session(client, budget, table, refusals),
          fd(descriptor),
          handshake(std::move(proof)),
          channel(descriptor) {}

    Session session;
    int fd;
    std::optional<Handshake> handshake;  // until the client has proved itself
    Channel channel;                     // from then on
    std::uint32_t events = 0;            // what epoll watches for
  };
  using Connections = std::unordered_map<ClientId, Connection>;

  int patience_ms() const;
  void accept_from(std::size_t listener) noexcept;
  int below_reserve(int fd);
  // Closes a connection for which there is no room, and says so; `in_numbers`: to one of this user.
  void turn_away(int fd, bool in_numbers);
  bool make_room();
  void admit(int fd);
  void pause_accepting(bool pause);
  void drop_silent();
  void on_event(ClientId client, std::uint32_t events);
  bool serve(Connection& connection, std::uint32_t events);
  bool receive(Connection& connection);
  static bool flush(Connection& connection);
  void watch(ClientId client, Connection& connection);
  void end(Connections::iterator found, const std::exception& error) noexcept;
  void note(const Session& session, const std::exception& error) noexcept;
  void drop(ClientId client) noexcept;
  void forget(ClientId client) noexcept;
  void tell_woken() noexcept;
  void publish();

  std::mutex turn_;         // held by the thread that uses what is below, in the loop for a turn
  bool abandoned_ = false;  // written in a forked child only, by its only thread
  Descriptors descriptors_;
  int epoll_ = -1;
  int wake_ = -1;  // an eventfd: written to stop the loop
  std::vector<int> listeners_;
  Admission admission_;
  bool accepting_ = true;
  Budget budget_;  // outlives all that is charged to it
  Refusals refusals_;
  Table table_;
  Woken woken_;  // has room for every client: to wake them takes no memory
  Connections clients_;
  std::unordered_map<ClientId, Session> locals_;
  ClientId next_client_ = 0;
  std::deque<std::pair<Clock::time_point, ClientId>>
      newcomers_;  // until when each must have proved itself and greeted
  std::vector<char> input_;
  // Counters for observers; they order nothing.
  std::atomic<std::size_t> connection_count_{0};
  std::atomic<std::size_t> waiting_count_{0};
  Outcasts refused_;
  Outcasts forged_;
};

}  // namespace collectives::store
