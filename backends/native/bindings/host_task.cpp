#include "bindings/host_task.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <new>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/interrupt.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

// References that nobody has let go of yet, because the thread that did so last may not call Python. A forked
// child gets the list whole, whatever its parent's threads were doing.
struct SetAside {
  PyObject* object;
  SetAside* next;
};

// Release of an entry, acquire by who takes all of them.
std::atomic<SetAside*> set_aside = nullptr;

void set_aside_object(void* object) noexcept {
  auto* entry = new (std::nothrow) SetAside{static_cast<PyObject*>(object), nullptr};
  if (entry == nullptr) return;  // no memory: the object stays
  entry->next = set_aside.load(std::memory_order_relaxed);
  while (!set_aside.compare_exchange_weak(entry->next, entry, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

void let_go(void* object) { nb::steal(static_cast<PyObject*>(object)); }

}  // namespace

Owner owner_of(nb::object object) { return {object.release().ptr(), set_aside_object}; }

void collect_owners() {
  if (set_aside.load(std::memory_order_relaxed) == nullptr) [[likely]]
    return;
  SetAside* entry = set_aside.exchange(nullptr, std::memory_order_acquire);
  while (entry != nullptr) {
    const std::unique_ptr<SetAside> taken(entry);
    entry = taken->next;
    let_go(taken->object);
  }
}

HostTask::~HostTask() {
  if (task_ == nullptr || task_->inherited()) return;
  task_->abandon();
  if (task_->finished()) let_go(task_->take_owner());
}

bool HostTask::finished() const {
  if (!task_->observe()) return false;
  let_go(task_->take_owner());
  return true;
}

bool HostTask::poll() const {
  if (finished()) return true;
  if (!task_->inherited()) {
    const ReleasedLock released;
    task_->poll();
  }
  return finished();
}

bool HostTask::wait(std::optional<double> seconds) const {
  if (finished()) return true;
  if (task_->inherited()) {
    throw Error(ErrorKind::aborted, "this operation belongs to the parent of this forked process");
  }
  {
    PythonInterrupt interrupt(PythonInterrupt::Release::now);
    task_->wait(seconds ? deadline_in(*seconds) : kNever, &interrupt);
  }
  if (PyErr_CheckSignals() != 0) {
    task_->rest();
    throw nb::python_error();
  }
  return finished();
}

nb::object HostTask::error() const {
  return finished() && task_->error() != nullptr ? exception_from(*task_->error()) : nb::none();
}

void HostTask::notify(std::uint64_t group) const {
  poll();  // goes on, where a signal has ended a wait
  task_->notify(group);
}

void HostTask::rest() const {
  if (!task_->inherited()) task_->rest();
}

void HostTask::undo() const { task_->undo(); }

void bind_task(nb::module_& module) {
  nb::class_<HostTask>(module, "HostTask")
      .def_prop_ro("id", [](const HostTask& self) { return self.task().id(); })
      .def_prop_ro("is_message", [](const HostTask& self) { return self.task().is_message(); })
      .def_prop_ro("source", [](const HostTask& self) { return self.task().source(); })
      .def("finished", &HostTask::finished)
      .def("poll", &HostTask::poll)
      .def("error", &HostTask::error)
      .def("wait", &HostTask::wait, nb::arg("seconds").none())
      .def("notify", &HostTask::notify, nb::arg("group"))
      .def("rest", &HostTask::rest);
}

}  // namespace collectives
