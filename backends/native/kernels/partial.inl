// Partial results: accumulators in memory, so that a reduction can be continued elsewhere. Part of
// reduce.inl.
//
// In memory accumulators lie in the order of their elements, whatever the vector width: machines with
// different instruction sets exchange them.

template <std::size_t kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using Type = std::uint8_t;
};
template <>
struct UnsignedOf<2> {
  using Type = std::uint16_t;
};

// A small float's elements in their order: each in the lowest bits of a lane of its own, which is where a
// packed format expects the first part of a word.
template <class Format, int kPartsOfFormat = Format::kParts>
struct InOrder {
  using Element = typename Format::Element;
  using Register = typename Format::Register;
  using Narrow = VectorOf<typename UnsignedOf<Format::kElementBytes>::Type, kFloatLanes>;
  static constexpr int kParts = 1;
  static constexpr std::size_t kElementBytes = Format::kElementBytes;
  static constexpr std::size_t kStepBytes = sizeof(Narrow);

  static void load(const std::byte* from, Register (&parts)[1]) {
    std::byte words[kVectorBytes];
    store_vector(words, __builtin_convertvector(load_vector<Narrow>(from), U32));
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

// Accumulators as they are in memory.
template <class Format>
struct Carried : Direct<typename Format::Element> {
  using Register = typename Format::Register;
  static void store(std::byte* to, const Register (&parts)[1]) { store_vector(to, parts[0]); }
};

// The two halves of an operation: elements enter and accumulators stay, accumulators enter and results leave.
template <class Op>
struct Beginning : Op {
  using Op::Op;
  template <class Register>
  Register finish(Register a) const {
    return a;
  }
};

// Partial sums of an average are those of scaled terms: what overflowed could not be computed again.
template <class Format>
struct Beginning<Average<Format>> : ScaledAverage<Format> {
  using ScaledAverage<Format>::ScaledAverage;
  template <class Register>
  Register finish(Register a) const {
    return a;
  }
};

template <class Op>
struct Ending : Op {
  using Op::Op;
  template <class Register>
  Register enter(Register x) const {
    return x;
  }
};

template <class Format>
struct Ending<Average<Format>> : ScaledAverage<Format> {
  using ScaledAverage<Format>::ScaledAverage;
  template <class Register>
  Register enter(Register x) const {
    return x;
  }
};

template <class From, class To, class Op>
inline void fold_step(std::byte* dst, const void* const* sources, int n, std::size_t step, const Op& op) {
  typename From::Register total[1];
  From::load(at(sources[0], step * From::kStepBytes), total);
  total[0] = op.enter(total[0]);
  for (int k = 1; k < n; ++k) {
    typename From::Register term[1];
    From::load(at(sources[k], step * From::kStepBytes), term);
    total[0] = op.combine(total[0], op.enter(term[0]));
  }
  total[0] = op.finish(total[0]);
  To::store(dst + step * To::kStepBytes, total);
}

template <class From, class To, class Op>
void fold_kernel(std::byte* dst, const void* const* sources, int n, std::size_t count, double factor) {
  constexpr std::size_t kLanes = From::kStepBytes / From::kElementBytes;
  static_assert(kLanes == To::kStepBytes / To::kElementBytes);
  const Op op(factor);
  const std::size_t whole = count / kLanes;
  for (std::size_t step = 0; step < whole; ++step) fold_step<From, To>(dst, sources, n, step, op);

  const std::size_t rest = count % kLanes;
  if (rest == 0) return;
  alignas(kVectorBytes) std::byte padded[From::kStepBytes] = {};
  typename From::Register total[1];
  __builtin_memcpy(padded, at(sources[0], whole * From::kStepBytes), rest * From::kElementBytes);
  From::load(padded, total);
  total[0] = op.enter(total[0]);
  for (int k = 1; k < n; ++k) {
    typename From::Register term[1];
    __builtin_memcpy(padded, at(sources[k], whole * From::kStepBytes), rest * From::kElementBytes);
    From::load(padded, term);
    total[0] = op.combine(total[0], op.enter(term[0]));
  }
  total[0] = op.finish(total[0]);
  alignas(kVectorBytes) std::byte result[To::kStepBytes];
  To::store(result, total);
  __builtin_memcpy(dst + whole * To::kStepBytes, result, rest * To::kElementBytes);
}

// Integer AVG: exact sums, see average_kernel.
template <class T, class Wide>
void sum_exactly_kernel(std::byte* dst, const void* const* sources, int n, std::size_t count, double) {
  for (std::size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (int k = 0; k < n; ++k) {
      T x;
      __builtin_memcpy(&x, at(sources[k], i * sizeof(T)), sizeof(T));
      sum += static_cast<Wide>(x);
    }
    __builtin_memcpy(dst + i * sizeof(Wide), &sum, sizeof(Wide));
  }
}

template <class T, class Wide, class Divisor>
void divide_sums_kernel(std::byte* dst, const void* const* sources, int n, std::size_t count, double factor) {
  const auto divisor = static_cast<Divisor>(factor);
  for (std::size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (int k = 0; k < n; ++k) {
      Wide term;
      __builtin_memcpy(&term, at(sources[k], i * sizeof(Wide)), sizeof(Wide));
      sum += term;
    }
    const T x = static_cast<T>(static_cast<std::int64_t>(sum / divisor));
    __builtin_memcpy(dst + i * sizeof(T), &x, sizeof(T));
  }
}
