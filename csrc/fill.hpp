// The second pass: writes chosen datums of a scanned request into micro-batch tensors. The only copy on the road.
//
// Nearly all label cells of a classifier are zero. Memory that is zero already is filled by writing the others alone, and made zero
// again by clear(): two passes over few cells instead of one over all.
#pragma once

#include <optional>

#include "request.hpp"

namespace spindle {

struct InputTarget {
    int64_t name = -1;  // Request::name_index
    float* to = nullptr;
    std::optional<float> fallback;  // for datums that lack the input
};

struct FillTarget {
    int32_t* tokens = nullptr;  // [tokens of the datums]
    int64_t* labels = nullptr;  // [cells of the datums], row-major; nullptr = not wanted
    const InputTarget* inputs = nullptr;
    size_t num_inputs = 0;
    bool zeroed = false;  // labels and inputs are zero bits as they come
};

// Label cells of a datum: length x K, 0 when it has no target_tokens.
int64_t cells_of(const Datum& datum);

// How many of them fill writes where memory is zeroed: those listed, or those between zeros at either end.
int64_t written_cells(const Request& request, const Datum& datum);

// Writes datums in the order given, end to end. The caller has checked that indices are in range, that every datum has the inputs
// it must have in the width of its labels, and that the memory is large enough.
void fill(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to);

// Zeroes the labels and inputs that fill, called with the same, wrote into zeroed memory. Tokens stay.
void clear(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to);

}  // namespace spindle
