// Each layer that Python sees adds its names to the module through one function. Python names memory by its
// address, and keeps it alive.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace collectives {

inline std::byte* pointer_from(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_kernels(nanobind::module_& module);
void bind_host(nanobind::module_& module);
void bind_mpi(nanobind::module_& module);
void bind_observer(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_store_client(nanobind::module_& module);

}  // namespace collectives
