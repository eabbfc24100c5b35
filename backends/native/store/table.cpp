#include "store/table.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

namespace collectives::store {
namespace {

bool parse(const std::string& text, std::int64_t& number) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stop == end;
}

}  // namespace

bool Table::there(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }

void Table::set(const std::string& key, std::string value, Woken& woken) {
  values_[key] = std::move(value);
  key_appeared(key, woken);
}

void Table::append(const std::string& key, const std::string& value, Woken& woken) {
  values_[key] += value;
  key_appeared(key, woken);
}

std::string Table::compare_set(const std::string& key, const std::string& expected,
                               const std::string& desired, Woken& woken) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    if (!expected.empty()) return expected;
    set(key, desired, woken);
    return desired;
  }
  if (found->second == expected) found->second = desired;
  return found->second;
}

bool Table::add(const std::string& key, std::int64_t amount, std::int64_t& sum, Woken& woken) {
  std::int64_t before = 0;
  if (const auto found = values_.find(key); found != values_.end() && !parse(found->second, before))
    return false;
  if (__builtin_add_overflow(before, amount, &sum)) return false;
  set(key, std::to_string(sum), woken);
  return true;
}

const std::string& Table::get(const std::string& key) const {
  static const std::string nothing;
  const auto found = values_.find(key);
  return found == values_.end() ? nothing : found->second;
}

bool Table::erase(const std::string& key) { return values_.erase(key) != 0; }

bool Table::check(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [this](const std::string& key) { return there(key); });
}

void Table::push(const std::string& key, std::string value, Woken& woken) {
  queues_[key].push_back(std::move(value));
  wake_one(key, woken);
}

std::size_t Table::pop(ClientId client, const std::string& key, std::string& value) {
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
  for (const std::string& key : wait.missing) waiting_for_[key].insert(turn);
  waits_.emplace(turn, std::move(wait));
  turns_[client] = turn;
  return false;
}

Table::Arrival Table::barrier(ClientId client, const std::string& key, std::int64_t members, Woken& woken) {
  cancel(client);
  std::int64_t count = 0;
  if (!add(key, 1, count, woken)) return Arrival::kInvalid;
  if (count >= members) {
    if (const auto found = barriers_.find(key); found != barriers_.end()) {
      const std::set<Turn> arrived = std::move(found->second);
      barriers_.erase(found);
      for (const Turn turn : arrived) finish(turn, woken);
    }
    return Arrival::kComplete;
  }
  const Turn turn = next_turn_++;
  waits_.emplace(turn, Wait{client, {}, {}, key, true});
  turns_[client] = turn;
  barriers_[key].insert(turn);
  return Arrival::kWaits;
}

void Table::cancel(ClientId client) {
  const auto found = turns_.find(client);
  if (found == turns_.end()) return;
  const Turn turn = found->second;
  turns_.erase(found);
  const auto node = waits_.extract(turn);
  const Wait& wait = node.mapped();
  for (const std::string& key : wait.missing) forget(key, turn);
  if (!wait.in_barrier) return;
  if (const auto arrived = barriers_.find(wait.barrier); arrived != barriers_.end()) {
    arrived->second.erase(turn);
    if (arrived->second.empty()) barriers_.erase(arrived);
  }
  const auto count = values_.find(wait.barrier);
  std::int64_t number = 0;
  if (count == values_.end() || !parse(count->second, number)) return;  // somebody else took the key over
  if (number <= 1) {
    values_.erase(count);
  } else {
    count->second = std::to_string(number - 1);
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

void Table::key_appeared(const std::string& key, Woken& woken) {
  const auto found = waiting_for_.find(key);
  if (found == waiting_for_.end()) return;
  const std::set<Turn> turns = std::move(found->second);
  waiting_for_.erase(found);
  for (const Turn turn : turns) {
    Wait& wait = waits_.at(turn);
    wait.missing.erase(key);
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
