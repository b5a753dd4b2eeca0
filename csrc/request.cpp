#include "request.hpp"

#include <algorithm>

#include "csr.hpp"
#include "protobuf.hpp"
#include "zstd_frame.hpp"

namespace spindle {

namespace {

Bytes checked_text(Bytes bytes, const char* what, const Limits& limits) {
    if (bytes.size > static_cast<size_t>(limits.max_name_length))
        throw InvalidRequest(text(what, " has ", bytes.size, " bytes: at most ", limits.max_name_length, " are allowed"));
    if (!is_utf8(bytes)) throw MalformedBody(text("the body is not readable protobuf: ", what, " is not UTF-8"));
    return bytes;
}

// Builds a Request datum by datum; both ways in end here, so both are checked alike.
class Builder {
  public:
    Builder(Request& request, const Limits& limits) : request_(request), storage_(*request.storage), limits_(limits) {}

    void begin_datum() {
        if (storage_.datums.size() >= static_cast<size_t>(limits_.max_datums))
            throw InvalidRequest(text("data has more than ", limits_.max_datums, " datums: send it in several requests"));
        Datum datum;
        datum.first_chunk = static_cast<uint32_t>(storage_.chunks.size());
        datum.first_tensor = static_cast<uint32_t>(storage_.tensors.size());
        datum.first_span = static_cast<uint32_t>(storage_.spans.size());
        storage_.datums.push_back(datum);
    }
    void add_chunk(const Chunk& chunk) {
        if (chunk.tokens.size % item_size(chunk.dtype) != 0)
            throw wrong(text("model_input has ", chunk.tokens.size, " bytes of tokens, which is no whole number of int32"));
        if (chunk.tokens.size == 0) return;
        datum().length += static_cast<int64_t>(chunk.tokens.size / item_size(chunk.dtype));
        if (datum().length > limits_.max_sequence_length)
            throw wrong(text("model_input has more than ", limits_.max_sequence_length, " tokens, the most that are allowed"));
        storage_.chunks.push_back(chunk);
        ++datum().chunks;
    }
    void add_span(const Span& span) {
        if (storage_.spans.size() >= static_cast<size_t>(limits_.max_spans))
            throw wrong(text("the request has more than ", limits_.max_spans, " provenance spans"));
        storage_.spans.push_back(span);
        ++datum().spans;
    }
    // A later entry of the same name takes the place of the earlier, as in a protobuf map.
    void add_tensor(Bytes name, Tensor tensor) {
        checked_text(name, "a loss input's name", limits_);
        tensor.name = intern(name);
        for (uint32_t i = 0; i < datum().tensors; ++i) {
            Tensor& earlier = storage_.tensors[datum().first_tensor + i];
            if (earlier.name == tensor.name) {
                earlier = tensor;
                return;
            }
        }
        storage_.tensors.push_back(tensor);
        ++datum().tensors;
    }
    void end_datum() {
        Datum& now = datum();
        if (now.length == 0) throw wrong("model_input has no tokens: at least one is needed");
        request_.num_tokens += now.length;
        if (request_.num_tokens > limits_.max_tokens)
            throw InvalidRequest(text("data has more than ", limits_.max_tokens, " tokens: send it in several requests"));
        Fingerprint content = tokens_fingerprint(now);
        check_tokens(now);
        int64_t widest = 1;
        for (uint32_t i = 0; i < now.tensors; ++i) {
            Tensor& tensor = storage_.tensors[now.first_tensor + i];
            check_tensor(now, tensor);
            widest = std::max(widest, tensor.width);
        }
        cells_ += now.length * widest;
        if (cells_ > limits_.max_cells)
            throw InvalidRequest(text("data has more than ", limits_.max_cells, " cells (tokens x K): send it in several requests"));
        Fingerprint inputs;
        for (uint32_t i = 0; i < now.tensors; ++i) {
            Tensor& tensor = storage_.tensors[now.first_tensor + i];
            if (tensor.layout == Layout::csr)
                if (const std::string what = list_cells(tensor, now.length, storage_.cells); !what.empty()) throw wrong(text(input_name(tensor), " ", what));
            inputs.add(tensor_fingerprint(tensor));
        }
        content.then(inputs);
        for (uint32_t i = 0; i < now.spans; ++i) content.then(span_fingerprint(storage_.spans[now.first_span + i]));
        request_.fingerprint.then(content);
    }
    // What can only be said at the end of the request.
    void finish() {
        if (request_.model_id.size == 0) throw InvalidRequest("model_id is missing");
        if (request_.seq_id <= 0) throw InvalidRequest(text("seq_id is ", request_.seq_id, ": 1 or more is needed"));
        if (request_.loss_fn.size == 0) throw InvalidRequest("loss_fn is missing");
        if (storage_.datums.empty()) throw InvalidRequest("data is empty: at least one datum is needed");
        Fingerprint settings;
        for (const ConfigEntry& entry : request_.config()) {
            if (!entry.set) throw InvalidRequest(text("loss_fn_config: ", entry.name.text(), " has no value"));
            uint64_t number;
            std::memcpy(&number, &entry.number, 8);
            Fingerprint one = spindle::fingerprint(entry.name);
            one.then(entry.is_text ? spindle::fingerprint(entry.text) : Fingerprint{number, 1});
            settings.add(one);
        }
        Fingerprint& all = request_.fingerprint;
        all.then(settings);
        all.then(spindle::fingerprint(request_.loss_fn));
        all.then(spindle::fingerprint(request_.model_id));
        all.then((static_cast<uint64_t>(static_cast<uint32_t>(request_.seq_id)) << 1) | (request_.forward_only ? 1 : 0));
    }
    void set_config(Vec<ConfigEntry>& config, const ConfigEntry& entry) {
        checked_text(entry.name, "a loss_fn_config name", limits_);
        for (ConfigEntry& earlier : config) {
            if (earlier.name.text() == entry.name.text()) {
                earlier = entry;
                return;
            }
        }
        if (config.size() >= static_cast<size_t>(limits_.max_config_entries))
            throw InvalidRequest(text("loss_fn_config has more than ", limits_.max_config_entries, " entries"));
        config.push_back(entry);
    }
    InvalidRequest wrong(const std::string& what) const { return InvalidRequest(text("datum ", storage_.datums.size() - 1, ": ", what)); }

  private:
    Datum& datum() { return storage_.datums.back(); }

    uint32_t intern(Bytes name) {
        for (size_t i = 0; i < storage_.names.size(); ++i)
            if (storage_.names[i].text() == name.text()) return static_cast<uint32_t>(i);
        if (storage_.names.size() >= static_cast<size_t>(limits_.max_input_names))
            throw wrong(text("loss_fn_inputs of the request have more than ", limits_.max_input_names, " different names"));
        storage_.names.push_back(name);
        storage_.name_fingerprints.push_back(spindle::fingerprint(name));
        return static_cast<uint32_t>(storage_.names.size() - 1);
    }

    std::string ids_allowed() const {
        return limits_.vocab_size ? text("token ids are 0 to ", limits_.vocab_size - 1) : std::string("token ids are not negative");
    }
    std::string_view input_name(const Tensor& tensor) const { return storage_.names[tensor.name].text(); }
    void check_tokens(const Datum& now) const {
        const int64_t bound = limits_.vocab_size ? limits_.vocab_size : int64_t{1} << 31;  // micro-batches hold int32
        int64_t before = 0;
        for (uint32_t i = 0; i < now.chunks; ++i) {
            const Chunk& chunk = storage_.chunks[now.first_chunk + i];
            if (const int64_t at = first_outside(chunk.tokens, chunk.dtype, bound); at >= 0)
                throw wrong(text("model_input: token ", before + at, " is ", integer_at(chunk.tokens, chunk.dtype, at), ": token ids are 0 to ", bound - 1));
            before += static_cast<int64_t>(chunk.tokens.size / item_size(chunk.dtype));
        }
    }
    void check_tensor(Datum& now, Tensor& tensor) const {
        const std::string_view name = input_name(tensor);
        if (const std::string what = settle(tensor, now.length, limits_.max_target_width); !what.empty()) throw wrong(text(name, " ", what));
        const auto before = static_cast<int64_t>((tensor.nonzero.data - tensor.values.data) / item_size(tensor.dtype));
        const char* cell = tensor.layout == Layout::csr ? ": listed value " : ": value ";
        if (name == "target_tokens") {
            if (tensor.width == scalar_width)
                throw wrong(text("target_tokens is one number without a shape: its first size must be the datum's ", now.length, " tokens"));
            now.target_width = tensor.width;
            if (!is_integer(tensor.dtype))
                throw wrong(text("target_tokens has dtype ", name_of(tensor.dtype), ": int64 or int32 is needed"));
            if (const int64_t at = first_outside(tensor.nonzero, tensor.dtype, limits_.vocab_size); at >= 0)
                throw wrong(text(name, cell, before + at, " is ", integer_at(tensor.nonzero, tensor.dtype, at), ": ", ids_allowed()));
        } else if (const int64_t at = first_not_finite(tensor.nonzero, tensor.dtype); at >= 0) {
            const double value = number_at(tensor.nonzero, tensor.dtype, at);
            throw wrong(text(name, cell, before + at, " is ", value != value ? "nan" : value > 0 ? "inf" : "-inf", ": it must be finite"));
        }
    }

    Fingerprint tokens_fingerprint(const Datum& now) const {
        Fingerprint out;
        for (uint32_t i = 0; i < now.chunks; ++i) out.then(spindle::fingerprint(storage_.chunks[now.first_chunk + i].tokens));
        return out;
    }
    Fingerprint tensor_fingerprint(const Tensor& tensor) const {
        Fingerprint out = storage_.name_fingerprints[tensor.name];
        out.then(spindle::fingerprint(tensor.nonzero));
        out.then(Fingerprint{static_cast<uint64_t>(tensor.nonzero.data - tensor.values.data), tensor.values.size});  // what zeros are around
        if (tensor.layout == Layout::csr) {
            const auto* cells = reinterpret_cast<const uint8_t*>(storage_.cells.data() + tensor.first_cell);
            out.then(spindle::fingerprint({cells, tensor.col.size / 2}));  // 4 bytes each
        }
        out.then((static_cast<uint64_t>(tensor.width) << 16) | (static_cast<uint64_t>(tensor.rank) << 8) | (static_cast<uint64_t>(tensor.dtype) << 4) |
                 static_cast<uint64_t>(tensor.layout));
        return out;
    }
    static Fingerprint span_fingerprint(const Span& span) {
        Fingerprint out = spindle::fingerprint(span.sequence_id);
        out.then(static_cast<uint64_t>(span.offset));
        out.then(static_cast<uint64_t>(span.length));
        out.then((span.of_inputs ? 2 : 0) | (span.sampled ? 1 : 0));
        return out;
    }

    Request& request_;
    Storage& storage_;
    const Limits& limits_;
    int64_t cells_ = 0;
};

// The body as far as it is readable; inflates further when asked.
class Source {
  public:
    explicit Source(Bytes plain) : data_(plain.data), readable_(plain.size), total_(plain.size) {}
    Source(Inflater& inflater, const uint8_t* to, size_t bound) : data_(to), total_(bound), inflater_(&inflater) {}

    const uint8_t* data() const { return data_; }
    size_t total() const { return total_; }  // at most; exact when nothing is left to inflate
    // How far the body can be read, at least to `end` when it is that long.
    size_t readable(size_t end) {
        if (end > readable_ && inflater_) {
            readable_ = inflater_->advance(end);
            if (inflater_->finished()) total_ = readable_;
        }
        return readable_;
    }

  private:
    const uint8_t* data_;
    size_t readable_ = 0;
    size_t total_;
    Inflater* inflater_ = nullptr;
};

constexpr size_t tag_and_size = 20;  // more than any tag with a varint takes

// Walks the top-level fields. Each is whole and readable when `visit(reader)` is called, which reads or skips its value.
template <class Visit>
void walk(Source& source, Visit visit) {
    size_t at = 0;
    for (;;) {
        size_t readable = source.readable(at + tag_and_size);
        if (at == readable) return;
        Reader head(Bytes{source.data() + at, readable - at});
        head.next();
        size_t end = readable;
        if (head.wire == Wire::bytes) {
            const uint64_t size = head.varint(5);
            end = static_cast<size_t>(head.at() - source.data()) + size;
            if (end > source.total() || (end > readable && source.readable(end) < end))
                throw MalformedBody("the body is not readable protobuf: it ends inside a field");
        } else if (head.wire == Wire::group) {
            end = source.readable(SIZE_MAX);
        }
        Reader reader(Bytes{source.data() + at, end - at});
        reader.next();
        visit(reader);
        at = static_cast<size_t>(reader.at() - source.data());
    }
}

// Remembers which arm of a oneof the message has, merging as protobuf does: the same arm again goes on, another starts anew.
void parse_chunk(Bytes message, Builder& builder, int64_t index) {
    Reader reader(message);
    uint32_t arm = 0;
    Chunk chunk;
    while (reader.next()) {
        if (reader.wire == Wire::bytes && reader.field >= 1 && reader.field <= 3) {
            if (reader.field != arm) chunk = Chunk{};
            arm = reader.field;
            Reader inner(reader.bytes());
            while (inner.next()) {
                if (arm == 1 && inner.is(1, Wire::bytes)) chunk.tokens = inner.bytes();
                else if (arm == 2 && inner.is(2, Wire::bytes) && !is_utf8(inner.bytes_ahead()))
                    throw MalformedBody("the body is not readable protobuf: an image's format is not UTF-8");
                else inner.skip();
            }
        } else {
            reader.skip();
        }
    }
    if (arm != 1)
        throw builder.wrong(text("model_input chunk ", index, arm == 2 ? " is an image" : arm == 3 ? " is dmel audio" : " is empty",
                                 ": not supported, only encoded_text is"));
    builder.add_chunk(chunk);
}

void add_checked_span(const Span& span, Builder& builder) {
    const char* field = span.of_inputs ? "loss_fn_input_spans" : "model_input_spans";
    if (!span.set) throw builder.wrong(text(field, " has a span that is neither prompt_tokens nor sampled_tokens"));
    if (span.offset < 0 || span.length < 0)
        throw builder.wrong(text(field, " has offset ", span.offset, " and length ", span.length, ": neither may be negative"));
    builder.add_span(span);
}

void parse_span(Bytes message, bool of_inputs, Builder& builder, const Limits& limits) {
    Reader reader(message);
    Span span;
    while (reader.next()) {
        if (reader.is(1, Wire::bytes) || reader.is(2, Wire::bytes)) {
            const bool sampled = reader.field == 2;
            if (!span.set || sampled != span.sampled) span = Span{};
            span.set = true;
            span.sampled = sampled;
            Reader inner(reader.bytes());
            while (inner.next()) {
                if (inner.is(1, Wire::bytes)) span.sequence_id = checked_text(inner.bytes(), "a span's sequence_id", limits);
                else if (inner.is(2, Wire::varint)) span.offset = static_cast<int64_t>(inner.varint());
                else if (inner.is(3, Wire::varint)) span.length = static_cast<int64_t>(inner.varint());
                else inner.skip();
            }
        } else {
            reader.skip();
        }
    }
    span.of_inputs = of_inputs;
    add_checked_span(span, builder);
}

void parse_input(Bytes entry, Builder& builder) {
    Reader reader(entry);
    Bytes name;
    Tensor tensor;
    while (reader.next()) {
        if (reader.is(1, Wire::bytes)) name = reader.bytes();
        else if (reader.is(2, Wire::bytes)) parse_tensor(reader.bytes(), tensor);
        else reader.skip();
    }
    builder.add_tensor(name, tensor);
}

void parse_datum(Bytes message, Builder& builder, const Limits& limits) {
    builder.begin_datum();
    Reader reader(message);
    int64_t chunks = 0;
    while (reader.next()) {
        if (reader.is(1, Wire::bytes)) parse_chunk(reader.bytes(), builder, chunks++);
        else if (reader.is(2, Wire::bytes)) parse_input(reader.bytes(), builder);
        else if (reader.is(3, Wire::bytes)) parse_span(reader.bytes(), false, builder, limits);
        else if (reader.is(4, Wire::bytes)) parse_span(reader.bytes(), true, builder, limits);
        else reader.skip();
    }
    builder.end_datum();
}

void parse_config_value(Bytes message, ConfigEntry& onto) {
    Reader reader(message);
    while (reader.next()) {
        if (reader.is(1, Wire::fixed64)) {
            onto.number = reader.fixed_double();
            onto.text = {};
            onto.is_text = false;
            onto.set = true;
        } else if (reader.is(2, Wire::bytes)) {
            onto.text = reader.bytes();
            onto.number = 0;
            onto.is_text = true;
            onto.set = true;
            if (!is_utf8(onto.text)) throw MalformedBody("the body is not readable protobuf: a loss_fn_config text is not UTF-8");
        } else {
            reader.skip();
        }
    }
}

ConfigEntry parse_config(Bytes message, bool v2) {
    Reader reader(message);
    ConfigEntry entry;
    entry.set = !v2;  // a plain map's missing value is 0
    while (reader.next()) {
        if (reader.is(1, Wire::bytes)) entry.name = reader.bytes();
        else if (v2 && reader.is(2, Wire::bytes)) parse_config_value(reader.bytes(), entry);
        else if (!v2 && reader.is(2, Wire::fixed64)) entry.number = reader.fixed_double();
        else reader.skip();
    }
    return entry;
}

// The fields that say which request it is; false when the field is another.
bool read_identity(Reader& reader, Bytes& model_id, int32_t& seq_id) {
    if (reader.is(1, Wire::bytes)) {
        model_id = reader.bytes();
        if (!is_utf8(model_id)) throw MalformedBody("the body is not readable protobuf: model_id is not UTF-8");
    } else if (reader.is(2, Wire::varint)) {
        seq_id = static_cast<int32_t>(reader.varint());
    } else {
        return false;
    }
    return true;
}

void parse_request(Source& source, Request& request, const Limits& limits) {
    Builder builder(request, limits);
    Storage& storage = *request.storage;
    walk(source, [&](Reader& reader) {
        if (read_identity(reader, request.model_id, request.seq_id)) {
            checked_text(request.model_id, "model_id", limits);
        } else if (reader.is(3, Wire::bytes)) {
            parse_datum(reader.bytes(), builder, limits);
        } else if (reader.is(4, Wire::bytes)) {
            request.loss_fn = checked_text(reader.bytes(), "loss_fn", limits);
        } else if (reader.is(5, Wire::bytes)) {
            builder.set_config(storage.config, parse_config(reader.bytes(), false));
        } else if (reader.is(6, Wire::varint)) {
            request.forward_only = reader.varint() != 0;
        } else if (reader.is(7, Wire::bytes)) {
            builder.set_config(storage.config_v2, parse_config(reader.bytes(), true));
        } else {
            reader.skip();
        }
    });
    request.nbytes = source.readable(SIZE_MAX);
    builder.finish();
}

// A rejected request still takes its place in its adapter's order, so its name is looked for in the whole body.
void name_request(Source& source, InvalidRequest& error) {
    Bytes model_id;
    try {
        walk(source, [&](Reader& reader) {
            if (!read_identity(reader, model_id, error.seq_id)) reader.skip();
        });
    } catch (const MalformedBody&) {
    }
    error.has_model_id = model_id.size > 0;
    error.model_id = model_id.text().substr(0, 4096);
}

void check_body_size(Bytes body, const Limits& limits) {
    if (body.size == 0) throw MalformedBody("the body is empty");
    if (body.size > static_cast<size_t>(limits.max_body_bytes))
        throw MalformedBody(text("the body has ", body.size, " bytes: at most ", limits.max_body_bytes, " are allowed"));
}

}  // namespace

Storage::~Storage() {
    if (context) free_zstd_context(context);
}

ZSTD_DCtx_s* Storage::zstd() {
    if (!context) context = new_zstd_context();
    return context;
}

void Storage::clear() {
    datums.clear();
    chunks.clear();
    tensors.clear();
    spans.clear();
    cells.clear();
    names.clear();
    name_fingerprints.clear();
    config.clear();
    config_v2.clear();
}

size_t Storage::held() const {
    return arena.touched() + datums.capacity() * sizeof(Datum) + chunks.capacity() * sizeof(Chunk) + tensors.capacity() * sizeof(Tensor) +
           spans.capacity() * sizeof(Span) + cells.capacity() * sizeof(uint32_t);
}

Pool<Storage>& storage_pool() {
    static auto* pool = new Pool<Storage>;  // outlives every request, whatever order the interpreter ends in
    return *pool;
}

const Tensor* Request::find(const Datum& datum, int64_t name) const {
    for (uint32_t i = 0; i < datum.tensors; ++i) {
        const Tensor& tensor = storage->tensors[datum.first_tensor + i];
        if (tensor.name == name) return &tensor;
    }
    return nullptr;
}

int64_t Request::name_index(std::string_view name) const {
    for (size_t i = 0; i < names().size(); ++i)
        if (names()[i].text() == name) return static_cast<int64_t>(i);
    return -1;
}

void Request::release() {
    if (storage) storage_pool().give_back(std::move(storage));
}

Request scan(Bytes body, Encoding encoding, const Limits& limits) {
    check_body_size(body, limits);
    Request request;
    const auto run = [&](Source& source) {
        try {
            parse_request(source, request, limits);
        } catch (InvalidRequest& error) {
            name_request(source, error);
            throw;
        }
    };
    if (encoding == Encoding::identity) {
        if (body.size > static_cast<size_t>(limits.max_inflated_bytes))
            throw MalformedBody(text("the body has ", body.size, " bytes: at most ", limits.max_inflated_bytes, " are allowed"));
        request.storage = storage_pool().take(0);
        Source source(body);
        run(source);
        return request;
    }
    const InflatedSize size = inspect_zstd(body, limits);
    request.storage = storage_pool().take(size.bound);
    Arena& arena = request.storage->arena;
    Inflater inflater(request.storage->zstd(), body, arena.data(), size.bound);
    Source source(inflater, arena.data(), size.bound);
    try {
        run(source);
    } catch (...) {
        arena.touch(inflater.produced());
        throw;
    }
    arena.touch(inflater.produced());
    return request;
}

Request assemble(Bytes model_id, int32_t seq_id, Bytes loss_fn, bool forward_only, const std::vector<ConfigEntry>& config,
                 const std::vector<ArrayDatum>& datums, const Limits& limits) {
    Request request;
    request.storage = storage_pool().take(0);
    try {
        request.model_id = checked_text(model_id, "model_id", limits);
        request.seq_id = seq_id;
        request.loss_fn = checked_text(loss_fn, "loss_fn", limits);
        request.forward_only = forward_only;
        Builder builder(request, limits);
        for (const ConfigEntry& entry : config) builder.set_config(request.storage->config, entry);
        for (const ArrayDatum& datum : datums) {
            builder.begin_datum();
            builder.add_chunk(datum.tokens);
            for (const auto& [name, tensor] : datum.inputs) builder.add_tensor(name, tensor);
            for (Span span : datum.spans) {
                span.sequence_id = checked_text(span.sequence_id, "a span's sequence_id", limits);
                add_checked_span(span, builder);
            }
            request.nbytes += datum.tokens.tokens.size;
            for (const auto& [name, tensor] : datum.inputs) request.nbytes += tensor.values.size + tensor.crow.size + tensor.col.size;
            builder.end_datum();
        }
        builder.finish();
    } catch (InvalidRequest& error) {
        error.has_model_id = model_id.size > 0;
        error.model_id = model_id.text();
        error.seq_id = seq_id;
        throw;
    }
    return request;
}

Identity peek(Bytes body, Encoding encoding, const Limits& limits) {
    static constexpr size_t head_bytes = size_t{128} << 10;
    check_body_size(body, limits);
    std::unique_ptr<Storage> storage;
    Bytes head = body;
    if (encoding == Encoding::zstd) {
        const size_t bound = inspect_zstd(body, limits).bound;
        storage = storage_pool().take(bound);
        Inflater inflater(storage->zstd(), body, storage->arena.data(), bound);
        head = {storage->arena.data(), inflater.advance_within(head_bytes)};
        storage->arena.touch(head.size);
    }
    Identity out;
    out.inflated = encoding == Encoding::zstd ? head.size : 0;
    Bytes model_id;
    bool has_seq_id = false;
    Reader reader({head.data, std::min(head.size, head_bytes)});
    try {
        while (!(model_id.size && has_seq_id) && reader.next()) {
            const bool seq_id_next = reader.is(2, Wire::varint);
            if (read_identity(reader, model_id, out.seq_id)) has_seq_id |= seq_id_next;
            else reader.skip();
        }
    } catch (const MalformedBody&) {  // the head is cut off somewhere; what matters is whether the two were in it
    }
    out.model_id = model_id.text();
    if (storage) storage_pool().give_back(std::move(storage));
    if (out.model_id.empty() || !has_seq_id)
        throw MalformedBody(text("model_id and seq_id are not in the first ", head_bytes, " bytes of the body: write them before data"));
    return out;
}

}  // namespace spindle
