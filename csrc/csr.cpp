#include "csr.hpp"

#include <algorithm>
#include <vector>

#include "errors.hpp"
#include "simd.hpp"

namespace spindle {

namespace {
// Every one of n + 1 row starts is at least the one before it, and none is negative (the first is known not to be). One sign bit says
// it all: differences of numbers that are not negative cannot overflow.
SPINDLE_WIDE bool rises(const uint8_t* crow, size_t n) {
    uint64_t signs = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto next = load<uint64_t>(crow + 8 * i + 8);
        signs |= next | (next - load<uint64_t>(crow + 8 * i));
    }
    return signs >> 63 == 0;
}

// How many of n runs of row starts are all equal to the start before them.
constexpr size_t run = 32;
SPINDLE_WIDE size_t flat_runs(const uint8_t* crow, size_t n) {
    for (size_t i = 0; i < n; ++i, crow += 8 * run) {
        const auto start = load<uint64_t>(crow);
        uint64_t differs = 0;
        for (size_t k = 1; k <= run; ++k) differs |= load<uint64_t>(crow + 8 * k) ^ start;
        if (differs) return i;
    }
    return n;
}

// The same as rises(), quicker where they rise in few places.
bool rises_seldom(const uint8_t* crow, size_t n) {
    for (size_t i = 0; i < n;) {
        i += run * flat_runs(crow + 8 * i, (n - i) / run);
        const size_t here = std::min(run, n - i);
        if (!rises(crow + 8 * i, here)) return false;
        i += here;
    }
    return true;
}

int64_t row_start(const Tensor& tensor, int64_t row) { return load<int64_t>(tensor.crow.data + 8 * row); }
int64_t column(const Tensor& tensor, int64_t i) { return load<int64_t>(tensor.col.data + 8 * i); }

// Few cells listed: most row starts are equal to the one before.
bool has_few(const Tensor& tensor, int64_t length) { return tensor.col.size <= static_cast<size_t>(length); }

// The first row from `row` on that starts at listed cell i or later. Looks near first: rows come in order.
int64_t row_from(const Tensor& tensor, int64_t row, int64_t i, int64_t rows) {
    int64_t stride = 1;
    while (row + stride <= rows && row_start(tensor, row + stride) < i) stride *= 2;
    int64_t low = row + stride / 2;
    int64_t high = std::min(row + stride, rows);
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (row_start(tensor, middle) < i) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Rows of the listed cells when they are few: looks for each.
void search_rows(const Tensor& tensor, int64_t rows, uint32_t* to) {
    int64_t next = 0;  // the first row that starts past the current one
    const auto nnz = static_cast<int64_t>(tensor.col.size / 8);
    for (int64_t i = 0; i < nnz; ++i) {
        if (row_start(tensor, next) <= i) next = row_from(tensor, next, i + 1, rows);
        to[i] = static_cast<uint32_t>(next - 1);
    }
}

// The same when they are many, without a branch that depends on the row: every row writes `spare` times, and the next one over it.
constexpr size_t spare = 8;
SPINDLE_WIDE void spread_rows(const uint8_t* crow, size_t rows, uint32_t* to) {
    for (size_t row = 0; row < rows; ++row) {
        const auto start = load<uint64_t>(crow + 8 * row);
        const auto end = load<uint64_t>(crow + 8 * row + 8);
        for (size_t i = 0; i < spare; ++i) to[start + i] = static_cast<uint32_t>(row);
        for (size_t i = start + spare; i < end; ++i) to[i] = static_cast<uint32_t>(row);
    }
}

// Rows become cells. True when they rise throughout: then rows are sorted, and no cell is there twice.
SPINDLE_WIDE bool add_columns(uint32_t* cells, const uint8_t* col, size_t n, uint32_t width) {
    for (size_t i = 0; i < n; ++i) cells[i] = cells[i] * width + static_cast<uint32_t>(load<uint64_t>(col + 8 * i));
    uint32_t falls = 0;
    for (size_t i = 1; i < n; ++i) falls |= cells[i] <= cells[i - 1] ? 1 : 0;
    return falls == 0;
}

std::string find_twice(const Tensor& tensor, int64_t rows) {
    std::vector<int64_t> last_row(static_cast<size_t>(tensor.width), -1);  // that lists the column
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = row_start(tensor, row); i < row_start(tensor, row + 1); ++i) {
            int64_t& seen = last_row[static_cast<size_t>(column(tensor, i))];
            if (seen == row) return text("lists column ", column(tensor, i), " twice in row ", row, ": list each cell once");
            seen = row;
        }
    }
    return {};
}
}  // namespace

std::string check_csr(const Tensor& tensor, int64_t length) {
    const size_t rows = tensor.crow.size / 8;
    const size_t nnz = tensor.col.size / 8;
    if (tensor.crow.size % 8 || tensor.col.size % 8) return "has CSR indices that are no whole number of int64";
    if (rows != static_cast<size_t>(length) + 1) return text("has ", rows, " crow_indices: ", length + 1, " (rows + 1) are needed");
    if (const auto first = load<int64_t>(tensor.crow.data); first != 0) return text("has crow_indices that begin with ", first, ": 0 is needed");
    const auto last = load<int64_t>(tensor.crow.data + 8 * length);
    if (last < 0 || static_cast<uint64_t>(last) != nnz)
        return text("has crow_indices that end with ", last, ": the ", nnz, " col_indices are needed");
    if (!(has_few(tensor, length) ? rises_seldom : rises)(tensor.crow.data, static_cast<size_t>(length))) {
        int64_t row = 0;
        while (load<int64_t>(tensor.crow.data + 8 * row) <= load<int64_t>(tensor.crow.data + 8 * row + 8)) ++row;
        return text("has crow_indices that fall after row ", row, ": they must not");
    }
    if (tensor.values.size / item_size(tensor.dtype) != nnz)
        return text("has ", tensor.values.size / item_size(tensor.dtype), " values for ", nnz, " col_indices: equal numbers are needed");
    if (const int64_t at = first_outside(tensor.col, Dtype::int64, tensor.width); at >= 0)
        return text("has col_indices[", at, "] = ", load<int64_t>(tensor.col.data + 8 * at), ": 0 to ", tensor.width - 1, " are allowed");
    return {};
}

std::string list_cells(Tensor& tensor, int64_t length, Vec<uint32_t>& cells) {
    const size_t nnz = tensor.col.size / 8;
    tensor.first_cell = cells.size();
    cells.resize(tensor.first_cell + nnz + spare);
    uint32_t* const own = cells.data() + tensor.first_cell;
    if (has_few(tensor, length)) search_rows(tensor, length, own);
    else spread_rows(tensor.crow.data, static_cast<size_t>(length), own);
    cells.resize(tensor.first_cell + nnz);
    return add_columns(own, tensor.col.data, nnz, static_cast<uint32_t>(tensor.width)) ? std::string() : find_twice(tensor, length);
}

}  // namespace spindle
