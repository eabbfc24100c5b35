#include "store/decoder.hpp"

#include <cstring>
#include <utility>

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

bool Decoder::begin() {
  std::uint8_t code = 0;
  request_bytes_ = 0;
  read(code);
  if (code >= std::size(kForms)) return false;
  partial_ = Request{};
  partial_.command = static_cast<Command>(code);
  form_ = kForms[code];
  step_ = 0;
  loop_start_ = 0;
  repeats_ = 1;
  has_length_ = false;
  return true;
}

Decoder::Status Decoder::text(std::size_t limit, std::vector<std::string>& into) {
  if (!has_length_) {
    if (!read(length_)) return Status::kNeedMore;
    if (length_ > limit || length_ > kMaxRequestBytes - request_bytes_) return Status::kInvalid;
    has_length_ = true;
  }
  if (available() < length_) return Status::kNeedMore;
  const auto size = static_cast<std::size_t>(length_);
  into.emplace_back(buffer_, position_, size);
  position_ += size;
  request_bytes_ += size;
  has_length_ = false;
  return request_bytes_ > kMaxRequestBytes - sizeof(std::uint64_t) ? Status::kInvalid : Status::kReady;
}

Decoder::Status Decoder::field() {
  switch (form_[step_]) {
    case 'u':
      return read(partial_.word) ? Status::kReady : Status::kNeedMore;
    case 'n':
      return read(partial_.number) ? Status::kReady : Status::kNeedMore;
    case 'k':
      return text(kMaxKeyBytes, partial_.keys);
    case 'v':
      return text(kMaxValueBytes, partial_.values);
    default:  // '*'
      if (!read(repeats_)) return Status::kNeedMore;
      loop_start_ = step_ + 1;
      return repeats_ > kMaxKeys ? Status::kInvalid : Status::kReady;
  }
}

Decoder::Status Decoder::next(Request& request) {
  if (form_ == nullptr) {
    if (available() == 0) return Status::kNeedMore;
    if (!begin()) return Status::kInvalid;
  }
  while (form_[step_] != '\0' && repeats_ != 0) {
    const Status status = field();
    if (status != Status::kReady) return status;
    ++step_;
    if (form_[step_] == '\0' && --repeats_ != 0) step_ = loop_start_;
  }
  form_ = nullptr;
  request = std::move(partial_);
  return Status::kReady;
}

}  // namespace collectives::store
