#include "algorithms/pipeline.hpp"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace collectives {
namespace {

// A gateway that waits for sockets and local ranks at the same time checks the latter this often.
constexpr Nanoseconds kLocalCheckEvery = 100'000;

}  // namespace

Pipeline::Pipeline(CollectiveContext& collective, std::vector<Gateways> channels, std::uint64_t chunks,
                   const Stages& stages)
    : collective_(collective),
      local_(collective.topology().local()),
      machine_(collective.topology().machine),
      channels_(std::move(channels)),
      channel_(static_cast<std::size_t>(std::find_if(channels_.begin(), channels_.end(),
                                                     [this](const Gateways& gateways) {
                                                       return gateways[static_cast<std::size_t>(machine_)] ==
                                                              collective_.rank();
                                                     }) -
                                        channels_.begin())),
      chunks_(chunks),
      turns_((chunks + channels_.size() - 1 - std::min(channel_, channels_.size() - 1)) / channels_.size()),
      stages_(stages),
      session_(collective.rank_context(), collective.call(), collective.streams()),
      links_(machines()) {}

void Pipeline::run() {
  collective_.check_chunks(chunks_);
  if (is_gateway()) {
    run_gateway();
  } else {
    run_member();
  }
}

// ---- items

// Phase 1 of the first `depth` turns; then alternately phase 1 of a turn and phase 2 of the one `depth`
// earlier; then the rest of phase 2.
std::uint64_t Pipeline::first_item(std::uint64_t turn) const noexcept {
  const std::uint64_t depth = std::min(stages_.depth, turns_);
  return !stages_.two_phases || turn < depth ? turn : depth + 2 * (turn - depth);
}

std::uint64_t Pipeline::second_item(std::uint64_t turn) const noexcept {
  const std::uint64_t depth = std::min(stages_.depth, turns_);
  return turn < turns_ - depth ? depth + 2 * turn + 1 : turns_ + turn;
}

Pipeline::Item Pipeline::item(std::uint64_t number) const noexcept {
  const std::uint64_t depth = std::min(stages_.depth, turns_);
  if (!stages_.two_phases || number < depth) return {false, number};
  if (number >= 2 * turns_ - depth) return {true, number - turns_};
  const std::uint64_t alternate = number - depth;
  return alternate % 2 == 0 ? Item{false, depth + alternate / 2} : Item{true, alternate / 2};
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

bool Pipeline::all_have(CollectiveContext::Word word, std::uint64_t chunk) const {
  return std::all_of(local_.begin(), local_.end(), [&](int r) { return collective_.has(r, word, chunk); });
}

bool Pipeline::gateway_has(CollectiveContext::Word word, std::uint64_t chunk, std::uint64_t own) const {
  const int rank = gateway(chunk);
  return rank == collective_.rank() ? own > turn(chunk) : collective_.has(rank, word, chunk);
}

bool Pipeline::all_drained(std::uint64_t chunk) const {
  return single_rank() ? finished_ > chunk : all_have(&Progress::drained, chunk);
}

// ---- a rank that is no gateway

void Pipeline::run_member() {
  const auto await_all = [this](CollectiveContext::Word word, std::uint64_t chunk) {
    for (const int r : local_) {
      if (r != collective_.rank()) collective_.await(r, word, chunk);
    }
  };
  for (std::uint64_t i = 0; i < chunks_ + stages_.lag + 1; ++i) {
    if (stages_.fills && i < chunks_) {
      if (i >= kSlots) {
        await_all(stages_.reduces ? &Progress::reduced : &Progress::drained, i - kSlots);
        if (!stages_.reduces) collective_.await(gateway(i - kSlots), &Progress::forwarded, i - kSlots);
      }
      fill(i);
      collective_.publish(&Progress::filled, i);
      if (stages_.reduces) {
        await_all(&Progress::filled, i);
        if (i >= kSlots) collective_.await(gateway(i - kSlots), &Progress::forwarded, i - kSlots);
        reduce(i);
        collective_.publish(&Progress::reduced, i);
      }
    }
    if (i < stages_.lag || i - stages_.lag >= chunks_) continue;
    const std::uint64_t c = i - stages_.lag;
    collective_.await(gateway(c), &Progress::arrived, c);
    finish(c);
    collective_.publish(&Progress::drained, c);
  }
}

// ---- the gateway

void Pipeline::run_gateway() {
  const Gateways& peers = channels_[channel_];
  for (std::size_t m = 0; m < peers.size(); ++m) {
    if (static_cast<int>(m) != machine_) links_[m].stream = &session_.with(peers[m]);
  }
  Interrupt* const interrupt = collective_.call().interrupt;
  // Waiting for a local rank: this core is offered to it for as long as one would spin.
  const auto patience = static_cast<Nanoseconds>(collective_.tuning().spin_us) * 1000;
  Nanoseconds idle_since = 0;
  while (finished_ < chunks_ || sent_items() < items()) {
    bool moved = step_local();
    moved = step_links() || moved;
    if (session_.pump()) {
      collect_completions();
      moved = true;
    }
    moved = step_chunks() || moved;
    if (moved) {
      idle_since = 0;
      continue;
    }
    if (!single_rank()) {
      const Nanoseconds now = now_ns();
      if (idle_since == 0) {
        idle_since = now;
        if (interrupt != nullptr) interrupt->blocks();
      }
      if (now - idle_since < patience) {
        sched_yield();
        continue;
      }
    }
    session_.wait(slowest_gateway(), single_rank() ? kNever : kLocalCheckEvery);
  }
}

bool Pipeline::step_local() {
  if (single_rank()) {
    filled_ = reduced_ = chunks_;
    return false;
  }
  bool moved = false;
  if (stages_.fills && filled_ < chunks_) {
    const std::uint64_t c = filled_;
    const bool room =
        c < kSlots || (all_have(stages_.reduces ? &Progress::reduced : &Progress::drained, c - kSlots) &&
                       (stages_.reduces || gateway_has(&Progress::forwarded, c - kSlots, forwarded_)));
    if (room) {
      fill(c);
      collective_.publish(&Progress::filled, filled_++);
      moved = true;
    }
  }
  if (stages_.reduces && reduced_ < filled_) {
    const std::uint64_t c = reduced_;
    // The own slot of partials is read until it is forwarded and, where results are made of it, finished.
    const bool room = c < kSlots || (gateway_has(&Progress::forwarded, c - kSlots, forwarded_) &&
                                     (stages_.two_phases || finished_ > c - kSlots));
    if (room && all_have(&Progress::filled, c)) {
      reduce(c);
      collective_.publish(&Progress::reduced, reduced_++);
      moved = true;
    }
  }
  return moved;
}

bool Pipeline::step_links() {
  bool moved = false;
  while (kept_ < turns_ && (!stages_.two_phases || kept_ < combined_ + stages_.depth) &&
         (single_rank() || !stages_.fills ||
          all_have(stages_.reduces ? &Progress::reduced : &Progress::filled, chunk_of(kept_)))) {
    keep(chunk_of(kept_++));
    moved = true;
  }
  for (std::size_t m = 0; m < links_.size(); ++m) {
    Link& link = links_[m];
    if (link.stream == nullptr) continue;
    const int machine = static_cast<int>(m);
    while (link.sending < items()) {
      const Item next = item(link.sending);
      if (next.second ? combined_ <= next.turn : kept_ <= next.turn) break;
      if (next.second) {
        send_second(chunk_of(next.turn), machine);
      } else {
        send_first(chunk_of(next.turn), machine);
      }
      link.sends.push_back({link.sending++, link.stream->send(nullptr, 0)});
      moved = true;
    }
    while (link.receiving < items()) {
      const Item next = item(link.receiving);
      const std::uint64_t c = chunk_of(next.turn);
      if (next.second ? !results_have_room(c) : !first_has_room(c)) break;
      if (next.second) {
        receive_second(c, machine);
      } else {
        receive_first(c, machine);
      }
      link.receives.push_back({link.receiving++, link.stream->receive(nullptr, 0)});
      moved = true;
    }
  }
  if (moved) collect_completions();
  return moved;
}

void Pipeline::collect_completions() {
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
  for (; forwarded_ < turns_ && sent > first_item(forwarded_); ++forwarded_) {
    if (!single_rank()) collective_.publish(&Progress::forwarded, chunk_of(forwarded_));
    moved = true;
  }
  while (combined_ < turns_ && kept_ > combined_ && received > first_item(combined_) &&
         results_have_room(chunk_of(combined_))) {
    combine(chunk_of(combined_++));
    moved = true;
  }
  while (arrived_ < combined_ && (!stages_.two_phases || received > second_item(arrived_))) {
    if (!single_rank()) collective_.publish(&Progress::arrived, chunk_of(arrived_));
    ++arrived_;
    moved = true;
  }
  while (finished_ < chunks_ && gateway_has(&Progress::arrived, finished_, arrived_)) {
    finish(finished_);
    if (!single_rank()) collective_.publish(&Progress::drained, finished_);
    ++finished_;
    moved = true;
  }
  return moved;
}

// The rank that this one has waited for longest, as far as one can tell.
int Pipeline::slowest_gateway() const {
  int rank = gateway(std::min(finished_, chunks_ - 1));
  std::uint64_t least = items();
  for (std::size_t m = 0; m < links_.size(); ++m) {
    const Link& link = links_[m];
    if (link.stream == nullptr || std::min(link.received, link.sent) >= least) continue;
    least = std::min(link.received, link.sent);
    rank = channels_[channel_][m];
  }
  return rank;
}

}  // namespace collectives
