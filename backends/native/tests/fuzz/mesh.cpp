// Fuzz target for what a rank makes of its connections with other machines: hellos of strangers and of ranks,
// the leaders' frames, arrivals, messages.
//
// The victim is rank 0, alone on its machine; rank 1, on another, has proved that it belongs to the group.
// The input is a list of turns (turns.hpp). Their number modulo 7:
//   0  bytes of a stranger
//   1  rank 1 connects, with these bytes in its hello instead of its own; the first two say where
//   2  bytes of rank 1 on the connection of leaders
//   3  the same on the connection of arrivals
//   4  the same on the connection of messages
//   5  the victim runs a collective: opcode, root, number of elements (1)
//   6  the victim receives a message: tag, number of bytes (2)
// No bytes in turns 0 and 2 to 4: that connection ends.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/group.hpp"
#include "memory/descriptor.hpp"
#include "security/handshake.hpp"
#include "sockets/tcp_socket.hpp"
#include "state/segment_layout.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/ranks.hpp"
#include "transport/connection_manager.hpp"

namespace collectives {
namespace {

constexpr int kRanks = 2;
constexpr Nanoseconds kBriefly = 2 * kMillisecond;
constexpr int kPatienceMs = 10'000;
constexpr int kNoIndex = 0;
constexpr int kMailOfTheHigherRank = 1;

const Machines& machines() {
  static const Machines kMachines{{0}, {1}};
  return kMachines;
}

void await(const Descriptor& socket, short events) {
  pollfd waiting{.fd = socket.get(), .events = events, .revents = 0};
  CHECK(::poll(&waiting, 1, kPatienceMs) == 1);
}

// What rank 1 says first on a connection (transport/connection_manager.hpp).
std::string hello_of(Purpose purpose, int index) {
  return Hello{.from = 1, .size = kRanks, .purpose = purpose, .index = index}.bytes();
}

class Victim {
 public:
  Victim()
      : group_(membership_between_machines(machines(), 0, segment_, make_event(), ports_), "victim's group",
               kNever, new_record()) {
    link_ = connect_as_rank(hello_of(Purpose::control, kNoIndex));
    CHECK(link_);
    CHECK(group_.connect(deadline_after(kLimit)).empty());
  }

  void turn(unsigned char number, std::string_view bytes) {
    switch (number % 7) {
      case 0:
        if (!stranger_) stranger_ = connect();
        return send(stranger_, bytes);
      case 1: {
        std::string hello = hello_of(Purpose::stream, kNoIndex);
        overwrite(hello.data(), hello.size(), bytes);
        others_.push_back(connect_as_rank(hello));
        return;
      }
      case 2:
        return send(link_, bytes);
      case 3:
        if (!arrivals_) arrivals_ = connect_as_rank(hello_of(Purpose::arrival, kNoIndex));
        return send(arrivals_, bytes);
      case 4:
        if (!mail_) mail_ = connect_as_rank(hello_of(Purpose::mail, kMailOfTheHigherRank));
        return send(mail_, bytes);
      default:
        try {
          return number % 7 == 5 ? run(bytes) : receive(bytes);
        } catch (const Error&) {  // the group is broken, and stays so
          return;
        }
    }
  }

 private:
  Descriptor connect() {
    Descriptor socket = begin_connect(ports_.endpoints[0][0], "");
    await(socket, POLLOUT);
    CHECK(connect_error(socket) == 0);
    return socket;
  }

  // Empty where the victim refused it.
  Descriptor connect_as_rank(const std::string& hello) {
    Descriptor socket = connect();
    Handshake handshake = Handshake::dial(std::string(kTestKey), hello, CipherSuite::none);
    for (;;) {
      const Handshake::Status status = handshake.step(socket.get());
      if (status == Handshake::Status::proved) return socket;
      if (status == Handshake::Status::refused) return {};
      await(socket, POLLIN);
    }
  }

  static void send(Descriptor& socket, std::string_view bytes) {
    if (bytes.empty()) return socket.reset();
    if (!socket) return;
    // What the victim no longer takes is lost.
    static_cast<void>(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  void run(std::string_view bytes) {
    const auto opcode = static_cast<Opcode>(1 + take_number(bytes, 1) % 9);
    const auto root = static_cast<int>(take_number(bytes, 1) % kRanks);
    const std::size_t count = take_number(bytes, 1);
    Request request = request_for(opcode, rooted(opcode) ? root : 0);
    std::vector<std::int32_t> data(count);
    const std::vector<std::int32_t> input(count);
    std::array<std::vector<std::int32_t>, kRanks> sent;
    std::array<std::vector<std::int32_t>, kRanks> got;
    request.data = bytes_of(data);
    request.input = reinterpret_cast<const std::byte*>(input.data());
    request.count = count;
    for (std::size_t r = 0; r < kRanks; ++r) {
      sent[r].resize(count);
      got[r].resize(count);
      request.inputs.push_back({bytes_of(sent[r]), count * sizeof(std::int32_t)});
      request.outputs.push_back({bytes_of(got[r]), count * sizeof(std::int32_t)});
    }
    group_.run(request, kBriefly, nullptr);
  }

  void receive(std::string_view bytes) {
    Envelope from{1, static_cast<std::uint32_t>(take_number(bytes, 1)), DType::uint8, 0};
    from.bytes = take_number(bytes, 2);
    std::vector<std::byte> place(from.bytes);
    CHECK(group_.receive(from, place.data(), kBriefly)->wait(kNever, nullptr));
  }

  std::shared_ptr<Segment> segment_ = std::make_shared<Segment>(
      Segment::create_private(SegmentLayout(shape_for(kRanks, true)).total_bytes()));
  Ports ports_ = listen_for(kRanks);
  Group group_;
  // Rank 1's and a stranger's, which end first.
  Descriptor link_;
  Descriptor arrivals_;
  Descriptor mail_;
  Descriptor stranger_;
  std::vector<Descriptor> others_;
};

}  // namespace
}  // namespace collectives

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::Victim victim;
  collectives::for_each_turn(
      data, size, [&](unsigned char number, std::string_view bytes) { victim.turn(number, bytes); });
  return 0;
}
