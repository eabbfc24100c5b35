#include "store/session.hpp"

#include <algorithm>
#include <cstring>

namespace collectives::store {
namespace {

constexpr std::size_t kHelloBytes = 512;        // taken from a client before its first request is complete
constexpr std::size_t kPieceBytes = 64 * 1024;  // of replies, made before they are sent
constexpr std::size_t kFreeBytes = 64 * 1024;   // that a connection may hold beside the budget
constexpr std::size_t kRefusalsKept = 64;

template <typename T>
void put(std::string& output, T value) {
  output.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Whether somebody asks whose server this is.
bool of_ours(const std::vector<std::string>& keys) { return keys.size() == 1 && keys[0] == kServerKey; }

void put_count(std::string& output, std::size_t count) { put(output, static_cast<std::int64_t>(count)); }

}  // namespace

void Refusals::add(std::uint32_t ping, std::string why) {
  if (latest_.size() == kRefusalsKept) latest_.pop_front();
  latest_.emplace_back(ping, std::move(why));
}

std::string Refusals::of(std::uint32_t ping) const {
  const auto found = std::find_if(latest_.rbegin(), latest_.rend(),
                                  [ping](const auto& refusal) { return refusal.first == ping; });
  return found == latest_.rend() ? std::string() : found->second;
}

std::size_t Session::room() const {
  if (!validated_) return kHelloBytes - std::min(decoder_.held(), kHelloBytes);
  return busy() || output_.size() >= kPieceBytes ? 0 : kInputBytes;
}

void Session::feed(std::string_view bytes) {
  decoder_.feed(bytes);
  starved_ = false;
  hold();
}

void Session::work(Woken& woken) {
  Request request;
  fill();
  for (int i = 0; i < kRequestsPerTurn && !replying() && output_.size() < kPieceBytes; ++i) {
    if (!decoder_.next(request)) {
      starved_ = true;
      if (!validated_ && room() == 0) throw Refusal("the first request must be a greeting");
      break;
    }
    hold();  // without what the request carries: the table counts it
    execute(request, woken);
    fill();
  }
  hold();
}

void Session::wake() {
  wait_bytes_ = 0;
  hold();
  if (replying()) {
    woken_ = true;
  } else {
    put(output_, kStopWaiting);
  }
}

void Session::sent(std::size_t size) {
  sent_ += size;
  if (sent_ < output_.size()) return;
  output_.clear();
  sent_ = 0;
}

void Session::execute(Request& request, Woken& woken) {
  if (!validated_) {
    validated_ = request.command == Command::kValidate && request.word == kMagic;
    if (!validated_) throw Refusal("the first request must be a greeting");
    return;
  }
  std::vector<std::string>& keys = request.keys;
  std::vector<std::string>& values = request.values;
  switch (request.command) {
    case Command::kValidate:
      throw Refusal("a second greeting");
    case Command::kSet:
      return table_.set(keys[0], std::move(values[0]), woken);
    case Command::kCompareSet:
      parts_.push_back(table_.compare_set(keys[0], std::move(values[0]), std::move(values[1]), woken));
      return;
    case Command::kGet:
      parts_.push_back(get(keys[0]));
      return;
    case Command::kAdd:
      return put(output_, table_.add(keys[0], request.number, woken));
    case Command::kCheck:
      return put(output_, of_ours(keys) || table_.check(keys) ? kAllThere : kNotAllThere);
    case Command::kWait:
      wait_bytes_ = Table::wait_bytes(keys);
      hold();
      if (!table_.wait(client_, keys)) return;
      wait_bytes_ = 0;
      return put(output_, kStopWaiting);
    case Command::kGetNumKeys:
      return put_count(output_, table_.size());
    case Command::kDeleteKey:
      return put_count(output_, table_.erase(keys[0]) ? 1 : 0);
    case Command::kAppend:
      return table_.append(keys[0], values[0], woken);
    case Command::kMultiGet:
      return multi_get(keys);
    case Command::kMultiSet:
      return table_.set_all(keys, std::move(values), woken);
    case Command::kCancelWait:
      table_.cancel(client_);
      wait_bytes_ = 0;
      return put(output_, kWaitCanceled);
    case Command::kPing:
      if (name_ == 0) name_ = request.word;
      return put(output_, request.word);
    case Command::kQueuePush:
      return table_.push(keys[0], std::move(values[0]), woken);
    case Command::kQueuePop: {
      SharedValue value;
      const std::size_t length = table_.pop(client_, keys[0], value);
      put_count(output_, length);
      if (length != 0) parts_.push_back(std::move(value));
      return;
    }
    case Command::kQueueLen:
      return put_count(output_, table_.length(keys[0]));
    case Command::kListKeys:
      parts_.push_back(table_.list());
      bare_ = true;
      return put_count(output_, table_.size());
    case Command::kBarrier:
      wait_bytes_ = 0;
      if (table_.barrier(client_, keys[0], request.number, woken)) put(output_, kStopWaiting);
      return;
  }
}

SharedValue Session::get(const std::string& key) const {
  std::uint32_t name = 0;
  if (key.size() == sizeof(kRefusalKey) - 1 + sizeof(name) && key.starts_with(kRefusalKey)) {
    std::memcpy(&name, key.data() + sizeof(kRefusalKey) - 1, sizeof(name));
    return std::make_shared<Value>(budget_, refusals_.of(name), 0);
  }
  return table_.get(key);
}

void Session::multi_get(const std::vector<std::string>& keys) {
  std::size_t bytes = 0;
  parts_.reserve(keys.size());
  for (const std::string& key : keys) {
    parts_.push_back(table_.get(key));
    bytes += sizeof(std::uint64_t) + (parts_.back() == nullptr ? 0 : parts_.back()->bytes.size());
  }
  budget_.expect_reply(bytes);
}

void Session::fill() {
  if (!replying()) return;
  const std::size_t head = bare_ ? 0 : sizeof(std::uint64_t);
  while (replying() && output_.size() < kPieceBytes) {
    SharedValue& part = parts_[next_part_];
    const std::string_view bytes = part == nullptr ? std::string_view() : std::string_view(part->bytes);
    if (part_done_ < head) {
      put(output_, static_cast<std::uint64_t>(bytes.size()));
      part_done_ = head;
    }
    const std::string_view piece =
        bytes.substr(part_done_ - head, kPieceBytes - std::min(kPieceBytes, output_.size()));
    output_ += piece;
    part_done_ += piece.size();
    if (part_done_ < head + bytes.size()) return;
    part.reset();
    part_done_ = 0;
    ++next_part_;
  }
  if (replying()) return;
  parts_ = {};
  next_part_ = 0;
  bare_ = false;
  if (woken_) put(output_, kStopWaiting);
  woken_ = false;
}

void Session::hold() {
  const std::size_t bytes = decoder_.held() + parts_.capacity() * sizeof(SharedValue) + wait_bytes_;
  const std::size_t counted = bytes - std::min(bytes, kFreeBytes);
  if (counted > held_.bytes()) budget_.expect(counted - held_.bytes());
  held_.resize(counted);
}

}  // namespace collectives::store
