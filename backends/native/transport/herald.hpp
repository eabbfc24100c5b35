// What the leaders of machines tell each other beside the operations: which failure broke the group, who died
// or left, and what their ranks wait in.
//
// Each pair of leaders has one connection for it, made when the group is formed. News of this machine are
// found in its segment, news of the others are written to it, into their ranks' mirrors. A process that is
// killed is seen by its descriptor on its own machine, or, where it is a leader, by the end of its connection
// on the others. A machine that vanishes without a word is known by its silence: a connection on which
// nothing came for a while carries a *ping*, which the other kernel acknowledges even where the process is
// stopped. So a stopped process is never taken for a dead one.
//
// To be used on the courier's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "transport/snapshot.hpp"

namespace collectives {

class Courier;
class Station;
struct Poisoned;

class Herald {
 public:
  Herald(Station& station, const Courier& courier);
  ~Herald();
  Herald(const Herald&) = delete;
  Herald& operator=(const Herald&) = delete;

  // Takes the connection with another leader, who hears first what he has missed.
  void adopt(int leader, Descriptor socket);
  // Whether all other leaders have been connected with.
  bool linked() const;

  // Something happened on a descriptor that this put into epoll.
  void handle(int fd, std::uint32_t events);

  // Looks for news in the segment, and after the connections.
  void look(Nanoseconds now);
  void look_soon() noexcept { next_look_ = 0; }
  Nanoseconds next_look() const noexcept { return next_look_; }

  // Tells that this rank leaves. Those who hear it close their connections.
  void say_goodbye();
  // Whether no connection is left.
  bool alone() const noexcept { return links_.empty(); }

 private:
  enum class Kind : std::uint32_t { status = 1, gone = 2, poison = 3, ping = 4, pong = 5 };
  struct Frame {
    Kind kind = Kind::ping;
    std::uint32_t bytes = 0;  // that follow
    std::int32_t rank = 0;
    std::uint32_t reserved = 0;
  };
  static_assert(sizeof(Frame) == 16);

  struct Link {
    int leader = 0;
    Descriptor socket;
    std::string out;      // not sent yet
    std::string in;       // not understood yet
    int unanswered = 0;   // pings since the other process last said anything
    int silent = 0;       // looks in a row that found its machine silent
    bool behind = false;  // it has missed statuses
    bool closing = false;
  };
  struct Local {
    int rank = 0;
    Snapshot last;                 // as of the last look
    Snapshot told;                 // to the others
    std::optional<Presence> gone;  // told
  };

  void tell(Link& link, Kind kind, int rank, std::string_view payload);
  void tell_poison(Link& link, const Poisoned& news);
  // To all, once.
  void tell_poison();
  void tell_gone(Link& link, const Local& local, Nanoseconds now);
  // What the other links were told before this one was there.
  void tell_past(Link& link);
  void note_gone(Local& local, Presence how, Nanoseconds now);
  void flush(Link& link);
  void read(Link& link);
  // Returns whether the other one said goodbye.
  bool understand(Link& link, const Frame& frame, std::string_view payload);
  void look_at_ranks(Nanoseconds now, bool tick);
  void look_after(Link& link);
  // The connection has ended with this error, 0 for in order.
  void lose(Link& link, int error);
  void forget_closed();

  Station& station_;
  const Courier& courier_;
  std::map<int, Link> links_;  // by descriptor
  std::set<int> met_;          // leaders that were ever connected with
  std::vector<Local> locals_;
  bool poison_known_ = false;
  bool poison_told_ = false;  // by this leader to all
  bool said_goodbye_ = false;
  Nanoseconds next_look_ = 0;
  Nanoseconds next_tick_ = 0;
};

}  // namespace collectives
