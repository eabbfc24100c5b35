#include "bindings/operation_record.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/errors.hpp"

namespace nb = nanobind;

namespace collectives {
namespace {

void append(nb::list& values, const OperationRing& ring) {
  for (const RecordedOperation& one : ring.operations()) {
    const bool has_tensor = one.tensors != 0;
    values.append(nb::make_tuple(one.number, name_of_kind(one.kind), text_from(detail_of(one)),
                                 has_tensor ? nb::object(nb::make_tuple(one.count)) : nb::none(),
                                 has_tensor ? name_of(one.dtype) : "", one.tensors, one.bytes, one.timeout,
                                 one.began, one.ended, text_from(one.error), text_from(one.site)));
  }
}

nb::list operations_of(const SharedRecord& shared) {
  nb::list values;
  append(values, shared.record->collectives);
  append(values, shared.record->messages);
  return values;
}

void add(nb::dict& values, const OperationRing& ring) {
  const auto totals = ring.totals();
  for (std::size_t kind = 0; kind < totals.size(); ++kind) {
    if (totals[kind].count == 0) continue;
    nb::dict one;
    one["count"] = totals[kind].count;
    one["bytes"] = totals[kind].bytes;
    one["errors"] = totals[kind].errors;
    one["seconds"] = static_cast<double>(totals[kind].time) / static_cast<double>(kSecond);
    values[name_of_kind(static_cast<std::uint8_t>(kind))] = one;
  }
}

nb::dict totals_of(const SharedRecord& shared) {
  nb::dict values;
  add(values, shared.record->collectives);
  add(values, shared.record->messages);
  return values;
}

nb::str first_error_of(const SharedRecord& shared) {
  const std::string error = shared.record->collectives.first_error();
  return text_from(error.empty() ? shared.record->messages.first_error() : error);
}

}  // namespace

void bind_operation_record(nb::module_& module) {
  nb::class_<SharedRecord>(module, "OperationRecord")
      .def(
          "__init__",
          [](SharedRecord* self, std::size_t capacity) {
            new (self) SharedRecord{std::make_shared<OperationRecord>(capacity)};
          },
          nb::arg("capacity"))
      .def("operations", operations_of)
      .def("totals", totals_of)
      .def_prop_ro("begun",
                   [](const SharedRecord& shared) {
                     return shared.record->collectives.begun() + shared.record->messages.begun();
                   })
      .def_prop_ro("first_error", first_error_of);
}

}  // namespace collectives
