// zstd bodies: what a body will inflate to, known before memory is taken, and inflating it piece by piece.
#pragma once

#include "arena.hpp"
#include "bytes.hpp"
#include "limits.hpp"

namespace spindle {

// What the frame and block headers alone say of a body.
struct InflatedSize {
    size_t bound = 0;    // it cannot inflate to more
    bool exact = false;  // every frame declares its size: it inflates to exactly `bound`
};

// Walks the headers of all frames without inflating. Throws MalformedBody for bytes that are not whole zstd frames, for
// dictionaries, windows over the limit, sizes over the limit, and declared sizes that the blocks cannot have.
InflatedSize inspect_zstd(Bytes body, const Limits& limits);

// Inflates a body that inspect_zstd accepted into one contiguous run, on demand.
// Borrows the context, the body and the destination (which must hold `capacity` bytes).
class Inflater {
  public:
    Inflater(ZSTD_DCtx_s* context, Bytes body, uint8_t* to, size_t capacity);

    // Inflates until at least `end` bytes are there or the body is over. Returns how many there are.
    size_t advance(size_t end);
    // Whole blocks only while they surely fit in `end`; for a look at the head of a body.
    size_t advance_within(size_t end);
    size_t produced() const { return produced_; }
    bool finished() const { return in_ == body_.size; }

  private:
    void step();
    ZSTD_DCtx_s* context_;
    Bytes body_;
    uint8_t* to_;
    size_t capacity_;
    size_t in_ = 0;
    size_t produced_ = 0;
    size_t hint_ = 0;         // compressed bytes that the next step needs; 0 = at a frame's start
};

// A new decompression context, or bad_alloc. The caller frees it with ZSTD_freeDCtx.
ZSTD_DCtx_s* new_zstd_context();
void free_zstd_context(ZSTD_DCtx_s* context);

}  // namespace spindle
