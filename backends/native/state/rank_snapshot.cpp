#include "state/rank_snapshot.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace collectives {
namespace {

// The words of an arrival, which its rank may be rewriting for a later operation: what is read then belongs
// to no operation, so it counts only where it has not changed for a while. The race is intended.
__attribute__((no_sanitize("thread"))) void peek(const Arrival& arrival, RankSnapshot& snapshot) {
  snapshot.what = arrival.what;
  snapshot.own_count = arrival.own_count;
}

}  // namespace

std::string site_of(const Status& status) {
  std::string text;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::uint32_t before = status.site_version.load(std::memory_order_acquire);
    text.clear();
    for (const auto& character : status.site) {
      const char c = character.load(std::memory_order_acquire);
      if (c == '\0') break;
      text.push_back(c);
    }
    if ((before & 1) == 0 && status.site_version.load(std::memory_order_acquire) == before) return text;
  }
  return {};
}

void raise_to(std::atomic<std::uint64_t>& word, std::uint64_t value) noexcept {
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  // Release: who reads it knows that the rank needs nothing of earlier operations.
  while (seen < value && !word.compare_exchange_weak(seen, value, std::memory_order_release)) {
  }
}

RankSnapshot snapshot_of(const ControlPage& page) {
  const Status& status = page.status;
  RankSnapshot now;
  now.presence = status.presence.load(std::memory_order_acquire);
  now.finished = status.finished.load(std::memory_order_acquire);
  const std::uint64_t even = page.arrivals[0].sequence.load(std::memory_order_acquire);
  const std::uint64_t odd = page.arrivals[1].sequence.load(std::memory_order_acquire);
  now.arrived = std::max(even, odd);
  peek(page.arrivals[odd > even ? 1 : 0], now);
  now.entered = status.entered.load(std::memory_order_relaxed);
  now.process = status.process.load(std::memory_order_relaxed);
  now.mail_peer = status.mail_peer.load(std::memory_order_relaxed);
  now.mail_direction = status.mail_direction.load(std::memory_order_relaxed);
  now.mail_tag = status.mail_tag.load(std::memory_order_relaxed);
  now.mail_since = status.mail_since.load(std::memory_order_relaxed);
  now.waits_for = page.collective_doorbell.publisher.load(std::memory_order_relaxed);
  const std::string site = site_of(status);
  std::memcpy(now.site, site.data(), std::min(site.size(), sizeof(now.site) - 1));
  const RemoteStatus& remote = page.remote;
  const std::uint64_t arrived = remote.arrived.load(std::memory_order_acquire);
  // An arrival is newer than what the control channel sent, but does not tell what the rank waits for.
  if (arrived == 0 || arrived < now.arrived) return now;
  now.arrived = arrived;
  std::array<std::uint64_t, 3> words{};
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = remote.what[i].load(std::memory_order_relaxed);
  now.what = std::bit_cast<Fingerprint>(words);
  now.own_count = remote.own_count.load(std::memory_order_relaxed);
  now.waits_for = remote.waits_for.load(std::memory_order_relaxed);
  return now;
}

void store_snapshot(const RankSnapshot& snapshot, ControlPage& mirror) {
  Status& status = mirror.status;
  raise_to(status.finished, snapshot.finished);
  status.entered.store(snapshot.entered, std::memory_order_relaxed);
  status.process.store(snapshot.process, std::memory_order_relaxed);
  status.mail_direction.store(snapshot.mail_direction, std::memory_order_relaxed);
  status.mail_tag.store(snapshot.mail_tag, std::memory_order_relaxed);
  status.mail_since.store(snapshot.mail_since, std::memory_order_relaxed);
  status.mail_peer.store(snapshot.mail_peer, std::memory_order_relaxed);
  status.site_version.fetch_add(1, std::memory_order_acq_rel);
  for (std::size_t i = 0; i < kSiteBytes; ++i)
    status.site[i].store(snapshot.site[i], std::memory_order_release);
  status.site_version.fetch_add(1, std::memory_order_release);
  RemoteStatus& remote = mirror.remote;
  const auto words = std::bit_cast<std::array<std::uint64_t, 3>>(snapshot.what);
  for (std::size_t i = 0; i < words.size(); ++i) remote.what[i].store(words[i], std::memory_order_relaxed);
  remote.own_count.store(snapshot.own_count, std::memory_order_relaxed);
  remote.waits_for.store(snapshot.waits_for, std::memory_order_relaxed);
  remote.arrived.store(snapshot.arrived, std::memory_order_release);
  // Release, last: who sees that the rank has gone sees what it did before.
  status.presence.store(snapshot.presence, std::memory_order_release);
}

}  // namespace collectives
