#include "tensor.hpp"

#include "csr.hpp"
#include "protobuf.hpp"

namespace spindle {

namespace {
void parse_csr(Bytes message, Tensor& onto) {
    Reader reader(message);
    while (reader.next()) {
        if (reader.is(1, Wire::bytes)) onto.values = reader.bytes();
        else if (reader.is(2, Wire::bytes)) onto.crow = reader.bytes();
        else if (reader.is(3, Wire::bytes)) onto.col = reader.bytes();
        else reader.skip();
    }
}

std::string shape_text(const Tensor& tensor) {
    std::string out = "[";
    for (int i = 0; i < tensor.rank && i < 2; ++i) out += (i ? ", " : "") + std::to_string(tensor.shape[i]);
    return out + (tensor.rank > 2 ? ", ...]" : "]");
}

std::string settle_shape(Tensor& tensor, int64_t length, int64_t max_width) {
    if (tensor.rank == 0) {
        if (tensor.layout == Layout::csr) return "is CSR without a shape: give [N, K]";
        const auto values = static_cast<int64_t>(tensor.values.size / item_size(tensor.dtype));
        if (values == 1 && length != 1) {
            tensor.width = scalar_width;
            return {};
        }
        push_size(tensor, values);
    }
    if (tensor.rank > 2) return text("has shape ", shape_text(tensor), ": [N] or [N, K] are allowed");
    if (tensor.layout == Layout::csr && tensor.rank != 2) return text("is CSR of shape ", shape_text(tensor), ": CSR needs [N, K]");
    if (tensor.shape[0] != length)
        return text("has shape ", shape_text(tensor), ": its first size must be the datum's ", length, " tokens");
    if (tensor.rank == 2 && (tensor.shape[1] < 1 || tensor.shape[1] > max_width))
        return text("has shape ", shape_text(tensor), ": K must be 1 to ", max_width);
    tensor.width = tensor.rank == 2 ? tensor.shape[1] : 0;
    return {};
}
}  // namespace

void push_size(Tensor& tensor, int64_t size) {
    if (tensor.rank < 2) tensor.shape[tensor.rank] = size;
    if (tensor.rank < UINT8_MAX) ++tensor.rank;
}

void parse_tensor(Bytes message, Tensor& onto) {
    Reader reader(message);
    while (reader.next()) {
        if (reader.is(1, Wire::bytes)) {
            onto.values = reader.bytes();
            onto.crow = onto.col = {};
            onto.layout = Layout::dense;
        } else if (reader.is(2, Wire::bytes)) {
            if (onto.layout != Layout::csr) onto.values = {};
            onto.layout = Layout::csr;
            parse_csr(reader.bytes(), onto);
        } else if (reader.is(3, Wire::varint)) {
            onto.wire_dtype = reader.varint();
            const auto known = static_cast<int32_t>(onto.wire_dtype);
            onto.dtype = known >= 1 && known <= 4 ? static_cast<Dtype>(known) : Dtype::unset;
        } else if (reader.is(4, Wire::varint)) {
            push_size(onto, static_cast<int64_t>(reader.varint()));
        } else if (reader.is(4, Wire::bytes)) {
            Reader packed(reader.bytes());
            while (!packed.at_end()) push_size(onto, static_cast<int64_t>(packed.varint()));
        } else {
            reader.skip();
        }
    }
}

std::string settle(Tensor& tensor, int64_t length, int64_t max_width) {
    if (tensor.layout == Layout::unset) return "holds neither dense nor sparse_csr data";
    if (tensor.dtype == Dtype::unset)
        return text("has dtype number ", static_cast<int32_t>(tensor.wire_dtype), ": 1 float32, 2 int64, 3 int32 and 4 bfloat16 are allowed");
    const size_t item = item_size(tensor.dtype);
    if (tensor.values.size % item != 0)
        return text("has ", tensor.values.size, " bytes of data, which is no whole number of ", name_of(tensor.dtype));
    if (std::string wrong = settle_shape(tensor, length, max_width); !wrong.empty()) return wrong;
    tensor.nonzero = tensor.layout == Layout::csr ? tensor.values : without_outer_zeros(tensor.values);
    if (tensor.layout == Layout::csr) return check_csr(tensor, length);
    if (tensor.width == scalar_width) return {};
    const uint64_t cells = static_cast<uint64_t>(length) * static_cast<uint64_t>(tensor.width ? tensor.width : 1);  // both are bounded: no overflow
    if (tensor.values.size / item != cells)
        return text("has ", tensor.values.size / item, " values, but its shape ", shape_text(tensor), " asks for ", cells);
    return {};
}

}  // namespace spindle
