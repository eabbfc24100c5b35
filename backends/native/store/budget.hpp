// What the server may hold for its clients, in bytes, and the error of a client that wants more.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace collectives::store {

// Ends the connection of the client whose request caused it; the client may read the text afterwards.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One number limits everything: stored keys and values, and what connections hold beyond kFreeBytes each.
class Budget {
 public:
  static constexpr std::size_t kShortBytes = 4096;

  explicit Budget(std::size_t limit) : limit_(limit) {}

  std::size_t used() const { return used_; }
  std::size_t value_limit() const { return limit_ / 16; }
  std::size_t reply_limit() const { return limit_ / 4; }

  // Throws Refusal unless `bytes` more fit once `freed` are given back. The last sixteenth is for what is
  // short, so that a client with large values does not keep the others from their counters and addresses.
  void expect(std::size_t bytes, std::size_t freed = 0) const {
    const std::size_t most = bytes <= kShortBytes ? limit_ : limit_ - limit_ / 16;
    if (used_ - freed + bytes <= most) return;
    refuse("it would make the server hold " + std::to_string(used_ - freed + bytes) + " bytes, of at most " +
           std::to_string(most) + (most == limit_ ? "" : " (the rest is for values of up to 4096 bytes)"));
  }
  void expect_value(std::size_t size) const {
    if (size > value_limit()) {
      refuse("the value would have " + std::to_string(size) + " bytes, of at most " +
             std::to_string(value_limit()) + ", a sixteenth of COLLECTIVES_STORE_BYTES");
    }
  }
  void expect_reply(std::size_t size) const {
    if (size > reply_limit()) {
      refuse("the reply would have " + std::to_string(size) + " bytes, of at most " +
             std::to_string(reply_limit()) +
             ", a quarter of COLLECTIVES_STORE_BYTES; ask for fewer keys at once");
    }
  }

 private:
  friend class Charge;

  [[noreturn]] void refuse(const std::string& why) const {
    throw Refusal(why + ". Set COLLECTIVES_STORE_BYTES higher (it is " + std::to_string(limit_) +
                  ") in the process that runs the server");
  }

  std::size_t limit_;
  std::size_t used_ = 0;
};

// Bytes of a budget that are given back with the object. Taking them never fails: expect() comes before.
class Charge {
 public:
  explicit Charge(Budget& budget, std::size_t bytes = 0) : budget_(&budget), bytes_(bytes) {
    budget_->used_ += bytes_;
  }
  ~Charge() { budget_->used_ -= bytes_; }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  std::size_t bytes() const { return bytes_; }
  void resize(std::size_t bytes) {
    budget_->used_ += bytes;
    budget_->used_ -= std::exchange(bytes_, bytes);
  }

 private:
  Budget* budget_;
  std::size_t bytes_;
};

// A value as it is stored and sent. Replies share it, so that a client that reads slowly holds no copy; while
// it is shared nobody changes it.
struct Value {
  Value(Budget& budget, std::string content, std::size_t overhead)
      : bytes(std::move(content)), charge(budget, bytes.size() + overhead) {}

  std::string bytes;
  Charge charge;
};

}  // namespace collectives::store
