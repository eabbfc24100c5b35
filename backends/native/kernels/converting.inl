// Reductions through accumulators in memory, a block at a time: of the small floats that have no kernels of
// their own, of integers' averages, and in two steps, to and from the accumulators of one machine. Part of
// reduce.inl.
//
// In memory accumulators lie in the order of their elements, whatever the vector width: machines with
// different instruction sets exchange them.

using U16 = VectorOf<std::uint16_t, kFloatLanes>;
using U8 = VectorOf<std::uint8_t, kFloatLanes>;

template <std::size_t kBytes>
struct UnsignedOf {
  using Type = U16;
};
template <>
struct UnsignedOf<1> {
  using Type = U8;
};

inline U32 widened(U16 narrow) { return __builtin_convertvector(narrow, U32); }
// By steps, which compilers have instructions for.
inline U32 widened(U8 narrow) { return widened(__builtin_convertvector(narrow, U16)); }

// A small float's elements in their order: each in the lowest bits of a lane of its own, which is where a
// packed format expects the first part of a word.
template <class Format, int kPartsOfFormat = Format::kParts>
struct InOrder {
  using Register = typename Format::Register;
  using Narrow = typename UnsignedOf<Format::kElementBytes>::Type;
  static constexpr std::size_t kElementBytes = Format::kElementBytes;
  static constexpr std::size_t kStepBytes = sizeof(Narrow);

  static void load(const std::byte* from, Register (&parts)[1]) {
    std::byte words[kVectorBytes];
    store_vector(words, widened(load_vector<Narrow>(from)));
    Register all[Format::kParts];
    Format::load(words, all);
    parts[0] = all[0];
  }
  static void store(std::byte* to, const Register (&parts)[1]) {
    Register all[Format::kParts];
    for (int p = 0; p < Format::kParts; ++p) all[p] = parts[0];
    std::byte words[kVectorBytes];
    Format::store(words, all);
    store_vector(to, __builtin_convertvector(load_vector<U32>(words), Narrow));
  }
};

// The others keep their order as they are.
template <class Format>
struct InOrder<Format, 1> : Format {};

template <class Elements>
void widen_floats(std::byte* accumulators, const std::byte* elements, std::size_t count) {
  const std::size_t bytes = count * Elements::kElementBytes;
  std::size_t offset = 0;
  F32 parts[1];
  for (; bytes - offset >= Elements::kStepBytes;
       offset += Elements::kStepBytes, accumulators += sizeof(F32)) {
    Elements::load(elements + offset, parts);
    store_vector(accumulators, parts[0]);
  }
  if (offset == bytes) return;
  std::byte padded[Elements::kStepBytes] = {};
  __builtin_memcpy(padded, elements + offset, bytes - offset);
  Elements::load(padded, parts);
  store_vector(accumulators, parts[0]);
}

template <class Elements>
void narrow_floats(std::byte* elements, const std::byte* accumulators, std::size_t count) {
  const std::size_t bytes = count * Elements::kElementBytes;
  std::size_t offset = 0;
  for (; bytes - offset >= Elements::kStepBytes;
       offset += Elements::kStepBytes, accumulators += sizeof(F32)) {
    const F32 parts[1] = {load_vector<F32>(accumulators)};
    Elements::store(elements + offset, parts);
  }
  if (offset == bytes) return;
  const F32 parts[1] = {load_vector<F32>(accumulators)};
  std::byte padded[Elements::kStepBytes];
  Elements::store(padded, parts);
  __builtin_memcpy(elements + offset, padded, bytes - offset);
}

template <class T, class Wide>
void widen_integers(std::byte* accumulators, const std::byte* elements, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    T x;
    __builtin_memcpy(&x, elements + i * sizeof(T), sizeof(T));
    const auto wide = static_cast<Wide>(x);
    __builtin_memcpy(accumulators + i * sizeof(Wide), &wide, sizeof(Wide));
  }
}

// Truncates; what is left of a mean fits the elements' type, and both signs share its bits.
template <class Unsigned, class Wide>
void narrow_integers(std::byte* elements, const std::byte* accumulators, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Wide wide;
    __builtin_memcpy(&wide, accumulators + i * sizeof(Wide), sizeof(Wide));
    const auto x = static_cast<Unsigned>(static_cast<std::int64_t>(wide));
    __builtin_memcpy(elements + i * sizeof(Unsigned), &x, sizeof(Unsigned));
  }
}

// The sums of 64-bit integers. Those of fewer bits are exact in float64 up to kMaxAveragedIntegers elements,
// where the truncated quotient is exact as well: one that is no integer differs from the next by at least
// 2^-53 of itself.
__extension__ typedef __int128 Int128;

struct Exact {
  using Element = Int128;
  using Register = Int128;
  static constexpr int kParts = 1;
  static constexpr std::size_t kStepBytes = sizeof(Int128);
  static void load(const std::byte* from, Register (&parts)[1]) { parts[0] = load_vector<Register>(from); }
};

// An average of integers, whose sums do not overflow.
template <class Format>
struct Quotient : Average<Format> {
  using Average<Format>::Average;
};

// As many sources are widened before they are combined; a block of each then stays in the CPU's first cache.
constexpr int kWidened = 4;
constexpr std::size_t kWidenedBytes = 4096;
// At equal offsets in their pages blocks would hinder each other's loads and stores.
constexpr std::size_t kRoomBytes = kWidenedBytes + 4 * kCacheLine;

template <class Format>
struct ConvertingBlock {
  using Register = typename Format::Register;
  static constexpr int kSteps = sizeof(Register) == kVectorBytes ? 4 : 1;
  using Chunk = Accumulators<Format, kSteps>;
  static constexpr std::size_t kCount = kWidenedBytes / sizeof(typename Format::Element);

  const Conversion& from;
  const void* const* sources;
  int n;
  std::size_t begin;
  std::size_t count;

  // A source's accumulators, as whole chunks: in `room`, unless they are such where they lie.
  const std::byte* terms_of(const void* source, std::byte* room) const {
    const std::byte* elements = at(source, begin * from.element_bytes);
    if (from.widen == nullptr && count == kCount) return elements;
    const std::size_t bytes = count * sizeof(typename Format::Element);
    if (from.widen == nullptr) {
      __builtin_memcpy(room, elements, bytes);
    } else {
      from.widen(room, elements, count);
    }
    __builtin_memset(room + bytes, 0, chunk_bytes() - bytes);
    return room;
  }

  std::size_t chunk_bytes() const {
    return (count * sizeof(typename Format::Element) + sizeof(Chunk) - 1) / sizeof(Chunk) * sizeof(Chunk);
  }

  // Returns the sum of each accumulator less itself, which is zero where all of them are finite.
  template <class Op>
  Register fold(std::byte* total, const Op& op) const {
    alignas(kVectorBytes) std::byte rooms[kWidened][kRoomBytes];
    const std::byte* terms[kWidened];
    Register excess{};
    for (int first = 0; first < n; first += kWidened) {
      const int size = n - first < kWidened ? n - first : kWidened;
      for (int k = 0; k < size; ++k) terms[k] = terms_of(sources[first + k], rooms[k]);
      for (std::size_t offset = 0; offset < chunk_bytes(); offset += sizeof(Chunk)) {
        Chunk chunk;
        int k = 0;
        if (first == 0) {
          chunk.begin(terms[k++] + offset, op);
        } else {
          __builtin_memcpy(&chunk, total + offset, sizeof(Chunk));
        }
        for (; k < size; ++k) chunk.join(terms[k] + offset, op);
        if (first + size == n) {
          chunk.end(op);
          excess += chunk.excess();
        }
        __builtin_memcpy(total + offset, &chunk, sizeof(Chunk));
      }
    }
    return excess;
  }

  template <class Op>
  [[gnu::noinline, gnu::cold]] void repair(std::byte* total, double factor) const {
    alignas(kVectorBytes) std::byte again[kWidenedBytes];
    fold(again, Op(factor));
    for (std::size_t offset = 0; offset < chunk_bytes(); offset += sizeof(Chunk)) {
      Chunk chunk;
      Chunk other;
      __builtin_memcpy(&chunk, total + offset, sizeof(Chunk));
      __builtin_memcpy(&other, again + offset, sizeof(Chunk));
      chunk.replace(other);
      __builtin_memcpy(total + offset, &chunk, sizeof(Chunk));
    }
  }
};

// `Format` is that of the accumulators. As in `reduce_kernel`, `dst` and `second` may be any of the sources
// whose elements have their size.
template <class Format, template <class> class OpOf>
void converting_kernel(std::byte* dst, std::byte* second, const std::byte* next, const void* const* sources,
                       int n, std::size_t count, double factor, const Conversion& from,
                       const Conversion& to) {
  using Op = OpOf<Format>;
  using Repairing = typename Repair<Op>::Type;
  using Block = ConvertingBlock<Format>;
  alignas(kVectorBytes) std::byte total[kWidenedBytes];
  const Op op(factor);
  for (std::size_t begin = 0; begin < count; begin += Block::kCount) {
    const std::size_t size = count - begin < Block::kCount ? count - begin : Block::kCount;
    const std::size_t place = begin * to.element_bytes;
    if (next != nullptr) fetch(next + place, size * to.element_bytes);
    const Block block{from, sources, n, begin, size};
    // Accumulators that stay such are made in their place; no source lies there, whose elements have another
    // size.
    std::byte* made = to.narrow == nullptr && size == Block::kCount ? dst + place : total;
    const auto excess = block.fold(made, op);
    if constexpr (!__is_same(Repairing, void)) {
      if (!all_zero(excess)) block.template repair<Repairing>(made, factor);
    }
    if (to.narrow != nullptr) {
      to.narrow(dst + place, made, size);
    } else if (made == total) {
      __builtin_memcpy(dst + place, total, size * to.element_bytes);
    }
    if (second != nullptr) __builtin_memcpy(second + place, dst + place, size * to.element_bytes);
  }
}

template <class Format, template <class> class OpOf>
constexpr void add_converting(InstructionSet& set, Domain domain, ReduceOp op) {
  set.converting[static_cast<int>(domain)][static_cast<int>(op)] = converting_kernel<Format, OpOf>;
}
