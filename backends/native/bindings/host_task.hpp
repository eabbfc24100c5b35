// Tasks of the host group in Python, and the Python objects whose memory they use.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>

#include "engine/task.hpp"

namespace collectives {

// Keeps an object.
Owner owner_of(nanobind::object object);

// Lets go of the objects that the core's threads have set aside.
void collect_owners();

// To be used with Python's lock. Nobody can ask for a task whose handle has gone, perhaps because its issuer
// got the exception of a signal handler instead.
class HostTask {
 public:
  explicit HostTask(std::shared_ptr<Task> task) noexcept : task_(std::move(task)) {}
  HostTask(HostTask&&) = default;
  HostTask(const HostTask&) = delete;
  HostTask& operator=(const HostTask&) = delete;
  HostTask& operator=(HostTask&&) = delete;
  ~HostTask();

  const Task& task() const noexcept { return *task_; }

  // Those that say so let go of the owner.
  bool finished() const;
  bool poll() const;
  bool wait(std::optional<double> seconds) const;
  nanobind::object error() const;
  void notify(std::uint64_t group) const;

  // Both for callers that raise: what the operation has taken others get.
  void rest() const;
  void undo() const;

 private:
  std::shared_ptr<Task> task_;
};

void bind_task(nanobind::module_& module);

}  // namespace collectives
