// Sparse rows: what makes them sound, and writing them out as their dense twin.
#pragma once

#include "tensor.hpp"

namespace spindle {

// What is wrong with the index arrays of an [length, tensor.width] CSR tensor, or an empty string.
// A column may be listed once in a row; rows need not be sorted.
std::string check_csr(const Tensor& tensor, int64_t length);

}  // namespace spindle
