#include "state/process_state.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory/descriptor.hpp"

namespace collectives {
namespace {

constexpr int kStartOfStack = 28;  // field of /proc/ID/stat, counted from 1; another one for each program

}  // namespace

ProcessState state_of_process(int id) noexcept {
  char text[1024];
  std::snprintf(text, sizeof(text), "/proc/%d/stat", id);
  const Descriptor file(::open(text, O_RDONLY | O_CLOEXEC));
  if (!file) return {.ended = errno == ENOENT};
  const ssize_t size = ::read(file.get(), text, sizeof(text) - 1);
  if (size <= 0) return {.ended = size < 0 && errno == ESRCH};
  text[size] = '\0';
  // The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] == '\0') return {};
  field += 2;
  ProcessState state;
  state.ended = *field == 'Z' || *field == 'X';
  state.stopped = *field == 'T' || *field == 't';
  for (int number = 3; number < kStartOfStack; ++number) {
    field = std::strchr(field, ' ');
    if (field == nullptr) return state;
    ++field;
  }
  state.image = std::strtoull(field, nullptr, 10);
  return state;
}

}  // namespace collectives
