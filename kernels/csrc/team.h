// The threads of this process's kernels: one team, woken for a call, its members meeting at barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "crowd.h"

namespace plait {

class Team {
public:
    static Team& get();

    // Ends the threads that are there and starts num_threads - 1 others; the caller is the first member. Throws
    // std::system_error where the system starts no more: those that it has started are the team then.
    void resize(int num_threads);
    // Members of this call: fewer than there are threads while others want their cores.
    int size() const { return size_; }

    // Runs work(team) on every member at once; returns when all have ended. Callers take turns. Throws std::bad_alloc
    // when all have ended, where a member lacked memory inside each or shares; it must not throw elsewhere.
    template <class Work>
    void run(const Work& work) {
        std::lock_guard lock(alone_);
        start([](const void* it, Team& team) { (*static_cast<const Work*>(it))(team); }, &work);
        if (lacks_memory_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // Inside run: calls work(i) for each i below count, each on one member, and meets. Members take the next i as they
    // become free, so that one that lost its core holds up one piece of work and not its share.
    template <class Work>
    void each(int64_t count, const Work& work) {
        if (size_ == 1)
            return attempt([&] {
                for (int64_t i = 0; i < count; ++i) work(i);
            });
        attempt([&] {
            for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        });
        meet();
    }

    // As each, but every member begins with its own share of neighbouring numbers, the same whenever count is, so that
    // what it wrote under a number is still in its core's caches; one that is done goes on with the others' shares.
    template <class Work>
    void shares(int64_t count, const Work& work) {
        if (size_ == 1) return each(count, work);
        attempt([&] {
            for (int i = 0; i < size_; ++i) {
                const int whose = (member_ + i) % size_;
                const int64_t begin = count * whose / size_, length = count * (whose + 1) / size_ - begin;
                auto& next = seats_[whose].next;
                for (int64_t j; (j = next.fetch_add(1, std::memory_order_relaxed)) < length;) work(begin + j);
            }
        });
        meet();
    }

    ~Team() { resize(1); }

private:
    using Body = void (*)(const void*, Team&);

    // What a member is told and tells, on a cache line of its own.
    struct alignas(64) Seat {
        std::atomic<uint32_t> calls{0};  // that it took part in; the number wraps around
        std::atomic<int64_t> next{0};    // how far its share is taken
        // Of the last call: from its beginning to this member's, and without the core where others waited for it.
        Time late{}, lost{};
        Time idle{};  // without the core at meetings that were not over, in this part so far; the member's own
    };

    // A member that lacks memory takes no more pieces and comes to the meeting all the same: the others wait for it.
    template <class Work>
    void attempt(const Work& work) {
        try {
            work();
        } catch (const std::exception&) {  // bad_alloc, or length_error
            lacks_memory_.store(true, std::memory_order_relaxed);
        }
    }

    void start(Body body, const void* it);
    void call();
    void take_part();
    void meet();
    void await_others(uint32_t meeting);
    void offer_core(uint32_t meeting);
    void serve(int member);

    // Which member a thread is: every caller is the first.
    static thread_local int member_;

    std::mutex alone_;
    int size_ = 1;
    Crowd crowd_;
    std::unique_ptr<Seat[]> seats_ = std::make_unique<Seat[]>(1);
    std::vector<std::thread> threads_;
    Body body_ = nullptr;
    const void* it_ = nullptr;
    Crowd::Clock::time_point began_{};
    bool is_over_ = false;
    std::atomic<bool> lacks_memory_{false};  // a member, in this call
    // On cache lines of their own; the first's number wraps around.
    alignas(64) std::atomic<uint32_t> meetings_{0};
    std::atomic<Time> met_at_{};  // when the last meeting was over, on the clock of calls
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace plait
