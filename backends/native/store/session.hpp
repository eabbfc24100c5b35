// One client's side of the store: its bytes come in, requests are carried out, replies go out in pieces. No
// sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/budget.hpp"
#include "store/decoder.hpp"
#include "store/table.hpp"

namespace collectives::store {

// Why connections were ended, by their names. The protocol has no error reply; a client of ours asks on
// another connection (kRefusalKey).
class Refusals {
 public:
  void add(std::uint32_t name, std::string why);
  std::string of(std::uint32_t name) const;  // empty if unknown

 private:
  std::deque<std::pair<std::uint32_t, std::string>> latest_;
};

class Session {
 public:
  static constexpr int kRequestsPerTurn = 128;
  static constexpr std::size_t kInputBytes = 64 * 1024;  // taken at a time

  Session(ClientId client, Budget& budget, Table& table, const Refusals& refusals)
      : client_(client), budget_(budget), table_(table), refusals_(refusals), held_(budget) {}

  // How many bytes feed() may be given now: none while requests or replies wait, few before the greeting.
  std::size_t room() const;
  // May throw Refusal, as work() does; then the connection is to be closed after what is in output().
  void feed(std::string_view bytes);
  // Carries out requests until output() is full, but at most kRequestsPerTurn: others come in between.
  void work(Woken& woken);
  // Something is left that work() could do once output() has been sent.
  bool busy() const { return !starved_ || replying(); }
  // The client's wait is over.
  void wake();

  std::string_view output() const { return std::string_view(output_).substr(sent_); }
  void sent(std::size_t size);

  bool validated() const { return validated_; }  // the first request was a good greeting
  std::uint32_t name() const { return name_; }   // number of the first ping, else 0

 private:
  void execute(Request& request, Woken& woken);
  SharedValue get(const std::string& key) const;
  void multi_get(const std::vector<std::string>& keys);
  bool replying() const { return next_part_ < parts_.size(); }
  void fill();
  void hold();

  ClientId client_;
  Budget& budget_;
  Table& table_;
  const Refusals& refusals_;
  Decoder decoder_;
  bool starved_ = true;  // decoder_ has no whole request
  bool validated_ = false;
  std::uint32_t name_ = 0;

  std::string output_;              // the next piece of the replies
  std::size_t sent_ = 0;            // bytes of output_ that have left
  std::vector<SharedValue> parts_;  // of the reply under way; null stands for an empty value
  std::size_t next_part_ = 0;
  std::size_t part_done_ = 0;   // bytes of it, with its length, that have been in output_
  bool bare_ = false;           // the parts carry their lengths themselves
  bool woken_ = false;          // its wait is over, to be told after the reply
  std::size_t wait_bytes_ = 0;  // held by the table for its wait
  Charge held_;                 // all of that beyond what is free
};

}  // namespace collectives::store
