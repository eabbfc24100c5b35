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

// Operations: what becomes of a source's elements as they enter the accumulators, how they are combined with
// those of the sources before, and what becomes of the accumulators at the end.

template <class Format>
struct Identity {
  using Register = typename Format::Register;
  explicit Identity(double) {}
  Register enter(Register x) const { return x; }
  Register finish(Register a) const { return a; }
};

template <class Format>
struct Sum : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return a + x; }
};

template <class Format>
struct Average : Sum<Format> {
  using Register = typename Format::Register;
  explicit Average(double factor)
      : Sum<Format>(factor), divisor(splat<Register>(static_cast<typename Format::Element>(factor))) {}
  Register finish(Register a) const { return a / divisor; }
  Register divisor;
};

// Of terms so small that no sum of them overflows. The power of two is exact, so that the mean is that of
// Average, bit by bit, unless a term gets subnormal.
template <class Format>
struct ScaledAverage : Average<Format> {
  using Register = typename Format::Register;
  explicit ScaledAverage(double factor) : Average<Format>(factor) {
    const double power = power_from(factor);
    up = splat<Register>(static_cast<typename Format::Element>(power));
    down = splat<Register>(static_cast<typename Format::Element>(1 / power));
  }
  Register enter(Register x) const { return x * down; }
  Register finish(Register a) const { return a / this->divisor * up; }
  Register up, down;
};

// How an operation computes again what its accumulators could not hold; void for those that do not.
template <class Op>
struct Repair {
  using Type = void;
};
template <class Format>
struct Repair<Average<Format>> {
  using Type = ScaledAverage<Format>;
};

template <class Format>
struct PremulSum : Sum<Format> {
  using Register = typename Format::Register;
  explicit PremulSum(double value)
      : Sum<Format>(value), factor(splat<Register>(static_cast<typename Format::Element>(value))) {}
  Register enter(Register x) const { return x * factor; }
  Register factor;
};

// ScaledAverage of terms that PremulSum has multiplied by its power of two.
template <class Format>
struct Descaled : ScaledAverage<Format> {
  using ScaledAverage<Format>::ScaledAverage;
  using Register = typename Format::Register;
  Register enter(Register x) const { return x; }
};

template <class Format>
struct Product : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return a * x; }
};

// x != x only for NaN. A NaN accumulator loses no comparison and stays.
// NOLINTBEGIN(misc-redundant-expression)
template <class Format>
struct Min : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return ((x < a) | (x != x)) ? x : a; }
};

template <class Format>
struct Max : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return ((x > a) | (x != x)) ? x : a; }
};
// NOLINTEND(misc-redundant-expression)

template <class Format>
struct And : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return a & x; }
};

template <class Format>
struct Or : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return a | x; }
};

template <class Format>
struct Xor : Identity<Format> {
  using Identity<Format>::Identity;
  using Register = typename Format::Register;
  Register combine(Register a, Register x) const { return a ^ x; }
};

template <class Register>
inline bool all_zero(Register v) {
  bool all = true;
  for (std::size_t i = 0; i < sizeof(Register) / sizeof(v[0]); ++i) all = all & (v[i] == 0);
  return all;
}

// The accumulators of kSteps steps.
template <class Format, int kSteps>
struct Accumulators {
  using Register = typename Format::Register;
  static constexpr std::size_t kBytes = kSteps * Format::kStepBytes;

  template <class Op>
  void begin(const std::byte* from, const Op& op) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      Format::load(from + static_cast<std::size_t>(s) * Format::kStepBytes, steps[s]);
#pragma GCC unroll 4
      for (int p = 0; p < Format::kParts; ++p) steps[s][p] = op.enter(steps[s][p]);
    }
  }

  template <class Op>
  void join(const std::byte* from, const Op& op) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      Register terms[Format::kParts];
      Format::load(from + static_cast<std::size_t>(s) * Format::kStepBytes, terms);
#pragma GCC unroll 4
      for (int p = 0; p < Format::kParts; ++p) steps[s][p] = op.combine(steps[s][p], op.enter(terms[p]));
    }
  }

  template <class Op>
  void end(const Op& op) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 4
      for (int p = 0; p < Format::kParts; ++p) steps[s][p] = op.finish(steps[s][p]);
    }
  }

  // The sum of each element less itself, which is NaN for one that is infinite or NaN and zero for any other.
  Register excess() const {
    Register sum{};
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 4
      for (int p = 0; p < Format::kParts; ++p) sum += steps[s][p] - steps[s][p];
    }
    return sum;
  }

  // Takes those elements from `others` that are infinite or NaN here.
  void replace(const Accumulators& others) {
    for (int s = 0; s < kSteps; ++s) {
      for (int p = 0; p < Format::kParts; ++p) {
        const Register difference = steps[s][p] - steps[s][p];
        steps[s][p] = difference == Register{} ? steps[s][p] : others.steps[s][p];
      }
    }
  }

  void store(std::byte* to) const {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      Format::store(to + static_cast<std::size_t>(s) * Format::kStepBytes, steps[s]);
    }
  }

  Register steps[kSteps][Format::kParts];
};

inline const std::byte* at(const void* source, std::size_t offset) {
  return static_cast<const std::byte*>(source) + offset;
}

template <class Format, class Op, int kSteps>
[[gnu::noinline, gnu::cold]] void repair(Accumulators<Format, kSteps>& accumulators,
                                         const void* const* sources, int n, std::size_t offset,
                                         double factor) {
  const Op op(factor);
  Accumulators<Format, kSteps> again;
  again.begin(at(sources[0], offset), op);
  for (int k = 1; k < n; ++k) again.join(at(sources[k], offset), op);
  again.end(op);
  accumulators.replace(again);
}

// As many sources are read side by side: more streams than that outrun the CPU's prefetching and, lying at
// equal offsets in their pages, evict each other from its first cache. Accumulators wait for the next group
// in a block that stays in that cache.
constexpr int kStreams = 8;
constexpr std::size_t kBlockBytes = 8192;

// Sources [first, last) of a chunk at `offset`. `carried` holds the accumulators between groups of sources.
template <class Format, class Op, int kSteps>
inline void reduce_chunk(std::byte* dst, std::byte* second, const void* const* sources, int n, int first,
                         int last, std::size_t offset, const Op& op, std::byte* carried, double factor) {
  Accumulators<Format, kSteps> accumulators;
  int k = first;
  if (first == 0) {
    accumulators.begin(at(sources[k++], offset), op);
  } else {
    __builtin_memcpy(&accumulators, carried, sizeof(accumulators));
  }
  for (; k < last; ++k) accumulators.join(at(sources[k], offset), op);
  if (last == n) {
    accumulators.end(op);
    using Repairing = typename Repair<Op>::Type;
    if constexpr (!__is_same(Repairing, void)) {
      if (!all_zero(accumulators.excess()))
        repair<Format, Repairing>(accumulators, sources, n, offset, factor);
    }
    accumulators.store(dst + offset);
    if (second != nullptr) accumulators.store(second + offset);
  } else {
    __builtin_memcpy(carried, &accumulators, sizeof(accumulators));
  }
}

// Every element is read from all sources before its places in `dst` and `second` are written, which is why
// these may be any of them.
template <class Format, template <class> class OpOf>
void reduce_kernel(std::byte* dst, std::byte* second, const std::byte* next, const void* const* sources,
                   int n, std::size_t bytes, double factor) {
  using Op = OpOf<Format>;
  constexpr int kSteps = 8 / Format::kParts;
  using Step = Accumulators<Format, 1>;
  using Chunk = Accumulators<Format, kSteps>;
  constexpr std::size_t kBlock = kBlockBytes / sizeof(Chunk) * Chunk::kBytes;

  const Op op(factor);
  const std::size_t whole = bytes - bytes % Step::kBytes;
  alignas(kVectorBytes) std::byte carried[kBlockBytes];
  for (std::size_t block = 0; block < whole; block += kBlock) {
    const std::size_t end = whole - block < kBlock ? whole : block + kBlock;
    for (int first = 0; first < n; first += kStreams) {
      const int last = n - first < kStreams ? n : first + kStreams;
      std::byte* carry = carried;
      std::size_t offset = block;
      for (; end - offset >= Chunk::kBytes; offset += Chunk::kBytes, carry += sizeof(Chunk)) {
        if (next != nullptr && first == 0) fetch(next + offset, Chunk::kBytes);
        reduce_chunk<Format, Op, kSteps>(dst, second, sources, n, first, last, offset, op, carry, factor);
      }
      for (; offset < end; offset += Step::kBytes, carry += sizeof(Step)) {
        reduce_chunk<Format, Op, 1>(dst, second, sources, n, first, last, offset, op, carry, factor);
      }
    }
  }

  // The last elements take the same vector code on a padded copy, so that no result depends on an element's
  // position.
  const std::size_t rest = bytes - whole;
  if (rest == 0) return;
  alignas(kVectorBytes) std::byte padded[Step::kBytes] = {};
  const auto reduce_rest = [&](Step& accumulators, const auto& with) {
    __builtin_memcpy(padded, at(sources[0], whole), rest);
    accumulators.begin(padded, with);
    for (int k = 1; k < n; ++k) {
      __builtin_memcpy(padded, at(sources[k], whole), rest);
      accumulators.join(padded, with);
    }
    accumulators.end(with);
  };
  Step accumulators;
  reduce_rest(accumulators, op);
  using Repairing = typename Repair<Op>::Type;
  if constexpr (!__is_same(Repairing, void)) {
    if (!all_zero(accumulators.excess())) {
      Step again;
      reduce_rest(again, Repairing(factor));
      accumulators.replace(again);
    }
  }
  accumulators.store(padded);
  __builtin_memcpy(dst + whole, padded, rest);
  if (second != nullptr) __builtin_memcpy(second + whole, padded, rest);
}

#include "kernels/converting.inl"

template <class Format, template <class> class OpOf>
constexpr void add(InstructionSet& set, DType dtype, ReduceOp op) {
  set.reduce[static_cast<int>(dtype)][static_cast<int>(op)] = reduce_kernel<Format, OpOf>;
}

template <class Format>
constexpr void add_sums(InstructionSet& set, DType dtype) {
  add<Format, Sum>(set, dtype, ReduceOp::sum);
  add<Format, Average>(set, dtype, ReduceOp::avg);
}

template <class Format>
constexpr void add_floating(InstructionSet& set, DType dtype) {
  add_sums<Format>(set, dtype);
  add<Format, Product>(set, dtype, ReduceOp::product);
  add<Format, Min>(set, dtype, ReduceOp::min);
  add<Format, Max>(set, dtype, ReduceOp::max);
  add<Format, PremulSum>(set, dtype, ReduceOp::premul_sum);
}

// Wrapping arithmetic knows no sign, so that both types share the unsigned kernels; bits know no width
// either.
template <class Unsigned>
constexpr void add_integer(InstructionSet& set, DType dtype) {
  add<Integer<Unsigned>, Sum>(set, dtype, ReduceOp::sum);
  add<Integer<Unsigned>, Product>(set, dtype, ReduceOp::product);
  add<Integer<std::uint64_t>, And>(set, dtype, ReduceOp::band);
  add<Integer<std::uint64_t>, Or>(set, dtype, ReduceOp::bor);
  add<Integer<std::uint64_t>, Xor>(set, dtype, ReduceOp::bxor);
}

template <class T, class Unsigned, class Wide>
constexpr void add_ordered(InstructionSet& set, DType dtype, Domain domain) {
  add<Integer<T>, Min>(set, dtype, ReduceOp::min);
  add<Integer<T>, Max>(set, dtype, ReduceOp::max);
  set.conversions[static_cast<int>(dtype)] = {widen_integers<T, Wide>, narrow_integers<Unsigned, Wide>,
                                              sizeof(T), domain};
}

template <class Format>
constexpr void add_small(InstructionSet& set, DType dtype) {
  using Elements = InOrder<Format>;
  set.conversions[static_cast<int>(dtype)] = {widen_floats<Elements>, narrow_floats<Elements>,
                                              Format::kElementBytes, Domain::float32};
}

template <class Format, template <class> class AverageOf>
constexpr void add_domain(InstructionSet& set, Domain domain) {
  set.kept[static_cast<int>(domain)] = {nullptr, nullptr, sizeof(typename Format::Element), domain};
  add_converting<Format, Sum>(set, domain, ReduceOp::sum);
  add_converting<Format, AverageOf>(set, domain, ReduceOp::avg);
}

constexpr InstructionSet make_instruction_set() noexcept {
  InstructionSet set{COLLECTIVES_ISA_NAME, {}, {}, {}, {}, copy_fetching, copy_past_cache};

  add<Boolean, Or>(set, DType::boolean, ReduceOp::sum);
  add<Boolean, Or>(set, DType::boolean, ReduceOp::max);
  add<Boolean, Or>(set, DType::boolean, ReduceOp::bor);
  add<Boolean, And>(set, DType::boolean, ReduceOp::product);
  add<Boolean, And>(set, DType::boolean, ReduceOp::min);
  add<Boolean, And>(set, DType::boolean, ReduceOp::band);
  add<Boolean, Xor>(set, DType::boolean, ReduceOp::bxor);

  add_integer<std::uint8_t>(set, DType::uint8);
  add_integer<std::uint8_t>(set, DType::int8);
  add_integer<std::uint16_t>(set, DType::uint16);
  add_integer<std::uint16_t>(set, DType::int16);
  add_integer<std::uint32_t>(set, DType::uint32);
  add_integer<std::uint32_t>(set, DType::int32);
  add_integer<std::uint64_t>(set, DType::uint64);
  add_integer<std::uint64_t>(set, DType::int64);
  add_ordered<std::uint8_t, std::uint8_t, double>(set, DType::uint8, Domain::float64);
  add_ordered<std::int8_t, std::uint8_t, double>(set, DType::int8, Domain::float64);
  add_ordered<std::uint16_t, std::uint16_t, double>(set, DType::uint16, Domain::float64);
  add_ordered<std::int16_t, std::uint16_t, double>(set, DType::int16, Domain::float64);
  add_ordered<std::uint32_t, std::uint32_t, double>(set, DType::uint32, Domain::float64);
  add_ordered<std::int32_t, std::uint32_t, double>(set, DType::int32, Domain::float64);
  add_ordered<std::uint64_t, std::uint64_t, Int128>(set, DType::uint64, Domain::int128);
  add_ordered<std::int64_t, std::uint64_t, Int128>(set, DType::int64, Domain::int128);

  add_floating<Float16>(set, DType::float16);
  add_floating<BFloat16>(set, DType::bfloat16);
  add_floating<Float<float>>(set, DType::float32);
  add_floating<Float<double>>(set, DType::float64);
  add<Float<float>, Descaled>(set, DType::float32, kDescaled);
  add<Float<double>, Descaled>(set, DType::float64, kDescaled);

  add_small<Float16>(set, DType::float16);
  add_small<BFloat16>(set, DType::bfloat16);
  add_small<SmallFloat<Float8E4M3FN>>(set, DType::float8_e4m3fn);
  add_sums<SmallFloat<Float8E4M3FN>>(set, DType::float8_e4m3fn);
  add_small<SmallFloat<Float8E5M2>>(set, DType::float8_e5m2);
  add_sums<SmallFloat<Float8E5M2>>(set, DType::float8_e5m2);
  add_small<SmallFloat<Float8E4M3FNUZ>>(set, DType::float8_e4m3fnuz);
  add_small<SmallFloat<Float8E5M2FNUZ>>(set, DType::float8_e5m2fnuz);
  add_small<Float8E8M0FNU>(set, DType::float8_e8m0fnu);

  add_domain<Exact, Quotient>(set, Domain::int128);
  add_domain<Float<double>, Quotient>(set, Domain::float64);
  add_domain<Float<float>, Average>(set, Domain::float32);
  add_converting<Float<float>, Product>(set, Domain::float32, ReduceOp::product);
  add_converting<Float<float>, Min>(set, Domain::float32, ReduceOp::min);
  add_converting<Float<float>, Max>(set, Domain::float32, ReduceOp::max);
  add_converting<Float<float>, PremulSum>(set, Domain::float32, ReduceOp::premul_sum);
  add_converting<Float<float>, Descaled>(set, Domain::float32, kDescaled);
  return set;
}

}  // namespace

constinit const InstructionSet kInstructionSet = make_instruction_set();

}  // namespace collectives::COLLECTIVES_ISA
