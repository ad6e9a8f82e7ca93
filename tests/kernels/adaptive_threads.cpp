// A C interface of kernels/csrc/adaptive_threads.h for test_adaptive_threads.py. Times in nanoseconds.
#include "adaptive_threads.h"

#include <cstdint>

using plait::AdaptiveThreads;
using Nanoseconds = std::chrono::nanoseconds;

extern "C" {

AdaptiveThreads* threads_create(int most) { return new AdaptiveThreads(most); }

void threads_free(AdaptiveThreads* threads) { delete threads; }

int threads_size(AdaptiveThreads* threads, int64_t now) {
    return threads->size(AdaptiveThreads::Clock::time_point(Nanoseconds(now)));
}

// late and lost [size] of the call's workers.
void threads_report(AdaptiveThreads* threads, int64_t now, int64_t whole, const int64_t* late, const int64_t* lost,
                    int size) {
    plait::LostTime lost_time;
    for (int i = 0; i < size; ++i) lost_time.add(Nanoseconds(late[i]), Nanoseconds(lost[i]));
    threads->report(AdaptiveThreads::Clock::time_point(Nanoseconds(now)), Nanoseconds(whole), lost_time.all());
}

}  // extern "C"
