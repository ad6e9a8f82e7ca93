#include "team.h"

#include <sched.h>

#include <chrono>

namespace plait {
namespace {

using Clock = std::chrono::steady_clock;
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

}  // namespace

thread_local int Team::member_ = 0;

Team& Team::get() {
    static Team team;
    return team;
}

void Team::resize(int num_threads) {
    std::lock_guard lock(alone_);
    if (num_threads == size_) return;
    is_over_ = true;
    call();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    is_over_ = false;
    size_ = num_threads;
    shares_ = std::make_unique<Share[]>(size_t(num_threads));
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i, seen = calls_.load()] { serve(i, seen); });
}

void Team::start(Body body, const void* it) {
    body_ = body;
    it_ = it;
    if (size_ > 1) call();
    body(it, *this);
    if (size_ > 1) meet();
}

void Team::call() {
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
}

void Team::meet() {
    const int meeting = meetings_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size_ - 1) return await_others(meetings_, meeting);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) shares_[i].next.store(0, std::memory_order_relaxed);
    meetings_.fetch_add(1, std::memory_order_release);
}

void Team::serve(int member, int seen) {
    member_ = member;
    for (;; ++seen) {
        await_call(calls_, seen);
        if (is_over_) return;
        body_(it_, *this);
        meet();
    }
}

}  // namespace plait
