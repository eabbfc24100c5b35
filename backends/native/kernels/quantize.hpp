// Blocks of float32 in 8 bits for each element and one float32 for each block, and back.
//
// A block is `block` elements in a row, the last one perhaps fewer. Its step is its greatest magnitude over
// the greatest code; an element becomes the code nearest to its quotient by the step, ties to even:
//
//   int8            whole numbers from -127 to 127, so that the error is at most half a step
//   float8_e4m3fn   numbers of 4 significant bits up to 448: the error is at most 1/16 of the element, or
//                   2^-10 steps where that is more
//
// A step is rounded up where it is subnormal, so that the bounds hold there, too, and is no less than 2^-149
// unless the block is zero. In int8 zeros lose their sign.
//
// A block with elements that are not finite has its step stored with the sign bit, and one code less: 126 and
// 416 are the greatest then, the next ones (127 and 448, of either sign) stand for infinity, -128 and NaN for
// NaN. So these stay what they are, and the others of the block nearly as exact as without them.
//
// All is IEEE 754 arithmetic without contraction: the same bits on every CPU and for every way to split a
// range at blocks. Pointers may have any alignment, `count` may be 0. Runs on the calling thread alone; any
// thread may call it. std::invalid_argument: the format is another, or `block` is 0.
#pragma once

#include <cstddef>

#include "common/codes.hpp"

namespace collectives {

// Writes `count` codes and the step of each block. Where `left` is not null, it gets what the codes leave out
// of the source, and NaN where that is not finite; it may be the source.
void quantize(std::byte* codes, std::byte* steps, const std::byte* source, std::byte* left, std::size_t count,
              std::size_t block, DType format);

// Writes, or adds to `dst`, what codes and steps stand for, times `weight`: positive, and finite. The step is
// multiplied first, so that no sum of means overflows.
void dequantize(std::byte* dst, const std::byte* codes, const std::byte* steps, std::size_t count,
                std::size_t block, DType format, float weight, bool adds);

}  // namespace collectives
