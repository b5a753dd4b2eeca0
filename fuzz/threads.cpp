// Eight threads put the same inputs through the fuzz target at once, sharing the pool: for ThreadSanitizer.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
    std::vector<std::vector<uint8_t>> corpus;
    for (int i = 1; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::vector<std::thread> threads;
    for (size_t turn = 0; turn < 8; ++turn)
        threads.emplace_back([&corpus, turn] {
            for (size_t i = 0; i < 100 * corpus.size(); ++i) {
                const auto& input = corpus[(i + turn) % corpus.size()];
                LLVMFuzzerTestOneInput(input.data(), input.size());
            }
        });
    for (std::thread& thread : threads) thread.join();
    std::printf("8 threads, %zu inputs each\n", 100 * corpus.size());
    return 0;
}
