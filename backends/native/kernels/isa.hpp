// What each instruction set's translation unit hands to the dispatcher.
//
// `reduce.inl` and `copy.inl` are compiled once per instruction set, under that set's flags. Two rules keep
// code for one set from being linked into a path for another: everything there has internal linkage, and
// nothing there uses an inline function or template from elsewhere (the standard library included), of which
// the linker would keep one copy for all. The tables are constant-initialised, so that no code of an
// unsupported set runs at start-up.
#pragma once

#include <cstddef>

#include "common/dtype.hpp"

namespace collectives {

// `second` is another place for the result, `next` what to fetch meanwhile; either may be null.
using ReduceKernel = void (*)(std::byte* dst, std::byte* second, const std::byte* next,
                              const void* const* sources, int n, std::size_t count, double factor);
using FoldKernel = void (*)(std::byte* dst, const void* const* sources, int n, std::size_t count,
                            double factor);
using CopyKernel = void (*)(std::byte* dst, const std::byte* src, const std::byte* next, std::size_t bytes);

// Sums of so many 32-bit integers are exact in float64.
inline constexpr int kMaxAveragedIntegers = 1 << 20;

struct PartialKernels {
  FoldKernel accumulate;
  FoldKernel combine;
  std::size_t bytes;  // of an accumulator
};

struct InstructionSet {
  const char* name;
  ReduceKernel reduce[kDTypeCount][kReduceOpCount];  // null: handled by the dispatcher, or not reducible
  PartialKernels partial[kDTypeCount][kReduceOpCount];
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
