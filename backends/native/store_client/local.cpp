#include "store_client/local.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "common/error.hpp"

namespace collectives::store_client {

LocalConnection::LocalConnection(std::weak_ptr<store::Loop> server) : server_(std::move(server)) {
  if (const auto loop = server_.lock()) client_ = loop->open_local();
}

LocalConnection::~LocalConnection() {
  if (const auto loop = server_.lock()) loop->close_local(client_);
}

void LocalConnection::send(std::string_view requests, Nanoseconds /*deadline*/, Interrupt& interrupt) {
  if (read_ == output_.size()) {
    output_.clear();
    read_ = 0;
  }
  // Where the client is refused, the replies to come are missing.
  if (const auto loop = server_.lock())
    loop->serve_local(client_, requests, output_, [&] { interrupt.blocks(); });
}

void LocalConnection::read_into(Replies& replies, Nanoseconds /*deadline*/, Interrupt& /*interrupt*/) {
  if (read_ == output_.size()) throw Error(ErrorKind::network, "the server closed the connection");
  const std::span<char> room = replies.room();
  const std::size_t size = std::min(room.size(), output_.size() - read_);
  std::memcpy(room.data(), output_.data() + read_, size);
  read_ += size;
  replies.arrived(size);
}

}  // namespace collectives::store_client
