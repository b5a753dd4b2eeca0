// One input to the codec's ways in. The first byte chooses; the rest is the body.
//
// Besides the sanitizers, it holds the codec to what must be true of every input: a plain body and its zstd twin give the same
// fingerprint or the same error, filling an accepted request writes every cell, listed cells lie in it, and peek agrees with scan.
#include <zstd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cells.hpp"
#include "errors.hpp"
#include "fill.hpp"
#include "request.hpp"

namespace spindle {
namespace {

#define MUST(condition)                                                    \
    do {                                                                   \
        if (!(condition)) {                                                \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                  \
        }                                                                  \
    } while (0)

Limits small_limits() {
    Limits limits;
    limits.max_inflated_bytes = 1 << 20;
    limits.max_datums = 64;
    limits.max_cells = 1 << 16;
    limits.max_tokens = 1 << 14;
    limits.vocab_size = 1000;
    return limits;
}

void fill_everything(const Request& request) {
    size_t tokens = 0;
    size_t cells = 0;
    std::vector<int64_t> indices;
    for (const Datum& datum : request.datums()) {
        tokens += static_cast<size_t>(datum.length);
        cells += static_cast<size_t>(cells_of(datum));
        indices.push_back(static_cast<int64_t>(indices.size()));
    }
    constexpr int64_t unwritten = INT64_MIN;
    std::vector<int32_t> ids(tokens, -1);
    std::vector<int64_t> labels(cells, unwritten);
    std::vector<std::vector<float>> values;
    std::vector<InputTarget> inputs;
    for (size_t name = 0; name < request.names().size(); ++name) {
        bool fits = true;
        for (const Datum& datum : request.datums()) {
            const Tensor* tensor = request.find(datum, static_cast<int64_t>(name));
            fits &= !tensor || tensor->width == datum.target_width;
        }
        if (!fits) continue;
        values.emplace_back(cells, 0.0f);
        inputs.push_back({static_cast<int64_t>(name), values.back().data(), 1.0f});
    }
    FillTarget to;
    to.tokens = ids.data();
    to.labels = labels.data();
    to.inputs = inputs.data();
    to.num_inputs = inputs.size();
    fill(request, indices.data(), indices.size(), to);
    for (const int32_t id : ids) MUST(id >= 0 && id < 1000);
    for (const int64_t label : labels) MUST(label >= 0 && label < 1000);
    for (const auto& column : values)
        for (const float value : column) MUST(value - value == 0);

    // Zeroed memory is filled alike, and cleared to the last byte.
    std::vector<int64_t> zeroed_labels(cells, 0);
    std::vector<std::vector<float>> zeroed_values(values.size(), std::vector<float>(cells, 0.0f));
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i].to = zeroed_values[i].data();
    to.labels = zeroed_labels.data();
    to.zeroed = true;
    fill(request, indices.data(), indices.size(), to);
    MUST(zeroed_labels == labels && zeroed_values == values);
    clear(request, indices.data(), indices.size(), to);
    for (const int64_t label : zeroed_labels) MUST(label == 0);
    for (const auto& column : zeroed_values)
        for (const float value : column) MUST(value == 0 && !std::signbit(value));
}

// Which cells are listed, and every input laid over the targets' cells.
void ask_of_cells(const Request& request) {
    int64_t cells = 0;
    std::vector<int64_t> indices;
    for (const Datum& datum : request.datums()) {
        cells += cells_of(datum);
        indices.push_back(static_cast<int64_t>(indices.size()));
    }
    std::vector<int64_t> names;
    for (size_t name = 0; name < request.names().size(); ++name) names.push_back(static_cast<int64_t>(name));
    int64_t before = -1;
    for (const int64_t cell : listed_cells(request, indices.data(), indices.size(), names)) {
        MUST(cell > before && cell < cells);
        before = cell;
    }
    for (const int64_t name : names) {
        try {
            const std::vector<float> spread = spread_input(request, indices.data(), indices.size(), name);
            MUST(static_cast<int64_t>(spread.size()) >= cells);
            for (const float value : spread) MUST(value - value == 0);
        } catch (const std::invalid_argument&) {
        }
    }
}

// What a scan came to: its fingerprint, or the error's text.
std::string outcome(Bytes body, Encoding encoding, const Limits& limits) {
    try {
        const Request request = scan(body, encoding, limits);
        MUST(request.seq_id > 0 && request.num_tokens > 0);
        fill_everything(request);
        ask_of_cells(request);
        return text("ok ", request.fingerprint.low, " ", request.fingerprint.high);
    } catch (const MalformedBody& error) {
        return text("malformed ", error.what());
    } catch (const InvalidRequest& error) {
        return text("invalid ", error.what(), " ", error.model_id, " ", error.seq_id);
    }
}

void look(Bytes body, Encoding encoding, const Limits& limits) {
    try {
        const Identity identity = peek(body, encoding, limits);
        MUST(identity.inflated <= size_t{128} << 10 && !identity.model_id.empty());
    } catch (const MalformedBody&) {
    }
}

}  // namespace
}  // namespace spindle

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace spindle;
    static const Limits limits = small_limits();
    if (size < 1) return 0;
    const Bytes body{data + 1, size - 1};
    if (data[0] & 1) {  // the bytes as zstd
        outcome(body, Encoding::zstd, limits);
        look(body, Encoding::zstd, limits);
        return 0;
    }
    const std::string plain = outcome(body, Encoding::identity, limits);
    look(body, Encoding::identity, limits);
    if (body.size == 0) return 0;
    std::string packed(ZSTD_compressBound(body.size), '\0');
    packed.resize(ZSTD_compress(packed.data(), packed.size(), body.data, body.size, 1));
    const Bytes twin{reinterpret_cast<const uint8_t*>(packed.data()), packed.size()};
    MUST(outcome(twin, Encoding::zstd, limits) == plain);
    look(twin, Encoding::zstd, limits);
    return 0;
}
