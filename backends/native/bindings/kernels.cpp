#include "bindings/bindings.hpp"

namespace collectives {

void bind_kernels(nanobind::module_& module) { (void)module; }

}  // namespace collectives
