// Fuzz target for what the store's server does with the bytes of its clients: decoder, session, table,
// limits.
//
// The input is a list of turns (turns.hpp): a client's number, and bytes for that client. A turn with no
// bytes is the end of the client's connection. A client whose number has the highest bit set reads nothing
// until its next turn.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "store/budget.hpp"
#include "store/session.hpp"
#include "store/table.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/testing.hpp"

namespace collectives::store {
namespace {

constexpr std::size_t kClients = 4;
constexpr std::size_t kMaxBytes = 64 * 1024;  // so that short inputs reach every limit

class Server {
 public:
  ~Server() {
    for (std::size_t client = 0; client < kClients; ++client) drop(client);
    CHECK(table_.waiting() == 0);
  }

  void turn(unsigned char number, std::string_view bytes) {
    const std::size_t client = number % kClients;
    reads_[client] = number < 128;
    if (bytes.empty()) {
      drop(client);
    } else {
      serve(client, bytes);
    }
    for (std::size_t i = 0; i < woken_.size(); ++i) {
      const auto woken = static_cast<std::size_t>(woken_[i]);
      if (sessions_[woken] == nullptr) continue;
      sessions_[woken]->wake();
      if (reads_[woken]) drain(*sessions_[woken]);
    }
    woken_.clear();
    CHECK(budget_.used() <= kMaxBytes + kClients * 1024);
  }

 private:
  void serve(std::size_t client, std::string_view bytes) {
    std::unique_ptr<Session>& session = sessions_[client];
    if (session == nullptr) session = std::make_unique<Session>(client, budget_, table_, refusals_);
    try {
      finish(*session, true);  // makes room
      session->feed(bytes);
      finish(*session, reads_[client]);
    } catch (const Refusal& refusal) {
      refusals_.add(session->name(), refusal.what());
      drop(client);
    }
  }

  void finish(Session& session, bool reads) {
    do {
      if (reads) drain(session);
      session.work(woken_);
    } while (reads && (session.busy() || !session.output().empty()));
  }

  static void drain(Session& session) {
    CHECK(session.output().size() <= 128 * 1024);
    while (!session.output().empty()) session.sent((session.output().size() + 1) / 2);
  }

  void drop(std::size_t client) {
    if (sessions_[client] == nullptr) return;
    sessions_[client].reset();
    table_.drop(client, woken_);
  }

  Budget budget_{kMaxBytes};
  Refusals refusals_;
  Table table_{budget_};
  Woken woken_;
  std::array<std::unique_ptr<Session>, kClients> sessions_;
  std::array<bool, kClients> reads_{};
};

}  // namespace
}  // namespace collectives::store

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::store::Server server;
  collectives::for_each_turn(
      data, size, [&](unsigned char number, std::string_view bytes) { server.turn(number, bytes); });
  return 0;
}
