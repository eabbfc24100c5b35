// What stands for CUDA streams and events: threads that carry out tasks in order.
//
// A stream is a number. Stream 0 has no thread: its tasks run in the caller, so that calls return when they
// are done. An event notes a place in a stream; noted again, it forgets the place before.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace nccl_double {

class Event;

// Notes that a call of this thread made a context on its current device, as CUDA does where there is none.
// Each thread begins on device 0.
void use_device();

bool stream_exists(std::intptr_t stream);

// Runs a task after those that the stream has.
void enqueue(std::intptr_t stream, std::function<void()> task);

std::shared_ptr<Event> make_event();
// Notes the place that the stream has reached.
void record(const std::shared_ptr<Event>& event, std::intptr_t stream);
// Lets later tasks of the stream wait until the noted place has been passed.
void await(const std::shared_ptr<Event>& event, std::intptr_t stream);

}  // namespace nccl_double
