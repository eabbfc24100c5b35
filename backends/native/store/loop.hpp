// The event loop of the store server: accepts, reads, executes, writes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/admission.hpp"
#include "store/decoder.hpp"
#include "store/descriptors.hpp"
#include "store/table.hpp"

namespace collectives::store {

class Loop {
 public:
  Loop(const std::vector<int>& listeners, Admission admission);

  void run();           // until request_stop(); called by one thread
  void request_stop();  // from any thread

  Descriptors& descriptors() { return descriptors_; }
  std::size_t connections() const { return connection_count_.load(std::memory_order_relaxed); }
  std::size_t waiting() const { return waiting_count_.load(std::memory_order_relaxed); }

 private:
  struct Connection {
    int fd = -1;
    std::optional<Handshake> handshake;  // until the client has proved itself
    Decoder decoder;
    std::string output;        // replies not sent yet
    std::size_t sent = 0;      // bytes of output that are
    bool validated = false;    // the first request was a good Validate
    std::uint32_t events = 0;  // what epoll watches for
  };

  void accept_from(std::size_t listener);
  void pause_accepting(bool pause);
  void drop_unproved();
  void on_event(ClientId client, std::uint32_t events);
  bool receive(Connection& connection);
  bool execute_pending(ClientId client, Connection& connection);
  bool execute(ClientId client, Connection& connection, Request& request);
  bool flush(Connection& connection);
  void watch(ClientId client, Connection& connection);
  void drop(ClientId client);
  void tell_woken();
  void publish();

  Descriptors descriptors_;
  int epoll_ = -1;
  int wake_ = -1;  // an eventfd: written to stop the loop
  std::vector<int> listeners_;
  Door door_;
  bool accepting_ = true;
  Table table_;
  Woken woken_;
  std::unordered_map<ClientId, Connection> clients_;
  ClientId next_client_ = 0;
  std::vector<char> input_;
  // Counters for observers; they order nothing.
  std::atomic<std::size_t> connection_count_{0};
  std::atomic<std::size_t> waiting_count_{0};
};

}  // namespace collectives::store
