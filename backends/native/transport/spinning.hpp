// How long to spin before a thread gives its core away.
//
// A short spin is always worth it. A long one saves two context switches where the peer is running on another
// core and about to publish, and is wasted where it is not. Whether it pays is learnt: each success earns
// credit, each failure costs some, and without credit only every 32nd wait tries again. Where ranks outnumber
// cores none is tried at all, because the peer may need this very core to publish (measured: with 4 ranks on
// 2 cores those tries alone made an operation of 8 bytes take 17 us instead of 6).
#pragma once

#include <algorithm>

namespace collectives {

class Spinning {
 public:
  static constexpr int kShortSpins = 100;

  // How likely a peer publishes soon: `none` forbids long spins, `little` gives no credit in advance.
  enum class Hope { none, little, good };

  explicit Spinning(Hope hope) : tries_(hope != Hope::none), credit_(hope == Hope::good ? kMost / 2 : 0) {}

  bool worth_long() noexcept { return credit_ > 0 || (tries_ && ++refused_ % kTryEvery == 0); }
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
