// Looks at a torch tensor through DLPack's C exchange table (DLPack 1.3, `__dlpack_c_exchange_api__`): no
// torch headers, no temporary objects, a tenth of the time that asking for address, size, type and layout
// from Python takes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

#include "common/codes.hpp"

namespace collectives {

struct TensorView {
  std::byte* data;
  std::size_t count;
  std::size_t rows;  // length of dimension 0; 1 where there is none
  DType dtype;
};

// Takes tensors of this type from now on. Does nothing where the type has no table of a version that is
// known.
void register_tensor_type(nanobind::handle type);

// The view of a tensor of a registered type (a subclass counts as another type) that is dense, on the CPU,
// real, and not lazily negated; nothing otherwise, whatever it is.
std::optional<TensorView> dense_view(nanobind::handle tensor);

}  // namespace collectives
