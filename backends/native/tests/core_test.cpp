// Runs the tests of the core (CMake: -DCOLLECTIVES_TESTS=ON, and for example -DCOLLECTIVES_SANITIZE=thread).
#include <cstdio>
#include <cstring>

#include "tests/testing.hpp"

// An argument chooses the tests whose names contain it.
int main(int count, char** arguments) {
  using namespace collectives;
  if (count > 1 && std::strcmp(arguments[1], kExitWhileEncrypting) == 0) exit_while_encrypting();
  for (const auto& tests : {security_tests, encryption_tests, selection_tests, state_tests, worker_pool_tests,
                            transport_tests, collectives_tests, collectives_between_machines_tests,
                            messenger_tests, group_tests, foreign_words_tests, operation_record_tests,
                            store_client_tests, completions_tests, nccl_calls_tests, nccl_turns_tests}) {
    for (const auto& [name, test] : tests()) {
      if (count > 1 && std::strstr(name, arguments[1]) == nullptr) continue;
      std::printf("%s\n", name);
      std::fflush(stdout);
      test();
    }
  }
  std::printf("all passed\n");
  return 0;
}
