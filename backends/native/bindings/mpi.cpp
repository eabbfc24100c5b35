// Collectives and messages of the mpi backend, without the GIL. Addresses are numbers, and the callers
// keep the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/fast_path.hpp"
#include "bindings/interrupt.hpp"
#include "bindings/operation_record.hpp"
#include "bindings/request_from.hpp"
#include "bindings/tensor_view.hpp"
#include "engine/task.hpp"
#include "engine/transfer.hpp"
#include "mpi/in_flight.hpp"
#include "mpi/messages.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using Clock = std::chrono::steady_clock;

// Tests before Python's lock is given up, where it is kept at first.
constexpr int kTestsWithLock = 50;
// How long a caller goes on testing, the core given away in between, before it leaves the operation to
// whoever watches time limits and other ranks.
constexpr auto kPatience = std::chrono::milliseconds(2);

// The most bytes of the tensors of one call on this rank that the fast path takes.
constexpr std::size_t kFastBytes = 8 << 20;

// The flight record of a group, whose threads write one after the other: by the GIL, or without one by a
// lock.
struct SerialRecord {
  explicit SerialRecord(std::shared_ptr<OperationRecord> given) : record(std::move(given)) {}

  const std::shared_ptr<OperationRecord> record;
  nb::ft_mutex writing;
};

// Where an operation stands in the flight record.
struct RecordedInFlight {
  std::shared_ptr<SerialRecord> record;  // that has the ring
  OperationRing& ring;
  RecordTicket ticket;
};

// An operation in flight, with MPI's error code, for Python.
struct InFlight {
  std::unique_ptr<MpiOperation> progress;
  MpiMessage* const message;  // what it is, unless it is a collective
  long number;                // of the operation, 0 where the caller counts
  nb::object call;  // the tensors of a fast call, and what else Python needs to carry it on; null elsewhere
  std::optional<RecordedInFlight> recorded;
  bool started = false;
  int error = kMpiSuccess;

  explicit InFlight(std::unique_ptr<MpiCollective> what, long of = 0, nb::object how = {})
      : progress(std::move(what)), message(nullptr), number(of), call(std::move(how)) {}
  explicit InFlight(std::unique_ptr<MpiMessage> what, long of = 0, nb::object how = {})
      : message(what.get()), number(of), call(std::move(how)) {
    progress = std::move(what);
  }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // With the GIL held. MPI may still write into the memory of what is not done, which therefore stays.
  ~InFlight() {
    if (!started || progress->done()) return;
    static_cast<void>(progress.release());
    static_cast<void>(call.release());
  }

  void start() {
    started = true;
    error = progress->start();
  }

  // Notes its end in the flight record, with the GIL held; `text` is why it failed, or empty.
  void end(const std::string& text) {
    const std::optional<RecordedInFlight> ended = std::exchange(recorded, std::nullopt);
    if (!ended) return;
    const nb::ft_lock_guard lock(ended->record->writing);
    if (text.empty()) {
      ended->ring.end(ended->ticket, now_ns());
    } else {
      ended->ring.fail(ended->ticket, now_ns(), text);
    }
  }

  bool completed() {
    if (error == kMpiSuccess) error = progress->advance();
    return error != kMpiSuccess || progress->done();
  }
};

class MpiGroup {
 public:
  MpiGroup(const MpiCommunicator& collectives, std::uintptr_t messages, int largest_tag,
           nb::object operations, nb::object message_numbers, int spins,
           std::shared_ptr<OperationRecord> record, Nanoseconds timeout, nb::list unfinished)
      : collectives_(collectives),
        messages_{collectives.mpi, messages, collectives.rank, collectives.size},
        tags_(static_cast<unsigned>(largest_tag) / 2),
        operations_(std::move(operations)),
        message_numbers_(std::move(message_numbers)),
        spins_(spins),
        record_(std::make_shared<SerialRecord>(std::move(record))),
        timeout_(timeout),
        unfinished_(std::move(unfinished)) {
    static_cast<void>(collectives.messages());  // throws where the library is of no use
  }

  // The time limit of operations, for the flight record.
  void set_timeout(Nanoseconds timeout) noexcept { timeout_.store(timeout, std::memory_order_relaxed); }

  // True: done; false: the call does not qualify, or is too large; else the operation, which has failed or is
  // in flight. It is in the list of unfinished ones as well, because a signal's handler may raise before the
  // caller has it.
  nb::object fast_collective(std::uint8_t opcode, nb::handle output, nb::handle input, std::uint8_t op,
                             nb::handle root, bool listed) {
    std::optional<FastRequest> fast =
        fast_request(collectives_.rank, collectives_.size, opcode, output, input, op, root, listed);
    // MPI reduces in place.
    if (!fast || fast->bytes > kFastBytes ||
        (fast->request.opcode == Opcode::all_reduce && fast->request.input != nullptr))
      return nb::bool_(false);
    const std::size_t bytes = fast->bytes;
    const long number = next_number(operations_);
    const BegunOperation begun =
        record_of(fast->request, static_cast<std::uint64_t>(number), timeout(), now_ns());
    auto in_flight = std::make_shared<InFlight>(collective(std::move(fast->request)), number,
                                                nb::make_tuple(opcode, listed, output, input, op, root));
    begin(*in_flight, record_->record->collectives, listed ? begun : single_form(begun), bytes);
    return answer(std::move(in_flight));
  }

  // The same for a message on the communicator of messages. A receive is true only for one of the tensor's
  // size.
  nb::object fast_message(bool sends, nb::handle tensor, int peer, int tag) {
    const std::optional<TensorView> view = dense_view(tensor);
    if (!view) return nb::bool_(false);
    const std::size_t bytes = view->count * size_of(view->dtype);
    if (bytes > kFastBytes) return nb::bool_(false);
    auto message = std::make_unique<MpiMessage>(messages_.messages(), sends, view->data,
                                                static_cast<int>(bytes), messages_.mpi.byte, peer, tag);
    const long number = next_number(message_numbers_);
    auto in_flight =
        std::make_shared<InFlight>(std::move(message), number, nb::make_tuple(sends, tensor, peer, tag));
    const Envelope envelope{
        .peer = peer, .tag = static_cast<std::uint32_t>(tag), .dtype = view->dtype, .bytes = bytes};
    begin(*in_flight, record_->record->messages,
          record_of(sends, envelope, static_cast<std::uint64_t>(number), timeout(), now_ns()), bytes);
    const MpiMessage& sent = *in_flight->message;
    if (sent.done() && static_cast<std::size_t>(sent.moved()) != bytes)
      return unfinished(std::move(in_flight));
    return answer(std::move(in_flight));
  }

  std::shared_ptr<InFlight> issue(std::uint8_t opcode, Address data, Address input, std::size_t count,
                                  std::uint8_t dtype, std::uint8_t op, double factor, int root,
                                  const Parts& outputs, const Parts& inputs) {
    return start(std::make_shared<InFlight>(
        collective(request_from(opcode, data, input, count, dtype, op, factor, root, outputs, inputs))));
  }

  std::shared_ptr<InFlight> issue_message(bool sends, std::uintptr_t data, int count, std::uintptr_t type,
                                          int peer, int tag) {
    return start(std::make_shared<InFlight>(std::make_unique<MpiMessage>(
        messages_.messages(), sends, pointer_from(data), count, type, peer, tag)));
  }

 private:
  Nanoseconds timeout() const noexcept { return timeout_.load(std::memory_order_relaxed); }

  static long next_number(const nb::object& counter) {
    const nb::object number = nb::steal(PyIter_Next(counter.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    return PyLong_AsLong(number.ptr());
  }

  std::unique_ptr<MpiCollective> collective(Request request) {
    const auto tag = static_cast<int>(exchanges_.fetch_add(1, std::memory_order_relaxed) % tags_ * 2);
    return std::make_unique<MpiCollective>(collectives_, scratch_, std::move(request), tag);
  }

  static std::shared_ptr<InFlight> start(std::shared_ptr<InFlight> in_flight) {
    const ReleasedLock released;
    in_flight->start();
    return in_flight;
  }

  nb::object answer(std::shared_ptr<InFlight> in_flight) {
    if (in_flight->error == kMpiSuccess && in_flight->progress->done()) {
      in_flight->end("");
      return nb::bool_(true);
    }
    return unfinished(std::move(in_flight));
  }

  nb::object unfinished(std::shared_ptr<InFlight> in_flight) {
    nb::object left = nb::cast(std::move(in_flight));
    unfinished_.append(left);
    return left;
  }

  // Where it is not done at the return, whoever gets it notes its end.
  void begin(InFlight& in_flight, OperationRing& ring, const BegunOperation& begun, std::size_t bytes) const {
    {
      const nb::ft_lock_guard lock(record_->writing);
      in_flight.recorded.emplace(RecordedInFlight{record_, ring, ring.begin(begun)});
    }
    try {
      start_and_test(in_flight, bytes);
    } catch (const std::exception& error) {
      in_flight.end(error.what());
      throw;
    }
  }

  void start_and_test(InFlight& in_flight, std::size_t bytes) const {
    PythonInterrupt lock(release_for(bytes));
    in_flight.start();
    for (int i = 0; i < spins_; ++i) {
      if (in_flight.completed()) return;
      if (i == kTestsWithLock) lock.blocks();
    }
    lock.blocks();
    const auto until = Clock::now() + kPatience;
    do {
      sched_yield();
      if (in_flight.completed()) return;
    } while (Clock::now() < until);
  }

  const MpiCommunicator collectives_;
  const MpiCommunicator messages_;
  const unsigned tags_;
  const nb::object operations_;
  const nb::object message_numbers_;
  std::atomic<unsigned> exchanges_{0};  // relaxed: ranks issue in one order
  const int spins_;
  const std::shared_ptr<SerialRecord> record_;
  std::atomic<Nanoseconds> timeout_;  // relaxed: orders nothing
  nb::list unfinished_;
  const std::shared_ptr<MpiScratch> scratch_ = std::make_shared<MpiScratch>();
};

}  // namespace

void bind_mpi(nb::module_& module) {
  nb::class_<InFlight>(module, "MpiInFlight")
      .def("advance",
           [](InFlight& in_flight) {
             const ReleasedLock released;
             return in_flight.completed();
           })
      .def("cancel", [](InFlight& in_flight) { return in_flight.message->cancel(); })
      .def_prop_ro("status",
                   [](const InFlight& in_flight) {
                     const std::string_view status = in_flight.message->status();
                     return nb::bytes(status.data(), status.size());
                   })
      .def_prop_ro("is_message", [](const InFlight& in_flight) { return in_flight.message != nullptr; })
      .def_ro("call", &InFlight::call)
      .def("end", &InFlight::end, nb::arg("error"))
      .def_ro("number", &InFlight::number)
      .def_ro("error", &InFlight::error);
  nb::class_<MpiGroup>(module, "MpiGroup")
      .def(
          "__init__",
          [](MpiGroup* self,
             std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t,
                        std::uintptr_t>
                 functions,
             std::tuple<std::size_t, std::size_t> bytes, std::uintptr_t byte, std::uintptr_t collectives,
             std::uintptr_t messages, int rank, int size, int largest_tag, nb::object operations,
             nb::object message_numbers, int spins, const SharedRecord& shared, Nanoseconds timeout,
             nb::list unfinished) {
            const auto& [isend, irecv, test, testall, get_count, cancel] = functions;
            const auto& [handle_bytes, status_bytes] = bytes;
            const MpiLibrary mpi{isend,  irecv,        test,         testall, get_count,
                                 cancel, handle_bytes, status_bytes, byte};
            new (self)
                MpiGroup({mpi, collectives, rank, size}, messages, largest_tag, std::move(operations),
                         std::move(message_numbers), spins, shared.record, timeout, std::move(unfinished));
          },
          nb::arg("functions"), nb::arg("bytes"), nb::arg("byte"), nb::arg("collectives"),
          nb::arg("messages"), nb::arg("rank"), nb::arg("size"), nb::arg("largest_tag"),
          nb::arg("operations"), nb::arg("message_numbers"), nb::arg("spins"), nb::arg("record"),
          nb::arg("timeout_ns"), nb::arg("unfinished"))
      .def("set_timeout", &MpiGroup::set_timeout, nb::arg("timeout_ns"))
      .def("fast_collective", &MpiGroup::fast_collective, nb::arg("opcode"),
           nb::arg("output").none() = nb::none(), nb::arg("input").none() = nb::none(),
           nb::arg("op_code") = 0, nb::arg("root") = 0, nb::arg("listed") = false)
      .def("fast_message", &MpiGroup::fast_message, nb::arg("sends"), nb::arg("tensor"), nb::arg("peer"),
           nb::arg("tag"))
      .def("issue", &MpiGroup::issue, nb::arg("opcode"), nb::arg("data_ptr"), nb::arg("input_ptr"),
           nb::arg("count"), nb::arg("dtype_code"), nb::arg("op_code"), nb::arg("factor"), nb::arg("root"),
           nb::arg("outputs"), nb::arg("inputs"))
      .def("issue_message", &MpiGroup::issue_message, nb::arg("sends"), nb::arg("data_ptr"), nb::arg("count"),
           nb::arg("type"), nb::arg("peer"), nb::arg("tag"));
}

}  // namespace collectives
