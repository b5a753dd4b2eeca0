// A borrowed run of bytes, and unaligned little-endian loads from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Spindle reads the little-endian arrays of the wire in place: it does not run on big-endian machines."
#endif

namespace spindle {

// Borrowed: whoever made it keeps the memory alive. Nothing is assumed about alignment.
struct Bytes {
    const uint8_t* data = nullptr;
    size_t size = 0;

    std::string_view text() const { return {reinterpret_cast<const char*>(data), size}; }
};

template <class T>
inline T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

}  // namespace spindle
