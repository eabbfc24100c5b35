// The host group: addresses are plain numbers, and `owner` is what their memory belongs to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/fast_path.hpp"
#include "bindings/host_task.hpp"
#include "bindings/interrupt.hpp"
#include "bindings/operation_record.hpp"
#include "bindings/owned_group.hpp"
#include "bindings/request_from.hpp"
#include "bindings/tensor_view.hpp"
#include "engine/group.hpp"
#include "state/bootstrap.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

// With `wait` runs the operation and returns None; else queues it and returns its task.
nb::object collective(OwnedGroup& owned, std::uint8_t opcode, Address data, Address input, std::size_t count,
                      std::uint8_t dtype, std::uint8_t op, double factor, int root, const Parts& outputs,
                      const Parts& inputs, Nanoseconds timeout, bool wait, nb::object owner) {
  Group& group = usable(owned);
  Request request = request_from(opcode, data, input, count, dtype, op, factor, root, outputs, inputs);
  if (!wait) {
    return nb::cast(
        HostTask(group.enqueue(std::move(request), timeout, owner_of(std::move(owner)), call_site())));
  }
  std::size_t bytes = count * size_of(request.reduction.dtype);
  for (const Part& part : request.outputs) bytes += part.bytes;
  for (const Part& part : request.inputs) bytes += part.bytes;
  PythonInterrupt interrupt(release_for(bytes));
  group.run(request, timeout, &interrupt);
  return nb::none();
}

HostTask message(OwnedGroup& owned, bool sends, Address data, std::size_t count, std::uint8_t dtype, int peer,
                 std::uint32_t tag, Nanoseconds timeout, nb::object owner) {
  Group& group = usable(owned);
  const DType checked = dtype_from(dtype);
  const Envelope envelope{.peer = peer, .tag = tag, .dtype = checked, .bytes = count * size_of(checked)};
  Owner kept = owner_of(std::move(owner));
  const ReleasedLock released;
  return HostTask(sends ? group.send(envelope, pointer_from(data), timeout, std::move(kept))
                        : group.receive(envelope, pointer_from(data), timeout, std::move(kept)));
}

template <class Function>
auto without_gil(Function&& function) {
  const ReleasedLock released;
  return function();
}

using TuningValues = std::map<std::string, std::uint64_t>;

TuningValues values_of(const Tuning& tuning) {
  TuningValues values;
  for (const TuningField& field : tuning_fields()) values[field.name] = tuning.*field.value;
  return values;
}

// The fields that `values` does not name keep their defaults.
Tuning tuning_from(const TuningValues& values, int size) {
  Tuning tuning = default_tuning(size);
  for (const auto& [name, value] : values) {
    bool known = false;
    for (const TuningField& field : tuning_fields()) {
      if (name != field.name) continue;
      tuning.*field.value = value;
      known = true;
    }
    if (!known) throw std::invalid_argument("there is no threshold '" + name + "'");
  }
  const std::string complaint = complaint_about(tuning);
  if (!complaint.empty()) throw std::invalid_argument(complaint);
  return tuning;
}

void bind_tuning(nb::module_& module) {
  nb::dict fields;
  for (const TuningField& field : tuning_fields()) {
    fields[field.name] = nb::make_tuple(field.least, field.most, field.unit, field.meaning);
  }
  module.attr("TUNING_FIELDS") = fields;
  module.def(
      "complete_tuning",
      [](const TuningValues& values, int size) { return values_of(tuning_from(values, size)); },
      nb::arg("values"), nb::arg("size"));
}

// Address and port.
using Place = std::pair<std::string, std::uint16_t>;

struct Listeners {
  explicit Listeners(std::vector<Listener> given) : all(std::move(given)) {}
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  std::vector<Listener> all;
};

void bind_network(nb::module_& module) {
  module.def("interfaces", [] {
    std::vector<std::tuple<std::string, std::string, bool>> found;
    for (Interface& each : interfaces()) {
      found.emplace_back(std::move(each.name), std::move(each.address), each.loopback);
    }
    return found;
  });
  nb::class_<Listeners>(module, "HostListeners")
      .def(
          "__init__",
          [](Listeners* listeners, const std::vector<std::string>& addresses, int backlog,
             const std::vector<std::uint16_t>& ports) {
            std::vector<Listener> all;
            for (const std::string& address : addresses) all.push_back(listen_tcp(address, backlog, ports));
            new (listeners) Listeners(std::move(all));
          },
          nb::arg("addresses"), nb::arg("backlog"), nb::arg("ports"),
          "Listens on each address, on the first of the ports that is free there; 0 lets the system choose.")
      .def_prop_ro("places",
                   [](const Listeners& listeners) {
                     std::vector<Place> places;
                     for (const Listener& each : listeners.all) {
                       places.emplace_back(each.endpoint.address, each.endpoint.port);
                     }
                     return places;
                   })
      .def("close", [](Listeners& listeners) { listeners.all.clear(); });
  nb::class_<Membership>(module, "Membership")
      .def_prop_ro("ended", &Membership::ended)
      .def(
          "span",
          [](Membership& membership, std::vector<std::vector<int>> machines, std::vector<std::string> hosts,
             Listeners& listeners, const std::vector<std::vector<Place>>& places, const nb::bytes& key,
             bool own_user_only, bool encrypts, bool from_lanes, int ranks_on_host) {
            Network network;
            network.key.assign(key.c_str(), key.size());
            network.own_user_only = own_user_only;
            network.encrypts = encrypts;
            network.from_lanes = from_lanes;
            network.listeners = std::move(listeners.all);
            for (const std::vector<Place>& rank : places) {
              std::vector<Endpoint>& lanes = network.endpoints.emplace_back();
              for (const auto& [address, port] : rank) lanes.push_back({address, port});
            }
            membership.span(make_topology(std::move(machines), std::move(hosts), membership.rank),
                            std::move(network), ranks_on_host);
          },
          nb::arg("machines"), nb::arg("hosts"), nb::arg("listeners"), nb::arg("places"), nb::arg("key"),
          nb::arg("own_user_only"), nb::arg("encrypts"), nb::arg("from_lanes"), nb::arg("ranks_on_host"));
}

void bind_bootstrap(nb::module_& module) {
  module.def(
      "single_rank_membership", [] { return new Membership(single_rank_membership()); },
      nb::rv_policy::take_ownership);
  nb::class_<BootstrapLeader>(module, "BootstrapLeader")
      .def(
          "__init__",
          [](BootstrapLeader* leader, const std::string& name, std::vector<int> members, int size,
             const nb::bytes& key) {
            new (leader)
                BootstrapLeader(name, std::move(members), size, std::string(key.c_str(), key.size()));
          },
          nb::arg("name"), nb::arg("members"), nb::arg("size"), nb::arg("key"))
      .def(
          "accept",
          [](BootstrapLeader& leader, double seconds) {
            return without_gil([&] { return leader.accept(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def(
          "set_tuning",
          [](BootstrapLeader& leader, const TuningValues& values, int size, std::uint64_t threads) {
            Tuning tuning = tuning_from(values, size);
            tuning.threads = threads;
            leader.set_tuning(tuning);
          },
          nb::arg("values"), nb::arg("size"), nb::arg("threads"))
      .def(
          "share",
          [](BootstrapLeader& leader, bool spans_machines, double seconds) {
            without_gil([&] { leader.share(spans_machines, deadline_in(seconds)); });
          },
          nb::arg("spans_machines"), nb::arg("seconds"))
      .def("exclude", &BootstrapLeader::exclude, nb::arg("rank"))
      .def_prop_ro("members", [](const BootstrapLeader& leader) { return leader.members(); })
      .def(
          "await_attached",
          [](BootstrapLeader& leader, double seconds) {
            return without_gil([&] { return leader.await_attached(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def(
          "release",
          [](BootstrapLeader& leader, double seconds) {
            return without_gil([&] { return new Membership(leader.release(deadline_in(seconds))); });
          },
          nb::arg("seconds"), nb::rv_policy::take_ownership)
      .def("close", &BootstrapLeader::close);
  nb::class_<BootstrapFollower>(module, "BootstrapFollower")
      .def(
          "__init__",
          [](BootstrapFollower* follower, const std::string& name, int leader, int rank, int size,
             const nb::bytes& key, double seconds) {
            std::string known(key.c_str(), key.size());
            const ReleasedLock released;
            new (follower)
                BootstrapFollower(name, leader, rank, size, std::move(known), deadline_in(seconds));
          },
          nb::arg("name"), nb::arg("leader"), nb::arg("rank"), nb::arg("size"), nb::arg("key"),
          nb::arg("seconds"))
      .def(
          "proved",
          [](BootstrapFollower& follower, double seconds) {
            return without_gil([&] { return follower.proved(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def_prop_ro("leader_ended", &BootstrapFollower::leader_ended)
      .def(
          "answered",
          [](BootstrapFollower& follower, double seconds) {
            return without_gil([&] { return follower.answered(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def(
          "attach",
          [](BootstrapFollower& follower, double seconds) {
            return without_gil([&] { return follower.attach(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def(
          "await_release",
          [](BootstrapFollower& follower, double seconds) {
            return without_gil([&] { return new Membership(follower.await_release(deadline_in(seconds))); });
          },
          nb::arg("seconds"), nb::rv_policy::take_ownership)
      .def("close", &BootstrapFollower::close);
}

void bind_group(nb::module_& module) {
  nb::class_<OwnedGroup>(module, "HostGroup")
      .def(
          "__init__",
          [](OwnedGroup* group, Membership& membership, std::string label, Nanoseconds timeout,
             const SharedRecord& shared, unsigned threads, unsigned cores) {
            if (threads < 1 || threads > WorkerPool::kMostParts) {
              throw std::invalid_argument("threads must be from 1 to " +
                                          std::to_string(WorkerPool::kMostParts) + ", not " +
                                          std::to_string(threads));
            }
            membership.threads = threads;
            membership.workers_linger = threads <= cores;
            new (group) OwnedGroup(
                std::make_unique<Group>(std::move(membership), std::move(label), timeout, shared.record));
          },
          nb::arg("membership"), nb::arg("label"), nb::arg("timeout_ns"), nb::arg("record"),
          nb::arg("threads"), nb::arg("cores"))
      .def("fast_collective", fast_collective, nb::arg("opcode"), nb::arg("output").none() = nb::none(),
           nb::arg("input").none() = nb::none(), nb::arg("op_code") = 0, nb::arg("root") = 0,
           nb::arg("listed") = false)
      .def("fast_collective_async", fast_collective_async, nb::arg("opcode"), nb::arg("output").none(),
           nb::arg("input").none(), nb::arg("op_code"), nb::arg("root"), nb::arg("listed"))
      .def("fast_message", fast_message, nb::arg("sends"), nb::arg("tensor"), nb::arg("peer"), nb::arg("tag"),
           nb::arg("waits"))
      .def(
          "connect",
          [](OwnedGroup& group, double seconds) {
            Group& mine = usable(group);
            return without_gil([&] { return mine.connect(deadline_in(seconds)); });
          },
          nb::arg("seconds"))
      .def("lost_ranks",
           [](OwnedGroup& group) { return group.inherited() ? std::vector<int>() : group->lost_ranks(); })
      .def("connection_error", [](OwnedGroup& group) { return usable(group).connection_error(); })
      .def(
          "set_timeout", [](OwnedGroup& group, Nanoseconds timeout) { usable(group).set_timeout(timeout); },
          nb::arg("timeout_ns"))
      .def("collective", collective, nb::arg("opcode"), nb::arg("data_ptr"), nb::arg("input_ptr"),
           nb::arg("count"), nb::arg("dtype_code"), nb::arg("op_code"), nb::arg("factor"), nb::arg("root"),
           nb::arg("outputs"), nb::arg("inputs"), nb::arg("timeout_ns"), nb::arg("wait"), nb::arg("owner"))
      .def("message", message, nb::arg("sends"), nb::arg("data_ptr"), nb::arg("count"), nb::arg("dtype_code"),
           nb::arg("peer"), nb::arg("tag"), nb::arg("timeout_ns"), nb::arg("owner"))
      .def(
          "fail",
          [](OwnedGroup& group, nb::handle exception) {
            const Error error = error_from(exception);
            if (!group.inherited()) without_gil([&] { group->fail(error); });
          },
          nb::arg("error"))
      .def("failure",
           [](OwnedGroup& group) -> nb::object {
             if (group.inherited()) return nb::none();
             const std::optional<Failure> failure = without_gil([&] { return group->failure(); });
             return failure ? exception_from(error_from(*failure)) : nb::none();
           })
      .def(
          "shutdown",
          [](OwnedGroup& group, bool finish) {
            if (!group.inherited()) without_gil([&] { group->shutdown(finish); });
          },
          nb::arg("finish"))
      .def(
          "not_done",
          [](OwnedGroup& group, const HostTask& handle, double seconds) {
            Group& mine = usable(group);
            const auto waited = static_cast<Nanoseconds>(seconds * 1e9);
            return exception_from(without_gil([&] { return mine.not_done(handle.task(), waited); }));
          },
          nb::arg("task"), nb::arg("seconds"))
      .def_prop_ro("tuning", [](OwnedGroup& group) { return values_of(group->tuning()); })
      .def("report", [](OwnedGroup& group) {
        Group& mine = usable(group);
        return text_from(without_gil([&] { return mine.report(); }));
      });
  module.def("register_tensor_type", register_tensor_type, nb::arg("type"));
  nb::dict opcodes;
  for (std::uint8_t code = 1; code <= static_cast<std::uint8_t>(Opcode::all_to_all); ++code) {
    opcodes[name_of(static_cast<Opcode>(code))] = code;
  }
  module.attr("COLLECTIVES") = opcodes;
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("MOST_THREADS") = WorkerPool::kMostParts;
}

}  // namespace

void bind_host(nb::module_& module) {
  bind_errors(module);
  bind_tuning(module);
  bind_network(module);
  bind_bootstrap(module);
  bind_operation_record(module);
  bind_task(module);
  bind_group(module);
}

}  // namespace collectives
