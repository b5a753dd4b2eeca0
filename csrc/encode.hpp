// Writes a ForwardBackwardOutput message in one go: its size is known before the first byte.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"

namespace spindle {

struct OutputContent {
    const float* logprobs = nullptr;  // cells of all datums, input order
    const int64_t* lengths = nullptr;
    const int64_t* widths = nullptr;  // 0 = [N], K = [N, K]
    size_t num_datums = 0;
    std::vector<std::pair<std::string, double>> metrics;
};

// The number of bytes that encode_output writes.
size_t encoded_size(const OutputContent& content);

// `to` must hold encoded_size bytes. Consecutive datums of equal width share one ArrayRecord.
void encode_output(const OutputContent& content, uint8_t* to);

}  // namespace spindle
