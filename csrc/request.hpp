// A forward_backward request after the first pass: checked whole, kept as spans into its body.
//
// scan() walks the body once, inflating just ahead of itself, so that each datum is checked while it is still in the cache.
// assemble() builds the same thing from arrays that the caller holds. After either, fill() cannot fail on the content.
#pragma once

#include <functional>
#include <memory>

#include "arena.hpp"
#include "fingerprint.hpp"
#include "limits.hpp"
#include "tensor.hpp"

namespace spindle {

// A run of token ids of a datum.
struct Chunk {
    Bytes tokens;
    Dtype dtype = Dtype::int32;
};

// Where a run of tokens came from, as the client claims.
struct Span {
    bool of_inputs = false;  // of loss_fn_inputs; else of model_input
    bool sampled = false;    // sampled_tokens; else prompt_tokens
    bool set = false;
    Bytes sequence_id;
    int64_t offset = 0;
    int64_t length = 0;
};

struct Datum {
    uint32_t first_chunk = 0, chunks = 0;
    uint32_t first_tensor = 0, tensors = 0;
    uint32_t first_span = 0, spans = 0;
    int64_t length = 0;         // tokens
    int64_t target_width = -1;  // of target_tokens: 0 = [N], K = [N, K], -1 = absent
};

struct ConfigEntry {
    Bytes name;
    bool is_text = false;
    bool set = false;
    double number = 0;
    Bytes text;
};

// What a request borrows from the pool while it lives. clear() keeps capacities.
struct Storage {
    Storage() = default;
    ~Storage();
    Storage(const Storage&) = delete;
    Storage& operator=(const Storage&) = delete;

    Arena arena;
    ZSTD_DCtx_s* context = nullptr;  // made on first use
    Vec<Datum> datums;
    Vec<Chunk> chunks;
    Vec<Tensor> tensors;
    Vec<Span> spans;
    Vec<uint32_t> cells;  // that CSR tensors list
    Vec<Bytes> names;  // of loss inputs, in the order met
    Vec<Fingerprint> name_fingerprints;
    Vec<ConfigEntry> config, config_v2;

    ZSTD_DCtx_s* zstd();
    void clear();
    size_t held() const;
};

Pool<Storage>& storage_pool();

class Request {
  public:
    Request() = default;
    Request(Request&&) = default;
    Request& operator=(Request&&) = default;
    ~Request() { release(); }

    Bytes model_id, loss_fn;
    int32_t seq_id = 0;
    bool forward_only = false;
    int64_t num_tokens = 0;
    size_t nbytes = 0;  // of the body as it is held
    Fingerprint fingerprint;
    std::unique_ptr<Storage> storage;  // null once released

    const Vec<Datum>& datums() const { return storage->datums; }
    const Vec<ConfigEntry>& config() const { return storage->config_v2.empty() ? storage->config : storage->config_v2; }
    const Vec<Bytes>& names() const { return storage->names; }
    const Tensor* find(const Datum& datum, int64_t name) const;  // nullptr when the datum lacks it
    int64_t name_index(std::string_view name) const;             // -1 when no datum has it

    // Gives the memory back to the pool. Every Bytes of the request is dead after it.
    void release();
};

enum class Encoding : uint8_t { identity, zstd };

// The body must outlive the request when it is not compressed. Throws MalformedBody or InvalidRequest.
Request scan(Bytes body, Encoding encoding, const Limits& limits);

// One datum of an in-process request, borrowed.
struct ArrayDatum {
    Chunk tokens;
    std::vector<std::pair<Bytes, Tensor>> inputs;  // name, tensor with layout, dtype, rank, shape and bytes set
    std::vector<Span> spans;
};

// The in-process twin of scan. Everything it is given must outlive the request.
Request assemble(Bytes model_id, int32_t seq_id, Bytes loss_fn, bool forward_only, const std::vector<ConfigEntry>& config,
                 const std::vector<ArrayDatum>& datums, const Limits& limits);

struct Identity {
    std::string model_id;
    int32_t seq_id = 0;
    size_t inflated = 0;  // bytes that were inflated to learn it
};

// model_id and seq_id from the head of a body. Inflates at most 128 KiB; throws MalformedBody when they are not in it.
Identity peek(Bytes body, Encoding encoding, const Limits& limits);

}  // namespace spindle
