// The Python face of the codec, and the only file that knows Python. Every pass over bytes runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <zstd.h>

#include <limits>
#include <mutex>

#include "cells.hpp"
#include "encode.hpp"
#include "errors.hpp"
#include "fill.hpp"
#include "request.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace spindle {
namespace {

using IntArray = py::array_t<int64_t, py::array::c_style>;
using FloatArray = py::array_t<float, py::array::c_style>;

// A held Py_buffer. Made and dropped with the GIL.
class BufferView {
  public:
    explicit BufferView(const py::handle& from) {
        if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;
    Bytes bytes() const { return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)}; }

  private:
    Py_buffer view_{};
};

// A request with what keeps its bytes alive.
struct Held {
    Request request;
    std::unique_ptr<BufferView> body;  // of an uncompressed body
    py::object arrays;                 // of an in-process request
};

py::str to_str(Bytes text) { return {reinterpret_cast<const char*>(text.data), text.size}; }

// What Python holds. What is cheap stays readable after release(); the rest then raises.
class ScannedRequest {
  public:
    explicit ScannedRequest(std::shared_ptr<Held> held) : held_(std::move(held)) {
        const Request& request = held_->request;
        model_id = to_str(request.model_id);
        loss_fn = to_str(request.loss_fn);
        seq_id = request.seq_id;
        forward_only = request.forward_only;
        num_tokens = request.num_tokens;
        num_datums = request.datums().size();
        nbytes = request.nbytes;
        fingerprint_ = request.fingerprint;
        for (const ConfigEntry& entry : request.config())
            config[to_str(entry.name)] = entry.is_text ? py::object(to_str(entry.text)) : py::object(py::float_(entry.number));
        lengths = per_datum<int64_t>([](const Datum& datum) { return datum.length; });
        target_widths = per_datum<int64_t>([](const Datum& datum) { return datum.target_width; });
        cells = per_datum<int64_t>([](const Datum& datum) { return cells_of(datum); });
        py::array_t<int64_t> starts(static_cast<py::ssize_t>(num_datums + 1));
        int64_t* next = starts.mutable_data();
        int64_t before = 0;
        for (const Datum& datum : request.datums()) {
            *next++ = before;
            before += cells_of(datum);
        }
        *next = before;
        cell_starts = read_only(std::move(starts));
        written_cells = per_datum<int64_t>([&request](const Datum& datum) { return spindle::written_cells(request, datum); });
        has_spans = per_datum<bool>([](const Datum& datum) { return datum.spans > 0; });
    }

    py::str model_id, loss_fn;
    int32_t seq_id;
    bool forward_only;
    int64_t num_tokens;
    size_t num_datums;
    size_t nbytes;
    py::dict config;
    py::array lengths, target_widths, cells, cell_starts, written_cells, has_spans;

    py::bytes fingerprint() const { return {reinterpret_cast<const char*>(&fingerprint_), sizeof(fingerprint_)}; }

    std::vector<py::str> input_names() const {
        const auto held = use();
        std::vector<py::str> out;
        for (const Bytes& name : held->request.names()) out.push_back(to_str(name));
        return out;
    }
    py::array input_widths(const std::string& name) const {
        return per_input<int64_t>(name, [](const Tensor* tensor) { return tensor ? tensor->width : -1; });
    }
    // The first datum that lacks the input, has it in another shape than target_tokens, in an integer type; -1 where none does.
    py::tuple input_faults(const std::string& name) const {
        const auto held = use();
        const int64_t index = held->request.name_index(name);
        int64_t absent = -1, misshapen = -1, integer = -1, d = 0;
        const auto note = [&d](int64_t& first, bool fault) { first = first < 0 && fault ? d : first; };
        for (const Datum& datum : held->request.datums()) {
            const Tensor* tensor = held->request.find(datum, index);
            note(absent, !tensor);
            note(misshapen, tensor && tensor->width != datum.target_width);
            note(integer, tensor && is_integer(tensor->dtype));
            ++d;
        }
        return py::make_tuple(absent, misshapen, integer);
    }
    py::tuple spans(int64_t index) const {
        const auto held = use();
        if (index < 0 || static_cast<size_t>(index) >= num_datums) throw py::index_error("datum " + std::to_string(index) + " of " + std::to_string(num_datums));
        const Datum& datum = held->request.datums()[static_cast<size_t>(index)];
        py::list of_tokens, of_inputs;
        for (uint32_t i = 0; i < datum.spans; ++i) {
            const Span& span = held->request.storage->spans[datum.first_span + i];
            (span.of_inputs ? of_inputs : of_tokens)
                .append(py::make_tuple(span.sampled ? "sampled_tokens" : "prompt_tokens", to_str(span.sequence_id), span.offset, span.length));
        }
        return py::make_tuple(of_tokens, of_inputs);
    }
    void release() {
        std::shared_ptr<Held> last;
        const std::lock_guard<std::mutex> lock(mutex_);
        last.swap(held_);
    }
    bool released() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return !held_;
    }
    // Keeps the bytes alive while they are read, also when another thread releases the request meanwhile.
    std::shared_ptr<Held> use() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!held_) throw std::runtime_error("the request was released: its tensors are gone");
        return held_;
    }

  private:
    template <class T, class Of>
    py::array per_datum(Of of) const {
        const auto held = use();
        py::array_t<T> out(static_cast<py::ssize_t>(num_datums));
        T* to = out.mutable_data();
        for (const Datum& datum : held->request.datums()) *to++ = static_cast<T>(of(datum));
        return read_only(std::move(out));
    }
    static py::array read_only(py::array out) {
        py::detail::array_proxy(out.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
        return out;
    }
    template <class T, class Of>
    py::array per_input(const std::string& name, Of of) const {
        const Request& request = use()->request;
        const int64_t index = request.name_index(name);
        return per_datum<T>([&](const Datum& datum) { return of(request.find(datum, index)); });
    }

    mutable std::mutex mutex_;
    std::shared_ptr<Held> held_;
    Fingerprint fingerprint_;
};

Encoding parse_encoding(const std::optional<std::string>& name) {
    if (!name || *name == "identity" || name->empty()) return Encoding::identity;
    if (*name == "zstd") return Encoding::zstd;
    throw MalformedBody("Content-Encoding is '" + *name + "': zstd or identity is allowed");
}

std::unique_ptr<ScannedRequest> py_scan(const py::object& body, const std::optional<std::string>& content_encoding, const Limits& limits) {
    const Encoding encoding = parse_encoding(content_encoding);
    auto held = std::make_shared<Held>();
    held->body = std::make_unique<BufferView>(body);
    const Bytes bytes = held->body->bytes();
    {
        const py::gil_scoped_release no_gil;
        held->request = scan(bytes, encoding, limits);
    }
    if (encoding == Encoding::zstd) held->body.reset();
    return std::make_unique<ScannedRequest>(std::move(held));
}

Bytes text_of(const py::handle& str) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(str.ptr(), &size);
    if (!data) throw py::error_already_set();
    return {reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)};
}

Bytes bytes_of(const py::array& array) {
    if (!(array.flags() & py::array::c_style)) throw py::value_error("arrays of an in-process request must be C-contiguous");
    return {static_cast<const uint8_t*>(array.data()), static_cast<size_t>(array.nbytes())};
}

Dtype dtype_of(const py::array& array) {
    const auto size = array.itemsize();
    switch (array.dtype().kind()) {
        case 'i': return size == 8 ? Dtype::int64 : size == 4 ? Dtype::int32 : Dtype::unset;
        case 'f': return size == 4 ? Dtype::float32 : Dtype::unset;
        default: return Dtype::unset;
    }
}

// One (name, values, crow or None, col or None, shape or None).
std::pair<Bytes, Tensor> input_of(const py::tuple& given) {
    const auto values = given[1].cast<py::array>();
    Tensor tensor;
    tensor.dtype = dtype_of(values);
    tensor.values = bytes_of(values);
    tensor.layout = Layout::dense;
    if (!given[2].is_none()) {
        tensor.layout = Layout::csr;
        tensor.crow = bytes_of(given[2].cast<IntArray>());
        tensor.col = bytes_of(given[3].cast<IntArray>());
    }
    const py::tuple shape = given[4].is_none() ? py::tuple(values.attr("shape")) : given[4].cast<py::tuple>();
    for (const py::handle& size : shape) push_size(tensor, size.cast<int64_t>());
    return {text_of(given[0]), tensor};
}

// (of loss_fn_inputs, sampled, sequence_id, offset, length)
Span span_of(const py::tuple& given) {
    Span span;
    span.of_inputs = given[0].cast<bool>();
    span.sampled = given[1].cast<bool>();
    span.set = true;
    span.sequence_id = text_of(given[2]);
    span.offset = given[3].cast<int64_t>();
    span.length = given[4].cast<int64_t>();
    return span;
}

std::unique_ptr<ScannedRequest> py_scan_arrays(const py::str& model_id, int32_t seq_id, const py::list& datums, const py::str& loss_fn,
                                               const py::dict& loss_fn_config, bool forward_only, const Limits& limits) {
    auto held = std::make_shared<Held>();
    held->arrays = py::make_tuple(model_id, loss_fn, loss_fn_config, datums);
    std::vector<ConfigEntry> config;
    for (const auto& [name, value] : loss_fn_config) {
        ConfigEntry entry;
        entry.name = text_of(name);
        entry.set = true;
        entry.is_text = py::isinstance<py::str>(value);
        if (entry.is_text) entry.text = text_of(value);
        else entry.number = value.cast<double>();
        config.push_back(entry);
    }
    std::vector<ArrayDatum> arrays;
    arrays.reserve(datums.size());
    for (const py::handle& given : datums) {
        const auto datum = given.cast<py::tuple>();
        const auto tokens = datum[0].cast<py::array>();
        if (!is_integer(dtype_of(tokens))) throw py::type_error("tokens of an in-process request must be int32 or int64");
        ArrayDatum out;
        out.tokens = {bytes_of(tokens), dtype_of(tokens)};
        for (const py::handle& input : datum[1]) out.inputs.push_back(input_of(input.cast<py::tuple>()));
        for (const py::handle& item : datum[2]) out.spans.push_back(span_of(item.cast<py::tuple>()));
        arrays.push_back(std::move(out));
    }
    const Bytes model = text_of(model_id);
    const Bytes loss = text_of(loss_fn);
    {
        const py::gil_scoped_release no_gil;
        held->request = assemble(model, seq_id, loss, forward_only, config, arrays, limits);
    }
    return std::make_unique<ScannedRequest>(std::move(held));
}

const int64_t* checked(const IntArray& indices, const ScannedRequest& scanned) {
    for (py::ssize_t i = 0; i < indices.size(); ++i)
        if (indices.data()[i] < 0 || static_cast<size_t>(indices.data()[i]) >= scanned.num_datums)
            throw py::index_error("datum " + std::to_string(indices.data()[i]) + " of " + std::to_string(scanned.num_datums));
    return indices.data();
}

// A writable one-dimensional array of exactly `size` items, as raw memory.
template <class T>
T* memory_of(const py::object& given, int64_t size, const std::string& name) {
    const auto array = py::array::ensure(given);
    if (!array || !py::isinstance<py::array_t<T>>(array) || !(array.flags() & py::array::c_style) || !array.writeable())
        throw py::type_error(name + " must be a writable contiguous " + py::str(py::dtype::of<T>()).cast<std::string>() + " array");
    if (array.size() != size) throw py::value_error(name + " has " + std::to_string(array.size()) + " items: the datums need " + std::to_string(size));
    return static_cast<T*>(const_cast<void*>(array.data()));
}

// Where fill writes and clear zeroes, checked against the datums.
struct Destination {
    FillTarget to;
    std::vector<InputTarget> inputs;
    int64_t num_tokens = 0;

    Destination(const Request& request, const IntArray& indices, const ScannedRequest& scanned, const py::object& targets, const py::dict& given) {
        const int64_t* chosen = checked(indices, scanned);
        int64_t num_cells = 0;
        for (py::ssize_t i = 0; i < indices.size(); ++i) {
            const Datum& datum = request.datums()[static_cast<size_t>(chosen[i])];
            num_tokens += datum.length;
            num_cells += cells_of(datum);
        }
        if (!targets.is_none()) to.labels = memory_of<int64_t>(targets, num_cells, "targets");
        for (const auto& [key, value] : given) {
            const auto name = key.cast<std::string>();
            const auto pair = value.cast<py::tuple>();
            InputTarget input;
            input.name = request.name_index(name);
            input.to = memory_of<float>(pair[0].cast<py::object>(), num_cells, name);
            if (!pair[1].is_none()) input.fallback = pair[1].cast<float>();
            for (py::ssize_t i = 0; i < indices.size(); ++i) {
                const int64_t index = chosen[i];
                const Datum& datum = request.datums()[static_cast<size_t>(index)];
                const Tensor* tensor = request.find(datum, input.name);
                if (!tensor && !input.fallback) throw py::value_error("datum " + std::to_string(index) + ": " + name + " is missing and has no default");
                if (tensor && tensor->width != datum.target_width)
                    throw py::value_error("datum " + std::to_string(index) + ": " + name + " does not have the shape of target_tokens");
            }
            inputs.push_back(input);
        }
        to.inputs = inputs.data();
        to.num_inputs = inputs.size();
    }
};

void py_fill(const ScannedRequest& scanned, const IntArray& indices, const py::object& tokens, const py::object& targets, const py::dict& inputs,
             bool zeroed) {
    const auto held = scanned.use();
    Destination there(held->request, indices, scanned, targets, inputs);
    there.to.tokens = memory_of<int32_t>(tokens, there.num_tokens, "tokens");
    there.to.zeroed = zeroed;
    const py::gil_scoped_release no_gil;
    fill(held->request, indices.data(), static_cast<size_t>(indices.size()), there.to);
}

void py_clear(const ScannedRequest& scanned, const IntArray& indices, const py::object& targets, const py::dict& inputs) {
    const auto held = scanned.use();
    const Destination there(held->request, indices, scanned, targets, inputs);
    const py::gil_scoped_release no_gil;
    clear(held->request, indices.data(), static_cast<size_t>(indices.size()), there.to);
}

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array_t<int64_t> py_listed_cells(const ScannedRequest& scanned, const IntArray& indices, const std::vector<std::string>& names) {
    const auto held = scanned.use();
    std::vector<int64_t> which;
    for (const std::string& name : names) which.push_back(held->request.name_index(name));
    const int64_t* datums = checked(indices, scanned);
    std::vector<int64_t> cells;
    {
        const py::gil_scoped_release no_gil;
        cells = listed_cells(held->request, datums, static_cast<size_t>(indices.size()), which);
    }
    return array_of(cells);
}

py::array_t<float> py_spread_input(const ScannedRequest& scanned, const IntArray& indices, const std::string& name) {
    const auto held = scanned.use();
    const int64_t* datums = checked(indices, scanned);
    std::vector<float> values;
    {
        const py::gil_scoped_release no_gil;
        values = spread_input(held->request, datums, static_cast<size_t>(indices.size()), held->request.name_index(name));
    }
    return array_of(values);
}

// The bytes of an answer while they come to be. Nobody sees them before finish().
class Answer {
  public:
    Answer(const IntArray& lengths, const IntArray& widths) : outline_(checked_outline(lengths, widths)), missing_(outline_.num_datums()) {
        placed_.resize(outline_.num_datums());
        capacity_ = outline_.size() + room_for_metrics;
        bytes_ = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(capacity_)));
        if (!bytes_) throw py::error_already_set();
        const py::gil_scoped_release no_gil;
        prefer_huge_pages(memory(), capacity_);
        outline_.write(memory());
    }

    void place(const IntArray& indices, const FloatArray& logprobs) {
        int64_t cells = 0;
        for (py::ssize_t i = 0; i < indices.size(); ++i) {
            const int64_t datum = indices.data()[i];
            if (datum < 0 || static_cast<size_t>(datum) >= outline_.num_datums())
                throw py::index_error("datum " + std::to_string(datum) + " of " + std::to_string(outline_.num_datums()));
            cells += outline_.cells(static_cast<size_t>(datum));
            if (cells > logprobs.size()) break;
        }
        check_cells(logprobs, cells);
        const py::gil_scoped_release no_gil;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!bytes_) throw std::runtime_error("the answer is finished");
        const float* from = logprobs.data();
        for (py::ssize_t i = 0; i < indices.size(); ++i) {
            const auto datum = static_cast<size_t>(indices.data()[i]);
            const auto n = static_cast<size_t>(outline_.cells(datum));
            if (n) std::memcpy(memory() + outline_.offset(datum), from, 4 * n);
            from += n;
            missing_ -= placed_[datum] ? 0 : 1;
            placed_[datum] = true;
        }
    }

    py::object finish(const Metrics& metrics) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!bytes_) throw std::runtime_error("the answer is finished");
        if (missing_) throw std::runtime_error("logprobs of " + std::to_string(missing_) + " datums are missing");
        const size_t size = outline_.size() + write_metrics(metrics, nullptr);
        PyObject* bytes = bytes_.release().ptr();
        if (size > capacity_ && _PyBytes_Resize(&bytes, static_cast<Py_ssize_t>(size)) != 0) throw py::error_already_set();
        write_metrics(metrics, reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes)) + outline_.size());
        if (size < capacity_ && _PyBytes_Resize(&bytes, static_cast<Py_ssize_t>(size)) != 0) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(bytes);
    }

  private:
    static constexpr size_t room_for_metrics = 512;  // so that most often the bytes are only cut to their size, where they lie

    static Outline checked_outline(const IntArray& lengths, const IntArray& widths) {
        if (lengths.size() != widths.size()) throw py::value_error("lengths and widths must have one entry per datum");
        int64_t room = int64_t{1} << 40;  // cells
        for (py::ssize_t d = 0; d < lengths.size(); ++d) {
            const int64_t length = lengths.data()[d];
            const int64_t width = std::max<int64_t>(widths.data()[d], 1);
            if (length < 0 || widths.data()[d] < 0) throw py::value_error("lengths and widths must not be negative");
            if (length > room / width) throw py::value_error("lengths and widths ask for more than 2^40 cells");
            room -= length * width;
        }
        return {{lengths.data(), lengths.data() + lengths.size()}, {widths.data(), widths.data() + widths.size()}};
    }
    static void check_cells(const FloatArray& logprobs, int64_t cells) {
        if (cells != logprobs.size())
            throw py::value_error("logprobs has " + std::to_string(logprobs.size()) + " cells: lengths and widths ask for " + std::to_string(cells));
    }
    uint8_t* memory() const { return reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes_.ptr())); }

    std::mutex mutex_;
    Outline outline_;
    size_t missing_;
    std::vector<bool> placed_;
    size_t capacity_ = 0;
    py::object bytes_;  // null once finished
};

py::tuple py_peek(const py::object& body, const std::optional<std::string>& content_encoding, const Limits& limits) {
    const Encoding encoding = parse_encoding(content_encoding);
    const BufferView view(body);
    Identity identity;
    {
        const py::gil_scoped_release no_gil;
        identity = peek(view.bytes(), encoding, limits);
    }
    return py::make_tuple(identity.model_id, identity.seq_id, identity.inflated);
}

void check_limits(const Limits& limits) {
    if (limits.zstd_window_log_max < 10 || limits.zstd_window_log_max > 31) throw py::value_error("zstd_window_log_max must be 10 to 31");
    if (limits.vocab_size < 0 || limits.vocab_size > INT32_MAX) throw py::value_error("vocab_size must be 0 to 2^31 - 1");
    if (limits.max_cells > UINT32_MAX) throw py::value_error("max_cells must be 0 to 2^32 - 1");
    const int64_t sizes[] = {limits.max_body_bytes,    limits.max_inflated_bytes, limits.max_datums,  limits.max_tokens,     limits.max_sequence_length,
                             limits.max_target_width,  limits.max_cells,          limits.max_name_length, limits.max_input_names, limits.max_config_entries,
                             limits.max_spans};
    for (const int64_t size : sizes)
        if (size < 0 || size > int64_t{1} << 40) throw py::value_error("limits must be 0 to 2^40");
    // Sums of K over sequence lengths must stay far inside int64.
    if (limits.max_target_width > int64_t{1} << 20 || limits.max_tokens > int64_t{1} << 40) throw py::value_error("max_target_width must be at most 2^20");
}

template <class Member>
void limit(py::class_<Limits>& cls, const char* name, Member member) {
    cls.def_readonly(name, member);
}

void bind_limits(py::module_& m) {
    py::class_<Limits> cls(m, "Limits");
    const Limits d;
    cls.def(py::init([](int64_t body, int64_t inflated, int64_t datums, int64_t tokens, int64_t length, int64_t width, int64_t cells, int64_t name,
                        int64_t inputs, int64_t config, int64_t spans, int64_t vocab, int64_t window) {
                Limits out{body, inflated, datums, tokens, length, width, cells, name, inputs, config, spans, vocab, window};
                check_limits(out);
                return out;
            }),
            py::kw_only(), "max_body_bytes"_a = d.max_body_bytes, "max_inflated_bytes"_a = d.max_inflated_bytes, "max_datums"_a = d.max_datums,
            "max_tokens"_a = d.max_tokens, "max_sequence_length"_a = d.max_sequence_length, "max_target_width"_a = d.max_target_width,
            "max_cells"_a = d.max_cells, "max_name_length"_a = d.max_name_length, "max_input_names"_a = d.max_input_names,
            "max_config_entries"_a = d.max_config_entries, "max_spans"_a = d.max_spans, "vocab_size"_a = d.vocab_size,
            "zstd_window_log_max"_a = d.zstd_window_log_max);
    limit(cls, "max_body_bytes", &Limits::max_body_bytes);
    limit(cls, "max_inflated_bytes", &Limits::max_inflated_bytes);
    limit(cls, "max_datums", &Limits::max_datums);
    limit(cls, "max_tokens", &Limits::max_tokens);
    limit(cls, "max_sequence_length", &Limits::max_sequence_length);
    limit(cls, "max_target_width", &Limits::max_target_width);
    limit(cls, "max_cells", &Limits::max_cells);
    limit(cls, "max_name_length", &Limits::max_name_length);
    limit(cls, "max_input_names", &Limits::max_input_names);
    limit(cls, "max_config_entries", &Limits::max_config_entries);
    limit(cls, "max_spans", &Limits::max_spans);
    limit(cls, "vocab_size", &Limits::vocab_size);
    limit(cls, "zstd_window_log_max", &Limits::zstd_window_log_max);
}

void bind_request(py::module_& m) {
    py::class_<ScannedRequest>(m, "ScannedRequest")
        .def_readonly("model_id", &ScannedRequest::model_id)
        .def_readonly("seq_id", &ScannedRequest::seq_id)
        .def_readonly("loss_fn", &ScannedRequest::loss_fn)
        .def_readonly("loss_fn_config", &ScannedRequest::config)
        .def_readonly("forward_only", &ScannedRequest::forward_only)
        .def_readonly("num_datums", &ScannedRequest::num_datums)
        .def_readonly("num_tokens", &ScannedRequest::num_tokens)
        .def_readonly("nbytes", &ScannedRequest::nbytes)
        .def_readonly("lengths", &ScannedRequest::lengths)
        .def_readonly("target_widths", &ScannedRequest::target_widths)
        .def_readonly("cells", &ScannedRequest::cells)
        .def_readonly("cell_starts", &ScannedRequest::cell_starts)
        .def_readonly("written_cells", &ScannedRequest::written_cells)
        .def_readonly("has_spans", &ScannedRequest::has_spans)
        .def_property_readonly("fingerprint", &ScannedRequest::fingerprint)
        .def_property_readonly("input_names", &ScannedRequest::input_names)
        .def_property_readonly("released", &ScannedRequest::released)
        .def("input_widths", &ScannedRequest::input_widths, "name"_a)
        .def("input_faults", &ScannedRequest::input_faults, "name"_a)
        .def("spans", &ScannedRequest::spans, "datum"_a)
        .def("release", &ScannedRequest::release);
}

// Errors become spindle.errors, with what the body named.
void translate(std::exception_ptr thrown) {
    if (!thrown) return;
    try {
        std::rethrow_exception(thrown);
    } catch (const InvalidRequest& error) {
        const py::object type = py::module_::import("spindle.errors").attr("InvalidRequest");
        const py::object model_id = error.has_model_id ? py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
                                                             error.model_id.data(), static_cast<Py_ssize_t>(error.model_id.size()), "replace"))
                                                       : py::none();
        PyErr_SetObject(type.ptr(), type(error.what(), model_id, error.seq_id).ptr());
    } catch (const MalformedBody& error) {
        const py::object type = py::module_::import("spindle.errors").attr("MalformedBody");
        PyErr_SetObject(type.ptr(), type(error.what()).ptr());
    }
}

}  // namespace
}  // namespace spindle

PYBIND11_MODULE(_codec, m, py::mod_gil_not_used()) {
    using namespace spindle;
    py::register_exception_translator(&translate);
    bind_limits(m);
    bind_request(m);
    m.attr("built_with") = py::dict("compiler"_a = __VERSION__, "standard"_a = __cplusplus, "libzstd"_a = ZSTD_versionString());
    m.def("scan", &py_scan, "body"_a, "content_encoding"_a, "limits"_a);
    m.def("scan_arrays", &py_scan_arrays, "model_id"_a, "seq_id"_a, "datums"_a, "loss_fn"_a, "loss_fn_config"_a, "forward_only"_a, "limits"_a);
    m.def("fill", &py_fill, "request"_a, "datum_indices"_a, "tokens"_a, "targets"_a, "inputs"_a, "zeroed"_a);
    m.def("clear", &py_clear, "request"_a, "datum_indices"_a, "targets"_a, "inputs"_a);
    m.def("listed_cells", &py_listed_cells, "request"_a, "datum_indices"_a, "names"_a);
    m.def("spread_input", &py_spread_input, "request"_a, "datum_indices"_a, "name"_a);
    py::class_<Answer>(m, "Answer")
        .def(py::init<const IntArray&, const IntArray&>(), "lengths"_a, "widths"_a)
        .def("place", &Answer::place, "datum_indices"_a, "logprobs"_a)
        .def("finish", &Answer::finish, "metrics"_a);
    m.def("peek", &py_peek, "body"_a, "content_encoding"_a, "limits"_a);
    m.def("pool_stats", [] {
        return py::dict("idle"_a = storage_pool().idle(), "idle_bytes"_a = storage_pool().idle_bytes(), "max_idle"_a = Pool<Storage>::max_idle,
                        "max_idle_bytes"_a = Pool<Storage>::max_idle_bytes, "allocated_bytes"_a = allocated_bytes());
    });
}
