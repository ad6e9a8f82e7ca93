// Runs a kernel's blocks on the played GPU, a cluster after the other.
#pragma once
#include <functional>
#include <memory>

#include "gemm_ptx.cuh"

inline std::function<void()> kernel;

inline void live() {
    kernel();
    fiber->has_ended = true;
    swapcontext(&fiber->context, &scheduler);
}

inline std::unique_ptr<Fiber> fiber_of(Block& block, int thread) {
    auto born = std::make_unique<Fiber>();
    born->block = &block, born->thread = thread;
    born->stack.resize(64 << 10);
    getcontext(&born->context);
    born->context.uc_stack.ss_sp = born->stack.data();
    born->context.uc_stack.ss_size = born->stack.size();
    makecontext(&born->context, live, 0);
    return born;
}

inline void run_cluster(int first, int size, int num_threads, int shared_bytes) {
    Cluster cluster;
    cluster.num_threads = size * num_threads;
    cluster.blocks.resize(size);
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (Block& block : cluster.blocks) {
        block.cluster = &cluster, block.index = first++, block.num_threads = num_threads;
        block.memory.assign(shared_bytes, 0xFF);  // NaN
        block.warps.resize(num_threads / 32);
        for (int thread = 0; thread < num_threads; ++thread) fibers.push_back(fiber_of(block, thread));
    }
    for (size_t ended = 0; ended < fibers.size();) {
        ended = 0;
        for (auto& next : fibers) {
            fiber = next.get();
            if (!fiber->has_ended) swapcontext(&scheduler, &fiber->context);
            ended += fiber->has_ended;
        }
    }
}

// `launch` is of blocks, threads, bytes of shared memory, and blocks of a cluster.
inline void run_grid(const int* launch, std::function<void()> given) {
    const auto [blocks, num_threads, shared_bytes, cluster] = *(const int(*)[4])launch;
    kernel = std::move(given), grid_size = blocks;
    for (int first = 0; first < blocks; first += cluster) run_cluster(first, cluster, num_threads, shared_bytes);
}
