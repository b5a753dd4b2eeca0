// The second pass: writes chosen datums of a scanned request into micro-batch tensors. The only copy on the road.
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
    int64_t* tokens = nullptr;     // [tokens of the datums]
    int64_t* positions = nullptr;  // the same; from 0 in each datum
    int64_t* labels = nullptr;     // [cells of the datums], row-major; nullptr = not wanted
    const InputTarget* inputs = nullptr;
    size_t num_inputs = 0;
};

// Label cells of a datum: length x K, 0 when it has no target_tokens.
int64_t cells_of(const Datum& datum);

// Writes datums in the order given, end to end. The caller has checked that indices are in range, that every datum has the inputs
// it must have in the width of its labels, and that the memory is large enough.
void fill(const Request& request, const int64_t* datums, size_t num_datums, const FillTarget& to);

}  // namespace spindle
