#include "common/codes.hpp"

#include <cstddef>
#include <iterator>

namespace collectives {
namespace {

enum class Category : std::uint8_t { boolean, integer, floating, scale, complex, opaque };

struct Description {
  DType dtype;
  const char* name;
  std::uint8_t size;
  Category category;
};

constexpr Description kDescriptions[] = {
    {DType::boolean, "bool", 1, Category::boolean},
    {DType::uint8, "uint8", 1, Category::integer},
    {DType::uint16, "uint16", 2, Category::integer},
    {DType::uint32, "uint32", 4, Category::integer},
    {DType::uint64, "uint64", 8, Category::integer},
    {DType::int8, "int8", 1, Category::integer},
    {DType::int16, "int16", 2, Category::integer},
    {DType::int32, "int32", 4, Category::integer},
    {DType::int64, "int64", 8, Category::integer},
    {DType::float16, "float16", 2, Category::floating},
    {DType::bfloat16, "bfloat16", 2, Category::floating},
    {DType::float32, "float32", 4, Category::floating},
    {DType::float64, "float64", 8, Category::floating},
    {DType::complex32, "complex32", 4, Category::complex},
    {DType::complex64, "complex64", 8, Category::complex},
    {DType::complex128, "complex128", 16, Category::complex},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1, Category::floating},
    {DType::float8_e5m2, "float8_e5m2", 1, Category::floating},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz", 1, Category::floating},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz", 1, Category::floating},
    {DType::float8_e8m0fnu, "float8_e8m0fnu", 1, Category::scale},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", 1, Category::opaque},
    {DType::bits1x8, "bits1x8", 1, Category::opaque},
    {DType::bits2x4, "bits2x4", 1, Category::opaque},
    {DType::bits4x2, "bits4x2", 1, Category::opaque},
    {DType::bits8, "bits8", 1, Category::opaque},
    {DType::bits16, "bits16", 2, Category::opaque},
    {DType::int1, "int1", 1, Category::opaque},
    {DType::int2, "int2", 1, Category::opaque},
    {DType::int3, "int3", 1, Category::opaque},
    {DType::int4, "int4", 1, Category::opaque},
    {DType::int5, "int5", 1, Category::opaque},
    {DType::int6, "int6", 1, Category::opaque},
    {DType::int7, "int7", 1, Category::opaque},
    {DType::uint1, "uint1", 1, Category::opaque},
    {DType::uint2, "uint2", 1, Category::opaque},
    {DType::uint3, "uint3", 1, Category::opaque},
    {DType::uint4, "uint4", 1, Category::opaque},
    {DType::uint5, "uint5", 1, Category::opaque},
    {DType::uint6, "uint6", 1, Category::opaque},
    {DType::uint7, "uint7", 1, Category::opaque},
    {DType::qint8, "qint8", 1, Category::opaque},
    {DType::quint8, "quint8", 1, Category::opaque},
    {DType::qint32, "qint32", 4, Category::opaque},
    {DType::quint4x2, "quint4x2", 1, Category::opaque},
    {DType::quint2x4, "quint2x4", 1, Category::opaque},
};

constexpr bool in_order_of_codes() {
  for (std::size_t i = 0; i < std::size(kDescriptions); ++i) {
    if (static_cast<std::size_t>(kDescriptions[i].dtype) != i) return false;
  }
  return true;
}
static_assert(std::size(kDescriptions) == kDTypeCount && in_order_of_codes());

constexpr const char* kOpNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
static_assert(std::size(kOpNames) == kReduceOpCount);

const Description& describe(DType dtype) noexcept { return kDescriptions[static_cast<std::size_t>(dtype)]; }

constexpr unsigned bit(ReduceOp op) { return 1U << static_cast<unsigned>(op); }

constexpr unsigned kOrdered =
    bit(ReduceOp::sum) | bit(ReduceOp::product) | bit(ReduceOp::min) | bit(ReduceOp::max);
constexpr unsigned kBitwise = bit(ReduceOp::band) | bit(ReduceOp::bor) | bit(ReduceOp::bxor);

constexpr unsigned ops_of(Category category) {
  switch (category) {
    case Category::boolean:
      return kOrdered | kBitwise;
    case Category::integer:
      return kOrdered | kBitwise | bit(ReduceOp::avg);
    case Category::floating:
      return kOrdered | bit(ReduceOp::avg) | bit(ReduceOp::premul_sum);
    case Category::scale:
      return kOrdered | bit(ReduceOp::avg);
    case Category::complex:
      return bit(ReduceOp::sum) | bit(ReduceOp::avg) | bit(ReduceOp::premul_sum);
    case Category::opaque:
      return 0;
  }
  return 0;
}

}  // namespace

bool is_dtype(std::uint8_t code) noexcept { return code < kDTypeCount; }

bool is_reduce_op(std::uint8_t code) noexcept { return code < kReduceOpCount; }

std::size_t size_of(DType dtype) noexcept { return describe(dtype).size; }

const char* name_of(DType dtype) noexcept { return describe(dtype).name; }

const char* name_of(ReduceOp op) noexcept { return kOpNames[static_cast<std::size_t>(op)]; }

bool reducible(DType dtype, ReduceOp op) noexcept {
  return (ops_of(describe(dtype).category) & bit(op)) != 0;
}

const char* name_of(Opcode opcode) noexcept {
  constexpr const char* kNames[] = {"none",       "barrier",        "broadcast", "all_reduce", "reduce",
                                    "all_gather", "reduce_scatter", "gather",    "scatter",    "all_to_all"};
  const auto code = static_cast<std::size_t>(opcode);
  return code < std::size(kNames) ? kNames[code] : "unknown";
}

bool reduces(Opcode opcode) noexcept {
  return opcode == Opcode::all_reduce || opcode == Opcode::reduce || opcode == Opcode::reduce_scatter;
}

bool rooted(Opcode opcode) noexcept {
  return opcode == Opcode::broadcast || opcode == Opcode::reduce || opcode == Opcode::gather ||
         opcode == Opcode::scatter;
}

}  // namespace collectives
