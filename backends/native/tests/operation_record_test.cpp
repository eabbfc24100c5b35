// The record of a group's last operations: the ring by itself, and what groups write into it.
#include "engine/operation_record.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks.hpp"

namespace collectives {
namespace {

// All fields follow from the number, so that a reader can tell whether an entry is whole.
BegunOperation operation_of(std::uint64_t number) {
  return {.kind = static_cast<std::uint8_t>(Opcode::reduce),
          .dtype = DType::float32,
          .reduction = ReduceOp::max,
          .tensors = static_cast<std::uint32_t>(number),
          .peer = static_cast<std::int32_t>(number % 1000),
          .tag = static_cast<std::uint32_t>(number),
          .number = number,
          .count = number,
          .bytes = 4 * number,
          .timeout = static_cast<Nanoseconds>(5 * number),
          .began = static_cast<Nanoseconds>(10 * number)};
}

bool whole(const RecordedOperation& one) {
  const std::uint64_t number = one.number;
  const auto time = static_cast<Nanoseconds>(number);
  const bool ended_well = one.error.empty() || one.error == "error " + std::to_string(number);
  return one.kind == static_cast<std::uint8_t>(Opcode::reduce) && one.reduction == ReduceOp::max &&
         one.tensors == static_cast<std::uint32_t>(number) &&
         one.peer == static_cast<std::int32_t>(number % 1000) &&
         one.tag == static_cast<std::uint32_t>(number) && one.count == number && one.bytes == 4 * number &&
         one.timeout == 5 * time && one.began == 10 * time &&
         (one.ended == 0 || one.ended == 10 * time + 1) && ended_well &&
         (one.site.empty() || one.site == "site " + std::to_string(number) + " of the whole test");
}

void write(OperationRing& ring, std::uint64_t number) {
  const RecordTicket ticket = ring.begin(operation_of(number));
  if (number % 2 == 0) ring.note_site(ticket, "site " + std::to_string(number) + " of the whole test");
  const auto now = static_cast<Nanoseconds>(10 * number + 1);
  if (number % 5 == 0) {
    ring.fail(ticket, now, "error " + std::to_string(number));
  } else {
    ring.end(ticket, now);
  }
}

void test_wrap_around() {
  OperationRing ring(4);
  for (std::uint64_t number = 1; number <= 6; ++number) write(ring, number);
  const RecordTicket pending = ring.begin(operation_of(7));
  const std::vector<RecordedOperation> kept = ring.operations();
  CHECK(kept.size() == 4 && ring.begun() == 7);
  for (std::size_t i = 0; i < kept.size(); ++i) CHECK(kept[i].number == 4 + i && whole(kept[i]));
  CHECK(kept[0].site == "site 4 of the whole test" && kept[1].error == "error 5" && kept[3].ended == 0);
  CHECK(detail_of(kept[0]) == "MAX, root 4");
  // One that outlasts its entry changes no other's, and counts.
  for (std::uint64_t number = 8; number <= 11; ++number) write(ring, number);
  ring.fail(pending, 71, "too late");
  for (const RecordedOperation& one : ring.operations()) CHECK(whole(one) && one.number > 7);
  const OperationRing::Totals totals = ring.totals()[static_cast<std::size_t>(Opcode::reduce)];
  CHECK(totals.count == 11 && totals.bytes == 4 * 66 && totals.errors == 3 && totals.time == 11);
  CHECK(ring.first_error() == "error 5");
}

void test_nothing_kept() {
  OperationRing ring(0);
  write(ring, 5);
  CHECK(ring.operations().empty() && ring.begun() == 1 && ring.first_error() == "error 5");
  CHECK(ring.totals()[static_cast<std::size_t>(Opcode::reduce)].errors == 1);
}

void test_long_sites() {
  OperationRing ring(1);
  ring.note_site(ring.begin(operation_of(1)), std::string(200, 'x'));
  CHECK(ring.operations()[0].site == std::string(56, 'x'));
  ring.begin(operation_of(2));
  CHECK(ring.operations()[0].site.empty());
}

void test_reader_beside_a_writer() {
  OperationRing ring(3);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::uint64_t number = 1; number <= 20'000; ++number) write(ring, number);
    done.store(true, std::memory_order_release);
  });
  bool last = false;
  while (!last) {
    last = done.load(std::memory_order_acquire);
    std::uint64_t before = 0;
    for (const RecordedOperation& one : ring.operations()) {
      const bool lost = one.error == "what failed is not known any more";  // overwritten while it was read
      CHECK(lost || whole(one));
      CHECK(one.number > before);
      before = one.number;
    }
  }
  writer.join();
  CHECK(ring.operations().size() == 3);
}

void test_operations_of_a_group() {
  const auto record = new_record();
  const auto segment = segment_for(2);
  Groups groups;
  groups.push_back(std::make_unique<Group>(membership_of(segment, 0, 2), "first", kLimit, record));
  groups.push_back(std::make_unique<Group>(membership_of(segment, 1, 2), "second", kLimit, new_record()));
  std::vector<std::int32_t> sent(3, 7);
  const std::string site = "train.py:88 in step";
  on_all(2, [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    std::vector<std::int32_t> values(3, r);
    Request request = request_for(Opcode::all_reduce);
    request.data = bytes_of(values);
    request.count = values.size();
    const auto task = group.enqueue(request, kLimit, {}, std::make_shared<const std::string>(site));
    CHECK(task->wait(kNever, nullptr));
    if (r == 0) {
      CHECK(group.send({1, 4, DType::int32, 12}, bytes_of(sent), kLimit)->wait(kNever, nullptr));
      if (!group.send_at_once({1, 5, DType::int32, 12}, bytes_of(sent)))
        CHECK(group.send({1, 5, DType::int32, 12}, bytes_of(sent), kLimit)->wait(kNever, nullptr));
    } else {
      CHECK(group.receive({0, 4, DType::int32, 12}, bytes_of(values), kLimit)->wait(kNever, nullptr));
      CHECK(group.receive({0, 5, DType::int32, 12}, bytes_of(values), kLimit)->wait(kNever, nullptr));
    }
  });
  std::vector<std::int32_t> never(1);
  const auto receive = groups[0]->receive({kAnyRank, 6, DType::int32, 4}, bytes_of(never), kMillisecond);
  CHECK(receive->wait(kNever, nullptr));
  const auto collectives = record->collectives.operations();
  CHECK(collectives.size() == 1);
  CHECK(collectives[0].number == 1 && collectives[0].bytes == 12 && collectives[0].count == 3);
  CHECK(collectives[0].site == site && detail_of(collectives[0]) == "SUM");
  CHECK(collectives[0].began <= collectives[0].ended && collectives[0].error.empty());
  const auto messages = record->messages.operations();
  CHECK(messages.size() == 3);
  CHECK(detail_of(messages[0]) == "to rank 1, tag 4" && messages[0].number == 1 && messages[0].ended != 0);
  CHECK(detail_of(messages[1]) == "to rank 1, tag 5" && messages[1].number == 2);
  CHECK(detail_of(messages[2]) == "from any rank, tag 6");
  CHECK(messages[2].error.find("CollectiveTimeoutError: [rank 0] first") == 0);
  CHECK(record->messages.first_error() == messages[2].error);
  on_all(2, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
}

}  // namespace

Tests operation_record_tests() {
  return {
      {"record: wrap-around", test_wrap_around},
      {"record: nothing kept", test_nothing_kept},
      {"record: long sites", test_long_sites},
      {"record: reader beside a writer", test_reader_beside_a_writer},
      {"record: operations of a group", test_operations_of_a_group},
  };
}

}  // namespace collectives
