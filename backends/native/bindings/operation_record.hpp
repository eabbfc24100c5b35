// The record of a group's last operations, shared by the group, which writes it, and Python, which reads it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "engine/operation_record.hpp"

namespace collectives {

// Not nanobind's own sharing, by which the last thread of the core that lets go would need Python's lock.
struct SharedRecord {
  std::shared_ptr<OperationRecord> record;
};

void bind_operation_record(nanobind::module_& module);

}  // namespace collectives
