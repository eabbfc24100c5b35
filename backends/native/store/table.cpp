#include "store/table.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

namespace collectives::store {
namespace {

bool parse(const std::string& text, std::int64_t& number) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stop == end;
}

// Of a key and value beyond their bytes: nodes and buckets of the maps, and the objects that own the bytes.
constexpr std::size_t kEntryBytes = 256;

// What would be given back if nobody held the value any more; a value that a reply still sends stays.
std::size_t freed_by(const SharedValue& value) { return value.use_count() == 1 ? value->charge.bytes() : 0; }

}  // namespace

SharedValue Table::make(std::size_t key_size, std::string value, std::size_t freed) const {
  budget_.expect_value(value.size());
  budget_.expect(key_size + kEntryBytes + value.size(), freed);
  return std::make_shared<Value>(budget_, std::move(value), key_size + kEntryBytes);
}

void Table::store(const std::string& key, SharedValue value, Woken& woken) {
  const auto [place, is_new] = values_.try_emplace(key);
  place->second = std::move(value);
  if (is_new) {
    list_bytes_ += sizeof(std::uint64_t) + key.size();
    list_.reset();
  }
  key_appeared(key, woken);
}

bool Table::there(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }

void Table::set(const std::string& key, std::string value, Woken& woken) {
  const auto found = values_.find(key);
  store(key, make(key.size(), std::move(value), found == values_.end() ? 0 : freed_by(found->second)), woken);
}

void Table::set_all(const std::vector<std::string>& keys, std::vector<std::string> values, Woken& woken) {
  std::size_t bytes = 0;
  std::size_t freed = 0;
  std::unordered_set<std::string_view> counted;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    budget_.expect_value(values[i].size());
    bytes += keys[i].size() + kEntryBytes + values[i].size();
    const auto found = values_.find(keys[i]);
    if (found != values_.end() && counted.insert(keys[i]).second) freed += freed_by(found->second);
  }
  budget_.expect(bytes, freed);
  std::vector<SharedValue> made;
  made.reserve(values.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    made.push_back(std::make_shared<Value>(budget_, std::move(values[i]), keys[i].size() + kEntryBytes));
  }
  for (std::size_t i = 0; i < keys.size(); ++i) store(keys[i], std::move(made[i]), woken);
}

void Table::append(const std::string& key, const std::string& value, Woken& woken) {
  const auto found = values_.find(key);
  if (found == values_.end()) return set(key, value, woken);
  SharedValue& old = found->second;
  const std::size_t size = old->bytes.size() + value.size();
  budget_.expect_value(size);
  if (old.use_count() == 1) {
    budget_.expect(value.size());
    old->bytes += value;
    old->charge.resize(old->charge.bytes() + value.size());
  } else {
    old = make(key.size(), old->bytes + value, 0);
  }
}

SharedValue Table::compare_set(const std::string& key, std::string expected, std::string desired,
                               Woken& woken) {
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) return make(0, std::move(expected), 0);
  if (found == values_.end() || found->second->bytes == expected) set(key, std::move(desired), woken);
  return get(key);
}

std::int64_t Table::add(const std::string& key, std::int64_t amount, Woken& woken) {
  std::int64_t sum = 0;
  const auto found = values_.find(key);
  if (found != values_.end() && !parse(found->second->bytes, sum)) {
    throw Refusal("the key holds no integer to add to");
  }
  if (__builtin_add_overflow(sum, amount, &sum)) throw Refusal("the sum has more than 64 bits");
  set(key, std::to_string(sum), woken);
  return sum;
}

SharedValue Table::get(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : found->second;
}

bool Table::erase(const std::string& key) {
  if (values_.erase(key) == 0) return false;
  list_bytes_ -= sizeof(std::uint64_t) + key.size();
  list_.reset();
  return true;
}

bool Table::check(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [this](const std::string& key) { return there(key); });
}

SharedValue Table::list() {
  if (SharedValue made = list_.lock()) return made;
  budget_.expect_reply(list_bytes_);
  budget_.expect(list_bytes_);
  std::string keys;
  keys.reserve(list_bytes_);
  for (const auto& [key, value] : values_) {
    const std::uint64_t size = key.size();
    keys.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(key);
  }
  SharedValue made = std::make_shared<Value>(budget_, std::move(keys), kEntryBytes);
  list_ = made;
  return made;
}

void Table::push(const std::string& key, std::string value, Woken& woken) {
  SharedValue made = make(key.size(), std::move(value), 0);
  std::list<SharedValue> one;
  one.push_back(std::move(made));
  std::list<SharedValue>& queue = queues_[key];
  queue.splice(queue.end(), one);
  wake_one(key, woken);
}

std::size_t Table::pop(ClientId client, const std::string& key, SharedValue& value) {
  if (const auto hint = may_pop_.find(client); hint != may_pop_.end() && hint->second == key)
    may_pop_.erase(hint);
  const auto found = queues_.find(key);
  if (found == queues_.end()) return 0;
  const std::size_t length = found->second.size();
  value = std::move(found->second.front());
  found->second.pop_front();
  if (length == 1) queues_.erase(found);
  return length;
}

std::size_t Table::length(const std::string& key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0 : found->second.size();
}

bool Table::wait(ClientId client, const std::vector<std::string>& keys) {
  cancel(client);
  Wait wait{client, {}, {}, {}, false};
  for (const std::string& key : keys) {
    if (!there(key)) wait.missing.insert(key);
  }
  if (wait.missing.empty()) return true;
  const Turn turn = next_turn_++;
  turns_[client] = turn;
  // From here on cancel() takes back what there is, however far this comes.
  for (const std::string& key : waits_.emplace(turn, std::move(wait)).first->second.missing) {
    waiting_for_[key].insert(turn);
  }
  return false;
}

std::size_t Table::wait_bytes(const std::vector<std::string>& keys) {
  std::size_t bytes = 0;
  for (const std::string& key : keys) bytes += kEntryBytes + 2 * key.size();
  return bytes;
}

bool Table::barrier(ClientId client, const std::string& key, std::int64_t members, Woken& woken) {
  cancel(client);
  if (add(key, 1, woken) >= members) {
    const auto arrived = barriers_.extract(key);
    if (arrived.empty()) return true;
    for (const Turn turn : arrived.mapped()) finish(turn, woken);
    return true;
  }
  const Turn turn = next_turn_++;
  try {
    turns_[client] = turn;
    Wait& wait = waits_.emplace(turn, Wait{client, {}, {}, key, false}).first->second;
    barriers_[key].insert(turn);
    wait.in_barrier = true;
  } catch (const std::bad_alloc&) {
    count_out(key, turn);
    throw;
  }
  return false;
}

void Table::cancel(ClientId client) {
  const auto found = turns_.find(client);
  if (found == turns_.end()) return;
  const Turn turn = found->second;
  turns_.erase(found);
  const auto node = waits_.extract(turn);
  if (node.empty()) return;  // there was no memory for it
  const Wait& wait = node.mapped();
  for (const std::string& key : wait.missing) forget(key, turn);
  if (wait.in_barrier) count_out(wait.barrier, turn);
}

void Table::count_out(const std::string& key, Turn turn) {
  if (const auto arrived = barriers_.find(key); arrived != barriers_.end()) {
    arrived->second.erase(turn);
    if (arrived->second.empty()) barriers_.erase(arrived);
  }
  const auto count = values_.find(key);
  std::int64_t number = 0;
  if (count == values_.end() || !parse(count->second->bytes, number)) return;  // somebody took the key over
  if (number <= 1) {
    erase(key);
  } else if (count->second.use_count() == 1) {
    count->second->bytes = std::to_string(number - 1);
  } else {
    count->second = std::make_shared<Value>(budget_, std::to_string(number - 1), key.size() + kEntryBytes);
  }
}

void Table::drop(ClientId client, Woken& woken) {
  cancel(client);
  const auto hint = may_pop_.find(client);
  if (hint == may_pop_.end()) return;
  const std::string queue = std::move(hint->second);
  may_pop_.erase(hint);
  if (queues_.contains(queue)) wake_one(queue, woken);
}

void Table::forget(const std::string& key, Turn turn) {
  const auto found = waiting_for_.find(key);
  if (found == waiting_for_.end()) return;
  found->second.erase(turn);
  if (found->second.empty()) waiting_for_.erase(found);
}

// A queue that was pushed to may have been emptied again while the wait went on for its other keys.
bool Table::complete(Turn turn, Wait& wait) {
  if (!wait.missing.empty()) return false;
  for (std::string& key : wait.credited) {
    if (there(key)) continue;
    waiting_for_[key].insert(turn);
    wait.missing.insert(std::move(key));
  }
  wait.credited.clear();
  return wait.missing.empty();
}

void Table::finish(Turn turn, Woken& woken) {
  const auto node = waits_.extract(turn);
  turns_.erase(node.mapped().client);
  woken.push_back(node.mapped().client);
}

// Each waiter is taken off before it is looked at, so that the others stay on if memory ends.
void Table::key_appeared(const std::string& key, Woken& woken) {
  for (auto found = waiting_for_.find(key); found != waiting_for_.end(); found = waiting_for_.find(key)) {
    const Turn turn = *found->second.begin();
    Wait& wait = waits_.at(turn);
    wait.missing.erase(key);
    forget(key, turn);
    if (complete(turn, wait)) finish(turn, woken);
  }
}

void Table::wake_one(const std::string& queue, Woken& woken) {
  const auto found = waiting_for_.find(queue);
  if (found == waiting_for_.end()) return;
  const std::vector<Turn> turns(found->second.begin(), found->second.end());
  for (const Turn turn : turns) {
    Wait& wait = waits_.at(turn);
    wait.missing.erase(queue);
    forget(queue, turn);
    if (complete(turn, wait)) {
      may_pop_[wait.client] = queue;
      finish(turn, woken);
      return;
    }
    wait.credited.push_back(queue);
  }
}

}  // namespace collectives::store
