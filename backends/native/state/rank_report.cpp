// Texts for reports and errors: what every rank waits in or did last.
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

std::string ago(Nanoseconds since) {
  char text[32];
  const Nanoseconds passed = std::max<Nanoseconds>(now_ns() - since, 0);
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(passed) / static_cast<double>(kSecond));
  return text;
}

std::string mail_of(const RankSnapshot& rank) {
  const bool sending = rank.mail_direction == static_cast<std::uint32_t>(MailDirection::send);
  std::string text = sending ? "waits in send to " : "waits in receive from ";
  text += rank.mail_peer == kNobody ? "any rank" : "rank " + std::to_string(rank.mail_peer - 1);
  return text + ", tag " + std::to_string(rank.mail_tag) + ", for " + ago(rank.mail_since);
}

}  // namespace

RankSnapshot RankContext::snapshot(int rank) const {
  const ControlPage& theirs = page(rank);
  RankSnapshot known = snapshot_of(theirs);
  const RemoteStatus& remote = theirs.remote;
  const std::uint64_t arrived = remote.arrived.load(std::memory_order_acquire);
  if (arrived <= known.arrived) {
    // An arrival is newer than what the control channel sent, but does not tell what the rank waits for.
    if (arrived < known.arrived || is_local(rank)) return known;
  }
  known.arrived = arrived;
  std::array<std::uint64_t, 3> words{};
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = remote.what[i].load(std::memory_order_relaxed);
  known.what = std::bit_cast<Fingerprint>(words);
  known.own_count = remote.own_count.load(std::memory_order_relaxed);
  known.waits_for = remote.waits_for.load(std::memory_order_relaxed);
  return known;
}

std::string RankContext::name_of_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (topology().spans_machines()) text += " on '" + topology().host_of(rank) + "'";
  return text;
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

}  // namespace collectives
