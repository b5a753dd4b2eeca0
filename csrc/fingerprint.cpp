#include "fingerprint.hpp"

#include "simd.hpp"

namespace spindle {

namespace {
constexpr size_t lanes = 8;
constexpr size_t stripe = lanes * 8;
constexpr uint64_t odd[lanes] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93,
                                 0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};

uint64_t mix(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Each lane sums 32 x 32-bit products of its words under a key that moves on with every stripe (so that order counts), and the
// word itself goes into the neighbouring lane (so that a zero factor hides nothing).
SPINDLE_WIDE void absorb(uint64_t* sums, const uint8_t* from, size_t stripes) {
    uint64_t key[lanes];
    uint64_t sum[lanes];
    for (size_t i = 0; i < lanes; ++i) {
        key[i] = odd[i];
        sum[i] = sums[i];
    }
    for (size_t n = 0; n < stripes; ++n, from += stripe) {
        uint64_t word[lanes];
        std::memcpy(word, from, stripe);
        for (size_t i = 0; i < lanes; ++i) {
            const uint64_t keyed = word[i] + key[i];
            sum[i] += (keyed & 0xffffffff) * (keyed >> 32) + word[i ^ 1];
            key[i] += odd[lanes - 1 - i];
        }
    }
    for (size_t i = 0; i < lanes; ++i) sums[i] = sum[i];
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
    const size_t stripes = content.size / stripe;
    absorb(sums, content.data, stripes);
    if (const size_t rest = content.size % stripe) {
        uint8_t last[stripe] = {};
        std::memcpy(last, content.data + stripes * stripe, rest);
        for (size_t i = 0; i < lanes; ++i) sums[i] = mix(sums[i] ^ odd[i], odd[lanes - 1 - i]);
        absorb(sums, last, 1);
    }
    Fingerprint out{content.size, odd[7]};
    for (size_t i = 0; i < lanes; i += 2) out.then(Fingerprint{sums[i], sums[i + 1]});
    return out;
}

}  // namespace spindle
