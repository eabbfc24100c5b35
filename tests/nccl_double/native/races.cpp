#include "races.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>
#include <utility>

namespace nccl_double {

namespace {

constexpr std::size_t kTold = 5;

struct Mark {
  Place place;  // its number is 0 for no access
  std::string what;
};

// Whether an access, or none, is done before another begins.
bool comes_before(const Mark& one, const Mark& other) {
  if (one.place.number == 0) return true;
  const auto found = other.place.clock->find(one.place.sequence);
  return found != other.place.clock->end() && found->second >= one.place.number;
}

// What was last done to the bytes of a range.
struct Cell {
  std::uintptr_t end;
  Mark write;
  std::vector<Mark> reads;  // since the write, the last of each sequence
};

std::atomic<std::intptr_t> sequences{0};

struct Watch {
  std::mutex mutex;
  bool on = false;
  std::uint64_t life = 0;
  std::map<std::uintptr_t, Cell> memory;  // by begin; cells do not overlap
  std::map<std::intptr_t, Clock> streams;
  std::intptr_t next_owners = new_sequence();
  std::map<std::pair<std::intptr_t, std::size_t>, std::intptr_t> together;  // sequences, by stream and place
  Clock counts;                                                             // accesses of each sequence
  Clock known;                                                              // to any thread
  Clock everywhere;                                                         // known to all
  std::size_t found = 0;
  std::vector<std::string> told;
};

// Never destroyed: threads of streams may outlive the end of main.
Watch& watch() {
  static auto* const all = new Watch;
  return *all;
}

struct Host {
  std::intptr_t sequence = new_sequence();
  std::uint64_t life = 0;
  Clock clock;
};

// The calling thread. A new one knows what the others did, as whoever started it may have waited for them.
Host& host() {
  thread_local Host own;
  if (own.life != watch().life) {
    own.life = watch().life;
    own.clock = watch().known;
  }
  join(own.clock, watch().everywhere);
  return own;
}

Clock& clock_at(std::intptr_t stream) {
  if (stream == 0) return host().clock;
  Clock& clock = watch().streams[stream];
  join(clock, host().clock);
  return clock;
}

// Makes cells begin and end at an address.
void split(std::uintptr_t at) {
  auto& memory = watch().memory;
  auto cell = memory.upper_bound(at);
  if (cell == memory.begin()) return;
  --cell;
  if (cell->first == at || cell->second.end <= at) return;
  Cell rest = cell->second;
  cell->second.end = at;
  memory.emplace(at, std::move(rest));
}

void tell(const Mark& before, const Mark& now, bool wrote, bool writes, std::uintptr_t at,
          std::size_t bytes) {
  if (++watch().found > kTold) return;
  const auto name = [](const Mark& one) {
    std::ostringstream text;
    text << one.what << " (" << (one.place.sequence > 0 ? "stream " : "sequence ") << std::hex
         << one.place.sequence << ")";
    return text.str();
  };
  std::ostringstream text;
  text << name(now) << (writes ? " writes " : " reads ") << bytes << " bytes at " << std::hex << at
       << " that " << name(before) << (wrote ? " writes" : " reads")
       << ", and nothing says which comes first";
  watch().told.push_back(text.str());
}

void touch(const Mark& mark, const Range& range) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  auto& memory = watch().memory;
  bool told = false;  // once for a range
  // An access that became known late may come before those that are noted.
  const auto compare = [&](const Mark& other, bool wrote, std::uintptr_t at) {
    if (told || comes_before(other, mark) || comes_before(mark, other)) return;
    tell(other, mark, wrote, range.writes, at, range.end - range.begin);
    told = true;
  };
  for (std::uintptr_t at = range.begin; at < range.end;) {
    auto cell = memory.lower_bound(at);
    if (cell == memory.end() || cell->first > at) {
      const std::uintptr_t end = cell == memory.end() ? range.end : std::min(cell->first, range.end);
      cell = memory.emplace_hint(cell, at, Cell{end, {}, {}});
    }
    Cell& here = cell->second;
    compare(here.write, true, at);
    if (range.writes) {
      for (const Mark& read : here.reads) compare(read, false, at);
      if (comes_before(here.write, mark) || !comes_before(mark, here.write)) {
        here.write = mark;
        here.reads.clear();
      }
    } else {
      std::erase_if(here.reads, [&](const Mark& read) { return read.place.sequence == mark.place.sequence; });
      here.reads.push_back(mark);
    }
    at = here.end;
  }
}

void forget(std::uintptr_t begin, std::uintptr_t end) {
  if (begin >= end) return;
  split(begin);
  split(end);
  watch().memory.erase(watch().memory.lower_bound(begin), watch().memory.lower_bound(end));
}

Place note(Clock clock, std::intptr_t sequence, const Accesses& accesses) {
  const std::uint64_t number = ++watch().counts[sequence];
  clock[sequence] = number;
  const Mark mark{{sequence, number, watch().life, std::make_shared<const Clock>(std::move(clock))},
                  accesses.what};
  for (const Range& range : accesses.ranges) touch(mark, range);
  return mark.place;
}

}  // namespace

std::intptr_t new_sequence() { return --sequences; }  // beside those of streams, which have positive numbers

void join(Clock& into, const Clock& from) {
  for (const auto& [sequence, number] : from) {
    std::uint64_t& own = into[sequence];
    own = std::max(own, number);
  }
}

void watch_accesses(bool on) {
  Watch& all = watch();
  const std::lock_guard lock(all.mutex);
  all.on = on;
  ++all.life;
  all.memory.clear();
  all.streams.clear();
  all.known.clear();
  all.everywhere.clear();
  all.found = 0;
  all.told.clear();
}

Clock clock_of(std::intptr_t stream) {
  const std::lock_guard lock(watch().mutex);
  return watch().on ? clock_at(stream) : Clock();
}

void follow(std::intptr_t stream, const Clock& clock) {
  const std::lock_guard lock(watch().mutex);
  if (!watch().on) return;
  join(clock_at(stream), clock);
  if (stream == 0) join(watch().known, clock);
}

void follow_everywhere(const Clock& clock) {
  const std::lock_guard lock(watch().mutex);
  if (watch().on) join(watch().everywhere, clock);
}

Place access(std::intptr_t stream, const std::vector<Accesses>& operations) {
  const std::lock_guard lock(watch().mutex);
  if (!watch().on) return {};
  Clock& clock = clock_at(stream);
  const std::intptr_t own = stream == 0 ? host().sequence : stream;
  if (operations.size() == 1) {
    Place place = note(clock, own, operations.front());
    clock = *place.clock;
    return place;
  }
  const Clock before = clock;
  Place last;
  for (std::size_t number = 0; number < operations.size(); ++number) {
    std::intptr_t& sequence = watch().together[{own, number}];
    if (sequence == 0) sequence = new_sequence();
    last = note(before, sequence, operations[number]);
    join(clock, *last.clock);
  }
  return last;
}

Place access_behind(Clock clock, std::intptr_t sequence, const Accesses& accesses) {
  const std::lock_guard lock(watch().mutex);
  if (!watch().on) return {sequence, 0, 0, std::make_shared<const Clock>(std::move(clock))};
  return note(std::move(clock), sequence, accesses);
}

void access_at(const Place& place, const Accesses& accesses) {
  const std::lock_guard lock(watch().mutex);
  if (!watch().on || place.number == 0 || place.life != watch().life) return;
  for (const Range& range : accesses.ranges) touch({place, accesses.what}, range);
}

void forget_accesses(std::uintptr_t begin, std::uintptr_t end) {
  const std::lock_guard lock(watch().mutex);
  if (watch().on) forget(begin, end);
}

void give_back(const std::vector<std::intptr_t>& streams, const Accesses& accesses) {
  const std::lock_guard lock(watch().mutex);
  if (!watch().on) return;
  Clock clock = host().clock;
  for (const std::intptr_t stream : streams) join(clock, watch().streams[stream]);
  note(std::move(clock), watch().next_owners, accesses);
  for (const Range& range : accesses.ranges) forget(range.begin, range.end);
}

std::string take_races() {
  const std::lock_guard lock(watch().mutex);
  std::ostringstream text;
  for (const std::string& one : std::exchange(watch().told, {})) text << one << '\n';
  const std::size_t found = std::exchange(watch().found, 0);
  if (found > kTold) text << "and " << found - kTold << " more\n";
  return text.str();
}

}  // namespace nccl_double
