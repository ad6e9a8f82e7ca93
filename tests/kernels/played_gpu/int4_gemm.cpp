// Runs a 4-bit GEMM (SOURCE, KERNEL) on the played GPU, for test_int4_cuda.py.
#include SOURCE

#include <memory>

namespace {

struct Arguments {
    const unsigned short* x;
    const uint4* codes;
    const Scale* scale;
    const unsigned char* zero;
    unsigned short* out;
    long long rows, outputs, inputs, chunks, out_stride;
};

Arguments given;
std::vector<float> left;
std::vector<int> flags;

void live() {
#ifdef ROWS
    const RowMap x = {given.x, given.rows, given.inputs, ROWS};
    KERNEL(x, given.codes, given.scale, given.zero, given.out, given.rows, given.outputs, given.inputs, given.chunks,
           given.out_stride, left.data(), flags.data());
#else
    KERNEL(given.x, given.codes, given.scale, given.zero, given.out, given.rows, given.outputs, given.inputs,
           given.chunks, given.out_stride);
#endif
    fiber->has_ended = true;
    swapcontext(&fiber->context, &scheduler);
}

std::unique_ptr<Fiber> fiber_of(Block& block, int thread) {
    auto born = std::make_unique<Fiber>();
    born->block = &block, born->thread = thread;
    born->stack.resize(64 << 10);
    getcontext(&born->context);
    born->context.uc_stack.ss_sp = born->stack.data();
    born->context.uc_stack.ss_size = born->stack.size();
    makecontext(&born->context, live, 0);
    return born;
}

void run_cluster(int first, int size, int num_threads, int shared_bytes) {
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

}  // namespace

extern "C" void run(const int* launch, const void* const* tensors, const long long* numbers) {
    const auto [blocks, num_threads, shared_bytes, cluster] = *(const int(*)[4])launch;
    given = {(const unsigned short*)tensors[0], (const uint4*)tensors[1], (const Scale*)tensors[2],
             (const unsigned char*)tensors[3], (unsigned short*)tensors[4], numbers[0], numbers[1], numbers[2],
             numbers[3], numbers[4]};
    grid_size = blocks;
#ifdef ROWS
    left.assign((size_t)blocks * ROWS * WARPGROUPS * 64, NAN), flags.assign(blocks, 0);
#endif
    for (int first = 0; first < blocks; first += cluster) run_cluster(first, cluster, num_threads, shared_bytes);
}
