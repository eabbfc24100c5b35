// What stands for CUDA streams, events and graphs: threads that carry out tasks in order.
//
// A stream is a number. Stream 0 has no thread: its tasks run in the caller, so that calls return when they
// are done. An event notes a place in a stream; noted again, it forgets the place before.
//
// With a seed in the environment, streams are held for a while before tasks that are drawn, so that what
// nothing orders runs in other orders. Draws of a stream depend on the seed and on how many were made before.
//
// While a stream is captured, what is put on it is not carried out but noted in a graph, and so is what is
// put on streams that wait for one of its events. As CUDA does, a capture ends in an error after what it
// forbids: to wait for an event from outside, to ask for one from inside, to block the host, not to join a
// stream again. A launched graph carries out its nodes in any order that events and streams leave it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "races.hpp"

namespace nccl_double {

class Event;

// Returns the seed, COLLECTIVES_TEST_STREAMS_SEED, or 0 where no stream is held.
unsigned seed();

// Notes that a call of this thread made a context on its current device, as CUDA does where there is none.
// Each thread begins on device 0.
void use_device();

bool stream_exists(std::intptr_t stream);

// Runs a task after those that the stream has. Its operations start together; the last is carried out by the
// task, where more accesses of it may become known.
void enqueue(std::intptr_t stream, std::function<void()> task, const std::vector<Accesses>& operations = {});

// How the calling thread is hindered by captures, a `cudaStreamCaptureMode`; returns the one before.
int exchange_capture_mode(int mode);

// Whether a wait of the calling thread's host for a stream is an error.
bool refuses_to_wait();

// Whether a capture forbids the calling thread a call that may be unsafe; breaks that capture off.
bool forbidden_by_a_capture();

// Whether the stream is being captured; `error` is set where that capture has met an error.
bool is_captured(std::intptr_t stream, bool* error = nullptr);

// Notes a task in the graph that the stream is captured into. Each launch of the graph calls `prepare` in the
// thread that launches it, with the place of the last operation, and carries out what that returns. Nodes
// with owners keep their order; owners are communicators, which the graph holds.
using Prepare = std::function<std::function<void()>(const Place&)>;
void capture(std::intptr_t stream, Prepare prepare, const std::vector<const void*>& owners,
             const std::vector<Accesses>& operations);

std::shared_ptr<Event> make_event();
// Notes the place that the stream has reached.
void record(const std::shared_ptr<Event>& event, std::intptr_t stream);
// Lets later tasks of the stream wait until the noted place has been passed; returns whether that is allowed.
bool await(const std::shared_ptr<Event>& event, std::intptr_t stream);

}  // namespace nccl_double
