// A collective as its issuer describes it, ready to be executed now or later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/part.hpp"
#include "common/clock.hpp"
#include "common/codes.hpp"
#include "engine/operation_record.hpp"
#include "state/control_page.hpp"

namespace collectives {

class CollectiveContext;

struct Request {
  Opcode opcode = Opcode::barrier;
  Reduction reduction{.dtype = DType::uint8, .op = ReduceOp::sum, .factor = 1.0};
  int root = 0;
  std::byte* data = nullptr;         // the one tensor that is written, or read and written
  const std::byte* input = nullptr;  // the one tensor that is only read; none where `data` is read
  std::size_t count = 0;             // elements of that tensor
  std::vector<Part> outputs;         // by rank
  std::vector<Part> inputs;          // by rank
};

// What the ranks compare.
Fingerprint fingerprint_of(const Request& request);

// Elements that this rank contributes, for messages.
std::uint64_t own_count_of(const Request& request);

// What the flight record says of it: its outputs, where it has several tensors, as messages do elsewhere.
BegunOperation record_of(const Request& request, std::uint64_t number, Nanoseconds timeout,
                         Nanoseconds began) noexcept;

// Runs it on the calling thread.
void execute(const Request& request, CollectiveContext& collective);

}  // namespace collectives
