#include "mpi/messages.hpp"

#include <stdexcept>

namespace collectives {
namespace {

template <class Handle>
Handle handle_of(std::uintptr_t value) {
  if constexpr (sizeof(Handle) == sizeof(int)) {
    return static_cast<Handle>(value);
  } else {
    return reinterpret_cast<Handle>(value);
  }
}

template <class Handle>
class Messages final : public MpiMessages {
 public:
  Messages(const MpiLibrary& library, std::uintptr_t communicator)
      : isend_(reinterpret_cast<Isend>(library.isend)),
        irecv_(reinterpret_cast<Irecv>(library.irecv)),
        test_(reinterpret_cast<Test>(library.test)),
        testall_(reinterpret_cast<Testall>(library.testall)),
        get_count_(reinterpret_cast<GetCount>(library.get_count)),
        cancel_(reinterpret_cast<Cancel>(library.cancel)),
        byte_(handle_of<Handle>(library.byte)),
        communicator_(handle_of<Handle>(communicator)),
        status_bytes_(library.status_bytes) {}

  int send(const std::byte* data, int count, std::uintptr_t type, int peer, int tag) override {
    Handle request{};
    const int code = isend_(data, count, handle_of<Handle>(type), peer, tag, communicator_, &request);
    if (code == kMpiSuccess) requests_.push_back(request);
    return code;
  }

  int receive(std::byte* data, int count, std::uintptr_t type, int peer, int tag) override {
    Handle request{};
    const int code = irecv_(data, count, handle_of<Handle>(type), peer, tag, communicator_, &request);
    if (code == kMpiSuccess) requests_.push_back(request);
    return code;
  }

  int test(bool& done) override {
    done = true;
    if (requests_.empty()) return kMpiSuccess;
    constexpr std::size_t kWord = sizeof(std::uint64_t);
    statuses_.resize((requests_.size() * status_bytes_ + kWord - 1) / kWord);
    int all = 0;
    const int code = requests_.size() == 1 ? test_(requests_.data(), &all, statuses_.data())
                                           : testall_(static_cast<int>(requests_.size()), requests_.data(),
                                                      &all, statuses_.data());
    done = code == kMpiSuccess && all != 0;
    if (done) requests_.clear();
    return code;
  }

  int received(int& bytes) override { return get_count_(statuses_.data(), byte_, &bytes); }

  std::string_view status() const override {
    return {reinterpret_cast<const char*>(statuses_.data()), status_bytes_};
  }

  int cancel() override {
    int code = kMpiSuccess;
    for (Handle& request : requests_) {
      if (const int found = cancel_(&request)) code = found;
    }
    return code;
  }

 private:
  using Isend = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Irecv = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  using Test = int (*)(Handle*, int*, void*);
  using Testall = int (*)(int, Handle*, int*, void*);
  using GetCount = int (*)(const void*, Handle, int*);
  using Cancel = int (*)(Handle*);

  const Isend isend_;
  const Irecv irecv_;
  const Test test_;
  const Testall testall_;
  const GetCount get_count_;
  const Cancel cancel_;
  const Handle byte_;
  const Handle communicator_;
  const std::size_t status_bytes_;
  std::vector<Handle> requests_;
  std::vector<std::uint64_t> statuses_;
};

}  // namespace

std::unique_ptr<MpiMessages> make_messages(const MpiLibrary& library, std::uintptr_t communicator) {
  if (library.handle_bytes == sizeof(void*)) return std::make_unique<Messages<void*>>(library, communicator);
  if (library.handle_bytes == sizeof(int)) return std::make_unique<Messages<int>>(library, communicator);
  throw std::invalid_argument("handles of MPI are as long as an int or a pointer");
}

}  // namespace collectives
