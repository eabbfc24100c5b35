#include "memory/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "common/error.hpp"

namespace collectives {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail_segment(const std::string& what, int error) {
  throw Error(ErrorKind::backend, with_errno("shared memory: " + what, error));
}

// The size of a segment that another process made.
std::size_t sealed_bytes(const Descriptor& file) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) fail_segment("cannot look at a descriptor", errno);
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw Error(ErrorKind::backend, "shared memory: the descriptor is no sealed segment");
  }
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace

Segment::Segment(Descriptor file, std::size_t bytes, int protection, int flags)
    : file_(std::move(file)), bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, protection, flags, file_.get(), 0);
  if (address == MAP_FAILED) fail_segment("cannot map " + std::to_string(bytes) + " bytes", errno);
  data_ = static_cast<std::byte*>(address);
}

Segment Segment::create(std::size_t bytes) {
  Descriptor file(::memfd_create("collectives", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail_segment("memfd_create failed", errno);
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    fail_segment("cannot size a segment of " + std::to_string(bytes) + " bytes", errno);
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0)
    fail_segment("cannot seal a segment", errno);
  return Segment(std::move(file), bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
}

Segment Segment::create_private(std::size_t bytes) {
  return Segment(Descriptor(), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
}

Segment Segment::attach(Descriptor file) {
  const std::size_t bytes = sealed_bytes(file);
  return Segment(std::move(file), bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
}

Segment Segment::observe(Descriptor file) {
  const std::size_t bytes = sealed_bytes(file);
  return Segment(std::move(file), bytes, PROT_READ, MAP_SHARED);
}

Segment::Segment(Segment&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    unmap();
    file_ = std::move(other.file_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Segment::~Segment() { unmap(); }

void Segment::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  data_ = nullptr;
}

void Segment::commit(std::size_t offset, std::size_t bytes) const {
  if (!file_) return;
  int error = 0;
  do {
    error = ::posix_fallocate(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    fail_segment("cannot allocate " + std::to_string(bytes) +
                     " bytes; free memory, or raise the limit of the container",
                 error);
  }
}

}  // namespace collectives
