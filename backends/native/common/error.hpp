// The one error type that crosses layers; the bindings turn it into the Python class of the same meaning.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace collectives {

enum class ErrorKind : std::uint8_t {
  backend = 0,      // anything without a kind of its own
  timeout = 1,      // an operation passed its time limit
  mismatch = 2,     // ranks issued different operations; nothing was written
  peer_lost = 3,    // a rank died or left; `rank` says which
  aborted = 4,      // the group was aborted, shut down, or broken by an earlier error
  network = 5,      // a connection could not be made or broke
  interrupted = 6,  // the interrupt hook asked to stop; the hook's owner holds the cause
  program = 7,      // an exception of a rank's own program; only as a cause
  resources = 8,    // the system gives this process no more descriptors or memory
};

class Error;

// What a program can read of an error besides its kind and text; as here where it is not known.
// NOLINTBEGIN(readability-redundant-member-init): without them compilers warn where some are left out.
struct ErrorDetails {
  int rank = -1;                            // at fault, within the group
  std::vector<int> missing = {};            // ranks that had not come, or the first of them
  std::string operation = {};               // "all_reduce", "send"
  std::int64_t sequence = -1;               // of a collective within its group
  std::shared_ptr<const Error> cause = {};  // the first error, where this one comes of it
};
// NOLINTEND(readability-redundant-member-init)

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message, ErrorDetails details = {})
      : kind_(kind), content_(std::make_shared<const Content>(std::move(message), std::move(details))) {}

  ErrorKind kind() const noexcept { return kind_; }
  const ErrorDetails& details() const noexcept { return content_->details; }
  int rank() const noexcept { return content_->details.rank; }
  const std::string& message() const noexcept { return content_->message; }
  const char* what() const noexcept override { return content_->message.c_str(); }

 private:
  struct Content {
    Content(std::string text, ErrorDetails about) : message(std::move(text)), details(std::move(about)) {}

    std::string message;
    ErrorDetails details;
  };

  ErrorKind kind_;
  std::shared_ptr<const Content> content_;  // shared, so that a copy, as `throw` makes it, cannot fail
};

// The class of `collectives.errors` of the same meaning.
const char* class_of(ErrorKind kind) noexcept;
// "CollectiveTimeoutError: message".
std::string with_class(const Error& error);

// "what: text of errno".
std::string with_errno(const std::string& what, int error);

}  // namespace collectives
