// A request of the core from what Python says of a collective: addresses as numbers, types by their codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "engine/request.hpp"

namespace collectives {

using Address = std::uintptr_t;
// Address and bytes of each rank's part.
using Parts = std::vector<std::pair<Address, std::size_t>>;

inline std::vector<Part> parts_from(const Parts& given) {
  std::vector<Part> parts;
  parts.reserve(given.size());
  for (const auto& [address, bytes] : given) parts.push_back({pointer_from(address), bytes});
  return parts;
}

// Throws std::invalid_argument for a code that names nothing.
inline Request request_from(std::uint8_t opcode, Address data, Address input, std::size_t count,
                            std::uint8_t dtype, std::uint8_t op, double factor, int root,
                            const Parts& outputs, const Parts& inputs) {
  Request request;
  request.opcode = static_cast<Opcode>(opcode);
  request.reduction = {dtype_from(dtype), op_from(op), factor};
  request.root = root;
  request.data = pointer_from(data);
  request.input = pointer_from(input);
  request.count = count;
  request.outputs = parts_from(outputs);
  request.inputs = parts_from(inputs);
  return request;
}

}  // namespace collectives
