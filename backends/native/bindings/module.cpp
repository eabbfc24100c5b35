#include "bindings/bindings.hpp"

NB_MODULE(_native, module) {
  module.doc() =
      "The C++ core of collectives: private, no torch headers; raw pointers, counts and type codes only.";
  collectives::bind_kernels(module);
  collectives::bind_host(module);
  collectives::bind_mpi(module);
  collectives::bind_store(module);
}
