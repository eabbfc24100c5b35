// What errors of collectives say (timeout, lost rank, broken group), and the report of what every rank waits
// in.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <string>

#include "common/dtype.hpp"
#include "common/opcode.hpp"
#include "state/rank_context.hpp"
#include "state/rank_snapshot.hpp"

namespace collectives {
namespace {

// How much later than the end of a connection the control channel may tell why it ended.
constexpr Nanoseconds kExplanationLimit = 400 * kMillisecond;
// Writing a failure record takes microseconds. A writer that takes this long is stopped.
constexpr Nanoseconds kFailureWriteLimit = kSecond;

std::string seconds(Nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time) / static_cast<double>(kSecond));
  return text;
}

// Shorter than what `seconds` can tell apart, too.
std::string limit_text(Nanoseconds limit) {
  return limit < 100 * kMillisecond ? std::to_string(limit / kMillisecond) + " ms" : seconds(limit);
}

std::string ago(Nanoseconds since) { return seconds(std::max<Nanoseconds>(now_ns() - since, 0)); }

std::string mail_of(const RankSnapshot& rank) {
  const bool sending = rank.mail_direction == static_cast<std::uint32_t>(MailDirection::send);
  std::string text = sending ? "waits in send to " : "waits in receive from ";
  text += rank.mail_peer == kNobody ? "any rank" : "rank " + std::to_string(rank.mail_peer - 1);
  return text + ", tag " + std::to_string(rank.mail_tag) + ", for " + ago(rank.mail_since);
}

}  // namespace

RankSnapshot RankContext::snapshot(int rank) const { return snapshot_of(page(rank)); }

std::string RankContext::name_of_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (topology().spans_machines()) text += " on '" + topology().host_of(rank) + "'";
  return text;
}

std::string RankContext::prefix() const { return "[rank " + std::to_string(rank()) + "] " + label_; }

std::string RankContext::timeout_text(const std::string& operation, Nanoseconds timeout,
                                      const std::string& details) const {
  return operation + " was not done within its timeout of " + limit_text(timeout) + details +
         ". Every rank:\n" + report();
}

std::string RankContext::report() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    text += (r == 0 ? "  " : "\n  ") + name_of_rank(r) + ": " + report_of(r);
  }
  return text;
}

std::string RankContext::report_of(int rank) const {
  const RankSnapshot known = snapshot(rank);
  std::string text;
  if (departed(rank)) {
    text = "left the group; ";
  } else if (unreachable(rank)) {
    text = "cannot be reached; ";
  } else if (rank != this->rank() && dead(rank)) {
    text = "dead; ";
  }
  // Of a remote rank that goes on, its leader sends nothing but its arrivals.
  const bool passing =
      !is_local(rank) && page(rank).remote.arrived.load(std::memory_order_acquire) < known.arrived;
  const bool inside = known.arrived > known.finished && !passing;
  if (known.arrived == 0) {
    text += "has begun no collective";
  } else {
    text += inside ? "in " : (passing ? "has come to " : "finished ");
    text += describe(known.what, known.own_count) + " number " + std::to_string(known.arrived);
    if (inside && known.waits_for != 0) text += ", waits for rank " + std::to_string(known.waits_for - 1);
    text += inside ? ", for " + ago(known.entered) : ", begun " + ago(known.entered) + " ago";
  }
  if (known.mail_peer != 0) text += "; " + mail_of(known);
  const std::string site = known.site;
  if (!site.empty() && (known.mail_peer != 0 || inside)) text += ", at " + site;
  return text;
}

void RankContext::throw_peer_lost(int rank, const std::string& operation) const {
  const char* how = " has died";
  if (departed(rank)) how = " has left the group";
  if (unreachable(rank))
    how = " cannot be reached any more, because its machine or the network between is gone,";
  const std::string text = name_of_rank(rank) + " (process " +
                           std::to_string(page(rank).status.process.load(std::memory_order_relaxed)) + ")" +
                           how + " while others needed it in " + operation +
                           "; last seen: " + report_of(rank);
  fail_group(ErrorKind::peer_lost, rank, text);
  throw_broken(true);
}

void RankContext::fail_on_word(int owner, const std::string& word, std::uint64_t value,
                               const std::string& allowed) const {
  if (broken()) return;
  fail_group(ErrorKind::backend, owner,
             "rank " + std::to_string(rank()) + " found " + std::to_string(value) + " as " + word +
                 " of rank " + std::to_string(owner) + ", which can be " + allowed +
                 "; some process overwrites the memory that the ranks of this machine share");
}

void RankContext::throw_on_word(int owner, const std::string& word, std::uint64_t value,
                                const std::string& allowed) const {
  fail_on_word(owner, word, value, allowed);
  throw_broken(true);
}

void RankContext::throw_connection_lost(const Call& call, int rank) const {
  const Nanoseconds limit = now_ns() + kExplanationLimit;
  while (now_ns() < limit) {
    check_liveness(call, rank);
    const timespec pause{0, kMillisecond};
    ::nanosleep(&pause, nullptr);
  }
  // It closed its connection, and neither its leader nor its process tells why.
  throw_peer_lost(rank, describe(call) + ", where its connection ended");
}

void RankContext::throw_timeout(const Call& call, int waited_for) const {
  // What a leader waits for, or a rank for its leader, may be another's fault.
  const int peer = last_to_arrive(call, waited_for);
  const std::string text =
      timeout_text(describe(call), call.timeout,
                   ": rank " + std::to_string(rank()) + " waited for rank " + std::to_string(peer));
  fail_group(ErrorKind::timeout, peer, text);
  throw Error(ErrorKind::timeout, prefix() + ": " + text, peer);
}

void RankContext::throw_broken(bool begun) const {
  const FailureRecord& record = failure_record();
  const Nanoseconds limit = now_ns() + kFailureWriteLimit;
  // Acquire, here and below: the fields of a complete record.
  std::uint32_t state = record.state.load(std::memory_order_acquire);
  while (state >= FailureRecord::kFirstWriter) {
    const std::uint32_t writer = state - FailureRecord::kFirstWriter;
    // Looked at before the record is read again: what the writer stored before it died counts.
    const bool over = now_ns() >= limit || writer >= shape().size || dead(static_cast<int>(writer));
    state = record.state.load(std::memory_order_acquire);
    if (state < FailureRecord::kFirstWriter) break;
    if (over) {
      throw Error(ErrorKind::peer_lost,
                  prefix() + " is broken: rank " + std::to_string(writer) +
                      " died or stopped while it recorded the cause; make a new group",
                  static_cast<int>(writer));
    }
    sched_yield();
  }
  const std::optional<Failure> first = failure();
  if (!first) throw Error(ErrorKind::aborted, prefix() + " was shut down");
  const ErrorKind kind = first->kind;
  if (kind == ErrorKind::peer_lost) throw Error(kind, prefix() + ": " + first->text, first->rank);
  if (kind == ErrorKind::timeout && begun) {
    throw Error(kind, prefix() + ": rank " + std::to_string(first->writer) + " gave up: " + first->text,
                first->rank);
  }
  throw Error(
      ErrorKind::aborted,
      prefix() + " is broken since an earlier error; make a new group. The first cause: " + first->text,
      first->rank);
}

}  // namespace collectives
