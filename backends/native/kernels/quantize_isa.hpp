// What each instruction set's translation unit of quantize.inl hands to quantize.cpp; the rules of isa.hpp
// hold.
#pragma once

#include <cstddef>

namespace collectives {

struct QuantizeKernels {
  void (*quantize)(std::byte* codes, std::byte* steps, const std::byte* source, std::byte* left,
                   std::size_t count, std::size_t block);
  void (*dequantize)(std::byte* dst, const std::byte* codes, const std::byte* steps, std::size_t count,
                     std::size_t block, float weight);
  void (*add)(std::byte* dst, const std::byte* codes, const std::byte* steps, std::size_t count,
              std::size_t block, float weight);
};

struct QuantizeSet {
  const char* name;  // as of InstructionSet
  QuantizeKernels int8;
  QuantizeKernels float8_e4m3fn;
};

namespace isa_default {
extern const QuantizeSet kQuantizeSet;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const QuantizeSet kQuantizeSet;
}
namespace isa_avx512 {
extern const QuantizeSet kQuantizeSet;
}
#endif

}  // namespace collectives
