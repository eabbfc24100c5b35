// The kernels of one instruction set. Included by isa_*.cpp, which define
//   COLLECTIVES_ISA            the namespace
//   COLLECTIVES_ISA_NAME       its name in words
//   COLLECTIVES_VECTOR_BYTES   the width of a vector register
// See isa.hpp for the two rules that this file and those it includes obey.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/isa.hpp"

namespace collectives::COLLECTIVES_ISA {
namespace {

#include "kernels/copy.inl"
#include "kernels/formats.inl"

// Operations: how one more source joins the accumulators. `Context` holds what depends on the call alone.

template <class Format>
struct Plain {
  using Vector = typename Format::Vector;
  explicit Plain(double) {}
  Vector enter(Vector x) const { return x; }
  Vector finish(Vector x) const { return x; }
};

template <class Format>
struct Sum : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return a + x; }
};

template <class Format>
struct Average : Sum<Format> {
  using Vector = typename Format::Vector;
  explicit Average(double factor)
      : Sum<Format>(factor), divisor(splat<Vector>(static_cast<typename Format::Element>(factor))) {}
  Vector finish(Vector x) const { return x / divisor; }
  Vector divisor;
};

template <class Format>
struct PremulSum : Sum<Format> {
  using Vector = typename Format::Vector;
  explicit PremulSum(double value)
      : Sum<Format>(value), factor(splat<Vector>(static_cast<typename Format::Element>(value))) {}
  Vector enter(Vector x) const { return x * factor; }
  Vector factor;
};

template <class Format>
struct Product : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return a * x; }
};

// x != x only for NaN. A NaN accumulator loses no comparison and stays.
template <class Format>
struct Min : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return (x < a) | (x != x) ? x : a; }
};

template <class Format>
struct Max : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return (x > a) | (x != x) ? x : a; }
};

template <class Format>
struct And : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return a & x; }
};

template <class Format>
struct Or : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return a | x; }
};

template <class Format>
struct Xor : Plain<Format> {
  using Plain<Format>::Plain;
  using Vector = typename Format::Vector;
  Vector combine(Vector a, Vector x) const { return a ^ x; }
};

inline const std::byte* bytes_of(const void* source) { return static_cast<const std::byte*>(source); }

// kSteps vectors that start `offset` bytes into every source. All sources are combined in registers before
// the store, which is also what makes `dst` free to be any one of them.
template <class Format, class Op, int kSteps>
inline void reduce_steps(std::byte* dst, const void* const* sources, int n, std::size_t offset,
                         const Op& op) {
  constexpr std::size_t kStepBytes = Format::kLanes * Format::kElementBytes;
  typename Format::Vector accumulators[kSteps];
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    accumulators[s] =
        op.enter(Format::load(bytes_of(sources[0]) + offset + static_cast<std::size_t>(s) * kStepBytes));
  }
  for (int k = 1; k < n; ++k) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      accumulators[s] = op.combine(
          accumulators[s],
          op.enter(Format::load(bytes_of(sources[k]) + offset + static_cast<std::size_t>(s) * kStepBytes)));
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    Format::store(dst + offset + static_cast<std::size_t>(s) * kStepBytes, op.finish(accumulators[s]));
  }
}

template <class Format, template <class> class OpOf>
void reduce_kernel(std::byte* dst, const void* const* sources, int n, std::size_t count, double factor) {
  using Op = OpOf<Format>;
  constexpr int kUnrolled = 4;
  constexpr std::size_t kStepBytes = Format::kLanes * Format::kElementBytes;
  const Op op(factor);
  const std::size_t bytes = count * Format::kElementBytes;
  std::size_t offset = 0;
  for (; bytes - offset >= kUnrolled * kStepBytes; offset += kUnrolled * kStepBytes) {
    reduce_steps<Format, Op, kUnrolled>(dst, sources, n, offset, op);
  }
  for (; bytes - offset >= kStepBytes; offset += kStepBytes) {
    reduce_steps<Format, Op, 1>(dst, sources, n, offset, op);
  }
  const std::size_t rest = bytes - offset;
  if (rest == 0) return;
  // The last elements take the same vector code on a padded copy, so that no element knows its position.
  alignas(kVectorBytes) std::byte padded[kStepBytes] = {};
  __builtin_memcpy(padded, bytes_of(sources[0]) + offset, rest);
  typename Format::Vector accumulator = op.enter(Format::load(padded));
  for (int k = 1; k < n; ++k) {
    __builtin_memcpy(padded, bytes_of(sources[k]) + offset, rest);
    accumulator = op.combine(accumulator, op.enter(Format::load(padded)));
  }
  Format::store(padded, op.finish(accumulator));
  __builtin_memcpy(dst + offset, padded, rest);
}

// Integer AVG. `Wide` holds every sum of kMaxAveragedIntegers elements exactly: float64 for elements of up to
// 32 bits, where the truncated quotient is exact as well: a quotient that is not an integer differs from the
// next one by at least 2^-53 of itself.
template <class T, class Wide, class Divisor>
void average_kernel(std::byte* dst, const void* const* sources, int n, std::size_t count, double factor) {
  constexpr std::size_t kBlock = 512;
  const auto divisor = static_cast<Divisor>(factor);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = count - begin < kBlock ? count - begin : kBlock;
    Wide sums[kBlock];
    for (int k = 0; k < n; ++k) {
      const std::byte* from = bytes_of(sources[k]) + begin * sizeof(T);
      for (std::size_t i = 0; i < size; ++i) {
        T x;
        __builtin_memcpy(&x, from + i * sizeof(T), sizeof(T));
        sums[i] = k == 0 ? static_cast<Wide>(x) : sums[i] + static_cast<Wide>(x);
      }
    }
    std::byte* to = dst + begin * sizeof(T);
    for (std::size_t i = 0; i < size; ++i) {
      const T x = static_cast<T>(static_cast<std::int64_t>(sums[i] / divisor));
      __builtin_memcpy(to + i * sizeof(T), &x, sizeof(T));
    }
  }
}

__extension__ typedef __int128 Int128;

constexpr ReduceKernel* entry(InstructionSet& set, DType dtype, ReduceOp op) {
  return &set.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

template <class Format>
constexpr void add_floating(InstructionSet& set, DType dtype) {
  *entry(set, dtype, ReduceOp::sum) = reduce_kernel<Format, Sum>;
  *entry(set, dtype, ReduceOp::avg) = reduce_kernel<Format, Average>;
  *entry(set, dtype, ReduceOp::product) = reduce_kernel<Format, Product>;
  *entry(set, dtype, ReduceOp::min) = reduce_kernel<Format, Min>;
  *entry(set, dtype, ReduceOp::max) = reduce_kernel<Format, Max>;
  *entry(set, dtype, ReduceOp::premul_sum) = reduce_kernel<Format, PremulSum>;
}

// Wrapping arithmetic and bits know no sign, so that both types share the unsigned kernels.
template <class Unsigned>
constexpr void add_integer(InstructionSet& set, DType dtype) {
  using Format = Integer<Unsigned>;
  *entry(set, dtype, ReduceOp::sum) = reduce_kernel<Format, Sum>;
  *entry(set, dtype, ReduceOp::product) = reduce_kernel<Format, Product>;
  *entry(set, dtype, ReduceOp::band) = reduce_kernel<Format, And>;
  *entry(set, dtype, ReduceOp::bor) = reduce_kernel<Format, Or>;
  *entry(set, dtype, ReduceOp::bxor) = reduce_kernel<Format, Xor>;
}

template <class T, class Wide, class Divisor>
constexpr void add_ordered(InstructionSet& set, DType dtype) {
  *entry(set, dtype, ReduceOp::min) = reduce_kernel<Integer<T>, Min>;
  *entry(set, dtype, ReduceOp::max) = reduce_kernel<Integer<T>, Max>;
  *entry(set, dtype, ReduceOp::avg) = average_kernel<T, Wide, Divisor>;
}

constexpr InstructionSet make_instruction_set() {
  InstructionSet set{COLLECTIVES_ISA_NAME, {}, copy_past_cache};

  *entry(set, DType::boolean, ReduceOp::sum) = reduce_kernel<Boolean, Or>;
  *entry(set, DType::boolean, ReduceOp::max) = reduce_kernel<Boolean, Or>;
  *entry(set, DType::boolean, ReduceOp::bor) = reduce_kernel<Boolean, Or>;
  *entry(set, DType::boolean, ReduceOp::product) = reduce_kernel<Boolean, And>;
  *entry(set, DType::boolean, ReduceOp::min) = reduce_kernel<Boolean, And>;
  *entry(set, DType::boolean, ReduceOp::band) = reduce_kernel<Boolean, And>;
  *entry(set, DType::boolean, ReduceOp::bxor) = reduce_kernel<Boolean, Xor>;

  add_integer<std::uint8_t>(set, DType::uint8);
  add_integer<std::uint8_t>(set, DType::int8);
  add_integer<std::uint16_t>(set, DType::uint16);
  add_integer<std::uint16_t>(set, DType::int16);
  add_integer<std::uint32_t>(set, DType::uint32);
  add_integer<std::uint32_t>(set, DType::int32);
  add_integer<std::uint64_t>(set, DType::uint64);
  add_integer<std::uint64_t>(set, DType::int64);
  add_ordered<std::uint8_t, double, double>(set, DType::uint8);
  add_ordered<std::int8_t, double, double>(set, DType::int8);
  add_ordered<std::uint16_t, double, double>(set, DType::uint16);
  add_ordered<std::int16_t, double, double>(set, DType::int16);
  add_ordered<std::uint32_t, double, double>(set, DType::uint32);
  add_ordered<std::int32_t, double, double>(set, DType::int32);
  add_ordered<std::uint64_t, Int128, std::int64_t>(set, DType::uint64);
  add_ordered<std::int64_t, Int128, std::int64_t>(set, DType::int64);

  add_floating<Float16>(set, DType::float16);
  add_floating<BFloat16>(set, DType::bfloat16);
  add_floating<Float32>(set, DType::float32);
  add_floating<Float64>(set, DType::float64);
  add_floating<SmallFloat<Float8E4M3FN>>(set, DType::float8_e4m3fn);
  add_floating<SmallFloat<Float8E5M2>>(set, DType::float8_e5m2);
  add_floating<SmallFloat<Float8E4M3FNUZ>>(set, DType::float8_e4m3fnuz);
  add_floating<SmallFloat<Float8E5M2FNUZ>>(set, DType::float8_e5m2fnuz);
  add_floating<Float8E8M0FNU>(set, DType::float8_e8m0fnu);
  return set;
}

}  // namespace

constinit const InstructionSet kInstructionSet = make_instruction_set();

}  // namespace collectives::COLLECTIVES_ISA
