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

int64_t row_start(const Tensor& tensor, int64_t row) { return load<int64_t>(tensor.crow.data + 8 * row); }
int64_t column(const Tensor& tensor, int64_t i) { return load<int64_t>(tensor.col.data + 8 * i); }

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

// In the unsorted row that holds listed cells i - 1 and i: is a column there twice?
std::string check_unsorted(const Tensor& tensor, int64_t row) {
    std::vector<bool> seen(static_cast<size_t>(tensor.width));
    for (int64_t i = row_start(tensor, row); i < row_start(tensor, row + 1); ++i) {
        const int64_t at = column(tensor, i);
        if (seen[static_cast<size_t>(at)]) return text("lists column ", at, " twice in row ", row, ": list each cell once");
        seen[static_cast<size_t>(at)] = true;
    }
    return {};
}

// No column twice in a row. Where columns rise nothing can be twice, so only places where they do not are looked at; in sorted
// rows those are the starts of rows.
std::string check_duplicates(const Tensor& tensor, int64_t rows) {
    const auto nnz = static_cast<int64_t>(tensor.col.size / 8);
    int64_t row = 0;
    for (int64_t i = 1; i < nnz; ++i) {
        if (column(tensor, i - 1) < column(tensor, i)) continue;
        row = row_from(tensor, row, i, rows);
        if (row_start(tensor, row) == i) continue;
        const int64_t unsorted = row - 1;
        if (std::string wrong = check_unsorted(tensor, unsorted); !wrong.empty()) return wrong;
        i = row_start(tensor, row) - 1;  // on with the next row
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
    if (!rises(tensor.crow.data, static_cast<size_t>(length))) {
        int64_t row = 0;
        while (load<int64_t>(tensor.crow.data + 8 * row) <= load<int64_t>(tensor.crow.data + 8 * row + 8)) ++row;
        return text("has crow_indices that fall after row ", row, ": they must not");
    }
    if (tensor.values.size / item_size(tensor.dtype) != nnz)
        return text("has ", tensor.values.size / item_size(tensor.dtype), " values for ", nnz, " col_indices: equal numbers are needed");
    if (const int64_t at = first_outside(tensor.col, Dtype::int64, tensor.width); at >= 0)
        return text("has col_indices[", at, "] = ", load<int64_t>(tensor.col.data + 8 * at), ": 0 to ", tensor.width - 1, " are allowed");
    return check_duplicates(tensor, length);
}

void note_rows(Tensor& tensor, int64_t length, Vec<uint32_t>& rows) {
    constexpr int64_t few = 8;  // rows per listed cell, at least
    const auto nnz = static_cast<int64_t>(tensor.col.size / 8);
    if (nnz * few > length) return;
    tensor.first_row = static_cast<int64_t>(rows.size());
    int64_t next = 0;  // the first row that starts past the current one
    for (int64_t i = 0; i < nnz; ++i) {
        if (row_start(tensor, next) <= i) next = row_from(tensor, next, i + 1, length);
        rows.push_back(static_cast<uint32_t>(next - 1));
    }
}

}  // namespace spindle
