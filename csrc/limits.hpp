// Every bound that a client can meet, in one place. scan enforces all of them.
#pragma once

#include <cstdint>

namespace spindle {

struct Limits {
    int64_t max_body_bytes = int64_t{64} << 20;       // as it came, before zstd
    int64_t max_inflated_bytes = int64_t{512} << 20;  // after zstd
    int64_t max_datums = 4096;
    int64_t max_tokens = int64_t{8} << 20;           // of all datums of a request
    int64_t max_sequence_length = int64_t{1} << 20;  // of one datum
    int64_t max_target_width = 256;                  // K of an [N, K] input
    int64_t max_cells = int64_t{1} << 26;            // N * K summed over datums: CSR says many in few bytes; fits 32 bits
    int64_t max_name_length = 256;                   // bytes of model_id, loss_fn, input and config names
    int64_t max_input_names = 64;                    // different ones of a request
    int64_t max_config_entries = 64;
    int64_t max_spans = int64_t{1} << 16;  // provenance spans of all datums
    int64_t vocab_size = 0;                // token ids must be below it; 0 = any that are not negative (of tokens: that fit int32)
    int64_t zstd_window_log_max = 27;
};

}  // namespace spindle
