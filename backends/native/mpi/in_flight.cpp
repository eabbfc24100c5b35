#include "mpi/in_flight.hpp"

#include <algorithm>
#include <utility>

#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Where all ranks' tensors take no more than this together, every rank gets and reduces them all.
constexpr std::size_t kAtOnceBytes = 64 << 10;
// The largest tensor that its root sends to each rank as a whole.
constexpr std::size_t kWholeBytes = 256 << 10;
// What all parts of a chunk take together.
constexpr std::size_t kChunkBytes = 2 << 20;
// The most bytes of a message between ranks; longer ones are several.
constexpr std::size_t kMessageBytes = std::size_t{1} << 30;

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

MpiMessage::MpiMessage(std::unique_ptr<MpiMessages> messages, bool sends, std::byte* data, int count,
                       std::uintptr_t type, int peer, int tag)
    : messages_(std::move(messages)),
      sends_(sends),
      data_(data),
      count_(count),
      type_(type),
      peer_(peer),
      tag_(tag) {}

int MpiMessage::start() {
  return sends_ ? messages_->send(data_, count_, type_, peer_, tag_)
                : messages_->receive(data_, count_, type_, peer_, tag_);
}

int MpiMessage::advance() {
  bool completed = false;
  if (const int code = messages_->test(completed); code != kMpiSuccess || !completed) return code;
  moved_ = count_;
  if (!sends_) {
    if (const int code = messages_->received(moved_)) return code;
  }
  done_ = true;
  return kMpiSuccess;
}

MpiCollective::MpiCollective(const MpiCommunicator& communicator, std::shared_ptr<MpiScratch> scratch,
                             Request request, int tag)
    : communicator_(communicator), scratch_(std::move(scratch)), request_(std::move(request)), tag_(tag) {}

int MpiCollective::start() {
  const std::size_t bytes = request_.count * size_of(request_.reduction.dtype);
  const Part input{writable(request_.input), bytes};
  const Part data{request_.data, bytes};
  const auto root = static_cast<std::size_t>(request_.root);
  switch (request_.opcode) {
    case Opcode::none:
    case Opcode::barrier:
      distance_ = 1;
      window_[0].messages = communicator_.messages();
      return begin_barrier_round();
    case Opcode::all_reduce:
    case Opcode::reduce:
    case Opcode::reduce_scatter:
      plan_reduction(data);
      break;
    case Opcode::broadcast:
      plan_broadcast(data);
      break;
    case Opcode::all_gather:
      sent_ = all(input);
      received_ = request_.outputs;
      break;
    case Opcode::gather:
      sent_ = all({});
      sent_[root] = input;
      received_ = is_root() ? request_.outputs : all({});
      break;
    case Opcode::scatter:
      sent_ = is_root() ? request_.inputs : all({});
      received_ = all({});
      received_[root] = data;
      break;
    case Opcode::all_to_all:
      sent_ = request_.inputs;
      received_ = request_.outputs;
      break;
  }
  if (!reduces_) {
    const Part& mine = sent_[me()];
    const Part& place = received_[me()];
    if (mine.bytes != 0 && place.bytes != 0 && mine.data != place.data) {
      collectives::copy(  // not std::copy, found by the type of the arguments
          place.data, mine.data, mine.bytes);
    }
  }
  for (std::size_t chunk = 0; chunk < std::min(chunks_, window_.size()); ++chunk) {
    if (const int code = begin(chunk)) return code;
  }
  return kMpiSuccess;
}

void MpiCollective::plan_reduction(Part data) {
  const std::size_t item = size_of(request_.reduction.dtype);
  const bool rooted = request_.opcode == Opcode::reduce;
  reduces_ = true;
  target_ = data.data;
  if (request_.opcode == Opcode::reduce_scatter) {
    sent_ = request_.inputs;
    own_ = sent_[me()];
  } else if (data.bytes * ranks() <= kAtOnceBytes) {
    sent_ = all(rooted ? Part{} : data);
    if (rooted) sent_[static_cast<std::size_t>(request_.root)] = data;
    reduces_ = !rooted || is_root();
    if (!reduces_) received_ = all({});
    own_ = data;
  } else {
    sent_ = handed_on_ = cut(data.data, request_.count, item, ranks());
    own_ = sent_[me()];
    target_ = own_.data;
    if (rooted && !is_root()) {
      aside_ = scratch_->take(own_.bytes);
      target_ = aside_.memory.get();
    }
  }
  cut_into_chunks(item);
}

void MpiCollective::plan_broadcast(Part data) {
  const auto root = static_cast<std::size_t>(request_.root);
  received_ = all({});
  if (data.bytes <= kWholeBytes) {
    sent_ = all(is_root() ? data : Part{});
    received_[root] = data;
    return;
  }
  sent_ = handed_on_ = cut(data.data, data.bytes, 1, ranks());
  cut_into_chunks(1);
  own_ = sent_[me()];
  target_ = own_.data;
  received_[root] = own_;
  if (!is_root()) sent_ = all({});
}

void MpiCollective::cut_into_chunks(std::size_t item) {
  std::size_t longest = 1;
  for (const Part& part : sent_) longest = std::max(longest, part.bytes);
  per_chunk_ = std::max<std::size_t>(1, kChunkBytes / (ranks() * item)) * item;
  chunks_ = (longest + per_chunk_ - 1) / per_chunk_;
}

// Begins with the next rank, so that not all send to the same one first.
template <class Sent, class Received>
int MpiCollective::exchange(MpiMessages& messages, int tag, Sent sent, Received received) {
  const std::uintptr_t byte = communicator_.mpi.byte;
  const auto each = [&](Part part, auto move) {
    for (std::size_t begin = 0; begin < part.bytes; begin += kMessageBytes) {
      const std::size_t bytes = std::min(kMessageBytes, part.bytes - begin);
      if (const int code = move(part.data + begin, static_cast<int>(bytes))) return code;
    }
    return kMpiSuccess;
  };
  for (std::size_t step = 1; step < ranks(); ++step) {
    const std::size_t source = (me() + ranks() - step) % ranks();
    const int code = each(received(source), [&](std::byte* data, int bytes) {
      return messages.receive(data, bytes, byte, static_cast<int>(source), tag);
    });
    if (code != kMpiSuccess) return code;
  }
  for (std::size_t step = 1; step < ranks(); ++step) {
    const std::size_t peer = (me() + step) % ranks();
    const int code = each(sent(peer), [&](const std::byte* data, int bytes) {
      return messages.send(data, bytes, byte, static_cast<int>(peer), tag);
    });
    if (code != kMpiSuccess) return code;
  }
  return kMpiSuccess;
}

int MpiCollective::begin(std::size_t chunk) {
  Chunk& now = chunk_of(chunk);
  if (now.messages == nullptr) now.messages = communicator_.messages();
  if (reduces_ && now.memory.memory == nullptr) {
    now.memory = scratch_->take(std::min(per_chunk_, own_.bytes) * (ranks() - 1));
  }
  return exchange(
      *now.messages, tag_, [&](std::size_t rank) { return piece(sent_[rank], chunk); },
      [&](std::size_t rank) { return reduces_ ? arriving(chunk, rank) : piece(received_[rank], chunk); });
}

// Dissemination: after the round of distance d every rank knows that the 2d - 1 before it have come. The
// distances of all rounds lead to different ranks, so that one tag does.
int MpiCollective::begin_barrier_round() {
  const int size = communicator_.size;
  const int rank = communicator_.rank;
  const std::uintptr_t byte = communicator_.mpi.byte;
  if (distance_ >= size) return kMpiSuccess;
  MpiMessages& messages = *window_[0].messages;
  const int source = (rank - distance_ + size) % size;
  if (const int code = messages.receive(nullptr, 0, byte, source, tag_)) return code;
  return messages.send(nullptr, 0, byte, (rank + distance_) % size, tag_);
}

int MpiCollective::advance() {
  bool completed = false;
  while (chunk_ < chunks_) {
    if (const int code = chunk_of(chunk_).messages->test(completed); code != kMpiSuccess || !completed) {
      return code;
    }
    if (distance_ != 0 && distance_ < communicator_.size) {
      distance_ *= 2;
      if (const int code = begin_barrier_round()) return code;
      continue;
    }
    if (reduces_) combine(chunk_);
    if (!handed_on_.empty()) {
      if (const int code = publish(chunk_)) return code;
    }
    if (const std::size_t next = chunk_++ + window_.size(); next < chunks_) {
      if (const int code = begin(next)) return code;
    }
  }
  if (publications_ != nullptr) {
    if (const int code = publications_->test(completed); code != kMpiSuccess || !completed) return code;
  }
  if (!done_) finish();
  return kMpiSuccess;
}

void MpiCollective::combine(std::size_t chunk) {
  const Part own = piece(own_, chunk);
  if (own.bytes == 0) return;
  std::vector<const void*> sources(ranks(), own.data);
  for (std::size_t rank = 0; rank < ranks(); ++rank) {
    if (rank != me()) sources[rank] = arriving(chunk, rank).data;
  }
  const Reduction& how = request_.reduction;
  reduce(target_ + chunk * per_chunk_, sources.data(), communicator_.size, own.bytes / size_of(how.dtype),
         how.dtype, how.op, how.factor);
}

int MpiCollective::publish(std::size_t chunk) {
  const Part result{target_ + chunk * per_chunk_, piece(own_, chunk).bytes};
  if (publications_ == nullptr) publications_ = std::move(chunk_of(chunk).messages);
  return exchange(
      *publications_, tag_ + 1,
      [&](std::size_t rank) { return gets_all(static_cast<int>(rank)) ? result : Part{}; },
      [&](std::size_t rank) {
        return gets_all(communicator_.rank) ? piece(handed_on_[rank], chunk) : Part{};
      });
}

void MpiCollective::finish() {
  done_ = true;
  for (MpiScratch::Piece* piece : {&window_[0].memory, &window_[1].memory, &aside_}) {
    if (piece->memory != nullptr) scratch_->give_back(std::move(*piece));
  }
}

Part MpiCollective::piece(Part part, std::size_t chunk) const noexcept {
  const std::size_t begin = chunk == 0 ? 0 : std::min(chunk * per_chunk_, part.bytes);
  return {part.data + begin, std::min(per_chunk_, part.bytes - begin)};
}

Part MpiCollective::arriving(std::size_t chunk, std::size_t rank) noexcept {
  const std::size_t bytes = piece(own_, chunk).bytes;
  const std::size_t place = rank < me() ? rank : rank - 1;
  return {chunk_of(chunk).memory.memory.get() + place * bytes, bytes};
}

bool MpiCollective::gets_all(int rank) const noexcept {
  if (request_.opcode == Opcode::reduce) return rank == request_.root;
  return request_.opcode != Opcode::broadcast || rank != request_.root;
}

}  // namespace collectives
