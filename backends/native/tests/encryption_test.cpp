// Encrypted connections: keys, records, and channels over sockets that take and give little at a time.
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "security/channel.hpp"
#include "security/handshake.hpp"
#include "security/key_exchange.hpp"
#include "security/libcrypto.hpp"
#include "security/records.hpp"
#include "sockets/stream.hpp"
#include "tests/refusing_libcrypto.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

constexpr std::array kSuites = {CipherSuite::aes_256_gcm, CipherSuite::chacha20_poly1305};
std::string some_secret() { return std::string(kSecretBytes, 's'); }

std::string some_bytes(std::size_t size, unsigned seed = 1) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) {
    seed = seed * 1664525 + 1013904223;
    byte = static_cast<char>(seed >> 24);
  }
  return bytes;
}

iovec part_of(std::string& bytes, std::size_t begin = 0, std::size_t size = std::string::npos) {
  return {.iov_base = bytes.data() + begin, .iov_len = std::min(size, bytes.size() - begin)};
}

void test_where_there_is_no_libcrypto() {
  const Error missing = error_of([] { load_libcrypto({}); });
  CHECK(missing.message().find("COLLECTIVES_ENCRYPTION=off") != std::string::npos);
  const std::array<const char*, 1> ours = {"libcrypto.so.of-nobody"};
  try {
    static_cast<void>(load_libcrypto(ours));  // one that is loaded under another name does, too
  } catch (const Error& error) {
    CHECK(error.message().find("libcrypto.so.3") != std::string::npos);
  }
}

// RFC 7748, 6.1, has no keys of our drawing; what counts is that both agree, and no third.
void test_key_exchange() {
  const KeyPair one;
  const KeyPair other;
  const KeyPair third;
  CHECK(one.public_key().size() == kPublicKeyBytes && one.public_key() != other.public_key());
  CHECK(one.shared_with(other.public_key()) == other.shared_with(one.public_key()));
  CHECK(one.shared_with(other.public_key()) != one.shared_with(third.public_key()));
  CHECK(one.shared_with(std::string(kPublicKeyBytes, '\0')).empty());  // a point of small order
  CHECK(one.shared_with("short").empty());
}

struct Pair {
  explicit Pair(CipherSuite suite, std::uint64_t records = RecordCipher::kRecordsOfASecret)
      : seals(RecordCipher::Role::seals, suite, some_secret(), records),
        opens(RecordCipher::Role::opens, suite, some_secret(), records) {}

  std::string seal(std::string bytes) {
    std::string record(record_bytes(bytes.size()), '\0');
    const iovec part = part_of(bytes);
    seals.seal(&part, bytes.size(), reinterpret_cast<std::byte*>(record.data()));
    return record;
  }

  // Nothing where it is not the next record.
  std::string open(const std::string& record) {
    const auto* const begin = reinterpret_cast<const std::byte*>(record.data());
    const std::size_t size = opens.length(begin);
    if (size == 0 || record.size() < record_bytes(size)) return {};
    std::string bytes(size, '\0');
    const iovec part = part_of(bytes);
    return opens.open(begin, size, &part) ? bytes : std::string();
  }

  RecordCipher seals;
  RecordCipher opens;
};

void test_records() {
  for (const CipherSuite suite : kSuites) {
    Pair pair(suite);
    std::string last;
    for (const std::size_t size : {std::size_t{1}, std::size_t{15}, std::size_t{4097}, kMostRecordBytes}) {
      const std::string bytes = some_bytes(size);
      const std::string record = pair.seal(bytes);
      CHECK(size < 15 || record.find(bytes) == std::string::npos);
      CHECK(record != last && pair.open(record) == bytes);
      last = record;
    }
    CHECK(pair.seal("the same") != pair.seal("the same"));
  }
}

void test_records_of_parts() {
  for (const CipherSuite suite : kSuites) {
    Pair pair(suite);
    std::string bytes = some_bytes(1000);
    std::string record(record_bytes(bytes.size()), '\0');
    const std::array<iovec, 4> from = {part_of(bytes, 0, 1), part_of(bytes, 1, 0), part_of(bytes, 1, 600),
                                       part_of(bytes, 601)};
    pair.seals.seal(from.data(), bytes.size(), reinterpret_cast<std::byte*>(record.data()));
    std::string got(1010, 'x');
    const std::array<iovec, 2> to = {part_of(got, 0, 333), part_of(got, 333)};
    const auto* const begin = reinterpret_cast<const std::byte*>(record.data());
    CHECK(pair.opens.length(begin) == bytes.size());
    CHECK(pair.opens.open(begin, bytes.size(), to.data()));
    CHECK(got == bytes + std::string(10, 'x'));
  }
}

// Whatever bit is changed; a length already before the bytes are there.
void test_changed_records() {
  for (const CipherSuite suite : kSuites) {
    const std::string bytes = some_bytes(20);
    for (std::size_t bit = 0; bit < 8 * record_bytes(bytes.size()); ++bit) {
      Pair pair(suite);
      std::string record = pair.seal(bytes);
      record[bit / 8] = static_cast<char>(record[bit / 8] ^ 1 << bit % 8);
      const bool in_header = bit / 8 < kRecordHeaderBytes;
      CHECK((pair.opens.length(reinterpret_cast<const std::byte*>(record.data())) == 0) == in_header);
      CHECK(pair.open(record).empty());
    }
  }
}

void test_records_out_of_place() {
  for (const CipherSuite suite : kSuites) {
    Pair repeated(suite);
    const std::string first = repeated.seal("first");
    CHECK(repeated.open(first) == "first" && repeated.open(first).empty());
    Pair reordered(suite);
    static_cast<void>(reordered.seal("first"));
    CHECK(reordered.open(reordered.seal("other")).empty());
    Pair foreign(suite);
    RecordCipher others(RecordCipher::Role::seals, suite, std::string(kSecretBytes, 'o'));
    std::string bytes = "first";
    std::string record(record_bytes(bytes.size()), '\0');
    const iovec part = part_of(bytes);
    others.seal(&part, bytes.size(), reinterpret_cast<std::byte*>(record.data()));
    CHECK(foreign.open(record).empty());
  }
}

// A secret serves for a number of records; both ends take the next one with the same record.
void test_new_secrets() {
  for (const CipherSuite suite : kSuites) {
    Pair pair(suite, 3);
    Pair lasting(suite);
    for (int i = 0; i < 10; ++i) {
      const std::string record = pair.seal("a record");
      CHECK((record == lasting.seal("a record")) == (i < 3));
      CHECK(pair.open(record) == "a record");
    }
    const std::string first = Pair(suite, 3).seal("a record");
    CHECK(pair.open(first).empty());  // its number has come again, its secret has not
  }
}

struct EncryptedConnection {
  EncryptedConnection() = default;

  Descriptor sockets[2];
  Channel here;
  Channel there;
};

// With small buffers, so that records go and come in parts.
EncryptedConnection connected(CipherSuite suite = CipherSuite::aes_256_gcm, std::size_t batch = 4) {
  std::array<int, 2> sockets{};
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets.data()) == 0);
  const int room = 4096;
  CHECK(::setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)) == 0);
  EncryptedConnection ends;
  ends.sockets[0] = Descriptor(sockets[0]);
  ends.sockets[1] = Descriptor(sockets[1]);
  const std::string back(kSecretBytes, 'b');
  ends.here = Channel(sockets[0], {.suite = suite, .outgoing = some_secret(), .incoming = back}, batch);
  ends.there = Channel(sockets[1], {.suite = suite, .outgoing = back, .incoming = some_secret()}, batch);
  return ends;
}

std::string received(Channel& channel, std::size_t room) {
  std::string bytes(room, '\0');
  const ssize_t got = channel.receive(bytes.data(), room);
  if (got < 0) CHECK(errno == EAGAIN);
  CHECK(got >= static_cast<ssize_t>(room) || !channel.holds());
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

// Any sizes on both sides, over a socket that takes little: all bytes come, once and in order.
void test_channels() {
  for (const CipherSuite suite : {CipherSuite::none, kSuites[0], kSuites[1]}) {
    for (const std::size_t room : {std::size_t{7}, std::size_t{5000}, std::size_t{200'000}}) {
      EncryptedConnection ends = connected(suite);
      CHECK(ends.here.encrypted() == (suite != CipherSuite::none));
      std::string bytes = some_bytes(room == 7 ? 5'000 : 300'000);
      std::string got;
      std::size_t sent = 0;
      std::size_t offer = 1;
      while (got.size() < bytes.size()) {
        std::array<iovec, 2> parts = {part_of(bytes, sent, offer / 2), part_of(bytes, sent + offer / 2)};
        const ssize_t size = sent == bytes.size() ? 0 : ends.here.send(parts.data(), parts.size());
        if (size < 0) CHECK(errno == EAGAIN);
        sent += static_cast<std::size_t>(std::max<ssize_t>(size, 0));
        offer = std::min(2 * offer, bytes.size() - sent);
        got += received(ends.there, room);
      }
      CHECK(got == bytes && received(ends.there, room).empty());
      CHECK(ends.here.handed_over() >= bytes.size());
      ends.here = Channel();
      ends.sockets[0].reset();
      std::byte none{};
      CHECK(ends.there.receive(&none, 1) == 0);  // as a socket that has ended
    }
  }
}

// What was encrypted before the socket took no more is not encrypted again, whatever is offered then.
void test_bytes_that_wait() {
  EncryptedConnection ends = connected();
  std::string bytes = some_bytes(3 * kMostRecordBytes);
  CHECK(ends.here.send(bytes.data(), bytes.size()) < 0 && errno == EAGAIN);
  std::string got;
  std::size_t sent = 0;
  while (got.size() < bytes.size()) {
    got += received(ends.there, 100'000);
    const ssize_t size = ends.here.send(bytes.data() + sent, std::min<std::size_t>(bytes.size() - sent, 100));
    if (size > 0) sent += static_cast<std::size_t>(size);
  }
  CHECK(got == bytes);
}

void test_pieces_of_a_record() {
  EncryptedConnection ends = connected();
  std::string bytes = some_bytes(100);
  CHECK(ends.here.send(bytes.data(), bytes.size()) == 100);
  CHECK(received(ends.there, 30) == bytes.substr(0, 30));
  CHECK(ends.there.holds());
  CHECK(received(ends.there, 200) == bytes.substr(30));
  CHECK(!ends.there.holds());
}

std::string on_the_wire(const Descriptor& socket) {
  std::string bytes(1 << 16, '\0');
  const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

// Both ends of a connection whose bytes somebody has in hand between them.
struct Tapped {
  EncryptedConnection near = connected();
  EncryptedConnection far = connected();

  std::string say(std::string_view text) {
    CHECK(near.here.send(text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    return on_the_wire(near.sockets[1]);
  }
  void pass_on(const std::string& bytes) {
    CHECK(::send(far.sockets[0].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }
  bool forged() {
    std::array<std::byte, 1000> bytes{};
    return far.there.receive(bytes.data(), bytes.size()) < 0 && errno == kForged;
  }
};

void test_tampered_channels() {
  const auto broken = [](auto&& tamper) {
    Tapped tapped;
    tapped.pass_on(tapped.say("before"));
    CHECK(received(tapped.far.there, 100) == "before");
    tamper(tapped);
    CHECK(tapped.forged());
    tapped.pass_on(tapped.say("after"));
    CHECK(tapped.forged() && tapped.far.there.holds());  // nothing else comes any more
  };
  broken([](Tapped& tapped) {
    std::string record = tapped.say("flipped");
    record.back() = static_cast<char>(record.back() ^ 1);
    tapped.pass_on(record);
  });
  broken([](Tapped& tapped) {  // a length, of which the bytes have not come
    std::string record = tapped.say("flipped");
    record[1] = static_cast<char>(record[1] ^ 1);
    tapped.pass_on(record.substr(0, kRecordHeaderBytes));
  });
  broken([](Tapped& tapped) {
    const std::string record = tapped.say("repeated");
    tapped.pass_on(record + record);
    CHECK(received(tapped.far.there, 8) == "repeated");
  });
  broken([](Tapped& tapped) {
    const std::string first = tapped.say("first");
    tapped.pass_on(tapped.say("other") + first);
  });
  broken([](Tapped& tapped) {
    const std::string record = tapped.say("truncated");
    tapped.pass_on(record.substr(0, record.size() - 1) + tapped.say("next"));
  });
  broken([](Tapped& tapped) {
    Tapped other;
    tapped.pass_on(other.say("before"));  // as if of the same place
  });
  broken([](Tapped& tapped) {  // what this end itself has said
    CHECK(tapped.far.there.send("before", 6) == 6);
    tapped.pass_on(on_the_wire(tapped.far.sockets[0]));
  });
}

// Of which the kernel tells nothing any more.
void test_forgery_behind_good_bytes() {
  Tapped tapped;
  std::string forged = tapped.say("good");
  forged += std::string(kRecordHeaderBytes, 'f');
  tapped.pass_on(forged);
  std::array<std::byte, 1000> bytes{};
  CHECK(tapped.far.there.receive(bytes.data(), bytes.size()) == 4);
  CHECK(tapped.far.there.holds());
  CHECK(tapped.forged());
}

// What was being sealed when libcrypto refused does not count as sent later, in part or in whole.
void test_failures_in_sealing() {
  EncryptedConnection ends = connected();
  std::string bytes = some_bytes(3 * kMostRecordBytes);
  {
    const RefusingLibcrypto refuses(2);
    CHECK(error_of([&] { ends.here.send(bytes.data(), bytes.size()); }).kind() == ErrorKind::backend);
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(error_of([&] { ends.here.send(bytes.data(), bytes.size()); }).kind() == ErrorKind::backend);
    CHECK(received(ends.there, 1000).empty());
  }
  CHECK(ends.there.send("back", 4) == 4 && received(ends.here, 10) == "back");
}

// The kernel tells it once, and then that the connection has ended in order.
void test_connections_that_were_reset() {
  EncryptedConnection ends = connected();
  CHECK(ends.here.send("unread", 6) == 6);
  CHECK(ends.there.send("said", 4) == 4);
  ends.sockets[1].reset();
  CHECK(received(ends.here, 100) == "said");
  for (int i = 0; i < 2; ++i) {
    std::byte byte{};
    CHECK(ends.here.receive(&byte, 1) < 0 && errno == ECONNRESET);
    CHECK(ends.here.send(&byte, 1) < 0 && errno == EPIPE);
  }
}

void test_one_wait_for_a_part_of_a_record() {
  EncryptedConnection ends = connected();
  CHECK(ends.here.send("a record", 8) == 8);
  const std::string record = on_the_wire(ends.sockets[1]);
  CHECK(::send(ends.sockets[0].get(), record.data(), 20, 0) == 20);
  const timeval limit{.tv_sec = 5, .tv_usec = 0};
  CHECK(::setsockopt(ends.sockets[1].get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
  CHECK(::fcntl(ends.sockets[1].get(), F_SETFL, 0) == 0);  // it blocks from now on
  const Nanoseconds begin = now_ns();
  std::array<std::byte, 100> bytes{};
  CHECK(ends.there.receive(bytes.data(), bytes.size(), 0) < 0 && errno == EAGAIN);
  CHECK(now_ns() - begin < 4 * kSecond);
}

// Of what a stream throws, only this says that others have tampered with it.
void test_errors_of_streams() {
  Tapped tapped;
  tapped.pass_on(std::string(kRecordHeaderBytes, 'f'));
  std::vector<Connection> connections;
  connections.emplace_back(std::move(tapped.far.sockets[1]), std::move(tapped.far.there));
  Stream stream(1, std::move(connections));
  std::array<std::byte, 4> bytes{};
  stream.receive(bytes.data(), bytes.size());
  bool forged = false;
  try {
    stream.pump();
  } catch (const ForgedError& error) {
    forged = error.rank() == 1;
  }
  CHECK(forged);
  EncryptedConnection ends = connected();
  connections.clear();
  connections.emplace_back(std::move(ends.sockets[0]), std::move(ends.here));
  Stream refused(1, std::move(connections));
  refused.send(bytes.data(), bytes.size());
  const RefusingLibcrypto refuses(0);
  CHECK(error_of([&] { refused.pump(); }).kind() == ErrorKind::backend);
}

// Both ends encrypt after their handshake, with secrets that no other connection has.
void test_handshakes_that_agree_to_encrypt() {
  std::string last;
  for (const CipherSuite suite : kSuites) {
    EncryptedConnection ends = connected(CipherSuite::none);
    Handshake dialler = Handshake::dial(some_secret(), "hello", suite);
    Handshake acceptor = Handshake::accept(some_secret(), "hello", 5, {.clear = false, .encrypted = true});
    const int here = ends.sockets[0].get();
    const int there = ends.sockets[1].get();
    static_cast<void>(dialler.step(here));
    static_cast<void>(acceptor.step(there));
    static_cast<void>(dialler.step(here));
    CHECK(acceptor.step(there) == Handshake::Status::asks && acceptor.confirm(there));
    CHECK(acceptor.hello() == "hello" && dialler.step(here) == Handshake::Status::proved);
    Channel one = dialler.channel(here, 1);
    Channel other = acceptor.channel(there, 1);
    CHECK(one.encrypted() && one.send("ping", 4) == 4 && received(other, 10) == "ping");
    CHECK(other.send("pong", 4) == 4);
    const std::string record = on_the_wire(ends.sockets[0]);
    CHECK(record.size() == record_bytes(4) && record != std::exchange(last, record));
  }
}

// Where one end encrypts and the other does not, both learn it, by a proof.
void test_handshakes_that_differ() {
  for (const bool encrypted : {false, true}) {
    EncryptedConnection ends = connected(CipherSuite::none);
    const int here = ends.sockets[0].get();
    const int there = ends.sockets[1].get();
    Handshake dialler =
        Handshake::dial(some_secret(), "hello", encrypted ? CipherSuite::aes_256_gcm : CipherSuite::none);
    Handshake acceptor =
        Handshake::accept(some_secret(), "hello", 5, {.clear = encrypted, .encrypted = !encrypted});
    static_cast<void>(dialler.step(here));
    static_cast<void>(acceptor.step(there));
    static_cast<void>(dialler.step(here));
    CHECK(acceptor.step(there) == Handshake::Status::differs);
    CHECK(dialler.step(here) == Handshake::Status::differs);
  }
}

// What a stranger says does not bring down an end whose libcrypto makes no keys.
void test_hello_where_no_key_is_made() {
  EncryptedConnection ends = connected(CipherSuite::none);
  Handshake dialler = Handshake::dial(some_secret(), "hello", CipherSuite::aes_256_gcm);
  static_cast<void>(dialler.step(ends.sockets[0].get()));
  Handshake acceptor = Handshake::accept(some_secret(), "hello", 5, {.clear = true, .encrypted = true});
  const RefusingLibcrypto refuses(0);
  CHECK(acceptor.step(ends.sockets[1].get()) == Handshake::Status::refused);
  CHECK(acceptor.trouble().find("COLLECTIVES_ENCRYPTION=off") != std::string::npos);
  CHECK(on_the_wire(ends.sockets[0]).empty());
  CHECK(error_of(check_encryption).kind() == ErrorKind::backend);
}

// A connection that is gone when this end speaks is no end that knows another key.
void test_handshakes_with_nobody() {
  EncryptedConnection ends = connected(CipherSuite::none);
  ends.sockets[1].reset();
  Handshake dialler = Handshake::dial(some_secret(), "hello", CipherSuite::none);
  CHECK(dialler.step(ends.sockets[0].get()) == Handshake::Status::refused);
  CHECK(dialler.ended() && dialler.error() == EPIPE);
}

void test_exits_of_processes_that_encrypt() {
  constexpr int kTimes = 50;
  const Nanoseconds begin = now_ns();
  for (int i = 0; i < kTimes; ++i) {
    std::string program = "core_test";
    std::string argument = kExitWhileEncrypting;
    // What is not freed at the exit, because others may use it, is no leak.
    std::string leaks = "ASAN_OPTIONS=detect_leaks=0";
    std::string threads = "TSAN_OPTIONS=atexit_sleep_ms=0:report_thread_leaks=0";
    std::array<char*, 3> arguments = {program.data(), argument.data(), nullptr};
    std::array<char*, 3> environment = {leaks.data(), threads.data(), nullptr};
    pid_t child = 0;
    CHECK(::posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environment.data()) ==
          0);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  CHECK(now_ns() - begin < kTimes * kSecond);  // none waits for a thread that waits for bytes
}

// A suite that is changed on its way, as to have both send in clear, breaks the handshake.
void test_suites_changed_on_their_way() {
  for (const CipherSuite changed : {CipherSuite::none, CipherSuite::chacha20_poly1305}) {
    EncryptedConnection ends = connected(CipherSuite::none);
    Handshake dialler = Handshake::dial(some_secret(), "hello", CipherSuite::aes_256_gcm);
    Handshake acceptor = Handshake::accept(some_secret(), "hello", 5, {.clear = true, .encrypted = true});
    static_cast<void>(dialler.step(ends.sockets[0].get()));
    std::string hello = on_the_wire(ends.sockets[1]);
    hello[5] = static_cast<char>(changed);
    EncryptedConnection others = connected(CipherSuite::none);
    const auto pass = [](const std::string& bytes, const Descriptor& to) {
      CHECK(::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    };
    pass(hello, others.sockets[0]);
    static_cast<void>(acceptor.step(others.sockets[1].get()));
    pass(on_the_wire(others.sockets[0]), ends.sockets[1]);
    static_cast<void>(dialler.step(ends.sockets[0].get()));
    pass(on_the_wire(ends.sockets[1]), others.sockets[0]);
    CHECK(acceptor.step(others.sockets[1].get()) == Handshake::Status::refused);
    CHECK(on_the_wire(others.sockets[0]).empty());
  }
}

[[noreturn]] void keep_sending(EncryptedConnection& ends) {
  std::string bytes = some_bytes(40'000);
  for (;;) {
    static_cast<void>(ends.here.send(bytes.data(), bytes.size()));
    static_cast<void>(ends.there.receive(bytes.data(), bytes.size()));
  }
}

[[noreturn]] void keep_shaking_hands() {
  for (;;) {
    try {
      const KeyPair one;
      static_cast<void>(one.shared_with(KeyPair().public_key()));
      const EncryptedConnection ends = connected();
    } catch (const Error&) {
      ::pause();  // no key is made any more
    }
  }
}

[[noreturn]] void wait_for_bytes(EncryptedConnection& ends) {
  CHECK(::fcntl(ends.sockets[1].get(), F_SETFL, 0) == 0);
  std::byte byte{};
  for (;;) static_cast<void>(ends.there.receive(&byte, 1, 0));
}

}  // namespace

void exit_while_encrypting() {
  // They stay, as their threads do.
  auto* const busy = new EncryptedConnection(connected());
  auto* const silent = new EncryptedConnection(connected(CipherSuite::chacha20_poly1305));
  std::thread([busy] { keep_sending(*busy); }).detach();
  std::thread(keep_shaking_hands).detach();
  std::thread([silent] { wait_for_bytes(*silent); }).detach();
  const timespec meanwhile{0, 20 * kMillisecond};
  ::nanosleep(&meanwhile, nullptr);
  std::exit(0);
}

Tests encryption_tests() {
  return {
      {"bytes that wait", test_bytes_that_wait},
      {"changed records", test_changed_records},
      {"channels", test_channels},
      {"connections that were reset", test_connections_that_were_reset},
      {"errors of streams", test_errors_of_streams},
      {"exits of processes that encrypt", test_exits_of_processes_that_encrypt},
      {"failures in sealing", test_failures_in_sealing},
      {"forgery behind good bytes", test_forgery_behind_good_bytes},
      {"handshakes that agree to encrypt", test_handshakes_that_agree_to_encrypt},
      {"handshakes that differ", test_handshakes_that_differ},
      {"handshakes with nobody", test_handshakes_with_nobody},
      {"hello where no key is made", test_hello_where_no_key_is_made},
      {"key exchange", test_key_exchange},
      {"new secrets", test_new_secrets},
      {"one wait for a part of a record", test_one_wait_for_a_part_of_a_record},
      {"pieces of a record", test_pieces_of_a_record},
      {"records", test_records},
      {"records of parts", test_records_of_parts},
      {"records out of place", test_records_out_of_place},
      {"suites changed on their way", test_suites_changed_on_their_way},
      {"tampered channels", test_tampered_channels},
      {"where there is no libcrypto", test_where_there_is_no_libcrypto},
  };
}

}  // namespace collectives
