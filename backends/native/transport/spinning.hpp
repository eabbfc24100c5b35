// How long to spin before a thread gives its core away.
//
// A short spin is always worth it. A long one saves two context switches where the peer is running on another
// core and about to publish, and is wasted where it is not. Whether it pays is learnt: each success earns
// credit, each failure costs some, and without credit only every 32nd wait tries again.
#pragma once

#include <algorithm>

namespace collectives {

class Spinning {
 public:
  static constexpr int kShortSpins = 100;

  // Without hope no credit is given in advance: more ranks than cores.
  explicit Spinning(bool hope) : credit_(hope ? kMost / 2 : 0) {}

  bool worth_long() noexcept { return credit_ > 0 || ++refused_ % kTryEvery == 0; }
  void succeeded() noexcept { credit_ = std::min(credit_ + 1, kMost); }
  void failed() noexcept { credit_ = std::max(credit_ - 2, 0); }

 private:
  static constexpr int kMost = 16;
  static constexpr int kTryEvery = 32;

  int credit_;
  int refused_ = 0;
};

}  // namespace collectives
