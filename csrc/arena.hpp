// Memory that requests borrow: a large mapping for inflated bytes, and vectors that keep their capacity.
//
// An Arena reserves address space only; pages become memory when they are written. The pool hands out workspaces and keeps a
// bounded number of idle ones, so that a steady stream of requests allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

struct ZSTD_DCtx_s;

namespace spindle {

// What the codec has taken from the system since it was loaded; moves only when something is really allocated.
void count_allocation(size_t bytes);
uint64_t allocated_bytes();

// Asks for huge pages where whole ones fit: memory touched for the first time then costs a fault per 2 MB, not per 4 KB.
void prefer_huge_pages(void* data, size_t size);

template <class T>
struct CountingAllocator {
    using value_type = T;
    CountingAllocator() = default;
    template <class U>
    CountingAllocator(const CountingAllocator<U>&) {}
    T* allocate(size_t n) {
        count_allocation(n * sizeof(T));
        return std::allocator<T>().allocate(n);
    }
    void deallocate(T* at, size_t n) { std::allocator<T>().deallocate(at, n); }
    bool operator==(const CountingAllocator&) const { return true; }
    bool operator!=(const CountingAllocator&) const { return false; }
};

template <class T>
using Vec = std::vector<T, CountingAllocator<T>>;

// One mapping, aligned to huge pages and asking for them. Contents are kept from use to use; nobody may read what it did not write.
class Arena {
  public:
    Arena() = default;
    explicit Arena(size_t capacity);
    Arena(Arena&& other) noexcept { swap(other); }
    Arena& operator=(Arena&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Arena();

    uint8_t* data() const { return data_; }
    size_t capacity() const { return capacity_; }
    size_t touched() const { return touched_; }  // bytes that are memory, not only address space
    void touch(size_t end) {
        if (end > touched_) touched_ = end;
    }

  private:
    void swap(Arena& other) noexcept;
    uint8_t* data_ = nullptr;
    size_t capacity_ = 0;
    size_t touched_ = 0;
    void* mapping_ = nullptr;
    size_t mapped_ = 0;
};

// Takes Storage objects (a request's arena, zstd context and vectors) out and back. Storage must have `Arena arena`,
// `void clear()` (forget the contents, keep the capacity) and `size_t held()` (bytes of memory kept).
template <class Storage>
class Pool {
  public:
    static constexpr size_t max_idle = 16;
    static constexpr size_t max_idle_bytes = size_t{256} << 20;

    // An idle one whose arena holds `capacity` bytes, the smallest that does; else a new one.
    std::unique_ptr<Storage> take(size_t capacity) {
        std::unique_ptr<Storage> out;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            size_t best = idle_.size();
            for (size_t i = 0; i < idle_.size(); ++i) {
                const size_t have = idle_[i]->arena.capacity();
                if (have >= capacity && (best == idle_.size() || have < idle_[best]->arena.capacity())) best = i;
            }
            if (best == idle_.size() && !idle_.empty()) best = idle_.size() - 1;
            if (best < idle_.size()) {
                out = std::move(idle_[best]);
                idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(best));
                idle_bytes_ -= out->held();
            }
        }
        if (!out) {
            count_allocation(sizeof(Storage));
            out = std::make_unique<Storage>();
        }
        if (out->arena.capacity() < capacity) out->arena = Arena(capacity);
        return out;
    }
    // Kept when it fits the bounds, freed otherwise.
    void give_back(std::unique_ptr<Storage> storage) {
        storage->clear();
        const size_t held = storage->held();
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.size() >= max_idle || idle_bytes_ + held > max_idle_bytes) return;
        idle_bytes_ += held;
        idle_.push_back(std::move(storage));
    }
    size_t idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return idle_.size();
    }
    size_t idle_bytes() {
        std::lock_guard<std::mutex> lock(mutex_);
        return idle_bytes_;
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Storage>> idle_;
    size_t idle_bytes_ = 0;
};

}  // namespace spindle
