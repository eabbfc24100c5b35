// Each layer that Python sees adds its names to the module through one function. Python names memory by its
// address, and keeps it alive.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/clock.hpp"
#include "common/codes.hpp"

namespace collectives {

// Python names data types and reductions by their codes; others raise ValueError.
inline DType dtype_from(std::uint8_t code) {
  if (!is_dtype(code)) throw std::invalid_argument("no dtype has the code " + std::to_string(code));
  return static_cast<DType>(code);
}

inline ReduceOp op_from(std::uint8_t code) {
  if (!is_reduce_op(code)) throw std::invalid_argument("no reduction has the code " + std::to_string(code));
  return static_cast<ReduceOp>(code);
}

inline Nanoseconds deadline_in(double seconds) {
  constexpr double kLongest = 1e9;  // a lifetime
  return deadline_after(static_cast<Nanoseconds>(std::fmin(std::fmax(seconds, 0.0), kLongest) * 1e9));
}

inline std::byte* pointer_from(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_completions(nanobind::module_& module);
void bind_cuda(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_host(nanobind::module_& module);
void bind_mpi(nanobind::module_& module);
void bind_nccl(nanobind::module_& module);
void bind_observer(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_store_client(nanobind::module_& module);

}  // namespace collectives
