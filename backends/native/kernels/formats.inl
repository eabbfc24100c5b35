// Element formats: how a vector of elements is loaded into accumulators and stored from them. Part of
// reduce.inl.
//
// A format has
//   Vector          the accumulators of one step
//   kLanes          elements in a step
//   kElementBytes   bytes of an element in memory
//   load, store     between memory (any alignment) and a Vector; `store` rounds to nearest even and makes
//   every NaN
//                   the canonical one
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
using U16 = VectorOf<std::uint16_t, kFloatLanes>;
using U8 = VectorOf<std::uint8_t, kFloatLanes>;

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
  V v;
  for (std::size_t i = 0; i < sizeof(V) / sizeof(T); ++i) v[i] = value;
  return v;
}

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
struct Integer {
  using Element = T;
  using Vector = VectorOf<T, kVectorBytes / sizeof(T)>;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(T);
  static constexpr std::size_t kElementBytes = sizeof(T);
  static Vector load(const std::byte* from) { return load_vector<Vector>(from); }
  static void store(std::byte* to, Vector v) { store_vector(to, v); }
};

// One byte; anything but 0 counts as true, and 1 is stored.
struct Boolean {
  using Element = std::uint8_t;
  using Vector = VectorOf<std::uint8_t, kVectorBytes>;
  static constexpr std::size_t kLanes = kVectorBytes;
  static constexpr std::size_t kElementBytes = 1;
  static Vector load(const std::byte* from) {
    const Vector v = load_vector<Vector>(from);
    return bits_as<Vector>(v != 0) & 1;
  }
  static void store(std::byte* to, Vector v) { store_vector(to, v); }
};

struct Float32 {
  using Element = float;
  using Vector = F32;
  static constexpr std::size_t kLanes = kFloatLanes;
  static constexpr std::size_t kElementBytes = 4;
  static F32 load(const std::byte* from) { return load_vector<F32>(from); }
  static void store(std::byte* to, F32 v) { store_vector(to, v == v ? v : splat<F32>(__builtin_nanf(""))); }
};

struct Float64 {
  using Element = double;
  using Vector = F64;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(double);
  static constexpr std::size_t kElementBytes = 8;
  static F64 load(const std::byte* from) { return load_vector<F64>(from); }
  static void store(std::byte* to, F64 v) { store_vector(to, v == v ? v : splat<F64>(__builtin_nan(""))); }
};

struct BFloat16 {
  using Element = float;
  using Vector = F32;
  static constexpr std::size_t kLanes = kFloatLanes;
  static constexpr std::size_t kElementBytes = 2;
  static F32 load(const std::byte* from) {
    return bits_as<F32>(__builtin_convertvector(load_vector<U16>(from), U32) << 16);
  }
  static void store(std::byte* to, F32 v) {
    const U32 bits = bits_as<U32>(v);
    const U32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const U32 result = v == v ? rounded : splat<U32>(0x7FC0U);
    store_vector(to, __builtin_convertvector(result, U16));
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
//   kInfinity  the magnitude of infinity, all above it being NaN; 0 where the format has none
//   kNaN       the code that is stored for NaN
//   kSignedZero  whether there is a negative zero; otherwise its code is the only NaN, and overflow gives
//   that kOverflow  else the magnitude that stands for everything too large
// Overflow is what torch makes of it (2.12 and later, where e4m3fn saturates).
template <class Spec>
struct SmallFloat {
  using Codes = VectorOf<typename Spec::Code, kFloatLanes>;
  using Element = float;
  using Vector = F32;
  static constexpr std::size_t kLanes = kFloatLanes;
  static constexpr std::size_t kElementBytes = sizeof(typename Spec::Code);

  static constexpr int kBits = 8 * static_cast<int>(kElementBytes);
  static constexpr std::uint32_t kSign = 1U << (kBits - 1);
  static constexpr int kShift = 23 - Spec::kMantissaBits;
  static constexpr int kMinExponent = 1 - Spec::kBias;  // of a normal number
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Spec::kBias);
  // 2 to the power kMagic has the unit of the format's subnormals as the unit of its last place.
  static constexpr int kMagic = kMinExponent - Spec::kMantissaBits + 23;

  static F32 load(const std::byte* from) {
    const U32 code = __builtin_convertvector(load_vector<Codes>(from), U32);
    const U32 magnitude = code & (kSign - 1);
    const U32 normal = (magnitude << kShift) + (kRebias << 23);
    const F32 multiple = __builtin_convertvector(bits_as<I32>(magnitude), F32);
    const U32 subnormal = bits_as<U32>(multiple * power_of_two(kMinExponent - Spec::kMantissaBits));
    U32 bits = magnitude < (1U << Spec::kMantissaBits) ? subnormal : normal;
    if constexpr (Spec::kInfinity != 0) {
      bits = magnitude >= Spec::kInfinity ? (magnitude << kShift) | 0x7F800000U : bits;
      return bits_as<F32>(bits | (code & kSign) << (32 - kBits));
    } else {
      const U32 nan = Spec::kSignedZero ? magnitude : code;
      return bits_as<F32>(nan == Spec::kNaN ? splat<U32>(0x7FC00000U)
                                            : bits | (code & kSign) << (32 - kBits));
    }
  }

  static void store(std::byte* to, F32 v) {
    const U32 bits = bits_as<U32>(v);
    const U32 sign = bits & 0x80000000U;
    const U32 magnitude = bits ^ sign;
    // Adding just under half a unit, and one more where the kept part is odd, rounds to nearest even; the
    // carry may run into the exponent, as it should. Below the normal numbers the addition of 2^kMagic does
    // the rounding.
    const U32 odd = (magnitude >> kShift) & 1;
    const U32 normal =
        ((magnitude + ((1U << (kShift - 1)) - 1) + odd) >> kShift) - (kRebias << Spec::kMantissaBits);
    const U32 subnormal =
        bits_as<U32>(bits_as<F32>(magnitude) + power_of_two(kMagic)) - bits_of_power_of_two(kMagic);
    U32 code = magnitude < bits_of_power_of_two(kMinExponent) ? subnormal : normal;
    if constexpr (Spec::kSignedZero) {
      code = code > Spec::kOverflow ? splat<U32>(Spec::kOverflow) : code;
      code |= sign >> (32 - kBits);
    } else {
      const U32 signed_code = code == 0 ? code : code | sign >> (32 - kBits);
      code = code >= kSign ? splat<U32>(Spec::kNaN) : signed_code;
    }
    code = magnitude > 0x7F800000U ? splat<U32>(Spec::kNaN) : code;
    store_vector(to, __builtin_convertvector(code, Codes));
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

struct Float16Spec {
  using Code = std::uint16_t;
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr std::uint32_t kInfinity = 0x7C00, kOverflow = 0x7C00, kNaN = 0x7E00;
  static constexpr bool kSignedZero = true;
};

#if defined(__AVX512F__)
// The masked forms, with all lanes on: the others are written in gcc 12's header so that it warns of an
// uninitialised variable there (gcc bug 105593).
struct Float16 : SmallFloat<Float16Spec> {
  static F32 load(const std::byte* from) {
    return bits_as<F32>(_mm512_maskz_cvtph_ps(0xFFFF, load_vector<__m256i>(from)));
  }
  static void store(std::byte* to, F32 v) {
    const F32 result = v == v ? v : splat<F32>(__builtin_nanf(""));
    store_vector(to, _mm512_maskz_cvtps_ph(0xFFFF, bits_as<__m512>(result),
                                           _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#elif defined(__F16C__)
struct Float16 : SmallFloat<Float16Spec> {
  static F32 load(const std::byte* from) { return bits_as<F32>(_mm256_cvtph_ps(load_vector<__m128i>(from))); }
  static void store(std::byte* to, F32 v) {
    const F32 result = v == v ? v : splat<F32>(__builtin_nanf(""));
    store_vector(to, _mm256_cvtps_ph(bits_as<__m256>(result), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#elif defined(__aarch64__)
struct Float16 : SmallFloat<Float16Spec> {
  static F32 load(const std::byte* from) {
    return bits_as<F32>(vcvt_f32_f16(load_vector<float16x4_t>(from)));
  }
  static void store(std::byte* to, F32 v) {
    const F32 result = v == v ? v : splat<F32>(__builtin_nanf(""));
    store_vector(to, vcvt_f16_f32(bits_as<float32x4_t>(result)));
  }
};
#else
using Float16 = SmallFloat<Float16Spec>;
#endif

// Code e stands for 2 to the power e - 127, and 255 for NaN: no sign, no zero. Rounding is to the nearest
// power of two, 1.5 of one upward; the sign is dropped, infinity is NaN.
struct Float8E8M0FNU {
  using Element = float;
  using Vector = F32;
  using Codes = VectorOf<std::uint8_t, kFloatLanes>;
  static constexpr std::size_t kLanes = kFloatLanes;
  static constexpr std::size_t kElementBytes = 1;
  static F32 load(const std::byte* from) {
    const U32 code = __builtin_convertvector(load_vector<Codes>(from), U32);
    const U32 finite = code == 0 ? splat<U32>(0x00400000U) : code << 23;
    return bits_as<F32>(code == 0xFF ? splat<U32>(0x7FC00000U) : finite);
  }
  static void store(std::byte* to, F32 v) {
    const U32 magnitude = bits_as<U32>(v) & 0x7FFFFFFFU;
    // Half of the smallest normal number is code 0 itself, so there the tie goes down.
    const U32 half = magnitude < 0x00800000U ? splat<U32>(0x003FFFFFU) : splat<U32>(0x00400000U);
    const U32 code = (magnitude + half) >> 23;
    store_vector(to, __builtin_convertvector(code > 0xFF ? splat<U32>(0xFFU) : code, Codes));
  }
};
