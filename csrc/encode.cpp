#include "encode.hpp"

#include <algorithm>
#include <string_view>

namespace spindle {

namespace {
constexpr std::string_view record_type = "ArrayRecord";
constexpr std::string_view field_name = "logprobs";

// Either counts bytes or writes them, so that one description of the message serves both passes.
class Sink {
  public:
    explicit Sink(uint8_t* to) : to_(to) {}
    size_t size() const { return size_; }

    void byte(uint8_t value) {
        if (to_) to_[size_] = value;
        ++size_;
    }
    void varint(uint64_t value) {
        for (; value >= 0x80; value >>= 7) byte(static_cast<uint8_t>(value) | 0x80);
        byte(static_cast<uint8_t>(value));
    }
    void raw(const void* from, size_t n) {
        if (to_ && n) std::memcpy(to_ + size_, from, n);
        size_ += n;
    }
    void number(uint32_t field, uint64_t value) {
        varint(field << 3);
        varint(value);
    }
    void header(uint32_t field, size_t n) {
        varint(field << 3 | 2);
        varint(n);
    }
    void string(uint32_t field, std::string_view value) {
        header(field, value.size());
        raw(value.data(), value.size());
    }
    // A submessage: its description runs once to count and once to write.
    template <class Describe>
    void message(uint32_t field, Describe describe) {
        Sink counter(nullptr);
        describe(counter);
        header(field, counter.size());
        if (to_) describe(*this);
        else size_ += counter.size();
    }

  private:
    uint8_t* to_;
    size_t size_ = 0;
};

// BatchedTensor of datums [first, last), whose cells begin at `cells`.
void batched_tensor(Sink& sink, const OutputContent& content, size_t first, size_t last, int64_t first_cell) {
    const int64_t width = content.widths[first];
    int64_t rows = 0;
    for (size_t d = first; d < last; ++d) rows += content.lengths[d];
    const int64_t row_bytes = 4 * std::max<int64_t>(width, 1);
    sink.header(1, static_cast<size_t>(rows * row_bytes));
    sink.raw(content.logprobs + first_cell, static_cast<size_t>(rows * row_bytes));
    sink.header(2, 8 * (last - first + 1));
    int64_t offset = 0;
    sink.raw(&offset, 8);
    for (size_t d = first; d < last; ++d) {
        offset += content.lengths[d] * row_bytes;
        sink.raw(&offset, 8);
    }
    sink.number(3, 1);  // float32
    if (width > 0) {
        Sink counter(nullptr);
        counter.varint(static_cast<uint64_t>(width));
        sink.header(4, counter.size());
        sink.varint(static_cast<uint64_t>(width));
    }
}

void describe(Sink& sink, const OutputContent& content) {
    sink.string(1, record_type);
    int64_t first_cell = 0;
    for (size_t first = 0, last = 0; first < content.num_datums; first = last) {
        int64_t cells = 0;
        for (last = first; last < content.num_datums && content.widths[last] == content.widths[first]; ++last)
            cells += content.lengths[last] * std::max<int64_t>(content.widths[last], 1);
        sink.message(2, [&](Sink& record) {
            record.string(1, record_type);
            record.message(2, [&](Sink& entry) {
                entry.string(1, field_name);
                entry.message(2, [&](Sink& tensor) { batched_tensor(tensor, content, first, last, first_cell); });
            });
            record.number(3, last - first);
        });
        first_cell += cells;
    }
    for (const auto& [name, value] : content.metrics) {
        sink.message(3, [&, &key = name, &number = value](Sink& entry) {
            entry.string(1, key);
            entry.varint(2 << 3 | 1);
            entry.raw(&number, 8);
        });
    }
}
}  // namespace

size_t encoded_size(const OutputContent& content) {
    Sink sink(nullptr);
    describe(sink, content);
    return sink.size();
}

void encode_output(const OutputContent& content, uint8_t* to) {
    Sink sink(to);
    describe(sink, content);
}

}  // namespace spindle
