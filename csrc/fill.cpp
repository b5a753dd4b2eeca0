#include "fill.hpp"

#include <algorithm>

#include "simd.hpp"
#include "stream.hpp"

namespace spindle {

namespace {
constexpr int64_t block_cells = 2048;  // of CSR rows written out at a time, in the nearest cache

SPINDLE_WIDE void widen_bfloat16(float* to, const uint8_t* from, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = bfloat16_to_float(load<uint16_t>(from + 2 * i));
}

// Any wire type to the type of the micro-batch.
void write_cells(const StreamWriter& writer, int64_t* to, Bytes from, Dtype dtype) {
    if (dtype == Dtype::int32) writer.widen(to, from.data, from.size / 4);
    else writer.copy(to, from.data, from.size);
}
void write_cells(const StreamWriter& writer, float* to, Bytes from, Dtype dtype) {
    if (dtype == Dtype::float32) return writer.copy(to, from.data, from.size);
    const size_t n = from.size / item_size(dtype);
    if (dtype == Dtype::bfloat16) return widen_bfloat16(to, from.data, n);
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(integer_at(from, dtype, static_cast<int64_t>(i)));
}

template <class Cell>
Cell cell_at(const Tensor& tensor, int64_t i) {
    if constexpr (std::is_same_v<Cell, float>) return static_cast<float>(number_at(tensor.values, tensor.dtype, i));
    else return integer_at(tensor.values, tensor.dtype, i);
}

// The dense twin of a CSR tensor: unlisted cells are 0.
template <class Cell>
void densify(const StreamWriter& writer, Cell* to, const Tensor& tensor, int64_t length) {
    const auto row_start = [&](int64_t row) { return load<int64_t>(tensor.crow.data + 8 * row); };
    const int64_t width = tensor.width;
    const int64_t rows_at_a_time = std::max<int64_t>(block_cells / width, 1);
    Cell cells[block_cells];
    for (int64_t first = 0; first < length; first += rows_at_a_time) {
        const int64_t last = std::min(first + rows_at_a_time, length);
        const auto size = static_cast<size_t>((last - first) * width);
        if (row_start(first) == row_start(last)) {
            writer.zero(to + first * width, size * sizeof(Cell));
            continue;
        }
        const bool fits = size <= static_cast<size_t>(block_cells);  // a single row may be wider than the block
        Cell* const block = fits ? cells : to + first * width;
        std::fill_n(block, size, Cell{0});
        for (int64_t row = first; row < last; ++row)
            for (int64_t i = row_start(row); i < row_start(row + 1); ++i)
                block[(row - first) * width + load<int64_t>(tensor.col.data + 8 * i)] = cell_at<Cell>(tensor, i);
        if (fits) writer.copy(to + first * width, reinterpret_cast<const uint8_t*>(block), size * sizeof(Cell));
    }
}

// The same where few cells are listed, whose rows were noted: zeros from one of them to the next.
template <class Cell>
void densify_few(const StreamWriter& writer, Cell* to, const Tensor& tensor, int64_t length, const uint32_t* rows) {
    constexpr int64_t rows_at_a_time = 4;
    const auto nnz = static_cast<int64_t>(tensor.col.size / 8);
    const int64_t width = tensor.width;
    int64_t done = 0;  // rows written
    for (int64_t i = 0; i < nnz;) {
        const auto first = static_cast<int64_t>(rows[i]);
        const int64_t last = std::min(first + rows_at_a_time, length);
        writer.zero(to + done * width, static_cast<size_t>((first - done) * width) * sizeof(Cell));
        std::fill_n(to + first * width, (last - first) * width, Cell{0});
        for (; i < nnz && rows[i] < last; ++i) to[rows[i] * width + load<int64_t>(tensor.col.data + 8 * i)] = cell_at<Cell>(tensor, i);
        done = last;
    }
    writer.zero(to + done * width, static_cast<size_t>((length - done) * width) * sizeof(Cell));
}

template <class Cell>
void write_tensor(const StreamWriter& writer, Cell* to, const Tensor& tensor, int64_t length, const Vec<uint32_t>& rows) {
    if (tensor.first_row >= 0) densify_few(writer, to, tensor, length, rows.data() + tensor.first_row);
    else if (tensor.layout == Layout::csr) densify(writer, to, tensor, length);
    else write_cells(writer, to, tensor.values, tensor.dtype);
}
void write_tokens(const StreamWriter& writer, int64_t* to, const Request& request, const Datum& datum) {
    for (uint32_t i = 0; i < datum.chunks; ++i) {
        const Chunk& chunk = request.storage->chunks[datum.first_chunk + i];
        write_cells(writer, to, chunk.tokens, chunk.dtype);
        to += chunk.tokens.size / item_size(chunk.dtype);
    }
}
}  // namespace

int64_t cells_of(const Datum& datum) { return datum.target_width < 0 ? 0 : datum.length * std::max<int64_t>(datum.target_width, 1); }

void fill(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to) {
    int64_t tokens = 0;
    int64_t cells = 0;
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        tokens += datum.length;
        cells += cells_of(datum);
    }
    const size_t bytes = static_cast<size_t>(tokens) * 16 + static_cast<size_t>(cells) * (8 + 4 * to.num_inputs);
    const StreamWriter writer(bytes);
    const Vec<uint32_t>& rows = request.storage->rows;
    const int64_t target_name = request.name_index("target_tokens");
    // From the last datum to the first: what scan read last is what a cache may still hold.
    for (size_t d = num_datums; d-- > 0;) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        tokens -= datum.length;
        cells -= cells_of(datum);
        writer.count_up(to.positions + tokens, static_cast<size_t>(datum.length));
        write_tokens(writer, to.tokens + tokens, request, datum);
        if (datum.target_width < 0) continue;
        for (size_t i = to.num_inputs; i-- > 0;) {
            const InputTarget& input = to.inputs[i];
            if (const Tensor* tensor = request.find(datum, input.name)) write_tensor(writer, input.to + cells, *tensor, datum.length, rows);
            else std::fill_n(input.to + cells, cells_of(datum), *input.fallback);
        }
        if (to.labels) write_tensor(writer, to.labels + cells, *request.find(datum, target_name), datum.length, rows);
    }
}

}  // namespace spindle
