// What a machine contributes to a short reduction, as one.
#pragma once

#include <cstddef>
#include <vector>

namespace collectives {

// A machine's leader sends each other machine the partials that its ranks need, in place of what every local
// rank staged. Machines that agree about the operation agree about the lengths.
class MachineContribution {
 public:
  virtual ~MachineContribution() = default;

  // Of what a machine sends to another.
  virtual std::size_t bytes(std::size_t from, std::size_t to) const = 0;
  // On a leader: makes the machine's partials of what its ranks have staged, which all do this operation.
  virtual void reduce_local() = 0;
  // After that, appends what goes to a machine.
  virtual void append_to(std::vector<std::byte>& frame, std::size_t machine) const = 0;

 protected:
  MachineContribution() = default;
  MachineContribution(const MachineContribution&) = default;
  MachineContribution& operator=(const MachineContribution&) = default;
};

}  // namespace collectives
