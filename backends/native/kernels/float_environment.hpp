// The floating-point mode of the calling thread, held at IEEE 754's default while kernels run.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace collectives {

// A process may have set its threads to flush subnormal numbers to zero (torch.set_flush_denormal) or to
// round another way, and the mode belongs to the thread: without this guard the bits of a result would depend
// on the rank, and on whether the calling thread or the progress thread computed it.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() noexcept : saved_(_mm_getcsr()) {
    if ((saved_ & kModeBits) != kDefaultMode) _mm_setcsr((saved_ & ~kModeBits) | kDefaultMode);
  }
  ~DefaultFloatEnvironment() {
    if ((saved_ & kModeBits) != kDefaultMode) _mm_setcsr(saved_);
  }
#elif defined(__aarch64__)
  DefaultFloatEnvironment() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatEnvironment() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_));
  }
#else
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  // MXCSR: everything but the six sticky status flags; all exceptions masked, nearest, no flushing.
  static constexpr std::uint32_t kModeBits = 0xFFC0;
  static constexpr std::uint32_t kDefaultMode = 0x1F80;
  std::uint32_t saved_;
#elif defined(__aarch64__)
  std::uint64_t saved_ = 0;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace collectives
