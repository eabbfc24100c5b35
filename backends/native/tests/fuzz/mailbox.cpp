// Fuzz target for what a rank makes of the mailboxes that it shares with another process: the frames and
// bytes of a ring, and both ends' counters.
//
// The input is a list of turns (turns.hpp). Their number modulo 5:
//   0  bytes for the ring of what rank 1 sends to the victim, rank 0
//   1  a number of 8 bytes: how far rank 1 says that it has written
//   2  a number of 8 bytes: how far rank 1 says that it has read
//   3  the victim receives: tag, whether from any rank, whether at once, number of bytes (2)
//   4  the victim sends: tag, whether at once, number of bytes (4)
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/group.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

constexpr int kRanks = 2;
constexpr Nanoseconds kBriefly = kMillisecond;
constexpr std::uint64_t kMostSent = 4 << 20;  // more than a ring

class Victim {
 public:
  Victim()
      : segment_(segment_for(kRanks)),
        group_(membership_of(segment_, 0, kRanks), "victim's group", kNever, new_record()),
        other_(membership_of(segment_, 1, kRanks), "other rank") {}

  void turn(unsigned char number, std::string_view bytes) {
    switch (number % 5) {
      case 0:
        return overwrite(other_.mailbox(1, 0), other_.shape().mail_bytes, bytes);
      case 1:
        return other_.written(1, 0).store(take_number(bytes, 8));
      case 2:
        return other_.read(1, 0).store(take_number(bytes, 8));
      default:
        try {
          return number % 5 == 3 ? receive(bytes) : send(bytes);
        } catch (const Error&) {  // the group is broken, and stays so
          return;
        }
    }
  }

 private:
  void receive(std::string_view bytes) {
    Envelope from{1, static_cast<std::uint32_t>(take_number(bytes, 1)), DType::uint8, 0};
    const bool any = take_number(bytes, 1) != 0;
    const bool at_once = take_number(bytes, 1) != 0;
    from.bytes = take_number(bytes, 2);
    std::vector<std::byte> place(from.bytes);
    if (at_once && group_.receive_at_once(from, place.data())) return;
    if (any) from.peer = kAnyRank;
    CHECK(group_.receive(from, place.data(), kBriefly)->wait(kNever, nullptr));
  }

  void send(std::string_view bytes) {
    Envelope to{1, static_cast<std::uint32_t>(take_number(bytes, 1)), DType::uint8, 0};
    const bool at_once = take_number(bytes, 1) != 0;
    to.bytes = take_number(bytes, 4) % kMostSent;
    const std::vector<std::byte> data(to.bytes);
    if (at_once && group_.send_at_once(to, data.data())) return;
    CHECK(group_.send(to, data.data(), kBriefly)->wait(kNever, nullptr));
  }

  std::shared_ptr<Segment> segment_;
  Group group_;
  RankContext other_;
};

}  // namespace
}  // namespace collectives

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::Victim victim;
  collectives::for_each_turn(
      data, size, [&](unsigned char number, std::string_view bytes) { victim.turn(number, bytes); });
  return 0;
}
