#include "thread_pool.h"

#include <sched.h>
#include <time.h>

#include <chrono>

namespace plait {
namespace {

using Clock = AdaptiveThreads::Clock;
using std::chrono::microseconds;

// How long a worker spins for the next call before it sleeps: longer than the gap between two steps' calls.
constexpr microseconds kSpinTime(300);
// Spins at a barrier before the worker yields its core at each further look. Workers never sleep inside a call: a
// sleeper would queue behind other processes at each of the many barriers.
constexpr int kBarrierSpins = 1024;
constexpr int kSpinsPerClock = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns when the number of calls differs from `seen`.
void wait_for_call(const std::atomic<uint32_t>& calls, uint32_t seen) {
    const auto end = Clock::now() + kSpinTime;
    for (int i = 1; calls.load(std::memory_order_acquire) == seen; ++i) {
        relax();
        if (i % kSpinsPerClock == 0 && Clock::now() > end) return calls.wait(seen, std::memory_order_acquire);
    }
}

// Processor time of this thread.
Time thread_cpu_time() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Time in which this thread had no core.
class OffCore {
public:
    Time so_far() const { return std::max(Time{}, Clock::now() - began_ - (thread_cpu_time() - cpu_time_)); }

private:
    const Clock::time_point began_ = Clock::now();
    const Time cpu_time_ = thread_cpu_time();
};

}  // namespace

thread_local int ThreadPool::worker_ = 0;

ThreadPool& ThreadPool::get() {
    static ThreadPool pool;
    return pool;
}

void ThreadPool::resize(int num_threads) {
    std::lock_guard lock(mutex_);
    if (num_threads == int(threads_.size()) + 1) return;
    is_stopping_ = true;
    size_ = int(threads_.size()) + 1;
    wake_workers();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    is_stopping_ = false;
    size_ = 1;
    states_ = std::make_unique<WorkerState[]>(size_t(num_threads));
    control_ = AdaptiveThreads(1);
    for (int i = 1; i < num_threads; ++i) {
        threads_.emplace_back([this, i] { worker_loop(i); });
        control_ = AdaptiveThreads(i + 1);
    }
}

void ThreadPool::dispatch(Body body, const void* it) {
    body_ = body;
    work_ = it;
    began_ = Clock::now();
    size_ = control_.size(began_);
    wake_workers();
    run_part();
    const auto ended = Clock::now();
    LostTime lost_time;
    for (int i = 0; i < size_; ++i) lost_time.add(states_[i].late, states_[i].lost);
    if (size_ > 1) lost_time.add(Time{}, ended.time_since_epoch() - barrier_passed_at_.load(std::memory_order_relaxed));
    control_.report(ended, ended - began_, lost_time.all());
}

void ThreadPool::wake_workers() {
    for (int i = 1; i < size_; ++i) {
        states_[i].calls.fetch_add(1, std::memory_order_release);
        states_[i].calls.notify_one();
    }
}

// Runs this worker's part of a call.
void ThreadPool::run_part() {
    WorkerState& state = states_[worker_];
    state.late = Clock::now() - began_;
    state.idle = Time{};
    const OffCore off;
    body_(work_, *this);
    state.lost = std::max(Time{}, off.so_far() - state.idle);
    if (size_ > 1) wait_at_barrier();
}

void ThreadPool::wait_at_barrier() {
    const uint32_t barrier = barriers_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size_ - 1) return spin_at_barrier(barrier);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) states_[i].next.store(0, std::memory_order_relaxed);
    barrier_passed_at_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed);
    barriers_.fetch_add(1, std::memory_order_release);
}

// Returns when the barrier is complete.
void ThreadPool::spin_at_barrier(uint32_t barrier) {
    for (int i = 0; i < kBarrierSpins; ++i) {
        if (barriers_.load(std::memory_order_acquire) != barrier) return;
        relax();
    }
    yield_at_barrier(barrier);
}

// The same, but yields the core. Time off the core is no loss until the barrier is complete.
void ThreadPool::yield_at_barrier(uint32_t barrier) {
    const OffCore off;
    while (barriers_.load(std::memory_order_acquire) == barrier) sched_yield();
    const Time late = Clock::now().time_since_epoch() - barrier_passed_at_.load(std::memory_order_relaxed);
    states_[worker_].idle += std::max(Time{}, off.so_far() - late);
}

void ThreadPool::worker_loop(int worker) {
    worker_ = worker;
    for (uint32_t seen = 0;; ++seen) {
        wait_for_call(states_[worker].calls, seen);
        if (is_stopping_) return;
        run_part();
    }
}

}  // namespace plait
