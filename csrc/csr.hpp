// Sparse rows: what makes them sound, and writing them out as their dense twin.
#pragma once

#include "tensor.hpp"

namespace spindle {

// What is wrong with the index arrays of an [length, tensor.width] CSR tensor, or an empty string.
// A column may be listed once in a row; rows need not be sorted.
std::string check_csr(const Tensor& tensor, int64_t length);

// For a checked tensor whose rows are mostly empty: appends the row of each listed cell to `rows`, so that writing it out later does
// not have to read all row starts again.
void note_rows(Tensor& tensor, int64_t length, Vec<uint32_t>& rows);

}  // namespace spindle
