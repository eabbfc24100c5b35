// The control page in words.
#include <algorithm>
#include <cstdio>
#include <string>

#include "common/dtype.hpp"
#include "common/operation.hpp"
#include "transport/station.hpp"

namespace collectives {
namespace {

std::string ago(Nanoseconds since) {
  char text[32];
  const Nanoseconds passed = std::max<Nanoseconds>(now_ns() - since, 0);
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(passed) / static_cast<double>(kSecond));
  return text;
}

std::string site_of(const Status& status) {
  std::string text;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::uint32_t before = status.site_version.load(std::memory_order_acquire);
    text.clear();
    for (const auto& character : status.site) {
      const char c = character.load(std::memory_order_relaxed);
      if (c == '\0') break;
      text.push_back(c);
    }
    if ((before & 1) == 0 && status.site_version.load(std::memory_order_acquire) == before) return text;
  }
  return {};
}

std::string mail_of(const Status& status, std::uint32_t peer) {
  const bool sending = status.mail_kind.load(std::memory_order_relaxed) == 1;
  std::string text = sending ? "waits in send to " : "waits in receive from ";
  text += peer == kNobody ? "any rank" : "rank " + std::to_string(peer - 1);
  return text + ", tag " + std::to_string(status.mail_tag.load(std::memory_order_relaxed)) + ", for " +
         ago(status.mail_since.load(std::memory_order_relaxed));
}

}  // namespace

std::string Station::report() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    text += (r == 0 ? "  rank " : "\n  rank ") + std::to_string(r) + ": " + report_of(r);
  }
  return text;
}

std::string Station::report_of(int rank) const {
  const ControlPage& theirs = page(rank);
  const Status& status = theirs.status;
  const std::uint64_t even = theirs.arrivals[0].sequence.load(std::memory_order_acquire);
  const std::uint64_t odd = theirs.arrivals[1].sequence.load(std::memory_order_acquire);
  const Arrival& last = theirs.arrivals[odd > even ? 1 : 0];
  const std::uint64_t arrived = std::max(even, odd);
  const std::uint64_t finished = status.finished.load(std::memory_order_acquire);
  const Nanoseconds entered = status.entered.load(std::memory_order_relaxed);

  std::string text;
  if (departed(rank)) {
    text = "left the group";
  } else if (rank != this->rank() && dead(rank)) {
    text = "dead";
  }
  if (!text.empty()) text += "; ";
  if (arrived == 0) {
    text += "has begun no collective";
  } else {
    text += arrived > finished ? "in " : "finished ";
    // A rank that goes on meanwhile may rewrite the line; then the words are of a later operation, which is
    // as good.
    text += describe(last.what, last.own_count) + " number " + std::to_string(arrived);
    const std::uint32_t waits_for = theirs.collective_bell.publisher.load(std::memory_order_relaxed);
    if (arrived > finished && waits_for != 0) text += ", waits for rank " + std::to_string(waits_for - 1);
    text += arrived > finished ? ", for " + ago(entered) : ", begun " + ago(entered) + " ago";
  }
  const std::uint32_t peer = status.mail_peer.load(std::memory_order_relaxed);
  if (peer != 0) text += "; " + mail_of(status, peer);
  const std::string site = site_of(status);
  if (!site.empty() && (peer != 0 || arrived > finished)) text += ", at " + site;
  return text;
}

}  // namespace collectives
