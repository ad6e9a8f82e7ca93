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
void await_call(const std::atomic<int>& calls, int seen) {
    const auto end = Clock::now() + kAwake;
    for (int i = 1; calls.load(std::memory_order_acquire) == seen; ++i) {
        relax();
        if (i % kLooksPerClock == 0 && Clock::now() > end) return calls.wait(seen, std::memory_order_acquire);
    }
}

// Returns when the meeting is over.
void await_others(const std::atomic<int>& meetings, int meeting) {
    for (int i = 0; meetings.load(std::memory_order_acquire) == meeting; ++i) {
        relax();
        if (i >= kLooks) sched_yield();
    }
}

// Processor time of this thread.
Crowd::Time worked() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

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
    crowd_ = Crowd(num_threads);
    seats_ = std::make_unique<Seat[]>(size_t(num_threads));
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
}

void Team::start(Body body, const void* it) {
    body_ = body;
    it_ = it;
    began_ = Clock::now();
    size_ = crowd_.size(began_);
    call();
    take_part();
    const auto ended = Clock::now();
    Crowd::Time lost{};
    for (int i = 0; i < size_; ++i) lost += seats_[i].lost;
    crowd_.tell(ended, ended - began_, lost);
}

void Team::call() {
    for (int i = 1; i < size_; ++i) {
        seats_[i].calls.fetch_add(1, std::memory_order_release);
        seats_[i].calls.notify_one();
    }
}

// A member's part of a call, which has lost the time from its beginning on that it does not work.
void Team::take_part() {
    const auto worked_before = worked();
    body_(it_, *this);
    seats_[member_].lost = std::max(Crowd::Time{}, Clock::now() - began_ - (worked() - worked_before));
    if (size_ > 1) meet();
}

void Team::meet() {
    const int meeting = meetings_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size_ - 1) return await_others(meetings_, meeting);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) seats_[i].next.store(0, std::memory_order_relaxed);
    meetings_.fetch_add(1, std::memory_order_release);
}

void Team::serve(int member) {
    member_ = member;
    for (int seen = 0;; ++seen) {
        await_call(seats_[member].calls, seen);
        if (is_over_) return;
        take_part();
    }
}

}  // namespace plait
