// The one error type that crosses layers; the bindings turn it into the Python class of the same meaning.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace collectives {

enum class ErrorKind : std::uint8_t {
  backend = 0,      // anything without a kind of its own
  timeout = 1,      // an operation passed its time limit
  mismatch = 2,     // ranks issued different operations; nothing was written
  peer_lost = 3,    // a rank died or left; `rank` says which
  aborted = 4,      // the group was aborted, shut down, or broken by an earlier error
  network = 5,      // a connection could not be made or broke
  interrupted = 6,  // the interrupt hook asked to stop; the hook's owner holds the cause
};

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message, int rank = -1)
      : kind_(kind), rank_(rank), message_(std::make_shared<const std::string>(std::move(message))) {}

  ErrorKind kind() const noexcept { return kind_; }
  // The rank at fault within the group, or -1.
  int rank() const noexcept { return rank_; }
  const std::string& message() const noexcept { return *message_; }
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  ErrorKind kind_;
  int rank_;
  std::shared_ptr<const std::string> message_;  // shared, so that a copy, as `throw` makes it, cannot fail
};

// "what: text of errno".
std::string with_errno(const std::string& what, int error);

}  // namespace collectives
