// The kernels, for tests and tools: addresses are plain numbers, and nobody checks what they point to.
#include "kernels/kernels.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"
#include "kernels/quantize.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

std::vector<const void*> pointers_from(const std::vector<std::uintptr_t>& addresses) {
  std::vector<const void*> pointers;
  pointers.reserve(addresses.size());
  for (const std::uintptr_t address : addresses) pointers.push_back(pointer_from(address));
  return pointers;
}

void bound_reduce(std::uintptr_t dst, const std::vector<std::uintptr_t>& sources, std::size_t count,
                  std::uint8_t dtype, std::uint8_t op, double factor, std::uintptr_t second,
                  std::uintptr_t next) {
  const std::vector<const void*> pointers = pointers_from(sources);
  const DType checked_dtype = dtype_from(dtype);
  const ReduceOp checked_op = op_from(op);
  const ReleasedLock released;
  reduce(pointer_from(dst), pointers.data(), static_cast<int>(pointers.size()), count, checked_dtype,
         checked_op, factor, {.second = pointer_from(second), .next = pointer_from(next)});
}

using Fold = void (*)(void*, const void* const*, int, std::size_t, DType, ReduceOp, double);

template <Fold kFunction>
void bound_fold(std::uintptr_t dst, const std::vector<std::uintptr_t>& sources, std::size_t count,
                std::uint8_t dtype, std::uint8_t op, double factor) {
  const std::vector<const void*> pointers = pointers_from(sources);
  const DType checked_dtype = dtype_from(dtype);
  const ReduceOp checked_op = op_from(op);
  const ReleasedLock released;
  kFunction(pointer_from(dst), pointers.data(), static_cast<int>(pointers.size()), count, checked_dtype,
            checked_op, factor);
}

using Copy = void (*)(void*, const void*, std::size_t, const void*);

template <Copy kFunction>
void bound_copy(std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, std::uintptr_t next) {
  const ReleasedLock released;
  kFunction(pointer_from(dst), pointer_from(src), bytes, pointer_from(next));
}

using Take = void (*)(void*, void*, std::size_t);

template <Take kFunction>
void bound_take(std::uintptr_t dst, std::uintptr_t src, std::size_t bytes) {
  const ReleasedLock released;
  kFunction(pointer_from(dst), pointer_from(src), bytes);
}

void bound_quantize(std::uintptr_t codes, std::uintptr_t steps, std::uintptr_t source, std::uintptr_t left,
                    std::size_t count, std::size_t block, std::uint8_t dtype) {
  const DType format = dtype_from(dtype);
  const ReleasedLock released;
  quantize(pointer_from(codes), pointer_from(steps), pointer_from(source), pointer_from(left), count, block,
           format);
}

void bound_dequantize(std::uintptr_t dst, std::uintptr_t codes, std::uintptr_t steps, std::size_t count,
                      std::size_t block, std::uint8_t dtype, float weight, bool adds) {
  const DType format = dtype_from(dtype);
  const ReleasedLock released;
  dequantize(pointer_from(dst), pointer_from(codes), pointer_from(steps), count, block, format, weight, adds);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  nb::dict dtypes;
  for (std::uint8_t code = 0; code < kDTypeCount; ++code) dtypes[name_of(static_cast<DType>(code))] = code;
  module.attr("DTYPES") = dtypes;
  module.def(
      "dtype_size", [](std::uint8_t code) { return size_of(dtype_from(code)); }, nb::arg("dtype_code"));
  module.def(
      "reducible",
      [](std::uint8_t dtype, std::uint8_t op) { return reducible(dtype_from(dtype), op_from(op)); },
      nb::arg("dtype_code"), nb::arg("op_code"));
  module.def("reduce", bound_reduce, nb::arg("dst_ptr"), nb::arg("source_ptrs"), nb::arg("count"),
             nb::arg("dtype_code"), nb::arg("op_code"), nb::arg("factor"), nb::arg("second_ptr") = 0,
             nb::arg("next_ptr") = 0);
  module.def("accumulate", bound_fold<accumulate>, nb::arg("partial_ptr"), nb::arg("source_ptrs"),
             nb::arg("count"), nb::arg("dtype_code"), nb::arg("op_code"), nb::arg("factor"));
  module.def("combine", bound_fold<combine>, nb::arg("dst_ptr"), nb::arg("partial_ptrs"), nb::arg("count"),
             nb::arg("dtype_code"), nb::arg("op_code"), nb::arg("factor"));
  module.def(
      "accumulator_bytes",
      [](std::uint8_t dtype, std::uint8_t op) { return accumulator_bytes(dtype_from(dtype), op_from(op)); },
      nb::arg("dtype_code"), nb::arg("op_code"));
  module.def("copy", bound_copy<copy>, nb::arg("dst_ptr"), nb::arg("src_ptr"), nb::arg("nbytes"),
             nb::arg("next_ptr") = 0);
  module.def("copy_streaming", bound_copy<copy_streaming>, nb::arg("dst_ptr"), nb::arg("src_ptr"),
             nb::arg("nbytes"), nb::arg("next_ptr") = 0);
  module.def("copy_taking", bound_take<copy_taking>, nb::arg("dst_ptr"), nb::arg("src_ptr"),
             nb::arg("nbytes"));
  module.def("copy_taking_streaming", bound_take<copy_taking_streaming>, nb::arg("dst_ptr"),
             nb::arg("src_ptr"), nb::arg("nbytes"));
  module.def("quantize", bound_quantize, nb::arg("codes_ptr"), nb::arg("steps_ptr"), nb::arg("source_ptr"),
             nb::arg("left_ptr"), nb::arg("count"), nb::arg("block"), nb::arg("dtype_code"));
  module.def("dequantize", bound_dequantize, nb::arg("dst_ptr"), nb::arg("codes_ptr"), nb::arg("steps_ptr"),
             nb::arg("count"), nb::arg("block"), nb::arg("dtype_code"), nb::arg("weight"), nb::arg("adds"));
  module.def("cpu_capability", cpu_capability);
}

}  // namespace collectives
