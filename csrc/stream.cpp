#include "stream.hpp"

#include <algorithm>

#include "simd.hpp"

namespace spindle {

namespace {
constexpr size_t large = size_t{256} << 10;  // more than the caches near a core have to spare
constexpr size_t ahead = 3072;               // bytes that reads are asked for early; measured, and flat around it

#ifdef SPINDLE_AVX2
using Vector = __m256i;
constexpr size_t vector_bytes = sizeof(Vector);

// Items of `item` bytes until `to` stands at a whole vector; `to` is a multiple of `item`, as arrays are.
size_t items_to_boundary(const void* to, size_t item, size_t n) {
    const size_t past = reinterpret_cast<uintptr_t>(to) % vector_bytes;
    return std::min(n, (past ? vector_bytes - past : 0) / item);
}

SPINDLE_AVX2 void stream_copy(uint8_t* to, const uint8_t* from, size_t bytes) {
    const size_t head = items_to_boundary(to, 1, bytes);
    std::memcpy(to, from, head);
    size_t i = head;
    for (; i + 4 * vector_bytes <= bytes; i += 4 * vector_bytes) {
        if (i + ahead < bytes) {
            _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead + 64), _MM_HINT_T0);
        }
        Vector v[4];
        for (size_t k = 0; k < 4; ++k) v[k] = _mm256_loadu_si256(reinterpret_cast<const Vector*>(from + i + k * vector_bytes));
        for (size_t k = 0; k < 4; ++k) _mm256_stream_si256(reinterpret_cast<Vector*>(to + i + k * vector_bytes), v[k]);
    }
    std::memcpy(to + i, from + i, bytes - i);
}

SPINDLE_AVX2 void stream_zero(uint8_t* to, size_t bytes) {
    const size_t head = items_to_boundary(to, 1, bytes);
    std::memset(to, 0, head);
    size_t i = head;
    for (; i + vector_bytes <= bytes; i += vector_bytes) _mm256_stream_si256(reinterpret_cast<Vector*>(to + i), _mm256_setzero_si256());
    std::memset(to + i, 0, bytes - i);
}

SPINDLE_AVX2 void stream_widen(int64_t* to, const uint8_t* from, size_t n) {
    size_t i = 0;
    for (const size_t head = items_to_boundary(to, 8, n); i < head; ++i) to[i] = load<int32_t>(from + 4 * i);
    for (; i + 8 <= n; i += 8) {
        _mm_prefetch(reinterpret_cast<const char*>(from + 4 * i + ahead), _MM_HINT_T0);
        for (size_t k = 0; k < 8; k += 4) {
            const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4 * (i + k)));
            _mm256_stream_si256(reinterpret_cast<Vector*>(to + i + k), _mm256_cvtepi32_epi64(narrow));
        }
    }
    for (; i < n; ++i) to[i] = load<int32_t>(from + 4 * i);
}
#endif

SPINDLE_WIDE void plain_widen(int64_t* to, const uint8_t* from, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = load<int32_t>(from + 4 * i);
}
}  // namespace

#ifdef SPINDLE_AVX2
StreamWriter::StreamWriter(size_t total_bytes) : past_caches_(total_bytes >= large && has_avx2()) {}
StreamWriter::~StreamWriter() {
    if (past_caches_) _mm_sfence();
}
#define SPINDLE_STREAM(call) \
    if (past_caches_) return call
#else
StreamWriter::StreamWriter(size_t) : past_caches_(false) {}
StreamWriter::~StreamWriter() = default;
#define SPINDLE_STREAM(call)
#endif

void ask_early(Bytes source) {
    for (size_t i = 0; i < std::min(source.size, ahead); i += 64) __builtin_prefetch(source.data + i);
}

void StreamWriter::copy(void* to, const uint8_t* from, size_t bytes) const {
    if (bytes == 0) return;
    SPINDLE_STREAM(stream_copy(static_cast<uint8_t*>(to), from, bytes));
    std::memcpy(to, from, bytes);
}

void StreamWriter::zero(void* to, size_t bytes) const {
    if (bytes == 0) return;
    SPINDLE_STREAM(stream_zero(static_cast<uint8_t*>(to), bytes));
    std::memset(to, 0, bytes);
}

void StreamWriter::widen(int64_t* to, const uint8_t* int32, size_t n) const {
    SPINDLE_STREAM(stream_widen(to, int32, n));
    plain_widen(to, int32, n);
}

}  // namespace spindle
