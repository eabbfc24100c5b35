// Reductions and copies over plain memory: the arithmetic of every collective operation.
//
// A source is the contribution of one rank; sources come in rank order. The accumulator is the type in which
// they are combined: float32 for float16, bfloat16 and every float8, otherwise the element type itself
// (complex numbers by component). The result is rounded to the element type once, after the last source.
//
// A result is a function of the values of the sources alone: it depends neither on alignment, nor on the
// vector width of the CPU, nor on how a caller splits a range into calls, nor on the thread's floating-point
// mode (rounding, flush to zero). So that this holds for NaN as well, whose sign and payload the hardware
// does not define, a NaN result is always the positive quiet NaN of its format (the only NaN, where the
// format has one).
#pragma once

#include <cstddef>

#include "common/codes.hpp"

namespace collectives {

// How a reduction uses memory beside its result and its sources.
struct ReduceOptions {
  // Another place for the result, or null: written from registers, so that no copy has to read it again. The
  // rules of `dst` hold for it too, and it does not overlap `dst`.
  void* second = nullptr;
  // What the calling thread reads next, or null: as many bytes of it as the result has are fetched into the
  // second-level cache meanwhile, while the thread waits for peers. A hint: any address will do.
  const void* next = nullptr;
};

// dst[i] = round(sources[0][i] op sources[1][i] op ... op sources[n-1][i]) for i in [0, count), combined from
// left to right.
//
//   SUM, PRODUCT   Integers wrap around (two's complement); on bool they are "or" and "and".
//   AVG            The sum divided by `factor`, before the one rounding. Integers: the exact sum, divided by
//                  the integer `factor`, truncated toward zero.
//   MIN, MAX       A NaN in any source gives NaN; of equal values (the two zeros) the first source's is kept;
//                  on bool they are "and" and "or".
//   BAND/BOR/BXOR  Integers and bool.
//   PREMUL_SUM     Every source is multiplied by `factor`, rounded to the accumulator type beforehand, then
//                  summed. For complex elements the factor is real.
// `factor` is ignored for the other operations. With one source every operation but AVG and PREMUL_SUM copies
// it.
//
// Rounding is to nearest, ties to even, and what does not fit becomes what torch makes of it: infinity; in
// float8_e4m3fn the largest number (as torch 2.12 and later); NaN in the float8 formats "fnuz" and e8m0fnu.
// float8_e8m0fnu holds powers of two alone: its sums round to the nearest of them (1.5 of one upward).
//
// Pointers may have any alignment. `dst` may be exactly one of the sources; any other overlap is undefined. A
// source may be given more than once. `count` may be 0.
//
// Runs on the calling thread alone; any thread may call it.
//
// Throws std::invalid_argument, with nothing written, if n < 1, if the pair is not `reducible`, or if an AVG
// factor is not positive and finite (for integers: not an integer of at most 2^53).
void reduce(void* dst, const void* const* sources, int n, std::size_t count, DType dtype, ReduceOp op,
            double factor, const ReduceOptions& options = {});

// The same reduction in two steps, for sources in several places. The partial of some sources is what their
// accumulators hold after the last of them, in memory: an accumulator an element, in their order and in this
// CPU's byte order. `combine` reduces partials from left to right and rounds:
//
//   accumulate(p[j], sources of place j, ...) for each j, then combine(dst, p, number of places, ...)
//
// With one source a place that gives the bits of `reduce` over all sources; with more it adds up place by
// place. Operations whose accumulators are exact (integers, bool, MIN, MAX) give the same either way.
//
// `dst` may be exactly one of the sources where both have elements of one size; else it overlaps none.
std::size_t accumulator_bytes(DType dtype, ReduceOp op);
void accumulate(void* partial, const void* const* sources, int n, std::size_t count, DType dtype, ReduceOp op,
                double factor);
void combine(void* dst, const void* const* partials, int n, std::size_t count, DType dtype, ReduceOp op,
             double factor);

// Copies between ranges that do not overlap. `next` is as in `ReduceOptions`.
void copy(void* dst, const void* src, std::size_t bytes, const void* next = nullptr);

// The same for a destination that this CPU will not read soon: the stores pass by the cache where the CPU can
// do so, and are ordered before any store that follows in program order when the call returns.
void copy_streaming(void* dst, const void* src, std::size_t bytes, const void* next = nullptr);

// The same, and takes over the source's cache lines (common/cache_line.hpp). Nobody else may use them
// meanwhile.
void copy_taking(void* dst, void* src, std::size_t bytes);
void copy_taking_streaming(void* dst, void* src, std::size_t bytes);

// The instruction set in use: "default" (the baseline of the architecture), "avx2" or "avx512". Chosen once,
// the best that the CPU has; the environment variable COLLECTIVES_CPU_CAPABILITY may lower it (empty: as if
// unset). Throws std::invalid_argument if the variable names none, or one that this CPU lacks. `reduce` and
// `copy_streaming` throw the same: a process that wants the error early calls this first.
const char* cpu_capability();

}  // namespace collectives
