// Connections to a store's server. Deadlines are moments of Python's time.monotonic(), which is the clock of
// the core; errors are those of sockets in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cerrno>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <system_error>

#include "bindings/bindings.hpp"
#include "bindings/owned_group.hpp"
#include "store/server.hpp"
#include "store_client/connection.hpp"
#include "store_client/local.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using store_client::Connection;
using store_client::LocalConnection;
using store_client::Replies;
using store_client::SocketConnection;

Nanoseconds moment(double seconds) {
  constexpr double kLatest = 9e9;  // far beyond any clock, and within 64 bits
  return seconds >= kLatest ? kNever : static_cast<Nanoseconds>(std::fmax(seconds, 0.0) * 1e9);
}

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Calls a function, whose errors become those of Python's sockets; has Python's lock again afterwards.
template <class Function>
void call(std::size_t bytes, Function&& function) {
  try {
    PythonInterrupt interrupt(release_for(bytes));
    function(interrupt);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::interrupted) throw nb::python_error();
    PyErr_SetString(error.kind() == ErrorKind::timeout ? PyExc_TimeoutError : PyExc_ConnectionResetError,
                    error.what());
    throw nb::python_error();
  }
}

nb::object value_of(const Replies::Field& field) {
  if (field.kind == 'v') return nb::bytes(field.bytes.data(), field.bytes.size());
  return nb::int_(field.number);
}

// A value for each letter of the form; lists without their counts.
nb::list taken(Replies& replies) {
  nb::list values;
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const Replies::Field field = replies.field(i);
    if (field.kind != 'l') {
      values.append(value_of(field));
      continue;
    }
    nb::list listed;
    for (const std::size_t last = i + static_cast<std::size_t>(field.number); i < last;) {
      listed.append(value_of(replies.field(++i)));
    }
    values.append(listed);
  }
  replies.take();
  return values;
}

nb::list await(Connection& connection, std::string_view form, double deadline) {
  Replies* replies = nullptr;
  call(0, [&](Interrupt& interrupt) { replies = &connection.await(form, moment(deadline), interrupt); });
  return taken(*replies);
}

nb::list exchange(Connection& connection, const nb::bytes& requests, std::string_view form, double deadline) {
  Replies* replies = nullptr;
  call(requests.size(), [&](Interrupt& interrupt) {
    connection.send(view(requests), moment(deadline), interrupt);
    replies = &connection.await(form, moment(deadline), interrupt);
  });
  return taken(*replies);
}

void send(Connection& connection, const nb::bytes& requests, double deadline) {
  call(requests.size(),
       [&](Interrupt& interrupt) { connection.send(view(requests), moment(deadline), interrupt); });
}

nb::bytes receive(Connection& connection, std::size_t bytes, double deadline) {
  Replies* replies = nullptr;
  call(0, [&](Interrupt& interrupt) { replies = &connection.receive(bytes, moment(deadline), interrupt); });
  const nb::bytes result(replies->held().data(), bytes);
  replies->take(bytes);
  return result;
}

}  // namespace

void bind_store_client(nb::module_& module) {
  nb::class_<Connection>(module, "StoreConnection",
                         "One connection to a store's server, used by one thread at a time.")
      .def("exchange", &exchange, nb::arg("requests"), nb::arg("form"), nb::arg("deadline"),
           "Sends requests; returns their replies as `replies` does.")
      .def("send", &send, nb::arg("data"), nb::arg("deadline"))
      .def(
          "replies", &await, nb::arg("form"), nb::arg("deadline"),
          "Returns the next replies: a letter of the form for each, b = u8, u = u32, n = i64, v = value, l = "
          "list of values.")
      .def("receive", &receive, nb::arg("size"), nb::arg("deadline"), "Returns the next bytes.");
  nb::class_<SocketConnection, Connection>(
      module, "StoreSocketConnection", "Over the descriptor of a connected socket, which stays the caller's.")
      .def(nb::init<int>(), nb::arg("socket"));
  nb::class_<LocalConnection, Connection>(module, "StoreLocalConnection",
                                          "To a server of this process, for requests that do not wait.")
      .def(
          "__init__",
          [](LocalConnection* self, const store::Server& server) {
            new (self) LocalConnection(server.loop());
          },
          nb::arg("server"));
}

}  // namespace collectives
