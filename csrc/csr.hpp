// Sparse rows: what makes them sound, and which cells they list.
#pragma once

#include "tensor.hpp"

namespace spindle {

// What is wrong with the index arrays of an [length, tensor.width] CSR tensor, or an empty string. Columns may still come twice.
std::string check_csr(const Tensor& tensor, int64_t length);

// Appends the listed cells (row x K + column) of a checked tensor to `cells`, row by row, in the order listed, so that nobody has to
// read its index arrays again. Returns what is wrong when a column is listed twice in a row; within a row any order is allowed.
// length x K fits 32 bits.
std::string list_cells(Tensor& tensor, int64_t length, Vec<uint32_t>& cells);

}  // namespace spindle
