#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include "bindings/bindings.hpp"
#include "security/handshake.hpp"
#include "security/peer_process.hpp"
#include "store/server.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

nb::tuple listed_outcasts(const store::Outcasts* outcasts) {
  return outcasts == nullptr ? nb::make_tuple(0, "") : nb::make_tuple(outcasts->count(), outcasts->last());
}

}  // namespace

void bind_store(nanobind::module_& module) {
  using store::Server;
  module.def("is_own_user", is_own_user, nb::arg("user"),
             "Whether the number of a user stands for the user of this process, and for no other.");
  module.def(
      "peer_process",
      [](int socket) {
        const PeerProcess found = peer_process(socket);
        if (found == PeerProcess::unknown) {
          PyErr_SetFromErrno(PyExc_OSError);
          throw nb::python_error();
        }
        if (found == PeerProcess::elsewhere) return "elsewhere";
        return found == PeerProcess::of_this_user ? "of this user" : "of another user";
      },
      nb::arg("socket"), "Whose process has the other end of a TCP connection on this machine.");
  module.def("within_machine", within_machine, nb::arg("socket"),
             "Whether a TCP connection stays on this machine, as the addresses of its ends say.");
  module.def("check_libcrypto", check_encryption,
             "Raises where there is no libcrypto to encrypt by, or it refuses keys or ciphers.");
  module.attr("FORGED") = forged_text();
  nb::class_<Server>(module, "StoreServer",
                     "Serves a TCP key/value store on listening sockets, in one thread without the GIL.")
      .def(
          "__init__",
          [](Server* self, const std::vector<int>& listeners, std::size_t max_bytes, const nb::bytes& key,
             bool own_user_only, std::uint8_t encryption) {
            try {
              new (self) Server(listeners, max_bytes,
                                {.key = std::string(key.c_str(), key.size()),
                                 .own_user_only = own_user_only,
                                 .encryption = static_cast<store::Encryption>(encryption)});
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
          },
          nb::arg("listeners"), nb::arg("max_bytes"), nb::arg("key") = nb::bytes("", 0),
          nb::arg("own_user_only") = false, nb::arg("encryption") = 0,
          "Takes over descriptors of sockets that are bound and listening; holds at most so many bytes for "
          "clients; see Admission for the rest.")
      // Keeps the GIL, so that nobody asks for a property meanwhile; where there is none, the lock of the
      // server's object. The thread ends within its current turn.
      .def("stop", &Server::stop, nb::lock_self(), "Closes all connections and ends the thread; idempotent.")
      .def_prop_ro("running", &Server::running, nb::lock_self())
      .def_prop_ro("connections", &Server::connections, nb::lock_self(), "Open connections; for diagnosis.")
      .def_prop_ro("waiting", &Server::waiting, nb::lock_self(),
                   "Clients in a wait or a barrier; for diagnosis.")
      .def_prop_ro(
          "refused", [](const Server& server) { return listed_outcasts(server.refused()); }, nb::lock_self(),
          "How many connections were not let in, and the address of the last, empty where it is not known.")
      .def_prop_ro(
          "forged", [](const Server& server) { return listed_outcasts(server.forged()); }, nb::lock_self(),
          "Likewise of clients' connections on which bytes came that the clients had not sent.");
}

}  // namespace collectives
