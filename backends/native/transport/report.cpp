// The control page in words.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <string>

#include "common/dtype.hpp"
#include "common/operation.hpp"
#include "transport/snapshot.hpp"
#include "transport/station.hpp"

namespace collectives {
namespace {

std::string ago(Nanoseconds since) {
  char text[32];
  const Nanoseconds passed = std::max<Nanoseconds>(now_ns() - since, 0);
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(passed) / static_cast<double>(kSecond));
  return text;
}

std::string mail_of(const Snapshot& rank) {
  const bool sending = rank.mail_kind == 1;
  std::string text = sending ? "waits in send to " : "waits in receive from ";
  text += rank.mail_peer == kNobody ? "any rank" : "rank " + std::to_string(rank.mail_peer - 1);
  return text + ", tag " + std::to_string(rank.mail_tag) + ", for " + ago(rank.mail_since);
}

}  // namespace

Snapshot Station::snapshot(int rank) const {
  const ControlPage& theirs = page(rank);
  Snapshot known = snapshot_of(theirs);
  const Heard& heard = theirs.heard;
  const std::uint64_t arrived = heard.arrived.load(std::memory_order_acquire);
  if (arrived <= known.arrived) {
    // The meeting brings newer news than the herald, but not what the rank waits for.
    if (arrived < known.arrived || is_local(rank)) return known;
  }
  known.arrived = arrived;
  std::array<std::uint64_t, 3> words{};
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = heard.what[i].load(std::memory_order_relaxed);
  known.what = std::bit_cast<Fingerprint>(words);
  known.own_count = heard.own_count.load(std::memory_order_relaxed);
  known.waits_for = heard.waits_for.load(std::memory_order_relaxed);
  return known;
}

std::string Station::name_of_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (placement().several()) text += " on '" + placement().host_of(rank) + "'";
  return text;
}

std::string Station::report() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    text += (r == 0 ? "  " : "\n  ") + name_of_rank(r) + ": " + report_of(r);
  }
  return text;
}

std::string Station::report_of(int rank) const {
  const Snapshot known = snapshot(rank);
  std::string text;
  if (departed(rank)) {
    text = "left the group; ";
  } else if (unreachable(rank)) {
    text = "cannot be reached; ";
  } else if (rank != this->rank() && dead(rank)) {
    text = "dead; ";
  }
  // Of a remote rank that has not stood still since, a leader knows only that it has come.
  const bool passing =
      !is_local(rank) && page(rank).heard.arrived.load(std::memory_order_acquire) < known.arrived;
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
