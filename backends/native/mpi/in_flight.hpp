// Operations in flight on an MPI communicator. A collective is messages between the ranks: every rank sends
// each other one what is for it, and reduces what it gets with the kernels, in rank order.
//
// A large tensor that all ranks get goes in two stages, after R. Rabenseifner, "Optimization of collective
// reduction operations" (ICCS 2004), with direct exchanges instead of recursive ones: each rank gets its part
// from the others, then hands the result on. It is cut into chunks, two of which are on the way to their
// ranks at a time, so that the kernels find in the cache what has just arrived.
//
// What goes over the wire depends on the operation, its sizes and the number of ranks alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "engine/request.hpp"
#include "mpi/messages.hpp"

namespace collectives {

// A communicator of an MPI library, and the place of this process in it.
struct MpiCommunicator {
  MpiLibrary mpi;
  std::uintptr_t handle;
  int rank;
  int size;

  std::unique_ptr<MpiMessages> messages() const { return make_messages(mpi, handle); }
};

// Memory for what other ranks send, kept from one operation to the next. Any thread may call.
class MpiScratch {
 public:
  struct Piece {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0;
  };

  Piece take(std::size_t bytes);
  void give_back(Piece piece);

 private:
  std::mutex mutex_;
  std::vector<Piece> free_;
};

// An operation in flight. To be started once; `start` and `advance` return MPI's error code, after which it
// has ended.
class MpiOperation {
 public:
  virtual ~MpiOperation() = default;
  virtual int start() = 0;
  // Tests the messages and goes on as far as it gets.
  virtual int advance() = 0;
  virtual bool done() const noexcept = 0;
};

// A message of the user's, sent or received: `count` elements of the data type `type`.
class MpiMessage final : public MpiOperation {
 public:
  MpiMessage(std::unique_ptr<MpiMessages> messages, bool sends, std::byte* data, int count,
             std::uintptr_t type, int peer, int tag);

  int start() override;
  int advance() override;
  bool done() const noexcept override { return done_; }
  // Bytes that moved, when it is done; of a receive that C's int can count.
  int moved() const noexcept { return moved_; }
  // MPI's status of a receive that is done.
  std::string_view status() const { return messages_->status(); }
  int cancel() { return messages_->cancel(); }

 private:
  const std::unique_ptr<MpiMessages> messages_;
  const bool sends_;
  std::byte* const data_;
  const int count_;
  const std::uintptr_t type_;
  const int peer_;
  const int tag_;
  bool done_ = false;
  int moved_ = 0;
};

class MpiCollective final : public MpiOperation {
 public:
  // `tag` and the one after it belong to this operation.
  MpiCollective(const MpiCommunicator& communicator, std::shared_ptr<MpiScratch> scratch, Request request,
                int tag);

  int start() override;
  int advance() override;
  bool done() const noexcept override { return done_; }

 private:
  // A chunk on the way to the ranks that its parts are for.
  struct Chunk {
    std::unique_ptr<MpiMessages> messages;
    MpiScratch::Piece memory;  // for what is reduced here
  };

  void plan_reduction(Part data);
  void plan_broadcast(Part data);
  // Cuts the parts that ranks get first into chunks.
  void cut_into_chunks(std::size_t item);
  int begin(std::size_t chunk);
  int begin_barrier_round();
  void combine(std::size_t chunk);
  int publish(std::size_t chunk);
  void finish();

  // Begins messages with all other ranks: `sent(rank)` and `received(rank)` are the memory, if any.
  template <class Sent, class Received>
  int exchange(MpiMessages& messages, int tag, Sent sent, Received received);

  Chunk& chunk_of(std::size_t chunk) noexcept { return window_[chunk % window_.size()]; }
  // What of a rank's part is in a chunk.
  Part piece(Part part, std::size_t chunk) const noexcept;
  // Where a rank's contribution to this rank's part arrives.
  Part arriving(std::size_t chunk, std::size_t rank) noexcept;
  // Whether a rank gets the parts that are handed on.
  bool gets_all(int rank) const noexcept;
  bool is_root() const noexcept { return communicator_.rank == request_.root; }
  std::size_t me() const noexcept { return static_cast<std::size_t>(communicator_.rank); }
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(communicator_.size); }
  // A part for every rank, each `part`.
  std::vector<Part> all(Part part) const { return std::vector<Part>(ranks(), part); }

  const MpiCommunicator communicator_;
  const std::shared_ptr<MpiScratch> scratch_;
  const Request request_;
  const int tag_;

  bool done_ = false;
  int distance_ = 0;            // of the barrier's round
  std::vector<Part> sent_;      // by rank: what it gets of this one
  std::vector<Part> received_;  // by rank: where to put what it sends, unless this rank reduces it
  std::vector<Part>
      handed_on_;         // by rank: the parts that the second stage hands on; none where there is none
  Part own_;              // this rank's part, before it is reduced
  bool reduces_ = false;  // whether this rank reduces
  std::byte* target_ = nullptr;  // where this rank's part is in the end
  MpiScratch::Piece aside_;      // for a target that is no memory of the user's

  std::size_t chunks_ = 1;
  std::size_t chunk_ = 0;                                            // the first one that has not arrived
  std::size_t per_chunk_ = std::numeric_limits<std::size_t>::max();  // bytes of a rank's part
  std::array<Chunk, 2> window_;
  std::unique_ptr<MpiMessages> publications_;
};

}  // namespace collectives
