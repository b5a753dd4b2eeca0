// Scans and fills one body, zstd or plain, ROUNDS times, for an instruction counter: probe BODY ROUNDS
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
        const Request request = scan(body, load<uint32_t>(body.data) == 0xfd2fb528 ? Encoding::zstd : Encoding::identity, limits);
        std::vector<int64_t> datums;
        size_t cells = 0;
        for (const Datum& datum : request.datums()) {
            datums.push_back(static_cast<int64_t>(datums.size()));
            cells += static_cast<size_t>(cells_of(datum));
        }
        const auto tokens = static_cast<size_t>(request.num_tokens);
        std::vector<int32_t> ids(tokens);
        std::vector<int64_t> labels(cells);
        std::vector<std::vector<float>> values(request.names().size(), std::vector<float>(cells));
        std::vector<InputTarget> inputs;
        for (size_t name = 0; name < values.size(); ++name)
            if (request.names()[name].text() != "target_tokens") inputs.push_back({static_cast<int64_t>(name), values[name].data(), 1.0f});
        FillTarget to;
        to.tokens = ids.data();
        to.labels = labels.data();
        to.inputs = inputs.data();
        to.num_inputs = inputs.size();
        fill(request, datums.data(), datums.size(), to);
    }
    return 0;
}
