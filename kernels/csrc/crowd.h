// How many members a team should have while other processes want its cores.
//
// A member that lost its core in the middle of a piece of work holds up all at the next meeting. Of M members who
// together lose a share f of a call's time, the work goes on as M (1 - f) would; one fewer leave that core alone.
#pragma once

#include <algorithm>
#include <chrono>

namespace plait {

class Crowd {
public:
    using Clock = std::chrono::steady_clock;
    using Time = Clock::duration;

    explicit Crowd(int most = 1) : most_(most), size_(most) {}

    // Members of the call that begins now: one more than before where as many were not crowded, or not for a while.
    int size(Clock::time_point now) {
        if (!is_judged_ && now >= retry_) {
            size_ = std::min(size_ + 1, most_);
            is_judged_ = true;
        }
        return size_;
    }

    // A call ended now that took `whole`, of which its members lost `lost` in all to other processes.
    void tell(Clock::time_point now, Time whole, Time lost) {
        if (!is_judged_) return;
        whole_ += whole;
        lost_ += lost;
        if (whole_ < kLook) return;
        const bool is_crowded = size_ > 1 && lost_ * size_ > whole_;
        whole_ = lost_ = Time{};
        is_judged_ = size_ == most_ && !is_crowded;
        retry_ = is_crowded ? now + pause_ : now;
        pause_ = is_crowded ? std::min(2 * pause_, kMostPause) : kLeastPause;
        size_ -= is_crowded;
    }

private:
    static constexpr Time kLook = std::chrono::milliseconds(20);
    static constexpr Time kLeastPause = std::chrono::milliseconds(100), kMostPause = std::chrono::milliseconds(800);

    int most_, size_;
    bool is_judged_ = true;  // whether this size may turn out to be too many
    Time whole_{}, lost_{}, pause_ = kLeastPause;
    Clock::time_point retry_{};
};

}  // namespace plait
