// One loss input of one datum: where its numbers lie in the body, dense or CSR. Borrows everything.
#pragma once

#include <string>

#include "arena.hpp"
#include "checks.hpp"

namespace spindle {

enum class Layout : uint8_t { unset, dense, csr };

constexpr int64_t scalar_width = -2;  // -1 is said of a tensor that is absent

struct Tensor {
    uint32_t name = 0;  // into Request::names
    Layout layout = Layout::unset;
    Dtype dtype = Dtype::unset;
    uint8_t rank = 0;            // sizes met in the shape, saturating at 255
    int64_t shape[2] = {0, 0};   // the first two of them
    int64_t width = 0;           // 0 = [N], K = [N, K], scalar_width = one number without a shape; known once settled
    Bytes values;                // dense cells row-major, or the listed values
    Bytes crow;                  // CSR: [N + 1] int64
    Bytes col;                   // CSR: [nnz] int64
    Bytes nonzero;               // values without_outer_zeros when dense, else all of them
    size_t first_cell = 0;       // CSR: where its listed cells begin in Storage::cells
    uint64_t wire_dtype = 0;     // as it came, for the message
};

// Reads a Tensor message onto what earlier pieces of it said, as protobuf merges.
void parse_tensor(Bytes message, Tensor& onto);

// Appends one size of the shape.
void push_size(Tensor& tensor, int64_t size);

// Settles shape and width for a datum of `length` tokens and checks that the tensor is whole: sizes agree, CSR indices are sound.
// Returns what is wrong, or an empty string. `max_width` bounds K.
std::string settle(Tensor& tensor, int64_t length, int64_t max_width);

}  // namespace spindle
