// Wire protocol of the TCP key/value store, as spoken by torch.distributed.TCPStore (libuv server, torch 2.11
// and newer). One connection carries requests of one client, in order; a reply is sent for the requests
// marked so.
//
// A u8, u32, u64 or i64 is an integer in the byte order of the machine, which is little endian on every
// machine served here. A key or value is a u64 length, then that many bytes: at most kMaxKeyBytes for a key
// and kMaxValueBytes for a value. A request is a u8 command, then the fields of the table:
//
//    command         fields                          reply
//    0 Validate      u32 kMagic                      -           first request of every connection
//    1 Set           key value                       -
//    2 CompareSet    key value(expected) value(new)  value       what the key holds afterwards
//    3 Get           key                             value       empty if the key is missing
//    4 Add           key i64                         i64         the sum
//    5 Check         u64 n, n keys                   u8          0 all there / 1 not
//    6 Wait          u64 n, n keys                   u8 0        once all are there
//    7 GetNumKeys    -                               i64
//    8 DeleteKey     key                             i64         1 removed, 0 was missing
//    9 Append        key value                       -
//   10 MultiGet      u64 n, n keys                   n values    empty for a missing key
//   11 MultiSet      u64 n, n times (key value)      -
//   12 CancelWait    -                               u8 1        ends a Wait or Barrier unanswered so far
//   13 Ping          u32                             u32         the same number
//   14 QueuePush     key value                       -
//   15 QueuePop      key                             i64 n, value if n > 0   n: length before the pop
//   16 QueueLen      key                             i64
//   17 ListKeys      -                               i64 n, n values         the keys as they are stored
//   18 Barrier       key i64 members                 u8 0        once that many have arrived
//
// Clients put "/" before every key of a user, so that the plain key "init/", on which workers count
// themselves in, cannot collide. A wait whose time is up on the client's clock sends CancelWait; if its
// answer (0) was already under way, the client reads 0 and then 1. Integers under Add and Barrier are stored
// as decimal text. A request that does not parse, passes a limit, or adds to something that is no integer
// ends the connection: the protocol has no error reply (but see kRefusalKey).
//
// Beyond torch's protocol: where there is a job secret, every connection begins with a handshake
// (security/handshake.hpp), whose hello is kHello. A client that sends a request instead gets kProofWanted,
// which a client takes for a wrong answer to its first ping, and is hung up on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace collectives::store {

inline constexpr std::uint32_t kMagic = 0x3C85F7CE;
inline constexpr std::string_view kPrefixOfUsers = "/";

enum class Command : std::uint8_t {
  kValidate = 0,
  kSet = 1,
  kCompareSet = 2,
  kGet = 3,
  kAdd = 4,
  kCheck = 5,
  kWait = 6,
  kGetNumKeys = 7,
  kDeleteKey = 8,
  kAppend = 9,
  kMultiGet = 10,
  kMultiSet = 11,
  kCancelWait = 12,
  kPing = 13,
  kQueuePush = 14,
  kQueuePop = 15,
  kQueueLen = 16,
  kListKeys = 17,
  kBarrier = 18,
};

// Beyond torch's protocol: this key, which no user key equals (they begin with "/"), is there at our server
// and at no other, as CHECK says of it alone. Nothing is stored under it, so that counts and lists of keys do
// not show it.
inline constexpr char kServerKey[] = "collectives";

inline constexpr char kHello[] = "collectives auth";
inline constexpr std::size_t kRecordsAtOnce = 1;  // where connections are encrypted
inline constexpr char kProofWanted[] = "auth";

// Followed by the four bytes of a connection's first ping, it reads as the reason for which the server ended
// that connection; empty if it did not, or has forgotten.
inline constexpr char kRefusalKey[] = "collectives/refused/";

// What a client is sent, in the place of any reply, whose connection the server cannot keep; the reason
// follows.
inline constexpr char kTurnedAway[] = "collectives: ";

// The only reason where a proof is asked for. Both together are longer than the nonce of a handshake, in
// whose place they come.
inline constexpr char kNoRoom[] = "no room for another connection";

inline constexpr std::uint8_t kAllThere = 0;      // answer of Check
inline constexpr std::uint8_t kNotAllThere = 1;   // answer of Check
inline constexpr std::uint8_t kStopWaiting = 0;   // answer of Wait and Barrier
inline constexpr std::uint8_t kWaitCanceled = 1;  // answer of CancelWait

inline constexpr std::size_t kMaxKeyBytes = 8 * 1024;
inline constexpr std::size_t kMaxValueBytes = 8 * 1024 * 1024;
inline constexpr std::size_t kMaxKeys = 128 * 1024;
// What one request may carry in all; torch has no such limit and would let one client fill the memory.
inline constexpr std::size_t kMaxRequestBytes = 256 * 1024 * 1024;

}  // namespace collectives::store
