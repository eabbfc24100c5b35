// Turns the bytes of one connection into requests; trusts nothing that came over the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/protocol.hpp"

namespace collectives::store {

struct Request {
  Command command{};
  std::uint32_t word = 0;           // Validate, Ping
  std::int64_t number = 0;          // Add, Barrier
  std::vector<std::string> keys;    // one, or those of a list
  std::vector<std::string> values;  // in the order of the fields
};

// Incremental: bytes are looked at once, however the network cuts them, so that a large request costs linear
// time and a length is believed only as far as its bytes have arrived.
class Decoder {
 public:
  void feed(std::string_view bytes);

  // Takes the next whole request out; false until all of it has come. Throws Refusal at bytes that are no
  // request, or one over a limit of the protocol: the connection must be closed.
  bool next(Request& request);

  // About the memory that is held for requests that next() has not given out.
  std::size_t held() const;

 private:
  std::size_t available() const { return buffer_.size() - position_; }
  template <typename T>
  bool read(T& value);
  void begin();
  bool field();
  bool text(const char* what, std::size_t limit, std::vector<std::string>& into);
  void compact();

  std::string buffer_;
  std::size_t position_ = 0;       // first byte of buffer_ not consumed yet
  Request partial_;                // the request being read
  const char* form_ = nullptr;     // its fields (decoder.cpp); null between requests
  std::size_t step_ = 0;           // index of the next field in form_
  std::size_t loop_start_ = 0;     // first field of a repeated group
  std::uint64_t repeats_ = 1;      // passes through the group that are left, this one included
  std::size_t request_bytes_ = 0;  // taken by the request so far
  bool has_length_ = false;        // the length of the current key or value has been read
  std::uint64_t length_ = 0;
};

}  // namespace collectives::store
