// Operations in flight on an MPI communicator. A collective is messages between the ranks: every rank sends
// each other one what is for it, and reduces what it gets with the kernels, in rank order.
//
// What goes over the wire depends on the operation, its sizes and the number of ranks alone, so that ranks
// may carry out the same operation in different ways: this one, or the group's own in Python.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/request.hpp"
#include "mpi/messages.hpp"

namespace collectives {

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

// A message of the user's, sent or received.
class MpiMessage final : public MpiOperation {
 public:
  MpiMessage(std::unique_ptr<MpiMessages> messages, bool sends, std::byte* data, std::size_t bytes, int peer,
             int tag);

  int start() override;
  int advance() override;
  bool done() const noexcept override { return done_; }
  // Bytes that moved, when it is done.
  int moved() const noexcept { return moved_; }

 private:
  const std::unique_ptr<MpiMessages> messages_;
  const bool sends_;
  std::byte* const data_;
  const std::size_t bytes_;
  const int peer_;
  const int tag_;
  bool done_ = false;
  int moved_ = 0;
};

class MpiCollective final : public MpiOperation {
 public:
  // `tag` and the one after it belong to this operation. Reductions whose whole is at most `at_once` bytes on
  // all ranks together are sent as a whole; others are cut into a part for each rank, which reduces it and
  // hands it on.
  MpiCollective(std::unique_ptr<MpiMessages> messages, std::shared_ptr<MpiScratch> scratch, int rank,
                int size, Request request, int tag, std::size_t at_once);

  int start() override;
  int advance() override;
  bool done() const noexcept override { return done_; }

 private:
  int exchange(const std::vector<Part>& sent, const std::vector<Part>& received);
  int begin_barrier_round();
  int begin_reduction();
  // What follows when all messages have completed; nothing more is in flight where it sets `done_`.
  int next();
  void combine();
  int publish();
  void finish();

  bool is_root() const noexcept { return rank_ == request_.root; }
  Part own() const noexcept { return parts_[static_cast<std::size_t>(rank_)]; }
  std::vector<Part> nothing() const { return std::vector<Part>(static_cast<std::size_t>(size_)); }
  // A part for every rank, each `part`.
  std::vector<Part> all(Part part) const { return std::vector<Part>(static_cast<std::size_t>(size_), part); }

  const std::unique_ptr<MpiMessages> messages_;
  const std::shared_ptr<MpiScratch> scratch_;
  const int rank_;
  const int size_;
  const Request request_;
  int tag_;
  const std::size_t at_once_;

  bool done_ = false;
  int distance_ = 0;                  // of the barrier's round
  bool publishes_ = false;            // whether the reduced part is to be handed on
  std::byte* target_ = nullptr;       // where this rank reduces to; null where it does not
  std::vector<Part> parts_;           // of the tensor that is reduced, by rank
  std::vector<const void*> sources_;  // of this rank's part, by rank
  MpiScratch::Piece piece_;
};

}  // namespace collectives
