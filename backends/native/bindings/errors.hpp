// Errors of the core as exceptions of `collectives.errors`.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "common/error.hpp"

namespace collectives {

// A text for users, with a mark for each byte that is no part of a character: ranks cut names of files at any
// byte, and what others share may be no text at all.
nanobind::str text_from(const std::string& text);

// An instance of the class of the same meaning. Needs the GIL.
nanobind::object exception_from(const Error& error);

// The other way round, for a DistError.
Error error_from(nanobind::handle exception);

void bind_errors(nanobind::module_& module);

}  // namespace collectives
