// The event loop of the store server: accepts, reads, executes, writes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/admission.hpp"
#include "store/budget.hpp"
#include "store/descriptors.hpp"
#include "store/session.hpp"
#include "store/table.hpp"

namespace collectives::store {

class Loop {
 public:
  Loop(const std::vector<int>& listeners, std::size_t max_bytes, Admission admission);

  void run() noexcept;  // until request_stop(); called by one thread
  void request_stop();  // from any thread

  Descriptors& descriptors() { return descriptors_; }
  std::size_t connections() const { return connection_count_.load(std::memory_order_relaxed); }
  std::size_t waiting() const { return waiting_count_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Connection {
    Connection(int descriptor, std::optional<Handshake> proof, ClientId client, Budget& budget, Table& table,
               const Refusals& refusals)
        : session(client, budget, table, refusals), fd(descriptor), handshake(std::move(proof)) {}

    Session session;
    int fd;
    std::optional<Handshake> handshake;  // until the client has proved itself
    std::uint32_t events = 0;            // what epoll watches for
  };
  using Connections = std::unordered_map<ClientId, Connection>;

  int patience_ms() const;
  void accept_from(std::size_t listener) noexcept;
  int below_reserve(int fd);
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
  void drop(ClientId client) noexcept;
  void tell_woken() noexcept;
  void publish();

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
  ClientId next_client_ = 0;
  std::deque<std::pair<Clock::time_point, ClientId>>
      newcomers_;  // until when each must have proved itself and greeted
  std::vector<char> input_;
  // Counters for observers; they order nothing.
  std::atomic<std::size_t> connection_count_{0};
  std::atomic<std::size_t> waiting_count_{0};
};

}  // namespace collectives::store
