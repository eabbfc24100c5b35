// The tests of the core: programs without Python, whose ranks are threads, made for sanitizers.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "common/error.hpp"

namespace collectives {

using Tests = std::vector<std::pair<const char*, std::function<void()>>>;

// Of each file; core_test.cpp runs them all.
Tests security_tests();
Tests encryption_tests();
Tests selection_tests();
Tests state_tests();
Tests worker_pool_tests();
Tests transport_tests();
Tests collectives_tests();
Tests collectives_between_machines_tests();
Tests messenger_tests();
Tests group_tests();
Tests foreign_words_tests();
Tests operation_record_tests();
Tests store_client_tests();
Tests completions_tests();
Tests nccl_calls_tests();
Tests nccl_turns_tests();

// A process that ends so while its threads encrypt (core_test's first argument).
inline constexpr char kExitWhileEncrypting[] = "--exit-while-encrypting";
[[noreturn]] void exit_while_encrypting();

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

template <class Function>
Error error_of(Function&& function) {
  try {
    std::forward<Function>(function)();
  } catch (const Error& error) {
    return error;
  }
  std::fprintf(stderr, "expected an error\n");
  std::abort();
}

}  // namespace collectives
