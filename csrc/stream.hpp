// Writing results that nobody reads soon: past the caches when they are large, so that memory is written once and not read first.
#pragma once

#include "bytes.hpp"

namespace spindle {

class StreamWriter {
  public:
    // Small outputs go through the caches, where their reader will find them.
    explicit StreamWriter(size_t total_bytes);
    // What was written is visible to other threads, and to a device, once this returns.
    ~StreamWriter();
    StreamWriter(const StreamWriter&) = delete;
    StreamWriter& operator=(const StreamWriter&) = delete;

    void copy(void* to, const uint8_t* from, size_t bytes) const;
    void zero(void* to, size_t bytes) const;
    void widen(int64_t* to, const uint8_t* int32, size_t n) const;

  private:
    bool past_caches_;
};

// Has the head of what will be copied next brought nearer meanwhile.
void ask_early(Bytes source);

}  // namespace spindle
