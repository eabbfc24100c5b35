// Copying past the cache, and copying while other memory is fetched. Part of reduce.inl.

constexpr std::size_t kCacheLine = 64;

// Fetches the cache line of `address` into the second-level cache; the first is too small to keep what is not
// wanted yet. Any address will do.
inline void fetch(const std::byte* address) { __builtin_prefetch(address, 0, 2); }

inline void fetch(const std::byte* begin, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes; offset += kCacheLine) fetch(begin + offset);
}

// Copies and fetches by turns, in bursts of as many lines as the processor can have under way.
void copy_fetching(std::byte* dst, const std::byte* src, const std::byte* next, std::size_t bytes) {
  constexpr std::size_t kBurst = 8 * kCacheLine;
  std::size_t offset = 0;
  for (; bytes - offset >= kBurst; offset += kBurst) {
    fetch(next + offset, kBurst);
    __builtin_memcpy(dst + offset, src + offset, kBurst);
  }
  __builtin_memcpy(dst + offset, src + offset, bytes - offset);
}

// Below this the first lines' partial stores and the fence cost more than the cache saves.
constexpr std::size_t kStreamingMinBytes = 4096;

#if defined(__x86_64__)

#if COLLECTIVES_VECTOR_BYTES == 64
using Line = __m512i;
inline Line load_line(const std::byte* from) { return _mm512_loadu_si512(from); }
inline void stream_line(std::byte* to, Line v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v); }
#elif COLLECTIVES_VECTOR_BYTES == 32
using Line = __m256i;
inline Line load_line(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void stream_line(std::byte* to, Line v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v); }
#else
using Line = __m128i;
inline Line load_line(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline void stream_line(std::byte* to, Line v) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), v); }
#endif

void copy_past_cache(std::byte* dst, const std::byte* src, const std::byte* next, std::size_t bytes) {
  if (bytes < kStreamingMinBytes) {
    __builtin_memcpy(dst, src, bytes);
    return;
  }
  constexpr std::size_t kLines = 4 * kCacheLine / sizeof(Line);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kCacheLine;
  __builtin_memcpy(dst, src, head);
  std::size_t offset = head;
  for (; bytes - offset >= kLines * sizeof(Line); offset += kLines * sizeof(Line)) {
    if (next != nullptr) fetch(next + offset, kLines * sizeof(Line));
    Line lines[kLines];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLines; ++i) lines[i] = load_line(src + offset + i * sizeof(Line));
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLines; ++i) stream_line(dst + offset + i * sizeof(Line), lines[i]);
  }
  __builtin_memcpy(dst + offset, src + offset, bytes - offset);
  // Non-temporal stores are weakly ordered: without the fence a flag stored next could be seen before the
  // data.
  _mm_sfence();
}

#else

void copy_past_cache(std::byte* dst, const std::byte* src, const std::byte* next, std::size_t bytes) {
  if (next != nullptr) return copy_fetching(dst, src, next, bytes);
  __builtin_memcpy(dst, src, bytes);
}

#endif
