#include "bindings/errors.hpp"

#include <exception>

namespace nb = nanobind;
using namespace nb::literals;

namespace collectives {
namespace {

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    // The hook that asked for the interruption has left the signal handler's exception in place.
    if (error.kind() == ErrorKind::interrupted && PyErr_Occurred() != nullptr) return;
    const nb::object exception = exception_from(error);
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
  }
}

}  // namespace

nb::str text_from(const std::string& text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::object exception_from(const Error& error) {
  const nb::object type = nb::module_::import_("collectives.errors").attr(class_of(error.kind()));
  const ErrorDetails& details = error.details();
  nb::list missing;
  for (const int rank : details.missing) missing.append(rank);
  const nb::object cause = details.cause ? exception_from(*details.cause) : nb::none();
  return type(text_from(error.message()), details.rank, "missing_ranks"_a = missing,
              "operation"_a = text_from(details.operation), "sequence"_a = details.sequence,
              "cause"_a = cause);
}

void bind_errors(nb::module_& /*module*/) { nb::register_exception_translator(translate); }

}  // namespace collectives
