// What errors of collectives say (timeout, lost rank, broken group), and the report of what every rank waits
// in.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "common/codes.hpp"
#include "security/channel.hpp"
#include "sockets/unix_socket.hpp"
#include "state/hello.hpp"
#include "state/rank_context.hpp"
#include "state/rank_snapshot.hpp"

namespace collectives {
namespace {

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

bool is_known(std::uint32_t kind) noexcept {
  return kind <= static_cast<std::uint32_t>(ErrorKind::resources);
}

}  // namespace

FailureDetails packed(const Failure& failure) {
  FailureDetails details{.kind = static_cast<std::uint32_t>(failure.kind),
                         .rank = failure.about.rank,
                         .writer = failure.writer,
                         .behind = static_cast<std::uint32_t>(failure.behind),
                         .sequence = failure.about.sequence};
  failure.about.operation.copy(details.operation, sizeof(details.operation) - 1);
  const std::vector<int>& missing = failure.about.missing;
  details.missing_count = static_cast<std::uint32_t>(std::min(missing.size(), kMostMissing));
  std::copy_n(missing.begin(), details.missing_count, details.missing);
  return details;
}

Failure unpacked(const FailureDetails& details, std::string text, int size) {
  Failure failure;
  if (is_known(details.kind)) failure.kind = static_cast<ErrorKind>(details.kind);
  failure.writer = details.writer;
  failure.behind = details.behind < text.size() ? details.behind : 0;
  failure.text = std::move(text);
  failure.about.rank = details.rank < size ? std::max(details.rank, -1) : -1;
  failure.about.operation.assign(details.operation, ::strnlen(details.operation, sizeof(details.operation)));
  failure.about.sequence = std::max<std::int64_t>(details.sequence, -1);
  const std::size_t count = std::min<std::size_t>(details.missing_count, kMostMissing);
  for (std::size_t i = 0; i < count; ++i) {
    const int rank = details.missing[i];
    if (rank >= 0 && rank < size) failure.about.missing.push_back(rank);
  }
  return failure;
}

Failure failure_from(const Error& error, int writer) {
  Failure failure{.kind = error.kind(), .writer = writer, .text = error.message(), .about = error.details()};
  failure.about.cause.reset();
  const std::shared_ptr<const Error>& cause = error.details().cause;
  if (cause && cause->kind() == ErrorKind::program && failure.text.ends_with(cause->message())) {
    failure.behind = cause->message().size();
  }
  return failure;
}

Error error_from(const Failure& failure) {
  ErrorDetails about = failure.about;
  if (failure.behind > 0) {
    about.cause = std::make_shared<const Error>(ErrorKind::program,
                                                failure.text.substr(failure.text.size() - failure.behind),
                                                ErrorDetails{.rank = failure.about.rank});
  }
  return {failure.kind, failure.text, about};
}

ErrorDetails details_after(const Failure& failure) {
  const Error first = error_from(failure);
  ErrorDetails about = first.details();
  if (failure.kind != ErrorKind::aborted) about.cause = std::make_shared<const Error>(first);
  return about;
}

RankSnapshot RankContext::snapshot(int rank) const { return snapshot_of(page(rank)); }
std::string RankContext::name_of_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (topology().spans_machines()) text += " on '" + topology().host_of(rank) + "'";
  return text;
}

std::string RankContext::prefix() const { return "[rank " + std::to_string(rank()) + "] " + label_; }

std::string RankContext::timeout_text(const std::string& operation, Nanoseconds timeout,
                                      const std::string& details) const {
  // In parentheses the words of other libraries, which people search logs for.
  return operation + " was not done within its timeout of " + limit_text(timeout) + " (timed out)" + details +
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
  } else if (rank != this->rank() && stopped(rank)) {
    text = "stopped; ";
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

void RankContext::throw_peer_lost(int rank, const std::string& operation, ErrorDetails about) const {
  const bool runs = is_local(rank) && process(rank) && !readable_until(*process(rank), 0);
  const char* how = runs ? " runs another program since exec" : " has died";
  if (departed(rank)) how = " has left the group";
  if (unreachable(rank))
    how = " cannot be reached any more, because its machine or the network between is gone,";
  const std::int32_t process = page(rank).status.process.load(std::memory_order_relaxed);
  std::string text = name_of_rank(rank);
  if (process > 0) text += " (process " + std::to_string(process) + ")";  // its machine may not have told yet
  text += how;
  text += " while others needed it in " + operation + "; last seen: " + report_of(rank);
  about.rank = rank;
  fail_group(ErrorKind::peer_lost, text, about);
  throw_broken(true);
}

void RankContext::throw_disconnected(int rank, const std::string& operation, ErrorDetails about) const {
  about.rank = rank;
  fail_group(ErrorKind::network,
             "rank " + std::to_string(this->rank()) + " has lost its connection with " + name_of_rank(rank) +
                 " in " + operation +
                 ", and nothing tells that the rank has ended; last seen: " + report_of(rank),
             about);
  throw_broken(true);
}

void RankContext::fail_forged(int rank, Purpose purpose) const {
  if (broken()) return;
  fail_group(ErrorKind::network,
             "rank " + std::to_string(this->rank()) + " has ended its connection with " + name_of_rank(rank) +
                 " for " + name_of(purpose) + ": " + forged_text(),
             {.rank = rank});
}

void RankContext::throw_forged(int rank, Purpose purpose) const {
  fail_forged(rank, purpose);
  throw_broken(true);
}

void RankContext::fail_on_word(int owner, const std::string& word, std::uint64_t value,
                               const std::string& allowed) const {
  if (broken()) return;
  fail_group(ErrorKind::backend,
             "rank " + std::to_string(rank()) + " found " + std::to_string(value) + " as " + word +
                 " of rank " + std::to_string(owner) + ", which can be " + allowed +
                 "; some process overwrites the memory that the ranks of this machine share",
             {.rank = owner});
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
  throw_disconnected(rank, describe(call), details_of(call));
}

std::vector<int> RankContext::missing_ranks(std::uint64_t sequence, bool local) const {
  std::vector<int> missing;
  for (int r = 0; r < size(); ++r) {
    const ControlPage& theirs = page(r);
    const std::uint64_t arrived = std::max({theirs.arrivals[0].sequence.load(std::memory_order_acquire),
                                            theirs.arrivals[1].sequence.load(std::memory_order_acquire),
                                            theirs.remote.arrived.load(std::memory_order_acquire)});
    if (is_local(r) == local && arrived < sequence) missing.push_back(r);
  }
  return missing;
}

// The rank that a peer waits for in the same operation, if any, and so on; -1 for no peer.
int RankContext::end_of_waiting(std::uint64_t sequence, int peer) const {
  for (int hops = 0; peer >= 0 && hops < size(); ++hops) {
    const RankSnapshot known = snapshot(peer);
    const int next = static_cast<int>(known.waits_for) - 1;
    if (known.arrived != sequence || known.finished >= sequence) break;
    if (next < 0 || next >= size() || next == rank()) break;
    peer = next;
  }
  return peer;
}

void RankContext::add_blame(ErrorDetails& about) const {
  const RankSnapshot mine = snapshot(rank());
  if (mine.arrived > mine.finished) add_blame(about, mine.arrived, static_cast<int>(mine.waits_for) - 1);
}

void RankContext::add_blame(ErrorDetails& about, std::uint64_t sequence, int waited_for) const {
  // A stopped rank holds up all that wait for it; what a leader would tell of other machines is out of date.
  for (const int r : topology().local()) {
    const bool needed = page(r).status.finished.load(std::memory_order_acquire) < sequence;
    if (about.rank < 0 && r != rank() && needed && stopped(r)) about.rank = r;
  }
  about.missing = missing_ranks(sequence, true);
  if (about.missing.empty() && about.rank != topology().leader())
    about.missing = missing_ranks(sequence, false);
  if (about.rank < 0) {
    about.rank = about.missing.empty() ? end_of_waiting(sequence, waited_for) : about.missing.front();
  }
}

Error RankContext::not_done(const std::string& operation, Nanoseconds waited,
                            const ErrorDetails& about) const {
  return {ErrorKind::timeout,
          prefix() + ": " + operation + " was not done after wait(" + limit_text(waited) +
              "); it goes on until its own time limit. Every rank:\n" + report(),
          about};
}

void RankContext::throw_timeout(const Call& call, int waited_for, const std::string& aside) const {
  ErrorDetails about = details_of(call);
  add_blame(about, call.sequence, waited_for);
  // All may have come while the limit passed.
  const std::string whom = about.rank < 0 ? "others" : "rank " + std::to_string(about.rank);
  const std::string text = timeout_text(describe(call), call.timeout,
                                        ": rank " + std::to_string(rank()) + " waited for " + whom + aside);
  fail_group(ErrorKind::timeout, text, about);
  throw Error(ErrorKind::timeout, prefix() + ": " + text, about);
}

void RankContext::throw_broken(bool begun) const {
  const FailureRecord& record = failure_record();
  const Nanoseconds limit = now_ns() + kFailureWriteLimit;
  // Acquire, here and below: the fields of a complete record.
  std::uint32_t state = record.state.load(std::memory_order_acquire);
  while (state >= FailureRecord::kFirstWriter) {
    const std::uint32_t writer = state - FailureRecord::kFirstWriter;
    // Looked at before the record is read again: what the writer stored before it died counts.
    const bool known = writer < shape().size;
    const bool died = known && dead(static_cast<int>(writer));
    const bool over = now_ns() >= limit || !known;
    state = record.state.load(std::memory_order_acquire);
    if (state < FailureRecord::kFirstWriter) break;
    if (died || over) {
      throw Error(died ? ErrorKind::peer_lost : ErrorKind::aborted,
                  prefix() + " is broken: rank " + std::to_string(writer) + (died ? " died" : " stopped") +
                      " while it recorded the cause; make a new group",
                  {.rank = known ? static_cast<int>(writer) : -1});
    }
    sched_yield();
  }
  const std::optional<Failure> first = failure();
  if (!first) throw Error(ErrorKind::aborted, prefix() + " was shut down");
  const ErrorKind kind = first->kind;
  if (kind == ErrorKind::peer_lost) throw Error(kind, prefix() + ": " + first->text, first->about);
  if ((kind == ErrorKind::timeout || kind == ErrorKind::network) && begun) {
    throw Error(kind, prefix() + ": rank " + std::to_string(first->writer) + " gave up: " + first->text,
                first->about);
  }
  throw Error(
      ErrorKind::aborted,
      prefix() + " is broken since an earlier error; make a new group. The first cause: " + first->text,
      details_after(*first));
}

}  // namespace collectives
