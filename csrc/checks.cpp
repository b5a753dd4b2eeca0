#include "checks.hpp"

#include <algorithm>
#include <cmath>

#include "simd.hpp"

namespace spindle {

namespace {
// The largest of n little-endian words after masking. Unsigned, so that a negative integer counts as huge.
SPINDLE_WIDE uint32_t largest32(const uint8_t* from, size_t n, uint32_t mask) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; ++i) most = std::max(most, load<uint32_t>(from + 4 * i) & mask);
    return most;
}

SPINDLE_WIDE uint16_t largest16(const uint8_t* from, size_t n, uint16_t mask) {
    uint16_t most = 0;
    for (size_t i = 0; i < n; ++i) most = std::max<uint16_t>(most, load<uint16_t>(from + 2 * i) & mask);
    return most;
}

// All of n int64 lie in [0, bound), for a bound that fits 32 bits: the high words are zero and the low words are below it.
SPINDLE_WIDE bool int64_below(const uint8_t* from, size_t n, uint32_t bound) {
    uint32_t high = 0;
    uint32_t low = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto value = load<uint64_t>(from + 8 * i);
        high |= static_cast<uint32_t>(value >> 32);
        low = std::max(low, static_cast<uint32_t>(value));
    }
    return high == 0 && (n == 0 || low < bound);
}

constexpr size_t zero_block = 256;  // bytes; a multiple of every item

// How many of n blocks are zero before the first that is not, going on by `stride` bytes from one to the next.
SPINDLE_WIDE size_t zero_blocks(const uint8_t* from, size_t n, ptrdiff_t stride) {
    for (size_t block = 0; block < n; ++block, from += stride) {
        uint64_t any = 0;
        for (size_t i = 0; i < zero_block; i += 8) any |= load<uint64_t>(from + i);
        if (any) return block;
    }
    return n;
}

bool quick_in_range(Bytes values, Dtype dtype, int64_t bound) {
    const size_t n = values.size / item_size(dtype);
    if (dtype == Dtype::int32) {
        const uint32_t limit = bound == 0 || bound > INT32_MAX ? uint32_t{1} << 31 : static_cast<uint32_t>(bound);
        return n == 0 || largest32(values.data, n, UINT32_MAX) < limit;
    }
    return bound > 0 && bound <= UINT32_MAX && int64_below(values.data, n, static_cast<uint32_t>(bound));
}

bool quick_finite(Bytes values, Dtype dtype) {
    const size_t n = values.size / item_size(dtype);
    switch (dtype) {
        case Dtype::float32: return largest32(values.data, n, 0x7fffffff) < 0x7f800000;
        case Dtype::bfloat16: return largest16(values.data, n, 0x7fff) < 0x7f80;
        default: return true;
    }
}
}  // namespace

const char* name_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::float32: return "float32";
        case Dtype::int64: return "int64";
        case Dtype::int32: return "int32";
        case Dtype::bfloat16: return "bfloat16";
        default: return "unset";
    }
}

Bytes without_outer_zeros(Bytes values) {
    const size_t head = zero_block * zero_blocks(values.data, values.size / zero_block, zero_block);
    values.data += head;
    values.size -= head;
    if (const size_t blocks = values.size / zero_block)
        values.size -= zero_block * zero_blocks(values.data + values.size - zero_block, blocks, -static_cast<ptrdiff_t>(zero_block));
    return values;
}

int64_t integer_at(Bytes values, Dtype dtype, int64_t index) {
    return dtype == Dtype::int32 ? load<int32_t>(values.data + 4 * index) : load<int64_t>(values.data + 8 * index);
}

double number_at(Bytes values, Dtype dtype, int64_t index) {
    switch (dtype) {
        case Dtype::float32: return load<float>(values.data + 4 * index);
        case Dtype::bfloat16: return bfloat16_to_float(load<uint16_t>(values.data + 2 * index));
        default: return static_cast<double>(integer_at(values, dtype, index));
    }
}

int64_t first_outside(Bytes values, Dtype dtype, int64_t bound) {
    if (quick_in_range(values, dtype, bound)) return -1;
    const auto n = static_cast<int64_t>(values.size / item_size(dtype));
    for (int64_t i = 0; i < n; ++i) {
        const int64_t value = integer_at(values, dtype, i);
        if (value < 0 || (bound > 0 && value >= bound)) return i;
    }
    return -1;
}

int64_t first_not_finite(Bytes values, Dtype dtype) {
    if (quick_finite(values, dtype)) return -1;
    const auto n = static_cast<int64_t>(values.size / item_size(dtype));
    for (int64_t i = 0; i < n; ++i)
        if (!std::isfinite(number_at(values, dtype, i))) return i;
    return -1;
}

}  // namespace spindle
