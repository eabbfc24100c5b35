// A copy of what a rank publishes for reports, in a form that one machine can send to another.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/clock.hpp"
#include "state/control_page.hpp"

namespace collectives {

// The fields of Status and RemoteStatus under the same names. Times are those of the clock of the machine
// that holds it; `to_ages` makes them ages, which another machine understands, and `from_ages` times again.
struct RankSnapshot {
  std::uint64_t arrived = 0;
  Fingerprint what;
  std::uint64_t own_count = 0;
  std::uint64_t finished = 0;
  Nanoseconds entered = 0;
  Nanoseconds mail_since = 0;
  std::uint32_t presence = 0;
  std::uint32_t waits_for = 0;
  std::int32_t process = 0;
  std::uint32_t mail_peer = 0;
  std::uint32_t mail_direction = 0;
  std::uint32_t mail_tag = 0;
  char site[kSiteBytes] = {};

  bool operator==(const RankSnapshot&) const = default;

  void to_ages(Nanoseconds now) noexcept {
    entered = difference(now, entered);
    mail_since = difference(now, mail_since);
  }
  void from_ages(Nanoseconds now) noexcept { to_ages(now); }

 private:
  // Of words that another process wrote: they may be of any value, so the difference wraps.
  static Nanoseconds difference(Nanoseconds now, Nanoseconds then) noexcept {
    return static_cast<Nanoseconds>(static_cast<std::uint64_t>(now) - static_cast<std::uint64_t>(then));
  }
};
static_assert(std::is_trivially_copyable_v<RankSnapshot> && sizeof(RankSnapshot) == 184);

RankSnapshot snapshot_of(const ControlPage& page);

// Writes it to a mirror.
void store_snapshot(const RankSnapshot& snapshot, ControlPage& mirror);

// Raises a word that several threads of one leader write, with release.
void raise_to(std::atomic<std::uint64_t>& word, std::uint64_t value) noexcept;

// The source line of a status; empty where it changes all the time.
std::string site_of(const Status& status);

}  // namespace collectives
