#include "engine/request.hpp"

#include <bit>

#include "collectives/collectives.hpp"

namespace collectives {
namespace {

// FNV-1a over whole numbers, enough to tell lists of sizes apart.
class Digest {
 public:
  void add(std::uint64_t value) noexcept {
    for (int shift = 0; shift < 64; shift += 8) {
      state_ = (state_ ^ ((value >> shift) & 0xff)) * 0x100000001b3;
    }
  }
  void add(const std::vector<Part>& parts) noexcept {
    for (const Part& part : parts) add(part.bytes);
  }
  std::uint64_t value() const noexcept { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace

Fingerprint fingerprint_of(const Request& request) {
  Fingerprint what;
  what.opcode = static_cast<std::uint8_t>(request.opcode);
  what.dtype = static_cast<std::uint8_t>(request.reduction.dtype);
  if (reduces(request.opcode)) {
    what.reduction = static_cast<std::uint8_t>(request.reduction.op);
    if (request.reduction.op == ReduceOp::premul_sum)
      what.check = std::bit_cast<std::uint64_t>(request.reduction.factor);
  }
  if (rooted(request.opcode)) what.root = static_cast<std::uint32_t>(request.root);
  switch (request.opcode) {
    case Opcode::all_gather:
    case Opcode::reduce_scatter: {
      Digest digest;
      digest.add(what.check);
      digest.add(request.opcode == Opcode::all_gather ? request.outputs : request.inputs);
      what.check = digest.value();
      break;
    }
    case Opcode::all_to_all:  // its ranks compare tables of sizes
      break;
    default:
      what.count = request.count;
  }
  return what;
}

std::uint64_t own_count_of(const Request& request) {
  if (request.opcode == Opcode::reduce_scatter || request.opcode == Opcode::all_to_all) {
    return total_bytes(request.inputs) / size_of(request.reduction.dtype);
  }
  return request.count;
}

BegunOperation record_of(const Request& request, std::uint64_t number, Nanoseconds timeout,
                         Nanoseconds began) noexcept {
  const bool lists = request.opcode == Opcode::all_gather || request.opcode == Opcode::all_to_all;
  const std::size_t item = size_of(request.reduction.dtype);
  BegunOperation operation{.kind = static_cast<std::uint8_t>(request.opcode),
                           .dtype = request.reduction.dtype,
                           .reduction = request.reduction.op,
                           .tensors = request.opcode == Opcode::barrier ? 0U : 1U,
                           .peer = request.root,
                           .number = number,
                           .count = request.count,
                           .bytes = request.count * item,
                           .timeout = timeout,
                           .began = began};
  if (lists) {
    operation.tensors = static_cast<std::uint32_t>(request.outputs.size());
    operation.count = request.outputs.front().bytes / item;
    operation.bytes = total_bytes(request.outputs);
  }
  return operation;
}

void execute(const Request& request, CollectiveContext& collective) {
  const std::size_t bytes = request.count * size_of(request.reduction.dtype);
  switch (request.opcode) {
    case Opcode::none:
    case Opcode::barrier:
      return barrier(collective);
    case Opcode::broadcast:
      return broadcast(collective, request.data, bytes, request.root);
    case Opcode::all_reduce:
      return all_reduce(collective, request.data, request.input == nullptr ? request.data : request.input,
                        request.count, request.reduction);
    case Opcode::reduce:
      return reduce_to_root(collective, request.data, request.count, request.reduction, request.root);
    case Opcode::all_gather:
      return all_gather(collective, request.outputs, request.input);
    case Opcode::reduce_scatter:
      return reduce_scatter(collective, request.data, request.inputs, request.reduction);
    case Opcode::gather:
      return gather(collective, request.outputs, request.input, bytes, request.root);
    case Opcode::scatter:
      return scatter(collective, request.data, bytes, request.inputs, request.root);
    case Opcode::all_to_all:
      return all_to_all(collective, request.outputs, request.inputs);
  }
}

}  // namespace collectives
