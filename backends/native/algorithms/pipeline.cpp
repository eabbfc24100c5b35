#include "algorithms/pipeline.hpp"

#include <algorithm>
#include <utility>

namespace collectives {
namespace {

// An agent that waits for sockets and local ranks at the same time looks at the latter this often.
constexpr Nanoseconds kTick = 100'000;

}  // namespace

Pipeline::Pipeline(Round& round, std::vector<int> agents, std::uint64_t chunks, const Form& form)
    : round_(round),
      local_(round.placement().local()),
      machine_(round.placement().machine),
      agents_(std::move(agents)),
      agent_(agents_[static_cast<std::size_t>(machine_)]),
      chunks_(chunks),
      form_(form),
      traffic_(round.station(), round.call(), round.streams()),
      links_(agents_.size()) {}

void Pipeline::run() {
  if (is_agent()) {
    run_agent();
  } else {
    run_member();
  }
}

// ---- items
// ------------------------------------------------------------------------------------------------------

// Phase 1 of the first `depth` chunks; then phase 1 of a chunk and phase 2 of one `depth` earlier in turn;
// then the rest of phase 2.
std::uint64_t Pipeline::first_item(std::uint64_t chunk) const noexcept {
  const std::uint64_t depth = std::min(form_.depth, chunks_);
  return !form_.two_phases || chunk < depth ? chunk : depth + 2 * (chunk - depth);
}

std::uint64_t Pipeline::second_item(std::uint64_t chunk) const noexcept {
  const std::uint64_t depth = std::min(form_.depth, chunks_);
  return chunk < chunks_ - depth ? depth + 2 * chunk + 1 : chunks_ + chunk;
}

Pipeline::Item Pipeline::item(std::uint64_t number) const noexcept {
  const std::uint64_t depth = std::min(form_.depth, chunks_);
  if (!form_.two_phases || number < depth) return {false, number};
  if (number >= 2 * chunks_ - depth) return {true, number - chunks_};
  const std::uint64_t turn = number - depth;
  return turn % 2 == 0 ? Item{false, depth + turn / 2} : Item{true, turn / 2};
}

std::uint64_t Pipeline::sent_items() const noexcept {
  std::uint64_t least = items();
  for (const Link& link : links_) {
    if (link.stream != nullptr) least = std::min(least, link.sent);
  }
  return least;
}

std::uint64_t Pipeline::received_items() const noexcept {
  std::uint64_t least = items();
  for (const Link& link : links_) {
    if (link.stream != nullptr) least = std::min(least, link.received);
  }
  return least;
}

bool Pipeline::all_have(Round::Word word, std::uint64_t chunk) const {
  return std::all_of(local_.begin(), local_.end(), [&](int r) { return round_.has(r, word, chunk); });
}

bool Pipeline::all_drained(std::uint64_t chunk) const {
  return alone() ? finished_ > chunk : all_have(&Progress::drained, chunk);
}

// ---- a rank that is no agent
// ------------------------------------------------------------------------------------

void Pipeline::run_member() {
  const auto await_all = [this](Round::Word word, std::uint64_t chunk) {
    for (const int r : local_) {
      if (r != round_.rank()) round_.await(r, word, chunk);
    }
  };
  for (std::uint64_t i = 0; i < chunks_ + form_.lag + 1; ++i) {
    if (form_.fills && i < chunks_) {
      if (i >= kSlots) {
        await_all(form_.reduces ? &Progress::reduced : &Progress::drained, i - kSlots);
        if (!form_.reduces) round_.await(agent_, &Progress::forwarded, i - kSlots);
      }
      fill(i);
      round_.publish(&Progress::filled, i);
      if (form_.reduces) {
        await_all(&Progress::filled, i);
        if (i >= kSlots) round_.await(agent_, &Progress::forwarded, i - kSlots);
        reduce(i);
        round_.publish(&Progress::reduced, i);
      }
    }
    if (i < form_.lag || i - form_.lag >= chunks_) continue;
    const std::uint64_t c = i - form_.lag;
    round_.await(agent_, &Progress::arrived, c);
    finish(c);
    round_.publish(&Progress::drained, c);
  }
}

// ---- the agent
// --------------------------------------------------------------------------------------------------

void Pipeline::run_agent() {
  for (std::size_t m = 0; m < agents_.size(); ++m) {
    if (static_cast<int>(m) != machine_) links_[m].stream = &traffic_.with(agents_[m]);
  }
  while (finished_ < chunks_ || sent_items() < items()) {
    bool moved = step_local();
    moved = step_links() || moved;
    if (traffic_.pump()) {
      settle();
      moved = true;
    }
    moved = step_chunks() || moved;
    if (!moved) traffic_.wait(wanted(), alone() ? kNever : kTick);
  }
}

bool Pipeline::step_local() {
  if (alone()) {
    filled_ = reduced_ = chunks_;
    return false;
  }
  bool moved = false;
  if (form_.fills && filled_ < chunks_) {
    const std::uint64_t c = filled_;
    const bool room =
        c < kSlots || (all_have(form_.reduces ? &Progress::reduced : &Progress::drained, c - kSlots) &&
                       (form_.reduces || forwarded_ > c - kSlots));
    if (room) {
      fill(c);
      round_.publish(&Progress::filled, filled_++);
      moved = true;
    }
  }
  if (form_.reduces && reduced_ < filled_) {
    const std::uint64_t c = reduced_;
    // Its own slot of partials is read until it is forwarded and, where results are made of it, finished.
    const bool room = c < kSlots || (forwarded_ > c - kSlots && (form_.two_phases || finished_ > c - kSlots));
    if (room && all_have(&Progress::filled, c)) {
      reduce(c);
      round_.publish(&Progress::reduced, reduced_++);
      moved = true;
    }
  }
  return moved;
}

bool Pipeline::step_links() {
  bool moved = false;
  while (
      kept_ < chunks_ && (!form_.two_phases || kept_ < combined_ + form_.depth) &&
      (alone() || !form_.fills || all_have(form_.reduces ? &Progress::reduced : &Progress::filled, kept_))) {
    keep(kept_++);
    moved = true;
  }
  for (std::size_t m = 0; m < links_.size(); ++m) {
    Link& link = links_[m];
    if (link.stream == nullptr) continue;
    const int machine = static_cast<int>(m);
    while (link.sending < items()) {
      const Item next = item(link.sending);
      if (next.second ? combined_ <= next.chunk : kept_ <= next.chunk) break;
      if (next.second) {
        send_second(next.chunk, machine);
      } else {
        send_first(next.chunk, machine);
      }
      link.sends.push_back({link.sending++, link.stream->send(nullptr, 0)});
      moved = true;
    }
    while (link.receiving < items()) {
      const Item next = item(link.receiving);
      if (next.second ? !results_have_room(next.chunk) : !first_has_room(next.chunk)) break;
      if (next.second) {
        receive_second(next.chunk, machine);
      } else {
        receive_first(next.chunk, machine);
      }
      link.receives.push_back({link.receiving++, link.stream->receive(nullptr, 0)});
      moved = true;
    }
  }
  if (moved) settle();
  return moved;
}

void Pipeline::settle() {
  for (Link& link : links_) {
    if (link.stream == nullptr) continue;
    for (; !link.sends.empty() && link.sends.front().position <= link.stream->sent();
         link.sends.pop_front()) {
      link.sent = link.sends.front().item + 1;
    }
    for (; !link.receives.empty() && link.receives.front().position <= link.stream->received();
         link.receives.pop_front()) {
      link.received = link.receives.front().item + 1;
    }
  }
}

bool Pipeline::step_chunks() {
  bool moved = false;
  const std::uint64_t sent = sent_items();
  const std::uint64_t received = received_items();
  for (; forwarded_ < chunks_ && sent > first_item(forwarded_); ++forwarded_) {
    if (!alone()) round_.publish(&Progress::forwarded, forwarded_);
    moved = true;
  }
  while (combined_ < chunks_ && kept_ > combined_ && received > first_item(combined_) &&
         results_have_room(combined_)) {
    combine(combined_++);
    moved = true;
  }
  while (arrived_ < combined_ && (!form_.two_phases || received > second_item(arrived_))) {
    if (!alone()) round_.publish(&Progress::arrived, arrived_);
    ++arrived_;
    moved = true;
  }
  while (finished_ < arrived_) {
    finish(finished_);
    if (!alone()) round_.publish(&Progress::drained, finished_);
    ++finished_;
    moved = true;
  }
  return moved;
}

// The rank that this one has waited for longest, as far as one can tell.
int Pipeline::wanted() const {
  int rank = agent_;
  std::uint64_t least = items() + 1;
  for (std::size_t m = 0; m < links_.size(); ++m) {
    const Link& link = links_[m];
    if (link.stream == nullptr || std::min(link.received, link.sent) >= least) continue;
    least = std::min(link.received, link.sent);
    rank = agents_[m];
  }
  return rank;
}

}  // namespace collectives
