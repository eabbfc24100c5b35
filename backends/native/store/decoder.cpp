#include "store/decoder.hpp"

#include <cstring>
#include <utility>

#include "store/budget.hpp"

namespace collectives::store {
namespace {

// Fields of each command: u = u32, n = i64, k = key, v = value, * = u64 count of passes through what follows.
constexpr const char* kForms[] = {
    "u",    // Validate
    "kv",   // Set
    "kvv",  // CompareSet
    "k",    // Get
    "kn",   // Add
    "*k",   // Check
    "*k",   // Wait
    "",     // GetNumKeys
    "k",    // DeleteKey
    "kv",   // Append
    "*k",   // MultiGet
    "*kv",  // MultiSet
    "",     // CancelWait
    "u",    // Ping
    "kv",   // QueuePush
    "k",    // QueuePop
    "k",    // QueueLen
    "",     // ListKeys
    "kn",   // Barrier
};

constexpr std::size_t kCompactAt = 64 * 1024;
constexpr std::size_t kTextBytes = 2 * sizeof(std::string);  // of a key or value beyond its bytes

[[noreturn]] void over(const char* what, std::uint64_t size, std::size_t limit) {
  throw Refusal(std::string(what) + " of " + std::to_string(size) + " bytes, of at most " +
                std::to_string(limit));
}

}  // namespace

void Decoder::feed(std::string_view bytes) {
  compact();
  buffer_.append(bytes);
}

void Decoder::compact() {
  if (position_ == buffer_.size()) {
    buffer_.clear();
    position_ = 0;
    // A large request must not pin its memory for the rest of the connection's life.
    if (buffer_.capacity() > 16 * kCompactAt) buffer_.shrink_to_fit();
  } else if (position_ >= kCompactAt) {
    buffer_.erase(0, position_);
    position_ = 0;
  }
}

template <typename T>
bool Decoder::read(T& value) {
  if (available() < sizeof(T)) return false;
  std::memcpy(&value, buffer_.data() + position_, sizeof(T));
  position_ += sizeof(T);
  request_bytes_ += sizeof(T);
  return true;
}

void Decoder::begin() {
  std::uint8_t code = 0;
  request_bytes_ = 0;
  read(code);
  if (code >= std::size(kForms)) throw Refusal("no request begins with the byte " + std::to_string(code));
  partial_ = Request{};
  partial_.command = static_cast<Command>(code);
  form_ = kForms[code];
  step_ = 0;
  loop_start_ = 0;
  repeats_ = 1;
  has_length_ = false;
}

bool Decoder::text(const char* what, std::size_t limit, std::vector<std::string>& into) {
  if (!has_length_) {
    if (!read(length_)) return false;
    if (length_ > limit) over(what, length_, limit);
    if (length_ > kMaxRequestBytes - request_bytes_) {
      over("a request", request_bytes_ + length_, kMaxRequestBytes);
    }
    has_length_ = true;
  }
  if (available() < length_) return false;
  const auto size = static_cast<std::size_t>(length_);
  into.emplace_back(buffer_, position_, size);
  position_ += size;
  request_bytes_ += size;
  has_length_ = false;
  // So that the subtraction above cannot wrap.
  if (request_bytes_ > kMaxRequestBytes - sizeof(std::uint64_t)) {
    over("a request", request_bytes_ + sizeof(std::uint64_t), kMaxRequestBytes);
  }
  return true;
}

bool Decoder::field() {
  switch (form_[step_]) {
    case 'u':
      return read(partial_.word);
    case 'n':
      return read(partial_.number);
    case 'k':
      return text("a key", kMaxKeyBytes, partial_.keys);
    case 'v':
      return text("a value", kMaxValueBytes, partial_.values);
    default:  // '*'
      if (!read(repeats_)) return false;
      loop_start_ = step_ + 1;
      if (repeats_ > kMaxKeys) {
        throw Refusal("a request for " + std::to_string(repeats_) + " keys, of at most " +
                      std::to_string(kMaxKeys));
      }
      return true;
  }
}

bool Decoder::next(Request& request) {
  if (form_ == nullptr) {
    if (available() == 0) return false;
    begin();
  }
  while (form_[step_] != '\0' && repeats_ != 0) {
    if (!field()) return false;
    ++step_;
    if (form_[step_] == '\0' && --repeats_ != 0) step_ = loop_start_;
  }
  form_ = nullptr;
  request = std::move(partial_);
  return true;
}

std::size_t Decoder::held() const {
  if (form_ == nullptr) return available();
  return available() + request_bytes_ + kTextBytes * (partial_.keys.size() + partial_.values.size());
}

}  // namespace collectives::store
