// What the memory of an operation belongs to.
//
// The core knows tensors by their addresses alone. Whoever issues an operation that outlives the call gives
// it an owner, which keeps the memory until the operation is over and everybody has let go of it. The last
// one may be any thread of the core, with any lock: `let_go` only sets the object aside.
#pragma once

#include <atomic>
#include <utility>

namespace collectives {

class Owner {
 public:
  using LetGo = void (*)(void*) noexcept;

  Owner() = default;
  Owner(void* object, LetGo let_go) noexcept : object_(object), let_go_(let_go) {}
  Owner(Owner&& other) noexcept : object_(other.take()), let_go_(other.let_go_) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  Owner& operator=(Owner&&) = delete;
  ~Owner() {
    if (void* const object = take()) let_go_(object);
  }

  // The object, for whoever can let go of it better; null for all but the first. The operation must be over.
  void* take() noexcept {
    // Relaxed where it is gone: there is nothing to order. Acquire-release where several ask at once.
    if (object_.load(std::memory_order_relaxed) == nullptr) return nullptr;
    return object_.exchange(nullptr, std::memory_order_acq_rel);
  }

 private:
  std::atomic<void*> object_{nullptr};
  LetGo let_go_ = nullptr;
};

}  // namespace collectives
