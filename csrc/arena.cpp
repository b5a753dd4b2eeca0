#include "arena.hpp"

#include <sys/mman.h>

#include <atomic>
#include <new>
#include <utility>

namespace spindle {

namespace {
constexpr size_t huge_page = size_t{2} << 20;
std::atomic<uint64_t> allocated{0};

// Sizes come in steps of an eighth of their power of two, so that bodies of about one size share arenas.
size_t round_up(size_t size) {
    size_t step = huge_page;
    while (step * 16 <= size) step *= 2;
    return (size + step - 1) / step * step;
}
}  // namespace

void prefer_huge_pages(void* data, size_t size) {
#ifdef MADV_HUGEPAGE
    const auto start = (reinterpret_cast<uintptr_t>(data) + huge_page - 1) / huge_page * huge_page;
    const auto end = (reinterpret_cast<uintptr_t>(data) + size) / huge_page * huge_page;
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
    static_cast<void>(data);
    static_cast<void>(size);
#endif
}

void count_allocation(size_t bytes) { allocated.fetch_add(bytes, std::memory_order_relaxed); }
uint64_t allocated_bytes() { return allocated.load(std::memory_order_relaxed); }

Arena::Arena(size_t capacity) {
    if (capacity == 0) return;
    capacity_ = round_up(capacity);
    mapped_ = capacity_ + huge_page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping_ == MAP_FAILED) {
        mapping_ = nullptr;
        throw std::bad_alloc();
    }
    count_allocation(capacity_);
    const auto start = (reinterpret_cast<uintptr_t>(mapping_) + huge_page - 1) / huge_page * huge_page;
    data_ = reinterpret_cast<uint8_t*>(start);
    prefer_huge_pages(data_, capacity_);
}

Arena::~Arena() {
    if (mapping_) munmap(mapping_, mapped_);
}

void Arena::swap(Arena& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    std::swap(touched_, other.touched_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
}

}  // namespace spindle
