#include "common/error.hpp"

#include <system_error>

namespace collectives {

const char* class_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::timeout:
      return "CollectiveTimeoutError";
    case ErrorKind::mismatch:
      return "CollectiveMismatchError";
    case ErrorKind::peer_lost:
      return "PeerLostError";
    case ErrorKind::aborted:
      return "GroupAbortedError";
    case ErrorKind::network:
      return "DistNetworkError";
    case ErrorKind::program:
      return "DistError";
    case ErrorKind::backend:
    case ErrorKind::resources:
    case ErrorKind::interrupted:
      break;
  }
  return "DistBackendError";
}

std::string with_class(const Error& error) {
  if (error.kind() == ErrorKind::interrupted) return error.message();  // Python has the exception
  return std::string(class_of(error.kind())) + ": " + error.message();
}

std::string with_errno(const std::string& what, int error) {
  return what + ": " + std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

}  // namespace collectives
