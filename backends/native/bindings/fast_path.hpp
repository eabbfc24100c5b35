// The fast path from a user function into the core, which nearly all calls take.
//
// It takes calls without a time limit of their own, on dense real CPU tensors of one registered type that fit
// together; their arguments are checked here, through DLPack, and not in Python. Every other call, and every
// wrong argument, is left to the general path, which knows all cases and words the errors.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/owned_group.hpp"
#include "engine/request.hpp"

namespace collectives {

struct FastRequest {
  Request request;
  std::size_t bytes = 0;     // of all its tensors
  nanobind::object tensors;  // all of them, whatever becomes of the lists
};

// The request of a rank in a group of `size` for the arguments of `fast_collective`; nothing where the call
// does not qualify.
std::optional<FastRequest> fast_request(int rank, int size, std::uint8_t opcode, nanobind::handle output,
                                        nanobind::handle input, std::uint8_t op, nanobind::handle root,
                                        bool listed);

// Runs a collective and returns true; returns false, with nothing done, where the call does not qualify.
// `output` and `input` are what the user function takes under these names; a tensor that
// is both is the output. With `listed` the larger of the two is a list of a tensor for each rank, else one
// tensor.
bool fast_collective(OwnedGroup& owned, std::uint8_t opcode, nanobind::handle output, nanobind::handle input,
                     std::uint8_t op, nanobind::handle root, bool listed);

// The same for an asynchronous call: queues it and returns its task, which keeps the tensors, or None.
nanobind::object fast_collective_async(OwnedGroup& owned, std::uint8_t opcode, nanobind::handle output,
                                       nanobind::handle input, std::uint8_t op, nanobind::handle root,
                                       bool listed);

// Sends or receives a message: returns None where the call does not qualify; true where it has waited for the
// message, or a message has left at once; else the transfer, which keeps the tensor. Where it throws, nothing
// of the message is under way that touches the tensor, and no message has been taken.
nanobind::object fast_message(OwnedGroup& owned, bool sends, nanobind::handle tensor, nanobind::handle peer,
                              nanobind::handle tag, bool waits);

}  // namespace collectives
