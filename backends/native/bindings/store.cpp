#include "bindings/bindings.hpp"

namespace collectives {

void bind_store(nanobind::module_& module) { (void)module; }

}  // namespace collectives
