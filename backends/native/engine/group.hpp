// A group of ranks: collectives in order of issue, point-to-point messages beside them.
//
// One thread at a time may execute collectives. A synchronous call on an idle group executes on its own
// thread. Every other operation joins the queue, whose head the progress thread executes once it may. The
// queue's operations go before any later synchronous call, so operations run in order of issue.
//
// Thread safety: every method may be called from any thread. No thread of the group touches Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/thread.hpp"
#include "engine/messenger.hpp"
#include "engine/operation_record.hpp"
#include "engine/request.hpp"
#include "engine/task.hpp"
#include "state/rank_context.hpp"
#include "transport/machine_transport.hpp"

namespace collectives {

class Group {
 public:
  // `label` names the group in messages; `timeout` is the limit of operations that name none; `record` gets
  // the operations that begin.
  Group(Membership membership, std::string label, Nanoseconds timeout,
        std::shared_ptr<OperationRecord> record);
  // Ends the group at once: outstanding operations fail.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  Nanoseconds timeout() const noexcept { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Nanoseconds timeout) noexcept { timeout_.store(timeout, std::memory_order_relaxed); }

  // Between machines: waits until the leaders are connected or the deadline passed; returns the ranks that
  // are not. Throws where a connection failed for good. To be called on every rank before the group is used.
  std::vector<int> connect(Nanoseconds deadline);
  // The ranks that have died or vanished, as far as this one knows; none once the group has ended.
  std::vector<int> lost_ranks() const;
  // Why the last attempt to connect failed; may be empty.
  std::string connection_error();

  // Executes the operation, on the calling thread where the group is idle, and returns when it is done or has
  // failed. The request's memory is not touched afterwards. An interruption breaks the group for all ranks.
  void run(const Request& request, Nanoseconds timeout, Interrupt* interrupt);

  // Queues the operation. Its memory must stay valid until the task is finished, which the owner sees to.
  // `site` is the source line of the call, for reports.
  std::shared_ptr<Task> enqueue(Request request, Nanoseconds timeout, Owner owner = {},
                                std::shared_ptr<const std::string> site = nullptr);

  // Messages and receives; see Messenger. They keep no order with the collectives.
  std::shared_ptr<Transfer> send(const Envelope& envelope, const std::byte* data, Nanoseconds timeout,
                                 Owner owner = {}, Interrupt* caller = nullptr);
  std::shared_ptr<Transfer> receive(const Envelope& envelope, std::byte* data, Nanoseconds timeout,
                                    Owner owner = {}, Interrupt* caller = nullptr);
  bool send_at_once(const Envelope& envelope, const std::byte* data);
  bool receive_at_once(const Envelope& envelope, std::byte* data);
  void put_back(const Envelope& envelope, const std::byte* data) { messenger_->put_back(envelope, data); }

  // Breaks the group for all ranks, unless it is broken already. Blocks on nothing.
  void fail(const Error& error);
  // What broke the group first, if anything.
  std::optional<Failure> failure() const;

  // Ends the group and frees what it holds. With `finish`, operations already issued come to their own end
  // first, each within its time limit; without, they fail at once. Idempotent. Called from within an
  // operation of the same thread, by a signal handler, it only makes that operation fail; the next call
  // frees.
  void shutdown(bool finish);

  // What to say of a task of this group that was not done after its caller had waited so long.
  Error not_done(const Task& task, Nanoseconds waited) const;

  // What every rank waits in or did last.
  std::string report() const;

  const Tuning& tuning() const noexcept { return tuning_; }

 private:
  struct Queued {
    std::shared_ptr<Task> task;
    Request request;
    Nanoseconds timeout;
    Nanoseconds deadline;
    std::shared_ptr<const std::string> site;
  };

  void run_queued(const Request& request, Nanoseconds timeout, Interrupt* interrupt);
  void execute_now(const Request& request, Nanoseconds timeout, Nanoseconds deadline, Interrupt* interrupt,
                   const std::string* site);
  void carry_out(const Request& request, const Call& call);
  void finish_execution();
  void serve_queue();
  bool await_idle(Nanoseconds deadline) const;
  [[noreturn]] void refuse() const;

  const int rank_;
  const int size_;
  const std::string label_;
  std::atomic<Nanoseconds> timeout_;  // relaxed: orders nothing
  const Tuning tuning_;
  const std::shared_ptr<OperationRecord> record_;  // its collectives: of the thread that executes them
  // Both: whoever executes an operation is counted in `pending_` and uses them freely; everyone else holds
  // `context_mutex_`.
  std::unique_ptr<RankContext> context_;
  std::unique_ptr<MachineTransport> machines_;  // of a group that spans machines
  mutable std::mutex context_mutex_;
  std::optional<Failure> failure_;  // what had broken the group when it ended
  std::shared_ptr<Messenger> messenger_;
  // Only for the thread that executes collectives: the number of the last one begun, and scratch space.
  std::uint64_t sequence_ = 0;
  std::vector<const void*> sources_;

  // Operations issued and not finished. The synchronous call that changes 0 to 1 may execute; whoever
  // finishes an operation while others are pending lets the queue go on. Release by whoever finishes, acquire
  // by whoever executes next: what the executing thread uses. Sequentially consistent with `closed_`: either
  // a call sees the closing, or the closer sees the call.
  std::atomic<std::uint64_t> pending_{0};
  // No operation is accepted any more. Relaxed for messages, as the messenger refuses them by itself.
  std::atomic<bool> closed_{false};

  std::mutex mutex_;  // guards everything below
  std::condition_variable queue_changed_;
  std::deque<Queued> queue_;
  bool queue_executes_ = false;
  bool stopping_ = false;
  BackgroundThread thread_;

  std::mutex shutdown_mutex_;  // held by the one shutdown
};

}  // namespace collectives
