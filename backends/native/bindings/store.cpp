#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <system_error>
#include <vector>

#include "bindings/bindings.hpp"
#include "store/server.hpp"

namespace nb = nanobind;

namespace collectives {

void bind_store(nanobind::module_& module) {
  using store::Server;
  nb::class_<Server>(module, "StoreServer",
                     "Serves a TCP key/value store on listening sockets, in one thread without the GIL.")
      .def(
          "__init__",
          [](Server* self, const std::vector<int>& listeners, std::size_t max_bytes) {
            try {
              new (self) Server(listeners, max_bytes);
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
          },
          nb::arg("listeners"), nb::arg("max_bytes"),
          "Takes over descriptors of sockets that are bound and listening; holds at most so many bytes for "
          "clients.")
      // Keeps the GIL, so that nobody asks for a property meanwhile; the thread ends within its current turn.
      .def("stop", &Server::stop, "Closes all connections and ends the thread; idempotent.")
      .def_prop_ro("running", &Server::running)
      .def_prop_ro("connections", &Server::connections, "Open connections; for diagnosis.")
      .def_prop_ro("waiting", &Server::waiting, "Clients in a wait or a barrier; for diagnosis.");
}

}  // namespace collectives
