// The quantizing kernels of one instruction set. Included by quantize_*.cpp with the definitions that
// reduce.inl takes, and under the same rules.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/quantize_isa.hpp"

namespace collectives::COLLECTIVES_ISA {
namespace {

#include "kernels/formats.inl"

constexpr std::int32_t kInfiniteBits = 0x7F800000;

// Formats of codes. `encode` takes quotients by the step, `decode` gives them back, each with the codes in
// the lowest bits. kGreatest is the code of a block's greatest magnitude, kGreatestBesideInfinity where
// elements of the block are not finite.
struct Int8Codes {
  using Byte = std::int8_t;
  static constexpr bool kIsSigned = true;
  static constexpr float kGreatest = 127, kGreatestBesideInfinity = 126;
  static constexpr std::int32_t kInfinity = 127, kNegativeInfinity = -127, kNaN = -128;

  // The last place of the sum with 1.5 * 2^23 is 1: the addition does the rounding.
  static I32 encode(F32 quotients) { return bits_as<I32>(quotients + 12582912.0F) - 0x4B400000; }
  static F32 decode(I32 codes) { return __builtin_convertvector(codes, F32); }
};

struct Float8Codes {
  using Byte = std::uint8_t;
  static constexpr bool kIsSigned = false;
  using Format = SmallFloat<Float8E4M3FN>;  // of four elements in a word, of which the first is used
  static constexpr float kGreatest = 448, kGreatestBesideInfinity = 416;
  static constexpr std::int32_t kInfinity = 0x7E, kNegativeInfinity = 0xFE, kNaN = 0x7F;

  static I32 encode(F32 quotients) {
    const F32 parts[Format::kParts] = {quotients, quotients, quotients, quotients};
    std::byte words[kVectorBytes];
    Format::store(words, parts);
    return load_vector<I32>(words) & 0xFF;
  }
  static F32 decode(I32 codes) {
    std::byte words[kVectorBytes];
    store_vector(words, codes);
    F32 parts[Format::kParts];
    Format::load(words, parts);
    return parts[0];
  }
};

inline I32 magnitude_bits(F32 v) { return bits_as<I32>(v) & 0x7FFFFFFF; }
inline I32 greater(I32 a, I32 b) { return a > b ? a : b; }

inline std::int32_t greatest_lane(I32 v) {
  std::int32_t greatest = v[0];
  for (std::size_t i = 1; i < kFloatLanes; ++i) greatest = v[i] > greatest ? v[i] : greatest;
  return greatest;
}

inline float float_of(std::int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::int32_t bits_of(float value) {
  std::int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A register of one number; splat() sets lane by lane what the compiler does not know.
inline F32 broadcast(float value) { return value - F32{}; }

// The step of a block whose greatest magnitude is to have the code `most`. Its product with that is no less
// than the magnitude, which matters among subnormal steps, and is finite.
inline float step_of(float greatest, float most) {
  float step = greatest / most;
  if (step * most < greatest) step = float_of(bits_of(step) + 1);
  if (bits_of(step * most) >= kInfiniteBits) step = float_of(bits_of(step) - 1);
  return step;
}

// Calls `each` with the offset and the number of elements of every register's part of n elements.
template <class Each>
inline void for_registers(std::size_t n, Each&& each) {
  std::size_t i = 0;
  for (; n - i >= kFloatLanes; i += kFloatLanes) each(i, kFloatLanes);
  if (i < n) each(i, n - i);
}

// Registers between memory of whole ones, and of fewer elements, which are zeros then.
template <class V>
inline V load_part(const std::byte* from, std::size_t lanes) {
  if (lanes == kFloatLanes) return load_vector<V>(from);
  V v{};
  __builtin_memcpy(&v, from, lanes * (sizeof(V) / kFloatLanes));
  return v;
}

template <class V>
inline void store_part(std::byte* to, V v, std::size_t lanes) {
  if (lanes == kFloatLanes) return store_vector(to, v);
  __builtin_memcpy(to, &v, lanes * (sizeof(V) / kFloatLanes));
}

// Between codes in memory and in the lanes of a register; gcc 12 converts lane by lane what is not spelled
// out.
inline void store_codes(std::byte* to, I32 codes, std::size_t lanes) {
  using Narrow = VectorOf<std::uint8_t, kFloatLanes>;
#if COLLECTIVES_VECTOR_BYTES == 32
  const __m256i low = bits_as<__m256i>(codes & 0xFF);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  store_part(to, bits_as<Narrow>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words))), lanes);
#else
  store_part(to, __builtin_convertvector(codes, Narrow), lanes);
#endif
}

template <class Codes>
inline I32 load_codes(const std::byte* from, std::size_t lanes) {
  using Narrow = VectorOf<typename Codes::Byte, kFloatLanes>;
  const Narrow codes = load_part<Narrow>(from, lanes);
#if COLLECTIVES_VECTOR_BYTES == 64
  const __m128i bytes = bits_as<__m128i>(codes);
  return bits_as<I32>(Codes::kIsSigned ? _mm512_maskz_cvtepi8_epi32(0xFFFF, bytes)
                                       : _mm512_maskz_cvtepu8_epi32(0xFFFF, bytes));
#elif COLLECTIVES_VECTOR_BYTES == 32
  const __m128i bytes = _mm_cvtsi64_si128(bits_as<std::int64_t>(codes));
  return bits_as<I32>(Codes::kIsSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  return __builtin_convertvector(codes, I32);
#endif
}

template <class Codes, bool kKeepsLeft>
void quantize_block(std::byte* codes, std::byte* stored_step, const std::byte* source, std::byte* left,
                    std::size_t n) {
  I32 greatest{};
  for_registers(n, [&](std::size_t i, std::size_t lanes) {
    greatest = greater(greatest, magnitude_bits(load_part<F32>(source + i * sizeof(float), lanes)));
  });
  std::int32_t most = greatest_lane(greatest);
  const bool finite = most < kInfiniteBits;
  if (!finite) {
    greatest = I32{};
    for_registers(n, [&](std::size_t i, std::size_t lanes) {
      const I32 bits = magnitude_bits(load_part<F32>(source + i * sizeof(float), lanes));
      greatest = greater(greatest, bits < kInfiniteBits ? bits : I32{});
    });
    most = greatest_lane(greatest);
  }
  const float step = step_of(float_of(most), finite ? Codes::kGreatest : Codes::kGreatestBesideInfinity);
  store_vector(stored_step, finite ? step : -step);
  const F32 steps = broadcast(step);
  const F32 divisors = broadcast(most == 0 ? 1.0F : step);
  const auto encode_all = [&](auto adjust) {
    for_registers(n, [&](std::size_t i, std::size_t lanes) {
      const F32 v = load_part<F32>(source + i * sizeof(float), lanes);
      I32 code = Codes::encode(v / divisors);
      F32 rest = v - Codes::decode(code) * steps;
      adjust(v, code, rest);
      store_codes(codes + i, code, lanes);
      if constexpr (kKeepsLeft) store_part(left + i * sizeof(float), rest, lanes);
    });
  };
  if (finite) {
    encode_all([](F32, I32&, F32&) {});
  } else {
    encode_all([](F32 v, I32& code, F32& rest) {
      const I32 bits = magnitude_bits(v);
      code = bits < kInfiniteBits   ? code
             : bits > kInfiniteBits ? splat<I32>(Codes::kNaN)
             : bits_as<I32>(v) < 0  ? splat<I32>(Codes::kNegativeInfinity)
                                    : splat<I32>(Codes::kInfinity);
      rest = bits < kInfiniteBits ? rest : splat<F32>(__builtin_nanf(""));
    });
  }
}

template <class Codes, bool kKeepsLeft>
void quantize_blocks(std::byte* codes, std::byte* steps, const std::byte* source, std::byte* left,
                     std::size_t count, std::size_t block) {
  for (std::size_t begin = 0, n = 0; begin < count; begin += n, steps += sizeof(float)) {
    n = count - begin < block ? count - begin : block;
    const std::size_t offset = begin * sizeof(float);
    quantize_block<Codes, kKeepsLeft>(codes + begin, steps, source + offset,
                                      kKeepsLeft ? left + offset : nullptr, n);
  }
}

template <class Codes>
void quantize_kernel(std::byte* codes, std::byte* steps, const std::byte* source, std::byte* left,
                     std::size_t count, std::size_t block) {
  (left == nullptr ? quantize_blocks<Codes, false> : quantize_blocks<Codes, true>)(codes, steps, source, left,
                                                                                   count, block);
}

template <class Codes, bool kAdds>
void dequantize_kernel(std::byte* dst, const std::byte* codes, const std::byte* steps, std::size_t count,
                       std::size_t block, float weight) {
  for (std::size_t begin = 0, n = 0; begin < count; begin += n, steps += sizeof(float)) {
    n = count - begin < block ? count - begin : block;
    const std::int32_t stored = load_vector<std::int32_t>(steps);
    const F32 factors = broadcast(float_of(stored & 0x7FFFFFFF) * weight);
    const auto decode_all = [&](auto adjust) {
      for_registers(n, [&](std::size_t i, std::size_t lanes) {
        std::byte* to = dst + (begin + i) * sizeof(float);
        const I32 code = load_codes<Codes>(codes + begin + i, lanes);
        F32 v = Codes::decode(code) * factors;
        adjust(code, v);
        if constexpr (kAdds) v = load_part<F32>(to, lanes) + v;
        store_part(to, v, lanes);
      });
    };
    if (stored >= 0) {
      decode_all([](I32, F32&) {});
    } else {
      decode_all([](I32 code, F32& v) {
        v = code == Codes::kInfinity           ? splat<F32>(__builtin_inff())
            : code == Codes::kNegativeInfinity ? splat<F32>(-__builtin_inff())
            : code == Codes::kNaN              ? splat<F32>(__builtin_nanf(""))
                                               : v;
      });
    }
  }
}

template <class Codes>
constexpr QuantizeKernels kKernels = {quantize_kernel<Codes>, dequantize_kernel<Codes, false>,
                                      dequantize_kernel<Codes, true>};

}  // namespace

constinit const QuantizeSet kQuantizeSet = {COLLECTIVES_ISA_NAME, kKernels<Int8Codes>, kKernels<Float8Codes>};

}  // namespace collectives::COLLECTIVES_ISA
