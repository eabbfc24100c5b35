// Lets a thread of Python that sleeps in the core answer signals, and tells where it came from.
#pragma once

#include <string>

#include "transport/station.hpp"

namespace collectives {

// To be used on the thread that made it, with the GIL released.
class PythonInterrupt final : public Interrupt {
 public:
  // Runs pending signal handlers; true where one raised. The exception stays set for the caller.
  bool requested() override;
  // "file:line in function" of the innermost frame outside this package and torch.
  std::string site() override;
};

}  // namespace collectives
