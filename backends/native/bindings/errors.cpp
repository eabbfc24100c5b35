#include "bindings/errors.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace collectives {
namespace {

// Derived classes before their bases.
constexpr std::array kKinds{ErrorKind::timeout, ErrorKind::mismatch, ErrorKind::peer_lost, ErrorKind::aborted,
                            ErrorKind::backend, ErrorKind::network,  ErrorKind::program};

ErrorKind kind_of(nb::handle exception) {
  const nb::module_ errors = nb::module_::import_("collectives.errors");
  for (const ErrorKind kind : kKinds) {
    if (nb::isinstance(exception, errors.attr(class_of(kind)))) return kind;
  }
  throw nb::type_error("only a DistError can break a group");
}

// What is no text, such as half a character, in backslashes.
std::string bytes_from(nb::handle text) {
  const auto bytes =
      nb::steal<nb::bytes>(PyUnicode_AsEncodedString(nb::str(text).ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {bytes.c_str(), bytes.size()};
}

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

Error error_from(nb::handle exception) {
  ErrorDetails details{.rank = nb::cast<int>(exception.attr("rank")),
                       .missing = nb::cast<std::vector<int>>(exception.attr("missing_ranks")),
                       .operation = bytes_from(exception.attr("operation")),
                       .sequence = nb::cast<std::int64_t>(exception.attr("sequence"))};
  const nb::object cause = exception.attr("cause");
  if (!cause.is_none()) details.cause = std::make_shared<const Error>(error_from(cause));
  return {kind_of(exception), bytes_from(exception), details};
}

void bind_errors(nb::module_& /*module*/) { nb::register_exception_translator(translate); }

}  // namespace collectives
