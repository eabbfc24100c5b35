// Completions of operations, for the threads of Python that carry them out.
#include "engine/completions.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/interrupt.hpp"
#include "engine/task.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using Taken = std::optional<Completions::Taken>;

std::optional<std::pair<std::uint64_t, bool>> pop() {
  Taken taken = Completions::instance().poll();
  if (!taken) {
    const ReleasedLock released;
    taken = Completions::instance().pop();
  }
  if (!taken) return std::nullopt;
  return std::pair(taken->number, taken->by_last);
}

// Of an operation that Python carries out. One that goes before it is done is not waited for.
class Completion {
 public:
  Completion(std::uint64_t number, std::uint64_t group, bool collective) : number_(number) {
    Completions::instance().expect(number, group, collective);
  }
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  ~Completion() { Completions::instance().forget(number_); }

  void push() { Completions::instance().push(number_); }

 private:
  const std::uint64_t number_;
};

class OperationWait {
 public:
  explicit OperationWait(bool collective) : collective_(collective) {}
  void enter() { counted_.emplace(collective_); }
  void exit() { counted_.reset(); }

 private:
  const bool collective_;
  std::optional<Completions::Wait> counted_;
};

}  // namespace

void bind_completions(nb::module_& module) {
  nb::class_<OperationWait>(module, "OperationWait")
      .def(nb::init<bool>(), nb::arg("collective"))
      .def("__enter__", &OperationWait::enter)
      .def("__exit__", [](OperationWait& wait, const nb::args&) { wait.exit(); });
  nb::class_<Completion>(module, "Completion")
      .def(nb::init<std::uint64_t, std::uint64_t, bool>(), nb::arg("number"), nb::arg("group"),
           nb::arg("collective"))
      .def("push", &Completion::push);
  module.def("next_operation", [] { return Task::next_id(); });
  module.def("pop_completion", pop);
  module.def("close_completions", [] { Completions::instance().close(); });
}

}  // namespace collectives
