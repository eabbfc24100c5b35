// The CUDA runtime over the double's streams: the functions that the core calls, and what they forbid.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

#include "graphs.hpp"
#include "streams.hpp"

using namespace nccl_double;

namespace {

constexpr int kCudaSuccess = 0;
constexpr int kInvalidValue = 1;     // cudaErrorInvalidValue
constexpr int kInvalidHandle = 400;  // cudaErrorInvalidResourceHandle
constexpr int kNotReady = 600;       // cudaErrorNotReady

thread_local int last_cuda_error = kCudaSuccess;
thread_local bool refuses = false;
thread_local bool tells = false;

// Returns a status of CUDA for a result of the double's functions, and keeps it as the runtime does.
int status_of(int result) {
  const int status = result >= 0 ? kCudaSuccess : result == -1 ? kInvalidHandle : -result;
  if (status != kCudaSuccess) last_cuda_error = status;
  return status;
}

int failed(int status) { return last_cuda_error = status; }

}  // namespace

bool nccl_double::refuses_to_wait() { return refuses; }

extern "C" {

int double_set_device(int device);
std::intptr_t double_stream_create();
std::intptr_t double_event_create();
int double_event_record(std::intptr_t event, std::intptr_t stream);
int double_event_wait(std::intptr_t event, std::intptr_t stream);
int double_event_query(std::intptr_t event);
int double_event_tell(std::intptr_t event);
int double_event_synchronize(std::intptr_t event);

// Lets a wait of the calling thread's host for a stream be an error, or not.
int double_refuse_to_wait(int on) {
  refuses = on != 0;
  return 0;
}

// Lets all threads know what the calling one is told of events: it notes that where theirs look.
int double_tell(int on) {
  tells = on != 0;
  return 0;
}

int cudaGetDevice(int* device) {
  *device = double_set_device(0);
  double_set_device(*device);
  return kCudaSuccess;
}

int cudaEventCreateWithFlags(std::intptr_t* event, unsigned) {
  if (forbidden_by_a_capture()) return failed(kNotInCapture);
  use_device();
  *event = double_event_create();
  return kCudaSuccess;
}

int cudaEventRecord(std::intptr_t event, std::intptr_t stream) {
  use_device();
  return status_of(double_event_record(event, stream));
}

int cudaStreamWaitEvent(std::intptr_t stream, std::intptr_t event, unsigned) {
  use_device();
  return status_of(double_event_wait(event, stream));
}

int cudaEventQuery(std::intptr_t event) {
  if (forbidden_by_a_capture()) return failed(kNotInCapture);
  const int result = double_event_query(event);
  if (result == 0) return failed(kNotReady);
  if (result == 1 && tells) double_event_tell(event);
  return status_of(result);
}

int cudaEventSynchronize(std::intptr_t event) {
  if (refuses) return failed(kNotPermitted);
  if (forbidden_by_a_capture()) return failed(kNotInCapture);
  use_device();
  return status_of(double_event_synchronize(event));
}

int cudaStreamIsCapturing(std::intptr_t stream, int* capturing) {
  use_device();
  if (!stream_exists(stream)) return failed(kInvalidHandle);
  bool broken = false;
  *capturing = is_captured(stream, &broken) ? (broken ? 2 : 1) : 0;
  return kCudaSuccess;
}

int cudaStreamCreateWithPriority(std::intptr_t* stream, unsigned, int priority) {
  if (forbidden_by_a_capture()) return failed(kNotInCapture);
  if (priority > 0 || priority < -5) return failed(kInvalidValue);
  use_device();
  *stream = double_stream_create();
  return kCudaSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, std::intptr_t stream) {
  use_device();
  if (!stream_exists(stream)) return failed(kInvalidHandle);
  enqueue(stream, [=] { std::memmove(to, from, bytes); });
  return kCudaSuccess;
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = exchange_capture_mode(*mode);
  return kCudaSuccess;
}

int cudaGetLastError() { return std::exchange(last_cuda_error, kCudaSuccess); }

const char* cudaGetErrorName(int) { return "an error of the double"; }

const char* cudaGetErrorString(int status) {
  switch (status) {
    case kInvalidHandle:
      return "there is no such stream or event";
    case kNotPermitted:
      return "this thread would wait for a stream";
    case kNotInCapture:
      return "operation not permitted when a stream is captured";
    case kCrossesCapture:
      return "an event from outside would become part of the capture";
    case kCapturedEvent:
      return "operation not permitted on an event that was recorded in a capture";
    default:
      return "a call of CUDA has failed";
  }
}

}  // extern "C"
