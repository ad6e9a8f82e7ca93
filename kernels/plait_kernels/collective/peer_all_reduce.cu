// The sum over ranks, the residual and the RMS norm in one launch, over memory that peers write into. One block at a
// time has a row; a thread has VECTORS vectors of 8 elements of it. The specification is
// plait_kernels.collective.reference.
//
// A rank pushes its summand into each peer's memory and finds theirs in its own. The data are their own flags: memory
// that nobody has written holds EMPTY, so a reader waits until a word differs. Three slots alternate, by an epoch that
// the kernel itself counts, so that a captured launch needs nothing of the host: while a launch fills slot e, it empties
// the slot of launch e - 1. A peer writes there in launch e + 2, after it has read what this rank pushes in e + 1.
//
// Every launch has the same shape on all ranks, and its blocks are resident all at once, since they wait for the peers'.

#ifndef VECTORS
#define VECTORS 1
#endif

constexpr int SLOTS = 3;
constexpr int MAX_RANKS = 8;
// Rows that a block pushes before it needs the first of them from its peers.
#ifndef AHEAD
#define AHEAD 2
#endif
// Two elements of minus zero; a rank pushes plus zeros instead.
constexpr unsigned EMPTY = 0x80008000u;
constexpr unsigned SPINS_BETWEEN_LOOKS = 1024;

// In device memory, one for each rank; the host writes it once.
struct State {
    unsigned epoch;
    unsigned num_begun;        // blocks of this launch that have read the epoch
    unsigned used[SLOTS];      // vectors that each peer wrote to a slot, still to be emptied
    unsigned rank, world;
    unsigned padding;
    unsigned long long capacity;        // vectors of one rank in a slot
    unsigned long long spin_nanoseconds;
    unsigned* report;                   // on the host: is lost, rank, epoch, place
    uint4* memory[MAX_RANKS];           // of each rank: [SLOTS][world - 1][capacity]
};

__device__ float low(unsigned word) {
#ifdef IS_HALF
    float number;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(number) : "r"(word));
    return number;
#else
    return __uint_as_float(word << 16);
#endif
}

__device__ float high(unsigned word) {
#ifdef IS_HALF
    float number;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(number) : "r"(word));
    return number;
#else
    return __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ unsigned pack(float low, float high) {
    unsigned word;
#ifdef IS_HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ void add(float (&sum)[8], uint4 vector) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[2 * i] += low(words[i]), sum[2 * i + 1] += high(words[i]);
}

__device__ uint4 rounded(const float (&sum)[8]) {
    return {pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7])};
}

__device__ unsigned filled(unsigned word) { return word == EMPTY ? 0u : word; }

__device__ uint4 filled(uint4 vector) {
    return {filled(vector.x), filled(vector.y), filled(vector.z), filled(vector.w)};
}

__device__ bool is_there(uint4 vector) {
    return vector.x != EMPTY && vector.y != EMPTY && vector.z != EMPTY && vector.w != EMPTY;
}

__device__ uint4 peek(const uint4* address) {
    uint4 vector;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(address)
                 : "memory");
    return vector;
}

__device__ void push(uint4* address, uint4 vector) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(vector.x), "r"(vector.y),
                 "r"(vector.z), "r"(vector.w)
                 : "memory");
}

__device__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Waits until a peer has written a vector. One that does not within the limit is reported, and nothing is waited for
// from then on: the host ends the process.
__device__ uint4 await(const uint4* address, const State& state, unsigned epoch, unsigned place) {
    uint4 vector = peek(address);
    if (is_there(vector)) return vector;
    volatile unsigned* report = state.report;
    const unsigned long long limit = now() + state.spin_nanoseconds;
    for (unsigned spins = 1; !is_there(vector = peek(address)); ++spins) {
        if (spins % SPINS_BETWEEN_LOOKS) continue;
        if (report[0]) break;
        if (now() < limit) continue;
        report[1] = state.rank, report[2] = epoch, report[3] = place;
        __threadfence_system();
        report[0] = 1;
        break;
    }
    return vector;
}

__device__ float block_sum(float value) {
    __shared__ float of_warp[32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();  // the row before has been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    const int warps = (blockDim.x + 31) / 32;
    value = threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f;
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

struct Arguments {
    const uint4 *x, *residual, *weight;
    uint4 *normed, *sum;
    long long num_rows, row_vectors;
    float eps;
    unsigned place;
};

class Launch {
   public:
    // Before the wait for the kernel before this one: only what no kernel writes is read, or brought near.
    __device__ Launch(const Arguments& given, State* state)
        : given_(given), state_(state), rank_(state->rank), world_(state->world), capacity_(state->capacity) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (column(i) < given_.row_vectors) weight_[i] = given_.weight[column(i)];
        for (unsigned peer = 0; peer < MAX_RANKS; peer += 4)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(&state->memory[peer]));
    }

    __device__ void run() {
        epoch_ = *static_cast<volatile unsigned*>(&state_->epoch);
        const unsigned slot_before = (epoch_ + 2) % SLOTS;
        const unsigned used = *static_cast<volatile unsigned*>(&state_->used[slot_before]);
        long long next = blockIdx.x;
        for (int i = 0; i < AHEAD && next < given_.num_rows; ++i, next += gridDim.x) push_row(next);
        count();
        empty_slot(slot_before, used);
        for (long long row = blockIdx.x; row < given_.num_rows; row += gridDim.x) {
            if (next < given_.num_rows) push_row(next), next += gridDim.x;
            take_row(row);
        }
    }

   private:
    __device__ long long column(int i) const { return threadIdx.x + static_cast<long long>(i) * blockDim.x; }

    // Where `source`'s vectors lie in the memory of `owner`.
    __device__ uint4* place_of(unsigned owner, unsigned source, unsigned slot) const {
        const unsigned region = source < owner ? source : source - 1;
        return state_->memory[owner] + (slot * (world_ - 1ull) + region) * capacity_;
    }

    __device__ void push_row(long long row) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (column(i) >= given_.row_vectors) continue;
            const long long at = row * given_.row_vectors + column(i);
            const uint4 own = filled(given_.x[at]);
            for (unsigned peer = 0; peer < world_; ++peer)
                if (peer != rank_) push(place_of(peer, rank_, epoch_ % SLOTS) + at, own);
        }
    }

    __device__ void take_row(long long row) {
        float squares = 0;
        uint4 total[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (column(i) >= given_.row_vectors) continue;
            const long long at = row * given_.row_vectors + column(i);
            const uint4 residual = given_.residual[at];  // comes while the peers' summands do
            float sum[8] = {};
            for (unsigned source = 0; source < world_; ++source)  // in rank order: equal bits on every rank
                add(sum, source == rank_
                             ? filled(given_.x[at])
                             : await(place_of(rank_, source, epoch_ % SLOTS) + at, *state_, epoch_, given_.place));
            add(sum, residual);
            total[i] = rounded(sum);
            given_.sum[at] = total[i];
            squares += squares_of(total[i]);
        }
        const float scale = rsqrtf(block_sum(squares) / (8 * given_.row_vectors) + given_.eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (column(i) < given_.row_vectors)
                given_.normed[row * given_.row_vectors + column(i)] = scaled(total[i], scale, weight_[i]);
    }

    __device__ static float squares_of(uint4 vector) {
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) squares += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
        return squares;
    }

    __device__ static uint4 scaled(uint4 total, float scale, uint4 weight) {
        const unsigned words[4] = {total.x, total.y, total.z, total.w};
        const unsigned by[4] = {weight.x, weight.y, weight.z, weight.w};
        unsigned made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            made[i] = pack(low(words[i]) * scale * low(by[i]), high(words[i]) * scale * high(by[i]));
        return {made[0], made[1], made[2], made[3]};
    }

    __device__ void empty_slot(unsigned slot, unsigned used) {
        const uint4 empty = {EMPTY, EMPTY, EMPTY, EMPTY};
        for (unsigned source = 0; source < world_; ++source) {
            if (source == rank_) continue;
            uint4* region = place_of(rank_, source, slot);
            for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < used; i += gridDim.x * blockDim.x)
                region[i] = empty;
        }
    }

    // The last block that has read the launch's number makes it the next one's; that has not begun to read.
    __device__ void count() {
        __syncthreads();
        if (threadIdx.x || (gridDim.x > 1 && atomicAdd(&state_->num_begun, 1u) != gridDim.x - 1)) return;
        state_->num_begun = 0;
        state_->used[(epoch_ + 2) % SLOTS] = 0;
        state_->used[epoch_ % SLOTS] = static_cast<unsigned>(given_.num_rows * given_.row_vectors);
        state_->epoch = epoch_ + 1;
    }

    const Arguments given_;
    State* const state_;
    const unsigned rank_, world_;
    const unsigned long long capacity_;
    unsigned epoch_;
    uint4 weight_[VECTORS];
};

extern "C" __global__ void __launch_bounds__(1024, 1)
    all_reduce_add_rms_norm(const uint4* x, const uint4* residual, const uint4* weight, uint4* normed, uint4* sum,
                            long long num_rows, long long row_vectors, double eps, long long place, State* state) {
#ifdef PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    Launch launch({x, residual, weight, normed, sum, num_rows, row_vectors, static_cast<float>(eps),
                   static_cast<unsigned>(place)},
                  state);
#ifdef PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    launch.run();
}
