// Calls of the NCCL that this process has loaded, by address, without the GIL. Addresses are numbers, and the
// callers keep the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"
#include "nccl/calls.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using Calls = NcclCalls;
using OpenGroups = NcclOpenGroups;

[[noreturn]] void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// Arguments are looked at as they are: their conversion by nanobind tries those of an enum twice.
template <class Kind>
Kind from(const char* function, nb::handle number);

template <>
void* from<void*>(const char*, nb::handle number) {
  const auto value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw nb::python_error();
  return pointer_from(static_cast<std::uintptr_t>(value));
}

template <>
int from<int>(const char*, nb::handle number) {
  const long value = PyLong_AsLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (!std::in_range<int>(value)) {
    throw std::invalid_argument("a code or rank of NCCL has 32 bits, but is " + std::to_string(value));
  }
  return static_cast<int>(value);
}

template <>
std::size_t from<std::size_t>(const char* function, nb::handle count) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(count.ptr(), &overflow);
  if (overflow == 0 && value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (overflow != 0 || value < 0) {
    throw std::invalid_argument(std::string(function) + ": count must be from 0 to 2**63 - 1, but is " +
                                nb::str(count).c_str());
  }
  return static_cast<std::size_t>(value);
}

const char* name_of(Calls::End end) {
  switch (end) {
    case Calls::End::destroyed:
      return "destroyed";
    case Calls::End::aborted:
      return "aborted";
    default:
      return "";
  }
}

// NCCL's functions by the places of their addresses.
struct NcclFunction {
  enum Place : std::uint8_t { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, recv, count };
};
constexpr std::array<const char*, NcclFunction::count> kNames = {
    "ncclAllReduce",     "ncclReduce", "ncclBroadcast", "ncclAllGather",
    "ncclReduceScatter", "ncclSend",   "ncclRecv"};

class Communicator {
 public:
  using Functions = std::array<std::uintptr_t, NcclFunction::count>;

  Communicator(const Functions& functions, std::uintptr_t handle, nb::object error, nb::object refusal)
      : functions_(functions),
        handle_(pointer_from(handle)),
        error_(std::move(error)),
        refusal_(std::move(refusal)) {
    for (const std::uintptr_t function : functions) {
      if (function == 0) throw std::invalid_argument("a function of NCCL has no address");
    }
  }

  // Calls a function, which takes `given`, the communicator and the stream.
  template <class... Kinds>
  void issue(NcclFunction::Place function, void* stream, Kinds... given) const {
    const OpenGroups::Entry entry = OpenGroups::of_this_thread().enter(calls_);
    if (entry == OpenGroups::Entry::refused) raise(refusal_(kNames[function], name_of(calls_->end())));
    int status = 0;
    {
      const ReleasedLock released;
      status =
          reinterpret_cast<int (*)(Kinds..., void*, void*)>(functions_[function])(given..., handle_, stream);
      if (entry == OpenGroups::Entry::call) calls_->leave();
    }
    if (status != 0) raise(error_(status, kNames[function]));
  }

  // For calls of NCCL that Python makes itself.
  void enter(const std::string& function) const {
    if (!calls_->enter()) raise(refusal_(function, name_of(calls_->end())));
  }
  void leave() const { calls_->leave(); }

  bool close(bool aborts, std::optional<double> patience) const {
    const int own = OpenGroups::of_this_thread().noted(*calls_);
    const ReleasedLock released;
    return calls_->close(aborts ? Calls::End::aborted : Calls::End::destroyed, own,
                         patience ? std::optional(Calls::Seconds(*patience)) : std::nullopt);
  }

  const char* end() const { return name_of(calls_->end()); }

 private:
  const Functions functions_;
  void* const handle_;
  const nb::object error_;
  const nb::object refusal_;
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

template <class>
using Handle = nb::handle;

// The method for a function, by the kinds of its arguments before communicator and stream as `nccl.h` has
// them: buffers, the count, codes of type, reduction, root or peer.
template <NcclFunction::Place function, class... Kinds>
void call(const Communicator& self, Handle<Kinds>... given, nb::handle stream) {
  const char* const name = kNames[function];
  self.issue(function, from<void*>(name, stream), from<Kinds>(name, given)...);
}

class GroupCalls {
 public:
  GroupCalls(std::uintptr_t start, std::uintptr_t end, nb::object error)
      : start_(reinterpret_cast<int (*)()>(start)),
        end_(reinterpret_cast<int (*)()>(end)),
        error_(std::move(error)) {
    if (start == 0 || end == 0) throw std::invalid_argument("a function of NCCL has no address");
  }

  void start() const {
    int status = 0;
    {
      const ReleasedLock released;
      status = start_();
    }
    if (status != 0) raise(error_(status, "ncclGroupStart"));
    OpenGroups::of_this_thread().opened();
  }

  // An error of the group says nothing new where one of the block is under way.
  void end(nb::handle error_of_block) const {
    int status = 0;
    {
      const ReleasedLock released;
      status = end_();
      OpenGroups::of_this_thread().closed();
    }
    if (status != 0 && error_of_block.is_none()) raise(error_(status, "ncclGroupEnd"));
  }

  bool open() const { return OpenGroups::of_this_thread().any(); }

 private:
  int (*const start_)();
  int (*const end_)();
  const nb::object error_;
};

// How long a thread that waits for its turn sleeps before it answers signals.
constexpr auto kSleep = std::chrono::milliseconds(100);

class Turns {
 public:
  explicit Turns(double patience)
      : turns_(std::chrono::duration_cast<NcclTurns::Clock::duration>(Calls::Seconds(patience))) {}

  std::uint64_t begin(const nb::list& communicators) {
    NcclTurns::Communicators used;
    used.reserve(communicators.size());
    for (const nb::handle one : communicators) used.push_back(one.ptr());
    // No thread that has the lock of the turns waits for Python's.
    std::optional<std::uint64_t> number = turns_.begin(used, NcclTurns::Clock::duration::zero());
    while (!number) {
      {
        const ReleasedLock released;
        number = turns_.begin(used, kSleep);
      }
      if (PyErr_CheckSignals() != 0) {
        if (number) turns_.end(*number);
        throw nb::python_error();
      }
    }
    return *number;
  }

  void end(std::uint64_t number) { turns_.end(number); }

 private:
  NcclTurns turns_;
};

}  // namespace

void bind_nccl(nb::module_& module) {
  nb::class_<Communicator>(module, "NcclCommunicator")
      .def(nb::init<const Communicator::Functions&, std::uintptr_t, nb::object, nb::object>(),
           nb::arg("functions"), nb::arg("handle"), nb::arg("error"), nb::arg("refusal"))
      .def_static("functions", [] { return std::vector<std::string>(kNames.begin(), kNames.end()); })
      .def("all_reduce", &call<NcclFunction::all_reduce, void*, void*, std::size_t, int, int>)
      .def("reduce", &call<NcclFunction::reduce, void*, void*, std::size_t, int, int, int>)
      .def("broadcast", &call<NcclFunction::broadcast, void*, void*, std::size_t, int, int>)
      .def("all_gather", &call<NcclFunction::all_gather, void*, void*, std::size_t, int>)
      .def("reduce_scatter", &call<NcclFunction::reduce_scatter, void*, void*, std::size_t, int, int>)
      .def("send", &call<NcclFunction::send, void*, std::size_t, int, int>)
      .def("recv", &call<NcclFunction::recv, void*, std::size_t, int, int>)
      .def("enter", &Communicator::enter, nb::arg("function"))
      .def("leave", &Communicator::leave)
      .def("close", &Communicator::close, nb::arg("aborts"), nb::arg("patience").none() = nb::none())
      .def_prop_ro("end", &Communicator::end);
  nb::class_<GroupCalls>(module, "NcclGroups")
      .def(nb::init<std::uintptr_t, std::uintptr_t, nb::object>(), nb::arg("start"), nb::arg("end"),
           nb::arg("error"))
      .def("__enter__", &GroupCalls::start)
      .def(
          "__exit__",
          [](const GroupCalls& calls, nb::handle, nb::handle error, nb::handle) { calls.end(error); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none())
      .def_prop_ro("open", &GroupCalls::open);
  nb::class_<Turns>(module, "NcclTurns")
      .def(nb::init<double>(), nb::arg("patience"))
      .def("begin", &Turns::begin, nb::arg("communicators"))
      .def("end", &Turns::end, nb::arg("turn"));
}

}  // namespace collectives
