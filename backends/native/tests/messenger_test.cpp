// Point-to-point messages on one machine.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks.hpp"

namespace collectives {
namespace {

void test_messages(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    const int size = group.size();
    // Several threads of a rank exchange with all others, with tags of their own, while collectives run.
    const auto exchange = [&](std::uint32_t tag) {
      std::minstd_rand random(tag);  // the same lengths on every rank
      for (int round = 0; round < 20; ++round) {
        const std::size_t count = random() % (round % 5 == 0 ? 300'000 : 3000);
        std::vector<std::shared_ptr<Transfer>> transfers;
        std::vector<std::vector<std::int32_t>> received(static_cast<std::size_t>(size),
                                                        std::vector<std::int32_t>(count));
        auto sent = values_of(r, count, round);
        const auto envelope = [&](int peer) { return Envelope{peer, tag, DType::int32, count * 4}; };
        const bool at_once = round % 2 == 0;
        for (int p = 0; p < size; ++p) {
          if (at_once && group.send_at_once(envelope(p), bytes_of(sent))) continue;
          transfers.push_back(group.send(envelope(p), bytes_of(sent), kLimit));
        }
        for (int p = size - 1; p >= 0; --p) {
          std::byte* const data = bytes_of(received[static_cast<std::size_t>(p)]);
          if (at_once && group.receive_at_once(envelope(p), data)) continue;
          transfers.push_back(group.receive(envelope(p), data, kLimit));
        }
        for (const auto& transfer : transfers) {
          CHECK(transfer->wait(kNever, nullptr));
          CHECK(transfer->error() == nullptr);
        }
        for (int p = 0; p < size; ++p)
          CHECK(received[static_cast<std::size_t>(p)] == values_of(p, count, round));
      }
    };
    std::thread first(exchange, 1);
    std::thread second(exchange, 2);
    Rank me(group);
    for (int i = 0; i < 50; ++i) check_reductions(me, 3000, 0);
    first.join();
    second.join();
    group.shutdown(true);
  });
}

void test_messages_at_once(Groups groups) {
  Group& sender = *groups[0];
  Group& receiver = *groups[1];
  std::int32_t sent = 7;
  std::int32_t got = 0;
  std::byte* const from = reinterpret_cast<std::byte*>(&sent);
  std::byte* const to = reinterpret_cast<std::byte*>(&got);
  const Envelope there{1, 3, DType::int32, 4};
  const Envelope back{0, 3, DType::int32, 4};
  const Envelope other_tag{0, 4, DType::int32, 4};
  CHECK(!receiver.receive_at_once(back, to));  // nothing has come
  CHECK(sender.send_at_once(there, from));
  CHECK(!receiver.receive_at_once(other_tag, to));  // another message is the first
  CHECK(receiver.receive_at_once(back, to) && got == 7);
  // A receive that was posted before has the first message.
  std::int32_t first = 0;
  const auto posted = receiver.receive(back, reinterpret_cast<std::byte*>(&first), kLimit);
  sent = 8;
  CHECK(sender.send_at_once(there, from));
  sent = 9;
  CHECK(sender.send_at_once(there, from));
  got = 0;
  if (!receiver.receive_at_once(back, to)) {
    CHECK(receiver.receive(back, to, kLimit)->wait(kNever, nullptr));
  }
  CHECK(posted->wait(kNever, nullptr));
  CHECK(first == 8 && got == 9);
  // Until the ring is full; then order is kept with what waits for room.
  std::vector<std::int32_t> many(1024);
  const Envelope brief{1, 5, DType::int32, 4096};
  int left = 0;
  for (; sender.send_at_once(brief, bytes_of(many)); ++left) many[0] = left + 1;
  const auto waiting = sender.send(brief, bytes_of(many), kLimit);
  CHECK(!sender.send_at_once(brief, bytes_of(many)));
  std::vector<std::int32_t> taken(1024);
  for (int i = 0; i <= left; ++i) {
    const Envelope same{0, 5, DType::int32, 4096};
    if (!receiver.receive_at_once(same, bytes_of(taken))) {
      CHECK(receiver.receive(same, bytes_of(taken), kLimit)->wait(kNever, nullptr));
    }
    CHECK(taken[0] == i);
  }
  CHECK(waiting->wait(kNever, nullptr));
  on_all(2, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
}

void test_any_source_and_background(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    constexpr std::size_t kCount = 200'000;  // more than a ring
    const Envelope to_first{0, 5, DType::int32, kCount * 4};
    const Envelope from_any{kAnyRank, 5, DType::int32, kCount * 4};
    auto values = values_of(r, kCount);
    if (r != 0) {
      const auto task = group.send(to_first, bytes_of(values), kLimit);
      while (!task->finished()) std::this_thread::yield();  // nobody waits: the background thread drives
    } else {
      for (int i = 1; i < group.size(); ++i) {
        const auto task = group.receive(from_any, bytes_of(values), kLimit);
        CHECK(task->wait(kNever, nullptr));
        CHECK(values == values_of(task->source(), kCount));
      }
    }
    group.shutdown(true);
  });
}

class Stop final : public Interrupt {
 public:
  void blocks() override {}
  bool requested() override { return true; }
  std::string site() override { return ""; }
};

void test_interrupted_receives(Groups groups) {
  Group& sender = *groups[0];
  Group& receiver = *groups[1];
  Stop stop;
  const Envelope there{1, 3, DType::int32, 4};
  const Envelope back{0, 3, DType::int32, 4};
  const auto receive = [&](std::int32_t& value, Interrupt* caller = nullptr) {
    return receiver.receive(back, reinterpret_cast<std::byte*>(&value), kLimit, {}, caller);
  };
  const auto send = [&](std::int32_t value) {
    const auto task = sender.send(there, reinterpret_cast<std::byte*>(&value), kLimit);
    CHECK(task->wait(kNever, nullptr));
  };
  const auto got = [&] {
    std::int32_t value = 0;
    CHECK(receive(value)->wait(kNever, nullptr));
    return value;
  };
  // A blocking one takes no message.
  std::int32_t first = 0;
  CHECK(error_of([&] { receive(first, &stop); }).kind() == ErrorKind::interrupted);
  send(1);
  CHECK(got() == 1 && first == 0);
  // One whose wait is interrupted rests until somebody asks for it again.
  const auto resting = receive(first);
  CHECK(error_of([&] { resting->wait(kNever, &stop); }).kind() == ErrorKind::interrupted);
  send(2);
  CHECK(got() == 2 && first == 0 && !resting->finished());
  send(3);
  CHECK(resting->wait(kNever, nullptr) && first == 3);
  // Also where the message has come meanwhile, unless somebody has seen that.
  const auto come = receive(first);
  send(4);
  CHECK(come->wait(kNever, nullptr));
  come->rest();
  CHECK(!come->finished() && got() == 4);
  send(5);
  CHECK(come->wait(kNever, nullptr) && come->observe() && first == 5);
  come->rest();
  CHECK(come->finished());
  // One behind which others wait goes on, as they would get its message.
  std::int32_t second = 0;
  const auto early = receive(first);
  const auto late = receive(second);
  CHECK(error_of([&] { early->wait(kNever, &stop); }).kind() == ErrorKind::interrupted);
  send(6);
  send(7);
  CHECK(late->wait(kNever, nullptr) && early->finished() && first == 6 && second == 7);
  // One that nobody can ask for any more takes no message.
  receive(first)->abandon();
  send(8);
  CHECK(got() == 8 && first == 6);
  on_all(2, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
}

void test_interrupted_sends(Groups groups) {
  Group& sender = *groups[0];
  Group& receiver = *groups[1];
  Stop stop;
  constexpr std::size_t kCount = 1'000'000;  // more than a ring
  const Envelope there{1, 3, DType::int32, kCount * 4};
  const Envelope back{0, 3, DType::int32, kCount * 4};
  // One of which a part has left goes on from a copy, and one that has not begun is taken back.
  for (const int salt : {1, 2}) {
    auto values = values_of(0, kCount, salt);
    CHECK(error_of([&] { sender.send(there, bytes_of(values), kLimit, {}, &stop); }).kind() ==
          ErrorKind::interrupted);
    values.assign(kCount, -1);
  }
  // One whose wait is interrupted rests until somebody asks for it again.
  auto values = values_of(0, kCount, 3);
  const auto resting = sender.send(there, bytes_of(values), kLimit);
  CHECK(error_of([&] { resting->wait(kNever, &stop); }).kind() == ErrorKind::interrupted);
  std::vector<std::int32_t> taken(kCount);
  const auto got = [&] {
    CHECK(receiver.receive(back, bytes_of(taken), kLimit)->wait(kNever, nullptr));
    return taken;
  };
  CHECK(got() == values_of(0, kCount, 1));
  auto others = values_of(0, kCount, 4);
  const auto overtaking = sender.send(there, bytes_of(others), kLimit);
  CHECK(got() == others);
  resting->poll();
  CHECK(got() == values && resting->wait(kNever, nullptr) && overtaking->finished());
  on_all(2, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
}

std::atomic<int> let_go = 0;  // relaxed: counts

void test_owners(Groups groups) {
  Group& group = *groups[0];
  std::int32_t value = 0;
  const Envelope self{0, 3, DType::int32, 4};
  const auto receive = [&] {
    return group.receive(
        self, reinterpret_cast<std::byte*>(&value), kLimit,
        Owner(&value, [](void*) noexcept { let_go.fetch_add(1, std::memory_order_relaxed); }));
  };
  auto dropped = receive();
  dropped.reset();  // the group has it
  CHECK(let_go == 0);
  auto taken = receive();
  for (int i = 0; i < 2; ++i) {
    CHECK(group.send(self, reinterpret_cast<std::byte*>(&value), kLimit)->wait(kNever, nullptr));
  }
  CHECK(let_go == 1);
  CHECK(taken->take_owner() == &value && taken->take_owner() == nullptr);
  taken.reset();
  CHECK(let_go == 1);
  receive();
  group.shutdown(false);
  CHECK(let_go == 2);
}

}  // namespace

Tests messenger_tests() {
  return {
      {"messages, 2 ranks", [] { test_messages(shared_ranks(2)); }},
      {"messages, 3 attached ranks", [] { test_messages(attached_ranks(3)); }},
      {"messages at once", [] { test_messages_at_once(shared_ranks(2)); }},
      {"interrupted receives", [] { test_interrupted_receives(shared_ranks(2)); }},
      {"interrupted sends", [] { test_interrupted_sends(shared_ranks(2)); }},
      {"interrupted receives between machines", [] { test_interrupted_receives(machine_ranks({{0}, {1}})); }},
      {"owners", [] { test_owners(shared_ranks(1)); }},
      {"any source", [] { test_any_source_and_background(shared_ranks(3)); }},
  };
}

}  // namespace collectives
