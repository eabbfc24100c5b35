#include "nccl/cuda_streams.hpp"

#include <algorithm>
#include <utility>

namespace collectives {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;               // cudaErrorNotReady
constexpr unsigned kWithoutTimes = 2;        // cudaEventDisableTiming
constexpr unsigned kNonBlocking = 1;         // cudaStreamNonBlocking: waits for no legacy default stream
constexpr int kRelaxedCapture = 2;           // cudaStreamCaptureModeRelaxed
constexpr int kByAddress = 4;                // cudaMemcpyDefault
constexpr std::uintptr_t kLegacyStream = 1;  // cudaStreamLegacy, which 0 names, too

template <class... Arguments>
int call(void* function, Arguments... arguments) {
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

const char* text(void* function, int status) {
  return reinterpret_cast<const char* (*)(int)>(function)(status);
}

}  // namespace

const std::array<const char*, CudaStreams::function_count> CudaStreams::names = {
    "cudaGetDevice",         "cudaEventCreateWithFlags",
    "cudaEventRecord",       "cudaEventQuery",
    "cudaEventSynchronize",  "cudaStreamWaitEvent",
    "cudaStreamIsCapturing", "cudaStreamCreateWithPriority",
    "cudaMemcpyAsync",       "cudaThreadExchangeStreamCaptureMode",
    "cudaGetLastError",      "cudaGetErrorName",
    "cudaGetErrorString",
};

// Lets this thread make calls that would break off captures of other threads.
class CudaStreams::RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaStreams& streams) : exchange_(streams.functions_[exchange_capture_mode]) {
    call(exchange_, &mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { call(exchange_, &mode_); }

 private:
  void* const exchange_;
  int mode_ = kRelaxedCapture;
};

CudaStreams::CudaStreams(const Functions& functions, int device) : functions_(functions), device_(device) {
  for (std::size_t i = 0; i < functions.size(); ++i) {
    if (functions[i] == nullptr) throw std::invalid_argument(std::string(names[i]) + " has no address");
  }
}

bool CudaStreams::is_current() const {
  int current = 0;
  check(call(functions_[get_device], &current));
  return current == device_;
}

bool CudaStreams::is_capturing(Stream stream) const {
  // The legacy stream never is, and to ask is an error while another one is.
  if (reinterpret_cast<std::uintptr_t>(stream) <= kLegacyStream) return false;
  int status = 0;
  check(call(functions_[stream_is_capturing], stream, &status));
  return status != 0;
}

CudaStreams::Stream CudaStreams::make_stream(int priority) const {
  Stream made = nullptr;
  const RelaxedCapture relaxed(*this);
  check(call(functions_[stream_create], &made, kNonBlocking, priority));
  return made;
}

CudaStreams::Event CudaStreams::record(Stream stream) {
  Event event = nullptr;
  bool found = false;
  {
    const std::lock_guard lock(mutex_);
    found = !idle_.empty();
    if (found) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (!found) {
    const RelaxedCapture relaxed(*this);
    check(call(functions_[event_create], &event, kWithoutTimes));
  }
  if (const int status = call(functions_[event_record], event, stream); status != kSuccess) {
    give_back(event);
    check(status);
  }
  return event;
}

void CudaStreams::give_back(Event event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    idle_.push_back(event);
  } catch (const std::exception&) {
    // No memory, or no lock: the event is lost.
  }
}

void CudaStreams::wait(Stream stream, Event event) const {
  check(call(functions_[stream_wait_event], stream, event, 0U));
}

bool CudaStreams::done(Event event) const {
  int status = 0;
  {
    const RelaxedCapture relaxed(*this);
    status = call(functions_[event_query], event);
  }
  if (status == kNotReady) {
    call(functions_[get_last_error]);  // else this thread's next call of torch would find the status there
    return false;
  }
  check(status);
  return true;
}

void CudaStreams::synchronize(Event event) const { check(call(functions_[event_synchronize], event)); }

void CudaStreams::copy(void* to, const void* from, std::size_t bytes, Stream stream) const {
  check(call(functions_[memcpy_async], to, from, bytes, kByAddress, stream));
}

void CudaStreams::check(int status) const {
  if (status == kSuccess) return;
  call(functions_[get_last_error]);
  throw CudaError("CUDA error " + std::to_string(status) + ": " + text(functions_[get_error_string], status) +
                  " (" + text(functions_[get_error_name], status) + ")");
}

}  // namespace collectives
