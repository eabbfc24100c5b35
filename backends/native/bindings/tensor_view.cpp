#include "bindings/tensor_view.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace nb = nanobind;

namespace collectives {
namespace {

// The parts of DLPack that are needed here, as its specification lays them out.
enum : std::int32_t { kCpu = 1 };
enum Code : std::uint8_t {
  kInt = 0,
  kUnsigned = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3Fn = 10,
  kFloat8E4M3Fnuz = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2Fnuz = 13,
  kFloat8E8M0Fnu = 14,
};

struct ExchangeTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeTable* older;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*tensor_from_object)(void* object, ExchangeTensor* tensor);
  void* current_stream;
};

struct TensorType {
  PyTypeObject* type;
  const ExchangeTable* table;
  // The table calls all integers of up to 8 bits alike, so that the tensor's own `dtype` has to tell whether
  // it is one of these.
  PyObject* int8;
  PyObject* uint8;
  PyObject* dtype_name;
  PyObject* is_neg_name;
};

using TensorTypes = std::vector<TensorType>;

// Replaced as a whole, at import, and never freed, so that other threads may look at tensors meanwhile.
// Release of the content, acquire by who reads it; null before the first.
std::atomic<const TensorTypes*> tensor_types = nullptr;
nb::ft_mutex registering;

std::optional<DType> dtype_of(std::uint8_t code, std::uint8_t bits) {
  const auto sized = [bits](DType b8, DType b16, DType b32, DType b64) -> std::optional<DType> {
    switch (bits) {
      case 8:
        return b8;
      case 16:
        return b16;
      case 32:
        return b32;
      case 64:
        return b64;
      default:
        return std::nullopt;
    }
  };
  switch (code) {
    case kInt:
      return sized(DType::int8, DType::int16, DType::int32, DType::int64);
    case kUnsigned:
      return sized(DType::uint8, DType::uint16, DType::uint32, DType::uint64);
    case kFloat:
      if (bits == 8) return std::nullopt;
      return sized(DType::float16, DType::float16, DType::float32, DType::float64);
    case kBfloat:
      return bits == 16 ? std::optional(DType::bfloat16) : std::nullopt;
    case kBool:
      return bits == 8 ? std::optional(DType::boolean) : std::nullopt;
    case kFloat8E4M3Fn:
      return DType::float8_e4m3fn;
    case kFloat8E4M3Fnuz:
      return DType::float8_e4m3fnuz;
    case kFloat8E5M2:
      return DType::float8_e5m2;
    case kFloat8E5M2Fnuz:
      return DType::float8_e5m2fnuz;
    case kFloat8E8M0Fnu:
      return DType::float8_e8m0fnu;
    default:  // complex numbers among them: the table does not tell whether they are lazily conjugated
      return std::nullopt;
  }
}

// The number of elements where they lie in row-major order without gaps, else nothing.
std::optional<std::size_t> dense_count(const ExchangeTensor& tensor) {
  std::int64_t count = 1;
  bool dense = true;
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == count);
    count *= tensor.shape[i];
  }
  if (!dense && count != 0) return std::nullopt;
  return static_cast<std::size_t>(count);
}

bool negated(nb::handle tensor, const TensorType& type) {
  PyObject* self = tensor.ptr();
  const nb::object result = nb::steal(PyObject_VectorcallMethod(type.is_neg_name, &self, 1, nullptr));
  return result.ptr() != Py_False;
}

bool has_dtype(nb::handle tensor, const TensorType& type, PyObject* dtype) {
  return nb::steal(PyObject_GetAttr(tensor.ptr(), type.dtype_name)).ptr() == dtype;
}

}  // namespace

void register_tensor_type(nb::handle type) {
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) return;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw nb::python_error();
  if (table->major != 1 || table->tensor_from_object == nullptr) return;
  const nb::object torch = nb::module_::import_("torch");
  nb::object int8 = torch.attr("int8");
  nb::object uint8 = torch.attr("uint8");
  nb::object dtype_name = nb::steal(PyUnicode_InternFromString("dtype"));
  nb::object is_neg_name = nb::steal(PyUnicode_InternFromString("is_neg"));
  const nb::ft_lock_guard lock(registering);
  const TensorTypes* before = tensor_types.load(std::memory_order_acquire);
  auto types = before == nullptr ? std::make_unique<TensorTypes>() : std::make_unique<TensorTypes>(*before);
  for (const TensorType& known : *types) {
    if (known.type == reinterpret_cast<PyTypeObject*>(type.ptr())) return;
  }
  types->push_back({reinterpret_cast<PyTypeObject*>(type.ptr()), table, int8.release().ptr(),
                    uint8.release().ptr(), dtype_name.release().ptr(), is_neg_name.release().ptr()});
  tensor_types.store(types.release(), std::memory_order_release);
}

std::optional<TensorView> dense_view(nb::handle tensor) {
  const TensorTypes* types = tensor_types.load(std::memory_order_acquire);
  if (types == nullptr) return std::nullopt;
  for (const TensorType& known : *types) {
    if (Py_TYPE(tensor.ptr()) != known.type) continue;
    ExchangeTensor view;
    if (known.table->tensor_from_object(tensor.ptr(), &view) != 0) {
      PyErr_Clear();  // sparse, quantized, on a device without memory, ...: the caller's business
      return std::nullopt;
    }
    const std::optional<DType> dtype = dtype_of(view.code, view.bits);
    const std::optional<std::size_t> count = dense_count(view);
    if (view.device_type != kCpu || view.lanes != 1 || !dtype || !count ||
        (view.data == nullptr && *count != 0) || negated(tensor, known) ||
        (*dtype == DType::int8 && !has_dtype(tensor, known, known.int8)) ||
        (*dtype == DType::uint8 && !has_dtype(tensor, known, known.uint8))) {
      PyErr_Clear();
      return std::nullopt;
    }
    const std::int64_t rows = view.dimensions == 0 ? 1 : view.shape[0];
    auto* const data = static_cast<std::byte*>(view.data);
    return TensorView{data == nullptr ? nullptr : data + view.byte_offset, *count,
                      static_cast<std::size_t>(rows), *dtype};
  }
  return std::nullopt;
}

}  // namespace collectives
