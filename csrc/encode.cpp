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
    bool writes() const { return to_ != nullptr; }

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
    // n bytes that somebody else writes; returns where.
    size_t hole(size_t n) {
        size_ += n;
        return size_ - n;
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

}  // namespace

Outline::Outline(std::vector<int64_t> lengths, std::vector<int64_t> widths)
    : lengths_(std::move(lengths)), widths_(std::move(widths)), offsets_(lengths_.size()) {
    Sink counter(nullptr);
    describe(counter);
    size_ = counter.size();
}

int64_t Outline::cells(size_t datum) const { return lengths_[datum] * std::max<int64_t>(widths_[datum], 1); }

void Outline::write(uint8_t* to) {
    Sink sink(to);
    describe(sink);
}

// BatchedTensor of datums [first, last).
template <class Sink>
void Outline::batched_tensor(Sink& sink, size_t first, size_t last) {
    size_t nbytes = 0;
    for (size_t d = first; d < last; ++d) nbytes += 4 * static_cast<size_t>(cells(d));
    sink.header(1, nbytes);
    const size_t at = sink.hole(nbytes);
    sink.header(2, 8 * (last - first + 1));
    int64_t before = 0;
    for (size_t d = first; d < last; ++d) {
        if (sink.writes()) offsets_[d] = at + static_cast<size_t>(before);
        sink.raw(&before, 8);
        before += 4 * cells(d);
    }
    sink.raw(&before, 8);
    sink.number(3, 1);  // float32
    if (const int64_t width = widths_[first]; width > 0) {
        Sink counter(nullptr);
        counter.varint(static_cast<uint64_t>(width));
        sink.header(4, counter.size());
        sink.varint(static_cast<uint64_t>(width));
    }
}

template <class Sink>
void Outline::describe(Sink& sink) {
    sink.string(1, record_type);
    for (size_t first = 0, last = 0; first < num_datums(); first = last) {
        while (last < num_datums() && widths_[last] == widths_[first]) ++last;
        sink.message(2, [&](Sink& record) {
            record.string(1, record_type);
            record.message(2, [&](Sink& entry) {
                entry.string(1, field_name);
                entry.message(2, [&](Sink& tensor) { batched_tensor(tensor, first, last); });
            });
            record.number(3, last - first);
        });
    }
}

size_t write_metrics(const Metrics& metrics, uint8_t* to) {
    Sink sink(to);
    for (const auto& [name, value] : metrics) {
        sink.message(3, [&, &key = name, &number = value](Sink& entry) {
            entry.string(1, key);
            entry.varint(2 << 3 | 1);
            entry.raw(&number, 8);
        });
    }
    return sink.size();
}

}  // namespace spindle
