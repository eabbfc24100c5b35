// Lets a thread of Python that sleeps in the core answer signals, and tells where it came from.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "state/rank_context.hpp"

namespace collectives {

// To be used on the thread that made it. Made with the GIL held, gives it up at once or when the thread first
// blocks, so that a short operation whose peers are there already costs no handover between Python's threads;
// has it again at its end.
class PythonInterrupt final : public Interrupt {
 public:
  enum class Release { now, when_blocked };

  explicit PythonInterrupt(Release release) {
    if (release == Release::now) PythonInterrupt::blocks();
  }
  PythonInterrupt(const PythonInterrupt&) = delete;
  PythonInterrupt& operator=(const PythonInterrupt&) = delete;
  ~PythonInterrupt() override;

  void blocks() override;
  // Runs pending signal handlers; true where one raised. The exception stays set for the caller.
  bool requested() override;
  // "file:line in function" of the innermost frame outside this package and torch.
  std::string site() override;

 private:
  PyThreadState* released_ = nullptr;
};

// Gives up the GIL for its lifetime. In place of nanobind's, with which a daemon thread that comes back while
// the interpreter ends would abort the process.
class ReleasedLock {
 public:
  ReleasedLock() : released_(PyEval_SaveThread()) {}
  ReleasedLock(const ReleasedLock&) = delete;
  ReleasedLock& operator=(const ReleasedLock&) = delete;
  ~ReleasedLock();

 private:
  PyThreadState* released_;
};

// The source line that issues an operation which the calling thread does not wait for: as
// `PythonInterrupt::site`. Texts are kept, so that a line that issues many costs little.
std::shared_ptr<const std::string> call_site();

// To be called at import, before the first `call_site` or `PythonInterrupt::site`.
void prepare_call_sites();

}  // namespace collectives
