// Memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plait {

// An array of at least `count` items, uninitialised; each slot is one.
template <class Item, int Slot>
inline Item* room(int64_t count) {
    struct alignas(64) Line {
        char bytes[64];
    };
    thread_local std::vector<Line> lines;
    const size_t needed = (size_t(count) * sizeof(Item) + 63) / 64;
    if (lines.size() < needed) lines.resize(needed);
    return reinterpret_cast<Item*>(lines.data());
}

}  // namespace plait
