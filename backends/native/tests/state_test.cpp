// What ranks publish in shared memory, and how they notice that others are gone.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <semaphore>
#include <string>
#include <system_error>
#include <thread>

#include "state/bootstrap.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

// Those who wait leave a core that they share with the rank they wait for, if they know that they share it.
void test_core_of_a_rank_that_never_waits() {
  const std::shared_ptr<Segment> segment = segment_for(2);
  const Groups groups = ranks_sharing(segment, 2);
  const SegmentLayout layout(shape_for(2));
  const auto page = [&](int r) -> ControlPage& {
    return *reinterpret_cast<ControlPage*>(segment->data() + layout.rank_offset(r));
  };
  std::thread first([&] { Rank(*groups[0]).run(request_for(Opcode::barrier)); });
  while (page(0).arrivals[1].sequence.load(std::memory_order_acquire) == 0) std::this_thread::yield();
  Rank(*groups[1]).run(request_for(Opcode::barrier));  // finds that the other has come
  first.join();
  CHECK(page(0).status.core.load() != 0);
  CHECK(page(1).status.core.load() != 0);
  page(0).status.core.store(0);
  page(1).status.core.store(0);
  const Envelope to{1, 0, DType::uint8, 1};
  const std::byte letter{};
  CHECK(groups[0]->send_at_once(to, &letter));  // and a sender waits for nobody
  CHECK(page(0).status.core.load() != 0);
  std::byte come{};
  const Envelope from{0, 0, DType::uint8, 1};
  CHECK(groups[1]->receive_at_once(from, &come));
  CHECK(page(1).status.core.load() != 0);
}

// Who forwards what others send waits for nobody in particular, and all may come while the limit passes.
void test_limit_that_passes_when_all_have_come() {
  const std::shared_ptr<Segment> segment = segment_for(2);
  const RankContext first(membership_of(segment, 0, 2), "group");
  const RankContext second(membership_of(segment, 1, 2), "group");
  const SegmentLayout layout(shape_for(2));
  for (int r = 0; r < 2; ++r) {
    reinterpret_cast<ControlPage*>(segment->data() + layout.rank_offset(r))->arrivals[0].sequence.store(1);
  }
  Call call;
  call.sequence = 1;
  call.deadline = now_ns();
  const Error error = error_of([&] { first.check_liveness(call, -1); });
  CHECK(error.kind() == ErrorKind::timeout && error.rank() == -1);
  CHECK(error.details().missing.empty());
  CHECK(error.message().find("waited for others") != std::string::npos);
}

// A machine holds a mirror of every remote rank: nothing in it is for each of the others but the splits.
void test_mirrors_end_before_mail_counters() {
  const SegmentLayout layout(shape_for(128, true));
  const std::size_t end = layout.rank_offset(1) + layout.mirror_bytes();
  CHECK(layout.splits_offset(1) + 4 * 128 * sizeof(std::uint64_t) <= end);
  CHECK(layout.slot_offset(1) + 2 * layout.shape().slot_bytes <= end);
  CHECK(layout.written_offset(1, 0) >= end && layout.read_offset(1, 0) >= end);
  CHECK(layout.buffer_offset(1) >= end);
}

// A writer that dies between the two stores of a failure record leaves nobody spinning.
void test_failure_record_that_stays_incomplete(bool writer_dies) {
  const std::shared_ptr<Segment> segment = segment_for(2);
  const Groups groups = ranks_sharing(segment, 2);
  if (writer_dies) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    CHECK(::waitpid(child, nullptr, 0) == child);
    const SegmentLayout layout(shape_for(2));
    auto& page = *reinterpret_cast<ControlPage*>(segment->data() + layout.rank_offset(1));
    page.status.process.store(child);
  }
  auto& record = reinterpret_cast<SegmentHeader*>(segment->data())->failure;
  record.state.store(FailureRecord::kFirstWriter + 1);
  const Nanoseconds begin = now_ns();
  const Error error = error_of([&] { groups[0]->run(request_for(Opcode::barrier), kLimit, nullptr); });
  CHECK(error.kind() == (writer_dies ? ErrorKind::peer_lost : ErrorKind::aborted) && error.rank() == 1);
  CHECK(now_ns() - begin < 20 * kSecond);
  // One that only was slow is waited for.
  std::thread slow([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    record.details.kind = static_cast<std::uint32_t>(ErrorKind::timeout);
    record.state.store(FailureRecord::kFailureComplete);
  });
  if (!writer_dies) {
    CHECK(error_of([&] { groups[0]->run(request_for(Opcode::barrier), kLimit, nullptr); }).kind() ==
          ErrorKind::aborted);
  }
  slow.join();
}

// Bytes that a segment of so many bytes has pages for, of which nobody has told this process.
std::size_t allocated_of(std::size_t bytes) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat status{};
    if (target.find("memfd:collectives") != std::string::npos && ::stat(entry.path().c_str(), &status) == 0 &&
        static_cast<std::size_t>(status.st_size) == bytes) {
      return static_cast<std::size_t>(status.st_blocks) * 512;
    }
  }
  return 0;
}

// A page lies on the memory node of whoever allocates it, which is to be the rank that writes there.
void test_each_rank_allocates_what_it_writes() {
  const SegmentLayout layout(shape_for(2));
  const std::string name = "collectives-pages-" + std::to_string(::getpid());
  const Nanoseconds deadline = deadline_after(kLimit);
  BootstrapLeader leader(name, {0, 1}, 2, std::string(kTestKey));
  std::unique_ptr<RankContext> second;
  std::binary_semaphore attach{0};
  std::binary_semaphore attached{0};
  std::thread rank_1([&] {
    BootstrapFollower follower(name, 0, 1, 2, std::string(kTestKey), deadline);
    CHECK(follower.proved(deadline) && follower.answered(deadline));
    attach.acquire();
    follower.attach(deadline);
    second = std::make_unique<RankContext>(follower.await_release(deadline), "group");
    attached.release();
  });
  CHECK(leader.accept(deadline).empty());
  leader.share(false, deadline);
  const auto allocated = [&] { return allocated_of(layout.total_bytes()); };
  const std::size_t control = layout.control_bytes();
  const std::size_t buffer = layout.shape().buffer_bytes;
  CHECK(allocated() == kPage + control);  // the header, and what the leader writes
  attach.release();
  CHECK(leader.await_attached(deadline).empty());
  RankContext first(leader.release(deadline), "group");
  attached.acquire();
  rank_1.join();
  CHECK(allocated() == kPage + 2 * control);
  second->commit_buffer();
  CHECK(allocated() == kPage + 2 * control + buffer);
  first.commit_buffer();
  CHECK(allocated() == kPage + 2 * control + 2 * buffer);
  first.commit_mailbox(1);
  CHECK(allocated() == kPage + 2 * control + 2 * buffer + layout.mailbox_bytes());
}

}  // namespace

Tests state_tests() {
  return {
      {"core of a rank that never waits", [] { test_core_of_a_rank_that_never_waits(); }},
      {"limit that passes when all have come", [] { test_limit_that_passes_when_all_have_come(); }},
      {"each rank allocates what it writes", [] { test_each_rank_allocates_what_it_writes(); }},
      {"mirrors end before mail counters", [] { test_mirrors_end_before_mail_counters(); }},
      {"failure record of a dead writer", [] { test_failure_record_that_stays_incomplete(true); }},
      {"failure record of a stopped writer", [] { test_failure_record_that_stays_incomplete(false); }},
  };
}

}  // namespace collectives
