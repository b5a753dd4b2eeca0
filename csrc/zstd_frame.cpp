#include "zstd_frame.hpp"

#include <zstd.h>

#include <algorithm>
#include <new>

#include "errors.hpp"

namespace spindle {

namespace {
constexpr uint32_t frame_magic = 0xfd2fb528;
constexpr uint32_t skippable_magic = 0x184d2a50;  // the low 4 bits are free
constexpr size_t largest_block = size_t{128} << 10;

// A bounds-checked cursor over the headers.
struct Cursor {
    const uint8_t* at;
    const uint8_t* end;

    uint64_t little_endian(size_t n) {
        const uint8_t* from = take(n);
        uint64_t value = 0;
        for (size_t i = 0; i < n; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
        return value;
    }
    const uint8_t* take(size_t n) {
        if (static_cast<size_t>(end - at) < n) throw MalformedBody("the body is not readable zstd: it ends inside a frame");
        const uint8_t* out = at;
        at += n;
        return out;
    }
};

MalformedBody too_large(uint64_t size, const Limits& limits) {
    return MalformedBody(text("the body inflates to ", size, " bytes or more: at most ", limits.max_inflated_bytes, " are allowed"));
}

struct FrameHeader {
    bool declared = false;
    uint64_t size = 0;  // when declared
    size_t block_max = 0;
    bool checksum = false;
};

FrameHeader read_header(Cursor& cursor, const Limits& limits) {
    const auto descriptor = static_cast<uint32_t>(cursor.little_endian(1));
    const bool single_segment = descriptor & 0x20;
    if (descriptor & 0x08) throw MalformedBody("the body is not readable zstd: a reserved bit of the frame header is set");
    uint64_t window = 0;
    if (!single_segment) {
        const auto packed = static_cast<uint32_t>(cursor.little_endian(1));
        const uint32_t log = 10 + (packed >> 3);
        window = (uint64_t{1} << log) + ((uint64_t{1} << log) >> 3) * (packed & 7);
        if (window > uint64_t{1} << limits.zstd_window_log_max)
            throw MalformedBody(text("the zstd frame asks for a window of ", window, " bytes: at most 2^", limits.zstd_window_log_max,
                                     " are allowed; compress with a smaller window"));
    }
    static constexpr size_t dictionary_bytes[] = {0, 1, 2, 4};
    if (cursor.little_endian(dictionary_bytes[descriptor & 3]) != 0)
        throw MalformedBody("the zstd frame needs a dictionary: compress without one");
    FrameHeader header;
    header.checksum = descriptor & 0x04;
    static constexpr size_t size_bytes[] = {0, 2, 4, 8};
    const size_t n = (descriptor >> 6) == 0 && single_segment ? 1 : size_bytes[descriptor >> 6];
    header.declared = n > 0;
    header.size = cursor.little_endian(n) + (n == 2 ? 256 : 0);
    if (single_segment) window = header.size;
    header.block_max = static_cast<size_t>(std::min<uint64_t>(window, largest_block));
    return header;
}

// Bounds on what the blocks of a frame inflate to: raw and run-length blocks say it, compressed ones hold at most block_max.
struct BlockSizes {
    uint64_t least = 0;
    uint64_t most = 0;
};

BlockSizes walk_blocks(Cursor& cursor, size_t block_max) {
    BlockSizes sizes;
    for (bool last = false; !last;) {
        const auto block = static_cast<uint32_t>(cursor.little_endian(3));
        last = block & 1;
        const uint32_t kind = (block >> 1) & 3;
        const uint32_t size = block >> 3;
        if (kind == 3) throw MalformedBody("the body is not readable zstd: a block has the reserved kind");
        if (size > block_max) throw MalformedBody("the body is not readable zstd: a block is larger than its frame allows");
        cursor.take(kind == 1 ? 1 : size);
        sizes.least += kind == 2 ? 0 : size;
        sizes.most += kind == 2 ? block_max : size;
    }
    return sizes;
}
}  // namespace

InflatedSize inspect_zstd(Bytes body, const Limits& limits) {
    Cursor cursor{body.data, body.data + body.size};
    InflatedSize total{0, true};
    const auto limit = static_cast<uint64_t>(limits.max_inflated_bytes);
    uint64_t least = 0;
    uint64_t most = 0;
    bool first = true;
    while (cursor.at != cursor.end) {
        if (cursor.end - cursor.at < 4) throw MalformedBody("the body is not readable zstd: it ends inside a frame, or bytes trail the last one");
        const auto magic = static_cast<uint32_t>(cursor.little_endian(4));
        if ((magic & 0xfffffff0) == skippable_magic) {
            cursor.take(cursor.little_endian(4));
            continue;
        }
        if (magic != frame_magic)
            throw MalformedBody(first ? "the body is not zstd: it does not begin with a zstd frame" : "the body has trailing bytes after its last zstd frame");
        first = false;
        const FrameHeader header = read_header(cursor, limits);
        if (header.declared && header.size > limit) throw too_large(header.size, limits);
        const BlockSizes sizes = walk_blocks(cursor, header.block_max);
        if (header.checksum) cursor.take(4);
        if (header.declared && (header.size < sizes.least || header.size > sizes.most))
            throw MalformedBody(text("the zstd frame declares ", header.size, " bytes, but its blocks hold ", sizes.least, " to ", sizes.most));
        least += header.declared ? header.size : sizes.least;
        most += header.declared ? header.size : sizes.most;
        total.exact &= header.declared;
        if (least > limit) throw too_large(least, limits);
    }
    if (first) throw MalformedBody(body.size == 0 ? "the body is empty" : "the body holds no zstd frame");
    total.bound = static_cast<size_t>(std::min(most, limit));
    return total;
}

Inflater::Inflater(ZSTD_DCtx_s* context, Bytes body, uint8_t* to, size_t capacity)
    : context_(context), body_(body), to_(to), capacity_(capacity) {
    ZSTD_DCtx_reset(context_, ZSTD_reset_session_only);
}

void Inflater::step() {
    ZSTD_outBuffer out{to_, capacity_, produced_};
    ZSTD_inBuffer in{body_.data, std::min(body_.size, in_ + std::max<size_t>(hint_, 18)), in_};
    const size_t result = ZSTD_decompressStream(context_, &out, &in);
    if (ZSTD_isError(result)) throw MalformedBody(text("the body is not readable zstd: ", ZSTD_getErrorName(result)));
    if (in.pos == in_ && out.pos == produced_)
        throw MalformedBody(text("the body inflates to more than the ", capacity_, " bytes that are allowed"));
    in_ = in.pos;
    produced_ = out.pos;
    hint_ = result;
}

size_t Inflater::advance(size_t end) {
    while (produced_ < end && !finished()) step();
    return produced_;
}

size_t Inflater::advance_within(size_t end) {
    // A raw block comes out in pieces: the first of them may be a few bytes.
    constexpr size_t least = 4096;
    while (!finished() && (produced_ < least || produced_ + std::min(capacity_ - produced_, largest_block) <= end)) step();
    return produced_;
}

ZSTD_DCtx_s* new_zstd_context() {
    ZSTD_DCtx* context = ZSTD_createDCtx();
    if (!context) throw std::bad_alloc();
    count_allocation(ZSTD_sizeof_DCtx(context));
    ZSTD_DCtx_setParameter(context, ZSTD_d_windowLogMax, ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
    // "Stable output": every call of a frame gets the same destination, so that zstd writes into it and keeps no window of its own.
    if (ZSTD_isError(ZSTD_DCtx_setParameter(context, ZSTD_d_experimentalParam2, 1))) {
        ZSTD_freeDCtx(context);
        throw std::runtime_error("this libzstd cannot inflate into a stable buffer: version 1.5 or later is needed");
    }
    return context;
}

void free_zstd_context(ZSTD_DCtx_s* context) { ZSTD_freeDCtx(context); }

}  // namespace spindle
