#include "fingerprint.hpp"

#include "simd.hpp"

namespace spindle {

namespace {
constexpr size_t lanes = 8;
constexpr size_t stripe = lanes * 8;
alignas(32) constexpr uint64_t odd[lanes] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93,
                                             0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};
alignas(32) constexpr uint64_t steps[lanes] = {odd[7], odd[6], odd[5], odd[4], odd[3], odd[2], odd[1], odd[0]};

uint64_t mix(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Each lane sums 32 x 32-bit products of its words under a key that moves on with every stripe (so that order counts), and the
// word itself goes into the neighbouring lane (so that a zero factor hides nothing).
void absorb_plain(uint64_t* sums, uint64_t* key, const uint8_t* from, size_t stripes) {
    for (; stripes; --stripes, from += stripe) {
        for (size_t i = 0; i < lanes; ++i) {
            const uint64_t keyed = load<uint64_t>(from + 8 * i) + key[i];
            sums[i] += (keyed & 0xffffffff) * (keyed >> 32) + load<uint64_t>(from + 8 * (i ^ 1));
            key[i] += steps[i];
        }
    }
}

#ifdef SPINDLE_AVX2
// The same, four lanes at a time.
SPINDLE_AVX2 void absorb_avx2(uint64_t* sums, uint64_t* keys, const uint8_t* from, size_t stripes) {
    __m256i sum[2], key[2], step[2];
    for (int half = 0; half < 2; ++half) {
        sum[half] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + 4 * half));
        key[half] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 4 * half));
        step[half] = _mm256_load_si256(reinterpret_cast<const __m256i*>(steps + 4 * half));
    }
    for (; stripes; --stripes, from += stripe) {
        for (int half = 0; half < 2; ++half) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half));
            const __m256i keyed = _mm256_add_epi64(word, key[half]);
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i neighbour = _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2));
            sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, neighbour));
            key[half] = _mm256_add_epi64(key[half], step[half]);
        }
    }
    for (int half = 0; half < 2; ++half) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4 * half), sum[half]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + 4 * half), key[half]);
    }
}
#endif

void absorb(uint64_t* sums, uint64_t* keys, const uint8_t* from, size_t stripes) {
#ifdef SPINDLE_AVX2
    if (has_avx2()) return absorb_avx2(sums, keys, from, stripes);
#endif
    absorb_plain(sums, keys, from, stripes);
}
}  // namespace

void Fingerprint::then(const Fingerprint& other) {
    const uint64_t a = mix(low ^ other.low ^ odd[0], high + other.high + odd[1]);
    const uint64_t b = mix(high ^ other.high ^ odd[2], low + other.low * odd[4] + odd[3]);
    low = a + other.high;
    high = b + other.low;
}

Fingerprint fingerprint(Bytes content) {
    uint64_t sums[lanes];
    for (size_t i = 0; i < lanes; ++i) sums[i] = odd[i] * (content.size + i + 1);
    uint64_t keys[lanes];
    std::memcpy(keys, odd, sizeof(keys));
    const size_t stripes = content.size / stripe;
    if (stripes) absorb(sums, keys, content.data, stripes);
    if (const size_t rest = content.size % stripe) {
        uint8_t last[stripe] = {};
        std::memcpy(last, content.data + stripes * stripe, rest);
        absorb(sums, keys, last, 1);
    }
    Fingerprint out{content.size, odd[7]};
    for (size_t i = 0; i < lanes; i += 2) out.then(Fingerprint{sums[i], sums[i + 1]});
    return out;
}

}  // namespace spindle
