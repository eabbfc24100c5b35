// Element formats: how elements become accumulators and back. Part of reduce.inl.
//
// A register holds accumulators, as many as fit the CPU's vector width. A step is what one load and one store
// of a format handle: kParts registers. A format has
//   Element, Register   the accumulators' type, and a vector of it
//   kParts              registers in a step
//   kElementBytes       bytes of an element in memory
//   kStepBytes          bytes of a step in memory
//   load, store         between kStepBytes of memory (any alignment) and kParts registers; `store` rounds to
//                       nearest even and makes every NaN the canonical one
// Each format decides which element lies in which lane of which register, since lanes are never combined.
//
// Floating-point arithmetic here is IEEE 754 lane by lane and without contraction, so that every vector width
// gives the same bits.

template <class T, std::size_t N>
using VectorOf [[gnu::vector_size(sizeof(T) * N)]] = T;

constexpr std::size_t kVectorBytes = COLLECTIVES_VECTOR_BYTES;
constexpr std::size_t kFloatLanes = kVectorBytes / sizeof(float);

using F32 = VectorOf<float, kFloatLanes>;
using F64 = VectorOf<double, kVectorBytes / sizeof(double)>;
using I32 = VectorOf<std::int32_t, kFloatLanes>;
using U32 = VectorOf<std::uint32_t, kFloatLanes>;

template <class V>
inline V load_vector(const std::byte* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store_vector(std::byte* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// A vector of equal lanes. (Adding a scalar to a vector of zeros would lose the sign of -0.)
template <class V, class T>
inline V splat(T value) {
  if constexpr (__is_same(V, T)) {
    return value;
  } else {
    V v;
    for (std::size_t i = 0; i < sizeof(V) / sizeof(T); ++i) v[i] = value;
    return v;
  }
}

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Lanes where a < b, for lanes without their highest bit: only such comparisons are cheap on every CPU.
inline I32 below(U32 a, U32 b) { return bits_as<I32>(a) < bits_as<I32>(b); }

inline F32 with_canonical_nan(F32 v) { return v == v ? v : splat<F32>(__builtin_nanf("")); }
inline F64 with_canonical_nan(F64 v) { return v == v ? v : splat<F64>(__builtin_nan("")); }

// A format whose elements are their own accumulators.
template <class T>
struct Direct {
  using Element = T;
  using Register = VectorOf<T, kVectorBytes / sizeof(T)>;
  static constexpr int kParts = 1;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr std::size_t kStepBytes = kVectorBytes;
  static void load(const std::byte* from, Register (&parts)[1]) { parts[0] = load_vector<Register>(from); }
};

template <class T>
struct Integer : Direct<T> {
  using Register = typename Direct<T>::Register;
  static void store(std::byte* to, const Register (&parts)[1]) { store_vector(to, parts[0]); }
};

// One byte; anything but 0 counts as true, and 1 is stored.
struct Boolean : Integer<std::uint8_t> {
  static void load(const std::byte* from, Register (&parts)[1]) {
    parts[0] = bits_as<Register>(load_vector<Register>(from) != 0) & 1;
  }
};

template <class T>
struct Float : Direct<T> {
  using Register = typename Direct<T>::Register;
  static void store(std::byte* to, const Register (&parts)[1]) {
    store_vector(to, with_canonical_nan(parts[0]));
  }
};

// Small floats. A vector of memory is seen as 32-bit words, each holding kParts elements; part p takes the
// p-th of every word, so that no element changes its lane.
template <std::size_t kBytes>
struct Packed {
  using Element = float;
  using Register = F32;
  static constexpr int kParts = static_cast<int>(4 / kBytes);
  static constexpr std::size_t kElementBytes = kBytes;
  static constexpr std::size_t kStepBytes = kVectorBytes;
  static constexpr int kBits = 8 * static_cast<int>(kBytes);

  // Part p of every word, moved to the word's highest bits; below it is what is left of the other parts.
  static U32 to_top(U32 words, int p) { return words << (32 - kBits * (p + 1)); }
};

struct BFloat16 : Packed<2> {
  static void load(const std::byte* from, F32 (&parts)[2]) {
    const U32 words = load_vector<U32>(from);
    parts[0] = bits_as<F32>(words << 16);
    parts[1] = bits_as<F32>(words & 0xFFFF0000U);
  }
  static void store(std::byte* to, const F32 (&parts)[2]) {
    store_vector(to, rounded(parts[0]) >> 16 | (rounded(parts[1]) & 0xFFFF0000U));
  }

 private:
  // The element in the upper half of each lane. Adding just under half a unit, and one more where the kept
  // part is odd, rounds to nearest even; the carry runs into the exponent, as it should.
  static U32 rounded(F32 v) {
    const U32 bits = bits_as<U32>(v);
    return v == v ? bits + 0x7FFF + ((bits >> 16) & 1) : splat<U32>(0x7FC00000U);
  }
};

constexpr float power_of_two(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}

// The bits of the float32 that is 2 to the power `exponent`.
constexpr std::uint32_t bits_of_power_of_two(int exponent) {
  return static_cast<std::uint32_t>(exponent + 127) << 23;
}

// A float of 8 or 16 bits in whole: a sign bit, exponent bits, and Spec::kMantissaBits. Magnitudes are codes
// without the sign. Spec says what the top magnitudes mean:
//   kInfinity    the magnitude of infinity, all above it being NaN; 0 where the format has none
//   kNaN         the code that is stored for NaN
//   kSignedZero  whether there is a negative zero; otherwise its code is the only NaN, and stands for overflow
//   kOverflow    with a negative zero, the magnitude that stands for everything too large
// Overflow becomes what torch makes of it (2.12 and later, where e4m3fn saturates).
template <class Spec>
struct SmallFloat : Packed<sizeof(typename Spec::Code)> {
  using Base = Packed<sizeof(typename Spec::Code)>;
  using Base::kBits, Base::kParts;
  static constexpr int kUnused = 32 - kBits;
  static constexpr std::uint32_t kSign = 1U << (kBits - 1);
  static constexpr int kShift = 23 - Spec::kMantissaBits;
  static constexpr int kMinExponent = 1 - Spec::kBias;  // of a normal number
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Spec::kBias);
  // 2 to the power kMagic has the unit of the format's subnormals as the unit of its last place.
  static constexpr int kMagic = kMinExponent - Spec::kMantissaBits + 23;

  static void load(const std::byte* from, F32 (&parts)[kParts]) {
    const U32 words = load_vector<U32>(from);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) parts[p] = decoded(Base::to_top(words, p));
  }

  static void store(std::byte* to, const F32 (&parts)[kParts]) {
    U32 words = encoded(parts[0]);
#pragma GCC unroll 4
    for (int p = 1; p < kParts; ++p) words |= encoded(parts[p]) << (kBits * p);
    store_vector(to, words);
  }

 private:
  static F32 decoded(U32 top) {
    const U32 sign = top & 0x80000000U;
    const U32 magnitude = (top & 0x7FFFFFFFU) >> kUnused;
    const U32 normal = (magnitude << kShift) + (kRebias << 23);
    const F32 multiple = __builtin_convertvector(bits_as<I32>(magnitude), F32);
    const U32 subnormal = bits_as<U32>(multiple * power_of_two(kMinExponent - Spec::kMantissaBits));
    U32 bits = below(magnitude, splat<U32>(1U << Spec::kMantissaBits)) ? subnormal : normal;
    if constexpr (Spec::kInfinity != 0) {
      bits |= below(magnitude, splat<U32>(Spec::kInfinity)) ? U32{} : splat<U32>(0x7F800000U);
      return bits_as<F32>(bits | sign);
    } else if constexpr (Spec::kSignedZero) {
      return bits_as<F32>((magnitude == Spec::kNaN ? splat<U32>(0x7FC00000U) : bits) | sign);
    } else {
      return bits_as<F32>((top >> kUnused) == Spec::kNaN ? splat<U32>(0x7FC00000U) : bits | sign);
    }
  }

  // The code, in the lowest bits.
  static U32 encoded(F32 v) {
    const U32 bits = bits_as<U32>(v);
    const U32 magnitude = bits & 0x7FFFFFFFU;
    const U32 sign = (bits >> kUnused) & kSign;
    // Normal numbers as in BFloat16; below them the addition of 2^kMagic does the rounding.
    const U32 odd = (magnitude >> kShift) & 1;
    const U32 normal =
        ((magnitude + ((1U << (kShift - 1)) - 1) + odd) >> kShift) - (kRebias << Spec::kMantissaBits);
    const U32 subnormal =
        bits_as<U32>(bits_as<F32>(magnitude) + power_of_two(kMagic)) - bits_of_power_of_two(kMagic);
    U32 code = below(magnitude, splat<U32>(bits_of_power_of_two(kMinExponent))) ? subnormal : normal;
    if constexpr (Spec::kSignedZero) {
      code = below(splat<U32>(Spec::kOverflow), code) ? splat<U32>(Spec::kOverflow) : code;
      return v == v ? code | sign : splat<U32>(Spec::kNaN);
    } else {
      const U32 with_sign = code == 0 ? code : code | sign;
      return below(code, splat<U32>(kSign)) ? with_sign : splat<U32>(Spec::kNaN);
    }
  }
};

struct Float8E4M3FN {
  using Code = std::uint8_t;
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr std::uint32_t kInfinity = 0, kOverflow = 0x7E, kNaN = 0x7F;
  static constexpr bool kSignedZero = true;
};

struct Float8E5M2 {
  using Code = std::uint8_t;
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr std::uint32_t kInfinity = 0x7C, kOverflow = 0x7C, kNaN = 0x7F;
  static constexpr bool kSignedZero = true;
};

struct Float8E4M3FNUZ {
  using Code = std::uint8_t;
  static constexpr int kMantissaBits = 3, kBias = 8;
  static constexpr std::uint32_t kInfinity = 0, kNaN = 0x80;
  static constexpr bool kSignedZero = false;
};

struct Float8E5M2FNUZ {
  using Code = std::uint8_t;
  static constexpr int kMantissaBits = 2, kBias = 16;
  static constexpr std::uint32_t kInfinity = 0, kNaN = 0x80;
  static constexpr bool kSignedZero = false;
};

// float16 on CPUs without instructions for it.
struct Binary16 {
  using Code = std::uint16_t;
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr std::uint32_t kInfinity = 0x7C00, kOverflow = 0x7C00, kNaN = 0x7E00;
  static constexpr bool kSignedZero = true;
};

#if COLLECTIVES_VECTOR_BYTES > 16 || defined(__aarch64__)

#if COLLECTIVES_VECTOR_BYTES == 64
// The masked forms, with all lanes on: the others are written in gcc 12's header so that it warns of an
// uninitialised variable there (gcc bug 105593).
inline F32 widened_half(const std::byte* from) {
  return bits_as<F32>(_mm512_maskz_cvtph_ps(0xFFFF, load_vector<__m256i>(from)));
}
inline __m256i narrowed_half(F32 v) {
  return _mm512_maskz_cvtps_ph(0xFFFF, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif COLLECTIVES_VECTOR_BYTES == 32
inline F32 widened_half(const std::byte* from) {
  return bits_as<F32>(_mm256_cvtph_ps(load_vector<__m128i>(from)));
}
inline __m128i narrowed_half(F32 v) {
  return _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
inline F32 widened_half(const std::byte* from) {
  return bits_as<F32>(vcvt_f32_f16(load_vector<float16x4_t>(from)));
}
inline float16x4_t narrowed_half(F32 v) { return vcvt_f16_f32(bits_as<float32x4_t>(v)); }
#endif

struct Float16 {
  using Element = float;
  using Register = F32;
  static constexpr int kParts = 1;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kStepBytes = kVectorBytes / 2;
  static void load(const std::byte* from, F32 (&parts)[1]) { parts[0] = widened_half(from); }
  static void store(std::byte* to, const F32 (&parts)[1]) {
    store_vector(to, narrowed_half(with_canonical_nan(parts[0])));
  }
};

#else
using Float16 = SmallFloat<Binary16>;
#endif

// Code e stands for 2 to the power e - 127, and 255 for NaN: no sign, no zero. Rounding is to the nearest
// power of two, 1.5 of one upward; the sign is dropped, infinity is NaN.
struct Float8E8M0FNU : Packed<1> {
  static void load(const std::byte* from, F32 (&parts)[4]) {
    const U32 words = load_vector<U32>(from);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const U32 exponent = (to_top(words, p) >> 1) & 0x7F800000U;
      // The mantissa bit that makes 2^-127 of code 0, and a NaN of code 255.
      const I32 extreme = (exponent == 0) | (exponent == 0x7F800000U);
      parts[p] = bits_as<F32>(exponent | (bits_as<U32>(extreme) & 0x00400000U));
    }
  }
  static void store(std::byte* to, const F32 (&parts)[4]) {
    U32 words{};
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) words |= encoded(parts[p]) << (8 * p);
    store_vector(to, words);
  }

 private:
  static U32 encoded(F32 v) {
    const U32 magnitude = bits_as<U32>(v) & 0x7FFFFFFFU;
    // Half of the smallest normal number is code 0 itself, so there the tie goes down. Infinity and NaN round
    // to 255 or, with the highest mantissa bit, to 256.
    const U32 half =
        below(magnitude, splat<U32>(0x00800000U)) ? splat<U32>(0x003FFFFFU) : splat<U32>(0x00400000U);
    const U32 code = (magnitude + half) >> 23;
    return code - (code >> 8);
  }
};
