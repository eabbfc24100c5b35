#include "bindings/interrupt.hpp"

#include <string_view>

namespace nb = nanobind;

namespace collectives {
namespace {

bool ours(nb::handle frame) {
  const nb::object globals = nb::steal(PyFrame_GetGlobals(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  const nb::handle name = PyDict_GetItemString(globals.ptr(), "__name__");
  if (!name.is_valid() || !PyUnicode_Check(name.ptr())) return false;
  const std::string_view module = nb::borrow<nb::str>(name).c_str();
  const auto within = [&](std::string_view package) {
    return module == package || (module.starts_with(package) && module[package.size()] == '.');
  };
  return within("collectives") || within("torch");
}

}  // namespace

PythonInterrupt::~PythonInterrupt() {
  if (released_ != nullptr) PyEval_RestoreThread(released_);
}

void PythonInterrupt::blocks() {
  if (released_ == nullptr) released_ = PyEval_SaveThread();
}

bool PythonInterrupt::requested() {
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

std::string PythonInterrupt::site() {
  const nb::gil_scoped_acquire acquire;
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid() && ours(frame)) {
    frame = nb::steal(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
  }
  if (!frame.is_valid()) return {};
  auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
  const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
  const std::string file = nb::cast<nb::str>(code.attr("co_filename")).c_str();
  const std::string function = nb::cast<nb::str>(code.attr("co_name")).c_str();
  const std::string line = std::to_string(PyFrame_GetLineNumber(raw));
  return file.substr(file.find_last_of('/') + 1) + ":" + line + " in " + function;
}

}  // namespace collectives
