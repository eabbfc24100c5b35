// One collective in progress, as a waiting thread needs to know it.
#pragma once

#include <cstdint>
#include <string>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "state/control_page.hpp"

namespace collectives {

// A sleeper wakes at least this often to check whether to go on.
inline constexpr Nanoseconds kLongestSleep = 100 * kMillisecond;
// One that is woken again and again checks this often all the same.
inline constexpr Nanoseconds kCheckEvery = 50 * kMillisecond;

// What a thread that blocks in an operation owes to its owner. The bindings implement it for Python's lock
// and signals.
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  // The calling thread is about to yield or sleep, perhaps again.
  virtual void blocks() = 0;
  // Whether to give the operation up.
  virtual bool requested() = 0;
  // The source line of the call, or an empty text.
  virtual std::string site() = 0;
};

struct Call {
  std::uint64_t sequence = 0;
  Fingerprint what;
  std::uint64_t own_count = 0;
  Nanoseconds timeout = 0;  // as given, for the message
  Nanoseconds deadline = kNever;
  Interrupt* interrupt = nullptr;
  const std::string* site = nullptr;  // the source line, of a call that nobody blocks in
};

// "all_reduce(SUM, float32, 1024 elements)".
std::string describe(const Fingerprint& what, std::uint64_t own_count);
// "all_reduce(SUM, float32, 1024 elements) number 7".
std::string describe(const Call& call);
// The same for programs.
ErrorDetails details_of(const Call& call);

}  // namespace collectives
