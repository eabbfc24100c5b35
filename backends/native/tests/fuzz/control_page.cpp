// Fuzz target for what ranks and observers make of the words that all processes of a group share: control
// pages, split tables, the header with the failure record.
//
// The input is a list of turns (turns.hpp). Their number modulo 11:
//   0 to 2   bytes for the control page of that rank
//   3 to 5   bytes for the split tables of that rank less 3
//   6        bytes for the header
//   7        a rank (1) arrives at the collective of the next turn 8 as an honest one would, and is done with
//            it where a byte that is not 0 follows
//   8        the victim, rank 0, runs a collective: opcode, root, number of elements (2)
//   9        the victim tells what everyone waits in
//   10       a process that is no rank looks at the group
#include <fcntl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/group.hpp"
#include "state/segment_observer.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

constexpr int kRanks = 3;
constexpr Nanoseconds kBriefly = kMillisecond;
constexpr std::uint64_t kFirst = 1;

// A segment that has a descriptor, for observers.
std::shared_ptr<Segment> segment_to_observe() {
  const SegmentLayout layout(shape_for(kRanks));
  auto segment = std::make_shared<Segment>(Segment::create(layout.total_bytes()));
  auto& header = *reinterpret_cast<SegmentHeader*>(segment->data());
  header.parameters = {
      .magic = kMagic, .version = kLayoutVersion, .shape = layout.shape(), .tuning = default_tuning(kRanks)};
  return segment;
}

class Victim {
 public:
  Victim()
      : segment_(segment_to_observe()),
        group_(membership_of(segment_, 0, kRanks), "victim's group", kNever, new_record()),
        others_(membership_of(segment_, 1, kRanks), "others") {}

  void turn(unsigned char number, std::string_view bytes) {
    const unsigned kind = number % 11;
    const int rank = static_cast<int>(kind % kRanks);
    if (kind < 3) return overwrite(&others_.page(rank), sizeof(ControlPage), bytes);
    if (kind < 6) return overwrite(others_.splits(rank, 0), 4 * kRanks * sizeof(std::uint64_t), bytes);
    if (kind == 6) return overwrite(segment_->data(), sizeof(SegmentHeader), bytes);
    if (kind == 7) return arrivals_.push_back(bytes);
    try {
      if (kind == 8) run(bytes);
      if (kind == 9) static_cast<void>(group_.report());
      if (kind == 10)
        static_cast<void>(observe(Descriptor(::fcntl(segment_->file().get(), F_DUPFD_CLOEXEC, 0))));
    } catch (const Error&) {  // which is what they are for
    }
  }

 private:
  void run(std::string_view bytes) {
    const auto opcode = static_cast<Opcode>(1 + take_number(bytes, 1) % 9);
    const auto root = static_cast<int>(take_number(bytes, 1) % kRanks);
    const std::size_t count = take_number(bytes, 2);
    Request request = request_for(opcode, rooted(opcode) ? root : 0);
    std::vector<std::int32_t> data(count);
    std::array<std::vector<std::int32_t>, kRanks> sent;
    std::array<std::vector<std::int32_t>, kRanks> got;
    const std::vector<std::int32_t> input(count);
    request.data = bytes_of(data);
    request.input = reinterpret_cast<const std::byte*>(input.data());
    request.count = count;
    for (std::size_t r = 0; r < kRanks; ++r) {
      sent[r].resize(count);
      got[r].resize(count);
      request.inputs.push_back({bytes_of(sent[r]), count * sizeof(std::int32_t)});
      request.outputs.push_back({bytes_of(got[r]), count * sizeof(std::int32_t)});
    }
    for (std::string_view arrival : arrivals_) arrive(arrival, request);
    arrivals_.clear();
    group_.run(request, kBriefly, nullptr);
  }

  void arrive(std::string_view bytes, const Request& request) {
    const auto rank = static_cast<int>(take_number(bytes, 1) % kRanks);
    Arrival& arrival = others_.arrival(rank, kFirst);
    arrival.what = fingerprint_of(request);
    arrival.sequence.store(kFirst);
    if (take_number(bytes, 1) == 0) return;
    Progress& progress = others_.page(rank).progress;
    for (auto* word : {&progress.filled, &progress.reduced, &progress.drained}) word->store(kNever);
  }

  std::shared_ptr<Segment> segment_;
  Group group_;
  RankContext others_;
  std::vector<std::string_view> arrivals_;  // of the next collective
};

}  // namespace
}  // namespace collectives

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::Victim victim;
  collectives::for_each_turn(
      data, size, [&](unsigned char number, std::string_view bytes) { victim.turn(number, bytes); });
  return 0;
}
