#include "engine/request.hpp"

#include <bit>

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

std::size_t total_bytes(const std::vector<Part>& parts) {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.bytes;
  return total;
}

}  // namespace

Fingerprint fingerprint_of(const Request& request) {
  Fingerprint what;
  what.kind = static_cast<std::uint8_t>(request.kind);
  what.dtype = static_cast<std::uint8_t>(request.reduction.dtype);
  if (reduces(request.kind)) {
    what.reduction = static_cast<std::uint8_t>(request.reduction.op);
    if (request.reduction.op == ReduceOp::premul_sum)
      what.check = std::bit_cast<std::uint64_t>(request.reduction.factor);
  }
  if (rooted(request.kind)) what.root = static_cast<std::uint32_t>(request.root);
  switch (request.kind) {
    case Kind::all_gather:
    case Kind::reduce_scatter: {
      Digest digest;
      digest.add(what.check);
      digest.add(request.kind == Kind::all_gather ? request.outputs : request.inputs);
      what.check = digest.value();
      break;
    }
    case Kind::all_to_all:  // its ranks compare tables of sizes
      break;
    default:
      what.count = request.count;
  }
  return what;
}

std::uint64_t own_count_of(const Request& request) {
  if (request.kind == Kind::reduce_scatter || request.kind == Kind::all_to_all) {
    return total_bytes(request.inputs) / size_of(request.reduction.dtype);
  }
  return request.count;
}

void execute(const Request& request, Round& round) {
  const std::size_t bytes = request.count * size_of(request.reduction.dtype);
  switch (request.kind) {
    case Kind::none:
    case Kind::barrier:
      return barrier(round);
    case Kind::broadcast:
      return broadcast(round, request.data, bytes, request.root);
    case Kind::all_reduce:
      return all_reduce(round, request.data, request.count, request.reduction);
    case Kind::reduce:
      return reduce_to_root(round, request.data, request.count, request.reduction, request.root);
    case Kind::all_gather:
      return all_gather(round, request.outputs, request.input);
    case Kind::reduce_scatter:
      return reduce_scatter(round, request.data, request.inputs, request.reduction);
    case Kind::gather:
      return gather(round, request.outputs, request.input, bytes, request.root);
    case Kind::scatter:
      return scatter(round, request.data, bytes, request.inputs, request.root);
    case Kind::all_to_all:
      return all_to_all(round, request.outputs, request.inputs);
  }
}

}  // namespace collectives
