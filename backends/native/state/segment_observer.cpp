#include "state/segment_observer.hpp"

#include <cstddef>
#include <utility>

#include "common/error.hpp"
#include "memory/copy_once.hpp"
#include "memory/segment.hpp"
#include "state/segment_layout.hpp"

namespace collectives {
namespace {

// More than any group has, and little enough that no size overflows.
constexpr std::uint64_t kMostRanks = 1 << 16;

SegmentLayout layout_of(const Segment& segment) {
  if (segment.bytes() >= kPage) {
    const auto* header = reinterpret_cast<const SegmentHeader*>(segment.data());
    const SegmentParameters found = copy_once(header->parameters);
    if (found.magic == kMagic && found.version == kLayoutVersion && found.shape.size > 0 &&
        found.shape.size <= kMostRanks) {
      for (const bool spans_machines : {false, true}) {
        const SegmentLayout layout(shape_for(static_cast<int>(found.shape.size), spans_machines));
        if (layout.shape() == found.shape && layout.total_bytes() == segment.bytes()) return layout;
      }
    }
  }
  throw Error(ErrorKind::backend, "no segment of a group of this version");
}

std::string label_of(const SegmentHeader& header) {
  std::string text;
  for (const auto& character : header.label) {
    const char c = character.load(std::memory_order_relaxed);
    if (c == '\0') break;
    text.push_back(c);
  }
  return text;
}

ObservedRank observe(const ControlPage& page) {
  ObservedRank rank;
  rank.known = snapshot_of(page);
  rank.process_space = page.status.process_space.load(std::memory_order_relaxed);
  const std::uint64_t told = page.remote.arrived.load(std::memory_order_acquire);
  rank.local = told == 0 && rank.process_space != 0;
  // Of a remote rank that goes on, its leader tells nothing but its arrivals.
  const bool passing = !rank.local && told < rank.known.arrived;
  rank.inside = rank.known.arrived > rank.known.finished && !passing;
  return rank;
}

}  // namespace

ObservedGroup observe(Descriptor file) {
  const Segment segment = Segment::observe(std::move(file));
  const SegmentLayout layout = layout_of(segment);
  const auto& header = *reinterpret_cast<const SegmentHeader*>(segment.data());
  const int size = static_cast<int>(layout.shape().size);
  ObservedGroup group;
  group.label = label_of(header);
  group.failure = failure_of(header.failure, size);
  for (int rank = 0; rank < size; ++rank) {
    group.ranks.push_back(
        observe(*reinterpret_cast<const ControlPage*>(segment.data() + layout.rank_offset(rank))));
  }
  return group;
}

}  // namespace collectives
