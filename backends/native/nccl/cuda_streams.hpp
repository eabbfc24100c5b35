// Streams and events of one CUDA device, by calls of the runtime that this process has loaded. It is called
// by address: the core is built without CUDA, and has to use the runtime that torch uses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace collectives {

// What the runtime says of a call that failed.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A stream is a `cudaStream_t`, an event a `cudaEvent_t`; the runtime keeps its own locks. Methods of any
// thread; those that the runtime carries out on the current device say so.
class CudaStreams {
 public:
  using Stream = void*;
  using Event = void*;

  enum Function : std::uint8_t {
    get_device,
    event_create,
    event_record,
    event_query,
    event_synchronize,
    stream_wait_event,
    stream_is_capturing,
    stream_create,
    memcpy_async,
    exchange_capture_mode,
    get_last_error,
    get_error_name,
    get_error_string,
    function_count
  };
  // The runtime's names of these functions.
  static const std::array<const char*, function_count> names;
  using Functions = std::array<void*, function_count>;

  // Throws where a function has no address.
  CudaStreams(const Functions& functions, int device);

  // Whether the device is the calling thread's current one.
  bool is_current() const;
  // Whether the stream is being captured into a graph.
  bool is_capturing(Stream stream) const;
  // A new stream of the current device; lower numbers are preferred.
  Stream make_stream(int priority) const;
  // An event at the present end of a stream, to be given back. On the current device.
  Event record(Stream stream);
  // Keeps an event for the next record; what waits for it goes on waiting for the place that it had.
  void give_back(Event event) noexcept;
  // Lets what is put on a stream from now on begin when the event is done.
  void wait(Stream stream, Event event) const;
  // Whether a stream has got to the event; on the current device, as another one would get a context.
  bool done(Event event) const;
  // Blocks until a stream has got to the event.
  void synchronize(Event event) const;
  // Lets a stream copy memory, of which one side may be pinned memory of the host.
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) const;

 private:
  class RelaxedCapture;

  void check(int status) const;

  const Functions functions_;
  const int device_;
  std::mutex mutex_;
  std::vector<Event> idle_;
};

// An event that goes back to its streams at the end.
class CudaEvent {
 public:
  CudaEvent(std::shared_ptr<CudaStreams> streams, CudaStreams::Stream stream)
      : streams_(std::move(streams)), event_(streams_->record(stream)) {}
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() { streams_->give_back(event_); }

  void wait(CudaStreams::Stream stream) const { streams_->wait(stream, event_); }
  bool done() const { return streams_->done(event_); }
  void synchronize() const { streams_->synchronize(event_); }

 private:
  const std::shared_ptr<CudaStreams> streams_;
  const CudaStreams::Event event_;
};

}  // namespace collectives
