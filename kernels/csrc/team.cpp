#include "team.h"

#include <sched.h>
#include <time.h>

#include <chrono>

namespace plait {
namespace {

using Clock = Crowd::Clock;
using std::chrono::microseconds;

// How long a member looks out for the next call before it sleeps: longer than what lies between two steps' calls.
constexpr microseconds kAwake(300);
// Looks at a meeting before the core is offered, at each further look, to whoever else wants it. Nobody sleeps inside
// a call: a sleeper would come back behind every other process, once for each of the many meetings.
constexpr int kLooks = 1024;
constexpr int kLooksPerClock = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns when another call than `seen` was made.
void await_call(const std::atomic<uint32_t>& calls, uint32_t seen) {
    const auto end = Clock::now() + kAwake;
    for (int i = 1; calls.load(std::memory_order_acquire) == seen; ++i) {
        relax();
        if (i % kLooksPerClock == 0 && Clock::now() > end) return calls.wait(seen, std::memory_order_acquire);
    }
}

// Processor time of this thread.
Time worked() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Time in which this thread had no core.
class Off {
public:
    Time so_far() const { return std::max(Time{}, Clock::now() - began_ - (worked() - worked_)); }

private:
    const Clock::time_point began_ = Clock::now();
    const Time worked_ = worked();
};

}  // namespace

thread_local int Team::member_ = 0;

Team& Team::get() {
    static Team team;
    return team;
}

void Team::resize(int num_threads) {
    std::lock_guard lock(alone_);
    if (num_threads == int(threads_.size()) + 1) return;
    is_over_ = true;
    size_ = int(threads_.size()) + 1;
    call();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    is_over_ = false;
    size_ = 1;
    seats_ = std::make_unique<Seat[]>(size_t(num_threads));
    crowd_ = Crowd(1);
    for (int i = 1; i < num_threads; ++i) {
        threads_.emplace_back([this, i] { serve(i); });
        crowd_ = Crowd(i + 1);
    }
}

void Team::start(Body body, const void* it) {
    body_ = body;
    it_ = it;
    began_ = Clock::now();
    size_ = crowd_.size(began_);
    call();
    take_part();
    const auto ended = Clock::now();
    Losses losses;
    for (int i = 0; i < size_; ++i) losses.add(seats_[i].late, seats_[i].lost);
    if (size_ > 1) losses.add(Time{}, ended.time_since_epoch() - met_at_.load(std::memory_order_relaxed));
    crowd_.tell(ended, ended - began_, losses.all());
}

void Team::call() {
    for (int i = 1; i < size_; ++i) {
        seats_[i].calls.fetch_add(1, std::memory_order_release);
        seats_[i].calls.notify_one();
    }
}

// A member's part of a call.
void Team::take_part() {
    Seat& seat = seats_[member_];
    seat.late = Clock::now() - began_;
    seat.idle = Time{};
    const Off off;
    body_(it_, *this);
    seat.lost = std::max(Time{}, off.so_far() - seat.idle);
    if (size_ > 1) meet();
}

void Team::meet() {
    const uint32_t meeting = meetings_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size_ - 1) return await_others(meeting);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) seats_[i].next.store(0, std::memory_order_relaxed);
    met_at_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed);
    meetings_.fetch_add(1, std::memory_order_release);
}

// Returns when the meeting is over.
void Team::await_others(uint32_t meeting) {
    for (int i = 0; i < kLooks; ++i) {
        if (meetings_.load(std::memory_order_acquire) != meeting) return;
        relax();
    }
    offer_core(meeting);
}

// The same, letting others have the core: time that a member does not need until the meeting is over.
void Team::offer_core(uint32_t meeting) {
    const Off off;
    while (meetings_.load(std::memory_order_acquire) == meeting) sched_yield();
    const Time late = Clock::now().time_since_epoch() - met_at_.load(std::memory_order_relaxed);
    seats_[member_].idle += std::max(Time{}, off.so_far() - late);
}

void Team::serve(int member) {
    member_ = member;
    for (uint32_t seen = 0;; ++seen) {
        await_call(seats_[member].calls, seen);
        if (is_over_) return;
        take_part();
    }
}

}  // namespace plait
