#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"

NB_MODULE(_native, module) {
#ifdef NDEBUG
  // Python never clears the frames of daemon threads, nor what C++ futures of torch hold: at exit these
  // objects are alive through no fault of ours, and the report of them would meet users.
  nanobind::set_leak_warnings(false);
#endif
  module.doc() =
      "The C++ core of collectives: private, no torch headers; raw pointers, counts and type codes only.";
  collectives::prepare_call_sites();
  collectives::bind_cuda(module);
  collectives::bind_kernels(module);
  collectives::bind_completions(module);
  collectives::bind_host(module);
  collectives::bind_mpi(module);
  collectives::bind_nccl(module);
  collectives::bind_observer(module);
  collectives::bind_store(module);
  collectives::bind_store_client(module);
}
