// Scratch buffers that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plait {

// This thread's buffer number `Slot`, of at least `count` items, uninitialised.
template <class Item, int Slot>
inline Item* scratch(int64_t count) {
    struct alignas(64) Line {
        char bytes[64];
    };
    thread_local std::vector<Line> lines;
    const size_t needed = (size_t(count) * sizeof(Item) + 63) / 64;
    if (lines.size() < needed) lines.resize(needed);
    return reinterpret_cast<Item*>(lines.data());
}

// Grows an array to at least `count` items; new ones are zero.
template <class Item>
inline void fit(std::vector<Item>& items, int64_t count) {
    if (items.size() < size_t(count)) items.resize(size_t(count));
}

}  // namespace plait
