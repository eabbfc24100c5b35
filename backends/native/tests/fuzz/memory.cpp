// Allocation with a limit: what asks for more than any input needs gets std::bad_alloc, as where there is no
// more memory. AddressSanitizer's own allocation would end the program instead.
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

constexpr std::size_t kMostBytes = std::size_t{256} << 20;

void* allocate(std::size_t bytes) noexcept {
  return bytes <= kMostBytes ? std::malloc(bytes != 0 ? bytes : 1) : nullptr;
}

void* allocate_or_throw(std::size_t bytes) {
  if (void* memory = allocate(bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
