// The rule of kernels/csrc/crowd.h with a C interface, for tests/kernels/test_crowd.py. Times in nanoseconds.
#include "crowd.h"

#include <cstdint>

using plait::Crowd;
using Nanoseconds = std::chrono::nanoseconds;

extern "C" {

Crowd* crowd_create(int most) { return new Crowd(most); }

void crowd_free(Crowd* crowd) { delete crowd; }

int crowd_size(Crowd* crowd, int64_t now) { return crowd->size(Crowd::Clock::time_point(Nanoseconds(now))); }

// late and lost [size] of the call's members.
void crowd_tell(Crowd* crowd, int64_t now, int64_t whole, const int64_t* late, const int64_t* lost, int size) {
    plait::Losses losses;
    for (int i = 0; i < size; ++i) losses.add(Nanoseconds(late[i]), Nanoseconds(lost[i]));
    crowd->tell(Crowd::Clock::time_point(Nanoseconds(now)), Nanoseconds(whole), losses.all());
}

}  // extern "C"
