#include "mpi/in_flight.hpp"

#include <algorithm>
#include <utility>

#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// The whole cut into a part of whole elements for each rank; the first are longer by one where it must be.
std::vector<Part> cut(std::byte* data, std::size_t count, std::size_t item, std::size_t ranks) {
  std::vector<Part> parts;
  parts.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::size_t bytes = (count / ranks + (r < count % ranks ? 1 : 0)) * item;
    parts.push_back({data, bytes});
    data += bytes;
  }
  return parts;
}

std::byte* writable(const std::byte* data) {
  return const_cast<std::byte*>(data);  // a Part does not say what is only read
}

}  // namespace

MpiScratch::Piece MpiScratch::take(std::size_t bytes) {
  constexpr std::size_t kLeast = 4096;
  {
    const std::lock_guard lock(mutex_);
    for (Piece& piece : free_) {
      if (piece.bytes < bytes) continue;
      std::swap(piece, free_.back());
      Piece found = std::move(free_.back());
      free_.pop_back();
      return found;
    }
    free_.clear();
  }
  const std::size_t taken = std::max(bytes, kLeast);
  return {std::make_unique_for_overwrite<std::byte[]>(taken), taken};
}

void MpiScratch::give_back(Piece piece) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(piece));
}

MpiMessage::MpiMessage(std::unique_ptr<MpiMessages> messages, bool sends, std::byte* data, std::size_t bytes,
                       int peer, int tag)
    : messages_(std::move(messages)), sends_(sends), data_(data), bytes_(bytes), peer_(peer), tag_(tag) {}

int MpiMessage::start() {
  return sends_ ? messages_->send(data_, bytes_, peer_, tag_)
                : messages_->receive(data_, bytes_, peer_, tag_);
}

int MpiMessage::advance() {
  bool completed = false;
  if (const int code = messages_->test(completed); code != kMpiSuccess || !completed) return code;
  moved_ = static_cast<int>(bytes_);
  if (!sends_) {
    if (const int code = messages_->received(moved_)) return code;
  }
  done_ = true;
  return kMpiSuccess;
}

MpiCollective::MpiCollective(std::unique_ptr<MpiMessages> messages, std::shared_ptr<MpiScratch> scratch,
                             int rank, int size, Request request, int tag, std::size_t at_once)
    : messages_(std::move(messages)),
      scratch_(std::move(scratch)),
      rank_(rank),
      size_(size),
      request_(std::move(request)),
      tag_(tag),
      at_once_(at_once) {}

int MpiCollective::start() {
  const std::size_t bytes = request_.count * size_of(request_.reduction.dtype);
  const Part input{writable(request_.input), bytes};
  const Part data{request_.data, bytes};
  const auto root = static_cast<std::size_t>(request_.root);
  std::vector<Part> sent;
  std::vector<Part> received;
  switch (request_.opcode) {
    case Opcode::none:
    case Opcode::barrier:
      distance_ = 1;
      return begin_barrier_round();
    case Opcode::all_reduce:
    case Opcode::reduce:
    case Opcode::reduce_scatter:
      return begin_reduction();
    case Opcode::broadcast:
      sent = is_root() ? all(data) : nothing();
      received = nothing();
      received[root] = data;
      break;
    case Opcode::all_gather:
      sent = all(input);
      received = request_.outputs;
      break;
    case Opcode::gather:
      sent = nothing();
      sent[root] = input;
      received = is_root() ? request_.outputs : nothing();
      break;
    case Opcode::scatter:
      sent = is_root() ? request_.inputs : nothing();
      received = nothing();
      received[root] = data;
      break;
    case Opcode::all_to_all:
      sent = request_.inputs;
      received = request_.outputs;
      break;
  }
  const Part& mine = sent[static_cast<std::size_t>(rank_)];
  const Part& place = received[static_cast<std::size_t>(rank_)];
  if (mine.bytes != 0 && place.bytes != 0 && mine.data != place.data) {
    collectives::copy(  // not std::copy, found by the type of the arguments
        place.data, mine.data, mine.bytes);
  }
  return exchange(sent, received);
}

// Begins with the next rank, so that not all send to the same one first.
int MpiCollective::exchange(const std::vector<Part>& sent, const std::vector<Part>& received) {
  for (int step = 1; step < size_; ++step) {
    const int source = (rank_ - step + size_) % size_;
    const Part& place = received[static_cast<std::size_t>(source)];
    if (place.bytes == 0) continue;
    if (const int code = messages_->receive(place.data, place.bytes, source, tag_)) return code;
  }
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const Part& part = sent[static_cast<std::size_t>(peer)];
    if (part.bytes == 0) continue;
    if (const int code = messages_->send(part.data, part.bytes, peer, tag_)) return code;
  }
  return kMpiSuccess;
}

// Dissemination: after the round of distance d every rank knows that the 2d - 1 before it have come. The
// distances of all rounds lead to different ranks, so that one tag does.
int MpiCollective::begin_barrier_round() {
  if (distance_ >= size_) return kMpiSuccess;
  const int source = (rank_ - distance_ + size_) % size_;
  if (const int code = messages_->receive(nullptr, 0, source, tag_)) return code;
  return messages_->send(nullptr, 0, (rank_ + distance_) % size_, tag_);
}

int MpiCollective::begin_reduction() {
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t item = size_of(request_.reduction.dtype);
  const std::size_t whole = request_.count * item;
  const bool rooted_one = request_.opcode == Opcode::reduce;
  const bool at_once = request_.opcode != Opcode::reduce_scatter && whole * ranks <= at_once_;
  std::vector<Part> sent;
  bool reduces_here = true;
  std::byte* own_source = nullptr;
  std::size_t bytes = whole;  // of what this rank reduces
  if (at_once) {
    reduces_here = !rooted_one || is_root();
    own_source = request_.data;
    sent = rooted_one ? nothing() : all({request_.data, whole});
    if (!reduces_here) sent[static_cast<std::size_t>(request_.root)] = {request_.data, whole};
  } else {
    parts_ = request_.opcode == Opcode::reduce_scatter ? request_.inputs
                                                       : cut(request_.data, request_.count, item, ranks);
    own_source = own().data;
    bytes = own().bytes;
    sent = parts_;
    publishes_ = request_.opcode != Opcode::reduce_scatter;
  }
  const bool reduces_aside = publishes_ && rooted_one && !is_root();
  std::vector<Part> received = nothing();
  sources_.assign(ranks, own_source);
  if (reduces_here) {
    piece_ = scratch_->take(bytes * (ranks - 1 + (reduces_aside ? 1 : 0)));
    std::byte* place = piece_.memory.get();
    for (std::size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) == rank_) continue;
      received[r] = {place, bytes};
      sources_[r] = place;
      place += bytes;
    }
    target_ = reduces_aside ? place : at_once || !publishes_ ? request_.data : own_source;
  }
  return exchange(sent, received);
}

int MpiCollective::advance() {
  while (!done_) {
    bool completed = false;
    if (const int code = messages_->test(completed)) return code;
    if (!completed) return kMpiSuccess;
    if (const int code = next()) return code;
  }
  return kMpiSuccess;
}

int MpiCollective::next() {
  if (distance_ != 0 && distance_ < size_) {
    distance_ *= 2;
    return begin_barrier_round();
  }
  if (target_ != nullptr) combine();
  if (publishes_) return publish();
  finish();
  return kMpiSuccess;
}

void MpiCollective::combine() {
  const std::size_t bytes = parts_.empty() ? request_.count * size_of(request_.reduction.dtype) : own().bytes;
  const Reduction& how = request_.reduction;
  if (bytes != 0) {
    reduce(target_, sources_.data(), size_, bytes / size_of(how.dtype), how.dtype, how.op, how.factor);
  }
}

int MpiCollective::publish() {
  publishes_ = false;
  ++tag_;
  const Part result{target_, own().bytes};
  target_ = nullptr;
  if (request_.opcode == Opcode::all_reduce) return exchange(all(result), parts_);
  std::vector<Part> sent = nothing();
  sent[static_cast<std::size_t>(request_.root)] = result;
  return exchange(sent, is_root() ? parts_ : nothing());
}

void MpiCollective::finish() {
  done_ = true;
  if (piece_.memory != nullptr) scratch_->give_back(std::move(piece_));
}

}  // namespace collectives
