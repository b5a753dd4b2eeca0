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
SPINDLE_WIDE void narrow(int32_t* to, const uint8_t* from, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<int32_t>(load<int64_t>(from + 8 * i));
}

// Any wire type to the type of the micro-batch.
void write_cells(const StreamWriter& writer, int32_t* to, Bytes from, Dtype dtype) {
    if (dtype == Dtype::int32) writer.copy(to, from.data, from.size);
    else narrow(to, from.data, from.size / 8);
}
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
Cell cell_at(const Tensor& tensor, size_t i) {
    if constexpr (std::is_same_v<Cell, float>) return static_cast<float>(number_at(tensor.values, tensor.dtype, static_cast<int64_t>(i)));
    else return integer_at(tensor.values, tensor.dtype, static_cast<int64_t>(i));
}

// Where the cells of a tensor lie in it that are not known to be zero.
struct Stretch {
    size_t first, size;
};
Stretch stretch_of(const Tensor& dense) {
    const size_t item = item_size(dense.dtype);
    return {static_cast<size_t>(dense.nonzero.data - dense.values.data) / item, dense.nonzero.size / item};
}

struct Listed {
    const uint32_t* cells;
    size_t size;
};
Listed listed_of(const Request& request, const Tensor& csr) { return {request.storage->cells.data() + csr.first_cell, csr.col.size / 8}; }

// The dense twin of a CSR tensor, a few rows at a time: unlisted cells are 0.
template <class Cell>
void densify(const StreamWriter& writer, Cell* to, const Tensor& tensor, Listed listed, int64_t length) {
    const int64_t rows_at_a_time = std::max<int64_t>(block_cells / tensor.width, 1);
    Cell cells[block_cells];
    size_t i = 0;
    for (int64_t row = 0; row < length; row += rows_at_a_time) {
        const auto first = static_cast<size_t>(row * tensor.width);
        const auto last = static_cast<size_t>(std::min(row + rows_at_a_time, length) * tensor.width);
        if (i == listed.size || listed.cells[i] >= last) {
            writer.zero(to + first, (last - first) * sizeof(Cell));
            continue;
        }
        const bool fits = last - first <= block_cells;  // a single row may be wider than the block
        Cell* const block = fits ? cells : to + first;
        std::fill_n(block, last - first, Cell{0});
        for (; i < listed.size && listed.cells[i] < last; ++i) block[listed.cells[i] - first] = cell_at<Cell>(tensor, i);
        if (fits) writer.copy(to + first, reinterpret_cast<const uint8_t*>(block), (last - first) * sizeof(Cell));
    }
}

template <class Cell>
void write_tensor(const StreamWriter& writer, Cell* to, const Request& request, const Tensor& tensor, const Datum& datum, bool zeroed) {
    if (tensor.layout == Layout::csr) {
        const Listed listed = listed_of(request, tensor);
        if (!zeroed) return densify(writer, to, tensor, listed, datum.length);
        for (size_t i = 0; i < listed.size; ++i) to[listed.cells[i]] = cell_at<Cell>(tensor, i);
        return;
    }
    const auto [first, size] = stretch_of(tensor);
    if (!zeroed) {
        writer.zero(to, first * sizeof(Cell));
        writer.zero(to + first + size, (static_cast<size_t>(cells_of(datum)) - first - size) * sizeof(Cell));
    }
    write_cells(writer, to + first, tensor.nonzero, tensor.dtype);
}

// Has the first and the last place brought nearer that write_tensor will write in zeroed memory: where few cells are listed they are all.
template <class Cell>
void ask_early(const Cell* to, const Request& request, const Tensor& tensor) {
    if (tensor.layout == Layout::csr) {
        const Listed listed = listed_of(request, tensor);
        if (listed.size == 0) return;
        __builtin_prefetch(to + listed.cells[0], 1);
        __builtin_prefetch(to + listed.cells[listed.size - 1], 1);
    } else {
        const auto [first, size] = stretch_of(tensor);
        __builtin_prefetch(to + first, 1);
        __builtin_prefetch(to + first + size, 1);
    }
}

template <class Cell>
void clear_tensor(Cell* to, const Request& request, const Tensor& tensor) {
    if (tensor.layout == Layout::csr) {
        const Listed listed = listed_of(request, tensor);
        for (size_t i = 0; i < listed.size; ++i) to[listed.cells[i]] = 0;
    } else {
        const auto [first, size] = stretch_of(tensor);
        std::fill_n(to + first, size, Cell{0});
    }
}

void write_tokens(const StreamWriter& writer, int32_t* to, const Request& request, const Datum& datum) {
    for (uint32_t i = 0; i < datum.chunks; ++i) {
        const Chunk& chunk = request.storage->chunks[datum.first_chunk + i];
        write_cells(writer, to, chunk.tokens, chunk.dtype);
        to += chunk.tokens.size / item_size(chunk.dtype);
    }
}

bool is_zero_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits == 0;
}
}  // namespace

int64_t cells_of(const Datum& datum) { return datum.target_width < 0 ? 0 : datum.length * std::max<int64_t>(datum.target_width, 1); }

int64_t written_cells(const Request& request, const Datum& datum) {
    const Tensor* labels = request.find(datum, request.name_index("target_tokens"));
    if (!labels) return 0;
    return static_cast<int64_t>(labels->layout == Layout::csr ? labels->col.size / 8 : stretch_of(*labels).size);
}

void fill(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to) {
    int64_t tokens = 0;
    int64_t cells = 0;
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        tokens += datum.length;
        cells += cells_of(datum);
    }
    const size_t cell_bytes = to.zeroed ? 0 : (to.labels ? 8 : 0) + 4 * to.num_inputs;
    const StreamWriter writer(static_cast<size_t>(tokens) * 4 + static_cast<size_t>(cells) * cell_bytes);
    const int64_t target_name = request.name_index("target_tokens");
    const int64_t all_cells = cells;
    // From the last datum to the first: what scan read last is what a cache may still hold.
    for (size_t d = num_datums; d-- > 0;) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        tokens -= datum.length;
        cells -= cells_of(datum);
        if (d > 0) ask_early(request.storage->chunks[request.datums()[static_cast<size_t>(datums[d - 1])].first_chunk].tokens);
        if (to.zeroed && datum.target_width >= 0) {
            if (to.labels) ask_early(to.labels + cells, request, *request.find(datum, target_name));
            for (size_t i = 0; i < to.num_inputs; ++i)
                if (const Tensor* tensor = request.find(datum, to.inputs[i].name)) ask_early(to.inputs[i].to + cells, request, *tensor);
        }
        write_tokens(writer, to.tokens + tokens, request, datum);
    }
    cells = all_cells;
    for (size_t d = num_datums; d-- > 0;) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        cells -= cells_of(datum);
        if (datum.target_width < 0) continue;
        for (size_t i = to.num_inputs; i-- > 0;) {
            const InputTarget& input = to.inputs[i];
            if (const Tensor* tensor = request.find(datum, input.name)) write_tensor(writer, input.to + cells, request, *tensor, datum, to.zeroed);
            else if (!(to.zeroed && is_zero_bits(*input.fallback))) std::fill_n(input.to + cells, cells_of(datum), *input.fallback);
        }
        if (to.labels) write_tensor(writer, to.labels + cells, request, *request.find(datum, target_name), datum, to.zeroed);
    }
}

void clear(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to) {
    const int64_t target_name = request.name_index("target_tokens");
    int64_t cells = 0;
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        if (datum.target_width < 0) continue;
        for (size_t i = 0; i < to.num_inputs; ++i) {
            const InputTarget& input = to.inputs[i];
            if (const Tensor* tensor = request.find(datum, input.name)) clear_tensor(input.to + cells, request, *tensor);
            else if (!is_zero_bits(*input.fallback)) std::fill_n(input.to + cells, cells_of(datum), 0.0f);
        }
        if (to.labels) clear_tensor(to.labels + cells, request, *request.find(datum, target_name));
        cells += cells_of(datum);
    }
}

}  // namespace spindle
