#include "bindings/interrupt.hpp"

#include <unistd.h>

#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace nb = nanobind;

namespace collectives {
namespace {

nb::object code_of(nb::handle frame) {
  return nb::steal(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

int line_of(nb::handle frame) { return PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frame.ptr())); }

// "__name__". Made at import: threads that wait in C++ until the first one has made it could not pause when
// Python, without a GIL, wants all to.
PyObject* name_key = nullptr;

bool ours(nb::handle frame) {
  const nb::object globals = frame.attr("f_globals");
  const nb::object name = nb::steal(PyObject_GetItem(globals.ptr(), name_key));
  if (!name.is_valid()) PyErr_Clear();
  if (!name.is_valid() || !PyUnicode_Check(name.ptr())) return false;
  const char* const text = PyUnicode_AsUTF8(name.ptr());
  if (text == nullptr) {  // lone surrogates
    PyErr_Clear();
    return false;
  }
  const std::string_view module = text;
  const auto within = [&](std::string_view package) {
    return module == package || (module.starts_with(package) && module[package.size()] == '.');
  };
  return within("collectives") || within("torch");
}

// The innermost frame that is the user's, or of a thread that has none, such as autograd's, the outermost.
nb::object calling_frame() {
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid() && ours(frame)) {
    nb::object back = frame.attr("f_back");
    if (back.is_none()) break;
    frame = std::move(back);
  }
  return frame;
}

// Also of a path that is no UTF-8, whose bytes Python keeps as lone surrogates.
std::string text_of(nb::handle text) {
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "?";
  }
  return PyBytes_AsString(bytes.ptr());
}

std::string describe(nb::handle code, int line) {
  const std::string file = text_of(code.attr("co_filename"));
  const std::string function = text_of(code.attr("co_name"));
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(line) + " in " + function;
}

// Texts of lines that issued operations. The code objects are held, so that none is taken for another.
struct KnownSites {
  static constexpr std::size_t kMost = 1024;

  struct Site {
    nb::object code;
    std::shared_ptr<const std::string> text;
  };

  std::mutex mutex;  // for interpreters without a global lock; nobody who has it calls Python
  std::map<std::pair<const PyObject*, int>, Site> sites;
};

// Around a call that takes Python's lock. While the interpreter ends, CPython before 3.14 ends a thread that
// asks for it, by unwinding its stack; nanobind's and our frames that may not throw would abort the process
// for that. The thread sleeps until the process ends instead, as it does from 3.14 on.
class SleepWhenUnwound {
 public:
  SleepWhenUnwound() = default;
  SleepWhenUnwound(const SleepWhenUnwound&) = delete;
  SleepWhenUnwound& operator=(const SleepWhenUnwound&) = delete;
  ~SleepWhenUnwound() {
    while (!taken_) pause();
  }
  void taken() { taken_ = true; }

 private:
  bool taken_ = false;
};

// Not in the destructor that calls it: what may not throw needs no cleanup before it ends the process.
[[gnu::noinline]] void restore(PyThreadState* released) {
  SleepWhenUnwound guard;
  PyEval_RestoreThread(released);
  guard.taken();
}

class PythonLock {
 public:
  PythonLock() : state_(take()) {}
  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;
  ~PythonLock() { PyGILState_Release(state_); }

 private:
  [[gnu::noinline]] static PyGILState_STATE take() {
    SleepWhenUnwound guard;
    const PyGILState_STATE state = PyGILState_Ensure();
    guard.taken();
    return state;
  }

  PyGILState_STATE state_;
};

}  // namespace

PythonInterrupt::~PythonInterrupt() {
  if (released_ != nullptr) restore(released_);
}

ReleasedLock::~ReleasedLock() { restore(released_); }

void PythonInterrupt::blocks() {
  if (released_ == nullptr) released_ = PyEval_SaveThread();
}

bool PythonInterrupt::requested() {
  const PythonLock lock;
  return PyErr_CheckSignals() != 0;
}

std::string PythonInterrupt::site() {
  const PythonLock lock;
  const nb::object frame = calling_frame();
  return frame.is_valid() ? describe(code_of(frame), line_of(frame)) : "";
}

std::shared_ptr<const std::string> call_site() {
  static KnownSites& known = *new KnownSites();  // outlives the interpreter, which must not be called then
  const PythonLock lock;
  const nb::object frame = calling_frame();
  if (!frame.is_valid()) return nullptr;
  nb::object code = code_of(frame);
  const std::pair<const PyObject*, int> key{code.ptr(), line_of(frame)};
  {
    const std::lock_guard guard(known.mutex);
    const auto found = known.sites.find(key);
    if (found != known.sites.end()) return found->second.text;
  }
  auto text = std::make_shared<const std::string>(describe(code, key.second));
  std::map<std::pair<const PyObject*, int>, KnownSites::Site> dropped;  // let go without the mutex
  const std::lock_guard guard(known.mutex);
  if (known.sites.size() >= KnownSites::kMost) dropped.swap(known.sites);
  return known.sites.try_emplace(key, KnownSites::Site{std::move(code), std::move(text)}).first->second.text;
}

void prepare_call_sites() { name_key = PyUnicode_InternFromString("__name__"); }

}  // namespace collectives
