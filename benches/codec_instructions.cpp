// Scans and fills one plain body ROUNDS times, for an instruction counter: probe BODY ROUNDS
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "fill.hpp"

int main(int, char** argv) {
    using namespace spindle;
    std::ifstream file(argv[1], std::ios::binary);
    const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
    const Bytes body{reinterpret_cast<const uint8_t*>(raw.data()), raw.size()};
    Limits limits;
    limits.vocab_size = 151936;
    for (int round = std::atoi(argv[2]); round; --round) {
        const Request request = scan(body, Encoding::identity, limits);
        std::vector<int64_t> datums;
        size_t cells = 0;
        for (const Datum& datum : request.datums()) {
            datums.push_back(static_cast<int64_t>(datums.size()));
            cells += static_cast<size_t>(cells_of(datum));
        }
        const auto tokens = static_cast<size_t>(request.num_tokens);
        std::vector<int32_t> ids(tokens);
        std::vector<int64_t> labels(cells);
        std::vector<float> weights(cells);
        InputTarget input;
        input.name = request.name_index("weights");
        input.to = weights.data();
        FillTarget to;
        to.tokens = ids.data();
        to.labels = labels.data();
        to.inputs = &input;
        to.num_inputs = 1;
        fill(request, datums.data(), datums.size(), to);
    }
    return 0;
}
