// Errors of the core as exceptions of `collectives.errors`.
#pragma once

#include <nanobind/nanobind.h>

#include "common/error.hpp"

namespace collectives {

// An instance of the class of the same meaning. Needs the GIL.
nanobind::object exception_from(const Error& error);

void bind_errors(nanobind::module_& module);

}  // namespace collectives
