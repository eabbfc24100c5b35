// all_to_all, even and uneven. The split tables travel with the arrivals, and every rank checks those of all.
// A rank that sends little stages it; the others fill chunks of their rings that hold a piece for each rank.
// Between machines every pair of ranks exchanges directly.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/pairwise_exchange.hpp"
#include "collectives/collectives.hpp"
#include "kernels/kernels.hpp"
#include "memory/copy_once.hpp"

namespace collectives {
namespace {

struct Sender {
  std::uint64_t total = 0;        // bytes that it sends
  std::uint64_t before_mine = 0;  // of them to ranks before this one
  bool stages = false;
};

}  // namespace

void all_to_all(CollectiveContext& collective, const std::vector<Part>& outputs,
                const std::vector<Part>& inputs) {
  const auto me = static_cast<std::size_t>(collective.rank());
  const auto ranks = static_cast<std::size_t>(collective.size());
  const auto as_rank = [](std::size_t r) { return static_cast<int>(r); };
  const CopyOut copy_out(collective, total_bytes(outputs));
  if (ranks == 1) {
    collective.engage_team(inputs[0].bytes);
    return copy_out(outputs[0].data, inputs[0].data, inputs[0].bytes);
  }
  // Each sender stages or not by itself.
  const std::size_t most_staged = most_staged_bytes(Opcode::all_to_all, collective.tuning());

  std::uint64_t* splits = collective.splits(collective.rank());
  for (std::size_t r = 0; r < ranks; ++r) {
    splits[r] = inputs[r].bytes;
    splits[ranks + r] = outputs[r].bytes;
  }
  const std::size_t total = total_bytes(inputs);
  collective.reserve(most_staged);  // what the others send is not known yet
  if (total <= most_staged) {
    std::byte* stage = collective.stage(total);
    for (std::size_t r = 0; r < ranks; stage += inputs[r].bytes, ++r)
      collectives::copy(stage, inputs[r].data, inputs[r].bytes);
  }
  collective.arrive_and_wait();

  // Each number is read once, this rank's own not at all: others could change them between two looks.
  std::vector<Sender> senders(ranks);
  std::uint64_t longest = 0;  // of what goes through chunks
  for (std::size_t s = 0; s < ranks; ++s) {
    Sender& sender = senders[s];
    std::uint64_t most = 0;
    for (std::size_t d = 0; d < ranks; ++d) {
      const std::uint64_t sent = s == me ? inputs[d].bytes : copy_once(collective.splits(as_rank(s))[d]);
      const std::uint64_t expected =
          d == me ? outputs[s].bytes : copy_once(collective.splits(as_rank(d))[ranks + s]);
      if (sent != expected) {
        collective.mismatch("rank " + std::to_string(s) + " sends " + std::to_string(sent) +
                            " bytes to rank " + std::to_string(d) + ", which expects " +
                            std::to_string(expected));
      }
      if (d == me) sender.before_mine = sender.total;
      if (sender.total + sent < sent) {
        collective.rank_context().throw_on_word(
            as_rank(s), "the number of bytes sent to rank " + std::to_string(d), sent,
            "at most " + std::to_string(~sender.total) + " after those to the ranks before");
      }
      sender.total += sent;
      if (d != s) most = std::max(most, sent);
    }
    // A rank that stages all it sends has no chunks.
    sender.stages = sender.total <= most_staged;
    if (!sender.stages) longest = std::max(longest, most);
  }
  const std::size_t step = collective.begin_pieces(ranks * longest);
  const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
  collective.check_chunks(chunks);  // before anything is written
  for (std::size_t s = 0; s < ranks; ++s) {
    const Sender& sender = senders[s];
    if (!sender.stages || s == me) continue;
    const std::byte* staged = collective.staged(as_rank(s), sender.total);
    collectives::copy(outputs[s].data, staged + sender.before_mine, outputs[s].bytes);
  }

  if (collective.topology().spans_machines()) {
    copy_out(outputs[me].data, inputs[me].data, inputs[me].bytes);
    if (longest == 0) return;
    std::vector<Part> received(outputs);
    std::vector<Part> sent(inputs);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (senders[r].stages || r == me) received[r].bytes = 0;
      if (senders[me].stages || r == me) sent[r].bytes = 0;
    }
    return pairwise_exchange(collective, received, sent, longest);
  }
  std::size_t own_longest = 0;  // of what this rank fills or drains
  for (std::size_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    if (!senders[me].stages) own_longest = std::max(own_longest, inputs[r].bytes);
    if (!senders[r].stages) own_longest = std::max(own_longest, outputs[r].bytes);
  }
  const std::uint64_t own_chunks = Pieces{.total = own_longest, .step = step}.count();
  // The own part is copied piece by piece while the others fill or drain, and the rest at the end.
  const Pieces own{.total = inputs[me].bytes, .step = step};
  const auto keep = [&](std::size_t begin, std::size_t end) {
    copy_out(outputs[me].data + begin, inputs[me].data + begin, end - begin);
  };
  collective.open_rings(chunks, ranks * step);
  for (std::uint64_t i = 0; own_chunks > 0 && i <= own_chunks; ++i) {
    if (i < own_chunks && !senders[me].stages) {
      collective.await_room(i);
      collective.team().split_items(
          ranks - 1, step, [&](std::size_t other, std::size_t begin, std::size_t end) {
            const std::size_t r = (me + 1 + other) % ranks;
            const Pieces pieces{.total = inputs[r].bytes, .step = step};
            end = std::min(end, pieces.length(i));
            if (begin >= end) return;
            collectives::copy(collective.chunk(collective.rank(), i) + r * step + begin,
                              inputs[r].data + pieces.begin(i) + begin, end - begin);
          });
      collective.filled(i);
    }
    if (i < own_chunks) keep(own.begin(i), own.begin(i + 1));
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    for (std::size_t k = 1; k < ranks; ++k) {
      const std::size_t r = (me + k) % ranks;
      const Pieces pieces{.total = outputs[r].bytes, .step = step};
      if (senders[r].stages || pieces.length(c) == 0) continue;
      collective.await_filled(as_rank(r), c);
      copy_out.take(outputs[r].data + pieces.begin(c), collective.chunk(as_rank(r), c) + me * step,
                    pieces.length(c));
    }
    collective.drained(c);
  }
  // The others need not wait for this rank in the chunks that it has no part in.
  if (own_chunks < chunks) collective.drained(chunks - 1);
  keep(own.begin(own_chunks), own.total);
}

}  // namespace collectives
