// Calls of the NCCL that this process has loaded, by address, without the GIL. Addresses are numbers, and the
// callers keep the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"
#include "nccl/calls_in_progress.hpp"
#include "nccl/turns.hpp"

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
void* address(nb::handle number) {
  const auto value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw nb::python_error();
  return pointer_from(static_cast<std::uintptr_t>(value));
}

int code(nb::handle number) {
  const long value = PyLong_AsLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (!std::in_range<int>(value)) {
    throw std::invalid_argument("a code or rank of NCCL has 32 bits, but is " + std::to_string(value));
  }
  return static_cast<int>(value);
}

std::size_t elements(const char* function, nb::handle count) {
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

class Communicator {
 public:
  using Functions = std::array<std::uintptr_t, 7>;

  Communicator(const Functions& functions, std::uintptr_t handle, nb::object error, nb::object refusal)
      : all_reduce_(reinterpret_cast<AllReduce>(functions[0])),
        reduce_(reinterpret_cast<Reduce>(functions[1])),
        broadcast_(reinterpret_cast<Broadcast>(functions[2])),
        all_gather_(reinterpret_cast<AllGather>(functions[3])),
        reduce_scatter_(reinterpret_cast<AllReduce>(functions[4])),
        send_(reinterpret_cast<Send>(functions[5])),
        recv_(reinterpret_cast<Recv>(functions[6])),
        handle_(pointer_from(handle)),
        error_(std::move(error)),
        refusal_(std::move(refusal)) {
    for (const std::uintptr_t function : functions) {
      if (function == 0) throw std::invalid_argument("a function of NCCL has no address");
    }
  }

  void all_reduce(nb::handle send, nb::handle recv, nb::handle count, nb::handle dtype, nb::handle op,
                  nb::handle stream) const {
    const char* name = "ncclAllReduce";
    issue(name, all_reduce_, address(send), address(recv), elements(name, count), code(dtype), code(op),
          handle_, address(stream));
  }

  void reduce(nb::handle send, nb::handle recv, nb::handle count, nb::handle dtype, nb::handle op,
              nb::handle root, nb::handle stream) const {
    const char* name = "ncclReduce";
    issue(name, reduce_, address(send), address(recv), elements(name, count), code(dtype), code(op),
          code(root), handle_, address(stream));
  }

  void broadcast(nb::handle send, nb::handle recv, nb::handle count, nb::handle dtype, nb::handle root,
                 nb::handle stream) const {
    const char* name = "ncclBroadcast";
    issue(name, broadcast_, address(send), address(recv), elements(name, count), code(dtype), code(root),
          handle_, address(stream));
  }

  void all_gather(nb::handle send, nb::handle recv, nb::handle count, nb::handle dtype,
                  nb::handle stream) const {
    const char* name = "ncclAllGather";
    issue(name, all_gather_, address(send), address(recv), elements(name, count), code(dtype), handle_,
          address(stream));
  }

  void reduce_scatter(nb::handle send, nb::handle recv, nb::handle count, nb::handle dtype, nb::handle op,
                      nb::handle stream) const {
    const char* name = "ncclReduceScatter";
    issue(name, reduce_scatter_, address(send), address(recv), elements(name, count), code(dtype), code(op),
          handle_, address(stream));
  }

  void send(nb::handle send, nb::handle count, nb::handle dtype, nb::handle peer, nb::handle stream) const {
    const char* name = "ncclSend";
    issue(name, send_, address(send), elements(name, count), code(dtype), code(peer), handle_,
          address(stream));
  }

  void recv(nb::handle recv, nb::handle count, nb::handle dtype, nb::handle peer, nb::handle stream) const {
    const char* name = "ncclRecv";
    issue(name, recv_, address(recv), elements(name, count), code(dtype), code(peer), handle_,
          address(stream));
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
  // As `nccl.h` has them: buffers, count, codes of type, reduction, root or peer, communicator, stream.
  using AllReduce = int (*)(const void*, void*, std::size_t, int, int, void*, void*);
  using Reduce = int (*)(const void*, void*, std::size_t, int, int, int, void*, void*);
  using Broadcast = int (*)(const void*, void*, std::size_t, int, int, void*, void*);
  using AllGather = int (*)(const void*, void*, std::size_t, int, void*, void*);
  using Send = int (*)(const void*, std::size_t, int, int, void*, void*);
  using Recv = int (*)(void*, std::size_t, int, int, void*, void*);

  template <class Function, class... Arguments>
  void issue(const char* name, Function function, Arguments... arguments) const {
    const OpenGroups::Entry entry = OpenGroups::of_this_thread().enter(calls_);
    if (entry == OpenGroups::Entry::refused) raise(refusal_(name, name_of(calls_->end())));
    int status = 0;
    {
      const ReleasedLock released;
      status = function(arguments...);
      if (entry == OpenGroups::Entry::call) calls_->leave();
    }
    if (status != 0) raise(error_(status, name));
  }

  const AllReduce all_reduce_;
  const Reduce reduce_;
  const Broadcast broadcast_;
  const AllGather all_gather_;
  const AllReduce reduce_scatter_;
  const Send send_;
  const Recv recv_;
  void* const handle_;
  const nb::object error_;
  const nb::object refusal_;
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

class GroupCalls {
 public:
  GroupCalls(std::uintptr_t start, std::uintptr_t end, nb::object error)
      : start_(reinterpret_cast<Function>(start)),
        end_(reinterpret_cast<Function>(end)),
        error_(std::move(error)) {
    if (start == 0 || end == 0) throw std::invalid_argument("a function of NCCL has no address");
  }

  void start() const {
    int status = 0;
    {
      const ReleasedLock released;
      status = start_();
    }
    check(status, "ncclGroupStart");
    OpenGroups::of_this_thread().opened();
  }

  void end() const {
    int status = 0;
    {
      const ReleasedLock released;
      status = end_();
      OpenGroups::of_this_thread().closed();
    }
    check(status, "ncclGroupEnd");
  }

  bool open() const { return OpenGroups::of_this_thread().any(); }

 private:
  using Function = int (*)();

  void check(int status, const char* name) const {
    if (status != 0) raise(error_(status, name));
  }

  const Function start_;
  const Function end_;
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
      .def("all_reduce", &Communicator::all_reduce, nb::arg("send"), nb::arg("recv"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("op"), nb::arg("stream"))
      .def("reduce", &Communicator::reduce, nb::arg("send"), nb::arg("recv"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("op"), nb::arg("root"), nb::arg("stream"))
      .def("broadcast", &Communicator::broadcast, nb::arg("send"), nb::arg("recv"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("root"), nb::arg("stream"))
      .def("all_gather", &Communicator::all_gather, nb::arg("send"), nb::arg("recv"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("stream"))
      .def("reduce_scatter", &Communicator::reduce_scatter, nb::arg("send"), nb::arg("recv"),
           nb::arg("recv_count"), nb::arg("dtype"), nb::arg("op"), nb::arg("stream"))
      .def("send", &Communicator::send, nb::arg("send"), nb::arg("count"), nb::arg("dtype"), nb::arg("peer"),
           nb::arg("stream"))
      .def("recv", &Communicator::recv, nb::arg("recv"), nb::arg("count"), nb::arg("dtype"), nb::arg("peer"),
           nb::arg("stream"))
      .def("enter", &Communicator::enter, nb::arg("function"))
      .def("leave", &Communicator::leave)
      .def("close", &Communicator::close, nb::arg("aborts"), nb::arg("patience").none() = nb::none())
      .def_prop_ro("end", &Communicator::end);
  nb::class_<GroupCalls>(module, "NcclGroups")
      .def(nb::init<std::uintptr_t, std::uintptr_t, nb::object>(), nb::arg("start"), nb::arg("end"),
           nb::arg("error"))
      .def("start", &GroupCalls::start)
      .def("end", &GroupCalls::end)
      .def_prop_ro("open", &GroupCalls::open);
  nb::class_<Turns>(module, "NcclTurns")
      .def(nb::init<double>(), nb::arg("patience"))
      .def("begin", &Turns::begin, nb::arg("communicators"))
      .def("end", &Turns::end, nb::arg("turn"));
}

}  // namespace collectives
