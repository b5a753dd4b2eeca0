// Block-wise questions about arrays as they lie in the body: unaligned, little-endian, of any wire type.
// The quick answer is one branch-free pass; only a "no" pays for finding where.
#pragma once

#include "bytes.hpp"

namespace spindle {

// The wire's element types, numbered as in its enum.
enum class Dtype : uint8_t { unset = 0, float32 = 1, int64 = 2, int32 = 3, bfloat16 = 4 };

constexpr bool is_integer(Dtype dtype) { return dtype == Dtype::int64 || dtype == Dtype::int32; }
constexpr size_t item_size(Dtype dtype) {
    return dtype == Dtype::int64 ? 8 : dtype == Dtype::bfloat16 ? 2 : dtype == Dtype::unset ? 0 : 4;
}
const char* name_of(Dtype dtype);

// The values without the whole blocks of zero bits at either end: what is zero passes every check, and need not be written where
// memory is zero already. -0.0 is not zero bits.
Bytes without_outer_zeros(Bytes values);

// Index of the first integer outside [0, bound), or -1. bound 0 = only negative ones are outside.
int64_t first_outside(Bytes values, Dtype dtype, int64_t bound);
// Index of the first NaN or infinity, or -1.
int64_t first_not_finite(Bytes values, Dtype dtype);

int64_t integer_at(Bytes values, Dtype dtype, int64_t index);
double number_at(Bytes values, Dtype dtype, int64_t index);

inline float bfloat16_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

}  // namespace spindle
