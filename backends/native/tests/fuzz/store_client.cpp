// Fuzz target for what the store's client does with the bytes of a server.
//
// The input is a list of turns (turns.hpp). An odd number: the bytes choose the letters of the form of the
// next replies. An even one: the server sends the bytes, and the client reads as many replies as are
// complete.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "common/error.hpp"
#include "store_client/replies.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/testing.hpp"

namespace collectives::store_client {
namespace {

class Client {
 public:
  Client() { replies_.expect(form_); }

  void turn(unsigned char number, std::string_view bytes) {
    if (number % 2 == 1) {
      form_.clear();
      for (const char letter : bytes) form_ += "bunvl"[static_cast<unsigned char>(letter) % 5];
      replies_.expect(form_);
      return;
    }
    arrive(bytes);
    // A form without letters is complete at once, for ever.
    while (!form_.empty() && replies_.complete()) {
      read();
      replies_.expect(form_);
    }
  }

 private:
  void arrive(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::span<char> room = replies_.room();
      CHECK(!room.empty());
      CHECK(room.size() <= 4 * (replies_.held().size() + 64 * 1024));
      const std::size_t size = std::min(room.size(), bytes.size());
      std::memcpy(room.data(), bytes.data(), size);
      replies_.arrived(size);
      bytes.remove_prefix(size);
    }
  }

  void read() {
    const std::string_view held = replies_.held();
    CHECK(replies_.size() >= form_.size());
    std::size_t seen = 0;
    for (std::size_t i = 0; i < replies_.size(); ++i) {
      const Replies::Field field = replies_.field(i);
      if (field.kind != 'v') continue;
      CHECK(field.bytes.data() >= held.data());
      CHECK(field.bytes.data() + field.bytes.size() <= held.data() + held.size());
      seen += field.bytes.size();
    }
    CHECK(seen <= held.size());
    replies_.take();
    CHECK(replies_.held().size() <= held.size());
  }

  Replies replies_;
  std::string form_ = "v";
};

}  // namespace
}  // namespace collectives::store_client

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::store_client::Client client;
  try {
    collectives::for_each_turn(
        data, size, [&](unsigned char number, std::string_view bytes) { client.turn(number, bytes); });
  } catch (const collectives::Error& error) {
    CHECK(error.kind() == collectives::ErrorKind::network);
  }
  return 0;
}
