// Runs the fuzz target where libFuzzer is not at hand: every file given, then `runs` mutations of them from a fixed seed.
//   driver RUNS SEED FILE...
// An input that fails is left in crash.bin.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {
using Input = std::vector<uint8_t>;

uint64_t pick(std::mt19937_64& random, uint64_t n) { return n ? random() % n : 0; }

void mutate(Input& input, const std::vector<Input>& corpus, std::mt19937_64& random) {
    static const uint8_t telling[] = {0, 1, 2, 3, 7, 8, 0x0a, 0x12, 0x1a, 0x22, 0x7f, 0x80, 0xfe, 0xff};
    const size_t at = pick(random, input.size());
    const size_t n = std::min<size_t>(pick(random, 16) + 1, input.size() - std::min(at, input.size()));
    switch (pick(random, 8)) {
        case 0: if (!input.empty()) input[at] ^= static_cast<uint8_t>(1u << pick(random, 8)); break;
        case 1: if (!input.empty()) input[at] = telling[pick(random, sizeof telling)]; break;
        case 2: if (!input.empty()) input[at] = static_cast<uint8_t>(input[at] + (pick(random, 2) ? 1 : 255)); break;
        case 3: input.erase(input.begin() + static_cast<std::ptrdiff_t>(at), input.begin() + static_cast<std::ptrdiff_t>(at + n)); break;
        case 4: input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), n, telling[pick(random, sizeof telling)]); break;
        case 5: {  // a piece of itself again
            const Input piece(input.begin() + static_cast<std::ptrdiff_t>(at), input.begin() + static_cast<std::ptrdiff_t>(at + n));
            const size_t to = pick(random, input.size() + 1);
            input.insert(input.begin() + static_cast<std::ptrdiff_t>(to), piece.begin(), piece.end());
            break;
        }
        case 6: input.resize(pick(random, input.size() + 1)); break;
        default: {  // the head of one with the tail of another
            const Input& other = corpus[pick(random, corpus.size())];
            const size_t from = pick(random, other.size());
            input.resize(at);
            input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        }
    }
    if (input.size() > 1 << 16) input.resize(1 << 16);
}
}  // namespace

int main(int argc, char** argv) {
    const uint64_t runs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    std::vector<Input> corpus;
    for (int i = 3; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
    }
    if (corpus.empty()) corpus.push_back({0});
    for (uint64_t run = 0; run < runs; ++run) {
        Input input = corpus[pick(random, corpus.size())];
        for (uint64_t i = pick(random, 6) + 1; i; --i) mutate(input, corpus, random);
        {
            std::ofstream last("crash.bin", std::ios::binary | std::ios::trunc);
            last.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
        }
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::remove("crash.bin");
    std::printf("%llu inputs\n", static_cast<unsigned long long>(corpus.size() + runs));
    return 0;
}
