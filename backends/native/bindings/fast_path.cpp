#include "bindings/fast_path.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensor_view.hpp"
#include "state/rank_context.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

// How long a message is awaited before its caller prepares to sleep.
constexpr int kMessageSpins = 100;

// The whole number in [0, end); nothing for every other object, booleans and numbers of numpy among them.
std::optional<int> number_below(nb::handle object, std::int64_t end) {
  if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object.ptr(), &overflow);
  if (overflow != 0 || value < 0 || value >= end) return std::nullopt;
  return static_cast<int>(value);
}

// Reads the tensors of one call, which must all have one data type.
class TensorReader {
 public:
  explicit TensorReader(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  DType dtype() const noexcept { return dtype_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // All tensors that it was told to keep.
  nb::object kept() && {
    if (others_.is_valid()) return nb::make_tuple(std::move(tensors_), std::move(others_));
    return std::move(tensors_);
  }

  // A tensor or a tuple of tensors.
  void keep(nb::object tensors) { (tensors_.is_valid() ? others_ : tensors_) = std::move(tensors); }

  std::optional<TensorView> one(nb::handle tensor) {
    const std::optional<TensorView> view = dense_view(tensor);
    if (!view || (seen_ && view->dtype != dtype_)) return std::nullopt;
    seen_ = true;
    dtype_ = view->dtype;
    bytes_ += view->count * size_of(dtype_);
    return view;
  }

  // Fills `parts` from a list of a tensor for each rank, or, unless `listed`, from one tensor that is cut
  // equally.
  bool parts(nb::handle tensors, bool listed, std::vector<Part>& parts, bool by_rows = false) {
    parts.reserve(ranks_);
    if (listed) {
      if (!PyList_CheckExact(tensors.ptr()) && !PyTuple_CheckExact(tensors.ptr())) return false;
      // Another thread may change the list.
      nb::object all = nb::steal(PySequence_Tuple(tensors.ptr()));
      if (!all.is_valid()) throw nb::python_error();
      if (nb::len(all) != ranks_) return false;
      for (std::size_t r = 0; r < ranks_; ++r) {
        const std::optional<TensorView> view = one(PyTuple_GetItem(all.ptr(), static_cast<Py_ssize_t>(r)));
        if (!view) return false;
        parts.push_back({view->data, view->count * size_of(dtype_)});
      }
      keep(std::move(all));
      return true;
    }
    keep(nb::borrow(tensors));
    const std::optional<TensorView> view = one(tensors);
    if (!view || (by_rows ? view->rows : view->count) % ranks_ != 0) return false;
    const std::size_t bytes = view->count / ranks_ * size_of(dtype_);
    for (std::size_t r = 0; r < ranks_; ++r) parts.push_back({view->data + r * bytes, bytes});
    return true;
  }

 private:
  const std::size_t ranks_;
  DType dtype_ = DType::uint8;
  bool seen_ = false;
  std::size_t bytes_ = 0;
  nb::object tensors_;
  nb::object others_;
};

bool all_of_size(const std::vector<Part>& parts, std::size_t bytes) {
  for (const Part& part : parts) {
    if (part.bytes != bytes) return false;
  }
  return true;
}

// Whether no part shares memory with another. Most lists are in the order of their memory.
bool apart(const std::vector<Part>& parts) {
  const auto follows = [](const Part& before, const Part& after) {
    return before.data + before.bytes <= after.data;
  };
  const auto unordered = [&](const Part& before, const Part& after) { return !follows(before, after); };
  if (std::adjacent_find(parts.begin(), parts.end(), unordered) == parts.end()) return true;
  std::vector<Part> sorted;
  sorted.reserve(parts.size());
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(sorted),
               [](const Part& part) { return part.bytes > 0; });
  std::sort(sorted.begin(), sorted.end(), [](const Part& a, const Part& b) { return a.data < b.data; });
  return std::adjacent_find(sorted.begin(), sorted.end(), unordered) == sorted.end();
}

// Fills a request from the tensors; returns false where the call does not qualify.
bool read(Request& request, TensorReader& reader, std::size_t me, bool is_root, nb::handle output,
          nb::handle input, bool listed) {
  const auto take = [&](nb::handle tensor, auto*& address) {
    const std::optional<TensorView> view = reader.one(tensor);
    if (!view) return false;
    reader.keep(nb::borrow(tensor));
    address = view->data;
    request.count = view->count;
    return true;
  };
  const auto own_bytes = [&] { return request.count * size_of(reader.dtype()); };
  const auto rooted_list = [&](nb::handle tensors, std::vector<Part>& parts) {
    if (!is_root) return tensors.is_none();
    return reader.parts(tensors, true, parts) && all_of_size(parts, own_bytes());
  };
  switch (request.opcode) {
    case Opcode::none:
      return false;
    case Opcode::barrier:
      return true;
    case Opcode::all_reduce: {
      if (!take(output, request.data)) return false;
      const std::size_t count = request.count;
      if (input.is_none()) return true;
      if (!take(input, request.input) || request.count != count) return false;
      // Python refuses those that overlap in part.
      return request.input == request.data || request.input + own_bytes() <= request.data ||
             request.data + own_bytes() <= request.input;
    }
    case Opcode::broadcast:
    case Opcode::reduce:
      return take(output, request.data);
    case Opcode::all_gather:
      return take(input, request.input) && reader.parts(output, listed, request.outputs) &&
             request.outputs[me].bytes == own_bytes() && apart(request.outputs);
    case Opcode::reduce_scatter:
      return take(output, request.data) && reader.parts(input, listed, request.inputs) &&
             request.inputs[me].bytes == own_bytes();
    case Opcode::gather:
      return take(input, request.input) && rooted_list(output, request.outputs) && apart(request.outputs);
    case Opcode::scatter:
      return take(output, request.data) && rooted_list(input, request.inputs);
    case Opcode::all_to_all:
      return reader.parts(output, listed, request.outputs, true) &&
             reader.parts(input, listed, request.inputs, true) &&
             request.outputs[me].bytes == request.inputs[me].bytes && apart(request.outputs);
  }
  return false;
}

}  // namespace

std::optional<FastRequest> fast_request(int rank, int size, std::uint8_t opcode, nb::handle output,
                                        nb::handle input, std::uint8_t op, nb::handle root, bool listed) {
  std::optional<FastRequest> fast(std::in_place);
  Request& request = fast->request;
  request.opcode = static_cast<Opcode>(opcode);
  if (rooted(request.opcode)) {
    const std::optional<int> checked = number_below(root, size);
    if (!checked) return std::nullopt;
    request.root = *checked;
  }
  TensorReader reader(size);
  if (!read(request, reader, static_cast<std::size_t>(rank), rank == request.root, output, input, listed)) {
    return std::nullopt;
  }
  request.reduction.dtype = reader.dtype();
  if (reduces(request.opcode)) {
    request.reduction.op = static_cast<ReduceOp>(op);
    if (!is_reduce_op(op) || request.reduction.op == ReduceOp::premul_sum ||
        !reducible(reader.dtype(), request.reduction.op)) {
      return std::nullopt;
    }
    if (request.reduction.op == ReduceOp::avg) request.reduction.factor = size;
  }
  fast->bytes = reader.bytes();
  fast->tensors = std::move(reader).kept();
  return fast;
}

bool fast_collective(OwnedGroup& owned, std::uint8_t opcode, nb::handle output, nb::handle input,
                     std::uint8_t op, nb::handle root, bool listed) {
  Group& group = usable(owned);
  const std::optional<FastRequest> fast =
      fast_request(group.rank(), group.size(), opcode, output, input, op, root, listed);
  if (!fast) return false;
  PythonInterrupt interrupt(release_for(fast->bytes));
  group.run(fast->request, group.timeout(), &interrupt);
  return true;
}

nb::object fast_collective_async(OwnedGroup& owned, std::uint8_t opcode, nb::handle output, nb::handle input,
                                 std::uint8_t op, nb::handle root, bool listed) {
  Group& group = usable(owned);
  std::optional<FastRequest> fast =
      fast_request(group.rank(), group.size(), opcode, output, input, op, root, listed);
  if (!fast) return nb::none();
  return nb::cast(HostTask(group.enqueue(std::move(fast->request), group.timeout(),
                                         owner_of(std::move(fast->tensors)), call_site())));
}

nb::object fast_message(OwnedGroup& owned, bool sends, nb::handle tensor, nb::handle peer, nb::handle tag,
                        bool waits) {
  Group& group = usable(owned);
  const std::optional<int> checked_peer = number_below(peer, group.size());
  const std::optional<int> checked_tag = number_below(tag, std::int64_t{1} << 31);
  if (!checked_peer || !checked_tag) return nb::none();
  const std::optional<TensorView> view = dense_view(tensor);
  if (!view) return nb::none();
  const Envelope envelope{.peer = *checked_peer,
                          .tag = static_cast<std::uint32_t>(*checked_tag),
                          .dtype = view->dtype,
                          .bytes = view->count * size_of(view->dtype)};
  nb::object posted;
  if (sends ? !group.send_at_once(envelope, view->data)
            : !waits || !group.receive_at_once(envelope, view->data)) {
    Owner owner = waits ? Owner() : owner_of(nb::borrow(tensor));
    std::shared_ptr<Transfer> transfer;
    {
      PythonInterrupt interrupt(release_for(envelope.bytes));
      Interrupt* caller = waits ? &interrupt : nullptr;
      transfer = sends ? group.send(envelope, view->data, group.timeout(), std::move(owner), caller)
                       : group.receive(envelope, view->data, group.timeout(), std::move(owner), caller);
      for (int i = 0; !waits && i < kMessageSpins && !transfer->finished(); ++i) {
        relax_processor();
        transfer->poll();
      }
    }
    if (!waits) posted = nb::cast(HostTask(transfer));
    if (waits && transfer->error() != nullptr) throw Error(*transfer->error());
  }
  // A signal handler that raised right behind this call would take the message with it.
  if (PyErr_CheckSignals() != 0) {
    if (posted.is_valid()) {
      nb::cast<const HostTask&>(posted).undo();
    } else if (!sends) {
      group.put_back(envelope, view->data);
    }
    throw nb::python_error();
  }
  if (posted.is_valid()) return posted;
  return nb::bool_(true);
}

}  // namespace collectives
