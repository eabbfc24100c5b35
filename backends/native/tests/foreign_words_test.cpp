// Words in shared memory that no rank of the group wrote: another process of the same user may overwrite any
// of them at any time. Each test has one rank, the victim, and writes what the others share itself.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/request.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

constexpr std::uint64_t kFarAway = std::uint64_t{1} << 40;
constexpr Nanoseconds kBriefly = 200 * kMillisecond;

// One rank as a group, and another rank's view of the segment to write to.
class Victim {
 public:
  Victim(int rank, int size)
      : segment_(segment_for(size)),
        group_(membership_of(segment_, rank, size), "victim's group", kNever, new_record()),
        others_(membership_of(segment_, (rank + 1) % size, size), "others") {}

  Group& group() { return group_; }
  RankContext& others() { return others_; }
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(segment_->data()); }

  // Lets a rank arrive at the victim's first collective.
  void arrive(int rank, const Request& request) {
    constexpr std::uint64_t kFirst = 1;
    others_.arrival(rank, kFirst).what = fingerprint_of(request);
    others_.arrival(rank, kFirst).sequence.store(kFirst);
  }
  // And be done with everything it was to do, as far as the words tell.
  void finish_chunks(int rank) {
    Progress& progress = others_.page(rank).progress;
    for (auto* word : {&progress.filled, &progress.reduced, &progress.drained}) word->store(kNever);
  }
  Error error_of_collective(const Request& request) {
    return error_of([&] { group_.run(request, kLimit, nullptr); });
  }

 private:
  std::shared_ptr<Segment> segment_;
  Group group_;
  RankContext others_;
};

Error error_of_task(Task& task) {
  CHECK(task.wait(kNever, nullptr));
  CHECK(task.error() != nullptr);
  return *task.error();
}

// The error says whose word it was, what it says, and what went wrong with the group.
void check_blames(const Error& error, int rank, const std::string& value) {
  CHECK(error.kind() == ErrorKind::aborted);
  CHECK(error.rank() == rank);
  CHECK(error.message().find("of rank " + std::to_string(rank)) != std::string::npos);
  CHECK(error.message().find(value) != std::string::npos);
}

// ---- messages

void test_bytes_that_never_came(int size) {
  std::byte data[4] = {};
  const Envelope from{1, 0, DType::uint8, sizeof(data)};
  Victim waits(0, size);
  waits.others().written(1, 0).store(kFarAway);
  check_blames(error_of_task(*waits.group().receive(from, data, kLimit)), 1, std::to_string(kFarAway));
  Victim looks(0, size);
  looks.others().written(1, 0).store(kFarAway);
  check_blames(error_of([&] { looks.group().receive_at_once(from, data); }), 1, std::to_string(kFarAway));
  CHECK(std::all_of(std::begin(data), std::end(data), [](std::byte each) { return each == std::byte{}; }));
}

void test_bytes_read_before_they_came(int size) {
  const std::byte data[4] = {};
  const Envelope to{1, 0, DType::uint8, sizeof(data)};
  Victim victim(0, size);
  victim.others().read(1, 0).store(kFarAway);
  CHECK(!victim.group().send_at_once(to, data));
  check_blames(error_of([&] { victim.group().send(to, data, kLimit); }), 1, std::to_string(kFarAway));
}

// Fewer bytes are free than a frame has, which no rank leaves: nothing is written past the ring.
void test_room_for_less_than_a_frame() {
  constexpr int kRanks = 66;  // so many that a ring is shorter than what is written at a time
  Victim victim(0, kRanks);
  RankContext& others = victim.others();
  const std::size_t ring = others.shape().mail_bytes;
  const std::vector<std::byte> data(4 * ring, std::byte{1});
  const auto to = [](std::size_t bytes) { return Envelope{1, 0, DType::uint8, bytes}; };
  const auto first = victim.group().send(to(ring - 16), data.data(), kLimit);
  CHECK(first->wait(kNever, nullptr) && first->error() == nullptr);
  CHECK(others.written(0, 1).load() == ring);
  const auto second = victim.group().send(to(data.size()), data.data(), kBriefly);
  others.read(1, 0).store(5);
  others.ring_mail(0);
  CHECK(error_of_task(*second).kind() == ErrorKind::timeout);
  CHECK(others.mailbox(0, 2)[0] == std::byte{});
}

// A ring that is shorter than what is copied at a time, with an honest peer.
void test_short_rings() {
  constexpr int kRanks = 66;
  const std::shared_ptr<Segment> segment = segment_for(kRanks);
  Group sender(membership_of(segment, 0, kRanks), "sender", kNever, new_record());
  Group receiver(membership_of(segment, 1, kRanks), "receiver", kNever, new_record());
  std::vector<std::int32_t> sent = values_of(0, 300'000);
  std::vector<std::int32_t> got(sent.size());
  const auto leaving = sender.send({1, 0, DType::int32, sent.size() * 4}, bytes_of(sent), kLimit);
  const auto coming = receiver.receive({0, 0, DType::int32, got.size() * 4}, bytes_of(got), kLimit);
  CHECK(coming->wait(kNever, nullptr) && coming->error() == nullptr);
  CHECK(leaving->wait(kNever, nullptr) && leaving->error() == nullptr);
  CHECK(got == sent);
}

// A frame that names no data type breaks the group: its sender speaks another version.
void test_frame_of_no_dtype() {
  Victim victim(1, 2);
  constexpr std::size_t kDTypeAt = 12;
  constexpr std::byte kUnknown{kDTypeCount};
  std::memcpy(victim.others().mailbox(0, 1) + kDTypeAt, &kUnknown, 1);
  victim.others().written(0, 1).store(16);
  std::byte data{};
  const Error error = error_of_task(*victim.group().receive({0, 0, DType::uint8, 1}, &data, kLimit));
  CHECK(error.kind() == ErrorKind::aborted);
  CHECK(error.rank() == 0);  // whose it is, not who found it
  CHECK(error.message().find("rank 0 sent rank 1") != std::string::npos);
  CHECK(error.message().find("unknown data type 46") != std::string::npos);
}

// Messages that nobody asked for come as fast as they are taken: time limits hold all the same.
void test_flood_of_messages() {
  Victim victim(0, 2);
  RankContext& others = victim.others();
  struct {
    std::uint64_t bytes = 0;
    std::uint32_t tag = 9;
    std::uint32_t dtype = 0;
  } frame;
  std::atomic<bool> stop{false};
  std::thread sender([&] {
    const std::size_t ring = others.shape().mail_bytes;
    for (std::uint64_t position = 0; !stop.load(); position += sizeof(frame)) {
      while (position + sizeof(frame) - others.read(0, 1).load() > ring && !stop.load()) relax_processor();
      std::memcpy(others.mailbox(1, 0) + position % ring, &frame, sizeof(frame));
      others.written(1, 0).store(position + sizeof(frame));
    }
  });
  std::byte data{};
  const auto transfer = victim.group().receive({1, 0, DType::uint8, 1}, &data, kBriefly);
  CHECK(error_of_task(*transfer).kind() == ErrorKind::timeout);
  stop.store(true);
  sender.join();
}

// ---- collectives

Request four_bytes_to_each(std::vector<std::int32_t>& sent, std::vector<std::int32_t>& got) {
  Request request = request_for(Opcode::all_to_all);
  for (std::size_t r = 0; r < sent.size(); ++r) {
    request.inputs.push_back({bytes_of(sent) + 4 * r, 4});
    request.outputs.push_back({bytes_of(got) + 4 * r, 4});
  }
  return request;
}

// Tables in which each rank sends four bytes to each, but for what rank 0 sends to itself and to rank 2.
void write_splits(Victim& victim, const Request& request, std::uint64_t to_itself, std::uint64_t to_last) {
  for (const int r : {0, 2}) {
    std::uint64_t* splits = victim.others().splits(r, 1);
    std::fill_n(splits, 6, 4);
    if (r == 0) splits[0] = splits[3] = to_itself;
    if (r == 0) splits[2] = to_last;
    if (r == 2) splits[3] = to_last;
    victim.arrive(r, request);
    victim.finish_chunks(r);
  }
}

// Sizes whose sum wraps to a small one, so that a rank seems to stage what it sends.
void test_splits_that_wrap() {
  Victim victim(1, 3);
  std::vector<std::int32_t> sent(3, 7);
  std::vector<std::int32_t> got(3, -1);
  const Request request = four_bytes_to_each(sent, got);
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  write_splits(victim, request, kHalf, kHalf);
  check_blames(victim.error_of_collective(request), 0, std::to_string(kHalf));
  CHECK(got == std::vector<std::int32_t>(3, -1));
}

// Sizes of others decide how many chunks there are, and must not keep this rank busy.
void test_splits_of_many_chunks() {
  std::vector<std::int32_t> sent(3, 7);
  std::vector<std::int32_t> got(3, -1);
  const Request request = four_bytes_to_each(sent, got);
  Victim victim(1, 3);
  write_splits(victim, request, 4, kFarAway << 10);
  CHECK(victim.error_of_collective(request).kind() == ErrorKind::backend);
  CHECK(got == std::vector<std::int32_t>(3, -1));
  Victim another(1, 3);
  write_splits(another, request, 4, std::uint64_t{1} << 30);
  another.group().run(request, kLimit, nullptr);
  CHECK(got[1] == 7);
}

void test_arrival_of_no_operation() {
  Victim victim(0, 2);
  Arrival& arrival = victim.others().arrival(1, 1);
  arrival.what = {
      .opcode = 99, .reduction = 77, .dtype = 200, .root = 1U << 31, .count = kFarAway, .check = 1};
  arrival.sequence.store(1);
  const Error error = victim.error_of_collective(request_for(Opcode::barrier));
  CHECK(error.kind() == ErrorKind::mismatch);
  CHECK(error.message().find("rank 1: unknown(?, 0 elements)") != std::string::npos);
}

// A leader sends what the others of its machine staged to the other machines.
void test_staged_bytes_that_do_not_fit() {
  std::vector<std::shared_ptr<Segment>> segments;
  Groups groups = machine_ranks({{0, 1}, {2}}, true, &segments);
  const SegmentLayout layout(shape_for(3, true));
  auto& page = *reinterpret_cast<ControlPage*>(segments[0]->data() + layout.rank_offset(1));
  page.machine_arrival.staged[1] = kFarAway + 5000;
  page.arrivals[1].what = fingerprint_of(request_for(Opcode::barrier));
  page.arrivals[1].sequence.store(1);
  on_all(2, [&](int thread) {
    Group& group = *groups[thread == 0 ? 0 : 2];
    check_blames(error_of([&] { group.run(request_for(Opcode::barrier), kLimit, nullptr); }), 1,
                 std::to_string(kFarAway + 5000));
    group.shutdown(false);
  });
}

// ---- the failure record

void test_failure_record_without_an_end() {
  Victim victim(0, 2);
  FailureRecord& record = victim.header().failure;
  auto* const begin = reinterpret_cast<std::byte*>(record.text);
  std::memset(begin, 'x',
              kPage - static_cast<std::size_t>(begin - reinterpret_cast<std::byte*>(&victim.header())));
  record.details.rank = 123'456;
  record.details.missing_count = 77'777;
  record.details.kind = static_cast<std::uint32_t>(ErrorKind::peer_lost);
  record.state.store(FailureRecord::kFailureComplete);
  const Error error = victim.error_of_collective(request_for(Opcode::barrier));
  CHECK(error.rank() == -1);
  CHECK(error.message().size() < kFailureText + 200);
}

// ---- everything at once

// Random words all over what ranks share. Each operation ends, well or not, and a sanitizer finds nothing.
class Noise {
 public:
  explicit Noise(unsigned seed) : random_(seed) {}

  bool one_in(unsigned n) { return random_() % n == 0; }
  std::size_t below(std::size_t end) { return random_() % end; }
  std::uint64_t word() {
    const std::uint64_t any = (std::uint64_t{random_()} << 40) ^ (std::uint64_t{random_()} << 20) ^ random_();
    const std::uint64_t words[] = {0, 1, 16, 4096, any & 0xffff, any & 0xffffffff, any, ~std::uint64_t{0}};
    return words[below(std::size(words))];
  }
  // Some words of a part of the segment.
  void spread(void* begin, std::size_t bytes, unsigned one_in_so_many) {
    auto* const at = static_cast<std::byte*>(begin);
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
      if (!one_in(one_in_so_many)) continue;
      const std::uint64_t value = word();
      std::memcpy(at + i, &value, sizeof(value));
    }
  }

 private:
  std::minstd_rand random_;
};

// A frame of a length that the test has memory for, in a stream that may have begun long ago.
void write_noisy_mailbox(Noise& noise, RankContext& others, int sender) {
  std::byte* const mailbox = others.mailbox(sender, 0);
  noise.spread(mailbox, 256, 2);
  for (std::size_t at = 0; at < 256; at += 16) {
    const std::uint64_t bytes = noise.below(4) == 0 ? noise.below(1 << 16) : noise.below(64);
    std::memcpy(mailbox + at, &bytes, sizeof(bytes));
  }
  others.written(sender, 0).store(noise.one_in(3) ? noise.word() : noise.below(1 << 12) * 16);
  if (noise.one_in(3)) others.read(sender, 0).store(noise.word());
}

void run_noisy_round(unsigned seed) {
  constexpr int kRanks = 3;
  constexpr std::size_t kCounts[] = {1, 20, 1000, 20'000, 100'000};
  Noise noise(seed);
  Victim victim(0, kRanks);
  RankContext& others = victim.others();
  const std::size_t count = kCounts[noise.below(std::size(kCounts))];
  const auto opcode = static_cast<Opcode>(1 + noise.below(9));
  const auto root = static_cast<int>(noise.below(kRanks));
  Request request = request_for(opcode, rooted(opcode) ? root : 0);
  std::vector<std::int32_t> data(count);
  const std::vector<std::int32_t> input(count);
  std::vector<std::vector<std::int32_t>> sent(kRanks, data);
  std::vector<std::vector<std::int32_t>> got(kRanks, data);
  request.data = bytes_of(data);
  request.input = reinterpret_cast<const std::byte*>(input.data());
  request.count = count;
  for (auto& each : sent) request.inputs.push_back({bytes_of(each), count * 4});
  for (auto& each : got) request.outputs.push_back({bytes_of(each), count * 4});

  for (int r = 0; r < kRanks; ++r) {
    noise.spread(&others.page(r), sizeof(ControlPage), 3);
    noise.spread(others.splits(r, 0), 4 * kRanks * sizeof(std::uint64_t), 4);
    if (noise.one_in(2)) std::fill_n(others.splits(r, 1), 2 * kRanks, count * 4);
    if (noise.one_in(2)) victim.finish_chunks(r);
    if (r == 0) continue;
    if (!noise.one_in(4)) victim.arrive(r, request);
    write_noisy_mailbox(noise, others, r);
  }
  if (noise.one_in(20)) noise.spread(&victim.header().failure, sizeof(FailureRecord), 2);

  constexpr Nanoseconds kLimitOfRound = 10 * kMillisecond;
  int errors = 0;  // which ones depends on the noise
  const auto attempt = [&](const auto& operation) {
    try {
      operation();
    } catch (const Error&) {
      ++errors;
    }
  };
  attempt([&] { victim.group().run(request, kLimitOfRound, nullptr); });
  std::vector<std::byte> place(noise.below(64));
  const Envelope envelope{1, 0, DType::uint8, place.size()};
  attempt([&] { victim.group().receive_at_once(envelope, place.data()); });
  attempt([&] {
    const auto coming = victim.group().receive(envelope, place.data(), kLimitOfRound);
    const auto leaving = victim.group().send(envelope, place.data(), kLimitOfRound);
    CHECK(coming->wait(kNever, nullptr) && leaving->wait(kNever, nullptr));
  });
  attempt([&] { victim.group().report(); });
}

void test_noise() {
  for (unsigned seed = 1; seed <= 200; ++seed) run_noisy_round(seed);
}

}  // namespace

Tests foreign_words_tests() {
  return {
      {"bytes that never came", [] { test_bytes_that_never_came(2); }},
      {"bytes that never came, 66 ranks", [] { test_bytes_that_never_came(66); }},
      {"bytes read before they came", [] { test_bytes_read_before_they_came(2); }},
      {"room for less than a frame", [] { test_room_for_less_than_a_frame(); }},
      {"rings shorter than a stride", [] { test_short_rings(); }},
      {"frame of no data type", [] { test_frame_of_no_dtype(); }},
      {"flood of messages", [] { test_flood_of_messages(); }},
      {"splits that wrap", [] { test_splits_that_wrap(); }},
      {"splits of many chunks", [] { test_splits_of_many_chunks(); }},
      {"arrival of no operation", [] { test_arrival_of_no_operation(); }},
      {"staged bytes that do not fit", [] { test_staged_bytes_that_do_not_fit(); }},
      {"failure record without an end", [] { test_failure_record_without_an_end(); }},
      {"noise", [] { test_noise(); }},
  };
}

}  // namespace collectives
