// Oversubscription control: how many workers a call uses while other processes want their cores.
//
// A worker that loses its core in the middle of an item of work holds up all others at the next barrier. M workers
// that together lose a fraction f of a call's time work as fast as M (1 - f). Where that is less than M - 1, one worker
// fewer is faster.
#pragma once

#include <algorithm>
#include <chrono>

namespace plait {

using Time = std::chrono::steady_clock::duration;

// Time of one call that its workers lost to other processes.
class LostTime {
public:
    // Adds a worker that began `late` after the call and was off its core for `lost` in the middle of it. Workers wake
    // in parallel, so that only the latest start counts, less what a plain wake-up takes.
    void add(Time late, Time lost) {
        late_ = std::max(late_, late - kWakeUp);
        lost_ += lost;
    }

    Time all() const { return late_ + lost_; }

private:
    // More than the last worker of a large pool takes to wake on idle cores.
    static constexpr Time kWakeUp = std::chrono::milliseconds(1);

    Time late_{}, lost_{};
};

class AdaptiveThreads {
public:
    using Clock = std::chrono::steady_clock;

    explicit AdaptiveThreads(int max = 1) : max_(max), size_(max) {}

    // Workers of the call that begins now: one more than before once the pause is over.
    int size(Clock::time_point now) {
        if (!is_probing_ && now >= retry_) {
            size_ = std::min(size_ + 1, max_);
            is_probing_ = true;
            whole_ = lost_ = Time{};
        }
        return size_;
    }

    // Reports a call that ended now and took `whole`; its workers lost `lost` together.
    void report(Clock::time_point now, Time whole, Time lost) {
        whole_ += whole;
        lost_ += lost;
        if (whole_ < kWindow) return;
        const bool is_oversubscribed = size_ > 1 && lost_ * size_ > whole_;
        whole_ = lost_ = Time{};
        if (is_oversubscribed)
            shrink(now);
        else if (is_probing_)
            settle(now);
    }

private:
    static constexpr Time kWindow = std::chrono::milliseconds(20);
    static constexpr Time kLeastPause = std::chrono::milliseconds(100), kMostPause = std::chrono::milliseconds(800);

    void shrink(Clock::time_point now) {
        --size_;
        retry_ = now + pause_;
        if (is_probing_) pause_ = std::min(2 * pause_, kMostPause);
        is_probing_ = false;
    }

    void settle(Clock::time_point now) {
        is_probing_ = size_ == max_;
        retry_ = now;
        pause_ = kLeastPause;
    }

    int max_, size_;
    bool is_probing_ = true;  // whether this size is on trial after growing
    Time whole_{}, lost_{}, pause_ = kLeastPause;
    Clock::time_point retry_{};
};

}  // namespace plait
