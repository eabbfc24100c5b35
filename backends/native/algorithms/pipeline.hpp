// Long messages between machines, chunk by chunk.
//
// Chunks are dealt out in turn to channels, as many as the smallest machine has ranks. A channel has a
// gateway on each machine, the rank that exchanges this channel's chunks with the other machines, so that all
// ranks take part in the exchange, each with one stream to each other machine. Machines exchange in two
// phases: in the first each gateway sends the others what they need of its machine's chunk; in the second,
// where there is one, it sends them what it made of what it received. A share is one machine's part of a
// chunk, a slice one local rank's.
//
// Local ranks pass contributions to their gateway, and take results from it, through regions of their staging
// buffers that hold kSlots chunks each:
//   fill c      put a contribution into the own region               -> filled
//   reduce c    make a slice of the machine's partial of it          -> reduced
//   (the gateway: send it, phase 1                                   -> forwarded)
//   (the gateway: combine the partials of all machines; phase 2      -> arrived)
//   finish c    take the results from the gateway's region           -> drained
// Where a machine has one rank there are no regions: its gateway works straight on the tensors.
//
// Two gateways send each other items in one order that both know, so that nothing in a stream needs a header:
// phase 1 of the channel's chunks, and phase 2 of each after phase 1 of the one that comes `depth` turns
// later. So both directions of a link are busy, with as much in flight as that many chunks hold. No cycle of
// waiting can arise: an item waits only for items of earlier chunks and for local ranks, which wait for
// nothing later (a rank that is no gateway finishes chunk c only after its part in chunk c + lag, on which
// phase 2 of chunk c waits).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "algorithms/collective_context.hpp"
#include "transport/stream_pool.hpp"

namespace collectives {

class Pipeline {
 public:
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Returns when this rank's part is done.
  void run();

  // Chunks that a region holds.
  static constexpr std::uint64_t kSlots = 4;
  // Bytes of all regions of a rank. Small enough that those of three operations in a row fit into the staging
  // buffer: see collective_context.hpp.
  static constexpr std::size_t kRegionBytes = 1280 << 10;
  // Turns of a channel between the phases, where the first has places of its own; else less than kSlots.
  static constexpr std::uint64_t kDepth = 16;

 protected:
  struct Stages {
    bool fills = false;    // local ranks contribute
    bool reduces = false;  // and reduce what they contributed
    bool two_phases = false;
    std::uint64_t lag = 0;         // chunks that a rank goes on before it finishes one
    std::uint64_t depth = kDepth;  // turns between the phases; the same on all machines
  };

  // The gateways of a channel, by machine.
  using Gateways = std::vector<int>;

  Pipeline(CollectiveContext& collective, std::vector<Gateways> channels, std::uint64_t chunks,
           const Stages& stages);
  virtual ~Pipeline() = default;

  // What a rank does for itself. Contributions of all local ranks are there when `reduce` is called, and
  // everything of the chunk when `finish` is.
  virtual void fill(std::uint64_t) {}
  virtual void reduce(std::uint64_t) {}
  virtual void finish(std::uint64_t) = 0;

  // What a gateway does for its machine. `keep` comes once the machine's contribution to a chunk is complete
  // and before anything of it is sent; `combine` once all of phase 1 has been received.
  virtual void keep(std::uint64_t) {}
  virtual void combine(std::uint64_t) {}
  // Queue what goes to, or comes from, that machine.
  virtual void send_first(std::uint64_t chunk, int machine) = 0;
  virtual void receive_first(std::uint64_t chunk, int machine) = 0;
  virtual void send_second(std::uint64_t, int) {}
  virtual void receive_second(std::uint64_t, int) {}
  // Whether the place of phase 1, or of results, is free.
  virtual bool first_has_room(std::uint64_t chunk) const = 0;
  virtual bool results_have_room(std::uint64_t chunk) const = 0;

  bool single_rank() const noexcept { return local_.size() == 1; }
  std::size_t machines() const noexcept { return channels_.front().size(); }
  // The rank of this machine that exchanges a chunk.
  int gateway(std::uint64_t chunk) const noexcept {
    return channels_[chunk % channels_.size()][static_cast<std::size_t>(machine_)];
  }
  bool is_gateway() const noexcept { return channel_ < channels_.size(); }
  // How many chunks of the same channel come before this one.
  std::uint64_t turn(std::uint64_t chunk) const noexcept { return chunk / channels_.size(); }
  // Chunks of which a gateway holds results: kSlots of its channel.
  std::uint64_t result_slots() const noexcept { return kSlots * channels_.size(); }
  Stream& stream(int machine) { return *links_[static_cast<std::size_t>(machine)].stream; }
  // Of the gateway: whether all local ranks have taken their results of the chunk.
  bool all_drained(std::uint64_t chunk) const;
  bool second_has_left(std::uint64_t chunk) const { return sent_items() > second_item(turn(chunk)); }
  // Turns of the own channel.
  std::uint64_t combined() const noexcept { return combined_; }
  std::uint64_t finished() const noexcept { return finished_; }

  CollectiveContext& collective_;
  const std::vector<int>& local_;
  const int machine_;

 private:
  struct Sent {
    std::uint64_t item;
    std::uint64_t position;
  };
  struct Link {
    Stream* stream = nullptr;   // none for the own machine
    std::uint64_t sending = 0;  // next item to queue
    std::uint64_t receiving = 0;
    std::deque<Sent> sends;  // queued, not done
    std::deque<Sent> receives;
    std::uint64_t sent = 0;  // items done
    std::uint64_t received = 0;
  };

  void run_member();
  void run_gateway();
  bool step_local();
  bool step_links();
  bool step_chunks();
  void collect_completions();
  int slowest_gateway() const;

  std::uint64_t chunk_of(std::uint64_t turn) const noexcept { return turn * channels_.size() + channel_; }
  std::uint64_t items() const noexcept { return stages_.two_phases ? 2 * turns_ : turns_; }
  std::uint64_t first_item(std::uint64_t turn) const noexcept;
  std::uint64_t second_item(std::uint64_t turn) const noexcept;
  struct Item {
    bool second;
    std::uint64_t turn;
  };
  Item item(std::uint64_t number) const noexcept;
  std::uint64_t sent_items() const noexcept;
  std::uint64_t received_items() const noexcept;
  bool all_have(CollectiveContext::Word word, std::uint64_t chunk) const;
  // Whether the chunk's gateway has come so far; `own`: turns that this rank has, where it is that.
  bool gateway_has(CollectiveContext::Word word, std::uint64_t chunk, std::uint64_t own) const;

  const std::vector<Gateways> channels_;
  const std::size_t channel_;  // the own one; their number where there is none
  const std::uint64_t chunks_;
  const std::uint64_t turns_;  // chunks of the own channel
  const Stages stages_;
  StreamSession session_;
  std::vector<Link> links_;  // by machine

  // Chunks that this rank is done with, stage by stage.
  std::uint64_t filled_ = 0;
  std::uint64_t reduced_ = 0;
  std::uint64_t finished_ = 0;
  // Turns that a gateway is done with.
  std::uint64_t kept_ = 0;
  std::uint64_t forwarded_ = 0;
  std::uint64_t combined_ = 0;
  std::uint64_t arrived_ = 0;
};

}  // namespace collectives
