// How many members a team should have while other processes want its cores.
//
// A member that lost its core in the middle of a piece of work holds up all at the next meeting. Of M members who
// together lose a share f of a call's time, the work goes on as M (1 - f) would; one fewer leave that core alone.
#pragma once

#include <algorithm>
#include <chrono>

namespace plait {

using Time = std::chrono::steady_clock::duration;

// What the members of one call lost to other processes.
class Losses {
public:
    // A member began its part so long after the call, and was off its core for `lost` in the midst of it. Members
    // sleep and wake side by side, so of their beginnings the latest alone counts, where it is no mere awakening.
    void add(Time late, Time lost) {
        late_ = std::max(late_, late - kAwakening);
        lost_ += lost;
    }

    Time all() const { return late_ + lost_; }

private:
    // What the last member of a large team takes to begin where nobody else wants its core, and more.
    static constexpr Time kAwakening = std::chrono::milliseconds(1);

    Time late_{}, lost_{};
};

class Crowd {
public:
    using Clock = std::chrono::steady_clock;

    explicit Crowd(int most = 1) : most_(most), size_(most) {}

    // Members of the call that begins now: one more than before where as many were not crowded, or not for a while.
    int size(Clock::time_point now) {
        if (!is_tried_ && now >= retry_) {
            size_ = std::min(size_ + 1, most_);
            is_tried_ = true;
            whole_ = lost_ = Time{};
        }
        return size_;
    }

    // A call ended now that took `whole`, of which its members lost `lost` in all to other processes.
    void tell(Clock::time_point now, Time whole, Time lost) {
        whole_ += whole;
        lost_ += lost;
        if (whole_ < kLook) return;
        const bool is_crowded = size_ > 1 && lost_ * size_ > whole_;
        whole_ = lost_ = Time{};
        if (is_crowded)
            shrink(now);
        else if (is_tried_)
            settle(now);
    }

private:
    static constexpr Time kLook = std::chrono::milliseconds(20);
    static constexpr Time kLeastPause = std::chrono::milliseconds(100), kMostPause = std::chrono::milliseconds(800);

    void shrink(Clock::time_point now) {
        --size_;
        retry_ = now + pause_;
        if (is_tried_) pause_ = std::min(2 * pause_, kMostPause);
        is_tried_ = false;
    }

    void settle(Clock::time_point now) {
        is_tried_ = size_ == most_;
        retry_ = now;
        pause_ = kLeastPause;
    }

    int most_, size_;
    bool is_tried_ = true;  // whether this size was grown to and may turn out to be too many
    Time whole_{}, lost_{}, pause_ = kLeastPause;
    Clock::time_point retry_{};
};

}  // namespace plait
