// How long a waiting thread spins before it gives its core away.
//
// A short spin is always worth it. A long spin saves two context switches where the peer runs on another core
// and is about to publish, and is wasted otherwise. A caller that waits for its own operation always spins:
// two ranks that sleep alternately wake too late for each other's spins ever after (measured: 12 us instead
// of 1.2). A background thread competes with its process for the core, so it learns whether long spins pay:
// each success earns credit, each failure costs some, and without credit only every 32nd wait tries again.
//
// Nobody spins long on the core that the peer is on, nor where ranks outnumber cores, because the peer may
// need this very core to publish (measured: with 4 ranks on 2 cores such attempts alone made an operation of
// 8 bytes take 17 us instead of 6). Where ranks outnumber cores the short spin is shorter, and left out where
// the peer was last seen on this core (a barrier of 4 ranks on 2 cores: 3.9 us instead of 6.1; of 4 ranks
// that the kernel leaves one core: 9 instead of 22). A caller that may not spin yields its core repeatedly
// for as long as it would have spun, since waking a core that has gone idle can cost more than many
// operations (measured on a virtual machine: 28 us, against 1.8 for a change of threads on one core).
//
// Who waits for a rank of this machine yields nowhere else, as the kernel may give another program a whole
// time slice for it. Measured with Linux 6.18 and 2 ranks on 2 cores: vLLM beside one busy process makes 48
// tokens a second instead of 25 to 32, but transformers beside two makes 15 % less.
#pragma once

#include <algorithm>

namespace collectives {

inline void relax_processor() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

class SpinPolicy {
 public:
  static constexpr int kShortSpins = 100;
  static constexpr int kCrowdedSpins = 40;  // where ranks outnumber cores

  // How likely a peer publishes soon: `none` forbids long spins, `low` gives no credit in advance.
  enum class Likelihood { none, low, high };

  explicit SpinPolicy(Likelihood likelihood)
      : spins_long_(likelihood != Likelihood::none),
        credit_(likelihood == Likelihood::high ? kMostCredit / 2 : 0) {}

  // `waited_for`: the caller's own thread waits, and would do nothing with its core.
  bool should_spin_long(bool waited_for) noexcept {
    return spins_long_ && (waited_for || credit_ > 0 || ++refused_ % kTryEvery == 0);
  }
  void succeeded() noexcept { credit_ = std::min(credit_ + 1, kMostCredit); }
  void failed() noexcept { credit_ = std::max(credit_ - 2, 0); }

 private:
  static constexpr int kMostCredit = 16;
  static constexpr int kTryEvery = 32;

  const bool spins_long_;
  int credit_;
  int refused_ = 0;
};

}  // namespace collectives
