#include "kernels/kernels.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/cache_line.hpp"
#include "kernels/float_environment.hpp"
#include "kernels/isa.hpp"

namespace collectives {
namespace {

constexpr const char* kCapabilityVariable = "COLLECTIVES_CPU_CAPABILITY";
constexpr double kLargestExactInteger = 9007199254740992.0;  // 2^53

// Best first; `available` asks the CPU and, for the vector registers' state, the operating system.
struct Candidate {
  const InstructionSet* set;
  bool available;
};

const InstructionSet& choose_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {{&isa_avx512::kInstructionSet, avx512},
                                  {&isa_avx2::kInstructionSet, avx2},
                                  {&isa_default::kInstructionSet, true}};
#else
  const Candidate candidates[] = {{&isa_default::kInstructionSet, true}};
#endif
  const char* variable = std::getenv(kCapabilityVariable);
  const std::string_view wanted = variable == nullptr ? "" : variable;
  std::string usable;
  for (const Candidate& candidate : candidates) {
    if (!candidate.available) continue;
    if (wanted.empty() || wanted == candidate.set->name) return *candidate.set;
    usable += usable.empty() ? "" : ", ";
    usable += candidate.set->name;
  }
  throw std::invalid_argument(std::string(kCapabilityVariable) + "=" + variable +
                              " names no instruction set of this CPU; usable here: " + usable +
                              " (unset it to get the first)");
}

const InstructionSet& instruction_set() {
  static const InstructionSet& chosen = choose_instruction_set();
  return chosen;
}

std::string describe(DType dtype, ReduceOp op) { return std::string(name_of(op)) + " of " + name_of(dtype); }

bool is_integer(DType dtype) { return dtype >= DType::uint8 && dtype <= DType::int64; }

void check(int n, DType dtype, ReduceOp op, double factor) {
  if (n < 1) throw std::invalid_argument("reduce needs at least one source, not " + std::to_string(n));
  if (!reducible(dtype, op)) throw std::invalid_argument(describe(dtype, op) + " is not defined");
  if (op != ReduceOp::avg) return;
  if (is_integer(dtype) && n > kMaxAveragedIntegers) {
    throw std::invalid_argument(describe(dtype, op) + " takes at most " +
                                std::to_string(kMaxAveragedIntegers) + " sources, not " + std::to_string(n));
  }
  const bool fits = is_integer(dtype) ? factor == std::trunc(factor) && factor <= kLargestExactInteger
                                      : std::isfinite(factor);
  if (!(factor > 0) || !fits) {
    throw std::invalid_argument(describe(dtype, op) + " needs a positive " +
                                (is_integer(dtype) ? "integer of at most 2^53" : "finite number") +
                                " as divisor, not " + std::to_string(factor));
  }
}

// A complex number is two numbers to every operation that is defined on it.
DType component_of(DType dtype) {
  switch (dtype) {
    case DType::complex32:
      return DType::float16;
    case DType::complex64:
      return DType::float32;
    case DType::complex128:
      return DType::float64;
    default:
      return dtype;
  }
}

bool is_floating(DType dtype) { return !is_integer(dtype) && dtype != DType::boolean; }

// Which phase of a reduction: elements to elements, elements to accumulators, or these to elements.
enum class Phase : std::uint8_t { whole, beginning, ending };

// The conversion to and from accumulators that are not the elements themselves; null for those that are. An
// integer has such ones for AVG alone.
const Conversion* conversion_of(const InstructionSet& set, DType element, ReduceOp op) {
  const Conversion& conversion = set.conversions[static_cast<int>(element)];
  if (conversion.widen == nullptr || (op != ReduceOp::avg && !is_floating(element))) return nullptr;
  return &conversion;
}

void run(void* dst, const void* const* sources, int n, std::size_t count, DType dtype, ReduceOp op,
         double factor, const ReduceOptions& options, Phase phase) {
  const InstructionSet& set = instruction_set();
  if (count == 0) return;
  const DType element = component_of(dtype);
  if (element != dtype) count *= 2;
  const Conversion* conversion = conversion_of(set, element, op);
  const bool begins = phase == Phase::beginning;
  const bool ends = phase == Phase::ending;
  if (op == ReduceOp::avg && is_floating(element) && phase != Phase::whole) {
    op = begins ? ReduceOp::premul_sum : kDescaled;
    if (begins) factor = 1 / power_from(factor);
  } else if ((op == ReduceOp::avg && begins) || (op == ReduceOp::premul_sum && ends)) {
    op = ReduceOp::sum;
  }
  const DefaultFloatEnvironment environment;
  auto* const result = static_cast<std::byte*>(dst);
  auto* const second = static_cast<std::byte*>(options.second);
  const auto* const next = static_cast<const std::byte*>(options.next);
  const ReduceKernel kernel = set.reduce[static_cast<int>(element)][static_cast<int>(op)];
  if (conversion == nullptr || (phase == Phase::whole && kernel != nullptr)) {
    return kernel(result, second, next, sources, n, count * size_of(element), factor);
  }
  const int domain = static_cast<int>(conversion->domain);
  const Conversion& kept = set.kept[domain];
  set.converting[domain][static_cast<int>(op)](result, second, next, sources, n, count, factor,
                                               ends ? kept : *conversion, begins ? kept : *conversion);
}

}  // namespace

void reduce(void* dst, const void* const* sources, int n, std::size_t count, DType dtype, ReduceOp op,
            double factor, const ReduceOptions& options) {
  check(n, dtype, op, factor);
  if (n == 1 && op != ReduceOp::avg && op != ReduceOp::premul_sum) {
    static_cast<void>(instruction_set());  // which throws where the variable is wrong
    for (void* to : {dst, options.second}) {
      if (to != nullptr && to != sources[0] && count != 0) {
        std::memcpy(to, sources[0], count * size_of(dtype));
      }
    }
    return;
  }
  run(dst, sources, n, count, dtype, op, factor, options, Phase::whole);
}

std::size_t accumulator_bytes(DType dtype, ReduceOp op) {
  const DType element = component_of(dtype);
  const InstructionSet& set = isa_default::kInstructionSet;
  const Conversion* conversion = conversion_of(set, element, op);
  if (conversion == nullptr) return size_of(dtype);
  return (element == dtype ? 1 : 2) * set.kept[static_cast<int>(conversion->domain)].element_bytes;
}

void accumulate(void* partial, const void* const* sources, int n, std::size_t count, DType dtype, ReduceOp op,
                double factor) {
  check(n, dtype, op, factor);
  run(partial, sources, n, count, dtype, op, factor, {}, Phase::beginning);
}

void combine(void* dst, const void* const* partials, int n, std::size_t count, DType dtype, ReduceOp op,
             double factor) {
  check(n, dtype, op, factor);
  run(dst, partials, n, count, dtype, op, factor, {}, Phase::ending);
}

void copy(void* dst, const void* src, std::size_t bytes, const void* next) {
  if (bytes == 0) return;
  if (next == nullptr) {
    std::memcpy(dst, src, bytes);
  } else {
    instruction_set().copy_fetching(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src),
                                    static_cast<const std::byte*>(next), bytes);
  }
}

void copy_streaming(void* dst, const void* src, std::size_t bytes, const void* next) {
  const InstructionSet& set = instruction_set();
  if (bytes == 0) return;
  set.copy_streaming(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src),
                     static_cast<const std::byte*>(next), bytes);
}

void copy_taking(void* dst, void* src, std::size_t bytes) {
  copy_and_take(static_cast<std::byte*>(dst), static_cast<std::byte*>(src), bytes,
                [](std::byte* to, const std::byte* from, std::size_t length) { copy(to, from, length); });
}

void copy_taking_streaming(void* dst, void* src, std::size_t bytes) {
  copy_and_take(
      static_cast<std::byte*>(dst), static_cast<std::byte*>(src), bytes,
      [](std::byte* to, const std::byte* from, std::size_t length) { copy_streaming(to, from, length); });
}

const char* cpu_capability() { return instruction_set().name; }

}  // namespace collectives
