// How long to spin before a thread gives its core away.
//
// A short spin is always worth it. A long one saves two context switches where the peer is running on another
// core and about to publish, and is wasted where it is not. A caller that waits for its own operation always
// spins, since two ranks that sleep by turns wake too late for each other's spins for ever after (measured:
// 12 us instead of 1.2). For a background thread, whose core computes meanwhile, it is learnt whether it
// pays: each success earns credit, each failure costs some, and without credit only every 32nd wait tries
// again. On the core that the peer is on nobody spins. Where ranks outnumber cores none is tried at all,
// because the peer may need this very core to publish (measured: with 4 ranks on 2 cores those tries alone
// made an operation of 8 bytes take 17 us instead of 6). There the short spin is shorter, too, and left out
// where the peer was last seen on this core (a barrier of 4 ranks on 2 cores: 3.9 us instead of 6.1; of 4
// ranks that the kernel leaves one core: 9 instead of 22). Where a caller may not spin it offers its core
// again and again for as long as it would, since waking a core that has gone idle can cost more than many
// operations (measured on a virtual machine: 28 us, against 1.8 for a change of threads on one core).
#pragma once

#include <algorithm>

namespace collectives {

class Spinning {
 public:
  static constexpr int kShortSpins = 100;
  static constexpr int kCrowdedSpins = 40;  // where ranks outnumber cores
  // A long spin offers its core after so many short ones, about 15 us: the peer may have come to it
  // meanwhile.
  static constexpr int kRoundsToYield = 8;

  // How likely a peer publishes soon: `none` forbids long spins, `little` gives no credit in advance.
  enum class Hope { none, little, good };

  explicit Spinning(Hope hope) : tries_(hope != Hope::none), credit_(hope == Hope::good ? kMost / 2 : 0) {}

  // `waited_for`: the caller's own thread waits, and would do nothing with its core.
  bool worth_long(bool waited_for) noexcept {
    return tries_ && (waited_for || credit_ > 0 || ++refused_ % kTryEvery == 0);
  }
  void succeeded() noexcept { credit_ = std::min(credit_ + 1, kMost); }
  void failed() noexcept { credit_ = std::max(credit_ - 2, 0); }

 private:
  static constexpr int kMost = 16;
  static constexpr int kTryEvery = 32;

  const bool tries_;
  int credit_;
  int refused_ = 0;
};

}  // namespace collectives
