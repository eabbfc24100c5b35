// The state of groups as a process that is no rank of them sees it.
#include <fcntl.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "common/error.hpp"
#include "state/segment_observer.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

nb::object rank_or_none(std::uint32_t rank) {
  if (rank == 0 || rank == kNobody) return nb::none();
  return nb::int_(rank - 1);
}

nb::dict values_of(const ObservedRank& rank, Nanoseconds now) {
  const RankSnapshot& known = rank.known;
  const auto seconds_since = [now](Nanoseconds then) {
    return std::max(static_cast<double>(now - then), 0.0) / kSecond;
  };
  nb::dict values;
  values["local"] = rank.local;
  values["process"] = known.process;
  values["process_space"] = rank.process_space;
  values["presence"] = known.presence;
  values["sequence"] = known.arrived;
  values["inside"] = rank.inside;
  values["operation"] =
      known.arrived == 0 ? nb::object(nb::none()) : text_from(describe(known.what, known.own_count));
  values["waits_for"] = rank.inside ? rank_or_none(known.waits_for) : nb::none();
  values["seconds"] = seconds_since(known.entered);
  values["message"] = nb::none();
  if (known.mail_peer != 0) {
    nb::dict message;
    message["sends"] = known.mail_direction == static_cast<std::uint32_t>(MailDirection::send);
    message["peer"] = rank_or_none(known.mail_peer);
    message["tag"] = known.mail_tag;
    message["seconds"] = seconds_since(known.mail_since);
    values["message"] = message;
  }
  values["site"] = text_from(std::string(known.site, ::strnlen(known.site, sizeof(known.site))));
  return values;
}

nb::dict observe_segment(int fd) {
  Descriptor file(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!file) throw Error(ErrorKind::backend, with_errno("cannot duplicate a descriptor", errno));
  const ObservedGroup group = observe(std::move(file));
  const Nanoseconds now = now_ns();
  nb::list ranks;
  for (const ObservedRank& rank : group.ranks) ranks.append(values_of(rank, now));
  nb::dict values;
  values["label"] = text_from(group.label);
  values["failure"] = group.failure ? nb::object(text_from(group.failure->text)) : nb::none();
  values["ranks"] = ranks;
  return values;
}

}  // namespace

void bind_observer(nb::module_& module) { module.def("observe_segment", observe_segment, nb::arg("fd")); }

}  // namespace collectives
