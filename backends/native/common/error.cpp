#include "common/error.hpp"

#include <system_error>

namespace collectives {

std::string with_errno(const std::string& what, int error) {
  return what + ": " + std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

}  // namespace collectives
