// Questions about single cells: which of them a request lists, and inputs of another shape than the targets laid over them.
#pragma once

#include <vector>

#include "request.hpp"

namespace spindle {

// The cells of the datums, laid end to end, that any of the named tensors lists, in order. A dense tensor lists all cells of its datum,
// and so does one that a datum lacks (its default is everywhere).
std::vector<int64_t> listed_cells(const Request& request, const int64_t* datums, size_t num_datums, const std::vector<int64_t>& names);

// An input beside the cells of each datum, row-major [cells], or [N, K] where it has K columns and the targets are [N]: one number
// stands at every cell, a number per row at every cell of its row. CSR is written dense. Throws std::invalid_argument when a datum has
// target_tokens [N, K] and columns other than K, or lacks the input.
std::vector<float> spread_input(const Request& request, const int64_t* datums, size_t num_datums, int64_t name);

}  // namespace spindle
