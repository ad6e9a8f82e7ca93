// The threads of this process's kernels: one team, woken for a call, its members meeting at barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace plait {

class Team {
public:
    static Team& get();

    // Ends the threads that are there and starts num_threads - 1 others; the caller is the last member.
    void resize(int num_threads);
    int size() const { return size_; }

    // Runs work(team) on every member at once; returns when all have ended. Callers take turns.
    template <class Work>
    void run(const Work& work) {
        std::lock_guard lock(alone_);
        start([](const void* it, Team& team) { (*static_cast<const Work*>(it))(team); }, &work);
    }

    // Inside run: calls work(i) for each i below count, each on one member, and meets. Members take the next i as they
    // become free, so that one that lost its core holds up one piece of work and not its share.
    template <class Work>
    void each(int64_t count, const Work& work) {
        if (size_ == 1) {
            for (int64_t i = 0; i < count; ++i) work(i);
            return;
        }
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        meet();
    }

    // As each, but every member begins with its own share of neighbouring numbers, the same whenever count is, so that
    // what it wrote under a number is still in its core's caches; one that is done goes on with the others' shares.
    template <class Work>
    void shares(int64_t count, const Work& work) {
        if (size_ == 1) return each(count, work);
        for (int i = 0; i < size_; ++i) {
            const int whose = (member_ + i) % size_;
            const int64_t begin = count * whose / size_, length = count * (whose + 1) / size_ - begin;
            auto& next = shares_[whose].next;
            for (int64_t j; (j = next.fetch_add(1, std::memory_order_relaxed)) < length;) work(begin + j);
        }
        meet();
    }

    ~Team() { resize(1); }

private:
    using Body = void (*)(const void*, Team&);

    // How far a member's share is taken.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
    };

    void start(Body body, const void* it);
    void call();
    void meet();
    void serve(int member, int seen);

    // Which member a thread is: every caller is the first.
    static thread_local int member_;

    std::mutex alone_;
    int size_ = 1;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> threads_;
    Body body_ = nullptr;
    const void* it_ = nullptr;
    bool is_over_ = false;
    // On cache lines of their own; their numbers wrap around.
    alignas(64) std::atomic<int> calls_{0};
    alignas(64) std::atomic<int> meetings_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace plait
