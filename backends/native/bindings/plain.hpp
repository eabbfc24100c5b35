// The short way from a user function into the core, for the calls that nearly all calls are.
//
// A *plain* call has no time limit of its own and is on dense real CPU tensors of one registered
// type that fit together; its arguments are looked at here, through DLPack, and not in Python. Whatever is
// not plain, wrong arguments among it, is left to the way of every operation, which knows all cases and words
// the errors.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/owned_group.hpp"
#include "engine/request.hpp"

namespace collectives {

struct Plain {
  Request request;
  std::size_t bytes = 0;  // of all its tensors
};

// The request of a rank among so many for the arguments of `plain_collective`; nothing where the call is not
// plain.
std::optional<Plain> plain_request(int rank, int size, std::uint8_t kind, nanobind::handle output,
                                   nanobind::handle input, std::uint8_t op, nanobind::handle root,
                                   bool listed);

// Runs a collective and returns true; returns false, with nothing done, where the call is not plain or the
// group is busy. `output` and `input` are what the user function takes under these names; a tensor that is
// both is the output. With `listed` the larger of the two is a list of a tensor for each rank, else one
// tensor.
bool plain_collective(OwnedGroup& owned, std::uint8_t kind, nanobind::handle output, nanobind::handle input,
                      std::uint8_t op, nanobind::handle root, bool listed);

// The same for an asynchronous call: queues it and returns its task, or null. The caller keeps the tensors.
std::shared_ptr<Task> plain_launch(OwnedGroup& owned, std::uint8_t kind, nanobind::handle output,
                                   nanobind::handle input, std::uint8_t op, nanobind::handle root,
                                   bool listed);

// Posts a message or a receive: returns None where the call is not plain; true where the message has gone or
// come at once, or with `waits` soon; else the transfer, whose tensor the caller must keep.
nanobind::object plain_message(OwnedGroup& owned, bool sends, nanobind::handle tensor, nanobind::handle peer,
                               nanobind::handle tag, bool waits);

}  // namespace collectives
