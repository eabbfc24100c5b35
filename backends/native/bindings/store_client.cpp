// Connections to a store's server. Deadlines are moments of Python's time.monotonic(), which is the clock of
// the core; errors are those of sockets in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "bindings/bindings.hpp"
#include "bindings/owned_group.hpp"
#include "store/protocol.hpp"
#include "store/server.hpp"
#include "store_client/connection.hpp"
#include "store_client/local.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

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

template <class T>
void put(std::string& requests, T value) {
  requests.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_bytes(std::string& requests, std::string_view prefix, std::string_view content) {
  put<std::uint64_t>(requests, prefix.size() + content.size());
  requests += prefix;
  requests += content;
}

void put_key_bytes(std::string& requests, std::string_view bytes, nb::handle key) {
  constexpr std::size_t kMost = store::kMaxKeyBytes - store::kPrefixOfUsers.size();
  if (bytes.size() > kMost) {
    constexpr Py_ssize_t kShown = 32;
    const auto shown = nb::steal(PyUnicode_Substring(key.ptr(), 0, kShown));
    if (!shown.is_valid()) throw nb::python_error();
    throw nb::value_error(("a key of a TCPStore may have " + std::to_string(kMost) + " bytes, this one has " +
                           std::to_string(bytes.size()) + ": " + nb::repr(shown).c_str() + "...")
                              .c_str());
  }
  put_bytes(requests, store::kPrefixOfUsers, bytes);
}

// A user's key as it is stored. What came of bytes that are no text goes back to them.
void put_key(std::string& requests, nb::handle key) {
  Py_ssize_t size = 0;
  if (const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size)) {
    return put_key_bytes(requests, {text, static_cast<std::size_t>(size)}, key);
  }
  if (!PyUnicode_Check(key.ptr())) throw nb::python_error();
  PyErr_Clear();
  const auto encoded = nb::steal<nb::bytes>(PyUnicode_AsEncodedString(key.ptr(), "utf-8", "surrogateescape"));
  if (!encoded.is_valid()) throw nb::python_error();
  put_key_bytes(requests, view(encoded), key);
}

// A member of an enumeration, too, which nanobind would convert first.
std::uint8_t command_from(nb::handle field) {
  const long code = PyLong_AsLong(field.ptr());
  if (code == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return static_cast<std::uint8_t>(code);
}

nb::list listed(std::string& requests, nb::handle fields) {
  auto items = nb::cast<nb::list>(fields);
  if (nb::len(items) > store::kMaxKeys) {
    throw nb::value_error(("a TCPStore takes at most " + std::to_string(store::kMaxKeys) +
                           " keys in one call, not " + std::to_string(nb::len(items)))
                              .c_str());
  }
  put<std::uint64_t>(requests, nb::len(items));
  return items;
}

void put_field(std::string& requests, char kind, nb::handle field) {
  switch (kind) {
    case 'b':
      return put(requests, command_from(field));
    case 'u':
      return put(requests, nb::cast<std::uint32_t>(field));
    case 'n':
      return put(requests, nb::cast<std::int64_t>(field));
    case 'v':
      return put_bytes(requests, "", view(nb::cast<nb::bytes>(field)));
    case 'k':
      return put_key(requests, field);
    case 'K':
      for (const nb::handle key : listed(requests, field)) put_key(requests, key);
      return;
    case 'P':
      for (const nb::handle item : listed(requests, field)) {
        const auto pair = nb::cast<nb::tuple>(item);
        if (pair.size() != 2) throw nb::value_error("a key and its value are a pair");
        put_key(requests, pair[0]);
        put_bytes(requests, "", view(nb::cast<nb::bytes>(pair[1])));
      }
      return;
    default:
      throw nb::value_error("no field of a request has this letter");
  }
}

std::string encoded(std::string_view form, const nb::tuple& fields) {
  if (form.size() != fields.size()) throw nb::value_error("a request needs one field for each letter");
  std::string requests;
  for (std::size_t i = 0; i < form.size(); ++i) put_field(requests, form[i], fields[i]);
  if (requests.size() > store::kMaxRequestBytes) {
    throw nb::value_error(("a request of " + std::to_string(requests.size()) +
                           " bytes is more than a server takes: " + std::to_string(store::kMaxRequestBytes) +
                           "; pass fewer keys in one call")
                              .c_str());
  }
  return requests;
}

nb::bytes requests_of(std::string_view form, const nb::args& fields) {
  const std::string requests = encoded(form, fields);
  return nb::bytes(requests.data(), requests.size());
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

nb::list await(store_client::Connection& connection, std::string_view form, double deadline) {
  Replies* replies = nullptr;
  call(0, [&](Interrupt& interrupt) { replies = &connection.await(form, moment(deadline), interrupt); });
  return taken(*replies);
}

nb::list exchanged(store_client::Connection& connection, std::string_view requests, std::string_view form,
                   double deadline) {
  Replies* replies = nullptr;
  call(requests.size(), [&](Interrupt& interrupt) {
    connection.send(requests, moment(deadline), interrupt);
    replies = &connection.await(form, moment(deadline), interrupt);
  });
  return taken(*replies);
}

nb::list exchange(store_client::Connection& connection, const nb::bytes& requests, std::string_view form,
                  double deadline) {
  return exchanged(connection, view(requests), form, deadline);
}

nb::list ask(store_client::Connection& connection, std::string_view form, const nb::tuple& fields,
             std::string_view replies, double limit) {
  const double now = static_cast<double>(now_ns()) / static_cast<double>(kSecond);
  return exchanged(connection, encoded(form, fields), replies, now + limit);
}

void send_bytes(store_client::Connection& connection, const nb::bytes& requests, double deadline) {
  call(requests.size(),
       [&](Interrupt& interrupt) { connection.send(view(requests), moment(deadline), interrupt); });
}

nb::bytes receive_bytes(store_client::Connection& connection, std::size_t bytes, double deadline) {
  Replies* replies = nullptr;
  call(0, [&](Interrupt& interrupt) { replies = &connection.receive(bytes, moment(deadline), interrupt); });
  const nb::bytes result(replies->held().data(), bytes);
  replies->take(bytes);
  return result;
}

const char* prove(SocketConnection& connection, const nb::bytes& key, bool encrypts, double deadline) {
  SocketConnection::Proved proved{};
  call(0, [&](Interrupt& interrupt) {
    proved = connection.prove(std::string(view(key)), encrypts, moment(deadline), interrupt);
  });
  switch (proved) {
    case SocketConnection::Proved::both:
      return "both";
    case SocketConnection::Proved::turned_away:
      return "turned away";
    case SocketConnection::Proved::differ:
      return "differ";
    case SocketConnection::Proved::ended:
      return "ended";
    default:
      return "not server";
  }
}

}  // namespace

void bind_store_client(nb::module_& module) {
  module.def(
      "store_requests", &requests_of, nb::arg("form"), nb::arg("fields"),
      "Bytes of requests: a letter of the form for each field, b = u8, u = u32, n = i64, v = value or key as "
      "stored, k = key of a user, K = list of keys, P = list of keys with values.");
  nb::class_<store_client::Connection>(module, "StoreConnection",
                                       "One connection to a store's server, used by one thread at a time.")
      .def("exchange", &exchange, nb::arg("requests"), nb::arg("form"), nb::arg("deadline"),
           "Sends requests; returns their replies as `replies` does.")
      .def("ask", &ask, nb::arg("form"), nb::arg("fields"), nb::arg("replies"), nb::arg("limit"),
           "Sends requests of `store_requests`; returns their replies as `replies` does, within so many "
           "seconds. Nothing is sent where a field cannot be.")
      .def("send", &send_bytes, nb::arg("data"), nb::arg("deadline"))
      .def(
          "replies", &await, nb::arg("form"), nb::arg("deadline"),
          "Returns the next replies: a letter of the form for each, b = u8, u = u32, n = i64, v = value, l = "
          "list of values.")
      .def("receive", &receive_bytes, nb::arg("size"), nb::arg("deadline"), "Returns the next bytes.");
  nb::class_<SocketConnection, store_client::Connection>(
      module, "StoreSocketConnection", "Over the descriptor of a connected socket, which stays the caller's.")
      .def(nb::init<int>(), nb::arg("socket"))
      .def("prove", &prove, nb::arg("key"), nb::arg("encrypts"), nb::arg("deadline"),
           "Both ends prove that they know the key, before anything is sent, and encrypt what follows or do "
           "not. Returns 'both', or why the connection is to be closed: 'turned away', 'differ', 'ended', "
           "'not server'.");
  nb::class_<LocalConnection, store_client::Connection>(
      module, "StoreLocalConnection", "To a server of this process, for requests that do not wait.")
      .def(
          "__init__",
          [](LocalConnection* self, const store::Server& server) {
            new (self) LocalConnection(server.loop());
          },
          nb::arg("server").lock());
}

}  // namespace collectives
