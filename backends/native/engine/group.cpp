#include "engine/group.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "algorithms/collective_context.hpp"
#include "engine/completions.hpp"
namespace collectives {
namespace {

// How long threads of this process get to leave operations that were just broken.
constexpr Nanoseconds kLeaveLimit = 5 * kSecond;

thread_local const Group* executing = nullptr;  // whose operation the calling thread executes

class Executing {
 public:
  explicit Executing(const Group* group) : before_(std::exchange(executing, group)) {}
  Executing(const Executing&) = delete;
  Executing& operator=(const Executing&) = delete;
  ~Executing() { executing = before_; }

 private:
  const Group* before_;
};

// Notes for the flight record where a caller that waits long comes from.
class RecordedInterrupt final : public Interrupt {
 public:
  RecordedInterrupt(Interrupt* caller, OperationRing& record, const RecordTicket& ticket)
      : caller_(caller), record_(record), ticket_(ticket) {}
  void blocks() override { caller_->blocks(); }
  bool requested() override { return caller_->requested(); }
  std::string site() override {
    std::string site = caller_->site();
    record_.note_site(ticket_, site);
    return site;
  }

 private:
  Interrupt* const caller_;
  OperationRing& record_;
  const RecordTicket& ticket_;
};

}  // namespace

Group::Group(Membership membership, std::string label, Nanoseconds timeout,
             std::shared_ptr<OperationRecord> record)
    : rank_(membership.rank),
      size_(membership.size),
      label_(std::move(label)),
      timeout_(timeout),
      tuning_(membership.tuning),
      record_(std::move(record)),
      context_(std::make_unique<RankContext>(std::move(membership), label_)),
      sources_(static_cast<std::size_t>(size_)) {
  try {
    if (context_->spans_machines()) machines_ = std::make_unique<MachineTransport>(*context_);
    messenger_ =
        std::make_shared<Messenger>(*context_, machines_ ? &machines_->connections : nullptr, record_);
  } catch (const Error& error) {
    context_->fail_to_join(error);
    throw;
  }
}

Group::~Group() { shutdown(false); }

std::vector<int> Group::connect(Nanoseconds deadline) {
  {
    const std::lock_guard lock(context_mutex_);
    for (int r = 0; machines_ && r < size_; ++r) {
      if (r == rank_ || !context_->dead(r)) continue;
      throw Error(ErrorKind::peer_lost, context_->name_of_rank(r) + " has died while the group was formed",
                  {.rank = r});
    }
  }
  for (;;) {
    {
      const std::lock_guard lock(context_mutex_);
      if (!machines_) return {};
      context_->check_usable();
      std::vector<int> missing = machines_->connections.unconnected();
      if (missing.empty() || now_ns() >= deadline) return missing;
    }
    const timespec pause{0, kMillisecond / 2};
    ::nanosleep(&pause, nullptr);
  }
}

std::vector<int> Group::lost_ranks() const {
  const std::lock_guard lock(context_mutex_);
  std::vector<int> lost;
  for (int r = 0; context_ && r < size_; ++r) {
    if (r != rank_ && context_->dead(r)) lost.push_back(r);
  }
  return lost;
}

std::string Group::connection_error() {
  const std::lock_guard lock(context_mutex_);
  return machines_ ? machines_->connections.connection_error() : "";
}

void Group::fail(const Error& error) {
  const std::lock_guard lock(context_mutex_);
  if (context_) context_->fail_group(failure_from(error, rank_));
}

std::optional<Failure> Group::failure() const {
  const std::lock_guard lock(context_mutex_);
  return context_ ? context_->failure() : failure_;
}

void Group::refuse() const {
  const std::optional<Failure> failure = this->failure();
  const std::string text = "[rank " + std::to_string(rank_) + "] " + label_ + " was shut down";
  if (!failure) throw Error(ErrorKind::aborted, text);
  throw Error(ErrorKind::aborted, text + "; the first cause: " + failure->text, details_after(*failure));
}

void Group::run(const Request& request, Nanoseconds timeout, Interrupt* interrupt) {
  std::uint64_t idle = 0;
  if (!pending_.compare_exchange_strong(idle, 1, std::memory_order_seq_cst)) {
    return run_queued(request, timeout, interrupt);
  }
  try {
    if (closed_.load(std::memory_order_seq_cst)) [[unlikely]]
      refuse();
    const Executing here(this);
    const Completions::Wait counted(true);
    execute_now(request, timeout, kNever, interrupt, nullptr);
  } catch (...) {
    finish_execution();
    throw;
  }
  finish_execution();
}

// Behind operations that are queued or running.
void Group::run_queued(const Request& request, Nanoseconds timeout, Interrupt* interrupt) {
  std::shared_ptr<const std::string> site;
  if (interrupt != nullptr) {
    site = std::make_shared<const std::string>(interrupt->site());
    interrupt->blocks();
  }
  const std::shared_ptr<Task> task = enqueue(request, timeout, {}, std::move(site));
  try {
    task->wait(kNever, interrupt);
  } catch (...) {
    const ErrorDetails about{.rank = rank_, .operation = name_of(request.opcode)};
    fail({ErrorKind::aborted,
          "rank " + std::to_string(rank_) + " was interrupted in " +
              describe(fingerprint_of(request), own_count_of(request)),
          about});
    task->wait(kNever, nullptr);  // whoever executes it leaves at once
    throw;
  }
  if (task->error() != nullptr) throw Error(*task->error());
}

void Group::execute_now(const Request& request, Nanoseconds timeout, Nanoseconds deadline,
                        Interrupt* interrupt, const std::string* site) {
  context_->check_usable();
  const Nanoseconds began = now_ns();
  Call call;
  call.sequence = ++sequence_;
  call.what = fingerprint_of(request);
  call.own_count = own_count_of(request);
  call.timeout = timeout;
  call.deadline = deadline == kNever ? deadline_after(timeout, began) : deadline;
  call.site = site;
  OperationRing& record = record_->collectives;
  const RecordTicket ticket = record.begin(record_of(request, call.sequence, timeout, began));
  if (site != nullptr) record.note_site(ticket, *site);
  RecordedInterrupt recorded(interrupt, record, ticket);
  call.interrupt = interrupt == nullptr ? nullptr : &recorded;
  context_->status().entered.store(began, std::memory_order_relaxed);
  try {
    carry_out(request, call);
  } catch (const Error& error) {
    record.fail(ticket, now_ns(), with_class(error));
    throw;
  }
  record.end(ticket, now_ns());
}

void Group::carry_out(const Request& request, const Call& call) {
  Status& status = context_->status();
  context_->note_core();
  // Of an earlier operation that waited long.
  if (status.site[0].load(std::memory_order_relaxed) != '\0') context_->note_site("");
  try {
    CollectiveContext collective(*context_, call, sources_, machines_.get());
    execute(request, collective);
    collective.close();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::mismatch) status.finished.store(call.sequence, std::memory_order_release);
    throw;
  } catch (const std::exception& error) {
    // Peers may be waiting for what will not come.
    context_->abort("rank " + std::to_string(rank()) + " failed in " + describe(call.what, call.own_count) +
                    ": " + error.what());
    throw Error(ErrorKind::backend, std::string(error.what()), details_of(call));
  }
  status.finished.store(call.sequence, std::memory_order_release);
}

void Group::finish_execution() {
  if (pending_.fetch_sub(1, std::memory_order_release) == 1) return;
  {
    const std::lock_guard lock(mutex_);
    queue_executes_ = true;
  }
  queue_changed_.notify_all();
}

std::shared_ptr<Task> Group::enqueue(Request request, Nanoseconds timeout, Owner owner,
                                     std::shared_ptr<const std::string> site) {
  auto task = std::make_shared<Task>(request.opcode, std::move(owner));
  bool idle = false;
  {
    std::unique_lock lock(mutex_);
    if (closed_.load(std::memory_order_seq_cst)) {
      // A shutdown holds what a refusal needs while it joins the thread, which needs this lock to end.
      lock.unlock();
      refuse();
    }
    if (!thread_.started()) {
      try {
        thread_.start("collectives", [this] { serve_queue(); });
      } catch (const Error& error) {
        throw Error(error.kind(), "[rank " + std::to_string(rank_) + "] " + label_ + ": " +
                                      name_of(request.opcode) + " was not begun: " + error.message());
      }
    }
    queue_.push_back({task, std::move(request), timeout, deadline_after(timeout), std::move(site)});
    idle = pending_.fetch_add(1, std::memory_order_seq_cst) == 0;
    if (idle) queue_executes_ = true;
  }
  if (idle) queue_changed_.notify_all();
  return task;
}

std::shared_ptr<Transfer> Group::send(const Envelope& envelope, const std::byte* data, Nanoseconds timeout,
                                      Owner owner, Interrupt* caller) {
  if (closed_.load(std::memory_order_relaxed)) refuse();
  return messenger_->send(envelope, data, timeout, std::move(owner), caller);
}

std::shared_ptr<Transfer> Group::receive(const Envelope& envelope, std::byte* data, Nanoseconds timeout,
                                         Owner owner, Interrupt* caller) {
  if (closed_.load(std::memory_order_relaxed)) refuse();
  return messenger_->receive(envelope, data, timeout, std::move(owner), caller);
}

bool Group::send_at_once(const Envelope& envelope, const std::byte* data) {
  if (closed_.load(std::memory_order_relaxed)) refuse();
  return messenger_->send_at_once(envelope, data, timeout());
}

bool Group::receive_at_once(const Envelope& envelope, std::byte* data) {
  if (closed_.load(std::memory_order_relaxed)) refuse();
  return messenger_->receive_at_once(envelope, data, timeout());
}

void Group::serve_queue() {
  std::unique_lock lock(mutex_);
  for (;;) {
    queue_changed_.wait(lock, [this] { return stopping_ || (queue_executes_ && !queue_.empty()); });
    if (!queue_executes_ || queue_.empty()) return;
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    next.task->begin(sequence_ + 1);
    std::optional<Error> failure;
    try {
      execute_now(next.request, next.timeout, next.deadline, nullptr, next.site.get());
    } catch (const Error& error) {
      failure = error;
    }
    lock.lock();
    // Under the lock, so that every operation counted is in the queue. Before the task is finished, so that
    // whoever waits for it finds the group idle.
    if (pending_.fetch_sub(1, std::memory_order_release) == 1) queue_executes_ = false;
    lock.unlock();
    next.task->finish(std::move(failure));
    next.task.reset();
    lock.lock();
  }
}

Error Group::not_done(const Task& task, Nanoseconds waited) const {
  const std::lock_guard lock(context_mutex_);
  if (context_) return context_->not_done(task.describe(), waited, task.awaited(*context_));
  return {ErrorKind::timeout, "[rank " + std::to_string(rank_) + "] " + label_ + ": " + task.describe() +
                                  " was not done, and the group was shut down since"};
}

std::string Group::report() const {
  {
    const std::lock_guard lock(context_mutex_);
    if (context_) return context_->report();
  }
  refuse();
}

bool Group::await_idle(Nanoseconds deadline) const {
  while (pending_.load(std::memory_order_seq_cst) != 0) {
    if (now_ns() >= deadline) return false;
    const timespec pause{0, kMillisecond / 2};
    ::nanosleep(&pause, nullptr);
  }
  return true;
}

void Group::shutdown(bool finish) {
  if (!finish || executing == this) {
    // Also ends the patience of a shutdown that waits for operations.
    const std::lock_guard lock(context_mutex_);
    if (context_) context_->leave();
  }
  if (executing == this) return;
  const std::lock_guard once(shutdown_mutex_);
  {
    // Under the lock, so that no later operation finds the queue open.
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_seq_cst);
  }
  if (finish) {
    await_idle(kNever);
    messenger_->flush();
  }
  {
    const std::lock_guard lock(context_mutex_);
    if (!context_) return;
    context_->leave();
  }
  const Nanoseconds deadline = now_ns() + kLeaveLimit;
  const bool idle = await_idle(deadline) && messenger_->close(deadline);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queue_changed_.notify_all();
  const std::lock_guard lock(context_mutex_);
  failure_ = context_->failure();
  if (idle) {
    thread_.join();
    machines_.reset();
    context_.reset();
  } else {
    // A thread is stuck in an operation, in a signal handler for instance. It keeps what it uses.
    thread_.abandon();
    static_cast<void>(machines_.release());
    static_cast<void>(context_.release());
    static_cast<void>(new std::shared_ptr<Messenger>(messenger_));
  }
}

}  // namespace collectives
