// Walks the protobuf wire format without building messages.
//
// Promises: reads only inside the bytes it was given; throws MalformedBody for whatever is not well-formed wire format.
// Owns nothing: what it returns points into those bytes.
#pragma once

#include "bytes.hpp"
#include "errors.hpp"

namespace spindle {

enum class Wire : uint8_t { varint = 0, fixed64 = 1, bytes = 2, group = 3, end_group = 4, fixed32 = 5 };

class Reader {
  public:
    explicit Reader(Bytes from) : at_(from.data), end_(from.data + from.size) {}

    uint32_t field = 0;
    Wire wire = Wire::varint;

    // Reads the next tag into field and wire; false at the end of the message.
    bool next() {
        if (at_ == end_) return false;
        const uint64_t tag = varint(5);
        if (tag > UINT32_MAX || (tag >> 3) == 0) throw MalformedBody("the body is not readable protobuf: a field number is out of range");
        field = static_cast<uint32_t>(tag >> 3);
        wire = static_cast<Wire>(tag & 7);
        if ((tag & 7) > 5) throw MalformedBody(text("the body is not readable protobuf: field ", field, " has wire type ", tag & 7));
        return true;
    }
    bool is(uint32_t wanted, Wire kind) const { return field == wanted && wire == kind; }

    uint64_t varint(int max_bytes = 10) {
        uint64_t value = 0;
        for (int i = 0; i < max_bytes; ++i) {
            if (at_ == end_) throw cut_off();
            const uint8_t byte = *at_++;
            if (i == 9 && byte > 1) break;
            value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
            if (byte < 0x80) return value;
        }
        throw MalformedBody("the body is not readable protobuf: a number has too many bytes");
    }
    Bytes bytes() {
        const uint64_t size = varint(5);
        if (size > static_cast<uint64_t>(end_ - at_)) throw cut_off();
        const Bytes out{at_, static_cast<size_t>(size)};
        at_ += size;
        return out;
    }
    Bytes bytes_ahead() const { return Reader(*this).bytes(); }  // without stepping over them
    double fixed_double() { return load<double>(take(8)); }

    // Steps over the value of the field just read.
    void skip() { skip(0); }

    bool at_end() const { return at_ == end_; }
    const uint8_t* at() const { return at_; }

  private:
    static constexpr int max_depth = 100;  // of nested groups, as the protobuf libraries have it

    static MalformedBody cut_off() { return MalformedBody("the body is not readable protobuf: it ends inside a field"); }
    const uint8_t* take(size_t n) {
        if (static_cast<size_t>(end_ - at_) < n) throw cut_off();
        const uint8_t* out = at_;
        at_ += n;
        return out;
    }
    void skip(int depth) {
        switch (wire) {
            case Wire::varint: varint(); break;
            case Wire::fixed64: take(8); break;
            case Wire::bytes: bytes(); break;
            case Wire::fixed32: take(4); break;
            case Wire::group: skip_group(depth + 1); break;
            case Wire::end_group: throw MalformedBody("the body is not readable protobuf: a group ends that never began");
        }
    }
    void skip_group(int depth) {
        if (depth > max_depth) throw MalformedBody("the body is not readable protobuf: groups nest too deep");
        const uint32_t opened = field;
        for (;;) {
            if (!next()) throw cut_off();
            if (wire == Wire::end_group) {
                if (field != opened) throw MalformedBody("the body is not readable protobuf: a group ends that never began");
                return;
            }
            skip(depth);
        }
    }

    const uint8_t* at_;
    const uint8_t* end_;
};

// Protobuf strings must be UTF-8.
bool is_utf8(Bytes text);

}  // namespace spindle
