// Memory that several processes map: an anonymous file that has a descriptor and no name.
#pragma once

#include <cstddef>

#include "memory/descriptor.hpp"

namespace collectives {

class Segment {
 public:
  Segment() noexcept = default;

  // Makes a segment of zeros and maps it. Its size is sealed, so that no holder of the descriptor can take
  // pages away from under the others. Pages come with `commit`, not before.
  static Segment create(std::size_t bytes);

  // Makes a segment for this process alone, without a descriptor; its pages come when touched.
  static Segment create_private(std::size_t bytes);

  // Maps the segment that a peer made; the size is the file's. Throws if its seals are missing.
  static Segment attach(Descriptor file);

  // Maps it to read only, as `attach` does otherwise.
  static Segment observe(Descriptor file);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Allocates the pages of a range, so that lack of memory is an error here and not a SIGBUS at the first
  // write. Does nothing for a private segment.
  void commit(std::size_t offset, std::size_t bytes) const;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  const Descriptor& file() const noexcept { return file_; }

 private:
  Segment(Descriptor file, std::size_t bytes, int protection, int flags);
  void unmap() noexcept;

  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace collectives
