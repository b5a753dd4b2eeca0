#include "cells.hpp"

#include <algorithm>
#include <stdexcept>

#include "fill.hpp"

namespace spindle {

namespace {
template <class Visit>  // visit(listed value, cell of the datum)
void each_listed(const Request& request, const Tensor& tensor, Visit visit) {
    const uint32_t* cells = request.storage->cells.data() + tensor.first_cell;
    for (int64_t i = 0; i < static_cast<int64_t>(tensor.col.size / 8); ++i) visit(i, int64_t{cells[i]});
}

float value_at(const Tensor& tensor, int64_t i) { return static_cast<float>(number_at(tensor.values, tensor.dtype, i)); }
}  // namespace

std::vector<int64_t> listed_cells(const Request& request, const int64_t* datums, size_t num_datums, const std::vector<int64_t>& names) {
    std::vector<int64_t> out;
    int64_t first = 0;  // of the datum's cells
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        const auto begin = static_cast<std::ptrdiff_t>(out.size());
        bool all = false;
        for (const int64_t name : names) {
            const Tensor* tensor = request.find(datum, name);
            all = all || !tensor || tensor->layout != Layout::csr || tensor->width != datum.target_width;
        }
        if (all)
            for (int64_t cell = 0; cell < cells_of(datum); ++cell) out.push_back(first + cell);
        else
            for (const int64_t name : names)
                each_listed(request, *request.find(datum, name), [&](int64_t, int64_t cell) { out.push_back(first + cell); });
        std::sort(out.begin() + begin, out.end());
        out.erase(std::unique(out.begin() + begin, out.end()), out.end());
        first += cells_of(datum);
    }
    return out;
}

std::vector<float> spread_input(const Request& request, const int64_t* datums, size_t num_datums, int64_t name) {
    std::vector<float> out;
    for (size_t d = 0; d < num_datums; ++d) {
        const Datum& datum = request.datums()[static_cast<size_t>(datums[d])];
        const Tensor* tensor = request.find(datum, name);
        if (!tensor) throw std::invalid_argument("datum " + std::to_string(datums[d]) + " lacks the input");
        const int64_t width = datum.target_width;
        if (tensor->width == scalar_width) {
            out.insert(out.end(), static_cast<size_t>(cells_of(datum)), value_at(*tensor, 0));
        } else if (tensor->width == 0) {
            for (int64_t row = 0; row < datum.length; ++row)
                out.insert(out.end(), static_cast<size_t>(std::max<int64_t>(width, 1)), value_at(*tensor, row));
        } else {
            if (width > 0 && width != tensor->width)
                throw std::invalid_argument("datum " + std::to_string(datums[d]) + " has an input of other columns than target_tokens");
            const size_t begin = out.size();
            out.resize(begin + static_cast<size_t>(datum.length * tensor->width));
            if (tensor->layout == Layout::csr)
                each_listed(request, *tensor, [&](int64_t i, int64_t cell) { out[begin + static_cast<size_t>(cell)] = value_at(*tensor, i); });
            else
                for (int64_t i = 0; i < datum.length * tensor->width; ++i) out[begin + static_cast<size_t>(i)] = value_at(*tensor, i);
        }
    }
    return out;
}

}  // namespace spindle
