// A rank's connections with ranks on other machines, and the thread that makes them.
//
// Every rank of a group that spans machines listens, and has one thread that dials and accepts connections,
// watches idle sockets of point-to-point messages, and, on a leader, serves the control channel. A connection
// has a purpose and an index. Both ends first prove that they know the group's key (security/handshake.hpp);
// who has not done so two seconds after it connected is dropped. Each rank, purpose and index is taken once.
// A lane is one address of every rank; connection `index` takes lane index % lanes.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/thread.hpp"
#include "memory/descriptor.hpp"
#include "security/handshake.hpp"
#include "security/peer_process.hpp"
#include "sockets/connection.hpp"
#include "state/hello.hpp"
#include "state/membership.hpp"

namespace collectives {

class RankContext;
class ControlChannel;
struct Call;

class ConnectionManager {
 public:
  // The context must outlive it.
  ConnectionManager(RankContext& context, Network network);
  // Ends the thread after the control channel has announced the departure.
  ~ConnectionManager();
  ConnectionManager(const ConnectionManager&) = delete;
  ConnectionManager& operator=(const ConnectionManager&) = delete;

  // Addresses of each rank.
  int lanes() const noexcept { return static_cast<int>(network_.listeners.size()); }

  // Asks for a connection with that rank; returns at once. Asking again changes nothing.
  void dial(int rank, Purpose purpose, int index);

  // The connection with that rank, dialled here or there, once: non-blocking, authenticated, with nothing
  // read from it yet. Empty where it is not there. Throws where it was dialled here in vain:
  // ErrorKind::peer_lost where nobody listens there any more, else ErrorKind::network.
  Connection take(int rank, Purpose purpose, int index);

  // Grows with each connection that can be taken, and each that failed; this rank's mail doorbell rings then.
  // Acquire: what it counts can be taken.
  std::uint64_t changes() const noexcept { return changes_.load(std::memory_order_acquire); }

  // For a pair of ranks that both call it: the higher one dials, both wait, as an operation on the thread
  // that executes it.
  Connection connect(const Call& call, int rank, Purpose purpose, int index);

  // Rings this rank's mail doorbell, once, when the socket can be read from (or written to, with `write`), or
  // its connection has ended.
  void watch(int socket, bool write);
  // Fails the group, because a connection with that rank was tampered with.
  void fail_forged(int rank, Purpose purpose) const;
  // To be called before a socket is closed that was watched.
  void unwatch(int socket);

  // Leaders that this leader has no control connection with yet; on other ranks, their leader where it has
  // not all. Throws where a connection failed for good.
  std::vector<int> unconnected();
  // Why the last attempt to connect failed; empty where none did.
  std::string connection_error();

 private:
  friend class ControlChannel;
  using Key = std::tuple<int, Purpose, int>;

  // Accepted, and not proved yet.
  struct PendingConnection {
    Descriptor socket;
    Nanoseconds deadline = 0;
    Handshake handshake;
  };
  // A connection that is being made.
  struct Dial {
    Key key;
    Nanoseconds asked = 0;     // when it was asked for
    Nanoseconds limit = 0;     // for how long, unless somebody listens there
    Nanoseconds refused = 0;   // since when nobody listens there, 0 where that is not so
    Nanoseconds again_at = 0;  // when to try again, where there is no socket
    Nanoseconds give_up_at = 0;
    Descriptor socket;
    std::optional<Handshake> handshake;  // once it is connected
    bool looked_at = false;              // whose process has taken it
    std::string error_text;
  };
  // What an event of epoll is about.
  enum class Source : std::uint32_t { wake, listener, pending, dial, watch, control };

  void begin();
  // All below on this object's own thread.
  void serve() noexcept;
  // Makes a control connection that has ended anew. The control channel hears of it, or that it fails.
  void dial_again(int leader);
  void poll_once();
  void handle(Source source, int fd, std::uint32_t events);
  void accept_connections(int listener);
  void go_on(PendingConnection& pending);
  // Whose process has the other end, where that decides whether to speak with it; else this user's.
  PeerProcess peer(const Descriptor& socket) const;
  std::string cannot_take() const;
  void set_error_text(std::string text);
  bool may_take(const Hello& hello) const;
  void start_connect(Dial& dial);
  void finish_connect(Dial& dial);
  void go_on(Dial& dial, Handshake& handshake);
  const Endpoint& endpoint_of(const Dial& dial) const;
  void retry(Dial& dial, int error);
  void fail(Dial& dial, ErrorKind kind);
  void handle_timers(Nanoseconds now);
  void deliver(const Key& key, Descriptor socket, const Handshake& handshake);
  int poll_timeout_ms(Nanoseconds now) const;
  // Adds it to epoll, or changes the events of one that is there.
  void add(Source source, int fd, std::uint32_t events) const;
  void remove(int fd) const noexcept;

  RankContext& context_;
  Network network_;
  Descriptor epoll_;
  Descriptor wake_;  // of this rank alone; a leader has the leader event of its machine, too
  std::map<int, PendingConnection> pending_connections_;  // by descriptor
  std::list<Dial> dials_;
  std::set<Key> accepted_;
  std::unique_ptr<ControlChannel> control_;  // of a leader
  Nanoseconds accept_again_at_ = 0;

  std::mutex mutex_;  // guards what follows, but for `changes_` and the thread
  std::map<Key, Connection> ready_;
  std::map<Key, Error> failed_;
  std::set<Key> asked_;
  std::vector<Key> wanted_;  // asked for and not begun
  std::string error_text_;
  bool ending_ = false;

  std::atomic<std::uint64_t> changes_{0};
  BackgroundThread thread_;
};

}  // namespace collectives
