#include "bindings/bindings.hpp"

namespace collectives {

void bind_host(nanobind::module_& module) { (void)module; }

}  // namespace collectives
