// A 128-bit fingerprint of content, to tell a retry from another request. Not cryptographic: it guards against accidents.
#pragma once

#include "bytes.hpp"

namespace spindle {

struct Fingerprint {
    uint64_t low = 0;
    uint64_t high = 0;

    bool operator==(const Fingerprint& other) const { return low == other.low && high == other.high; }
    // Order does not matter: for the entries of a map.
    void add(const Fingerprint& other) {
        low += other.low;
        high += other.high;
    }
    // Order matters: for everything else.
    void then(const Fingerprint& other);
    void then(uint64_t number) { then(Fingerprint{number, ~number}); }
};

Fingerprint fingerprint(Bytes content);

}  // namespace spindle
