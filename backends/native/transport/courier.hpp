// A rank's connections with ranks on other machines, and the thread that makes them.
//
// Every rank of a group that spans machines listens, and has one thread, the *courier*, which dials and
// accepts connections, watches idle sockets of point-to-point messages, and, on a leader, carries the control
// plane (herald.hpp). A connection has a *purpose* and an index; whoever dials says hello first: version, the
// group's secret, rank, purpose, index. A connection that does not say so within two seconds is dropped, as
// is one with another secret. A *lane* is one address of every rank; connection `index` takes lane index %
// lanes.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/thread.hpp"
#include "memory/descriptor.hpp"
#include "transport/bootstrap.hpp"

namespace collectives {

class Station;
class Herald;
struct Call;

enum class Purpose : std::uint32_t {
  control = 0,  // news between leaders; the courier keeps it
  meeting = 1,  // arrivals between leaders (exchange.hpp)
  stream = 2,   // long messages
  mail = 3,     // point-to-point messages, from the rank that dials to the one that accepts
};

class Courier {
 public:
  // The station must outlive it.
  Courier(Station& station, Network network);
  // Ends the thread after it has said goodbye.
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Addresses of each rank.
  int lanes() const noexcept { return static_cast<int>(network_.listeners.size()); }

  // Asks for a connection with that rank; returns at once. Asking again changes nothing.
  void dial(int rank, Purpose purpose, int index);

  // The connection with that rank, dialled here or there, once: non-blocking, authenticated, with nothing
  // read from it yet. Empty where it is not there. Throws where it was dialled here in vain:
  // ErrorKind::peer_lost where nobody listens there any more, else ErrorKind::network.
  Descriptor take(int rank, Purpose purpose, int index);

  // Grows with each connection that can be taken, and each that failed; this rank's mail bell rings then.
  // Acquire: what it counts can be taken.
  std::uint64_t arrivals() const noexcept { return arrivals_.load(std::memory_order_acquire); }

  // For a pair of ranks that both call it: the higher one dials, both wait, as an operation on the thread
  // that executes it.
  Descriptor link(const Call& call, int rank, Purpose purpose, int index);

  // Rings this rank's mail bell, once, when the socket can be read from (or written to, with `write`), or its
  // connection has ended.
  void watch(int socket, bool write);
  // To be called before a socket is closed that was watched.
  void unwatch(int socket);

  // An eventfd for poll() beside sockets: readable once there are news of this process or of a leader's
  // courier that a waiting operation should look at. `unstir` makes it unreadable.
  int stirred() const noexcept { return stir_.get(); }
  void unstir() const noexcept;
  void stir() const noexcept;

  // The segment holds news; they concern this machine's leader too.
  void wake() const noexcept;

  // Leaders that this leader has no control connection with yet; on other ranks, their leader where it has
  // not all. Throws where a connection failed for good.
  std::vector<int> unlinked();
  // What stands in the way of connections, in words; may be empty.
  std::string trouble();

 private:
  friend class Herald;
  using Key = std::tuple<int, Purpose, int>;

  // What whoever dials says first.
  struct Hello {
    std::uint64_t magic = kMagic;
    std::uint64_t version = kLayoutVersion;
    char secret[32] = {};
    std::int32_t rank = 0;
    std::int32_t size = 0;
    Purpose purpose = Purpose::control;
    std::int32_t index = 0;
  };
  static_assert(sizeof(Hello) == 64);

  // Somebody who has connected and not said hello yet.
  struct Stranger {
    Descriptor socket;
    Nanoseconds deadline = 0;
    std::size_t come = 0;
    std::array<std::byte, sizeof(Hello)> bytes{};
  };
  // A connection that is being made.
  struct Dial {
    Key key;
    Nanoseconds asked = 0;     // when it was asked for
    Nanoseconds refused = 0;   // since when nobody listens there, 0 where that is not so
    Nanoseconds again_at = 0;  // when to try again, where there is no socket
    Nanoseconds give_up_at = 0;
    Descriptor socket;
    std::string trouble;
  };
  // What an event of epoll is about.
  enum class Source : std::uint32_t { wake, listener, stranger, dial, watch, herald };

  // All below on the courier's thread.
  void serve() noexcept;
  void turn();
  void handle(Source source, int fd, std::uint32_t events);
  void meet_strangers(int listener);
  void listen_to(Stranger& stranger);
  void begin(Dial& dial);
  void advance(Dial& dial);
  void retry(Dial& dial, int error);
  void fail(Dial& dial, ErrorKind kind);
  void look_at_time(Nanoseconds now);
  void deliver(const Key& key, Descriptor socket);
  int patience(Nanoseconds now) const;
  // Puts it into epoll, one-shot where asked; where it is there already, changes that.
  void add(Source source, int fd, std::uint32_t events) const;
  void remove(int fd) const noexcept;

  Station& station_;
  Network network_;
  Descriptor epoll_;
  Descriptor wake_;  // of ranks that do not lead; a leader's is the machine's bell
  Descriptor stir_;
  std::map<int, Stranger> strangers_;  // by descriptor
  std::list<Dial> dials_;
  std::unique_ptr<Herald> herald_;  // of a leader
  Nanoseconds accept_again_at_ = 0;

  std::mutex mutex_;  // guards the rest
  std::map<Key, Descriptor> ready_;
  std::map<Key, Error> failed_;
  std::set<Key> asked_;
  std::vector<Key> wanted_;  // asked for and not begun
  std::string trouble_;
  bool ending_ = false;

  std::atomic<std::uint64_t> arrivals_{0};
  BackgroundThread thread_;
};

}  // namespace collectives
