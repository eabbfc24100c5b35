// Each layer that Python sees adds its names to the module through one function.
#pragma once

#include <nanobind/nanobind.h>

namespace collectives {

void bind_kernels(nanobind::module_& module);
void bind_host(nanobind::module_& module);
void bind_mpi(nanobind::module_& module);
void bind_store(nanobind::module_& module);

}  // namespace collectives
