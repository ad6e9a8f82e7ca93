// The thread pool of this process's kernels: workers wake for a call and meet at barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "adaptive_threads.h"

namespace plait {

class ThreadPool {
public:
    static ThreadPool& get();

    // Replaces the threads by num_threads - 1 new ones; the caller is the first worker. Throws std::system_error if the
    // system starts no more; the pool then has those that were started.
    void resize(int num_threads);
    // Workers of this call; fewer than the threads while other processes want their cores.
    int size() const { return size_; }

    // Runs work(pool) on every worker at once and returns when all have ended. Concurrent callers are serialised.
    // Throws std::bad_alloc at the end if a worker lacked memory inside a parallel_for; `work` must throw nowhere else.
    template <class Work>
    void run(const Work& work) {
        std::lock_guard lock(mutex_);
        dispatch([](const void* it, ThreadPool& pool) { (*static_cast<const Work*>(it))(pool); }, &work);
        if (is_out_of_memory_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // Inside run: calls work(i) once for each i below count, then waits at a barrier. Workers take the next i as they
    // become free, so that one that loses its core delays one item only.
    template <class Work>
    void parallel_for(int64_t count, const Work& work) {
        if (size_ == 1)
            return attempt([&] {
                for (int64_t i = 0; i < count; ++i) work(i);
            });
        attempt([&] {
            for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        });
        wait_at_barrier();
    }

    // As parallel_for, but each worker begins with its own range of i, the same for the same count: what it wrote for
    // an i is still in its core's caches. A worker that is done goes on with the others' ranges.
    template <class Work>
    void parallel_for_affine(int64_t count, const Work& work) {
        if (size_ == 1) return parallel_for(count, work);
        attempt([&] {
            for (int i = 0; i < size_; ++i) {
                const int owner = (worker_ + i) % size_;
                const int64_t begin = count * owner / size_, length = count * (owner + 1) / size_ - begin;
                auto& next = states_[owner].next;
                for (int64_t j; (j = next.fetch_add(1, std::memory_order_relaxed)) < length;) work(begin + j);
            }
        });
        wait_at_barrier();
    }

    ~ThreadPool() { resize(1); }

private:
    using Body = void (*)(const void*, ThreadPool&);

    // A worker's state, on a cache line of its own.
    struct alignas(64) WorkerState {
        std::atomic<uint32_t> calls{0};  // calls that it took part in; wraps around
        std::atomic<int64_t> next{0};    // how far its range is taken
        // In the last call: delay of its start, and time off its core while others waited for it.
        Time late{}, lost{};
        Time idle{};  // time off its core at barriers that were not complete; used by the worker alone
    };

    // A worker that lacks memory takes no more items but still goes to the barrier, where the others wait.
    template <class Work>
    void attempt(const Work& work) {
        try {
            work();
        } catch (const std::exception&) {  // bad_alloc, or length_error
            is_out_of_memory_.store(true, std::memory_order_relaxed);
        }
    }

    void dispatch(Body body, const void* it);
    void wake_workers();
    void run_part();
    void wait_at_barrier();
    void spin_at_barrier(uint32_t barrier);
    void yield_at_barrier(uint32_t barrier);
    void worker_loop(int worker);

    // This thread's number; every caller is worker 0.
    static thread_local int worker_;

    std::mutex mutex_;
    int size_ = 1;
    AdaptiveThreads control_;
    std::unique_ptr<WorkerState[]> states_ = std::make_unique<WorkerState[]>(1);
    std::vector<std::thread> threads_;
    Body body_ = nullptr;
    const void* work_ = nullptr;
    AdaptiveThreads::Clock::time_point began_{};
    bool is_stopping_ = false;
    std::atomic<bool> is_out_of_memory_{false};  // some worker, in this call
    // On cache lines of their own; the number of barriers wraps around.
    alignas(64) std::atomic<uint32_t> barriers_{0};
    std::atomic<Time> barrier_passed_at_{};  // when the last barrier was complete
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace plait
