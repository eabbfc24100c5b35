// Short collectives and messages of the mpi backend, without the GIL. Addresses are numbers, and the callers
// keep the memory alive.
#include <nanobind/nanobind.h>
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
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/fast_path.hpp"
#include "bindings/interrupt.hpp"
#include "bindings/operation_record.hpp"
#include "bindings/tensor_view.hpp"
#include "engine/task.hpp"
#include "engine/transfer.hpp"
#include "mpi/in_flight.hpp"
#include "mpi/messages.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

using Clock = std::chrono::steady_clock;
using ByteParts = std::vector<std::tuple<std::uintptr_t, std::size_t>>;

// Tests before Python's lock is given up, where it is kept at first.
constexpr int kTestsWithLock = 50;
// How long a caller goes on testing, the core given away in between, before it leaves the operation to
// whoever watches time limits and other ranks.
constexpr auto kPatience = std::chrono::milliseconds(2);

struct Limits {
  std::size_t at_once;  // as `MpiCollective` takes it
  std::size_t whole;    // largest whole that every rank sends as it is to all others
  int most_ranks;       // that do so
  std::size_t chunk;    // largest whole of the ranks' parts of a reduction that is not cut further
  std::size_t local;    // bytes that one call has on this rank
};

std::vector<Part> parts_from(const ByteParts& given) {
  std::vector<Part> parts;
  parts.reserve(given.size());
  for (const auto& [pointer, bytes] : given) parts.push_back({pointer_from(pointer), bytes});
  return parts;
}

std::size_t longest(const std::vector<Part>& parts) {
  std::size_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.bytes);
  return most;
}

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
  long number;      // of the operation, 0 where the caller counts
  nb::object call;  // the tensors of a fast call, and what else Python needs to carry it on; null elsewhere
  std::optional<RecordedInFlight> recorded;
  bool started = false;
  int error = kMpiSuccess;

  InFlight(std::unique_ptr<MpiOperation> what, long of, nb::object how = {})
      : progress(std::move(what)), number(of), call(std::move(how)) {}
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

class MpiFastPath {
 public:
  MpiFastPath(const MpiLibrary& library, std::uintptr_t communicator, std::uintptr_t messages, int rank,
              int size, int largest_tag, nb::object operations, nb::object message_numbers,
              nb::object exchanges, const Limits& limits, int spins, std::shared_ptr<OperationRecord> record,
              Nanoseconds timeout, nb::list unfinished)
      : library_(library),
        communicator_(communicator),
        messages_(messages),
        rank_(rank),
        size_(size),
        tags_(largest_tag / 2),
        operations_(std::move(operations)),
        message_numbers_(std::move(message_numbers)),
        exchanges_(std::move(exchanges)),
        limits_(limits),
        spins_(spins),
        record_(std::make_shared<SerialRecord>(std::move(record))),
        timeout_(timeout),
        unfinished_(std::move(unfinished)) {
    make_messages(library, communicator);  // throws where the library is of no use
  }

  // The time limit of operations, for the flight record.
  void set_timeout(Nanoseconds timeout) noexcept { timeout_.store(timeout, std::memory_order_relaxed); }

  // True: done; false: the call does not qualify, or is too large; else the operation, which has failed or is
  // in flight. It is in the list of unfinished ones as well, because a signal's handler may raise before the
  // caller has it.
  nb::object fast_collective(std::uint8_t opcode, nb::handle output, nb::handle input, std::uint8_t op,
                             nb::handle root, bool listed) {
    std::optional<FastRequest> fast = fast_request(rank_, size_, opcode, output, input, op, root, listed);
    if (!fast || !takes(fast->request, fast->bytes, listed)) return nb::bool_(false);
    const std::size_t bytes = fast->bytes;
    Task::note_issue();
    const long number = next_number(operations_);
    const BegunOperation begun =
        record_of(fast->request, static_cast<std::uint64_t>(number), timeout(), now_ns());
    auto in_flight =
        make_in_flight(std::move(fast->request), number, nb::make_tuple(opcode, listed, output, input));
    begin(*in_flight, record_->record->collectives, listed ? begun : single_form(begun), bytes);
    return answer(std::move(in_flight));
  }

  // The same for a message on the communicator of messages. A receive is true only for one of the tensor's
  // size.
  nb::object fast_message(bool sends, nb::handle tensor, int peer, int tag) {
    const std::optional<TensorView> view = dense_view(tensor);
    if (!view) return nb::bool_(false);
    const std::size_t bytes = view->count * size_of(view->dtype);
    if (bytes > limits_.local) return nb::bool_(false);
    auto message =
        std::make_unique<MpiMessage>(make_messages(library_, messages_), sends, view->data, bytes, peer, tag);
    const MpiMessage& sent = *message;
    const long number = next_number(message_numbers_);
    auto in_flight =
        std::make_shared<InFlight>(std::move(message), number, nb::make_tuple(sends, tensor, peer, tag));
    const Envelope envelope{
        .peer = peer, .tag = static_cast<std::uint32_t>(tag), .dtype = view->dtype, .bytes = bytes};
    begin(*in_flight, record_->record->messages,
          record_of(sends, envelope, static_cast<std::uint64_t>(number), timeout(), now_ns()), bytes);
    if (sent.done() && static_cast<std::size_t>(sent.moved()) != bytes)
      return unfinished(std::move(in_flight));
    return answer(std::move(in_flight));
  }

  std::shared_ptr<InFlight> issue(std::uint8_t opcode, std::uintptr_t data, std::uintptr_t input,
                                  std::size_t count, std::uint8_t dtype, std::uint8_t op, double factor,
                                  int root, const ByteParts& outputs, const ByteParts& inputs) {
    if (!is_dtype(dtype) || !is_reduce_op(op)) throw std::invalid_argument("no such data type or reduction");
    Request request;
    request.opcode = static_cast<Opcode>(opcode);
    request.reduction = {static_cast<DType>(dtype), static_cast<ReduceOp>(op), factor};
    request.root = root;
    request.data = pointer_from(data);
    request.input = pointer_from(input);
    request.count = count;
    request.outputs = parts_from(outputs);
    request.inputs = parts_from(inputs);
    auto in_flight = make_in_flight(std::move(request), 0);
    const ReleasedLock released;
    in_flight->start();
    return in_flight;
  }

  // Whether such an operation goes over the wire as here; equal on all ranks. `bytes` is the whole tensor,
  // all ranks' parts of it together.
  bool serves(std::uint8_t opcode, std::size_t bytes, std::size_t item) const {
    const auto ranks = static_cast<std::size_t>(size_);
    switch (static_cast<Opcode>(opcode)) {
      case Opcode::barrier:
        return true;
      case Opcode::broadcast:
      case Opcode::all_gather:
        return size_ <= limits_.most_ranks && bytes <= limits_.whole;
      case Opcode::all_reduce:
      case Opcode::reduce:
        if (bytes == 0) return false;
        if (bytes * ranks <= limits_.at_once) return size_ <= limits_.most_ranks;
        return fits_chunk((bytes / item + ranks - 1) / ranks * item, item);
      default:
        return false;
    }
  }

 private:
  Nanoseconds timeout() const noexcept { return timeout_.load(std::memory_order_relaxed); }

  bool fits_chunk(std::size_t part, std::size_t item) const {
    const auto ranks = static_cast<std::size_t>(size_);
    return part <= std::max<std::size_t>(1, limits_.chunk / (ranks * item)) * item;
  }

  bool takes(const Request& request, std::size_t local, bool listed) const {
    const std::size_t item = size_of(request.reduction.dtype);
    const std::size_t bytes = request.count * item;
    if (local > limits_.local) return false;
    switch (request.opcode) {
      case Opcode::all_gather:
        return listed ||
               serves(static_cast<std::uint8_t>(request.opcode), bytes * request.outputs.size(), item);
      case Opcode::reduce_scatter:
        return fits_chunk(longest(request.inputs), item);
      case Opcode::gather:
      case Opcode::scatter:
      case Opcode::all_to_all:
        return true;
      default:
        return serves(static_cast<std::uint8_t>(request.opcode), bytes, item);
    }
  }

  static long next_number(const nb::object& counter) {
    const nb::object number = nb::steal(PyIter_Next(counter.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    return PyLong_AsLong(number.ptr());
  }

  std::shared_ptr<InFlight> make_in_flight(Request request, long number, nb::object call = {}) {
    const auto tag = static_cast<int>(next_number(exchanges_) % tags_ * 2);
    auto collective = std::make_unique<MpiCollective>(make_messages(library_, communicator_), scratch_, rank_,
                                                      size_, std::move(request), tag, limits_.at_once);
    return std::make_shared<InFlight>(std::move(collective), number, std::move(call));
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

  const MpiLibrary library_;
  const std::uintptr_t communicator_;
  const std::uintptr_t messages_;
  const int rank_;
  const int size_;
  const int tags_;
  const nb::object operations_;
  const nb::object message_numbers_;
  const nb::object exchanges_;
  const Limits limits_;
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
      .def_prop_ro("moved",
                   [](const InFlight& in_flight) {
                     const auto* message = dynamic_cast<const MpiMessage*>(in_flight.progress.get());
                     return message == nullptr ? 0 : message->moved();
                   })
      .def_prop_ro("is_message",
                   [](const InFlight& in_flight) {
                     return dynamic_cast<const MpiMessage*>(in_flight.progress.get()) != nullptr;
                   })
      .def_ro("call", &InFlight::call)
      .def("end", &InFlight::end, nb::arg("error"))
      .def_ro("number", &InFlight::number)
      .def_ro("error", &InFlight::error);
  nb::class_<MpiFastPath>(module, "MpiFastPath")
      .def(
          "__init__",
          [](MpiFastPath* self,
             std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>
                 functions,
             std::tuple<std::size_t, std::size_t> bytes, std::uintptr_t communicator, std::uintptr_t messages,
             std::uintptr_t byte, int rank, int size, int largest_tag, nb::object operations,
             nb::object message_numbers, nb::object exchanges,
             std::tuple<std::size_t, std::size_t, int, std::size_t, std::size_t> limits, int spins,
             const SharedRecord& shared, Nanoseconds timeout, nb::list unfinished) {
            const auto& [isend, irecv, test, testall, get_count] = functions;
            const auto& [handle_bytes, status_bytes] = bytes;
            const auto& [at_once, whole, most_ranks, chunk, local] = limits;
            new (self) MpiFastPath({isend, irecv, test, testall, get_count, handle_bytes, status_bytes, byte},
                                   communicator, messages, rank, size, largest_tag, std::move(operations),
                                   std::move(message_numbers), std::move(exchanges),
                                   {at_once, whole, most_ranks, chunk, local}, spins, shared.record, timeout,
                                   std::move(unfinished));
          },
          nb::arg("functions"), nb::arg("bytes"), nb::arg("communicator"), nb::arg("messages"),
          nb::arg("byte"), nb::arg("rank"), nb::arg("size"), nb::arg("largest_tag"), nb::arg("operations"),
          nb::arg("message_numbers"), nb::arg("exchanges"), nb::arg("limits"), nb::arg("spins"),
          nb::arg("record"), nb::arg("timeout_ns"), nb::arg("unfinished"))
      .def("set_timeout", &MpiFastPath::set_timeout, nb::arg("timeout_ns"))
      .def("fast_collective", &MpiFastPath::fast_collective, nb::arg("opcode"),
           nb::arg("output").none() = nb::none(), nb::arg("input").none() = nb::none(),
           nb::arg("op_code") = 0, nb::arg("root") = 0, nb::arg("listed") = false)
      .def("fast_message", &MpiFastPath::fast_message, nb::arg("sends"), nb::arg("tensor"), nb::arg("peer"),
           nb::arg("tag"))
      .def("issue", &MpiFastPath::issue, nb::arg("opcode"), nb::arg("data_ptr") = 0, nb::arg("input_ptr") = 0,
           nb::arg("count") = 0, nb::arg("dtype_code") = 0, nb::arg("op_code") = 0, nb::arg("factor") = 1.0,
           nb::arg("root") = 0, nb::arg("outputs") = ByteParts{}, nb::arg("inputs") = ByteParts{})
      .def("serves", &MpiFastPath::serves, nb::arg("opcode"), nb::arg("nbytes"), nb::arg("itemsize"));
}

}  // namespace collectives
