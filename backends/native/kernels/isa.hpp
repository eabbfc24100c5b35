// What each instruction set's translation unit hands to the dispatcher.
//
// `reduce.inl` and what it includes are compiled once per instruction set, under that set's flags. Two rules
// keep code for one set from being linked into a path for another: everything there has internal linkage, and
// nothing there uses an inline function or template from elsewhere (the standard library included), of which
// the linker would keep one copy for all. The tables are constant-initialised, so that no code of an
// unsupported set runs at start-up.
#pragma once

#include <cstddef>

#include "common/codes.hpp"

namespace collectives {

// Elements to elements. `second` is another place for the result, `next` what to fetch meanwhile; either may
// be null.
using ReduceKernel = void (*)(std::byte* dst, std::byte* second, const std::byte* next,
                              const void* const* sources, int n, std::size_t bytes, double factor);
using CopyKernel = void (*)(std::byte* dst, const std::byte* src, const std::byte* next, std::size_t bytes);

// The types of accumulators that elements of another type are widened to.
enum class Domain : std::uint8_t { float32, float64, int128 };
inline constexpr int kDomainCount = 3;

// Sums of so many 32-bit integers are exact in float64.
inline constexpr int kMaxAveragedIntegers = 1 << 20;

// How elements become accumulators in memory, in their order, and back; null for those that are such. `widen`
// may write a whole vector at the end.
struct Conversion {
  void (*widen)(std::byte* accumulators, const std::byte* elements, std::size_t count);
  void (*narrow)(std::byte* elements, const std::byte* accumulators, std::size_t count);
  std::size_t element_bytes;
  Domain domain;
};

// Widens the sources by `from`, and narrows the result by `to`.
using ConvertingKernel = void (*)(std::byte* dst, std::byte* second, const std::byte* next,
                                  const void* const* sources, int n, std::size_t count, double factor,
                                  const Conversion& from, const Conversion& to);

// An average that is continued elsewhere sums terms that PREMUL_SUM has made so small that no sum overflows:
// by 1 / power_from(divisor). This operation makes the average of such sums.
inline constexpr auto kDescaled = static_cast<ReduceOp>(kReduceOpCount);
inline constexpr int kKernelOpCount = kReduceOpCount + 1;

static inline double power_from(double divisor) {
  double power = 1;
  while (power < divisor) power *= 2;
  return power;
}

struct InstructionSet {
  const char* name;
  ReduceKernel reduce[kDTypeCount][kKernelOpCount];  // null: through accumulators, or not reducible
  Conversion conversions[kDTypeCount];               // null for types that are never converted
  Conversion kept[kDomainCount];                     // of accumulators
  ConvertingKernel converting[kDomainCount][kKernelOpCount];
  CopyKernel copy_fetching;
  CopyKernel copy_streaming;
};

namespace isa_default {
extern const InstructionSet kInstructionSet;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const InstructionSet kInstructionSet;
}
namespace isa_avx512 {
extern const InstructionSet kInstructionSet;
}
#endif

}  // namespace collectives
