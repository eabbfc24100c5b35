#include "kernels/quantize.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/float_environment.hpp"
#include "kernels/kernels.hpp"
#include "kernels/quantize_isa.hpp"

namespace collectives {
namespace {

const QuantizeSet& quantize_set() {
  static const QuantizeSet& chosen = []() -> const QuantizeSet& {
#if defined(__x86_64__)
    const std::string_view name = cpu_capability();
    if (name == isa_avx512::kQuantizeSet.name) return isa_avx512::kQuantizeSet;
    if (name == isa_avx2::kQuantizeSet.name) return isa_avx2::kQuantizeSet;
#endif
    return isa_default::kQuantizeSet;
  }();
  return chosen;
}

const QuantizeKernels& quantize_kernels(std::size_t block, DType format) {
  if (block == 0) throw std::invalid_argument("a block has at least one element");
  if (format == DType::int8) return quantize_set().int8;
  if (format == DType::float8_e4m3fn) return quantize_set().float8_e4m3fn;
  throw std::invalid_argument(std::string("float32 is quantized to int8 or float8_e4m3fn, not to ") +
                              name_of(format));
}

}  // namespace

void quantize(std::byte* codes, std::byte* steps, const std::byte* source, std::byte* left, std::size_t count,
              std::size_t block, DType format) {
  const QuantizeKernels& kernels = quantize_kernels(block, format);
  const DefaultFloatEnvironment environment;
  kernels.quantize(codes, steps, source, left, count, block);
}

void dequantize(std::byte* dst, const std::byte* codes, const std::byte* steps, std::size_t count,
                std::size_t block, DType format, float weight, bool adds) {
  const QuantizeKernels& kernels = quantize_kernels(block, format);
  const DefaultFloatEnvironment environment;
  (adds ? kernels.add : kernels.dequantize)(dst, codes, steps, count, block, weight);
}

}  // namespace collectives
