#include "elements.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace nccl_double {
namespace {

// A float of up to 16 bits with an exponent field of E bits and a mantissa field of M bits. Without
// infinities, the largest code is NaN and what lies beyond the largest number becomes that number.
template <int E, int M, bool kInfinities, typename Bits>
struct SmallFloat {
  Bits bits;

  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr int kLargestField = (1 << E) - 1;

  static float largest() {
    const int field = kInfinities ? kLargestField - 1 : kLargestField;
    const int mantissa = kInfinities ? (1 << M) - 1 : (1 << M) - 2;
    return std::ldexp(static_cast<float>((1 << M) + mantissa), field - kBias - M);
  }

  operator float() const {
    const int field = (bits >> M) & kLargestField;
    const int mantissa = bits & ((1 << M) - 1);
    float value;
    if (field == kLargestField && kInfinities) {
      value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    } else if (!kInfinities && field == kLargestField && mantissa == (1 << M) - 1) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (field == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - M);
    } else {
      value = std::ldexp(static_cast<float>((1 << M) + mantissa), field - kBias - M);
    }
    return bits >> (E + M) ? -value : value;
  }

  static SmallFloat of(float value) {
    const int sign = std::signbit(value) ? 1 << (E + M) : 0;
    if (std::isnan(value)) return {static_cast<Bits>(sign | ((1 << (E + M)) - 1))};
    float size = std::fabs(value);
    const int exponent = size == 0 ? 1 - kBias : std::max(std::ilogb(std::min(size, largest())), 1 - kBias);
    size = std::isinf(size) ? size : std::ldexp(std::nearbyint(std::ldexp(size, M - exponent)), exponent - M);
    if (size > largest()) {
      if (kInfinities) return {static_cast<Bits>(sign | (kLargestField << M))};
      size = largest();
    }
    const int field = size < std::ldexp(1.0f, 1 - kBias) ? 0 : std::ilogb(size) + kBias;
    const int units = static_cast<int>(std::ldexp(size, M - (field ? field - kBias : 1 - kBias)));
    return {static_cast<Bits>(sign | (field ? (field << M) + units - (1 << M) : units))};
  }
};

using Float16 = SmallFloat<5, 10, true, std::uint16_t>;
using Bfloat16 = SmallFloat<8, 7, true, std::uint16_t>;
using Float8e4m3 = SmallFloat<4, 3, false, std::uint8_t>;
using Float8e5m2 = SmallFloat<5, 2, true, std::uint8_t>;

// Calls `use` with a value of the type that `type` names.
template <typename Use>
void with_type(int type, Use use) {
  switch (type) {
    case kInt8:
      return use(std::int8_t{});
    case kUint8:
      return use(std::uint8_t{});
    case kInt32:
      return use(std::int32_t{});
    case kUint32:
      return use(std::uint32_t{});
    case kInt64:
      return use(std::int64_t{});
    case kUint64:
      return use(std::uint64_t{});
    case kFloat16:
      return use(Float16{});
    case kFloat32:
      return use(float{});
    case kFloat64:
      return use(double{});
    case kBfloat16:
      return use(Bfloat16{});
    case kFloat8e4m3:
      return use(Float8e4m3{});
    default:
      return use(Float8e5m2{});
  }
}

// The type to compute in: unsigned for integers, so that sums wrap around.
template <typename T>
struct Wide {
  using type = float;
};
template <typename T>
  requires std::is_arithmetic_v<T>
struct Wide<T> {
  using type = T;
};

template <typename T>
T load(const std::byte* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T, typename W>
void store(std::byte* data, std::size_t index, W wide) {
  T value;
  if constexpr (std::is_arithmetic_v<T>) {
    value = wide;
  } else {
    value = T::of(wide);
  }
  std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

template <typename W>
W times(W left, W right) {
  if constexpr (std::is_integral_v<W>) {
    return static_cast<W>(static_cast<std::uint64_t>(left) * static_cast<std::uint64_t>(right));
  } else {
    return left * right;
  }
}

template <typename W>
W plus(W left, W right) {
  if constexpr (std::is_integral_v<W>) {
    return static_cast<W>(static_cast<std::uint64_t>(left) + static_cast<std::uint64_t>(right));
  } else {
    return left + right;
  }
}

template <typename W>
W combine(int op, W left, W right) {
  switch (op) {
    case kProd:
      return times(left, right);
    case kMax:
      return std::max(left, right);
    case kMin:
      return std::min(left, right);
    default:
      return plus(left, right);
  }
}

}  // namespace

std::size_t element_bytes(int type) {
  std::size_t bytes = 0;
  with_type(type, [&](auto value) { bytes = sizeof(value); });
  return bytes;
}

void reduce(int type, int op, const std::vector<const std::byte*>& inputs, std::byte* output,
            std::size_t count) {
  with_type(type, [&](auto example) {
    using T = decltype(example);
    using W = typename Wide<T>::type;
    // As NCCL: integers are divided in the end, others multiplied by an inverse of their own type before.
    W inverse = 1;
    if constexpr (!std::is_integral_v<W>) {
      std::byte rounded[sizeof(T)];
      store<T>(rounded, 0, W(1) / static_cast<W>(inputs.size()));
      if (op == kAvg) inverse = load<T>(rounded, 0);
    }
    const auto given = [&](std::size_t k, std::size_t i) {
      std::byte scaled[sizeof(T)];
      store<T>(scaled, 0, times<W>(load<T>(inputs[k], i), inverse));
      return static_cast<W>(load<T>(scaled, 0));
    };
    for (std::size_t i = 0; i < count; ++i) {
      W value = given(0, i);
      for (std::size_t k = 1; k < inputs.size(); ++k) value = combine<W>(op, value, given(k, i));
      if (std::is_integral_v<W> && op == kAvg) value = static_cast<W>(value / static_cast<W>(inputs.size()));
      store<T>(output, i, value);
    }
  });
}

void multiply(int type, const std::byte* factor, const std::byte* input, std::byte* output,
              std::size_t count) {
  with_type(type, [&](auto example) {
    using T = decltype(example);
    using W = typename Wide<T>::type;
    const W by = load<T>(factor, 0);
    for (std::size_t i = 0; i < count; ++i) store<T>(output, i, times<W>(load<T>(input, i), by));
  });
}

}  // namespace nccl_double
