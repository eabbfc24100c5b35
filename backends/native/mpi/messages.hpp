// Messages of an MPI library that another module of this process has loaded.
//
// No header of any MPI is needed: the functions come as addresses, and a handle is an int (MPICH) or a
// pointer (Open MPI, and the ABI of MPI 5), as the caller says. Counts stay within C's int.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace collectives {

// Addresses of MPI's functions and values of its handles, as its own C interface has them.
struct MpiLibrary {
  std::uintptr_t isend;
  std::uintptr_t irecv;
  std::uintptr_t test;
  std::uintptr_t testall;
  std::uintptr_t get_count;
  std::uintptr_t cancel;
  std::size_t handle_bytes;
  std::size_t status_bytes;
  std::uintptr_t byte;  // the data type
};

inline constexpr int kMpiSuccess = 0;  // by the standard

// Messages that are awaited together. Every function returns MPI's error code. Not to be destroyed while one
// is under way, because MPI writes into the statuses of those it tests and into the messages' memory.
class MpiMessages {
 public:
  virtual ~MpiMessages() = default;
  virtual int send(const std::byte* data, int count, std::uintptr_t type, int peer, int tag) = 0;
  virtual int receive(std::byte* data, int count, std::uintptr_t type, int peer, int tag) = 0;
  // Tests all; `done` says whether they are through, and there are none then. Where there is one, the code
  // tells what is wrong with it, else only that something is.
  virtual int test(bool& done) = 0;
  // Bytes of the one message that was received, after it is through.
  virtual int received(int& bytes) = 0;
  // MPI's status of that message.
  virtual std::string_view status() const = 0;
  // Asks MPI to take back those under way.
  virtual int cancel() = 0;
};

// Throws std::invalid_argument where no MPI has handles of this length.
std::unique_ptr<MpiMessages> make_messages(const MpiLibrary& library, std::uintptr_t communicator);

}  // namespace collectives
