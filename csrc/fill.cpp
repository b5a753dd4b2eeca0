#include "fill.hpp"

#include <algorithm>

#include "simd.hpp"

namespace spindle {

namespace {
SPINDLE_WIDE void widen_int32(const uint8_t* from, size_t n, int64_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = load<int32_t>(from + 4 * i);
}
SPINDLE_WIDE void count_up(size_t n, int64_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<int64_t>(i);
}
SPINDLE_WIDE void widen_bfloat16(const uint8_t* from, size_t n, float* to) {
    for (size_t i = 0; i < n; ++i) to[i] = bfloat16_to_float(load<uint16_t>(from + 2 * i));
}

void copy_integers(Bytes from, Dtype dtype, int64_t* to) {
    if (dtype == Dtype::int32) widen_int32(from.data, from.size / 4, to);
    else if (from.size) std::memcpy(to, from.data, from.size);
}

void copy_floats(Bytes from, Dtype dtype, float* to) {
    const size_t n = from.size / item_size(dtype);
    switch (dtype) {
        case Dtype::float32:
            if (n) std::memcpy(to, from.data, from.size);
            break;
        case Dtype::bfloat16: widen_bfloat16(from.data, n, to); break;
        default:
            for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(integer_at(from, dtype, static_cast<int64_t>(i)));
    }
}

// Dense twin of a CSR tensor: unlisted cells are 0.
template <class Cell, class Read>
void densify(const Tensor& tensor, int64_t length, Cell* to, Read read) {
    std::memset(to, 0, static_cast<size_t>(length * tensor.width) * sizeof(Cell));
    for (int64_t row = 0; row < length; ++row) {
        const auto begin = load<int64_t>(tensor.crow.data + 8 * row);
        const auto end = load<int64_t>(tensor.crow.data + 8 * row + 8);
        for (int64_t i = begin; i < end; ++i) to[row * tensor.width + load<int64_t>(tensor.col.data + 8 * i)] = static_cast<Cell>(read(i));
    }
}
}  // namespace

void fill(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to) {
    int64_t* tokens = to.tokens;
    int64_t* positions = to.positions;
    int64_t* labels = to.labels;
    const int64_t target_name = request.name_index("target_tokens");
    int64_t cells_before = 0;
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        for (uint32_t i = 0; i < datum.chunks; ++i) {
            const Chunk& chunk = request.storage->chunks[datum.first_chunk + i];
            copy_integers(chunk.tokens, chunk.dtype, tokens);
            tokens += chunk.tokens.size / item_size(chunk.dtype);
        }
        count_up(static_cast<size_t>(datum.length), positions);
        positions += datum.length;
        if (datum.target_width < 0) continue;
        const int64_t cells = datum.length * std::max<int64_t>(datum.target_width, 1);
        if (labels) {
            const Tensor& tensor = *request.find(datum, target_name);
            if (tensor.layout == Layout::csr)
                densify(tensor, datum.length, labels, [&](int64_t i) { return integer_at(tensor.values, tensor.dtype, i); });
            else copy_integers(tensor.values, tensor.dtype, labels);
            labels += cells;
        }
        for (size_t i = 0; i < to.num_inputs; ++i) {
            const InputTarget& input = to.inputs[i];
            float* out = input.to + cells_before;
            const Tensor* tensor = request.find(datum, input.name);
            if (!tensor) std::fill_n(out, cells, *input.fallback);
            else if (tensor->layout == Layout::csr)
                densify(*tensor, datum.length, out, [&](int64_t c) { return number_at(tensor->values, tensor->dtype, c); });
            else copy_floats(tensor->values, tensor->dtype, out);
        }
        cells_before += cells;
    }
}

}  // namespace spindle
