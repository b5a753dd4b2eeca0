#include "csr.hpp"

#include <vector>

#include "errors.hpp"
#include "simd.hpp"

namespace spindle {

namespace {
// Every one of n + 1 row starts is at least the one before it.
SPINDLE_WIDE bool rises(const uint8_t* crow, size_t n) {
    int64_t falls = 0;
    for (size_t i = 0; i < n; ++i) falls |= load<int64_t>(crow + 8 * i + 8) < load<int64_t>(crow + 8 * i);
    return falls == 0;
}

// In each row with more than one listed cell, no column twice. Rows are few that need the slow look: sorted ones do not.
std::string check_rows(const Tensor& tensor, int64_t length) {
    const int64_t nnz = static_cast<int64_t>(tensor.col.size / 8);
    if (nnz < 2) return {};
    std::vector<bool> seen;
    for (int64_t row = 0; row < length; ++row) {
        const auto begin = load<int64_t>(tensor.crow.data + 8 * row);
        const auto end = load<int64_t>(tensor.crow.data + 8 * row + 8);
        bool sorted = true;
        for (int64_t i = begin + 1; i < end; ++i)
            sorted &= load<int64_t>(tensor.col.data + 8 * i - 8) < load<int64_t>(tensor.col.data + 8 * i);
        if (sorted) continue;
        seen.assign(static_cast<size_t>(tensor.width), false);
        for (int64_t i = begin; i < end; ++i) {
            const auto column = load<int64_t>(tensor.col.data + 8 * i);
            if (seen[static_cast<size_t>(column)]) return text("lists column ", column, " twice in row ", row, ": list each cell once");
            seen[static_cast<size_t>(column)] = true;
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
    if (!rises(tensor.crow.data, static_cast<size_t>(length))) {
        int64_t row = 0;
        while (load<int64_t>(tensor.crow.data + 8 * row) <= load<int64_t>(tensor.crow.data + 8 * row + 8)) ++row;
        return text("has crow_indices that fall after row ", row, ": they must not");
    }
    if (tensor.values.size / item_size(tensor.dtype) != nnz)
        return text("has ", tensor.values.size / item_size(tensor.dtype), " values for ", nnz, " col_indices: equal numbers are needed");
    if (const int64_t at = first_outside(tensor.col, Dtype::int64, tensor.width); at >= 0)
        return text("has col_indices[", at, "] = ", load<int64_t>(tensor.col.data + 8 * at), ": 0 to ", tensor.width - 1, " are allowed");
    return check_rows(tensor, length);
}

}  // namespace spindle
