// Streams and events of CUDA devices, by the addresses of the runtime's functions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"
#include "nccl/cuda_streams.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using Streams = std::shared_ptr<CudaStreams>;

// Calls that only note something for the device keep the GIL: to give it up and get it back takes longer than
// they do. Those that may wait for a lock of the driver, or for the device, do not.
class Device {
 public:
  Device(const std::vector<std::uintptr_t>& functions, int device) : streams_(make(functions, device)) {}

  bool is_current() const { return streams_->is_current(); }
  bool is_capturing(std::uintptr_t stream) const { return streams_->is_capturing(pointer_from(stream)); }
  std::uintptr_t make_stream(int priority) const {
    const ReleasedLock released;
    return reinterpret_cast<std::uintptr_t>(streams_->make_stream(priority));
  }
  std::unique_ptr<CudaEvent> record(std::uintptr_t stream) const {
    return std::make_unique<CudaEvent>(streams_, pointer_from(stream));
  }
  void order(std::uintptr_t stream, std::uintptr_t behind) const {
    CudaEvent(streams_, pointer_from(behind)).wait(pointer_from(stream));
  }
  void copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, std::uintptr_t stream) const {
    streams_->copy(pointer_from(to), pointer_from(from), bytes, pointer_from(stream));
  }

 private:
  static Streams make(const std::vector<std::uintptr_t>& functions, int device) {
    CudaStreams::Functions given{};
    if (functions.size() != given.size()) throw std::invalid_argument("an address is missing");
    for (std::size_t i = 0; i < given.size(); ++i) given[i] = pointer_from(functions[i]);
    return std::make_shared<CudaStreams>(given, device);
  }

  const Streams streams_;
};

bool done(const CudaEvent& event) {
  const ReleasedLock released;
  return event.done();
}

void synchronize(const CudaEvent& event) {
  const ReleasedLock released;
  event.synchronize();
}

}  // namespace

void bind_cuda(nb::module_& module) {
  nb::class_<CudaEvent>(module, "CudaEvent")
      .def(
          "wait", [](const CudaEvent& event, std::uintptr_t stream) { event.wait(pointer_from(stream)); },
          nb::arg("stream"))
      .def("done", &done)
      .def("synchronize", &synchronize);
  nb::class_<Device>(module, "CudaStreams")
      .def(nb::init<const std::vector<std::uintptr_t>&, int>(), nb::arg("functions"), nb::arg("device"))
      .def_static(
          "functions",
          [] { return std::vector<std::string>(CudaStreams::names.begin(), CudaStreams::names.end()); })
      .def("is_current", &Device::is_current)
      .def("is_capturing", &Device::is_capturing, nb::arg("stream"))
      .def("make_stream", &Device::make_stream, nb::arg("priority"))
      .def("record", &Device::record, nb::arg("stream"))
      .def("order", &Device::order, nb::arg("stream"), nb::arg("behind"))
      .def("copy", &Device::copy, nb::arg("to"), nb::arg("source"), nb::arg("bytes"), nb::arg("stream"));
}

}  // namespace collectives
