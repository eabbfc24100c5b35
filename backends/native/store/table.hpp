// The data behind a store server: keys, queues, and the clients that wait for them. No sockets, no locks: one
// thread. A client has at most one wait at a time. A key is there if it holds a value or is a queue that is
// not empty. Calls append the clients whose wait they ended to `woken`; the caller tells them.
//
// A call that would break a limit of the budget, or that cannot be (a sum of a text), throws Refusal and
// changes nothing. So does std::bad_alloc, as long as `woken` has room for all clients and nobody waits for
// queues: then no wait that the call ends needs memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/budget.hpp"

namespace collectives::store {

using ClientId = std::uint64_t;
using Woken = std::vector<ClientId>;
using SharedValue = std::shared_ptr<Value>;

class Table {
 public:
  explicit Table(Budget& budget) : budget_(budget) {}

  void set(const std::string& key, std::string value, Woken& woken);
  void set_all(const std::vector<std::string>& keys, std::vector<std::string> values, Woken& woken);
  void append(const std::string& key, const std::string& value, Woken& woken);
  // Stores `desired` if the key holds `expected`, or if the key is missing and `expected` is empty. Returns
  // what the key holds then; `expected` if the key is missing.
  SharedValue compare_set(const std::string& key, std::string expected, std::string desired, Woken& woken);
  // Returns the sum.
  std::int64_t add(const std::string& key, std::int64_t amount, Woken& woken);
  SharedValue get(const std::string& key) const;  // null if missing
  bool erase(const std::string& key);
  bool check(const std::vector<std::string>& keys) const;
  std::size_t size() const { return values_.size(); }
  // Every key: u64 length, then its bytes. One object for all who send it while no key comes or goes.
  SharedValue list();

  // Wakes one waiter only: the one that has waited longest and needs nothing else.
  void push(const std::string& key, std::string value, Woken& woken);
  // Returns the length before the pop; 0 leaves `value` alone.
  std::size_t pop(ClientId client, const std::string& key, SharedValue& value);
  std::size_t length(const std::string& key) const;

  // True if there is nothing to wait for; else the client is woken later.
  bool wait(ClientId client, const std::vector<std::string>& keys);
  // About the memory that the client's wait for these keys takes.
  static std::size_t wait_bytes(const std::vector<std::string>& keys);
  // Counts the client in under the key; completes for everybody with the last of `members`, and then returns
  // true.
  bool barrier(ClientId client, const std::string& key, std::int64_t members, Woken& woken);
  // Ends the client's wait. A client that leaves a barrier before it completes is counted out again, so that
  // it may come back without releasing the others early.
  void cancel(ClientId client);
  // As cancel, for a client that is gone: if it was woken for a queue that it never popped, another is woken
  // instead.
  void drop(ClientId client, Woken& woken);
  std::size_t waiting() const { return waits_.size(); }

 private:
  using Turn = std::uint64_t;  // order in which waits began

  struct Wait {
    ClientId client;
    std::unordered_set<std::string> missing;
    std::vector<std::string> credited;  // queues that were pushed to while another key was missing
    std::string barrier;                // key counted in under; meaningful if in_barrier
    bool in_barrier = false;
  };

  SharedValue make(std::size_t key_size, std::string value, std::size_t freed) const;
  void store(const std::string& key, SharedValue value, Woken& woken);
  bool there(const std::string& key) const;
  void key_appeared(const std::string& key, Woken& woken);
  void wake_one(const std::string& queue, Woken& woken);
  bool complete(Turn turn, Wait& wait);
  void finish(Turn turn, Woken& woken);
  void forget(const std::string& key, Turn turn);
  void count_out(const std::string& key, Turn turn);

  Budget& budget_;
  std::unordered_map<std::string, SharedValue> values_;
  std::size_t list_bytes_ = 0;  // of list()
  std::weak_ptr<Value> list_;   // its last result, unless keys have changed since
  std::unordered_map<std::string, std::list<SharedValue>> queues_;  // never holds an empty queue
  std::map<Turn, Wait> waits_;
  std::unordered_map<ClientId, Turn> turns_;
  std::unordered_map<std::string, std::set<Turn>> waiting_for_;  // key -> waits that miss it
  std::unordered_map<std::string, std::set<Turn>> barriers_;     // key -> waits counted in under it
  std::unordered_map<ClientId, std::string> may_pop_;            // client -> queue that it was woken for
  Turn next_turn_ = 0;
};

}  // namespace collectives::store
