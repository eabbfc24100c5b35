// What the leaders of machines tell each other beside the operations: which failure broke the group, which
// ranks died or left, and what their ranks wait in.
//
// Each pair of leaders has one connection for it, made when the group is formed. A leader finds the events of
// its machine in its segment, and writes those of the others to their ranks' mirrors. A process that is
// killed is seen by its descriptor on its own machine. A leader's connection ends with it, but the network
// may end one too, so that it is made again: where nobody listens any more, the leader has ended. A machine
// that vanishes is known by what its kernel does not acknowledge: a connection on which nothing was sent for
// a while carries a ping, which the other kernel acknowledges even where the process is stopped. So a stopped
// process is never taken for a dead one. What is heard does not count: where a link carries packets one way
// only, both sides find out at about the same time.
//
// To be used on the connection manager's thread.
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
#include "sockets/connection.hpp"
#include "state/rank_snapshot.hpp"

namespace collectives {

class ConnectionManager;
class RankContext;
struct Failure;

class ControlChannel {
 public:
  ControlChannel(RankContext& context, ConnectionManager& connections);
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // Takes the connection with another leader, and sends what it has missed.
  void add_link(int leader, Connection connection);
  // Whether all other leaders have been connected with.
  bool complete() const;
  // Whether that leader may connect once more: it may have found out first that a connection has ended, and
  // where both have, both make it again.
  bool takes_another(int leader) const { return links_with(leader) < 2; }
  // Whether that leader ever was.
  bool was_linked(int leader) const { return connected_.count(leader) != 0; }
  // A connection with that leader has ended, and cannot be made again: its process has, or (not `ended`) its
  // machine cannot be reached.
  void is_not_there(int leader, bool ended);

  // An event of epoll on a descriptor that this added.
  void handle(int fd, std::uint32_t events);

  // Checks the segment for events, and the connections.
  void check(Nanoseconds now);
  void check_soon() noexcept { next_check_ = 0; }
  Nanoseconds next_check() const noexcept { return next_check_; }

  // Tells the others that this rank leaves, upon which they close their connections.
  void announce_departure();
  // Whether no connection is left.
  bool no_links() const noexcept { return links_.empty(); }

 private:
  enum class FrameType : std::uint32_t { status = 1, exit = 2, failure = 3, ping = 4, pong = 5 };
  struct Frame {
    FrameType type = FrameType::ping;
    std::uint32_t bytes = 0;  // that follow
    std::int32_t rank = 0;
    std::uint32_t reserved = 0;
  };
  static_assert(sizeof(Frame) == 16);

  struct Link {
    int leader = 0;
    Connection connection;
    std::string out;                    // not sent yet
    std::string in;                     // not handled yet
    int unanswered = 0;                 // pings since the other process last sent anything
    std::uint64_t sent = 0;             // bytes that this kernel was given
    std::uint64_t sent_when_heard = 0;  // of them, when the other process last sent anything
    int quiet = 0;                      // checks since anything was sent
    std::uint64_t acknowledged = 0;     // of them by the other kernel, as of the last check
    int silent = 0;                     // checks since then that found nothing more acknowledged
    int send_error = 0;                 // errno of the send that failed; nothing is sent any more then
    bool missed_status = false;         // it has not been sent all statuses
    bool closing = false;
  };
  struct Local {
    int rank = 0;
    RankSnapshot last;             // as of the last check
    RankSnapshot sent;             // to the others
    std::optional<Presence> gone;  // how, once it is sent
  };

  void send(Link& link, FrameType type, int rank, std::string_view payload);
  void send_failure(Link& link, const Failure& failure);
  // To all, once.
  void send_failure();
  void send_exit(Link& link, int rank, Presence how, Nanoseconds now);
  // What the other links were sent before this one was added.
  void send_history(Link& link);
  void report_exit(Local& local, Presence how, Nanoseconds now);
  void flush(Link& link);
  void read(Link& link);
  // Returns whether the other leader has announced its departure.
  bool handle_frame(Link& link, const Frame& frame, std::string_view payload);
  void check_ranks(Nanoseconds now, bool tick);
  static bool takes_statuses(const Link& link) noexcept;
  void check_link(Link& link);
  // The connection has ended with this error, 0 for in order.
  void link_ended(Link& link, int error);
  std::ptrdiff_t links_with(int leader) const;
  void remove_closed();

  RankContext& context_;
  ConnectionManager& connections_;
  std::map<int, Link> links_;  // by descriptor
  std::set<int> connected_;    // leaders that were ever connected with
  std::vector<Local> locals_;
  bool failure_known_ = false;
  bool failure_sent_ = false;  // by this leader to all
  bool departure_announced_ = false;
  bool exits_received_ = false;  // of which nobody has been told
  Nanoseconds next_check_ = 0;
  Nanoseconds next_tick_ = 0;
};

}  // namespace collectives
