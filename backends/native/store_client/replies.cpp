#include "store_client/replies.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/error.hpp"

namespace collectives::store_client {
namespace {

constexpr std::size_t kLeastRoom = 16 * 1024;
constexpr std::size_t kKeptBytes = 1024 * 1024;  // that a connection keeps between replies
constexpr std::uint64_t kMostValueBytes = std::uint64_t{1} << 40;

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

[[noreturn]] void impossible(const std::string& what) {
  throw Error(ErrorKind::network, "the server announced " + what + ", which cannot be");
}

}  // namespace

std::span<char> Replies::room() {
  if (capacity_ - end_ < kLeastRoom) {
    const std::size_t held = end_ - begin_;
    const std::size_t wanted = held <= capacity_ / 2 && capacity_ - held >= kLeastRoom
                                   ? capacity_
                                   : std::max(2 * capacity_, 2 * kLeastRoom);
    auto data = std::make_unique_for_overwrite<char[]>(wanted);
    if (held > 0) std::memcpy(data.get(), data_.get() + begin_, held);
    data_ = std::move(data);
    capacity_ = wanted;
    begin_ = 0;
    end_ = held;
  }
  return {data_.get() + end_, capacity_ - end_};
}

void Replies::expect(std::string_view form) {
  if (form.find_first_not_of("bunvl") != std::string_view::npos) {
    throw std::invalid_argument("'" + std::string(form) + "' is no form of replies");
  }
  form_ = form;
  step_ = 0;
  cursor_ = 0;
  listed_ = 0;
  fields_.clear();
}

bool Replies::complete() {
  while (step_ < form_.size() || listed_ > 0) {
    if (listed_ > 0) {
      if (!next('v')) return false;
      --listed_;
    } else {
      if (!next(form_[step_])) return false;
      ++step_;
    }
  }
  return true;
}

// Finds the next field, if all of it has come.
bool Replies::next(char kind) {
  const char* const at = data_.get() + begin_ + cursor_;
  const std::size_t available = end_ - begin_ - cursor_;
  const std::size_t head = kind == 'b' ? 1 : kind == 'u' ? sizeof(std::uint32_t) : sizeof(std::int64_t);
  if (available < head) return false;
  Found found{kind, 0, cursor_ + head, 0};
  if (kind == 'b') {
    found.number = static_cast<unsigned char>(*at);
  } else if (kind == 'u') {
    found.number = load<std::uint32_t>(at);
  } else if (kind == 'v') {
    const auto size = load<std::uint64_t>(at);
    if (size > kMostValueBytes) impossible("a value of " + std::to_string(size) + " bytes");
    if (available - head < size) return false;
    found.bytes = static_cast<std::size_t>(size);
  } else {
    found.number = load<std::int64_t>(at);
  }
  if (kind == 'l') {
    if (found.number < 0) impossible("a list of " + std::to_string(found.number) + " values");
    listed_ = found.number;
  }
  fields_.push_back(found);
  cursor_ += head + found.bytes;
  return true;
}

Replies::Field Replies::field(std::size_t index) const noexcept {
  const Found& found = fields_[index];
  return {found.kind, found.number, {data_.get() + begin_ + found.offset, found.bytes}};
}

void Replies::take() noexcept {
  take(cursor_);
  form_ = {};
  cursor_ = 0;
  fields_.clear();
}

void Replies::take(std::size_t bytes) noexcept {
  begin_ += bytes;
  if (begin_ < end_) return;
  begin_ = 0;
  end_ = 0;
  if (capacity_ <= kKeptBytes) return;
  data_.reset();
  capacity_ = 0;
}

}  // namespace collectives::store_client
