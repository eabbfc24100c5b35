// What the kernel tells of another process of this machine.
#pragma once

#include <cstdint>

namespace collectives {

struct ProcessState {
  bool ended = false;
  bool stopped = false;     // by a signal or a debugger
  std::uint64_t image = 0;  // tells the program that it runs from one that it runs after exec; 0 unknown
};

// As far as it can be told; of the process with that id as counted here.
ProcessState state_of_process(int id) noexcept;

}  // namespace collectives
