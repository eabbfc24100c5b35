// Element types, reductions and collective operations, by the codes that cross every boundary: Python to C++,
// and rank to rank.
//
// A code never changes its meaning; new ones are added at the end. This header declares and defines nothing
// that the compiler could emit, so that translation units for different instruction sets can share it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace collectives {

// Every dtype that torch has for dense CPU tensors.
enum class DType : std::uint8_t {
  boolean = 0,
  uint8 = 1,
  uint16 = 2,
  uint32 = 3,
  uint64 = 4,
  int8 = 5,
  int16 = 6,
  int32 = 7,
  int64 = 8,
  float16 = 9,
  bfloat16 = 10,
  float32 = 11,
  float64 = 12,
  complex32 = 13,  // two float16
  complex64 = 14,
  complex128 = 15,
  float8_e4m3fn = 16,
  float8_e5m2 = 17,
  float8_e4m3fnuz = 18,
  float8_e5m2fnuz = 19,
  float8_e8m0fnu = 20,

  // From here on bytes are moved and never reduced.
  float4_e2m1fn_x2 = 21,
  bits1x8 = 22,
  bits2x4 = 23,
  bits4x2 = 24,
  bits8 = 25,
  bits16 = 26,
  int1 = 27,
  int2 = 28,
  int3 = 29,
  int4 = 30,
  int5 = 31,
  int6 = 32,
  int7 = 33,
  uint1 = 34,
  uint2 = 35,
  uint3 = 36,
  uint4 = 37,
  uint5 = 38,
  uint6 = 39,
  uint7 = 40,
  qint8 = 41,
  quint8 = 42,
  qint32 = 43,
  // Several tensor elements share one byte: an element here is one byte of storage.
  quint4x2 = 44,
  quint2x4 = 45,
};
inline constexpr int kDTypeCount = 46;

// The numbers of torch.distributed.ReduceOp.
enum class ReduceOp : std::uint8_t {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8,
};
inline constexpr int kReduceOpCount = 9;

// Whether a code that came from outside names anything.
bool is_dtype(std::uint8_t code) noexcept;
bool is_reduce_op(std::uint8_t code) noexcept;

// Bytes of one element.
std::size_t size_of(DType dtype) noexcept;

// The name that torch gives: "float32", "SUM".
const char* name_of(DType dtype) noexcept;
const char* name_of(ReduceOp op) noexcept;

// Whether `reduce` (kernels/kernels.hpp) computes `op` on `dtype`:
//   bool      SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR
//   integers  the same and AVG
//   floats    SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM; float8_e8m0fnu without PREMUL_SUM, because the
//             format has neither a sign nor a zero that could hold the product with any factor
//   complex   SUM, AVG, PREMUL_SUM
//   others    none
bool reducible(DType dtype, ReduceOp op) noexcept;

// A collective operation.
enum class Opcode : std::uint8_t {
  none = 0,
  barrier = 1,
  broadcast = 2,
  all_reduce = 3,
  reduce = 4,
  all_gather = 5,
  reduce_scatter = 6,
  gather = 7,
  scatter = 8,
  all_to_all = 9,
};

const char* name_of(Opcode opcode) noexcept;

// Whether its ranks must name a reduction, or a root.
bool reduces(Opcode opcode) noexcept;
bool rooted(Opcode opcode) noexcept;

}  // namespace collectives
