// Point-to-point messages of one rank: matching by sender, receiver and tag, in order.
//
// A message is a frame and its bytes in the stream from one rank to another; messages of one stream follow
// each other whole. A receive is posted until a message is attached to it. A message that finds no posted
// receive is unexpected: its bytes go to memory of their own, so that it never holds up those behind it,
// whatever their tags; but while no transfer is outstanding here, messages stay in the stream. One thread at
// a time makes progress, that is, moves bytes and sleeps on this rank's doorbell: a blocked caller if there
// is one, else the background thread, which exists once an operation outlived the call that posted it.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/thread.hpp"
#include "engine/operation_record.hpp"
#include "engine/transfer.hpp"
#include "state/rank_context.hpp"
#include "transport/mailbox.hpp"

namespace collectives {

class ConnectionManager;

class Messenger : public std::enable_shared_from_this<Messenger> {
 public:
  // Context and connections must live until `close`. `connections` is null in a group on one machine.
  Messenger(RankContext& context, ConnectionManager* connections, std::shared_ptr<OperationRecord> record);
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // The memory must stay valid until the transfer is finished, which the owner sees to. Throws where the
  // group is broken. With a `caller` it is finished at the return. Where they throw, whatever for, nothing
  // touches the memory any more: a receive has taken no message, and a send has not begun or goes on from a
  // copy.
  std::shared_ptr<Transfer> send(const Envelope& envelope, const std::byte* data, Nanoseconds timeout,
                                 Owner owner = {}, Interrupt* caller = nullptr);
  std::shared_ptr<Transfer> receive(const Envelope& envelope, std::byte* data, Nanoseconds timeout,
                                    Owner owner = {}, Interrupt* caller = nullptr);

  // The same without a transfer, for a short message of a rank on this machine that leaves at once, or has
  // come within a few turns. Where they return false nothing has happened: call `send` or `receive`. The time
  // limit is for the record alone.
  bool send_at_once(const Envelope& envelope, const std::byte* data, Nanoseconds timeout);
  bool receive_at_once(const Envelope& envelope, std::byte* data, Nanoseconds timeout);

  // For callers that raise after they have got a message: the next receive of its sender and tag gets it.
  void put_back(const Envelope& envelope, const std::byte* data);

  // See Task. A wait that is interrupted suspends the transfer: nothing touches its memory, and later ones
  // get its turn, until somebody waits for it or polls it again. For `send` and `recv` may be made of `isend`
  // and `irecv` and a wait, and nobody asks for the transfer again then. One that others are waiting for, or
  // that has been overtaken, goes on.
  bool wait(Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt);
  void poll(Transfer& transfer);
  void rest(Transfer& transfer);
  void undo(Transfer& transfer);
  void abandon(Transfer& transfer);

  // Waits until all sends have left and all messages that began to come have come; gives up receives that
  // nothing came for.
  void flush();
  // Fails what is outstanding and ends the background thread. Returns false where a thread does not leave
  // before the deadline.
  bool close(Nanoseconds deadline);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using TransferPointer = std::shared_ptr<Transfer>;

  struct Message {
    int source;
    std::uint32_t tag;
    DType dtype;
    std::uint64_t bytes;
    std::uint64_t received = 0;
    std::unique_ptr<std::byte[]> memory;  // of an unexpected message
    TransferPointer receiver;             // once attached; neither memory nor receiver: dropped
  };
  static std::shared_ptr<Message> message_of(const Envelope& envelope);
  struct Incoming {
    std::unique_ptr<Inbox> box;
    Nanoseconds departed = 0;          // when the sender was first seen to have left
    std::shared_ptr<Message> current;  // the message whose bytes come next
  };
  struct Outgoing {
    std::unique_ptr<Outbox> box;
    std::deque<TransferPointer> queue;
  };

  // All below with the mutex held.
  void check_open() const;
  void begin(Transfer& transfer);
  void record_at_once(bool sends, const Envelope& envelope, Nanoseconds timeout);
  void start(Lock& lock, const TransferPointer& transfer, Interrupt* caller);
  void wake_background();
  static void write_frame(Outbox& box, const Envelope& envelope);
  bool pump();
  bool pump_out(Outgoing& outgoing);
  bool pump_in(int source, Incoming& incoming);
  std::shared_ptr<Message> open_message(int source, Inbox& box);
  static bool wants(const Envelope& receive, const Message& message) noexcept;
  bool buffer_unexpected(Message& message);
  void send_to_self(const TransferPointer& transfer);
  void match_unexpected(const TransferPointer& transfer);
  void attach(const std::shared_ptr<Message>& message, TransferPointer transfer);
  void complete(const std::shared_ptr<Message>& message);
  void finish(const TransferPointer& transfer, std::optional<Error> error);
  void withdraw(Transfer& transfer);
  bool detach(Transfer& transfer);
  void give_back(const Transfer& transfer);
  void take_back(const TransferPointer& transfer, const char* why);
  void suspend(Transfer& transfer);
  void resume(Transfer& transfer);
  bool overtaken(const Transfer& transfer) const;
  bool wait(Lock& lock, Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt);
  void run_progress(Lock& lock, const std::function<bool()>& done, Nanoseconds deadline,
                    Interrupt* interrupt);
  void sleep_on_doorbell(Lock& lock, Nanoseconds deadline);
  void check_transfers();
  void fail_on_dead_leader();
  bool has_left(int rank);
  void check_connections(const Transfer& transfer, int rank) const;
  void fail_timed_out(const TransferPointer& transfer);
  std::optional<std::uint64_t> requeue(const Transfer& transfer);
  void offer(const std::shared_ptr<Message>& message, const std::byte* data);
  void fail_all(const Error& error);
  Nanoseconds nearest_deadline() const;
  void run_background();

  RankContext* context_;  // null after close
  const int rank_;
  const std::shared_ptr<OperationRecord> record_;  // its messages: with the mutex held

  std::mutex mutex_;
  std::condition_variable changed_;                 // a transfer finished, or nobody makes progress any more
  std::condition_variable thread_wakes_;            // for the background thread
  std::vector<Incoming> incoming_;                  // by sender
  std::vector<Outgoing> outgoing_;                  // by receiver
  std::list<std::shared_ptr<Message>> unexpected_;  // in order of arrival, complete or not
  std::list<TransferPointer> posted_;               // receives in order of issue
  std::list<TransferPointer> outstanding_;          // every unfinished transfer
  bool progress_running_ = false;
  bool background_runs_ = false;
  bool background_awake_ = false;
  bool closing_ = false;
  int waiters_ = 0;         // callers in `wait`
  SpinPolicy spin_policy_;  // of callers that make progress
  Nanoseconds next_core_change_ = 0;
  BackgroundThread thread_;
};

}  // namespace collectives
