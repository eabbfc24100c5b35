// barrier, broadcast, all_gather, gather, scatter, all_to_all: whatever moves bytes and computes nothing.
//
// Short: senders stage before the meeting, receivers copy after it. Long: senders fill chunks of their rings,
// receivers drain them, one chunk behind. A chunk for several receivers holds a *piece* for each, at equal
// distances. Long messages between machines take other ways: between_machines.hpp.
#include <algorithm>
#include <string>

#include "algorithms/between_machines.hpp"
#include "algorithms/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

std::size_t total_bytes(const std::vector<Part>& parts) {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.bytes;
  return total;
}

std::size_t longest_bytes(const std::vector<Part>& parts) {
  std::size_t longest = 0;
  for (const Part& part : parts) longest = std::max(longest, part.bytes);
  return longest;
}

}  // namespace

void barrier(Round& round) {
  if (round.size() > 1) round.meet();
}

void broadcast(Round& round, std::byte* data, std::size_t bytes, int root) {
  if (round.size() == 1) return;
  const bool sends = round.rank() == root;
  if (bytes <= round.tuning().staged_bytes) {
    round.reserve(bytes);
    if (sends) collectives::copy(round.stage(bytes), data, bytes);
    round.meet();
    if (!sends) collectives::copy(data, round.staged(root, bytes), bytes);
    return;
  }
  round.meet();
  if (round.placement().several()) return broadcast_between_machines(round, data, bytes, root);
  const Pieces pieces{.total = bytes, .step = round.tuning().chunk_bytes};
  round.open_rings(pieces.count(), pieces.step);
  const CopyOut copy_out(round, bytes);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (sends) {
      round.await_room(c);
      collectives::copy(round.chunk(root, c), data + pieces.begin(c), pieces.length(c));
      round.filled(c);
    } else {
      round.await_filled(root, c);
      copy_out.drain(data + pieces.begin(c), round.chunk(root, c), pieces.length(c));
      round.drained(c);
    }
  }
}

void all_gather(Round& round, const std::vector<Part>& outputs, const std::byte* input) {
  const int me = round.rank();
  const int ranks = round.size();
  const Part& mine = outputs[static_cast<std::size_t>(me)];
  const CopyOut copy_out(round, total_bytes(outputs));
  if (ranks == 1) return copy_out(mine.data, input, mine.bytes);
  const std::size_t longest = longest_bytes(outputs);
  if (longest <= round.tuning().staged_bytes) {
    round.reserve(longest);
    collectives::copy(round.stage(mine.bytes), input, mine.bytes);
    round.meet();
    for (int r = 0; r < ranks; ++r) {
      const Part& part = outputs[static_cast<std::size_t>(r)];
      if (r != me) collectives::copy(part.data, round.staged(r, part.bytes), part.bytes);
    }
    return copy_out(mine.data, input, mine.bytes);
  }
  round.meet();
  if (round.placement().several()) return all_gather_between_machines(round, outputs, input);
  const std::size_t step = round.tuning().chunk_bytes;
  const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
  round.open_rings(chunks, round.tuning().chunk_bytes);
  for (std::uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) {
      const Pieces pieces{.total = mine.bytes, .step = step};
      round.await_room(i);
      collectives::copy(round.chunk(me, i), input + pieces.begin(i), pieces.length(i));
      round.filled(i);
      copy_out(mine.data + pieces.begin(i), input + pieces.begin(i), pieces.length(i));
    }
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      const Part& part = outputs[static_cast<std::size_t>(r)];
      const Pieces pieces{.total = part.bytes, .step = step};
      if (pieces.length(c) == 0) continue;
      round.await_filled(r, c);
      copy_out.drain(part.data + pieces.begin(c), round.chunk(r, c), pieces.length(c));
    }
    round.drained(c);
  }
}

void gather(Round& round, const std::vector<Part>& outputs, const std::byte* input, std::size_t bytes,
            int root) {
  const int me = round.rank();
  const int ranks = round.size();
  const bool receives = me == root;
  const CopyOut copy_out(round, bytes * static_cast<std::size_t>(ranks));
  if (bytes <= round.tuning().staged_bytes) {
    round.reserve(bytes);
    if (!receives) collectives::copy(round.stage(bytes), input, bytes);
    if (ranks > 1) round.meet();
    if (!receives) return;
    for (int r = 0; r < ranks; ++r) {
      const Part& part = outputs[static_cast<std::size_t>(r)];
      if (r != me) collectives::copy(part.data, round.staged(r, bytes), bytes);
    }
    return copy_out(outputs[static_cast<std::size_t>(me)].data, input, bytes);
  }
  if (ranks > 1) round.meet();
  if (round.placement().several()) {
    std::vector<Part> received(outputs);
    std::vector<Part> sent(static_cast<std::size_t>(ranks));
    received.resize(sent.size());
    if (receives) {
      Part& own = received[static_cast<std::size_t>(me)];
      copy_out(own.data, input, bytes);
      own.bytes = 0;
    } else {
      sent[static_cast<std::size_t>(root)] = {const_cast<std::byte*>(input), bytes};  // only read
    }
    return exchange_between_machines(round, received, sent, bytes);
  }
  const Pieces pieces{.total = bytes, .step = round.tuning().chunk_bytes};
  round.open_rings(pieces.count(), pieces.step);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (!receives) {
      round.await_room(root, c);
      collectives::copy(round.chunk(me, c), input + pieces.begin(c), pieces.length(c));
      round.filled(c);
      continue;
    }
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      round.await_filled(r, c);
      copy_out.take(outputs[static_cast<std::size_t>(r)].data + pieces.begin(c), round.chunk(r, c),
                    pieces.length(c));
    }
    round.drained(c);
    // While the others fill.
    copy_out(outputs[static_cast<std::size_t>(me)].data + pieces.begin(c), input + pieces.begin(c),
             pieces.length(c));
  }
}

void scatter(Round& round, std::byte* output, std::size_t bytes, const std::vector<Part>& inputs, int root) {
  const int me = round.rank();
  const int ranks = round.size();
  const bool sends = me == root;
  const auto all = static_cast<std::size_t>(ranks);
  const std::size_t total = bytes * all;
  const CopyOut copy_out(round, bytes);
  if (total <= round.tuning().staged_bytes) {
    round.reserve(total);
    if (sends) {
      std::byte* stage = round.stage(total);
      for (std::size_t r = 0; r < all; ++r) collectives::copy(stage + r * bytes, inputs[r].data, bytes);
    }
    if (ranks > 1) round.meet();
    if (sends) return copy_out(output, inputs[static_cast<std::size_t>(me)].data, bytes);
    return collectives::copy(output, round.staged(root, total) + static_cast<std::size_t>(me) * bytes, bytes);
  }
  if (ranks > 1) round.meet();
  if (ranks == 1) return copy_out(output, inputs[0].data, bytes);
  if (round.placement().several()) {
    std::vector<Part> received(all);
    std::vector<Part> sent(inputs);
    sent.resize(all);
    if (sends) {
      copy_out(output, inputs[static_cast<std::size_t>(me)].data, bytes);
      sent[static_cast<std::size_t>(me)].bytes = 0;
    } else {
      received[static_cast<std::size_t>(root)] = {output, bytes};
    }
    return exchange_between_machines(round, received, sent, bytes);
  }
  const Pieces pieces{.total = bytes, .step = round.piece_bytes()};
  round.open_rings(pieces.count(), all * pieces.step);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (sends) {
      round.await_room(c);
      for (std::size_t r = 0; r < all; ++r) {
        if (r == static_cast<std::size_t>(me)) continue;
        collectives::copy(round.chunk(me, c) + r * pieces.step, inputs[r].data + pieces.begin(c),
                          pieces.length(c));
      }
      round.filled(c);
      // While the others drain.
      copy_out(output + pieces.begin(c), inputs[static_cast<std::size_t>(me)].data + pieces.begin(c),
               pieces.length(c));
    } else {
      round.await_filled(root, c);
      copy_out.take(output + pieces.begin(c),
                    round.chunk(root, c) + static_cast<std::size_t>(me) * pieces.step, pieces.length(c));
      round.drained(c);
    }
  }
}

void all_to_all(Round& round, const std::vector<Part>& outputs, const std::vector<Part>& inputs) {
  const auto me = static_cast<std::size_t>(round.rank());
  const auto ranks = static_cast<std::size_t>(round.size());
  const auto as_rank = [](std::size_t r) { return static_cast<int>(r); };
  const CopyOut copy_out(round, total_bytes(outputs));
  if (ranks == 1) return copy_out(outputs[0].data, inputs[0].data, inputs[0].bytes);

  std::uint64_t* splits = round.splits(round.rank());
  for (std::size_t r = 0; r < ranks; ++r) {
    splits[r] = inputs[r].bytes;
    splits[ranks + r] = outputs[r].bytes;
  }
  const std::size_t total = total_bytes(inputs);
  round.reserve(round.tuning().staged_bytes);  // what the others send is not known yet
  if (total <= round.tuning().staged_bytes) {
    std::byte* stage = round.stage(total);
    for (std::size_t r = 0; r < ranks; stage += inputs[r].bytes, ++r)
      collectives::copy(stage, inputs[r].data, inputs[r].bytes);
  }
  round.meet();

  std::uint64_t longest = 0;
  for (std::size_t s = 0; s < ranks; ++s) {
    const std::uint64_t* theirs = round.splits(as_rank(s));
    for (std::size_t d = 0; d < ranks; ++d) {
      const std::uint64_t expected = round.splits(as_rank(d))[ranks + s];
      if (theirs[d] != expected) {
        round.mismatch("rank " + std::to_string(s) + " sends " + std::to_string(theirs[d]) +
                       " bytes to rank " + std::to_string(d) + ", which expects " + std::to_string(expected));
      }
    }
    // Whoever stages all it sends has no chunks.
    std::uint64_t sends = 0;
    std::uint64_t most = 0;
    for (std::size_t d = 0; d < ranks; ++d) {
      sends += theirs[d];
      if (d != s) most = std::max(most, theirs[d]);
    }
    if (sends > round.tuning().staged_bytes) longest = std::max(longest, most);
  }
  std::vector<bool> staged(ranks);
  for (std::size_t s = 0; s < ranks; ++s) {
    const std::uint64_t* theirs = round.splits(as_rank(s));
    std::uint64_t before = 0;
    std::uint64_t sends = 0;
    for (std::size_t d = 0; d < ranks; ++d) {
      if (d < me) before += theirs[d];
      sends += theirs[d];
    }
    staged[s] = sends <= round.tuning().staged_bytes;
    if (staged[s] && s != me)
      collectives::copy(outputs[s].data, round.staged(as_rank(s), sends) + before, outputs[s].bytes);
  }

  if (round.placement().several()) {
    copy_out(outputs[me].data, inputs[me].data, inputs[me].bytes);
    if (longest == 0) return;
    std::vector<Part> received(outputs);
    std::vector<Part> sent(inputs);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (staged[r] || r == me) received[r].bytes = 0;
      if (staged[me] || r == me) sent[r].bytes = 0;
    }
    return exchange_between_machines(round, received, sent, longest);
  }
  const std::size_t step = round.piece_bytes();
  const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
  // The own part, a chunk's share at a time while the others fill or drain, and the rest at the end.
  const Pieces own{.total = inputs[me].bytes, .step = step};
  const auto keep = [&](std::size_t begin, std::size_t end) {
    copy_out(outputs[me].data + begin, inputs[me].data + begin, end - begin);
  };
  round.open_rings(chunks, ranks * step);
  for (std::uint64_t i = 0; chunks > 0 && i <= chunks; ++i) {
    if (i < chunks && !staged[me]) {
      round.await_room(i);
      for (std::size_t k = 1; k < ranks; ++k) {
        const std::size_t r = (me + k) % ranks;
        const Pieces pieces{.total = inputs[r].bytes, .step = step};
        collectives::copy(round.chunk(round.rank(), i) + r * step, inputs[r].data + pieces.begin(i),
                          pieces.length(i));
      }
      round.filled(i);
    }
    if (i < chunks) keep(own.begin(i), own.begin(i + 1));
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    for (std::size_t k = 1; k < ranks; ++k) {
      const std::size_t r = (me + k) % ranks;
      const Pieces pieces{.total = outputs[r].bytes, .step = step};
      if (staged[r] || pieces.length(c) == 0) continue;
      round.await_filled(as_rank(r), c);
      copy_out.take(outputs[r].data + pieces.begin(c), round.chunk(as_rank(r), c) + me * step,
                    pieces.length(c));
    }
    round.drained(c);
  }
  keep(own.begin(chunks), own.total);
}

}  // namespace collectives
